"""The operator `distance_attention` against dense float64 autograd, in both of its implementations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from milepost.attention import library
from milepost.attention.blocked import distance_attention
from milepost.attention.tiles import plan

NEG_INF = float("-inf")
IMPLEMENTATIONS = ["torch", "native"]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and library.unavailable() is not None:
        pytest.skip(f"no compiled kernel: {library.unavailable()}")
    return request.param


# ---- patterns of visibility: (lo, hi) of Q queries that stand at offset .. offset + Q - 1, over K keys ---------------


def causal(queries: int, keys: int) -> tuple[Tensor, Tensor]:
    place = torch.arange(keys - queries, keys)[None]
    return torch.zeros_like(place), place + 1


def bidirectional(queries: int, keys: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(1, queries, dtype=torch.int64), torch.full((1, queries), keys)


def window(queries: int, keys: int) -> tuple[Tensor, Tensor]:
    lo, hi = causal(queries, keys)
    return (hi - 17).clamp(min=0), hi


def two_sided_window(queries: int, keys: int) -> tuple[Tensor, Tensor]:
    lo, hi = causal(queries, keys)
    return (hi - 17).clamp(min=0), (hi + 16).clamp(max=keys)


def chunked(queries: int, keys: int) -> tuple[Tensor, Tensor]:
    lo, hi = causal(queries, keys)
    return (hi - 1) // 48 * 48, hi


def left_padded(queries: int, keys: int) -> tuple[Tensor, Tensor]:
    lo, hi = causal(queries, keys)
    pads = torch.tensor([[keys // 3], [0]])
    return torch.maximum(lo, pads), hi.expand(2, -1)


def right_padded(queries: int, keys: int) -> tuple[Tensor, Tensor]:
    lo, hi = causal(queries, keys)
    ends = torch.tensor([[keys], [keys - keys // 3]])
    return lo.expand(2, -1), torch.minimum(hi, ends)


def packed(queries: int, keys: int) -> tuple[Tensor, Tensor]:
    lo, hi = causal(queries, keys)
    starts = torch.tensor([0, 5, 6, 40, 41, 42, 43, 150, 151, 300])
    begin = starts[torch.searchsorted(starts, hi - 1, right=True) - 1]
    return begin, hi


def scattered(queries: int, keys: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(queries * 1000 + keys)
    edges = torch.randint(0, keys + 1, (2, queries, 2), generator=generator).sort(-1).values
    return edges[..., 0].contiguous(), edges[..., 1].contiguous()


PATTERNS = [
    causal,
    bidirectional,
    window,
    two_sided_window,
    chunked,
    left_padded,
    right_padded,
    packed,
    scattered,
]


# ---- tables ----------------------------------------------------------------------------------------------------------


def random_table(heads: int, first: int, count: int) -> Tensor:
    return torch.randn(heads, count)


def alibi_table(heads: int, first: int, count: int) -> Tensor:
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)
    return -slopes[:, None] * torch.arange(first, first + count).abs()


def steep_table(heads: int, first: int, count: int) -> Tensor:
    return 20 * alibi_table(heads, first, count)


def growing_table(heads: int, first: int, count: int) -> Tensor:
    return -alibi_table(heads, first, count)


def holed_table(heads: int, first: int, count: int) -> Tensor:
    table = steep_table(heads, first, count)
    table[:, torch.arange(first, first + count) % 5 == 3] = NEG_INF
    table[0, (torch.arange(first, first + count) % 3) != 1] = NEG_INF
    return table


def cliff_table(heads: int, first: int, count: int) -> Tensor:
    """Steep decay, and one far distance that matters again."""
    table = 4 * steep_table(heads, first, count)
    table[:, -1] = 1.0
    table[:, count // 2] = 2.0
    return table


TABLES = [random_table, alibi_table, steep_table, growing_table, holed_table, cliff_table]


def dense(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, lo: Tensor, hi: Tensor, first: int, offset: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The definition, in float64."""
    q, k, v, table = (x.double() for x in (q, k, v, table))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    place, key = torch.arange(q.shape[2]) + offset, torch.arange(k.shape[2])
    index = (place[:, None] - key - first).clamp(0, max(table.shape[1] - 1, 0))
    seen = (key >= lo[..., None]) & (key < hi[..., None])
    logits = scale * q @ k.mT + table[:, index]
    logits = logits.masked_fill(~seen[:, None], NEG_INF)
    top = logits.detach().amax(-1, keepdim=True) if k.shape[2] else logits.new_zeros(*logits.shape[:3], 1)
    top = top.masked_fill(top == NEG_INF, 0.0)
    weights = torch.exp(logits - top)
    total = weights.sum(-1, keepdim=True)
    none = total == 0
    total = total.masked_fill(none, 1.0)
    return (weights / total) @ v, (total.log() + top).masked_fill(none, NEG_INF).squeeze(-1)


