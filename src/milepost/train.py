"""Training: Hugging Face's ``Trainer`` under a thin layer that makes methods comparable and runs resumable.

    corpus = load_corpus("prose")
    model_config = MilepostConfig(vocab_size=corpus.vocab_size, encoding="alibi", trained_length=128)
    result = train(model_config, TrainConfig(steps=400, length=128), corpus, "runs/alibi")

One seed gives every method the same initial trunk and the same windows in the same order. An interrupted training goes
on from its last intact checkpoint to the same losses. Under ``torchrun`` the same call trains on every process.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, SequentialSampler
from transformers import AutoModelForCausalLM, PrinterCallback, Trainer, TrainingArguments
from transformers.utils import logging as hf_logging

from milepost.data import ConstantLength, Corpus, Curriculum, LengthPlan, MixedLengths, Stage, WindowDataset, collate
from milepost.encoding import Encoding

Items = Dataset[dict[str, Tensor]]
Progress = Callable[[int, int, float], None]
"""Called as ``progress(step, steps, loss)`` after every step whose loss is known."""

MODEL = "model"
SETTINGS = "training.json"
CURVE = "losses.json"
MANIFEST = "sha256.json"
PARTIAL = "partial"


class TrainingError(RuntimeError):
    """A training that cannot go on; the message names the step and the method."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train. What to train is the model's configuration.

    Attributes:
        steps: optimiser steps; with ``stages`` None means as many as their tokens take.
        length: tokens of a window.
        mixed_lengths: length -> share of the tokens, instead of ``length``.
        stages: a curriculum of :class:`~milepost.data.Stage`, instead of ``length``. A stage's options may hold
            ``encoding``: the line that replaces the model's from there on (other frequencies, same parameters).
        batch_size: windows of the longest length on each device; shorter ones come in equal tokens.
        grad_accum: batches summed for one step.
        lr: peak learning rate, reached after the share ``warmup`` of the steps; then a cosine to ``lr * min_lr``.
        encoding_lr_scale: the encoding's own parameters learn at ``lr`` times this, without weight decay.
        weight_decay: of matrices; vectors have none.
        clip: largest norm of all gradients; 0 = none.
        dropout: replaces the model's, unless None.
        precision: of the arithmetic (weights stay float32); ``auto`` is bfloat16 on accelerators that have it.
        device: ``auto``, ``cpu``, or what Hugging Face finds.
        checkpoint_every: steps between checkpoints; 0 = none.
        documents: attention and positions stay inside documents.
        gradient_checkpointing: recompute layers in the backward pass.
        compile: ``torch.compile`` the model.
        log_to: where losses are logged every ``log_every`` steps.

    Raises:
        ValueError: every value that cannot be, together.
    """

    steps: int | None = None
    length: int = 128
    mixed_lengths: Mapping[int, float] | None = None
    stages: tuple[Stage, ...] | None = None
    batch_size: int = 8
    grad_accum: int = 1
    lr: float = 3e-3
    min_lr: float = 0.1
    warmup: float = 0.05
    encoding_lr_scale: float = 10.0
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    dropout: float | None = None
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    seed: int = 0
    checkpoint_every: int = 0
    documents: bool = False
    gradient_checkpointing: bool = False
    compile: bool = False
    log_to: Literal["none", "tensorboard", "trackio"] = "none"
    log_every: int = 10
    workers: int = 0

    def __post_init__(self) -> None:
        wrong = []
        if self.steps is None and not self.stages:
            wrong.append("steps is needed unless stages say how many tokens to train on")
        for name, least in {"steps": 1, "length": 2, "batch_size": 1, "grad_accum": 1, "log_every": 1}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                wrong.append(f"{name} is at least {least}; got {value}")
        for name in ("lr", "encoding_lr_scale"):
            if not 0 < getattr(self, name) < math.inf:
                wrong.append(f"{name} is positive; got {getattr(self, name)}")
        for name in ("weight_decay", "clip", "checkpoint_every", "workers"):
            if getattr(self, name) < 0:
                wrong.append(f"{name} is not negative; got {getattr(self, name)}")
        for name in ("warmup", "min_lr"):
            if not 0 <= getattr(self, name) <= 1:
                wrong.append(f"{name} is a share, 0 to 1; got {getattr(self, name)}")
        if self.dropout is not None and not 0 <= self.dropout < 1:
            wrong.append(f"dropout is in [0, 1); got {self.dropout}")
        if self.stages and self.mixed_lengths:
            wrong.append("stages and mixed_lengths both set the lengths; give one of them")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                wrong.append(f"{name} is one of {', '.join(allowed)}; got {getattr(self, name)!r}")
        for stage in self.stages or ():
            if set(stage.options) - {"encoding"}:
                wrong.append(f"a stage's options hold 'encoding' only; got {sorted(stage.options)}")
        if wrong:
            raise ValueError("; ".join(wrong))

    def plan(self, processes: int = 1) -> LengthPlan:
        """The window length of every step."""
        if self.stages:
            longest = max(stage.length for stage in self.stages)
            return Curriculum(self.stages, self.items_per_step(processes) * longest)
        if self.mixed_lengths:
            return MixedLengths(self.mixed_lengths, self.seed)
        return ConstantLength(self.length)

    def items_per_step(self, processes: int = 1) -> int:
        return self.batch_size * self.grad_accum * processes

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return cast(dict[str, Any], json.loads(json.dumps(dataclasses.asdict(self))))


_CHOICES = {
    "precision": ("auto", "float32", "bfloat16", "float16"),
    "log_to": ("none", "tensorboard", "trackio"),
}


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainResult:
    """What came out.

    Attributes:
        model: trained, in evaluation mode.
        losses: mean loss of every step, from the first, through all interruptions.
        tokens: trained on, in all.
        seconds: of training, in all attempts together.
        tokens_per_second: ``tokens / seconds``.
        resumed_from: the step at which this call began.
        parameters, encoding_parameters: how many there are.
    """

    model: Any
    losses: tuple[float, ...]
    tokens: int
    seconds: float
    resumed_from: int
    parameters: int
    encoding_parameters: int

    @property
    def steps(self) -> int:
        return len(self.losses)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without the model."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "model"}
        return {
            **values,
            "losses": list(self.losses),
            "steps": self.steps,
            "tokens_per_second": self.tokens_per_second,
        }


def train(
    model_config: Any,
    config: TrainConfig,
    data: Corpus | Items,
    output_dir: str | Path,
    *,
    resume: bool = True,
    progress: Progress | None = None,
) -> TrainResult:
    """Train a language model from scratch, or go on with it.

    Args:
        model_config: of any causal model that ``AutoModelForCausalLM`` knows.
        data: a corpus, whose train side is read in random windows; or a map-style dataset whose item i depends on i
            alone, taken in order.
        output_dir: gets ``model/`` (the trained model), and checkpoints until then.
        resume: go on from the last intact checkpoint, or return the finished model; False starts anew.
        progress: called after every step with (step, steps, loss).

    Raises:
        TrainingError: a loss that is not finite.
        ValueError: ``output_dir`` holds a training of other settings (the difference is named), or too few items.
        DataError: text shorter than a window.
        OSError: a full disk; checkpoints written before stay intact.
    """
    folder = Path(output_dir)
    model_config = type(model_config).from_dict(model_config.to_dict())
    if config.dropout is not None:
        model_config.dropout = config.dropout
    arguments = _arguments(config, folder)
    items = _items(config, data, arguments.world_size)
    if not resume:
        shutil.rmtree(folder, ignore_errors=True)
    if arguments.process_index == 0:
        _claim(folder, model_config, config, data)
    if intact(folder / MODEL):
        return _finished(folder, model_config)
    torch.manual_seed(config.seed)
    with _quiet():
        model = AutoModelForCausalLM.from_config(model_config)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        trainer = _Trainer(config=config, items=items, progress=progress, model=model, args=arguments)
        checkpoint = latest_checkpoint(folder)
        trainer.start_from(checkpoint)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        if trainer.is_world_process_zero():
            trainer.write(folder / MODEL, lambda path: trainer.save_model(str(path)))
            for old in folder.glob("checkpoint-*"):
                shutil.rmtree(old, ignore_errors=True)
    return _result(model.eval(), trainer.losses, trainer.tokens_per_step, trainer.seconds, trainer.first_step)


# ---- the Trainer ----------------------------------------------------------------------------------------------------


class _Ordered(Dataset[dict[str, Tensor]]):
    """Items in order, from the step at which a training begins; ``steps`` of them are wanted."""

    def __init__(self, items: Items, steps: int, per_step: int) -> None:
        self.items, self.steps, self.per_step, self.first = items, steps, per_step, 0

    def __len__(self) -> int:
        return self.steps * self.per_step

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        # The loader reads ahead of the last step of a resumed training: what it gets there is never used.
        return self.items[(index + self.first * self.per_step) % len(self)]


class _Trainer(Trainer):
    def __init__(self, *, config: TrainConfig, items: _Ordered, progress: Progress | None, **kwargs: Any) -> None:
        super().__init__(train_dataset=items, data_collator=collate, **kwargs)
        self.remove_callback(PrinterCallback)
        self.optimizer: torch.optim.Optimizer | None
        self.lr_scheduler: Any
        self.config, self.items, self.progress = config, items, progress
        self.plan = config.plan(self.args.world_size)
        self.tokens_per_step = 0
        self.losses: list[float] = []
        self.waiting: list[Tensor] = []  # losses of steps not yet read from the device
        self.micro: Tensor | None = None
        self.first_step, self.seconds_before, self.began = 0, 0.0, time.perf_counter()
        self.random_state: str | None = None
        self.spec = getattr(self.model.config, "encoding", None)
        self.read_every = 1 if self.args.device.type == "cpu" else config.log_every

    def start_from(self, checkpoint: Path | None) -> None:
        """Losses, clock and place in the data of a checkpoint; the weights are the Trainer's."""
        if checkpoint is not None:
            curve = json.loads((checkpoint / CURVE).read_text("utf-8"))
            self.losses, self.seconds_before = curve["losses"], curve["seconds"]
            self.tokens_per_step = curve["tokens_per_step"]
            self.first_step = self.items.first = len(self.losses)
            self.random_state = str(checkpoint)
        self.began = time.perf_counter()

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.perf_counter() - self.began

    # ---- what differs from the Trainer's own ----

    def _get_train_sampler(self, train_dataset: Items | None = None) -> SequentialSampler:
        return SequentialSampler(cast(Any, self.items))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            groups = parameter_groups(self.model if model is None else model, self.config)
            self.optimizer = torch.optim.AdamW(groups, lr=self.config.lr, betas=self.config.betas, fused=True)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            schedule = learning_rate(self.config, num_training_steps)
            optimizer = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def floating_point_ops(self, inputs: Any) -> int:
        return 0

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        if self.random_state is not None:  # only now has the data loader taken its draw
            self._load_rng_state(self.random_state)
            self.random_state = None
        self._set_stage(len(self.losses) + len(self.waiting))
        self.tokens_per_step = inputs["input_ids"].numel() * self.config.grad_accum * self.args.world_size
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.micro = loss.clone() if self.micro is None else self.micro + loss
        if self.accelerator.gradient_state.sync_gradients:
            self.waiting.append(self.micro)
            self.micro = None
            if len(self.waiting) >= self.read_every:
                self._read_losses()
        return loss

    def _set_stage(self, step: int) -> None:
        if isinstance(self.plan, Curriculum) and self.spec is not None:
            spec = self.plan.stage(step).options.get("encoding", self.spec)
            model = self.accelerator.unwrap_model(self.model)
            if spec != model.config.encoding:
                model.base_model.set_encoding(spec)

    def _read_losses(self) -> None:
        """Losses from the device, averaged over processes; one that is not finite ends the training."""
        if not self.waiting:
            return
        values = torch.stack(self.waiting)
        if self.args.world_size > 1:
            values = self.accelerator.reduce(values, "mean")
        self.waiting = []
        for loss in values.tolist():
            step = len(self.losses) + 1
            if not math.isfinite(loss):
                raise TrainingError(
                    f"the loss of {self.spec or type(self.model).__name__} became {loss} at step {step} of "
                    f"{self.items.steps}: lower lr ({self.config.lr}) or encoding_lr_scale "
                    f"({self.config.encoding_lr_scale}), or clip gradients (clip {self.config.clip})"
                )
            self.losses.append(loss)
            if self.progress is not None and self.args.process_index == 0:
                self.progress(step, self.items.steps, loss)

    # ---- checkpoints ----

    def _get_output_dir(self, trial: Any) -> str:
        return str(Path(self.args.output_dir) / PARTIAL)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self._read_losses()
        folder = Path(self.args.output_dir)
        name = f"checkpoint-{self.state.global_step}"
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.is_world_process_zero():
                self._finish(folder / PARTIAL / name, folder / name)
                others = sorted(folder.glob("checkpoint-*"), key=_step_of)
                for old in others[:-2]:
                    shutil.rmtree(old, ignore_errors=True)
        finally:
            if self.is_world_process_zero():
                shutil.rmtree(folder / PARTIAL, ignore_errors=True)

    def write(self, folder: Path, save: Callable[[Path], Any]) -> None:
        """``save`` into a folder that appears complete or not at all."""
        partial = folder.parent / PARTIAL / folder.name
        try:
            partial.mkdir(parents=True, exist_ok=True)
            save(partial)
            self._finish(partial, folder)
        finally:
            shutil.rmtree(partial.parent, ignore_errors=True)

    def _finish(self, partial: Path, folder: Path) -> None:
        self._read_losses()
        curve = {"losses": self.losses, "seconds": self.seconds, "tokens_per_step": self.tokens_per_step}
        (partial / CURVE).write_text(json.dumps(curve), "utf-8")
        (partial / MANIFEST).write_text(json.dumps(_digests(partial)), "utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)


def parameter_groups(model: nn.Module, config: TrainConfig) -> list[dict[str, Any]]:
    """Matrices with weight decay, vectors without, and the encoding's parameters at their own rate without."""
    own = {p for module in model.modules() if isinstance(module, Encoding) for p in module.parameters()}
    rest = [p for p in model.parameters() if p not in own and p.requires_grad]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
        {
            "params": [p for p in model.parameters() if p in own and p.requires_grad],
            "weight_decay": 0.0,
            "lr": config.lr * config.encoding_lr_scale,
        },
    ]
    return [group for group in groups if group["params"]]


