"""A model folder that is ready to use at the new length, and a page that says how."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from milepost.encodings.frequencies import FrequencyMethod, from_config, merge_scaling
from milepost.extend.doctor import diagnose
from milepost.extend.export import Export, ExportRefused, export
from milepost.stretch.plan import Method
from milepost.sweep import write_atomically

ENGINES = ("transformers", "vllm", "llama.cpp")


def write_folder(
    out: Path,
    source: Path,
    method: Method,
    frequencies: FrequencyMethod | None,
    *,
    trained: int,
    target: int,
    head_dim: int,
    measured: str,
    layer_type: str | None = None,
) -> Path:
    """Copy ``source`` (a model folder) to ``out`` with the method merged into its config.json, and write EXPORT.md.

    The weights are copied as they are. Of config.json only the rope block and max_position_embeddings change; methods
    that a config cannot say leave it as it was, and EXPORT.md tells how they are used instead. The folder appears by
    one rename, complete or not at all.
    """
    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(source, part)
    config = json.loads((part / "config.json").read_text("utf-8"))
    exports, refusals = _exports(frequencies, trained, target, head_dim)
    made = exports.get("transformers")
    if made is not None:
        config = merge_scaling(config, dict(made.rope_parameters), layer_type=layer_type, replace_trained=True)
        config["max_position_embeddings"] = target
        write_atomically(part / "config.json", json.dumps(config, indent=2) + "\n")
        _check(config, frequencies, layer_type)
    findings = diagnose(config)
    write_atomically(part / "EXPORT.md", _page(method, exports, refusals, trained, target, measured, findings.text()))
    if out.exists():
        shutil.rmtree(out)
    part.rename(out)
    return out


def said_by_config(frequencies: FrequencyMethod | None, trained: int, target: int, head_dim: int) -> bool:
    """Whether transformers' config.json can ask for these frequencies."""
    return "transformers" in _exports(frequencies, trained, target, head_dim)[0]


def _exports(
    frequencies: FrequencyMethod | None, trained: int, target: int, head_dim: int
) -> tuple[dict[str, Export], dict[str, str]]:
    made: dict[str, Export] = {}
    refused: dict[str, str] = {}
    for engine in ENGINES:
        if frequencies is None:
            refused[engine] = "the method changes more than frequencies, which no configuration can say"
            continue
        own = getattr(frequencies, "trained_length", None)
        try:
            made[engine] = export(
                frequencies,
                engine,  # type: ignore[arg-type]  # one of ENGINES
                head_dim=head_dim,
                trained_length=None if own else trained,
                target_length=target,
            )
        except (ExportRefused, ValueError) as error:
            refused[engine] = str(error)
    return made, refused


def _check(config: Mapping[str, Any], wanted: FrequencyMethod | None, layer_type: str | None) -> None:
    """The written file, read back, asks for the frequencies that were measured."""
    assert wanted is not None
    length = int(config["max_position_embeddings"])
    found = from_config(config, layer_type=layer_type).frequencies(length).inv_freq
    expected = wanted.frequencies(length).inv_freq
    if found.shape != expected.shape or float(((found - expected) / expected).abs().max()) > 1e-6:
        raise RuntimeError("the config.json that was written does not ask for the frequencies that were measured")


def _page(
    method: Method,
    exports: Mapping[str, Export],
    refusals: Mapping[str, str],
    trained: int,
    target: int,
    measured: str,
    doctor: str,
) -> str:
    options = ", ".join(f"{key}={value!r}" for key, value in method.options.items())
    call = f"milepost.attach(model, {method.spec!r}{', ' + options if options else ''})"
    lines = [
        f"# {method.label}: from {trained} to {target} tokens",
        "",
        measured,
        "",
        "## In Python",
        "",
        "```python",
        "import milepost",
        "",
        call if method.spec is not None else "# the model is used as it is",
        "```",
        "",
    ]
    titles = {"transformers": "transformers", "vllm": "vLLM", "llama.cpp": "llama.cpp"}
    for engine in ENGINES:
        lines += [f"## {titles[engine]}", ""]
        if engine in exports:
            where = "This folder's config.json says it already.\n\n" if engine == "transformers" else ""
            lines += [f"{where}```\n{exports[engine].text()}\n```", ""]
        else:
            lines += [f"Not possible: {refusals[engine]}", ""]
            if engine == "llama.cpp" and method.name == "self-extend":
                group, window = method.options["group"], method.options["window"]
                lines += [f"An approximation by shifting the cache: `--grp-attn-n {group} --grp-attn-w {window}`.", ""]
    lines += ["## What the doctor says of config.json", "", "```", doctor, "```", ""]
    return "\n".join(lines)
