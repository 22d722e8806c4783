"""Methods that stretch each pair by how many turns it made in training: NTK-by-parts, YaRN, Llama-3."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from milepost.encodings.frequencies.base import (
    Frequencies,
    Scalable,
    Scale,
    at_least,
    is_number,
    ladder,
    log,
    pair_index,
    positive,
)

Ramp = Literal["rotations", "index"]


def correction_index(rotations: float, rotary_dim: int, base: float, trained_length: int) -> float:
    """The (real-valued) pair index that makes ``rotations`` turns in training: ``d ln(L / (2 pi r)) / (2 ln base)``."""
    return rotary_dim * math.log(trained_length / (2 * math.pi * rotations)) / (2 * math.log(base))


def rotation_ramp(theta: Tensor, trained_length: int, alpha: float, beta: float) -> Tensor:
    """Share of each pair that is kept: 0 below ``alpha`` turns, 1 above ``beta``, linear in turns between."""
    turns = trained_length * theta / (2 * math.pi)
    if alpha == beta:
        return (turns >= alpha).to(theta.dtype)
    return ((turns - alpha) / (beta - alpha)).clamp(0.0, 1.0)


def index_ramp(index: Tensor, low: float, high: float) -> Tensor:
    """0 up to pair ``low``, 1 from pair ``high``, linear in the pair index between; an empty range becomes a step."""
    return ((index - low) / ((high if high != low else high + 0.001) - low)).clamp(0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class ByParts(Scalable):
    """NTK-by-parts: pairs with many turns in training are kept, pairs with few are interpolated.

    Formula: ``theta' = (1 - g) theta / factor + g theta``.
    ``ramp="rotations"``: g linear in turns ``L theta / 2 pi`` between alpha and beta (the paper).
    ``ramp="index"``: g linear in the pair index between the pairs that make beta and alpha turns (every engine); the
    two agree only at the ends. ``truncate`` rounds those pairs outwards and belongs to ``ramp="index"``.
    The upper end is clamped at d-1, not at the last pair: that is what published code does.
    Raises ValueError unless 0 < alpha <= beta.
    Source: YaRN (arXiv 2309.00071), equations 17-20; jquesnelle/yarn and transformers for the index ramp.
    """

    name: ClassVar[str] = "by_parts"
    title: ClassVar[str] = "NTK-by-parts"
    source: ClassVar[str] = "arXiv 2309.00071"

    trained_length: int
    alpha: float = 1.0
    beta: float = 32.0
    ramp: Ramp = "rotations"
    truncate: bool = True

    def problems(self) -> list[str]:
        problems = super().problems() + positive(self, "trained_length", "alpha", "beta")
        if not problems and self.alpha > self.beta:
            problems.append(f"alpha must not exceed beta, got alpha={self.alpha:g} and beta={self.beta:g}: swapped?")
        if self.ramp not in ("rotations", "index"):
            problems.append(f"ramp must be 'rotations' or 'index', got {self.ramp!r}")
        return problems

    def correction_range(self) -> tuple[float, float]:
        """(low, high) pair indices between which the index ramp runs."""
        return correction_range(self.rotary_dim, self.base, self.trained_length, self.beta, self.alpha, self.truncate)

    def kept_share(self, device: torch.device | None = None) -> Tensor:
        """g, float64 (P,): 1 = as trained, 0 = divided by the factor."""
        if self.ramp == "rotations":
            return rotation_ramp(self.plain(device), self.trained_length, self.alpha, self.beta)
        return 1 - index_ramp(pair_index(self.rotary_dim, device), *self.correction_range())

    def at_factor(self, factor: Scale, device: torch.device | None = None) -> Frequencies:
        return Frequencies(blend(self.plain(device), self.kept_share(device), factor))


def blend(theta: Tensor, kept: Tensor, factor: Scale) -> Tensor:
    """``kept * theta + (1 - kept) * theta / factor``; exactly theta where kept is 1."""
    return theta * (kept + (1 - kept) / factor)


def correction_range(
    rotary_dim: int, base: float, trained_length: int, beta_fast: float, beta_slow: float, truncate: bool
) -> tuple[float, float]:
    """(low, high) of the index ramp, rounded outwards if ``truncate``, clamped to [0, d-1]."""
    low = correction_index(beta_fast, rotary_dim, base, trained_length)
    high = correction_index(beta_slow, rotary_dim, base, trained_length)
    if truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    return max(low, 0.0), min(high, rotary_dim - 1.0)


@dataclass(frozen=True, kw_only=True)
class PartNTK(Scalable):
    """The first, two-ramp form of NTK-by-parts.

    Formula: interpolated to NTK-aware over the turns ``beta = (1.25, 0.75)``, then that to unscaled over
    ``gamma = (16, 2)``; both ramps linear in pair index between rounded ends.
    Source: jquesnelle/yarn, LlamaPartNTKScaledRotaryEmbedding.
    """

    name: ClassVar[str] = "part_ntk"
    title: ClassVar[str] = "NTK-by-parts, two ramps"
    source: ClassVar[str] = "github.com/jquesnelle/yarn"

    trained_length: int
    beta: tuple[float, float] = (1.25, 0.75)
    gamma: tuple[float, float] = (16.0, 2.0)

    def problems(self) -> list[str]:
        problems = super().problems() + positive(self, "trained_length")
        if self.rotary_dim == 2:
            problems.append("rotary_dim 2 has no NTK base: the exponent d/(d-2) divides by zero")
        for name in ("beta", "gamma"):
            pair = getattr(self, name)
            good = isinstance(pair, tuple) and len(pair) == 2 and all(is_number(x) and x > 0 for x in pair)
            if not good or pair[0] < pair[1]:
                problems.append(f"{name} must be two numbers of turns > 0, the larger first, got {pair!r}")
        return problems

    def _ramp(self, turns: tuple[float, float], index: Tensor) -> Tensor:
        return index_ramp(
            index, *correction_range(self.rotary_dim, self.base, self.trained_length, turns[0], turns[1], True)
        )

    def at_factor(self, factor: Scale, device: torch.device | None = None) -> Frequencies:
        theta, index = self.plain(device), pair_index(self.rotary_dim, device)
        ntk = ladder(self.rotary_dim, self.base * factor ** (self.rotary_dim / (self.rotary_dim - 2)), device)
        slow, fast = self._ramp(self.beta, index), self._ramp(self.gamma, index)
        inner = (1 - slow) * ntk + slow * theta / factor
        return Frequencies((1 - fast) * theta + fast * inner)


@dataclass(frozen=True, kw_only=True)
class Llama3(Scalable):
    """Llama 3.1's scaling: NTK-by-parts with the rotations ramp between 1 and 4 turns, and no attention factor.

    Formula: wavelengths below ``L/high`` kept, above ``L/low`` divided by the factor, blended in turns between.
    ``low_freq_factor == high_freq_factor`` (Llama 4) is a step.
    Source: meta-llama/llama-models, apply_scaling.
    """

    name: ClassVar[str] = "llama3"
    title: ClassVar[str] = "Llama-3 scaling"
    source: ClassVar[str] = "github.com/meta-llama/llama-models"

    trained_length: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def problems(self) -> list[str]:
        problems = super().problems() + positive(self, "trained_length", "low_freq_factor", "high_freq_factor")
        if not problems and self.low_freq_factor > self.high_freq_factor:
            problems.append(
                f"low_freq_factor must not exceed high_freq_factor, got {self.low_freq_factor:g} and "
                f"{self.high_freq_factor:g}: swapped?"
            )
        return problems

    def at_factor(self, factor: Scale, device: torch.device | None = None) -> Frequencies:
        theta = self.plain(device)
        kept = rotation_ramp(theta, self.trained_length, self.low_freq_factor, self.high_freq_factor)
        return Frequencies(blend(theta, kept, factor))


def yarn_temperature(factor: Scale, mscale: float = 1.0) -> Scale:
    """``g(s, m) = 0.1 m ln s + 1``, and 1 for s <= 1 (YaRN, equation 22; DeepSeek's mscale)."""
    return 0.1 * mscale * log(at_least(factor, 1.0)) + 1.0


@dataclass(frozen=True, kw_only=True)
class Yarn(ByParts):
    """YaRN: NTK-by-parts and a temperature on the rotated part.

    Formula: frequencies of `ByParts` with beta_fast = beta and beta_slow = alpha; ``attention_factor`` by the first
    rule that applies: the value given; ``g(s, mscale) / g(s, mscale_all_dim)`` if mscale or mscale_all_dim is given;
    ``g(s, 1) = 0.1 ln s + 1``. ``softmax_factor = g(s, mscale_all_dim)^2`` if ``mscale_all_dim`` (DeepSeek's MLA models
    multiply the softmax scale by it), switched off by ``scale_softmax=False``.
    ``ramp`` is "index" by default, as in every engine; "rotations" is the paper's.
    ``mscale_rule="transformers"`` ignores mscale unless both numbers are given and not 0, as transformers does;
    "reference" is DeepSeek's own code: a missing mscale is 1, a missing mscale_all_dim is 0.
    Raises ValueError for an attention_factor that is not above 0, and for a range that runs backwards.
    Source: YaRN (arXiv 2309.00071), equations 17-22; DeepSeek-V2's modeling code for mscale.
    """

    name: ClassVar[str] = "yarn"
    title: ClassVar[str] = "YaRN"
    source: ClassVar[str] = "arXiv 2309.00071"

    ramp: Ramp = "index"
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    mscale_rule: Literal["reference", "transformers"] = "reference"
    scale_softmax: bool = True

    def problems(self) -> list[str]:
        problems = super().problems() + positive(self, "attention_factor")
        for name in ("mscale", "mscale_all_dim"):
            value = getattr(self, name)
            if value is not None and (not is_number(value) or value < 0):
                problems.append(f"{name} must be a number >= 0, got {value!r}")
        if self.mscale_rule not in ("reference", "transformers"):
            problems.append(f"mscale_rule must be 'reference' or 'transformers', got {self.mscale_rule!r}")
        return problems

    def factors(self, factor: Scale | None = None) -> tuple[Scale, Scale]:
        """(attention_factor, softmax_factor) at a stretch: one for cosine and sine, one for the softmax scale."""
        factor = self.factor if factor is None else factor
        softmax: Scale = 1.0
        if self.scale_softmax and self.mscale_all_dim:
            softmax = yarn_temperature(factor, self.mscale_all_dim) ** 2
        if self.attention_factor is not None:
            return self.attention_factor, softmax
        both = bool(self.mscale and self.mscale_all_dim)
        either = self.mscale is not None or self.mscale_all_dim is not None
        if both or (either and self.mscale_rule == "reference"):
            top = yarn_temperature(factor, 1.0 if self.mscale is None else self.mscale)
            return top / yarn_temperature(factor, self.mscale_all_dim or 0.0), softmax
        return yarn_temperature(factor), softmax

    def at_factor(self, factor: Scale, device: torch.device | None = None) -> Frequencies:
        return Frequencies(blend(self.plain(device), self.kept_share(device), factor), *self.factors(factor))
