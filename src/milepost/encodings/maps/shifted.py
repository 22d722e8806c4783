"""Shifts of all positions of a sequence: SHAPE, and CAPE of 2021."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from milepost.encoding import EncodingConfig, PositionMap
from milepost.encodings.maps.draws import below, documents, fresh_seed, row_index, uniform
from milepost.positions import Positions


@dataclass(frozen=True, kw_only=True)
class SHAPEConfig(EncodingConfig):
    """Options of :class:`SHAPE`.

    Attributes:
        max_shift: K; training shifts by one of 0 .. K - 1.
        test_shift: outside training: ``full`` shifts by K, as the official code does; ``half`` by K // 2; ``zero`` not.
    """

    max_shift: int = 500
    test_shift: Literal["full", "half", "zero"] = "full"

    def __post_init__(self) -> None:
        if self.max_shift < 1:
            raise ValueError(f"max_shift is at least 1; got {self.max_shift}")
        if self.test_shift not in ("full", "half", "zero"):
            raise ValueError(f"test_shift is 'full', 'half' or 'zero'; got {self.test_shift!r}")


class SHAPE(PositionMap):
    """Shifted absolute positions: ``t -> t + k``, one k per sequence, drawn from 0 .. K - 1 in training.

    Shapes: positions of any dtype, which they keep; distances do not change. A packed row draws one k per document. A
    batch draws one per row where its rows are known (from the positions or from ``tokens``).
    Raises ValueError for ``max_shift`` below 1.
    Source: Kiyono et al. 2021 (arXiv 2109.05644). Their code, at test time, adds the constant K itself, which training
    never drew; that is the default, ``test_shift`` offers the alternatives. It also bounds k by the length of its
    sinusoid table, which is not needed here.
    """

    Config = SHAPEConfig
    config: SHAPEConfig

    def forward(self, positions: Positions, tokens: Tensor | None = None) -> Positions:
        bound = self.config.max_shift
        at_queries: Tensor | int
        at_keys: Tensor | int
        if self.training:
            seed, row = fresh_seed(positions.device), row_index(positions, tokens)
            of_query, of_key = documents(positions)
            at_queries, at_keys = below(bound, seed, row, of_query), below(bound, seed, row, of_key)
        else:
            at_queries = at_keys = {"full": bound, "half": bound // 2, "zero": 0}[self.config.test_shift]
        return replace(positions, query=positions.query + at_queries, key=positions.key + at_keys)


@dataclass(frozen=True, kw_only=True)
class CAPEConfig(EncodingConfig):
    """Options of :class:`CAPE`; the defaults are the authors' example for text.

    Attributes:
        max_global_shift: Dmax; one shift per sequence from U(-Dmax, Dmax).
        max_local_shift: emax; one shift per token from U(-emax, emax). Above 0.5 it may swap neighbours.
        max_scale: smax; one factor per sequence, its logarithm from U(-ln smax, ln smax).
        normalize: subtract the mean position of the sequence, at test time too. Bidirectional attention only.
    """

    max_global_shift: float = 5.0
    max_local_shift: float = 1.0
    max_scale: float = 1.03
    normalize: bool = False

    def __post_init__(self) -> None:
        if self.max_global_shift < 0 or self.max_local_shift < 0 or self.max_scale < 1:
            raise ValueError(
                "max_global_shift and max_local_shift are not negative and max_scale is at least 1; got "
                f"{self.max_global_shift}, {self.max_local_shift} and {self.max_scale}"
            )


class CAPE(PositionMap):
    """Continuous augmented positions: ``t -> (t - mean + D + e_t) exp(u)``, drawn in training.

    D is one number per sequence (per document of a packed row), e_t one per token, u one per sequence. Outside training
    only the mean is subtracted, and that only with ``normalize``.

    Shapes: float64 positions in training or with ``normalize``; otherwise they are unchanged.
    Raises ValueError for ``normalize`` in causal attention: the mean tells every token how long the text will be, and
    changes as a cache grows.
    Source: Likhomanenko et al. 2021 (arXiv 2106.03143). The published ports count one padded token into the mean
    (``positions > length``); padding is left out here. Not the CAPE that became DAPE (``dape``).
    """

    Config = CAPEConfig
    config: CAPEConfig

    def forward(self, positions: Positions, tokens: Tensor | None = None) -> Positions:
        query, key = positions.query, positions.key
        if self.config.normalize:
            if positions.causal:
                raise ValueError(
                    "CAPE's normalize subtracts the mean position, which tells a causal model the length of the text; "
                    "use normalize=False, or bidirectional attention"
                )
            at_queries, at_keys = mean_position(positions)
            query, key = query - at_queries, key - at_keys
        if self.training:
            seed, row = fresh_seed(positions.device), row_index(positions, tokens)
            of_query, of_key = documents(positions)
            query = self._augment(query, positions.query, seed, row, of_query)
            key = self._augment(key, positions.key, seed, row, of_key)
        if query is positions.query:
            return positions
        return positions.mapped(query, key)

    def _augment(self, at: Tensor, token: Tensor, seed: Tensor, row: Tensor, document: Tensor | int) -> Tensor:
        shift = self.config.max_global_shift * (2 * uniform(seed, row, document, 1) - 1)
        jitter = self.config.max_local_shift * (2 * uniform(seed, row, document, 2, token.long()) - 1)
        scale = math.log(self.config.max_scale) * (2 * uniform(seed, row, document, 3) - 1)
        return cape_position(at, shift, jitter, scale)


def cape_position(at: Tensor, shift: Tensor, jitter: Tensor, log_scale: Tensor) -> Tensor:
    """``(at + shift + jitter) exp(log_scale)`` in float64."""
    return (at.double() + shift + jitter) * log_scale.exp()


def mean_position(positions: Positions) -> tuple[Tensor, Tensor]:
    """Mean position of the tokens, padding left out: for each query and each key ``(B|1, Q)``, ``(B|1, K)`` float64.

    In a packed row it is the mean of the document.
    """
    key = positions.key.double()
    weight = torch.ones_like(key) if positions.key_present is None else positions.key_present.double()
    key, weight = torch.broadcast_tensors(key, weight)
    if positions.key_document is None:
        mean = (key * weight).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True).clamp(min=1)
        return mean, mean
    document = positions.key_document.expand_as(key)
    begins = torch.zeros_like(document)
    begins[:, 1:] = (document[:, 1:] != document[:, :-1]).long()
    run = begins.cumsum(-1)
    total = torch.zeros_like(key).scatter_add(1, run, key * weight)
    count = torch.zeros_like(key).scatter_add(1, run, weight).clamp(min=1)
    at_keys = (total / count).gather(1, run)
    return at_keys.index_select(1, positions.query_slots()), at_keys
