"""Checks of form: numbers are numbers, the type is known, every key is one that the type reads."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from typing import Any

from milepost.encodings.frequencies import METHODS
from milepost.encodings.frequencies.config import MODEL_KEYS, ROPE_KEYS, SHARED_KEYS
from milepost.extend.doctor.classes import ALPHA, MROPE, SU
from milepost.extend.doctor.findings import DELETE, Change, Finding, View, listed, number, short, whole
from milepost.extend.engines import TRANSFORMERS_TYPES, VLLM_TYPES
from milepost.extend.rope_types import rope_type_names

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
SIZES = ("head_dim", "hidden_size", "num_attention_heads")
BASES = ("rope_theta", "rotary_emb_base", "rope_local_base_freq")
LEGACY = {"su": "longrope", "mrope": "default"}
"""Rope types of older files, and what they are called today."""
SPELT = ("rope_theta", "max_position_embeddings", "original_max_position_embeddings", "partial_rotary_factor")
"""Keys of a configuration whose misspelling is looked for."""


def plainly(key: str) -> str:
    """A key without case, underscores and hyphens."""
    return key.lower().replace("_", "").replace("-", "")


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
    if view.rotary:
        places += [
            (view.top(key), key, view.config[key])
            for key in TOP_NUMBERS
            if view.config.get(key) is not None
            and view.top(key) not in {place[0] for place in places}
            and not (key in SIZES and isinstance(view.config[key], list))  # one size a layer
            and not (key == "head_dim" and view.config.get("qk_rope_head_dim") is not None)
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
        if key in LENGTHS and isinstance(found, float) and whole(found) is not None and where == view.top(key):
            yield Finding(
                rule="number-out-of-range",
                where=where,
                words=f"{key} is {short(value)}, written with a point: transformers 5 wants whole numbers and stops",
                fix=f"{key}: {whole(found)}",
                changes=(Change(path=where, value=whole(found)),),
            )
            continue
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
                words=f"attention_factor {found:g} multiplies rotated logits by {found * found:g} at every length",
            )


def check_nulls(view: View) -> Iterator[Finding]:
    """Null is no value: where transformers fills in what is missing, it keeps a null that is there."""
    if not view.stated:
        return
    nulls = [key for key in ("rope_theta", "partial_rotary_factor") if key in view.block and view.block[key] is None]
    if "rope_type" in view.block and view.block["rope_type"] is None and view.block.get("type") is not None:
        nulls.append("rope_type")
    original = "original_max_position_embeddings"
    if view.type in ("yarn", "llama3", "longrope") and original in view.block and view.block[original] is None:
        nulls += [original] if view.original_at_top is None or view.layer_type else []
    for key in nulls:
        yield Finding(
            rule="null-value",
            where=view.at(key),
            words=f"{key} is null in the block: transformers keeps it, takes nothing in its place and stops",
            fix=f"remove {key} from the block, or give it its value",
            changes=() if key == "rope_type" else (Change(path=view.at(key), value=DELETE),),
        )
    truncate = view.block.get("truncate")
    if view.type == "yarn" and truncate is not None and not isinstance(truncate, bool):
        meant = {"true": True, "false": False, "1": True, "0": False}.get(str(truncate).lower())
        yield Finding(
            rule="truncate-not-boolean",
            where=view.at("truncate"),
            words=f"truncate is {short(truncate)}: read as {bool(truncate)}",
            fix=None if meant is None else f"truncate: {str(meant).lower()}",
            changes=() if meant is None else (Change(path=view.at("truncate"), value=meant),),
        )


def check_spelling(view: View) -> Iterator[Finding]:
    """A block or a number of the configuration under a name that is almost right is never read."""
    if view.path == view.config_path and view.stated:
        return
    for key, value in view.config.items():
        meant = None
        if isinstance(value, dict) and key not in ("rope_scaling", "rope_parameters"):
            names = {plainly(name): name for name in ("rope_scaling", "rope_parameters")}
            close = difflib.get_close_matches(plainly(key), names, n=1, cutoff=0.85)
            meant = names[close[0]] if close else None
        elif number(value) is not None and view.rotary and key not in SPELT:
            names = {plainly(name): name for name in SPELT if view.config.get(name) is None}
            close = difflib.get_close_matches(plainly(key), names, n=1, cutoff=0.93)
            meant = names[close[0]] if close else None
            if meant is not None and view.block.get(meant) is not None:
                meant = None
        if meant is None:
            continue
        free = view.config.get(meant) is None
        yield Finding(
            rule="unknown-key",
            where=view.top(key),
            words=f"{key[:60]!r} is no key that any engine reads",
            fix=f"did you mean {meant!r}?",
            changes=(Change(path=view.top(meant), value=value), Change(path=view.top(key), value=DELETE))
            if free
            else (),
        )


def _meant(view: View, new: Any, old: Any) -> Any:
    """Of two types the one whose keys the block has; ``rope_type`` where both fit or neither does."""

    def missing(name: Any) -> int:
        required, optional = ROPE_KEYS.get(LEGACY.get(str(name), str(name)), (frozenset(), frozenset()))
        return len(set(view.block) - required - optional - SHARED_KEYS) + len(required - set(view.block))

    return old if isinstance(old, str) and missing(old) < missing(new) else new


def _legacy(view: View, name: str, key: str) -> Iterator[Finding]:
    """Types of older files, and types that a class takes for another one."""
    model_type = view.model_type
    original = view.block.get("original_max_position_embeddings")
    if name == "yarn" and model_type in SU and view.kind == "config":
        yield Finding(
            rule="type-not-for-class",
            where=view.at(key),
            words=f"transformers' {model_type} class takes rope_type 'yarn' for 'longrope' and stops without "
            "short_factor and long_factor",
            fix="longrope with both lists: this class has no YaRN",
        )
    if name not in LEGACY or view.kind == "override":
        return
    if name == "mrope" and (model_type in MROPE or not model_type):
        return
    if name == "su" and model_type in SU and original is not None:
        return
    why = f"transformers' {model_type} class" if model_type else "transformers"
    words = f"rope_type {name!r} is the old name of {LEGACY[name]!r}: {why} stops with a KeyError"
    if name == "su" and model_type in SU:
        words = f"rope_type 'su' is the old name of 'longrope': {why} stops with a KeyError, because "
        words += "original_max_position_embeddings is not in the block"
    yield Finding(
        rule="type-not-for-class",
        where=view.at(key),
        words=words,
        fix=f"rope_type: {LEGACY[name]}",
        changes=(Change(path=view.at("rope_type"), value=LEGACY[name]), Change(path=view.at("type"), value=DELETE)),
    )


def check_type(view: View) -> Iterator[Finding]:
    """The type is there, known, lower case, and said once."""
    if not view.stated:
        return
    new, old = view.block.get("rope_type"), view.block.get("type")
    if new is None and old is None:
        extra = sorted(set(view.block) - SHARED_KEYS)
        if extra:
            misspelt = [key for key in extra if plainly(key) in ("ropetype", "ropescalingtype", "scalingtype")]
            named = {plainly(key): key for required, optional in ROPE_KEYS.values() for key in required | optional}
            moves = {key: named[plainly(key)] for key in extra if named.get(plainly(key), key) != key}
            moves |= {misspelt[0]: "rope_type"} if len(misspelt) == 1 else {}
            yield Finding(
                rule="rope-type-missing",
                where=view.path,
                words=f"{listed(extra)} given and no rope_type: nothing is scaled",
                fix=f"rename {listed([f'{one!r} to {other!r}' for one, other in moves.items()])}"
                if len(misspelt) == 1
                else "add rope_type (linear, dynamic, yarn, llama3 or longrope) and what it needs",
                changes=tuple(
                    change
                    for one, other in moves.items()
                    for change in (
                        Change(path=view.at(other), value=view.block[one]),
                        Change(path=view.at(one), value=DELETE),
                    )
                )
                if len(misspelt) == 1
                else (),
            )
        return
    if new is not None and old is not None and new != old and LEGACY.get(str(old)) != new:
        keep = _meant(view, new, old)
        yield Finding(
            rule="type-disagrees",
            where=view.at("type"),
            words=f"rope_type is {short(new)} and type is {short(old)}: transformers takes {short(new)} silently, "
            "vLLM stops",
            fix="keep rope_type only" if keep == new else f"rope_type: {keep}, whose keys are in the block",
            changes=(
                *(() if keep == new else (Change(path=view.at("rope_type"), value=keep),)),
                Change(path=view.at("type"), value=DELETE),
            ),
        )
        if keep != new:
            return  # what is wrong with the other type is not worth a word
    key = "type" if new is None else "rope_type"
    name = old if new is None else new
    if isinstance(name, str):
        yield from _legacy(view, name, key)
    if new is None and view.kind == "override" and view.path == ("rope_parameters",):
        yield Finding(
            rule="key-missing",
            where=view.at("rope_type"),
            words="rope_type is missing, and type is not read: vLLM brings files into today's form, and overrides not "
            "(KeyError: 'rope_type')",
            fix=f"rope_type: {short(name)}",
        )
    if new is None:
        yield Finding(
            rule="legacy-type-key",
            where=view.at("type"),
            words="type is the old name of rope_type",
            changes=(Change(path=view.at("rope_type"), value=name), Change(path=view.at("type"), value=DELETE))
            if isinstance(name, str) and name not in LEGACY
            else (),
        )
    if not isinstance(name, str):
        yield Finding(rule="rope-type-unknown", where=view.at(key), words=f"rope_type is {short(name)}, not a name")
        return
    known = {*TRANSFORMERS_TYPES, *VLLM_TYPES, *LEGACY, "axial"}
    if name in known:
        if name not in TRANSFORMERS_TYPES and name not in (*LEGACY, "axial"):
            yield Finding(
                rule="rope-type-one-engine",
                where=view.at(key),
                words=f"rope_type {name!r} is vLLM's: transformers stops with a KeyError",
            )
        if name == "dynamic" and view.block.get("alpha") is not None and view.kind != "override":
            if view.model_type and view.model_type not in ALPHA:
                missing = "and stops without factor" if view.block.get("factor") is None else "and takes factor"
                yield Finding(
                    rule="rope-type-one-engine",
                    where=view.at("alpha"),
                    words=f"alpha is read by vLLM and by the hunyuan classes: transformers' {view.model_type} class "
                    f"does not read it, {missing}",
                )
        return
    if name.strip().lower() in known:
        meant = name.strip().lower()
        yield Finding(
            rule="rope-type-case",
            where=view.at(key),
            words=f"rope_type {name!r} is not {meant!r} for any engine",
            fix=f"rope_type: {meant}",
            changes=(Change(path=view.at(key), value=meant),),
        )
        return
    close = difflib.get_close_matches(name.lower(), (*TRANSFORMERS_TYPES, "ntk"), n=1, cutoff=0.6)
    words = f"rope_type {name[:40]!r} is unknown: transformers warns and stops with a KeyError in the model"
    if name in rope_type_names() or name in METHODS:
        words = f"rope_type {name!r} is a method of milepost: engines know it after milepost.register_rope_types() only"
    sure = bool(close) and name not in METHODS and name not in rope_type_names()
    sure = sure and difflib.SequenceMatcher(None, name.lower(), close[0]).ratio() >= 0.75
    yield Finding(
        rule="rope-type-unknown",
        where=view.at(key),
        words=words,
        fix=f"did you mean {close[0]!r}?" if close else None,
        changes=(Change(path=view.at(key), value=close[0]),) if sure else (),
    )


def check_keys(view: View) -> Iterator[Finding]:
    """Every key is one that the type reads; every key it needs is there."""
    kind = view.type
    if not view.stated or kind not in ROPE_KEYS:
        return
    new, old = view.block.get("rope_type"), view.block.get("type")
    if new is not None and old is not None and new != old and _meant(view, new, old) != new:
        return  # the other type is the one whose keys are there
    required, optional = ROPE_KEYS[kind]
    if kind == "dynamic" and "alpha" in view.block:
        required, optional = frozenset(), optional | {"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
    engine: set[str] = set()
    if view.kind == "override" or kind == "longrope":
        engine |= {"attn_factor", "extrapolation_factor", "apply_yarn_scaling", "short_mscale", "long_mscale"}
    if view.kind == "override" and kind == "dynamic":
        engine |= {"max_trained_positions"}
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
