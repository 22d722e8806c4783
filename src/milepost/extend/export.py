"""Writing a frequency method in the words of transformers, vLLM and llama.cpp, and reading it back.

    >>> from milepost.encodings.frequencies import Yarn
    >>> method = Yarn(rotary_dim=128, base=10000.0, trained_length=4096, factor=8.0)
    >>> export(method, "transformers").rope_parameters["rope_type"]
    'yarn'

What an engine has no name for is written as LongRoPE divisors ``theta / theta'`` where that is exact, and refused with
the reason where it is not. Every export is checked before it is returned: the engine's own formula is applied to what
was written and compared with the method, frequencies and attention factor, to 1e-6 relative.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

import torch

from milepost.encodings.frequencies import (
    ABF,
    NTK,
    ByParts,
    Default,
    Dynamic,
    Frequencies,
    FrequencyMethod,
    HoPECut,
    Linear,
    Llama3,
    LogN,
    LongRope,
    Proportional,
    Yarn,
    from_config,
    merge_scaling,
    rope_fields,
    usable_length,
)
from milepost.extend.engines import (
    LlamaCppRope,
    executed_transformers,
    llama_cpp_frequencies,
    transformers_frequencies,
    vllm_frequencies,
    vllm_table_length,
)

Engine = Literal["transformers", "vllm", "llama.cpp"]
TOLERANCE = 1e-6


class ExportRefused(ValueError):
    """The engine cannot do what the method asks for; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """A method in one engine's words.

    ``rope_parameters``: the block of a v5 config.json (transformers), or of ``--hf-overrides`` (vLLM).
    ``rope_scaling`` and ``rope_theta``: the same for v4. ``max_position_embeddings``: what the file should declare.
    ``overrides`` and ``max_model_len``: vLLM's --hf-overrides, JSON, and --max-model-len. ``flags``, ``gguf_keys``
    (without the architecture's prefix) and ``gguf_tensors``: llama.cpp. ``notes``: what the engine ignores or does
    otherwise. ``error``: the largest relative difference found on reading back.
    """

    engine: Engine
    method: str
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)
    rope_scaling: Mapping[str, Any] | None = None
    rope_theta: float | None = None
    max_position_embeddings: int | None = None
    overrides: str | None = None
    max_model_len: int | None = None
    flags: tuple[str, ...] = ()
    gguf_keys: Mapping[str, Any] = field(default_factory=dict)
    gguf_tensors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    error: float = 0.0

    def text(self) -> str:
        """Words to paste, and what to know about them."""
        lines = [f"{self.method} for {self.engine}"]
        if self.engine == "transformers":
            lines += [
                "",
                "config.json, transformers 5:",
                json.dumps({"rope_parameters": self.rope_parameters}, indent=2),
            ]
            old = {"rope_theta": self.rope_theta, "rope_scaling": self.rope_scaling}
            lines += ["", "config.json, transformers 4:", json.dumps(old, indent=2)]
        if self.overrides is not None:
            lines += ["", f"vllm serve MODEL --max-model-len {self.max_model_len} --hf-overrides '{self.overrides}'"]
        if self.engine == "llama.cpp":
            lines += ["", "llama-server -m MODEL.gguf " + " ".join(self.flags) if self.flags else "no flags do it"]
            lines += ["", "GGUF keys (after the architecture's prefix):"]
            lines += [f"  {key} = {value}" for key, value in self.gguf_keys.items()]
            lines += [f"  tensor {key}: {len(value)} numbers" for key, value in self.gguf_tensors.items()]
        if self.max_position_embeddings is not None:
            lines += ["", f"max_position_embeddings: {self.max_position_embeddings}"]
        lines += ["", *(f"- {note}" for note in self.notes)]
        lines.append(f"- read back with {self.engine}'s formula: largest relative difference {self.error:.1e}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {key: _plain(value) for key, value in self.__dict__.items() if value not in (None, (), {})}


def into_config(
    config: Mapping[str, Any], made: Export, *, layer_type: str | None = None, replace_trained: bool = False
) -> dict[str, Any]:
    """A copy of a config.json with an export for transformers merged in: block, base and declared length.

    Everything else survives; see `merge_scaling` for where the block goes and what is refused.
    Raises ValueError for an export that is not transformers'.
    """
    if made.engine != "transformers":
        raise ValueError(f"config.json is transformers' file: export for transformers, not for {made.engine}")
    merged = merge_scaling(config, made.rope_parameters, layer_type=layer_type, replace_trained=replace_trained)
    if made.max_position_embeddings is not None:
        merged["max_position_embeddings"] = made.max_position_embeddings
    return merged


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True, kw_only=True)
class _Words:
    """A method reduced to what engines can say: a block in transformers' words, or divisors."""

    block: dict[str, Any]
    attention_factor: float
    trained_length: int
    target_length: int
    softmax_in_model: bool = False
    notes: tuple[str, ...] = ()


