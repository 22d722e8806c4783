"""PoSE: training positions that skip, so that a short window meets the distances of a long one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from milepost.encoding import EncodingConfig, PositionMap
from milepost.encodings.maps.draws import below, fresh_seed, row_index
from milepost.positions import Positions


@dataclass(frozen=True, kw_only=True)
class PoSEConfig(EncodingConfig):
    """Options of :class:`PoSE`.

    Attributes:
        target_length: M, the length to be prepared for; training positions lie below it.
    """

    target_length: int

    def __post_init__(self) -> None:
        if self.target_length < 1:
            raise ValueError(f"target_length is at least 1; got {self.target_length}")


class PoSE(PositionMap):
    """Positional skip-wise training: the second of two chunks is moved on by a random skip.

    For a row of n tokens: ``t -> t`` for ``t < c`` and ``t -> t + s`` from c on, with ``c`` from 1 .. (n + 1) // 2 and
    ``s`` from 0 .. M - n, one pair per row. Outside training the identity.

    Shapes: int64 positions stay int64. Attention stays causal over the n tokens. The map moves positions only; the
    authors also take the second chunk's text from further on in the document, which is the data loader's part.
    Raises ValueError for a row longer than ``target_length``.
    Source: Zhu et al. 2023 (arXiv 2309.10400), two chunks, first offset fixed at 0 as in their final code.
    """

    Config = PoSEConfig
    config: PoSEConfig

    def forward(self, positions: Positions, tokens: Tensor | None = None) -> Positions:
        if not self.training:
            return positions
        length = positions.length[:, None]
        if not torch.compiler.is_compiling() and int(length.max()) > self.config.target_length:
            raise ValueError(
                f"a row of {int(length.max())} tokens is longer than PoSE's target_length "
                f"{self.config.target_length}; raise target_length or train on shorter rows"
            )
        seed, row = fresh_seed(positions.device), row_index(positions, tokens)
        cut = 1 + below((length + 1).div(2, rounding_mode="floor"), seed, row, 1)
        skip = below((self.config.target_length - length).clamp(min=0) + 1, seed, row, 2)
        return positions.mapped(pose_position(positions.query, cut, skip), pose_position(positions.key, cut, skip))


def pose_position(at: Tensor, cut: Tensor | int, skip: Tensor | int) -> Tensor:
    """``at`` below ``cut``, ``at + skip`` from there on."""
    return at + torch.as_tensor(skip, device=at.device) * (at >= cut)
