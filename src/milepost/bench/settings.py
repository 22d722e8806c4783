"""What to measure and how: groups of jobs, their lengths and precisions, the clock."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, Literal

from milepost.sweep import Job
from milepost.sweep.directory import file_name

LONG = 8192
LONG_ROUNDS = 3
"""Calls of this length and more are measured in no more rounds than these: they take minutes, and vary little."""


class SettingsError(ValueError):
    """Settings that cannot be: `problems` lists all of them, each with its value and its mend."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


@dataclass(frozen=True)
class Group:
    """What belongs together in a report. lengths: by precision."""

    title: str
    lengths: dict[str, tuple[int, ...]]


def _both(float32: tuple[int, ...], bfloat16: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {"float32": float32, "bfloat16": bfloat16}


GROUPS = {
    "forward": Group("Forward", _both((512, 1024, 2048, 4096, 8192, 16384, 32768), (512, 2048, 4096))),
    "training": Group("Forward and backward", _both((512, 1024, 2048, 4096, 16384), (512, 2048))),
    "flex": Group("FlexAttention, in a process of its own", {"float32": (1024, 4096, 16384)}),
    "decoding": Group("Decoding: one query against a cache", _both((1024, 4096, 16384, 32768), (4096, 32768))),
    "batches": Group("Packed documents and padding", {"float32": (4096,)}),
    "rotation": Group("Rotation of q and k", _both((512, 4096), (512, 4096))),
    "memory": Group("Peak memory", {"float32": (4096, 16384)}),
    "model": Group("Training of a model", {"float32": (128,)}),
    "order": Group("Which backend is fastest", {"float32": (128, 512, 1024, 2048)}),
    "terms": Group("Saying the terms", {"float32": (4096,)}),
}
"""In the order of the report."""

DTYPES = ("float32", "bfloat16")
FIXED_LENGTH = ("model",)

MEMORY = (
    ("sdpa, no bias", None, False),
    ("milepost native", "kerple-log", False),
    ("milepost blocked", "kerple-log", False),
    ("milepost sdpa", "kerple-log", False),
    ("sdpa + prebuilt mask", "kerple-log", False),
    ("sdpa + mask built each call", "kerple-log", False),
    ("FlexAttention, compiled", "kerple-log", False),
    ("x-transformers flash", "alibi", False),
    ("transformers BLOOM eager", "alibi", False),
    ("transformers T5 eager", "t5", False),
)
"""Contenders whose peak is measured, forward and in training: name, bias, learned."""
MEMORY_LEARNED = (
    ("milepost native", "kerple-log", True),
    ("milepost blocked", "kerple-log", True),
    ("sdpa + mask built each call", "kerple-log", True),
    ("transformers T5 eager", "t5", True),
)
"""The same with a learned bias, in training."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A selection of jobs, and how each is timed.

    Attributes:
        groups: names in `GROUPS`.
        lengths: instead of each group's own.
        dtypes: those of float32 and bfloat16 that a group knows.
        threads: of each job, which run one after the other.
        clock: ``cpu`` counts the seconds that the process computes, which a busy machine distorts least; ``wall``.
        rounds: in how many rounds contenders take turns.
    """

    groups: tuple[str, ...] = tuple(GROUPS)
    lengths: tuple[int, ...] | None = None
    dtypes: tuple[str, ...] = DTYPES
    threads: int = 1
    clock: Literal["cpu", "wall"] = "cpu"
    rounds: int = 5

    def check(self) -> Settings:
        """These settings, when they can be run.

        Raises `SettingsError` that lists every problem.
        """
        problems = _choices("groups", self.groups, tuple(GROUPS)) + _choices("dtypes", self.dtypes, DTYPES)
        problems += _choices("clock", (self.clock,), ("cpu", "wall"))
        for name, value in (("threads", self.threads), ("rounds", self.rounds)):
            if value < 1:
                problems.append(f"--{name} {value} must be at least 1")
        for length in self.lengths or ():
            if length < 16 or length % 8:
                problems.append(f"--lengths has {length}: give multiples of 8, at least 16")
        if not problems and not self.jobs():
            names = ", ".join(self.groups)
            problems.append(f"nothing of {names} is measured in {', '.join(self.dtypes)}: add float32 to --dtypes")
        if problems:
            raise SettingsError(problems)
        return self

    def jobs(self) -> list[Job]:
        """All jobs of the selection, each a process of its own, in the order of the report."""
        found = []
        for name, group in GROUPS.items():
            if name not in self.groups:
                continue
            for dtype, own in group.lengths.items():
                lengths = own if self.lengths is None or name in FIXED_LENGTH else self.lengths
                if dtype in self.dtypes:
                    found += [job for length in lengths for job in self._jobs(name, length, dtype)]
            if name == "flex" and "float32" in self.dtypes:
                found.append(self._job("flex", min(GROUPS["flex"].lengths["float32"]), "float32", training=True))
        return found

    def _jobs(self, group: str, length: int, dtype: str) -> list[Job]:
        if group == "memory":
            both = [(entry, training) for training in (False, True) for entry in MEMORY]
            both += [(entry, True) for entry in MEMORY_LEARNED]
            return [self._job(group, length, dtype, training=t, contender=list(entry)) for entry, t in both]
        if group == "model":
            return [self._job(group, length, dtype, kernel=kernel) for kernel in ("auto", "off")]
        return [self._job(group, length, dtype)]

    def _job(self, group: str, length: int, dtype: str, **more: Any) -> Job:
        rounds = self.rounds if length < LONG or group == "decoding" else min(self.rounds, LONG_ROUNDS)
        label = f"{group}, length {length}, {dtype}"
        if more.get("training"):
            label += ", with backward"
        if "contender" in more:
            name, bias, learned = more["contender"]
            label += f", {name}" + (f", {bias}" if bias else "") + (", learned" if learned else "")
        if more.get("kernel") == "off":
            label += ", without the compiled kernel"
        timing = {"threads": self.threads, "clock": self.clock, "rounds": rounds}
        values = {"group": group, "length": length, "dtype": dtype, **timing, **more}
        return Job(name=file_name(label.replace(", ", "-")), label=label, values=values)


def _choices(name: str, values: tuple[str, ...], allowed: tuple[str, ...]) -> list[str]:
    problems = [] if values else [f"--{name} is empty: choose among {', '.join(allowed)}"]
    for value in values:
        if value not in allowed:
            near = difflib.get_close_matches(value, allowed, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            problems.append(f"--{name} {value!r} is unknown; {hint}there are {', '.join(allowed)}")
    return problems
