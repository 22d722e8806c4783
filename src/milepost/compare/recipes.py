"""Training recipes: the same encoding trained short, long, by a length curriculum or on mixed lengths, at equal tokens.

`--methods rope@short,rope@long,rope@curriculum,rope@mixed` compares them. L is ``--train-length``; every recipe sees
``steps * batch_size * accumulation * L`` tokens, and every step the same number of them.

    short       windows of L/4 alone
    long        windows of L alone, which is what a method without a recipe means
    curriculum  half of the tokens at L/4, then a quarter at L/2, then a quarter at L
    mixed       the same shares, drawn at random step by step
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from milepost.compare.settings import Settings

RECIPES = ("short", "long", "curriculum", "mixed")
SHARES = ((4, 0.5), (2, 0.25), (1, 0.25))
"""(divisor of L, share of the tokens), from short to long."""


def split(method: str) -> tuple[str, str | None]:
    """``"alibi@mixed"`` -> ``("alibi", "mixed")``.

    Raises ValueError for a recipe that does not exist.
    """
    encoding, at, recipe = method.partition("@")
    if not at:
        return method, None
    if recipe not in RECIPES:
        raise ValueError(f"no recipe is named {recipe!r}; there are {', '.join(RECIPES)}")
    return encoding, recipe


def lengths(settings: Settings, recipe: str | None) -> dict[str, Any]:
    """What a recipe changes in `milepost.train.TrainConfig`.

    Raises ValueError when the trained length cannot be quartered.
    """
    longest = settings.train_length
    if recipe in (None, "long"):
        return {}
    if longest % 4 or longest < 8:
        raise ValueError(f"a recipe needs --train-length in multiples of 4, at least 8; got {longest}")
    if recipe == "short":
        return {"length": longest // 4, "batch_size": settings.batch_size * 4}
    if recipe == "mixed":
        return {"mixed_lengths": {longest // divisor: share for divisor, share in SHARES}}
    from milepost.data import Stage

    steps = [max(1, round(share * settings.steps)) for _, share in SHARES]
    steps[-1] = max(1, settings.steps - sum(steps[:-1]))
    stages = tuple(
        Stage(longest // divisor, count * settings.tokens_per_step)
        for (divisor, _), count in zip(SHARES, steps, strict=True)
    )
    return {"stages": stages, "steps": None}
