"""Versions and hardware, as plain values for reports."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("milepost", "torch", "transformers", "numpy", "accelerate", "safetensors", "tokenizers", "matplotlib")


def versions() -> dict[str, str]:
    """Python and the packages that decide numbers; 'none' for one that is not installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "none"
    return found


def hardware() -> dict[str, Any]:
    """Processor, cores that this process may use, memory in GiB, and accelerators."""
    import torch

    accelerators = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if not accelerators and torch.backends.mps.is_available():
        accelerators = ["mps"]
    return {
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "memory_gib": _memory_gib(),
        "accelerators": accelerators,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    if sys.platform == "win32" or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
