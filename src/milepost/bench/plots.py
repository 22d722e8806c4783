"""Four pictures of a benchmark: forward, forward and backward, decoding, memory; milepost in colour, peers in grey."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from milepost.report.style import DASHES, INK, MARKERS, PALETTE, figure_style, spread_labels

Key = tuple[str, str | None, bool]
"""Name, bias and learned of a row."""

FORWARD: dict[Key, str] = {
    ("milepost native", "kerple-log", False): "milepost, KERPLE",
    ("milepost native", "alibi", False): "milepost, ALiBi",
    ("milepost native", "mep", False): "milepost, MEP",
    ("milepost sdpa", "kerple-log", False): "milepost without a compiler, KERPLE",
    ("FlexAttention, compiled", "kerple-log", False): "FlexAttention, KERPLE",
    ("sdpa + prebuilt mask", "kerple-log", False): "SDPA + prebuilt mask",
    ("sdpa + mask built each call", "kerple-log", False): "SDPA + mask built each call",
    ("x-transformers flash", "alibi", False): "x-transformers flash, ALiBi",
    ("transformers BLOOM eager", "alibi", False): "transformers BLOOM, ALiBi",
    ("transformers T5 eager", "t5", False): "transformers T5",
}
TRAINING: dict[Key, str] = {
    ("milepost native", "kerple-log", True): "milepost, KERPLE, learned",
    ("milepost native", "alibi", False): "milepost, ALiBi",
    ("milepost native", "kerple-log", False): "milepost, KERPLE, fixed",
    ("milepost blocked", "kerple-log", True): "milepost without a compiler, KERPLE, learned",
    ("sdpa + prebuilt mask", "kerple-log", False): "SDPA + prebuilt mask, fixed",
    ("sdpa + mask built each call", "kerple-log", True): "SDPA + mask built each call, learned",
    ("x-transformers flash", "alibi", False): "x-transformers flash, ALiBi",
    ("transformers BLOOM eager", "alibi", False): "transformers BLOOM, ALiBi",
    ("transformers T5 eager", "t5", True): "transformers T5, learned",
}
DECODING: dict[Key, str] = {
    ("milepost native, known bound", "kerple-log", False): "milepost, KERPLE",
    ("milepost native, known bound", "alibi", False): "milepost, ALiBi",
    ("milepost native, known bound", "mep", False): "milepost, MEP",
    ("sdpa + row of biases", "kerple-log", False): "SDPA + prebuilt row",
    ("sdpa + row built each call", "kerple-log", False): "SDPA + row built each call",
}

NOT_FASTER = "time relative to attention without a bias"
GREYS = ("#3f464d", "#5d656d", "#7a828a", "#969da4", "#6b737b", "#4d555c")


def write_plots(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """PNG files in `folder` for the groups that were measured in float32."""
    import matplotlib

    matplotlib.use("Agg")
    written = []
    for name, figure in figures(results):
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=140, bbox_inches="tight")
        written.append(path)
    return written


def figures(results: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(name, figure) for each picture that has something to show."""
    runs = [run for run in results["runs"] if run["job"]["dtype"] == "float32"]
    flex = [run for run in runs if run["job"]["group"] == "flex" and not run["job"].get("training")]
    for group, title, shown in (
        ("forward", "Forward", FORWARD),
        ("training", "Forward and backward", TRAINING),
        ("decoding", "One query against a cache", DECODING),
    ):
        chosen = [run for run in runs if run["job"]["group"] == group] + (flex if group == "forward" else [])
        lines = _lines(chosen, shown)
        if lines:
            with figure_style():
                yield group, _against_length(lines, title, "keys in the cache" if group == "decoding" else "tokens")
    memory = [run for run in runs if run["job"]["group"] == "memory"]
    if memory:
        with figure_style():
            yield "memory", _bars(memory)


def _lines(runs: Sequence[Mapping[str, Any]], shown: Mapping[Key, str]) -> dict[str, list[tuple[int, float]]]:
    """Label -> (length, ratio) by length, in the order of `shown`."""
    lines: dict[str, dict[int, float]] = {label: {} for label in shown.values()}
    for run in runs:
        for row in run["rows"]:
            label = shown.get((row["name"], row["bias"], row["learned"]))
            if label is not None and "ratio" in row:
                lines[label].setdefault(run["job"]["length"], row["ratio"])
    return {label: sorted(points.items()) for label, points in lines.items() if points}


