"""FlexAttention: its block mask and score modification, run unfused on a CPU against the float64 reference."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from milepost import DenseBias, Positions, Terms, attend, build, explain
from milepost.attention import flex


@pytest.fixture(autouse=True)
def unfused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the score modification as it is, where torch would trace it once more; torch warns that this is slow."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def padded(length: int, *, left: int = 0, right: int = 0) -> Tensor:
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, :left] = 0
    mask[0, length - right :] = 0
    return mask


WHERE: dict[str, Callable[[], Positions]] = {
    "full": lambda: Positions.full(150),
    "bidirectional": lambda: Positions.full(40, causal=False),
    "one token": lambda: Positions.full(1),
    "one query": lambda: Positions.step(139),
    "queries of a chunk": lambda: Positions.step(131, queries=9),
    "packed": lambda: Positions.packed([5, 130, 1, 14]),
    "left": lambda: Positions.from_mask(padded(140, left=129), side="left"),
    "right": lambda: Positions.from_mask(padded(140, right=7), side="right"),
    "empty rows": lambda: Positions.from_mask(padded(40, left=40), side="left"),
    "cross": lambda: Positions.cross(13, 140),
    "static cache": lambda: Positions.from_mask(
        padded(40, right=10), side="right", queries=3, query_start=torch.tensor([27])
    ),
}


def tensors(positions: Positions, *, kv: int = 2) -> list[Tensor]:
    sizes = ((4, positions.num_queries, 16), (kv, positions.num_keys, 16), (kv, positions.num_keys, 8))
    return [torch.randn(2, *size) for size in sizes]


def compare(positions: Positions, terms: Terms, leaves: list[Tensor], **options: float) -> None:
    got = attend(*leaves, positions, terms, backend="flex", **options)
    wanted = attend(*(leaf.double() for leaf in leaves), positions, terms, backend="reference", **options)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=5e-6)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("kind", ["nothing", "window", "chunk", "alibi", "kerple-log", "t5"])
@torch.no_grad()
def test_every_mask_and_table(where: str, kind: str) -> None:
    positions = WHERE[where]()
    if kind in ("nothing", "window", "chunk"):
        terms = Terms() if kind == "nothing" else Terms(**{kind: 9})
    else:
        terms = build(kind, num_heads=4)(positions)
    compare(positions, terms, tensors(positions))


@pytest.mark.parametrize("where", ["full", "packed", "left", "empty rows", "cross"])
@torch.no_grad()
def test_a_bias_of_two_positions(where: str) -> None:
    positions = WHERE[where]()
    compare(positions, build("fire", num_heads=4, hidden=8, threshold=1.5)(positions), tensors(positions))
    moved = positions.mapped(positions.query * 0.5, positions.key * 0.5)
    compare(positions, build("alibi", num_heads=4)(moved), tensors(positions))


@torch.no_grad()
def test_soft_capped_logits_before_the_bias() -> None:
    positions = WHERE["full"]()
    leaves = [3 * leaf for leaf in tensors(positions)]
    compare(positions, build("alibi", num_heads=4)(positions), leaves, softcap=2.0)
    compare(positions, Terms(), leaves, softcap=2.0)


@pytest.mark.parametrize("where", [name for name in WHERE if name != "static cache"])
@pytest.mark.parametrize("window", [None, 9])
def test_the_block_mask_is_torchs_own(where: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks seen by some and by every row, against those torch finds by asking for each pair."""
    monkeypatch.setattr(flex, "BLOCK", 16)
    positions = WHERE[where]()
    seen = positions.intervals(window=window)
    assert seen is not None
    lo, hi = torch.broadcast_tensors(*seen)
    got = flex.block_mask(lo, hi, 2, positions.num_keys)
    assert got.mask_mod is not None
    wanted = torch_flex.create_block_mask(
        got.mask_mod, lo.shape[0], None, positions.num_queries, positions.num_keys, device="cpu", BLOCK_SIZE=16
    )
    assert torch.equal(got.to_dense(), wanted.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks"):
        a, b = getattr(got, name), getattr(wanted, name)
        assert a is not None and b is not None and torch.equal(a, b), name
    allowed = positions.allowed(window=window).expand(lo.shape[0], -1, -1)
    dense = torch_flex.create_mask(got.mask_mod, lo.shape[0], None, *allowed.shape[1:], device="cpu")
    assert torch.equal(dense[:, 0], allowed)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("into", ["q", "k", "v"])
@torch.no_grad()
def test_nan_and_infinity_reach_the_rows_that_see_them(value: float, into: str) -> None:
    positions = Positions.full(30)
    leaves = tensors(positions)
    leaves["qkv".index(into)][1, 1, 20, 3] = value
    terms = build("alibi", num_heads=4)(positions)
    got, wanted = (attend(*leaves, positions, terms, backend=name) for name in ("flex", "reference"))
    seen = torch.arange(30) >= 20 if into != "q" else torch.arange(30) == 20
    torch.testing.assert_close(got[:, :, seen], wanted[:, :, seen], rtol=0, atol=5e-6, equal_nan=True)
    assert not got.isfinite().all()
    if into != "v":  # a hidden value has weight 0, and 0 times NaN is NaN where all pairs are multiplied
        assert got[:, :, :20].isfinite().all()


@torch.no_grad()
def test_as_torch_runs_it_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
    positions = WHERE["left"]()
    compare(positions, build("alibi", num_heads=4)(positions), tensors(positions))


def test_it_says_why_not() -> None:
    positions = Positions.full(20)
    q = torch.randn(1, 4, 20, 16)
    terms = build("alibi", num_heads=4)(positions)
    assert "only by name" in explain(q, q, q, positions, terms).reasons["flex"]
    assert explain(q, q, q, positions, terms).chosen != "flex"
    with pytest.raises(ValueError, match="no backward pass on a CPU"):
        attend(q.clone().requires_grad_(), q, q, positions, terms, backend="flex")
    learned = build("kerple-log", num_heads=4)(positions)
    with pytest.raises(ValueError, match="no backward pass on a CPU"):
        attend(q, q, q, positions, learned, backend="flex")
    with pytest.raises(ValueError, match="float32"):
        attend(q.double(), q.double(), q.double(), positions, terms, backend="flex")
    with pytest.raises(ValueError, match="dropout"):
        attend(q, q, q, positions, terms, backend="flex", dropout=0.1)
    dense = Terms(bias=DenseBias(torch.zeros(1, 4, 20, 20), positions))
    with pytest.raises(ValueError, match="all pairs"):
        attend(q, q, q, positions, dense, backend="flex")
    with pytest.raises(ValueError, match="holes"):
        attend(q, q, q, Positions.from_mask(torch.arange(20)[None] % 3 > 0), Terms(), backend="flex")
    with pytest.raises(ValueError, match="nothing to attend to"):
        attend(q[:0], q[:0], q[:0], positions, terms, backend="flex")


def test_what_an_accelerator_would_be_told() -> None:
    """Decided from shapes and devices alone, so that it can be asked without one."""
    positions = Positions.full(256)
    q = torch.empty(1, 4, 256, 64, device="meta")
    terms = build("kerple-log", num_heads=4)(positions)
    assert flex.refuses(q.requires_grad_(), q, q, positions, terms) is None
    assert flex.discouraged(q, q, q, positions, terms) is None
    assert flex.discouraged(q, q, q, positions, Terms()) == "no bias: torch's own kernel is made for it"
    assert flex.refuses(q.double(), q, q, positions, terms) == "float64 on an accelerator"
    assert "16 numbers" in str(flex.refuses(q[..., :8], q, q, positions, terms))
    assert "by name" in str(flex.discouraged(q, q, q, positions, build("fire", num_heads=4, threshold=1.5)(positions)))
    few = positions.rows(250, 256)
    assert "queries" in str(flex.discouraged(q[:, :, 250:], q, q, few, build("alibi", num_heads=4)(few)))
