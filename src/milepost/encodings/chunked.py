"""3D-RPE: rotary positions inside chunks, and one more rotation for the chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from milepost.encoding import alias, register
from milepost.encodings.rotary import Phases, Rotary, RotaryConfig, Rotation
from milepost.positions import Positions
from milepost.terms import Terms


@dataclass(frozen=True, kw_only=True)
class ThreeDRPEConfig(RotaryConfig):
    """Options of :class:`ThreeDRPE`.

    Attributes:
        phase: phi_0, the rotation a chunk adds, in radians; chunk j turns by ``j * phi_0`` (free; 0: none).
        chunk: tokens of a chunk (None: 11/16 of the trained length, as published: 3/4 less the local window).
        local: how far a query's position may run past its chunk towards the chunk before (None: 1/16 of it).
        scheme: ``"chunks"``: intra, successive and inter chunk, each with a position of its own; ``"poster"``: the
            poster's formula alone, the in-chunk position everywhere.
    """

    phase: float = 0.1
    chunk: int | None = None
    local: int | None = None
    scheme: Literal["chunks", "poster"] = "chunks"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trained_length is None and self.chunk is None:
            raise ValueError("3d-rpe cuts chunks by the trained length: give trained_length or chunk")
        if self.chunk_length < 1 or self.local_window < 0:
            raise ValueError(
                f"chunk is at least 1 and local at least 0; got {self.chunk_length} and {self.local_window}"
            )
        if self.scheme not in ("chunks", "poster"):
            raise ValueError(f"scheme is 'chunks' or 'poster'; got {self.scheme!r}")

    @property
    def local_window(self) -> int:
        """local, after its default."""
        if self.local is not None:
            return self.local
        return (self.trained_length or self.chunk or 0) // 16

    @property
    def chunk_length(self) -> int:
        """chunk, after its default."""
        if self.chunk is not None:
            return self.chunk
        return max(1, (self.trained_length or 0) * 3 // 4 - self.local_window)


@register(
    "3d-rpe",
    title="3D-RPE",
    family="rotary",
    manifestation="embedding",
    learnable=False,
    integration="multiply",
    injection="every",
    source="Ma et al. 2024 (arXiv 2406.09897)",
    summary="RoPE on the position inside a chunk, and one phase more for every chunk between.",
)
class ThreeDRPE(Rotary):
    """3D-RPE: position m of chunk j turns a pair by ``m theta_p - phi_j``, with ``phi_j = j * phase``.

    The poster writes ``e^(i m theta) (cos phi_j h' + sin phi_j h)`` with ``h' = i h``: the same up to a quarter turn,
    which cancels in scores: ``Re[q conj(k) e^(i((m - n) theta - (phi_j - phi_k)))]``.

    Keys stand at ``j mod c`` (c = chunk). A query stands at ``i mod c`` for keys of its own chunk, at
    ``min(i mod c + c, c + local)`` for the chunk before, and at ``min(2c - 1, c + local)`` for older ones, so that no
    position exceeds ``c + local``. Three branches share one softmax; each rules its chunks. ``scheme="poster"`` keeps
    ``i mod c`` everywhere: one branch.

    Shapes: three branches over whole chunks. Chunks are counted from each row's or document's first token.
    Raises ValueError without a trained length or chunk; for bidirectional attention (chunks scheme); for mapped
    positions, which have no chunks.
    Source: Ma et al. 2024 (arXiv 2406.09897), poster and code. The code's phases are ``10000^(-j)`` (nil from the
    second chunk on), of the other sign, and rotate overlapping pairs of chunks twice: not followed. ``phase`` is
    free.
    """

    Config = ThreeDRPEConfig
    config: ThreeDRPEConfig

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        c = self.config
        size, last = c.chunk_length, c.chunk_length + c.local_window
        query, key = token_index(positions)
        key_at = torch.stack([key % size, key // size], dim=-1)
        chunk = query // size
        found = self.frequencies(positions)

        def turned(at: Tensor) -> Rotation:
            where = torch.stack([at, chunk], dim=-1)
            return self.rotation(positions, query_at=where, key_at=key_at, found=found)

        own = turned(query % size)
        if c.scheme == "poster":
            cacheable = not self.method.length_dependent and positions.query_document is None
            return Terms(branches=(own.branch(),), rotated_keys_cacheable=cacheable)
        if not positions.causal:
            raise ValueError("3d-rpe's chunks look back only: for bidirectional attention use scheme='poster'")
        before = turned((query % size + size).clamp(max=last))
        older = turned(torch.full_like(query, min(2 * size - 1, last)))
        branches = (own.branch(0, 1, size), before.branch(1, 2, size), older.branch(2, None, size))
        return Terms(branches=branches, rotated_keys_cacheable=False)

    def phases(self, inv_freq: Tensor) -> Phases:
        rows = inv_freq[:, None] if inv_freq.dim() == 2 else inv_freq

        def phases(at: Tensor) -> Tensor:
            where = at.double()
            return where[..., :1] * rows - where[..., 1:] * self.config.phase

        return phases


def token_index(positions: Positions) -> tuple[Tensor, Tensor]:
    """``(B|1, Q)`` and ``(B|1, K)`` int64: which token of its row or document each query and key is, from 0.

    Raises ValueError for mapped positions: their tokens are counted too, but the map would be lost without a word.
    """
    if not positions.slot_distance and positions.plain():
        raise ValueError("chunks are counted in tokens: this encoding takes no position map")
    keys = positions.of_keys()
    slots = keys.query_slots()[None]
    begin = keys._row_start()[..., 0]
    if positions.key_present is not None and not positions.slot_distance:
        rank = positions.key_present.long().cumsum(-1) - 1
        index = rank - rank.gather(1, begin.expand(rank.shape[0], -1))
    else:
        index = slots - begin
    index = index.clamp(min=0)
    return index[:, positions.query_slots()], index


alias("3d-rope-chunked", "3d-rpe")
