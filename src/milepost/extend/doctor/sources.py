"""Reading what the doctor looks at: config.json, a folder, GGUF metadata, an override, a mapping, a loaded model.

Nothing in a file is ever executed: JSON is parsed, GGUF keys are read, safetensors are opened by name.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from milepost.encodings.frequencies.config import ROPE_KEYS, SHARED_KEYS
from milepost.extend.doctor.findings import DELETE, Change, Finding, View

Kind = Literal["config", "parameters", "override", "gguf"]
BLOCKS = ("rope_parameters", "rope_scaling")
FLAT_KEYS = SHARED_KEYS.union({"method"}, *(required | optional for required, optional in ROPE_KEYS.values()))
"""Keys of a flat block: an object under one of them is a mistake, not a layer type."""
IDENTITY = frozenset({"model_type", "architectures", "hidden_size", "num_hidden_layers", "vocab_size", "text_config"})


class SourceError(ValueError):
    """There is nothing to read at the place given; a mistake of the call, not of the file."""


@dataclass(kw_only=True)
class Document:
    """What was read. ``data`` is parsed JSON, or the GGUF keys without their prefix."""

    label: str
    kind: Kind = "config"
    data: Any = None
    path: Path | None = None
    model: Any = None
    tensors: Mapping[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    beside: Mapping[str, Any] | None = None
    """The config.json that stands beside a GGUF file."""
    projections: list[tuple[Any, Any]] = field(default_factory=list)
    """(query, key) weights of some layers of a GGUF file."""


def read(source: Any, kind: Kind | None = None) -> Document:
    """Read a source: a path, a folder, JSON text, a hub name, a mapping, a configuration object or a model.

    Raises `SourceError` when there is nothing there.
    """
    if isinstance(source, Mapping):
        return Document(label="mapping", kind=kind or guess(source), data=plain(source))
    if isinstance(source, (list, tuple, int, float, bool)) or source is None:
        return Document(label="value", kind=kind or "config", data=source)
    if hasattr(source, "named_parameters"):
        document = read(source.config, kind)
        document.label, document.model = type(source).__name__, source
        return document
    if hasattr(source, "to_dict"):
        return Document(label=type(source).__name__, kind=kind or "config", data=plain(source.to_dict()))
    if isinstance(source, str) and source.lstrip()[:1] in ("{", "["):
        document = _from_text(source, "override", kind)
        if kind is None and document.kind == "config":
            document.kind = "override"
        return document
    if not isinstance(source, (str, Path)):
        raise SourceError(f"cannot read {type(source).__name__}: give a path, JSON, a mapping, a config or a model")
    return _from_path(Path(source), str(source), kind)


def plain(value: Any) -> Any:
    """A mapping with text keys all the way down, as JSON would hold it."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def guess(data: Mapping[str, Any]) -> Kind:
    """A bare block, or a configuration (a part of one counts)."""
    if ("rope_type" in data or "type" in data) and not IDENTITY & set(map(str, data)):
        return "parameters"
    return "config"


def _from_path(path: Path, name: str, kind: Kind | None) -> Document:
    if path.is_dir():
        config = path / "config.json"
        files = sorted(path.glob("*.gguf"))
        if not config.is_file():
            if not files:
                raise SourceError(f"{name} holds neither config.json nor a .gguf file")
            return _from_gguf(files[0], name)
        document = _from_file(config, name, kind)
        document.path = config
        return document
    if path.is_file():
        return _from_gguf(path, name) if path.suffix == ".gguf" else _from_file(path, name, kind)
    if name.count("/") == 1 and not name.startswith((".", "/")) and path.suffix not in (".json", ".gguf"):
        return _from_file(_from_hub(name), name, kind)
    raise SourceError(f"{name} does not exist")


def _from_hub(name: str) -> Path:
    """The configuration of a hub model, and nothing else of it."""
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise SourceError(
            f"{name} does not exist here, and huggingface_hub is not installed to look further"
        ) from error
    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:
        raise SourceError(f"{name} is no local path, and its config.json could not be fetched: {error}") from error


def _from_file(path: Path, label: str, kind: Kind | None) -> Document:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        document = Document(label=label, path=path)
        document.findings.append(Finding(rule="not-json", words=f"{path.name} cannot be read as text: {error}"))
        return document
    document = _from_text(text, label, kind)
    document.path = path
    return document


def _from_text(text: str, label: str, kind: Kind | None) -> Document:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        document = Document(label=label, kind=kind or "config")
        document.findings.append(Finding(rule="not-json", words=f"not JSON: {str(error)[:200]}"))
        return document
    return Document(label=label, kind=kind or (guess(data) if isinstance(data, dict) else "config"), data=data)


