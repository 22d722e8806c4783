from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from milepost import Branch, DistanceBias, Positions, Terms, attend, build, explain
from milepost.attention import BACKENDS, library, sdpa

POSITIONS: dict[str, Callable[[], Positions]] = {
    "full": lambda: Positions.full(40),
    "bidirectional": lambda: Positions.full(40, causal=False),
    "one query": lambda: Positions.step(39),
    "chunk": lambda: Positions.step(31, queries=9),
    "packed": lambda: Positions.packed([5, 20, 1, 14]),
    "left": lambda: Positions.from_mask(mask_of(40, left=7), side="left"),
    "right": lambda: Positions.from_mask(mask_of(40, right=7), side="right"),
    "empty row": lambda: Positions.from_mask(mask_of(40, left=40), side="left"),
    "holes": lambda: Positions.from_mask(holes(40)),
    "cross": lambda: Positions.cross(13, 40),
    "static cache": lambda: Positions.from_mask(
        mask_of(40, right=10), side="right", queries=3, query_start=torch.tensor([27])
    ),
}


def mask_of(length: int, *, left: int = 0, right: int = 0) -> Tensor:
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, :left] = 0
    if right:
        mask[1, -right:] = 0
    return mask


def holes(length: int) -> Tensor:
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, 10:13] = 0
    mask[1, ::3] = 0
    return mask


