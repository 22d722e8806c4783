"""Training: one order of data for all methods, resume to the same losses, own rates for encodings, safe checkpoints."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from milepost.data import Corpus, PasskeyDataset, PasskeyTask, Stage, load_corpus
from milepost.model import MilepostConfig, MilepostForCausalLM
from milepost.train import (
    TrainConfig,
    TrainingError,
    TrainResult,
    intact,
    latest_checkpoint,
    learning_rate,
    parameter_groups,
    train,
)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    words = np.random.default_rng(0).choice(["the", "cat", "sat", "on", "a", "mat", "and", "ran"], size=(4, 2000))
    return load_corpus({f"text {i}": " ".join(row) for i, row in enumerate(words)}, cache=False)


def model_config(encoding: str = "alibi", **options: Any) -> MilepostConfig:
    return MilepostConfig(width=16, num_layers=1, num_heads=2, trained_length=32, encoding=encoding, **options)


def config(**options: Any) -> TrainConfig:
    return TrainConfig(**{"steps": 8, "length": 32, "batch_size": 2, "device": "cpu", **options})


class Interrupted(Exception):
    pass


def stop_at(step: int) -> Any:
    def progress(now: int, steps: int, loss: float) -> None:
        if now == step:
            raise Interrupted

    return progress


def interrupted_and_resumed(model: MilepostConfig, how: TrainConfig, data: Any, folder: Path, step: int) -> TrainResult:
    with pytest.raises(Interrupted):
        train(model, how, data, folder, progress=stop_at(step))
    return train(model, how, data, folder)


# ---- the same data for all, the same curve after an interruption ----


class Seen(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int) -> None:
        self.count = count
        self.order: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.order.append(index)
        ids = torch.randint(0, 256, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def test_every_method_reads_the_same_items_in_order(tmp_path: Path) -> None:
    orders = []
    for encoding in ("alibi", "kerple-log"):
        data = Seen(16)
        train(model_config(encoding), config(), data, tmp_path / encoding)
        orders.append(data.order[:16])
    assert orders[0] == orders[1] == list(range(16))


def test_two_trainings_of_one_seed_are_the_same_and_of_another_differ(corpus: Corpus, tmp_path: Path) -> None:
    first, again, other = (
        train(model_config(dropout=0.1), config(seed=seed), corpus, tmp_path / name)
        for name, seed in [("a", 3), ("b", 3), ("c", 4)]
    )
    assert first.losses == again.losses
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True))
    assert first.losses != other.losses


@pytest.mark.parametrize(
    ("encoding", "options"),
    [
        ("kerple-log", {}),
        ("alibi", {"dropout": 0.2, "grad_accum": 2}),
        ("rope", {"mixed_lengths": {8: 0.5, 16: 0.25, 32: 0.25}}),
        (
            "rope:base=100+kerple-log",
            {"steps": None, "stages": (Stage(8, 320), Stage(32, 192, {"encoding": "rope:base=9000+kerple-log"}))},
        ),
    ],
)
def test_an_interrupted_training_resumes_to_the_undisturbed_one(
    corpus: Corpus, tmp_path: Path, encoding: str, options: dict[str, Any]
) -> None:
    how = config(checkpoint_every=3, **options)
    undisturbed = train(model_config(encoding), how, corpus, tmp_path / "a")
    resumed = interrupted_and_resumed(model_config(encoding), how, corpus, tmp_path / "b", step=7)
    assert resumed.resumed_from == 6
    assert resumed.losses == undisturbed.losses
    theirs = dict(undisturbed.model.named_parameters())
    for name, parameter in resumed.model.named_parameters():
        assert torch.equal(parameter, theirs[name]), name
    assert resumed.model.config.encoding == undisturbed.model.config.encoding
    assert not list((tmp_path / "b").glob("checkpoint-*")) and not (tmp_path / "b" / "partial").exists()


def test_a_finished_training_is_returned_without_training(corpus: Corpus, tmp_path: Path) -> None:
    first = train(model_config(), config(), corpus, tmp_path)
    calls: list[int] = []
    again = train(model_config(), config(), corpus, tmp_path, progress=lambda step, *_: calls.append(step))
    assert calls == [] and again.losses == first.losses and again.resumed_from == 8
    ids = torch.arange(20)[None]
    assert torch.equal(again.model(ids).logits, first.model(ids).logits)
    anew = train(model_config(), config(), corpus, tmp_path, resume=False)
    assert anew.resumed_from == 0 and anew.losses == first.losses


# ---- what is trained how ----


def test_losses_fall_and_the_result_counts(corpus: Corpus, tmp_path: Path) -> None:
    reported: list[tuple[int, int, float]] = []
    result = train(
        model_config("kerple-log"), config(steps=30, lr=1e-2), corpus, tmp_path, progress=lambda *a: reported.append(a)
    )
    assert result.losses[-1] < result.losses[0] - 1.0 and abs(result.losses[0] - math.log(258)) < 0.2
    assert [(step, loss) for step, _, loss in reported] == list(enumerate(result.losses, 1))
    assert {steps for _, steps, _ in reported} == {30}
    assert (result.steps, result.tokens, result.encoding_parameters) == (30, 30 * 64, 4)
    assert result.parameters == sum(p.numel() for p in result.model.parameters())
    assert not result.model.training
    assert json.loads(json.dumps(result.to_dict()))["losses"] == list(result.losses)


def test_accumulated_batches_are_one_large_batch(corpus: Corpus, tmp_path: Path) -> None:
    large = train(model_config(), config(batch_size=4), corpus, tmp_path / "a")
    small = train(model_config(), config(batch_size=1, grad_accum=4), corpus, tmp_path / "b")
    assert np.allclose(large.losses, small.losses, atol=2e-5)


def test_encoding_parameters_have_a_group_of_their_own() -> None:
    model = MilepostForCausalLM(model_config("kerple-log", bias=True))
    matrices, vectors, own = parameter_groups(model, config(lr=1e-3, encoding_lr_scale=7.0, weight_decay=0.3))
    assert set(own["params"]) == set(model.model.encodings.parameters())
    assert own["lr"] == pytest.approx(7e-3) and own["weight_decay"] == 0.0
    assert matrices["weight_decay"] == 0.3 and {p.dim() for p in matrices["params"]} == {2}
    assert vectors["weight_decay"] == 0.0 and {p.dim() for p in vectors["params"]} == {1}
    assert sum(len(g["params"]) for g in (matrices, vectors, own)) == len(list(model.parameters()))


def test_encoding_parameters_move_by_their_scale(corpus: Corpus, tmp_path: Path) -> None:
    """Adam's first step is the learning rate times the gradient's sign, so the scale can be read off."""
    moved = []
    for scale in (1.0, 10.0):
        how = config(steps=1, lr=1e-4, warmup=0.0, encoding_lr_scale=scale, clip=0.0)
        result = train(model_config("alibi:learn_slopes=True"), how, corpus, tmp_path / str(scale))
        start = MilepostForCausalLM(model_config("alibi:learn_slopes=True"))
        before, after = (next(m.model.encodings.parameters()).detach() for m in (start, result.model))
        moved.append((after - before).abs().max().item())
    assert moved[1] / moved[0] == pytest.approx(10.0, rel=1e-2)


def test_the_learning_rate_warms_up_and_follows_a_cosine() -> None:
    share = learning_rate(config(warmup=0.1, min_lr=0.1), 100)
    assert [share(step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert share(10) == 1.0 and share(55) == pytest.approx(0.55) and share(100) == pytest.approx(0.1)
    assert all(share(step + 1) < share(step) for step in range(10, 100))


def test_a_curriculum_changes_lengths_and_frequencies(corpus: Corpus, tmp_path: Path) -> None:
    lengths: list[tuple[int, ...]] = []
    specs: list[str] = []
    original = MilepostForCausalLM.forward

    def spy(self: MilepostForCausalLM, input_ids: Tensor, **kwargs: Any) -> Any:
        lengths.append(tuple(input_ids.shape))
        specs.append(self.config.encoding)
        return original(self, input_ids, **kwargs)

    stages = (Stage(8, 128), Stage(16, 64, {"encoding": "rope:base=5000"}), Stage(32, 64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MilepostForCausalLM, "forward", spy)
        result = train(model_config("rope"), config(steps=None, stages=stages), corpus, tmp_path)
    assert lengths == [(8, 8), (8, 8), (4, 16), (2, 32)]
    assert specs == ["rope", "rope", "rope:base=5000", "rope"]
    assert result.steps == 4 and result.tokens == 4 * 64


def test_documents_stay_apart_in_training(corpus: Corpus, tmp_path: Path) -> None:
    packed = train(model_config(), config(documents=True), corpus, tmp_path / "a")
    assert all(math.isfinite(loss) for loss in packed.losses)


def test_passkey_prompts_can_be_trained_on(tmp_path: Path) -> None:
    data = PasskeyDataset(PasskeyTask.small(), items=16, max_length=48)
    result = train(model_config(), config(), data, tmp_path)
    assert result.steps == 8 and result.tokens == 8 * 2 * 48


def test_bfloat16_and_gradient_checkpointing_train_too(corpus: Corpus, tmp_path: Path) -> None:
    plain = train(model_config("fire"), config(), corpus, tmp_path / "a")
    saved = train(model_config("fire"), config(gradient_checkpointing=True), corpus, tmp_path / "b")
    assert np.allclose(saved.losses, plain.losses, atol=1e-5)
    half = train(model_config("fire"), config(precision="bfloat16"), corpus, tmp_path / "c")
    assert half.losses != plain.losses and np.allclose(half.losses, plain.losses, atol=0.05)
    assert {p.dtype for p in half.model.parameters()} == {torch.float32}


def test_losses_are_logged_for_tensorboard(corpus: Corpus, tmp_path: Path) -> None:
    train(model_config(), config(log_to="tensorboard", log_every=2), corpus, tmp_path)
    assert list(tmp_path.rglob("events.out.tfevents*"))


# ---- what goes wrong ----


class Poisoned(Seen):
    """From item 6 on, the labels make the model divide by no target at all: a loss that is not a number."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = super().__getitem__(index)
        if index >= 6:
            item["labels"] = torch.full_like(item["labels"], -100)
        return item


