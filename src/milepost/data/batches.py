"""Which tokens a training step reads: lengths by step, window starts, document and segment ids.

Everything here is a pure function of (seed, index): a resumed training, another number of workers or another method
sees the same data in the same order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from milepost.data.errors import DataError

Ints = npt.NDArray[np.int64]
IGNORED = -100


class LengthPlan(Protocol):
    """The window length of every optimiser step. Each step has the same number of tokens, whatever its length."""

    @property
    def max_length(self) -> int: ...

    def length(self, step: int) -> int: ...


@dataclass(frozen=True)
class ConstantLength:
    """Every window has the same length."""

    max_length: int

    def __post_init__(self) -> None:
        if self.max_length < 2:
            raise DataError(f"window length {self.max_length} must be at least 2: the first token has no prediction")

    def length(self, step: int) -> int:
        return self.max_length


@dataclass(frozen=True)
class MixedLengths:
    """Lengths mixed by their share of the training tokens: {128: 0.5, 512: 0.5}.

    Steps have equal tokens, so a length's share of the steps is its share of the tokens. Step n takes the length whose
    interval of cumulated shares holds frac(u + n * golden ratio), u from the seed: after any number of steps every
    share is kept to about log(n) / n, which random draws do not do.

    Raises `DataError` for shares that are not positive, or a length that does not divide the longest.
    """

    shares: Mapping[int, float]
    seed: int = 0
    _lengths: tuple[int, ...] = field(init=False, repr=False)
    _ends: tuple[float, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        lengths = tuple(sorted(self.shares))
        _check_lengths(lengths)
        wrong = {length: share for length, share in self.shares.items() if not share > 0}
        if wrong:
            raise DataError(f"token shares must be positive, got {wrong}: leave out lengths that take no part")
        total = sum(self.shares.values())
        object.__setattr__(self, "_lengths", lengths)
        object.__setattr__(self, "_ends", tuple(accumulate(self.shares[length] / total for length in lengths)))

    @property
    def max_length(self) -> int:
        return self._lengths[-1]

    def length(self, step: int) -> int:
        offset = item_generator(self.seed, 0, "mixed").random()
        place = (offset + step * 0.6180339887498949) % 1.0
        return self._lengths[min(bisect_right(self._ends, place), len(self._lengths) - 1)]


@dataclass(frozen=True)
class Stage:
    """One stage of a length curriculum: window length, tokens to train on, and other changes (frequencies)."""

    length: int
    tokens: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise DataError(f"a curriculum stage needs at least one token, got tokens={self.tokens}")


@dataclass(frozen=True)
class Curriculum:
    """Stages of length and tokens, one after another; the last one goes on for ever.

    tokens_per_step: tokens of one optimiser step (items a step times the longest length). A stage lasts
    ceil(tokens / tokens_per_step) steps; `stage(step)` says where a resumed training stands, inside a stage too.

    Raises `DataError` for no stages, or a length that does not divide the longest.
    """

    stages: Sequence[Stage]
    tokens_per_step: int
    _ends: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.stages:
            raise DataError("a curriculum needs at least one stage")
        _check_lengths(tuple(stage.length for stage in self.stages))
        if self.tokens_per_step < self.max_length:
            raise DataError(
                f"tokens_per_step={self.tokens_per_step} is less than the longest stage length {self.max_length}"
            )
        steps = (-(-stage.tokens // self.tokens_per_step) for stage in self.stages)
        object.__setattr__(self, "_ends", tuple(accumulate(steps)))

    @property
    def max_length(self) -> int:
        return max(stage.length for stage in self.stages)

    @property
    def total_steps(self) -> int:
        return self._ends[-1]

    def stage_index(self, step: int) -> int:
        return min(bisect_right(self._ends, step), len(self.stages) - 1)

    def stage(self, step: int) -> Stage:
        return self.stages[self.stage_index(step)]

    def first_step(self, index: int) -> int:
        """The step at which a stage begins."""
        return 0 if index == 0 else self._ends[index - 1]

    def length(self, step: int) -> int:
        return self.stage(step).length


def item_generator(seed: int, index: int, purpose: str = "windows") -> np.random.Generator:
    """A generator that depends on (seed, index, purpose) only; cheap to make, independent of all others."""
    tag = int.from_bytes(purpose.encode()[:8], "little")
    key = np.array([seed % (1 << 64), tag], dtype=np.uint64)
    counter = np.array([0, 0, index, 0], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def window_starts(generator: np.random.Generator, stream_length: int, span: int, count: int) -> Ints:
    """(count,) starts drawn uniformly from all places where `span` tokens fit into the stream.

    Raises `DataError` when the stream is shorter than `span`.
    """
    if stream_length < span:
        raise DataError(
            f"the training text has {stream_length} tokens, a window needs {span}: use a shorter length or more text"
        )
    return generator.integers(0, stream_length - span, size=count, endpoint=True)


def document_ids(positions: Ints, starts: Ints) -> Ints:
    """Document number of each stream position, counted from 0 in each row; a separator belongs to the document it ends.

    positions: (..., n) offsets in the stream, increasing; starts: offsets where documents begin.
    """
    numbers = np.searchsorted(starts, positions, side="right") - 1
    new = np.diff(numbers, axis=-1, prepend=numbers[..., :1]) != 0
    return np.cumsum(new, axis=-1)


def segment_ids(tokens: Ints, separators: Collection[int], num_types: int = 2) -> Ints:
    """Segment of each token: the number of separators before it, modulo `num_types`; a separator closes its own.

    tokens: (..., n). Raises `DataError` for no separators or fewer than two types.
    """
    if not separators or num_types < 2:
        raise DataError(f"segments need separator ids and at least 2 types, got {list(separators)} and {num_types}")
    closes = np.isin(tokens, list(separators)).astype(np.int64)
    return (np.cumsum(closes, axis=-1) - closes) % num_types


def _check_lengths(lengths: Sequence[int]) -> None:
    if not lengths:
        raise DataError("no window length given")
    if min(lengths) < 2:
        raise DataError(f"window length {min(lengths)} must be at least 2: the first token has no prediction")
    wrong = [length for length in lengths if max(lengths) % length]
    if wrong:
        raise DataError(
            f"length {wrong[0]} does not divide the longest, {max(lengths)}: steps of equal tokens need that"
        )
