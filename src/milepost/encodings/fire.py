"""FIRE: a small network of the distance, relative to the query's own position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from milepost.encoding import Encoding, EncodingConfig, register
from milepost.kernels import as_float, new_parameter
from milepost.positions import Positions
from milepost.terms import PairBias, Terms, distance_bias


@dataclass(frozen=True, kw_only=True)
class FIREConfig(EncodingConfig):
    """Options of :class:`FIRE`.

    Attributes:
        num_heads: number of attention heads.
        hidden: width of the network.
        transform: ``"log"``: ``psi(x) = log(|c x| + 1)`` with a learned c; ``"identity"``: ``psi(x) = x``.
        threshold: start of the learned L below which queries are normalised alike; None: no threshold.
        c: start of c.
        eps: added to the denominator; None: 1e-6 with ``"log"``, as published, and 0 with ``"identity"``.
    """

    num_heads: int
    hidden: int = 32
    transform: Literal["log", "identity"] = "log"
    threshold: float | None = 512.0
    c: float = 0.1
    eps: float | None = None

    def __post_init__(self) -> None:
        if self.transform not in ("log", "identity"):
            raise ValueError(f"transform is 'log' or 'identity'; got {self.transform!r}")
        if self.threshold is not None and self.threshold < 0:
            raise ValueError(f"threshold is not negative (None for no threshold); got {self.threshold}")
        if self.c <= 0:
            raise ValueError(f"c is positive; got {self.c}")
        if self.hidden < 1:
            raise ValueError(f"hidden is at least 1; got {self.hidden}")


@register(
    "fire",
    title="FIRE",
    family="bias",
    manifestation="bias",
    learnable=True,
    integration="add",
    injection="every",
    source="Li et al. 2023 (arXiv 2310.04418)",
    summary="A small network of the distance divided by the query's position, so that its input never leaves [0, 1].",
    survey="FIRE",
    shared=False,
)
class FIRE(Encoding):
    """Functional interpolation: ``b(i, j) = MLP( psi(i - j) / (psi(max(i, L)) + eps) )``, ``psi(x) = log(|c x| + 1)``.

    The network is Linear(1, hidden), ReLU, Linear(hidden, H); c and ``L = |m| * threshold`` are learned (m starts at
    1). ``FIRE(transform="identity", threshold=None)`` is equation 20 of the survey (2312.17044), ``f((i - j) / i)``.
    A quotient 0/0, the first query without a threshold, is 0. In bidirectional attention the distance is ``|i - j|``
    and ``max(i, j, L)`` stands for ``max(i, L)`` (our extension).

    Shapes: a :class:`~milepost.terms.PairBias`, evaluated per block of queries: it depends on the query's position, not
    on the distance alone. While no position has reached L it does, and then it is a
    :class:`~milepost.terms.DistanceBias` with the same gradients. Computed in float32 or better;
    ``2 hidden + (hidden + 1) H + 2`` parameters per layer.
    Raises ValueError for a negative threshold, c that is not positive or an empty network.
    Source: Li et al. 2023 (arXiv 2310.04418); its pseudo-code as DAPE runs it. That takes the largest distance of each
    row for i, which is i itself only when no key is cached or padded; positions are read here.
    """

    Config = FIREConfig
    config: FIREConfig

    def setup(self) -> None:
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.mlp = nn.Sequential(
            nn.Linear(1, self.config.hidden, dtype=dtype),
            nn.ReLU(),
            nn.Linear(self.config.hidden, self.config.num_heads, dtype=dtype),
        )
        self.c = new_parameter(1) if self.config.transform == "log" else None
        self.threshold_scale = new_parameter(1) if self.config.threshold is not None else None
        self._reset_scales()

    def reset_parameters(self) -> None:
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()
        self._reset_scales()

    def _reset_scales(self) -> None:
        with torch.no_grad():
            if self.c is not None:
                self.c.fill_(self.config.c)
            if self.threshold_scale is not None:
                self.threshold_scale.fill_(1.0)

    def normalized(self, query: Tensor, key: Tensor, *, causal: bool = True) -> Tensor:
        """``(B|1, q)`` and ``(B|1, k)`` positions -> ``(B|1, q, k)``: what the network reads, in [0, 1]."""
        query, key = as_float(query, *self.parameters())[:, :, None], as_float(key, *self.parameters())[:, None, :]
        distance = (query - key).clamp(min=0) if causal else (query - key).abs()
        length = query if causal else torch.maximum(query, key)
        if self.threshold_scale is not None and self.config.threshold is not None:
            length = torch.maximum(length, (self.threshold_scale * self.config.threshold).abs())
        eps = self.config.eps
        if eps is None:
            eps = 1e-6 if self.config.transform == "log" else 0.0
        below = self._psi(length) + eps
        positive = below > 0
        return torch.where(positive, self._psi(distance) / torch.where(positive, below, 1.0), 0.0)

    def of_distance(self, distance: Tensor) -> Tensor:
        """The bias of queries below the threshold, ``(*shape)`` -> ``(H, *shape)``."""
        distance = as_float(distance, *self.parameters())
        origin = torch.zeros_like(distance).view(-1, 1)
        return self._network(self.normalized(distance.abs().view(-1, 1), origin).view(distance.shape)).movedim(-1, 0)

    def _network(self, x: Tensor) -> Tensor:
        return self.mlp(x[..., None].to(next(self.mlp.parameters()).dtype))

    def _below_threshold(self, positions: Positions) -> bool:
        """Whether L rules every query: then one line per head holds all biases. Asked where looking costs nothing."""
        threshold = self.threshold_scale
        if threshold is None or self.config.threshold is None or not positions.slot_distance:
            return False
        if torch.compiler.is_compiling() or positions.query.device.type != "cpu" or threshold.device.type != "cpu":
            return False
        last = [x.max() for x in (positions.query, positions.key) if x.numel()]
        with torch.no_grad():
            return all(bool(x < (threshold * self.config.threshold).abs()) for x in last)

    def _psi(self, x: Tensor) -> Tensor:
        return x if self.c is None else torch.log1p((self.c * x).abs())

    def converges(self) -> list[bool]:
        """For each head, whether the sum of ``exp(bias)`` over all distances is finite: never, the input is bounded."""
        return [False] * self.config.num_heads

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        causal = positions.causal
        if self._below_threshold(positions):
            return Terms(bias=distance_bias(self.of_distance, positions))

        def bias(query: Tensor, key: Tensor) -> Tensor:
            return self._network(self.normalized(query, key, causal=causal)).movedim(-1, 1)

        return Terms(bias=PairBias(bias, positions))
