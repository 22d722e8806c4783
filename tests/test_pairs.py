"""The backend `pairs`: biases of two positions by tile, against the float64 reference with gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from milepost import PairBias, Positions, Terms, attend, build, explain
from milepost.attention import pairs
from milepost.encoding import Encoding, Mapped
from milepost.encodings.maps.randomized import Randomized


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tiles of odd sizes, a batch taken in two parts."""
    monkeypatch.setattr(pairs, "ROWS", 13)
    monkeypatch.setattr(pairs, "KEYS", 17)
    monkeypatch.setattr(pairs, "NUMBERS", 2 * 4 * 13 * 17)


def padded(length: int, *, left: int = 0, right: int = 0) -> Tensor:
    mask = torch.ones(3, length, dtype=torch.long)
    mask[1, :left] = 0
    mask[2, length - right :] = 0
    return mask


def holes(length: int) -> Tensor:
    mask = torch.ones(3, length, dtype=torch.long)
    mask[0, 10:30] = 0
    mask[1, ::3] = 0
    return mask


WHERE: dict[str, Callable[[], Positions]] = {
    "full": lambda: Positions.full(67),
    "bidirectional": lambda: Positions.full(50, causal=False),
    "one token": lambda: Positions.full(1),
    "one query": lambda: Positions.step(66),
    "queries of a chunk": lambda: Positions.step(31, queries=29),
    "packed": lambda: Positions.packed([5, 30, 1, 20]),
    "packed, running on": lambda: Positions.packed([5, 30, 1, 20], reset=False),
    "left": lambda: Positions.from_mask(padded(50, left=21), side="left"),
    "right": lambda: Positions.from_mask(padded(50, right=21), side="right"),
    "empty rows": lambda: Positions.from_mask(padded(40, left=40), side="left"),
    "holes": lambda: Positions.from_mask(holes(50)),
    "cross": lambda: Positions.cross(13, 40),
    "static cache": lambda: Positions.from_mask(
        padded(50, right=10), side="right", queries=3, query_start=torch.tensor([37])
    ),
}


def tensors(positions: Positions, *, kv: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    sizes = ((4, positions.num_queries, 16), (kv, positions.num_keys, 16), (kv, positions.num_keys, 24))
    return [torch.randn(3, *size, dtype=torch.float64).to(dtype).requires_grad_() for size in sizes]


def fire(**options: object) -> Encoding:
    encoding = build("fire", num_heads=4, hidden=8, **{"threshold": 1.5, **options}).double()
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.mul_(1.5)
    return encoding


def outcome(
    leaves: list[Tensor], positions: Positions, terms: Terms, parameters: list[Tensor], backend: str
) -> list[Tensor | None]:
    out = attend(*leaves, positions, terms, backend=backend)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    grads = torch.autograd.grad((out.double() * weight).sum(), [*leaves, *parameters], allow_unused=True)
    return [out, *grads]


def compare(got: list[Tensor | None], wanted: list[Tensor | None], tolerance: float) -> None:
    for place, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert (a is None) == (b is None), place
        if a is not None and b is not None:
            assert a.isfinite().all(), place
            size = max(1.0, float(b.detach().abs().max())) if b.numel() else 1.0
            torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=tolerance * size)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("extra", ["", "window", "chunk"])
