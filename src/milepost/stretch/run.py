"""One method on one model: searched, tuned where asked, measured; the work of a worker process."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from milepost.evaluate import measure_lengths, passkey_by_length
from milepost.extend.attach import MODULE_NAME, attach
from milepost.stretch import models
from milepost.stretch.plan import Method
from milepost.stretch.settings import Settings
from milepost.sweep import Reporter


def perform(job: dict[str, Any], work: Path, out: Path, report: Reporter) -> dict[str, Any]:
    """Measure (after tuning, where the job has steps) and return plain values; tuned weights go to ``out``/model."""
    import torch

    settings = Settings.from_dict(job["settings"])
    method = Method.from_dict(job["method"])
    trained, target, steps = int(job["trained"]), int(job["target"]), int(job["steps"])
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    model, tokenizer = models.load(settings)
    corpus = models.corpus(settings, tokenizer)
    share = 0.0
    if method.search:
        from milepost.stretch.search import UNSCALED, search_factors

        def searching(done: int, total: int) -> None:
            report(0.4 * done / total, "searching factors")

        first = method.options.get("unscaled_tokens", 0)
        among = [n for n in UNSCALED if n < trained] if first == "search" else [first]
        found = search_factors(model, corpus, settings, trained, target, unscaled=among, done=searching)
        options = {**method.options, **found}
        method = Method(**{**method.to_dict(), "options": options, "search": False})
        share = 0.4
    losses: list[float] = []
    with attached(model, method, trained):
        if steps:
            from milepost.stretch.tune import tune

            start, size = share, (0.9 - share) * 0.7

            def tuning(done: int, total: int, loss: float) -> None:
                report(start + size * done / total, f"tuning {done}/{total}", loss=loss)

            length = int(job["tune_length"])
            losses = tune(
                model, method, corpus, settings, trained, target, length=length, steps=steps, folder=work, done=tuning
            )
            share += size
        result = measure(model, tokenizer, corpus, settings, trained, target, report, share)
        learned = learned_encoding(model)
    if steps:
        model.save_pretrained(out / "model")
        if learned:
            from safetensors.torch import save_file

            save_file(learned, out / "model" / "encoding.safetensors")
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "method": job["label"],
        "title": job["label"],
        "seed": settings.seed,
        "steps": steps,
        "parameters": parameters,
        "encoding_parameters": 0,
        "plan": method.to_dict(),
        "tune_losses": losses,
        **result,
    }


def attached(model: Any, method: Method, trained: int) -> AbstractContextManager[Any]:
    """The method at work in the model; the untouched model for the method without a spec."""
    if method.spec is None:
        return nullcontext()
    return attach(model, method.spec, trained_length=trained, **method.options)


def learned_encoding(model: Any) -> dict[str, Any]:
    """The parameters of the attached encodings, by name; empty for methods that learn nothing."""
    encodings = getattr(model, MODULE_NAME, None)
    return {} if encodings is None else {k: v.detach().clone() for k, v in encodings.named_parameters()}


def measure(
    model: Any,
    tokenizer: Any,
    corpus: Any,
    settings: Settings,
    trained: int,
    target: int,
    report: Reporter,
    share: float,
) -> dict[str, Any]:
    wanted = models.lengths(trained, target)
    regions = corpus.test.regions(size=target, count=settings.regions, allow_fewer=True)
    task = models.passkey_task(tokenizer)
    split = 0.75 if settings.prompts else 1.0

    def reading(read: int, total: int) -> None:
        report(share + (0.99 - share) * split * read / max(total, 1), "measuring perplexity")

    def answering(read: int, total: int) -> None:
        report(share + (0.99 - share) * (split + (1 - split) * read / max(total, 1)), "measuring passkey")

    measured = measure_lengths(
        model,
        corpus.test,
        regions,
        lengths=wanted,
        measures=("windows", "last"),
        last=max(1, wanted[0] // 2),
        batch_tokens=settings.batch_tokens,
        done=reading,
    )
    found = []
    if settings.prompts:
        found = passkey_by_length(
            model,
            task,
            lengths=[length for length in wanted if length >= task.min_length],
            prompts=settings.prompts,
            seed=settings.seed + 1_000_003,
            batch_tokens=settings.batch_tokens,
            done=answering,
        )
    return {
        "perplexity": [loss.to_dict() for loss in measured.lengths],
        "positions": [
            {"low": p.low, "high": p.high, "targets": p.targets, "mean": p.mean} for p in measured.positions
        ],
        "passkey": [row.to_dict() for row in found],
    }
