"""One page with everything: opens without a network, on a phone, in light and in dark."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from milepost.report.plots import render
from milepost.report.style import GRID, INK, PALETTE, PALETTE_DARK
from milepost.report.table import Table

CAPTIONS = {
    "perplexity": "Each held-out target is counted once at every length. Short windows hold more targets with little "
    "context, so part of the gain with length is that early-token effect.",
    "perplexity-last": "The targets are the same at every length; only the context before them grows.",
    "perplexity-sliding": "Windows advance by a stride and count only new targets, so that each has long context.",
    "positions": "A model that cannot use distant text stays flat beyond its trained length; one that breaks rises.",
    "passkey": "A second model of the same encoding, trained on short prompts alone. Fast decay costs retrieval, which "
    "perplexity does not show.",
    "curves": "Taken from the trained models; thin lines are further layers where they have a set of their own.",
}


def page(
    results: Mapping[str, Any],
    tables: Sequence[Table],
    figures: Mapping[str, Any],
    *,
    title: str,
    lead: str = "",
    notes: Sequence[str] = (),
) -> str:
    """The report as one HTML file: tables, plots as inline SVG, every setting, versions and hardware.

    figures: file stem -> matplotlib figure. lead: one paragraph under the title. notes: what a reader must know.
    Nothing is loaded from elsewhere and no script is needed.
    """
    style = (resources.files("milepost.report") / "report.css").read_text("utf-8")
    style = _series(PALETTE) + f"@media (prefers-color-scheme: dark) {{ {_series(PALETTE_DARK)} }}\n" + style
    main, rest = list(tables[:1]), list(tables[1:])
    parts = [f"<h1>{html.escape(title)}</h1>"]
    if lead:
        parts.append(f'<p class="lead">{html.escape(lead)}</p>')
    parts += [f'<p class="note">{html.escape(note)}</p>' for note in notes]
    names = list(figures)
    if names:
        parts.append(_figure(names[0], figures[names[0]]))
    parts += [table.to_html() for table in main]
    parts += [_figure(name, figures[name]) for name in names[1:]]
    parts += [table.to_html() for table in rest]
    if results.get("failures"):
        parts.append(_failures(results["failures"]))
    parts.append(_details("Settings", results["settings"]))
    parts.append(_details("Data", results.get("data", {})))
    parts.append(_details("Versions and hardware", results.get("environment", {})))
    body = "\n".join(part for part in parts if part)
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{html.escape(title)}</title><style>{style}</style></head>\n"
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def _series(colors: Sequence[str]) -> str:
    """The colours of lines as CSS variables."""
    return ":root { " + " ".join(f"--series-{number}: {color};" for number, color in enumerate(colors)) + " }\n"


def inline_svg(figure: Any, name: str) -> str:
    """The figure as an SVG element that takes its colours from the page."""
    text = render(figure, "svg", salt=name, transparent=True).decode("utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Glyphs and markers are defined once a figure: keep the names of several figures apart
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'(xlink:href="|url\()#([^")]+)', rf"\1#{name}-\2", text)
    text = text.replace(INK, "currentColor").replace(GRID, "var(--grid)")
    for number, color in enumerate(PALETTE):
        text = text.replace(color, f"var(--series-{number})")
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(name)}" ', 1)


def _figure(name: str, figure: Any) -> str:
    caption = CAPTIONS.get(name, "")
    return (
        f'<figure class="plot" id="plot-{html.escape(name)}"><div class="scroll">{inline_svg(figure, name)}</div>'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


def _failures(failures: Sequence[Mapping[str, Any]]) -> str:
    rows = "".join(
        f"<li><b>{html.escape(str(f['method']))}, seed {f['seed']}</b>: {html.escape(str(f['message']))}</li>"
        for f in failures
    )
    return f'<section class="failures"><h3>Runs that failed</h3><ul>{rows}</ul></section>'


def _details(title: str, values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th scope=row class=left>{html.escape(key)}</th><td class=left>{html.escape(value)}</td></tr>"
        for key, value in _flat(values)
    )
    return (
        f'<details><summary>{html.escape(title)}</summary><div class="scroll"><table>{rows}</table></div></details>'
        if rows
        else ""
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            rows += _flat(value, f"{name}.")
        elif isinstance(value, list | tuple):
            rows.append((name, ", ".join(map(str, value))))
        else:
            rows.append((name, str(value)))
    return rows
