"""Transformer-XL's relative attention: projected sinusoids of the distance, and two learned query vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from milepost.encoding import Encoding, EncodingConfig, register
from milepost.encodings.relative.common import block_of, check_one_axis, look_up, per_query_head, sinusoids, sizes
from milepost.kernels import new_parameter
from milepost.positions import Positions
from milepost.terms import Terms


@dataclass(frozen=True, kw_only=True)
class TransformerXLConfig(EncodingConfig):
    """Options of :class:`TransformerXL`.

    Attributes:
        num_heads: number of attention heads.
        head_dim: width of one head.
        width: of the sinusoidal vectors; the model's width, as published. Even.
        clamp: distances beyond it count as it (``clamp_len`` of the authors' code); None: no limit.
        base: of the sinusoids' frequencies.
    """

    num_heads: int
    head_dim: int
    width: int
    clamp: int | None = None
    base: float = 10000.0

    def __post_init__(self) -> None:
        sizes(self, ("num_heads", "head_dim", "width"))
        if self.width % 2:
            raise ValueError(f"width is even: half sines, half cosines; got {self.width}")
        if self.clamp is not None and self.clamp < 0:
            raise ValueError(f"clamp is not negative (None for no limit); got {self.clamp}")


@register(
    "transformer-xl",
    title="Transformer-XL",
    family="relative",
    manifestation="embedding",
    learnable=True,
    integration="add",
    injection="every",
    source="Dai et al. 2019 (arXiv 1901.02860)",
    summary="The query meets a projected sinusoid of the distance; two learned vectors replace its own position.",
    shared=False,
)
class TransformerXL(Encoding):
    """``e_ij = ((q_i + u) . k_j + (q_i + v) . W_R R[i - j]) / sqrt(d)``, R the sinusoids of signed distances.

    Where slots tell the distance, ``W_R R`` is made once per distance and read per pair. Elsewhere (mapped positions,
    masks with holes) the sinusoid of a difference is split into products of sines and cosines of the two positions,
    which is exact for positions that are not whole too. Neither makes a vector for a pair.

    Shapes: ``scores`` of :class:`~milepost.terms.Terms`, for blocks of queries, in the dtype of the logits. Parameters
    per layer: ``u`` and ``v`` ``(H, head_dim)``, ``w_r`` ``(H * head_dim, width)``, all N(0, 0.02).
    Raises ValueError for an odd width, a negative clamp or several position axes.
    Source: Dai et al. 2019 (arXiv 1901.02860), section 3.3; code of XLNet in transformers, with its order (sines
    first). The authors' code can share u and v between layers; here every layer has its own.
    """

    Config = TransformerXLConfig
    config: TransformerXLConfig

    def setup(self) -> None:
        c = self.config
        self.u = new_parameter(c.num_heads, c.head_dim)
        self.v = new_parameter(c.num_heads, c.head_dim)
        self.w_r = new_parameter(c.num_heads * c.head_dim, c.width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0.0, 0.02)

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        check_one_axis(positions, self.name)
        relative = self._from_table(positions) or self._from_products(positions)

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
            u, v = self.u[:, None].to(logits.dtype), self.v[:, None].to(logits.dtype)
            content = u @ per_query_head(k.to(logits.dtype), q.shape[1]).mT
            logits = logits + scale * (content + relative(q.to(logits.dtype) + v, positions))
            return logits if bias is None else logits + bias

        return Terms(scores=scores)

    def _from_table(self, whole: Positions) -> Callable[[Tensor, Positions], Tensor] | None:
        """Where slots tell the distance, or a clamp bounds it: a line of relative keys, read by distance."""
        clamp = self.config.clamp
        if clamp is not None:
            first = 0 if whole.causal else -clamp
            distances = torch.arange(first, clamp + 1, device=whole.device)
        elif whole.slot_distance:
            first, _ = whole.distance_range()
            distances = whole.distances()
        else:
            return None
        count = distances.shape[0]
        few = not torch.compiler.is_compiling() and whole.num_queries < self.config.head_dim
        read = self._project_queries(distances) if few else self._project_distances(distances)

        def relative(query: Tensor, block: Positions) -> Tensor:
            if clamp is not None:
                distance = block_of(whole, block).distance()
            else:
                distance = (block.query_slots()[:, None] - block.key_slots())[None]
            return look_up(read(query), (distance - first).clamp(0, count - 1))

        return relative

    def _code(self, distance: Tensor) -> Tensor:
        return torch.cat(sinusoids(distance, self.config.width, self.config.base, self.w_r.dtype), -1)

    def _weight(self) -> Tensor:
        """``w_r`` as ``(H, head_dim, width)``."""
        return self.w_r.view(self.config.num_heads, self.config.head_dim, self.config.width)

    def _project_distances(self, distances: Tensor) -> Callable[[Tensor], Tensor]:
        """``q . (W_R R)``: one product per distance and one per pair."""
        keys = (self._code(distances)[None] @ self._weight().mT).mT
        return lambda query: query @ keys.to(query.dtype)

    def _project_queries(self, distances: Tensor) -> Callable[[Tensor], Tensor]:
        """``(W_R^T q) . R``, the same number: cheaper where queries are fewer than a head is wide (decoding)."""
        code, weight = self._code(distances).mT, self._weight()
        return lambda query: query @ weight.to(query.dtype) @ code.to(query.dtype)

    def _from_products(self, whole: Positions) -> Callable[[Tensor, Positions], Tensor]:
        """``a_s sin w(i - j) + a_c cos w(i - j)``, with ``(a_s, a_c) = W_R^T (q + v)``, by the addition theorem."""
        c = self.config
        weight = self._weight()
        of_keys = self._code(whole.key.double())

        def relative(query: Tensor, block: Positions) -> Tensor:
            here = block_of(whole, block).query.double()
            sine, cosine = (x[:, None].to(query.dtype) for x in sinusoids(here, c.width, c.base, self.w_r.dtype))
            with_sine, with_cosine = (query @ weight.to(query.dtype)).chunk(2, dim=-1)
            turned = torch.cat([with_cosine * sine - with_sine * cosine, with_sine * sine + with_cosine * cosine], -1)
            return turned @ of_keys[:, None].to(query.dtype).mT

        return relative
