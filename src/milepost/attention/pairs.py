"""Biases that are a function of two positions (FIRE, mapped and float positions), evaluated by tile, never as L x L.

Each tile of the bias is computed where it is needed, forward and backward, and forgotten: memory is
``O(H * ROWS * KEYS)`` beyond the inputs, the output and what the bias itself needs for one tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from milepost.attention import blocked, reference, rows
from milepost.attention.tiles import no_autocast, transformed
from milepost.positions import Positions
from milepost.terms import PairBias, Terms

ROWS, KEYS = 64, 256
"""A tile: large enough for the matrix products, small enough that FIRE's hidden layer stays near the core."""

NUMBERS = 1 << 19
"""Logits held at once; batch rows that share a tile of the bias are taken together up to this many."""

NOTHING = -80.0
"""A weight below ``e^-80`` of its row's largest so far is 0: all keys together move the output by less than
``K * 2e-35 * max|v|``, and products of denormal weights are slow on CPUs."""

NEG_INF = float("-inf")


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
    if not isinstance(terms.bias, PairBias):
        return "no bias that is a function of two positions"
    if terms.branches:
        return "several branches, or a branch that rules only some distances"
    if terms.scores is not None:
        return "content-dependent scores need whole rows of logits"
    if terms.weights is not None:
        return "the weights change after the softmax"
    if softcap is not None:
        return "soft-capped logits"
    if dropout > 0:
        return "dropout on the attention weights"
    if transformed():
        return blocked.TRANSFORMED
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
    """Exact for every mask. Gradients reach whatever the bias reads: parameters, and tensors computed from them.

    Tiles in which no pair is allowed are skipped: the future, other documents, keys outside a window. A row that sees
    no key gives 0. Under ``torch.compile`` the rows are one block, so that one graph serves all lengths.
    """
    bias = terms.bias
    assert isinstance(bias, PairBias)
    if torch.compiler.is_compiling() or not q.numel() or not k.numel():
        return reference.run(q, k, v, positions, terms, scale=scale)
    read = _tensors_read(bias)
    if read is None:
        return rows.run(q, k, v, positions, terms, scale=scale)
    work = torch.promote_types(q.dtype, torch.float32)
    plan = _Plan(bias, positions, terms.window, terms.chunk, scale, tuple(read))
    out: Tensor = _PairAttention.apply(plan, q.to(work), k.to(work), v.to(work), *read)
    return out.to(q.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# What the bias reads


class _Reader(TorchFunctionMode):
    """Collects the tensors with a gradient that operations take and that none of these operations made."""

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[int, Tensor] = {}
        self.made: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and tensor.requires_grad and id(tensor) not in self.made:
                self.read[id(tensor)] = tensor
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and id(tensor) not in self.read:
                self.made[id(tensor)] = tensor
        return result


def _tensors_read(bias: PairBias) -> list[Tensor] | None:
    """The tensors with a gradient that the function reads, found by asking it for one pair; None: not all are known."""
    if not torch.is_grad_enabled():
        return []
    with _Reader() as reader:
        asked = bias.function(bias.positions.query[:1, :1], bias.positions.key[:1, :1])
    if not asked.requires_grad:
        return []
    read = list(reader.read.values())
    known = {id(tensor) for tensor in read}
    # Every path from the answer must end in one of them; a hidden read (inside a custom Function) would lose gradients.
    stop = {tensor.grad_fn for tensor in read if tensor.grad_fn is not None}
    nodes, met = [asked.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in stop or node in met:
            continue
        met.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            return None
        nodes.extend(edge for edge, _ in node.next_functions)
    return read


# ---------------------------------------------------------------------------------------------------------------------
# Tiles


@dataclass(frozen=True, eq=False)
class _Tile:
    keys: slice
    hidden: Tensor | None
    """``(B|1, 1, r, k)``: pairs that are not allowed; None: all are."""


@dataclass(frozen=True, eq=False)
class _Plan:
    bias: PairBias
    positions: Positions
    window: int | None
    chunk: int | None
    scale: float
    read: tuple[Tensor, ...]

    def units(self, batch: int) -> list[slice]:
        """Batch rows that share their positions, hence their bias."""
        query, key = self.bias.positions.query, self.bias.positions.key
        if query.shape[0] == key.shape[0] == 1:
            return [slice(0, batch)]
        return [slice(row, row + 1) for row in range(batch)]

    def blocks(self, unit: slice) -> Iterator[tuple[slice, list[_Tile]]]:
        for start in range(0, self.positions.num_queries, ROWS):
            stop = min(start + ROWS, self.positions.num_queries)
            allowed = self.positions.rows(start, stop).allowed(window=self.window, chunk=self.chunk)[:, None]
            allowed = allowed[unit] if allowed.shape[0] > 1 else allowed
            tiles = []
            for begin in range(0, self.positions.num_keys, KEYS):
                keys = slice(begin, min(begin + KEYS, self.positions.num_keys))
                seen = allowed[..., keys]
                if bool(seen.all()):
                    tiles.append(_Tile(keys, None))
                elif bool(seen.any()):
                    tiles.append(_Tile(keys, ~seen))
            yield slice(start, stop), tiles

    def groups(self, unit: slice, heads: int) -> list[slice]:
        """The batch rows of a unit, as many at a time as fit, counted from the unit's first."""
        step = max(1, NUMBERS // (heads * ROWS * KEYS))
        count = unit.stop - unit.start
        return [slice(row, min(row + step, count)) for row in range(0, count, step)]

    def values(self, unit: slice, rows: slice, keys: slice) -> Tensor:
        """``(1, H, r, k)``: one tile of the bias."""
        query, key = self.bias.positions.query, self.bias.positions.key
        query = query[unit] if query.shape[0] > 1 else query
        key = key[unit] if key.shape[0] > 1 else key
        return self.bias.function(query[:, rows], key[:, keys])

    def logits(self, q: Tensor, k: Tensor, bias: Tensor, hidden: Tensor | None) -> Tensor:
        """``(n, H, r, k)``, -inf where a pair is not allowed."""
        s = _per_group(q, k.mT).mul_(self.scale).add_(bias)
        return s if hidden is None else s.masked_fill_(hidden, NEG_INF)


def _of(tensor: Tensor | None, rows: slice) -> Tensor | None:
    return tensor if tensor is None or tensor.shape[0] == 1 else tensor[rows]


def _per_group(a: Tensor, b: Tensor) -> Tensor:
    """``(n, H, r, x) @ (n, Hkv, x, y)`` where H / Hkv consecutive heads of a share one of b."""
    stacked = a.reshape(a.shape[0], b.shape[1], -1, a.shape[3])
    return torch.matmul(stacked, b).view(*a.shape[:3], b.shape[3])


def _summed(a: Tensor, b: Tensor, heads: int) -> Tensor:
    """``(n, H, r, x), (n, H, r, y) -> (n, Hkv, x, y)``: a^T b, summed over the rows and heads of each group."""
    a, b = (t.reshape(t.shape[0], heads, -1, t.shape[3]) for t in (a, b))
    return torch.matmul(a.mT, b)


def _weights(s: Tensor) -> Tensor:
    return s.masked_fill_(s < NOTHING, NEG_INF).exp_()


def _forward(plan: _Plan, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = q.new_full((*q.shape[:3], 1), NEG_INF)
    for unit in plan.units(q.shape[0]):
        unit_q, unit_k, unit_v = q[unit], k[unit], v[unit]
        for rows_, tiles in plan.blocks(unit):
            top, total, acc = lse[unit][:, :, rows_], None, out[unit][:, :, rows_]
            total = torch.zeros_like(top)
            for tile in tiles:
                bias = plan.values(unit, rows_, tile.keys)
                for group in plan.groups(unit, q.shape[1]):
                    hidden = _of(tile.hidden, group)
                    s = plan.logits(unit_q[group, :, rows_], unit_k[group, :, tile.keys], bias, hidden)
                    higher = torch.maximum(top[group], s.amax(-1, keepdim=True))
                    finite = higher.masked_fill(higher == NEG_INF, 0.0)
                    p = _weights(s.sub_(finite))
                    fade = torch.exp(top[group] - finite)
                    total[group].mul_(fade).add_(p.sum(-1, keepdim=True))
                    acc[group].mul_(fade).add_(_per_group(p, unit_v[group, :, tile.keys]))
                    top[group] = higher
            acc.div_(total.masked_fill(total == 0, 1.0))
            top.add_(total.log())
    return out, lse


def _backward(
    plan: _Plan, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    grads: list[Tensor | None] = [None] * len(plan.read)
    delta = (grad_out * out).sum(-1, keepdim=True)
    lse = lse.masked_fill(lse == NEG_INF, math.inf)
    heads = k.shape[1]
    for unit in plan.units(q.shape[0]):
        for rows_, tiles in plan.blocks(unit):
            for tile in tiles:
                with torch.set_grad_enabled(bool(plan.read)):
                    bias = plan.values(unit, rows_, tile.keys)
                fixed = bias.detach()
                grad_bias = torch.zeros_like(fixed, memory_format=torch.contiguous_format)
                for group in plan.groups(unit, q.shape[1]):
                    hidden = _of(tile.hidden, group)
                    batch = slice(unit.start + group.start, unit.start + group.stop)
                    row_q, row_grad = q[batch, :, rows_], grad_out[batch, :, rows_]
                    tile_k, tile_v = k[batch, :, tile.keys], v[batch, :, tile.keys]
                    p = _weights(plan.logits(row_q, tile_k, fixed, hidden).sub_(lse[batch, :, rows_]))
                    grad_v[batch, :, tile.keys] += _summed(p, row_grad, heads)
                    ds = _per_group(row_grad, tile_v.mT).sub_(delta[batch, :, rows_]).mul_(p)
                    grad_q[batch, :, rows_].add_(_per_group(ds, tile_k), alpha=plan.scale)
                    grad_k[batch, :, tile.keys].add_(_summed(ds, row_q, heads), alpha=plan.scale)
                    grad_bias += ds.sum_to_size(fixed.shape)
                if bias.requires_grad:
                    parts = torch.autograd.grad(bias, plan.read, grad_bias, allow_unused=True)
                    for place, part in enumerate(parts):
                        if part is not None:
                            held = grads[place]
                            grads[place] = part.clone() if held is None else held.add_(part)
    return grad_q, grad_k, grad_v, grads


class _PairAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, q: Tensor, k: Tensor, v: Tensor, *read: Tensor) -> Tensor:
        out, lse = _forward(plan, q, k, v)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, out, lse, *read)  # what is read: so that a change in place is noticed
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *_ = ctx.saved_tensors
        with no_autocast(q.device):
            grad_q, grad_k, grad_v, grads = _backward(ctx.plan, grad_out, q, k, v, out, lse)
        return None, grad_q, grad_k, grad_v, *grads
