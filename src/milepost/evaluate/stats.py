"""Intervals over documents, paired differences, and intervals of a share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A value with the two ends of its interval."""

    value: float
    low: float
    high: float

    def ends(self) -> dict[str, float | None]:
        """``low`` and ``high`` for a JSON file, which knows no infinity: None where the interval has no end."""
        return {name: end if math.isfinite(end) else None for name, end in (("low", self.low), ("high", self.high))}


def _clusters(sums: npt.ArrayLike, counts: npt.ArrayLike, groups: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Sums and counts by group (document), in the order of the groups' numbers."""
    totals, weights = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    labels, index = np.unique(np.asarray(groups), return_inverse=True)
    if not len(totals) == len(weights) == len(index) or not len(index):
        raise ValueError(
            f"sums, counts and groups need one length, at least 1; got {len(totals)}, {len(weights)}, {len(index)}"
        )
    if (weights <= 0).any():
        raise ValueError("every entry needs at least one target; some counts are 0 or less")
    return (
        np.bincount(index, weights=totals, minlength=len(labels)).astype(np.float64),
        np.bincount(index, weights=weights, minlength=len(labels)).astype(np.float64),
    )


def bootstrap_mean(
    sums: npt.ArrayLike,
    counts: npt.ArrayLike,
    groups: npt.ArrayLike,
    *,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = 0,
) -> Interval:
    """The mean loss sum(sums) / sum(counts), with a percentile interval from resampling whole documents.

    Targets of one document are alike, so documents are what is drawn: drawing tokens would give intervals that are far
    too narrow. One document says nothing of others: its interval reaches from -inf to inf.

    sums, counts, groups: (R,) loss in nats, number of targets and document of each region.
    Raises ValueError for lengths that differ or counts that are not positive.
    """
    totals, weights = _clusters(sums, counts, groups)
    value = float(totals.sum() / weights.sum())
    if len(totals) == 1:
        return Interval(value, -math.inf, math.inf)
    draws = _draws(len(totals), resamples, seed)
    means = totals[draws].sum(1) / weights[draws].sum(1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high))


def paired_difference(
    sums_a: npt.ArrayLike,
    sums_b: npt.ArrayLike,
    counts: npt.ArrayLike,
    groups: npt.ArrayLike,
    *,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = 0,
) -> Interval:
    """Mean loss of a minus that of b on the same targets, in nats a token; below 0 means that a is better.

    Both are summed over the same draw of documents each time, so that hard documents cancel. The difference counts as
    settled when the interval leaves out 0.
    Raises ValueError for lengths that differ.
    """
    first, second = np.asarray(sums_a, dtype=np.float64), np.asarray(sums_b, dtype=np.float64)
    if first.shape != second.shape:
        raise ValueError(f"a pair needs the same regions; got {first.shape[0]} and {second.shape[0]}")
    return bootstrap_mean(first - second, counts, groups, resamples=resamples, level=level, seed=seed)


def _draws(count: int, resamples: int, seed: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, count]).integers(0, count, size=(resamples, count))


def mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and the standard deviation over seeds (n - 1); no spread for a single value."""
    if not values:
        raise ValueError("there is no mean of no values")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, None
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def wilson_interval(successes: int, trials: int, *, level: float = LEVEL) -> Interval:
    """The interval of a share (exact answers among prompts) that stays honest near 0 and 1.

    Raises ValueError unless 0 <= successes <= trials and trials >= 1.
    Source: Wilson 1927, score interval without continuity correction.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes in {trials} trials is no share")
    z = _normal_quantile((1 + level) / 2)
    share = successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / (1 + z * z / trials)
    return Interval(share, max(centre - half, 0.0), min(centre + half, 1.0))


def _normal_quantile(probability: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(probability)
