"""What every frequency method returns, and the ladder they all start from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

Scale = float | Tensor
"""A plain number, or one number a row: a tensor of shape (B, 1)."""


class Frequencies(NamedTuple):
    """What one method answers for one length.

    ``inv_freq``: float64, radians per position of each pair; (P,), or (B, P) where the method reads the rows' lengths.
    A phase is ``position * inv_freq``; keep it in float32 or better and cast the cosine and sine last.
    ``attention_factor``: multiplies cosine and sine of queries *and* keys, so rotated logits carry its square.
    ``softmax_factor``: multiplies the softmax scale, once, on whole logits (rotated channels or not).
    Both factors are floats, or (B, 1) tensors where rows differ.
    """

    inv_freq: Tensor
    attention_factor: Scale = 1.0
    softmax_factor: Scale = 1.0


@runtime_checkable
class FrequencyMethod(Protocol):
    """A pure function of (its own fields, length): no state, no cache, no branch on a length.

    ``frequencies(length)`` takes ``None`` (the trained length), an int, a 0-dim tensor, or (B,) lengths, one a row.
    A row's answer depends on nothing but that row's length.
    """

    @property
    def rotary_dim(self) -> int:
        """Number of rotated channels (twice the number of pairs)."""
        ...

    @property
    def length_dependent(self) -> bool:
        """True where frequencies change with the length: rotated keys must then not be cached."""
        ...

    def frequencies(self, length: int | Tensor | None = None, *, device: torch.device | None = None) -> Frequencies:
        """Frequencies at a length (shapes in `Frequencies`)."""
        ...


def is_number(value: object) -> bool:
    """A finite real number that a float can hold; bool is not one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) < 2**1023


def refuse(owner: object, problems: Sequence[str]) -> None:
    """Raise one ValueError with every problem of a configuration in it."""
    if problems:
        raise ValueError(f"{type(owner).__name__}: " + "; ".join(problems))


def positive(owner: object, *names: str, at_least: float | None = None) -> list[str]:
    """Problems of the named fields that are not finite numbers above 0 (or not below ``at_least``)."""
    problems = []
    for name in names:
        value: Any = getattr(owner, name)
        if value is None:
            continue
        if not is_number(value):
            problems.append(f"{name} must be a finite number, got {value!r}")
        elif at_least is not None and value < at_least:
            hint = f" (inverted? 1/{name} = {1 / value:g})" if name == "factor" and value > 0 else ""
            problems.append(f"{name} must be at least {at_least:g}, got {value!r}{hint}")
        elif value <= 0:
            problems.append(f"{name} must be above 0, got {value!r}")
    return problems


