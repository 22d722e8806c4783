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

from milepost.encodings.frequencies.config import ROPE_KEYS, SHARED_KEYS, THETA_KEYS
from milepost.extend.doctor.check_model import BLOCKS
from milepost.extend.doctor.classes import FLAT_ONLY, LAYERED
from milepost.extend.doctor.findings import DELETE, ROTARY, Change, Finding, View, listed, short

Kind = Literal["config", "parameters", "override", "gguf"]
FLAT_KEYS = SHARED_KEYS.union({"method"}, *(required | optional for required, optional in ROPE_KEYS.values()))
"""Keys of a flat block: an object under one of them is a mistake, not a layer type."""
MARKS = ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))
"""Byte order marks, and the encoding that each one names."""
DEEPEST = 200
"""Levels of nesting that are read."""
OTHER_PARTS = ("vision", "visual", "audio", "image", "quant", "generation")
"""Words in the names of inner configurations that are not a language model's."""
WATCHED = FLAT_KEYS.union(
    (*BLOCKS, *THETA_KEYS, "text_config", "layer_types", "model_type", "max_position_embeddings", "head_dim"),
    ("original_max_position_embeddings", "hidden_size", "num_attention_heads", "rotary_pct", "rope_local_base_freq"),
    ("full_attention", "sliding_attention"),
)
"""Keys that change positions when one of two values is dropped."""
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
    rewritten: bool = False
    """Whether writing ``data`` out again mends something by itself."""


def read(source: Any, kind: Kind | None = None) -> Document:
    """Read a source: a path, a folder, JSON text, a hub name, a mapping, a configuration object or a model.

    Raises `SourceError` when there is nothing there.
    """
    if isinstance(source, Mapping):
        if _deep(source):
            return _from_text("[" * 2 * DEEPEST + "]" * 2 * DEEPEST, "mapping", kind)
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
    try:
        return _from_existing(path, name, kind)
    except (OSError, ValueError) as error:  # too long for a path, or a null character in it
        if isinstance(error, SourceError):
            raise
        raise SourceError(f"{short(name)} cannot be a path: {error.args[-1]}") from error


def _from_existing(path: Path, name: str, kind: Kind | None) -> Document:
    if not name.strip():
        raise SourceError(f"{name!r} is no path: give a file, a folder or JSON")
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
    if path.is_fifo():
        document = _from_file(path, name, kind)
        document.path = None
        return document
    if path.is_symlink():
        raise SourceError(f"{name} is a link to {path.readlink()}, which does not exist")
    if path.exists():
        raise SourceError(f"{name} is neither a file nor a folder")
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
        content = path.read_bytes()
        encoding = next((name for mark, name in MARKS if content.startswith(mark)), "utf-8")
        text = content.decode(encoding)
    except (OSError, UnicodeDecodeError) as error:
        document = Document(label=label, path=path)
        document.findings.append(Finding(rule="not-json", words=f"{path.name} cannot be read as text: {error}"))
        return document
    document = _from_text(text, label, kind)
    document.path = path
    if encoding != "utf-8":
        document.rewritten = True
        document.findings.append(
            Finding(
                rule="not-json",
                words=f"{path.name} begins with the byte order mark of {encoding}: transformers and vLLM read UTF-8 "
                "without a mark and stop",
                fix="write it as UTF-8 without a byte order mark",
            )
        )
    return document


