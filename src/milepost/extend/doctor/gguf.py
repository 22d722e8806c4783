"""Checks of GGUF metadata, alone and against the config.json beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from milepost.encodings.frequencies import from_config, rope_fields
from milepost.extend.doctor.findings import Finding, as_its_class_reads, figure, number, whole
from milepost.extend.doctor.layout import Layout, LayoutGuess
from milepost.extend.doctor.statements import describe
from milepost.extend.engines import EngineError, llama_cpp_frequencies
from milepost.extend.export import llama_cpp_rope

KNOWN = ("none", "linear", "yarn", "longrope")

PAIRS: dict[str, Layout] = {
    "llama": "interleaved",
    **dict.fromkeys(("qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "gptneox", "stablelm", "olmo2"), "half"),
}
"""Channels that llama.cpp rotates together, by architecture: its converter permutes llama's rows."""


def check_gguf(
    keys: Mapping[str, Any], tensors: Mapping[str, Any], config: Mapping[str, Any] | None
) -> Iterator[Finding]:
    """Findings about rope keys (without the architecture's prefix) and rope tensors."""
    base = keys.get("rope.freq_base")
    if base is None:
        stated = _config_value(config, "theta")
        yield Finding(
            rule="gguf-base-missing",
            where=("rope.freq_base",),
            words="rope.freq_base is missing: llama.cpp takes 10000"
            + (f", config.json says {figure(stated)}" if number(stated) else ""),
            fix="gguf_set_metadata cannot add a key: convert again, or pass --rope-freq-base "
            + (f"{figure(stated)}" if number(stated) else "BASE"),
        )
    elif number(base) is None or base <= 1:
        yield Finding(
            rule="number-out-of-range", where=("rope.freq_base",), words=f"rope.freq_base is {base}, must be above 1"
        )
    kind = keys.get("rope.scaling.type")
    factor, original = keys.get("rope.scaling.factor"), keys.get("rope.scaling.original_context_length")
    if kind is not None and kind not in KNOWN:
        yield Finding(
            rule="gguf-scaling-unknown",
            where=("rope.scaling.type",),
            words=f"rope.scaling.type {kind!r} is none of {', '.join(KNOWN)}",
        )
    missing = []
    if kind in ("linear", "yarn") and number(factor) is None:
        missing.append("rope.scaling.factor")
    if kind in ("yarn", "longrope") and whole(original) is None:
        missing.append("rope.scaling.original_context_length")
    if kind == "longrope" and not tensors:
        missing.append("rope_factors_long.weight and rope_factors_short.weight")
    for key in missing:
        context = keys.get("context_length")
        yield Finding(
            rule="gguf-scaling-incomplete",
            where=(key,),
            words=f"rope.scaling.type is {kind} and {key} is missing"
            + (f": llama.cpp measures against {context}" if "original" in key and context else ""),
        )
    stretch = number(factor)
    if stretch is not None and stretch < 1 and stretch != 0:
        yield Finding(
            rule="factor-below-one",
            where=("rope.scaling.factor",),
            words=f"rope.scaling.factor is {figure(stretch)}: pairs turn faster than in training",
        )
    positive = ("rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow")
    for key in positive:
        value = keys.get(key)
        if value is not None and (number(value) is None or value <= 0):
            yield Finding(rule="number-out-of-range", where=(key,), words=f"{key} is {value}, must be above 0")
    fast = number(keys.get("rope.scaling.yarn_beta_fast", 32.0))
    slow = number(keys.get("rope.scaling.yarn_beta_slow", 1.0))
    if kind == "yarn" and fast is not None and slow is not None and fast < slow:
        yield Finding(
            rule="range-backwards",
            where=("rope.scaling.yarn_beta_fast",),
            words=f"rope.scaling.yarn_beta_fast {fast:g} is below yarn_beta_slow {slow:g}",
        )
    context, known = whole(keys.get("context_length")), whole(original)
    if kind == "yarn" and context and known and stretch is not None and stretch >= 1:
        if round(known * stretch) != context:
            yield Finding(
                rule="length-mismatch",
                where=("context_length",),
                words=f"rope.scaling.factor {stretch:g} x original_context_length {known} reaches "
                f"{round(known * stretch)}, context_length says {context}",
            )
    for name, values in tensors.items():
        bad = next((value for value in values if number(value) is None or value <= 0), None)
        if bad is not None:
            yield Finding(
                rule="number-out-of-range",
                where=(name,),
                words=f"{name} holds {bad}: every divisor must be a number above 0",
            )
        dim = whole(keys.get("rope.dimension_count"))
        if dim is not None and len(values) != dim // 2:
            yield Finding(
                rule="list-length", where=(name,), words=f"{name} has {len(values)} numbers for {dim // 2} pairs"
            )
    if config is not None:
        yield from _against_config(keys, tensors, as_its_class_reads(config))