def export(
    method: FrequencyMethod | Mapping[str, Any] | Any,
    engine: Engine,
    *,
    head_dim: int | None = None,
    trained_length: int | None = None,
    target_length: int | None = None,
    softmax_in_model: bool | None = None,
) -> Export:
    """A frequency method (or the configuration that names one) in an engine's words, read back and compared.

    ``head_dim``: width of a head where only a part of it rotates (default: all of it does). ``trained_length``: where
    the method has none of its own. ``target_length``: what max_position_embeddings should declare (default: the length
    that a configuration reaches, see `usable_length`; for a method its trained length times the factor).
    ``softmax_in_model``: whether the model class multiplies its softmax scale by mscale_all_dim itself, as DeepSeek's
    do (default: whether the configuration has a qk_rope_head_dim).

    Raises `ExportRefused` with the reason when the engine cannot do it exactly, ValueError when a length is missing.
    """
    if engine not in ("transformers", "vllm", "llama.cpp"):
        raise ValueError(f"engine must be transformers, vllm or llama.cpp, got {engine!r}")
    if not isinstance(method, FrequencyMethod):
        config = method
        method = from_config(config)
        own = method.original_length if isinstance(method, Dynamic) else getattr(method, "trained_length", None)
        trained_length = trained_length or (None if own else _declared(config))
        target_length = target_length or reached(config)
        if softmax_in_model is None:
            softmax_in_model = rope_fields(config).softmax_in_model
    head_dim = head_dim or method.rotary_dim
    words = _words(method, engine, head_dim, trained_length, target_length, bool(softmax_in_model))
    made = {"transformers": _transformers, "vllm": _vllm, "llama.cpp": _llama_cpp}[engine](method, words, head_dim)
    return _checked(made, method, words, head_dim)


def reached(config: Any, *, layer_type: str | None = None) -> int | None:
    """The length that a configuration's scaling reaches, or None where it states none."""
    try:
        return usable_length(config, layer_type=layer_type).length
    except ValueError:
        return None


def _declared(config: Any) -> int | None:
    found = config.get("max_position_embeddings") if isinstance(config, Mapping) else None
    return found if found is not None else getattr(config, "max_position_embeddings", None)


# ---- a method in transformers' words --------------------------------------------------------------------------------