def test_a_loss_that_is_no_number_ends_the_training_and_names_step_and_method(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"the loss of alibi:slope_scale=2 became nan at step 4 of 8: lower lr"):
        train(model_config("alibi:slope_scale=2"), config(checkpoint_every=1), Poisoned(16), tmp_path)
    checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint is not None and checkpoint.name == "checkpoint-3"
    assert not (tmp_path / "model").exists()


def test_damaged_checkpoints_are_passed_over(corpus: Corpus, tmp_path: Path) -> None:
    how = config(checkpoint_every=2)
    undisturbed = train(model_config(), how, corpus, tmp_path / "a")
    folder = tmp_path / "b"
    with pytest.raises(Interrupted):
        train(model_config(), how, corpus, folder, progress=stop_at(7))
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    weights = folder / "checkpoint-6" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert not intact(folder / "checkpoint-6") and intact(folder / "checkpoint-4")
    with pytest.warns(UserWarning, match="checkpoint-6 is damaged and is not used"):
        resumed = train(model_config(), how, corpus, folder)
    assert resumed.resumed_from == 4 and resumed.losses == undisturbed.losses


def test_a_half_written_checkpoint_never_appears(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = torch.save

    def full_disk(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        if "checkpoint-4" in str(file) and "scheduler" in str(file):
            raise OSError(28, "No space left on device")
        original(value, file, *args, **kwargs)

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="No space left"):
        train(model_config(), config(checkpoint_every=2), corpus, tmp_path)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert intact(tmp_path / "checkpoint-2") and not (tmp_path / "partial").exists()


def test_a_folder_of_other_settings_is_refused_with_the_difference(corpus: Corpus, tmp_path: Path) -> None:
    train(model_config(), config(), corpus, tmp_path)
    with pytest.raises(ValueError, match=r"holds another training \(training.lr 0.003 there, 0.001 here\)"):
        train(model_config(), config(lr=1e-3), corpus, tmp_path)
    with pytest.raises(ValueError, match=r"model.encoding 'alibi' there, 'rope' here"):
        train(model_config("rope"), config(), corpus, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": None}, "steps is needed unless stages say"),
        ({"lr": 0.0, "warmup": 2.0}, "lr is positive; got 0.0; warmup is a share, 0 to 1; got 2.0"),
        ({"precision": "int4"}, "precision is one of auto, float32, bfloat16, float16; got 'int4'"),
        ({"stages": (Stage(8, 1),), "mixed_lengths": {8: 1.0}}, "give one of them"),
        ({"stages": (Stage(8, 1, {"base": 5}),)}, r"a stage's options hold 'encoding' only; got \['base'\]"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**options)


def test_too_few_items_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="8 steps of 2 items need 16 items; the data has 15"):
        train(model_config(), config(), Seen(15), tmp_path)
