"""Plots of a comparison: perplexity and loss against length, passkey retrieval, and what the encodings learned."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from milepost.report.style import INK, figure_style, head_colors, look, spread_labels
from milepost.report.table import measures_in

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FLOOR = -12.0
"""Biases are drawn down to here: exp(-12) of a weight is 6e-6."""


def figures(results: Mapping[str, Any]) -> dict[str, Figure]:
    """File stem -> figure, for everything that the results hold."""
    summary = results["summary"]
    trained = int(results["settings"]["train_length"])
    looks = {method: look(index) for index, method in enumerate(results["settings"]["methods"])}
    made: dict[str, Figure] = {}
    for measure in measures_in(summary):
        table = summary["perplexity"][measure]
        name = "perplexity" if measure == "windows" else f"perplexity-{measure}"
        made[name] = perplexity_figure(measure, table["cells"], trained, looks)
    if summary["positions"]:
        made["positions"] = positions_figure(summary["positions"], trained, looks)
    if summary["passkey"]:
        made["passkey"] = passkey_figure(summary["passkey"], looks)
    curves = {
        run["method"]: run["curves"]
        for run in reversed(results["runs"])
        if run.get("curves") and run["curves"]["kind"] == "bias"
    }
    ordered = {method: curves[method] for method in results["settings"]["methods"] if method in curves}
    if ordered:
        made["curves"] = curves_figure(ordered, trained)
    return made


def render(figure: Figure, kind: str, *, salt: str = "milepost", transparent: bool = False) -> bytes:
    """The bytes of a PNG or SVG; equal figures give equal bytes. salt: keeps ids of several SVGs on a page apart."""
    import matplotlib

    out = io.BytesIO()
    metadata: dict[str, Any] = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    with figure_style(), matplotlib.rc_context({"svg.hashsalt": salt}):
        figure.savefig(out, format=kind, dpi=160, metadata=metadata, transparent=transparent)
    return out.getvalue()


def perplexity_figure(
    measure: str, cells: Sequence[Mapping[str, Any]], trained: int, looks: Mapping[str, Mapping[str, Any]]
) -> Figure:
    """Perplexity against length, both logarithmic, the trained length marked, bands of 95 %."""
    titles = {
        "windows": "Perplexity by length: non-overlapping windows",
        "last": "Perplexity of the same targets, by context",
        "sliding": "Perplexity by length: sliding windows",
    }
    lines = _lines(cells, "value")
    with figure_style():
        figure, axes = _canvas(lines)
        _length_axis(axes, sorted({cell["length"] for cell in cells}), trained)
        axes.set_yscale("log")
        bands = _bands(cells)
        for method, points in lines.items():
            _line(axes, points, looks.get(method, {}), bands.get(method))
        _plain_log_ticks(axes, [value for points in lines.values() for _, value in points])
        axes.set_title(titles.get(measure, f"Perplexity: {measure}"))
        axes.set_xlabel("context length (tokens)" if measure == "last" else "test length (tokens)")
        axes.set_ylabel("perplexity")
        _label_ends(figure, axes, lines, looks)
    return figure


def positions_figure(rows: Sequence[Mapping[str, Any]], trained: int, looks: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Mean loss against the number of tokens of context, inside windows of the longest length."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        lines.setdefault(row["method"], []).append((math.sqrt(row["low"] * (row["high"] - 1)), row["mean"]))
    edges = sorted({row["low"] for row in rows} | {row["high"] - 1 for row in rows})
    with figure_style():
        figure, axes = _canvas(lines)
        _length_axis(axes, edges, trained, ticks=[edge for edge in edges if edge & (edge - 1) == 0])
        for method, points in lines.items():
            _line(axes, points, looks.get(method, {}), None)
        axes.set_title("Loss by position in the longest window")
        axes.set_xlabel("tokens of context")
        axes.set_ylabel("loss (nats a token)")
        _label_ends(figure, axes, lines, looks)
    return figure


def passkey_figure(passkey: Mapping[str, Any], looks: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Exact and digit accuracy against prompt length, with the lines that guessing would give."""
    lines = _lines(passkey["cells"], "exact")
    digits = _lines(passkey["cells"], "token")
    with figure_style():
        figure, axes = _canvas(lines)
        lengths = sorted({cell["length"] for cell in passkey["cells"]})
        _length_axis(axes, lengths, int(passkey["train_length"] or lengths[0]))
        axes.set_ylim(-0.04, 1.04)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "25 %", "50 %", "75 %", "100 %"])
        chance = passkey["chance_token"]
        axes.axhline(chance, color=INK, linewidth=0.9, linestyle=(0, (2, 2)), alpha=0.7)
        axes.annotate(
            "chance, digits", (0.03, chance), xycoords=("axes fraction", "data"), xytext=(0, 3),
            textcoords="offset points", fontsize=8.5, alpha=0.8,
        )  # fmt: skip
        for method, points in digits.items():
            style = {**looks.get(method, {}), "marker": "", "linewidth": 1.0, "alpha": 0.45}
            axes.plot(*zip(*points, strict=True), **style)
        for method, points in lines.items():
            _line(axes, points, looks.get(method, {}), None)
        axes.set_title("Passkey retrieval (thick: exact answers; thin: digits)")
        axes.set_xlabel("prompt length (tokens)")
        axes.set_ylabel("right answers")
        _label_ends(figure, axes, lines, looks)
    return figure


