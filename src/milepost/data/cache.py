"""Tokenised documents on disk: written once under a content hash, checked and memory-mapped afterwards.

A copy is a folder `<key>` with, for each split, the token stream (raw little-endian), the index (start, length, bytes
of each document) and the names, and `meta.json` with the size and digest of each file. It is written under another name
and renamed, so a reader sees a whole copy or none; two processes that build the same key at once both succeed and share
one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FORMAT_VERSION = 1
_BLOCK = 1 << 20
_WHOLE = 64 * _BLOCK
_ABANDONED = 24 * 3600.0
SPLITS = ("train", "test")

Ints = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class TokenDocument:
    """One tokenised document on its way into a copy."""

    split: str
    name: str
    tokens: Tokens
    num_bytes: int


@dataclass(frozen=True, eq=False)
class SplitArrays:
    """One split: stream (the separator after each document), index (n, 3) of start, length, bytes, and names."""

    stream: Tokens
    index: Ints
    names: list[str]
    path: Path | None


def default_cache_dir() -> Path:
    """XDG_CACHE_HOME/milepost where that is set, otherwise the platform's user cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "milepost"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "milepost"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "milepost" / "cache"
    return Path.home() / ".cache" / "milepost"


def cache_key(parts: Mapping[str, Any]) -> str:
    """The name of a copy: a hash of everything that decides its content, the format's version included."""
    text = json.dumps({"format": FORMAT_VERSION, **parts}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds every id."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def digest(path: Path) -> str:
    """sha256 of a file up to 64 MiB, of 64 blocks of 1 MiB spread evenly over a larger one (with its size)."""
    size = path.stat().st_size
    total = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= _WHOLE:
            while block := file.read(_BLOCK):
                total.update(block)
        else:
            for part in range(64):
                file.seek((size - _BLOCK) * part // 63)
                total.update(file.read(_BLOCK))
    return total.hexdigest()


def collect(documents: Iterable[TokenDocument], separator_id: int, dtype: np.dtype[Any]) -> dict[str, SplitArrays]:
    """The documents as arrays in memory."""
    streams: dict[str, list[Tokens]] = {split: [] for split in SPLITS}
    indices: dict[str, list[tuple[int, int, int]]] = {split: [] for split in SPLITS}
    names: dict[str, list[str]] = {split: [] for split in SPLITS}
    ends = dict.fromkeys(SPLITS, 0)
    separator = np.array([separator_id], dtype=dtype)
    for document in documents:
        split, length = document.split, len(document.tokens)
        streams[split] += [document.tokens.astype(dtype, copy=False), separator]
        indices[split].append((ends[split], length, document.num_bytes))
        names[split].append(document.name)
        ends[split] += length + 1
    return {
        split: SplitArrays(
            np.concatenate(streams[split]) if streams[split] else np.empty(0, dtype),
            np.array(indices[split], dtype=np.int64).reshape(-1, 3),
            names[split],
            None,
        )
        for split in SPLITS
    }


def write(
    folder: Path, documents: Iterable[TokenDocument], separator_id: int, dtype: np.dtype[Any], meta: Mapping[str, Any]
) -> None:
    """Write a copy under a temporary name and rename it to `folder`; a sound copy that is already there is kept.

    Whatever goes wrong, `folder` is whole or absent, and the temporary folder is removed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    temporary = folder.parent / f".{folder.name}.{os.getpid()}.{uuid.uuid4().hex}.tmp"
    temporary.mkdir()
    try:
        _write_files(temporary, documents, separator_id, dtype, meta)
        _publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load(folder: Path) -> tuple[dict[str, SplitArrays], dict[str, Any]] | None:
    """The copy in `folder`, memory-mapped, and its meta data; None when it is absent, incomplete or damaged."""
    try:
        meta: dict[str, Any] = json.loads((folder / "meta.json").read_text("utf-8"))
        stated = meta.pop("digest", None)
        if stated != _digest_meta(meta) or meta["format"] != FORMAT_VERSION:
            return None
        if any(digest(folder / name) != found for name, found in meta["files"].items()):
            return None
        dtype = np.dtype(meta["dtype"])
        return {split: _open_split(folder, split, dtype) for split in SPLITS}, meta
    except (OSError, ValueError, KeyError, TypeError):
        return None


def open_stream(path: Path, dtype: np.dtype[Any]) -> Tokens:
    """A token stream mapped read-only."""
    if path.stat().st_size == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def _open_split(folder: Path, split: str, dtype: np.dtype[Any]) -> SplitArrays:
    path = folder / f"{split}.tokens"
    names: list[str] = json.loads((folder / f"{split}.names.json").read_text("utf-8"))
    index: Ints = np.load(folder / f"{split}.index.npy", allow_pickle=False)
    return SplitArrays(open_stream(path, dtype), index, names, path)


def _write_files(
    folder: Path, documents: Iterable[TokenDocument], separator_id: int, dtype: np.dtype[Any], meta: Mapping[str, Any]
) -> None:
    indices: dict[str, list[tuple[int, int, int]]] = {split: [] for split in SPLITS}
    names: dict[str, list[str]] = {split: [] for split in SPLITS}
    ends = dict.fromkeys(SPLITS, 0)
    separator = np.array([separator_id], dtype=dtype).tobytes()
    files = {split: (folder / f"{split}.tokens").open("wb") for split in SPLITS}
    try:
        for document in documents:
            split, length = document.split, len(document.tokens)
            files[split].write(document.tokens.astype(dtype, copy=False).tobytes() + separator)
            indices[split].append((ends[split], length, document.num_bytes))
            names[split].append(document.name)
            ends[split] += length + 1
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    finally:
        for file in files.values():
            file.close()
    for split in SPLITS:
        np.save(folder / f"{split}.index.npy", np.array(indices[split], dtype=np.int64).reshape(-1, 3))
        (folder / f"{split}.names.json").write_text(json.dumps(names[split]), "utf-8")
    whole = {
        **meta,
        "format": FORMAT_VERSION,
        "dtype": dtype.str,
        "files": {path.name: digest(path) for path in sorted(folder.iterdir())},
    }
    (folder / "meta.json").write_text(json.dumps({**whole, "digest": _digest_meta(whole)}, indent=1), "utf-8")


def _publish(temporary: Path, folder: Path) -> None:
    """Rename into place. A damaged copy in the way is moved aside; a sound one, made meanwhile, stays."""
    for _ in range(100):
        try:
            os.rename(temporary, folder)
            return
        except OSError:
            if not folder.exists():
                raise
        if load(folder) is not None:
            return
        aside = folder.parent / f".{folder.name}.{os.getpid()}.{uuid.uuid4().hex}.tmp"
        try:
            os.rename(folder, aside)
        except FileNotFoundError:
            continue
        if aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink(missing_ok=True)
    raise OSError(f"{folder} cannot be replaced: another process keeps writing a damaged copy there")


def _sweep(folder: Path) -> None:
    """Remove what killed processes left of this copy: temporary folders in which nothing was written for a day."""
    for left in folder.parent.glob(f".{folder.name}.*.tmp"):
        try:
            newest = max(path.stat().st_mtime for path in (left, *left.iterdir()))
        except OSError:
            continue
        if time.time() - newest > _ABANDONED:
            shutil.rmtree(left, ignore_errors=True)


def _digest_meta(meta: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()