def _words(
    method: FrequencyMethod,
    engine: Engine,
    head_dim: int,
    trained_length: int | None,
    target_length: int | None,
    softmax_in_model: bool,
) -> _Words:
    own = getattr(method, "trained_length", None)
    if isinstance(method, Dynamic):
        own = method.original_length
    trained = own or trained_length
    name = type(method).__name__
    if trained is None:
        raise ValueError(f"{name} has no trained length of its own: pass trained_length")
    if trained_length is not None and own is not None and own != trained_length:
        raise ValueError(f"trained_length is {trained_length}, the method says {own}")
    factor = getattr(method, "factor", None) or 1.0
    target = target_length or getattr(method, "max_length", None) or round(trained * factor)
    if isinstance(method, LogN):
        raise ExportRefused("log-n scaling heats logits by the length of the input: no engine has a word for it")
    if method.length_dependent and not isinstance(method, (LongRope, Dynamic)):
        raise ExportRefused(f"{name} changes its frequencies with the length: no engine has a word for it")
    if getattr(method, "unscaled_tokens", 0):
        raise ExportRefused(
            f"the first {getattr(method, 'unscaled_tokens', 0)} tokens stay unscaled (unscaled_tokens): a property of "
            "positions, and no engine has a word for it; unscaled_tokens=0 can be written"
        )
    notes: list[str] = []
    in_model = softmax_in_model and isinstance(method, Yarn) and bool(method.mscale_all_dim)
    attention = _cosines(method) if in_model else _attention(method, head_dim, notes)
    block = _block(method, engine, trained, attention, head_dim, notes)
    if in_model:
        block = _for_scaled_softmax(method, engine, block, notes)
    if isinstance(method, Dynamic):
        target = trained
    return _Words(
        block=block,
        attention_factor=attention,
        trained_length=trained,
        target_length=target,
        softmax_in_model=in_model,
        notes=tuple(notes),
    )


def _cosines(method: FrequencyMethod) -> float:
    """The factor of cosine and sine alone."""
    return _number(method.frequencies().attention_factor)