def test_fire_and_its_gradients(where: str, extra: str) -> None:
    positions, encoding = WHERE[where](), fire(threshold=0.0 if where == "one token" else 1.5)
    terms = encoding(positions) + (Terms(**{extra: 9}) if extra else Terms())
    leaves = tensors(positions)
    parameters = list(encoding.parameters())
    wanted = outcome(leaves, positions, terms, parameters, "reference")
    assert all(grad is not None and (grad.any() or where == "one token") for grad in wanted[-2:])
    compare(outcome(leaves, positions, terms, parameters, "pairs"), wanted, 1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(dtype: torch.dtype) -> None:
    positions, encoding = Positions.full(67), build("fire", num_heads=4, threshold=1.5)
    leaves = tensors(positions, dtype=dtype)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    parameters = list(encoding.parameters())
    got = outcome(leaves, positions, encoding(positions), parameters, "pairs")
    assert got[0] is not None and got[0].dtype == dtype
    wanted = outcome(exact, positions, encoding(positions), parameters, "reference")
    compare(got, wanted, 2e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("name", ["randomized", "bipe-alibi", "float"])
def test_mapped_positions(name: str) -> None:
    """Positions of each row's own, positions that tokens decide, positions between the integers."""
    positions = Positions.full(50)
    tokens = torch.randint(0, 4, (3, 50))
    if name == "randomized":
        encoding: Encoding = Mapped(Randomized(max_position=200), build("kerple-log", num_heads=4)).double()
    elif name == "bipe-alibi":
        encoding = build(name, num_heads=4, width=32, separators=(0,)).double()
    else:
        encoding = build("kerple-log", num_heads=4).double()
    at = positions.mapped(positions.query * 0.3, positions.key * 0.3) if name == "float" else positions
    terms = encoding(at, tokens)
    assert isinstance(terms.bias, PairBias)
    if name == "randomized":
        assert terms.bias.positions.query.shape[0] == 3
    leaves, parameters = tensors(positions), list(encoding.parameters())
    wanted = outcome(leaves, positions, terms, parameters, "reference")
    compare(outcome(leaves, positions, terms, parameters, "pairs"), wanted, 1e-11)


def test_gradients_of_what_was_computed_before() -> None:
    """A bias that reads a table which is itself computed: its graph is walked once, not once a tile."""
    positions = Positions.full(40)
    slope = nn.Parameter(torch.rand(4, dtype=torch.float64))
    other = nn.Parameter(torch.rand(1, dtype=torch.float64))

    def terms() -> Terms:
        table = -slope.exp()[:, None] * torch.arange(40.0, dtype=torch.float64)
        moved = positions.mapped(positions.query * 0.5, positions.key * 0.5)
        return Terms(
            bias=PairBias(
                lambda i, j: (
                    table[:, (i[0, :, None] - j[0]).clamp(min=0).long()][None]
                    + other * (i[:, None, :, None] - j[:, None, None])
                ),
                moved,
            )
        )

    leaves = tensors(positions)
    wanted = outcome(leaves, positions, terms(), [slope, other], "reference")
    compare(outcome(leaves, positions, terms(), [slope, other], "pairs"), wanted, 1e-11)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return 2 * ctx.saved_tensors[0] * grad


def test_no_gradient_is_lost_in_a_function_of_ones_own() -> None:
    positions = Positions.full(20)
    hidden = nn.Parameter(torch.rand(4, dtype=torch.float64))
    shape = (1, 4, 1, 1)
    terms = Terms(
        bias=PairBias(lambda i, j: Square.apply(hidden).view(shape) * (j - 0.1 * i[..., None])[:, None], positions)
    )
    leaves = tensors(positions)
    wanted = outcome(leaves, positions, terms, [hidden], "reference")
    compare(outcome(leaves, positions, terms, [hidden], "pairs"), wanted, 1e-11)
    assert wanted[-1] is not None and wanted[-1].any()


def test_only_some_gradients_are_wanted() -> None:
    positions, encoding = Positions.full(40), fire()
    leaves = [leaf.detach() for leaf in tensors(positions)]
    grad = {}
    for backend in ("reference", "pairs"):
        out = attend(*leaves, positions, encoding(positions), backend=backend)
        grad[backend] = torch.autograd.grad(out.square().sum(), list(encoding.parameters()))
    for got, wanted in zip(grad["pairs"], grad["reference"], strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-11)
    with torch.no_grad():
        assert not attend(*leaves, positions, encoding(positions), backend="pairs").requires_grad


def test_under_activation_checkpointing() -> None:
    positions, encoding = Positions.full(40), fire()
    leaves = tensors(positions)

    def layer(*inputs: Tensor) -> Tensor:
        return attend(*inputs, positions, encoding(positions), backend="pairs")

    wanted = torch.autograd.grad(layer(*leaves).square().sum(), [*leaves, *encoding.parameters()])
    out = checkpoint(layer, *leaves, use_reentrant=False)
    got = torch.autograd.grad(out.square().sum(), [*leaves, *encoding.parameters()])
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_a_parameter_changed_before_the_backward_pass_is_noticed() -> None:
    positions, encoding = Positions.full(20), fire()
    out = attend(*tensors(positions), positions, encoding(positions), backend="pairs")
    with torch.no_grad():
        next(encoding.parameters()).add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_empty_batch_and_no_queries() -> None:
    positions, encoding = Positions.full(20), fire()
    q, k, v = (t[:0] for t in tensors(positions))
    assert attend(q, k, v, positions, encoding(positions), backend="pairs").shape == (0, 4, 20, 24)
    positions = Positions.full(20, queries=0)
    assert attend(*tensors(positions), positions, encoding(positions), backend="pairs").shape == (3, 4, 0, 24)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("into", ["q", "k", "v"])
def test_nan_and_infinity_reach_the_rows_that_see_them(value: float, into: str) -> None:
    """As the reference and torch's own kernel have it; what a row does not see in any tile does not touch it."""
    positions, encoding = Positions.full(30), fire()
    leaves = [leaf.detach() for leaf in tensors(positions)]
    leaves["qkv".index(into)][1, 1, 20, 3] = value
    terms = encoding(positions)
    got = attend(*leaves, positions, terms, backend="pairs")
    wanted = attend(*leaves, positions, terms, backend="sdpa")
    seen = torch.arange(30) >= 20 if into != "q" else torch.arange(30) == 20
    torch.testing.assert_close(got[:, :, seen], wanted[:, :, seen], rtol=0, atol=1e-11, equal_nan=True)
    assert got[:, :, :13].isfinite().all()
    assert not got.isfinite().all() or value == -math.inf


def test_weights_that_are_nothing_change_nothing() -> None:
    """Logits from -3000 to 3000: the largest decides, and weights below e^-80 of it are 0."""
    positions = Positions.full(60)
    terms = build("alibi", num_heads=4)(positions.mapped(positions.query * 7.5, positions.key * 7.5))
    q, k, v = (leaf.detach() for leaf in tensors(positions))
    for norm in (0.1, 30.0):
        got = attend(norm * q, norm * k, v, positions, terms, backend="pairs")
        wanted = attend(norm * q, norm * k, v, positions, terms, backend="reference")
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_the_same_bits_twice() -> None:
    positions, encoding = Positions.full(40), fire()
    leaves = tensors(positions)
    first = outcome(leaves, positions, encoding(positions), list(encoding.parameters()), "pairs")
    second = outcome(leaves, positions, encoding(positions), list(encoding.parameters()), "pairs")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None)


def test_the_bias_is_never_asked_for_more_than_a_tile() -> None:
    positions = Positions.packed([20, 40])
    asked: list[tuple[int, int]] = []

    def bias(query: Tensor, key: Tensor) -> Tensor:
        asked.append((query.shape[1], key.shape[1]))
        return torch.zeros(1, 4, query.shape[1], key.shape[1], dtype=torch.float64)

    terms = Terms(bias=PairBias(bias, positions))
    attend(*tensors(positions), positions, terms, backend="pairs").sum().backward()
    assert max(rows for rows, _ in asked) == pairs.ROWS and max(keys for _, keys in asked) == pairs.KEYS
    # Blocks of 13 rows, tiles of 17 keys: the tiles with an allowed pair, once in each direction, and the probe.
    allowed = positions.allowed()[0]
    live = sum(
        bool(allowed[row : row + 13, key : key + 17].any()) for row in range(0, 60, 13) for key in range(0, 60, 17)
    )
    assert len(asked) == 2 * live + 1 and live < 20


def test_one_graph_serves_all_lengths() -> None:
    encoding = fire()
    torch._dynamo.reset()
    counter = CompileCounter()

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = Positions.full(q.shape[2])
        return attend(q, k, v, positions, encoding(positions), backend="pairs")

    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    for length in (20, 33, 47, 64, 90):
        leaves = [leaf.detach() for leaf in tensors(Positions.full(length))]
        torch.testing.assert_close(compiled(*leaves), step(*leaves), rtol=0, atol=1e-11)
    assert counter.frame_count <= 2


def test_it_serves_where_torch_would_build_the_square() -> None:
    positions, encoding = Positions.full(2048), build("fire", num_heads=8, threshold=1.5)
    q = torch.zeros(1, 8, 2048, 16)
    explanation = explain(q, q, q, positions, encoding(positions))
    assert explanation.chosen == "pairs"
    assert "MiB" in explanation.reasons["sdpa"]
    assert explain(q, q, q, positions, Terms()).reasons["pairs"] == "no bias that is a function of two positions"
    assert "dropout" in explain(q, q, q, positions, encoding(positions), dropout=0.1).reasons["pairs"]
    few = positions.rows(2040, 2048)
    few_terms = encoding(few)
    assert explain(q[:, :, 2040:], q, q, few, few_terms).chosen == "sdpa"
