"""Checks of what a checkpoint was trained with: its base, its scaling, the share of a head that rotates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from milepost.extend.doctor.classes import IGNORES_PARTIAL, NULL_HEAD_DIM_STOPS, THETAS
from milepost.extend.doctor.findings import DELETE, Change, Finding, View, figure, number, short, whole

BLOCKS = ("rope_parameters", "rope_scaling")
"""Where a rope block stands, today's name first."""


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
    if view.kind == "override" and view.config_path:
        return  # inside text_config vLLM merges key by key: the checkpoint's base stays
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
    elif view.theta is None and view.rotary and view.kind in ("config", "parameters"):
        yield Finding(
            rule="theta-missing",
            where=view.at("rope_theta") if view.stated else view.top("rope_theta"),
            words=f"no rope_theta: transformers takes its {view.model_type} class's default, "
            f"{figure(THETAS[view.model_type])}, other readers theirs"
            if view.model_type in THETAS
            else "no rope_theta: transformers takes its class's default (10000 in most), other readers theirs",
            fix="state the base that the model was trained with",
        )


def block_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope block of a configuration that transformers 5 takes; empty where there is none."""
    return next((config[name] for name in reversed(BLOCKS) if isinstance(config.get(name), dict) and config[name]), {})


def theta_of(config: Any) -> Any:
    """The base that a configuration states, in its block or beside it."""
    if not isinstance(config, dict):
        return None
    for name in BLOCKS:
        block = config.get(name)
        if isinstance(block, dict) and block.get("rope_theta") is not None:
            return block["rope_theta"]
    return config.get("rope_theta", config.get("rotary_emb_base"))


def _override_theta(view: View) -> Iterator[Finding]:
    trained, inner = theta_of(view.checkpoint), view.block.get("rope_theta")
    if view.stated and inner is None and trained is not None:
        yield Finding(
            rule="theta-lost",
            where=view.at("rope_theta"),
            words=f"rope_theta missing: was {short(trained)} in the checkpoint, and the override replaces its block",
            fix=f"add rope_theta: {short(trained)} to the block",
            changes=(Change(path=view.at("rope_theta"), value=trained),),
        )
    now, before = number(inner), number(trained)
    if view.stated and now is not None and before is not None and now < before:
        yield Finding(
            rule="theta-lowered",
            where=view.at("rope_theta"),
            words=f"rope_theta {short(inner)} takes the place of {short(trained)}: every pair but the first turns "
            "faster than in training",
            fix=f"rope_theta: {short(trained)}",
            changes=(Change(path=view.at("rope_theta"), value=trained),),
        )
    checkpoint = view.checkpoint or {}
    held = block_of(checkpoint) or {"rope_type": "default"}
    outer = view.config.get("rope_theta")
    nested = any(isinstance(value, dict) for value in held.values())
    if not view.stated and outer is not None and trained not in (None, outer) and not nested:
        yield Finding(
            rule="override-not-read",
            where=view.top("rope_theta"),
            words=f"rope_theta {short(outer)} at the top level is not read: the checkpoint's rope_parameters hold "
            f"{short(trained)}",
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
    for name in BLOCKS:
        if isinstance(config.get(name), dict):
            block = config[name]
    name = block.get("rope_type", block.get("type"))
    return name if isinstance(name, str) else None


def check_trained(view: View) -> Iterator[Finding]:
    """A trained scaling is never replaced without saying so."""
    before = _scaling_of(view.checkpoint) or _scaling_of(view.config.get("_checkpoint_had"))
    removed = [name for name in BLOCKS if view.kind == "override" and name in view.config and not view.config[name]]
    if removed and view.checkpoint is not None and not view.stated:
        trained = theta_of(view.checkpoint)
        if before not in (None, "default", "mrope") and not view.replace_trained:
            yield Finding(
                rule="trained-scaling-replaced",
                where=view.top(removed[0]),
                words=f"{removed[0]} {short(view.config[removed[0]])} takes the checkpoint's {before!r} scaling away",
                fix=f"leave {removed[0]} out, or say that you mean it (--replace-trained)",
            )
        if trained is not None:
            yield Finding(
                rule="theta-lost",
                where=view.top(removed[0]),
                words=f"{removed[0]} {short(view.config[removed[0]])} takes the base {short(trained)} away: vLLM falls "
                "back to 10000",
                fix=f'"rope_parameters": {{"rope_type": "default", "rope_theta": {short(trained)}}}',
                changes=(
                    Change(path=view.top(removed[0]), value=DELETE),
                    Change(path=view.top("rope_parameters"), value={"rope_type": "default", "rope_theta": trained}),
                )
                if before in (None, "default", "mrope") or view.replace_trained
                else (Change(path=view.top(removed[0]), value=DELETE),),
            )
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
    if partial is not None and 0 < partial < 1 and view.type != "proportional" and str(model_type) in IGNORES_PARTIAL:
        yield Finding(
            rule="partial-ignored",
            where=view.at("partial_rotary_factor"),
            words=f"transformers' {model_type} class ignores partial_rotary_factor {partial:g}: the whole head rotates",
            fix="use a class that honours it, or remove it if the whole head was rotated in training",
        )
    inner = number(view.block.get("partial_rotary_factor"))
    outer = number(view.get("partial_rotary_factor", "rotary_pct"))
    if view.path != view.config_path and inner is not None and outer is not None and inner != outer:
        yield Finding(
            rule="partial-disagrees",
            where=view.at("partial_rotary_factor"),
            words=f"partial_rotary_factor is {inner:g} in the block and {outer:g} at the top level: transformers 5 "
            f"takes {inner:g}, version 4 {outer:g}",
            fix="state the share that rotated in training, once",
        )
    if view.type == "proportional" and partial is None:
        yield Finding(
            rule="share-missing",
            where=view.at("partial_rotary_factor"),
            words="rope_type 'proportional' without partial_rotary_factor: every pair rotates",
            fix="add partial_rotary_factor, the share of pairs that rotate",
        )
    head_dim, rotary_dim = view.head_dim, view.rotary_dim
    null = "head_dim" in view.config and view.config["head_dim"] is None
    if null and view.model_type in NULL_HEAD_DIM_STOPS and view.stated and view.type in ("yarn", "dynamic", "longrope"):
        yield Finding(
            rule="head-dim-null",
            where=view.top("head_dim"),
            words=f"head_dim is null, and transformers' {view.model_type} class keeps it: {view.type} multiplies None "
            "and stops (TypeError)",
            fix="remove head_dim" + (f", or write head_dim: {head_dim}" if head_dim else ""),
            changes=(Change(path=view.top("head_dim"), value=DELETE if head_dim is None else head_dim),),
        )
    sections = view.block.get("mrope_section")
    if sections is not None and rotary_dim is not None:
        parts = sections if isinstance(sections, (list, tuple)) else []
        total = sum(whole(part) or 0 for part in parts)
        if total != rotary_dim // 2 or any(whole(part) is None for part in parts):
            yield Finding(
                rule="mrope-sections",
                where=view.at("mrope_section"),
                words=f"mrope_section {short(sections)} adds up to {total}: {rotary_dim // 2} pairs rotate",
                fix=f"sections that add up to {rotary_dim // 2}, from the original checkpoint",
            )
    if head_dim is not None and head_dim > 65536:
        yield Finding(rule="size-implausible", where=view.top("head_dim"), words=f"a head of {head_dim} channels")
    elif rotary_dim is not None and view.rotary and (rotary_dim < 2 or (rotary_dim % 2 and rotary_dim == head_dim)):
        yield Finding(
            rule="rotary-dim-odd",
            where=view.top("head_dim"),
            words=f"{rotary_dim} channels rotate (head_dim {head_dim}): they cannot be paired",
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
    if dtype in ("bfloat16", "float16"):
        yield Finding(
            rule="half-precision-note",
            where=view.top("dtype" if "dtype" in view.config else "torch_dtype"),
            words=f"{dtype}: load with dtype=, never cast afterwards, or inv_freq is rounded to it",
        )
