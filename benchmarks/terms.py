"""How long every encoding takes to say its terms for 4096 positions: `python -m benchmarks.terms`.

The median of 20 calls on one thread, in milliseconds, after a warm-up; and how many numbers the terms hold. Written to
benchmarks/results/.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from datetime import date
from pathlib import Path

import torch

from milepost import Positions
from milepost.encoding import from_spec, names
from milepost.terms import DenseBias, DistanceBias

LENGTH = 4096
LIMIT_MS = 5.0
GEOMETRY = {
    "num_heads": 12, "head_dim": 64, "width": 768, "num_layers": 12, "vocab_size": 258, "trained_length": LENGTH,
}  # fmt: skip


def held(name: str) -> tuple[float, str]:
    """Milliseconds and what the bias holds."""
    encoding = from_spec(name, GEOMETRY).eval().for_layer(0)
    positions = Positions.full(LENGTH)
    if encoding.axes > 1:
        from milepost.testing import on_grid

        positions = on_grid(positions, encoding.axes)
    tokens = torch.zeros(1, LENGTH, dtype=torch.long)
    times = []
    with torch.no_grad():
        for _ in range(22):
            began = time.process_time()
            terms = encoding(positions, tokens)
            times.append(1000 * (time.process_time() - began))
    bias = terms.bias
    if isinstance(bias, DistanceBias):
        form = f"{bias.table.shape[0]} x {bias.table.shape[1]} numbers"
    elif isinstance(bias, DenseBias):
        form = f"{bias.tensor.numel():,} numbers"
    else:
        form = "a function of pairs" if bias is not None else "no bias"
    return statistics.median(times[2:]), form


def main() -> None:
    torch.set_num_threads(1)
    rows = [(name, *held(name)) for name in names()]
    rows.sort(key=lambda row: -row[1])
    lines = [
        f"# Terms for {LENGTH} positions",
        "",
        f"`python -m benchmarks.terms`, {date.today().isoformat()}, {platform.machine()}, torch {torch.__version__}, "
        "one thread, process CPU time, median of 20 calls in evaluation mode, 12 heads of 64.",
        "",
        "| encoding | ms | bias |",
        "| --- | --: | --- |",
        *(f"| {name} | {ms:.2f} | {form} |" for name, ms, form in rows),
        "",
        f"Over {LIMIT_MS:g} ms: {', '.join(name for name, ms, _ in rows if ms > LIMIT_MS) or 'none'}.",
    ]
    out = Path(__file__).parent / "results" / f"terms-{date.today().isoformat()}-{platform.machine()}.md"
    out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines[4:16]), lines[-1], sep="\n")
    print(out, file=sys.stderr)


if __name__ == "__main__":
    main()