def curves_figure(curves: Mapping[str, Mapping[str, Any]], trained: int) -> Figure:
    """Bias against distance of each trained encoding, one line a head, small multiples on one scale."""
    columns = 2 if len(curves) == 4 else min(len(curves), 3)
    rows = math.ceil(len(curves) / columns)
    with figure_style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(2.6 * columns + 0.9, 2.2 * rows + 1.1))
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        longest = max(max(curve["distances"]) for curve in curves.values())
        for place, axes in enumerate(grid.flat):
            axes.set_visible(place < len(curves))
            if place + columns >= len(curves):
                axes.tick_params(labelbottom=True)
        for axes, (method, curve) in zip(grid.flat, curves.items(), strict=False):
            draw_bias(axes, curve, trained)
            axes.set_title(method, fontsize=10.5, pad=4)
            axes.set_ylim(_FLOOR, None)
            axes.set_xlim(0.9, longest)
        high = max(max(v for v in _finite(curve)) for curve in curves.values())
        grid[0][0].set_ylim(_FLOOR, min(max(high, 0.0), 8.0) + 0.8)
        height, width = figure.get_figheight(), figure.get_figwidth()
        figure.supxlabel("distance (tokens)", fontsize=11, y=0.12 / height, va="bottom")
        figure.supylabel("bias (nats)", fontsize=11, x=0.1 / width, ha="left")
        figure.suptitle(
            f"Bias by distance, one line a head (dashed: trained length {trained})",
            fontsize=12, fontweight="bold", x=0.1 / width, y=1 - 0.08 / height, ha="left", va="top",
        )  # fmt: skip
        figure.subplots_adjust(
            left=0.75 / width, right=0.985, bottom=0.62 / height, top=1 - 0.68 / height,
            wspace=0.1, hspace=0.32,
        )  # fmt: skip
    return figure


def draw_bias(axes: Axes, curve: Mapping[str, Any], trained: int | None) -> None:
    """Heads of the first layer as lines; other layers, where they differ, thin."""
    distances = [max(d, 0.9) for d in curve["distances"]]
    layers = curve["layers"]
    colors = head_colors(len(layers[0]))
    for number, heads in enumerate(layers):
        for head, values in enumerate(heads):
            strong = number == 0
            axes.plot(
                distances, values, color=colors[head % len(colors)], linewidth=1.8 if strong else 0.8,
                alpha=1.0 if strong else 0.45, marker="",
            )  # fmt: skip
    axes.set_xscale("log")
    if trained is not None:
        axes.axvline(trained, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.6)
    _decades(axes)


def _finite(curve: Mapping[str, Any]) -> list[float]:
    values = [v for heads in curve["layers"] for head in heads for v in head if math.isfinite(v)]
    return values or [0.0]


def _decades(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.xaxis.set_major_locator(LogLocator(10))
    axes.xaxis.set_major_formatter(FuncFormatter(_plain_number()))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())


def _plain_number() -> Callable[[float, int | None], str]:
    def text(value: float, _position: int | None = None) -> str:
        return short(value)

    return text


def short(value: float) -> str:
    """1, 16, 512, 1k, 4k, 100k, 1M: powers of two and ten in few letters."""
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:g}k"
    if value >= 1_000_000:
        return f"{value / 1_000_000:g}M"
    if value >= 1000:
        return f"{value / 1000:g}k"
    return f"{value:g}"


def _lines(cells: Sequence[Mapping[str, Any]], key: str) -> dict[str, list[tuple[float, float]]]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for cell in sorted(cells, key=lambda cell: cell["length"]):
        value = cell[key]
        if value is not None and math.isfinite(value):
            lines.setdefault(cell["method"], []).append((cell["length"], min(value, 1e6)))
    return lines


