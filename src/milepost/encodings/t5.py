"""T5's bias: one learned number per head and bucket of distances."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from milepost.encoding import Encoding, EncodingConfig, register
from milepost.kernels import T5Table, as_float, t5_edges
from milepost.positions import Positions
from milepost.terms import Terms, distance_bias


@dataclass(frozen=True, kw_only=True)
class T5Config(EncodingConfig):
    """Options of :class:`T5`.

    Attributes:
        num_heads: number of attention heads.
        num_buckets: rows of the table; bidirectional attention gives half of them to each side.
        max_distance: distances from here on share a bucket. 8 buckets and 16 give the survey's example.
        bidirectional: which buckets to use; None follows the attention.
        scale: ``"none"`` adds the table as it is (T5); ``"sqrt-head-dim"`` multiplies it by ``sqrt(head_dim)``, as
            GPT-NeoX does, and with it the baselines of KERPLE and MEP.
        init: ``"published"``: normal with deviation ``width^-1/2`` (T5) or, with ``scale="sqrt-head-dim"`` or without a
            width, Xavier's ``sqrt(2 / (num_buckets + num_heads))`` (GPT-NeoX). ``"slopes"``: ALiBi's bias at the first
            distance of each bucket.
        head_dim: width of one head, for ``scale="sqrt-head-dim"``.
        width: width of the model, for the published start.
    """

    num_heads: int
    num_buckets: int = 32
    max_distance: int = 128
    bidirectional: bool | None = None
    scale: Literal["none", "sqrt-head-dim"] = "none"
    init: Literal["published", "slopes"] = "published"
    head_dim: int | None = None
    width: int | None = None

    def __post_init__(self) -> None:
        if self.scale not in ("none", "sqrt-head-dim"):
            raise ValueError(f"scale is 'none' or 'sqrt-head-dim'; got {self.scale!r}")
        if self.init not in ("published", "slopes"):
            raise ValueError(f"init is 'published' or 'slopes'; got {self.init!r}")
        if self.scale == "sqrt-head-dim" and self.head_dim is None:
            raise ValueError("scale='sqrt-head-dim' needs head_dim")
        if self.bidirectional is not False and self.num_buckets % 2:
            raise ValueError(f"bidirectional attention halves the buckets; num_buckets is {self.num_buckets}, odd")
        if self.bidirectional is not True:
            t5_edges(self.num_buckets, self.max_distance)


@register(
    "t5",
    title="T5 bias",
    family="bias",
    manifestation="bias",
    learnable=True,
    integration="add",
    injection="every",
    source="Raffel et al. 2020 (arXiv 1910.10683)",
    summary="A learned number per head and bucket; buckets widen with distance and the last one has no end.",
    survey="T5",
)
class T5(Encoding):
    """T5's relative bias: ``b_h = T[bucket(i - j), h]``.

    Causal attention: half of the buckets hold one distance each, the others equal steps of its logarithm up to
    ``max_distance``, and the last one everything beyond. Bidirectional attention: the same with half of the buckets for
    each side, future keys in the second half.

    Shapes: a :class:`~milepost.terms.DistanceBias` of ``(H, n)``, float32 or better; the table is ``(num_buckets, H)``,
    as transformers' ``relative_attention_bias.weight``. One table serves all layers.
    Raises ValueError for a ``max_distance`` inside the exact buckets, an odd number of buckets for two sides, or a
    scale without ``head_dim``.
    Source: Raffel et al. 2020 (arXiv 1910.10683), code of transformers. T5 does not divide its logits by
    sqrt(head_dim); this library does by default (``attend(scale=1.0)`` is T5's way). The KERPLE paper prints the
    formula of the wide buckets without its first term; the code is right.
    """

    Config = T5Config
    config: T5Config

    def setup(self) -> None:
        c = self.config
        neox = c.scale == "sqrt-head-dim"
        self.kernel = T5Table(
            c.num_heads,
            start=c.init,
            num_buckets=c.num_buckets,
            max_distance=c.max_distance,
            scale=math.sqrt(c.head_dim) if neox and c.head_dim is not None else 1.0,
            std=None if neox or c.width is None else c.width**-0.5,
            bidirectional=c.bidirectional is True,
        )

    def reset_parameters(self) -> None:
        self.kernel.reset_parameters()

    def converges(self) -> list[bool]:
        """For each head, whether the sum of ``exp(bias)`` over all distances is finite: never, the table ends flat."""
        return self.kernel.converges()

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        chosen = self.config.bidirectional
        both = not positions.causal if chosen is None else chosen

        def bias(distance: Tensor) -> Tensor:
            return self.kernel.look_up(as_float(distance, self.kernel.table), both)

        return Terms(bias=distance_bias(bias, positions))
