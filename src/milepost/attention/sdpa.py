"""torch's own scaled dot-product attention: plain, with a Hankel view of a distance table, or with a dense mask."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from milepost.attention import blocked
from milepost.attention.tiles import transformed
from milepost.attention.windows import largest_norms, windows
from milepost.positions import Positions
from milepost.terms import DistanceBias, PairBias, Terms

CHUNK = 256
"""Queries handled at a time by the Hankel view, so that keys later than the chunk are skipped.

Measured on a CPU, biased forward: 17 ms at 1024 and 63 at 2048, against 26 and 78 in chunks of 1024.
"""

FEW_QUERIES, FEW_KEYS = 32, 2048
"""Fewer of them gain nothing in `blocked` (one query and 16384 keys: 8.8 against 7.7 ms; 1024 of both: 22 to 17)."""

WORTH_READING = 0.7
"""The share of pairs within reach of a bias below which `blocked`, which leaves out the others, is faster on a CPU.

Measured with ALiBi, `blocked` against this backend: 1.0 at 2048 (share 0.7), 0.8 at 4096, 0.6 at 8192; with biases that
leave nothing out 1.1 to 1.2.
"""

PAIR_NUMBERS = 1 << 20
"""The largest mask, in numbers, that a bias of two positions is written out to; beyond it tiles are faster.

Measured with FIRE on a CPU, tiles against masks: 24 and 21 ms at 0.5 million numbers with gradients, 6.6 and 4.5
without; 107 and 147 at 2.1 million, 22 and 49 without.
"""

LEARNED_NUMBERS = 1 << 17
"""The largest mask that a learned distance table is written out to; beyond it `blocked` is faster.

