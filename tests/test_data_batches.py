from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, RandomSampler

from milepost.data import (
    EOS_ID,
    ConstantLength,
    Corpus,
    Curriculum,
    DataError,
    MixedLengths,
    PoSEPositions,
    RandomizedPositions,
    Stage,
    WindowDataset,
    collate,
    load_corpus,
    window_starts,
)
from milepost.data.batches import document_ids, item_generator, segment_ids
from milepost.data.positions import pose_positions

VECTORS = json.loads((Path(__file__).parent / "data" / "vectors-a.json").read_text("utf-8"))["vectors"]


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus({f"doc {i}": f"Document number {i}. " * (i % 7 + 1) for i in range(60)}, cache=False)


def test_items_are_pure_functions_of_seed_and_index(corpus: Corpus) -> None:
    first, second = (WindowDataset(corpus.train, 32, items=50, seed=3) for _ in range(2))
    forward = [first[i]["input_ids"].tolist() for i in range(50)]
    backward = [second[i]["input_ids"].tolist() for i in reversed(range(50))][::-1]
    assert forward == backward
    longer = WindowDataset(corpus.train, 32, items=500, seed=3)
    assert [longer[i]["input_ids"].tolist() for i in range(50)] == forward
    other = WindowDataset(corpus.train, 32, items=50, seed=4)
    assert [other[i]["input_ids"].tolist() for i in range(50)] != forward
    assert len({tuple(item) for item in forward}) > 40


def test_order_does_not_depend_on_workers(corpus: Corpus) -> None:
    dataset = WindowDataset(corpus.train, 16, items=24, seed=1)
    batches = [
        [batch["input_ids"] for batch in DataLoader(dataset, batch_size=4, num_workers=workers, collate_fn=collate)]
        for workers in (0, 2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*batches, strict=True))
    resumed = torch.stack([dataset[i]["input_ids"] for i in range(12, 16)])
    assert torch.equal(resumed, batches[0][3])


def test_windows_are_the_text_with_labels(corpus: Corpus) -> None:
    dataset = WindowDataset(corpus.train, 20, items=100)
    text = corpus.train.stream.astype(np.uint8 if corpus.vocab_size <= 256 else np.int64)
    windows = {tuple(text[i : i + 20].tolist()) for i in range(len(text) - 19)}
    for item in (dataset[i] for i in range(len(dataset))):
        assert item["input_ids"].dtype == torch.int64 and item["input_ids"].shape == (20,)
        assert torch.equal(item["input_ids"], item["labels"])
        assert tuple(item["input_ids"].tolist()) in windows
    with pytest.raises(IndexError):
        dataset[100]


def test_starts_cover_first_and_last_place() -> None:
    starts = window_starts(item_generator(0, 0), 10, 8, 400)
    assert set(starts.tolist()) == {0, 1, 2}
    with pytest.raises(DataError, match="has 10 tokens, a window needs 11"):
        window_starts(item_generator(0, 0), 10, 11, 1)


def test_a_text_shorter_than_the_window_is_refused_at_construction(corpus: Corpus) -> None:
    with pytest.raises(DataError, match="use a shorter length or more text"):
        WindowDataset(corpus.train, len(corpus.train.stream) + 1, items=1)
    WindowDataset(corpus.train, len(corpus.train.stream), items=1)


def test_generators_of_different_purpose_or_index_differ() -> None:
    draws = {
        item_generator(seed, index, purpose).integers(1 << 62)
        for seed in (0, 1, -1)
        for index in (0, 1, 1 << 40)
        for purpose in ("windows", "passkey")
    }
    assert len(draws) == 18


@given(
    shares=st.dictionaries(st.sampled_from([16, 32, 64, 128]), st.floats(0.05, 1.0), min_size=1),
    seed=st.integers(0, 1000),
)
def test_mixed_lengths_keep_their_token_shares(shares: dict[int, float], seed: int) -> None:
    plan = MixedLengths(shares, seed=seed)
    lengths = np.array([plan.length(step) for step in range(500)])
    assert plan.max_length == max(shares)
    for length, share in shares.items():
        assert abs((lengths == length).mean() - share / sum(shares.values())) < 0.02