def tensors(positions: Positions, *, heads: int = 4, kv: int = 2, dim: int = 16, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(0)

    def draw(h: int, n: int) -> Tensor:
        return torch.randn(2, h, n, dim, generator=generator, dtype=torch.float64).to(dtype)

    return draw(heads, positions.num_queries), draw(kv, positions.num_keys), draw(kv, positions.num_keys)


def by_hand(q: Tensor, k: Tensor, v: Tensor, positions: Positions, terms: Terms) -> Tensor:
    """One query at a time, with Python sums: nothing in common with the reference but the definition."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    allowed = positions.allowed(window=terms.window, chunk=terms.chunk).expand(2, -1, -1)
    bias = None if terms.bias is None else terms.bias.dense().expand(2, q.shape[1], -1, -1)
    for b in range(2):
        for h in range(q.shape[1]):
            g = h // (q.shape[1] // k.shape[1])
            for i in range(q.shape[2]):
                keys = allowed[b, i].nonzero()[:, 0].tolist()
                scores = [
                    float(q[b, h, i] @ k[b, g, j]) / math.sqrt(q.shape[-1])
                    + (0.0 if bias is None else float(bias[b, h, i, j]))
                    for j in keys
                ]
                if not keys:
                    continue
                top = max(scores)
                weights = [math.exp(s - top) for s in scores]
                total = sum(weights)
                out[b, h, i] = sum(w / total * v[b, g, j] for w, j in zip(weights, keys, strict=True))
    return out


@pytest.mark.parametrize("where", POSITIONS)
@pytest.mark.parametrize("kind", ["nothing", "distance", "pair", "window", "chunk"])
def test_every_backend_equals_the_definition(where: str, kind: str) -> None:
    positions = POSITIONS[where]()
    q, k, v = tensors(positions)
    alibi = build("alibi", num_heads=4, slope_scale=1.5).double()
    if kind == "nothing":
        terms = Terms()
    elif kind == "window":
        terms = Terms(window=5)
    elif kind == "chunk":
        terms = Terms(chunk=6) + alibi(positions)
    elif kind == "pair":
        terms = alibi(positions.mapped(positions.query * 0.5, positions.key * 0.5))
    else:
        terms = alibi(positions)
    wanted = by_hand(q, k, v, positions, terms)
    torch.testing.assert_close(attend(q, k, v, positions, terms, backend="reference"), wanted, atol=1e-12, rtol=0)
    reasons = explain(q, k, v, positions, terms).reasons
    served = [name for name in BACKENDS if reasons[name] == "chosen" or reasons[name].startswith("would serve")]
    for name in served:
        got = attend(q, k, v, positions, terms, backend=name)
        torch.testing.assert_close(got, wanted, atol=1e-9, rtol=0, msg=lambda m, name=name: f"{name}: {m}")
        got = attend(q.float(), k.float(), v.float(), positions, terms, backend=name)
        torch.testing.assert_close(got.double(), wanted, atol=3e-6, rtol=0, msg=lambda m, name=name: f"{name}: {m}")


def test_a_row_without_keys_is_zero_and_so_are_its_gradients() -> None:
    positions = POSITIONS["empty row"]()
    for backend in (*BACKENDS, "auto"):
        for terms in (Terms(), build("alibi", num_heads=4)(positions)):
            q, k, v = (t.requires_grad_() for t in tensors(positions, dtype=torch.float32))
            try:
                out = attend(q, k, v, positions, terms, backend=backend)
            except ValueError:
                continue
            assert torch.equal(out[1], torch.zeros_like(out[1])), backend
            grads = torch.autograd.grad(out.sum(), (q, k, v))
            assert all(g.isfinite().all() and not g[1].any() for g in grads), backend


def test_branches_share_one_softmax() -> None:
    """Two branches that say the same are one; branches that leave a distance out hide it."""
    positions = Positions.full(12)
    q, k, v = tensors(positions)
    plain = attend(q, k, v, positions)
    split = Terms(branches=(Branch(far=3), Branch(near=3)))
    torch.testing.assert_close(attend(q, k, v, positions, split), plain, atol=1e-12, rtol=0)
    window = attend(q, k, v, positions, Terms(window=3))
    torch.testing.assert_close(attend(q, k, v, positions, Terms(branches=(Branch(far=3),))), window, atol=1e-12, rtol=0)


def test_blocks_of_queries_change_nothing() -> None:
    from milepost.attention import reference

    positions = POSITIONS["left"]()
    q, k, v = tensors(positions)
    terms = build("alibi", num_heads=4)(positions)
    whole = reference.run(q, k, v, positions, terms, scale=0.25)
    for block in (1, 7, 40, 64):
        torch.testing.assert_close(reference.run(q, k, v, positions, terms, scale=0.25, block=block), whole)


def test_query_chunks_of_the_view_change_nothing() -> None:
    positions = Positions.full(2500)
    q, k, v = tensors(positions, dtype=torch.float32)
    terms = build("alibi", num_heads=4)(positions)
    whole = attend(q[:, :, 2000:], k, v, positions.rows(2000, 2500), terms_of(terms, 2000, 2500), backend="reference")
    torch.testing.assert_close(attend(q, k, v, positions, terms, backend="sdpa")[:, :, 2000:], whole, atol=2e-6, rtol=0)


def terms_of(terms: Terms, start: int, stop: int) -> Terms:
    assert terms.bias is not None
    return Terms(bias=terms.bias.rows(start, stop))


@pytest.mark.parametrize("norm", [1.0, 12.0, 60.0])
def test_the_denormal_cure_never_cuts_a_key_that_matters(norm: float) -> None:
    """A far key with a huge logit against a steep bias, and a table that grows again far out."""
    positions = Positions.full(300)
    q, k, v = tensors(positions, dtype=torch.float32)
    k[:, :, 3] = 0.0
    q = q * norm
    k[:, :, 3] += q.mean(dim=(1, 2), keepdim=True)[:, :, 0] * norm
    grows = torch.linspace(0, -200, 300)[None].repeat(4, 1)
    grows[:, 280:] = 5.0
    bias = DistanceBias(grows, positions, 0)
    wanted = attend(q.double(), k.double(), v.double(), positions, Terms(bias=bias), backend="reference")
    got = attend(q, k, v, positions, Terms(bias=bias), backend="sdpa")
    torch.testing.assert_close(got.double(), wanted, atol=2e-3 * max(1.0, norm / 10), rtol=1e-3)


def test_inputs_that_do_not_fit_are_refused() -> None:
    positions = Positions.full(8)
    q, k, v = tensors(positions)
    with pytest.raises(ValueError, match=r"layout is \(batch, heads, length, head_dim\)"):
        attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), positions)
    with pytest.raises(ValueError, match="4 query heads do not share 3"):
        attend(q, k[:, :1].repeat(1, 3, 1, 1), v, positions)
    with pytest.raises(ValueError, match="3 heads, q has 4"):
        attend(q, k, v, positions, build("alibi", num_heads=3)(positions))
    with pytest.raises(ValueError, match="no attention backend is named 'cuda'"):
        attend(q, k, v, positions, backend="cuda")


@pytest.mark.parametrize("place", [Positions.full(9), Positions.full(9, queries=4), Positions.full(7, causal=False)])
@pytest.mark.parametrize("window", [None, 3])
def test_a_short_learned_table_is_written_out(place: Positions, window: int | None) -> None:
    """Gradients of a mask that overlaps itself in memory, on the way without a compiled kernel."""
    encoding = build("kerple-log", num_heads=4).double()
    q, k, v = (x.double().requires_grad_() for x in tensors(place))
    results = []
    for name in ("sdpa", "reference"):
        out = attend(q, k, v, place, encoding(place) + Terms(window=window), backend=name)
        probe = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        results.append(torch.autograd.grad((out * probe).sum(), [q, k, v, *encoding.parameters()]))
    for got, right in zip(*results, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-11, atol=1e-12)


def test_explain_says_why() -> None:
    positions = Positions.full(256)
    q, k, v = tensors(positions)
    terms = build("alibi", num_heads=4, learn_slopes=True)(positions)
    explanation = explain(q, k, v, positions, terms)
    assert explanation.reasons[explanation.chosen] == "chosen"
    assert "learned distance table" in explanation.reasons["sdpa"]
    assert "learned distance table" in str(explanation)
    with pytest.raises(ValueError, match="'sdpa' refuses: a learned distance table"):
        attend(q, k, v, positions, terms, backend="sdpa")


def test_without_a_kernel_a_bias_that_decays_goes_to_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where enough pairs are out of its reach, and nowhere else."""
    monkeypatch.setenv("MILEPOST_KERNEL", "off")

    def chosen(name: str, length: int = 2048, queries: int = 2048, norm: float = 4.0, **options: float) -> str:
        positions = Positions.full(length, queries=queries)
        q, k = torch.full((1, 8, queries, 8), norm / 8**0.5), torch.full((1, 4, length, 8), norm / 8**0.5)
        explanation = explain(q, k, k, positions, build(name, num_heads=8)(positions), **options)
        assert attend(q, k, k, positions, build(name, num_heads=8)(positions), **options).isfinite().all()
        return explanation.chosen

    with torch.no_grad():
        assert chosen("alibi") == chosen("alibi", queries=32) == "blocked"
        assert chosen("kerple-log") == chosen("alibi", norm=30.0) == "sdpa"
        assert chosen("alibi", queries=1) == chosen("alibi", length=1024, queries=1024) == "sdpa"
        assert chosen("alibi", dropout=0.1) == "sdpa"


@pytest.mark.parametrize("queries, reach", [(1, 1), (5, 9), (9, 5), (7, 7), (30, 1), (0, 4)])
def test_pairs_within_reach_are_counted(queries: int, reach: int) -> None:
    pairs = sum(min(i + 1, reach) for i in range(queries))
    assert int(sdpa._within(queries, torch.tensor(reach))) == pairs


@pytest.mark.parametrize("where", ["packed", "left", "right"])
def test_padding_and_documents_never_build_a_dense_mask(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    positions = POSITIONS[where]()
    q, k, v = tensors(positions, dtype=torch.float32)
    monkeypatch.setattr(Positions, "allowed", lambda *_, **__: pytest.fail("a mask of Q x K was built"))
    for terms in (Terms(), build("alibi", num_heads=4)(positions), build("rope", head_dim=16)(positions)):
        assert attend(q, k, v, positions, terms).isfinite().all()


def test_autocast_changes_nothing_inside() -> None:
    positions = Positions.full(40)
    q, k, v = tensors(positions, dtype=torch.float32)
    terms = build("alibi", num_heads=4)(positions)
    plain = attend(q, k, v, positions, terms)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attend(q, k, v, positions, terms), plain)


def test_softcap() -> None:
    positions = Positions.full(8)
    q, k, v = tensors(positions)
    out = attend(q, k, v, positions, softcap=0.5)
    logits = 0.5 * torch.tanh(q @ k.repeat_interleave(2, 1).mT / 4.0 / 0.5)
    weights = logits.masked_fill(~positions.allowed(), -torch.inf).softmax(-1)
    torch.testing.assert_close(out, weights @ v.repeat_interleave(2, 1))


# ---- what a caller may do to it ---------------------------------------------------------------------------------


NATIVE = pytest.param(
    "native", marks=pytest.mark.skipif(library.unavailable() is not None, reason=f"no kernel: {library.unavailable()}")
)


def decaying(length: int, heads: int = 4) -> tuple[Positions, Terms]:
    positions = Positions.full(length)
    return positions, build("alibi", num_heads=heads)(positions)


@pytest.mark.parametrize("backend", [NATIVE, "blocked", "sdpa", "rows"])
def test_a_negative_scale_is_a_scale(backend: str) -> None:
    positions, terms = decaying(600)
    q, k, v = (x.float() * 3 for x in tensors(positions))
    want = attend(q.double(), k.double(), v.double(), positions, terms, scale=-0.3, backend="reference")
    got = attend(q, k, v, positions, terms, scale=-0.3, backend=backend)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-4)


