"""Reading frequency methods from model configurations, strictly: v4 and v5 forms, nested, every key accounted for."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from milepost.encodings.frequencies.base import FrequencyMethod, Scalable, is_number
from milepost.encodings.frequencies.byparts import ByParts, Llama3, PartNTK, Yarn
from milepost.encodings.frequencies.clex import Clex, ClexTable
from milepost.encodings.frequencies.longrope import LongRope
from milepost.encodings.frequencies.static import ABF, NTK, Default, HoPECut, Linear, Power, Proportional, Truncated
from milepost.encodings.frequencies.wrappers import Dynamic, LogN, Resonance, dynamic_ntk

METHODS: dict[str, type[Any]] = {
    cls.name: cls
    for cls in (
        Default,
        Proportional,
        Linear,
        NTK,
        ABF,
        ByParts,
        PartNTK,
        Yarn,
        Llama3,
        LongRope,
        Truncated,
        Power,
        HoPECut,
        Dynamic,
        Resonance,
        LogN,
        Clex,
        ClexTable,
    )
}
"""Every method by name."""

ALIASES: dict[str, str] = {
    "rope": "default",
    "pi": "linear",
    "position_interpolation": "linear",
    "p_rope": "proportional",
    "ntk_aware": "ntk",
    "ntk_by_parts": "by_parts",
    "su": "longrope",
    "mrope": "default",
    "deepseek_yarn": "yarn",
}
"""Other names in use, among them rope types of older checkpoints and of vLLM."""

ROPE_KEYS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset({"original_max_position_embeddings"})),
    "dynamic": (frozenset({"factor"}), frozenset({"alpha", "original_max_position_embeddings"})),
    "yarn": (
        frozenset({"factor", "original_max_position_embeddings"}),
        frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "finetuned"}),
    ),
    "longrope": (
        frozenset({"short_factor", "long_factor", "original_max_position_embeddings"}),
        frozenset({"factor", "attention_factor", "short_mscale", "long_mscale", "growth"}),
    ),
    "llama3": (
        frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
        frozenset(),
    ),
    "proportional": (frozenset(), frozenset({"factor"})),
}
"""(required, optional) keys of the rope types that transformers knows, besides `SHARED_KEYS`."""

SHARED_KEYS = frozenset(
    {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
)
"""Keys that may stand beside any rope type."""

MODEL_KEYS: dict[str, frozenset[str]] = {
    "ministral3": frozenset({"llama_4_scaling_beta", "max_position_embeddings"}),
    "mistral4": frozenset({"llama_4_scaling_beta", "max_position_embeddings"}),
    "qwen3_omni_moe_text": frozenset({"interleaved"}),
    "qwen3_omni_moe_talker_text": frozenset({"interleaved"}),
}
"""Keys that a model family reads from its rope block for purposes of its own."""

THETA_KEYS = ("rope_theta", "rotary_emb_base")
PARTIAL_KEYS = ("partial_rotary_factor", "rotary_pct", "rope_pct")


def nearest(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the nearest known word, or nothing."""
    close = difflib.get_close_matches(word.lower(), sorted(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def method_class(name: str) -> type[Any]:
    """The class of a method name. Raises KeyError that names the nearest."""
    found = METHODS.get(ALIASES.get(name, name))
    if found is None:
        known = sorted({*METHODS, *ALIASES})
        raise KeyError(f"no frequency method {name!r}{nearest(name, known)}; known: {', '.join(known)}")
    return found


class RopeFields(NamedTuple):
    """What a configuration says about rotary positions, found wherever its version keeps it, as it stands there.

    None = not said. Nothing is judged yet: a number may still be text.
    """

    parameters: dict[str, Any]
    rope_type: str
    theta: Any
    head_dim: Any
    partial: Any
    rotary_dim: Any
    max_length: Any
    original_length: Any
    softmax_in_model: bool
    foreign_keys: frozenset[str]


class _Source:
    """One reader for mappings and configuration objects."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def get(self, *names: str) -> Any:
        for name in names:
            found = self.config.get(name) if isinstance(self.config, Mapping) else getattr(self.config, name, None)
            if found is not None:
                return found
        return None


def _text_part(config: Any) -> Any:
    """The language model's part of a multimodal configuration."""
    source = _Source(config)
    if source.get("rope_parameters", "rope_scaling", *THETA_KEYS, "hidden_size", "head_dim") is None:
        return source.get("text_config") or config
    return config


def _is_parameters(config: Any) -> bool:
    return isinstance(config, Mapping) and ("rope_type" in config or ("type" in config and "model_type" not in config))


def _one_block(config: Mapping[str, Any], found: Any) -> Any:
    """The block of a file that has both names for it: they must say the same, the base beside them included."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    if not isinstance(new, Mapping) or not isinstance(old, Mapping) or not new or not old or _is_nested(new):
        return found if new else old or found

    def plain(block: Mapping[str, Any]) -> dict[str, Any]:
        said = {key: value for key, value in block.items() if value is not None}
        said.setdefault("rope_theta", config.get("rope_theta"))
        kind = said.pop("type", None)
        said.setdefault("rope_type", kind)
        return said

    if plain(new) != plain(old):
        raise ValueError(
            "rope_scaling and rope_parameters say different things: transformers 5 takes rope_scaling and forgets the "
            "other; keep one"
        )
    return found


def _is_nested(parameters: Mapping[str, Any]) -> bool:
    return bool(parameters) and all(value is None or isinstance(value, Mapping) for value in parameters.values())


def rope_fields(config: Any, layer_type: str | None = None) -> RopeFields:
    """Gather what a configuration (mapping, object, or bare rope parameters) says, without judging the scaling.

    Raises ValueError when parameters are nested per layer type and ``layer_type`` is not one of them, when ``type`` and
    ``rope_type`` disagree, when a scaling names no type, or when two original lengths disagree.
    """
    config = _text_part(config)
    bare = _is_parameters(config)
    source = _Source({} if bare else config)
    raw = config if bare else source.get("rope_parameters", "rope_scaling")
    if isinstance(config, Mapping) and not bare:
        raw = _one_block(config, raw)
    if raw is not None and not isinstance(raw, Mapping):
        raise ValueError(f"rope parameters must be a mapping, got {type(raw).__name__}: {str(raw)[:60]}")
    parameters = dict(raw or {})
    if _is_nested(parameters):
        if layer_type not in parameters:
            raise ValueError(
                f"rope parameters are given per layer type: pass layer_type, one of {sorted(parameters)}; "
                f"got {layer_type!r}"
            )
        parameters = dict(parameters[layer_type] or {})
    elif layer_type == "sliding_attention" and source.get("rope_local_base_freq") is not None:
        parameters = {"rope_type": "default", "rope_theta": source.get("rope_local_base_freq")}
    parameters = {key: value for key, value in parameters.items() if value is not None}

    new, old = parameters.get("rope_type"), parameters.get("type")
    renamed = ALIASES.get(old, old) if old in ("su", "mrope") else old
    if new is not None and old is not None and new not in (old, renamed):
        raise ValueError(f"rope_type is {new!r} and type is {old!r}: keep rope_type only")
    rope_type = new if new is not None else old
    if rope_type is None:
        extra = sorted(set(map(str, parameters)) - SHARED_KEYS)
        if extra:
            raise ValueError(f"rope_type is missing beside {', '.join(extra)}: nothing would be scaled; add rope_type")
        rope_type = "default"
    if not isinstance(rope_type, str):
        raise ValueError(f"rope_type must be text, got {rope_type!r}")

    inner, outer = (
        parameters.get("original_max_position_embeddings"),
        source.get("original_max_position_embeddings"),
    )
    if inner is not None and outer is not None and inner != outer:
        raise ValueError(
            f"two original lengths: original_max_position_embeddings is {inner} in the rope parameters and {outer} "
            "at the top level; keep the one with factor * original = max_position_embeddings"
        )
    head_dim = source.get("qk_rope_head_dim")
    if head_dim is None and layer_type == "full_attention":
        head_dim = source.get("global_head_dim")
    if head_dim is None:
        head_dim = source.get("head_dim", "kv_channels")
    if head_dim is None:
        hidden, heads = source.get("hidden_size", "n_embd", "d_model"), source.get("num_attention_heads", "n_head")
        if is_number(hidden) and is_number(heads) and heads > 0:
            head_dim = int(hidden // heads)
    partial = parameters.get("partial_rotary_factor")
    return RopeFields(
        parameters=parameters,
        rope_type=rope_type,
        theta=parameters["rope_theta"] if "rope_theta" in parameters else source.get(*THETA_KEYS),
        head_dim=head_dim,
        partial=partial if partial is not None else source.get(*PARTIAL_KEYS),
        rotary_dim=source.get("rotary_dim") if partial is None else None,
        max_length=source.get("max_position_embeddings", "n_positions"),
        original_length=inner if inner is not None else outer,
        softmax_in_model=source.get("qk_rope_head_dim") is not None,
        foreign_keys=MODEL_KEYS.get(str(source.get("model_type")), frozenset())
        | frozenset(() if isinstance(config, Mapping) else source.get("ignore_keys_at_rope_validation") or ()),
    )


def check_keys(
    rope_type: str, parameters: Iterable[str], required: Iterable[str], optional: Iterable[str]
) -> list[str]:
    """Problems with the keys of a rope block: missing ones, and unknown ones with the nearest known key."""
    required, known, given = set(required), {*required, *optional, *SHARED_KEYS}, set(parameters)
    problems = [f"{key} is missing (rope_type {rope_type!r} needs it)" for key in sorted(required - given)]
    for key in sorted(given - known):
        if key == "attn_factor":
            problems.append(
                "unknown key 'attn_factor': in llama.cpp and older vLLM it multiplies 0.1 ln factor + 1, "
                "'attention_factor' replaces it; write the product as attention_factor"
            )
        else:
            problems.append(f"unknown key {key!r} for rope_type {rope_type!r}{nearest(key, known)}")
    return problems


def _proposal(fields: RopeFields) -> str:
    """Words that propose an original length where none is given."""
    factor, longest = fields.parameters.get("factor"), fields.max_length
    if not is_number(longest):
        return "the length it was trained at before scaling"
    if is_number(factor) and factor:
        return (
            f"probably {int(longest / factor)} (= max_position_embeddings {longest} / factor {factor:g}) if "
            f"max_position_embeddings is already stretched, {longest} if it is not"
        )
    return f"the trained length, not the stretched {longest}"


def from_config(
    config: Any,
    *,
    layer_type: str | None = None,
    head_dim: int | None = None,
    rope_theta: float | None = None,
    max_position_embeddings: int | None = None,
    checkpoint: Any = None,
    mscale_rule: Literal["reference", "transformers"] = "transformers",
) -> FrequencyMethod:
    """The frequency method that a configuration asks for.

    ``config``: a transformers configuration object, a config.json as a mapping (``rope_parameters`` of v5, flat or per
    layer type; ``rope_scaling`` with ``rope_theta`` of v4), or bare rope parameters, with ``head_dim`` and what else
    they lack as arguments. ``checkpoint`` is the configuration that an override was applied to: a base it has is kept.
    ``mscale_rule`` is transformers' by default, so that a model keeps its own numbers; see `Yarn`.

    Raises ValueError with every problem found: unknown or missing keys (the nearest known key is named), a missing base
    (never defaulted), no or two original lengths, wrong numbers.
    """
    fields = rope_fields(config, layer_type)
    theta = fields.theta if rope_theta is None else rope_theta
    if theta is None and checkpoint is not None:
        theta = rope_fields(checkpoint, layer_type).theta
    fields = fields._replace(
        max_length=fields.max_length if max_position_embeddings is None else max_position_embeddings,
        head_dim=fields.head_dim if head_dim is None else head_dim,
        theta=theta,
    )
    problems = []
    if theta is None:
        problems.append(
            "rope_theta missing: no base in the rope parameters or beside them; an override must keep the checkpoint's "
            "(pass rope_theta= or checkpoint=)"
        )
    wrong_sizes = [
        f"{key} must be a number above 0, got {value!r}"
        for key, value in (
            ("head_dim", fields.head_dim),
            ("rotary_dim", fields.rotary_dim),
            ("max_position_embeddings", fields.max_length),
            ("original_max_position_embeddings", fields.original_length),
        )
        if value is not None and (not is_number(value) or value <= 0)
    ]
    if fields.partial is not None and (not is_number(fields.partial) or not 0 <= fields.partial <= 1):
        wrong_sizes.append(f"partial_rotary_factor must lie in [0, 1], got {fields.partial!r}")
    if wrong_sizes:
        raise ValueError("; ".join([*problems, *wrong_sizes]))
    rotary_dim = _rotary_dim(fields)
    if rotary_dim is None:
        problems.append("head_dim missing: give head_dim, or hidden_size and num_attention_heads")
    name = ALIASES.get(fields.rope_type, fields.rope_type)
    given = {key: value for key, value in fields.parameters.items() if key not in fields.foreign_keys - SHARED_KEYS}
    if fields.original_length is not None and name != "default":
        given["original_max_position_embeddings"] = fields.original_length
    if name in ROPE_KEYS:
        problems += _engine_problems(name, given, fields)
    elif name == "axial":
        problems.append("rope_type 'axial' is a two-dimensional vision encoding, not a frequency method")
    elif name not in METHODS and not (name.startswith("dynamic_") and name[8:] in METHODS):
        known = [*ROPE_KEYS, *METHODS, *ALIASES]
        problems.append(f"unknown rope_type {fields.rope_type!r}{nearest(fields.rope_type, known)}")
    if problems or rotary_dim is None:
        raise ValueError("; ".join(problems))
    if name in ROPE_KEYS:
        if fields.rope_type == "deepseek_yarn":
            mscale_rule = "reference"
        return _engine_method(name, given, fields, rotary_dim, theta, mscale_rule)
    return _own_method(name, given, fields, rotary_dim, theta)


def _rotary_dim(fields: RopeFields) -> int | None:
    if fields.head_dim is None:
        return fields.rotary_dim
    if fields.rope_type == "proportional" or fields.partial is None:
        return fields.head_dim if fields.rotary_dim is None else fields.rotary_dim
    return int(fields.head_dim * fields.partial)


def _engine_problems(name: str, given: Mapping[str, Any], fields: RopeFields) -> list[str]:
    required, optional = ROPE_KEYS[name]
    if "alpha" in given and name == "dynamic":
        optional = optional | {"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
        required = frozenset()
    if "factor" in required and name == "yarn" and "original_max_position_embeddings" in given and fields.max_length:
        required, optional = required - {"factor"}, optional | {"factor"}
    present = {*given, "partial_rotary_factor"} if fields.partial is not None else set(given)
    problems = check_keys(name, present, required, optional)
    for i, problem in enumerate(problems):
        if problem.startswith("original_max_position_embeddings is missing"):
            problems[i] = f"{problem}: {_proposal(fields)}"
    if name == "dynamic":
        original = given.get("original_max_position_embeddings")
        if fields.max_length is None and original is None:
            problems.append("max_position_embeddings missing: dynamic scaling measures growth against it")
        if original is not None and fields.max_length is not None and original != fields.max_length:
            problems.append(
                f"dynamic scaling measures growth against max_position_embeddings, here {fields.max_length}, and "
                f"original_max_position_embeddings {original} is not read: write max_position_embeddings: {original}"
            )
    return problems


def _engine_method(
    name: str, given: Mapping[str, Any], fields: RopeFields, rotary_dim: int, base: float, mscale_rule: Any
) -> FrequencyMethod:
    common: dict[str, Any] = {"rotary_dim": rotary_dim, "base": base}
    original: Any = given.get("original_max_position_embeddings")
    factor: Any = given.get("factor")
    if name == "default":
        return Default(**common)
    if name == "linear":
        return Linear(**common, factor=factor)
    if name == "proportional":
        share = 1.0 if fields.partial is None else fields.partial
        return Proportional(**common, proportion=share, factor=1.0 if factor is None else factor)
    if name == "dynamic":
        if "alpha" in given:
            return NTK(**common, factor=given["alpha"])
        return dynamic_ntk(**common, trained_length=fields.max_length or original, factor=factor)
    if name == "llama3":
        bounds = {key: given[key] for key in ("low_freq_factor", "high_freq_factor")}
        return Llama3(**common, trained_length=original, factor=factor, **bounds)
    if name == "longrope":
        lists: dict[str, Any] = {key: _numbers(key, given[key]) for key in ("short_factor", "long_factor")}
        rest = {key: given[key] for key in ROPE_KEYS[name][1] if key in given}
        return LongRope(**common, trained_length=original, max_length=fields.max_length, **lists, **rest)
    rest = {key: given[key] for key in ("attention_factor", "mscale", "mscale_all_dim", "truncate") if key in given}
    return Yarn(
        **common,
        trained_length=original,
        factor=(fields.max_length or 0) / original if factor is None else factor,
        beta=given.get("beta_fast") or 32.0,
        alpha=given.get("beta_slow") or 1.0,
        mscale_rule=mscale_rule,
        scale_softmax=fields.softmax_in_model,
        **rest,
    )


def _numbers(key: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{key} must be a list of numbers, got {type(value).__name__} {str(value)[:40]!r}")
    return tuple(value)


def _own_method(
    name: str, given: Mapping[str, Any], fields: RopeFields, rotary_dim: int, base: float
) -> FrequencyMethod:
    """A method of this library by its own name: keys are its fields, the trained length is the original length."""
    dynamic = name.startswith("dynamic_") and name not in METHODS
    cls = METHODS[name[8:] if dynamic else name]
    options = {key: value for key, value in given.items() if key not in SHARED_KEYS}
    if "original_max_position_embeddings" in options:
        options["trained_length"] = options.pop("original_max_position_embeddings")
    if cls is Clex or cls is Dynamic:
        raise ValueError(f"rope_type {name!r} cannot be read from numbers alone: build {cls.__name__} in code")
    inner = options.pop("method", None)
    known = {field.name for field in dataclasses.fields(cls)} - {"rotary_dim", "base", "method"}
    grown_from = options.pop("trained_length", None) if dynamic and "trained_length" not in known else None
    written = {"trained_length": "original_max_position_embeddings"} if "trained_length" not in given else {}
    strange = sorted(written.get(key, key) for key in set(options) - known)
    unknown = [f"unknown key {key!r}{nearest(key, known)}" for key in strange]
    missing = sorted(
        field.name
        for field in dataclasses.fields(cls)
        if field.name in known and field.name not in options and field.default is dataclasses.MISSING
    )
    unknown += [f"{key} is missing (rope_type {name!r} needs it)" for key in missing]
    if unknown:
        raise ValueError("; ".join(unknown))
    options = {key: _frozen(value) for key, value in options.items()}
    if cls in (Resonance, LogN):
        block = {"rope_type": "default", "rope_theta": base, **(inner or {})}
        head = fields.head_dim
        method = from_config(block, head_dim=head, max_position_embeddings=fields.max_length)
        return cls(method=method, **options)
    made = cls(rotary_dim=rotary_dim, base=base, **options)
    if not dynamic:
        return made
    if not isinstance(made, Scalable):
        raise ValueError(f"rope_type {name!r}: {cls.__name__} has no factor to grow")
    own = getattr(made, "trained_length", None) or grown_from
    return Dynamic(method=made, trained_length=own or fields.max_length)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


class UsableLength(NamedTuple):
    """How long input may be, and why."""

    length: int
    declared: int | None
    rule: str


def usable_length(config: Any, *, layer_type: str | None = None) -> UsableLength:
    """The length a configuration's scaling reaches, what the file declares, and the rule in words.

    original length x factor for linear, NTK and YaRN; max_position_embeddings as it stands for llama3 and longrope
    (they carry the true length there) and wherever no original length says what the factor multiplies. The factor is
    never applied to a length that already contains it. Raises ValueError when no length is stated.
    """
    fields = rope_fields(config, layer_type)
    declared = int(fields.max_length) if is_number(fields.max_length) else None
    original: Any = fields.original_length
    factor: Any = fields.parameters.get("factor")
    name = ALIASES.get(fields.rope_type, fields.rope_type)
    if name in ("llama3", "longrope", "default", "proportional") and declared is not None:
        rule = f"{name}: max_position_embeddings as it stands ({declared}); no factor multiplies it"
        return UsableLength(declared, declared, rule)
    if name == "dynamic" and declared is not None:
        rule = f"dynamic: nothing changes up to max_position_embeddings ({declared}), frequencies grow untrained beyond"
        return UsableLength(declared, declared, rule)
    if is_number(original) and is_number(factor):
        length = round(original * factor)
        rule = f"{name}: original_max_position_embeddings * factor = {original} * {factor:g} = {length}"
        if declared is not None and declared != length:
            rule += f"; the file declares {declared}: write max_position_embeddings: {length}"
        return UsableLength(length, declared, rule)
    if declared is None:
        raise ValueError("no length stated: neither max_position_embeddings nor an original length with a factor")
    rule = f"{name}: no original length says what the factor multiplies; max_position_embeddings as it stands"
    if is_number(factor):
        rule += f" ({declared}; {round(declared * factor)} if it is still the trained length)"
    return UsableLength(declared, declared, rule)


def merge_scaling(
    config: Mapping[str, Any],
    scaling: Mapping[str, Any],
    *,
    layer_type: str | None = None,
    replace_trained: bool = False,
) -> dict[str, Any]:
    """A copy of a config.json with a scaling merged in: the base and everything else survive.

    The block keeps its place and version (``rope_parameters`` flat or per layer type, or ``rope_scaling``); keys of an
    old scaling of another type do not survive, the base and the rotated share do. Raises ValueError when the result has
    no base, and when the checkpoint was trained with a scaling of another type, unless ``replace_trained``.
    """
    fields = rope_fields(config, layer_type)
    new_type = scaling.get("rope_type", scaling.get("type"))
    if not isinstance(new_type, str):
        raise ValueError("the scaling to merge names no rope_type")
    old_type = fields.rope_type
    if old_type not in ("default", new_type) and not replace_trained:
        raise ValueError(
            f"the checkpoint was trained with rope_type {old_type!r}; {new_type!r} would replace it and undo what its "
            "weights learned: widen its own block instead, or pass replace_trained=True"
        )
    kept = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
    block = {key: value for key, value in fields.parameters.items() if key in kept or old_type == new_type}
    block = {**{k: v for k, v in block.items() if k != "type"}, **{k: v for k, v in scaling.items() if k != "type"}}
    block["rope_type"] = new_type
    theta = block.get("rope_theta", fields.theta)
    if theta is None:
        raise ValueError("rope_theta missing: neither the checkpoint nor the scaling states a base")
    block["rope_theta"] = theta
    merged = dict(config)
    if "rope_theta" in merged:
        merged["rope_theta"] = theta
    place = "rope_parameters" if merged.get("rope_parameters") is not None else None
    place = place or ("rope_scaling" if "rope_theta" in merged or "rope_scaling" in merged else "rope_parameters")
    current = merged.get(place)
    if isinstance(current, Mapping) and _is_nested(current):
        merged[place] = {**current, layer_type: block}
    else:
        merged[place] = block
    return merged
