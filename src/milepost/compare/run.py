"""One run of a comparison: a method and a seed, trained and measured in a worker process."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from milepost.compare import recipes
from milepost.compare.settings import Settings
from milepost.encoding import Encoding, PerLayer, Sum
from milepost.sweep import Reporter, canonical_json, write_atomically

if TYPE_CHECKING:
    from milepost.data import Corpus

T = TypeVar("T")
CURVE_POINTS = 200


def perform(job: dict[str, Any], work: Path, out: Path, report: Reporter) -> dict[str, Any]:
    """Train, measure, and return the run's result as plain values; the trained model goes to `out`/model.

    Each part that is complete is kept in `work`, so that a killed run goes on where it was: the trainings from their
    checkpoints, the measurements from their files.
    """
    import torch

    settings = Settings.from_dict(job["settings"])
    method, seed = str(job["method"]), int(job["seed"])
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    clock = time.perf_counter()
    share = _Shares(settings, report)
    language = _language_model(settings, method, seed, work, share)
    passkey = _passkey_model(settings, method, seed, work, share) if settings.passkey else {}
    (work / "language" / "model").rename(out / "model")
    report(1.0, "done")
    timing = {**language.pop("timing"), **passkey.pop("timing", {})}
    timing["run_seconds"] = time.perf_counter() - clock
    timing["cpu_seconds"] = time.process_time()
    return {"method": method, "seed": seed, **language, **passkey, "timing": timing}


def load_data(settings: Settings) -> Corpus:
    """The corpus of these settings.

    Raises `DataError` for data that cannot be used.
    """
    from milepost.data import DataError, load_corpus

    try:
        return load_corpus(
            settings.data,
            tokenizer=None if settings.tokenizer == "bytes" else settings.tokenizer,
            text_field=settings.text_field,
            max_documents=settings.max_documents or None,
        )
    except DataError as error:
        names = [settings.data.removeprefix("hf:"), settings.tokenizer]
        remote = any("/" in name and not Path(name).exists() for name in names)
        if remote and os.environ.get("HF_HUB_OFFLINE") == "1":
            raise DataError(f"{error}; nothing is downloaded unless HF_HUB_OFFLINE=0 is set") from error
        raise


def model_config(settings: Settings, method: str, *, vocab_size: int, passkey: bool = False) -> Any:
    """The configuration of the model that is trained."""
    from milepost.model import MilepostConfig

    return MilepostConfig(
        vocab_size=vocab_size,
        width=settings.passkey_width if passkey else settings.width,
        num_layers=settings.passkey_layers if passkey else settings.layers,
        num_heads=settings.passkey_heads if passkey else settings.heads,
        num_kv_heads=None if passkey or not settings.kv_heads else settings.kv_heads,
        dropout=0.0 if passkey else settings.dropout,
        trained_length=settings.passkey_train_length if passkey else settings.train_length,
        encoding=recipes.split(method)[0],
        initializer_range=settings.passkey_init_std if passkey else settings.init_std,
    )


def train_config(settings: Settings, *, seed: int, recipe: str | None = None, log_to: str = "none") -> Any:
    """How the language model is trained."""
    from milepost.train import TrainConfig

    config = TrainConfig(
        steps=settings.steps,
        length=settings.train_length,
        batch_size=settings.batch_size,
        grad_accum=settings.accumulation,
        lr=settings.lr,
        warmup=settings.warmup,
        weight_decay=settings.weight_decay,
        clip=settings.clip,
        encoding_lr_scale=settings.encoding_lr_scale,
        precision=settings.precision,  # type: ignore[arg-type]  # checked by Settings
        device=settings.device,
        seed=seed,
        checkpoint_every=settings.checkpoint_every if settings.checkpoint_every < settings.steps else 0,
        log_to=log_to,  # type: ignore[arg-type]  # checked by TrainConfig
    )
    return dataclasses.replace(config, **recipes.lengths(settings, recipe))


def _language_model(settings: Settings, method: str, seed: int, work: Path, share: _Shares) -> dict[str, Any]:
    from milepost.evaluate import measure_lengths
    from milepost.report import bias_curves
    from milepost.train import train

    corpus = load_data(settings)
    config = train_config(settings, seed=seed, recipe=recipes.split(method)[1])
    geometry = model_config(settings, method, vocab_size=corpus.vocab_size)
    progress = share.training("train", "training")
    trained = train(geometry, config, corpus, work / "language", progress=progress)

    def measure() -> dict[str, Any]:
        began = time.perf_counter()
        refused: dict[int, str] = {}
        regions = corpus.test.regions(size=max(settings.test_lengths), count=settings.regions)
        measured = measure_lengths(
            trained.model,
            corpus.test,
            regions,
            lengths=settings.test_lengths,
            measures=settings.measures,
            last=settings.last_targets,
            stride=settings.stride or None,
            batch_tokens=settings.eval_batch_tokens,
            done=share.part("test", "measuring perplexity"),
            refused=refused,
        )
        trunk = trained.model.base_model
        schedule = PerLayer([_together([trunk.encodings[i] for i in indices]) for indices in trunk.schedule])
        return {
            "perplexity": [loss.to_dict() for loss in measured.lengths],
            "refused": {str(length): reason for length, reason in refused.items()},
            "positions": [
                {"low": p.low, "high": p.high, "targets": p.targets, "mean": p.mean} for p in measured.positions
            ],
            "curves": bias_curves(schedule, trained.model.config.geometry(), length=max(settings.test_lengths)),
            "timing": {"test_seconds": time.perf_counter() - began},
        }

    measured = _kept(work / "perplexity.json", measure)
    timing = {
        **measured.pop("timing"),
        "train_seconds": trained.seconds,
        "train_tokens_per_second": trained.tokens_per_second,
    }
    return {
        "parameters": trained.parameters,
        "encoding_parameters": trained.encoding_parameters,
        "train_losses": thinned(trained.losses),
        **measured,
        "timing": timing,
    }


def _passkey_model(settings: Settings, method: str, seed: int, work: Path, share: _Shares) -> dict[str, Any]:
    from milepost.data import VOCAB_SIZE, PasskeyDataset, PasskeyTask
    from milepost.evaluate import passkey_by_length
    from milepost.train import TrainConfig, train

    task = PasskeyTask.small()
    config = TrainConfig(
        steps=settings.passkey_steps,
        length=settings.passkey_train_length,
        batch_size=settings.passkey_batch_size,
        lr=settings.passkey_lr,
        weight_decay=settings.weight_decay,
        encoding_lr_scale=settings.encoding_lr_scale,
        device=settings.device,
        precision=settings.precision,  # type: ignore[arg-type]  # checked by Settings
        seed=seed,
        checkpoint_every=settings.checkpoint_every if settings.checkpoint_every < settings.passkey_steps else 0,
    )
    prompts = PasskeyDataset(
        task,
        items=settings.passkey_steps * settings.passkey_batch_size,
        max_length=settings.passkey_train_length,
        seed=seed,
    )
    geometry = model_config(settings, method, vocab_size=VOCAB_SIZE, passkey=True)
    progress = share.training("passkey_train", "training on passkeys")
    trained = train(geometry, config, prompts, work / "passkey", progress=progress)

    def measure() -> dict[str, Any]:
        began = time.perf_counter()
        refused: dict[int, str] = {}
        found = passkey_by_length(
            trained.model,
            task,
            lengths=settings.passkey_test_lengths,
            prompts=settings.passkey_prompts,
            seed=1_000_003 + seed,
            batch_tokens=settings.eval_batch_tokens,
            done=share.part("passkey_test", "measuring passkey"),
            refused=refused,
        )
        return {
            "passkey": [result.to_dict() for result in found],
            "passkey_refused": {str(length): reason for length, reason in refused.items()},
            "timing": {"passkey_test_seconds": time.perf_counter() - began},
        }

    measured = _kept(work / "passkey.json", measure)
    return {
        "passkey_train_losses": thinned(trained.losses),
        **measured,
        "timing": {**measured["timing"], "passkey_train_seconds": trained.seconds},
    }


def _together(parts: list[Encoding]) -> Encoding:
    return parts[0] if len(parts) == 1 else Sum(*parts)


def thinned(losses: tuple[float, ...]) -> list[float]:
    """At most 200 means of equal stretches of the training losses."""
    size = -(-len(losses) // CURVE_POINTS)
    return [sum(losses[at : at + size]) / len(losses[at : at + size]) for at in range(0, len(losses), size)]


def _kept(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `make` returns, from its file where an earlier attempt wrote it whole."""
    try:
        record = json.loads(path.read_text("utf-8"))
        value: dict[str, Any] = record["value"]
        if record["sha256"] == _digest(value):
            return value
    except (OSError, ValueError, KeyError, TypeError):
        pass
    value = json.loads(canonical_json(make()))
    write_atomically(path, canonical_json({"sha256": _digest(value), "value": value}))
    return value


