"""Positions drawn for a training window: what randomized and PoSE training need from the data side.

A draw returns which tokens of the text are taken and which positions they are given. It is a pure function of the
generator it is handed, so that `WindowDataset` items stay functions of (seed, index).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from milepost.data.errors import DataError

Ints = npt.NDArray[np.int64]


class PositionDraw(Protocol):
    """Draws (offsets, positions), both (length,) int64 and increasing, for a window of `length` tokens."""

    def span(self, length: int) -> int:
        """Tokens of text that a draw may reach over: every offset is below it."""
        ...

    def __call__(self, generator: np.random.Generator, length: int) -> tuple[Ints, Ints]: ...


@dataclass(frozen=True, kw_only=True)
class RandomizedPositions:
    """Randomized positions: `length` distinct integers of 0 .. maximum - 1, sorted.

    Raises `DataError` when the window is longer than `maximum`.
    Source: Ruoss et al. 2023 (ACL), section 3; one draw per sequence.
    """

    maximum: int

    def span(self, length: int) -> int:
        return length

    def __call__(self, generator: np.random.Generator, length: int) -> tuple[Ints, Ints]:
        if length > self.maximum:
            raise DataError(
                f"randomized positions: {length} tokens do not fit in maximum={self.maximum}; raise maximum"
            )
        positions = np.sort(generator.choice(self.maximum, size=length, replace=False)).astype(np.int64)
        return np.arange(length, dtype=np.int64), positions


@dataclass(frozen=True, kw_only=True)
class PoSEPositions:
    """PoSE: two chunks, the second moved ahead at random: distances up to `maximum` are trained at short length.

    The first chunk has r ~ U{1 .. (n + 1) // 2} tokens at positions 0 .. r - 1; the second continues at r + u with
    u ~ U{0 .. maximum - n}. Its text starts up to `text_skip` tokens further on (0: the text stays contiguous).

    Raises `DataError` when the window is longer than `maximum`.
    Source: Zhu et al. 2023, arXiv 2309.10400, and its train_pose.py, which takes the second chunk's text from
        further on in the document, by up to 4 * length.
    """

    maximum: int
    text_skip: int = 0

    def span(self, length: int) -> int:
        return length + self.text_skip

    def __call__(self, generator: np.random.Generator, length: int) -> tuple[Ints, Ints]:
        if length > self.maximum:
            raise DataError(f"PoSE positions: {length} tokens do not fit in maximum={self.maximum}; raise maximum")
        first = int(generator.integers(1, (length + 1) // 2, endpoint=True))
        skip = int(generator.integers(0, self.maximum - length, endpoint=True))
        text_skip = int(generator.integers(0, self.text_skip, endpoint=True))
        return pose_positions(length, first, text_skip), pose_positions(length, first, skip)


def pose_positions(length: int, first: int, skip: int) -> Ints:
    """0 .. first - 1, then first + skip .. length - 1 + skip: the positions of PoSE's two chunks."""
    index = np.arange(length, dtype=np.int64)
    return index + skip * (index >= first)
