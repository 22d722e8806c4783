"""Perplexity by length: the same held-out targets, each counted once, under different amounts of context."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from milepost.data import DataError, Regions, Windows, last_targets, nonoverlapping, sliding
from milepost.data.windows import TokenSource
from milepost.evaluate.stats import Interval, bootstrap_mean

MEASURES = {
    "windows": "non-overlapping windows of each length over the same text",
    "last": "the same last targets of each region, with growing context before them",
    "sliding": "windows that advance by a stride and count only what is new to them",
}
"""What perplexity by length can mean. The first mixes in the early-token effect: short windows have more targets with
little context. The second holds the targets fixed, so that differences are the context's alone."""

Done = Callable[[int, int], None]


class NotFinite(ValueError):
    """The model's loss is NaN or infinite."""


class LanguageModel(Protocol):
    """Anything that maps (B, L) token ids to logits: a tensor, or an object with `.logits`."""

    def __call__(self, *, input_ids: Tensor) -> Any: ...


@dataclass(frozen=True, eq=False)
class LengthLoss:
    """The loss at one length, kept by region so that intervals and paired differences can be made later.

    nats, counts, documents: (R,) summed loss, counted targets and document of each region.
    """

    measure: str
    length: int
    nats: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]

    @property
    def targets(self) -> int:
        """Number of targets counted, each one once."""
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        """Nats a token."""
        return float(self.nats.sum() / self.counts.sum())

    @property
    def perplexity(self) -> float:
        """exp of the mean loss; inf where that overflows."""
        return safe_exp(self.mean)

    def interval(self, *, level: float = 0.95) -> Interval:
        """Perplexity with its bootstrap interval over documents."""
        mean = bootstrap_mean(self.nats, self.counts, self.documents, level=level)
        return Interval(safe_exp(mean.value), safe_exp(mean.low), safe_exp(mean.high))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for results.json."""
        return {
            "measure": self.measure,
            "length": self.length,
            "targets": self.targets,
            "perplexity": self.perplexity,
            "mean_nats": self.mean,
            "region_nats": self.nats.tolist(),
            "region_targets": self.counts.tolist(),
            "region_documents": self.documents.tolist(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LengthLoss:
        return cls(
            measure=values["measure"],
            length=int(values["length"]),
            nats=np.array(values["region_nats"], dtype=np.float64),
            counts=np.array(values["region_targets"], dtype=np.int64),
            documents=np.array(values["region_documents"], dtype=np.int64),
        )


@dataclass(frozen=True)
class PositionLoss:
    """Mean loss of the targets with `low` to `high` - 1 tokens of context, in windows of the longest length."""

    low: int
    high: int
    targets: int
    mean: float


def safe_exp(value: float) -> float:
    """exp without an OverflowError."""
    return math.exp(value) if value < 700 else math.inf


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode without gradients; the training flag is put back afterwards."""
    was = bool(getattr(model, "training", False))
    if isinstance(model, nn.Module):
        model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        if isinstance(model, nn.Module):
            model.train(was)


def device_of(model: Any) -> torch.device:
    """Where a model wants its input."""
    if isinstance(model, nn.Module):
        parameter = next(model.parameters(), None)
        if parameter is not None:
            return parameter.device
    return torch.device("cpu")


def logits_of(model: Any, input_ids: Tensor) -> Tensor:
    """(B, L, vocabulary) logits, without a cache where the model can have one."""
    if hasattr(model, "config") and hasattr(model.config, "use_cache"):
        output = model(input_ids=input_ids, use_cache=False)
    else:
        output = model(input_ids=input_ids)
    logits = output if isinstance(output, Tensor) else output.logits
    return logits


