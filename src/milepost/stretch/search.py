"""LongRoPE's search for one divisor per pair, on one machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from milepost.encodings.frequencies import NTK, Linear, Yarn
from milepost.evaluate import perplexity_by_length
from milepost.extend.attach import attach
from milepost.extend.probe import layer_rotations
from milepost.stretch.settings import Settings

Candidate = tuple[int, tuple[float, ...]]
"""A number of unscaled tokens, and one divisor a pair."""

UNSCALED = (0, 1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 64, 128, 256)
"""The numbers of unscaled tokens that the paper searches among (arXiv 2402.13753)."""


def search_factors(
    model: Any,
    corpus: Any,
    settings: Settings,
    trained: int,
    target: int,
    *,
    regions: int = 4,
    unscaled: Sequence[int] = (0,),
    done: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Options of ``longrope`` with the divisors that read training text of the target length best.

    An evolutionary search over one divisor per pair, held in [1, 1.25 s] and ascending from fast to slow pairs. It
    starts from the divisors of PI, NTK and YaRN; each generation keeps the best third and fills up with mutations (a
    quarter of the pairs, times 0.8 to 1.25) and crossings of them. Fitness is the loss on `regions` stretches of
    *training* text, so that the test text stays unseen. ``unscaled``: the numbers of first tokens that may stay
    unscaled, among which the search moves too; no configuration can store another than 0.

    Source: LongRoPE (arXiv 2402.13753), section 3.2 and algorithm 1, with 40 generations of 64 on 5 texts: here those
    are settings.
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
    scores: dict[Candidate, float] = {}
    total = settings.population * (settings.generations + 1)

    def options(found: Candidate) -> dict[str, Any]:
        first, divided = found
        lists = {"short_factor": (1.0,) * len(divided), "long_factor": divided}
        return {**lists, "max_length": target, "factor": factor, "unscaled_tokens": first}

    def score(found: Candidate) -> float:
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

    def choice(first: int) -> int:
        """The number of unscaled tokens of a mutant: another one as often as a divisor changes."""
        moved = len(unscaled) > 1 and rng.random() < 0.25
        return int(unscaled[int(rng.integers(len(unscaled)))]) if moved else first

    def mutate(parent: Candidate) -> Candidate:
        values = np.asarray(parent[1])
        changed = rng.random(len(values)) < 0.25
        return choice(parent[0]), tidy(np.where(changed, values * rng.uniform(0.8, 1.25, len(values)), values))

    def cross(a: Candidate, b: Candidate) -> Candidate:
        first = a[0] if a[0] == b[0] or rng.random() < 0.5 else b[0]
        left, right = np.asarray(a[1]), np.asarray(b[1])
        return first, tidy(np.where(rng.random(len(left)) < 0.5, left, right))

    people = [(int(unscaled[0]), tidy(seed)) for seed in seeds]
    while len(people) < settings.population:
        people.append(mutate(people[int(rng.integers(len(seeds)))]))
    for _ in range(settings.generations):
        kept = sorted(set(people), key=score)[: max(2, settings.population // 3)]
        people = list(kept)
        while len(people) < settings.population:
            a, b = (kept[int(i)] for i in rng.integers(len(kept), size=2))
            people.append(mutate(a) if rng.random() < 0.6 else cross(a, b))
    return options(min(set(people), key=score))
