"""The two corpora that need no download: `prose` is shipped, `code` is the running interpreter's library."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import platform
import sysconfig
import tokenize
from collections.abc import Iterator, Mapping
from importlib import resources
from io import BytesIO
from pathlib import Path
from typing import Any

from milepost.data.errors import DataError
from milepost.data.sources import RawDocument

_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


class ProseSource:
    """The State of the Union addresses, 1790-2021: 233 documents, 10.8 MB, public domain.

    A document's name is "<year> <president>". The shipped text is compressed with xz; its sha256 is checked
    whenever it is read.
    """

    name = "prose"

    def __init__(self) -> None:
        self._folder = resources.files("milepost.data") / "corpora"
        self._index: dict[str, Any] = json.loads((self._folder / "prose.json").read_text("utf-8"))

    @property
    def about(self) -> Mapping[str, Any]:
        return {key: self._index[key] for key in ("title", "source", "license", "text_sha256")}

    @property
    def license_text(self) -> str:
        """The shipped licence note."""
        return (self._folder / "prose.LICENSE").read_text("utf-8")

    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self._index, sort_keys=True).encode()).hexdigest()

    def documents(self) -> Iterator[RawDocument]:
        """Raises `DataError` when the shipped file is not the one its index describes."""
        compressed = (self._folder / "prose.txt.xz").read_bytes()
        self._check("xz_sha256", compressed)
        text = lzma.decompress(compressed)
        self._check("text_sha256", text)
        start = 0
        for document in self._index["documents"]:
            end = start + document["bytes"]
            yield RawDocument(f"{document['year']} {document['president']}", text[start:end].decode("utf-8"))
            start = end

    def _check(self, key: str, data: bytes) -> None:
        found = hashlib.sha256(data).hexdigest()
        if found != self._index[key]:
            raise DataError(
                f"the shipped corpus 'prose' is damaged: its {key} is {found}, expected {self._index[key]}; "
                f"reinstall milepost"
            )


class CodeSource:
    """The sources of the running interpreter's standard library, without tests, installed packages and build settings.

    A document's name is its path below the library's folder. It differs by Python version, so its fingerprint (sha256
    over names and contents) belongs into every report. A file that is not in the encoding it states is left out.
    """

    name = "code"

    def __init__(self) -> None:
        self._root = Path(sysconfig.get_paths()["stdlib"])
        self._digest: str | None = None

    @property
    def about(self) -> Mapping[str, Any]:
        return {
            "title": f"standard library of {platform.python_implementation()} {platform.python_version()}",
            "license": "PSF-2.0 (read where it is installed, not redistributed)",
            "sha256": self.fingerprint(),
        }

    def fingerprint(self) -> str:
        if self._digest is None:
            total = hashlib.sha256()
            for document in self.documents():
                total.update(f"{document.name}\0{hashlib.sha256(document.text.encode()).hexdigest()}\n".encode())
            self._digest = total.hexdigest()
        return self._digest

    def documents(self) -> Iterator[RawDocument]:
        """Raises `DataError` when the interpreter's library is not there as files."""
        paths = sorted(self._files(), key=lambda path: path.relative_to(self._root).as_posix())
        if not paths:
            raise DataError(
                f"the standard library has no sources under {self._root}: use --data prose, or a folder of code"
            )
        for path in paths:
            data = path.read_bytes()
            try:
                encoding, _ = tokenize.detect_encoding(BytesIO(data).readline)
                text = data.decode(encoding.removesuffix("-sig"))
            except (SyntaxError, UnicodeDecodeError):
                continue
            yield RawDocument(path.relative_to(self._root).as_posix(), text)

    def _files(self) -> Iterator[Path]:
        for folder, subfolders, files in os.walk(self._root):
            kept = [name for name in subfolders if name not in _SKIPPED_FOLDERS and not name.startswith("config-")]
            subfolders[:] = kept
            for name in files:
                if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                    yield Path(folder, name)
