"""CoPE: positions are counted by gates that the logits open."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from milepost.encoding import Encoding, EncodingConfig, register
from milepost.kernels import new_parameter
from milepost.positions import Positions
from milepost.terms import Terms


@dataclass(frozen=True, kw_only=True)
class CoPEConfig(EncodingConfig):
    """Options of :class:`CoPE`.

    Attributes:
        head_dim: width of one head.
        npos_max: number of position embeddings; counts beyond ``npos_max - 1`` are that.
    """

    head_dim: int
    npos_max: int = 64

    def __post_init__(self) -> None:
        if self.head_dim < 1 or self.npos_max < 1:
            raise ValueError(
                f"head_dim and npos_max are at least 1; got head_dim {self.head_dim}, npos_max {self.npos_max}"
            )


def counted_positions(logits: Tensor, allowed: Tensor) -> Tensor:
    """``p_ij = sum of sigmoid(logits_ik) over the allowed keys k >= j``: ``(..., q, K)``, not yet clamped."""
    gates = torch.sigmoid(logits).masked_fill(~allowed, 0.0)
    return gates.flip(-1).cumsum(-1).flip(-1)


def interpolated(values: Tensor, at: Tensor) -> Tensor:
    """``(..., q, P)`` values at whole positions 0..P-1, read at ``(..., q, K)`` positions in between; linear."""
    at = at.clamp(max=values.shape[-1] - 1)
    low = at.floor()
    share = at - low
    return values.gather(-1, low.long()) * (1 - share) + values.gather(-1, at.ceil().long()) * share


@register(
    "cope",
    title="CoPE",
    family="content",
    manifestation="embedding",
    learnable=True,
    integration="add",
    injection="every",
    source="Golovneva et al. 2024 (arXiv 2405.18719)",
    summary="Counts only the tokens that the query finds relevant, and looks up what that count means.",
    shared=False,
)
class CoPE(Encoding):
    """Contextual position encoding:

    ``g_ij = sigmoid(q_i . k_j / sqrt(d))``, ``p_ij = min(g_ij + ... + g_ii, P - 1)``, ``b_ij = q_i . e[p_ij]``,

    where e between two whole numbers is the line between its neighbours. Only allowed keys open a gate, so padding and
    other documents are never counted, and a row is the same with a cache. q is not scaled in ``q_i . e``.

    Shapes: ``scores`` of :class:`~milepost.terms.Terms`, for blocks of queries; counted in float32 or better.
    Parameter: ``table`` ``(npos_max, head_dim)`` per layer, shared by its heads, zeros: it starts as NoPE.
    Raises ValueError in bidirectional attention, where no side to count from is defined.
    Source: Golovneva et al. 2024 (arXiv 2405.18719), section 4 and the code in its appendix; x-transformers. The
    text of the paper writes ``sigmoid(q . k)``; its code scales first, as here.
    """

    Config = CoPEConfig
    config: CoPEConfig

    def setup(self) -> None:
        self.table = new_parameter(self.config.npos_max, self.config.head_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.table.zero_()

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        if not positions.causal:
            raise ValueError(
                "CoPE counts from the query back to the key, so it is causal only; in bidirectional attention use "
                "DAPE (dape), which reads the content too"
            )

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
            counts = counted_positions(logits, allowed)
            logits = logits + interpolated(q.to(logits.dtype) @ self.table.to(logits.dtype).mT, counts)
            return logits if bias is None else logits + bias

        return Terms(scores=scores)
