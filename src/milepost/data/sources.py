"""Where documents come from: text files, folders, JSONL, parquet, Hugging Face datasets, and mappings of name to text.

A source tells its fingerprint cheaply (so that a cached copy is found without reading every text twice) and yields its
documents in a stable order.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from milepost.data.errors import DataError

TEXT_SUFFIXES = (
    ".txt",
    ".text",
    ".md",
    ".rst",
    ".tex",
    ".html",
    ".xml",
    ".py",
    ".c",
    ".h",
    ".cpp",
    ".js",
    ".java",
    ".rs",
    ".go",
)
JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)
TEST_SPLITS = ("test", "validation", "valid", "val", "dev")


@dataclass(frozen=True)
class RawDocument:
    """A named text; `split` is "train" or "test" where the source itself says so, None where names decide."""

    name: str
    text: str
    split: str | None = None


class Source(Protocol):
    """Documents with a fingerprint."""

    @property
    def name(self) -> str: ...

    @property
    def about(self) -> Mapping[str, Any]:
        """What a report should say of it: origin, licence, version."""
        ...

    def fingerprint(self) -> str:
        """Changes whenever the documents change."""
        ...

    def documents(self) -> Iterator[RawDocument]: ...


def read_text(path: Path, name: str | None = None) -> str:
    """The text of a UTF-8 file, line endings and all.

    Raises `DataError` with the byte offset when it is not UTF-8.
    """
    data = path.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name or path} is not UTF-8: byte {data[error.start]:#04x} at offset {error.start} cannot be decoded; "
            f"convert it first, for instance with `iconv -f LATIN1 -t UTF-8`"
        ) from error


def digest_file(path: Path) -> str:
    """sha256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_files(root: Path, files: list[Path]) -> str:
    """sha256 over names (relative to root) and contents."""
    total = hashlib.sha256()
    for path in files:
        total.update(f"{path.relative_to(root).as_posix()}\0{digest_file(path)}\n".encode())
    return total.hexdigest()


@dataclass(frozen=True)
class MappingSource:
    """Texts already in memory: name -> text."""

    texts: Mapping[str, str]
    name: str = "documents"

    @property
    def about(self) -> Mapping[str, Any]:
        return {"kind": "mapping"}

    def fingerprint(self) -> str:
        total = hashlib.sha256()
        for name, text in self.texts.items():
            total.update(json.dumps([name, hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()]).encode())
        return total.hexdigest()

    def documents(self) -> Iterator[RawDocument]:
        for name, text in self.texts.items():
            yield RawDocument(name, text)


