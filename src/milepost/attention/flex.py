"""FlexAttention: a distance table looked up, or a bias of two positions computed, inside torch's fused kernel.

Meant for accelerators. On a CPU, torch 2.13 runs it unfused unless compiled, and has no backward pass for it: there it
serves only who asks for it by name, for inference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from milepost.positions import Positions
from milepost.terms import DenseBias, DistanceBias, PairBias, Terms

BLOCK = 128
"""Queries and keys in one block of the block mask."""

Modification = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


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
    if terms.branches:
        return "several branches, or a branch that rules only some distances"
    if terms.scores is not None:
        return "content-dependent scores need whole rows of logits"
    if terms.weights is not None:
        return "the weights change after the softmax"
    if dropout > 0:
        return "dropout on the attention weights"
    if isinstance(terms.bias, DenseBias):
        return "a bias that is a tensor of all pairs"
    if not positions.slot_distance and not positions.plain():
        return "the keys a query sees are not one interval of slots (a mask with holes)"
    if min(q.numel(), k.numel(), v.numel()) == 0:
        return "nothing to attend to"
    if q.device.type == "cpu":
        if q.dtype != torch.float32:
            return f"on a CPU it is for float32; q is {q.dtype}"
        if torch.compiler.is_compiling():
            return "torch's compiler for CPUs does not take a mask or table that the same graph computes"
        if torch.is_grad_enabled() and any(t.requires_grad for t in _inputs(q, k, v, terms)):
            return "FlexAttention has no backward pass on a CPU"
        return None
    if q.dtype == torch.float64:
        return "float64 on an accelerator"
    if min(q.shape[3], v.shape[3]) < 16:
        return f"the fused kernel needs heads of 16 numbers or more; got {q.shape[3]} and {v.shape[3]}"
    return None


def discouraged(q: Tensor, k: Tensor, v: Tensor, positions: Positions, terms: Terms) -> str | None:
    """Why ``backend="auto"`` should not take it, though it would serve."""
    if q.device.type == "cpu":
        return "on a CPU FlexAttention holds all logits at once: only by name, for inference"
    if torch.compiler.is_compiling():
        return "inside a graph that is being compiled it is not proven: only by name"
    if isinstance(terms.bias, PairBias):
        return "a bias of two positions may hold matrix products, which a fused kernel cannot take: only by name"
    if terms.bias is None and positions.plain():
        return "no bias: torch's own kernel is made for it"
    if positions.num_queries < BLOCK:
        return f"fewer than {BLOCK} queries"
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
    """Blocks of keys that no query of a block sees are skipped; a row that sees no key gives 0.

    A learned distance table gets its gradient where torch gives one: on accelerators. The softmax is in float32.
    """
    seen = positions.intervals(window=terms.window, chunk=terms.chunk)
    assert seen is not None
    lo, hi = torch.broadcast_tensors(*seen)
    mask = block_mask(lo, hi, q.shape[0], positions.num_keys)
    modification = score_mod(positions, terms, softcap)
    grouped = False
    if q.shape[1] != k.shape[1]:
        grouped = True
    attention: Callable[..., Any] = flex_attention
    if q.device.type != "cpu" and not torch.compiler.is_compiling():
        attention = torch.compile(flex_attention)  # torch keeps the compiled code, under guards on all that matters
    out = attention(q, k, v, modification, mask, scale=scale, enable_gqa=grouped)
    assert isinstance(out, Tensor)
    return torch.where((hi > lo)[:, None, :, None], out, 0.0)


def score_mod(positions: Positions, terms: Terms, softcap: float | None = None) -> Modification | None:
    """``(score, b, h, i, j) -> score``: the soft cap, then the bias of one pair; None where nothing changes."""
    value = _value(positions, terms)
    if value is None and softcap is None:
        return None

    def modify(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if value is None else score + value(b, h, i, j)

    return modify


def _value(positions: Positions, terms: Terms) -> Mask | None:
    """``(b, h, i, j)`` -> the bias of one pair."""
    bias = terms.bias
    if isinstance(bias, DistanceBias):
        table = bias.table
        last, several = table.shape[1] - 1, table.shape[0] > 1
        # A tensor, so that a cache that grows does not compile anew.
        shift = torch.as_tensor(positions.query_start, device=table.device).reshape(()) - bias.first

        def lookup(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return table[h if several else 0, (i - j + shift).clamp(0, last)]

        return lookup
    if isinstance(bias, PairBias):
        query, key, function = bias.positions.query, bias.positions.key, bias.function

        def compute(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            at_query = query[b if query.shape[0] > 1 else 0, i]
            at_key = key[b if key.shape[0] > 1 else 0, j]
            of_heads = function(at_query[None, None], at_key[None, None])[0, :, 0, 0]
            return of_heads[h if of_heads.shape[0] > 1 else 0]

        return compute
    return None


def block_mask(lo: Tensor, hi: Tensor, batch: int, keys: int) -> BlockMask:
    """Of intervals ``lo <= j < hi``, each ``(B|1, Q)``: which blocks some of their rows see, and which all see."""
    queries = lo.shape[1]
    rows, columns = -(-queries // BLOCK), -(-keys // BLOCK)
    missing = rows * BLOCK - queries
    low, high = (torch.nn.functional.pad(edge, (0, missing)).view(-1, rows, BLOCK, 1) for edge in (lo, hi))
    begin = torch.arange(columns, device=lo.device) * BLOCK
    some = ((low < begin + BLOCK) & (high > begin) & (low < high)).any(2)
    every = ((low <= begin) & (high >= begin + BLOCK)).all(2)
    parts = (*_ordered(some & ~every), *_ordered(every))
    several = lo.shape[0] > 1

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        row = b if several else 0
        return (j >= lo[row, i]) & (j < hi[row, i])

    return BlockMask.from_kv_blocks(*parts, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(queries, keys))


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """``(B, rows, columns)`` bool -> how many per row, and their columns first, as FlexAttention wants them."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int()[:, None], order.int()[:, None].contiguous()


def _inputs(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, ...]:
    return (q, k, v, terms.bias.table) if isinstance(terms.bias, DistanceBias) else (q, k, v)
