"""Attention from one sequence to another."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from milepost.attention import attend
from milepost.encoding import Encoding
from milepost.model.config import MilepostConfig
from milepost.positions import Positions
from milepost.terms import Terms


class CrossAttention(nn.Module):
    """Attention from one sequence to another, with the encoding's relative signal where the two share an origin.

    ``aligned``: position 0 is the same place in both (two views of one signal). Otherwise the distance between them
    means nothing, and an encoding that acts in attention is refused (one that acts on embeddings is at home in both
    sequences). An encoding for causal attention alone refuses by itself.

    Shapes: x ``(B, Q, width)``, memory ``(B, K, width)``, memory_mask ``(B, K)`` with 0 = padding; returns x's shape.
    """

    def __init__(self, config: MilepostConfig, encoding: Encoding | None = None, *, aligned: bool = True) -> None:
        super().__init__()
        self.aligned, self.head_dim, self.encoding = aligned, config.head_dim, encoding
        size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.width, size, bias=config.bias)
        self.kv_proj = nn.Linear(config.width, 2 * kv_size, bias=config.bias)
        self.o_proj = nn.Linear(size, config.width, bias=config.bias)

    def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
        positions = Positions.cross(x.shape[1], memory.shape[1], device=x.device)
        terms = Terms() if self.encoding is None else self.encoding(positions)
        if not self.aligned and not terms.is_empty():
            raise ValueError(
                f"{terms.name} reads distances between two sequences that share no origin; "
                "pass aligned=True if they do, or give each sequence an absolute encoding"
            )
        if memory_mask is not None:
            positions = replace(positions, key_present=memory_mask.bool())
        parts = (self.q_proj(x), *self.kv_proj(memory).chunk(2, dim=-1))
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        return self.o_proj(attend(q, k, v, positions, terms).transpose(1, 2).flatten(2))
