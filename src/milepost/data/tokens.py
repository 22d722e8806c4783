"""Bytes as tokens, and what a corpus needs to know of any other tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from milepost.data.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD_ID = 256
EOS_ID = 257
VOCAB_SIZE = 258
PAD_TOKEN = "<|pad|>"
EOS_TOKEN = "<|eos|>"


def encode_bytes(text: str | bytes) -> npt.NDArray[np.uint16]:
    """Token ids of the byte tokenizer without building it: the id of a byte is its value. (n,) uint16."""
    data = text.encode("utf-8") if isinstance(text, str) else text
    return np.frombuffer(data, dtype=np.uint8).astype(np.uint16)


def decode_bytes(ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> bytes:
    """The bytes of byte-token ids; pad and eos stand for no byte and are dropped.

    Raises `DataError` for an id outside 0 .. 257.
    """
    values = np.asarray(ids, dtype=np.int64)
    wrong = values[(values < 0) | (values >= VOCAB_SIZE)]
    if len(wrong):
        raise DataError(f"{int(wrong[0])} is not a byte token: ids are 0 .. 255, {PAD_ID} (pad) and {EOS_ID} (eos)")
    return values[values < 256].astype(np.uint8).tobytes()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A `PreTrainedTokenizerFast` whose tokens are the 256 bytes, then pad (256) and eos (257); nothing is downloaded.

    The id of a byte is its value, `decode(encode(text)) == text` for every text, and a text that spells a special token
    is encoded as its bytes. Ids that are not valid UTF-8 decode with U+FFFD; `decode_bytes` gives the bytes themselves.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: byte for byte, character in enumerate(_printable_bytes())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([PAD_TOKEN, EOS_TOKEN])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def _printable_bytes() -> list[str]:
    """The character ByteLevel uses for each byte: itself where printable, else the next free one from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]


def resolve_tokenizer(tokenizer: str | PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A tokenizer object, loaded by `AutoTokenizer` when a name or path is given.

    Raises `DataError` when nothing can be loaded from that name.
    """
    if not isinstance(tokenizer, str):
        return tokenizer
    from transformers import AutoTokenizer

    try:
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise DataError(f"no tokenizer can be loaded from {tokenizer!r}: {error}") from error
    return loaded


def encode_plain(tokenizer: PreTrainedTokenizerBase | None, texts: list[str]) -> list[list[int]]:
    """Ids of each text with nothing added: no BOS, no EOS, and special tokens spelled in the text are read as text.

    tokenizer: None for bytes.
    """
    if tokenizer is None:
        return [list(text.encode("utf-8")) for text in texts]
    if not texts:
        return []
    options: dict[str, Any] = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    encoded = tokenizer(texts, split_special_tokens=True, **options)["input_ids"]
    return [list(ids) for ids in encoded]


def separator_of(tokenizer: PreTrainedTokenizerBase | None) -> int:
    """The id put after each document: eos, else sep, else bos.

    Raises `DataError` when the tokenizer has none of them.
    """
    if tokenizer is None:
        return EOS_ID
    for value in (tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.bos_token_id):
        if value is not None:
            return int(value)
    raise DataError(
        f"the tokenizer {type(tokenizer).__name__} has no eos, sep or bos token to end documents with: "
        f"pass separator_id=..."
    )


def vocab_size_of(tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Number of ids, added tokens included."""
    return VOCAB_SIZE if tokenizer is None else len(tokenizer)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase | None) -> str:
    """A hash of everything that decides a tokenizer's ids; truncation and padding settings are left out."""
    if tokenizer is None:
        return "bytes-v1"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state: Any
    if backend is not None:
        state = json.loads(backend.to_str())
        state.pop("truncation", None)
        state.pop("padding", None)
    else:
        state = [sorted(tokenizer.get_vocab().items()), {k: str(v) for k, v in tokenizer.special_tokens_map.items()}]
    text = json.dumps([type(tokenizer).__name__, state], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
