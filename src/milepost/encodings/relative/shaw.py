"""Shaw's relative vectors: one learned key and one learned value per clipped distance."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from milepost.encoding import Encoding, EncodingConfig, register
from milepost.encodings.relative.common import block_of, check_one_axis, deposit, look_up, sizes
from milepost.kernels import new_parameter
from milepost.positions import Positions
from milepost.terms import Terms


@dataclass(frozen=True, kw_only=True)
class ShawConfig(EncodingConfig):
    """Options of :class:`Shaw`.

    Attributes:
        num_heads: number of attention heads.
        head_dim: width of one head.
        clip: distances ``i - j`` are clipped to ``(r_min, r_max)``; one number K stands for ``(-K, K)``. ``(0, K)`` is
            enough for a causal model, which never reads the other rows.
        values: vectors for the values too.
        heads_share: one table for all heads of a layer, as published; False gives each head its own.
    """

    num_heads: int
    head_dim: int
    clip: int | tuple[int, int] = 16
    values: bool = True
    heads_share: bool = True

    def __post_init__(self) -> None:
        sizes(self, ("num_heads", "head_dim"))
        try:
            low, high = self.range
        except (TypeError, ValueError):
            raise ValueError(f"clip is one number or (r_min, r_max); got {self.clip!r}") from None
        if not low <= 0 <= high:
            raise ValueError(f"clip holds distance 0: r_min <= 0 <= r_max; got ({low}, {high})")

    @property
    def range(self) -> tuple[int, int]:
        """The smallest and the largest distance with a row of its own."""
        if isinstance(self.clip, int):
            return -self.clip, self.clip
        low, high = self.clip
        return low, high


@register(
    "shaw",
    title="Shaw",
    family="relative",
    manifestation="embedding",
    learnable=True,
    integration="add",
    injection="every",
    source="Shaw, Uszkoreit, Vaswani 2018 (arXiv 1803.02155)",
    summary="A learned vector per clipped distance, added to the keys and to the values.",
    survey="Shaw",
    shared=False,
)
class Shaw(Encoding):
    """Relative vectors on keys and values, with ``r = clip(i - j, r_min, r_max)``:

    ``e_ij = q_i . (k_j + aK[r]) / sqrt(d)`` and ``z_i = sum_j softmax(e)_ij (v_j + aV[r])``.

    Row 0 of the tables is the farthest past, row ``r_max`` the query's own token: row = ``r_max - r``. No vector is
    ever made for a pair: ``q aK^T`` is read per pair, and the probabilities are summed per row before they meet aV, so
    the cost is ``O(q (r_max - r_min))`` beside the logits. A distance that is not whole lies between two rows.

    Shapes: ``scores`` and ``weights`` of :class:`~milepost.terms.Terms`, for blocks of queries, in the dtype of the
    logits. Parameters: ``key`` and ``value``, ``(rows, head_dim)`` each, per layer (``(rows, H, head_dim)`` with
    ``heads_share=False``), Glorot uniform.
    Raises ValueError for a clip range without 0, or several position axes.
    Source: Shaw, Uszkoreit, Vaswani 2018 (arXiv 1803.02155), equations 3 to 5; tensor2tensor, common_attention.py. Some
    ports add where the code subtracts, ``i + j`` for ``j - i``.
    """

    Config = ShawConfig
    config: ShawConfig

    def setup(self) -> None:
        low, high = self.config.range
        heads = () if self.config.heads_share else (self.config.num_heads,)
        self.num_rows = high - low + 1
        self.key = new_parameter(self.num_rows, *heads, self.config.head_dim)
        self.value = new_parameter(self.num_rows, *heads, self.config.head_dim) if self.config.values else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = math.sqrt(6 / (self.num_rows + self.config.head_dim))
        if not self.config.heads_share:
            bound = math.sqrt(6 / (self.num_rows * (self.config.num_heads + self.config.head_dim)))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-bound, bound)

    def row(self, distance: Tensor) -> Tensor:
        """The table's row for each distance ``i - j``."""
        low, high = self.config.range
        return high - distance.clamp(low, high)

    def _per_head(self, table: Tensor, like: Tensor) -> Tensor:
        """``(1|H, rows, head_dim)``, in the dtype of ``like``."""
        return (table[None] if self.config.heads_share else table.transpose(0, 1)).to(like.dtype)

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        check_one_axis(positions, self.name)
        aK, aV = self.key, self.value

        def scores(
            logits: Tensor,
            bias: Tensor | None,
            *,
            q: Tensor,
            k: Tensor,
            positions: Positions,
            allowed: Tensor,
            scale: float,
        ) -> Tensor:
            row = self.row(block_of(whole, positions).distance())
            relative = q.to(logits.dtype) @ self._per_head(aK, logits).mT
            logits = logits + scale * look_up(relative, row)
            return logits if bias is None else logits + bias

        def weights(probabilities: Tensor, *, positions: Positions) -> tuple[Tensor, Tensor]:
            assert aV is not None
            row = self.row(block_of(whole, positions).distance())
            return probabilities, deposit(probabilities, row, self.num_rows) @ self._per_head(aV, probabilities)

        whole = positions
        return Terms(scores=scores, weights=None if aV is None else weights)