def pair_index(rotary_dim: int, device: torch.device | None) -> Tensor:
    """Pair numbers 0..P-1, float64."""
    return torch.arange(rotary_dim // 2, dtype=torch.float64, device=device)


def ladder(rotary_dim: int, base: Scale, device: torch.device | None) -> Tensor:
    """``base^(-2p/d)``, float64; (P,) for a plain base, (B, P) for a (B, 1) base."""
    exponent = pair_index(rotary_dim, device) * (-2.0 / rotary_dim)
    if isinstance(base, Tensor):
        return torch.pow(base.to(torch.float64), exponent)
    return torch.pow(torch.full((), float(base), dtype=torch.float64, device=device), exponent)


def row_length(length: int | Tensor, device: torch.device | None) -> Tensor:
    """A length as float64 with a trailing axis to broadcast against pairs: (B, 1), or (1,) for one length."""
    if isinstance(length, Tensor):
        return length.to(torch.float64).unsqueeze(-1)
    return torch.full((1,), length, dtype=torch.float64, device=device)


def device_of(length: int | Tensor | None, device: torch.device | None) -> torch.device | None:
    """Where to compute: on the asked device, else beside the lengths."""
    if device is not None:
        return device
    return length.device if isinstance(length, Tensor) else None


def at_least(value: Scale, floor: float) -> Scale:
    """``max(value, floor)`` without a branch on a tensor."""
    return value.clamp(min=floor) if isinstance(value, Tensor) else max(value, floor)


def log(value: Scale) -> Scale:
    """Natural logarithm of a number or a tensor."""
    return value.log() if isinstance(value, Tensor) else math.log(value)


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Base of the methods that start from the ladder ``theta_p = base^(-2p/rotary_dim)``."""

    rotary_dim: int
    base: float

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]

    def __post_init__(self) -> None:
        refuse(self, self.problems())

    def problems(self) -> list[str]:
        """Everything wrong with the fields, in words."""
        problems = []
        if isinstance(self.rotary_dim, bool) or not isinstance(self.rotary_dim, int):
            problems.append(f"rotary_dim must be an int, got {self.rotary_dim!r}")
        elif self.rotary_dim < 2 or self.rotary_dim % 2:
            problems.append(f"rotary_dim must be even and at least 2 (channels rotate in pairs), got {self.rotary_dim}")
        elif self.rotary_dim > 65536:
            problems.append(f"rotary_dim {self.rotary_dim} is no width of a head")
        if not is_number(self.base) or self.base <= 1:
            problems.append(f"base (rope_theta) must be a finite number above 1, got {self.base!r}")
        return problems

    @property
    def length_dependent(self) -> bool:
        """Whether frequencies change with the length."""
        return False

    def plain(self, device: torch.device | None = None) -> Tensor:
        """The unscaled ladder, float64 (P,)."""
        return ladder(self.rotary_dim, self.base, device)


@dataclass(frozen=True, kw_only=True)
class Scalable(Ladder):
    """Base of the methods that stretch by one ``factor``; `Dynamic` drives them with a factor per row."""

    factor: float = 1.0

    def problems(self) -> list[str]:
        return super().problems() + positive(self, "factor", at_least=1.0)

    def at_factor(self, factor: Scale, device: torch.device | None = None) -> Frequencies:
        """Frequencies stretched by ``factor`` (a number, or (B, 1)) in place of the field of that name."""
        raise TypeError(f"{type(self).__name__} does not say how it stretches: define at_factor(factor, device)")

    def frequencies(self, length: int | Tensor | None = None, *, device: torch.device | None = None) -> Frequencies:
        """Frequencies of this method; they do not depend on the length."""
        return self.at_factor(self.factor, device_of(length, device))


def check_inv_freq(
    method: FrequencyMethod, inv_freq: Tensor, *, length: int | None = None, tolerance: float = 1e-5
) -> None:
    """Raise unless ``inv_freq``, read from a loaded model, is what ``method`` asks for.

    A scaling named in a config and dropped on the way is invisible on short prompts; this finds it at load. Raises
    ValueError when the number of pairs differs, when the tensor is the plain unscaled ladder although the method
    stretches it, or when any pair is off by more than ``tolerance`` relative (float32 buffers keep about 1e-7).
    """
    wanted = method.frequencies(length).inv_freq.flatten()
    found = inv_freq.detach().to(device=wanted.device, dtype=torch.float64).flatten()
    if found.shape != wanted.shape:
        raise ValueError(
            f"the model rotates {found.numel()} pairs, the method asks for {wanted.numel()}: "
            "check head_dim and partial_rotary_factor"
        )

    def far(other: Tensor) -> Tensor:
        return (found - other).abs() > tolerance * other.abs().clamp(min=1e-300)

    wrong = far(wanted)
    if not bool(wrong.any()):
        return
    base = getattr(method, "base", None)
    if isinstance(base, float | int) and not bool(far(ladder(method.rotary_dim, base, wanted.device)).any()):
        raise ValueError(f"the model's inv_freq is the plain, unscaled ladder: the scaling {method!r} was dropped")
    pair = int(wrong.nonzero()[0])
    raise ValueError(
        f"inv_freq of pair {pair} is {float(found[pair]):.9g}, {type(method).__name__} gives {float(wanted[pair]):.9g} "
        f"({int(wrong.sum())} of {wrong.numel()} pairs differ by more than {tolerance:g})"
    )