def make(
    queries: int,
    keys: int,
    pattern=causal,
    table=random_table,
    *,
    batch: int = 2,
    heads: int = 4,
    key_heads: int = 2,
    size: int = 16,
    value_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    norm: float = 1.0,
):
    torch.manual_seed(seed)
    q = (norm * torch.randn(batch, heads, queries, size)).to(dtype)
    k = (norm * torch.randn(batch, key_heads, keys, size)).to(dtype)
    v = torch.randn(batch, key_heads, keys, value_size or size).to(dtype)
    lo, hi = pattern(queries, keys)
    lo, hi = lo[:batch], hi[:batch]
    first = 1 - keys
    values = table(heads, first, 2 * keys).to(torch.float64 if dtype == torch.float64 else torch.float32)
    return q, k, v, values, lo, hi, first, keys - queries, 1 / math.sqrt(size)


def run(inputs, implementation: str, **options):
    q, k, v, table, lo, hi, first, offset, scale = inputs
    return distance_attention(
        q, k, v, table, lo, hi, first=first, offset=offset, scale=scale, implementation=implementation, **options
    )


def gradients(inputs, outputs, seed: int = 1, through_lse: bool = True):
    out, lse = outputs
    generator = torch.Generator().manual_seed(seed)
    loss = (out.double() * torch.randn(out.shape, generator=generator, dtype=torch.float64)).sum()
    if through_lse:
        weight = torch.randn(lse.shape, generator=generator, dtype=torch.float64)
        loss = loss + (torch.where(lse == NEG_INF, 0.0, lse.double()) * weight).sum()
    return torch.autograd.grad(loss, inputs)