def learning_rate(config: TrainConfig, steps: int) -> Callable[[int], float]:
    """Step -> share of the peak learning rate: linear warm-up, then a cosine to ``min_lr``."""
    warmup = round(config.warmup * steps)

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(steps - warmup, 1)
        return config.min_lr + (1 - config.min_lr) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))

    return share


# ---- folders --------------------------------------------------------------------------------------------------------


def intact(folder: Path) -> bool:
    """Whether everything that was written into a sealed folder is there, byte for byte."""
    try:
        expected = json.loads((folder / MANIFEST).read_text("utf-8"))
        return bool(expected) and expected == _digests(folder)
    except (OSError, ValueError):
        return False


def latest_checkpoint(folder: Path) -> Path | None:
    """The last intact checkpoint; damaged ones are named in a warning and left out."""
    for checkpoint in sorted(folder.glob("checkpoint-*"), key=_step_of, reverse=True):
        if intact(checkpoint):
            return checkpoint
        warnings.warn(f"{checkpoint} is damaged and is not used", stacklevel=3)
    return None


def _step_of(checkpoint: Path) -> int:
    number = checkpoint.name.rpartition("-")[2]
    return int(number) if number.isdigit() else -1


def _digests(folder: Path) -> dict[str, str]:
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            with path.open("rb") as file:
                digests[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _claim(folder: Path, model_config: Any, config: TrainConfig, data: Corpus | Items) -> None:
    """Write down what is trained here; refuse if something else is."""
    settings = {
        "model": {k: v for k, v in model_config.to_dict().items() if k != "transformers_version"},
        "training": config.to_dict(),
        "data": data.fingerprint if isinstance(data, Corpus) else type(data).__name__,
    }
    settings = json.loads(json.dumps(settings, default=str))
    path = folder / SETTINGS
    try:
        known = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        known = None
    if known is not None and known != settings:
        raise ValueError(
            f"{folder} holds another training ({'; '.join(_differences(known, settings))}): "
            "use another folder, or resume=False to start anew"
        )
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / PARTIAL, ignore_errors=True)
    if known is None:
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(settings, indent=1), "utf-8")
        temporary.replace(path)


