"""Which encoding serves which layer: one set for all where it is shared as published, one for each layer otherwise."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch import nn

from milepost.encoding import Encoding, Mapped, Sum, from_spec
from milepost.model.config import MilepostConfig


def lay_out(config: MilepostConfig) -> tuple[nn.ModuleList, list[tuple[int, ...]], list[int]]:
    """The distinct encodings, which of them each layer uses, and the first of each kind (those that embed)."""
    modules: list[Encoding] = []
    schedule: list[tuple[int, ...]] = []
    first: dict[Encoding, int] = {}
    with _float32_and_own_generator():
        base = from_spec(config.encoding, config.geometry())
        for layer in range(config.num_layers):
            indices = []
            for part in _parts(base, layer):
                if part not in first:
                    first[part] = len(modules)
                    modules.append(part)
                elif not _is_shared(part, config.share_encoding):
                    modules.append(copy.deepcopy(part))
                    modules[-1].reset_parameters()
                    indices.append(len(modules) - 1)
                    continue
                indices.append(first[part])
            schedule.append(tuple(indices))
    return nn.ModuleList(modules), schedule, list(first.values())


def _parts(encoding: Encoding, layer: int) -> Iterator[Encoding]:
    encoding = encoding.for_layer(layer)
    if isinstance(encoding, Sum):
        for part in encoding.parts:
            yield from _parts(part, layer)  # type: ignore[arg-type]  # ModuleList hides the class
    else:
        yield encoding


def _is_shared(encoding: Encoding, share: bool | None) -> bool:
    while isinstance(encoding, Mapped):
        encoding = encoding.encoding
    info = encoding.info
    if info is None or info.injection == "initial":
        return True
    return info.shared if share is None else share


@contextlib.contextmanager
def _float32_and_own_generator() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.promote_types(before, torch.float32))
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_default_dtype(before)