def compare(inputs, implementation: str, tolerance: float, **options) -> None:
    q, k, v, table, *rest = inputs
    leaves = [x.clone().requires_grad_() for x in (q, k, v, table)]
    exact = [x.double().requires_grad_() for x in (q, k, v, table)]
    got, want = run((*leaves, *rest), implementation, **options), dense(*exact, *rest)
    assert got[0].dtype == q.dtype and got[0].is_contiguous() and got[1].is_contiguous()
    size = max(1.0, float(v.detach().abs().max())) if v.numel() else 1.0
    torch.testing.assert_close(got[0].double(), want[0], rtol=0, atol=tolerance * size)
    torch.testing.assert_close(got[1].double(), want[1], rtol=max(1e-6, tolerance), atol=max(2e-5, tolerance))
    for name, a, b in zip("q k v table".split(), gradients(leaves, got), gradients(exact, want), strict=True):
        assert a.isfinite().all(), name
        reach = max(1.0, float(b.abs().max())) if b.numel() else 1.0
        torch.testing.assert_close(a.double(), b, rtol=0, atol=5 * tolerance * reach, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("table", TABLES)
def test_equals_the_definition(pattern, table, implementation: str) -> None:
    compare(make(150, 150, pattern, table), implementation, 2e-5)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_float64_is_exact(pattern) -> None:
    compare(make(150, 173, pattern, steep_table, dtype=torch.float64), "torch", 1e-11)


@pytest.mark.parametrize("length", [1, 2, 63, 65, 127, 129, 1000])
def test_lengths_off_every_tile(length: int, implementation: str) -> None:
    compare(make(length, length, batch=1, heads=2, key_heads=1), implementation, 2e-5)


def test_a_long_length(implementation: str) -> None:
    compare(make(100, 4097, batch=1, heads=2, key_heads=1), implementation, 2e-5)
    compare(make(100, 4097, batch=1, heads=2, key_heads=2, table=alibi_table), implementation, 2e-5)


@pytest.mark.parametrize("size", [16, 32, 64, 80, 96, 128, 256])
def test_head_sizes(size: int, implementation: str) -> None:
    compare(make(70, 131, size=size), implementation, 3e-5)


@pytest.mark.parametrize("size, value_size", [(16, 40), (64, 24)])
def test_values_of_another_size(size: int, value_size: int, implementation: str) -> None:
    compare(make(70, 131, size=size, value_size=value_size), implementation, 2e-5)


@pytest.mark.parametrize("key_heads", [1, 2, 3, 6])
def test_grouped_queries(key_heads: int, implementation: str) -> None:
    compare(make(90, 140, window, heads=6, key_heads=key_heads), implementation, 2e-5)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1.6e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("pattern", [causal, left_padded, packed])
def test_half_precision_inputs(pattern, dtype: torch.dtype, tolerance: float, implementation: str) -> None:
    if implementation == "native" and dtype == torch.float16:
        assert "float16" in library.cannot(*make(3, 3, dtype=dtype)[:4])
        return
    compare(make(150, 150, pattern, alibi_table, dtype=dtype), implementation, tolerance)


def test_half_precision_is_float32_rounded_once(implementation: str) -> None:
    inputs = make(60, 60, dtype=torch.bfloat16)
    wide = (*(x.float() for x in inputs[:3]), *inputs[3:])
    assert torch.equal(run(inputs, implementation)[0], run(wide, implementation)[0].bfloat16())


@pytest.mark.parametrize("queries, keys", [(1, 1), (1, 300), (7, 300), (130, 300)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 1.6e-2)])
def test_fewer_queries_than_keys(
    queries: int, keys: int, dtype: torch.dtype, tolerance: float, implementation: str
) -> None:
    for size in (24, 32):  # a multiple of the widest vector, and none: the compiled kernel reads those rows straight
        compare(make(queries, keys, table=alibi_table, dtype=dtype, size=size), implementation, tolerance)


@pytest.mark.parametrize("batch, queries, keys", [(0, 5, 5), (2, 0, 5), (2, 0, 0), (2, 3, 0)])
def test_empty_axes(batch: int, queries: int, keys: int, implementation: str) -> None:
    q, k, v, table, *_ = make(max(queries, 1), max(keys, 1))
    q, k, v = q[:batch, :, :queries], k[:batch, :, :keys], v[:batch, :, :keys]
    lo = torch.zeros(1, queries, dtype=torch.int64)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, table)]
    out, lse = run((*leaves, lo, lo + keys, 1 - 5, 0, 0.1), implementation)
    assert out.shape == (batch, 4, queries, 16) and lse.shape == (batch, 4, queries)
    assert not out.any() and (lse == NEG_INF).all()
    grads = torch.autograd.grad(out.sum(), leaves)
    assert [g.shape for g in grads] == [x.shape for x in leaves]


def test_rows_without_keys(implementation: str) -> None:
    q, k, v, table, lo, hi, *rest = make(150, 150)
    hi = torch.where(torch.arange(150) % 7 == 2, lo, hi)
    lo, hi = lo.clone(), hi.clone()
    lo[0, 20:60], hi[0, 20:60] = 40, 30
    out, lse = run((q, k, v, table, lo, hi, *rest), implementation)
    empty = (hi <= lo)[0]
    assert empty.sum() > 40
    assert not out[:, :, empty].any() and (lse[:, :, empty] == NEG_INF).all() and lse[:, :, ~empty].isfinite().all()
    compare((q, k, v, table, lo, hi, *rest), implementation, 2e-5)


