"""LongRoPE's search for one divisor per pair, on one machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from milepost.encodings.frequencies import NTK, Linear, Yarn
from milepost.evaluate import perplexity_by_length
from milepost.extend.attach import attach
from milepost.extend.probe import layer_rotations
from milepost.stretch.settings import Settings


def search_factors(
    model: Any,
    corpus: Any,
    settings: Settings,
    trained: int,
    target: int,
    *,
    regions: int = 4,
    done: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Options of ``longrope`` with the divisors that read training text of the target length best.

    An evolutionary search over one divisor per pair, held in [1, 1.25 s] and ascending from fast to slow pairs. It
    starts from the divisors of PI, NTK and YaRN; each generation keeps the best third and fills up with mutations (a
    quarter of the pairs, times 0.8 to 1.25) and crossings of them. Fitness is the loss on `regions` stretches of
    *training* text, so that the test text stays unseen.

    Source: LongRoPE (arXiv 2402.13753), section 3.2 and algorithm 1; its search also moves "the first n tokens
    unscaled", which no engine can store, and runs 40 generations of 64 on 5 texts: here those are settings.
    """
    rotation = next(r for r in layer_rotations(model).values() if r.method is not None)
    assert rotation.method is not None
    base, dim, factor = float(getattr(rotation.method, "base", 10000.0)), rotation.rotary_dim, target / trained
    plain = Linear(rotary_dim=dim, base=base, factor=1.0).frequencies().inv_freq
    rng = np.random.default_rng([settings.seed, dim])

    def divisors(method: Any) -> np.ndarray[Any, Any]:
        return np.asarray((plain / method.frequencies().inv_freq).tolist())

    seeds = [
        divisors(Linear(rotary_dim=dim, base=base, factor=factor)),
        divisors(NTK(rotary_dim=dim, base=base, factor=factor)),
        divisors(Yarn(rotary_dim=dim, base=base, factor=factor, trained_length=trained)),
    ]

    def tidy(values: np.ndarray[Any, Any]) -> tuple[float, ...]:
        held = np.maximum.accumulate(np.clip(values, 1.0, 1.25 * factor))
        return tuple(float(f"{x:.4f}") for x in held)

    texts = corpus.train.regions(size=target, count=regions, allow_fewer=True)
    scores: dict[tuple[float, ...], float] = {}
    total = settings.population * (settings.generations + 1)

    def options(found: tuple[float, ...]) -> dict[str, Any]:
        return {"short_factor": (1.0,) * len(found), "long_factor": found, "max_length": target, "factor": factor}

    def score(found: tuple[float, ...]) -> float:
        if found not in scores:
            with attach(model, "longrope", trained_length=trained, **options(found)):
                loss = perplexity_by_length(
                    model, corpus.train, texts, lengths=[target], measures=["windows"],
                    batch_tokens=settings.batch_tokens,
                )  # fmt: skip
            scores[found] = loss[0].mean
            if done is not None:
                done(min(len(scores), total), total)
        return scores[found]

    def mutate(parent: np.ndarray[Any, Any]) -> tuple[float, ...]:
        changed = rng.random(len(parent)) < 0.25
        return tidy(np.where(changed, parent * rng.uniform(0.8, 1.25, len(parent)), parent))

    def cross(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> tuple[float, ...]:
        return tidy(np.where(rng.random(len(a)) < 0.5, a, b))

    people = [tidy(seed) for seed in seeds]
    while len(people) < settings.population:
        people.append(mutate(seeds[int(rng.integers(len(seeds)))]))
    for _ in range(settings.generations):
        kept = sorted(set(people), key=score)[: max(2, settings.population // 3)]
        people = list(kept)
        while len(people) < settings.population:
            a, b = (np.asarray(kept[int(i)]) for i in rng.integers(len(kept), size=2))
            people.append(mutate(a) if rng.random() < 0.6 else cross(a, b))
    return options(min(set(people), key=score))
