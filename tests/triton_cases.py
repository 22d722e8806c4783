"""The Triton kernels in Triton's interpreter, against the float64 definition. Run by test_triton.py in a process where
TRITON_INTERPRET=1 was set before triton was imported."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from milepost import Positions, Terms, attend, build, explain
from milepost.attention import fused, triton_kernel
from milepost.attention.blocked import distance_attention

NEG_INF = float("-inf")


def causal(queries: int, keys: int) -> tuple[Tensor, Tensor]:
    place = torch.arange(keys - queries, keys)[None]
    return torch.zeros_like(place), place + 1


def bidirectional(queries: int, keys: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(1, queries, dtype=torch.int64), torch.full((1, queries), keys)


def window(queries: int, keys: int) -> tuple[Tensor, Tensor]:
    lo, hi = causal(queries, keys)
    return (hi - 17).clamp(min=0), hi


def left_padded(queries: int, keys: int) -> tuple[Tensor, Tensor]:
    lo, hi = causal(queries, keys)
    return torch.maximum(lo, torch.tensor([[keys // 3], [0]])), hi.expand(2, -1)


def packed(queries: int, keys: int) -> tuple[Tensor, Tensor]:
    lo, hi = causal(queries, keys)
    starts = torch.tensor([0, 5, 6, 40, 41, 80])
    return starts[torch.searchsorted(starts, hi - 1, right=True) - 1], hi


def scattered(queries: int, keys: int) -> tuple[Tensor, Tensor]:
    edges = torch.randint(0, keys + 1, (2, queries, 2)).sort(-1).values
    return edges[..., 0], edges[..., 1]


def empty(queries: int, keys: int) -> tuple[Tensor, Tensor]:
    lo, hi = causal(queries, keys)
    return lo.expand(2, -1), torch.stack([hi[0], torch.zeros_like(hi[0])])


def random_table(heads: int, first: int, count: int) -> Tensor:
    return torch.randn(heads, count)


def steep_table(heads: int, first: int, count: int) -> Tensor:
    return -5.0 * torch.arange(1, heads + 1)[:, None] * torch.arange(first, first + count).abs()


def holed_table(heads: int, first: int, count: int) -> Tensor:
    return random_table(heads, first, count).masked_fill(torch.arange(first, first + count) % 5 == 3, NEG_INF)


def cliff_table(heads: int, first: int, count: int) -> Tensor:
    """Steep decay, and far distances that matter again."""
    table = 4 * steep_table(heads, first, count)
    table[:, -1] = 1.0
    table[:, count // 2 + count // 4] = 2.0
    return table


def make(
    queries: int,
    keys: int,
    pattern: Callable[[int, int], tuple[Tensor, Tensor]] = causal,
    table: Callable[[int, int, int], Tensor] = random_table,
    *,
    heads: int = 4,
    key_heads: int = 2,
    size: int = 16,
    value_size: int = 16,
    norm: float = 1.0,
    batch: int = 2,
) -> tuple[list[Tensor], dict[str, object]]:
    q = norm * torch.randn(batch, heads, queries, size)
    k, v = norm * torch.randn(batch, key_heads, keys, size), torch.randn(batch, key_heads, keys, value_size)
    lo, hi = pattern(queries, keys)
    first = 1 - keys
    leaves = [t.requires_grad_() for t in (q, k, v, table(heads, first, 2 * keys))]
    scale = 1 / math.sqrt(size)
    return leaves, {"lo": lo, "hi": hi, "first": first, "offset": keys - queries, "scale": scale}


def dense(leaves: list[Tensor], lo: Tensor, hi: Tensor, first: int, offset: int, scale: float) -> tuple[Tensor, Tensor]:
    """The definition."""
    q, k, v, table = leaves
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    place, key = torch.arange(q.shape[2]) + offset, torch.arange(k.shape[2])
    seen = (key >= lo[..., None]) & (key < hi[..., None])
    logits = scale * q @ k.mT + table[:, (place[:, None] - key - first).clamp(0, table.shape[1] - 1)]
    logits = logits.masked_fill(~seen[:, None], NEG_INF)
    top = logits.detach().amax(-1, keepdim=True)
    top = top.masked_fill(top == NEG_INF, 0.0)
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True)
    none = total == 0
    total = total.masked_fill(none, 1.0)
    return (weights / total) @ v, (total.log() + top).masked_fill(none, NEG_INF).squeeze(-1)


def through(results: tuple[Tensor, Tensor], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Gradients through the output and through the log-sum-exp."""
    out, lse = results
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    loss = (out.double() * weight).sum() + (torch.where(lse == NEG_INF, 0.0, lse.double()) * weight[..., 0]).sum()
    return torch.autograd.grad(loss, leaves)


def compare(leaves: list[Tensor], where: dict, tolerance: float = 5e-6, **options: float) -> None:
    got = distance_attention(*leaves, **where, implementation="triton", **options)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted = dense(exact, **where)
    assert got[0].dtype == leaves[0].dtype and got[1].dtype == torch.float32
    torch.testing.assert_close(got[0].double(), wanted[0], rtol=0, atol=tolerance)
    torch.testing.assert_close(got[1].double(), wanted[1], rtol=1e-5, atol=tolerance)
    for a, b in zip(through(got, leaves), through(wanted, exact), strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a.double(), b, rtol=0, atol=4 * tolerance * max(1.0, float(b.abs().max())))