def test_rows_whose_biases_are_all_minus_infinity(implementation: str) -> None:
    q, k, v, table, *rest = make(100, 100, size=32)
    table[1] = NEG_INF
    table[2, table.shape[1] // 2 - 30 :] = NEG_INF
    out, lse = run((q, k, v, table, *rest), implementation)
    assert not out[:, 1].any() and (lse[:, 1] == NEG_INF).all()
    compare((q, k, v, table, *rest), implementation, 2e-5)


def test_any_strides(implementation: str) -> None:
    q, k, v, *rest = make(70, 90, heads=4, key_heads=2)
    other = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    spread = [torch.stack([x, x + 1], -1)[..., 0] for x in (q, k, v)]
    want = run((q, k, v, *rest), implementation)
    for inputs in (other, spread):
        got = run((*inputs, *rest), implementation)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    compare((*other, *rest), implementation, 2e-5)


def test_int32_intervals_and_shared_batch(implementation: str) -> None:
    q, k, v, table, lo, hi, *rest = make(70, 90, window)
    want = run((q, k, v, table, lo, hi, *rest), implementation)
    got = run((q, k, v, table, lo.int().expand(2, -1), hi.int().expand(2, -1), *rest), implementation)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("table", [random_table, steep_table])
def test_deterministic(table, implementation: str) -> None:
    def once():
        q, k, v, values, *rest = make(300, 300, packed, table)
        leaves = [x.requires_grad_() for x in (q, k, v, values)]
        outputs = run((*leaves, *rest), implementation)
        return *outputs, *gradients(leaves, outputs)

    for a, b in zip(once(), once(), strict=True):
        assert torch.equal(a, b)


# ---- leaving keys out ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [0.3, 1.0, 8.0])
@pytest.mark.parametrize("table", [alibi_table, steep_table, cliff_table, growing_table])
@pytest.mark.parametrize("pattern", [causal, bidirectional, packed])
def test_skipping_moves_nothing(pattern, table, norm: float, implementation: str) -> None:
    inputs = make(300, 300, pattern, table, norm=norm, size=32)
    full, skipped = run(inputs, implementation, skip_eps=0.0), run(inputs, implementation, skip_eps=1e-12)
    for a, b in zip(full, skipped, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
    compare(inputs, implementation, 1e-3 if norm > 2 else 2e-5)


@pytest.mark.parametrize("queries", [1, 2, 40])
@pytest.mark.parametrize("size", [16, 24, 64])
def test_a_bound_of_the_keys_changes_nothing(queries: int, size: int, implementation: str) -> None:
    q, k, *rest = make(queries, 3000, table=steep_table, size=size)
    bound = 1.01 * k.norm(dim=-1).amax(-1)
    want = dense(q, k, *rest)
    for given in (bound, bound.amax(0, keepdim=True)):
        got = run((q, k, *rest), implementation, key_bound=given)
        torch.testing.assert_close(got[0].double(), want[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(got[1].double(), want[1], rtol=0, atol=1e-5)


def test_keys_out_of_reach_are_not_read(implementation: str) -> None:
    """With a bound given, far keys are left out unread: poison there does not show."""
    q, k, v, table, *rest = make(1, 3000, table=steep_table, heads=2)
    bound = k.norm(dim=-1).amax(-1)
    want = run((q, k, v, table, *rest), implementation, key_bound=bound)
    k[:, :, :1500], v[:, :, :1500] = math.nan, math.nan
    got = run((q, k, v, table, *rest), implementation, key_bound=bound)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("eps", [1e-2, 1e-4, 1e-8])
def test_the_stated_bound_holds(eps: float, implementation: str) -> None:
    inputs = make(400, 400, table=steep_table, norm=2.0)
    want = dense(*inputs)[0]
    got = run(inputs, implementation, skip_eps=eps)[0].double()
    assert (got - want).abs().max() <= 2 * eps * inputs[2].abs().max() + 1e-5


def test_one_far_key_that_matters(implementation: str) -> None:
    """A key far out of the reach of its bias that alone has a large enough product: it must be seen."""
    q, k, v, table, *rest = make(256, 256, table=alibi_table, batch=1, heads=2, key_heads=2, size=32)
    q, k = torch.full_like(q, 0.5), torch.zeros_like(k)
    k[:, :, 0] = 200.0
    out, _ = run((q, k, v, table * 2, *rest), implementation)
    want, _ = dense(q, k, v, table * 2, *rest)
    assert (want[0, 0, -1] - v[0, 0, 0]).abs().max() < 1e-3
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-4)


# ---- values that are not finite --------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("which", ["q", "k", "v", "table"])
def test_what_is_not_finite_is_seen(which: str, value: float, implementation: str) -> None:
    q, k, v, table, lo, hi, first, offset, scale = make(130, 130, batch=1, key_heads=4, table=alibi_table)
    if which == "table":
        table[1, 130 + 40] = value  # distance 41
        sees = torch.arange(130) >= 41
    else:
        {"q": q, "k": k, "v": v}[which][0, 1, 10, 3] = value
        sees = torch.arange(130) == 10 if which == "q" else torch.arange(130) >= 10
    place = torch.arange(130)
    mask = table[:, place[:, None] - place - first].masked_fill(place > place[:, None], NEG_INF)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[None])
    got, _ = run((q, k, v, table, lo, hi, first, offset, scale), implementation)
    assert want[0, 1, sees].isnan().any() or want[0, 1, sees].isinf().any()
    assert torch.equal(got[0, 1, sees].isfinite(), want[0, 1, sees].isfinite())
    clean = [0, 2, 3]
    torch.testing.assert_close(got[:, clean], want[:, clean], rtol=1e-5, atol=1e-5)


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_distances_outside_the_table_are_refused(implementation: str) -> None:
    q, k, v, table, lo, hi, first, offset, scale = make(20, 20)
    with pytest.raises(ValueError, match=r"reach distances 0 .. 19, the table holds 0 .. 18"):
        run((q, k, v, table[:, :19], lo, hi, 0, offset, scale), implementation)
    with pytest.raises(ValueError, match=r"reach distances -19"):
        run((q, k, v, table[:, 19:], lo, hi + 20, 0, offset, scale), implementation)
    run((q, k, v, table[:, :20], lo, hi, 0, offset, scale), implementation)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda q, k, v, t, lo, hi: (q[0], k, v, t, lo, hi), "4 axes"),
        (lambda q, k, v, t, lo, hi: (q, k[:, :, :, :8], v, t, lo, hi), "do not fit"),
        (lambda q, k, v, t, lo, hi: (q[:, :3], k, v, t[:3], lo, hi), "3 query heads"),
        (lambda q, k, v, t, lo, hi: (q, k, v, t[:2], lo, hi), "one row for each query head"),
        (lambda q, k, v, t, lo, hi: (q, k, v, t, lo[:, :3], hi), "lo must be"),
    ],
)
def test_shapes_that_do_not_fit(change, message: str) -> None:
    *tensors, first, offset, scale = make(20, 20)
    with pytest.raises(ValueError, match=message):
        run((*change(*tensors), first, offset, scale), "torch")


