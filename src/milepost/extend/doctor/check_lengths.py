"""Checks of lengths: the factor, the length before scaling, ranges, lists, and what changes with the length."""

from __future__ import annotations

from collections.abc import Iterator
from operator import le

from milepost.extend.doctor.classes import ORIGINALS
from milepost.extend.doctor.findings import DELETE, Change, Finding, View, number, short, whole

NATIVE_LENGTHS = (2048, 4096, 8192, 32768)
"""Lengths that models are trained at; a declared length among them is probably not stretched yet."""


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
    written = view.block.get("factor")
    if view.stated and view.type == "linear" and isinstance(written, int) and whole(written):
        yield Finding(
            rule="factor-integer",
            where=view.at("factor"),
            words=f"factor {written} is written without a point: vLLM's linear type stops (TypeError)",
            fix=f"factor: {written}.0",
            changes=(Change(path=view.at("factor"), value=float(written)),) if written < 2**53 else (),
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
    own = ORIGINALS.get(view.model_type)
    if own is not None and outer is None and inner is not None and inner != own and view.kind == "config":
        yield Finding(
            rule="original-lengths-disagree",
            where=view.at("original_max_position_embeddings"),
            words=f"original_max_position_embeddings is {short(inner)} in the block, and transformers' "
            f"{view.model_type} class takes its own {own} unless the top level states one",
            fix=f"state {short(inner)} at the top level",
            changes=(Change(path=view.top("original_max_position_embeddings"), value=inner),)
            if whole(inner)
            else (),
        )
    if inner is None and outer is None and (own is None or view.kind != "config"):
        proposal, reason = propose_original(view)
        yield Finding(
            rule="original-length-missing",
            where=view.at("original_max_position_embeddings"),
            words="original_max_position_embeddings is missing"
            + (
                f": transformers measures against {view.max_length}"
                if view.max_length and "original_max_position_embeddings" not in view.block
                else ""
            ),
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
    if longest is None or (view.type == "longrope" and factor is None):
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
    if view.type == "longrope" and original > longest:
        yield Finding(
            rule="length-mismatch",
            where=view.top("max_position_embeddings"),
            words=f"original_max_position_embeddings {original} is above max_position_embeddings {longest}: the long "
            "list is never used, and nothing is stretched",
            fix="the stretched length in max_position_embeddings, the one before it in the original length",
        )
    elif view.type in ("yarn", "linear", "longrope") and factor is not None and factor >= 1:
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
                words=f"{high} {top:g} is below {low} {bottom:g}: "
                + (
                    "slow pairs are not stretched at all"
                    if high == "beta_fast"
                    else "there is no blend, and engines disagree about the pairs between the two"
                ),
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
    lists = [view.block.get(key) for key in ("short_factor", "long_factor")]
    if all(isinstance(item, list) and all(number(x) is not None and x > 0 for x in item) for item in lists):
        near, far = (list(item or ()) for item in lists)
        if len(near) == len(far) and near != far and all(map(le, far, near)):
            yield Finding(
                rule="lists-swapped",
                where=view.at("long_factor"),
                words="every divisor of long_factor is at most that of short_factor: long input is stretched less",
                fix="swap short_factor and long_factor, if the original checkpoint has them the other way round",
            )
    if len(set(sizes.values())) == 2 and pairs is None:
        yield Finding(
            rule="list-length",
            where=view.path,
            words=f"short_factor has {sizes['short_factor']} numbers and long_factor {sizes['long_factor']}",
            fix="take both lists from the original checkpoint",
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
