"""Rotary encodings: queries and keys are rotated by angles that grow with position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from milepost.encoding import Encoding, EncodingConfig, register
from milepost.positions import Positions
from milepost.terms import Branch, Terms

Layout = Literal["half", "interleaved"]


def rotate(x: Tensor, angles: Tensor, layout: Layout = "half", *, factor: float | Tensor = 1.0) -> Tensor:
    """Rotate the first ``2 P`` channels of ``x`` by ``angles``; the rest passes unchanged, bit for bit.

    ``layout="half"`` pairs channels (p, p + P), as GPT-NeoX and Hugging Face do; ``"interleaved"`` pairs (2p, 2p+1),
    as GPT-J and Meta do. ``factor`` multiplies the rotated channels (YaRN's attention factor).

    Shapes: x ``(B, H, n, D)``, angles ``(B|1, n, P)`` float32 or better; the result has the dtype of x.
    """
    pairs = angles.shape[-1]
    work = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (angles.cos() * factor).to(work)[:, None], (angles.sin() * factor).to(work)[:, None]
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if layout == "half":
        a, b = turned[..., :pairs], turned[..., pairs:]
        parts = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        parts = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    parts = parts.to(x.dtype)
    return torch.cat([parts, rest], dim=-1) if rest.shape[-1] else parts


@dataclass(frozen=True, kw_only=True)
class RoPEConfig(EncodingConfig):
    """Options of :class:`RoPE`.

    Attributes:
        head_dim: width of one head.
        base: rope_theta.
        partial: fraction of the head that is rotated.
        layout: which channels form a pair.
    """

    head_dim: int
    base: float = 10000.0
    partial: float = 1.0
    layout: Layout = "half"

    def __post_init__(self) -> None:
        if not 0 < self.partial <= 1:
            raise ValueError(f"partial is in (0, 1]; got {self.partial}")
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(
                f"the rotated part of a head has an even width; head_dim {self.head_dim} x partial {self.partial} "
                f"gives {self.rotary_dim}"
            )

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial)


@register(
    "rope",
    title="RoPE",
    family="rotary",
    manifestation="embedding",
    learnable=False,
    integration="multiply",
    injection="every",
    source="Su et al. 2021 (arXiv 2104.09864)",
    summary="Queries and keys are rotated by position; their product depends on the distance.",
    survey="RoPE",
)
class RoPE(Encoding):
    """Rotary position embedding: pair p of q and k at position m is turned by ``m * base^(-2p/d)``.

    Shapes: one :class:`~milepost.terms.Branch`; angles in float32.
    Raises ValueError when the rotated part of a head is odd or empty.
    Source: Su et al. 2021 (arXiv 2104.09864), equation 34.
    """

    Config = RoPEConfig
    config: RoPEConfig

    def inv_freq(self, device: torch.device | None = None) -> Tensor:
        """``(P,)`` float64."""
        d = self.config.rotary_dim
        exponent = torch.arange(0, d, 2, dtype=torch.float64, device=device) / d
        return self.config.base**-exponent

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        inv_freq = self.inv_freq(positions.device)
        layout = self.config.layout

        def angles(at: Tensor) -> Tensor:
            return (at[..., None].double() * inv_freq).float()

        at_queries, at_keys = angles(positions.query), angles(positions.key)

        def query(q: Tensor) -> Tensor:
            return rotate(q, at_queries, layout)

        def key(k: Tensor, at: str) -> Tensor:
            return rotate(k, at_keys if at == "keys" else at_queries, layout)

        return Terms(branches=(Branch(query=query, key=key),))
