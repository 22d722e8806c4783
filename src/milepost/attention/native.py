"""The backend `native`: the compiled CPU kernel, for biases of the distance and for none."""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.attention import blocked, library
from milepost.positions import Positions
from milepost.terms import DistanceBias, Terms

FEW_QUERIES = 128
"""Plain attention of fewer queries is faster in torch's own kernel (measured: 0.05 against 0.15 ms at 32)."""


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
    reason = blocked.refuses(q, k, v, positions, terms, dropout=dropout, softcap=softcap)
    if reason is not None:
        return reason
    wrong = library.unfit(q, k, v, terms.bias.table if isinstance(terms.bias, DistanceBias) else None)
    if wrong is not None:
        return wrong
    if torch.compiler.is_compiling():
        # A traced graph loads no library: where there is none, the operator computes in torch when it runs.
        return None
    if terms.is_empty() and positions.plain() and positions.num_queries < FEW_QUERIES:
        return f"plain attention of fewer than {FEW_QUERIES} queries: torch's own kernel is faster"
    return library.unavailable()


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
    key_bound: Tensor | None = None,
) -> Tensor:
    """Memory linear in the length; keys whose weight is provably nothing are left out, in both directions."""
    return blocked.serve(q, k, v, positions, terms, scale, "auto", key_bound)
