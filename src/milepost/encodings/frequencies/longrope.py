"""LongRoPE: one searched divisor a pair, another list beyond the trained length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from milepost.encodings.frequencies.base import (
    Frequencies,
    Ladder,
    Scale,
    device_of,
    is_number,
    positive,
    row_length,
)


@dataclass(frozen=True, kw_only=True)
class LongRope(Ladder):
    """Frequencies divided pair by pair: ``short_factor`` up to the trained length, ``long_factor`` beyond it.

    Formula: ``theta_p / lambda_p``. ``growth="switch"``: long iff length > trained_length, each row for itself;
    "dynamic": ``lambda = 1 + (long - 1) (l/L - 1) / (L'/L - 1)``, l held in [L, L'], L' = max_length (LongRoPE's
    dynamic form); "short" or "long": one list at every length (vLLM takes one for the engine's life).
    attention_factor, at every length: the value given, else ``sqrt(1 + ln s / ln L)`` with ``s = factor``, else
    ``max_length / L``; 1 for s <= 1. ``short_mscale`` / ``long_mscale`` (vLLM) replace it list by list.
    ``unscaled_tokens``: tokens at positions below it keep ``theta_p``, under every list (the search's "first n
    tokens"). That is a property of positions: `frequencies` answers for all others, the encoding ``longrope`` applies
    both, and no engine stores it.
    Raises ValueError unless both lists have rotary_dim / 2 numbers above 0.
    Source: LongRoPE (arXiv 2402.13753), microsoft/LongRoPE ("su"); where transformers' docstring says that
    max_length / L overrides ``factor`` its code does the opposite, and so do we.
    """

    name: ClassVar[str] = "longrope"
    title: ClassVar[str] = "LongRoPE"
    source: ClassVar[str] = "arXiv 2402.13753"

    trained_length: int
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    max_length: int | None = None
    factor: float | None = None
    attention_factor: float | None = None
    short_mscale: float | None = None
    long_mscale: float | None = None
    growth: Literal["switch", "dynamic", "short", "long"] = "switch"
    unscaled_tokens: int = 0

    def problems(self) -> list[str]:
        problems = super().problems()
        problems += positive(self, "trained_length", "max_length", "attention_factor", "short_mscale", "long_mscale")
        problems += positive(self, "factor", at_least=1.0)
        for name in ("short_factor", "long_factor"):
            values = getattr(self, name)
            if not isinstance(values, tuple) or not all(is_number(x) and x > 0 for x in values):
                problems.append(f"{name} must be a tuple of numbers above 0, got {str(values)[:60]}")
            elif isinstance(self.rotary_dim, int) and len(values) != self.rotary_dim // 2:
                problems.append(
                    f"{name} must have rotary_dim / 2 = {self.rotary_dim // 2} numbers, got {len(values)} "
                    "(rotary_dim is head_dim times partial_rotary_factor)"
                )
        if self.growth not in ("switch", "dynamic", "short", "long"):
            problems.append(f"growth must be switch, dynamic, short or long, got {self.growth!r}")
        if self.growth == "dynamic" and (self.max_length or 0) <= (self.trained_length or 0):
            problems.append(
                f"growth='dynamic' needs max_length above trained_length, got {self.max_length} and "
                f"{self.trained_length}"
            )
        tokens: object = self.unscaled_tokens
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
            problems.append(f"unscaled_tokens must be a number of tokens, 0 for none, got {tokens!r}")
        if (self.short_mscale is None) != (self.long_mscale is None):
            problems.append("give short_mscale and long_mscale together, or neither")
        return problems

    @property
    def length_dependent(self) -> bool:
        return self.growth in ("switch", "dynamic") and (
            self.short_factor != self.long_factor or self.short_mscale != self.long_mscale
        )

    @property
    def stretch(self) -> float:
        """s of the attention factor: ``factor``, else max_length / trained_length, else 1."""
        if self.factor is not None:
            return self.factor
        return self.max_length / self.trained_length if self.max_length else 1.0

    def default_attention_factor(self) -> float:
        """``sqrt(1 + ln s / ln L)``, 1 for s <= 1."""
        if self.stretch <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.stretch) / math.log(self.trained_length))

    def frequencies(self, length: int | Tensor | None = None, *, device: torch.device | None = None) -> Frequencies:
        """(P,) for one list at every length, else one row a length; ``length=None`` is the trained length."""
        device = device_of(length, device)
        rows = row_length(self.trained_length if length is None else length, device)
        short = torch.tensor(self.short_factor, dtype=torch.float64, device=device)
        long = torch.tensor(self.long_factor, dtype=torch.float64, device=device)
        beyond = rows > self.trained_length
        if self.growth == "dynamic":
            span = (self.max_length or 0) / self.trained_length - 1
            share = ((rows / self.trained_length - 1) / span).clamp(0.0, 1.0)
            divisor = 1 + (long - 1) * share
        elif self.growth == "switch":
            divisor = torch.where(beyond, long, short)
        else:
            divisor = long if self.growth == "long" else short
        return Frequencies(self.plain(device) / divisor, self._attention(beyond))

    def _attention(self, beyond: Tensor) -> Scale:
        if self.short_mscale is None or self.long_mscale is None:
            return self.default_attention_factor() if self.attention_factor is None else self.attention_factor
        if self.growth in ("short", "long"):
            return self.long_mscale if self.growth == "long" else self.short_mscale
        return torch.where(
            beyond,
            torch.full_like(beyond, self.long_mscale, dtype=torch.float64),
            torch.full_like(beyond, self.short_mscale, dtype=torch.float64),
        )