def test_mixed_batches_have_equal_tokens_and_one_length_a_step(corpus: Corpus) -> None:
    plan = MixedLengths({16: 0.5, 64: 0.5}, seed=2)
    dataset = WindowDataset(corpus.train, plan, items=40, items_per_step=4)
    shapes = [batch["input_ids"].shape for batch in DataLoader(dataset, batch_size=4, collate_fn=collate)]
    assert {tuple(shape) for shape in shapes} == {(16, 16), (4, 64)}
    assert [shape[1] for shape in shapes] == [plan.length(step) for step in range(10)]
    shuffled = DataLoader(dataset, batch_size=4, collate_fn=collate, sampler=RandomSampler(dataset))
    with pytest.raises(DataError, match="take items in order"):
        list(shuffled)


def test_curriculum_stages_follow_tokens() -> None:
    stages = [Stage(16, 1000), Stage(32, 640, {"theta": 5e5}), Stage(64, 64)]
    plan = Curriculum(stages, tokens_per_step=128)
    assert [plan.first_step(i) for i in range(3)] == [0, 8, 13]
    assert [plan.length(step) for step in (0, 7, 8, 12, 13, 14, 1000)] == [16, 16, 32, 32, 64, 64, 64]
    assert plan.total_steps == 14 and plan.max_length == 64
    assert plan.stage(10).options == {"theta": 5e5} and plan.stage_index(10) == 1


def test_curriculum_batches_resume_inside_a_stage(corpus: Corpus) -> None:
    plan = Curriculum([Stage(16, 256), Stage(64, 256)], tokens_per_step=128)
    dataset = WindowDataset(corpus.train, plan, items=8, items_per_step=2)
    whole = [batch["input_ids"] for batch in DataLoader(dataset, batch_size=2, collate_fn=collate)]
    assert [tuple(batch.shape) for batch in whole] == [(8, 16), (8, 16), (2, 64), (2, 64)]
    assert torch.equal(collate([dataset[6], dataset[7]])["input_ids"], whole[3])
    with pytest.raises(DataError, match="counts 128 tokens a step, the data set gives 256"):
        WindowDataset(corpus.train, plan, items=8, items_per_step=4)


def test_packed_windows_number_their_documents(corpus: Corpus) -> None:
    dataset = WindowDataset(corpus.train, 200, items=20, documents=True)
    boundaries = 0
    for item in (dataset[i] for i in range(20)):
        ids, documents, labels = (item[name] for name in ("input_ids", "document_ids", "labels"))
        assert documents[0] == 0 and torch.equal(
            documents, torch.cat([torch.zeros(1, dtype=torch.int64), (ids == EOS_ID).cumsum(0)[:-1]])
        )
        first = torch.cat([torch.zeros(1, dtype=torch.bool), ids[:-1] == EOS_ID])
        assert torch.equal(labels == -100, first)
        assert torch.equal(labels[~first], ids[~first])
        boundaries += int(first.sum())
    assert boundaries > 20


def test_document_ids_count_from_zero_in_each_row() -> None:
    starts = np.array([0, 4, 6])
    rows = np.array([[2, 3, 4, 5, 6], [4, 5, 6, 7, 8]])
    assert document_ids(rows, starts).tolist() == [[0, 0, 1, 1, 2], [0, 0, 1, 1, 1]]


def test_segments_alternate_after_separators(corpus: Corpus) -> None:
    assert segment_ids(np.array([5, 9, 5, 9, 9, 5]), [9]).tolist() == [0, 0, 1, 1, 0, 1]
    assert segment_ids(np.array([[9, 9, 9, 9]]), [9], num_types=3).tolist() == [[0, 1, 2, 0]]
    item = WindowDataset(corpus.train, 64, items=1, segments=[ord("."), EOS_ID])[0]
    assert set(item["token_type_ids"].tolist()) == {0, 1}
    for separators, types in (([], 2), ([9], 1)):
        with pytest.raises(DataError, match="segments need"):
            segment_ids(np.array([1]), separators, types)


