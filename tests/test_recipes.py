from __future__ import annotations

import pytest

from milepost.compare import SettingsError, preset, recipes
from milepost.compare.run import train_config


@pytest.mark.parametrize("recipe", [None, *recipes.RECIPES])
def test_every_recipe_sees_the_same_tokens(recipe: str | None) -> None:
    settings = preset("tiny", train_length=64, steps=40)
    config = train_config(settings, seed=0, recipe=recipe)
    plan = config.plan()
    steps = settings.steps if config.steps is not None else plan.total_steps
    lengths = [plan.length(step) for step in range(steps)]
    assert steps == settings.steps
    assert config.items_per_step() * (16 if recipe == "short" else 64) == settings.tokens_per_step
    wanted = {"short": {16}, "long": {64}, None: {64}}.get(recipe, {16, 32, 64})
    assert set(lengths) == wanted
    if recipe == "curriculum":
        assert lengths == sorted(lengths)
        assert [lengths.count(n) for n in (16, 32, 64)] == [20, 10, 10]


def test_recipes_are_checked_before_anything_runs() -> None:
    assert recipes.split("rope:base=500@mixed") == ("rope:base=500", "mixed")
    assert recipes.split("rope") == ("rope", None)
    preset("tiny", methods=("alibi@mixed", "alibi@short")).check()
    with pytest.raises(SettingsError, match="no recipe is named 'long-ish'; there are short, long"):
        preset("tiny", methods=("alibi@long-ish",)).check()
    with pytest.raises(SettingsError, match="multiples of 4, at least 8; got 30"):
        preset("tiny", methods=("alibi@short",), train_length=30, test_lengths=(30, 60)).check()
