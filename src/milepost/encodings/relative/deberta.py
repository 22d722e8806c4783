"""DeBERTa's disentangled attention: content to position and position to content, each with its own projection."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from milepost.encoding import Encoding, EncodingConfig, register
from milepost.encodings.relative.common import block_of, check_one_axis, look_up, per_query_head, sizes
from milepost.kernels import new_parameter
from milepost.positions import Positions
from milepost.terms import Terms

CHUNK_NUMBERS = 1 << 23
"""Products of keys and position queries held at once, over batch and heads."""


@dataclass(frozen=True, kw_only=True)
class DeBERTaConfig(EncodingConfig):
    """Options of :class:`DeBERTa`.

    Attributes:
        num_heads: number of attention heads.
        head_dim: width of one head.
        width: of the relative embeddings; the model's width, as published.
        num_layers: layers that share the relative embeddings, each with projections of its own.
        clip: distances ``i - j`` are clipped to ``[-clip, clip - 1]``.
        c2p: the content of the query meets the position of the key.
        p2c: the position of the query meets the content of the key.
    """

    num_heads: int
    head_dim: int
    width: int
    num_layers: int = 1
    clip: int = 512
    c2p: bool = True
    p2c: bool = True

    def __post_init__(self) -> None:
        sizes(self, ("num_heads", "head_dim", "width", "num_layers", "clip"))
        if not self.c2p and not self.p2c:
            raise ValueError("DeBERTa needs c2p or p2c; both are False, which leaves no position signal")


@register(
    "deberta",
    title="DeBERTa",
    family="relative",
    manifestation="embedding",
    learnable=True,
    integration="add",
    injection="every",
    source="He et al. 2020 (arXiv 2006.03654)",
    summary="Logits are the sum of content to content, content to position and position to content.",
)
class DeBERTa(Encoding):
    """Disentangled attention, with ``r = clip(i - j, -k, k - 1) + k``:

    ``e_ij = (q_i . k_j + q_i . K[r] + Q[r] . k_j) / sqrt(3 d)``, ``K = P W_k`` and ``Q = P W_q + b_q``.

    P, the relative embeddings, is one table for all layers; the projections are each layer's own. ``for_layer(l)`` is
    the encoding of layer l; the whole one stands for layer 0. With one part off the factor is ``1/sqrt(2 d)``.

    Shapes: ``scores`` of :class:`~milepost.terms.Terms`, for blocks of queries, in the dtype of the logits. Parameters:
    ``table`` ``(2 clip, width)``, and per layer ``key`` ``(H * head_dim, width)`` without and ``query`` with a bias;
    N(0, 0.02), biases 0.
    Raises ValueError for sizes below 1, both parts off, or several position axes.
    Source: He et al. 2020 (arXiv 2006.03654), equations 2 to 4; code of transformers. The paper writes the distance of
    position to content the other way round, ``j - i``; its code, followed here, uses ``i - j`` for both. A bias on
    ``key``, which version 2 has, adds the same number to a whole row and changes nothing. Logarithmic buckets of
    distances and the absolute positions of its decoder are not part of this.
    """

    Config = DeBERTaConfig
    config: DeBERTaConfig

    def setup(self) -> None:
        c = self.config
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)

        def projections(wanted: bool, bias: bool) -> nn.ModuleList:
            count = c.num_layers if wanted else 0
            return nn.ModuleList(nn.Linear(c.width, c.num_heads * c.head_dim, bias, dtype=dtype) for _ in range(count))

        self.table = new_parameter(2 * c.clip, c.width)
        self.key = projections(c.c2p, False)
        self.query = projections(c.p2c, True)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("bias"):
                    parameter.zero_()
                else:
                    parameter.normal_(0.0, 0.02)

    def for_layer(self, layer: int) -> Encoding:
        if self.config.num_layers == 1:
            return self
        if not 0 <= layer < self.config.num_layers:
            raise ValueError(f"layer {layer} of a DeBERTa encoding made for num_layers={self.config.num_layers}")
        return DeBERTaLayer(self, layer)

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        return self.layer_terms(0, positions)

    def layer_terms(self, layer: int, positions: Positions) -> Terms:
        """The terms of one layer."""
        check_one_axis(positions, self.name)
        c = self.config
        low, high = self._rows(positions)
        table = self.table[low:high]

        def projected(projection: nn.Module) -> Tensor:
            return projection(table).view(-1, c.num_heads, c.head_dim).transpose(0, 1)

        keys = projected(self.key[layer]) if c.c2p else None
        queries = projected(self.query[layer]) if c.p2c else None
        factor = 1 / math.sqrt(1 + c.c2p + c.p2c)

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
            distance = block_of(whole, positions).distance()
            row = (distance.clamp(-c.clip, c.clip - 1) + (c.clip - low)).clamp(0, high - low - 1)
            if keys is not None:
                logits = logits + scale * look_up(q.to(logits.dtype) @ keys.to(logits.dtype).mT, row)
            if queries is not None:
                k = per_query_head(k.to(logits.dtype), q.shape[1])
                logits = logits + scale * _to_content(k, queries.to(logits.dtype), row)
            logits = logits * factor
            return logits if bias is None else logits + bias

        whole = positions
        return Terms(scores=scores)

    def _rows(self, positions: Positions) -> tuple[int, int]:
        """Half-open range of the table's rows that these positions can reach, where the host knows it."""
        clip = self.config.clip
        if positions.slot_distance and not torch.compiler.is_compiling():
            first, stop = positions.distance_range()
            return clip + max(-clip, min(first, clip - 1)), clip + max(1 - clip, min(stop, clip))
        return (clip if positions.causal else 0), 2 * clip


class DeBERTaLayer(Encoding):
    """One layer of a :class:`DeBERTa`; the parameters belong to the module of layer 0."""

    Config = DeBERTaConfig
    config: DeBERTaConfig

    def __init__(self, whole: DeBERTa, layer: int) -> None:
        nn.Module.__init__(self)
        self.config = whole.config
        self.info = whole.info  # type: ignore[misc]  # the layer answers to the name of the whole
        self.layer = layer
        self._whole = (whole,)
        if layer == 0:
            self.whole = whole

    def reset_parameters(self) -> None:
        if self.layer == 0:
            self._whole[0].reset_parameters()

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        return self._whole[0].layer_terms(self.layer, positions)


def _to_content(k: Tensor, queries: Tensor, row: Tensor) -> Tensor:
    """``queries[row[i, j]] . k[j]``: ``(B, H, K, D)``, ``(H, R, D)`` and ``(B|1, q, K)`` -> ``(B, H, q, K)``.

    Keys are taken in chunks, because their products with all rows would outgrow the logits of a block of queries. A
    single query (decoding) takes the one row it needs for each key instead.
    """
    if torch.compiler.is_compiling():
        return look_up(k @ queries.mT, row.mT).mT
    if row.shape[1] == 1 and not row.is_floating_point():
        return (queries[:, row[:, 0]].transpose(0, 1) * k).sum(-1)[:, :, None]
    row = row.mT
    chunk = max(16, CHUNK_NUMBERS // max(1, k.shape[0] * k.shape[1] * queries.shape[1]))
    parts = zip(k.split(chunk, dim=2), row.split(chunk, dim=1), strict=True)
    return torch.cat([look_up(keys @ queries.mT, rows).mT for keys, rows in parts], dim=-1)
