"""Rotary positions with several axes: images, video, and the mixed text of vision-language models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from milepost.encoding import EncodingConfig, PositionMap, register
from milepost.encodings.frequencies import FrequencyMethod, Linear
from milepost.encodings.rotary import Layout, Phases, Rotary, RotaryConfig, Rotation, same_tokens
from milepost.positions import Positions
from milepost.terms import Terms


def grid_positions(
    shape: Sequence[int],
    *,
    offsets: Sequence[int] | None = None,
    prefix: int = 0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Coordinates of a grid in row-major order: the last axis runs fastest, so token t of (H, W) is (t // W, t % W).

    ``offsets`` are added axis by axis; ``prefix`` tokens (a class token) stand at the origin before the grid. A pure
    function: nothing is cached. Shapes: ``(1, prefix + number of cells, axes)`` int64.
    Raises ValueError where offsets and shape have different lengths.
    """
    offsets = [0] * len(shape) if offsets is None else list(offsets)
    if len(offsets) != len(shape):
        raise ValueError(f"one offset an axis: {len(shape)} axes, offsets {offsets}")
    axes = [torch.arange(n, device=device) + o for n, o in zip(shape, offsets, strict=True)]
    cells = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)
    return torch.cat([cells.new_zeros(prefix, len(shape)), cells])[None]


@dataclass(frozen=True, kw_only=True)
class GridConfig(EncodingConfig):
    """Options of :class:`Grid`.

    Attributes:
        shape: cells along each axis, slowest first: (H, W) or (T, H, W).
        prefix: tokens before the grid (a class token); they stand at the origin and are not rotated.
    """

    shape: tuple[int, ...]
    prefix: int = 0


class Grid(PositionMap):
    """Puts a flattened grid back on its axes: position ``prefix + t`` becomes ``(t // W, t % W)``, row-major.

    ``Mapped(Grid(shape=(14, 14)), RoPE2D(head_dim=64))``.
    """

    Config = GridConfig
    config: GridConfig

    def forward(self, positions: Positions, tokens: Tensor | None = None) -> Positions:
        """``(B|1, n) -> (B|1, n, axes)``."""
        c = self.config

        def spread(at: Tensor) -> Tensor:
            cell = (at - c.prefix).clamp(min=0)
            coordinates = []
            for size in reversed(c.shape[1:]):
                coordinates.append(cell % size)
                cell = cell // size
            return torch.stack([cell, *reversed(coordinates)], dim=-1)

        return positions.mapped(spread(positions.query), spread(positions.key))


def axis_phases(inv_freq: Tensor, axis_of_pair: Sequence[int]) -> Phases:
    """Pair p turns by ``position[axis_of_pair[p]] * inv_freq[p]``; positions with one axis stand there on every axis.

    inv_freq ``(P,)``, or ``(B, P)`` by rows.
    """
    rows = inv_freq[:, None] if inv_freq.dim() == 2 else inv_freq
    axes = max(axis_of_pair) + 1

    def phases(at: Tensor) -> Tensor:
        if at.dim() == 2:
            return at.double()[..., None] * rows
        if at.shape[-1] < axes:
            raise ValueError(f"this encoding reads {axes} position axes; these positions have {at.shape[-1]}")
        return at.double()[..., torch.tensor(axis_of_pair, device=at.device)] * rows

    return phases


# ---- two axes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RoPE2DConfig(EncodingConfig):
    """Options of :class:`RoPE2D`.

    Attributes:
        head_dim: width of one head; all of it is rotated.
        base: theta of the ladder.
        axis_order: which axis the first pairs (or pair 0) read: ``"wh"``, width first, as published; or ``"hw"``.
            Positions themselves are always (row, column).
        packing: ``"segments"``: half of the pairs for each axis, each half with a ladder of its own; ``"interleaved"``:
            one ladder over all pairs, axes taking turns.
        layout: which channels form a pair.
    """

    head_dim: int
    base: float = 100.0
    axis_order: Literal["wh", "hw"] = "wh"
    packing: Literal["segments", "interleaved"] = "segments"
    layout: Layout = "interleaved"

    def __post_init__(self) -> None:
        if self.head_dim % 4:
            raise ValueError(f"two axes share the pairs evenly: head_dim is a multiple of 4; got {self.head_dim}")
        if self.axis_order not in ("wh", "hw"):
            raise ValueError(f"axis_order is 'wh' or 'hw'; got {self.axis_order!r}")
        if self.packing not in ("segments", "interleaved"):
            raise ValueError(f"packing is 'segments' or 'interleaved'; got {self.packing!r}")


