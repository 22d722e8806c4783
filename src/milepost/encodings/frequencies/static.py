"""Frequency methods that do not read the length: plain, interpolated, NTK, truncated, power, HoPE's cut."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from milepost.encodings.frequencies.base import (
    Frequencies,
    Ladder,
    Scalable,
    Scale,
    device_of,
    is_number,
    ladder,
    pair_index,
    positive,
)


@dataclass(frozen=True, kw_only=True)
class Default(Ladder):
    """The ladder as trained.

    Formula: ``theta_p = base^(-2p/d)``, d = rotary_dim, p = 0..d/2-1.
    Source: RoFormer (arXiv 2104.09864), section 3.2.2.
    """

    name: ClassVar[str] = "default"
    title: ClassVar[str] = "RoPE"
    source: ClassVar[str] = "arXiv 2104.09864"

    def frequencies(self, length: int | Tensor | None = None, *, device: torch.device | None = None) -> Frequencies:
        """The plain ladder, float64 (P,)."""
        return Frequencies(self.plain(device_of(length, device)))


@dataclass(frozen=True, kw_only=True)
class Proportional(Scalable):
    """p-RoPE: only the fastest share of the pairs rotates, the rest carries no position.

    Formula: ``theta_p = base^(-2p/d)`` for ``p < int(proportion * d // 2)``, else 0; d is the *whole* head
    (``rotary_dim = head_dim``); partial rotary's exponent runs over the rotated part. Divided by ``factor``.
    Raises ValueError unless 0 <= proportion <= 1.
    Source: "Round and Round We Go" (arXiv 2410.06205); transformers' ``proportional`` is the same function.
    """

    name: ClassVar[str] = "proportional"
    title: ClassVar[str] = "p-RoPE"
    source: ClassVar[str] = "arXiv 2410.06205"

    proportion: float

    def problems(self) -> list[str]:
        problems = super().problems()
        if not is_number(self.proportion) or not 0 <= self.proportion <= 1:
            problems.append(f"proportion must lie in [0, 1], got {self.proportion!r}")
        return problems

    @property
    def rotated_pairs(self) -> int:
        """Number of pairs that rotate (the product is floored, as published code does)."""
        return int(self.proportion * self.rotary_dim // 2)

    def at_factor(self, factor: Scale, device: torch.device | None = None) -> Frequencies:
        keep = pair_index(self.rotary_dim, device) < self.rotated_pairs
        return Frequencies(torch.where(keep, self.plain(device), 0.0) / factor)


@dataclass(frozen=True, kw_only=True)
class Linear(Scalable):
    """Position Interpolation: every frequency divided by the factor.

    Formula: ``theta_p / factor`` (the same as positions divided by the factor, fractions kept).
    Source: Position Interpolation (arXiv 2306.15595), equation 4.
    """

    name: ClassVar[str] = "linear"
    title: ClassVar[str] = "Position Interpolation"
    source: ClassVar[str] = "arXiv 2306.15595"

    def at_factor(self, factor: Scale, device: torch.device | None = None) -> Frequencies:
        return Frequencies(self.plain(device) / factor)


@dataclass(frozen=True, kw_only=True)
class NTK(Scalable):
    """NTK-aware scaling: a larger base, so that the first pair keeps its speed and the last is divided by the factor.

    Formula: ``base' = base * factor^(d/(d-2))``. With ``mixed_b`` Su's variants, which slow the first pair too:
    ``theta_p * exp(-a (p+1)^mixed_b)``, ``a = ln(factor) / P^mixed_b`` (1 = "fixed", 0.75 = "mixed").
    Raises ValueError for rotary_dim 2, where the exponent divides by zero.
    Source: YaRN (arXiv 2309.00071), definition 1; bojone/rerope for the variants; vLLM's ``ntk`` has the key mixed_b.
    """

    name: ClassVar[str] = "ntk"
    title: ClassVar[str] = "NTK-aware"
    source: ClassVar[str] = "arXiv 2309.00071"

    mixed_b: float | None = None

    def problems(self) -> list[str]:
        problems = super().problems() + positive(self, "mixed_b")
        if self.rotary_dim == 2 and self.mixed_b is None:
            problems.append("rotary_dim 2 has no NTK base: the exponent d/(d-2) divides by zero; use Linear")
        return problems

    def scaled_base(self, factor: Scale | None = None) -> Scale:
        """The base that NTK-aware scaling asks for (needs ``mixed_b=None``)."""
        factor = self.factor if factor is None else factor
        return self.base * factor ** (self.rotary_dim / (self.rotary_dim - 2))

    def at_factor(self, factor: Scale, device: torch.device | None = None) -> Frequencies:
        if self.mixed_b is None:
            return Frequencies(ladder(self.rotary_dim, self.scaled_base(factor), device))
        share = ((pair_index(self.rotary_dim, device) + 1) / (self.rotary_dim // 2)) ** self.mixed_b
        return Frequencies(self.plain(device) * factor ** (-share))


@dataclass(frozen=True, kw_only=True)
class ABF(Ladder):
    """Adjusted base frequency: the ladder of another base, trained or chosen by hand.

    Formula: ``theta_p = new_base^(-2p/d)``; ``base`` stays the checkpoint's, so that both are on record.
    Source: Effective Long-Context Scaling (arXiv 2309.16039); Code Llama (arXiv 2308.12950).
    """

    name: ClassVar[str] = "abf"
    title: ClassVar[str] = "Adjusted base frequency"
    source: ClassVar[str] = "arXiv 2309.16039"

    new_base: float

    def problems(self) -> list[str]:
        problems = super().problems()
        if not is_number(self.new_base) or self.new_base <= 1:
            problems.append(f"new_base must be a finite number above 1, got {self.new_base!r}")
        return problems

    def frequencies(self, length: int | Tensor | None = None, *, device: torch.device | None = None) -> Frequencies:
        """The ladder of the new base, float64 (P,)."""
        return Frequencies(ladder(self.rotary_dim, self.new_base, device_of(length, device)))


@dataclass(frozen=True, kw_only=True)
class Truncated(Scalable):
    """Truncated basis: fast pairs kept, middle pairs all set to one slow frequency, slow pairs stopped.

    Formula: ``theta >= b`` kept; ``a < theta < b`` becomes ``rho``; ``theta <= a`` becomes 0; divided by ``factor``.
    Defaults from the trained length T: ``b = 2 pi / T``, ``a = b / 8``, ``rho = b / 16`` (rho < a, as in the code).
    Raises ValueError unless 0 <= a < b.
    Source: Giraffe (arXiv 2308.10882), section 3.3; constants from abacusai/Long-Context's interpolate.py.
    """

    name: ClassVar[str] = "truncated"
    title: ClassVar[str] = "Truncated basis"
    source: ClassVar[str] = "arXiv 2308.10882"

    trained_length: int | None = None
    a: float | None = None
    b: float | None = None
    rho: float | None = None

    def problems(self) -> list[str]:
        problems = super().problems() + positive(self, "trained_length")
        given = [self.a, self.b, self.rho]
        if self.trained_length is None and None in given:
            problems.append("give trained_length, or all of a, b and rho")
        elif not all(value is None or (is_number(value) and value >= 0) for value in given):
            problems.append(f"a, b and rho must be numbers >= 0, got {given}")
        elif not problems:
            a, b, _ = self.thresholds()
            if a >= b:
                problems.append(f"a must be below b, got a={a:g} and b={b:g}")
        return problems

    def thresholds(self) -> tuple[float, float, float]:
        """(a, b, rho) after defaults."""
        b = self.b if self.b is not None else 2 * math.pi / (self.trained_length or math.inf)
        return (b / 8 if self.a is None else self.a), b, (b / 16 if self.rho is None else self.rho)

    def at_factor(self, factor: Scale, device: torch.device | None = None) -> Frequencies:
        a, b, rho = self.thresholds()
        theta = self.plain(device)
        slow = torch.where(theta > a, torch.full_like(theta, rho), 0.0)
        return Frequencies(torch.where(theta >= b, theta, slow) / factor)


@dataclass(frozen=True, kw_only=True)
class Power(Scalable):
    """Power basis: slow pairs slowed further by a power of their place in the ladder.

    Formula: ``theta_p * (1 - p/P)^exponent / factor``.
    Source: Giraffe (arXiv 2308.10882), section 3.2.
    """

    name: ClassVar[str] = "power"
    title: ClassVar[str] = "Power basis"
    source: ClassVar[str] = "arXiv 2308.10882"

    exponent: float

    def problems(self) -> list[str]:
        return super().problems() + positive(self, "exponent")

    def at_factor(self, factor: Scale, device: torch.device | None = None) -> Frequencies:
        place = 1 - pair_index(self.rotary_dim, device) / (self.rotary_dim // 2)
        return Frequencies(self.plain(device) * place**self.exponent / factor)


@dataclass(frozen=True, kw_only=True)
class HoPECut(Ladder):
    """HoPE's cut: pairs that do not complete one turn within the trained length carry no position.

    Formula: ``theta_p`` where ``theta_p >= 2 pi / trained_length``, else 0. The count depends on length and base.
    Equal to `Proportional` with ``proportion = kept_pairs / P``.
    Source: HoPE (arXiv 2410.21216); the criterion as later papers quote it.
    """

    name: ClassVar[str] = "hope_cut"
    title: ClassVar[str] = "HoPE's cut"
    source: ClassVar[str] = "arXiv 2410.21216"

    trained_length: int

    def problems(self) -> list[str]:
        return super().problems() + positive(self, "trained_length")

    @property
    def kept_pairs(self) -> int:
        """Number of pairs with at least one full turn in training."""
        return full_turn_pairs(self.rotary_dim, self.base, self.trained_length)

    def frequencies(self, length: int | Tensor | None = None, *, device: torch.device | None = None) -> Frequencies:
        """The ladder with its slow end stopped, float64 (P,)."""
        theta = self.plain(device_of(length, device))
        return Frequencies(torch.where(theta >= 2 * math.pi / self.trained_length, theta, 0.0))


def full_turn_pairs(rotary_dim: int, base: float, trained_length: int) -> int:
    """Number of pairs with ``theta_p >= 2 pi / trained_length``."""
    floor = 2 * math.pi / trained_length
    return sum(base ** (-2.0 * p / rotary_dim) >= floor for p in range(rotary_dim // 2))


def fope_kept_pairs(head_dim: int, base: float, trained_length: int) -> tuple[int, int]:
    """FoPE's sizes: (pairs kept as inputs, Fourier channels made of them).

    Formula: kept = number of ``theta_p >= 2 pi / trained_length``; out = ``min(kept, head_dim // 4)``.
    Source: FoPE (arXiv 2412.17739), official code.
    """
    kept = full_turn_pairs(head_dim, base, trained_length)
    return kept, min(kept, head_dim // 4)


def log_n_scale(position: Tensor, trained_length: int) -> Tensor:
    """Su's log-n temperature of a query.

    Formula: ``max(1, ln(position + 1) / ln(trained_length))``; positions count from 0. Multiplies q, or its logits.
    Shapes: any; float64. Source: kexue 8823; ReRoPE's official patches.
    """
    return ((position.to(torch.float64) + 1).log() / math.log(trained_length)).clamp(min=1.0)
