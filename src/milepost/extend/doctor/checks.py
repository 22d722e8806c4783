"""The checks: each looks at one rope block and yields findings. None may fail on any JSON whatever."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from milepost.encodings.frequencies import METHODS
from milepost.encodings.frequencies.config import MODEL_KEYS, ROPE_KEYS, SHARED_KEYS
from milepost.extend.doctor.findings import DELETE, Change, Finding, View, listed, number, whole
from milepost.extend.engines import TRANSFORMERS_TYPES, VLLM_TYPES
from milepost.extend.rope_types import rope_type_names

NATIVE_LENGTHS = (2048, 4096, 8192, 32768)
"""Lengths that models are trained at; a declared length among them is probably not stretched yet."""

NUMBERS = (
    *("factor", "attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "mscale"),
    *("mscale_all_dim", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "short_mscale"),
    *("long_mscale", "attn_factor", "alpha", "extrapolation_factor", "mixed_b"),
)
TOP_NUMBERS = (
    *("rope_theta", "rotary_emb_base", "partial_rotary_factor", "rotary_pct", "max_position_embeddings", "head_dim"),
    *("original_max_position_embeddings", "hidden_size", "num_attention_heads", "rope_local_base_freq"),
)
LENGTHS = (
    *("max_position_embeddings", "original_max_position_embeddings", "head_dim", "hidden_size"),
    "num_attention_heads",
)
BASES = ("rope_theta", "rotary_emb_base", "rope_local_base_freq")

IGNORES_PARTIAL = frozenset(
    {
        *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text"),
        *("olmo", "olmo2", "olmo3", "granite", "smollm3", "cohere", "cohere2", "gpt_oss", "starcoder2", "ministral3"),
    }
)
"""Model types whose class in transformers 5.24 rotates the whole head whatever partial_rotary_factor says."""

Check = Callable[[View], Iterator[Finding]]


def short(value: Any) -> str:
    """A value in at most 60 characters."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def parsed(value: Any) -> float | int | None:
    """The number that a text means, or None."""
    if not isinstance(value, str) or len(value) > 40:
        return None
    try:
        found = float(value)
    except ValueError:
        return None
    if not math.isfinite(found):
        return None
    return int(found) if found == int(found) and "." not in value and "e" not in value.lower() else found


