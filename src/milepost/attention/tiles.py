"""Attention with a distance table in plain torch: blocks of queries against the keys they see.

Right for every device and dtype. `milepost.attention.blocked` makes an operator with gradients of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

NEG_INF = float("-inf")
CPU_BLOCK_ROWS = 128
CPU_UNIT_ELEMENTS = 2**18
ACCELERATOR_BLOCK_ROWS = 512
ACCELERATOR_UNIT_ELEMENTS = 2**26


def compute_dtype(q: Tensor) -> torch.dtype:
    """float64 for float64, float32 for all others."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Inside, nothing is cast on this kind of device; nothing to do for devices that know no autocast (meta)."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def transformed() -> bool:
    """Whether ``torch.func`` (grad, jvp, vmap) or forward-mode differentiation looks on.

    Operators of our own know reverse mode alone: a tangent would be lost without a word.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def outside_the_table(least: int, most: int, first: int, count: int) -> ValueError:
    return ValueError(
        f"the intervals reach distances {least} .. {most}, the table holds {first} .. {first + count - 1}: "
        "make the table longer or the intervals shorter"
    )


def host_intervals(lo: Tensor, hi: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """On the host, int64, of one shape, clamped to the keys that exist."""
    low, high = torch.broadcast_tensors(lo.cpu().long().clamp(min=0), hi.cpu().long().clamp(max=keys))
    return low, high


def check_reach(lo: Tensor, hi: Tensor, first: int, count: int, offset: int) -> None:
    """ValueError where a visible pair's distance is not in the table."""
    seen = hi > lo
    if not bool(seen.any()):
        return
    place = torch.arange(lo.shape[1]) + offset
    least, most = int((place - hi + 1)[seen].min()), int((place - lo)[seen].max())
    if least < first or most >= first + count:
        raise outside_the_table(least, most, first, count)


# ---------------------------------------------------------------------------------------------------------------------
# The plan: blocks of query rows, each with the span of keys it sees


@dataclass(frozen=True)
class Block:
    """Query rows [row, row_end) against keys [key, key_end).

    Where the edges of the intervals run straight (constant or one step per row), distances outside [least, most] are
    invisible and that says everything; otherwise `ragged` and each row's own interval is masked.
    [shared_least, shared_most] are the distances that every row sees (empty if least > most).
    """

    row: int
    row_end: int
    key: int
    key_end: int
    least: int
    most: int
    shared_least: int
    shared_most: int
    ragged: bool


def plan(lo: Tensor, hi: Tensor, offset: int, rows: int) -> list[Block]:
    """Blocks of at most `rows` query rows that cover every visible pair of one batch row's intervals (Q,)."""
    blocks: list[Block] = []
    for start, end, straight in _segments(lo, hi, rows):
        for row in range(start, end, rows):
            row_end = min(row + rows, end)
            low, high = lo[row:row_end], hi[row:row_end]
            seen = high > low
            if not bool(seen.any()):
                continue
            low, high, place = low[seen], high[seen], torch.arange(row, row_end)[seen] + offset
            first_seen, last_seen = place - high + 1, place - low
            blocks.append(
                Block(
                    row,
                    row_end,
                    int(low.min()),
                    int(high.max()),
                    int(first_seen.min()),
                    int(last_seen.max()),
                    int(first_seen.max()),
                    int(last_seen.min()),
                    not straight,
                )
            )
    return blocks


def _segments(lo: Tensor, hi: Tensor, rows: int) -> Iterator[tuple[int, int, bool]]:
    """(start, end, straight) over all rows; runs too short to be worth a block of their own are joined, ragged."""
    pending: int | None = None
    for start, end in _straight_runs(lo, hi):
        if end - start < rows // 4 and (start > 0 or end < lo.shape[0]):
            pending = start if pending is None else pending
            if end - pending >= rows:
                yield pending, end, False
                pending = None
            continue
        if pending is not None:
            yield pending, start, False
            pending = None
        yield start, end, True
    if pending is not None:
        yield pending, lo.shape[0], False


