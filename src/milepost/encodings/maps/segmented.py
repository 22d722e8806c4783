"""Segments found in the text: positions that count sentences, and BiPE, which is made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from milepost.encoding import Encoding, EncodingConfig, PositionMap, build, register
from milepost.encodings.absolute.common import add, check_input, of_queries
from milepost.encodings.separators import FULL_STOP, NEWLINE, check_separators, segments
from milepost.positions import Positions
from milepost.terms import Terms


@dataclass(frozen=True, kw_only=True)
class SegmentedConfig(EncodingConfig):
    """Options of :class:`Segmented`.

    Attributes:
        separators: token ids that close a segment.
    """

    separators: tuple[int, ...] = (NEWLINE, FULL_STOP)

    def __post_init__(self) -> None:
        check_separators(self.separators)


class Segmented(PositionMap):
    """A token's position becomes the number of separators before it: all tokens of a segment stand together.

    A pure function of the ids of all keys, so that nothing has to be kept beside a cache.

    Shapes: int64 positions ``(B, n)``. Raises ValueError without the ids of all keys.
    Source: the inter-segment positions of He et al. 2024 (arXiv 2401.16421).
    """

    Config = SegmentedConfig
    config: SegmentedConfig
    needs_tokens = True

    def forward(self, positions: Positions, tokens: Tensor | None = None) -> Positions:
        index, _ = segments(tokens, positions, self.config.separators)
        return positions.mapped(of_queries(index, positions), index)


@dataclass(frozen=True, kw_only=True)
class BiPEConfig(EncodingConfig):
    """Options of :class:`BiPE`.

    Attributes:
        width: of the embeddings.
        between: what compares segments: ``rope`` or ``alibi``.
        num_heads: for ALiBi. head_dim: for RoPE.
        separators: token ids that close a segment; default: full stop and newline of a byte tokenizer.
        rows: of the table inside a segment; later tokens share its last row.
        slope_scale: multiplies ALiBi's slopes.
        base: of RoPE.
        std: of the initial table.
    """

    width: int
    between: Literal["rope", "alibi"] = "rope"
    num_heads: int | None = None
    head_dim: int | None = None
    separators: tuple[int, ...] = (FULL_STOP, NEWLINE)
    rows: int = 1024
    slope_scale: float = 96.0
    base: float = 10000.0
    std: float = 0.02

    def __post_init__(self) -> None:
        check_separators(self.separators)
        if self.between not in ("rope", "alibi"):
            raise ValueError(f"between is 'rope' or 'alibi'; got {self.between!r}")
        if self.rows < 1:
            raise ValueError(f"rows is at least 1; got {self.rows}")
        needed = "head_dim" if self.between == "rope" else "num_heads"
        if getattr(self, needed) is None:
            raise ValueError(f"BiPE with {self.between} needs {needed}")


_HE = "He et al. 2024 (arXiv 2401.16421)"


@register(
    "bipe-alibi",
    title="BiPE-ALiBi",
    family="map",
    manifestation="position map",
    learnable=True,
    integration="add",
    injection="every",
    source=_HE,
    summary="A learned code for the place inside a sentence, and ALiBi over the count of sentences.",
    preset={"between": "alibi"},
)
@register(
    "bipe-rope",
    title="BiPE-RoPE",
    family="map",
    manifestation="position map",
    learnable=True,
    integration="multiply",
    injection="every",
    source=_HE,
    summary="A learned code for the place inside a sentence, and RoPE over the count of sentences.",
    preset={"between": "rope"},
)
class BiPE(Encoding):
    """Bilevel position encoding: ``x_t + P[n(t)]`` at the input, RoPE or ALiBi at positions g(t) in every layer.

    g counts the separators before a token, n its place in its segment; a separator belongs to the segment it closes.

    Parameters: ``table`` ``(rows, width)``, N(0, 0.02). Shapes: as RoPE; a :class:`~milepost.terms.PairBias` for ALiBi.
    Needs the token ids of all keys; pads neither count nor separate.
    Raises ValueError without them, for separators that are no token ids, or when the geometry it needs is missing.
    Source: He et al. 2024 (arXiv 2401.16421). Their code multiplies ALiBi's slopes by 96, clamps n to the last row, and
    holds ALiBi as ``+s g(j)`` in half precision, which distances in float32 replace here. Its Llama separators are ids
    869 and 13, of which 869 is a full stop *after a space*: give the ids of your own tokenizer.
    """

    Config = BiPEConfig
    config: BiPEConfig
    needs_tokens = True

    def setup(self) -> None:
        options = self.config
        self.table = nn.Parameter(torch.empty(options.rows, options.width))
        self.position_map = Segmented(separators=options.separators)
        if options.between == "rope":
            self.between = build("rope", head_dim=options.head_dim, base=options.base)
        else:
            self.between = build("alibi", num_heads=options.num_heads, slope_scale=options.slope_scale)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=self.config.std)

    def embed(self, x: Tensor, positions: Positions, tokens: Tensor | None = None) -> Tensor:
        check_input(x, positions, self.config.width, self.name)
        _, place = segments(tokens, positions, self.config.separators)
        rows = of_queries(place, positions).clamp(max=self.config.rows - 1)
        return add(x, self.table[rows])

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        return self.between(self.position_map(positions, tokens), tokens)
