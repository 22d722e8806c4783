"""Every value of a comparison, its checks, and the presets."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from milepost.compare import recipes
from milepost.data import PasskeyTask
from milepost.encoding import catalogue, find, from_spec, parse_spec
from milepost.evaluate import MEASURES

ALL_TRAINABLE = "all-trainable"
CONTROL = "alibi:slope_scale=2"


class SettingsError(ValueError):
    """Settings that cannot be: `problems` lists all of them, each with its value and its mend."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


def _option(default: Any, help: str) -> Any:
    if isinstance(default, list | dict):
        raise TypeError("defaults are immutable")
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All that decides the numbers of a comparison. Each field is a flag of `milepost compare`; `help` describes it.

    Raises `SettingsError` with every problem found, when `check` is called.
    """

    methods: tuple[str, ...] = _option(
        ("mep", "mep-parameterized", "alibi", "rope", "sinusoidal", CONTROL),
        "encodings, separated by commas; options after a colon (alibi:slope_scale=2), a recipe "
        "after @ (rope@curriculum); all-trainable: the catalogue",
    )
    train_length: int = _option(128, "tokens of a training window")
    test_lengths: tuple[int, ...] = _option((128, 256, 512, 1024, 2048, 4096), "128,512 or 128..4096 (doubling)")
    seeds: int = _option(1, "trainings of each method; seed 0, 1, ...")
    data: str = _option("prose", "prose, code, a file or folder of text, JSONL, parquet, or a Hugging Face name")
    tokenizer: str = _option("bytes", "bytes, or a Hugging Face tokenizer by name or path")
    text_field: str = _option("text", "column of JSONL, parquet and Hugging Face rows that holds the text")
    max_documents: int = _option(0, "read no more than the first so many documents (0: all)")
    layers: int = _option(3, "layers of the model")
    width: int = _option(128, "width of the model")
    heads: int = _option(4, "attention heads")
    kv_heads: int = _option(0, "key and value heads (0: as many as heads)")
    dropout: float = _option(0.0, "dropout in training")
    steps: int = _option(400, "training steps")
    batch_size: int = _option(8, "windows in a batch")
    accumulation: int = _option(1, "batches summed for one step")
    lr: float = _option(3e-3, "peak learning rate; a cosine takes it to a tenth")
    warmup: float = _option(0.05, "share of the steps that warm up")
    weight_decay: float = _option(0.1, "weight decay of matrices")
    clip: float = _option(1.0, "largest gradient norm")
    encoding_lr_scale: float = _option(10.0, "learning rate of the encoding's own parameters, as a multiple of lr")
    precision: str = _option("auto", "auto, float32, bfloat16 or float16 (auto: bfloat16 on accelerators that have it)")
    device: str = _option("auto", "auto (an accelerator where there is one) or cpu")
    regions: int = _option(24, "stretches of held-out text, each as long as the longest test length")
    measures: tuple[str, ...] = _option(("windows", "last"), f"ways to measure perplexity: {', '.join(MEASURES)}")
    last: int = _option(0, "targets of each region in the measure 'last' (0: the shortest test length)")
    stride: int = _option(0, "stride of the measure 'sliding' (0: half of each length)")
    eval_batch_tokens: int = _option(8192, "tokens of one evaluation batch")
    passkey: bool = _option(True, "measure passkey retrieval too, with a second model trained on short prompts")
    passkey_train_length: int = _option(64, "longest passkey prompt in training")
    passkey_test_lengths: tuple[int, ...] = _option((64, 128, 256, 512, 1024), "prompt lengths in the test")
    passkey_prompts: int = _option(40, "prompts at each length")
    passkey_steps: int = _option(500, "training steps of the passkey model")
    passkey_batch_size: int = _option(16, "prompts in a batch")
    passkey_lr: float = _option(3e-3, "peak learning rate of the passkey model")
    passkey_layers: int = _option(2, "layers of the passkey model")
    passkey_width: int = _option(64, "width of the passkey model")
    passkey_heads: int = _option(4, "heads of the passkey model")
    passkey_init_std: float = _option(0.1, "standard deviation of its initial weights")
    init_std: float = _option(0.06, "standard deviation of the language model's initial weights")
    checkpoint_every: int = _option(100, "steps between checkpoints, from which a killed training goes on")
    threads: int = _option(1, "threads of each worker process")

    # ---- what is derived ----

    @property
    def tokens_per_step(self) -> int:
        return self.train_length * self.batch_size * self.accumulation

    @property
    def last_targets(self) -> int:
        return self.last or min(self.test_lengths)

    def geometry(self, *, passkey: bool = False, vocab_size: int = 258) -> dict[str, Any]:
        """What a model of these settings tells an encoding."""
        width, heads = (self.passkey_width, self.passkey_heads) if passkey else (self.width, self.heads)
        return {
            "num_heads": heads,
            "head_dim": width // heads,
            "width": width,
            "num_layers": self.passkey_layers if passkey else self.layers,
            "vocab_size": vocab_size,
            "trained_length": self.passkey_train_length if passkey else self.train_length,
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Settings:
        given: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return cls(**given)

    # ---- checks ----

    def check(self) -> Settings:
        """These settings, when they can be run.

        Raises `SettingsError` that lists every problem.
        """
        problems: list[str] = []
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                problems.append(f"{_flag(name)} {getattr(self, name)} must be at least 1")
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                problems.append(f"{_flag(name)} {getattr(self, name)} must not be negative")
        for name in ("lr", "passkey_lr", "clip", "encoding_lr_scale", "init_std", "passkey_init_std"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                problems.append(f"{_flag(name)} {value} must be positive")
        if not 0 <= self.dropout < 1:
            problems.append(f"--dropout {self.dropout} must lie in [0, 1)")
        if not 0 <= self.warmup < 1:
            problems.append(f"--warmup {self.warmup} is a share of the steps and must lie in [0, 1)")
        problems += _choice("precision", self.precision, ("auto", "float32", "bfloat16", "float16"))
        problems += _choice("device", self.device, ("auto", "cpu"))
        for measure in self.measures:
            problems += _choice("measures", measure, tuple(MEASURES))
        if problems:
            raise SettingsError(problems)
        problems += self._check_lengths()
        problems += self._check_geometry()
        if not problems:
            problems += self._check_methods()
        if problems:
            raise SettingsError(problems)
        return self

    def _check_lengths(self) -> list[str]:
        problems = []
        if not self.methods:
            problems.append("--methods is empty: name at least one encoding, see `milepost list`")
        if len(set(self.methods)) < len(self.methods):
            twice = sorted({method for method in self.methods if self.methods.count(method) > 1})
            problems.append(f"--methods names {', '.join(twice)} twice")
        if not self.measures:
            problems.append(f"--measures is empty: choose from {', '.join(MEASURES)}")
        if self.train_length < 2:
            problems.append(f"--train-length {self.train_length} must be at least 2: the first token has no prediction")
        if not self.test_lengths:
            problems.append("--test-lengths is empty: give lengths such as 128..4096")
            return problems
        shortest, longest = min(self.test_lengths), max(self.test_lengths)
        if shortest < 1:
            problems.append(f"--test-lengths has {shortest}: lengths are at least 1")
        if longest < self.train_length:
            problems.append(
                f"the longest of --test-lengths, {longest}, is shorter than --train-length {self.train_length}, so "
                f"nothing beyond the trained length would be measured: test at {self.train_length} or more"
            )
        if "last" in self.measures and self.last > shortest:
            problems.append(
                f"--last {self.last} targets do not fit into the shortest of --test-lengths, {shortest}: "
                f"use --last {shortest} or less"
            )
        if self.passkey:
            needed = PasskeyTask.small().min_length
            if self.passkey_train_length < needed:
                problems.append(
                    f"--passkey-train-length {self.passkey_train_length} cannot hold a prompt: use {needed} or more"
                )
            if not self.passkey_test_lengths or max(self.passkey_test_lengths) < self.passkey_train_length:
                problems.append(
                    f"--passkey-test-lengths {list(self.passkey_test_lengths)} are all shorter than "
                    f"--passkey-train-length {self.passkey_train_length}: test at that length or more"
                )
            elif min(self.passkey_test_lengths) < needed:
                problems.append(
                    f"--passkey-test-lengths has {min(self.passkey_test_lengths)}, but a prompt takes {needed} tokens"
                )
        return problems

    def _check_geometry(self) -> list[str]:
        problems = []
        pairs = [("--width", self.width, "--heads", self.heads)]
        if self.passkey:
            pairs.append(("--passkey-width", self.passkey_width, "--passkey-heads", self.passkey_heads))
        for width_flag, width, heads_flag, heads in pairs:
            if width % heads:
                near = max(round(width / heads), 1) * heads
                problems.append(
                    f"{width_flag} {width} does not divide into {heads_flag} {heads}: use {width_flag} {near}, or a "
                    f"number of heads that divides {width}"
                )
        if self.kv_heads and self.heads % self.kv_heads:
            problems.append(
                f"--heads {self.heads} do not share --kv-heads {self.kv_heads} evenly: use a divisor of {self.heads}"
            )
        return problems

    def _check_methods(self) -> list[str]:
        problems = []
        for method in self.methods:
            try:
                encoding, recipe = recipes.split(method)
                recipes.lengths(self, recipe)
                for part in encoding.replace("/", "+").split("+"):
                    entry = find(parse_spec(part)[0])
                    if not entry.trainable:
                        problems.append(
                            f"{method!r}: {entry.name} is for models that are trained already, see milepost stretch"
                        )
                        break
                else:
                    from_spec(encoding, self.geometry())
                    if self.passkey:
                        from_spec(encoding, self.geometry(passkey=True))
            except (ValueError, TypeError) as error:
                problems.append(f"method {method!r}: {error}")
        return problems


_POSITIVE = (
    "seeds", "layers", "width", "heads", "steps", "batch_size", "accumulation", "regions", "eval_batch_tokens",
    "passkey_prompts", "passkey_steps", "passkey_batch_size", "passkey_layers", "passkey_width", "passkey_heads",
    "checkpoint_every", "threads",
)  # fmt: skip
_NOT_NEGATIVE = ("kv_heads", "weight_decay", "last", "stride", "max_documents")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> list[str]:
    if value in allowed:
        return []
    near = difflib.get_close_matches(value, allowed, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return [f"{_flag(name)} {value!r} is unknown; {hint}there are {', '.join(allowed)}"]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


# ---- presets --------------------------------------------------------------------------------------------------------

_SMALL_METHODS = ("mep", "mep-parameterized", "alibi", "kerple-log", "t5", "rope", "sinusoidal", "nope")

PRESETS: dict[str, dict[str, Any]] = {
    "quick": {},
    "small": {
        "methods": (*_SMALL_METHODS, CONTROL),
        "seeds": 2,
        "layers": 4,
        "width": 192,
        "init_std": 0.05,
        "heads": 6,
        "steps": 1500,
        "batch_size": 16,
        "lr": 2e-3,
        "measures": ("windows", "last", "sliding"),
        "passkey_steps": 1200,
        "passkey_prompts": 100,
    },
    # Chi et al. 2022 (arXiv 2205.09921) and their kerple_configs/train.yml; five seeds there
    "kerple": {
        "methods": (*_SMALL_METHODS, CONTROL),
        "train_length": 512,
        "test_lengths": (512, 1024, 2048, 4096, 8192, 16384),
        "seeds": 5,
        "data": "Geralt-Targaryen/openwebtext2",
        "tokenizer": "openai-community/gpt2",
        "layers": 12,
        "width": 768,
        "init_std": 0.02,
        "heads": 12,
        "steps": 50_000,
        "batch_size": 32,
        "lr": 6e-4,
        "warmup": 0.01,
        "weight_decay": 0.0,
        "encoding_lr_scale": 1.0,
        "precision": "bfloat16",
        "regions": 64,
        "measures": ("windows", "last", "sliding"),
        "eval_batch_tokens": 65_536,
        "passkey_steps": 2000,
        "passkey_prompts": 100,
        "passkey_test_lengths": (64, 256, 1024, 4096),
        "checkpoint_every": 1000,
    },
    "tiny": {
        "methods": ("mep", "alibi", "rope"),
        "train_length": 32,
        "test_lengths": (32, 64, 128),
        "layers": 1,
        "width": 32,
        "heads": 2,
        "steps": 20,
        "batch_size": 4,
        "regions": 24,
        "passkey_steps": 20,
        "passkey_batch_size": 8,
        "passkey_width": 32,
        "passkey_heads": 2,
        "passkey_layers": 1,
        "passkey_prompts": 10,
        "passkey_train_length": 32,
        "passkey_test_lengths": (32, 64, 128),
        "checkpoint_every": 10,
    },
}
"""quick: the main job in minutes on two cores. small: about an hour. kerple: the published setting, for GPUs. tiny: 20
steps, to see whether everything runs at all; its numbers mean nothing."""


def preset(name: str, **changes: Any) -> Settings:
    """The settings of a preset with some values replaced; not yet checked.

    Raises `SettingsError` for an unknown preset or an unknown value.
    """
    if name not in PRESETS:
        raise SettingsError(_choice("preset", name, tuple(PRESETS)))
    known = [f.name for f in fields(Settings)]
    unknown = [key for key in changes if key not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"they are {', '.join(known)}"
        raise SettingsError([f"no setting is named {unknown[0]!r}; {hint}"])
    settings = Settings(**{**PRESETS[name], **changes})
    if ALL_TRAINABLE in settings.methods:
        trainable = tuple(entry.name for entry in catalogue() if entry.trainable)
        methods = dict.fromkeys(
            m for given in settings.methods for m in (trainable if given == ALL_TRAINABLE else (given,))
        )
        settings = dataclasses.replace(settings, methods=tuple(methods))
    return settings


# ---- values as text -------------------------------------------------------------------------------------------------


def parse_lengths(text: str) -> tuple[int, ...]:
    """'128,512' lists lengths; '128..4096' doubles from the first to the second; both can be mixed.

    Raises ValueError for anything else.
    """
    lengths: list[int] = []
    for part in text.replace(" ", "").split(","):
        low, dots, high = part.partition("..")
        try:
            first = int(low)
            last = int(high) if dots else first
        except ValueError:
            raise ValueError(f"{part!r} is no length: write 128,512 or 128..4096") from None
        if first < 1 or last < first:
            raise ValueError(f"{part!r} is no range of lengths: write the shorter first, such as 128..4096")
        while first < last:
            lengths.append(first)
            first *= 2
        lengths.append(last)
    return tuple(sorted(set(lengths)))


def parse_names(text: str) -> tuple[str, ...]:
    """'mep, alibi:slope_scale=2' -> the names, in order. A comma inside brackets belongs to an option's value."""
    names, depth, current = [], 0, ""
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            names.append(current.strip())
            current = ""
        else:
            current += character
    return tuple(name for name in [*names, current.strip()] if name)


PARSERS: dict[str, Callable[[str], Any]] = {
    "methods": parse_names,
    "measures": parse_names,
    "test_lengths": parse_lengths,
    "passkey_test_lengths": parse_lengths,
}
"""Fields that are given as text with commas."""

__all__ = ["PARSERS", "PRESETS", "Settings", "SettingsError", "parse_lengths", "parse_names", "preset"]
