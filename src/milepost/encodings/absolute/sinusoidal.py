"""Sinusoids of position, added to the input."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from milepost.encoding import Encoding, EncodingConfig, register
from milepost.encodings.absolute.common import add, check_input, work_dtype
from milepost.positions import Positions

Layout = Literal["interleaved", "concatenated", "cosine-first"]


@dataclass(frozen=True, kw_only=True)
class SinusoidalConfig(EncodingConfig):
    """Options of :class:`Sinusoidal`.

    Attributes:
        width: of the embeddings.
        layout: ``interleaved`` (sin, cos, sin, cos, …; the paper), ``concatenated`` (all sines, then all cosines;
            tensor2tensor, GPT-NeoX) or ``cosine-first`` (cos, sin, cos, sin, …). They differ by a fixed permutation.
        exponent: ``paper`` has frequencies ``base^(-2k/D)``; ``tensor2tensor`` has ``base^(-k/(D/2 - 1))``, whose last
            wavelength is exactly ``2 pi base``. The difference is real, not a permutation.
        base: the paper's 10000.
        offset: added to every position (fairseq begins at ``padding_idx + 1``).
        scale_input: multiply the token embeddings by ``sqrt(width)`` first, as the original Transformer does.
    """

    width: int
    layout: Layout = "interleaved"
    exponent: Literal["paper", "tensor2tensor"] = "paper"
    base: float = 10000.0
    offset: int = 0
    scale_input: bool = False

    def __post_init__(self) -> None:
        if self.width < 2 or self.width % 2:
            raise ValueError(f"sinusoids come in pairs, so width is even and positive; got {self.width}")
        if self.layout not in ("interleaved", "concatenated", "cosine-first"):
            raise ValueError(f"layout is 'interleaved', 'concatenated' or 'cosine-first'; got {self.layout!r}")
        if self.exponent not in ("paper", "tensor2tensor"):
            raise ValueError(f"exponent is 'paper' or 'tensor2tensor'; got {self.exponent!r}")
        if self.base <= 1:
            raise ValueError(f"base is above 1; got {self.base}")


@register(
    "sinusoidal",
    title="Sinusoidal",
    family="absolute",
    manifestation="embedding",
    learnable=False,
    integration="add",
    injection="initial",
    source="Vaswani et al. 2017 (arXiv 1706.03762), section 3.5",
    summary="Sines and cosines of the position, in wavelengths from 2 pi to 20000 pi, added to the token embeddings.",
    survey="Sinusoidal",
)
class Sinusoidal(Encoding):
    """Sinusoidal position embedding: a shift of the position is a fixed rotation of every pair.

    ``x_t + p(t)`` with ``p(t)[2k] = sin(t w_k)``, ``p(t)[2k+1] = cos(t w_k)``, ``w_k = 10000^(-2k/D)``.

    Shapes: ``(B, Q, width)`` in and out, in the dtype of the input. Positions may be any integers or floats. Angles are
    made in float64 and reduced to one turn before they become float32, so that they stay exact far out.
    Raises ValueError for an odd width, unknown options, or an input that does not fit.
    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.5. Published code differs in layout and exponent (see the
    options); many language models leave out the factor ``sqrt(D)``, as is the default here.
    """

    Config = SinusoidalConfig
    config: SinusoidalConfig

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        """``(width / 2,)`` float64."""
        pairs = self.config.width // 2
        index = torch.arange(pairs, dtype=torch.float64, device=device)
        steps = pairs if self.config.exponent == "paper" else max(pairs - 1, 1)
        return self.config.base ** -(index / steps)

    def code(self, at: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The code ``(*at.shape, width)`` of any positions, in float32 or better."""
        angles = (at.double() + self.config.offset)[..., None] * self.frequencies(at.device)
        if dtype != torch.float64:
            angles = torch.remainder(angles, 2 * math.pi).to(dtype)
        sin, cos = angles.sin(), angles.cos()
        if self.config.layout == "concatenated":
            return torch.cat([sin, cos], dim=-1)
        pair = [sin, cos] if self.config.layout == "interleaved" else [cos, sin]
        return torch.stack(pair, dim=-1).flatten(-2)

    def embed(self, x: Tensor, positions: Positions, tokens: Tensor | None = None) -> Tensor:
        check_input(x, positions, self.config.width, self.name)
        if self.config.scale_input:
            x = x * math.sqrt(self.config.width)
        return add(x, self.code(positions.query, work_dtype(x)))
