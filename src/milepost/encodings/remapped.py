"""Distance maps under biases: ReRoPE, leaky ReRoPE and Stair over ALiBi, KERPLE, T5 and any function of distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from milepost.encoding import Encoding, EncodingConfig, build_for, register
from milepost.encodings.relmaps import leaky_rerope_distance, rerope_distance, stair_distance
from milepost.positions import Positions
from milepost.terms import DistanceBias, PairBias, Terms, distance_bias


@dataclass(frozen=True, kw_only=True)
class RemappedConfig(EncodingConfig):
    """Options of :class:`Remapped`.

    Attributes:
        num_heads: number of attention heads.
        over: the bias whose distances are mapped: its name, or an encoding.
        map: which map.
        window: distances below it stay (None: a quarter of the trained length).
        factor: of the leaky map.
        step: of the stair.
        rounding: of the stair.
        trained_length: default of the window, and handed to the bias where it has it.
    """

    num_heads: int | None = None
    over: Any = "alibi"
    map: Literal["rerope", "leaky-rerope", "stair"] = "rerope"
    window: int | None = None
    factor: float = 16.0
    step: int = 50
    rounding: Literal["ceil", "floor"] = "ceil"
    trained_length: int | None = None

    def __post_init__(self) -> None:
        if self.map not in ("rerope", "leaky-rerope", "stair"):
            raise ValueError(f"map is 'rerope', 'leaky-rerope' or 'stair'; got {self.map!r}")
        if self.window is None and self.trained_length is None:
            raise ValueError("give window, or trained_length, of which it is a quarter")
        if self.factor < 1 or self.step < 1:
            raise ValueError(f"factor and step are at least 1; got {self.factor} and {self.step}")

    @property
    def near(self) -> int:
        """window, after its default."""
        return self.window if self.window is not None else max(1, (self.trained_length or 0) // 4)


@register(
    "remapped-bias",
    title="ReRoPE or Stair over a bias",
    family="bias",
    manifestation="bias",
    learnable=False,
    integration="add",
    injection="every",
    source="Su 2023 (kexue.fm 9708); Ma et al. 2024 (arXiv 2410.15859), who also map ALiBi",
    summary="A bias that sees far distances clipped, slowed or in stairs.",
)
class Remapped(Encoding):
    """``b_h(W(d))``: a bias b of the distance, read at a mapped distance W(d).

    For a bias the map needs no second comparison of q and k: it is another line per head, exact on every backend and in
    both directions (W is odd). ``map="rerope"``: d clipped at the window; ``"leaky-rerope"``: slower beyond it, at
    fractions (the bias must take them); ``"stair"``: in steps beyond it.

    Shapes: a :class:`~milepost.terms.DistanceBias`, as of the bias itself. Its parameters are this encoding's.
    Raises ValueError where the encoding is not a bias of distance alone.
    Source: the maps of `rerope`, `leaky-rerope` and `stair`; Ma et al. 2024 (arXiv 2410.15859) show stairs over ALiBi.
    """

    Config = RemappedConfig
    config: RemappedConfig

    def setup(self) -> None:
        c = self.config
        if isinstance(c.over, Encoding):
            self.over = c.over
        else:
            self.over = build_for(c.over, {"num_heads": c.num_heads, "trained_length": c.trained_length})

    def reset_parameters(self) -> None:
        self.over.reset_parameters()

    def distance(self, distance: Tensor) -> Tensor:
        """W(d), of any shape."""
        c = self.config
        if c.map == "rerope":
            return rerope_distance(distance, c.near)
        if c.map == "stair":
            return stair_distance(distance, c.near, c.step, c.rounding)
        return leaky_rerope_distance(distance, c.near, c.factor)

    def _moves_with_positions(self, positions: Positions) -> bool:
        """Whether the bias of a pair stays when both are moved by a million (FIRE's does not). Looks on CPUs alone."""
        if torch.compiler.is_compiling() or positions.device.type != "cpu":
            return True
        near = torch.tensor([[0.0, 2.0**20]], dtype=torch.float64)
        with torch.no_grad():
            bias = self.over(positions.mapped(near + 1, near)).bias
            if bias is None:
                return True
            pairs = bias.dense()[0]
        return torch.allclose(pairs[:, 0, 0], pairs[:, 1, 1], rtol=1e-5, atol=1e-6)

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        def bias(distance: Tensor) -> Tensor:
            apart = self.distance(distance).flatten()[None]
            there = positions.mapped(torch.zeros_like(apart[:, :1]), -apart)
            terms = self.over(there, tokens)
            if not isinstance(terms.bias, PairBias):
                raise ValueError(f"{self.over.name} is not a bias of distance alone: there is no distance to map")
            return terms.bias.dense()[0, :, 0].unflatten(1, distance.shape)

        own = self.over(positions, tokens)
        of_distance = isinstance(own.bias, DistanceBias) or not positions.slot_distance
        of_distance = of_distance and self._moves_with_positions(positions)
        if own.bias is None or not of_distance or own.branches or own.scores is not None or own.weights is not None:
            raise ValueError(f"{self.over.name} is not a bias of distance alone: there is no distance to map")
        return Terms(bias=distance_bias(bias, positions), window=own.window, chunk=own.chunk)
