"""One job of the benchmark, measured in a worker process."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from milepost.bench.race import Row, clock_of, race
from milepost.sweep import Reporter


def perform(job: dict[str, Any], work: Path, out: Path, report: Reporter) -> dict[str, Any]:
    """The rows of a job and the circumstances under which they came about, as plain values."""
    if job.get("kernel") == "off":
        os.environ["MILEPOST_KERNEL"] = "off"
    import torch

    from milepost.attention import library

    torch.set_num_threads(job["threads"])
    began, load = time.perf_counter(), _load()
    rows = rows_of(job, report)
    report(1.0, "done")
    return {
        "job": job,
        "rows": rows,
        "date": datetime.now().isoformat(timespec="minutes"),
        "seconds": time.perf_counter() - began,
        "load": [load, _load()],
        "kernel": library.instruction_set() or library.unavailable(),
        "code": code_digest(),
    }


def rows_of(job: Mapping[str, Any], report: Any) -> list[Row]:
    """What `job` says is measured, measured."""
    import torch

    clock, rounds, length = clock_of(job["clock"]), int(job["rounds"]), int(job["length"])
    group, dtype = str(job["group"]), getattr(torch, job["dtype"])
    if group == "memory":
        return [peak(job)]
    if group == "model":
        from milepost.bench import model

        return model.measure(clock, rounds, report)
    if group == "order":
        from milepost.bench import order

        return order.measure(length, clock, rounds, report)
    if group == "terms":
        from milepost.bench import saying

        return saying.measure(length, clock, report)
    from milepost.bench.calls import CALLS

    return race(CALLS[f"{group}-training" if job.get("training") else group](length, dtype), clock, rounds, report)


def peak(job: Mapping[str, Any]) -> Row:
    """The row of a memory job: one contender, forward or in training."""
    import torch

    from milepost.bench import calls, memory, peers
    from milepost.bench.case import Case, NotRun

    name, bias, learned = job["contender"]
    training = bool(job["training"])
    contenders = [*calls.contenders(training), peers.flex()]
    chosen = next(c for c in contenders if (c.name, c.bias, c.learned) == (name, bias, learned))
    case = Case(int(job["length"]), getattr(torch, job["dtype"]), training)
    row: Row = {"name": name, "bias": bias, "learned": learned, "training": training}
    try:
        return {**row, "mebibytes": memory.growth(lambda: chosen.call(case))}
    except NotRun as reason:
        return {**row, "not_run": str(reason)}
    except Exception as error:
        if chosen.ours:
            raise
        return {**row, "not_run": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


def code_digest() -> str:
    """A few hexadecimal digits that change with the code of attention, so that a report can say what it measured."""
    from milepost import attention

    digest = hashlib.sha256()
    for path in sorted(Path(attention.__file__).parent.glob("*.*")):
        if path.suffix in (".py", ".cpp"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _load() -> float | None:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