def _digest(value: Any) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


class _Shares:
    """Turns progress inside a part of the run into a share of the whole, by the tokens each part reads."""

    def __init__(self, settings: Settings, report: Reporter) -> None:
        self.report = report
        longest = max(settings.test_lengths)
        weights = {
            "train": 3.0 * settings.steps * settings.tokens_per_step,
            "test": 1.3 * settings.regions * longest * len(settings.test_lengths),
            "passkey_train": 0.0,
            "passkey_test": 0.0,
        }
        if settings.passkey:
            per_prompt = (settings.passkey_layers * settings.passkey_width**2) / (settings.layers * settings.width**2)
            weights["passkey_train"] = (
                3.0
                * settings.passkey_steps
                * settings.passkey_batch_size
                * settings.passkey_train_length
                * max(per_prompt, 0.2)
            )
            weights["passkey_test"] = (
                settings.passkey_prompts * sum(settings.passkey_test_lengths) * max(per_prompt, 0.2)
            )
        total = sum(weights.values())
        self.start: dict[str, float] = {}
        self.size: dict[str, float] = {}
        at = 0.0
        for name, weight in weights.items():
            self.start[name], self.size[name] = at, weight / total
            at += weight / total

    def part(self, name: str, phase: str) -> Callable[[int, int], None]:
        def done(read: int, total: int) -> None:
            self.report(min(self.start[name] + self.size[name] * read / max(total, 1), 0.999), phase)

        return done

    def training(self, name: str, phase: str) -> Callable[[int, int, float], None]:
        def step(number: int, steps: int, loss: float) -> None:
            at = min(self.start[name] + self.size[name] * number / max(steps, 1), 0.999)
            self.report(at, f"{phase} {number}/{steps}", loss=loss)

        return step
