"""What will happen at which length, engine by engine, in words computed from the engines' own formulas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from milepost.encodings.frequencies import Default, Frequencies, from_config, usable_length
from milepost.extend.doctor.findings import View, number
from milepost.extend.engines import (
    EngineError,
    llama_cpp_frequencies,
    transformers_frequencies,
    vllm_frequencies,
    vllm_max_model_len,
    vllm_table_length,
)
from milepost.extend.export import ExportRefused, export, llama_cpp_rope

ASSUMED_HEAD_DIM = 128


def describe(found: Frequencies, base: float) -> str:
    """A set of frequencies in words: pairs kept, pairs stretched, the attention factor."""
    inv_freq = found.inv_freq.flatten()
    plain = Default(rotary_dim=2 * inv_freq.numel(), base=base).frequencies().inv_freq
    stretch = plain / inv_freq
    moving = torch.isfinite(stretch)
    kept = int((stretch[moving] < 1 + 1e-6).sum())
    words = f"{kept} of {inv_freq.numel()} pairs as trained"
    if kept < int(moving.sum()):
        low, high = float(stretch[moving].min()), float(stretch[moving].max())
        words += f", slowed by up to {high:.4g}" if low < 1 + 1e-6 else f", slowed by {low:.4g} to {high:.4g}"
    still = int((~moving).sum())
    if still:
        words += f", {still} pairs not rotating"
    attention = found.attention_factor
    attention = float(attention.flatten()[0]) if isinstance(attention, torch.Tensor) else float(attention)
    return words if attention == 1.0 else f"{words}; cosine and sine times {attention:.5g}"


def statements(view: View) -> dict[str, list[str]]:
    """For each engine, sentences about this block. Empty where sizes are missing or implausible."""
    base = number(view.theta) if view.theta is not None else 10000.0
    head_dim = view.head_dim or ASSUMED_HEAD_DIM
    if base is None or base <= 1 or base > 1e30 or not 2 <= head_dim <= 4096 or head_dim % 2:
        return {}
    if view.partial is not None and not 0 < view.partial <= 1:
        return {}
    longest = view.max_length or view.original
    if longest is None or longest > 2**40:
        return {}
    lines: dict[str, list[str]] = {}
    for engine, tell in (("transformers", _transformers), ("vllm", _vllm), ("llama.cpp", _llama_cpp)):
        lines[engine] = _safely(partial(tell, view, head_dim, longest, base))
    reach = _safely(lambda: [usable_length(dict(view.config), layer_type=view.layer_type).rule])
    if view.kind != "parameters" and not reach[0].startswith("stops"):
        lines["reach"] = reach
    return lines


def _safely(tell: Callable[[], list[str]]) -> list[str]:
    """What an engine does, or that it stops; a check of numbers has already named the cause."""
    try:
        return tell()
    except (EngineError, ExportRefused) as error:
        return [f"stops or cannot: {error}"]
    except (ValueError, TypeError, KeyError, ZeroDivisionError, OverflowError, RuntimeError, AttributeError) as error:
        return [f"stops: {type(error).__name__}: {str(error)[:160]}"]


def _lengths(view: View, longest: int) -> list[int]:
    """Lengths at which to ask: the trained one, just past it, the declared one."""
    marks = {longest}
    if view.original:
        marks |= {view.original, view.original + 1}
    if view.type == "dynamic":
        marks |= {2 * longest}
    return sorted(marks)


def _transformers(view: View, head_dim: int, longest: int, base: float) -> list[str]:
    block = {"rope_theta": base, **view.block}
    if view.partial is not None:
        block.setdefault("partial_rotary_factor", view.partial)
    top = view.get("original_max_position_embeddings") if view.path != view.config_path else None
    said: list[tuple[int, str]] = []
    for length in _lengths(view, longest):
        found = transformers_frequencies(
            block,
            head_dim=head_dim,
            max_position_embeddings=longest,
            length=length,
            original_at_top=top,
            nested=view.layer_type is not None,
        )
        words = describe(found, base)
        if not said or said[-1][1] != words:
            said.append((length, words))
    if len(said) == 1:
        return [f"at every length: {said[0][1]}"]
    return [f"at {length} tokens: {words}" for length, words in said]


def _vllm(view: View, head_dim: int, longest: int, base: float) -> list[str]:
    block = {"rope_theta": base, **view.block}
    if view.partial is not None:
        block.setdefault("partial_rotary_factor", view.partial)
    if view.kind == "override" and view.path == ("rope_parameters",) and "rope_type" not in view.block:
        raise EngineError("KeyError: 'rope_type' (an override is not brought into today's form, as a file is)")
    top = view.get("original_max_position_embeddings") if view.path != view.config_path else None
    model_type = str(view.config.get("model_type"))
    reach = vllm_max_model_len(block, longest, original_at_top=top, model_type=model_type)
    found = vllm_frequencies(block, head_dim=head_dim, max_position_embeddings=longest, max_model_len=reach)
    lines = [f"max_model_len {reach} by itself; at every length: {describe(found, base)}"]
    rows = vllm_table_length(block, longest)
    if rows < reach:
        lines.append(f"its table ends at {rows}: longer input reads past the end, so pass --max-model-len {rows}")
    if view.type == "dynamic" and "alpha" not in view.block:
        lines.append("its dynamic type is one static base for every length, and scales by max_trained_positions only")
    if view.type == "longrope" and view.block.get("attention_factor") is not None:
        lines.append("attention_factor is not read: short_mscale and long_mscale are, or sqrt(1 + ln s / ln L)")
    if view.type == "yarn" and "mrope_section" in view.block:
        lines.append(
            "with an mrope_section its range is taken from 4 times the original length (Qwen3-VL's and Qwen3.5's "
            "classes: once, unless video is pruned)"
        )
    return lines


def _llama_cpp(view: View, head_dim: int, longest: int, base: float) -> list[str]:
    block: dict[str, Any] = {"rope_theta": base, **view.block}
    if view.partial is not None:
        block.setdefault("partial_rotary_factor", view.partial)
    if view.original is not None and view.type in ("yarn", "llama3", "longrope"):
        block["original_max_position_embeddings"] = view.original
    try:
        method = from_config(block, head_dim=head_dim, max_position_embeddings=longest)
    except ValueError as error:
        return [f"not told, because the block is not clear: {error}"]
    trained = getattr(method, "trained_length", None) or longest
    made = export(method, "llama.cpp", head_dim=head_dim, trained_length=trained, target_length=longest)
    found = llama_cpp_frequencies(llama_cpp_rope(made.gguf_keys, made.gguf_tensors), n_ctx=longest)
    lines = [f"with a context of {longest}: {describe(found, base)}"]
    if made.flags:
        lines.append("by flags: " + " ".join(made.flags))
    else:
        stored = [*(key for key in made.gguf_keys if "scaling" in key), *made.gguf_tensors]
        lines.append(f"needs {', '.join(stored)} in the GGUF file; no flag does it")
    return lines
