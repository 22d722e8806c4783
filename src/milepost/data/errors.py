"""Errors of the data layer."""

from __future__ import annotations


class DataError(ValueError):
    """Data that cannot be used as asked: missing, empty, unreadable or too short. The message says how to mend it."""


class FillError(DataError):
    """A prompt that is much shorter than its cell claims.

    `built` is the length that was reached, `target` the length that was asked for; report the first, never the second.
    """

    def __init__(self, built: int, target: int, min_fill: float) -> None:
        self.built = built
        self.target = target
        self.min_fill = min_fill
        super().__init__(
            f"the context holds {built} tokens of the {target} asked for (fill {built / target:.3f}, at least "
            f"{min_fill} needed): give more filler text or ask for a length of at most {built}"
        )

    def __reduce__(self) -> tuple[type[FillError], tuple[int, int, float]]:
        return type(self), (self.built, self.target, self.min_fill)
