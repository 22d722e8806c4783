"""TUPE: positions meet positions through projections of their own, apart from the content."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from milepost.encoding import Encoding, EncodingConfig, register
from milepost.encodings.relative.common import check_one_axis, sizes
from milepost.kernels import new_parameter, t5_bucket, t5_edges
from milepost.positions import Positions
from milepost.terms import Branch, PairBias, Terms

_SOURCE = "Ke, He, Liu 2020 (arXiv 2006.15595)"


@dataclass(frozen=True, kw_only=True)
class TUPEConfig(EncodingConfig):
    """Options of :class:`TUPE`.

    Attributes:
        num_heads: number of attention heads.
        head_dim: width of one head.
        width: of the position embeddings; the model's width, as published.
        trained_length: number of positions with an embedding.
        cls_reset: position 0 is [CLS]: what it gives to others and gets from them does not depend on where they are.
        relative: a T5 bias is added (TUPE-R).
        num_buckets, max_distance: of that bias.
        beyond: at positions without an embedding: ``raise``, or ``clamp`` to the last one.
    """

    num_heads: int
    head_dim: int
    width: int
    trained_length: int
    cls_reset: bool = True
    relative: bool = False
    num_buckets: int = 32
    max_distance: int = 128
    beyond: Literal["raise", "clamp"] = "raise"

    def __post_init__(self) -> None:
        sizes(self, ("num_heads", "head_dim", "width", "trained_length"))
        if self.beyond not in ("raise", "clamp"):
            raise ValueError(f"beyond is 'raise' or 'clamp'; got {self.beyond!r}")
        if self.relative:
            if self.num_buckets % 2:
                raise ValueError(f"bidirectional attention halves the buckets; num_buckets is {self.num_buckets}, odd")
            t5_edges(self.num_buckets, self.max_distance)


@register(
    "tupe-r",
    title="TUPE-R",
    family="relative",
    manifestation="embedding",
    learnable=True,
    integration="add",
    injection="every",
    source=_SOURCE,
    summary="TUPE with a T5 bias.",
    preset={"relative": True},
)
@register(
    "tupe",
    title="TUPE",
    family="relative",
    manifestation="embedding",
    learnable=True,
    integration="add",
    injection="every",
    source=_SOURCE,
    summary="Products of projected position embeddings as a bias, untied from the content; [CLS] has no place.",
)
class TUPE(Encoding):
    """Untied positional encoding: ``e_ij = q_i . k_j / sqrt(2 d) + (p_i U_q) . (p_j U_k) / sqrt(2 d)``.

    p is a learned embedding per position, normalised by a LayerNorm. With ``cls_reset`` every key gets one learned
    number per head from a query at position 0, and every other query gives another one to the key at position 0. With
    ``relative`` T5's bias is added; all pairs with [CLS] then have buckets of their own.

    Shapes: a branch that scales the queries, and a :class:`~milepost.terms.PairBias`, float32 or better. Parameters,
    one set for all layers: ``position`` ``(trained_length + 1, width)``, ``norm``, ``query`` and ``key`` (linear, with
    bias); ``relative`` ``(num_buckets + 1, H)``. N(0, 0.02), biases 0. As in the authors' code the embedding of
    position t is row t + 1, and the two numbers of [CLS] are the products of rows 0 and 1 with themselves.
    Raises ValueError for a position the table does not have, with ``beyond="raise"`` (under ``torch.compile`` the last
    embedding is taken), for positions that are not whole, or for several position axes.
    Source: Ke, He, Liu 2020 (arXiv 2006.15595); code of guolinke/TUPE. It is an encoder; causal attention gives all
    buckets to the past here.
    """

    Config = TUPEConfig
    config: TUPEConfig

    def setup(self) -> None:
        c = self.config
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        inner = c.num_heads * c.head_dim
        self.position = new_parameter(c.trained_length + 1, c.width)
        self.norm = nn.LayerNorm(c.width, dtype=dtype)
        self.query = nn.Linear(c.width, inner, dtype=dtype)
        self.key = nn.Linear(c.width, inner, dtype=dtype)
        self.relative = new_parameter(c.num_buckets + 1, c.num_heads) if c.relative else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.norm.reset_parameters()
        with torch.no_grad():
            for parameter in (self.position, self.query.weight, self.key.weight, self.relative):
                if parameter is not None:
                    parameter.normal_(0.0, 0.02)
            self.query.bias.zero_()
            self.key.bias.zero_()

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        check_one_axis(positions, self.name)
        self._check(positions)
        c = self.config
        causal, known_key = positions.causal, positions.key
        few = not torch.compiler.is_compiling() and positions.num_queries < self.config.head_dim
        known = None if few else self._project(self.key, known_key)

        def bias(query: Tensor, key: Tensor) -> Tensor:
            of_queries = self._project(self.query, query)
            if few:  # the same product the other way round, cheaper where queries are fewer than a head is wide
                weight, shift = self.key.weight.unflatten(0, (-1, c.head_dim)), self.key.bias.view(-1, c.head_dim, 1)
                products = of_queries @ weight @ self._rows(key)[:, None].mT + of_queries @ shift
            else:
                of_keys = known if known is not None and key is known_key else self._project(self.key, key)
                products = of_queries @ of_keys.mT
            return self._bias(query, key, products, causal)

        half = math.sqrt(0.5)
        return Terms(branches=(Branch(query=lambda q: q * half),), bias=PairBias(bias, positions))

    def _check(self, positions: Positions) -> None:
        key = positions.key
        if key.is_floating_point():
            raise ValueError(f"{self.name} has one embedding per whole position; these positions are {key.dtype}")
        if self.config.beyond == "clamp" or torch.compiler.is_compiling():
            return
        if positions.key_present is not None:
            key = torch.where(positions.key_present, key, 0)
        last = int(key.max()) if key.numel() else 0
        if last >= self.config.trained_length:
            raise ValueError(
                f"position {last} has no embedding: trained_length is {self.config.trained_length}; "
                "shorten the input, or take the last one with beyond='clamp'"
            )

    def _rows(self, at: Tensor) -> Tensor:
        """``(B|1, n)`` positions -> their normalised embeddings ``(B|1, n, width)``."""
        return self.norm(self.position[at.clamp(0, self.config.trained_length - 1) + 1])

    def _project(self, projection: nn.Linear, at: Tensor) -> Tensor:
        """``(B|1, n)`` positions -> ``(B|1, H, n, head_dim)``."""
        return projection(self._rows(at)).unflatten(-1, (self.config.num_heads, -1)).transpose(1, 2)

    def _bias(self, query: Tensor, key: Tensor, products: Tensor, causal: bool) -> Tensor:
        factor = 1 / math.sqrt(2 * self.config.head_dim)
        bias = products * factor
        from_cls, to_cls = (query == 0)[:, None, :, None], (key == 0)[:, None, None, :]
        if self.config.cls_reset:
            rows = self.norm(self.position[:2])
            own = (self.query(rows) * self.key(rows)).unflatten(-1, (self.config.num_heads, -1)).sum(-1) * factor
            bias = torch.where(to_cls, own[1, :, None, None], bias)
            bias = torch.where(from_cls, own[0, :, None, None], bias)
        if self.relative is None:
            return bias
        c = self.config
        bucket = t5_bucket(
            (query[:, :, None] - key[:, None, :]).to(bias.dtype),
            num_buckets=c.num_buckets,
            max_distance=c.max_distance,
            bidirectional=not causal,
        )
        if c.cls_reset:
            bucket = torch.where(to_cls[:, 0], c.num_buckets, bucket)
            bucket = torch.where(from_cls[:, 0], c.num_buckets // 2, bucket)
        return bias + self.relative[bucket].movedim(-1, 1)
