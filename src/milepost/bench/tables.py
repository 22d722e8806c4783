"""A benchmark's results as Markdown: what was measured on what, the essence, and every row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from milepost.bench.race import Row
from milepost.bench.settings import GROUPS

Run = Mapping[str, Any]


def markdown(results: Mapping[str, Any]) -> str:
    """The whole report."""
    lines = ["# Attention with biases, measured", "", *_circumstances(results), ""]
    short = essence(results["runs"])
    if short:
        lines += ["## In short", "", *short, ""]
    for name, group in GROUPS.items():
        runs = [run for run in results["runs"] if run["job"]["group"] == name]
        if runs:
            lines += [f"## {group.title}", "", *_group(name, runs)]
    if results["failures"]:
        lines += ["## Failed", "", *(f"- {name}: {text}" for name, text in results["failures"].items()), ""]
    return "\n".join(lines).rstrip() + "\n"


def _circumstances(results: Mapping[str, Any]) -> list[str]:
    settings, machine, runs = results["settings"], results["hardware"], results["runs"]
    clock = {"cpu": "process CPU time", "wall": "wall time"}[settings["clock"]]
    dates = sorted(run["date"] for run in runs)
    loads = [load for run in runs for load in run["load"] if load is not None]
    codes = sorted({run["code"] for run in runs})
    period = f"{dates[0].replace('T', ' ')} to {dates[-1].replace('T', ' ')}" if dates else "nothing yet"
    lines = [
        *(f"`{command}`" for command in results["commands"]),
        "",
        f"- Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; {machine['system']}; "
        f"torch's CPU capability {machine['cpu_capability']}; "
        f"kernel {', '.join(sorted({str(run['kernel']) for run in runs}))}.",
        f"- Versions: {', '.join(f'{name} {version}' for name, version in settings['versions'].items())}.",
        f"- Time: {clock} of {settings['threads']} thread(s), {period}"
        + (f", load {min(loads):.1f} to {max(loads):.1f}" if loads else "")
        + f"; {settings['rounds']} rounds, of calls from length 8192 on at most 3.",
        f"- Shape: {settings['shape']}. Code of attention: {', '.join(codes)}"
        + (" (not all runs measured the same code)." if len(codes) > 1 else "."),
        "- Every time and ratio is a median over rounds, with the lowest and the highest in brackets; ratios are taken "
        "within a round. *to plain*: time relative to the first row, torch's attention without a bias (for rotation, a "
        "copy of q and k). *to milepost*: relative to milepost's compiled kernel with the same bias. *to products*: "
        "relative to the matrix products alone, done by torch; its rate stands beside them and may lie far below the "
        "processor's. *error*: from float64, absolute for results, relative to the largest entry for gradients.",
    ]
    return lines


def essence(runs: Sequence[Run]) -> list[str]:
    """A table with one row for each precision, length and bias that milepost and a peer share."""
    lines = []
    for run in runs:
        job = run["job"]
        if job["group"] not in ("forward", "training", "flex", "decoding", "rotation"):
            continue
        for row in run["rows"]:
            if "ratio" not in row or row["bias"] is None or not _ours(row) or "faster" in row:
                continue
            rivals = [
                other
                for other in run["rows"]
                if (other["bias"], other["learned"]) == (row["bias"], row["learned"])
                and "faster" in other
                and not _ours(other)
            ]
            best = min(rivals, key=lambda other: other["faster"], default=None)
            direction = f"{job['group']}{' + backward' if job['group'] == 'flex' and job.get('training') else ''}"
            cells = [direction, job["dtype"], str(job["length"]), _bias(row)]
            cells += [_number(row["milliseconds"]), f"{row['ratio']:.2f}"]
            cells += ["", ""] if best is None else [best["name"], f"{best['faster']:.2f}"]
            lines.append(_line(cells))
    if not lines:
        return []
    head = ["", "dtype", "length", "bias", "ms", "to plain", "best peer", "its time to milepost's"]
    return [_line(head), _rule(":--", ":--", "--:", ":--", "--:", "--:", ":--", "--:"), *lines]


def _group(name: str, runs: Sequence[Run]) -> list[str]:
    if name == "memory":
        return _memory(runs)
    lines = []
    for run in runs:
        job = run["job"]
        title = f"length {job['length']}, {job['dtype']}"
        if name == "model":
            title = "with the compiled kernel" if job["kernel"] == "auto" else "without the compiled kernel"
        elif job.get("training"):
            title += ", forward and backward"
        table = {"model": _model, "order": _order, "terms": _terms}.get(name, _calls)
        lines += [f"### {title[0].upper()}{title[1:]}", "", *table(run), ""]
    return lines


def _calls(run: Run) -> list[str]:
    rows: list[Row] = run["rows"]
    floor = any("to_floor" in row for row in rows)
    head = ["", "bias", "ms", "to plain", "to milepost", *(["to products"] if floor else []), "error"]
    lines = [_line(head), _rule(":--", ":--", *["--:"] * (len(head) - 2))]
    for row in rows:
        remarks = [f"{row['gflops']:.0f} GFLOP/s"] if "gflops" in row else []
        remarks += [row["note"]] if row["note"] else []
        cells = [row["name"] + (f": {'; '.join(remarks)}" if remarks else ""), _bias(row)]
        if "not_run" in row:
            lines.append(_line([*cells, f"not run: {_escaped(row['not_run'])}", *[""] * (len(head) - 3)]))
            continue
        cells += [_with_spread(row, "milliseconds", "spread"), _with_spread(row, "ratio", "ratio_spread")]
        cells += [_with_spread(row, "faster", "faster_spread") if "faster" in row else ""]
        cells += [f"{row['to_floor']:.2f}"] if floor else []
        lines.append(_line([*cells, f"{row['error']:.1e}" if "error" in row else ""]))
    return lines


def _model(run: Run) -> list[str]:
    lines = [
        "Steps of the preset `quick`, as `milepost train` does them. *Plain attention*: the same model with torch's "
        "causal attention and no encoding; *explicit mask*: the bias written out as a mask for torch's attention.",
        "",
    ]
    lines += [_line(["model", "encoding", "ms a step", "tokens/s", "to plain attention"])]
    lines.append(_rule(":--", ":--", "--:", "--:", "--:"))
    for row in run["rows"]:
        cells = [row["name"], row["encoding"], _with_spread(row, "milliseconds", "spread")]
        cells += [f"{row['tokens_per_second']:,.0f}", _with_spread(row, "ratio", "ratio_spread")]
        lines.append(_line(cells))
    return lines


def _memory(runs: Sequence[Run]) -> list[str]:
    lines = [
        "MiB that preparing a call and calling it adds at the highest point to what its process held, q, k and v "
        "included in what it held.",
        "",
        _line(["", "bias", "length", "forward", "forward and backward"]),
        _rule(":--", ":--", "--:", "--:", "--:"),
    ]
    cells: dict[tuple[Any, ...], dict[bool, str]] = {}
    for run in runs:
        (row,) = run["rows"]
        key = (run["job"]["length"], row["name"], _bias(row))
        text = f"not run: {_escaped(row['not_run'])}" if "not_run" in row else f"{row['mebibytes']:,.0f}"
        cells.setdefault(key, {})[row["training"]] = text
    for (length, name, bias), passes in cells.items():
        lines.append(_line([name, bias, str(length), passes.get(False, ""), passes.get(True, "")]))
    return [*lines, ""]


def _order(run: Run) -> list[str]:
    lines = ["Milliseconds; the backend that `auto` takes is in bold.", ""]
    lines += [_line(["kind", "positions", "pass", "times", "auto to fastest"])]
    lines.append(_rule(":--", ":--", ":--", ":--", "--:"))
    for row in run["rows"]:
        times = row["milliseconds"]
        shown = ", ".join(
            f"**{name} {value:.3g}**" if name == row["chosen"] else f"{name} {value:.3g}"
            for name, value in sorted(times.items(), key=lambda item: item[1])
        )
        direction = "forward and backward" if row["training"] else "forward"
        ratio = times[row["chosen"]] / times[row["fastest"]] if row["chosen"] in times else float("nan")
        lines.append(_line([row["kind"], row["place"], direction, shown, f"{ratio:.2f}"]))
    return lines


def _terms(run: Run) -> list[str]:
    lines = [_line(["encoding", "ms", "its bias holds"]), _rule(":--", "--:", ":--")]
    return lines + [_line([row["name"], f"{row['milliseconds']:.2f}", row["bias"]]) for row in run["rows"]]


def _ours(row: Row) -> bool:
    return str(row["name"]).startswith("milepost")


def _bias(row: Row) -> str:
    return (row["bias"] or "") + (", learned" if row.get("learned") else "")


def _with_spread(row: Row, name: str, spread: str) -> str:
    low, high = row[spread]
    return f"{_number(row[name])} ({_number(low)} .. {_number(high)})"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _rule(*cells: str) -> str:
    return "|" + "|".join(cells) + "|"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
