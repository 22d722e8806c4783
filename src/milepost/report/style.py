"""One look for every picture: colours that colour-blind readers can tell apart, on white and on black."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

INK = "#1b1f24"
"""Text and axes; `page` replaces it by the colour of the page's text."""
GRID = "#d4d9df"
"""Grid lines; `page` replaces it by a colour that suits the background."""

PALETTE = ("#0077bb", "#ee7733", "#009988", "#cc3377", "#8866cc", "#33a7dd", "#a0841c", "#808890")
"""After Okabe and Ito 2008 and Paul Tol's vibrant set; mid tones, so that lines show on white and on black."""
PALETTE_DARK = ("#4aa8e8", "#ff9a5c", "#2fc4b2", "#ee6aa7", "#ab8df0", "#6cc8f0", "#cfae4a", "#a5aeb7")
"""The same, lighter: `page` shows them on a dark background."""
HEADS = ("#4a55cc", "#2f9fb8", "#58ad4a", "#e0962f")
"""From the first head to the last; all four show on white and on black."""
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")


def figure_style() -> AbstractContextManager[None]:
    """matplotlib settings for the duration of a `with`; nothing global is changed."""
    import matplotlib

    settings: Any = {
        "font.family": "DejaVu Sans",
        "font.size": 11,
        "axes.titlesize": 12,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 22,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": GRID,
        "grid.linewidth": 0.7,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "lines.linewidth": 2.0,
        "lines.markersize": 5.5,
        "legend.frameon": False,
        "figure.facecolor": "white",
        "axes.facecolor": "none",
        "svg.fonttype": "path",
        "path.simplify": True,
    }
    return matplotlib.rc_context(settings)


def look(index: int) -> dict[str, Any]:
    """Colour, line and marker of series number `index`: colours first, then dashes, so that 24 differ."""
    return {
        "color": PALETTE[index % len(PALETTE)],
        "linestyle": DASHES[index // len(PALETTE) % len(DASHES)],
        "marker": MARKERS[(index + index // len(PALETTE)) % len(MARKERS)],
    }


def head_colors(count: int) -> list[Any]:
    """A row of colours for heads, from the first to the last."""
    from matplotlib.colors import LinearSegmentedColormap

    scale = LinearSegmentedColormap.from_list("heads", HEADS)
    return [scale(index / max(count - 1, 1)) for index in range(count)]


def spread_labels(heights: Sequence[float], gap: float, low: float = 0.0, high: float = 1.0) -> list[float]:
    """Heights for labels that want to stand at `heights`, at least `gap` apart, inside low .. high where they fit.

    Order is kept; each label moves as little as its neighbours allow (pools of labels that touch move together).
    """
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    pools: list[list[float]] = []  # [sum of what its members want it to start at, members]; it starts at the mean
    for place in order:
        pools.append([heights[place], 1.0])
        while len(pools) > 1 and pools[-1][0] / pools[-1][1] < pools[-2][0] / pools[-2][1] + pools[-2][1] * gap:
            upper, lower = pools.pop(), pools.pop()
            shift = upper[0] - upper[1] * lower[1] * gap
            pools.append([lower[0] + shift, lower[1] + upper[1]])
    placed: list[float] = []
    for pool in pools:
        placed += [pool[0] / pool[1] + gap * number for number in range(int(pool[1]))]
    total = gap * (len(placed) - 1)
    if placed and total <= high - low:
        for number in range(len(placed)):  # push up from below, then down from above
            placed[number] = max(placed[number], low + gap * number)
        for number in reversed(range(len(placed))):
            placed[number] = min(placed[number], high - gap * (len(placed) - 1 - number))
    result = [0.0] * len(heights)
    for place, height in zip(order, placed, strict=True):
        result[place] = height
    return result
