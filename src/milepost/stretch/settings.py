"""Every value of a stretch, checked together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

Tuning = Literal["lora", "full"]


class SettingsError(ValueError):
    """Settings that contradict each other or are out of range; the text lists all of them."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `stretch` does.

    Attributes:
        model: a folder, a name in the local Hugging Face cache, or ``"demo"``.
        to: target length in tokens, or a multiple of the trained length such as ``"4x"``.
        methods: names of methods (see `plan`), or ``("auto",)``.
        trained: trained length (0: what the config says).
        data: corpus of the measurements and of tuning, as `milepost.data.load_corpus` takes it.
        regions: held-out stretches of text, each of the target length.
        prompts: passkey prompts at each length (0: no passkey).
        finetune: steps of tuning for each of the best methods (0: none).
        best: how many methods are tuned.
        tuning: LoRA adapters (peft) or all weights.
        rank: of the adapters.
        lr: of tuning.
        batch_tokens: tokens of one step of tuning, and of one forward pass when measuring.
        pose: tune at the trained length with skipped positions up to the target (PoSE), instead of at the target.
        margin: a length is usable while its perplexity stays within this share of the trained length's.
        passkey_floor: ... and passkey retrieval stays at this share.
        generations: of the LongRoPE search, where ``longrope-search`` is among the methods.
        population: of that search.
        seed: of data order, prompts and searches.
        threads: of each worker.
        dtype: the model is loaded in (auto: float32 on a CPU, the checkpoint's elsewhere).
        device: auto, cpu or cuda.
    """

    model: str
    to: int | str
    methods: tuple[str, ...] = ("auto",)
    trained: int = 0
    data: str = "prose"
    regions: int = 16
    prompts: int = 24
    finetune: int = 0
    best: int = 2
    tuning: Tuning = "lora"
    rank: int = 8
    lr: float = 1e-4
    batch_tokens: int = 4096
    pose: bool = False
    margin: float = 0.10
    passkey_floor: float = 0.90
    generations: int = 3
    population: int = 8
    seed: int = 0
    threads: int = 1
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "methods", tuple(self.methods))
        positive = ("regions", "best", "rank", "batch_tokens", "generations", "population", "threads")
        problems = [f"{name} is at least 1; got {getattr(self, name)}" for name in positive if getattr(self, name) < 1]
        problems += [f"{name} is at least 0; got {getattr(self, name)}" for name in ("prompts", "finetune", "trained")
                     if getattr(self, name) < 0]  # fmt: skip
        if self.tuning not in ("lora", "full"):
            problems.append(f"tuning is lora or full; got {self.tuning!r}")
        if self.lr <= 0 or self.margin <= 0:
            problems.append(f"lr and margin are positive; got {self.lr} and {self.margin}")
        if not 0 <= self.passkey_floor <= 1:
            problems.append(f"passkey_floor is a share between 0 and 1; got {self.passkey_floor}")
        if not self.methods:
            problems.append("no method given; 'auto' takes those that need no training")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            problems.append(f"dtype is auto, float32, bfloat16 or float16; got {self.dtype!r}")
        if problems:
            raise SettingsError("; ".join(problems))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "methods": list(self.methods)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Settings:
        known = {f.name for f in fields(cls)}
        return cls(**{**{k: v for k, v in values.items() if k in known}, "methods": tuple(values["methods"])})
