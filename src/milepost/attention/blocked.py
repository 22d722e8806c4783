"""Attention with a distance table as one operator, and the backend `blocked` that serves it in plain torch.

The operator is `distance_attention`. Two implementations stand behind it: `tiles.py`, in plain torch, right for every
device and dtype, and the compiled kernel that `library.py` loads, on a CPU where there is one.
"""

from __future__ import annotations

from types import ModuleType
from typing import NoReturn

import torch
from torch import Tensor

from milepost.attention import library, tiles
from milepost.positions import Positions
from milepost.terms import Branch, DistanceBias, Terms

NEG_INF = float("-inf")
TRANSFORMED = "torch.func and forward-mode differentiation do not see into this operator: torch's own operations serve"


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
    if terms.scores is not None:
        return "content-dependent scores need whole rows of logits"
    if terms.weights is not None:
        return "the weights change after the softmax"
    if softcap is not None:
        return "soft-capped logits"
    if dropout > 0:
        return "dropout on the attention weights"
    if tiles.transformed():
        return TRANSFORMED
    if terms.bias is not None and not isinstance(terms.bias, DistanceBias):
        return "the bias is not a function of the distance between slots alone"
    if isinstance(positions.query_start, Tensor):
        return "the slot of the first query is known on the device only"
    if not positions.slot_distance and not positions.plain():
        return "the keys a query sees are not one interval of slots (a mask with holes)"
    if len({branch.chunk for branch in terms.branches}) > 1:
        return "branches count distances in different units"
    if not _disjoint(terms.branches):
        return "branches rule overlapping distances"
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
    key_bound: Tensor | None = None,
) -> Tensor:
    """Memory linear in the length, forward and backward; keys whose weight is provably nothing are left out."""
    return serve(q, k, v, positions, terms, scale, "torch", key_bound)


def serve(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Positions,
    terms: Terms,
    scale: float,
    implementation: str,
    key_bound: Tensor | None = None,
) -> Tensor:
    """`attend` by `distance_attention`; several branches are merged by their log-sum-exps.

    `key_bound` is of k as given: a branch that transforms keys, or a dtype that rounds them, goes without.
    """
    seen = positions.intervals(window=terms.window, chunk=terms.chunk)
    start = positions.query_start
    assert seen is not None and isinstance(start, int | torch.SymInt)
    table, first = _table(q, positions, terms)
    branches = terms.branches or (Branch(),)
    work = q.dtype if len(branches) == 1 else tiles.compute_dtype(q)
    parts = []
    for branch in branches:
        branch_q = q if branch.query is None else branch.query(q)
        branch_k = k if branch.key is None else branch.key(k, at="keys")
        branch_q, branch_k, branch_v = branch_q.to(work), branch_k.to(work), v.to(work)
        bound = key_bound if branch_k is k else None
        for lo, hi in _ruled(branch, *seen, positions):
            part = distance_attention(
                branch_q,
                branch_k,
                branch_v,
                table,
                lo,
                hi,
                first=first,
                offset=start,
                scale=scale,
                key_bound=bound,
                implementation=implementation,
            )
            parts.append(part)
    return merge(parts)[0].to(q.dtype)