@dataclass(frozen=True)
class TextSource:
    """One text file, or every text file under a folder; the document's name is its path below the folder."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def about(self) -> Mapping[str, Any]:
        return {"kind": "text", "path": str(self.path)}

    def files(self) -> list[Path]:
        return [self.path] if self.path.is_file() else _files_under(self.path, TEXT_SUFFIXES)

    def _root(self) -> Path:
        return self.path.parent if self.path.is_file() else self.path

    def fingerprint(self) -> str:
        return digest_files(self._root(), self.files())

    def documents(self) -> Iterator[RawDocument]:
        for path in self.files():
            yield RawDocument(path.relative_to(self._root()).as_posix(), read_text(path))


@dataclass(frozen=True)
class JsonlSource:
    """JSON lines, one document a line; files named train* and test* (or validation*) keep that split."""

    path: Path
    text_field: str
    name_field: str | None

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def about(self) -> Mapping[str, Any]:
        return {"kind": "jsonl", "path": str(self.path), "text_field": self.text_field}

    def files(self) -> list[Path]:
        return [self.path] if self.path.is_file() else _files_under(self.path, JSONL_SUFFIXES)

    def fingerprint(self) -> str:
        files = self.files()
        return f"{self.text_field}:{self.name_field}:{digest_files(self.path.parent, files)}"

    def documents(self) -> Iterator[RawDocument]:
        files = self.files()
        splits = _splits_of_files(files)
        for path in files:
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        where = f"{path}, line {number}"
                        row = _parse_line(line, where)
                        text = _field(row, self.text_field, where, "text_field")
                        name = f"{path.name}:{number}"
                        if self.name_field is not None:
                            name = _field(row, self.name_field, where, "name_field")
                        yield RawDocument(name, text, splits[path])


@dataclass(frozen=True)
class ParquetSource:
    """Parquet files, one document a row, read by pyarrow in batches."""

    path: Path
    text_field: str
    name_field: str | None

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def about(self) -> Mapping[str, Any]:
        return {"kind": "parquet", "path": str(self.path), "text_field": self.text_field}

    def files(self) -> list[Path]:
        return [self.path] if self.path.is_file() else _files_under(self.path, PARQUET_SUFFIXES)

    def fingerprint(self) -> str:
        return f"{self.text_field}:{self.name_field}:{digest_files(self.path.parent, self.files())}"

    def documents(self) -> Iterator[RawDocument]:
        parquet = import_optional("pyarrow.parquet", "reading parquet")
        files = self.files()
        splits = _splits_of_files(files)
        columns = [field for field in (self.text_field, self.name_field) if field is not None]
        for path in files:
            try:
                table = parquet.ParquetFile(path)
            except (OSError, ValueError) as error:
                raise DataError(f"{path} cannot be read as parquet: {error}") from error
            with table:
                check_fields(table.schema_arrow.names, columns, str(path))
                row = 0
                for batch in table.iter_batches(batch_size=256, columns=columns):
                    for record in batch.to_pylist():
                        where = f"{path}, row {row}"
                        text = _field(record, self.text_field, where, "text_field")
                        name = f"{path.name}:{row}"
                        if self.name_field is not None:
                            name = _field(record, self.name_field, where, "name_field")
                        yield RawDocument(name, text, splits[path])
                        row += 1


class HuggingFaceSource:
    """A dataset of the hub or of a local folder, by `datasets.load_dataset` or `load_from_disk`.

    Its own train and test (or validation) splits are kept when both exist; otherwise the names "split/row" are hashed.
    """

    def __init__(
        self, path: str, *, subset: str | None, text_field: str, name_field: str | None, from_disk: bool
    ) -> None:
        self.name = path if subset is None else f"{path}:{subset}"
        self.about: Mapping[str, Any] = {
            "kind": "huggingface",
            "path": path,
            "subset": subset,
            "text_field": text_field,
        }
        self._text_field = text_field
        self._name_field = name_field
        datasets = import_optional("datasets", f"loading the dataset {path!r}")
        try:
            loaded = datasets.load_from_disk(path) if from_disk else datasets.load_dataset(path, subset)
        except Exception as error:
            kind = type(error).__name__
            raise DataError(f"the dataset {self.name!r} cannot be loaded ({kind}): {error}") from error
        splits: dict[str, Any] = dict(loaded) if isinstance(loaded, dict) else {"train": loaded}
        test = next((name for name in TEST_SPLITS if name in splits), None)
        kept = {"train": splits.get("train"), "test": splits.get(test) if test is not None else None}
        if kept["train"] is not None and kept["test"] is not None:
            self._splits: list[tuple[str, str | None, Any]] = [
                ("train", "train", kept["train"]),
                (str(test), "test", kept["test"]),
            ]
        else:
            self._splits = [(name, None, rows) for name, rows in sorted(splits.items())]
        fields = [field for field in (text_field, name_field) if field is not None]
        for name, _, rows in self._splits:
            check_fields(rows.column_names, fields, f"the split {name!r} of {self.name}")

    def fingerprint(self) -> str:
        parts = [(name, split, rows._fingerprint, len(rows)) for name, split, rows in self._splits]
        return hashlib.sha256(json.dumps([self._text_field, self._name_field, parts]).encode()).hexdigest()

    def documents(self) -> Iterator[RawDocument]:
        for split_name, split, rows in self._splits:
            columns = [field for field in (self._text_field, self._name_field) if field is not None]
            for index, row in enumerate(rows.select_columns(columns)):
                where = f"{self.name}, {split_name}, row {index}"
                text = _field(row, self._text_field, where, "text_field")
                name = f"{split_name}/{index}"
                if self._name_field is not None:
                    name = _field(row, self._name_field, where, "name_field")
                yield RawDocument(name, text, split)


def open_path(path: Path, *, text_field: str, name_field: str | None) -> Source:
    """The source for a local file or folder, by its suffix or contents.

    Raises `DataError` for a folder that holds nothing that can be read.
    """
    if path.is_file():
        if path.suffix in JSONL_SUFFIXES:
            return JsonlSource(path, text_field, name_field)
        if path.suffix in PARQUET_SUFFIXES:
            return ParquetSource(path, text_field, name_field)
        return TextSource(path)
    if any((path / mark).is_file() for mark in ("dataset_dict.json", "state.json")):
        return HuggingFaceSource(str(path), subset=None, text_field=text_field, name_field=name_field, from_disk=True)
    if _files_under(path, TEXT_SUFFIXES):
        return TextSource(path)
    if _files_under(path, JSONL_SUFFIXES):
        return JsonlSource(path, text_field, name_field)
    if _files_under(path, PARQUET_SUFFIXES):
        return ParquetSource(path, text_field, name_field)
    raise DataError(
        f"the folder {path} holds no text ({', '.join(TEXT_SUFFIXES)}), JSONL, parquet or saved dataset: "
        f"name a folder with such files, or one file"
    )


def import_optional(module: str, purpose: str) -> Any:
    """A module of the `data` extra.

    Raises `DataError` that names the extra when it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataError(f"{purpose} needs the package {package}: pip install 'milepost[data]'") from error


def check_fields(available: list[str], wanted: list[str], where: str) -> None:
    """Raises `DataError` that lists the available fields when a wanted one is missing."""
    for field in wanted:
        if field not in available:
            raise DataError(
                f"{where} has no field {field!r}; it has {', '.join(map(repr, available))}: pass text_field=..."
            )


def _field(row: Mapping[str, Any], field: str, where: str, option: str) -> str:
    if field not in row:
        fields = ", ".join(map(repr, row)) or "no fields"
        raise DataError(f"{where} has no field {field!r}; it has {fields}: pass {option}=...")
    value = row[field]
    if option == "name_field" and isinstance(value, int):
        return str(value)
    if not isinstance(value, str):
        raise DataError(f"{where}: field {field!r} holds {type(value).__name__}, not text: pass {option}=...")
    return value


def _parse_line(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 (offset {error.start} in the line): convert the file first") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where} holds a JSON {type(row).__name__}, not an object with a text field")
    return row


def _splits_of_files(files: list[Path]) -> dict[Path, str | None]:
    """train / test by the files' names when both kinds are there and nothing else is; None for all otherwise."""
    kinds: dict[Path, str | None] = {}
    for path in files:
        stem = path.name.lower()
        test = any(stem.startswith(name) for name in TEST_SPLITS)
        kinds[path] = "train" if stem.startswith("train") else "test" if test else None
    if set(kinds.values()) == {"train", "test"}:
        return kinds
    return dict.fromkeys(files)


def _files_under(root: Path, suffixes: tuple[str, ...]) -> list[Path]:
    found = [
        path
        for path in root.rglob("*")
        if path.suffix in suffixes
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(root).parts)
    ]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())