def _against_length(lines: Mapping[str, list[tuple[int, float]]], title: str, unit: str) -> Any:
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8.5, 5.2))
    axis.set(xscale="log", yscale="log", title=title, xlabel=unit, ylabel=NOT_FASTER)
    lengths = sorted({length for points in lines.values() for length, _ in points})
    axis.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n) for n in lengths])
    axis.minorticks_off()
    axis.axhline(1.0, color=INK, linewidth=1.0)
    for label, points, look in _looks(lines):
        axis.plot(*zip(*points, strict=True), **look, label=label)
    values = [ratio for points in lines.values() for _, ratio in points]
    low, high = min([*values, 1.0]) / 1.15, max([*values, 1.0]) * 1.15
    steps = [s for s in (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 15, 20, 30, 50) if low <= s <= high]
    axis.set_yticks(steps, [f"{s:g}" for s in steps])
    axis.set_ylim(low, high)
    _label(axis, lines)
    return figure


def _looks(lines: Mapping[str, list[Any]]) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    ours = peers = 0
    for label, points in lines.items():
        if label.startswith("milepost"):
            yield label, points, {"color": PALETTE[ours], "marker": MARKERS[ours], "zorder": 3}
            ours += 1
        else:
            style = {"linestyle": DASHES[peers % len(DASHES)], "linewidth": 1.4, "markersize": 4}
            yield label, points, {"color": GREYS[peers % len(GREYS)], "marker": MARKERS[::-1][peers], **style}
            peers += 1


def _label(axis: Any, lines: Mapping[str, list[tuple[int, float]]]) -> None:
    """Each line's name outside at the right, at the height of its last point, as near as the others allow."""
    low, high = map(math.log, axis.get_ylim())
    ends = [(label, points[-1], look["color"]) for label, points, look in _looks(lines)]
    wanted = [(math.log(ratio) - low) / (high - low) for _, (_, ratio), _ in ends]
    for (label, end, color), height in zip(ends, spread_labels(wanted, 0.052), strict=True):
        bold = "bold" if label.startswith("milepost") else "normal"
        axis.annotate(
            label, end, xytext=(1.04, height), textcoords="axes fraction", color=color, fontsize=9.5, fontweight=bold,
            va="center", arrowprops={"arrowstyle": "-", "color": color, "alpha": 0.35, "linewidth": 0.8},
        )  # fmt: skip


def _bars(runs: Sequence[Mapping[str, Any]]) -> Any:
    """Peak memory at the shortest length measured, where most contenders run."""
    from matplotlib import pyplot

    length = min(run["job"]["length"] for run in runs)
    found: dict[bool, list[tuple[str, float]]] = {False: [], True: []}
    for run in runs:
        (row,) = run["rows"]
        if run["job"]["length"] == length and "mebibytes" in row:
            learned = ", learned" if row["learned"] else ""
            found[row["training"]].append((row["name"] + learned, max(row["mebibytes"], 1.0)))
    panels = [training for training in (False, True) if found[training]]
    tall = max(len(rows) for rows in found.values())
    figure, axes = pyplot.subplots(1, len(panels), figsize=(6.2 * len(panels), 1.2 + 0.36 * tall), squeeze=False)
    for axis, training in zip(axes[0], panels, strict=True):
        rows = sorted(found[training], key=lambda row: row[1])
        names, sizes = zip(*rows, strict=True)
        colors = [PALETTE[0] if name.startswith("milepost") else GREYS[3] for name in names]
        places = range(len(rows))
        axis.barh(places, sizes, color=colors, height=0.7)
        axis.set_yticks(places, names, fontsize=9.5)
        axis.invert_yaxis()
        axis.set(xscale="log", xlabel=f"MiB at length {length}", xlim=(1, max(sizes) * 3))
        steps = [10**power for power in range(6) if 10**power <= max(sizes) * 3]
        axis.set_xticks(steps, [f"{step:,}" for step in steps])
        axis.minorticks_off()
        axis.set_title("Forward and backward" if training else "Forward")
        axis.grid(False, axis="y")
        for place, size in zip(places, sizes, strict=True):
            where = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
            axis.annotate(f"{size:,.0f}", (size, place), fontsize=9, **where)
    figure.tight_layout(w_pad=3)
    return figure