@given(length=st.integers(1, 64), extra=st.integers(0, 100), index=st.integers(0, 1000))
def test_randomized_positions_are_sorted_distinct_and_below_the_maximum(length: int, extra: int, index: int) -> None:
    draw = RandomizedPositions(maximum=length + extra)
    offsets, positions = draw(item_generator(0, index), length)
    assert offsets.tolist() == list(range(length))
    assert (np.diff(positions) > 0).all() and positions[0] >= 0 and positions[-1] < length + extra
    if extra == 0:
        assert positions.tolist() == offsets.tolist()


@given(length=st.integers(2, 64), extra=st.integers(0, 100), skip=st.integers(0, 50), index=st.integers(0, 1000))
def test_pose_positions_are_two_chunks(length: int, extra: int, skip: int, index: int) -> None:
    draw = PoSEPositions(maximum=length + extra, text_skip=skip)
    offsets, positions = draw(item_generator(0, index), length)
    assert positions[0] == offsets[0] == 0
    assert positions[-1] < length + extra and offsets[-1] < draw.span(length)
    for steps in (np.diff(positions), np.diff(offsets)):
        assert (steps >= 1).all() and (steps > 1).sum() <= 1
    jumps = np.nonzero(np.diff(positions) > 1)[0]
    assert all(jump + 1 <= (length + 1) // 2 for jump in jumps)


@pytest.mark.parametrize("vector", [v for v in VECTORS if v["method"] == "pose_positions"], ids=lambda v: v["id"])
def test_pose_vectors(vector: dict[str, object]) -> None:
    inputs = vector["inputs"]
    assert pose_positions(inputs["len"], inputs["rt1"], inputs["rt"]).tolist() == vector["expected"]


def test_pose_reaches_its_maximum() -> None:
    draw = PoSEPositions(maximum=20)
    largest = max(draw(item_generator(0, i), 16)[1].max() for i in range(200))
    assert largest == 19


def test_positions_are_drawn_for_every_window(corpus: Corpus) -> None:
    dataset = WindowDataset(corpus.train, 16, items=30, positions=PoSEPositions(maximum=256, text_skip=64))
    again = WindowDataset(corpus.train, 16, items=30, positions=PoSEPositions(maximum=256, text_skip=64))
    drawn = [tuple(dataset[i]["position_ids"].tolist()) for i in range(30)]
    assert drawn == [tuple(again[i]["position_ids"].tolist()) for i in range(30)]
    assert len(set(drawn)) > 20
    mixed = WindowDataset(
        corpus.train, MixedLengths({16: 1, 64: 1}), items=4, positions=RandomizedPositions(maximum=128)
    )
    for i in range(4):
        assert mixed[i]["position_ids"].shape == mixed[i]["input_ids"].shape


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ConstantLength(1), "must be at least 2"),
        (lambda: MixedLengths({}), "no window length"),
        (lambda: MixedLengths({32: 0.5, 48: 0.5}), "32 does not divide the longest, 48"),
        (lambda: MixedLengths({32: 0.0, 64: 1.0}), "must be positive"),
        (lambda: Curriculum([], tokens_per_step=10), "at least one stage"),
        (lambda: Curriculum([Stage(64, 10)], tokens_per_step=32), "less than the longest"),
        (lambda: Stage(64, 0), "tokens=0"),
        (lambda: RandomizedPositions(maximum=8)(item_generator(0, 0), 9), "raise maximum"),
        (lambda: PoSEPositions(maximum=8)(item_generator(0, 0), 9), "raise maximum"),
    ],
)
def test_plans_that_cannot_be_are_refused(call: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        call()


def test_item_counts_are_checked(corpus: Corpus) -> None:
    with pytest.raises(DataError, match="items=0"):
        WindowDataset(corpus.train, 16, items=0)
