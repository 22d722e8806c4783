"""TISA: a sum of learned Gaussians of the signed distance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from milepost.encoding import Encoding, EncodingConfig, alias, register
from milepost.kernels import as_float, new_parameter, per_head
from milepost.positions import Positions
from milepost.terms import Terms, distance_bias


@dataclass(frozen=True, kw_only=True)
class TISAConfig(EncodingConfig):
    """Options of :class:`TISA`.

    Attributes:
        num_heads: number of attention heads.
        num_kernels: Gaussians per head.
        official_offset: read the distance as ``(i - j) - 1``, as the published code does: for its trained weights.
    """

    num_heads: int
    num_kernels: int = 5
    official_offset: bool = False

    def __post_init__(self) -> None:
        if self.num_kernels < 1:
            raise ValueError(f"num_kernels is at least 1; got {self.num_kernels}")


@register(
    "tisa",
    title="TISA",
    family="bias",
    manifestation="bias",
    learnable=True,
    integration="add",
    injection="every",
    source="Wennberg, Henter 2021 (ACL, 2021.acl-short.18)",
    summary="A sum of learned Gaussians of the signed distance; far keys get no bias at all.",
    shared=False,
)
class TISA(Encoding):
    """Translation-invariant self-attention: ``b_h(x) = sum_k A_kh exp(-|B_kh| (x - C_kh)^2)``, ``x = i - j``.

    Start: ``A, B ~ N(0.1, 0.01)``, ``C ~ N(0, 5)`` (standard deviations). The survey (arXiv 2312.17044) spells it TISE.

    Shapes: a :class:`~milepost.terms.DistanceBias` of ``(H, n)``, float32 or better; A, B and C are ``(K, H)``.
    Raises ValueError for fewer than one Gaussian.
    Source: Wennberg, Henter 2021 (ACL, 2021.acl-short.18). The published code evaluates at ``(i - j) - 1``, one off;
    training does not notice, trained weights need ``official_offset=True``.
    """

    Config = TISAConfig
    config: TISAConfig

    def setup(self) -> None:
        shape = (self.config.num_kernels, self.config.num_heads)
        self.amplitude = new_parameter(*shape)
        self.sharpness = new_parameter(*shape)
        self.offset = new_parameter(*shape)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.amplitude.normal_(0.1, 0.01)
            self.sharpness.normal_(0.1, 0.01)
            self.offset.normal_(0.0, 5.0)

    def bias(self, distance: Tensor) -> Tensor:
        """``(*shape)`` signed distances -> ``(H, *shape)``."""
        x = as_float(distance, self.amplitude) - (1 if self.config.official_offset else 0)
        total = torch.zeros(self.config.num_heads, *x.shape, dtype=x.dtype, device=x.device)
        for k in range(self.config.num_kernels):
            a, b, c = (per_head(p[k], x) for p in (self.amplitude, self.sharpness, self.offset))
            total = total + a * torch.exp(-b.abs() * (x - c) ** 2)
        return total

    def converges(self) -> list[bool]:
        """For each head, whether the sum of ``exp(bias)`` over all distances is finite: never, far keys get 0."""
        return [False] * self.config.num_heads

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        return Terms(bias=distance_bias(self.bias, positions))


alias("tise", "tisa")
