"""The reference in blocks of queries: content-dependent scores and everything no leaner backend takes.

Memory is ``O(H * block * K)``. Under ``torch.compile`` the rows are one block (a loop would make one graph per length)
and the compiler fuses it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.attention import reference
from milepost.positions import Positions
from milepost.terms import Terms

BLOCK_NUMBERS = 1 << 23
"""Logits held at once, over batch and heads."""


def refuses(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Positions,
    terms: Terms,
    *,
    dropout: float = 0.0,
    softcap: float | None = None,
) -> str | None:
    return None


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Positions,
    terms: Terms,
    *,
    scale: float,
    dropout: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    block = None
    if not torch.compiler.is_compiling():
        block = max(16, BLOCK_NUMBERS // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    return reference.run(q, k, v, positions, terms, scale=scale, dropout=dropout, softcap=softcap, block=block)
