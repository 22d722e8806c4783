"""How far a model can be read: perplexity and passkey retrieval, with stated thresholds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from milepost.data import Corpus, PasskeyTask
from milepost.evaluate import measure_lengths, passkey_by_length


@dataclass(frozen=True)
class UsableLength:
    """The longest length at which every shorter one is usable too, and why the next is not.

    Attributes:
        length: in tokens; 0 when not even the shortest measured length is usable.
        reason: what stopped it, in words.
        perplexity: length -> perplexity.
        passkey: length -> share of exact answers; empty without passkey.
    """

    length: int
    reason: str
    perplexity: Mapping[int, float]
    passkey: Mapping[int, float]

    def __str__(self) -> str:
        return f"usable to {self.length} tokens: {self.reason}"


def usable_length(
    model: Any,
    corpus: Corpus,
    *,
    trained: int,
    lengths: Sequence[int],
    task: PasskeyTask | None = None,
    margin: float = 0.10,
    passkey_floor: float = 0.90,
    regions: int = 16,
    prompts: int = 24,
    seed: int = 0,
    batch_tokens: int = 8192,
) -> UsableLength:
    """The longest of ``lengths`` at which a model is usable, with every shorter one.

    Usable: perplexity of the same last targets, with that much context, within ``margin`` of what it is with the
    trained length as context; and, where a ``task`` is given, at least ``passkey_floor`` of ``prompts`` answered
    exactly. Works for any model that `milepost.evaluate` can measure, an attached encoding included.

    Raises ValueError when the trained length is not among ``lengths``.
    """
    wanted = sorted(set(lengths))
    if trained not in wanted:
        raise ValueError(f"lengths must contain the trained length {trained}; got {wanted}")
    text = corpus.test.regions(size=wanted[-1], count=regions, allow_fewer=True)
    measured = measure_lengths(
        model, corpus.test, text, lengths=wanted, measures=["last"], last=max(1, wanted[0] // 2),
        batch_tokens=batch_tokens,
    )  # fmt: skip
    perplexity = {row.length: row.perplexity for row in measured.lengths}
    passkey: dict[int, float] = {}
    if task is not None:
        possible = [length for length in wanted if length >= task.min_length]
        found = passkey_by_length(
            model, task, lengths=possible, prompts=prompts, seed=seed, batch_tokens=batch_tokens
        )
        passkey = {row.asked: row.exact for row in found}
    return judge(perplexity, passkey, trained=trained, margin=margin, passkey_floor=passkey_floor)


def judge(
    perplexity: Mapping[int, float],
    passkey: Mapping[int, float],
    *,
    trained: int,
    margin: float,
    passkey_floor: float,
    reference: float | None = None,
) -> UsableLength:
    """`usable_length` of measurements that exist already; ``reference``: the perplexity that margin is counted from."""
    base = perplexity[trained] if reference is None else reference
    usable, reason = 0, "no measured length fails"
    for length in sorted(perplexity):
        if length > trained and perplexity[length] > base * (1 + margin):
            reason = (
                f"at {length} perplexity is {perplexity[length]:.3g}, "
                f"{100 * (perplexity[length] / base - 1):.0f} % above the {base:.3g} of the trained length"
            )
            break
        if length in passkey and passkey[length] < passkey_floor:
            reason = f"at {length} passkey retrieval is {passkey[length]:.0%}, below {passkey_floor:.0%}"
            break
        usable = length
    return UsableLength(usable, reason, dict(perplexity), dict(passkey))