def merge(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """One softmax over disjoint sets of keys from (out, log-sum-exp) of each set; a set may be empty in any row."""
    if len(parts) == 1:
        return parts[0]
    lse = torch.stack([part[1] for part in parts])
    top = lse.detach().amax(0)
    top = top.masked_fill(top == NEG_INF, 0.0)
    weights = torch.exp(lse - top)
    total = weights.sum(0)
    none = total == 0
    total = total.masked_fill(none, 1.0)
    out = sum((part[0] * (weight / total)[..., None] for part, weight in zip(parts, weights, strict=True)), start=0.0)
    assert isinstance(out, Tensor)
    return out, (total.log() + top).masked_fill(none, NEG_INF)


def _table(q: Tensor, positions: Positions, terms: Terms) -> tuple[Tensor, int]:
    """(H, n) in float32 (float64 for float64), and the distance of its first column."""
    if isinstance(terms.bias, DistanceBias):
        return terms.bias.table.to(tiles.compute_dtype(q)).expand(q.shape[1], -1), terms.bias.first
    first, stop = positions.distance_range()
    return torch.zeros((q.shape[1], stop - first), dtype=tiles.compute_dtype(q), device=q.device), first


def _disjoint(branches: tuple[Branch, ...]) -> bool:
    ranges = sorted((branch.near or 0, float("inf") if branch.far is None else branch.far) for branch in branches)
    return all(before[1] <= after[0] for before, after in zip(ranges, ranges[1:], strict=False))


def _ruled(branch: Branch, lo: Tensor, hi: Tensor, positions: Positions) -> list[tuple[Tensor, Tensor]]:
    """The intervals of keys at the distances a branch rules: past and present, and future where that is seen."""
    near, far = branch.near or 0, branch.far
    if near == 0 and far is None:
        return [(lo, hi)]
    if branch.chunk is not None:
        return _ruled_chunks(branch.chunk, near, far, lo, hi, positions)
    slots = positions.query_slots()[None]
    least, most = (lo, hi) if far is None else (torch.maximum(lo, slots - far + 1), torch.minimum(hi, slots + far))
    if near == 0:
        return [(least, most)]
    past = (least, torch.minimum(most, slots - near + 1))
    return [past] if positions.causal else [past, (torch.maximum(least, slots + near), most)]


def _ruled_chunks(
    size: int, near: int, far: int | None, lo: Tensor, hi: Tensor, positions: Positions
) -> list[tuple[Tensor, Tensor]]:
    """The same where distances count chunks; the chunk of a query begins where `intervals` says."""
    own = positions.intervals(chunk=size)
    assert own is not None
    begin = own[0]
    least = lo if far is None else torch.maximum(lo, begin - (far - 1) * size)
    past = (least, torch.minimum(hi, begin - (near - 1) * size))
    if positions.causal:
        return [past]
    most = hi if far is None else torch.minimum(hi, begin + far * size)
    if near == 0:
        return [(least, most)]
    return [past, (torch.maximum(lo, begin + near * size), most)]


def distance_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lo: Tensor,
    hi: Tensor,
    *,
    first: int,
    offset: int,
    scale: float,
    skip_eps: float = 1e-12,
    key_bound: Tensor | None = None,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention whose logits get a learned or fixed function of the distance, in memory linear in the length.

    logits[b, h, i, j] = scale * (q[b, h, i] . k[b, h * Hkv // H, j]) + table[h, (offset + i) - j - first]

    and query row i of batch row b sees exactly the keys lo[b, i] <= j < hi[b, i]: causality, windows, chunks, padding
    and packed documents are all such intervals.

    Shapes: q (B, H, Q, D); k (B, Hkv, K, D) and v (B, Hkv, K, Dv) with H a multiple of Hkv (keys are never repeated);
    table (H, n), whose column 0 is the distance `first`; lo and hi (B, Q) or (1, Q), integer.
    Returns out (B, H, Q, Dv) in the dtype of q and the log-sum-exp of each row's logits (B, H, Q) in float32 (float64
    for float64 inputs). A row that sees no key gets out = 0 and log-sum-exp = -inf.
    Arithmetic is float32 for float16, bfloat16 and float32 inputs and float64 for float64. q, k, v and table are
    differentiable, through both results. The same inputs give the same bits, forward and backward.

    skip_eps: keys that provably cannot matter are left out; 0 turns that off. Per head, let R = 2 |scale| max|q| max|k|
    (by Cauchy-Schwarz every product scale * q.k lies within R/2 of 0), and let b0 be the largest bias among the
    distances that every row of the block sees. A key whose bias lies below b0 - R - ln(K / skip_eps) has at most weight
    skip_eps / K in its row: its logit is below b0 - R/2 - ln(K / skip_eps), while the key at b0 alone puts at least
    exp(b0 - R/2) into the denominator. All keys left out together weigh at most skip_eps, so the output moves by at
    most 2 * skip_eps * max|v|. The table need not be monotone.

    key_bound: (B or 1, Hkv), a number that no |k| exceeds, where the caller keeps one: a cache that takes the running
    maximum as keys arrive spares a decoding step from reading keys that it then leaves out.

    implementation: "auto" (the compiled kernel where it can run, else torch), "native", "triton" or "torch".

    Raises ValueError for shapes that do not fit, and where an interval reaches a distance outside the table.
    """
    if tiles.transformed():
        raise RuntimeError(
            "distance_attention knows reverse-mode gradients alone: under torch.func or forward-mode differentiation "
            "call attend, which then takes torch's own operations"
        )
    out, lse = _distance_attention(q, k, v, table, lo, hi, first, offset, scale, skip_eps, key_bound, implementation)
    return out, lse


# ---------------------------------------------------------------------------------------------------------------------
# The operator and its gradient


@torch.library.custom_op("milepost::distance_attention", mutates_args=())
def _distance_attention(
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
    implementation: str,
) -> tuple[Tensor, Tensor]:
    check(q, k, v, table, lo, hi)
    run = implementing(implementation, q, k, v, table).forward
    with tiles.no_autocast(q.device):
        return run(q, k, v, table, lo, hi, first, offset, scale, skip_eps, key_bound)


# Called by torch alone, with the operator's own arguments, whose types the operator's signature states: the
# registrations from here on have no annotations of their own.
@_distance_attention.register_fake
def _(q, k, v, table, lo, hi, first, offset, scale, skip_eps, key_bound, implementation):  # type: ignore[no-untyped-def]
    batch, heads, queries, _ = q.shape
    out = q.new_empty((batch, heads, queries, v.shape[3]))
    return out, q.new_empty((batch, heads, queries), dtype=tiles.compute_dtype(q))


@torch.library.custom_op("milepost::distance_attention_backward", mutates_args=())
def _distance_attention_backward(
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
    key_bound: Tensor | None,
    implementation: str,
    table_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    run = implementing(implementation, q, k, v, table).backward
    arguments = (grad_out, grad_lse, q, k, v, table, lo, hi, out, lse, first, offset, scale, skip_eps, key_bound)
    with tiles.no_autocast(q.device):
        return run(*arguments, table_grad=table_grad)


@_distance_attention_backward.register_fake
def _(  # type: ignore[no-untyped-def]
    grad_out,
    grad_lse,
    q,
    k,
    v,
    table,
    lo,
    hi,
    out,
    lse,
    first,
    offset,
    scale,
    skip_eps,
    key_bound,
    implementation,
    table_grad,
):
    grad_table = table.new_empty(table.shape if table_grad else (0,))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), grad_table


def _setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, k, v, table, lo, hi, *settings, key_bound, implementation = inputs
    ctx.settings, ctx.implementation = settings, implementation
    ctx.save_for_backward(q, k, v, table, lo, hi, key_bound, *output)


def _autograd(ctx, grad_out, grad_lse):  # type: ignore[no-untyped-def]
    q, k, v, table, lo, hi, key_bound, out, lse = ctx.saved_tensors
    table_grad = ctx.needs_input_grad[3]
    grads = _distance_attention_backward(
        grad_out,
        grad_lse,
        q,
        k,
        v,
        table,
        lo,
        hi,
        out,
        lse,
        *ctx.settings,
        key_bound,
        ctx.implementation,
        table_grad,
    )
    return (*grads[:3], grads[3] if table_grad else None, *(None,) * 8)


_distance_attention.register_autograd(_autograd, setup_context=_setup_context)


def _autograd_twice(ctx: object, *grads: Tensor) -> NoReturn:
    raise RuntimeError(
        "distance_attention has no second derivative: ask for the first without create_graph, or call attend with "
        "backend='rows', which torch differentiates any number of times"
    )


_distance_attention_backward.register_autograd(_autograd_twice)


def implementing(implementation: str, q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> ModuleType:
    """The module whose `forward` and `backward` the operator runs."""
    if implementation == "triton":
        from milepost.attention import triton_kernel  # imports triton

        return triton_kernel
    return library if use_native(implementation, q, k, v, table) else tiles


def use_native(implementation: str, q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> bool:
    if implementation == "torch":
        return False
    if implementation not in ("auto", "native"):
        raise ValueError(f"implementation={implementation!r}: choose 'auto', 'native', 'triton' or 'torch'")
    reason = library.cannot(q, k, v, table)
    if reason is not None and implementation == "native":
        raise RuntimeError(f"the compiled attention kernel cannot run here: {reason}; use implementation='auto'")
    return reason is None


def check(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lo: Tensor, hi: Tensor) -> None:
    """ValueError where shapes do not fit."""
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(f"q, k, v need 4 axes (batch, heads, length, size), got {q.dim()}, {k.dim()}, {v.dim()}")
    batch, heads, queries, size = q.shape
    if k.shape[0] != batch or v.shape[:3] != k.shape[:3] or k.shape[3] != size:
        raise ValueError(f"shapes of q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit")
    if k.shape[1] == 0 or heads % k.shape[1]:
        raise ValueError(f"{heads} query heads cannot be divided among {k.shape[1]} key heads")
    if table.dim() != 2 or table.shape[0] != heads:
        raise ValueError(f"table must be ({heads}, distances), one row for each query head, got {tuple(table.shape)}")
    for name, bound in (("lo", lo), ("hi", hi)):
        if bound.dim() != 2 or bound.shape[0] not in (1, batch) or bound.shape[1] != queries:
            raise ValueError(f"{name} must be ({batch}, {queries}) or (1, {queries}), got {tuple(bound.shape)}")
