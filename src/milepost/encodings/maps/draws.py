"""Random numbers as a pure function of a seed: the same in a cache, in chunks, when recomputed, and when compiled.

A training pass takes one number from torch's own generator (so ``torch.manual_seed`` rules it, and checkpointing
replays it); everything else is hashed from that number, the row and the position.
"""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.positions import Positions

BITS = 32
_MASK = (1 << BITS) - 1


def fresh_seed(device: torch.device) -> Tensor:
    """``(1,)`` int64 from torch's generator of that device."""
    return torch.randint(1 << 31, (1,), device=device)


def mix(*numbers: Tensor | int) -> Tensor:
    """An even 32-bit hash of integers, as int64; tensors broadcast. No product leaves the 63 bits of an int64."""
    state: Tensor | int = 0x2545F491
    for number in numbers:
        state = (state ^ (number & _MASK)) & _MASK
        state = state ^ (state >> 16)
        state = (state * 0x21F0AAAD) & _MASK
        state = state ^ (state >> 15)
        state = (state * 0x735A2D97) & _MASK
        state = state ^ (state >> 15)
    return torch.as_tensor(state)


def uniform(*numbers: Tensor | int) -> Tensor:
    """Float64 in [0, 1), a pure function of the numbers."""
    return mix(*numbers).double() / (1 << BITS)


def below(bound: Tensor | int, *numbers: Tensor | int) -> Tensor:
    """int64 in ``{0 .. bound - 1}``, a pure function of the numbers."""
    return (uniform(*numbers) * bound).floor().long()


def row_index(positions: Positions, tokens: Tensor | None) -> Tensor:
    """``(B|1, 1)``: the rows of the batch, as far as positions or tokens tell how many there are."""
    rows = positions.key.shape[0] if tokens is None else tokens.shape[0]
    return torch.arange(rows, device=positions.device)[:, None]


def documents(positions: Positions) -> tuple[Tensor | int, Tensor | int]:
    """Document ids of the queries and of the keys; 0 where every row is one document."""
    if positions.query_document is None or positions.key_document is None:
        return 0, 0
    return positions.query_document, positions.key_document
