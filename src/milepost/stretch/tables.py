"""The tables of a stretch: the ranking first, then what a comparison has, then the price of a hard switch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from milepost.report import Column, Table
from milepost.report import tables as shared_tables
from milepost.report.table import Cell, number


def tables(results: Mapping[str, Any]) -> list[Table]:
    """Ranking, perplexity, passkey and pairs, passkey by depth, and the hard switch."""
    made = [_ranking(results), *shared_tables(results)]
    if any(run["passkey"] for run in results["runs"]):
        made.append(_depths(results))
    if results["switch"]:
        made.append(_switch(results))
    return made


def _ranking(results: Mapping[str, Any]) -> Table:
    target = results["settings"]["target_length"]
    trained = results["settings"]["train_length"]
    cells = {(c["method"], c["length"]): c for c in results["summary"]["perplexity"]["windows"]["cells"]}
    passkey = {
        (c["method"], c["length"]): c["exact"] for c in (results["summary"]["passkey"] or {"cells": []})["cells"]
    }
    columns = (
        Column("rank"),
        Column("method", left=True),
        Column(str(trained), "perplexity"),
        Column(str(target), "perplexity"),
        *([Column(str(target), "passkey")] if passkey else []),
        Column("to", "usable"),
        Column("because", left=True, prose=True),
    )
    rows = []
    for row in results["ranking"]:
        name = row["method"]
        here, there = cells[name, trained], cells[name, target]
        usable = results["usable"][name]
        line = [
            Cell(str(row["rank"])),
            Cell(name),
            Cell(number(here["value"])),
            Cell(number(there["value"]), _ends(there), row["rank"] == 1),
        ]
        if passkey:
            share = passkey.get((name, target))
            line.append(Cell("–" if share is None else f"{share:.2f}"))
        rows.append((*line, Cell(str(usable["length"])), Cell(usable["reason"])))
    bracket = "" if there["low"] is None else " In brackets: 95 % bootstrap interval over documents."
    caption = f"{results['verdict']}{bracket} Equal ranks are not settled."
    return Table("Ranking", columns, tuple(rows), caption, name="ranking")


def _ends(cell: Mapping[str, Any]) -> str:
    return "" if cell["low"] is None or cell["high"] is None else f"[{number(cell['low'])}, {number(cell['high'])}]"


def _depths(results: Mapping[str, Any]) -> Table:
    """Passkey by depth at the target length, in fifths of the prompt."""
    bins = [(i / 5, (i + 1) / 5) for i in range(5)]
    columns = (
        Column("method", left=True),
        *(Column(f"{low:.0%}–{high:.0%}".replace("%–", "–")) for low, high in bins),
    )
    rows = []
    for run in results["runs"]:
        if not run["passkey"]:
            continue
        last = run["passkey"][-1]
        line = [Cell(run["method"])]
        for low, high in bins:
            hits = [
                hit
                for depth, hit in zip(last["depths"], last["hits"], strict=True)
                if low <= depth < high or (high == 1.0 and depth == 1.0)
            ]
            line.append(Cell(f"{sum(hits) / len(hits):.2f}" if hits else "–"))
        rows.append(tuple(line))
    length = results["settings"]["target_length"]
    return Table(
        f"Passkey by depth at {length}", columns, tuple(rows),
        "Share of exact answers by where the key stood, from the start of the prompt to its end.", name="depths",
    )  # fmt: skip


def _switch(results: Mapping[str, Any]) -> Table:
    first = results["switch"][0]
    at, beyond = first["at"], first["beyond"]
    columns = (
        Column("method", left=True),
        *(Column(title, f"at {length}") for length in (at, beyond) for title in ("untouched", "static", "dynamic")),
    )

    def cell(value: float | None) -> Cell:
        return Cell("–" if value is None else number(value))

    rows = tuple(
        (
            Cell(row["method"]),
            *(
                cell(row[key])
                for key in ("untouched", "static", "dynamic", "untouched_beyond", "static_beyond", "dynamic_beyond")
            ),
        )
        for row in results["switch"]
    )
    caption = (
        f"Perplexity. Whoever switches a static method on for texts beyond {at} tokens jumps from the untouched model "
        f"to the method at full factor; a dynamic form grows its factor with the text."
    )
    return Table("The price of a hard switch", columns, rows, caption, name="switch")
