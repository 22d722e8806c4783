from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from milepost.data import Corpus, DataError, load_corpus
from milepost.data import cache as disk
from milepost.data import corpus as corpus_module

TEXTS = {f"doc {i}": f"Document number {i}.\n" * (i + 1) for i in range(40)}


def folder_of(corpus: Corpus, cache_dir: Path) -> Path:
    return cache_dir / "tokens" / corpus.fingerprint


def same(first: Corpus, second: Corpus) -> bool:
    return all(
        (a.stream == b.stream).all() and (a.starts == b.starts).all() and list(a.names) == list(b.names)
        for a, b in ((first.train, second.train), (first.test, second.test))
    )


def refuse_tokenising(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Iterator[disk.TokenDocument]:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(corpus_module, "_tokenise", fail)


def test_the_second_load_maps_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_corpus(TEXTS, cache_dir=tmp_path)
    refuse_tokenising(monkeypatch)
    second = load_corpus(TEXTS, cache_dir=tmp_path)
    assert isinstance(second.train.stream, np.memmap)
    assert same(first, second)
    monkeypatch.undo()
    assert same(first, load_corpus(TEXTS, cache=False))
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == [first.fingerprint]


def test_the_key_changes_with_content_split_and_separator(tmp_path: Path) -> None:
    changed = {**TEXTS, "doc 3": "changed"}
    corpora = [
        load_corpus(TEXTS, cache_dir=tmp_path),
        load_corpus(changed, cache_dir=tmp_path),
        load_corpus(TEXTS, cache_dir=tmp_path, test_fraction=0.3),
        load_corpus(TEXTS, cache_dir=tmp_path, separator_id=10),
        load_corpus(TEXTS, cache_dir=tmp_path, max_documents=20),
    ]
    assert len({corpus.fingerprint for corpus in corpora}) == 5
    assert len(list((tmp_path / "tokens").iterdir())) == 5


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("old " * 200)
    load_corpus(path, cache_dir=tmp_path / "cache")
    path.write_text("new " * 200)
    assert bytes(load_corpus(path, cache_dir=tmp_path / "cache").train[0].tokens[:4].astype(np.uint8)) == b"new "


@pytest.mark.parametrize("name", ["train.tokens", "test.tokens", "train.index.npy", "test.names.json", "meta.json"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "empty"])
def test_a_damaged_copy_is_made_again(tmp_path: Path, name: str, damage: str) -> None:
    first = load_corpus(TEXTS, cache_dir=tmp_path)
    expected = {split.name: np.array(split.stream) for split in (first.train, first.test)}
    path = folder_of(first, tmp_path) / name
    data = path.read_bytes()
    if damage == "truncate":
        path.write_bytes(data[:-3])
    elif damage == "flip":
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    elif damage == "remove":
        path.unlink()
    else:
        path.write_bytes(b"")
    del first
    assert disk.load(path.parent) is None
    again = load_corpus(TEXTS, cache_dir=tmp_path)
    assert (again.train.stream == expected["train"]).all() and (again.test.stream == expected["test"]).all()
    assert disk.load(path.parent) is not None
    assert [entry.name for entry in (tmp_path / "tokens").iterdir()] == [again.fingerprint]


def test_a_file_where_the_copy_should_be_is_replaced(tmp_path: Path) -> None:
    first = load_corpus(TEXTS, cache=False)
    folder = folder_of(first, tmp_path)
    folder.parent.mkdir(parents=True)
    folder.write_text("in the way")
    assert same(load_corpus(TEXTS, cache_dir=tmp_path), first)
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]


