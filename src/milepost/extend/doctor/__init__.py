"""The doctor: what a configuration will make each engine do, what is wrong with it, why, and the corrected text.

    >>> report = diagnose({"rope_scaling": {"rope_type": "yarn", "factor": "4.0"}})
    >>> report.verdict
    'error'
    >>> [finding.rule for finding in report.findings][0]
    'not-a-number'

Any JSON whatever gets a verdict. Nothing in a file is executed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from milepost.encodings.frequencies import check_inv_freq, from_config
from milepost.encodings.frequencies.config import THETA_KEYS
from milepost.extend.doctor.check_model import BLOCKS, block_of, theta_of
from milepost.extend.doctor.checks import CHECKS
from milepost.extend.doctor.findings import Change, Finding, View, apply, as_its_class_reads, number, whole
from milepost.extend.doctor.gguf import check_gguf, check_gguf_layout, gguf_statements
from milepost.extend.doctor.layout import (
    LayoutGuess,
    expected_layout,
    folder_projections,
    guess_layout,
    model_projections,
)
from milepost.extend.doctor.rules import RULES, Rule, Severity, pages
from milepost.extend.doctor.sources import Document, Kind, SourceError, read, views
from milepost.extend.doctor.statements import statements

__all__ = [
    "RULES",
    "Finding",
    "LayoutGuess",
    "Report",
    "Rule",
    "SourceError",
    "as_its_class_reads",
    "diagnose",
    "guess_layout",
    "pages",
    "write_fixed",
]

ORDER: dict[Severity, int] = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True, kw_only=True)
class Report:
    """The doctor's answer.

    ``findings``: errors first. ``engines``: for each block, sentences for transformers, vLLM, llama.cpp, and "reach".
    ``corrected``: the document with every cure applied that needs no knowledge beyond the file; None where none does.
    ``left``: ids of errors and warnings that the corrected document still has.
    """

    source: str
    kind: Kind
    findings: tuple[Finding, ...]
    engines: Mapping[str, Mapping[str, tuple[str, ...]]]
    corrected: Any = None
    left: tuple[str, ...] = ()
    path: Path | None = None

    @property
    def verdict(self) -> Literal["clean", "warning", "error"]:
        """The worst severity; notes count as clean."""
        found = {finding.severity for finding in self.findings}
        return "error" if "error" in found else "warning" if "warning" in found else "clean"

    @property
    def exit_code(self) -> int:
        """1 for errors, else 0."""
        return int(self.verdict == "error")

    def rules(self) -> tuple[str, ...]:
        """The ids found."""
        return tuple(finding.rule for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for --json."""
        return {
            "source": self.source,
            "kind": self.kind,
            "verdict": self.verdict,
            "findings": [finding.to_dict() for finding in self.findings],
            "engines": {
                block: {name: list(lines) for name, lines in engines.items()} for block, engines in self.engines.items()
            },
            "corrected": self.corrected,
            "left": list(self.left),
        }

    def text(self) -> str:
        """The report in words."""
        lines = [f"{self.source}: {self.verdict}"]
        for finding in self.findings:
            where = f" at {'.'.join(finding.where)}" if finding.where else ""
            lines += ["", f"{finding.severity} [{finding.rule}]{where}", f"  {finding.words}"]
            if finding.fix:
                lines.append(f"  fix: {finding.fix}")
            lines.append(f"  why: {RULES[finding.rule].why}")
        for block, engines in self.engines.items():
            lines += ["", f"What happens{f' ({block})' if block else ''}:"]
            lines += [f"  {name}: {line}" for name, found in engines.items() for line in found]
        if self.corrected is not None:
            title = f"Corrected, except for {', '.join(self.left)}:" if self.left else "Corrected:"
            lines += ["", title, json.dumps(_rope_part(self.corrected), indent=2)]
        return "\n".join(lines).encode("utf-8", "backslashreplace").decode("utf-8")


def _rope_part(document: Any) -> Any:
    """The keys of a configuration that concern positions."""
    if not isinstance(document, dict):
        return document
    if isinstance(document.get("text_config"), dict) and not any("rope" in key for key in document):
        return {"text_config": _rope_part(document["text_config"])}
    words = ("rope", "rotary", "position", "head_dim", "factor", "type")
    return {key: value for key, value in document.items() if any(word in key for word in words)} or document