def _from_gguf(path: Path, label: str) -> Document:
    try:
        import gguf
    except ImportError as error:
        raise SourceError("reading GGUF metadata needs gguf: pip install 'milepost[gguf]'") from error
    document = Document(label=label, kind="gguf", path=path)
    try:
        reader = gguf.GGUFReader(path)
        keys = {name: found.contents() for name, found in reader.fields.items() if "tokenizer" not in name}
    except Exception as error:
        document.findings.append(Finding(rule="not-json", words=f"{path.name} is not a readable GGUF file: {error}"))
        return document
    prefix = f"{keys.get('general.architecture')}."
    document.data = {key.removeprefix(prefix): value for key, value in keys.items()}
    rope = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
    document.tensors = {t.name: t.data.flatten().tolist() for t in reader.tensors if t.name in rope}
    document.projections = _gguf_projections(gguf, reader)
    config = path.parent / "config.json"
    if config.is_file():
        found = _from_file(config, str(config), None).data
        document.beside = found if isinstance(found, dict) else None
    return document


def _gguf_projections(gguf: Any, reader: Any, limit: int = 8) -> list[tuple[Any, Any]]:
    """(query, key) weights of the first layers; types that cannot be dequantised are left out."""
    import torch

    named = {tensor.name: tensor for tensor in reader.tensors}
    found = []
    for layer in range(limit):
        tensors = [named.get(f"blk.{layer}.attn_{part}.weight") for part in ("q", "k")]
        try:
            query, key = (gguf.quants.dequantize(t.data, t.tensor_type) for t in tensors if t is not None)
        except (NotImplementedError, ValueError):
            break
        found.append((torch.from_numpy(query.copy()), torch.from_numpy(key.copy())))
    return found


def views(document: Document, checkpoint: Mapping[str, Any] | None, replace_trained: bool) -> Iterator[View]:
    """Every rope block of a document, with findings about the form of blocks added to the document."""
    data = document.data
    if not isinstance(data, dict):
        if not document.findings:
            kind = "null" if data is None else type(data).__name__
            document.findings.append(Finding(rule="not-an-object", words=f"the document is {kind}, not an object"))
        return
    common: dict[str, Any] = {"kind": document.kind, "checkpoint": checkpoint, "replace_trained": replace_trained}
    if document.kind == "parameters":
        yield View(config=data, block=data, **common)
        return
    config = data
    prefix: tuple[str, ...] = ()
    text = data.get("text_config")
    if isinstance(text, dict) and not any(data.get(name) is not None for name in (*BLOCKS, "rope_theta")):
        config, prefix = text, ("text_config",)
    yield from _blocks(document, config, prefix, common)


def _blocks(
    document: Document, config: dict[str, Any], prefix: tuple[str, ...], common: dict[str, Any]
) -> Iterator[View]:
    around: dict[str, Any] = {"config": config, "config_path": prefix, **common}
    present = [name for name in BLOCKS if config.get(name) is not None]
    for name in list(present):
        if isinstance(config[name], dict):
            continue
        present.remove(name)
        mended = _parsed(config[name])
        document.findings.append(
            Finding(
                rule="block-not-an-object",
                where=(*prefix, name),
                words=f"{name} is {type(config[name]).__name__}, not an object",
                fix=None if mended is None else "unquote it",
                changes=() if mended is None else (Change(path=(*prefix, name), value=mended),),
            )
        )
    if len(present) == 2 and config["rope_parameters"] != config["rope_scaling"]:
        document.findings.append(
            Finding(
                rule="two-blocks",
                where=(*prefix, "rope_scaling"),
                words="rope_scaling and rope_parameters differ: transformers 5 takes rope_scaling and drops the other",
                fix="keep one",
            )
        )
        present = ["rope_scaling"]
    if not present:
        yield View(block={}, path=prefix, stated=False, **around)
        return
    name = present[0]
    yield from _flat_or_nested(document, config, config[name], (*prefix, name), around)


def _moved(block: dict[str, Any], flat: list[str], layers: list[str], path: tuple[str, ...]) -> Iterator[Change]:
    """Edits that move flat keys into every layer type's block that lacks them."""
    for key in flat:
        for layer in layers:
            if key not in block[layer]:
                yield Change(path=(*path, layer, key), value=block[key])
        yield Change(path=(*path, key), value=DELETE)


def _parsed(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, str):
        return None
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _flat_or_nested(
    document: Document, config: dict[str, Any], block: dict[str, Any], path: tuple[str, ...], around: dict[str, Any]
) -> Iterator[View]:
    inner = [key for key, value in block.items() if isinstance(value, dict) and key not in FLAT_KEYS]
    if not inner:
        yield View(block=block, path=path, stated=bool(block), **around)
        return
    flat = [key for key in block if key not in inner and block[key] is not None]
    if flat:
        document.findings.append(
            Finding(
                rule="nested-mixed",
                where=path,
                words=f"{', '.join(sorted(flat)[:4])} stand beside layer types: they are not read",
                fix="move them into each layer type's block",
                changes=tuple(_moved(block, flat, inner, path)),
            )
        )
    layers = config.get("layer_types")
    for key in inner:
        known = set(map(str, layers)) if isinstance(layers, list) else set()
        if key not in known and difflib.get_close_matches(key, known, n=1, cutoff=0.8):
            document.findings.append(
                Finding(
                    rule="nested-unknown-layer",
                    where=(*path, key),
                    words=f"no layer is of type {key[:40]!r}: the model has {sorted(known)[:6]}",
                )
            )
        yield View(block=block[key], path=(*path, key), layer_type=key, **around)