class FullDisk:
    """Stands for an open file on a disk that fills up after some bytes."""

    def __init__(self, file: object, room: int) -> None:
        self._file = file
        self._room = room

    def write(self, data: bytes) -> int:
        self._room -= len(data)
        if self._room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self._file.write(data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


@pytest.mark.parametrize("room", [0, 2000])
def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    original = Path.open

    def open_full(self: Path, mode: str = "r", *args: object, **kwargs: object) -> object:
        file = original(self, mode, *args, **kwargs)
        return FullDisk(file, room) if mode == "wb" else file

    monkeypatch.setattr(Path, "open", open_full)
    with pytest.raises(OSError, match="No space left.*free some space, choose another cache_dir") as caught:
        load_corpus(TEXTS, cache_dir=tmp_path)
    assert caught.value.errno == errno.ENOSPC
    assert list((tmp_path / "tokens").iterdir()) == []
    monkeypatch.undo()
    assert same(load_corpus(TEXTS, cache_dir=tmp_path), load_corpus(TEXTS, cache=False))


def test_an_error_while_reading_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Iterator[disk.TokenDocument]:
        yield disk.TokenDocument("train", "a", np.arange(5, dtype=np.uint16), 5)
        raise DataError("broken")

    monkeypatch.setattr(corpus_module, "_tokenise", broken)
    with pytest.raises(DataError, match="broken"):
        load_corpus(TEXTS, cache_dir=tmp_path)
    assert list((tmp_path / "tokens").iterdir()) == []


def test_a_default_folder_that_cannot_be_written_warns_and_uses_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(disk, "write", refused)
    with pytest.warns(UserWarning, match="kept in memory"):
        corpus = load_corpus(TEXTS)
    assert same(corpus, load_corpus(TEXTS, cache=False))
    with pytest.raises(OSError, match="cannot be written"):
        load_corpus(TEXTS, cache_dir=tmp_path / "chosen")


def test_the_default_folder_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert disk.default_cache_dir() == tmp_path / "milepost"
    corpus = load_corpus(TEXTS)
    assert disk.load(tmp_path / "milepost" / "tokens" / corpus.fingerprint) is not None
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert disk.default_cache_dir().is_relative_to(Path.home())


def test_processes_that_build_at_once_share_one_copy(tmp_path: Path) -> None:
    code = (
        "import sys, time; from milepost.data import load_corpus\n"
        "time.sleep(max(0, float(sys.argv[2]) - time.time()))\n"
        "texts = {f'doc {i}': f'Document number {i}.\\n' * 200 * (i + 1) for i in range(40)}\n"
        "corpus = load_corpus(texts, cache_dir=sys.argv[1]); print(corpus.fingerprint, corpus.train.stream.sum())"
    )
    start = str(time.time() + 4)
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), start], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = {process.communicate(timeout=120)[0] for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(outputs) == 1
    fingerprint = outputs.pop().split()[0]
    assert [entry.name for entry in (tmp_path / "tokens").iterdir()] == [fingerprint]


def test_a_sound_copy_made_meanwhile_is_kept(tmp_path: Path) -> None:
    documents = [disk.TokenDocument(split, "a", np.arange(5, dtype=np.uint16), 5) for split in disk.SPLITS]
    folder = tmp_path / "key"
    disk.write(folder, documents, 9, np.dtype("<u2"), {})
    inode = folder.stat().st_ino
    disk.write(folder, documents, 9, np.dtype("<u2"), {})
    assert folder.stat().st_ino == inode
    assert [entry.name for entry in tmp_path.iterdir()] == ["key"]


def test_what_a_killed_process_left_is_swept_after_a_day(tmp_path: Path) -> None:
    corpus = load_corpus(TEXTS, cache=False)
    tokens = tmp_path / "tokens"
    old, new = (tokens / f".{corpus.fingerprint}.1.{name}.tmp" for name in ("old", "new"))
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "train.tokens").write_bytes(b"half")
    past = time.time() - 2 * 24 * 3600
    for path in (old / "train.tokens", old):
        os.utime(path, (past, past))
    load_corpus(TEXTS, cache_dir=tmp_path)
    assert not old.exists() and new.exists()


def test_large_files_are_digested_by_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_BLOCK", 64)
    monkeypatch.setattr(disk, "_WHOLE", 64 * 64)
    path = tmp_path / "large"
    data = np.random.default_rng(0).bytes(64 * 300)
    path.write_bytes(data)
    before = disk.digest(path)
    for damaged in (data[:-1], data + b"x", data[:-1] + bytes([data[-1] ^ 1]), bytes([data[0] ^ 1]) + data[1:]):
        path.write_bytes(damaged)
        assert disk.digest(path) != before
    path.write_bytes(data)
    assert disk.digest(path) == before


def test_wide_vocabularies_get_wide_tokens() -> None:
    assert disk.token_dtype(258) == np.dtype("<u2") == disk.token_dtype(1 << 16)
    assert disk.token_dtype((1 << 16) + 1) == np.dtype("<u4")
