"""What will happen at which length, engine by engine, in words computed from the engines' own formulas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from milepost.encodings.frequencies import NTK, Default, Frequencies, from_config, usable_length
from milepost.encodings.frequencies.config import MODEL_KEYS
from milepost.extend.doctor.classes import ALPHA, FLAT_ONLY, IGNORES_PARTIAL, LAYERED, MROPE, NULL_HEAD_DIM_STOPS, SU
from milepost.extend.doctor.findings import View
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
    """A set of frequencies in words, against the ladder of ``base``: pairs kept, stretched, the attention factor."""
    inv_freq = found.inv_freq.flatten()
    plain = Default(rotary_dim=2 * inv_freq.numel(), base=base).frequencies().inv_freq
    stretch = plain / inv_freq
    moving = torch.isfinite(stretch)
    slowed, faster = stretch[moving & (stretch > 1 + 1e-6)], stretch[moving & (stretch < 1 - 1e-6) & (stretch > 0)]
    backwards = int((moving & (stretch < 0)).sum())
    kept = int(moving.sum()) - slowed.numel() - faster.numel() - backwards
    words = f"{kept} of {inv_freq.numel()} pairs as trained"
    if slowed.numel():
        low, high = float(slowed.min()), float(slowed.max())
        words += f", slowed by {low:.4g} to {high:.4g}" if not kept else f", slowed by up to {high:.4g}"
    if faster.numel():
        words += f", {faster.numel()} pairs faster, by up to {1 / float(faster.min()):.4g}"
    if backwards:
        words += f", {backwards} pairs turning backwards"
    still = int((~moving).sum())
    if still:
        words += f", {still} pairs not rotating"
    attention = found.attention_factor
    attention = float(attention.flatten()[0]) if isinstance(attention, torch.Tensor) else float(attention)
    return words if attention == 1.0 else f"{words}; cosine and sine times {attention:.5g}"


def statements(view: View) -> dict[str, list[str]]:
    """For each engine, sentences about this block. Empty without rotary positions, or where sizes are implausible."""
    base, head_dim = view.base, view.head_dim or ASSUMED_HEAD_DIM
    if not view.rotary:
        return {}
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
    around = {key: value for key, value in view.config.items() if key not in ("rope_scaling", "text_config")}
    reach = _safely(lambda: [usable_length({**around, "rope_parameters": dict(view.block) or None}).rule])
    stretches = view.factor is None or view.factor >= 1
    if view.kind != "parameters" and stretches and not reach[0].startswith("stops"):
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
    original = view.original if view.layer_type else view.original_at_top or view.original
    if original:
        marks |= {original, original + 1}
    if view.type == "dynamic":
        marks |= {2 * longest}
    return sorted(marks)


def _block(view: View, base: float) -> dict[str, Any]:
    """The block with the base and the rotated share filled in from around it, as a file's is on reading."""
    block = {"rope_theta": base, **view.block}
    if view.kind == "config" and view.model_type in FLAT_ONLY and view.layer_type is not None:
        raise EngineError(f"the {view.model_type} class reads one flat block, and not one per layer type")
    if view.kind == "config" and view.model_type in LAYERED and view.layer_type is None and view.stated:
        raise EngineError(f"the {view.model_type} class reads one block per layer type, and not this flat one")
    if block["rope_theta"] is None:
        raise EngineError("TypeError: rope_theta is null (it is there, so the base beside the block is not taken)")
    if view.partial is not None:
        block.setdefault("partial_rotary_factor", view.partial)
    return block