def token_losses(model: LanguageModel, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of every target in nats, in float32.

    inputs, targets: (B, L) int64. Returns (B, L) float32. Logits are turned into float32 a few thousand at a time.
    """
    logits = logits_of(model, inputs)
    if logits.shape[:2] != targets.shape:
        raise ValueError(f"the model gave logits of shape {tuple(logits.shape)} for targets of {tuple(targets.shape)}")
    flat, wanted = logits.flatten(0, 1), targets.flatten()
    rows = max(1 << 22, flat.shape[-1]) // flat.shape[-1]
    parts = [
        F.cross_entropy(flat[at : at + rows].float(), wanted[at : at + rows], reduction="none")
        for at in range(0, len(flat), rows)
    ]
    return torch.cat(parts).view(targets.shape)


@dataclass(frozen=True, eq=False)
class Measured:
    """What one reading of the test text told.

    lengths: by measure, then by length. positions: inside the non-overlapping windows of the longest length.
    """

    lengths: list[LengthLoss]
    positions: list[PositionLoss]


def measure_lengths(
    model: LanguageModel,
    source: TokenSource,
    regions: Regions,
    *,
    lengths: Sequence[int],
    measures: Sequence[str] = ("windows", "last"),
    last: int | None = None,
    stride: int | None = None,
    batch_tokens: int = 8192,
    done: Done | None = None,
    refused: dict[int, str] | None = None,
) -> Measured:
    """The loss at each length by each measure over the same regions, and by position at the longest length.

    source: the tokens that `regions` point into, such as `corpus.test`.
    last: targets of the measure "last" in each region (default: the shortest length). stride: of "sliding" (default:
    half the length). batch_tokens: tokens of one forward pass; a window is never split. done: called with (tokens
    read, tokens in all). refused: where given, a length that the model refuses (a learned table that ends) is left out
    and its reason put here; otherwise the model's ValueError is raised.

    A window that several measures need is read once. Positions are empty unless "windows" is measured.
    Raises `DataError` for no lengths, an unknown measure, a length beyond the regions' size; `NotFinite` (a ValueError)
    when the model's loss is not a number.
    """
    lengths = sorted(set(lengths))
    measures = list(dict.fromkeys(measures))
    if not lengths:
        raise DataError("no test length given")
    for measure in measures:
        if measure not in MEASURES:
            raise DataError(f"unknown measure {measure!r}; there are {', '.join(MEASURES)}")
    plan = {
        (measure, length): _windows(measure, regions, length, last or lengths[0], stride)
        for length in lengths
        for measure in measures
    }
    total = sum(len(_distinct(plan, length)[0]) * length for length in lengths)
    read = 0
    found: dict[tuple[str, int], LengthLoss] = {}
    positions: list[PositionLoss] = []
    with evaluating(model):
        for length in lengths:
            starts, rows_of = _distinct(plan, length)
            losses = np.empty((len(starts), length), dtype=np.float32)
            try:
                for rows, values in _batches(model, source, starts, length, batch_tokens):
                    losses[rows] = values
                    read += values.size
                    if done is not None:
                        done(read, total)
            except NotFinite:
                raise
            except ValueError as error:
                if refused is None:
                    raise
                refused[length] = str(error)
                continue
            for measure, rows_index in rows_of.items():
                found[measure, length] = _by_region(measure, plan[measure, length], losses[rows_index], regions)
            if "windows" in rows_of:
                positions = _by_position(losses[rows_of["windows"]], plan["windows", length].counted())
    keys = [(measure, length) for measure in measures for length in lengths]
    return Measured([found[key] for key in keys if key in found], positions)


def perplexity_by_length(
    model: LanguageModel, source: TokenSource, regions: Regions, *, lengths: Sequence[int], **options: Any
) -> list[LengthLoss]:
    """`measure_lengths` without the positions; takes the same options and raises the same errors."""
    return measure_lengths(model, source, regions, lengths=lengths, **options).lengths


def loss_by_position(
    model: LanguageModel, source: TokenSource, regions: Regions, *, length: int, **options: Any
) -> list[PositionLoss]:
    """The mean loss by the number of tokens of context, in non-overlapping windows of one length, in octaves.

    A model that cannot use distant text stays flat beyond its trained length; one that breaks rises there.
    Takes `batch_tokens` and `done`, and raises, as `measure_lengths` does.
    """
    return measure_lengths(model, source, regions, lengths=[length], measures=["windows"], **options).positions


def _by_position(losses: npt.NDArray[np.float32], counted: npt.NDArray[np.bool_]) -> list[PositionLoss]:
    total = np.where(counted, losses, 0.0).sum(0, dtype=np.float64)
    counts = counted.sum(0)
    bounds = _octaves(losses.shape[1])
    bins: list[PositionLoss] = []
    for low, high in zip([0, *bounds[:-1]], bounds, strict=True):
        number = int(counts[low:high].sum())
        if number:
            bins.append(PositionLoss(low + 1, high + 1, number, float(total[low:high].sum() / number)))
    return bins


def _octaves(length: int) -> list[int]:
    edges = [2**power for power in range(3, 40) if 2**power < length]
    return [*edges, length]


def _windows(measure: str, regions: Regions, length: int, last: int, stride: int | None) -> Windows:
    if measure == "windows":
        return nonoverlapping(regions, length)
    if measure == "last":
        return last_targets(regions, length, last)
    return sliding(regions, length, min(stride, length) if stride else max(length // 2, 1))


def _pairs(windows: Windows) -> npt.NDArray[np.int64]:
    return np.stack([windows.document, windows.start], axis=1)


def _distinct(
    plan: dict[tuple[str, int], Windows], length: int
) -> tuple[npt.NDArray[np.int64], dict[str, npt.NDArray[np.int64]]]:
    """(document, start) of every window of this length once, and for each measure which of them are its own."""
    measures = [measure for measure, at in plan if at == length]
    pairs = [_pairs(plan[measure, length]) for measure in measures]
    distinct, index = np.unique(np.concatenate(pairs), axis=0, return_inverse=True)
    ends = np.cumsum([len(part) for part in pairs])[:-1]
    return distinct, dict(zip(measures, np.split(index.reshape(-1), ends), strict=True))


def _batches(
    model: LanguageModel, source: TokenSource, starts: npt.NDArray[np.int64], length: int, batch_tokens: int
) -> Iterator[tuple[slice, npt.NDArray[np.float32]]]:
    device = device_of(model)
    size = max(batch_tokens // length, 1)
    for at in range(0, len(starts), size):
        rows = slice(at, min(at + size, len(starts)))
        base = source.starts[starts[rows, 0]] + starts[rows, 1]
        tokens = torch.from_numpy(source.stream[base[:, None] + np.arange(length + 1)].astype(np.int64)).to(device)
        values = token_losses(model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).cpu().numpy()
        if not np.isfinite(values).all():
            bad = int(np.argwhere(~np.isfinite(values))[0][1])
            raise NotFinite(
                f"the model's loss is not a number at position {bad} of a window of {length}: "
                f"lower the learning rate, or check the encoding's parameters"
            )
        yield rows, values


def _by_region(measure: str, windows: Windows, losses: npt.NDArray[np.float32], regions: Regions) -> LengthLoss:
    counted = windows.counted()
    sums = np.where(counted, losses, 0.0).sum(1, dtype=np.float64)
    return LengthLoss(
        measure=measure,
        length=windows.length,
        nats=np.bincount(windows.region, weights=sums, minlength=len(regions)).astype(np.float64),
        counts=np.bincount(windows.region, weights=counted.sum(1), minlength=len(regions)).astype(np.int64),
        documents=regions.document.copy(),
    )