def _straight_runs(lo: Tensor, hi: Tensor) -> Iterator[tuple[int, int]]:
    """Maximal runs of rows in which each edge of the interval either stands still or moves by one key a row."""
    queries = lo.shape[0]
    if queries == 0:
        return
    seen = hi > lo
    step_lo, step_hi = lo.diff(), hi.diff()
    straight = (step_lo >= 0) & (step_lo <= 1) & (step_hi >= 0) & (step_hi <= 1) & (seen[1:] == seen[:-1])
    both_empty = ~seen[1:] & ~seen[:-1]
    code = torch.where(both_empty, 4, torch.where(straight, step_lo + 2 * step_hi, 5))
    codes, counts = torch.unique_consecutive(code, return_counts=True)
    start, row, kind = 0, 0, None  # rows start..row stand in one open run of this kind
    for step, count in zip(codes.tolist(), counts.tolist(), strict=True):
        if step == 5:
            for _ in range(count):
                yield start, row + 1
                start = row = row + 1
            kind = None
            continue
        if kind is not None and kind != step:
            yield start, row + 1
            start = row + 1
        kind = step
        row += count
    yield start, queries


def batches(lo: Tensor, hi: Tensor, batch: int, offset: int, rows: int) -> Iterator[tuple[int, int, list[Block]]]:
    """(first batch row, end, blocks): batch rows with the same intervals share one plan."""
    if lo.shape[0] == 1:
        yield 0, batch, plan(lo[0], hi[0], offset, rows)
        return
    same = ((lo[1:] == lo[:-1]) & (hi[1:] == hi[:-1])).all(dim=1).tolist()
    start = 0
    for row in range(1, batch + 1):
        if row == batch or not same[row - 1]:
            yield start, row, plan(lo[start], hi[start], offset, rows)
            start = row


# ---------------------------------------------------------------------------------------------------------------------
# Biases of a block: one line per head, seen as a matrix


