from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from milepost.data import DataError, PasskeyTask, load_corpus
from milepost.evaluate import (
    LengthLoss,
    NotFinite,
    bootstrap_mean,
    loss_by_position,
    mean_and_spread,
    measure_lengths,
    paired_difference,
    passkey_by_length,
    perplexity_by_length,
    token_losses,
    wilson_interval,
)

VOCAB = 258


@pytest.fixture
def corpus() -> Any:
    generator = np.random.default_rng(0)
    texts = {f"document {i}": bytes(generator.integers(97, 123, 400 + 30 * i).tolist()).decode() for i in range(30)}
    return load_corpus(texts, cache=False, test_fraction=0.3)


class Counting(nn.Module):
    """Gives a target with c tokens before it in the window the loss log(1 + c), whatever the text; the last log 258."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0

    def forward(self, input_ids: Tensor) -> Any:
        self.tokens += input_ids.numel()
        rows, length = input_ids.shape
        following = input_ids[:, 1:]  # what must be predicted, but for the last
        share = 1.0 / (2.0 + torch.arange(length - 1, dtype=torch.float64))
        logits = torch.full((rows, length, VOCAB), -math.inf, dtype=torch.float64)
        logits[:, :-1] = ((1 - share) / (VOCAB - 1)).log()[None, :, None]
        logits.scatter_(2, following[..., None], share.log()[None, :, None].expand(rows, -1, 1))
        logits[:, -1] = -math.log(VOCAB)
        return SimpleNamespace(logits=logits)

    @staticmethod
    def losses(length: int) -> list[float]:
        return [*(math.log(2 + place) for place in range(length - 1)), math.log(VOCAB)]


def test_a_uniform_model_has_the_vocabulary_as_perplexity_in_every_measure(corpus: Any) -> None:
    regions = corpus.test.regions(size=64, count=6)

    def uniform(*, input_ids: Tensor) -> Tensor:
        return torch.zeros(*input_ids.shape, VOCAB)

    rows = perplexity_by_length(
        uniform, corpus.test, regions, lengths=(8, 24, 64), measures=("windows", "last", "sliding")
    )
    assert [(row.measure, row.length) for row in rows] == [
        (measure, length) for measure in ("windows", "last", "sliding") for length in (8, 24, 64)
    ]
    for row in rows:
        assert row.targets == (6 * 8 if row.measure == "last" else 6 * 64)
        assert math.isclose(row.perplexity, VOCAB, rel_tol=1e-5)
        assert math.isclose(row.interval().low, row.interval().high, rel_tol=1e-6)


def test_loss_depends_on_context_as_the_measure_says(corpus: Any) -> None:
    """The early-token effect is in (a), not in (b): with more context before the same targets, loss moves alone."""
    regions = corpus.test.regions(size=64, count=4)
    model = Counting()
    measured = measure_lengths(model, corpus.test, regions, lengths=(16, 64), measures=("windows", "last"), last=4)
    by = {(row.measure, row.length): row for row in measured.lengths}

    for length in (16, 64):
        losses = Counting.losses(length)
        assert by["windows", length].targets == 4 * 64
        assert math.isclose(by["windows", length].mean, sum(losses) / length, rel_tol=1e-6)
        assert by["last", length].targets == 4 * 4
        assert math.isclose(by["last", length].mean, sum(losses[-4:]) / 4, rel_tol=1e-6)
    assert [p.low for p in measured.positions] == [1, 9, 17, 33]
    assert sum(p.targets for p in measured.positions) == by["windows", 64].targets


def test_windows_that_several_measures_need_are_read_once(corpus: Any) -> None:
    regions = corpus.test.regions(size=64, count=4)
    model = Counting()
    seen: list[tuple[int, int]] = []
    measure_lengths(
        model, corpus.test, regions, lengths=(16, 64), measures=("windows", "last", "sliding"), stride=16,
        done=lambda read, total: seen.append((read, total)),
    )  # fmt: skip
    assert model.tokens == 2 * 4 * 64 == seen[-1][0] == seen[-1][1]


def test_batches_change_nothing(corpus: Any) -> None:
    regions = corpus.test.regions(size=64, count=5)
    table = torch.randn(VOCAB, VOCAB)

    def bigram(*, input_ids: Tensor) -> Tensor:
        return table[input_ids]

    one, many = (
        perplexity_by_length(bigram, corpus.test, regions, lengths=(16, 48), batch_tokens=n) for n in (1, 10_000)
    )
    for a, b in zip(one, many, strict=True):
        np.testing.assert_allclose(a.nats, b.nats, rtol=1e-6)
    # a bigram model sees one token of context: every length gives the same loss
    assert math.isclose(one[0].mean, one[1].mean, rel_tol=1e-6)
    text = corpus.test.stream[corpus.test.starts[regions.document[0]] + regions.start[0] :][:65].astype(np.int64)
    expected = F.cross_entropy(table[text[:-1]], torch.from_numpy(text[1:]), reduction="sum")
    assert math.isclose(one[0].nats[0], float(expected), rel_tol=1e-5)


def test_results_survive_json(corpus: Any) -> None:
    loss = LengthLoss("windows", 8, np.array([1.5, 2.5]), np.array([2, 3]), np.array([4, 4]))
    again = LengthLoss.from_dict(loss.to_dict())
    assert again.to_dict() == loss.to_dict()
    assert again.mean == 0.8


def test_a_loss_that_is_not_finite_is_an_error_with_its_place(corpus: Any) -> None:
    regions = corpus.test.regions(size=32, count=2)

    def broken(*, input_ids: Tensor) -> Tensor:
        logits = torch.zeros(*input_ids.shape, VOCAB)
        logits[:, 5] = float("nan")
        return logits

    with pytest.raises(NotFinite, match="position 5 of a window of 16"):
        perplexity_by_length(broken, corpus.test, regions, lengths=(16,))


def test_a_length_that_the_model_refuses_is_left_out_or_raised(corpus: Any) -> None:
    regions = corpus.test.regions(size=32, count=2)

    def table_of_16(*, input_ids: Tensor) -> Tensor:
        if input_ids.shape[1] > 16:
            raise ValueError("position 16 is outside the table of 16 rows")
        return torch.zeros(*input_ids.shape, VOCAB)

    refused: dict[int, str] = {}
    rows = perplexity_by_length(table_of_16, corpus.test, regions, lengths=(16, 32), refused=refused)
    assert [row.length for row in rows] == [16, 16]
    assert "table of 16" in refused[32]
    with pytest.raises(ValueError, match="table of 16"):
        perplexity_by_length(table_of_16, corpus.test, regions, lengths=(16, 32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": ()}, "no test length"),
        ({"lengths": (8,), "measures": ("window",)}, "windows, last, sliding"),
        ({"lengths": (128,)}, "128 must lie between"),
        ({"lengths": (8,), "last": 9}, "targets=9"),
    ],
)
def test_wrong_questions(corpus: Any, options: dict[str, Any], message: str) -> None:
    regions = corpus.test.regions(size=32, count=2)
    with pytest.raises(DataError, match=message):
        perplexity_by_length(lambda input_ids: torch.zeros(*input_ids.shape, VOCAB), corpus.test, regions, **options)


def test_training_mode_is_put_back(corpus: Any) -> None:
    model = Counting().train()
    loss_by_position(model, corpus.test, corpus.test.regions(size=16, count=2), length=16)
    assert model.training


def test_token_losses_equal_cross_entropy_in_half_precision_logits() -> None:
    logits = torch.randn(2, 5, 7).to(torch.bfloat16)
    targets = torch.randint(0, 7, (2, 5))
    found = token_losses(lambda input_ids: logits, torch.zeros(2, 5, dtype=torch.long), targets)
    expected = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view(2, 5)
    torch.testing.assert_close(found, expected)


# ---- statistics ----


def test_intervals_come_from_documents_not_from_tokens() -> None:
    generator = np.random.default_rng(1)
    effect = np.repeat(generator.normal(0, 1, 20), 10)  # ten regions of each of twenty documents, all alike
    groups = np.repeat(np.arange(20), 10)
    counts = np.full(200, 5)
    clustered = bootstrap_mean(effect * 5, counts, groups)
    as_if_independent = bootstrap_mean(effect * 5, counts, np.arange(200))
    assert math.isclose(clustered.value, effect.mean())
    assert clustered.high - clustered.low > 2.5 * (as_if_independent.high - as_if_independent.low)
    # the interval of a mean of 20 documents is about +- 1.96 * sd / sqrt(20)
    assert math.isclose(clustered.high - clustered.low, 2 * 1.96 * effect.std() / math.sqrt(20), rel_tol=0.25)


@given(st.integers(1, 12), st.integers(0, 1000))
def test_the_interval_holds_its_value_and_one_document_has_none(documents: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    sums, counts = generator.normal(0, 1, documents), generator.integers(1, 9, documents)
    found = bootstrap_mean(sums, counts, np.arange(documents), resamples=400)
    assert found.low <= found.high
    assert found == bootstrap_mean(sums, counts, np.arange(documents), resamples=400)
    if documents == 1:
        assert (found.low, found.high) == (-math.inf, math.inf)
        assert found.ends() == {"low": None, "high": None}


def test_pairing_settles_what_separate_intervals_cannot() -> None:
    generator = np.random.default_rng(2)
    hard = generator.normal(2.0, 0.5, 24)
    counts, groups = np.full(24, 100), np.arange(24)
    a, b = hard * 100, (hard + 0.02 + generator.normal(0, 0.005, 24)) * 100
    gap = paired_difference(a, b, counts, groups)
    assert gap.high < 0 < bootstrap_mean(a, counts, groups).high - bootstrap_mean(b, counts, groups).low
    opposite = paired_difference(b, a, counts, groups)
    assert math.isclose(gap.value, -opposite.value)
    assert paired_difference(a, a, counts, groups).high == 0


def test_wilson_solves_its_own_equation() -> None:
    for hits, trials in ((0, 10), (3, 10), (10, 10), (40, 100)):
        found = wilson_interval(hits, trials)
        for end in (found.low, found.high):
            if 1e-9 < end < 1 - 1e-9:  # |share - end| = z sqrt(end (1 - end) / n)
                z = abs(found.value - end) / math.sqrt(end * (1 - end) / trials)
                assert math.isclose(z, 1.959964, rel_tol=1e-4)
    assert wilson_interval(0, 10).high > 0.2


@pytest.mark.parametrize(
    "call",
    [
        lambda: bootstrap_mean([], [], []),
        lambda: bootstrap_mean([1.0], [0], [0]),
        lambda: bootstrap_mean([1.0, 2.0], [1], [0]),
        lambda: paired_difference([1.0], [1.0, 2.0], [1], [0]),
        lambda: wilson_interval(3, 2),
        lambda: wilson_interval(0, 0),
        lambda: mean_and_spread([]),
    ],
)
def test_statistics_refuse_what_has_no_answer(call: Any) -> None:
    with pytest.raises(ValueError):
        call()


def test_mean_and_spread() -> None:
    assert mean_and_spread([3.0]) == (3.0, None)
    mean, spread = mean_and_spread([1.0, 2.0, 3.0])
    assert (mean, spread) == (2.0, 1.0)


# ---- passkey ----


class Reader(nn.Module):
    """Knows where `PasskeyTask.small` hides its key, when it lies no further back than `reach` tokens."""

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach = reach
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, input_ids: Tensor, logits_to_keep: int = 0) -> Any:
        self.shapes.append(tuple(input_ids.shape))
        logits = torch.zeros(*input_ids.shape, VOCAB)
        for row, ids in enumerate(input_ids.tolist()):
            at = ids.index(ord("#")) + 1
            key = ids[at : at + 5]
            if len(ids) - at <= self.reach:
                for place, digit in enumerate(key):
                    logits[row, len(ids) - 6 + place, digit] = 9.0
        return SimpleNamespace(logits=logits[:, -logits_to_keep:] if logits_to_keep else logits)


def test_a_model_that_reads_the_key_is_right_and_one_with_a_horizon_fails_beyond_it() -> None:
    task = PasskeyTask.small()
    perfect = passkey_by_length(Reader(10_000), task, lengths=(32, 128), prompts=10)
    assert [(row.exact, row.token) for row in perfect] == [(1.0, 1.0), (1.0, 1.0)]
    short = passkey_by_length(Reader(64), task, lengths=(32, 256), prompts=20)
    assert short[0].exact == 1.0
    assert 0 < short[1].exact < 0.5
    depth = {low: share for low, _, _, share in short[1].by_depth(4)}
    assert depth[0.75] > depth[0.0] == 0.0
    assert short[1].interval().low < short[1].exact < short[1].interval().high
    assert [row.length for row in short] == [32, 256]


def test_batches_are_bounded_and_never_padded() -> None:
    model = Reader(10_000)
    passkey_by_length(model, PasskeyTask.small(), lengths=(64,), prompts=10, batch_tokens=200)
    assert {shape[1] for shape in model.shapes} == {64}
    assert max(shape[0] for shape in model.shapes) == 3


def test_passkey_needs_lengths_and_prompts() -> None:
    with pytest.raises(DataError, match="at least one length"):
        passkey_by_length(Reader(1), PasskeyTask.small(), lengths=())
    with pytest.raises(DataError, match="ask for at least"):
        passkey_by_length(Reader(1), PasskeyTask.small(), lengths=(4,), prompts=1)