@register(
    "rope-2d",
    title="RoPE-2D, axial",
    family="rotary",
    manifestation="embedding",
    learnable=False,
    integration="multiply",
    injection="every",
    source="Heo et al. 2024 (arXiv 2403.13298), axial; EVA-02; transformers' vision models",
    summary="Half of the pairs rotate by the row, half by the column.",
)
class RoPE2D(Rotary):
    """Axial RoPE for images: pairs of one half turn by the column, those of the other by the row.

    ``angle_p = x * base^(-4p/d)`` for the first half and the same of y for the second. Positions have two axes, (row,
    column): see `Grid` and `grid_positions`. A position with one axis (text) stands there on both.

    Shapes: one :class:`~milepost.terms.Branch`; positions ``(B|1, n, 2)``.
    Raises ValueError for a head_dim that is no multiple of 4.
    Source: Heo et al. 2024 (arXiv 2403.13298), naver-ai/rope-vit: base 100, columns first, neighbouring channels.
    transformers' vision models: ``base=10000, axis_order="hw", layout="half"``. HunyuanImage-3: rows first,
    ``packing="interleaved"``.
    """

    Config = RoPE2DConfig
    config: RoPE2DConfig
    axes = 2

    def make_method(self) -> FrequencyMethod:
        c = self.config
        width = c.head_dim if c.packing == "interleaved" else c.head_dim // 2
        return Linear(rotary_dim=width, base=c.base)

    def inv_freq(self, device: torch.device | None = None, *, length: int | Tensor | None = None) -> Tensor:
        """``(head_dim / 2,)`` float64: of every pair, over both axes."""
        ladder = self.method.frequencies(device=device).inv_freq
        return ladder if self.config.packing == "interleaved" else ladder.repeat(2)

    def axis_of_pair(self) -> tuple[int, ...]:
        """Position axis (0 = row, 1 = column) of each pair."""
        pairs, first = self.config.head_dim // 2, int(self.config.axis_order == "wh")
        if self.config.packing == "interleaved":
            return tuple((first + p) % 2 for p in range(pairs))
        return (first,) * (pairs // 2) + (1 - first,) * (pairs // 2)

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        phases = axis_phases(self.inv_freq(positions.device), self.axis_of_pair())
        return Terms(branches=(_rotation(positions, phases, self.config.layout).branch(),))


def _rotation(positions: Positions, phases: Phases, layout: Layout) -> Rotation:
    return Rotation(positions.query, positions.key, phases, layout=layout, same=same_tokens(positions))


@dataclass(frozen=True, kw_only=True)
class RoPE2DMixedConfig(EncodingConfig):
    """Options of :class:`RoPE2DMixed`.

    Attributes:
        num_heads: number of attention heads.
        head_dim: width of one head.
        base: theta of the ladder at the start.
        layout: which channels form a pair.
    """

    num_heads: int
    head_dim: int
    base: float = 10.0
    layout: Layout = "interleaved"

    def __post_init__(self) -> None:
        if self.head_dim % 4:
            raise ValueError(f"two axes share the pairs evenly: head_dim is a multiple of 4; got {self.head_dim}")


@register(
    "rope-2d-mixed",
    title="RoPE-2D, mixed",
    family="rotary",
    manifestation="embedding",
    learnable=True,
    integration="multiply",
    injection="every",
    source="Heo et al. 2024 (arXiv 2403.13298), equation 14",
    summary="Every pair rotates along a learned direction of the image.",
    shared=False,
)
class RoPE2DMixed(Rotary):
    """Mixed RoPE for images: ``angle_p = x * fx_p + y * fy_p``, both frequencies learned for each layer, head and pair.

    At the start pair p of a head has length ``base^(-4j/d)``, along a random direction a for the first half of the
    pairs and ``a + 90°`` for the second.

    Parameters: ``frequencies`` (2, H, head_dim / 2) float32: fx, then fy. Shapes: positions ``(B|1, n, 2)`` (row,
    column); one axis (text) stands on both. In grouped attention a key head takes its first query head's frequencies.
    Source: Heo et al. 2024 (arXiv 2403.13298), naver-ai/rope-vit init_random_2d_freqs.
    """

    Config = RoPE2DMixedConfig
    config: RoPE2DMixedConfig
    axes = 2

    def setup(self) -> None:
        c = self.config
        self.frequencies_xy = nn.Parameter(torch.empty(2, c.num_heads, c.head_dim // 2))
        self.method = self.make_method()
        self.reset_parameters()

    def make_method(self) -> FrequencyMethod:
        return Linear(rotary_dim=self.config.head_dim // 2, base=self.config.base)

    def reset_parameters(self) -> None:
        angle = torch.rand(self.config.num_heads, device=self.frequencies_xy.device) * 2 * math.pi
        with torch.no_grad():
            self.frequencies_xy.copy_(self.directions(angle))

    def directions(self, angle: Tensor) -> Tensor:
        """``(2, H, head_dim / 2)``: initial frequencies of heads whose first half points along ``angle`` ``(H,)``."""
        size = self.method.frequencies(device=angle.device).inv_freq
        a = angle.double()[:, None]
        fx = torch.cat([size * a.cos(), size * (math.pi / 2 + a).cos()], dim=-1)
        fy = torch.cat([size * a.sin(), size * (math.pi / 2 + a).sin()], dim=-1)
        return torch.stack([fx, fy])

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        fx, fy = self.frequencies_xy.double()[:, :, None, :]

        def phases(at: Tensor) -> Tensor:
            where = at.double()[:, None]
            if at.dim() == 2:
                return where[..., None] * (fx + fy)
            return where[..., 1:2] * fx + where[..., 0:1] * fy

        return Terms(branches=(_rotation(positions, phases, self.config.layout).branch(),))


# ---- three axes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RoPE3DConfig(EncodingConfig):
    """Options of :class:`RoPE3D`.

    Attributes:
        head_dim: width of one head.
        split: channels of time, height and width, each even (None: as even as possible, the rest to time).
        base: theta of each axis's ladder.
        layout: which channels of the whole head form a pair.
    """

    head_dim: int
    split: tuple[int, int, int] | None = None
    base: float = 10000.0
    layout: Layout = "interleaved"

    def __post_init__(self) -> None:
        parts = self.channels
        if len(parts) != 3 or any(n < 2 or n % 2 for n in parts) or sum(parts) != self.head_dim:
            raise ValueError(
                f"split is three even numbers of at least 2 that add up to head_dim {self.head_dim}; got {parts}"
            )

    @property
    def channels(self) -> tuple[int, ...]:
        """Channels of each axis."""
        if self.split is not None:
            return tuple(self.split)
        each = self.head_dim // 6 * 2
        return self.head_dim - 2 * each, each, each


@register(
    "rope-3d",
    title="RoPE-3D",
    family="rotary",
    manifestation="embedding",
    learnable=False,
    integration="multiply",
    injection="every",
    source="common practice of video transformers (e.g. CogVideoX, arXiv 2408.06072)",
    summary="The head is split among time, height and width, one rotary ladder each.",
)
class RoPE3D(Rotary):
    """RoPE for video: channels split into (time, height, width), a plain one-dimensional RoPE on each part.

    Shapes: positions ``(B|1, n, 3)``; one axis (text) stands on all three.
    Raises ValueError for a split that is not three even parts of head_dim.
    Source: common practice; any split that adds up is used somewhere, so it is an option.
    """

    Config = RoPE3DConfig
    config: RoPE3DConfig
    axes = 3

    def setup(self) -> None:
        self.ladders = [Linear(rotary_dim=n, base=self.config.base) for n in self.config.channels]
        super().setup()

    def make_method(self) -> FrequencyMethod:
        return self.ladders[0]

    def inv_freq(self, device: torch.device | None = None, *, length: int | Tensor | None = None) -> Tensor:
        """``(head_dim / 2,)`` float64: the three ladders one after the other."""
        return torch.cat([ladder.frequencies(device=device).inv_freq for ladder in self.ladders])

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        axis_of_pair = tuple(axis for axis, n in enumerate(self.config.channels) for _ in range(n // 2))
        phases = axis_phases(self.inv_freq(positions.device), axis_of_pair)
        return Terms(branches=(_rotation(positions, phases, self.config.layout).branch(),))


@dataclass(frozen=True, kw_only=True)
class MRoPEConfig(RotaryConfig):
    """Options of :class:`MRoPE`.

    Attributes:
        sections: pairs of time, height and width (None: as Qwen2-VL divides them, 2 : 3 : 3).
        interleaved: axes take turns along the ladder (Qwen3-VL) instead of standing in blocks (Qwen2-VL).
    """

    sections: tuple[int, int, int] | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        pairs = self.rotary_dim // 2
        if len(self.pairs) != 3 or sum(self.pairs) != pairs or min(self.pairs) < 0:
            raise ValueError(
                f"sections are three numbers of pairs that add up to rotary_dim / 2 = {pairs} (not to head_dim); "
                f"got {self.pairs}"
            )
        if self.interleaved and (3 * self.pairs[1] - 2 >= pairs or 3 * self.pairs[2] - 1 >= pairs):
            raise ValueError(f"interleaved sections {self.pairs} do not fit {pairs} pairs: height and width take turns")

    @property
    def pairs(self) -> tuple[int, ...]:
        """Pairs of each axis."""
        if self.sections is not None:
            return tuple(self.sections)
        total = self.rotary_dim // 2
        each = total // 3 if self.interleaved else total * 3 // 8
        return total - 2 * each, each, each


@register(
    "m-rope",
    title="M-RoPE",
    family="rotary",
    manifestation="embedding",
    learnable=False,
    integration="multiply",
    injection="every",
    source="Wang et al. 2024, Qwen2-VL (arXiv 2409.12191); Qwen3-VL for the interleaved form",
    summary="One ladder whose pairs read time, height or width; on text it is plain RoPE.",
)
class MRoPE(Rotary):
    """Multimodal RoPE: one frequency ladder, of which each pair reads one of three position ids (time, height, width).

    Text has three equal ids and gets plain RoPE. Blocks as in Qwen2-VL (``sections=(16, 24, 24)`` for head_dim 128), or
    ``interleaved``: pairs 1, 4, 7 ... read the height and 2, 5, 8 ... the width, up to their number; the rest time.

    Shapes: positions ``(B|1, n, 3)``, or one axis for text. Every ``scaling`` of RoPE applies to the ladder.
    Raises ValueError for sections that do not add up to the number of pairs.
    Source: Wang et al. 2024 (arXiv 2409.12191); transformers' qwen2_vl and qwen3_vl. After an image, text positions go
    on from the largest id: the positions say so, not this encoding.
    """

    Config = MRoPEConfig
    config: MRoPEConfig
    axes = 3

    def axis_of_pair(self) -> tuple[int, ...]:
        """0 = time, 1 = height, 2 = width, for each pair."""
        t, h, w = self.config.pairs
        if not self.config.interleaved:
            return (0,) * t + (1,) * h + (2,) * w
        axes = [0] * (t + h + w)
        for axis, count in ((1, h), (2, w)):
            for p in range(axis, min(3 * count, len(axes)), 3):
                axes[p] = axis
        return tuple(axes)

    def phases(self, inv_freq: Tensor) -> Phases:
        return axis_phases(inv_freq, self.axis_of_pair())
