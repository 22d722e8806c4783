"""Passkey retrieval by length and depth: what fast decay costs, and perplexity hides."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from milepost.data import DataError, PasskeyPrompt, PasskeyTask
from milepost.evaluate.perplexity import Done, device_of, evaluating
from milepost.evaluate.stats import Interval, wilson_interval


@dataclass(frozen=True)
class PasskeyResult:
    """Answers at one length.

    length: mean real length of the prompts in tokens, answer included; asked: the length asked for.
    token: share of answer tokens that are right given the right ones before them; exact: answers right in every token,
    which is what greedy decoding would give.
    depths, hits: (prompts,) depth of the needle and whether the answer was exact.
    """

    asked: int
    length: int
    prompts: int
    token: float
    exact: float
    depths: tuple[float, ...]
    hits: tuple[bool, ...]

    def interval(self, *, level: float = 0.95) -> Interval:
        """The exact share with its Wilson interval."""
        return wilson_interval(sum(self.hits), self.prompts, level=level)

    def by_depth(self, bins: int = 5) -> list[tuple[float, float, int, float]]:
        """(low, high, prompts, exact share) of equal bins of depth that hold a prompt."""
        rows = []
        place = [min(int(depth * bins), bins - 1) for depth in self.depths]
        for number in range(bins):
            inside = [hit for at, hit in zip(place, self.hits, strict=True) if at == number]
            if inside:
                rows.append((number / bins, (number + 1) / bins, len(inside), sum(inside) / len(inside)))
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Plain values for results.json."""
        return {
            "asked": self.asked,
            "length": self.length,
            "prompts": self.prompts,
            "token": self.token,
            "exact": self.exact,
            "depths": list(self.depths),
            "hits": list(self.hits),
        }


def passkey_by_length(
    model: Any,
    task: PasskeyTask,
    *,
    lengths: Sequence[int],
    prompts: int = 32,
    depths: Sequence[float] | None = None,
    seed: int = 0,
    batch_tokens: int = 8192,
    done: Done | None = None,
    refused: dict[int, str] | None = None,
) -> list[PasskeyResult]:
    """Accuracy of the answer at each length.

    prompts: number at each length, their depths spread evenly from start to end, or cycled through `depths`. The
    same (length, seed) gives the same prompts to every model. One pass with the answer in place tells both accuracies.
    refused: where given, a length that the model refuses is left out and its reason put here.
    Raises `DataError` for no lengths or prompts, or a length that cannot hold a prompt.
    """
    chosen = sorted(set(lengths))
    if not chosen or prompts < 1:
        raise DataError(f"passkey needs at least one length and one prompt; got {list(chosen)} and {prompts}")
    results = []
    total, read = sum(chosen) * prompts, 0
    with evaluating(model):
        for length in chosen:
            made = task.prompts(length, count=prompts, seed=seed, depths=depths)
            right: list[npt.NDArray[np.bool_]] = []
            try:
                for group in _groups(made, batch_tokens):
                    right += _answers(model, group)
                    read += sum(map(len, group))
                    if done is not None:
                        done(min(read, total), total)
            except ValueError as error:
                if refused is None:
                    raise
                refused[length] = str(error)
                continue
            tokens = np.concatenate(right)
            hits = tuple(bool(row.all()) for row in right)
            results.append(
                PasskeyResult(
                    asked=length,
                    length=round(sum(map(len, made)) / len(made)),
                    prompts=len(made),
                    token=float(tokens.mean()),
                    exact=sum(hits) / len(hits),
                    depths=tuple(float(prompt.depth) for prompt in made),
                    hits=hits,
                )
            )
    return results


def _groups(prompts: Sequence[PasskeyPrompt], batch_tokens: int) -> list[list[PasskeyPrompt]]:
    """Batches of prompts of the same length and answer length, so that nothing is padded; order is kept."""
    groups: list[list[PasskeyPrompt]] = []
    for prompt in prompts:
        shape = (len(prompt), len(prompt.answer))
        last = groups[-1] if groups else None
        if last and shape == (len(last[0]), len(last[0].answer)) and (len(last) + 1) * len(prompt) <= batch_tokens:
            last.append(prompt)
        else:
            groups.append([prompt])
    return groups


def _answers(model: Any, prompts: Sequence[PasskeyPrompt]) -> list[npt.NDArray[np.bool_]]:
    """Which tokens of each answer are the model's first choice."""
    ids = torch.from_numpy(np.stack([prompt.input_ids for prompt in prompts])).to(device_of(model))
    answer = len(prompts[0].answer)
    options: dict[str, Any] = {}
    forward = getattr(model, "forward", model)
    names = inspect.signature(forward).parameters
    if "logits_to_keep" in names:
        options["logits_to_keep"] = answer + 1
    if "use_cache" in names:
        options["use_cache"] = False
    output = model(input_ids=ids, **options)
    logits = output if isinstance(output, Tensor) else output.logits
    guesses = logits[:, -answer - 1 : -1].argmax(-1)
    right: npt.NDArray[np.bool_] = (guesses == ids[:, -answer:]).cpu().numpy()
    return list(right)
