"""Worker processes for the runs that are missing, a few at a time."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from milepost.sweep.directory import SweepDirectory
from milepost.sweep.files import canonical_json, write_atomically
from milepost.sweep.progress import Progress
from milepost.sweep.worker import ERROR, JOB


@dataclass(frozen=True)
class Job:
    """One run of a sweep.

    name: unique, good as a folder's name; label: for people; values: what the worker is given, plain JSON values.
    """

    name: str
    label: str
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[str]
    started: float


def run_jobs(
    directory: SweepDirectory,
    jobs: Sequence[Job],
    *,
    worker: str,
    workers: int,
    threads: int,
    progress: Progress,
    identity: str,
) -> dict[str, dict[str, str]]:
    """Do every job that is not complete; `workers` processes of `threads` threads each, side by side.

    worker: module that calls `worker_main`. identity: hash of the sweep's settings, kept in each run's manifest.
    A complete run is checked against its checksums first and redone when it is damaged. A run that fails is recorded,
    and the others go on. Returns job name -> {"kind", "message", "log"} of those that failed.

    Ended early (Ctrl-C, a kill), every worker ends too and what is complete stays.
    """
    missing: list[Job] = []
    for job in jobs:
        problem = directory.discard_damaged(job.name, _about(job, identity))
        if problem is not None:
            progress.note(f"{job.label}: the finished run is damaged ({problem}) and is done again")
        if directory.is_complete(job.name):
            shutil.rmtree(directory.work_folder(job.name), ignore_errors=True)
            progress.already(job)
        else:
            missing.append(job)
    failures: dict[str, dict[str, str]] = {}
    running: dict[str, _Running] = {}
    messages: queue.Queue[tuple[str, dict[str, Any] | None]] = queue.Queue()
    waiting = list(missing)
    try:
        while waiting or running:
            while waiting and len(running) < max(workers, 1):
                job = waiting.pop(0)
                progress.started(job)
                running[job.name] = _start(directory, job, worker, threads, identity, messages)
            try:
                name, message = messages.get(timeout=1.0)
            except queue.Empty:
                progress.tick()
                continue
            entry = running[name]
            if message is not None:
                progress.advanced(entry.job, message)
                continue
            code = entry.process.wait()
            del running[name]
            if code == 0 and directory.is_complete(name):
                progress.finished(entry.job, directory.result(name), time.monotonic() - entry.started)
            else:
                failures[name] = _failure(directory, name, code)
                progress.failed(entry.job, failures[name]["message"])
    finally:
        for entry in running.values():
            entry.process.kill()
        for entry in running.values():
            entry.process.wait()
    _remove_empty(directory.path / "work")
    return failures


def _about(job: Job, identity: str) -> dict[str, Any]:
    return {"run": job.name, "settings": identity}


def _start(
    directory: SweepDirectory,
    job: Job,
    worker: str,
    threads: int,
    identity: str,
    messages: queue.Queue[tuple[str, dict[str, Any] | None]],
) -> _Running:
    work = directory.work_folder(job.name)
    _prepare(work, job, directory, identity)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join([path for path in sys.path if path]),
    }
    with (work / "log.txt").open("a", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", worker, str(work.resolve()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
            text=True,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends its workers
        )
    threading.Thread(target=_listen, args=(job.name, process, messages), daemon=True).start()
    return _Running(job, process, time.monotonic())


def _prepare(work: Path, job: Job, directory: SweepDirectory, identity: str) -> None:
    """A work folder of this very sweep, with its checkpoints, or an empty one."""
    record = {
        "job": dict(job.values),
        "about": _about(job, identity),
        "final": str(directory.run_folder(job.name).resolve()),
    }
    text = canonical_json(record)
    try:
        known = json.loads((work / JOB).read_text("utf-8"))["about"] == record["about"]
    except (OSError, ValueError, KeyError, TypeError):
        known = False
    if not known:
        shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    (work / ERROR).unlink(missing_ok=True)
    write_atomically(work / JOB, text)


def _listen(
    name: str, process: subprocess.Popen[str], messages: queue.Queue[tuple[str, dict[str, Any] | None]]
) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        try:
            messages.put((name, json.loads(line)))
        except ValueError:
            continue
    messages.put((name, None))


def _failure(directory: SweepDirectory, name: str, code: int) -> dict[str, str]:
    work = directory.work_folder(name)
    log = f"work/{name}/log.txt"
    try:
        record = json.loads((work / ERROR).read_text("utf-8"))
        return {"kind": str(record["kind"]), "message": str(record["message"]), "log": log}
    except (OSError, ValueError, KeyError, TypeError):
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        hint = " (the system may have run out of memory)" if code == -9 else ""
        return {"kind": "WorkerDied", "message": f"the worker {how}{hint}; see {log}", "log": log}


def _remove_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        pass
