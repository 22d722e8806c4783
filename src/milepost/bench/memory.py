"""How far one call raises the peak of its process, which runs nothing else."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from collections.abc import Callable
from pathlib import Path

STATUS = Path("/proc/self/status")


def growth(prepare: Callable[[], Callable[[], object]]) -> float:
    """MiB over what was there before, at the highest point of preparing a call and calling it; results included.

    Done once before, so that code that is loaded or compiled on the first call is not counted.
    """
    prepare()()
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # memory that was freed but kept would hide what the call needs
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _resident()
    prepare()()
    return (_peak() - before) / 2**20


def _resident() -> int:
    return _status("VmRSS") if STATUS.exists() else _peak()


def _peak() -> int:
    if STATUS.exists():
        return _status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _status(entry: str) -> int:
    return next(int(line.split()[1]) * 1024 for line in STATUS.read_text().splitlines() if line.startswith(entry))