@pytest.mark.parametrize(
    "pattern", [causal, bidirectional, window, left_padded, packed, scattered, empty], ids=lambda f: f.__name__
)
def test_patterns(pattern: Callable[[int, int], tuple[Tensor, Tensor]]) -> None:
    compare(*make(66, 90, pattern, heads=4 if pattern is causal else 2, key_heads=2 if pattern is causal else 1))


@pytest.mark.parametrize("table", [steep_table, holed_table, cliff_table], ids=lambda f: f.__name__)
@pytest.mark.parametrize("norm", [0.3, 5.0])
def test_tables_and_what_is_skipped(table: Callable[[int, int, int], Tensor], norm: float) -> None:
    """Skipping moves nothing beyond rounding, also where a far key matters and where norms are large."""
    leaves, where = make(66, 190, causal, table, heads=2, key_heads=1, norm=norm, batch=1)
    # Logits near 200 are rounded by 8e-6 or less, each summand of a product too: how it adds up is the processor's.
    compare(leaves, where, 6e-5 if norm > 1 else 5e-6)
    on = distance_attention(*leaves, **where, implementation="triton")[0]
    off = distance_attention(*leaves, **where, implementation="triton", skip_eps=0.0)[0]
    torch.testing.assert_close(on, off, rtol=0, atol=1e-6)


def test_tiles_are_skipped() -> None:
    """Keys in tiles out of reach are not even read: NaN there is not met, and is met when nothing is skipped."""
    leaves, where = make(64, 192, causal, steep_table, heads=1, key_heads=1, norm=0.3)
    q, k, v, table = (leaf.detach() for leaf in leaves)
    v[:, :, :64] = math.nan
    got = distance_attention(q, k, v, table, **where, implementation="triton")[0]
    assert got.isfinite().all()
    assert distance_attention(q, k, v, table, **where, implementation="triton", skip_eps=0.0)[0].isnan().any()


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 130), (2, 65), (63, 64), (65, 65)])
def test_lengths(queries: int, keys: int) -> None:
    compare(*make(queries, keys, heads=2, batch=1))


@pytest.mark.parametrize(("size", "value_size"), [(8, 24), (40, 16), (80, 80), (160, 16)])
def test_head_sizes(size: int, value_size: int) -> None:
    compare(*make(20, 40, heads=2, size=size, value_size=value_size))


def test_strided_inputs() -> None:
    leaves, where = make(20, 40)
    q, k, v, table = leaves
    strided = [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in (q, k)]
    last = v.detach().mT.contiguous().mT.requires_grad_()
    compare([*strided, last, table], where)


def test_half_precision() -> None:
    leaves, where = make(20, 70)
    halves = [*(leaf.detach().half().requires_grad_() for leaf in leaves[:3]), leaves[3]]
    compare(halves, where, 2e-3)


def test_nothing_to_do() -> None:
    leaves, where = make(8, 8)
    q, k, v, table = leaves
    out, lse = distance_attention(q[:0], k[:0], v[:0], table, **where, implementation="triton")
    assert out.shape == (0, 4, 8, 16) and lse.shape == (0, 4, 8)
    gone = {**where, "lo": where["lo"][:, :0], "hi": where["hi"][:, :0]}
    out = distance_attention(q[:, :, :0], k, v, table, **gone, implementation="triton")[0]
    assert out.shape == (2, 4, 0, 16)
    assert all(not grad.any() for grad in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("into", [0, 1, 2])
def test_nan_and_infinity_reach_the_rows_that_see_them(value: float, into: int) -> None:
    leaves, where = make(20, 20)
    leaves = [leaf.detach() for leaf in leaves]
    leaves[into][1, 1, 10, 3] = value
    got = distance_attention(*leaves, **where, implementation="triton")[0].double()
    wanted = dense([leaf.double() for leaf in leaves], **where)[0]
    seen = torch.arange(20) >= 10 if into else torch.arange(20) == 10
    torch.testing.assert_close(got[:, :, seen], wanted[:, :, seen], rtol=0, atol=5e-6, equal_nan=True)
    assert not got.isfinite().all()


@pytest.mark.parametrize("name", ["alibi", "kerple-log", "rerope"])
def test_as_a_backend(name: str) -> None:
    """Tables and merged branches through `attend`, a padded batch, by name."""
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, :11] = 0
    positions = Positions.from_mask(mask, side="left")
    options = {"head_dim": 16, "window": 8} if name == "rerope" else {"num_heads": 4}
    encoding = build(name, **options)
    terms = encoding(positions)
    leaves = [torch.randn(2, heads, 30, 16, requires_grad=True) for heads in (4, 2, 2)]
    read = [*leaves, *encoding.parameters()]
    got, wanted = (attend(*leaves, positions, terms, backend=backend) for backend in ("triton", "reference"))
    torch.testing.assert_close(got, wanted, rtol=0, atol=5e-6)
    grads = [torch.autograd.grad(out.square().sum(), read, retain_graph=True) for out in (got, wanted)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-5 * max(1.0, float(b.abs().max())))


def test_only_by_name() -> None:
    positions = Positions.full(20)
    q = torch.randn(1, 4, 20, 16)
    explanation = explain(q, q, q, positions, build("alibi", num_heads=4)(positions))
    assert "only by name" in explanation.reasons["triton"] and explanation.chosen != "triton"
    double = explain(q.double(), q.double(), q.double(), positions, Terms())
    assert double.reasons["triton"].startswith("float64")
    assert fused.interpreted() and triton_kernel.triton.knobs.runtime.interpret
