"""The meaning of attention with :class:`~milepost.terms.Terms`: short, readable, exact in float64.

Every other backend is tested against this one. It never refuses.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from milepost.positions import Positions
from milepost.terms import Branch, Terms


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
    block: int | None = None,
) -> Tensor:
    """softmax over the allowed keys of ``scale * q'.k' + bias``, times the values. ``(B, H, Q, Dv)``.

    Computed in float64 for float64 inputs and in float32 otherwise; a row that may see no key, or only keys whose bias
    is -inf, gives 0. ``k`` and ``v`` are already transformed where ``terms`` has a single branch. ``block`` bounds
    memory: that many queries at a time, ``O(H * block * K)`` instead of ``O(H * Q * K)``, with the same result.
    """
    dtype = q.dtype
    work = torch.promote_types(dtype, torch.float32)
    q, k, v = q.to(work), positions.without_absent(k.to(work)), positions.without_absent(v.to(work))
    pairs = [
        (branch, branch.query(q) if branch.query else q, branch.key(k, at="keys") if branch.key else k)
        for branch in terms.branches or (Branch(),)
    ]
    count = positions.num_queries
    if block is None:
        return _rows(pairs, v, positions, terms, 0, count, scale, dropout, softcap).to(dtype)
    blocks = []
    for start in range(0, max(count, 1), block):
        stop = min(start + block, count)
        rows = [(branch, rotated_q[:, :, start:stop], rotated_k) for branch, rotated_q, rotated_k in pairs]
        blocks.append(_rows(rows, v, positions.rows(start, stop), terms, start, stop, scale, dropout, softcap))
    out = torch.cat(blocks, dim=2) if len(blocks) != 1 else blocks[0]
    return out.to(dtype)


def _rows(
    pairs: list[tuple[Branch, Tensor, Tensor]],
    v: Tensor,
    positions: Positions,
    terms: Terms,
    start: int,
    stop: int,
    scale: float,
    dropout: float,
    softcap: float | None,
) -> Tensor:
    allowed = positions.allowed(window=terms.window, chunk=terms.chunk)[:, None]
    _, q, k = pairs[0]
    logits = _per_group(q, k.mT) * scale
    if any(branch.near is not None or branch.far is not None for branch, _, _ in pairs):
        ruled = pairs[0][0].pairs(positions)[:, None]
        for branch, other_q, other_k in pairs[1:]:
            mine = branch.pairs(positions)[:, None]
            logits = torch.where(mine, _per_group(other_q, other_k.mT) * scale, logits)
            ruled = ruled | mine
        allowed = allowed & ruled
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)

    bias = None if terms.bias is None else terms.bias.rows(start, stop).dense().to(logits.dtype)
    if terms.scores is not None:
        logits = terms.scores(logits, bias, q=q, k=k, positions=positions, allowed=allowed, scale=scale)
    elif bias is not None:
        logits = logits + bias

    logits = logits.masked_fill(~allowed, -torch.inf)
    some = (logits.detach() != -torch.inf).any(-1, keepdim=True)
    weights = torch.softmax(logits.masked_fill(~some, 0.0), dim=-1)
    weights = F.dropout(torch.where(some, weights, 0.0), dropout)
    addition = None
    if terms.weights is not None:
        weights, addition = terms.weights(weights, positions=positions)
    out = _per_group(weights, v)
    return out if addition is None else out + addition


def _per_group(a: Tensor, b: Tensor) -> Tensor:
    """``(B, H, m, n) @ (B, Hkv, n, p)`` where each of the Hkv heads serves ``H / Hkv`` consecutive heads of ``a``."""
    if a.shape[1] == b.shape[1]:
        return a @ b
    batch, heads, rows, inner = a.shape
    grouped = a.reshape(batch, b.shape[1], heads // b.shape[1] * rows, inner)
    return (grouped @ b).view(batch, heads, rows, b.shape[-1])
