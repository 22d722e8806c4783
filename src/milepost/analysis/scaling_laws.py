"""How far RoPE can extrapolate, from its base, its width and the lengths of training and tuning alone.

>>> critical_dimension(128, 10000.0, 4096)
92
>>> round(extrapolation_limit(20000.0, 92, 128))
7754
"""

from __future__ import annotations

import math
from typing import NamedTuple

CONFIDENCE = (
    "formulas as the literature around the paper quotes them; they reproduce every number it states for LLaMA-2"
)
"""How sure these formulas are: the paper's own text was not at hand."""


def critical_dimension(rotary_dim: int, base: float, trained_length: int) -> int:
    """Channels whose pairs saw a whole turn in training: ``2 ceil(d/2 log_b(T / 2 pi))``, at most d.

    The first ``critical_dimension / 2`` pairs are known at every angle; the others meet new angles beyond T.
    Raises ValueError for an odd or empty width, a base of 1 or less, or fewer than 7 positions (no pair turns).
    Source: Liu et al. 2023, Scaling Laws of RoPE-based Extrapolation (arXiv 2310.05209), its d_extra. The count of
    pairs with ``lambda <= T`` is ``floor(x) + 1``, the same number unless x is whole.
    """
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim is even and at least 2; got {rotary_dim}")
    _check(base, trained_length)
    pairs = math.ceil(rotary_dim / 2 * math.log(trained_length / (2 * math.pi), base))
    return min(2 * pairs, rotary_dim)


def extrapolation_limit(base: float, critical: int, rotary_dim: int) -> float:
    """Length up to which a tuned base keeps the critical dimension's pairs within one turn: ``2 pi b^(d_extra / d)``.

    ``base`` is the one in use after tuning, ``critical`` comes from pre-training. Source: as `critical_dimension`.
    """
    if not 0 < critical <= rotary_dim:
        raise ValueError(f"critical lies between 1 and rotary_dim {rotary_dim}; got {critical}")
    return 2 * math.pi * base ** (critical / rotary_dim)


def critical_base(trained_length: int, tuned_length: int, base: float = 10000.0) -> float:
    """Base from which on the pre-trained critical dimension limits a tuned model: ``b^(log_(T/2pi)(T_tune/2pi))``.

    Below it the limit follows the critical dimension recomputed at the tuned length. Source: as `critical_dimension`.
    """
    _check(base, trained_length)
    _check(base, tuned_length)
    return base ** math.log(tuned_length / (2 * math.pi), trained_length / (2 * math.pi))


def small_base_thresholds(tuned_length: int) -> tuple[float, float, float]:
    """Bases below which every pair's cosine and sine have seen a quarter, half and whole turn: 2T/pi, T/pi, T/2pi.

    Tuning below them extrapolates far (with base 500 to about a million). Source: as `critical_dimension`.
    """
    if tuned_length < 1:
        raise ValueError(f"tuned_length is at least 1; got {tuned_length}")
    return 2 * tuned_length / math.pi, tuned_length / math.pi, tuned_length / (2 * math.pi)


def base_lower_bound(context_length: float) -> float:
    """Smallest base that can serve a context, by a fit to experiments: ``0.0424 x^1.628``.

    Source: Men et al. 2024, Base of RoPE Bounds Context Length (arXiv 2405.14591), figure 1.
    """
    if context_length <= 0:
        raise ValueError(f"context_length is above 0; got {context_length}")
    return 0.0424 * context_length**1.628


class Reach(NamedTuple):
    """What the laws say about one checkpoint. Prints as a sentence.

    ``critical``: channels known at every angle. ``limit``: longest input to expect good perplexity at. ``bound_by``:
    what sets it: "training" (untouched or too small a base), "tuned length" or "critical dimension".
    """

    critical: int
    limit: float
    bound_by: str

    def __str__(self) -> str:
        return f"{self.critical} channels have turned; expect up to {self.limit:.0f} tokens (bound by {self.bound_by})"


def reach(
    *,
    rotary_dim: int,
    trained_length: int,
    base: float = 10000.0,
    tuned_base: float | None = None,
    tuned_length: int | None = None,
) -> Reach:
    """The laws together: a checkpoint trained at ``trained_length`` with ``base``, perhaps tuned with another base.

    Untuned: the trained length. Tuned with a base of at least `critical_base`: `extrapolation_limit` of the
    pre-trained critical dimension; with a smaller one, of the critical dimension at the tuned length and base.
    """
    critical = critical_dimension(rotary_dim, base, trained_length)
    if tuned_base is None or tuned_base == base:
        return Reach(critical, float(max(trained_length, tuned_length or 0)), "training")
    tuned_length = tuned_length or trained_length
    if tuned_base >= critical_base(trained_length, tuned_length, base):
        return Reach(critical, extrapolation_limit(tuned_base, critical, rotary_dim), "critical dimension")
    tuned = critical_dimension(rotary_dim, tuned_base, tuned_length)
    limit = max(extrapolation_limit(tuned_base, tuned, rotary_dim), float(tuned_length))
    return Reach(tuned, limit, "tuned length")


def _check(base: float, length: int) -> None:
    if base <= 1:
        raise ValueError(f"base is above 1; got {base}")
    if length <= 2 * math.pi:
        raise ValueError(f"lengths are at least 7 positions, so that the fastest pair turns once; got {length}")
