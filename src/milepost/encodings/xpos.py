"""xPos: rotary positions whose products decay with distance, each pair at its own rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from milepost.encoding import register
from milepost.encodings.rotary import Layout, Phases, Rotary, RotaryConfig, Rotation
from milepost.positions import Positions
from milepost.terms import Branch, Terms

NATS = {torch.float16: 12.0, torch.bfloat16: 60.0, torch.float32: 60.0, torch.float64: 600.0}
"""Logarithm of the largest decay across one call that two separate factors, of q and of k, can hold with room left."""


@dataclass(frozen=True, kw_only=True)
class XPosConfig(RotaryConfig):
    """Options of :class:`XPos`.

    Attributes:
        decay: ``"pair"`` as published, or ``"scalar"``: one rate for all pairs, as the survey writes it.
        gamma: for pairs, g of ``zeta_p = (2p/d + g) / (1 + g)`` (None: 0.4); for the scalar, the factor a position,
            in (0, 1], which must be given.
        scale_base: positions over which zeta is taken once (pairs only).
        block: blockwise causal attention for testing beyond the trained length: a query sees its own block of this
            many tokens and the one before (the authors take half the trained length).
    """

    layout: Layout = "interleaved"
    decay: Literal["pair", "scalar"] = "pair"
    gamma: float | None = None
    scale_base: float = 512.0
    block: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay not in ("pair", "scalar"):
            raise ValueError(f"decay is 'pair' or 'scalar'; got {self.decay!r}")
        if self.decay == "scalar" and (self.gamma is None or not 0 < self.gamma <= 1):
            raise ValueError(f"decay='scalar' needs gamma in (0, 1], the factor a position; got {self.gamma}")
        if self.decay == "pair" and self.gamma is not None and self.gamma <= 0:
            raise ValueError(f"gamma of decay='pair' is above 0; got {self.gamma}")
        if self.scale_base <= 0:
            raise ValueError(f"scale_base is above 0; got {self.scale_base}")
        if self.block is not None and self.block < 1:
            raise ValueError(f"block is at least 1 token; got {self.block}")


@register(
    "xpos",
    title="xPos",
    family="rotary",
    manifestation="embedding",
    learnable=False,
    integration="multiply",
    injection="every",
    source="Sun et al. 2022 (arXiv 2212.10554)",
    summary="RoPE whose products decay with distance, slow pairs least; causal only.",
    survey="xPOS",
)
class XPos(Rotary):
    """xPos: RoPE with pair p of ``q_i . k_j`` multiplied by ``zeta_p^((i - j) / scale_base)``.

    ``zeta_p = (2p/d + g) / (1 + g)`` with g = .4. Queries carry ``zeta^(+(i - c)/B)`` and keys ``zeta^(-(j - c)/B)``
    with one centre c for both, the middle of each row's keys, so that neither overflows; cached keys are raw. Where the
    call is so long that the two factors do not fit the dtype, logits are made block by block with a centre of their own
    (exact at any length; memory of a block of rows). ``decay="scalar"`` multiplies logits by ``gamma^(i - j)``.

    Shapes: one :class:`~milepost.terms.Branch`, or a ``scores`` hook for long calls and the scalar form.
    Raises ValueError for bidirectional attention, where decay would turn into growth; in float16 beyond
    `separable_length` tokens, and under a compiler beyond that of float32.
    Source: Sun et al. 2022 (arXiv 2212.10554); microsoft/torchscale, centred on the call's middle (it cancels).
    The survey's scalar gamma is the paper's ablation, not xPos. To extrapolate, the paper tests with blockwise causal
    attention (``block``); without it perplexity grows beyond the trained length.
    """

    Config = XPosConfig
    config: XPosConfig

    def zeta(self, device: torch.device | None = None) -> Tensor:
        """``(P,)`` float64: the decay of each pair over ``scale_base`` positions (one, for the scalar form)."""
        c = self.config
        pairs = c.rotary_dim // 2
        if c.decay == "scalar":
            assert c.gamma is not None
            return torch.full((pairs,), c.gamma, dtype=torch.float64, device=device)
        g = 0.4 if c.gamma is None else c.gamma
        return (torch.arange(pairs, dtype=torch.float64, device=device) / pairs + g) / (1 + g)

    def rate(self, device: torch.device | None = None) -> Tensor:
        """``(P,)`` float64: nats of decay a position."""
        return -self.zeta(device).log() / (1.0 if self.config.decay == "scalar" else self.config.scale_base)

    def separable_length(self, dtype: torch.dtype = torch.float32) -> int | None:
        """Keys of one call up to which separate factors of q and k fit the dtype; None: any number."""
        c = self.config
        if c.decay == "scalar":
            return None
        g = 0.4 if c.gamma is None else c.gamma
        fastest = math.log((1 + g) / g) / c.scale_base
        return int(NATS[dtype] / fastest)

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        if not positions.causal:
            raise ValueError(
                "xpos is causal only: for keys ahead of the query its decay becomes growth. For bidirectional "
                "attention use rope, alibi or bipe"
            )
        rotation = self.rotation(positions)
        ruled = {} if self.config.block is None else {"near": 0, "far": 2, "chunk": self.config.block}
        if self.config.decay == "scalar":
            scores = _ScalarDecay(positions, float(self.rate()[0]))
            return Terms(branches=(rotation.branch(**ruled),), scores=scores, rotated_keys_cacheable=self._cacheable)
        limit = self.separable_length()
        assert limit is not None
        if positions.num_keys > limit:
            return self._long(positions, rotation, ruled, limit)
        rotation = self._growing(positions, rotation)

        def in_range(x: Tensor) -> None:
            if x.dtype == torch.float16 and positions.num_keys > (self.separable_length(torch.float16) or 0):
                raise ValueError(
                    f"xpos with scale_base {self.config.scale_base:g} holds {self.separable_length(torch.float16)} "
                    f"keys in float16, not {positions.num_keys}: use bfloat16 or float32"
                )

        def query(q: Tensor) -> Tensor:
            in_range(q)
            return rotation.query(q)

        def key(k: Tensor, at: str = "keys") -> Tensor:
            in_range(k)
            return rotation.key(k, at)

        return Terms(branches=(Branch(query=query, key=key, **ruled),), rotated_keys_cacheable=False)

    @property
    def _cacheable(self) -> bool:
        return not self.method.length_dependent

    def _growing(self, positions: Positions, rotation: Rotation) -> Rotation:
        rate = self.rate(positions.device)
        key = positions.key.double()
        centre = ((key.amax(-1) + key.amin(-1)) / 2)[:, None, None]
        rotation.growth = (
            lambda at: (centre - at.double()[..., None]) * rate,
            lambda at: (at.double()[..., None] - centre) * rate,
        )
        rotation.same = False
        return rotation

    def _long(self, positions: Positions, rotation: Rotation, ruled: dict[str, Any], limit: int) -> Terms:
        if torch.compiler.is_compiling() or not isinstance(positions.query_start, int):
            raise ValueError(
                f"xpos with scale_base {self.config.scale_base:g} holds {limit} keys in one compiled call, not "
                f"{positions.num_keys}: run longer calls without a compiler, or raise scale_base"
            )
        scores = _BlockDecay(positions, rotation, self.rate(positions.device), limit // 4)
        branches = (Branch(**ruled),) if ruled else ()
        return Terms(branches=branches, scores=scores, rotated_keys_cacheable=False)


class _ScalarDecay:
    """Logits times ``exp(-rate * distance)``, then the bias."""

    def __init__(self, positions: Positions, rate: float) -> None:
        self.positions, self.rate = positions, rate

    def __call__(
        self,
        logits: Tensor,
        bias: Tensor | None,
        *,
        q: Tensor,
        k: Tensor,
        positions: Positions,
        allowed: Tensor,
        scale: float,
    ) -> Tensor:
        query = block_of(self.positions, positions)
        distance = (query[:, :, None] - self.positions.key[:, None, :]).clamp(min=0)[:, None]
        logits = logits * (distance.double() * -self.rate).exp().to(logits.dtype)
        return logits if bias is None else logits + bias


class _BlockDecay:
    """Decayed rotary logits with a centre for each block of queries, so that no factor grows beyond a block's span."""

    def __init__(self, positions: Positions, rotation: Rotation, rate: Tensor, rows: int) -> None:
        self.positions, self.rotation, self.rate, self.rows = positions, rotation, rate, max(1, rows)

    def __call__(
        self,
        logits: Tensor,
        bias: Tensor | None,
        *,
        q: Tensor,
        k: Tensor,
        positions: Positions,
        allowed: Tensor,
        scale: float,
    ) -> Tensor:
        at = block_of(self.positions, positions)
        blocks = []
        for start in range(0, q.shape[2], self.rows):
            query_at = at[:, start : start + self.rows]
            first, last = query_at.amin(-1).double()[:, None], query_at.amax(-1).double()[:, None]

            growth = _growth_from(first, last, self.rate)
            turned = Rotation(
                query_at,
                self.positions.key,
                self.rotation.phases,
                layout=self.rotation.layout,
                factor=self.rotation.factor,
                query_factor=self.rotation.query_factor,
                growth=growth,
            )
            part = turned.query(q[:, :, start : start + self.rows])
            blocks.append(per_group(part, turned.key(k).mT) * scale)
        logits = torch.cat(blocks, dim=2)
        return logits if bias is None else logits + bias


