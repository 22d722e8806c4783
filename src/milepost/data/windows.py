"""Which tokens an evaluation reads, and which targets it counts.

A *region* is a stretch of one held-out document with `size` targets: tokens start .. start + size, where the first
token is context only. A *window* of length n reads n tokens from `start` on and predicts the n that begin one later.
All functions here return index arrays and touch no text, so that what is counted can be checked
without a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from milepost.data.errors import DataError

Ints = npt.NDArray[np.int64]


class TokenSource(Protocol):
    """What `Windows.gather` reads from: a `Split`, or anything with one token stream and document starts."""

    @property
    def stream(self) -> npt.NDArray[np.unsignedinteger]: ...

    @property
    def starts(self) -> Ints: ...


@dataclass(frozen=True, eq=False)
class Regions:
    """Stretches of held-out text, the same for every context length.

    document, start: (R,) int64, the document's index and the offset in it of the region's first (context-only) token.
    size: number of targets in each region; the region holds size + 1 tokens.
    """

    document: Ints
    start: Ints
    size: int

    def __len__(self) -> int:
        return len(self.document)

    @property
    def num_targets(self) -> int:
        return len(self) * self.size


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows of one length, in a stable order (by region, then start): methods can be compared token by token.

    region, document, start: (W,) int64; `start` is the offset in the document of the first input token.
    first: (W,) int64, targets first .. length - 1 of the window are counted, earlier ones are context.
    length: number of inputs (= number of targets read) of each window.
    """

    region: Ints
    document: Ints
    start: Ints
    first: Ints
    length: int

    def __len__(self) -> int:
        return len(self.start)

    @property
    def num_targets(self) -> int:
        """Number of counted targets, each one once."""
        return int((self.length - self.first).sum())

    def counted(self) -> npt.NDArray[np.bool_]:
        """(W, length) bool: True where the target is counted."""
        return np.arange(self.length) >= self.first[:, None]

    def target_positions(self) -> tuple[Ints, Ints]:
        """(document, offset in the document) of every counted target, in window order: two (num_targets,) arrays."""
        rows, columns = np.nonzero(self.counted())
        return self.document[rows], self.start[rows] + columns + 1

    def gather(
        self, source: TokenSource, rows: slice | Sequence[int] | Ints | None = None
    ) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
        """Tokens of some windows (all by default): inputs, targets (n, length) int64 and counted (n, length) bool."""
        index = np.arange(len(self))[rows if rows is not None else slice(None)]
        base = source.starts[self.document[index]] + self.start[index]
        tokens = source.stream[base[:, None] + np.arange(self.length + 1)].astype(np.int64)
        return tokens[:, :-1], tokens[:, 1:], np.arange(self.length) >= self.first[index][:, None]


def select_regions(lengths: Sequence[int] | Ints, *, size: int, count: int = 24, allow_fewer: bool = False) -> Regions:
    """`count` disjoint regions of `size` targets, spread as evenly as possible over the documents that are long enough.

    lengths: tokens of each document. Every document with more than `size` tokens takes part; no document gets a second
    region before each has one, and the regions of a document are spread evenly over it. No target lies in two regions.
    The choice depends on lengths, size and count only.

    Raises `DataError` when no document is long enough, or fewer than `count` regions fit and `allow_fewer` is False.
    """
    if size < 1 or count < 1:
        raise DataError(f"size and count must be at least 1, got size={size}, count={count}")
    sizes = np.asarray(lengths, dtype=np.int64)
    room = np.maximum(sizes - 1, 0) // size
    eligible = np.nonzero(room)[0]
    if len(eligible) == 0:
        raise DataError(
            f"no held-out document has {size + 1} tokens, which a region of {size} targets needs; {_describe(sizes)}: "
            f"ask for a shorter length or use longer documents"
        )
    total = int(room.sum())
    if total < count and not allow_fewer:
        raise DataError(
            f"{count} regions of {size} targets were asked for but only {total} fit in the held-out documents; "
            f"{_describe(sizes)}: ask for fewer regions, a shorter length, or allow fewer regions"
        )
    share = np.zeros(len(sizes), dtype=np.int64)
    left = min(count, total)
    while left:
        open_documents = np.nonzero(share < room)[0]
        if len(open_documents) > left:  # the last round: documents at even steps through the list
            open_documents = open_documents[((np.arange(left) + 0.5) * len(open_documents) / left).astype(np.int64)]
        share[open_documents] += 1
        left -= len(open_documents)
    documents: list[int] = []
    starts: list[int] = []
    for document in np.nonzero(share)[0]:
        regions = int(share[document])
        slack = int(sizes[document]) - 1 - regions * size
        documents += [int(document)] * regions
        starts += [i * size + (2 * i + 1) * slack // (2 * regions) for i in range(regions)]
    return Regions(np.array(documents, dtype=np.int64), np.array(starts, dtype=np.int64), size)


def nonoverlapping(regions: Regions, length: int) -> Windows:
    """Non-overlapping windows of `length` over each region: every target counted once, whatever the length.

    Where `length` does not divide the region's size, the last window is moved left until it is full, and counts only
    the targets that no earlier window has counted. Much of the gain with length in this measure is the early-token
    effect.

    Raises `DataError` when `length` is less than 1 or exceeds the region's size.
    """
    return sliding(regions, length, length)


def last_targets(regions: Regions, length: int, targets: int) -> Windows:
    """One window of `length` at the end of each region, of which the last `targets` targets are counted.

    For every length the same target tokens, with growing context before them: loss differences are the context's alone.

    Raises `DataError` when `targets` exceeds `length` or `length` exceeds the region's size.
    """
    _check_length(regions, length)
    if not 1 <= targets <= length:
        raise DataError(
            f"targets={targets} must lie between 1 and the window's length {length}: "
            f"the same targets must fit in the shortest window"
        )
    index = np.arange(len(regions), dtype=np.int64)
    first = np.full(len(regions), length - targets, dtype=np.int64)
    return Windows(index, regions.document, regions.start + regions.size - length, first, length)


def sliding(regions: Regions, length: int, stride: int) -> Windows:
    """Windows of `length` that advance by `stride` targets; each counts only the targets that are new to it.

    The first window of a region counts all its targets (they have no more context to be given); every later counted
    target sees at least length - stride tokens before it. The last window is moved left until it ends with the region.

    Raises `DataError` when `stride` is not in 1 .. length or `length` exceeds the region's size.
    """
    _check_length(regions, length)
    if not 1 <= stride <= length:
        raise DataError(
            f"stride={stride} must lie between 1 and the window's length {length}, or targets would be skipped"
        )
    ends = np.minimum(np.arange(length, regions.size + stride, stride, dtype=np.int64), regions.size)
    first = length - np.diff(ends, prepend=0)
    count = len(regions)
    return Windows(
        region=np.repeat(np.arange(count, dtype=np.int64), len(ends)),
        document=np.repeat(regions.document, len(ends)),
        start=(regions.start[:, None] + (ends - length)).reshape(-1),
        first=np.tile(first, count),
        length=length,
    )


def _check_length(regions: Regions, length: int) -> None:
    if not 1 <= length <= regions.size:
        raise DataError(
            f"window length {length} must lie between 1 and the regions' size {regions.size}: "
            f"select regions with size >= the longest length"
        )


def _describe(sizes: Ints) -> str:
    if len(sizes) == 0:
        return "there are no documents"
    longest = ", ".join(str(n) for n in sorted(sizes.tolist(), reverse=True)[:5])
    more = ", ..." if len(sizes) > 5 else ""
    return f"the {len(sizes)} document(s) have these lengths, longest first: {longest}{more}"
