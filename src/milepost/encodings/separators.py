"""Segments of a text, found by the ids of the tokens that close them."""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.positions import Positions

NEWLINE, FULL_STOP = 10, 46
"""Byte ids, the separators of the byte tokenizer."""


def segments(tokens: Tensor | None, positions: Positions, separators: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """For every key slot: how many separators its document had before it, and its place in its segment.

    A separator belongs to the segment it closes. Padding neither counts nor separates.

    Shapes: tokens ``(B, K)``; two int64 tensors ``(B, K)``.
    Raises ValueError when ``tokens`` are not the ids of all keys.
    """
    if tokens is None or tokens.shape[-1] != positions.num_keys:
        raise ValueError(
            f"segments are found in the ids of all {positions.num_keys} keys, (batch, keys); got "
            f"{'none' if tokens is None else tuple(tokens.shape)}"
        )
    closes = torch.zeros_like(tokens, dtype=torch.bool)
    for separator in separators:
        closes = closes | (tokens == separator)
    if positions.key_present is not None:
        closes = closes & positions.key_present
        order = (positions.key_present.long().cumsum(-1) - 1).clamp(min=0).expand_as(tokens)
    else:
        order = torch.arange(positions.num_keys, device=tokens.device).expand_as(tokens)
    before = closes.long().cumsum(-1) - closes.long()
    begin = _before(torch.where(closes, order + 1, 0).cummax(-1).values)
    if positions.key_document is not None:
        document = positions.key_document.expand_as(tokens)
        first = torch.zeros_like(closes)
        first[:, 1:] = document[:, 1:] != document[:, :-1]
        begin = torch.maximum(begin, torch.where(first, order, 0).cummax(-1).values)
        before = before - torch.where(first, before, 0).cummax(-1).values
    return before, (order - begin).clamp(min=0)


def _before(per_slot: Tensor) -> Tensor:
    """Each slot's predecessor's value; 0 at the first."""
    return torch.cat([torch.zeros_like(per_slot[:, :1]), per_slot[:, :-1]], dim=-1)


def check_separators(separators: tuple[int, ...]) -> None:
    """Raises ValueError unless these are token ids."""
    if any(not isinstance(i, int) or i < 0 for i in separators):
        raise ValueError(f"separators are token ids, such as ({NEWLINE}, {FULL_STOP}); got {separators!r}")