def test_an_unknown_implementation() -> None:
    with pytest.raises(ValueError, match="choose 'auto', 'native', 'triton' or 'torch'"):
        run(make(3, 3), "fast")


# ---- the operator under torch's tools --------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["plain", "transposed"])
def test_opcheck(layout: str, implementation: str) -> None:
    q, k, v, table, lo, hi, first, offset, scale = make(20, 33, heads=4, key_heads=2)
    if layout == "transposed":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    leaves = [x.requires_grad_() for x in (q, k, v, table)]
    torch.library.opcheck(
        torch.ops.milepost.distance_attention.default,
        (*leaves, lo, hi, first, offset, scale, 1e-12, None, implementation),
    )
    out, lse = run((*leaves, lo, hi, first, offset, scale), implementation)
    with torch.no_grad():
        torch.library.opcheck(
            torch.ops.milepost.distance_attention_backward.default,
            (
                torch.randn_like(out),
                torch.randn_like(lse),
                *(x.detach() for x in leaves),
                lo,
                hi,
                out.detach(),
                lse.detach(),
                first,
                offset,
                scale,
                1e-12,
                None,
                implementation,
                True,
            ),
        )


def test_gradcheck() -> None:
    q, k, v, table, *rest = make(9, 12, dtype=torch.float64, size=8)
    leaves = [x.requires_grad_() for x in (q, k, v, table)]
    assert torch.autograd.gradcheck(lambda *x: run((*x, *rest), "torch"), leaves)