Measured with KERPLE on a CPU, forward and backward: 5.5 against `blocked`'s 8.9 ms at 65,536 numbers and 2.0 against
3.2 at 131,072; 11.8 against 9.9 at 262,144.
"""

LOG_KEYS = 21.0
"""At least ln K for any K below a billion; a constant, so that one traced graph serves all lengths."""


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
    if softcap is not None:
        return "soft-capped logits"
    if transformed():
        return "torch's attention on a CPU has no forward-mode derivative, and torch.func may ask for one"
    if _learned(terms) and (torch.compiler.is_compiling() or _numbers(q, k) > LEARNED_NUMBERS):
        return f"a learned distance table of {q.shape[2]} x {k.shape[2]} pairs: its mask would need a gradient as large"
    if isinstance(terms.bias, PairBias) and dropout == 0 and not torch.compiler.is_compiling():
        if _numbers(q, k) > PAIR_NUMBERS:
            return f"a bias of two positions would become a mask of {_numbers(q, k) * 4 / 2**20:.3g} MiB"
    by_intervals = positions.slot_distance and isinstance(positions.query_start, int) and dropout == 0
    by_distance = terms.bias is None or isinstance(terms.bias, DistanceBias)
    if by_intervals and by_distance and not positions.plain() and positions.num_queries != 1:
        return "padding or packed documents would need a dense mask; a backend that reads intervals serves them"
    return None


def _learned(terms: Terms) -> bool:
    return isinstance(terms.bias, DistanceBias) and terms.bias.table.requires_grad and torch.is_grad_enabled()


def _numbers(q: Tensor, k: Tensor) -> int:
    """Of a mask for every head."""
    return q.shape[1] * q.shape[2] * k.shape[2]


def discouraged(q: Tensor, k: Tensor, v: Tensor, positions: Positions, terms: Terms) -> str | None:
    """Why ``backend="auto"`` asks on, though this would serve: a decaying bias, whose far keys `blocked` leaves out."""
    bias, start = terms.bias, positions.query_start
    if q.device.type != "cpu" or torch.compiler.is_compiling() or not isinstance(start, int):
        return None
    if not isinstance(bias, DistanceBias) or bias.first != 0 or not positions.causal:
        return None
    if positions.num_queries < FEW_QUERIES or positions.num_keys < FEW_KEYS:
        return None
    if blocked.refuses(q, k, v, positions, terms) is not None:
        return None
    if not bool((bias.table[:, 0] - bias.table.amin(1) > math.log(positions.num_keys / 1e-12)).any()):
        return None
    largest = largest_norms(q)[0] * largest_norms(k)[0].repeat_interleave(q.shape[1] // k.shape[1])
    reach = windows(bias.table, spread=2 * q.shape[3] ** -0.5 * largest, longest=positions.num_keys)
    stop = start + positions.num_queries
    pairs = _within(stop, reach) - _within(start, reach)
    share = float(pairs.double().mean()) * 2 / (stop * (stop + 1) - start * (start + 1))
    if share >= WORTH_READING:
        return None
    return f"would serve; blocked is asked first where {1 - share:.0%} of the pairs are out of the bias's reach"


def _within(queries: int, reach: Tensor) -> Tensor:
    """How many pairs the first so many queries have with keys nearer than `reach` and not later than themselves."""
    rising = reach.clamp(max=queries)
    return rising * (rising + 1) // 2 + (queries - rising) * reach


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
    """Exact for every mask and bias; ``O(H * K)`` memory where no padding, no documents and no pair bias is present."""
    simple = positions.plain() and terms.chunk is None and isinstance(positions.query_start, int)
    if simple and (terms.bias is None or isinstance(terms.bias, DistanceBias)):
        return _plain(q, k, v, positions, terms, scale, dropout, key_bound)
    return _dense(q, k, v, positions, terms, scale, dropout)


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Positions,
    terms: Terms,
    scale: float,
    dropout: float,
    key_bound: Tensor | None,
) -> Tensor:
    count, keys, start = positions.num_queries, positions.num_keys, positions.query_start
    assert isinstance(start, int)
    if not torch.compiler.is_compiling() and (count == 0 or keys == 0):
        return q.new_zeros((*q.shape[:3], v.shape[3]))
    unbiased = terms.bias is None and terms.window is None
    if unbiased and not positions.causal:
        return _sdpa(q, k, v, None, scale, dropout)
    if unbiased and count == keys:
        return _sdpa(q, k, v, None, scale, dropout, causal=True)
    if torch.compiler.is_compiling() or not positions.causal or count < 2 * CHUNK:
        return _hankel(q, k, v, positions, terms, scale, dropout, key_bound)
    blocks = []
    for begin in range(0, count, CHUNK):
        end = min(begin + CHUNK, count)
        seen = start + end
        rows, keys_seen, values = q[:, :, begin:end], k[:, :, :seen], v[:, :, :seen]
        blocks.append(_hankel(rows, keys_seen, values, positions, terms, scale, dropout, key_bound, begin))
    return torch.cat(blocks, dim=2)


def _hankel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Positions,
    terms: Terms,
    scale: float,
    dropout: float,
    key_bound: Tensor | None,
    begin: int = 0,
) -> Tensor:
    """Bias and causality in one line per head, viewed as the mask with strides (1, 1) over flipped queries.

    With ``x = (Q-1-i) + j`` the distance is ``start + Q - 1 - x``: one number per x, for every pair.
    """
    count, keys = q.shape[2], k.shape[2]
    start = positions.query_start + begin
    distance = (start + count - 1) - torch.arange(count + keys - 1, device=q.device)
    bias = terms.bias
    if isinstance(bias, DistanceBias):
        line = bias.table[:, (distance - bias.first).clamp(0, bias.table.shape[1] - 1)]
        zero_in_every_row = positions.causal or (count == keys and positions.query_start == 0)
        if line.device.type == "cpu" and zero_in_every_row:
            line = _without_denormals(line, distance, q, k, scale, key_bound)
    else:
        line = torch.zeros(1, count + keys - 1, device=q.device, dtype=torch.promote_types(q.dtype, torch.float32))
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if positions.causal:
        hidden = hidden | (distance < 0)
    if terms.window is not None:
        hidden = hidden | (distance >= terms.window) | (distance <= -terms.window)
    line = line.masked_fill(hidden, -torch.inf).contiguous()
    mask = line.unfold(1, keys, 1)[None]
    out = _sdpa(q.flip(2), k, v, mask.expand(-1, q.shape[1], -1, -1), scale, dropout)
    return out.flip(2)


def _without_denormals(
    line: Tensor, distance: Tensor, q: Tensor, k: Tensor, scale: float, key_bound: Tensor | None
) -> Tensor:
    """-inf where no weight can reach ``e^-28 / K`` of its row, because products of denormals are slow on CPUs.

    Bound: ``|q.k| * scale <= R/2`` with ``R = 2 * scale * max|q| * max|k|``, and distance 0 is visible in every row,
    so a weight is at most ``exp(R + b(d) - b(0))`` of the row's total.
    """
    largest_k = _largest_norm(k) if key_bound is None else key_bound.detach().float().amax()
    reach = 2 * abs(scale) * _largest_norm(q) * largest_k
    at_zero = torch.where(distance == 0, line, -torch.inf).amax(-1, keepdim=True)
    bound = at_zero - (reach + LOG_KEYS + 28.0)
    return line.masked_fill(line < bound, -torch.inf)


def _largest_norm(x: Tensor) -> Tensor:
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    return x.detach().float().norm(dim=-1).amax()


def _dense(
    q: Tensor, k: Tensor, v: Tensor, positions: Positions, terms: Terms, scale: float, dropout: float
) -> Tensor:
    allowed = positions.allowed(window=terms.window, chunk=terms.chunk)[:, None]
    some = allowed.any(-1, keepdim=True)
    visible = allowed | ~some
    if terms.bias is None:
        mask = visible
    else:
        mask = terms.bias.dense().masked_fill(~visible, -torch.inf)
    mask = mask.expand(-1, q.shape[1], -1, -1)
    k, v = positions.without_absent(k), positions.without_absent(v)
    return torch.where(some, _sdpa(q, k, v, mask, scale, dropout), 0.0)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, dropout: float, *, causal: bool = False
) -> Tensor:
    dtype = q.dtype
    if mask is not None and mask.dtype != torch.bool:
        work = torch.promote_types(mask.dtype, torch.float32) if dtype != torch.float64 else torch.float64
        q, k, v, mask = q.to(work), k.to(work), v.to(work), mask.to(work)
    elif not q.dtype == k.dtype == v.dtype:
        work = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        q, k, v = q.to(work), k.to(work), v.to(work)
    grouped = False
    if q.shape[1] != k.shape[1]:  # a branch, so that a traced comparison of sizes becomes a plain bool
        grouped = True
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scale,
        enable_gqa=grouped,
    )
    return out.to(dtype)