def check_gguf_layout(architecture: Any, guess: LayoutGuess) -> Iterator[Finding]:
    """Rows of the query and key projections stand as llama.cpp rotates them."""
    wanted = PAIRS.get(str(architecture))
    if wanted is not None and guess.layout is not None and guess.layout != wanted:
        yield Finding(
            rule="layout-mismatch",
            words=f"the weights couple {guess.layout} pairs (scores: half {guess.half:.2f}, interleaved "
            f"{guess.interleaved:.2f}); llama.cpp rotates {wanted} pairs for {architecture}",
            fix="convert again with the converter of llama.cpp, which permutes the rows",
        )


def _config_value(config: Mapping[str, Any] | None, name: str) -> Any:
    if config is None:
        return None
    try:
        return getattr(rope_fields(config), name)
    except ValueError:
        return None


def _against_config(
    keys: Mapping[str, Any], tensors: Mapping[str, Any], config: Mapping[str, Any]
) -> Iterator[Finding]:
    found_any = False
    pairs = (
        ("rope.freq_base", "rope_theta", _config_value(config, "theta")),
        ("context_length", "max_position_embeddings", _config_value(config, "max_length")),
        ("rope.dimension_count", "head_dim", _rotary(config)),
        ("rope.scaling.original_context_length", "original_max_position_embeddings", _original(config)),
    )
    for key, name, stated in pairs:
        found = number(keys.get(key))
        wanted = number(stated)
        if found is not None and wanted is not None and not math.isclose(found, wanted, rel_tol=1e-6):
            found_any = True
            yield Finding(
                rule="gguf-config-disagree",
                where=(key,),
                words=f"{key} is {figure(found)}, {name} of config.json is {figure(wanted)}",
            )
    if not found_any:
        yield from _frequencies_against(keys, tensors, config)


def _frequencies_against(
    keys: Mapping[str, Any], tensors: Mapping[str, Any], config: Mapping[str, Any]
) -> Iterator[Finding]:
    """The frequencies themselves: a scaling that one of the two files has and the other has not."""
    context = whole(keys.get("context_length"))
    try:
        method = from_config(config)
        wanted = method.frequencies(context)
        dim = 2 * wanted.inv_freq.numel()
        base = float(keys["rope.freq_base"])
        complete = {"rope.dimension_count": dim, **keys}
        found = llama_cpp_frequencies(llama_cpp_rope(complete, tensors), n_ctx=context)
        ours, theirs = wanted.inv_freq.flatten(), found.inv_freq.flatten()
        if ours.shape == theirs.shape and bool(((ours - theirs).abs() <= 1e-4 * ours.abs()).all()):
            return
    except (ValueError, TypeError, KeyError, ZeroDivisionError, OverflowError, RuntimeError):
        return  # what is wrong with one of them is found elsewhere
    yield Finding(
        rule="gguf-config-disagree",
        where=("rope.scaling.type",),
        words=f"llama.cpp computes {describe(found, base)}; config.json asks for {describe(wanted, base)}",
        fix="convert again from the checkpoint that config.json belongs to",
    )


def _rotary(config: Mapping[str, Any]) -> Any:
    head_dim, partial = _config_value(config, "head_dim"), _config_value(config, "partial")
    return head_dim * partial if number(head_dim) and number(partial) else head_dim


def _original(config: Mapping[str, Any]) -> Any:
    return _config_value(config, "original_length")


def gguf_statements(keys: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, list[str]]:
    """What llama.cpp makes of these keys."""
    base = number(keys.get("rope.freq_base")) or 10000.0
    context = whole(keys.get("context_length"))
    dim = whole(keys.get("rope.dimension_count"))
    if dim is None:
        width, heads = whole(keys.get("embedding_length")), whole(keys.get("attention.head_count"))
        dim = width // heads if width and heads else None
    if context is None or dim is None or dim % 2 or not 2 <= dim <= 4096 or base <= 1:
        return {}
    complete = {**keys, "rope.freq_base": base, "rope.dimension_count": dim, "context_length": context}
    try:
        found = llama_cpp_frequencies(llama_cpp_rope(complete, tensors), n_ctx=context)
    except (EngineError, ValueError, TypeError, ZeroDivisionError, OverflowError) as error:
        return {"llama.cpp": [f"stops: {error}"]}
    return {"llama.cpp": [f"with a context of {context}: {describe(found, base)}"]}
