"""What a worker process does around one run: dies with its parent, reports progress, finishes by one rename."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from milepost.sweep.directory import RESULT
from milepost.sweep.files import canonical_json, explain_os_error, seal, write_atomically

JOB = "job.json"
ERROR = "error.json"


class Reporter:
    """Tells the parent where a run stands: one JSON object a line on the stream; silent once the parent is gone."""

    def __init__(self, stream: Any = None, *, interval: float = 0.5) -> None:
        self._stream = stream
        self._interval = interval
        self._last = 0.0

    def __call__(self, fraction: float, phase: str, **numbers: float) -> None:
        """fraction: of the whole run, 0 to 1; phase: what is being done, in one or two words."""
        now = time.monotonic()
        if self._stream is None or (now - self._last < self._interval and fraction < 1.0):
            return
        self._last = now
        try:
            self._stream.write(json.dumps({"fraction": fraction, "phase": phase, **numbers}) + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            self._stream = None


def worker_main(perform: Callable[[dict[str, Any], Path, Path, Reporter], Mapping[str, Any]]) -> int:
    """The main function of a worker process, started as `python -m module WORK_FOLDER PARENT_PID` by `run_jobs`.

    perform: (job, work folder, out folder, report) -> result. It may keep checkpoints in the work folder and files
    for good in the out folder. Its result and those files become runs/NAME by one rename, after all checksums are
    written. An exception is written to error.json in the work folder; checkpoints stay for the next attempt.
    """
    work, parent = Path(sys.argv[1]), int(sys.argv[2])
    _die_with(parent)
    out = work / "out"
    try:
        job = json.loads((work / JOB).read_text("utf-8"))
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        # stdout carries the reports alone: what libraries print goes to the log with stderr
        reports = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        result = perform(job["job"], work, out, Reporter(reports))
        write_atomically(out / RESULT, canonical_json(result))
        seal(out, job["about"])
        final = Path(job["final"])
        final.parent.mkdir(parents=True, exist_ok=True)
        out.rename(final)
        shutil.rmtree(work, ignore_errors=True)
        return 0
    except Exception as error:
        traceback.print_exc()
        if isinstance(error, OSError) and error.filename is not None:
            error = explain_os_error(error, Path(str(error.filename)))
        message = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        record = {"kind": type(error).__name__, "message": message or type(error).__name__}
        try:
            write_atomically(work / ERROR, canonical_json(record))
        except OSError:
            print(json.dumps(record), file=sys.stderr)
        return 1


def _die_with(parent: int) -> None:
    """End this process when the parent ends, by the kernel on Linux, by looking once a second elsewhere."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
