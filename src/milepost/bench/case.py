"""What is measured: one causal attention call of a given length, and the contenders that compute it.

The tables of biases stand for the kinds there are: ``kerple-log`` decays slowly, so that no key can be left out;
``alibi`` and ``mep`` decay fast; ``t5`` is flat from a distance on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from milepost.encoding import build
from milepost.positions import Positions
from milepost.terms import DistanceBias

HEADS, HEAD_DIM = 8, 64
SCALE = HEAD_DIM**-0.5
NEG_INF = float("-inf")
SQUARE_LIMIT = 1 << 30
"""Bytes of the largest (heads, L, L) tensor that a contender may hold; longer calls of it are not run."""

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q, k, v (B, H, L, D) -> (B, H, L, D)."""


class NotRun(Exception):
    """Why a contender is not measured here: what it lacks, or what it would take."""


@dataclass
class Case:
    """q, k, v and the gradient of the result for one length; tables by name; everything from one seed."""

    length: int
    dtype: torch.dtype
    training: bool = False
    queries: int | None = None
    q: Tensor = field(init=False)
    k: Tensor = field(init=False)
    v: Tensor = field(init=False)
    grad: Tensor = field(init=False)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        rows = self.queries or self.length
        shapes = [(1, HEADS, n, HEAD_DIM) for n in (rows, self.length, self.length, rows)]
        q, k, v, grad = (torch.randn(shape, generator=random).to(self.dtype) for shape in shapes)
        self.q, self.k, self.v = (x.requires_grad_(self.training) for x in (q, k, v))
        self.grad = grad

    def table(self, name: str) -> Tensor:
        """(H, L) in float32: the bias at each distance."""
        if name == "kerple-log":
            rate = torch.linspace(0.3, 1.5, HEADS, dtype=torch.float64)[:, None]
            return (-rate * torch.log1p(torch.arange(self.length, dtype=torch.float64))).float()
        encoding = build(name, num_heads=HEADS)
        if name == "t5":
            with torch.no_grad():
                next(encoding.parameters()).copy_(t5_weights())
        bias = encoding(Positions.full(self.length)).bias
        assert isinstance(bias, DistanceBias)
        return bias.table.detach().float()[:, : self.length].contiguous()

    def mask(self, table: Tensor) -> Tensor:
        """(1, H, L, L) in the case's dtype: the table gathered, -inf for the future."""
        place = torch.arange(self.length)
        distance = place[:, None] - place
        return table[:, distance.clamp(min=0)].masked_fill(distance < 0, NEG_INF)[None].to(self.dtype)

    def cured(self, mask: Tensor) -> Tensor:
        """The mask with -inf where weights are provably denormal or zero, which costs arithmetic dearly.

        A weight's logit lies at most R = 2 scale max|q| max|k| above its bias, relative to the nearest key's, whose
        bias is 0; so a bias below -(R + ln L + 28) gives less than exp(-28) / L of its row.
        """
        largest = [float(x.detach().float().norm(dim=-1).max()) for x in (self.q, self.k)]
        return mask.masked_fill(mask < -(2 * SCALE * math.prod(largest) + math.log(self.length) + 28), NEG_INF)


def t5_weights() -> Tensor:
    """(32, H): one number for each bucket and head."""
    return torch.randn(32, HEADS, generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Contender:
    """One way to compute a case.

    name: for the table; bias: which table it holds, None for none; learned: whether the table gets a gradient; ours:
    a failure is an error, a peer's is a remark; best: what peers with the same bias are compared with; square: it
    holds (H, L, L) tensors; longest: a longer case is not run, for its time; make: case -> (the function, what learns
    besides q, k and v), raises `NotRun`.
    """

    name: str
    make: Callable[[Case], tuple[Attention, tuple[Tensor, ...]]]
    bias: str | None = None
    learned: bool = False
    ours: bool = False
    best: bool = False
    square: bool = False
    longest: int | None = None

    def prepare(self, case: Case) -> tuple[Attention, tuple[Tensor, ...]]:
        """What `make` gives, unless the case is too large for this contender."""
        if self.square:
            size = HEADS * case.length**2 * case.dtype.itemsize
            if size > SQUARE_LIMIT:
                raise NotRun(f"{size / 2**30:.3g} GiB for each (heads, L, L) tensor, of which it holds one or more")
        if self.longest is not None and case.length > self.longest:
            raise NotRun(f"takes minutes; see length {self.longest}")
        return self.make(case)

    def call(self, case: Case) -> Callable[[], object]:
        """The call that is measured: the result, or in training the gradients of q, k, v and what learns."""
        function, learned = self.prepare(case)

        def forward() -> Tensor:
            with torch.no_grad():
                return function(case.q, case.k, case.v)

        def both() -> tuple[Tensor, ...]:
            inputs = (case.q, case.k, case.v, *learned)
            return torch.autograd.grad(function(case.q, case.k, case.v), inputs, case.grad)

        return both if case.training else forward