@dataclass
class _Run:
    """What both directions share: sizes, dtypes, the reversed table, and how work is cut into units."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    lo: Tensor
    hi: Tensor
    first: int
    offset: int
    scale: float
    skip_eps: float
    key_bound: Tensor | None

    def __post_init__(self) -> None:
        self.dtype = compute_dtype(self.q)
        self.batch, self.heads, self.queries, _ = self.q.shape
        self.key_heads, self.keys = self.k.shape[1], self.k.shape[2]
        self.group = self.heads // self.key_heads
        self.k, self.v = self.k.to(self.dtype), self.v.to(self.dtype)
        self.reversed = self.table.detach().to(self.dtype).flip(1)
        on_cpu = self.q.device.type == "cpu"
        rows = CPU_BLOCK_ROWS if on_cpu else ACCELERATOR_BLOCK_ROWS
        self.rows = max(16, rows // self.group)
        self.unit_elements = CPU_UNIT_ELEMENTS if on_cpu else ACCELERATOR_UNIT_ELEMENTS
        self.buffers: dict[str, Tensor] = {}
        self.margin = self._margin()

    def _margin(self) -> Tensor | None:
        """(B, H): how far below the reference a bias must lie for its keys not to matter; None: skip nothing."""
        if self.skip_eps <= 0 or self.keys == 0 or self.queries == 0 or self.table.shape[1] == 0:
            return None
        largest_q = torch.linalg.vector_norm(self.q, dim=-1, dtype=self.dtype).amax(-1)
        if self.key_bound is None:
            largest_k = torch.linalg.vector_norm(self.k, dim=-1).amax(-1)
        else:
            largest_k = self.key_bound.to(self.dtype).expand(self.batch, self.key_heads)
        largest_k = largest_k.repeat_interleave(self.group, dim=1)
        spread = 2 * abs(self.scale) * 1.001 * largest_q * largest_k
        margin = spread + math.log(self.keys / self.skip_eps)
        decay = self.reversed.amax(-1) - torch.where(self.reversed == NEG_INF, math.inf, self.reversed).amin(-1)
        return margin if bool((decay > margin).any()) else None

    def buffer(self, name: str, elements: int) -> Tensor:
        held = self.buffers.get(name)
        if held is None or held.numel() < elements:
            held = self.buffers[name] = torch.empty(elements, dtype=self.dtype, device=self.q.device)
        return held[:elements]

    def line(self, block: Block, start: int, end: int) -> Tensor:
        """(H, rows + keys - 1) biases of the block, nearest distance last; -inf where no pair or no weight is."""
        length = block.row_end - block.row + block.key_end - block.key - 1
        farthest = self.offset + block.row_end - 1 - block.key
        base = self.table.shape[1] - 1 - (farthest - self.first)
        line = self.reversed.new_full((self.heads, length), NEG_INF)
        distance_of = farthest  # the distance at place x of the line is farthest - x
        begin = max(0, -base)
        stop = min(length, self.table.shape[1] - base)
        if not block.ragged:
            begin = max(begin, distance_of - block.most)
            stop = min(stop, distance_of - block.least + 1)
        if stop > begin:
            line[:, begin:stop] = self.reversed[:, base + begin : base + stop]
        if self.margin is not None and block.shared_least <= block.shared_most:
            at = self.table.shape[1] - 1 + self.first
            common = self.reversed[:, at - block.shared_most : at - block.shared_least + 1].amax(-1)
            bound = common - self.margin[start:end].amax(0)
            line.masked_fill_(line < bound[:, None], NEG_INF)
        return line

    def units(self, block: Block, start: int, end: int, line: Tensor) -> Iterator[_Unit]:
        rows, keys = block.row_end - block.row, block.key_end - block.key
        count = max(1, self.unit_elements // max(1, self.group * rows * keys))
        strides = self.k.stride(), self.v.stride()
        foldable = all(self.key_heads == 1 or stride[0] == self.key_heads * stride[1] for stride in strides)
        together = min(end - start, count // self.key_heads) if foldable else 1
        together = max(1, together)
        step = self.key_heads if together > 1 else min(self.key_heads, max(count, torch.get_num_threads()))
        cuts = self._cuts(line, rows, keys)
        for batch in range(start, end, together):
            for head in range(0, self.key_heads, step):
                head_end = min(head + step, self.key_heads)
                mine = cuts[head * self.group : head_end * self.group]
                lead, tail = min(cut[0] for cut in mine), max(cut[1] for cut in mine)
                if lead < tail:
                    yield _Unit(self, block, line, batch, min(batch + together, end), head, head_end, lead, tail)

    def _cuts(self, line: Tensor, rows: int, keys: int) -> list[tuple[int, int]]:
        """For each head the keys of the block outside which no row has a bias above -inf."""
        if self.margin is None:
            return [(0, keys)] * self.heads
        alive = (line != NEG_INF).int()
        lead = alive.argmax(1)
        tail = line.shape[1] - alive.flip(1).argmax(1)
        none = alive.sum(1) == 0
        lead = (lead - rows + 1).clamp(min=0)
        tail = tail.clamp(max=keys).masked_fill(none, 0)
        return list(zip(lead.tolist(), tail.tolist(), strict=True))


@dataclass
class _Unit:
    """Some heads of some batch rows of one block; query rows are held last first, so that biases are one line."""

    run: _Run
    block: Block
    line: Tensor
    batch: int
    batch_end: int
    head: int
    head_end: int
    lead: int
    tail: int

    def __post_init__(self) -> None:
        run, block = self.run, self.block
        self.rows = block.row_end - block.row
        self.keys = self.tail - self.lead
        self.count = (self.batch_end - self.batch) * (self.head_end - self.head)
        self.stacked = run.group * self.rows
        self.query_heads = slice(self.head * run.group, self.head_end * run.group)
        self.key_slice = slice(block.key + self.lead, block.key + self.tail)
        self.k, self.v = self.of_keys(run.k), self.of_keys(run.v)

    def of_keys(self, tensor: Tensor) -> Tensor:
        """(count, keys, D): a view."""
        part = tensor[self.batch : self.batch_end, self.head : self.head_end, self.key_slice]
        return part.flatten(0, 1)

    def of_rows(self, tensor: Tensor) -> Tensor:
        """(count, group * rows, ...): the rows of this block, last first."""
        part = tensor[self.batch : self.batch_end, self.query_heads, self.block.row : self.block.row_end]
        part = part.to(self.run.dtype).flip(2)
        return part.reshape(self.count, self.stacked, *part.shape[3:])

    def put_rows(self, target: Tensor, rows: Tensor) -> None:
        part = target[self.batch : self.batch_end, self.query_heads, self.block.row : self.block.row_end]
        part.copy_(rows.reshape(part.shape).flip(2))

    def logits(self, q: Tensor) -> Tensor:
        """(count, group * rows, keys) in the run's buffer."""
        run, heads = self.run, self.head_end - self.head
        line = self.line[self.query_heads]
        shape = (self.batch_end - self.batch, heads, run.group, self.rows, self.keys)
        width = line.shape[1]
        bias = line.as_strided(shape, (0, run.group * width, width, 1, 1), line.storage_offset() + self.lead)
        s = run.buffer("logits", bias.numel()).view(shape)
        s.copy_(bias)
        if self.block.ragged:
            s.masked_fill_(~self._visible(), NEG_INF)
        s = s.view(self.count, self.stacked, self.keys)
        return s.baddbmm_(q, self.k.transpose(1, 2), alpha=run.scale)

    def _visible(self) -> Tensor:
        run, block = self.run, self.block
        own = min(self.batch, run.lo.shape[0] - 1)
        key = torch.arange(self.key_slice.start, self.key_slice.stop)
        lo, hi = (edge[own, block.row : block.row_end].flip(0)[:, None] for edge in (run.lo, run.hi))
        return ((key >= lo) & (key < hi)).to(run.q.device)