def diagnose(
    source: Any,
    *,
    kind: Kind | None = None,
    checkpoint: Any = None,
    replace_trained: bool = False,
) -> Report:
    """Look at a configuration, a folder, a GGUF file, an override, a mapping or a loaded model.

    ``kind`` says what the document is where it does not show: "config", "parameters" (a bare rope block), "override"
    (vLLM's --hf-overrides; JSON text is taken for one) or "gguf". ``checkpoint``: the configuration that an override
    applies to. ``replace_trained=True``: replacing a trained scaling is meant.
    Raises `SourceError` when there is nothing to read at ``source``.
    """
    before = read(checkpoint).data if checkpoint is not None else None
    base = before if isinstance(before, dict) else None
    document = read(source, kind)
    findings, engines = _examine(document, base, replace_trained)
    if document.kind != "gguf":
        findings += _model_findings(document)
    corrected = _corrected(document, base, replace_trained, findings)
    left: list[Finding] = []
    if corrected is not None:
        again = Document(label=document.label, kind=document.kind, data=corrected)
        left = [finding for finding in _examine(again, base, replace_trained)[0] if finding.severity != "note"]
    found = sorted(findings, key=lambda finding: ORDER[finding.severity])
    return Report(
        source=document.label,
        kind=document.kind,
        findings=tuple(found),
        engines=engines,
        corrected=corrected,
        left=tuple(dict.fromkeys(finding.rule for finding in left)),
        path=document.path,
    )


def _examine(
    document: Document, checkpoint: Mapping[str, Any] | None, replace_trained: bool
) -> tuple[list[Finding], dict[str, dict[str, tuple[str, ...]]]]:
    engines: dict[str, dict[str, tuple[str, ...]]] = {}
    if document.kind == "gguf":
        found = list(document.findings)
        if isinstance(document.data, dict):
            keys = document.data
            found += check_gguf(keys, document.tensors, document.beside)
            head_dim = whole(keys.get("attention.key_length")) or whole(keys.get("rope.dimension_count"))
            if document.projections and head_dim:
                guess = guess_layout(document.projections, head_dim, whole(keys.get("rope.dimension_count")))
                found += check_gguf_layout(keys.get("general.architecture"), guess)
            engines[""] = _tuples(gguf_statements(document.data, document.tensors))
        return found, engines
    checked: list[Finding] = []
    for view in views(document, checkpoint, replace_trained):
        for check in () if view.derived else CHECKS:
            checked += check(view)
        said = statements(_over(view))
        if said:
            engines[view.layer_type or ""] = _tuples(said)
    return _distinct([*document.findings, *checked]), engines


def _over(view: View) -> View:
    """The view as vLLM has it after an override, for the sentences only.

    A block at the top replaces the checkpoint's, its base included; inside text_config keys are merged; without a block
    the checkpoint's stays, its base too, whatever rope_theta stands beside.
    """
    if view.kind != "override" or view.checkpoint is None:
        return view
    around = {key: value for key, value in view.checkpoint.items() if key not in (*BLOCKS, *THETA_KEYS)}
    held = block_of(view.checkpoint)
    trained = theta_of(view.checkpoint)
    beside = {key: value for key, value in view.config.items() if key not in (*BLOCKS, *THETA_KEYS)}
    replaced = view.stated or any(name in view.config for name in BLOCKS)
    if view.config_path and not any(isinstance(value, dict) for value in held.values()):
        block = {**held, **({} if trained is None else {"rope_theta": trained}), **view.block}
    elif replaced:
        lost = None if view.path[-1:] == ("rope_scaling",) else 10000.0
        block = {"rope_theta": lost, **view.block} if view.stated else {"rope_type": "default", "rope_theta": 10000.0}
    else:
        named = {"rope_type": held.get("rope_type", held.get("type", "default"))}
        block = {**held, **named, **({} if trained is None else {"rope_theta": trained})}
    stated = {"config": {**around, **beside}, "block": block, "path": view.path or ("rope_parameters",)}
    return View(**{**view.__dict__, **stated, "stated": bool(block), "trained_base": number(trained)})