def _from_text(text: str, label: str, kind: Kind | None) -> Document:
    twice: dict[str, list[Any]] = {}

    def gathered(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            for name in {key for key, _ in pairs} & WATCHED:
                values = [value for key, value in pairs if key == name]
                if any(value != values[0] for value in values):
                    twice[name] = values
        return found

    try:
        data = json.loads(text, object_pairs_hook=gathered)
    except (ValueError, RecursionError) as error:
        document = Document(label=label, kind=kind or "config")
        document.findings.append(Finding(rule="not-json", words=f"not JSON: {str(error)[:200]}"))
        return document
    if _deep(data):
        document = Document(label=label, kind=kind or "config")
        document.findings.append(Finding(rule="not-json", words=f"nested more than {DEEPEST} deep: no configuration"))
        return document
    document = Document(label=label, kind=kind or (guess(data) if isinstance(data, dict) else "config"), data=data)
    for name, values in twice.items():
        document.rewritten = True
        document.findings.append(
            Finding(
                rule="duplicate-key",
                words=f"{name} stands twice in one object: {listed([short(value) for value in values])}; Python takes "
                "the last one without a word",
                fix="keep the one that you mean",
            )
        )
    return document


def _deep(data: Any) -> bool:
    """Whether lists and objects stand in each other further than any configuration's."""
    level = [data]
    for _ in range(DEEPEST):
        containers = [one for one in level if isinstance(one, (dict, list))]
        level = [item for one in containers for item in (one.values() if isinstance(one, dict) else one)]
        if not level:
            return False
    return any(isinstance(one, (dict, list)) for one in level)


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
    if document.kind == "override":
        text = data.get("text_config")
        inside = isinstance(text, dict) and not _has_rope(data)
        config = text if inside and isinstance(text, dict) else data
        prefix: tuple[str, ...] = ("text_config",) if inside else ()
        if checkpoint is not None and not inside:
            _override_against(document, data, checkpoint)
        common["checkpoint"] = _text_of(checkpoint) if checkpoint is not None else None
        yield from _blocks(document, config, prefix, common)
        return
    for config, prefix in _parts(document, data, ()):
        yield from _blocks(document, config, prefix, common)


def _has_rope(config: Mapping[str, Any]) -> bool:
    return any(config.get(name) is not None for name in (*BLOCKS, "rope_theta"))


def _text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a checkpoint's configuration."""
    text = config.get("text_config")
    return text if isinstance(text, dict) and not _has_rope(config) else config


def _override_against(document: Document, data: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> None:
    """Find a block of an override that stands where the checkpoint's model does not read it."""
    text = checkpoint.get("text_config")
    moved = [name for name in (*BLOCKS, "rope_theta") if data.get(name) is not None]
    if isinstance(text, dict) and (_has_rope(text) or "hidden_size" in text) and moved:
        document.findings.append(_not_read(moved, data, (), "the checkpoint's language model reads text_config"))
    held = checkpoint.get("rope_parameters")
    given = data.get("rope_parameters")
    if not isinstance(held, dict) or not isinstance(given, dict):
        return
    layers = [key for key, value in held.items() if isinstance(value, dict)]
    if layers and given and not any(isinstance(value, dict) for value in given.values()):
        merged = {**held, layers[0]: {**held[layers[0]], **given}} if "full_attention" not in layers else None
        merged = merged or {**held, "full_attention": {**held["full_attention"], **given}}
        document.findings.append(
            Finding(
                rule="block-not-read",
                where=("rope_parameters",),
                words=f"the checkpoint has one block per layer type ({listed(sorted(layers)[:3])}), and this flat one "
                "replaces them all: the model looks for its layers' blocks and stops",
                fix="override one block per layer type",
                changes=(Change(path=("rope_parameters",), value=merged),),
            )
        )


def _not_read(names: list[str], config: Mapping[str, Any], prefix: tuple[str, ...], reason: str) -> Finding:
    moves = [Change(path=(*prefix, "text_config", name), value=config[name]) for name in names]
    return Finding(
        rule="block-not-read",
        where=(*prefix, names[0]),
        words=f"{listed(names)} at the top level: {reason}, and these are not read",
        fix="move into text_config",
        changes=(*moves, *(Change(path=(*prefix, name), value=DELETE) for name in names)),
    )


def _parts(
    document: Document, data: dict[str, Any], prefix: tuple[str, ...], depth: int = 0
) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """The language models of a configuration: its text_config, itself, or what inner configurations hold."""
    text = data.get("text_config")
    if isinstance(text, dict) and (_has_rope(text) or any(key in text for key in IDENTITY)):
        beside = [name for name in BLOCKS if isinstance(data.get(name), dict) and data[name]]
        lost = [name for name in beside if not any(_same(data[name], text.get(other)) for other in BLOCKS)]
        if lost:
            document.findings.append(
                _not_read(lost, data, prefix, "the language model reads text_config")
                if not any(text.get(name) for name in BLOCKS)
                else Finding(
                    rule="block-not-read",
                    where=(*prefix, lost[0]),
                    words=f"{listed(lost)} differs from the block of text_config, which is the one that is read",
                    fix="keep the block in text_config only",
                )
            )
        yield text, (*prefix, "text_config")
        return
    inner = [
        (key, value)
        for key, value in data.items()
        if isinstance(value, dict) and key.endswith("_config") and not any(word in key for word in OTHER_PARTS)
    ]
    if not _has_rope(data) and str(data.get("model_type")) not in ROTARY and depth < 3:
        found = [part for key, value in inner for part in _parts(document, value, (*prefix, key), depth + 1)]
        found = [part for part in found if _has_rope(part[0]) or str(part[0].get("model_type")) in ROTARY]
        if found:
            yield from found
            return
    yield data, prefix


def _same(one: Any, other: Any) -> bool:
    """Whether two blocks say the same, ``type`` being the old name of ``rope_type``."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    return _plainly(one) == _plainly(other)


def _plainly(block: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    found = {key: value for key, value in {**more, **block}.items() if value is not None}
    old = found.pop("type", None)
    found.setdefault("rope_type", old)
    return found


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
        empty = config[name] in (False, 0, "", "null", "none", "None", [])
        document.findings.append(
            Finding(
                rule="block-not-an-object",
                where=(*prefix, name),
                words=f"{name} is {type(config[name]).__name__}, not an object",
                fix="unquote it" if mended is not None else f"{name}: null" if empty else None,
                changes=(Change(path=(*prefix, name), value=mended),) if mended is not None or empty else (),
            )
        )
    present = [name for name in present if config[name]] or present[:1]
    theta = {"rope_theta": config["rope_theta"]} if config.get("rope_theta") is not None else {}
    if len(present) == 2 and _plainly(config["rope_parameters"], **theta) != _plainly(config["rope_scaling"], **theta):
        document.findings.append(
            Finding(
                rule="two-blocks",
                where=(*prefix, "rope_scaling"),
                words="rope_scaling and rope_parameters differ: transformers 5 takes rope_scaling and drops the other",
                fix="keep one",
            )
        )
    if len(present) == 2:
        present = ["rope_scaling"]
    model_type = config.get("model_type")
    layered = LAYERED.get(model_type) if isinstance(model_type, str) and document.kind == "config" else None
    if layered is not None and present != ["rope_parameters"]:
        block = config[present[0]] if present else {}
        inside = {**config, "rope_theta": config.get(layered.full[0])}
        path = (*prefix, *present)
        yield View(
            block=block, path=path, stated=bool(block), layer_type="full_attention", **{**around, "config": inside}
        )
        key, usual = layered.sliding
        block = {**(block if layered.both else {}), "rope_theta": config.get(key, usual)}
        yield View(block=block, path=path, layer_type="sliding_attention", derived=True, **around)
        return
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
    model_type = str(config.get("model_type"))
    if not inner:
        if model_type in LAYERED and document.kind == "config" and block:
            document.findings.append(
                Finding(
                    rule="block-not-read",
                    where=path,
                    words=f"transformers' {model_type} class reads one block per layer type, and not this flat one",
                    fix='"rope_parameters": {"full_attention": {...}, "sliding_attention": {...}}',
                    changes=(Change(path=path, value={"full_attention": dict(block)}),),
                )
            )
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
    if model_type in FLAT_ONLY and document.kind == "config":
        same = all(block[key] == block[inner[0]] for key in inner)
        document.findings.append(
            Finding(
                rule="block-not-read",
                where=path,
                words=f"transformers' {model_type} class reads one flat block: those of {listed(sorted(inner)[:3])} "
                "are not read, or stop it",
                fix="state one flat block",
                changes=(Change(path=path, value=dict(block[inner[0]])),) if same else (),
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
