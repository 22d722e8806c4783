"""The sweep: every (method, seed) of a comparison, then the table, the plots and the report."""

from __future__ import annotations

import hashlib
import json
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost.compare.run import load_data
from milepost.compare.settings import CONTROL, Settings
from milepost.compare.summary import summarise
from milepost.data import DataError, PasskeyTask
from milepost.sweep import Job, Progress, SweepDirectory, canonical_json, run_jobs, write_atomically
from milepost.sweep.directory import file_name
from milepost.sweep.environment import hardware, usable_cores, versions

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = "milepost.compare/1"
WORKER = "milepost.compare.worker"


@dataclass(frozen=True)
class Outcome:
    """What a comparison left behind.

    path: the sweep's directory. results: what results.json holds. failures: runs that failed, also in results.
    """

    path: Path
    results: dict[str, Any]

    @property
    def failures(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.results["failures"]
        return found


def compare(
    settings: Settings,
    out: str | Path,
    *,
    workers: int | None = None,
    console: Console | None = None,
    quiet: bool = False,
    command: str = "",
    worker: str = WORKER,
) -> Outcome:
    """Train and measure every (method, seed), and write results.json, tables, plots and report.html into `out`.

    workers: processes side by side (default: as many as the cores hold, one where there is an accelerator). The same
    call again does only what is missing. A run that fails is reported in `failures` and does not stop the others.

    Raises `SettingsError`, `DataError`, `DifferentSettings` (the folder holds another comparison; nothing is changed),
    `SweepBusy`, and `OSError` when a file cannot be written.
    """
    began, cpu = time.perf_counter(), _cpu_seconds()
    settings.check()
    corpus = load_data(settings)
    corpus.test.regions(size=max(settings.test_lengths), count=settings.regions)  # raises when text is too short
    if len(corpus.train.stream) < settings.train_length:
        raise DataError(
            f"the training text has {len(corpus.train.stream)} tokens, a window needs --train-length "
            f"{settings.train_length}: give more text, or a shorter length"
        )
    identity = {
        "schema": SCHEMA,
        "settings": settings.to_dict(),
        "data": corpus.fingerprint,
        "versions": {k: v for k, v in versions().items() if k in ("python", "milepost", "torch", "transformers")},
    }
    digest = hashlib.sha256(canonical_json(identity).encode()).hexdigest()
    jobs = jobs_of(settings)
    count = min(workers or default_workers(settings), len(jobs))
    directory = SweepDirectory(out)
    with directory.lock():
        directory.claim(identity)
        with Progress(len(jobs), workers=count, console=console, describe=_describe, quiet=quiet) as progress:
            failed = run_jobs(
                directory,
                jobs,
                worker=worker,
                workers=count,
                threads=settings.threads,
                progress=progress,
                identity=digest,
            )
        runs = [directory.result(job.name) for job in jobs if directory.is_complete(job.name)]
        failures = [
            {"method": job.values["method"], "seed": job.values["seed"], **failed[job.name]}
            for job in jobs
            if job.name in failed
        ]
        timing = {"seconds": time.perf_counter() - began, "cpu_seconds": _cpu_seconds() - cpu, "workers": count}
        results = assemble(settings, runs, failures, corpus.describe(), timing=timing, command=command)
        write_report(directory.path, results)
    return Outcome(directory.path, results)


def jobs_of(settings: Settings) -> list[Job]:
    """One job for each seed and method; seeds are the outer loop, so that a whole round is done early."""
    return [
        Job(
            name=_job_name(method, seed),
            label=method if settings.seeds == 1 else f"{method}, seed {seed}",
            values={"method": method, "seed": seed, "settings": settings.to_dict()},
        )
        for seed in range(settings.seeds)
        for method in settings.methods
    ]


def default_workers(settings: Settings) -> int:
    """One where an accelerator does the work, otherwise as many as the cores hold."""
    import torch

    if settings.device == "auto" and (torch.cuda.is_available() or torch.backends.mps.is_available()):
        return 1
    return max(usable_cores() // settings.threads, 1)


def assemble(
    settings: Settings,
    runs: Sequence[Mapping[str, Any]],
    failures: Sequence[Mapping[str, Any]],
    data: Mapping[str, Any],
    *,
    timing: Mapping[str, Any],
    command: str = "",
) -> dict[str, Any]:
    """results.json as plain values. Everything that differs between equal runs stands under keys named "timing"."""
    chance = PasskeyTask.small().chance
    summary = summarise(
        runs,
        methods=settings.methods,
        train_length=settings.train_length,
        passkey_train_length=settings.passkey_train_length if settings.passkey else None,
        passkey_chance=chance,
    )
    speeds = [
        {
            "method": row["method"],
            "train_tokens_per_second": _mean(
                [run["timing"]["train_tokens_per_second"] for run in runs if run["method"] == row["method"]]
            ),
        }
        for row in summary["methods"]
    ]
    results = {
        "schema": SCHEMA,
        "settings": settings.to_dict(),
        "data": dict(data),
        "environment": {"versions": versions(), "hardware": hardware()},
        "summary": summary,
        "runs": list(runs),
        "failures": list(failures),
        "timing": {**timing, "command": command, "methods": speeds},
    }
    plain: dict[str, Any] = json.loads(canonical_json(results))
    return plain


def write_report(folder: Path, results: Mapping[str, Any]) -> None:
    """results.json, table.md, table.tex, the plots and report.html, each atomically."""
    from milepost.report import figures, page, render, tables

    write_atomically(folder / "results.json", canonical_json(results))
    made = tables(results)
    title, lead, notes = headline(results)
    head = f"# {title}\n\n{lead}\n\n" + "".join(f"{note}\n\n" for note in notes)
    write_atomically(folder / "table.md", head + "\n".join(table.to_markdown() for table in made))
    write_atomically(folder / "table.tex", "\n".join(table.to_latex() for table in made))
    drawn = figures(results)
    for name, figure in drawn.items():
        for kind in ("png", "svg"):
            write_atomically(folder / f"{name}.{kind}", render(figure, kind, salt=name))
    write_atomically(folder / "report.html", page(results, made, drawn, title=title, lead=lead, notes=notes))


def headline(results: Mapping[str, Any]) -> tuple[str, str, list[str]]:
    """Title, one paragraph of what came out, and what a reader must know beside it."""
    settings, summary = results["settings"], results["summary"]
    count = len(summary["methods"])
    plural = "s" if count != 1 else ""
    title = f"Length extrapolation: {count} encoding{plural}, trained at {settings['train_length']} tokens"
    tokens = settings["steps"] * settings["batch_size"] * settings["accumulation"] * settings["train_length"]
    seeds = settings["seeds"]
    lead = (
        f"Each trained for {settings['steps']:,} steps ({tokens:,} tokens) on "
        f"{results['data'].get('name', settings['data'])} with {seeds} seed{'s' if seeds != 1 else ''}, tested on "
        f"held-out documents at up to {max(settings['test_lengths'])} tokens."
    )
    verdict = _verdict(results)
    if verdict:
        lead += " " + verdict
    notes = []
    methods = [row["method"] for row in summary["methods"]]
    if CONTROL in methods and any(method.startswith("mep") for method in methods):
        notes.append(
            f"{CONTROL} is a control: ALiBi with doubled slopes. A mixture of kernels has shown something only "
            f"where it is better than this row too."
        )
    if seeds == 1:
        notes.append("One seed: intervals are over documents, and say nothing of how another training would turn out.")
    for failure in results["failures"]:
        notes.append(f"{failure['method']}, seed {failure['seed']}, failed: {failure['message']}")
    return title, lead, notes


def _verdict(results: Mapping[str, Any]) -> str:
    from milepost.report import measures_in

    measures = measures_in(results["summary"])
    if not measures:
        return ""
    cells = results["summary"]["perplexity"][measures[0]]["cells"]
    at = {(cell["method"], cell["length"]): cell["value"] for cell in cells}
    trained = results["settings"]["train_length"]
    lengths = sorted({cell["length"] for cell in cells})
    base, longest = min(lengths, key=lambda length: (abs(length - trained), length)), lengths[-1]
    if base == longest:
        return ""
    known = [row["method"] for row in results["summary"]["methods"]]
    methods = [method for method in known if (method, base) in at and (method, longest) in at]
    growth = {method: at[method, longest] / at[method, base] for method in methods}
    held = [method for method in methods if growth[method] <= 1.1]
    rose = sorted((method for method in methods if growth[method] > 1.1), key=lambda method: -growth[method])
    words = []
    if held:
        words.append(f"hold within 10 % from {base} to {longest}: {', '.join(held)}")
    if rose:
        words.append(f"rise: {', '.join(f'{method} ({growth[method]:.2g} times)' for method in rose)}")
    refused = [method for method in known if method not in methods]
    if refused:
        words.append(f"refuse {longest}: {', '.join(refused)}")
    return f"Perplexity by length: {'; '.join(words)}."


def _describe(result: Mapping[str, Any]) -> str:
    """A finished run in a few words."""
    cells = [cell for cell in result.get("perplexity", []) if cell["measure"] == "windows"] or result.get(
        "perplexity", []
    )
    words = []
    if cells:
        first, last = cells[0], cells[-1]
        words.append(
            f"perplexity {first['perplexity']:.2f} at {first['length']}, {last['perplexity']:.2f} at {last['length']}"
        )
    if result.get("passkey"):
        first, last = result["passkey"][0], result["passkey"][-1]
        words.append(f"passkey {first['exact']:.2f} at {first['length']}, {last['exact']:.2f} at {last['length']}")
    return "; ".join(words)


def _job_name(method: str, seed: int) -> str:
    name = file_name(method)
    if name != method or len(name) > 80:
        name = f"{name[:80]}-{hashlib.sha256(method.encode()).hexdigest()[:8]}"
    return f"{name}.seed{seed}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _cpu_seconds() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