def _bands(cells: Sequence[Mapping[str, Any]]) -> dict[str, tuple[list[float], list[float], list[float]]]:
    bands: dict[str, tuple[list[float], list[float], list[float]]] = {}
    for cell in sorted(cells, key=lambda cell: cell["length"]):
        if all(cell[key] is not None and math.isfinite(cell[key]) for key in ("low", "high")):
            x, low, high = bands.setdefault(cell["method"], ([], [], []))
            x.append(cell["length"])
            low.append(cell["low"])
            high.append(cell["high"])
    return bands


def _canvas(lines: Mapping[str, Any]) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    longest = max(map(len, lines), default=8)
    margin = min(0.32 + 0.092 * longest, 2.9)
    height = max(4.2, 0.2 * len(lines) + 1.6)
    figure = Figure(figsize=(5.0 + margin, height))
    axes = figure.add_subplot()
    width = figure.get_figwidth()
    figure.subplots_adjust(left=0.86 / width, right=1 - margin / width, bottom=0.6 / height, top=1 - 0.72 / height)
    return figure, axes


def _length_axis(axes: Axes, lengths: Sequence[int], trained: int, ticks: Sequence[int] | None = None) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    low, high = float(lengths[0]), float(max(lengths[-1], trained))
    if low == high:
        low, high = low / 2, high * 2
    margin = (high / low) ** 0.025
    axes.set_xlim(low / margin, high * margin)
    shown = _apart(ticks if ticks is not None else lengths, trained, (high / low) ** 0.06)
    while len(shown) > 9:
        shown = shown[::2]
    axes.set_xticks(shown, [short(length) for length in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.axvspan(trained, high * margin, color=INK, alpha=0.035, linewidth=0)
    axes.axvline(trained, color=INK, linewidth=1.0, linestyle=(0, (4, 3)), alpha=0.7)
    left = math.log(trained / low) > 0.75 * math.log(high / low)
    axes.annotate(
        f"trained length {short(trained)}", (trained, 1.0), xycoords=("data", "axes fraction"),
        xytext=(-4 if left else 4, 3), textcoords="offset points", fontsize=8.5, alpha=0.85,
        ha="right" if left else "left", va="bottom",
    )  # fmt: skip


def _apart(lengths: Sequence[int], trained: int, ratio: float) -> list[int]:
    """The lengths whose labels have room, the trained one first."""
    shown: list[int] = []
    for length in sorted(lengths, key=lambda length: (length != trained, length)):
        if all(max(length, other) >= ratio * min(length, other) for other in shown):
            shown.append(length)
    return sorted(shown)


def _line(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    style: Mapping[str, Any],
    band: tuple[list[float], list[float], list[float]] | None,
) -> None:
    axes.plot(*zip(*points, strict=True), **style)
    if band is not None:
        axes.fill_between(*band, color=style.get("color"), alpha=0.13, linewidth=0)


def _plain_log_ticks(axes: Axes, values: Sequence[float]) -> None:
    """Few round numbers inside the range of the values, written out."""
    from matplotlib.ticker import NullFormatter, NullLocator

    if not values:
        return
    low, high = min(values) * 0.93, max(values) * 1.07
    low, high = min(low, axes.get_ylim()[0]), max(high, axes.get_ylim()[1])
    axes.set_ylim(low, high)
    for steps in ((1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(ticks) <= 8:
            break
    if len(ticks) < 2:
        ticks = [float(f"{low + (high - low) * part:.3g}") for part in (0.1, 0.37, 0.63, 0.9)]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())


def _label_ends(
    figure: Figure,
    axes: Axes,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    looks: Mapping[str, Mapping[str, Any]],
) -> None:
    """Each line's name at its right end, moved apart where lines end close together, with a thin leader."""
    size = 9.5
    axes.get_xlim(), axes.get_ylim()  # settles the limits, on which the ends depend
    height = axes.get_position().height * figure.get_figheight() * 72
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = {method: to_axes.transform(points[-1]) for method, points in lines.items() if points}
    places = spread_labels([float(end[1]) for end in ends.values()], gap=1.32 * size / height, low=-0.06, high=1.03)
    for (method, end), place in zip(ends.items(), places, strict=True):
        color = looks.get(method, {}).get("color", INK)
        axes.annotate(
            method, (float(end[0]), float(end[1])), xycoords="axes fraction", xytext=(1.045, place),
            textcoords="axes fraction", fontsize=size, color=color, va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.7, "alpha": 0.7, "shrinkA": 1, "shrinkB": 3,
                        "relpos": (0.0, 0.5)},
        )  # fmt: skip
