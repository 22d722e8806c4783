"""Tables as data, and as text for a terminal, Markdown, LaTeX and HTML."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table as RichTable

MEASURE_TITLES = {
    "windows": "Perplexity in non-overlapping windows",
    "last": "Perplexity of the same last targets, with growing context",
    "sliding": "Perplexity in sliding windows",
}

PROSE_WIDTH = 20
"""Columns of a terminal that sentences get at least."""


@dataclass(frozen=True)
class Column:
    """A column: its heading and the group it stands under ("trained", "longer"); `prose` may be broken into lines."""

    title: str
    group: str = ""
    left: bool = False
    prose: bool = False


@dataclass(frozen=True)
class Cell:
    """One value as text; `detail` (a spread) may be dropped where space is short; `best` marks the column's best."""

    text: str
    detail: str = ""
    best: bool = False


@dataclass(frozen=True)
class Table:
    """A table that any of the four renderers can write."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    name: str = field(default="", kw_only=True)

    def to_markdown(self) -> str:
        """GitHub's Markdown; the best of a column is bold."""

        def text(cell: Cell) -> str:
            value = f"**{cell.text}**" if cell.best else cell.text
            return (f"{value} {cell.detail}" if cell.detail else value).replace("|", "\\|")

        head = [f"{c.title} ({c.group})" if c.group else c.title for c in self.columns]
        lines = [
            f"### {self.title}",
            "",
            "| " + " | ".join(head) + " |",
            "|" + "|".join(":--" if c.left else "--:" for c in self.columns) + "|",
            *("| " + " | ".join(map(text, row)) + " |" for row in self.rows),
        ]
        if self.caption:
            lines += ["", self.caption]
        return "\n".join(lines) + "\n"

    def to_latex(self) -> str:
        """A `table` with booktabs rules; needs `\\usepackage{booktabs}`."""

        def text(cell: Cell) -> str:
            value = _latex(cell.text)
            value = rf"\textbf{{{value}}}" if cell.best else value
            return f"{value} {{\\scriptsize {_latex(cell.detail)}}}" if cell.detail else value

        groups = self._groups()
        lines = [
            r"\begin{table}[t]",
            r"\centering",
            rf"\caption{{{_latex(self.title)}. {_latex(self.caption)}}}",
            rf"\begin{{tabular}}{{{''.join('l' if c.left else 'r' for c in self.columns)}}}",
            r"\toprule",
        ]
        if any(name for name, _, _ in groups):
            lines.append(
                " & ".join(rf"\multicolumn{{{count}}}{{c}}{{{_latex(name)}}}" for name, _, count in groups) + r" \\"
            )
            lines += [rf"\cmidrule(lr){{{start + 1}-{start + count}}}" for name, start, count in groups if name]
        lines.append(" & ".join(_latex(c.title) for c in self.columns) + r" \\")
        lines.append(r"\midrule")
        lines += [" & ".join(map(text, row)) + r" \\" for row in self.rows]
        lines += [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
        return "\n".join(lines) + "\n"

    def to_html(self) -> str:
        """A `<figure>` with the table; the best of a column has class "best"."""

        def text(cell: Cell, column: Column) -> str:
            kind = " ".join(name for name in ("left" if column.left else "", "best" if cell.best else "") if name)
            detail = f' <span class="detail">{html.escape(cell.detail)}</span>' if cell.detail else ""
            tag = "th scope=row" if column is self.columns[0] else "td"
            end = tag.split()[0]
            return f'<{tag} class="{kind}">{html.escape(cell.text)}{detail}</{end}>'

        groups = self._groups()
        head = ""
        if any(name for name, _, _ in groups):
            cells = "".join(
                f'<th colspan="{count}" class="group">{html.escape(name)}</th>' for name, _, count in groups
            )
            head = f"<tr>{cells}</tr>"
        titles = "".join(
            f'<th scope="col" class="{"left" if c.left else ""}">{html.escape(c.title)}</th>' for c in self.columns
        )
        body = "".join(
            "<tr>" + "".join(text(cell, column) for cell, column in zip(row, self.columns, strict=True)) + "</tr>"
            for row in self.rows
        )
        return (
            f'<figure class="table" id="{html.escape(self.name)}"><h3>{html.escape(self.title)}</h3>'
            f'<div class="scroll"><table><thead>{head}<tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'
            f"<figcaption>{html.escape(self.caption)}</figcaption></figure>"
        )

    def to_rich(self, width: int | None = None) -> RichTable:
        """For a terminal; spreads are dropped when they do not fit into `width` columns."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        detailed = width is None or self._width() <= width
        table = RichTable(
            title=self.title,
            caption=self.caption,
            box=box.SIMPLE_HEAD,
            title_justify="left",
            caption_justify="left",
            title_style="bold",
            pad_edge=False,
        )
        for index, column in enumerate(self.columns):
            first = column.group and (index == 0 or self.columns[index - 1].group != column.group)
            heading = f"{column.group if first else ''}\n{column.title}" if self._grouped() else column.title
            narrowest = PROSE_WIDTH if column.prose else None
            table.add_column(
                heading, justify="left" if column.left else "right", no_wrap=not column.prose, min_width=narrowest
            )
        for row in self.rows:
            cells = []
            for cell in row:
                value = Text(cell.text + ("*" if cell.best else ""), style="bold" if cell.best else "")
                if cell.detail and detailed:
                    value.append(f" {cell.detail}", style="dim")
                cells.append(value)
            table.add_row(*cells)
        return table

    def _grouped(self) -> bool:
        return any(column.group for column in self.columns)

    def _width(self) -> int:
        widths = []
        for index, column in enumerate(self.columns):
            cells = [len(row[index].text) + row[index].best + len(row[index].detail) + 1 for row in self.rows]
            cells = [PROSE_WIDTH] if column.prose else cells
            widths.append(max([len(column.title), len(column.group), *cells]) + 2)
        return sum(widths)

    def _groups(self) -> list[tuple[str, int, int]]:
        """(name, first column, number of columns) of neighbours with the same group."""
        groups: list[tuple[str, int, int]] = []
        for index, column in enumerate(self.columns):
            if groups and groups[-1][0] == column.group:
                name, start, count = groups[-1]
                groups[-1] = (name, start, count + 1)
            else:
                groups.append((column.group, index, 1))
        return groups


def measures_in(summary: Mapping[str, Any]) -> list[str]:
    """The measures of a summary, in their usual order."""
    return sorted(summary["perplexity"], key=lambda name: ([*MEASURE_TITLES, name].index(name), name))


def tables(results: Mapping[str, Any]) -> list[Table]:
    """The tables of a comparison: perplexity by each measure, passkey, and paired differences to the best."""
    summary = results["summary"]
    made = [_perplexity_table(results, measure) for measure in measures_in(summary)]
    if summary["passkey"]:
        made.append(_passkey_table(results))
    if len(summary["methods"]) > 1:
        made.append(_pairs_table(results))
    return made


def _perplexity_table(results: Mapping[str, Any], measure: str) -> Table:
    summary = results["summary"]
    table = summary["perplexity"][measure]
    lengths = sorted({cell["length"] for cell in table["cells"]})
    cells = {(cell["method"], cell["length"]): cell for cell in table["cells"]}
    inside = {cell["length"]: cell["in_range"] for cell in table["cells"]}
    best = {length: min(c["value"] for (_, at), c in cells.items() if at == length) for length in lengths}
    speed = {row["method"]: row for row in results.get("timing", {}).get("methods", [])}
    several = any(len(row["seeds"]) > 1 for row in summary["methods"])
    columns = [
        Column("method", left=True),
        Column("params"),
        *(Column(_length(length), "trained" if inside[length] else "longer") for length in lengths),
        *([Column("tok/s")] if speed else []),
    ]
    rows = []
    for row in summary["methods"]:
        method = row["method"]
        line = [Cell(method), Cell(_count(row["parameters"]))]
        for length in lengths:
            cell = cells.get((method, length))
            if cell is None:
                line.append(Cell("–"))
                continue
            half = cell["spread"] if cell["spread"] is not None else _half(cell)
            detail = f"±{_like(half, cell['value'])}" if half is not None and math.isfinite(half) else ""
            line.append(Cell(number(cell["value"]), detail, number(cell["value"]) == number(best[length])))
        if speed:
            line.append(Cell(f"{speed[method]['train_tokens_per_second']:,.0f}" if method in speed else ""))
        rows.append(tuple(line))
    spread = (
        "standard deviation over seeds"
        if several
        else f"half of a 95 % bootstrap interval over {table['documents']} documents"
        if table["documents"] > 1
        else "unknown, of one document"
    )
    refusal = "; – the encoding refuses that length" if len(cells) < len(rows) * len(lengths) else ""
    caption = (
        f"{table['targets']:,} targets at every length, each counted once; ± {spread}; * best of a column; "
        f"sorted by the longest length{'; tok/s: tokens of training a second' if speed else ''}{refusal}."
    )
    return Table(
        MEASURE_TITLES.get(measure, measure), tuple(columns), tuple(rows), caption, name=f"perplexity-{measure}"
    )


def _half(interval: Mapping[str, Any]) -> float | None:
    """Half the width of an interval; None where it has no ends."""
    low, high = interval["low"], interval["high"]
    return None if low is None or high is None else (high - low) / 2


def _passkey_table(results: Mapping[str, Any]) -> Table:
    summary = results["summary"]
    passkey = summary["passkey"]
    lengths = sorted({cell["length"] for cell in passkey["cells"]})
    cells = {(cell["method"], cell["length"]): cell for cell in passkey["cells"]}
    inside = {cell["length"]: cell["in_range"] for cell in passkey["cells"]}
    best = {length: max(c["exact"] for (_, at), c in cells.items() if at == length) for length in lengths}
    columns = (
        Column("method", left=True),
        *(Column(_length(length), "trained" if inside[length] else "longer") for length in lengths),
    )
    rows = []
    for row in summary["methods"]:
        line = [Cell(row["method"])]
        for length in lengths:
            cell = cells.get((row["method"], length))
            if cell is None:
                line.append(Cell("–"))
                continue
            is_best = best[length] > 0 and f"{cell['exact']:.2f}" == f"{best[length]:.2f}"
            line.append(Cell(f"{cell['exact']:.2f}", f"({cell['token']:.2f})", is_best))
        rows.append(tuple(line))
    caption = (
        f"Share of exact answers (of right digits, in brackets) among {passkey['prompts']} prompts a length and seed, "
        f"depths spread evenly; {passkey.get('about') or _trained_on(passkey)}; chance "
        f"{_chance(passkey['chance_exact'])} exact, {passkey['chance_token']:g} a digit."
    )
    return Table("Passkey retrieval", columns, tuple(rows), caption, name="passkey")


def _trained_on(passkey: Mapping[str, Any]) -> str:
    return f"trained on prompts of up to {passkey['train_length']} tokens"


def _pairs_table(results: Mapping[str, Any]) -> Table:
    summary = results["summary"]
    measure = measures_in(summary)[0]
    pairs = [pair for pair in summary["pairs"] if pair["measure"] == measure]
    lengths = sorted({pair["length"] for pair in pairs})
    first = summary["methods"][0]["method"]
    found = {(pair["b"], pair["length"]): pair for pair in pairs if pair["a"] == first}
    rows = []
    for row in summary["methods"][1:]:
        line = [Cell(row["method"])]
        for length in lengths:
            pair = found.get((row["method"], length))
            if pair is None:
                line.append(Cell("–"))
                continue
            gap, half = -pair["difference"], _half(pair)
            settled = half is not None and (pair["low"] > 0 or pair["high"] < 0)
            line.append(Cell(f"{gap:+.3f}" + ("" if settled else " ?"), "" if half is None else f"±{half:.3f}"))
        rows.append(tuple(line))
    caption = (
        f"Loss minus that of {first}, in nats a token, on the same targets "
        f"({MEASURE_TITLES.get(measure, measure).lower()}): above 0 is worse. "
        f"± half of a 95 % bootstrap interval over documents; ? the interval holds 0, or there is but one document."
    )
    columns = (Column("method", left=True), *(Column(_length(length)) for length in lengths))
    return Table(f"Paired difference to {first}", columns, tuple(rows), caption, name="pairs")


def number(value: float) -> str:
    """Three significant digits: 6.91, 12.3, 134, 2.1e+04; 'inf' where it overflowed."""
    if not math.isfinite(value):
        return "inf"
    if value >= 99_950:
        return f"{value:.1e}"
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _like(part: float, whole: float) -> str:
    """`part` with the decimals that `number(whole)` has."""
    text = number(whole)
    decimals = len(text.partition(".")[2]) if "e" not in text else 0
    return f"{part:.1e}" if "e" in text else f"{part:.{decimals}f}"


def _chance(value: float) -> str:
    return f"{value:g}" if value >= 1e-4 else f"{value:.0e}".replace("e-0", "e-")


def _length(length: int) -> str:
    return str(length)


def _count(parameters: int) -> str:
    if parameters < 1_000_000:
        return f"{parameters / 1000:.1f} k"
    return f"{parameters / 1e6:.2f} M"


def _latex(text: str) -> str:
    special = {
        "\\": r"\textbackslash{}",
        "±": r"$\pm$",
        "–": "--",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
    }
    special |= {character: "\\" + character for character in "&%$#_{}"}
    return "".join(special.get(character, character) for character in text)


def rich_tables(made: Sequence[Table], width: int | None) -> list[RichTable]:
    """All of them for a terminal."""
    return [table.to_rich(width) for table in made]
