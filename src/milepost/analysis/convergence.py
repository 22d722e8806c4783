"""Does a bias extrapolate? The sum of its weights over all distances, and the distance that holds most of it.

Source: Qin, Zhong, Deng 2023 (arXiv 2307.10156): a model with bias ``b`` extrapolates if ``sum_d exp(b(d))`` is finite;
its theoretical receptive field TRF(eps) is the smallest number of tokens that holds all but the share ``eps`` of that
sum. Which series converge is known from their formulas, not from numbers: several divergent ones look convergent for
a million tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from milepost.encoding import Encoding
from milepost.encodings.none import NoPE
from milepost.positions import Positions

HEAD = 4096
"""Terms that are added one by one; the rest is an integral with Euler and Maclaurin's corrections."""


@dataclass(frozen=True)
class Series:
    """The weights ``exp(b(d))`` of each head, summed over ``d = 0, 1, 2, ...``

    Attributes:
        name: the encoding.
        converges: for each head, whether the sum is finite.
        total: for each head, the sum; ``inf`` where it diverges.
        eps: the share that a receptive field may leave out.
        receptive_field: for each head, TRF(eps) in tokens; None where the sum diverges.
    """

    name: str
    converges: tuple[bool, ...]
    total: tuple[float, ...]
    eps: float
    receptive_field: tuple[int | None, ...]

    @property
    def extrapolates(self) -> bool:
        """The paper's condition, for every head."""
        return all(self.converges)


def bias_at(encoding: Encoding, distance: Tensor) -> Tensor:
    """``(n,)`` distances ``>= 0``, fractions too, -> ``(H, n)`` float64: the bias of keys that far in the past.

    Raises:
        ValueError: an encoding that is not a bias of positions alone, or one that needs the query's own position.
    """
    key = -distance.double()[None]
    positions = Positions(
        query=torch.zeros(1, 1, dtype=torch.float64, device=key.device),
        key=key,
        query_start=key.shape[1] - 1,
        length=torch.full((1,), key.shape[1], device=key.device),
    )
    with torch.no_grad():
        terms = encoding(positions)
        if terms.branches or terms.scores is not None or terms.weights is not None:
            raise ValueError(f"{encoding.name} is not a bias of distance alone; its series depends on q and k")
        if terms.bias is None:
            return torch.zeros(1, key.shape[1], dtype=torch.float64, device=key.device)
        return terms.bias.dense()[0, :, 0].double()


def converges(encoding: Encoding) -> tuple[bool, ...]:
    """For each head, whether the sum of ``exp(b(d))`` over all distances is finite; known from the formula.

    Raises:
        ValueError: an encoding whose series is not known.
    """
    if isinstance(encoding, NoPE):
        return (False,)
    known = getattr(encoding, "converges", None)
    if known is None:
        raise ValueError(f"{encoding.name} does not say whether its series converges; give it a method `converges`")
    return tuple(known())


def partial_sums(encoding: Encoding, length: int) -> Tensor:
    """``(H, length)`` float64: ``exp(b(0)) + ... + exp(b(n - 1))`` for n = 1 to ``length``."""
    return bias_at(encoding, torch.arange(length)).exp().cumsum(-1)


def series(encoding: Encoding, eps: float = 0.01) -> Series:
    """The sum of a bias's weights over all distances, and its receptive field.

    Raises:
        ValueError: ``eps`` outside (0, 1), or an encoding whose series is not known.
    """
    if not 0 < eps < 1:
        raise ValueError(f"eps is a share in (0, 1); got {eps}")
    finite = converges(encoding)
    if not any(finite):
        return Series(encoding.name, finite, (math.inf,) * len(finite), eps, (None,) * len(finite))
    sums = partial_sums(encoding, HEAD)
    rest = tail(encoding, HEAD)
    totals, fields = [], []
    for head, ok in enumerate(finite):
        total = float(sums[head, -1] + rest[head]) if ok else math.inf
        totals.append(total)
        fields.append(_receptive_field(encoding, head, sums[head], total, eps) if ok else None)
    return Series(encoding.name, finite, tuple(totals), eps, tuple(fields))


def receptive_field(encoding: Encoding, eps: float = 0.01) -> tuple[int | None, ...]:
    """TRF(eps) of each head: the smallest n whose first n weights hold ``1 - eps`` of the sum; None if it diverges."""
    return series(encoding, eps).receptive_field


def tail(encoding: Encoding, start: int) -> Tensor:
    """``(H,)`` float64: ``sum of exp(b(d)) for d >= start`` of a convergent series; ``start`` is a thousand or more.

    ``integral + f/2 - f'/12``; the integral runs over ``log d``, and what lies beyond its end is taken as a power law.
    """
    nodes, weights = _gauss_legendre()
    first, last, width = math.log(start), 600.0, 0.25
    panels = torch.arange(first, last, width, dtype=torch.float64)
    at = (panels[:, None] + width * (nodes[None] + 1) / 2).flatten()
    weight = (width / 2 * weights).repeat(len(panels))
    log_integrand = bias_at(encoding, at.exp()) + at
    integral = (log_integrand.exp() * weight).sum(-1)
    end = log_integrand[:, -1]
    slope = (end - log_integrand[:, 0 - len(nodes)]) / (at[-1] - at[0 - len(nodes)])
    remainder = torch.where((slope < 0) & (end > -700), end.exp() / -slope, 0.0)
    around = bias_at(encoding, torch.tensor([start - 0.5, start, start + 0.5], dtype=torch.float64)).exp()
    return integral + remainder + around[:, 1] / 2 - (around[:, 2] - around[:, 0]) / 12


def _gauss_legendre(order: int = 16) -> tuple[Tensor, Tensor]:
    """Nodes and weights on [-1, 1], by Golub and Welsch."""
    k = torch.arange(1, order, dtype=torch.float64)
    off = k / (4 * k**2 - 1).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return nodes, 2 * vectors[0] ** 2


def _receptive_field(encoding: Encoding, head: int, sums: Tensor, total: float, eps: float) -> int:
    wanted = (1 - eps) * total
    if float(sums[-1]) >= wanted:
        return int(torch.searchsorted(sums, wanted)) + 1
    low, high = HEAD, 2 * HEAD
    while float(tail(encoding, high)[head]) > eps * total:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if float(tail(encoding, middle)[head]) > eps * total:
            low = middle
        else:
            high = middle
    return high