def check_numbers(view: View) -> Iterator[Finding]:
    """Numbers are numbers, and in their range."""
    places = [(view.at(key), key, view.block[key]) for key in NUMBERS if view.block.get(key) is not None]
    if view.stated or view.path == view.config_path:
        places += [
            (view.top(key), key, view.config[key])
            for key in TOP_NUMBERS
            if view.config.get(key) is not None and view.top(key) not in {place[0] for place in places}
        ]
    for where, key, value in places:
        found = number(value)
        if found is None:
            mended = parsed(value)
            yield Finding(
                rule="not-a-number",
                where=where,
                words=f"{key} is {short(value)}: {'text' if isinstance(value, str) else 'not a number'}",
                fix=None if mended is None else f"{key}: {mended}",
                changes=() if mended is None else (Change(path=where, value=mended),),
            )
            continue
        wrong = None
        if key in LENGTHS and whole(found) is None:
            wrong = "a whole number above 0"
        elif key in BASES and found <= 1:
            wrong = "above 1"
        elif key in ("partial_rotary_factor", "rotary_pct") and not 0 < found <= 1:
            wrong = "above 0 and at most 1"
        elif key in ("attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "alpha"):
            wrong = "above 0" if found <= 0 else None
        elif key in ("short_mscale", "long_mscale", "attn_factor", "mixed_b"):
            wrong = "above 0" if found <= 0 else None
        if wrong:
            yield Finding(rule="number-out-of-range", where=where, words=f"{key} is {short(value)}, must be {wrong}")
        elif key == "attention_factor" and not 0.3 <= found <= 3:
            yield Finding(
                rule="attention-factor-unusual",
                where=where,
                words=f"attention_factor {found:g} multiplies rotated logits by {found**2:g} at every length",
            )


def check_type(view: View) -> Iterator[Finding]:
    """The type is there, known, lower case, and said once."""
    if not view.stated:
        return
    new, old = view.block.get("rope_type"), view.block.get("type")
    if new is None and old is None:
        extra = sorted(set(view.block) - SHARED_KEYS)
        if extra:
            yield Finding(
                rule="rope-type-missing",
                where=view.path,
                words=f"{listed(extra)} given and no rope_type: nothing is scaled",
                fix="add rope_type (linear, dynamic, yarn, llama3 or longrope) and what it needs",
            )
        return
    if new is not None and old is not None and new != old:
        yield Finding(
            rule="type-disagrees",
            where=view.at("type"),
            words=f"rope_type is {short(new)} and type is {short(old)}: transformers takes {short(new)} silently",
            fix="keep rope_type only",
            changes=(Change(path=view.at("type"), value=DELETE),),
        )
    key = "type" if new is None else "rope_type"
    name = old if new is None else new
    if new is None:
        yield Finding(
            rule="legacy-type-key",
            where=view.at("type"),
            words="type is the old name of rope_type",
            changes=(Change(path=view.at("rope_type"), value=name), Change(path=view.at("type"), value=DELETE))
            if isinstance(name, str)
            else (),
        )
    if not isinstance(name, str):
        yield Finding(rule="rope-type-unknown", where=view.at(key), words=f"rope_type is {short(name)}, not a name")
        return
    known = {*TRANSFORMERS_TYPES, *VLLM_TYPES, "su", "mrope", "axial"}
    if name in known:
        if name not in TRANSFORMERS_TYPES and name not in ("su", "mrope", "axial"):
            yield Finding(
                rule="rope-type-one-engine",
                where=view.at(key),
                words=f"rope_type {name!r} is vLLM's: transformers stops with a KeyError",
            )
        return
    if name.lower() in known:
        yield Finding(
            rule="rope-type-case",
            where=view.at(key),
            words=f"rope_type {name!r} is not {name.lower()!r} for any engine",
            fix=f"rope_type: {name.lower()}",
            changes=(Change(path=view.at(key), value=name.lower()),),
        )
        return
    close = difflib.get_close_matches(name.lower(), sorted(known), n=1, cutoff=0.6)
    words = f"rope_type {name[:40]!r} is unknown: transformers warns and stops with a KeyError in the model"
    if name in rope_type_names() or name in METHODS:
        words = f"rope_type {name!r} is a method of milepost: engines know it after milepost.register_rope_types() only"
    yield Finding(
        rule="rope-type-unknown",
        where=view.at(key),
        words=words,
        fix=f"did you mean {close[0]!r}?" if close else None,
        changes=(Change(path=view.at(key), value=close[0]),) if close and name not in METHODS else (),
    )


def check_keys(view: View) -> Iterator[Finding]:
    """Every key is one that the type reads; every key it needs is there."""
    kind = view.type
    if not view.stated or kind not in ROPE_KEYS:
        return
    required, optional = ROPE_KEYS[kind]
    if kind == "dynamic" and "alpha" in view.block:
        required, optional = frozenset(), optional | {"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
    engine: set[str] = set()
    if view.kind == "override" or kind == "longrope":
        engine |= {"attn_factor", "extrapolation_factor", "apply_yarn_scaling", "short_mscale", "long_mscale"}
    beside = (*TOP_NUMBERS, "model_type", "dtype", "torch_dtype") if view.path == view.config_path else ()
    model = MODEL_KEYS.get(str(view.config.get("model_type")), ())
    known = {*required, *optional, *SHARED_KEYS, *engine, *model, *beside}
    for key in sorted(set(view.block) - known):
        if view.block[key] is None:
            continue
        if key == "attn_factor" and kind == "yarn":
            yield _attn_factor(view)
            continue
        close = difflib.get_close_matches(key.lower(), sorted(known - set(view.block)), n=1, cutoff=0.6)
        renamed = (Change(path=view.at(close[0]), value=view.block[key]),) if close else ()
        yield Finding(
            rule="unknown-key",
            where=view.at(key),
            words=f"{key[:60]!r} is not read by rope_type {kind!r}",
            fix=f"did you mean {close[0]!r}?" if close else f"remove {key[:60]!r}",
            changes=(*renamed, Change(path=view.at(key), value=DELETE)),
        )
    if view.kind == "override" and kind == "yarn" and "attn_factor" in view.block:
        replaced, multiplied = number(view.block.get("attention_factor")), number(view.block.get("attn_factor"))
        natural = _natural(view)
        if (
            None in (replaced, multiplied, natural)
            or abs((multiplied or 0) * (natural or 0) / (replaced or 1) - 1) > 1e-6
        ):
            yield _attn_factor(view)
    for key in sorted(required - set(k for k, v in view.block.items() if v is not None)):
        if key == "original_max_position_embeddings" or (key == "partial_rotary_factor"):
            continue
        yield Finding(
            rule="key-missing",
            where=view.at(key),
            words=f"rope_type {kind!r} needs {key}",
            fix=f"add {key}",
        )


def _natural(view: View) -> float | None:
    """YaRN's own temperature at the block's factor."""
    factor = view.factor
    return None if factor is None else 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1


def _attn_factor(view: View) -> Finding:
    given, natural = number(view.block.get("attn_factor")), _natural(view)
    meant = None if given is None or natural is None else given * natural
    if meant is not None and abs(meant - 1) < 1e-6:
        meant = 1.0
    fix = None if meant is None else f"attention_factor: {meant:.10g} for transformers; attn_factor is llama.cpp's"
    return Finding(
        rule="attn-factor",
        where=view.at("attn_factor"),
        words=f"attn_factor {short(view.block.get('attn_factor'))} multiplies 0.1 ln factor + 1 where it is read; "
        "attention_factor replaces it",
        fix=fix,
        changes=()
        if meant is None
        else (
            Change(path=view.at("attention_factor"), value=meant),
            Change(path=view.at("attn_factor"), value=DELETE),
        ),
    )


def check_factor(view: View) -> Iterator[Finding]:
    """The factor stretches."""
    factor = view.factor
    if view.stated and factor is not None and factor < 1:
        inverse = 1 / factor if factor > 1e-6 else None
        yield Finding(
            rule="factor-below-one",
            where=view.at("factor"),
            words=f"factor is {factor:g}: input would get shorter",
            fix=None if inverse is None else f"factor: {inverse:g}, if {factor:g} was meant as its inverse",
            changes=() if inverse is None else (Change(path=view.at("factor"), value=round(inverse, 6)),),
        )


def check_original(view: View) -> Iterator[Finding]:
    """One original length where the type needs it, and one only."""
    inner, outer = view.block.get("original_max_position_embeddings"), view.get("original_max_position_embeddings")
    if not view.stated or view.type not in ("yarn", "llama3", "longrope"):
        return
    same_place = view.path == view.config_path
    if inner is not None and outer is not None and inner != outer and not same_place:
        longest, factor = view.max_length, view.factor
        keep = next(
            (x for x in (inner, outer) if whole(x) and longest and factor and abs(whole(x) * factor - longest) < 1),  # type: ignore[operator]  # whole(x) is an int here
            inner,
        )
        yield Finding(
            rule="original-lengths-disagree",
            where=view.at("original_max_position_embeddings"),
            words=f"original_max_position_embeddings is {short(inner)} in the block and {short(outer)} at the top "
            "level: transformers takes the latter",
            fix=f"keep {short(keep)} only (factor x original = max_position_embeddings decides)",
            changes=(
                Change(path=view.at("original_max_position_embeddings"), value=keep),
                Change(path=view.top("original_max_position_embeddings"), value=DELETE),
            ),
        )
    if inner is None and outer is None:
        proposal, reason = propose_original(view)
        yield Finding(
            rule="original-length-missing",
            where=view.at("original_max_position_embeddings"),
            words="original_max_position_embeddings is missing"
            + (f": transformers measures against {view.max_length}" if view.max_length else ""),
            fix="add original_max_position_embeddings: "
            + (f"{proposal} ({reason})" if proposal else "the length before scaling"),
            changes=()
            if proposal is None
            else (Change(path=view.at("original_max_position_embeddings"), value=proposal),),
        )


def propose_original(view: View) -> tuple[int | None, str]:
    """The likely length before scaling, and why."""
    longest, factor = view.max_length, view.factor
    if view.type == "llama3" and (longest is None or longest > 8192):
        return 8192, "every published checkpoint with llama3 scaling"
    if longest is None:
        return None, ""
    if longest in NATIVE_LENGTHS or factor is None or factor <= 1:
        return longest, "max_position_embeddings, which looks unstretched"
    divided = whole(longest / factor)
    if divided is None:
        return longest, "max_position_embeddings: it is no multiple of the factor"
    return divided, f"= {longest}/{factor:g}"


def check_lengths(view: View) -> Iterator[Finding]:
    """The declared length is the one that the scaling reaches."""
    longest, factor, original = view.max_length, view.factor, view.original
    if not view.stated or longest is None or original is None:
        return
    if view.type == "llama3" and original >= longest:
        yield Finding(
            rule="llama3-length",
            where=view.top("max_position_embeddings"),
            words=f"original_max_position_embeddings {original} is not below max_position_embeddings {longest}",
            fix="state the stretched length in max_position_embeddings",
        )
    if view.type in ("yarn", "linear", "longrope") and factor is not None and factor >= 1:
        reached = round(original * factor) if original * factor < 2**53 else 0
        if reached != longest and reached > 0:
            effect = "serving stacks cut at the declared length" if longest < reached else "beyond that it is untrained"
            yield Finding(
                rule="length-mismatch",
                where=view.top("max_position_embeddings"),
                words=f"factor {factor:g} x original {original} reaches {reached}, max_position_embeddings says "
                f"{longest}: {effect}",
                fix=f"max_position_embeddings: {reached}",
                changes=(Change(path=view.top("max_position_embeddings"), value=reached),),
            )


def check_range(view: View) -> Iterator[Finding]:
    """Betas and frequency factors stand in order."""
    if not view.stated:
        return
    for high, low, defaults in (
        ("beta_fast", "beta_slow", (32.0, 1.0)),
        ("high_freq_factor", "low_freq_factor", (None, None)),
    ):
        upper, lower = number(view.block.get(high)), number(view.block.get(low))
        if upper is None and lower is None:
            continue
        top = upper if upper is not None else defaults[0]
        bottom = lower if lower is not None else defaults[1]
        if top is not None and bottom is not None and top < bottom:
            swapped = upper is not None and lower is not None
            yield Finding(
                rule="range-backwards",
                where=view.at(high),
                words=f"{high} {top:g} is below {low} {bottom:g}: slow pairs are not stretched at all",
                fix=f"{high}: {bottom:g}, {low}: {top:g}" if swapped else f"{high} above {low}",
                changes=(Change(path=view.at(high), value=lower), Change(path=view.at(low), value=upper))
                if swapped
                else (),
            )


def check_lists(view: View) -> Iterator[Finding]:
    """LongRoPE's lists have one number above 0 a pair."""
    if not view.stated or view.type != "longrope":
        return
    rotary_dim = view.rotary_dim
    pairs = rotary_dim // 2 if rotary_dim else None
    sizes = {}
    for key in ("short_factor", "long_factor"):
        value = view.block.get(key)
        if value is None:
            continue
        wanted = f"{pairs} numbers (head_dim x partial_rotary_factor / 2)" if pairs else "one number a pair"
        fix = "take both lists from the original checkpoint"
        if not isinstance(value, (list, tuple)):
            kind = "text" if isinstance(value, str) else type(value).__name__
            yield Finding(
                rule="list-length", where=view.at(key), words=f"{key} is {kind}, not a list of {wanted}", fix=fix
            )
            continue
        sizes[key] = len(value)
        bad = next((item for item in value if number(item) is None or item <= 0), None)
        if bad is not None:
            yield Finding(
                rule="number-out-of-range",
                where=view.at(key),
                words=f"{key} holds {short(bad)}: every divisor must be a number above 0",
                fix=fix,
            )
        if pairs is not None and len(value) != pairs:
            yield Finding(
                rule="list-length", where=view.at(key), words=f"{key} has {len(value)} numbers, needs {wanted}", fix=fix
            )
    if len(set(sizes.values())) == 2 and pairs is None:
        yield Finding(
            rule="list-length",
            where=view.path,
            words=f"short_factor has {sizes['short_factor']} numbers and long_factor {sizes['long_factor']}",
            fix="take both lists from the original checkpoint",
        )


def check_theta(view: View) -> Iterator[Finding]:
    """The base is stated, once, and survives an override."""
    inner, outer = view.block.get("rope_theta"), view.get("rope_theta", "rotary_emb_base")
    same_place = view.path == view.config_path
    if not same_place and inner is not None and outer is not None and inner != outer and view.layer_type is None:
        yield Finding(
            rule="theta-disagrees",
            where=view.at("rope_theta"),
            words=f"rope_theta is {short(inner)} in the block and {short(outer)} at the top level: transformers 5 "
            f"takes {short(inner)}, version 4 {short(outer)}",
            fix="state the base that the model was trained with, once",
        )
    if view.checkpoint is not None and view.kind == "override":
        yield from _override_theta(view)
        return
    if view.kind == "override" and view.stated and inner is None:
        yield Finding(
            rule="theta-lost",
            where=view.at("rope_theta"),
            words="the override replaces the whole block and states no rope_theta: transformers 5 loses the base",
            fix="repeat the checkpoint's rope_theta inside the block",
        )
    elif view.theta is None and view.kind in ("config", "parameters"):
        yield Finding(
            rule="theta-missing",
            where=view.at("rope_theta") if view.stated else view.top("rope_theta"),
            words="no rope_theta: transformers takes its class's default (10000 in most), other readers theirs",
            fix="state the base that the model was trained with",
        )


def _theta_of(config: Any) -> Any:
    if not isinstance(config, dict):
        return None
    for name in ("rope_parameters", "rope_scaling"):
        block = config.get(name)
        if isinstance(block, dict) and block.get("rope_theta") is not None:
            return block["rope_theta"]
    return config.get("rope_theta", config.get("rotary_emb_base"))


def _override_theta(view: View) -> Iterator[Finding]:
    trained, inner = _theta_of(view.checkpoint), view.block.get("rope_theta")
    if view.stated and inner is None and trained is not None:
        yield Finding(
            rule="theta-lost",
            where=view.at("rope_theta"),
            words=f"rope_theta missing: was {short(trained)} in the checkpoint, and the override replaces its block",
            fix=f"add rope_theta: {short(trained)} to the block",
            changes=(Change(path=view.at("rope_theta"), value=trained),),
        )
    checkpoint = view.checkpoint or {}
    held = checkpoint.get("rope_parameters")
    outer = view.config.get("rope_theta")
    if not view.stated and outer is not None and isinstance(held, dict) and held.get("rope_theta") not in (None, outer):
        yield Finding(
            rule="override-not-read",
            where=view.top("rope_theta"),
            words=f"rope_theta {short(outer)} at the top level is not read: the checkpoint's rope_parameters hold "
            f"{short(held['rope_theta'])}",
            fix="override rope_parameters as a whole",
            changes=(
                Change(path=view.top("rope_parameters"), value={**held, "rope_theta": outer}),
                Change(path=view.top("rope_theta"), value=DELETE),
            ),
        )


def _scaling_of(config: Any) -> str | None:
    """The type a checkpoint was trained with; accepts a configuration or a bare block."""
    if not isinstance(config, dict):
        return None
    block: Any = config
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(config.get(name), dict):
            block = config[name]
    name = block.get("rope_type", block.get("type"))
    return name if isinstance(name, str) else None


def check_trained(view: View) -> Iterator[Finding]:
    """A trained scaling is never replaced without saying so."""
    before = _scaling_of(view.checkpoint) or _scaling_of(view.config.get("_checkpoint_had"))
    if not view.stated or before in (None, "default", "mrope") or view.replace_trained:
        return
    names = {"su": "longrope"}
    if view.type is not None and names.get(str(before), before) != view.type:
        yield Finding(
            rule="trained-scaling-replaced",
            where=view.at("rope_type"),
            words=f"the checkpoint was trained with rope_type {before!r}; {view.type!r} replaces it",
            fix=f"keep the {before} block and widen it, or say that you mean it (--replace-trained)",
        )


def check_partial(view: View) -> Iterator[Finding]:
    """The class honours the rotated share, and the width is even."""
    partial, model_type = view.partial, view.config.get("model_type")
    if partial is not None and 0 < partial < 1 and view.type != "proportional" and model_type in IGNORES_PARTIAL:
        yield Finding(
            rule="partial-ignored",
            where=view.at("partial_rotary_factor"),
            words=f"transformers' {model_type} class ignores partial_rotary_factor {partial:g}: the whole head rotates",
            fix="use a class that honours it, or remove it if the whole head was rotated in training",
        )
    if view.type == "proportional" and partial is None:
        yield Finding(
            rule="share-missing",
            where=view.at("partial_rotary_factor"),
            words="rope_type 'proportional' without partial_rotary_factor: every pair rotates",
            fix="add partial_rotary_factor, the share of pairs that rotate",
        )
    head_dim, rotary_dim = view.head_dim, view.rotary_dim
    if head_dim is not None and head_dim > 65536:
        yield Finding(rule="size-implausible", where=view.top("head_dim"), words=f"a head of {head_dim} channels")
    elif rotary_dim is not None and (rotary_dim % 2 or rotary_dim < 2):
        yield Finding(
            rule="rotary-dim-odd",
            where=view.top("head_dim"),
            words=f"{rotary_dim} channels rotate (head_dim {head_dim}): they cannot be paired",
        )


def check_length_dependence(view: View) -> Iterator[Finding]:
    """Types whose frequencies change with the length."""
    if not view.stated:
        return
    if view.type == "dynamic" and "alpha" not in view.block:
        stated = view.block.get("original_max_position_embeddings")
        original, longest = whole(stated), view.max_length
        if stated is not None and original != longest:
            yield Finding(
                rule="dynamic-length",
                where=view.top("max_position_embeddings"),
                words=f"growth is measured against max_position_embeddings {longest}: nothing is scaled below it, and "
                f"original_max_position_embeddings {short(stated)} is not read",
                fix=f"max_position_embeddings: {short(stated)}, and remove original_max_position_embeddings; the "
                "stretch at length l is factor * l/L - (factor - 1)",
                changes=()
                if original is None
                else (
                    Change(path=view.top("max_position_embeddings"), value=original),
                    Change(path=view.at("original_max_position_embeddings"), value=DELETE),
                ),
            )
        yield Finding(
            rule="dynamic-cache",
            where=view.at("rope_type"),
            words=f"beyond {longest or 'the trained length'} tokens frequencies change while cached keys keep the old "
            "ones: decoding differs from one full pass, and rows of a batch share one length",
            fix="milepost.attach keeps raw keys and reads each row's length; or choose yarn with a fixed factor",
        )
    if view.type == "longrope":
        lists = view.block.get("short_factor"), view.block.get("long_factor")
        if all(isinstance(item, list) for item in lists) and lists[0] != lists[1]:
            yield Finding(
                rule="longrope-switch",
                where=view.at("long_factor"),
                words=f"past {view.original or 'the trained length'} tokens transformers changes lists with keys of "
                "the other list in its cache; vLLM and llama.cpp take one list by the configured context",
            )


def check_small_print(view: View) -> Iterator[Finding]:
    """Keys that mean different things in different readers."""
    if view.type == "yarn" and view.stated:
        mscale, all_dim = number(view.block.get("mscale")), number(view.block.get("mscale_all_dim"))
        given = (mscale is not None) != (all_dim is not None) or 0 in (mscale, all_dim)
        if given and view.block.get("attention_factor") is None:
            yield Finding(
                rule="mscale-alone",
                where=view.at("mscale"),
                words=f"mscale {short(view.block.get('mscale'))} with mscale_all_dim "
                f"{short(view.block.get('mscale_all_dim'))}: transformers ignores both, DeepSeek's code does not",
                fix="write attention_factor",
            )
        if view.layer_type is not None and view.block.get("truncate") is False:
            yield Finding(
                rule="nested-truncate",
                where=view.at("truncate"),
                words="truncate: false inside a nested block is not read by transformers 5.24: the range is rounded",
                fix="milepost.register_rope_types(override=True) honours it",
            )
    dtype = view.get("dtype", "torch_dtype")
    if dtype in ("bfloat16", "float16") and view.layer_type is None:
        yield Finding(
            rule="half-precision-note",
            where=view.top("dtype" if "dtype" in view.config else "torch_dtype"),
            words=f"{dtype}: load with dtype=, never cast afterwards, or inv_freq is rounded to it",
        )


CHECKS: tuple[Check, ...] = (
    check_numbers,
    check_type,
    check_keys,
    check_factor,
    check_original,
    check_lengths,
    check_range,
    check_lists,
    check_theta,
    check_trained,
    check_partial,
    check_length_dependence,
    check_small_print,
)
