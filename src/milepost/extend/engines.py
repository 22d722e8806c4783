"""What transformers, vLLM and llama.cpp make of a rope block: their formulas, silent rules included, in float64.

These are written from the engines' published behaviour, not from this library's methods, so that an export can be read
back and a configuration judged as the engine would judge it. `transformers_frequencies` is compared with the executed
library in the tests; vLLM and llama.cpp do not install everywhere and are compared with their formulas only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from milepost.encodings.frequencies import Frequencies

ENGINES = ("transformers", "vllm", "llama.cpp")

TRANSFORMERS_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
VLLM_TYPES = (
    *("default", "linear", "ntk", "dynamic", "yarn", "longrope", "llama3", "proportional"),
    *("deepseek_yarn", "deepseek_llama_scaling", "mllama4", "bailing_mrope", "openpangu"),
    "xdrope",  # before 0.33
)
VLLM_LEGACY = {"su": "longrope", "mrope": "default"}
"""Rope types that vLLM renames when it reads a file (not in an override)."""


class EngineError(ValueError):
    """The engine would stop with an error on this block; the text says which."""


def _plain(dim: int, base: float) -> Tensor:
    """The ladder; an odd rotary dimension gets the pair that it has half of, as in both engines."""
    return torch.tensor([base ** (-(2.0 * p) / dim) for p in range((dim + 1) // 2)], dtype=torch.float64)


def _number(block: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = block.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise EngineError(f"{key} is {value!r}, not a number")
    return float(value)


def _mscale(scale: float, mscale: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _index_ramp(dim: int, base: float, original: float, fast: float, slow: float, truncate: bool) -> Tensor:
    """Interpolated share of each pair: 0 up to the pair with ``fast`` turns, 1 from the pair with ``slow`` turns."""

    def pair(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair(fast), pair(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    return ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)


def _yarn(dim: int, base: float, block: Mapping[str, Any], truncate: bool) -> Tensor:
    factor, original = _number(block, "factor"), _number(block, "original_max_position_embeddings")
    fast, slow = block.get("beta_fast") or 32, block.get("beta_slow") or 1
    share = _index_ramp(dim, base, original, float(fast), float(slow), truncate)
    return _plain(dim, base) * (share / factor + (1 - share))


def _llama3(dim: int, base: float, block: Mapping[str, Any], slow_first: bool = False) -> Tensor:
    """``slow_first``: which of the two bounds is asked first; it matters where they are swapped only."""
    factor, original = _number(block, "factor"), _number(block, "original_max_position_embeddings")
    low, high = _number(block, "low_freq_factor"), _number(block, "high_freq_factor")
    theta = _plain(dim, base)
    out = []
    for value in theta.tolist():
        wavelength = 2 * math.pi / value
        fast, slow = wavelength < original / high, wavelength > original / low
        if fast and not (slow and slow_first):
            out.append(value)
        elif slow:
            out.append(value / factor)
        else:
            smooth = (original / wavelength - low) / (high - low) if high != low else 1.0
            out.append((1 - smooth) * value / factor + smooth * value)
    return torch.tensor(out, dtype=torch.float64)


def _divisors(block: Mapping[str, Any], key: str, pairs: int) -> Tensor:
    values = block.get(key)
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, (int, float)) for v in values):
        raise EngineError(f"{key} is not a list of numbers")
    if len(values) != pairs:
        raise EngineError(f"{key} has {len(values)} numbers for {pairs} pairs: size mismatch")
    return torch.tensor(values, dtype=torch.float64)


def transformers_frequencies(
    block: Mapping[str, Any],
    *,
    head_dim: int,
    max_position_embeddings: int,
    length: int | None = None,
    original_at_top: int | None = None,
    nested: bool = False,
    honours_partial: bool = True,
) -> Frequencies:
    """transformers 5.24's answer, with its silent rules.

    A missing rope_type is "default"; a missing original length is ``max_position_embeddings``; one at the top level of
    the file wins over the block's (flat blocks only); ``truncate`` of a nested block is not read; mscale counts only
    together with mscale_all_dim; a class that does not honour ``partial_rotary_factor`` rotates the whole head for the
    default type.
    """
    block = {key: value for key, value in block.items() if value is not None or key == "truncate"}
    kind = block.get("rope_type", block.get("type", "default"))
    base = _number(block, "rope_theta", 10000.0)
    partial = _number(block, "partial_rotary_factor", 1.0)
    dim = int(head_dim * partial)
    if kind not in TRANSFORMERS_TYPES:
        raise EngineError(f"KeyError: rope_type {kind!r} is unknown")
    if kind in ("yarn", "llama3", "longrope"):
        if original_at_top is not None and not nested:
            block["original_max_position_embeddings"] = original_at_top
        block.setdefault("original_max_position_embeddings", max_position_embeddings)
    if kind == "default":
        return Frequencies(_plain(dim if honours_partial else head_dim, base))
    if kind == "linear":
        return Frequencies(_plain(dim, base) / _number(block, "factor"))
    if kind == "proportional":
        kept = int(partial * head_dim // 2)
        theta = _plain(head_dim, base)
        theta[kept:] = 0.0
        return Frequencies(theta / _number(block, "factor", 1.0))
    if kind == "dynamic":
        factor = _number(block, "factor")
        grown = max(length or 0, max_position_embeddings) / max_position_embeddings
        if dim == 2:
            raise EngineError("division by zero: dynamic scaling of a rotary dimension of 2")
        return Frequencies(_plain(dim, base * (factor * grown - (factor - 1)) ** (dim / (dim - 2))))
    if kind == "llama3":
        return Frequencies(_llama3(dim, base, block, slow_first=True))
    original = _number(block, "original_max_position_embeddings")
    if kind == "yarn":
        if "factor" not in block:
            block["factor"] = max_position_embeddings / original
        factor = _number(block, "factor")
        mscale, all_dim = block.get("mscale"), block.get("mscale_all_dim")
        attention = block.get("attention_factor")
        if attention is None:
            attention = _mscale(factor)
            if mscale and all_dim:
                attention = _mscale(factor, float(mscale)) / _mscale(factor, float(all_dim))
        truncate = True if nested else bool(block.get("truncate", True))
        return Frequencies(_yarn(dim, base, block, truncate), float(attention))
    factor = _number(block, "factor", max_position_embeddings / original)
    attention = block.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    key = "long_factor" if length is not None and length > original else "short_factor"
    return Frequencies(_plain(dim, base) / _divisors(block, key, (dim + 1) // 2), float(attention))


def executed_transformers(
    block: Mapping[str, Any], *, head_dim: int, max_position_embeddings: int, length: int | None = None
) -> Frequencies:
    """The installed transformers' own answer (float32 inside), whatever is registered in its table at the moment.

    Raises ImportError where transformers is not installed.
    """
    from transformers import GPTNeoXConfig, LlamaConfig, modeling_rope_utils
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding

    own = {
        "linear": "linear_scaling_rope",
        "dynamic": "dynamic_ntk",
        "yarn": "yarn",
        "longrope": "longrope",
        "llama3": "llama3",
        "proportional": "proportional_rope",
    }
    sizes: dict[str, Any] = {"hidden_size": head_dim, "num_attention_heads": 1, "num_key_value_heads": 1}
    sizes["max_position_embeddings"] = max_position_embeddings
    block = {key: list(value) if isinstance(value, tuple) else value for key, value in block.items()}
    kind = str(block.get("rope_type", "default"))
    if kind == "default":
        sizes.pop("num_key_value_heads")
        config = GPTNeoXConfig(**sizes, rope_parameters={"partial_rotary_factor": 1.0, **block})
        inv_freq, attention = GPTNeoXRotaryEmbedding.compute_default_rope_parameters(config)
    elif kind in own:
        function = getattr(modeling_rope_utils, f"_compute_{own[kind]}_parameters")
        config = LlamaConfig(**sizes, head_dim=head_dim, rope_parameters=block)
        inv_freq, attention = function(config, device=torch.device("cpu"), seq_len=length)
    else:
        raise EngineError(f"KeyError: rope_type {kind!r} is unknown")
    return Frequencies(inv_freq.to(torch.float64), float(attention))


def vllm_frequencies(
    block: Mapping[str, Any],
    *,
    head_dim: int,
    max_position_embeddings: int,
    max_model_len: int | None = None,
    mrope_positions_factor: int = 4,
) -> Frequencies:
    """vLLM 0.33's answer: one table for the engine's life, made for ``max_model_len`` and not for a request's length.

    ``dynamic`` is one static base, transformers' at the declared length for a model trained at the block's
    ``max_trained_positions`` (without it nothing is scaled); ``ntk`` without mixed_b slows every pair, the first one
    too; LongRoPE takes one list by ``max_model_len`` and reads short_mscale / long_mscale, never attention_factor;
    ``proportional`` reads no factor; YaRN with an mrope_section takes its range from ``mrope_positions_factor`` times
    the original length (some models pass 1); DeepSeek's YaRN reads neither attention_factor nor truncate.
    """
    if "rope_theta" in block and block["rope_theta"] is None:
        raise EngineError("TypeError: rope_theta is null")
    block = {key: value for key, value in block.items() if value is not None or key == "truncate"}
    kind = block.get("rope_type", block.get("type", "default"))
    kind = VLLM_LEGACY.get(kind, kind)
    base, partial = _number(block, "rope_theta", 10000.0), _number(block, "partial_rotary_factor", 1.0)
    if not 0 < partial <= 1:
        raise EngineError(f"partial_rotary_factor={partial:g} must lie in (0, 1]")
    dim = int(_number(block, "rope_dim", 0.0)) or int(head_dim * partial)
    longest = max_model_len or max_position_embeddings
    if kind == "default":
        return Frequencies(_plain(dim, base))
    if kind == "proportional":
        theta = _plain(head_dim, base)
        theta[dim // 2 :] = 0.0
        return Frequencies(theta)
    if kind == "linear":
        factor = _number(block, "factor")
        if isinstance(block["factor"], int):
            raise EngineError(f"TypeError: its linear type takes factor {factor:.1f}, and not the integer {factor:g}")
        return Frequencies(_plain(dim, base) / factor)
    if kind == "ntk":
        factor, pairs = _number(block, "factor"), dim // 2
        share = torch.arange(1, pairs + 1, dtype=torch.float64) / pairs
        return Frequencies(_plain(dim, base) * factor ** -(share ** float(block.get("mixed_b", 1.0))))
    if kind == "dynamic":
        if "alpha" in block:
            return Frequencies(_plain(dim, base * _number(block, "alpha") ** (dim / (dim - 2))))
        factor = _number(block, "factor")
        grown = max_position_embeddings / _number(block, "max_trained_positions", max_position_embeddings)
        return Frequencies(_plain(dim, base * (factor * grown - (factor - 1)) ** (dim / (dim - 2))))
    if kind == "llama3":
        return Frequencies(_llama3(dim, base, block))
    if kind == "yarn":
        factor = _number(block, "factor")
        mscale, all_dim = block.get("mscale"), block.get("mscale_all_dim")
        attention = _mscale(factor)
        if "attention_factor" in block:
            attention = _number(block, "attention_factor")
        elif mscale and all_dim:
            attention = _mscale(factor, float(mscale)) / _mscale(factor, float(all_dim))
        if "mrope_section" in block:
            original = _number(block, "original_max_position_embeddings")
            block["original_max_position_embeddings"] = original * mrope_positions_factor
        return Frequencies(_yarn(dim, base, block, bool(block.get("truncate", True))), attention)
    if kind in ("deepseek_yarn", "deepseek_llama_scaling"):
        factor = _number(block, "factor")
        attention = _mscale(factor, _number(block, "mscale", 1.0)) / _mscale(
            factor, _number(block, "mscale_all_dim", 0.0)
        )
        return Frequencies(_yarn(dim, base, block, True), attention)
    if kind == "longrope":
        original = _number(block, "original_max_position_embeddings")
        long = longest > original
        scale = max_position_embeddings / original
        default = 1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(original))
        attention = _number(block, "long_mscale" if long else "short_mscale", default)
        divisors = _divisors(block, "long_factor" if long else "short_factor", (dim + 1) // 2)
        return Frequencies(_plain(dim, base) / divisors, attention)
    if kind in VLLM_TYPES and kind != "xdrope":
        raise EngineError(f"what vLLM makes of rope_type {kind!r} is not written here")
    raise EngineError(f"ValueError: Unknown RoPE scaling type {kind}")


def vllm_max_model_len(
    block: Mapping[str, Any],
    max_position_embeddings: int,
    *,
    original_at_top: int | None = None,
    model_type: str = "",
) -> int:
    """The longest context vLLM 0.33 derives from a configuration by itself.

    max_position_embeddings as it stands for YaRN, LongRoPE, llama3 and gemma3, times the factor for other types; for
    LongRoPE the original length, where the file states it beside the block (``original_at_top``).
    """
    kind = block.get("rope_type", block.get("type", "default"))
    kind = VLLM_LEGACY.get(kind, kind)
    if kind == "longrope" and original_at_top is not None:
        return original_at_top
    if kind in ("longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling") or "gemma3" in model_type:
        return max_position_embeddings
    return int(max_position_embeddings * _number(block, "factor", 1.0))


def vllm_table_length(
    block: Mapping[str, Any], max_position_embeddings: int, *, mrope_positions_factor: int = 4
) -> int:
    """The number of positions that vLLM 0.33 has cosines and sines for: longer input reads past their end.

    YaRN and linear: length times factor (the original length for YaRN); every other type: max_position_embeddings.
    """
    kind = block.get("rope_type", block.get("type", "default"))
    kind = VLLM_LEGACY.get(kind, kind)
    rows: float = max_position_embeddings
    if kind in ("yarn", "deepseek_yarn", "deepseek_llama_scaling"):
        rows = _number(block, "original_max_position_embeddings") * _number(block, "factor")
    elif kind == "linear":
        rows = max_position_embeddings * _number(block, "factor")
    if "mrope_section" in block and kind in ("default", "yarn"):
        rows *= mrope_positions_factor
    return math.ceil(rows)


@dataclass(frozen=True, kw_only=True)
class LlamaCppRope:
    """What llama.cpp knows about rotary positions after reading GGUF keys and flags (flags win).

    ``attn_factor`` is the key rope.scaling.attn_factor, which multiplies YaRN's own ``0.1 ln s + 1``. The flag
    --yarn-attn-factor multiplies too in older builds and is overwritten in newer ones, so it is not represented here.
    """

    dimension_count: int
    freq_base: float
    context_length: int
    scaling_type: str = "none"
    scaling_factor: float = 1.0
    original_context_length: int | None = None
    attn_factor: float = 1.0
    yarn_log_multiplier: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    rope_freqs: Sequence[float] | None = None
    rope_factors_short: Sequence[float] | None = None
    rope_factors_long: Sequence[float] | None = None
    notes: tuple[str, ...] = field(default=())


def llama_cpp_frequencies(rope: LlamaCppRope, *, n_ctx: int | None = None) -> Frequencies:
    """llama.cpp's answer for a context of ``n_ctx`` (default: the file's).

    YaRN rounds its range outwards always; the LongRoPE list is chosen by n_ctx, once; without an original context
    length the file's own context length is taken.
    """
    dim, base = rope.dimension_count, rope.freq_base
    original = rope.original_context_length or rope.context_length
    context = n_ctx or rope.context_length
    divisors = rope.rope_freqs
    if divisors is None:
        divisors = rope.rope_factors_long if context > original else rope.rope_factors_short
    theta = _plain(dim, base)
    if divisors is not None:
        theta = theta / _divisors({"factors": list(divisors)}, "factors", dim // 2)
    kind = rope.scaling_type
    if kind in ("none", "longrope", ""):
        return Frequencies(theta, rope.attn_factor)
    if kind == "linear":
        return Frequencies(theta / rope.scaling_factor, rope.attn_factor)
    if kind != "yarn":
        raise EngineError(f"rope scaling type {kind!r} is unknown")
    share = _index_ramp(dim, base, original, rope.beta_fast, rope.beta_slow, True)
    attention = _mscale(rope.scaling_factor) * rope.attn_factor
    if rope.yarn_log_multiplier:
        attention = (
            rope.attn_factor
            * _mscale(rope.scaling_factor)
            / (1 + rope.yarn_log_multiplier * math.log(rope.scaling_factor))
        )
    return Frequencies(theta * (share / rope.scaling_factor + (1 - share)), attention)