def test_compiles_to_two_graphs_over_all_lengths(implementation: str) -> None:
    torch._dynamo.reset()

    def step(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        length = q.shape[2]
        place = torch.arange(length)[None]
        table = weight[:, None] * torch.arange(length)
        out, lse = distance_attention(
            q,
            k,
            v,
            table,
            torch.zeros_like(place),
            place + 1,
            first=0,
            offset=k.shape[2] - length,
            scale=0.25,
            implementation=implementation,
        )
        return out.square().mean() + lse.mean()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (32, 100, 127, 128, 129, 500, 1023, 1024, 1025, 2500):
        q, k, v, *_ = make(length, length, batch=1, heads=2, key_heads=1, size=16)
        weight = torch.tensor([-0.1, -0.02], requires_grad=True)
        leaves = [x.requires_grad_() for x in (q, k, v)] + [weight]
        got = torch.autograd.grad(compiled(*leaves), leaves)
        want = torch.autograd.grad(step(*leaves), leaves)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list(step.__code__)
    assert len(entries) <= 2


# ---- the plan --------------------------------------------------------------------------------------------------------


def pairs(lo: Tensor, hi: Tensor, blocks, offset: int) -> Tensor:
    """How often each (row, key) pair is covered by the blocks, as the implementation reads them."""
    count = torch.zeros(lo.shape[0], int(hi.max().clamp(min=1)), dtype=torch.int64)
    for block in blocks:
        row = torch.arange(block.row, block.row_end)[:, None]
        key = torch.arange(block.key, block.key_end)[None]
        distance = row + offset - key
        if block.ragged:
            seen = (key >= lo[row]) & (key < hi[row])
        else:
            seen = (distance >= block.least) & (distance <= block.most)
        count[block.row : block.row_end, block.key : block.key_end] += seen.long()
    return count


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("queries, keys", [(1, 1), (1, 40), (9, 40), (200, 200), (150, 333)])
def test_the_plan_covers_each_visible_pair_once(pattern, queries: int, keys: int) -> None:
    lo, hi = torch.broadcast_tensors(*pattern(queries, keys))
    for low, high in zip(lo, hi, strict=True):
        low, high = low.clamp(min=0), high.clamp(max=keys)
        key = torch.arange(int(high.max().clamp(min=1)))
        want = (key >= low[:, None]) & (key < high[:, None])
        blocks = plan(low, high, keys - queries, 32)
        assert torch.equal(pairs(low, high, blocks, keys - queries), want.long())
        place = torch.arange(queries) + keys - queries
        for block in blocks:
            mine = slice(block.row, block.row_end)
            seen = (high > low)[mine]
            assert block.shared_least == int((place - high + 1)[mine][seen].max())
            assert block.shared_most == int((place - low)[mine][seen].min())


def test_regular_patterns_are_straight() -> None:
    for pattern, most in ((causal, 16), (bidirectional, 16), (window, 17), (two_sided_window, 19)):
        lo, hi = pattern(500, 500)
        blocks = plan(lo[0], hi[0], 0, 32)
        assert len(blocks) <= most
        assert sum(block.ragged for block in blocks) <= 2
