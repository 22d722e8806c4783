"""Documents as token arrays, split into train and test, tokenised once and mapped from disk."""

from __future__ import annotations

import difflib
import errno
import hashlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from milepost.data import cache as disk
from milepost.data.embedded import CodeSource, ProseSource
from milepost.data.errors import DataError
from milepost.data.sources import HuggingFaceSource, MappingSource, RawDocument, Source, open_path
from milepost.data.tokens import (
    byte_tokenizer,
    encode_bytes,
    encode_plain,
    resolve_tokenizer,
    separator_of,
    tokenizer_fingerprint,
    vocab_size_of,
)
from milepost.data.windows import Regions, select_regions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CORPORA = ("prose", "code")
SPLIT_SALT = "milepost split"
_BATCH_DOCUMENTS = 256
_BATCH_CHARACTERS = 1 << 22

Ints = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, eq=False)
class Document:
    """A named view of one document's tokens, without the separator; num_bytes is the UTF-8 length of its text."""

    name: str
    tokens: Tokens
    num_bytes: int

    def __len__(self) -> int:
        return len(self.tokens)


class Split(Sequence[Document]):
    """The documents of one side of the split, as views of one token stream.

    stream: (N,) unsigned, each document followed by `separator_id`; memory-mapped where the corpus is cached.
    starts, lengths, num_bytes: (documents,) int64, offset in the stream, tokens without separator, bytes of text.
    Pickling a mapped split (a worker started by spawn) passes its path, not its tokens.
    """

    def __init__(self, name: str, arrays: disk.SplitArrays, separator_id: int) -> None:
        self.name = name
        self.separator_id = separator_id
        self._arrays = arrays

    @property
    def stream(self) -> Tokens:
        return self._arrays.stream

    @property
    def starts(self) -> Ints:
        return self._arrays.index[:, 0]

    @property
    def lengths(self) -> Ints:
        return self._arrays.index[:, 1]

    @property
    def num_bytes(self) -> Ints:
        return self._arrays.index[:, 2]

    @property
    def names(self) -> Sequence[str]:
        return self._arrays.names

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents, separators not counted."""
        return int(self.lengths.sum())

    def __len__(self) -> int:
        return len(self._arrays.names)

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> list[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | list[Document]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of the {self.name} split, which has {len(self)}")
        start, length, num_bytes = (int(value) for value in self._arrays.index[index])
        return Document(self.names[index], self.stream[start : start + length], num_bytes)

    def regions(self, *, size: int, count: int = 24, allow_fewer: bool = False) -> Regions:
        """`select_regions` over this split's documents: `count` disjoint stretches of `size` targets each."""
        return select_regions(self.lengths, size=size, count=count, allow_fewer=allow_fewer)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        if self._arrays.path is not None:
            path, index, names = self._arrays.path, self._arrays.index, self._arrays.names
            state["_arrays"] = disk.SplitArrays(np.empty(0, self._arrays.stream.dtype), index, names, path)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        arrays = self._arrays
        if arrays.path is not None:
            stream = disk.open_stream(arrays.path, arrays.stream.dtype)
            self._arrays = disk.SplitArrays(stream, arrays.index, arrays.names, arrays.path)


