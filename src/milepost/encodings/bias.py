"""Relative biases: numbers added to the scaled logits, functions of distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from milepost.encoding import Encoding, EncodingConfig, register
from milepost.kernels import alibi_slopes
from milepost.positions import Positions
from milepost.terms import Terms, distance_bias


@dataclass(frozen=True, kw_only=True)
class ALiBiConfig(EncodingConfig):
    """Options of :class:`ALiBi`.

    Attributes:
        num_heads: number of attention heads.
        order: which slopes a number of heads gets that is no power of two.
        slope_scale: multiplies every slope (the authors interpolate with ``L / L'``).
        learn_slopes: train the slopes, through their logarithm (off as published).
    """

    num_heads: int
    order: Literal["official", "mpt"] = "official"
    slope_scale: float = 1.0
    learn_slopes: bool = False

    def __post_init__(self) -> None:
        if self.slope_scale <= 0:
            raise ValueError(f"slope_scale is positive; got {self.slope_scale}")


@register(
    "alibi",
    title="ALiBi",
    family="bias",
    manifestation="bias",
    learnable=False,
    integration="add",
    injection="every",
    source="Press, Smith, Lewis 2021 (arXiv 2108.12409)",
    summary="A linear penalty on distance, one fixed slope per head.",
    survey="ALiBi",
)
class ALiBi(Encoding):
    """Attention with linear biases: ``b_h(d) = -s_h |d|``, added after the scaling.

    Shapes: a :class:`~milepost.terms.DistanceBias` of ``(H, K)`` float32.
    Raises ValueError for fewer than one head or a scale that is not positive.
    Source: Press, Smith, Lewis 2021 (arXiv 2108.12409), section 3. The authors' code adds ``+s j`` to the mask, the
    same softmax in exact arithmetic; the distance form is used here because it keeps its precision far out.
    """

    Config = ALiBiConfig
    config: ALiBiConfig

    def setup(self) -> None:
        if self.config.learn_slopes:
            self.log_slopes = nn.Parameter(torch.empty(self.config.num_heads))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.config.learn_slopes:
            with torch.no_grad():
                self.log_slopes.copy_(self._published(self.log_slopes.device).log())

    def _published(self, device: torch.device) -> Tensor:
        slopes = alibi_slopes(self.config.num_heads, self.config.order)
        return torch.tensor(slopes, device=device) * self.config.slope_scale

    def slopes(self, device: torch.device | None = None) -> Tensor:
        """``(H,)`` float32: the slopes now in use."""
        if self.config.learn_slopes:
            return self.log_slopes.exp()
        return self._published(device or torch.device("cpu"))

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        slopes = self.slopes(positions.device)

        def bias(distance: Tensor) -> Tensor:
            return -slopes.view(-1, *[1] * distance.dim()) * distance.abs()

        return Terms(bias=distance_bias(bias, positions))
