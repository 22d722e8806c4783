"""Benchmarks: attention with biases, decoding, rotation, memory and training, beside what a user could take instead.

    from milepost.bench import Settings, bench
    outcome = bench(Settings(groups=("forward",), lengths=(1024,)), "bench")

Contenders take turns in one process for each shape; ratios are taken within a round; errors are against float64 and
stand in the same row. The folder is the state: a finished job is kept. Nothing here is a test.
"""

from __future__ import annotations

from milepost.bench.run import Outcome, bench
from milepost.bench.settings import GROUPS, Settings, SettingsError

__all__ = ["GROUPS", "Outcome", "Settings", "SettingsError", "bench"]
