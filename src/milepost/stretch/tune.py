"""A few steps of training at the new positions: adapters or all weights, at the target length or by PoSE."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from milepost.data import ConstantLength, PoSEPositions, WindowDataset
from milepost.stretch.plan import Method
from milepost.stretch.settings import Settings

Done = Callable[[int, int, float], None]
CHECKPOINT_EVERY = 25


def tune(
    model: Any,
    method: Method,
    corpus: Any,
    settings: Settings,
    trained: int,
    target: int,
    *,
    length: int,
    steps: int,
    folder: Path,
    done: Done | None = None,
) -> list[float]:
    """Tune ``model`` in place, with the method attached already, and return the loss of every step.

    ``length`` is that of the windows: the target; the trained length under PoSE, whose skipped positions reach up to
    the target; or the trained length for the control. Adapters are merged into the weights at the end. A checkpoint in
    ``folder`` lets a killed run go on at its last saved step.

    Raises ValueError when the loss is not a number.
    """
    tuned: Any = model
    if settings.tuning == "lora":
        tuned = _with_adapters(model, settings)
    skip = PoSEPositions(maximum=target) if settings.pose and length == trained and method.spec is not None else None
    rows = max(1, settings.batch_tokens // length)
    lengths, seed = ConstantLength(length), settings.seed
    data = WindowDataset(
        corpus.train, lengths, items=steps * rows, seed=seed, items_per_step=rows, positions=skip
    )
    losses: list[float] = []
    parameters = [p for p in tuned.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0)
    first = _resume(folder, parameters, optimizer, losses)
    tuned.train()
    device = next(model.parameters()).device
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * _schedule(step, steps)
        items = [data[step * rows + row] for row in range(rows)]
        batch = {key: torch.stack([torch.as_tensor(item[key]) for item in items]).to(device) for key in items[0]}
        loss = tuned(**batch, use_cache=False).loss
        if not bool(torch.isfinite(loss)):
            raise ValueError(f"the loss of {method.label} is {float(loss)} at tuning step {step + 1}: lower --lr")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
        if done is not None:
            done(step + 1, steps, losses[-1])
        if (step + 1) % CHECKPOINT_EVERY == 0 and step + 1 < steps:
            _save(folder, parameters, optimizer, losses)
    tuned.eval()
    if settings.tuning == "lora":
        tuned.merge_and_unload()
    return losses


def _schedule(step: int, steps: int) -> float:
    warm = max(1, steps // 20)
    return min(1.0, (step + 1) / warm) * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def _with_adapters(model: Any, settings: Settings) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ValueError(
            "tuning with LoRA needs peft: pip install 'milepost[stretch]', or tune all weights with --tuning full"
        ) from error
    import torch

    config = LoraConfig(
        r=settings.rank, lora_alpha=2 * settings.rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    torch.manual_seed(settings.seed)
    return get_peft_model(model, config)


def _save(folder: Path, parameters: list[Any], optimizer: Any, losses: list[float]) -> None:
    state = {"parameters": [p.detach() for p in parameters], "optimizer": optimizer.state_dict(), "losses": losses}
    part = folder / "tuning.pt.part"
    torch.save(state, part)
    part.replace(folder / "tuning.pt")


def _resume(folder: Path, parameters: list[Any], optimizer: Any, losses: list[float]) -> int:
    path = folder / "tuning.pt"
    if not path.exists():
        return 0
    try:
        state = torch.load(path, weights_only=True)
        saved = state["parameters"]
        if [p.shape for p in saved] != [p.shape for p in parameters]:
            return 0
        optimizer.load_state_dict(state["optimizer"])
    except (OSError, RuntimeError, KeyError, EOFError, ValueError):
        return 0
    with torch.no_grad():
        for parameter, value in zip(parameters, saved, strict=True):
            parameter.copy_(value)
    losses += state["losses"]
    return len(losses)