def _differences(known: Any, wanted: Any, name: str = "") -> list[str]:
    if isinstance(known, dict) and isinstance(wanted, dict):
        keys = dict.fromkeys([*known, *wanted])
        nested = [_differences(known.get(k), wanted.get(k), f"{name}.{k}".strip(".")) for k in keys]
        return [line for lines in nested for line in lines]
    return [] if known == wanted else [f"{name} {known!r} there, {wanted!r} here"]


def _items(config: TrainConfig, data: Corpus | Items, processes: int) -> _Ordered:
    plan = config.plan(processes)
    per_step = config.items_per_step(processes)
    steps = config.steps if config.steps is not None else cast(Curriculum, plan).total_steps
    if isinstance(data, Corpus):
        data = WindowDataset(
            data.train,
            plan,
            items=steps * per_step,
            seed=config.seed,
            items_per_step=per_step,
            documents=config.documents,
        )
    available = len(cast(Any, data))
    if available < steps * per_step:
        raise ValueError(f"{steps} steps of {per_step} items need {steps * per_step} items; the data has {available}")
    return _Ordered(data, steps, per_step)


def _arguments(config: TrainConfig, folder: Path) -> TrainingArguments:
    accelerator = torch.cuda.is_available() and config.device != "cpu"
    precision = config.precision
    if precision == "auto":
        precision = "bfloat16" if accelerator and torch.cuda.is_bf16_supported() else "float32"
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=config.steps or cast(Curriculum, config.plan(_processes())).total_steps,
        per_device_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.grad_accum,
        learning_rate=config.lr,
        max_grad_norm=config.clip,
        bf16=precision == "bfloat16",
        fp16=precision == "float16",
        use_cpu=config.device == "cpu",
        seed=config.seed,
        save_strategy="steps" if config.checkpoint_every else "no",
        save_steps=config.checkpoint_every or 500,
        logging_strategy="no" if config.log_to == "none" else "steps",
        logging_steps=config.log_every,
        logging_nan_inf_filter=False,
        report_to="none" if config.log_to == "none" else config.log_to,
        disable_tqdm=True,
        remove_unused_columns=False,
        ignore_data_skip=True,
        dataloader_num_workers=config.workers,
        torch_compile=config.compile,
        ddp_find_unused_parameters=False,
    )


def _processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _finished(folder: Path, model_config: Any) -> TrainResult:
    model = AutoModelForCausalLM.from_pretrained(folder / MODEL, config=model_config)
    curve = json.loads((folder / MODEL / CURVE).read_text("utf-8"))
    return _result(model.eval(), curve["losses"], curve["tokens_per_step"], curve["seconds"], len(curve["losses"]))


def _result(model: Any, losses: list[float], tokens_per_step: int, seconds: float, first_step: int) -> TrainResult:
    own = {p for module in model.modules() if isinstance(module, Encoding) for p in module.parameters()}
    return TrainResult(
        model=model,
        losses=tuple(losses),
        tokens=len(losses) * tokens_per_step,
        seconds=seconds,
        resumed_from=first_step,
        parameters=sum(p.numel() for p in model.parameters()),
        encoding_parameters=sum(p.numel() for p in own),
    )


class _quiet:
    """Hugging Face's progress bars and advice stay silent; warnings of this library do not."""

    def __enter__(self) -> None:
        self.level, self.bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
        hf_logging.set_verbosity_error()
        hf_logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        hf_logging.set_verbosity(self.level)
        if self.bars:
            hf_logging.enable_progress_bar()
