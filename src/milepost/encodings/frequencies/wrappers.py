"""Methods over methods: growth with the length, integer wavelengths, log-n temperature."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from milepost.encodings.frequencies.base import (
    Frequencies,
    FrequencyMethod,
    Scalable,
    Scale,
    device_of,
    positive,
    refuse,
    row_length,
)
from milepost.encodings.frequencies.static import NTK


@dataclass(frozen=True, kw_only=True)
class Dynamic:
    """Any stretching method, its factor growing with each row's own length and never below the trained length.

    Formula: ``form="paper"``: ``s = max(method.factor, l / L)``: the inner factor is the stretch that the model was
    already tuned for (1 = none). ``form="hf"``: ``s = f l/L - (f - 1)`` with ``l = max(length, L)`` and f the inner
    factor, as transformers' dynamic NTK (so factor 2 stretches by 3 at 2L). The two agree for f = 1 only.
    Shapes: (B, P) for (B,) lengths; ``length=None`` is the trained length.
    Keys rotated at one length do not fit queries rotated at another: cache them unrotated.
    Raises TypeError for a method without a factor, ValueError when two trained lengths disagree.
    Source: YaRN (arXiv 2309.00071), section 3.4; transformers' dynamic rope type for the second form.
    """

    name: ClassVar[str] = "dynamic"
    title: ClassVar[str] = "Dynamic scaling"
    source: ClassVar[str] = "arXiv 2309.00071"

    method: Scalable
    trained_length: int | None = None
    form: Literal["paper", "hf"] = "paper"

    def __post_init__(self) -> None:
        if not isinstance(self.method, Scalable):
            raise TypeError(
                f"Dynamic grows a method that has a factor (linear, ntk, by_parts, yarn, ...), "
                f"got {type(self.method).__name__}"
            )
        inner = getattr(self.method, "trained_length", None)
        problems = positive(self, "trained_length")
        if self.trained_length is None and inner is None:
            problems.append(f"give trained_length: {type(self.method).__name__} has none of its own")
        if self.trained_length is not None and inner is not None and inner != self.trained_length:
            problems.append(f"trained_length is {self.trained_length} here and {inner} in the method")
        if self.form not in ("paper", "hf"):
            problems.append(f"form must be 'paper' or 'hf', got {self.form!r}")
        refuse(self, problems)

    @property
    def rotary_dim(self) -> int:
        return self.method.rotary_dim

    @property
    def base(self) -> float:
        return self.method.base

    @property
    def length_dependent(self) -> bool:
        return True

    @property
    def original_length(self) -> int:
        """The trained length, from here or from the method."""
        own = self.trained_length if self.trained_length is not None else getattr(self.method, "trained_length", None)
        return int(own or 0)

    def stretch(self, length: int | Tensor | None, *, device: torch.device | None = None) -> Tensor:
        """The factor at a length, float64 (B, 1) or (1,)."""
        trained, factor = self.original_length, self.method.factor
        rows = row_length(trained if length is None else length, device_of(length, device))
        if self.form == "hf":
            return factor * (rows / trained).clamp(min=1.0) - (factor - 1)
        return (rows / trained).clamp(min=factor)

    def frequencies(self, length: int | Tensor | None = None, *, device: torch.device | None = None) -> Frequencies:
        """The inner method at each row's own stretch."""
        device = device_of(length, device)
        return self.method.at_factor(self.stretch(length, device=device), device)


def dynamic_ntk(
    *, rotary_dim: int, base: float, trained_length: int, factor: float = 1.0, form: Literal["paper", "hf"] = "hf"
) -> Dynamic:
    """Dynamic NTK, by default in transformers' form."""
    return Dynamic(
        method=NTK(rotary_dim=rotary_dim, base=base, factor=factor), trained_length=trained_length, form=form
    )


def unscaled(method: FrequencyMethod) -> list[str]:
    """A problem where a method keeps some tokens unscaled, which a method over it would lose."""
    tokens = getattr(method, "unscaled_tokens", 0)
    return [f"unscaled_tokens is {tokens} in the method: only the encoding longrope applies it"] if tokens else []


@dataclass(frozen=True, kw_only=True)
class Resonance:
    """Resonance RoPE: wavelengths rounded to whole positions, after any method, so that every turn repeats exactly.

    Formula: ``theta = 2 pi / round(2 pi / theta')``; pairs that do not rotate stay so. Factors pass through.
    Phases of integer wavelengths are best taken of ``position mod wavelength``: `wavelengths` gives them.
    Source: Resonance RoPE (arXiv 2403.00071), section 4; sheryc/resonance_rope.
    """

    name: ClassVar[str] = "resonance"
    title: ClassVar[str] = "Resonance RoPE"
    source: ClassVar[str] = "arXiv 2403.00071"

    method: FrequencyMethod

    def __post_init__(self) -> None:
        refuse(self, unscaled(self.method))

    @property
    def rotary_dim(self) -> int:
        return self.method.rotary_dim

    @property
    def base(self) -> float | None:
        """The inner method's base, where it has one."""
        return getattr(self.method, "base", None)

    @property
    def length_dependent(self) -> bool:
        return self.method.length_dependent

    def wavelengths(self, length: int | Tensor | None = None, *, device: torch.device | None = None) -> Tensor:
        """Whole wavelengths in positions, float64; infinite for pairs that do not rotate."""
        return (2 * math.pi / self.method.frequencies(length, device=device).inv_freq).round()

    def frequencies(self, length: int | Tensor | None = None, *, device: torch.device | None = None) -> Frequencies:
        """The inner method's answer with rounded wavelengths (1 / infinity gives the 0 back)."""
        found = self.method.frequencies(length, device=device)
        return found._replace(inv_freq=2 * math.pi / (2 * math.pi / found.inv_freq).round())


@dataclass(frozen=True, kw_only=True)
class LogN:
    """A method with logits heated by the logarithm of each row's length.

    Formula: ``softmax_factor = max(1, ln l / ln L)``, by the row's length; for the form by each query's own position
    see `log_n_scale`. ``length=None`` is the trained length.
    Source: kexue 8823; CLEX (arXiv 2310.16450) uses the same factor on q.
    """

    name: ClassVar[str] = "log_n"
    title: ClassVar[str] = "Log-n scale"
    source: ClassVar[str] = "kexue 8823"

    method: FrequencyMethod
    trained_length: int

    def __post_init__(self) -> None:
        refuse(self, positive(self, "trained_length", at_least=2) + unscaled(self.method))

    @property
    def rotary_dim(self) -> int:
        return self.method.rotary_dim

    @property
    def length_dependent(self) -> bool:
        return self.method.length_dependent

    def frequencies(self, length: int | Tensor | None = None, *, device: torch.device | None = None) -> Frequencies:
        """The inner method's answer with its softmax factor multiplied."""
        device = device_of(length, device)
        found = self.method.frequencies(length, device=device)
        rows = row_length(self.trained_length if length is None else length, device)
        scale: Scale = (rows.log() / math.log(self.trained_length)).clamp(min=1.0)
        return found._replace(softmax_factor=found.softmax_factor * scale)
