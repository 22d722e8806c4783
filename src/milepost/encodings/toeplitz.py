"""The general Toeplitz bias: one learned number per head and signed distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from milepost.encoding import Encoding, EncodingConfig, register
from milepost.kernels import new_parameter
from milepost.positions import Positions
from milepost.terms import Terms, distance_bias


@dataclass(frozen=True, kw_only=True)
class ToeplitzConfig(EncodingConfig):
    """Options of :class:`Toeplitz`.

    Attributes:
        num_heads: number of attention heads.
        trained_length: L: distances from ``-(L-1)`` to ``L-1`` have a number each.
        beyond: what longer distances do: ``"raise"``, or ``"clamp"`` to the last number on their side.
        std: standard deviation of the normal start.
    """

    num_heads: int
    trained_length: int
    beyond: Literal["raise", "clamp"] = "clamp"
    std: float = 0.02

    def __post_init__(self) -> None:
        if self.trained_length < 1:
            raise ValueError(f"trained_length is at least 1; got {self.trained_length}")
        if self.beyond not in ("raise", "clamp"):
            raise ValueError(f"beyond is 'raise' or 'clamp'; got {self.beyond!r}")
        if self.std < 0:
            raise ValueError(f"std is not negative; got {self.std}")


@register(
    "toeplitz",
    title="Toeplitz bias",
    family="bias",
    manifestation="bias",
    learnable=True,
    integration="add",
    injection="every",
    source="Press, Smith, Lewis 2021 and Chi et al. 2022 name the general form; Liutkus et al. 2021 (arXiv 2105.08399)",
    summary="A free number per head and distance: the most general static relative bias, with nothing to say beyond L.",
)
class Toeplitz(Encoding):
    """A free bias per signed distance and head: ``b_h(i - j) = T[h, clip(i - j, -(L-1), L-1) + L - 1]``.

    Every static bias of this library is a special case within the trained length. Beyond it, a table has no answer: an
    error, or the number of the farthest trained distance.

    Shapes: a :class:`~milepost.terms.DistanceBias` of ``(H, n)``; the table is ``(H, 2L - 1)``, start ``N(0, 0.02)``.
    Raises ValueError for a distance of L or more with ``beyond="raise"`` (compiled code, which cannot raise for mapped
    positions, clamps those).
    Source: our reading of "a learned bias for each relative position"; start and modes are our choice.
    """

    Config = ToeplitzConfig
    config: ToeplitzConfig

    def setup(self) -> None:
        self.table = new_parameter(self.config.num_heads, 2 * self.config.trained_length - 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.table.normal_(0.0, self.config.std)

    def converges(self) -> list[bool]:
        """For each head, whether the sum of ``exp(bias)`` over all distances is finite: never, the table ends flat."""
        return [False] * self.config.num_heads

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        length = self.config.trained_length
        if positions.slot_distance:
            first, stop = positions.distance_range()
            if self.config.beyond == "raise" and max(stop - 1, -first) >= length:
                raise self._too_far(max(stop - 1, -first))

        def bias(distance: Tensor) -> Tensor:
            if self.config.beyond == "raise" and not positions.slot_distance and not torch.compiler.is_compiling():
                if distance.numel() and int(distance.abs().max()) >= length:
                    raise self._too_far(int(distance.abs().max()))
            # Mapped positions may be fractions: the nearest distance serves.
            nearest = distance.round().long() if distance.is_floating_point() else distance
            return self.table[:, nearest.clamp(1 - length, length - 1) + length - 1]

        return Terms(bias=distance_bias(bias, positions))

    def _too_far(self, distance: int) -> ValueError:
        return ValueError(
            f"a distance of {distance} is beyond the table of {self.name}, trained for {self.config.trained_length} "
            "tokens; beyond='clamp' uses the farthest trained distance"
        )
