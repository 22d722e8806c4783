"""Contenders in turn, round after round in one process, so that a slow minute of the machine hits all of them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SHORTEST = 0.02
"""Seconds: quicker calls are repeated until a round takes about as long."""
MOST_REPEATS = 50

Row = dict[str, Any]
"""Plain JSON values: one line of a table."""


@dataclass
class Racer:
    """What is timed.

    call: without arguments. error: result of the call -> its distance from float64. ours: a failure ends the job; a
    peer's is a remark. best: racers with the same bias and learned are compared with this one. absent: why there is
    nothing to call. floor: the time of the matrix products alone. share: what part of the call counts. work: floating
    point operations of the call. note: for people.
    """

    name: str
    call: Callable[[], object] | None
    bias: str | None = None
    learned: bool = False
    error: Callable[[object], float] | None = None
    ours: bool = False
    best: bool = False
    floor: bool = False
    share: float = 1.0
    work: float | None = None
    absent: str = ""
    note: str = ""

    @property
    def pair(self) -> tuple[str | None, bool]:
        return self.bias, self.learned


def clock_of(name: str) -> Callable[[], float]:
    """``cpu``: seconds that this process computed, in all threads; ``wall``: seconds that passed."""
    return time.process_time if name == "cpu" else time.perf_counter


def race(
    racers: Sequence[Racer],
    clock: Callable[[], float],
    rounds: int,
    progress: Callable[[float, str], None] = lambda fraction, phase: None,
) -> list[Row]:
    """One row for each racer; the first racer is what `ratio` is relative to.

    Ratios are taken within a round, and the row has their median, lowest and highest. `faster`: how many times the
    time of the best contender with the same bias this one takes.
    """
    errors: dict[int, float] = {}
    warm: dict[int, float] = {}
    for index, racer in enumerate(racers):
        progress(0.3 * index / len(racers), "warming up")
        if racer.call is None:
            continue
        begin = clock()
        try:
            found = racer.call()
        except Exception as error:
            if racer.ours:
                raise
            racer.absent = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            continue
        warm[index] = clock() - begin
        if racer.error is not None:
            errors[index] = racer.error(found)
    running = list(warm)
    times = _times(racers, warm, clock, rounds, progress)
    best = {racers[index].pair: index for index in running if racers[index].best}
    floor = next((index for index in running if racers[index].floor), None)
    rows = []
    for index, racer in enumerate(racers):
        row: Row = {"name": racer.name, "bias": racer.bias, "learned": racer.learned, "note": racer.note}
        if index not in times:
            rows.append({**row, "not_run": racer.absent})
            continue
        mine = times[index]
        row |= {"milliseconds": 1e3 * statistics.median(mine), "spread": [1e3 * min(mine), 1e3 * max(mine)]}
        row |= _ratios("ratio", mine, times[running[0]])
        if racer.work is not None:
            row["gflops"] = 1e-9 * racer.work * racer.share / statistics.median(mine)
        if racer.pair in best and best[racer.pair] != index:
            row |= _ratios("faster", mine, times[best[racer.pair]])
        if floor is not None:
            row["to_floor"] = statistics.median([a / b for a, b in zip(mine, times[floor], strict=True)])
        if index in errors:
            if math.isfinite(errors[index]):
                row["error"] = errors[index]
            else:
                row["note"] = f"the result is not finite. {racer.note}".strip()
        rows.append(row)
    return rows


def _times(
    racers: Sequence[Racer],
    warm: Mapping[int, float],
    clock: Callable[[], float],
    rounds: int,
    progress: Callable[[float, str], None],
) -> dict[int, list[float]]:
    """Index -> seconds of a call in each round. warm: index -> seconds of its first call."""
    calls = {index: racers[index].call for index in warm}
    repeats = {index: _repeats(call, warm[index], clock) for index, call in calls.items() if call is not None}
    times: dict[int, list[float]] = {index: [] for index in warm}
    done = 0
    for _ in range(rounds):
        for index, call in calls.items():
            assert call is not None
            begin = clock()
            for _ in range(repeats[index]):
                call()
            times[index].append(racers[index].share * (clock() - begin) / repeats[index])
            done += 1
            progress(0.3 + 0.7 * done / (rounds * len(warm)), "measuring")
    return times


def _repeats(call: Callable[[], object], first: float, clock: Callable[[], float]) -> int:
    if first > 20 * SHORTEST:  # so long that it is no quick call, however slow the first one was
        return 1
    begin = clock()
    call()
    return max(1, min(MOST_REPEATS, round(SHORTEST / max(clock() - begin, 1e-6))))


def _ratios(name: str, mine: list[float], other: list[float]) -> Row:
    ratios = [a / b for a, b in zip(mine, other, strict=True)]
    return {name: statistics.median(ratios), f"{name}_spread": [min(ratios), max(ratios)]}