@pytest.mark.parametrize("backend", ["auto", "blocked", "sdpa", "rows", "reference"])
@pytest.mark.parametrize("positions", [Positions.full(0), Positions.full(5, queries=0), Positions.cross(5, 0)])
def test_no_queries_or_no_keys_give_nothing_or_zeros(positions: Positions, backend: str) -> None:
    out = attend(*tensors(positions), positions, build("alibi", num_heads=4)(positions), backend=backend)
    assert out.shape == (2, 4, positions.num_queries, 16) and not out.any()


@pytest.mark.parametrize("backend", ["auto", NATIVE, "blocked", "sdpa", "rows", "reference"])
def test_keys_whose_biases_are_all_minus_infinity_are_no_keys(backend: str) -> None:
    positions, _ = decaying(40)
    table = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))
    table[0] = -math.inf
    table[1, 0] = -math.inf  # its first query sees nothing
    q, k, v = (x.float() for x in tensors(positions))
    out = attend(q, k, v, positions, Terms(bias=DistanceBias(table, positions, 0)), backend=backend)
    assert out.isfinite().all() and not out[:, 0].any() and not out[:, 1, 0].any() and out[:, 1, 1:].any()


@pytest.mark.parametrize("backend", ["auto", NATIVE, "blocked", "sdpa", "rows", "reference"])
@pytest.mark.parametrize("side", ["left", "right", None])
@pytest.mark.parametrize("queries", [1, 40])
def test_a_nan_in_the_padding_stays_there(queries: int, side: str | None, backend: str) -> None:
    mask = mask_of(40, left=7) if side == "left" else mask_of(40, right=7)
    if side is None:
        mask[0, 10:13] = 0
    positions = Positions.from_mask(mask, side=side, queries=queries)
    terms = build("alibi", num_heads=4)(positions)
    q, k, v = (x.float() for x in tensors(positions))
    reasons = {"auto": "chosen", **explain(q, k, v, positions, terms).reasons}
    if not reasons[backend].startswith(("chosen", "would serve")):
        return  # it refuses
    want = attend(q, k, v, positions, terms, backend="reference")
    hidden = ~positions.key_present[:, None, :, None]
    got = attend(q, k.masked_fill(hidden, math.nan), v.masked_fill(hidden, math.nan), positions, terms, backend=backend)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("name", ["alibi", "rope", "t5", "nope", "fire"])
