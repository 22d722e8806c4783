"""Legendre polynomials of position, added to the input: the PoPE of 2024."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from milepost.encoding import Encoding, EncodingConfig, alias, register
from milepost.encodings.absolute.common import add, check_input, present_queries, work_dtype
from milepost.positions import Positions


@torch.library.custom_op("milepost::legendre", mutates_args=())
def legendre(x: Tensor, orders: int) -> Tensor:
    """``P_0(x) .. P_(orders-1)(x)``: ``(*x.shape, orders)`` float64, by the three-term recurrence.

    ``(n + 1) P_(n+1) = (2n + 1) x P_n - n P_(n-1)``, stable for x in [-1, 1] at any order. Not differentiable.
    """
    x = x.double()
    out = x.new_empty(orders, *x.shape)
    before, now = torch.zeros_like(x), torch.ones_like(x)
    for n in range(orders):
        out[n] = now
        before, now = now, ((2 * n + 1) * x * now - n * before) / (n + 1)
    return out.movedim(0, -1).contiguous()


@legendre.register_fake
def _(x: Tensor, orders: int) -> Tensor:
    return x.new_empty((*x.shape, orders), dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class LegendreConfig(EncodingConfig):
    """Options of :class:`Legendre`.

    Attributes:
        width: of the embeddings: one polynomial per channel.
        trained_length: L, the length whose positions fill [-1, 1].
        beyond: what happens from position L on: ``raise``; ``clamp`` to x = 1, so that all later tokens share one
            code; ``rescale`` fits [-1, 1] to the row's current length, which changes the codes of early positions too.
        first_order: order of the first channel's polynomial.
    """

    width: int
    trained_length: int
    beyond: Literal["raise", "clamp", "rescale"] = "raise"
    first_order: int = 1

    def __post_init__(self) -> None:
        if self.width < 1 or self.trained_length < 2 or self.first_order < 0:
            raise ValueError(
                "width is at least 1, trained_length at least 2, first_order not negative; got "
                f"{self.width}, {self.trained_length} and {self.first_order}"
            )
        if self.beyond not in ("raise", "clamp", "rescale"):
            raise ValueError(f"beyond is 'raise', 'clamp' or 'rescale'; got {self.beyond!r}")


@register(
    "pope",
    title="PoPE (Legendre)",
    family="absolute",
    manifestation="embedding",
    learnable=False,
    integration="add",
    injection="initial",
    source="Aggarwal 2024 (arXiv 2405.04585); positions mapped to [-1, 1] by this library's choice",
    summary="Legendre polynomials of the position, one per channel; not the polar PoPE of arXiv 2509.10534.",
)
class Legendre(Encoding):
    """Legendre position embedding: ``x_t + (P_1(u), .., P_D(u))`` with ``u = 2 t / (L - 1) - 1``.

    This is "PoPE: Legendre Orthogonal Polynomials Based Position Encoding" of 2024. It is *not* the rotary
    "Polar Coordinate Position Embeddings" (arXiv 2509.10534), which has the same short name.

    Shapes: ``(B, Q, width)`` in and out, in the dtype of the input; polynomials in float64. No parameters.
    Raises ValueError for a token beyond the trained length with ``beyond="raise"`` (under ``torch.compile`` its code is
    NaN), or for an input that does not fit. Outside [-1, 1] polynomials explode, so no mode leaves it.
    Source: arXiv 2405.04585 for basis, recurrence and addition. How positions meet [-1, 1] and which orders are used is
    our choice, because the paper's text could not be compared.
    """

    Config = LegendreConfig
    config: LegendreConfig

    def coordinate(self, at: Tensor, length: Tensor | None = None) -> Tensor:
        """u of positions ``(B|1, n)``, float64; ``length`` ``(B|1,)`` is read by ``rescale``."""
        span: Tensor | int = self.config.trained_length - 1
        if self.config.beyond == "rescale":
            if length is None:
                raise ValueError("rescaling needs the length of each row")
            span = (length[:, None] - 1).clamp(min=span).double()
        u = 2 * at.double() / span - 1
        return u if self.config.beyond == "raise" else u.clamp(-1.0, 1.0)

    def code(self, at: Tensor, length: Tensor | None = None) -> Tensor:
        """The codes ``(B|1, n, width)`` float64 of positions ``(B|1, n)``."""
        first = self.config.first_order
        u = self.coordinate(at, length).detach()
        if self.config.beyond == "raise":
            u = torch.where((u >= -1) & (u <= 1), u, torch.nan)
        return legendre(u, first + self.config.width)[..., first:]

    def embed(self, x: Tensor, positions: Positions, tokens: Tensor | None = None) -> Tensor:
        check_input(x, positions, self.config.width, self.name)
        at = positions.query
        present = present_queries(positions)
        if present is not None:
            at = torch.where(present, at, 0)
        if self.config.beyond == "raise" and not torch.compiler.is_compiling() and at.numel():
            first, last = float(at.min()), float(at.max())
            if first < 0 or last > self.config.trained_length - 1:
                raise ValueError(
                    f"position {last if first >= 0 else first:g} is outside the {self.config.trained_length} positions "
                    "that fill [-1, 1], and Legendre polynomials explode there; shorten the input, or give "
                    "beyond='clamp' or 'rescale'"
                )
        return add(x, self.code(at, positions.length).to(work_dtype(x)))


alias("legendre", "pope")