def _tuples(lines: Mapping[str, list[str]]) -> dict[str, tuple[str, ...]]:
    return {name: tuple(found) for name, found in lines.items()}


def _distinct(findings: list[Finding]) -> list[Finding]:
    """Each rule once a place: blocks per layer type share the configuration around them."""
    seen: dict[tuple[str, tuple[str, ...]], Finding] = {}
    for finding in findings:
        seen.setdefault((finding.rule, finding.where), finding)
    return list(seen.values())


def _corrected(
    document: Document, checkpoint: Mapping[str, Any] | None, replace_trained: bool, findings: list[Finding]
) -> Any:
    """The document after every change, repeated until nothing changes: one cure can bring the next fault to light."""
    changes = _changes(findings)
    if document.kind == "gguf" or not (changes or document.rewritten):
        return None
    data = document.data
    for _ in range(6):
        data = apply(data, changes)
        again = Document(label=document.label, kind=document.kind, data=data)
        changes = _changes(_examine(again, checkpoint, replace_trained)[0])
        if not changes:
            break
    return data if document.rewritten or _differ(data, document.data) else None


def _differ(one: Any, other: Any) -> bool:
    """Whether two documents are written differently: 4 and 4.0 are."""
    try:
        return repr(one) != repr(other)
    except RecursionError:
        return bool(one != other)


def _changes(findings: list[Finding]) -> list[Change]:
    return [change for finding in findings for change in finding.changes]


def _model_findings(document: Document) -> list[Finding]:
    """What only weights and buffers tell: the pairs' layout, the precision and the value of inv_freq."""
    data, model = document.data, document.model
    if not isinstance(data, dict):
        return []
    found = list(_buffers(model)) if model is not None else []
    weights = model_projections(model) if model is not None else None
    if weights is None and document.path is not None and any(document.path.parent.glob("*.safetensors")):
        weights = folder_projections(document.path.parent)
    view = next(iter(views(Document(label="", data=data), None, True)), None)
    if weights is None or view is None or view.head_dim is None or view.rotary_dim is None:
        return found
    model_type = view.config.get("model_type")
    guess = guess_layout(weights, view.head_dim, view.rotary_dim)
    wanted = expected_layout(model_type, view.config)
    if guess.layout is not None and guess.layout != wanted:
        found.append(
            Finding(
                rule="layout-mismatch",
                words=f"the weights couple {guess.layout} pairs (scores: half {guess.half:.2f}, interleaved "
                f"{guess.interleaved:.2f}); transformers' {model_type} rotates {wanted} pairs",
                fix="permute the rows of the query and key projections within each head",
            )
        )
    return found


def _buffers(model: Any) -> Iterator[Finding]:
    method = None
    try:
        method = from_config(model.config)
    except ValueError:
        pass  # the block's own findings say why
    for name, buffer in model.named_buffers():
        if not name.rpartition(".")[2] == "inv_freq":
            continue
        if buffer.dtype in (torch.bfloat16, torch.float16):
            yield Finding(
                rule="phases-half",
                where=(name,),
                words=f"{name} is {str(buffer.dtype).removeprefix('torch.')}: phases drift by radians within thousands "
                "of positions",
                fix="load with dtype=, or recompute inv_freq in float32 after casting",
            )
        elif method is not None and not method.length_dependent and not buffer.is_meta:
            try:
                check_inv_freq(method, buffer)
            except ValueError as error:
                yield Finding(rule="inv-freq-wrong", where=(name,), words=str(error))


def write_fixed(report: Report, path: Path | None = None) -> Path:
    """Write the corrected document beside the one that was read, never over anything; returns where.

    Raises ValueError when there is nothing to correct, FileExistsError when ``path`` is given and exists.
    """
    if report.corrected is None:
        raise ValueError(f"{report.source}: nothing that can be corrected without knowing the model")
    if path is None:
        start = report.path or Path("config.json")
        names = [f"{start.stem}.fixed{start.suffix or '.json'}"]
        names += [f"{start.stem}.fixed-{n}{start.suffix or '.json'}" for n in range(2, 1000)]
        path = next(start.with_name(name) for name in names if not start.with_name(name).exists())
    with path.open("x", encoding="utf-8") as file:
        json.dump(report.corrected, file, indent=2)
        file.write("\n")
    return path