def _growth_from(first: Tensor, last: Tensor, rate: Tensor) -> tuple[Phases, Phases]:
    """Growth of queries and of keys about ``first``; keys after ``last`` are seen by no query and grow no further."""

    def keys(where: Tensor) -> Tensor:
        return (torch.minimum(where.double(), last) - first)[..., None] * rate

    return lambda where: -keys(where), keys


def block_bounds(mine: Positions, block: Positions) -> tuple[int, int] | None:
    """(start, stop) of a block's queries among all queries of the call; None: the block is the whole call.

    A compiler always sees the whole call.
    """
    if torch.compiler.is_compiling() or mine.num_queries == block.num_queries:
        return None
    assert isinstance(mine.query_start, int) and isinstance(block.query_start, int)
    start = block.query_start - mine.query_start
    return start, start + block.num_queries


def block_of(mine: Positions, block: Positions) -> Tensor:
    """``(B|1, q)``: where the queries of a block stand in ``mine``, the (maybe mapped) positions of the whole call."""
    bounds = block_bounds(mine, block)
    return mine.query if bounds is None else mine.query[:, bounds[0] : bounds[1]]


def per_group(q: Tensor, k: Tensor) -> Tensor:
    """``(B, H, n, D) @ (B, Hkv, D, K)``, each of the Hkv heads serving ``H / Hkv`` consecutive heads of q."""
    if q.shape[1] == k.shape[1]:
        return q @ k
    batch, heads, rows, inner = q.shape
    return (q.reshape(batch, k.shape[1], heads // k.shape[1] * rows, inner) @ k).view(batch, heads, rows, k.shape[-1])