# ---------------------------------------------------------------------------------------------------------------------
# The two directions


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
    lo, hi = host_intervals(lo, hi, k.shape[2])
    check_reach(lo, hi, first, table.shape[1], offset)
    run = _Run(q, k, v, table, lo, hi, first, offset, scale, skip_eps, key_bound)
    out = q.new_zeros((run.batch, run.heads, run.queries, v.shape[3]))
    lse = q.new_full((run.batch, run.heads, run.queries), NEG_INF, dtype=run.dtype)
    for start, end, blocks in batches(lo, hi, run.batch, offset, run.rows):
        for block in blocks:
            line = run.line(block, start, end)
            for unit in run.units(block, start, end, line):
                s = unit.logits(unit.of_rows(q))
                top = s.amax(-1, keepdim=True)
                top = top.masked_fill(top == NEG_INF, 0.0)
                total = s.sub_(top).exp_().sum(-1, keepdim=True)
                unit.put_rows(out, torch.bmm(s, unit.v).div_(total.masked_fill(total == 0, 1.0)))
                unit.put_rows(lse, (total.log() + top).squeeze(-1))
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
    lo, hi = host_intervals(lo, hi, k.shape[2])
    run = _Run(q, k, v, table, lo, hi, first, offset, scale, skip_eps, key_bound)
    grad_q = q.new_zeros(q.shape)
    grad_k = torch.zeros(k.shape, dtype=run.dtype, device=k.device)
    grad_v = torch.zeros(v.shape, dtype=run.dtype, device=v.device)
    grad_line = torch.zeros(table.shape if table_grad else (0,), dtype=run.dtype, device=q.device)
    # d logits = P * (dO v - delta), where the gradient of the log-sum-exp enters as P * grad_lse
    delta = (grad_out.to(run.dtype) * out.to(run.dtype)).sum(-1) - grad_lse.to(run.dtype)
    lse = lse.masked_fill(lse == NEG_INF, math.inf)
    for start, end, blocks in batches(lo, hi, run.batch, offset, run.rows):
        for block in blocks:
            line = run.line(block, start, end)
            for unit in run.units(block, start, end, line):
                rows, rows_grad = unit.of_rows(q), unit.of_rows(grad_out)
                p = unit.logits(rows).sub_(unit.of_rows(lse)[..., None]).exp_()
                unit.of_keys(grad_v).baddbmm_(p.transpose(1, 2), rows_grad)
                # Each row one place further right than the one above, so that a diagonal is a column.
                shape = (unit.count, unit.stacked, unit.keys)
                width = unit.rows + unit.keys - 1
                flat = run.buffer("shifted", unit.count * unit.stacked * (width + 1))
                if table_grad:
                    flat.zero_()
                skewed = flat.as_strided(shape, (unit.stacked * (width + 1), width + 1, 1), flat.storage_offset())
                skewed.baddbmm_(rows_grad, unit.v.transpose(1, 2), beta=0)
                skewed.sub_(unit.of_rows(delta)[..., None]).mul_(p)
                unit.put_rows(grad_q, torch.bmm(skewed, unit.k).mul_(scale))
                unit.of_keys(grad_k).baddbmm_(skewed.transpose(1, 2), rows, alpha=scale)
                if table_grad:
                    _add_diagonals(grad_line, flat, unit, width)
    grad_table = grad_line.flip(1).to(table.dtype) if table_grad else table.new_empty((0,))
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_table


def _add_diagonals(grad_line: Tensor, flat: Tensor, unit: _Unit, width: int) -> None:
    run = unit.run
    heads = unit.query_heads.stop - unit.query_heads.start
    per_head = unit.rows * (width + 1)
    columns = flat.as_strided(
        (unit.batch_end - unit.batch, heads, unit.rows, width),
        (heads * per_head, per_head, width, 1),
        flat.storage_offset(),
    ).sum((0, 2))
    farthest = run.offset + unit.block.row_end - 1 - unit.key_slice.start
    base = run.table.shape[1] - 1 - (farthest - run.first)
    begin, stop = max(0, -base), min(width, run.table.shape[1] - base)
    if stop > begin:
        grad_line[unit.query_heads, base + begin : base + stop] += columns[:, begin:stop]
