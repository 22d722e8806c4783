"""Measure which attention backend is fastest for each kind of call: ``python -m benchmarks.order``.

The evidence behind the order in which ``backend="auto"`` asks the backends, and behind their thresholds. For each kind
of bias, length and direction every backend that does not refuse runs in turn in one process, round after round. A row
says which is fastest, which one ``auto`` takes, and the median time of each. Written to
``benchmarks/results/order-<date>-<machine>.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.run import RESULTS, machine
from milepost import Positions, Terms, attend, build, explain

HEADS, HEAD_DIM = 8, 64
NEVER = {"reference", "triton", "flex"}
"""Not measured: one holds all logits and is never taken, the others serve a CPU only by name, for tests."""

Make = Callable[[Positions], Terms]


def kinds() -> dict[str, Make]:
    """Name -> terms at positions; learned parameters require a gradient, as in training."""
    alibi, learned = build("alibi", num_heads=HEADS), build("kerple-log", num_heads=HEADS)
    fire, rerope = build("fire", num_heads=HEADS), build("rerope", head_dim=HEAD_DIM, window=256)
    return {
        "no bias": lambda positions: Terms(),
        "window of 256": lambda positions: Terms(window=256),
        "fixed table (alibi)": alibi,
        "learned table (kerple-log)": learned,
        "two positions, learned (fire)": fire,
        "two positions, fixed (alibi, float positions)": lambda positions: alibi(
            positions.mapped(positions.query * 0.75, positions.key * 0.75)
        ),
        "two branches (rerope)": rerope,
    }


def places(length: int) -> dict[str, Positions]:
    present = torch.ones(1, length, dtype=torch.bool)
    present[:, : length // 8] = False
    return {
        "full": Positions.full(length),
        "left padding": Positions.from_mask(present, side="left"),
        "one query": Positions.step(length - 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.order", description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="128,512,1024,2048")
    parser.add_argument("--kinds", help="comma-separated beginnings of names (default: all)")
    parser.add_argument("--places", default="full,left padding,one query")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=["cpu", "wall"], default="cpu", help="cpu: process time, for busy machines")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    wanted = tuple(options.kinds.split(",")) if options.kinds else ("",)
    rows: list[dict[str, Any]] = []
    for length in map(int, options.lengths.split(",")):
        for place, positions in places(length).items():
            if place not in options.places.split(","):
                continue
            for kind, make in kinds().items():
                if kind.startswith(wanted):
                    for training in (False,) if place == "one query" else (False, True):
                        row = race(positions, make, training, options.rounds, clock)
                        rows.append({"length": length, "place": place, "kind": kind, "training": training, **row})
                        print(json.dumps(rows[-1]), flush=True)
    document = {"command": " ".join(["python -m benchmarks.order", *sys.argv[1:]]), **machine(options), "rows": rows}
    name = f"order-{datetime.date.today()}-{platform.machine()}"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    (options.out / f"{name}.md").write_text(markdown(document))
    print(f"written: {options.out / name}.md, .json")
    return 0


def race(positions: Positions, make: Make, training: bool, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Seconds of each backend that does not refuse, medians over rounds, after one round to warm up."""
    q, k, v = (
        torch.randn(1, HEADS, n, HEAD_DIM, requires_grad=training)
        for n in (positions.num_queries, positions.num_keys, positions.num_keys)
    )
    with torch.set_grad_enabled(training):
        explanation = explain(q, k, v, positions, make(positions))
    served = [
        name
        for name, reason in explanation.reasons.items()
        if name not in NEVER and (reason == "chosen" or reason.startswith("would serve"))
    ]
    seconds: dict[str, list[float]] = {name: [] for name in served}
    for _ in range(rounds + 1):
        for name in served:
            start = clock()
            once(q, k, v, positions, make, training, name)
            seconds[name].append(clock() - start)
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    return {
        "chosen": explanation.chosen,
        "fastest": min(medians, key=medians.__getitem__),
        "seconds": medians,
        "refused": {name: reason for name, reason in explanation.reasons.items() if name not in served},
    }


def once(q: Tensor, k: Tensor, v: Tensor, positions: Positions, make: Make, training: bool, name: str) -> None:
    with torch.set_grad_enabled(training):
        out = attend(q, k, v, positions, make(positions), backend=name)
        if training:
            out.sum().backward()


def markdown(document: dict[str, Any]) -> str:
    lines = [
        "# Which backend is fastest",
        "",
        f"`{document['command']}`",
        "",
        *(f"- {key}: {value}" for key, value in document.items() if key not in ("command", "rows")),
        "",
        f"B = 1, H = {HEADS}, D = {HEAD_DIM}, float32, milliseconds (median); the one that `auto` takes is in bold.",
        "",
        "| kind | positions | length | pass | times | auto / fastest |",
        "|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        times = ", ".join(
            f"**{name} {value * 1e3:.3g}**" if name == row["chosen"] else f"{name} {value * 1e3:.3g}"
            for name, value in sorted(row["seconds"].items(), key=lambda item: item[1])
        )
        ratio = row["seconds"][row["chosen"]] / row["seconds"][row["fastest"]]
        passes = "forward and backward" if row["training"] else "forward"
        lines.append(f"| {row['kind']} | {row['place']} | {row['length']} | {passes} | {times} | {ratio:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