def _for_scaled_softmax(method: Any, engine: Engine, block: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """The block for a class that reads mscale_all_dim for its softmax scale as well."""
    if engine == "llama.cpp":
        raise ExportRefused(
            "the model scales its softmax by mscale_all_dim: llama.cpp reads rope.scaling.yarn_log_multiplier for it, "
            "which its own converter writes from the checkpoint's block"
        )
    own = {key: getattr(method, key) for key in ("mscale", "mscale_all_dim") if getattr(method, key) is not None}
    block = {**block, **own}
    if len(own) == 2 and own["mscale"]:
        del block["attention_factor"]
    elif engine == "vllm":
        raise ExportRefused("vLLM's DeepSeek type reads mscale and mscale_all_dim, and no attention_factor beside them")
    notes.append("mscale_all_dim stays in the block: the model class scales its softmax by it")
    return block


def _attention(method: FrequencyMethod, head_dim: int, notes: list[str]) -> float:
    """The attention factor to write, a softmax factor folded in where that is exact."""
    found = method.frequencies()
    if isinstance(found.attention_factor, torch.Tensor) or isinstance(found.softmax_factor, torch.Tensor):
        if isinstance(method, LongRope):
            raise ExportRefused("short_mscale and long_mscale differ: only vLLM keeps two, for an engine's whole life")
        return 1.0
    if found.softmax_factor == 1.0:
        return float(found.attention_factor)
    if head_dim != method.rotary_dim:
        raise ExportRefused(
            f"a softmax factor of {found.softmax_factor:g} on a partly rotated head cannot be written as an attention "
            "factor: DeepSeek's classes apply it themselves from mscale_all_dim; others need scale_softmax=False"
        )
    notes.append(
        f"the softmax factor {found.softmax_factor:g} is folded into attention_factor as its square root: the same "
        "logits while the whole head rotates; not for DeepSeek's classes, which apply mscale_all_dim themselves"
    )
    return float(found.attention_factor) * math.sqrt(found.softmax_factor)


def _partial(method: FrequencyMethod, head_dim: int) -> dict[str, Any]:
    if isinstance(method, (Proportional, HoPECut)) or head_dim == method.rotary_dim:
        return {}
    return {"partial_rotary_factor": method.rotary_dim / head_dim}


def _block(
    method: FrequencyMethod, engine: Engine, trained: int, attention: float, head_dim: int, notes: list[str]
) -> dict[str, Any]:
    """The rope block: by the engine's own name where it has one, else as LongRoPE divisors."""
    base = float(getattr(method, "base", None) or 10000.0)
    common: dict[str, Any] = {"rope_theta": base, **_partial(method, head_dim)}
    original = {"original_max_position_embeddings": trained}
    if isinstance(method, Default):
        return {"rope_type": "default", **common}
    if isinstance(method, ABF):
        return {"rope_type": "default", **common, "rope_theta": method.new_base}
    if isinstance(method, NTK) and method.mixed_b is None:
        notes.append(f"NTK-aware is a change of base: {base:g} becomes {float(method.scaled_base()):.9g}")
        return {"rope_type": "default", **common, "rope_theta": float(method.scaled_base())}
    if isinstance(method, NTK) and engine == "vllm":
        return {"rope_type": "ntk", **common, "factor": method.factor, "mixed_b": method.mixed_b}
    if isinstance(method, Linear):
        return {"rope_type": "linear", **common, "factor": method.factor}
    if isinstance(method, Llama3):
        bounds = {"low_freq_factor": method.low_freq_factor, "high_freq_factor": method.high_freq_factor}
        return {"rope_type": "llama3", **common, "factor": method.factor, **bounds, **original}
    stretched = getattr(method, "factor", 1.0) != 1.0
    if isinstance(method, (Proportional, HoPECut)) and (engine == "transformers" or engine == "vllm" and not stretched):
        rotated = method.kept_pairs if isinstance(method, HoPECut) else method.rotated_pairs
        share = (rotated + 0.25) / (method.rotary_dim // 2) if rotated < method.rotary_dim // 2 else 1.0
        if isinstance(method, HoPECut):
            notes.append(f"HoPE's cut keeps {rotated} pairs: p-RoPE with that share")
        elif rotated:
            share = method.proportion
        factor = {"factor": getattr(method, "factor", 1.0)} if stretched else {}
        return {"rope_type": "proportional", "rope_theta": base, "partial_rotary_factor": share, **factor}
    if isinstance(method, ByParts) and method.ramp == "index" and (engine != "llama.cpp" or method.truncate):
        yarn = {"beta_fast": method.beta, "beta_slow": method.alpha, "attention_factor": attention}
        ends = {} if method.truncate else {"truncate": False}
        if not method.truncate and engine == "transformers":
            notes.append("transformers 5.24 reads truncate of flat blocks only: do not nest this one per layer type")
        return {"rope_type": "yarn", **common, "factor": method.factor, **original, **yarn, **ends}
    if isinstance(method, ByParts) and attention == 1.0:
        bounds = {"low_freq_factor": method.alpha, "high_freq_factor": method.beta}
        if method.ramp == "rotations":
            notes.append("NTK-by-parts with the rotations ramp is what engines call llama3")
            return {"rope_type": "llama3", **common, "factor": method.factor, **bounds, **original}
    if isinstance(method, Dynamic):
        return _dynamic(method, engine, common, notes)
    if isinstance(method, LongRope):
        return _longrope(method, common, original, notes)
    return _divided(method, common, original, notes)


def _dynamic(method: Dynamic, engine: Engine, common: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    inner = method.method
    plain_ntk = isinstance(inner, NTK) and inner.mixed_b is None
    if engine != "transformers" or not plain_ntk or (method.form == "paper" and inner.factor != 1.0):
        why = {
            "vllm": "vLLM computes one table for its whole life",
            "llama.cpp": "llama.cpp has no scaling that grows with the length",
            "transformers": "transformers grows NTK in its own form only",
        }[engine]
        raise ExportRefused(f"the frequencies grow with the length, and {why}")
    notes.append(
        "growth is measured against max_position_embeddings: keep it at the trained length; transformers caches "
        "rotated keys, so decoding past it differs from one full pass, and the longest row of a batch decides for all"
    )
    return {"rope_type": "dynamic", **common, "factor": inner.factor}


def _longrope(method: LongRope, common: dict[str, Any], original: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    if method.growth == "dynamic":
        raise ExportRefused("LongRoPE's divisors grow with the length here: engines know two fixed lists only")
    short = method.long_factor if method.growth == "long" else method.short_factor
    long = method.short_factor if method.growth == "short" else method.long_factor
    if short != long:
        notes.append(
            "transformers changes lists in the middle of a generation at the trained length while its cache keeps keys "
            "of the other list; vLLM and llama.cpp take one list by the configured context, for short input too"
        )
    return {
        "rope_type": "longrope",
        **common,
        **original,
        "short_factor": list(short),
        "long_factor": list(long),
        **({} if method.factor is None else {"factor": method.factor}),
        "attention_factor": _number(method.frequencies().attention_factor),
    }


def _number(value: Any) -> float:
    return float(value.flatten()[0]) if isinstance(value, torch.Tensor) else float(value)


def _divided(
    method: FrequencyMethod, common: dict[str, Any], original: dict[str, Any], notes: list[str]
) -> dict[str, Any]:
    """LongRoPE with both lists equal to theta / theta'."""
    found = method.frequencies()
    inv_freq = found.inv_freq.flatten()
    if bool((inv_freq == 0).any()):
        raise ExportRefused(
            f"{int((inv_freq == 0).sum())} pairs do not rotate at all: their LongRoPE divisor would be infinite"
        )
    theta = Default(rotary_dim=method.rotary_dim, base=common["rope_theta"]).frequencies().inv_freq
    divisors = (theta / inv_freq).tolist()
    notes.append(
        f"the engine has no name for {type(method).__name__}: written as LongRoPE divisors, the same at all lengths"
    )
    return {
        "rope_type": "longrope",
        **common,
        **original,
        "short_factor": divisors,
        "long_factor": divisors,
        "factor": 1.0,
        "attention_factor": _number(found.attention_factor) * math.sqrt(_number(found.softmax_factor)),
    }


# ---- engines --------------------------------------------------------------------------------------------------------


def _transformers(method: FrequencyMethod, words: _Words, head_dim: int) -> Export:
    old = {key: value for key, value in words.block.items() if key != "rope_theta"}
    notes = list(words.notes)
    if "partial_rotary_factor" in words.block:
        notes.append(
            "several classes ignore partial_rotary_factor (llama, qwen, gemma ...): `milepost doctor` names them"
        )
    notes.append("write it into config.json: rope_scaling= or rope_parameters= on from_pretrained loses rope_theta")
    return Export(
        engine="transformers",
        method=type(method).__name__,
        rope_parameters=words.block,
        rope_scaling=None if words.block["rope_type"] == "default" else old,
        rope_theta=words.block["rope_theta"],
        max_position_embeddings=words.target_length,
        notes=tuple(notes),
    )


def _vllm(method: FrequencyMethod, words: _Words, head_dim: int) -> Export:
    block, notes = dict(words.block), list(words.notes)
    kind, target = block["rope_type"], words.target_length
    declared = target
    if "factor" in block:
        block["factor"] = float(block["factor"])  # the linear type stops at an integer
    if kind == "linear":
        declared = math.ceil(target / block["factor"])
        notes.append(f"vLLM multiplies max_position_embeddings by a linear block's factor itself: declare {declared}")
    if kind == "yarn" and "attention_factor" in block:
        natural = 1.0 if block["factor"] <= 1 else 0.1 * math.log(block["factor"]) + 1
        if abs(block["attention_factor"] - natural) < 1e-12:
            del block["attention_factor"]
        else:
            block["attn_factor"] = block["attention_factor"] / natural
            notes.append(
                "newer vLLM reads attention_factor (it replaces 0.1 ln s + 1), older vLLM attn_factor (it multiplies "
                "it): both are written and agree"
            )
    if kind == "longrope":
        block["short_mscale"] = block["long_mscale"] = block["attention_factor"]
        notes.append("vLLM's longrope ignores attention_factor: short_mscale and long_mscale carry it")
        if block["short_factor"] != block["long_factor"]:
            notes.append("vLLM takes long_factor at every length once max_model_len exceeds the trained length")
    if kind == "proportional":
        notes.append("vLLM knows the proportional type in newer versions only (0.33 has it)")
    rows = vllm_table_length(block, declared)
    if rows < target:
        raise ExportRefused(
            f"vLLM makes {rows} positions for a {kind} block, factor times the trained length, and {target} were asked "
            "for: raise the factor"
        )
    notes.append(
        "an override replaces rope_parameters as a whole, at the top of the configuration: for a model with a "
        'text_config write {"text_config": {...}} around it'
    )
    overrides = {"rope_parameters": block, "max_position_embeddings": declared}
    return Export(
        engine="vllm",
        method=type(method).__name__,
        rope_parameters=block,
        max_position_embeddings=declared,
        overrides=json.dumps(overrides),
        max_model_len=target,
        notes=tuple(notes),
    )


def _llama_cpp(method: FrequencyMethod, words: _Words, head_dim: int) -> Export:
    block, notes = words.block, list(words.notes)
    kind, base = block["rope_type"], float(block["rope_theta"])
    keys: dict[str, Any] = {"rope.dimension_count": method.rotary_dim, "rope.freq_base": base}
    keys["context_length"] = words.target_length
    flags = [f"--rope-freq-base {base:.9g}"]
    tensors: dict[str, tuple[float, ...]] = {}
    if kind == "default":
        flags.append("--rope-scaling none")
    elif kind == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(block["factor"])}
        flags += ["--rope-scaling linear", f"--rope-scale {block['factor']:g}"]
    elif kind == "yarn":
        factor = float(block["factor"])
        ratio = words.attention_factor / (1.0 if factor <= 1 else 0.1 * math.log(factor) + 1)
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": factor,
            "rope.scaling.original_context_length": words.trained_length,
            "rope.scaling.yarn_beta_fast": float(block["beta_fast"]),
            "rope.scaling.yarn_beta_slow": float(block["beta_slow"]),
        }
        flags += ["--rope-scaling yarn", f"--rope-scale {factor:g}", f"--yarn-orig-ctx {words.trained_length}"]
        flags += [f"--yarn-beta-fast {block['beta_fast']:g}", f"--yarn-beta-slow {block['beta_slow']:g}"]
        notes.append("llama.cpp multiplies by 0.1 ln s + 1 on its own: never pass that number to --yarn-attn-factor")
        if abs(ratio - 1) > 1e-9:
            keys["rope.scaling.attn_factor"] = ratio
            flags = []
            notes.append(
                f"the attention factor {words.attention_factor:g} needs the key rope.scaling.attn_factor = {ratio:.9g}"
                ": --yarn-attn-factor does the same in older builds and is overwritten in newer ones"
            )
    else:
        flags = []
        tensors, extra = _llama_cpp_tensors(method, words)
        keys |= extra
        notes.append(f"{kind} is stored as one divisor a pair: a tensor of the GGUF file; no flag can set it")
    return Export(
        engine="llama.cpp",
        method=type(method).__name__,
        flags=tuple(flags),
        gguf_keys=keys,
        gguf_tensors=tensors,
        notes=tuple(notes),
    )


def _llama_cpp_tensors(method: FrequencyMethod, words: _Words) -> tuple[dict[str, tuple[float, ...]], dict[str, Any]]:
    block = words.block
    keys: dict[str, Any] = {}
    if words.attention_factor != 1.0:
        keys["rope.scaling.attn_factor"] = words.attention_factor
    if block["rope_type"] == "longrope" and block["short_factor"] != block["long_factor"]:
        keys |= {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": words.trained_length}
        lists = {"rope_factors_short.weight": block["short_factor"], "rope_factors_long.weight": block["long_factor"]}
        return {key: tuple(value) for key, value in lists.items()}, keys
    inv_freq = method.frequencies().inv_freq.flatten()
    if bool((inv_freq == 0).any()):
        raise ExportRefused(
            f"{int((inv_freq == 0).sum())} pairs do not rotate at all: their divisor in rope_freqs.weight is infinite"
        )
    theta = Default(rotary_dim=method.rotary_dim, base=float(block["rope_theta"])).frequencies().inv_freq
    return {"rope_freqs.weight": tuple((theta / inv_freq).tolist())}, keys


# ---- reading back ---------------------------------------------------------------------------------------------------


def read_back(made: Export, *, head_dim: int, length: int) -> Frequencies:
    """What the engine makes of an export, at a length (for llama.cpp and vLLM: with that context configured).

    transformers is executed where it is installed; the others are their formulas.
    """
    longest = made.max_position_embeddings or int(made.gguf_keys.get("context_length", length))
    if made.engine == "transformers":
        formula = executed_transformers if find_spec("transformers") else transformers_frequencies
        return formula(made.rope_parameters, head_dim=head_dim, max_position_embeddings=longest, length=length)
    if made.engine == "vllm":
        return vllm_frequencies(
            made.rope_parameters, head_dim=head_dim, max_position_embeddings=longest, max_model_len=length
        )
    return llama_cpp_frequencies(llama_cpp_rope(made.gguf_keys, made.gguf_tensors), n_ctx=length)


def llama_cpp_rope(keys: Mapping[str, Any], tensors: Mapping[str, Any] | None = None) -> LlamaCppRope:
    """The engine's settings from GGUF keys (without the architecture's prefix) and rope tensors.

    As llama.cpp reads them: a factor without a type is linear, a factor of 0 is none, rope.scale_linear is an old name.
    """
    tensors = tensors or {}
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear"))
    return LlamaCppRope(
        dimension_count=int(keys["rope.dimension_count"]),
        freq_base=float(keys["rope.freq_base"]),
        context_length=int(keys["context_length"]),
        scaling_type=str(keys.get("rope.scaling.type", "linear")),
        scaling_factor=float(factor or 1.0),
        original_context_length=keys.get("rope.scaling.original_context_length"),
        attn_factor=float(keys.get("rope.scaling.attn_factor", 1.0)),
        yarn_log_multiplier=float(keys.get("rope.scaling.yarn_log_multiplier", 0.0)),
        beta_fast=float(keys.get("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(keys.get("rope.scaling.yarn_beta_slow", 1.0)),
        rope_freqs=tensors.get("rope_freqs.weight"),
        rope_factors_short=tensors.get("rope_factors_short.weight"),
        rope_factors_long=tensors.get("rope_factors_long.weight"),
    )


def difference(found: Frequencies, wanted: Frequencies, softmax_folded: bool = False) -> float:
    """Largest relative difference of frequencies and attention factors; infinite when the pairs do not match."""
    left, right = found.inv_freq.flatten(), wanted.inv_freq.flatten()
    if left.shape != right.shape:
        return math.inf
    worst = float(((left - right).abs() / right.abs().clamp(min=1e-300)).max())
    attention = _number(wanted.attention_factor)
    if softmax_folded:
        attention *= math.sqrt(_number(wanted.softmax_factor))
    return max(worst, abs(_number(found.attention_factor) / attention - 1))


def _checked(made: Export, method: FrequencyMethod, words: _Words, head_dim: int) -> Export:
    """The export with its largest difference on reading back; raises when it is not the method."""
    worst = 0.0
    for length in sorted({max(1, words.trained_length // 2), words.trained_length, 2 * words.trained_length}):
        wanted = method.frequencies(length)
        found = read_back(made, head_dim=head_dim, length=length)
        worst = max(worst, difference(found, wanted, softmax_folded=not words.softmax_in_model))
    if not worst <= TOLERANCE:
        raise ExportRefused(
            f"{type(method).__name__} written for {made.engine} reads back with a relative difference of {worst:.2e}"
        )
    return Export(**{**made.__dict__, "error": worst})
