"""Attention with a distance table as Triton kernels: what `distance_attention` runs on an accelerator.

Online softmax over tiles of keys, newest first; only tiles that a block of queries sees, and of those only tiles that
can matter. The bound: with N_i = |scale| |q_i| max|k| every product lies below N_i, so no logit of a tile exceeds
N_i + t, where t is the largest bias among its distances. Where that lies below m_i - ln(K / eps) for every row, m_i
being the row's largest logit so far, each key of the tile weighs at most eps / K of the row's denominator, which holds
exp(m_i). All keys left out weigh at most eps together, and move the output by at most 2 eps max|v|. The backward pass
puts the log-sum-exp, which is never below m_i, in the place of m_i.

Imports triton; `milepost.attention.fused` imports this module only where it may run. Its results have been compared
with the definition in Triton's interpreter, and its speed has not been measured on an accelerator.
"""

# Parameters of a kernel are pointers and scalars that Triton types at each launch.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

NEG_INF = float("-inf")

# ---------------------------------------------------------------------------------------------------------------------
# Kernels. A tile is BM queries by BN keys; `shift` is (slot of query 0) - (distance of the table's column 0), so that
# column shift + i - j holds the bias of query i and key j.


@triton.jit
def _load(pointer, rows, count, stride, size, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    inside = (rows < count)[:, None] & (columns < size)[None, :]
    return tl.load(pointer + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _store(pointer, values, rows, count, size, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    inside = (rows < count)[:, None] & (columns < size)[None, :]
    place = pointer + rows.to(tl.int64)[:, None] * size + columns[None, :]
    tl.store(place, values.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _largest_bias(tops, base, columns, BM: tl.constexpr, BN: tl.constexpr, SPAN: tl.constexpr):
    """Over the distances of a tile, from the maxima of BN columns each; never below the true maximum."""
    least = tl.maximum(base - (BN - 1), 0) // BN
    most = tl.minimum(base + BM - 1, columns - 1) // BN
    block = least + tl.arange(0, SPAN)
    return tl.max(tl.load(tops + block, mask=block <= most, other=float("-inf")), 0)


@triton.jit
def _matters(reach, top, level, seen, log_ratio):
    """Some row's logits of the tile may come within ln(K / eps) of its level; true where a NaN hides the answer."""
    over = tl.where(seen, reach + top - level, float("-inf"))
    return tl.max((over >= -log_ratio).to(tl.int32) + (over != over).to(tl.int32), 0) > 0


@triton.jit
def _logits(q, k, table, base, columns, lo, hi, start, scale, BM: tl.constexpr, BN: tl.constexpr):
    """(BM, BN), -inf where a pair is not visible or its distance not in the table."""
    local = tl.arange(0, BN)
    index = base + tl.arange(0, BM)[:, None] - local[None, :]
    keys = start + local[None, :]
    visible = (keys >= lo[:, None]) & (keys < hi[:, None]) & (index >= 0) & (index < columns)
    bias = tl.load(table + index, mask=visible, other=float("-inf"))
    product = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    return tl.where(visible, product + bias, float("-inf"))


@triton.jit
def _reach(q, scale, key_norm):
    wide = q.to(tl.float32)
    return tl.sqrt(tl.sum(wide * wide, 1)) * (tl.abs(scale) * key_norm * 1.001)


@triton.jit
def _forward_kernel(
    q, k, v, table, tops, lo, hi, begin, end, key_norms, out, lse,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, interval_batch, block_batch,
    heads, group, queries, keys, size, value_size, columns, top_columns, shift, scale, log_ratio,
    SKIP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    block, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = unit // heads, unit % heads
    key_head = head // group
    rows = block * BM + tl.arange(0, BM)
    k += batch * k_batch + key_head * k_head
    v += batch * v_batch + key_head * v_head
    table += head * columns
    tops += head * top_columns
    tile_q = _load(q + batch * q_batch + head * q_head, rows, queries, q_row, size, BD)
    low = tl.load(lo + batch * interval_batch + rows, mask=rows < queries, other=0)
    high = tl.load(hi + batch * interval_batch + rows, mask=rows < queries, other=0)
    lead = tl.load(begin + batch * block_batch + block) // BN
    tiles = tl.cdiv(tl.load(end + batch * block_batch + block), BN) - lead
    reach = _reach(tile_q, scale, tl.load(key_norms + batch * (heads // group) + key_head))
    largest = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    sums = tl.zeros((BM, BV), tl.float32)
    for step in range(0, tiles):
        start = (lead + tiles - 1 - step) * BN
        base = shift + block * BM - start
        live = True
        if SKIP:
            top = _largest_bias(tops, base, columns, BM, BN, SPAN)
            live = _matters(reach, top, largest, low < high, log_ratio)
        if live:
            at = start + tl.arange(0, BN)
            tile_k = _load(k, at, keys, k_row, size, BD)
            tile_v = _load(v, at, keys, v_row, value_size, BV)
            s = _logits(tile_q, tile_k, table, base, columns, low, high, start, scale, BM, BN)
            higher = tl.maximum(largest, tl.max(s, 1))
            finite = tl.where(higher == float("-inf"), 0.0, higher)
            p = tl.exp(s - finite[:, None])
            fade = tl.exp(largest - finite)
            total = total * fade + tl.sum(p, 1)
            sums = sums * fade[:, None] + tl.dot(p.to(tile_v.dtype), tile_v, input_precision="ieee")
            largest = higher
    none = total == 0.0
    safe = tl.where(none, 1.0, total)
    _store(out + unit * queries * value_size, sums / safe[:, None], rows, queries, value_size, BV)
    tl.store(lse + unit * queries + rows, tl.where(none, float("-inf"), largest + tl.log(safe)), mask=rows < queries)


@triton.jit
def _query_kernel(
    q, k, v, table, tops, lo, hi, begin, end, key_norms, lse, delta, grad_out, grad_q, grad_table,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, interval_batch, block_batch,
    heads, group, queries, keys, size, value_size, columns, top_columns, shift, scale, log_ratio,
    TABLE: tl.constexpr, SKIP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    SPAN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradient of q, and of the table: sums over the diagonals of a tile, added atomically."""
    block, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = unit // heads, unit % heads
    key_head = head // group
    rows = block * BM + tl.arange(0, BM)
    k += batch * k_batch + key_head * k_head
    v += batch * v_batch + key_head * v_head
    table += head * columns
    tops += head * top_columns
    tile_q = _load(q + batch * q_batch + head * q_head, rows, queries, q_row, size, BD)
    tile_grad = _load(grad_out + unit * queries * value_size, rows, queries, value_size, value_size, BV)
    low = tl.load(lo + batch * interval_batch + rows, mask=rows < queries, other=0)
    high = tl.load(hi + batch * interval_batch + rows, mask=rows < queries, other=0)
    level = tl.load(lse + unit * queries + rows, mask=rows < queries, other=float("inf"))
    row_delta = tl.load(delta + unit * queries + rows, mask=rows < queries, other=0.0)
    lead = tl.load(begin + batch * block_batch + block) // BN
    tiles = tl.cdiv(tl.load(end + batch * block_batch + block), BN) - lead
    reach = _reach(tile_q, scale, tl.load(key_norms + batch * (heads // group) + key_head))
    sums = tl.zeros((BM, BD), tl.float32)
    # Place x of a diagonal holds the pairs with m - n = x - (BN - 1).
    diagonal = tl.arange(0, WIDTH)
    column = tl.arange(0, BM)[:, None] + (BN - 1) - diagonal[None, :]
    on_tile = (column >= 0) & (column < BN)
    column = tl.minimum(tl.maximum(column, 0), BN - 1)
    for step in range(0, tiles):
        start = (lead + step) * BN
        base = shift + block * BM - start
        live = True
        if SKIP:
            top = _largest_bias(tops, base, columns, BM, BN, SPAN)
            live = _matters(reach, top, level, low < high, log_ratio)
        if live:
            at = start + tl.arange(0, BN)
            tile_k = _load(k, at, keys, k_row, size, BD)
            tile_v = _load(v, at, keys, v_row, value_size, BV)
            s = _logits(tile_q, tile_k, table, base, columns, low, high, start, scale, BM, BN)
            p = tl.exp(s - level[:, None])
            ds = p * (tl.dot(tile_grad, tl.trans(tile_v), input_precision="ieee") - row_delta[:, None])
            sums += tl.dot(ds.to(tile_k.dtype), tile_k, input_precision="ieee") * scale
            if TABLE:
                line = tl.sum(tl.where(on_tile, tl.gather(ds, column, 1), 0.0), 0)
                place = base - (BN - 1) + diagonal
                inside = (place >= 0) & (place < columns) & (diagonal < BM + BN - 1)
                tl.atomic_add(grad_table + head * columns + place, line, mask=inside)
    _store(grad_q + unit * queries * size, sums, rows, queries, size, BD)


@triton.jit
def _key_kernel(
    q, k, v, table, tops, lo, hi, begin, end, key_norms, lse, delta, grad_out, grad_k, grad_v,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, interval_batch, block_batch,
    heads, group, queries, keys, size, value_size, columns, top_columns, shift, scale, log_ratio,
    SKIP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The gradients of k and v, summed over the heads that share them."""
    start, unit = tl.program_id(0) * BN, tl.program_id(1).to(tl.int64)
    key_heads = heads // group
    batch, key_head = unit // key_heads, unit % key_heads
    at = start + tl.arange(0, BN)
    tile_k = _load(k + batch * k_batch + key_head * k_head, at, keys, k_row, size, BD)
    tile_v = _load(v + batch * v_batch + key_head * v_head, at, keys, v_row, value_size, BV)
    key_norm = tl.load(key_norms + unit)
    sums_k = tl.zeros((BN, BD), tl.float32)
    sums_v = tl.zeros((BN, BV), tl.float32)
    blocks = tl.cdiv(queries, BM)
    for step in range(0, group * blocks):
        head, block = key_head * group + step // blocks, step % blocks
        first = tl.load(begin + batch * block_batch + block)
        last = tl.load(end + batch * block_batch + block)
        if (first < start + BN) & (last > start):
            row_unit = batch * heads + head
            rows = block * BM + tl.arange(0, BM)
            low = tl.load(lo + batch * interval_batch + rows, mask=rows < queries, other=0)
            high = tl.load(hi + batch * interval_batch + rows, mask=rows < queries, other=0)
            level = tl.load(lse + row_unit * queries + rows, mask=rows < queries, other=float("inf"))
            tile_q = _load(q + batch * q_batch + head * q_head, rows, queries, q_row, size, BD)
            base = shift + block * BM - start
            live = True
            if SKIP:
                top = _largest_bias(tops + head * top_columns, base, columns, BM, BN, SPAN)
                live = _matters(_reach(tile_q, scale, key_norm), top, level, low < high, log_ratio)
            if live:
                row_delta = tl.load(delta + row_unit * queries + rows, mask=rows < queries, other=0.0)
                tile_grad = _load(grad_out + row_unit * queries * value_size, rows, queries, value_size, value_size, BV)
                line = table + head * columns
                s = _logits(tile_q, tile_k, line, base, columns, low, high, start, scale, BM, BN)
                p = tl.exp(s - level[:, None])
                sums_v += tl.dot(tl.trans(p.to(tile_grad.dtype)), tile_grad, input_precision="ieee")
                ds = p * (tl.dot(tile_grad, tl.trans(tile_v), input_precision="ieee") - row_delta[:, None])
                sums_k += tl.dot(tl.trans(ds.to(tile_q.dtype)), tile_q, input_precision="ieee") * scale
    _store(grad_k + unit * keys * size, sums_k, at, keys, size, BD)
    _store(grad_v + unit * keys * value_size, sums_v, at, keys, value_size, BV)


# ---------------------------------------------------------------------------------------------------------------------
# The host's side


class _Launch:
    """What the three kernels share: tile sizes, intervals of blocks of queries, maxima of the table, strides."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table: Tensor,
        lo: Tensor,
        hi: Tensor,
        first: int,
        offset: int,
        scale: float,
        skip_eps: float,
        key_bound: Tensor | None,
    ) -> None:
        self.q, self.k, self.v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
        self.batch, self.heads, self.queries, self.size = q.shape
        self.key_heads, self.keys, self.value_size = k.shape[1], k.shape[2], v.shape[3]
        widths = [max(16, triton.next_power_of_2(n)) for n in (self.size, self.value_size)]
        row_bytes = max(widths) * q.element_size()
        tile = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16  # so that all tiles fit into shared memory
        skip = skip_eps > 0
        self.table = table.detach().float().contiguous()
        self.constants = {"SKIP": skip, "BM": tile, "BN": tile, "BD": widths[0], "BV": widths[1], "SPAN": 4}
        self.width = 2 * tile

        lo, hi = torch.broadcast_tensors(lo.clamp(min=0), hi.clamp(max=self.keys))
        lo, hi = lo.int().contiguous(), hi.int().contiguous()
        self.blocks = triton.cdiv(self.queries, tile)
        missing = self.blocks * tile - self.queries
        begin = torch.nn.functional.pad(torch.where(lo < hi, lo, self.keys), (0, missing), value=self.keys)
        end = torch.nn.functional.pad(torch.where(lo < hi, hi, 0), (0, missing))
        begin = begin.view(-1, self.blocks, tile).amin(-1).contiguous()
        end = end.view(-1, self.blocks, tile).amax(-1).contiguous()

        columns = self.table.shape[1]
        top_columns = triton.cdiv(columns, tile)
        padded = torch.nn.functional.pad(self.table, (0, top_columns * tile - columns), value=NEG_INF)
        tops = padded.view(self.heads, top_columns, tile).amax(-1).contiguous()
        if not skip:
            norms = self.table.new_zeros((self.batch, self.key_heads))
        elif key_bound is None:
            norms = torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32).amax(-1)
        else:
            norms = key_bound.float().expand(self.batch, self.key_heads)

        shared = 0 if lo.shape[0] == 1 else 1
        self.tensors = (self.q, self.k, self.v, self.table, tops, lo, hi, begin, end, norms.contiguous())
        self.numbers = (
            *(t.stride(axis) for t in (self.q, self.k, self.v) for axis in range(3)),
            shared * self.queries,
            shared * self.blocks,
            self.heads,
            self.heads // self.key_heads,
            self.queries,
            self.keys,
            self.size,
            self.value_size,
            columns,
            top_columns,
            offset - first,
            float(scale),
            math.log(self.keys / skip_eps) if skip else 0.0,
        )


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current accelerator, which need not be the tensors' own."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lo: Tensor,
    hi: Tensor,
    first: int,
    offset: int,
    scale: float,
    skip_eps: float,
    key_bound: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp), as `distance_attention` says; a distance outside the table is not seen.

    Sums are in float32; weights are rounded to the dtype of v before they meet the values.
    """
    out = q.new_zeros((*q.shape[:3], v.shape[3]))
    lse = q.new_full(q.shape[:3], NEG_INF, dtype=torch.float32)
    if out.numel() == 0 or k.shape[2] == 0 or table.shape[1] == 0:
        return out, lse
    launch = _Launch(q, k, v, table, lo, hi, first, offset, scale, skip_eps, key_bound)
    grid = (launch.blocks, launch.batch * launch.heads)
    with _on(q.device):
        _forward_kernel[grid](*launch.tensors, out, lse, *launch.numbers, **launch.constants)
    return out, lse


def backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lo: Tensor,
    hi: Tensor,
    out: Tensor,
    lse: Tensor,
    first: int,
    offset: int,
    scale: float,
    skip_eps: float,
    key_bound: Tensor | None = None,
    *,
    table_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and the table. On an accelerator the table's are summed in no fixed order."""
    grad_q, grad_k, grad_v = (t.new_zeros(t.shape) for t in (q, k, v))
    grad_table = torch.zeros(table.shape if table_grad else (0,), dtype=torch.float32, device=table.device)
    if out.numel() == 0 or k.shape[2] == 0 or table.shape[1] == 0:
        return grad_q, grad_k, grad_v, grad_table.to(table.dtype)
    launch = _Launch(q, k, v, table, lo, hi, first, offset, scale, skip_eps, key_bound)
    grad_out = grad_out.to(q.dtype).contiguous()
    delta = (grad_out.float() * out.float()).sum(-1) - grad_lse.float()
    level = lse.masked_fill(lse == NEG_INF, math.inf).contiguous()
    shared = (*launch.tensors, level, delta.contiguous(), grad_out)
    grid = (launch.blocks, launch.batch * launch.heads)
    with _on(q.device):
        _query_kernel[grid](
            *shared, grad_q, grad_table, *launch.numbers, TABLE=table_grad, WIDTH=launch.width, **launch.constants
        )
        grid = (triton.cdiv(launch.keys, launch.constants["BN"]), launch.batch * launch.key_heads)
        _key_kernel[grid](*shared, grad_k, grad_v, *launch.numbers, **launch.constants)
    return grad_q, grad_k, grad_v, grad_table.to(table.dtype)
