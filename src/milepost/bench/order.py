"""Which backend is fastest for each kind of call: the evidence behind the order in which ``auto`` asks them."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from milepost.attention import attend, explain
from milepost.bench.case import HEAD_DIM, HEADS
from milepost.bench.race import Row
from milepost.encoding import build
from milepost.positions import Positions
from milepost.terms import Terms

NEVER = {"reference", "triton", "flex"}
"""Not measured: one holds all logits and is never taken, the others serve a CPU only by name, for tests."""

Make = Callable[[Positions], Terms]


def kinds() -> dict[str, Make]:
    """Name -> terms at positions; learned parameters require a gradient, as in training."""
    alibi, learned = build("alibi", num_heads=HEADS), build("kerple-log", num_heads=HEADS)
    fire, rerope = build("fire", num_heads=HEADS, threshold=1.5), build("rerope", head_dim=HEAD_DIM, window=256)
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


def measure(
    length: int, clock: Callable[[], float], rounds: int, progress: Callable[[float, str], None]
) -> list[Row]:
    """One row for each place, kind and direction: milliseconds of every backend that serves it."""
    calls = [
        (place, positions, kind, make, training)
        for place, positions in places(length).items()
        for kind, make in kinds().items()
        for training in ((False,) if place == "one query" else (False, True))
    ]
    rows = []
    for index, (place, positions, kind, make, training) in enumerate(calls):
        progress(index / len(calls), f"{kind}, {place}")
        row = compete(positions, make, training, rounds, clock)
        rows.append({"place": place, "kind": kind, "training": training, **row})
    return rows


def compete(positions: Positions, make: Make, training: bool, rounds: int, clock: Callable[[], float]) -> Row:
    """Median milliseconds of each backend that does not refuse, in turn, after one round to warm up."""
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
    times: dict[str, list[float]] = {name: [] for name in served}
    for _ in range(rounds + 1):
        for name in served:
            start = clock()
            once(q, k, v, positions, make, training, name)
            times[name].append(1e3 * (clock() - start))
    medians = {name: statistics.median(mine[1:]) for name, mine in times.items()}
    return {
        "chosen": explanation.chosen,
        "fastest": min(medians, key=medians.__getitem__),
        "milliseconds": medians,
        "refused": {name: reason for name, reason in explanation.reasons.items() if name not in served},
    }


def once(q: Tensor, k: Tensor, v: Tensor, positions: Positions, make: Make, training: bool, name: str) -> None:
    with torch.set_grad_enabled(training):
        out = attend(q, k, v, positions, make(positions), backend=name)
        if training:
            out.sum().backward()
