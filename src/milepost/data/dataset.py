"""Map-style torch datasets for the Hugging Face `Trainer`: item i is a pure function of (seed, i).

Take the items in order (a sequential sampler): the windows are drawn at random already, and only then does optimiser
step n read items n * items_per_step .. (n + 1) * items_per_step - 1 of a plan whose length changes by step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from milepost.data.batches import (
    IGNORED,
    ConstantLength,
    Curriculum,
    LengthPlan,
    document_ids,
    item_generator,
    segment_ids,
    window_starts,
)
from milepost.data.errors import DataError
from milepost.data.passkey import PasskeyTask
from milepost.data.positions import PositionDraw
from milepost.data.tokens import PAD_ID

Ints = npt.NDArray[np.int64]


class _TrainSplit(Protocol):
    @property
    def stream(self) -> npt.NDArray[np.unsignedinteger]: ...

    @property
    def starts(self) -> Ints: ...


class WindowDataset(Dataset[dict[str, Tensor]]):
    """Random windows of a training split: dicts of int64 `input_ids` and `labels` (a copy; the model shifts).

    split: a `Split`; windows may cross documents, which the separator tells apart.
    plan: window length by optimiser step; an integer stands for `ConstantLength`. An item has plan.max_length tokens:
        with a constant length one window, tensors (length,); otherwise as many windows as fit, tensors (rows, length),
        which `collate` joins into a batch of equal tokens whatever the length.
    items: how many items there are (optimiser steps times items_per_step).
    items_per_step: items of one optimiser step, over all devices and accumulated micro-batches.
    documents: add `document_ids` (counted from 0 in each window) for attention inside documents, and label the first
        token of every later document -100, for it cannot be predicted from its own document.
    segments: ids that close a segment: adds `token_type_ids`, 0 or 1 alternating.
    positions: a `PositionDraw`: adds `position_ids`, drawn anew for every window.

    Raises `DataError` when the split is shorter than a window, or a curriculum was planned for other steps.
    """

    def __init__(
        self,
        split: _TrainSplit,
        plan: LengthPlan | int,
        *,
        items: int,
        seed: int = 0,
        items_per_step: int = 1,
        documents: bool = False,
        segments: Collection[int] | None = None,
        positions: PositionDraw | None = None,
    ) -> None:
        self.split = split
        self.plan: LengthPlan = ConstantLength(plan) if isinstance(plan, int) else plan
        self.items = items
        self.seed = seed
        self.items_per_step = items_per_step
        self.documents = documents
        self.segments = None if segments is None else tuple(segments)
        self.positions = positions
        if items < 1 or items_per_step < 1:
            raise DataError(f"items={items} and items_per_step={items_per_step} must be at least 1")
        expected = items_per_step * self.plan.max_length
        if isinstance(self.plan, Curriculum) and self.plan.tokens_per_step != expected:
            raise DataError(
                f"the curriculum counts {self.plan.tokens_per_step} tokens a step, the data set gives {expected} "
                f"(items_per_step {items_per_step} x longest length {self.plan.max_length}): make them equal"
            )
        span = self._span(self.plan.max_length)
        window_starts(item_generator(seed, 0), len(split.stream), span, 1)

    def __len__(self) -> int:
        return self.items

    def length(self, index: int) -> int:
        """Window length of an item."""
        return self.plan.length(index // self.items_per_step)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.items:
            raise IndexError(f"item {index} of {self.items}")
        length = self.length(index)
        rows = self.plan.max_length // length
        generator = item_generator(self.seed, index)
        starts = window_starts(generator, len(self.split.stream), self._span(length), rows)
        offsets: Ints = np.tile(np.arange(length, dtype=np.int64), (rows, 1))
        item: dict[str, Ints] = {}
        if self.positions is not None:
            draws = [self.positions(generator, length) for _ in range(rows)]
            offsets = np.stack([offset for offset, _ in draws])
            item["position_ids"] = np.stack([position for _, position in draws])
        places = starts[:, None] + offsets
        tokens = self.split.stream[places].astype(np.int64)
        labels = tokens.copy()
        if self.documents:
            item["document_ids"] = document_ids(places, self.split.starts)
            labels[:, 1:][np.diff(item["document_ids"], axis=1) != 0] = IGNORED
        if self.segments is not None:
            item["token_type_ids"] = segment_ids(tokens, self.segments)
        item = {"input_ids": tokens, "labels": labels, **item}
        single = isinstance(self.plan, ConstantLength)
        return {name: torch.from_numpy(array[0] if single else array) for name, array in item.items()}

    def _span(self, length: int) -> int:
        return length if self.positions is None else self.positions.span(length)


class PasskeyDataset(Dataset[dict[str, Tensor]]):
    """Short passkey prompts for training: length drawn from min_length .. max_length, depth from 0 .. 1.

    An item holds `input_ids` and `labels`, (max_length,) int64: the prompt with its answer, padded on the right (causal
    attention needs no mask for that). Labels are -100 except on the answer, which alone can be predicted.

    min_length: default the shortest prompt there is.
    Raises `DataError` when the task does not fit in max_length.
    """

    def __init__(
        self, task: PasskeyTask, *, items: int, max_length: int, min_length: int | None = None, seed: int = 0
    ) -> None:
        shortest = task.min_length
        self.task = task
        self.items = items
        self.max_length = max_length
        self.min_length = shortest if min_length is None else min_length
        self.seed = seed
        if not shortest <= self.min_length <= max_length:
            raise DataError(
                f"passkey prompts of {self.min_length} .. {max_length} tokens: this task needs at least {shortest}, "
                f"and min_length must not exceed max_length"
            )
        pad = PAD_ID if task.tokenizer is None else task.tokenizer.pad_token_id
        if pad is None and task.tokenizer is not None:
            pad = task.tokenizer.eos_token_id
        self.pad_id = 0 if pad is None else int(pad)

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.items:
            raise IndexError(f"item {index} of {self.items}")
        generator = item_generator(self.seed, index, "pk-shape")
        length = int(generator.integers(self.min_length, self.max_length, endpoint=True))
        prompt = self.task.prompt(length, depth=float(generator.random()), seed=self.seed, index=index, draw="pk-train")
        input_ids = torch.full((self.max_length,), self.pad_id, dtype=torch.int64)
        labels = torch.full((self.max_length,), IGNORED, dtype=torch.int64)
        input_ids[: len(prompt)] = torch.from_numpy(prompt.input_ids)
        labels[prompt.prompt_length : len(prompt)] = torch.from_numpy(prompt.answer)
        return {"input_ids": input_ids, "labels": labels}


def collate(items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Items as one batch: windows (length,) are stacked, blocks of windows (rows, length) are joined.

    Raises `DataError` for blocks of different lengths: then items of different optimiser steps came into one batch.
    """
    lengths = sorted({item["input_ids"].shape[-1] for item in items})
    if len(lengths) > 1:
        raise DataError(
            f"windows of lengths {lengths} in one batch: take items in order, and set items_per_step to "
            f"batch size x accumulation steps x devices"
        )
    join = torch.stack if items[0]["input_ids"].dim() == 1 else torch.cat
    return {name: join([item[name] for item in items]) for name in items[0]}
