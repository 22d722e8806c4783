"""Attention by torch alone, and by milepost's backends."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from milepost.attention import attend, library
from milepost.bench.case import Attention, Case, Contender, NotRun
from milepost.positions import Positions
from milepost.terms import DistanceBias, Terms

DECAYING = ("kerple-log", "alibi", "mep")
BIASES = (*DECAYING, "t5")
LEARNED = ("kerple-log", "alibi", "t5")
LONGEST_TORCH = {False: 16384, True: 8192}
"""training -> the longest case of the backends without a compiled kernel."""


def plain() -> Contender:
    """What every time is compared with."""

    def make(case: Case) -> tuple[Attention, tuple[Tensor, ...]]:
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), ()

    return Contender("sdpa, no bias", make)


def mileposts(training: bool) -> list[Contender]:
    """Each bias on each backend that serves it, fixed and, in training, learned."""
    found = []
    for bias in BIASES:
        for learned in (False, True) if training and bias in LEARNED else (False,):
            backends = ("native",) if bias == "t5" else ("native", "blocked") if learned else _BACKENDS
            found += [milepost(backend, bias, learned, training) for backend in backends]
    return found


_BACKENDS = ("native", "blocked", "sdpa")


def milepost(backend: str, bias: str, learned: bool = False, training: bool = False) -> Contender:
    def make(case: Case) -> tuple[Attention, tuple[Tensor, ...]]:
        missing = library.unavailable() if backend == "native" else None
        if missing is not None:
            raise NotRun(missing)
        table = case.table(bias).requires_grad_(learned)
        positions = Positions.full(case.length)
        terms = Terms(bias=DistanceBias(table, positions, 0))
        return lambda q, k, v: attend(q, k, v, positions, terms, backend=backend), (table,) if learned else ()

    return Contender(
        f"milepost {backend}",
        make,
        bias,
        learned,
        ours=True,
        best=backend == "native",
        longest=None if backend == "native" else LONGEST_TORCH[training],
    )


def masked(training: bool) -> list[Contender]:
    """torch's attention with the bias as a mask: built before, without its denormals, or in each call."""
    found = []
    for bias in DECAYING:
        found += [_prebuilt(bias, cured=False), _prebuilt(bias, cured=True), _built(bias, learned=False)]
        if training and bias in LEARNED:
            found.append(_built(bias, learned=True))
    return found


def _prebuilt(bias: str, *, cured: bool) -> Contender:
    def make(case: Case) -> tuple[Attention, tuple[Tensor, ...]]:
        mask = case.mask(case.table(bias))
        if cured:
            mask = case.cured(mask)
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), ()

    name = "sdpa + prebuilt mask"
    return Contender(name + " without denormals" if cured else name, make, bias, square=True)


def _built(bias: str, *, learned: bool) -> Contender:
    def make(case: Case) -> tuple[Attention, tuple[Tensor, ...]]:
        table = case.table(bias).requires_grad_(learned)

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=case.mask(table))

        return function, (table,) if learned else ()

    return Contender("sdpa + mask built each call", make, bias, learned, square=True)
