"""How long every encoding takes to say its terms."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from milepost.bench.race import Row
from milepost.encoding import from_spec, names
from milepost.positions import Positions
from milepost.terms import DenseBias, DistanceBias
from milepost.testing import on_grid

CALLS = 20


def measure(length: int, clock: Callable[[], float], progress: Callable[[float, str], None]) -> list[Row]:
    """One row an encoding, in evaluation mode: the median of 20 calls, and what the bias holds; slowest first."""
    rows = []
    for index, name in enumerate(names()):
        progress(index / len(names()), name)
        milliseconds, form = said(name, length, clock)
        rows.append({"name": name, "milliseconds": milliseconds, "bias": form})
    return sorted(rows, key=lambda row: -row["milliseconds"])


def said(name: str, length: int, clock: Callable[[], float]) -> tuple[float, str]:
    """(milliseconds, what the bias holds) for `length` positions of a model of usual size."""
    geometry = {
        "num_heads": 12, "head_dim": 64, "width": 768, "num_layers": 12, "vocab_size": 258, "trained_length": length,
    }  # fmt: skip
    encoding = from_spec(name, geometry).eval().for_layer(0)
    positions = Positions.full(length)
    if encoding.axes > 1:
        positions = on_grid(positions, encoding.axes)
    tokens = torch.zeros(1, length, dtype=torch.long)
    times = []
    with torch.no_grad():
        for _ in range(CALLS + 2):
            began = clock()
            terms = encoding(positions, tokens)
            times.append(1e3 * (clock() - began))
    bias = terms.bias
    if isinstance(bias, DistanceBias):
        form = f"{bias.table.shape[0]} x {bias.table.shape[1]} numbers"
    elif isinstance(bias, DenseBias):
        form = f"{bias.tensor.numel():,} numbers"
    else:
        form = "a function of pairs" if bias is not None else "no bias"
    return statistics.median(times[2:]), form