def test_torch_func_gets_its_derivatives(name: str) -> None:
    torch.manual_seed(0)
    positions = Positions.full(150)
    encoding = build(name, **{"rope": {"head_dim": 16}, "nope": {}}.get(name, {"num_heads": 4}))
    q, k, v = (x.float() for x in tensors(positions))

    def run(x: Tensor, backend: str = "auto") -> Tensor:
        return attend(x, k.to(x.dtype), v.to(x.dtype), positions, encoding(positions), backend=backend)

    def exact(x: Tensor) -> Tensor:
        return run(x, "reference")

    tangent = torch.randn_like(q)
    _, got = torch.func.jvp(run, (q,), (tangent,))
    _, want = torch.func.jvp(exact, (q.double(),), (tangent.double(),))
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-5)
    with torch.autograd.forward_ad.dual_level():
        dual = run(torch.autograd.forward_ad.make_dual(q, tangent))
        forward = torch.autograd.forward_ad.unpack_dual(dual).tangent
    torch.testing.assert_close(forward.double(), want, rtol=0, atol=2e-5)

    given = q.clone().requires_grad_()
    run(given).square().sum().backward()
    torch.testing.assert_close(torch.func.grad(lambda x: run(x).square().sum())(q), given.grad, rtol=0, atol=2e-4)
    both = torch.func.vmap(run)(torch.stack([q, 2 * q]))
    torch.testing.assert_close(both, torch.stack([run(q), run(2 * q)]), rtol=0, atol=2e-5)


