from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from milepost import Positions


def positions_of_every_kind() -> dict[str, Positions]:
    left = torch.ones(3, 11, dtype=torch.long)
    left[1, :4] = 0
    left[2, :] = 0
    right = left.flip(1)
    ids = torch.tensor([[7, 7, 7, 3, 3, 9, 9, 9, 9, 7, 7]])
    return {
        "full": Positions.full(11),
        "bidirectional": Positions.full(11, causal=False),
        "step": Positions.step(9, queries=2),
        "left": Positions.from_mask(left, side="left"),
        "left, last queries": Positions.from_mask(left, side="left", queries=4),
        "right": Positions.from_mask(right, side="right"),
        "packed": Positions.packed([3, 1, 7]),
        "packed, bidirectional": Positions.packed([3, 1, 7], causal=False),
        "documents": Positions.from_documents(ids),
        "documents, last queries": Positions.from_documents(ids, queries=3),
        "static cache": Positions.from_mask(right, side="right", queries=2, query_start=torch.tensor([4])),
        "cross": Positions.cross(5, 11),
    }


@pytest.mark.parametrize("name", positions_of_every_kind())
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("chunk", [None, 4])
def test_intervals_are_the_allowed_keys(name: str, window: int | None, chunk: int | None) -> None:
    positions = positions_of_every_kind()[name]
    intervals = positions.intervals(window=window, chunk=chunk)
    assert intervals is not None
    lo, hi = (bound[:, :, None] for bound in intervals)
    slots = positions.key_slots()
    inside = (slots >= lo) & (slots < hi)
    allowed = positions.allowed(window=window, chunk=chunk)
    assert torch.equal(inside.expand_as(allowed), allowed.expand_as(inside | allowed))


@pytest.mark.parametrize("name", positions_of_every_kind())
def test_slot_distance_is_the_distance_of_positions(name: str) -> None:
    positions = positions_of_every_kind()[name]
    assert positions.slot_distance
    slots = (positions.query_slots()[:, None] - positions.key_slots()[None, :])[None]
    allowed = positions.allowed()
    distance, slots = torch.broadcast_tensors(positions.distance(), slots)
    allowed = allowed.expand_as(distance)
    assert torch.equal(distance[allowed], slots[allowed])
    first, stop = positions.distance_range()
    assert not allowed.any() or (int(slots[allowed].min()) >= first and int(slots[allowed].max()) < stop)


def test_masks_with_holes_have_no_interval_and_no_slot_distance() -> None:
    mask = torch.tensor([[1, 0, 0, 1, 1, 0]])
    positions = Positions.from_mask(mask)
    assert positions.intervals() is None and not positions.slot_distance
    assert positions.key.tolist() == [[0, 0, 0, 1, 2, 2]]
    assert positions.allowed()[0, 4].tolist() == [True, False, False, True, True, False]


def test_left_padding_counts_tokens_from_zero() -> None:
    positions = Positions.from_mask(torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]), side="left")
    assert positions.key.tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert positions.length.tolist() == [3, 5]


def test_rows_keep_their_place() -> None:
    for positions in positions_of_every_kind().values():
        if positions.num_queries < 3:
            continue
        part = positions.rows(1, 3)
        assert torch.equal(part.allowed(), positions.allowed()[:, 1:3])
        assert torch.equal(part.distance(), positions.distance()[:, 1:3])


def test_a_map_never_changes_who_sees_whom() -> None:
    for positions in positions_of_every_kind().values():
        mapped = positions.mapped(positions.query * -3, positions.key * -3)
        assert torch.equal(mapped.allowed(), positions.allowed())
        assert not mapped.slot_distance


@pytest.mark.parametrize(
    ("mask", "side", "message"),
    [
        (torch.ones(3), None, r"got \(3,\)"),
        (torch.ones(1, 3), "top", "'top'"),
        (torch.tensor([[1, 0, 1]]), "left", "row 0"),
        (torch.tensor([[1, 1, 1], [0, 1, 1]]), "right", "row 1"),
    ],
)
def test_wrong_masks_are_refused(mask: torch.Tensor, side: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Positions.from_mask(mask, side=side)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.booleans())
def test_packed_equals_documents(lengths: list[int], causal: bool) -> None:
    packed = Positions.packed(lengths, causal=causal)
    ids = torch.cat([torch.full((n,), 5 - i) for i, n in enumerate(lengths)])[None]
    documents = Positions.from_documents(ids, causal=causal)
    assert torch.equal(packed.allowed(), documents.allowed())
    assert torch.equal(packed.key, documents.key)
    assert packed.document_lengths == tuple(lengths)


def test_packed_without_reset_runs_on() -> None:
    positions = Positions.packed([2, 3], reset=False)
    assert positions.key.tolist() == [[0, 1, 2, 3, 4]]
    assert positions.length.tolist() == [5]
    with pytest.raises(ValueError, match="at least one token"):
        Positions.packed([2, 0])


def test_distance_needs_one_axis() -> None:
    positions = Positions.full(4)
    grid = torch.stack([positions.key, positions.key], -1)
    with pytest.raises(ValueError, match="rope-2d"):
        positions.mapped(grid, grid).distance()


@pytest.mark.parametrize("queries", [-1, 6])
def test_queries_are_among_the_keys(queries: int) -> None:
    makers = [
        lambda: Positions.full(5, queries=queries),
        lambda: Positions.from_mask(torch.ones(1, 5), queries=queries),
        lambda: Positions.from_documents(torch.zeros(1, 5, dtype=torch.long), queries=queries),
    ]
    for make in makers:
        with pytest.raises(ValueError, match=f"the last of the 5 keys, 0 to 5 of them; got {queries}"):
            make()