def _as_read(view: View, base: float) -> dict[str, Any]:
    """The block as transformers' class reads it, legacy names resolved where that class resolves them."""
    block = _block(view, base)
    kind = block.get("rope_type", block.get("type", "default"))
    stated = view.get("max_position_embeddings")
    if stated is not None and not isinstance(stated, int):
        raise EngineError(f"max_position_embeddings is {stated!r}: whole numbers only")
    null = "head_dim" in view.config and view.config["head_dim"] is None and view.model_type in NULL_HEAD_DIM_STOPS
    if null and kind in ("yarn", "dynamic", "longrope"):
        raise EngineError("TypeError: head_dim is null")
    for key in ("rope_type", "partial_rotary_factor", "original_max_position_embeddings"):
        if key in block and block[key] is None and not (key.startswith("original") and view.original_at_top):
            raise EngineError(f"TypeError: {key} is null")
    if kind == "mrope" and view.model_type in MROPE:
        kind = "default"
    if kind in ("su", "yarn") and view.model_type in SU:
        if kind == "su" and "original_max_position_embeddings" not in view.block:
            raise EngineError("KeyError: 'original_max_position_embeddings' is missing in the block")
        kind = "longrope"
        if not {"short_factor", "long_factor"} <= set(block):
            raise EngineError(f"KeyError: {view.model_type} reads yarn as longrope; its two lists are missing")
    return {**{key: value for key, value in block.items() if key != "type"}, "rope_type": kind}


def _transformers(view: View, head_dim: int, longest: int, base: float) -> list[str]:
    block = _as_read(view, base)
    if block["rope_type"] == "dynamic" and "alpha" in block and view.model_type in ALPHA:
        alpha = NTK(rotary_dim=head_dim, base=base, factor=float(block["alpha"])).frequencies()
        return [f"up to {longest} tokens: {describe(alpha, base)}"]
    said: list[tuple[int, str]] = []
    for length in _lengths(view, longest):
        found = transformers_frequencies(
            block,
            head_dim=head_dim,
            max_position_embeddings=longest,
            length=length,
            original_at_top=view.original_at_top,
            nested=view.layer_type is not None,
            honours_partial=view.model_type not in IGNORES_PARTIAL,
        )
        words = describe(found, view.trained_base or base)
        if not said or said[-1][1] != words:
            said.append((length, words))
    if len(said) == 1:
        return [f"at every length: {said[0][1]}"]
    return [f"at {length} tokens: {words}" for length, words in said]


def _vllm(view: View, head_dim: int, longest: int, base: float) -> list[str]:
    block = _block(view, base)
    if view.kind == "override" and view.path == ("rope_parameters",) and "rope_type" not in view.block:
        raise EngineError("KeyError: 'rope_type' (an override is not brought into today's form, as a file is)")
    top = view.original_at_top
    if view.kind != "override" and view.type in ("yarn", "llama3", "longrope"):  # read by transformers' own class
        original = view.block.get("original_max_position_embeddings")
        original = longest if original is None else original
        block["original_max_position_embeddings"] = original if top is None or view.layer_type else top
    reach = vllm_max_model_len(block, longest, original_at_top=top, model_type=view.model_type)
    found = vllm_frequencies(block, head_dim=head_dim, max_position_embeddings=longest, max_model_len=reach)
    lines = [f"max_model_len {reach} by itself; at every length: {describe(found, view.trained_base or base)}"]
    rows = vllm_table_length(block, longest)
    if 0 < rows < reach:
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
    foreign = MODEL_KEYS.get(view.model_type, frozenset())
    block = {key: value for key, value in _block(view, base).items() if key not in foreign}
    if view.original is not None and view.type in ("yarn", "llama3", "longrope"):
        block["original_max_position_embeddings"] = view.original
    try:
        method = from_config(block, head_dim=head_dim, max_position_embeddings=longest)
    except ValueError as error:
        return [f"not told, because the block is not clear: {error}"]
    trained = getattr(method, "trained_length", None) or longest
    made = export(method, "llama.cpp", head_dim=head_dim, trained_length=trained, target_length=longest)
    found = llama_cpp_frequencies(llama_cpp_rope(made.gguf_keys, made.gguf_tensors), n_ctx=longest)
    lines = [f"with a context of {longest}: {describe(found, view.trained_base or base)}"]
    if made.flags:
        lines.append("by flags: " + " ".join(made.flags))
    else:
        stored = [*(key for key in made.gguf_keys if "scaling" in key), *made.gguf_tensors]
        lines.append(f"needs {', '.join(stored)} in the GGUF file; no flag does it")
    return lines