def test_what_knows_no_tangents_says_so() -> None:
    positions, terms = decaying(40)
    q, k, v = (x.float() for x in tensors(positions))
    with pytest.raises(ValueError, match=r"forward-mode differentiation do not see into this operator"):
        torch.func.jvp(lambda x: attend(x, k, v, positions, terms, backend="blocked"), (q,), (q,))


@pytest.mark.parametrize("backend", [NATIVE, "blocked", "pairs"])
def test_a_backward_pass_inside_autocast_is_as_exact_as_outside(backend: str) -> None:
    positions = Positions.full(150)
    if backend == "pairs":
        positions = positions.mapped(positions.query * 1.25, positions.key * 1.25)
    encoding = build("kerple-log", num_heads=4)
    q, k, v = (x.float() for x in tensors(positions))
    found = []
    for cast in (False, True):
        x = q.clone().requires_grad_()
        encoding.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            attend(x, k, v, positions, encoding(positions), backend=backend).square().sum().backward()
        found.append([x.grad, *(p.grad for p in encoding.parameters())])
    for plain, inside in zip(*found, strict=True):
        assert torch.equal(plain, inside)


def test_meta_tensors_have_shapes() -> None:
    positions = Positions.full(40, device="meta")
    q, k, v = (x.to("meta") for x in tensors(positions, dtype=torch.float32))
    terms = build("alibi", num_heads=4)(positions)
    assert attend(q, k, v, positions, terms).shape == attend(q, k, v, positions).shape == (2, 4, 40, 16)


def test_wrong_calls_say_what_is_wrong() -> None:
    positions, terms = decaying(40)
    q, k, v = tensors(positions)
    wrong: list[tuple[str, tuple[Tensor, ...], dict[str, float]]] = [
        (r"do not share 0 key", (q, k[:, :0], v[:, :0]), {}),
        (r"one batch; got 2, 1 and 2 rows", (q, k[:1], v), {}),
        (r"heads of one size; got 16 and 8", (q, k[..., :8], v), {}),
        (r"floating point; got torch.int64", (q.long(), k, v), {}),
        (r"dropout .* got -0.1", (q, k, v), {"dropout": -0.1}),
        (r"dropout .* got 1.5", (q, k, v), {"dropout": 1.5}),
        (r"softcap is a positive number, .* got 0", (q, k, v), {"softcap": 0.0}),
    ]
    for words, given, options in wrong:
        with pytest.raises(ValueError, match=words):
            attend(*given, positions, terms, **options)


def test_keys_of_another_dtype() -> None:
    positions, terms = decaying(40)
    q, k, v = (x.float() for x in tensors(positions))
    k, v = k.bfloat16(), v.bfloat16()
    for more in (terms, Terms()):
        want = attend(q.double(), k.double(), v.double(), positions, more, backend="reference")
        torch.testing.assert_close(attend(q, k, v, positions, more).double(), want, rtol=0, atol=2e-5)


def test_second_derivatives_are_refused_in_words_or_exact() -> None:
    positions, terms = decaying(40)
    q, k, v = tensors(positions)

    def penalty(backend: str) -> Tensor:
        x = q.clone().requires_grad_()
        out = attend(x, k, v, positions, terms, backend=backend).square().sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        slope.square().sum().backward()
        return x.grad

    with pytest.raises(RuntimeError, match="no second derivative"):
        penalty("blocked")
    torch.testing.assert_close(penalty("rows"), penalty("reference"))
