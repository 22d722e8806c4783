from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest
import torch

from milepost import Branch, DenseBias, DistanceBias, PairBias, Positions, Terms, build
from milepost.terms import add_biases, distance_bias


def line(positions: Positions, seed: int = 0) -> DistanceBias:
    first, stop = positions.distance_range()
    generator = torch.Generator().manual_seed(seed)
    return DistanceBias(torch.randn(2, stop - first, generator=generator), positions, first)


def test_the_fields_of_terms_are_frozen() -> None:
    assert [f.name for f in fields(Terms)] == [
        "name", "branches", "bias", "scores", "weights", "value", "output", "window", "chunk",
        "rotated_keys_cacheable",
    ]  # fmt: skip
    with pytest.raises(FrozenInstanceError):
        Terms().window = 3  # type: ignore[misc]
    assert Terms().is_empty() and not Terms(window=2).is_empty()


@pytest.mark.parametrize(
    "positions", [Positions.full(9), Positions.step(5, queries=3), Positions.full(9, causal=False)]
)
def test_the_three_kinds_of_bias_mean_the_same(positions: Positions) -> None:
    distance = line(positions)
    allowed = positions.allowed()[:, None].expand(1, 2, -1, -1)
    dense = DenseBias(distance.dense(), positions)
    for other in (distance.as_pairs(), dense):
        assert torch.equal(other.dense()[allowed], distance.dense()[allowed])
        assert torch.equal(other.rows(1, 3).dense(), other.dense()[:, :, 1:3])
    assert torch.equal(distance.rows(1, 3).dense(), distance.dense()[:, :, 1:3])


def test_sums_keep_the_leanest_kind() -> None:
    positions = Positions.full(9)
    a, b = line(positions, 0), line(positions, 1)
    wanted = a.dense() + b.dense()
    allowed = positions.allowed()[:, None].expand_as(wanted)
    for left, right, kind in (
        (a, b, DistanceBias),
        (a, b.as_pairs(), PairBias),
        (a, DenseBias(b.dense(), positions), DenseBias),
    ):
        total = add_biases(left, right)
        assert isinstance(total, kind)
        torch.testing.assert_close(total.dense()[allowed], wanted[allowed])
    assert add_biases(None, b) is b and add_biases(a, None) is a


def test_pair_biases_on_different_positions_become_dense() -> None:
    positions = Positions.full(9)
    mapped = positions.mapped(positions.query * 2, positions.key * 2)
    slope = distance_bias(lambda d: -d[None].float(), positions)
    moved = distance_bias(lambda d: -d[None].float(), mapped)
    assert isinstance(moved, PairBias)
    total = add_biases(slope, moved)
    assert isinstance(total, DenseBias)
    assert float(total.dense()[0, 0, 8, 0]) == -24.0


def test_causal_pair_functions_never_see_the_future() -> None:
    seen = []

    def function(distance: torch.Tensor) -> torch.Tensor:
        seen.append(int(distance.min()))
        return -distance[None].float()

    positions = Positions.full(5)
    bias = distance_bias(function, positions.mapped(positions.query, positions.key))
    bias.dense()
    assert seen == [0]


def test_a_clash_names_both_encodings() -> None:
    positions = Positions.full(4)
    rope = build("rope", head_dim=8)(positions)
    with pytest.raises(ValueError, match="rope and rope both set 'branches'"):
        rope + rope
    both = rope + build("alibi", num_heads=2)(positions)
    assert both.name == "rope + alibi" and both.branches and both.bias is not None
    assert (Terms(window=4) + Terms(window=3)).window == 3
    with pytest.raises(ValueError, match="'chunk'"):
        Terms(chunk=4) + Terms(chunk=3)


def test_branches_rule_their_distances() -> None:
    distance = torch.arange(-4, 5)
    near, far = Branch(far=2), Branch(near=2)
    assert torch.equal(near.rules(distance), distance.abs() < 2)
    assert torch.equal(far.rules(distance), ~near.rules(distance))
