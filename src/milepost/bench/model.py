"""Training of the ``quick`` preset's model: what a step costs beside the same model with torch's attention alone.

Steps are those of `milepost.train` on the built-in corpus, batch and length as in the preset. The yardstick is the same
model with plain `scaled_dot_product_attention` and no encoding; ``explicit mask`` hands torch the whole bias as a mask
instead, which is what a model does without a library like this.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.nn import functional as F

from milepost.attention import library
from milepost.bench.race import Row
from milepost.compare.run import load_data, model_config, train_config
from milepost.compare.settings import preset
from milepost.model import decoder
from milepost.positions import Positions
from milepost.terms import Terms
from milepost.train import train

ENCODINGS = ("mep", "mep-parameterized", "kerple-log", "fire", "alibi", "rope", "nope")
MASKED = ("mep", "mep-parameterized", "kerple-log", "fire", "alibi")
WARM, STEPS = 4, 40
"""Steps of a round that are not counted, and those that are."""

Attend = Callable[..., Tensor]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A model to train. attend: what replaces the model's attention; None keeps it."""

    name: str
    encoding: str
    attend: Attend | None = None


def plain(q: Tensor, k: Tensor, v: Tensor, positions: Positions, terms: Terms, **options: Any) -> Tensor:
    """torch's causal attention, whatever the terms say."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def explicit_mask(q: Tensor, k: Tensor, v: Tensor, positions: Positions, terms: Terms, **options: Any) -> Tensor:
    """torch's attention with bias and causality written out as a (B, H, Q, K) mask."""
    assert terms.bias is not None
    mask = terms.bias.dense().masked_fill(~positions.allowed()[:, None], float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype))


def variants() -> list[Variant]:
    """The first is what the others are compared with; without a compiled kernel masks are left to the other job."""
    found = [Variant("plain attention, no encoding", "nope", plain)]
    found += [Variant("milepost auto", encoding) for encoding in ENCODINGS]
    if library.unavailable() is None:
        found += [Variant("explicit mask", encoding, explicit_mask) for encoding in MASKED]
    return found


def measure(clock: Callable[[], float], rounds: int, progress: Callable[[float, str], None]) -> list[Row]:
    """One row a variant: the median step, tokens a second, and the ratio to the first variant's step, by rounds."""
    settings = preset("quick")
    corpus = load_data(settings)
    config = dataclasses.replace(train_config(settings, seed=0), steps=WARM + STEPS, checkpoint_every=0)
    found = variants()
    with tempfile.TemporaryDirectory() as folder, attending(found[0].attend):  # the first training of a process is slow
        shape = model_config(settings, found[0].encoding, vocab_size=corpus.vocab_size)
        step_seconds(shape, dataclasses.replace(config, steps=2 * WARM), corpus, Path(folder), clock)
    times: list[list[float]] = [[] for _ in found]
    for turn in range(rounds):
        for index, variant in enumerate(found):
            progress((turn + index / len(found)) / rounds, "training")
            shape = model_config(settings, variant.encoding, vocab_size=corpus.vocab_size)
            with tempfile.TemporaryDirectory() as folder, attending(variant.attend):
                times[index].append(step_seconds(shape, config, corpus, Path(folder), clock))
    rows = []
    for variant, mine in zip(found, times, strict=True):
        row: Row = {"name": variant.name, "encoding": variant.encoding, "milliseconds": 1e3 * statistics.median(mine)}
        row["spread"] = [1e3 * min(mine), 1e3 * max(mine)]
        row["tokens_per_second"] = settings.tokens_per_step / statistics.median(mine)
        ratios = [a / b for a, b in zip(mine, times[0], strict=True)]
        row |= {"ratio": statistics.median(ratios), "ratio_spread": [min(ratios), max(ratios)]}
        rows.append(row)
    return rows


def step_seconds(shape: Any, config: Any, corpus: Any, folder: Path, clock: Callable[[], float]) -> float:
    """The median time of a step of a training from scratch, after the first few."""
    moments: list[float] = []
    train(shape, config, corpus, folder, progress=lambda step, steps, loss: moments.append(clock()))
    steps = [b - a for a, b in zip(moments[:-1], moments[1:], strict=True)]
    return statistics.median(steps[WARM - 1 :])


def attending(function: Attend | None) -> AbstractContextManager[object]:
    """Meanwhile the model's layers attend with `function`; with None as ever."""
    return nullcontext() if function is None else patch.object(decoder, "attend", function)
