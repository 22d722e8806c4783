"""The benchmark as a whole: a folder of finished jobs, and the report of all that is in it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost.bench.case import HEAD_DIM, HEADS
from milepost.bench.plots import write_plots
from milepost.bench.settings import GROUPS, MEMORY, MEMORY_LEARNED, Settings
from milepost.bench.tables import markdown
from milepost.sweep import Progress, SweepDirectory, canonical_json, run_jobs, write_atomically
from milepost.sweep.environment import hardware, versions

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = "milepost.bench/1"
WORKER = "milepost.bench.worker"
REPORT = "report.md"
MEMORY_CONTENDERS = (*MEMORY, *MEMORY_LEARNED)


@dataclass(frozen=True)
class Outcome:
    """What a benchmark left behind. path: its folder. results: what results.json holds."""

    path: Path
    results: dict[str, Any]

    @property
    def failures(self) -> dict[str, str]:
        found: dict[str, str] = self.results["failures"]
        return found


def bench(
    settings: Settings,
    out: str | Path,
    *,
    again: bool = False,
    console: Console | None = None,
    quiet: bool = False,
    command: str = "",
    worker: str = WORKER,
) -> Outcome:
    """Measure what is selected and not yet there; write results.json, report.md and plots of all that is there.

    Jobs run one after the other, each in a process of its own. A folder belongs to one machine, one clock, one number
    of threads and rounds, and one set of versions; other groups, lengths and precisions may be added to it. again:
    measure the selected jobs anew. A job that fails is in `failures` and does not stop the others.

    Raises `SettingsError`, `DifferentSettings`, `SweepBusy`, and `OSError` when a file cannot be written.
    """
    jobs = settings.check().jobs()
    identity = identity_of(settings)
    digest = hashlib.sha256(canonical_json(identity).encode()).hexdigest()
    directory = SweepDirectory(out)
    with directory.lock():
        directory.claim(identity)
        for job in jobs if again else ():
            shutil.rmtree(directory.run_folder(job.name), ignore_errors=True)
        with Progress(len(jobs), console=console, describe=_describe, quiet=quiet) as progress:
            failed = run_jobs(
                directory, jobs, worker=worker, workers=1, threads=settings.threads, progress=progress, identity=digest
            )
        results = {
            "schema": SCHEMA,
            "settings": identity,
            "hardware": hardware(),
            "commands": _commands(directory.path, command),
            "runs": finished(directory),
            "failures": {job.label: failed[job.name]["message"] for job in jobs if job.name in failed},
        }
        write_atomically(directory.path / "results.json", canonical_json(results))
        write_atomically(directory.path / REPORT, markdown(results))
        write_plots(results, directory.path)
    return Outcome(directory.path, results)


def identity_of(settings: Settings) -> dict[str, Any]:
    """What all jobs of a folder have in common."""
    names = ("python", "milepost", "torch", "transformers")
    found = {name: version for name, version in versions().items() if name in names}
    try:
        found["x-transformers"] = metadata.version("x-transformers")
    except metadata.PackageNotFoundError:
        found["x-transformers"] = "none"
    return {
        "schema": SCHEMA,
        "clock": settings.clock,
        "threads": settings.threads,
        "rounds": settings.rounds,
        "cpu": hardware()["cpu"],
        "versions": found,
        "shape": f"batch 1, {HEADS} heads, head size {HEAD_DIM}",
    }


def finished(directory: SweepDirectory) -> list[dict[str, Any]]:
    """The results of all jobs in the folder, in the order of the report."""
    found = []
    for folder in sorted((directory.path / "runs").glob("*")):
        try:
            found.append(directory.result(folder.name))
        except (OSError, ValueError):
            continue  # damaged: measured again when it is asked for
    groups, dtypes = list(GROUPS), ["float32", "bfloat16"]

    def place(run: Mapping[str, Any]) -> tuple[Any, ...]:
        job = run["job"]
        contender = MEMORY_CONTENDERS.index(tuple(job["contender"])) if "contender" in job else 0
        direction = bool(job.get("training")), job.get("kernel", "auto") != "auto"
        return groups.index(job["group"]), dtypes.index(job["dtype"]), *direction, job["length"], contender

    return sorted((run for run in found if run["job"]["group"] in groups), key=place)


def _describe(result: Mapping[str, Any]) -> str:
    """The fastest of ours in a few words."""
    rows = [row for row in result["rows"] if "ratio" in row and str(row["name"]).startswith("milepost")]
    if not rows:
        return ", ".join(f"{row['mebibytes']:,.0f} MiB" for row in result["rows"] if "mebibytes" in row)
    best = min(rows, key=lambda row: row["ratio"])
    bias = best.get("bias") or best.get("encoding")
    name = f"{best['name']}, {bias}" if bias else best["name"]
    return f"{name}: {best['milliseconds']:.3g} ms, {best['ratio']:.2f} of plain"


def _commands(folder: Path, command: str) -> list[str]:
    """Every command that measured into this folder, once."""
    try:
        known = json.loads((folder / "results.json").read_text("utf-8"))["commands"]
    except (OSError, ValueError, KeyError):
        known = []
    return [*known, command] if command and command not in known else known