@dataclass(frozen=True, eq=False)
class Corpus:
    """A tokenised corpus: `train` and `test` documents, and what a report must say of it.

    fingerprint: hash of the source's content, the tokenizer and the split; equal fingerprints mean equal tokens.
    source_fingerprint: hash of the documents alone.
    removed_duplicates: train documents left out because a test document has the same text.
    about: origin, licence and version of the source.
    """

    name: str
    train: Split
    test: Split
    vocab_size: int
    separator_id: int
    fingerprint: str
    source_fingerprint: str
    removed_duplicates: int
    about: Mapping[str, Any]
    _tokenizer: PreTrainedTokenizerBase | None = field(default=None, repr=False)

    @property
    def byte_level(self) -> bool:
        """True where tokens are bytes: ids are then byte values, pad 256, eos 257."""
        return self._tokenizer is None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer; the byte tokenizer is built on use."""
        return byte_tokenizer() if self._tokenizer is None else self._tokenizer

    def describe(self) -> dict[str, Any]:
        """Plain values for results.json."""
        return {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "source_fingerprint": self.source_fingerprint,
            "vocab_size": self.vocab_size,
            "train_documents": len(self.train),
            "train_tokens": self.train.num_tokens,
            "test_documents": len(self.test),
            "test_tokens": self.test.num_tokens,
            "removed_duplicates": self.removed_duplicates,
            "about": dict(self.about),
        }

    def __str__(self) -> str:
        unit = "bytes" if self.byte_level else "tokens"
        removed = f", {self.removed_duplicates} train documents removed as copies of test documents"
        return (
            f"{self.name}: train {len(self.train)} documents, {self.train.num_tokens:,} {unit}; "
            f"test {len(self.test)} documents, {self.test.num_tokens:,} {unit}"
            f"{removed if self.removed_duplicates else ''}; fingerprint {self.source_fingerprint[:12]}"
        )


@dataclass(frozen=True)
class _Plan:
    """Which side each document of a source goes to; None: left out."""

    sides: list[str | None]
    cut: int | None
    removed_duplicates: int


def load_corpus(
    spec: str | Path | Mapping[str, str],
    *,
    tokenizer: str | PreTrainedTokenizerBase | None = None,
    cache_dir: str | Path | None = None,
    cache: bool = True,
    text_field: str = "text",
    name_field: str | None = None,
    test_fraction: float = 0.1,
    max_documents: int | None = None,
    separator_id: int | None = None,
) -> Corpus:
    """Tokens of a corpus, split into train and test by document.

    spec: "prose" (State of the Union addresses, shipped), "code" (the interpreter's standard library), a text file, a
        folder of text files, a JSONL or parquet file or folder, a folder written by `datasets.save_to_disk`, a Hugging
        Face name ("owner/name", or "hf:name[:subset]" for any), or a mapping of document names to texts.
    tokenizer: a Hugging Face tokenizer, its name or path; None for bytes.
    cache_dir: where the tokenised copy lives (default: the user's cache folder); `cache=False` keeps it in memory only.
    text_field, name_field: columns of JSONL, parquet and Hugging Face rows; without name_field rows are numbered.
    max_documents: read no more than the first so many documents.
    separator_id: the id after each document; default the tokenizer's eos, else sep, else bos.

    Where a source has train and test (or validation) splits of its own, they are kept. Otherwise a document is a test
    document when the first 8 bytes of sha256("milepost split:" + name), read as a fraction of 2**64, are below
    `test_fraction`, whole, whatever its length and whatever other documents there are. Should one side stay empty, the
    document nearest to the boundary moves over; a single document is cut at the line end (or space, or character)
    nearest to its last `test_fraction`. Train documents whose text (by sha256) is also a test document are removed and
    counted.

    Raises `DataError` for an unknown name, empty data, text that is not UTF-8, a missing field, a missing package;
    `OSError` when the copy cannot be written (nothing half-written stays behind).
    """
    if not 0.0 < test_fraction < 1.0:
        raise DataError(f"test_fraction={test_fraction} must lie strictly between 0 and 1")
    if max_documents is not None and max_documents < 1:
        raise DataError(f"max_documents={max_documents} must be at least 1")
    source = open_source(spec, text_field=text_field, name_field=name_field)
    loaded_tokenizer = None if tokenizer is None else resolve_tokenizer(tokenizer)
    separator = separator_of(loaded_tokenizer) if separator_id is None else separator_id
    vocab_size = max(vocab_size_of(loaded_tokenizer), separator + 1)
    source_fingerprint = source.fingerprint()
    key = disk.cache_key(
        {
            "source": source_fingerprint,
            "tokenizer": tokenizer_fingerprint(loaded_tokenizer),
            "separator": separator,
            "test_fraction": test_fraction,
            "max_documents": max_documents,
            "salt": SPLIT_SALT,
        }
    )
    arrays, meta = _tokenised(
        source, loaded_tokenizer, separator, vocab_size, test_fraction, max_documents, key, cache, cache_dir
    )
    return Corpus(
        name=source.name,
        train=Split("train", arrays["train"], separator),
        test=Split("test", arrays["test"], separator),
        vocab_size=vocab_size,
        separator_id=separator,
        fingerprint=key,
        source_fingerprint=source_fingerprint,
        removed_duplicates=int(meta["removed_duplicates"]),
        about=source.about,
        _tokenizer=loaded_tokenizer,
    )


def open_source(
    spec: str | Path | Mapping[str, str], *, text_field: str = "text", name_field: str | None = None
) -> Source:
    """The documents behind a name, path or mapping, not yet tokenised.

    Raises `DataError` for a name that is neither a corpus, a path nor the form of a Hugging Face name.
    """
    if isinstance(spec, Mapping):
        return MappingSource(spec)
    if spec == "prose":
        return ProseSource()
    if spec == "code":
        return CodeSource()
    text = str(spec)
    if text.startswith("hf:"):
        name, _, subset = text.removeprefix("hf:").partition(":")
        return HuggingFaceSource(
            name, subset=subset or None, text_field=text_field, name_field=name_field, from_disk=False
        )
    path = Path(spec).expanduser()
    if path.exists():
        return open_path(path, text_field=text_field, name_field=name_field)
    if isinstance(spec, str) and re.fullmatch(r"[\w-]+/[\w.-]+", spec) and not path.parent.is_dir():
        return HuggingFaceSource(spec, subset=None, text_field=text_field, name_field=name_field, from_disk=False)
    near = difflib.get_close_matches(text, CORPORA, n=2, cutoff=0.4)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"the corpora are {' and '.join(CORPORA)}"
    raise DataError(
        f"unknown corpus {text!r}, and there is no such file or folder: {hint} "
        f"A Hugging Face data set is written owner/name or hf:name"
    )


def is_test_document(name: str, test_fraction: float) -> bool:
    """Whether a document of this name is held out, by the hash of its name alone."""
    return _split_hash(name) < test_fraction


def _split_hash(name: str) -> float:
    """The name's place in [0, 1)."""
    digest = hashlib.sha256(f"{SPLIT_SALT}:{name}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2.0**64


def _tokenised(
    source: Source,
    tokenizer: PreTrainedTokenizerBase | None,
    separator: int,
    vocab_size: int,
    test_fraction: float,
    max_documents: int | None,
    key: str,
    cache: bool,
    cache_dir: str | Path | None,
) -> tuple[dict[str, disk.SplitArrays], Mapping[str, Any]]:
    dtype = disk.token_dtype(vocab_size)
    folder = (disk.default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()) / "tokens" / key
    if cache:
        found = disk.load(folder)
        if found is not None:
            return found
    plan = _plan(source, test_fraction, max_documents)
    meta = {"source": source.name, "removed_duplicates": plan.removed_duplicates}
    if cache:
        try:
            disk.write(folder, _tokenise(source, plan, tokenizer), separator, dtype, meta)
        except OSError as error:
            if cache_dir is not None or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise OSError(
                    error.errno,
                    f"the tokenised copy cannot be written to {folder.parent} ({error.strerror or error}): "
                    f"free some space, choose another cache_dir, or keep it in memory with cache=False",
                ) from error
            warnings.warn(f"{folder.parent} cannot be written; the tokens are kept in memory", stacklevel=3)
        else:
            found = disk.load(folder)
            if found is None:
                raise OSError(errno.EIO, f"the tokenised copy in {folder} reads back damaged: choose another cache_dir")
            return found
    return disk.collect(_tokenise(source, plan, tokenizer), separator, dtype), meta


def _plan(source: Source, test_fraction: float, max_documents: int | None) -> _Plan:
    """Read the documents once and decide each one's side: by the source's own split or by name, without leaks."""
    names: list[str] = []
    sides: list[str | None] = []
    contents: list[bytes] = []
    by_name = False
    only_text = ""
    for document in _read(source, max_documents):
        names.append(document.name)
        contents.append(_content_hash(document, source.name))
        by_name = by_name or document.split is None
        side = document.split or ("test" if is_test_document(document.name, test_fraction) else "train")
        sides.append(side if document.text else None)
        only_text = document.text if document.text else only_text
    full = [index for index, side in enumerate(sides) if side is not None]
    if not full:
        raise DataError(f"{source.name} holds no text ({len(names)} documents, all empty): give it text")
    if len(full) == 1:
        return _Plan(sides, _cut_point(only_text, test_fraction, source.name), 0)
    if by_name:
        _fill_empty_side(sides, names, full)
    held_out = {content for content, side in zip(contents, sides, strict=True) if side == "test"}
    removed = 0
    for index in full:
        if sides[index] == "train" and contents[index] in held_out:
            sides[index] = None
            removed += 1
    for side in disk.SPLITS:
        if side not in sides:
            raise DataError(
                f"{source.name} leaves no {side} documents ({len(full)} documents, {removed} removed from train as "
                f"copies of test documents): give it more documents of different text"
            )
    return _Plan(sides, None, removed)


def _content_hash(document: RawDocument, source: str) -> bytes:
    try:
        return hashlib.sha256(document.text.encode("utf-8")).digest()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{source}, document {document.name!r}: character {error.start} is a lone surrogate "
            f"({document.text[error.start]!r}) and has no UTF-8 form: remove it"
        ) from error


def _fill_empty_side(sides: list[str | None], names: list[str], full: list[int]) -> None:
    present = {sides[index] for index in full}
    if "test" not in present:
        sides[min(full, key=lambda index: _split_hash(names[index]))] = "test"
    elif "train" not in present:
        sides[max(full, key=lambda index: _split_hash(names[index]))] = "train"


def _cut_point(text: str, test_fraction: float, name: str) -> int:
    """Where to cut a single document: after the line end, else the space, nearest to its last `test_fraction`."""
    if len(text) < 2:
        raise DataError(f"{name} holds a single document of one character, which cannot be split: give it more text")
    wanted = min(max(round(len(text) * (1.0 - test_fraction)), 1), len(text) - 1)
    reach = max(len(text) // 50, 1)
    for separator in ("\n", " "):
        before = text.rfind(separator, max(wanted - reach, 0), wanted) + 1
        after = text.find(separator, wanted - 1, wanted + reach) + 1
        found = [cut for cut in (before, after) if 0 < cut < len(text)]
        if found:
            return min(found, key=lambda cut: abs(cut - wanted))
    return wanted


def _read(source: Source, max_documents: int | None) -> Iterator[RawDocument]:
    for index, document in enumerate(source.documents()):
        if max_documents is not None and index >= max_documents:
            return
        yield document


def _tokenise(source: Source, plan: _Plan, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[disk.TokenDocument]:
    batch: list[tuple[str, str, str]] = []
    characters = 0
    for document, side in zip(_read(source, len(plan.sides)), plan.sides, strict=True):
        if side is None:
            continue
        if plan.cut is not None:
            name, text, cut = document.name, document.text, plan.cut
            batch += [("train", f"{name} [:{cut}]", text[:cut]), ("test", f"{name} [{cut}:]", text[cut:])]
        else:
            batch.append((side, document.name, document.text))
        characters += len(document.text)
        if len(batch) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield from _encode(batch, tokenizer)
            batch, characters = [], 0
    yield from _encode(batch, tokenizer)


def _encode(
    batch: list[tuple[str, str, str]], tokenizer: PreTrainedTokenizerBase | None
) -> Iterator[disk.TokenDocument]:
    if tokenizer is None:
        for side, name, text in batch:
            tokens = encode_bytes(text)
            yield disk.TokenDocument(side, name, tokens, len(tokens))
        return
    encoded = encode_plain(tokenizer, [text for _, _, text in batch])
    for (side, name, text), ids in zip(batch, encoded, strict=True):
        yield disk.TokenDocument(side, name, np.array(ids, dtype=np.uint32), len(text.encode("utf-8")))
