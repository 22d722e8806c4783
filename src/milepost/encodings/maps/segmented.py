"""Segments found in the text: positions that count sentences, and BiPE, which is made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from milepost.encoding import Encoding, EncodingConfig, PositionMap, build, register
from milepost.encodings.absolute.common import add, check_input, of_queries
from milepost.positions import Positions
from milepost.terms import Terms

NEWLINE, FULL_STOP = 10, 46
"""Byte ids, the separators of the byte tokenizer."""


def segments(tokens: Tensor, positions: Positions, separators: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """For every key slot: how many separators its document had before it, and its place in its segment.

    A separator belongs to the segment it closes. Padding neither counts nor separates.

    Shapes: tokens ``(B, K)``; two int64 tensors ``(B, K)``.
    Raises ValueError when ``tokens`` are not the ids of all keys.
    """
    if tokens is None or tokens.shape[-1] != positions.num_keys:
        raise ValueError(
            f"segments are found in the ids of all {positions.num_keys} keys, (batch, keys); got "
            f"{'none' if tokens is None else tuple(tokens.shape)}"
        )
    closes = torch.zeros_like(tokens, dtype=torch.bool)
    for separator in separators:
        closes = closes | (tokens == separator)
    if positions.key_present is not None:
        closes = closes & positions.key_present
        order = (positions.key_present.long().cumsum(-1) - 1).clamp(min=0).expand_as(tokens)
    else:
        order = torch.arange(positions.num_keys, device=tokens.device).expand_as(tokens)
    before = closes.long().cumsum(-1) - closes.long()
    begin = _before(torch.where(closes, order + 1, 0).cummax(-1).values)
    if positions.key_document is not None:
        document = positions.key_document.expand_as(tokens)
        first = torch.zeros_like(closes)
        first[:, 1:] = document[:, 1:] != document[:, :-1]
        begin = torch.maximum(begin, torch.where(first, order, 0).cummax(-1).values)
        before = before - torch.where(first, before, 0).cummax(-1).values
    return before, (order - begin).clamp(min=0)


def _before(per_slot: Tensor) -> Tensor:
    """Each slot's predecessor's value; 0 at the first."""
    return torch.cat([torch.zeros_like(per_slot[:, :1]), per_slot[:, :-1]], dim=-1)


def _check_separators(separators: tuple[int, ...]) -> None:
    if any(not isinstance(i, int) or i < 0 for i in separators):
        raise ValueError(f"separators are token ids, such as ({NEWLINE}, {FULL_STOP}); got {separators!r}")


@dataclass(frozen=True, kw_only=True)
class SegmentedConfig(EncodingConfig):
    """Options of :class:`Segmented`.

    Attributes:
        separators: token ids that close a segment.
    """

    separators: tuple[int, ...] = (NEWLINE, FULL_STOP)

    def __post_init__(self) -> None:
        _check_separators(self.separators)


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
        index, _ = segments(tokens, positions, self.config.separators)  # type: ignore[arg-type]  # checked there
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
        _check_separators(self.separators)
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
        _, place = segments(tokens, positions, self.config.separators)  # type: ignore[arg-type]  # checked there
        rows = of_queries(place, positions).clamp(max=self.config.rows - 1)
        return add(x, self.table[rows])

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        return self.between(self.position_map(positions, tokens), tokens)
