from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.data import (
    DataError,
    Regions,
    Windows,
    last_targets,
    load_corpus,
    nonoverlapping,
    select_regions,
    sliding,
)

document_lengths = st.lists(st.integers(0, 400), min_size=1, max_size=12)


def targets_of_regions(regions: Regions) -> Counter[tuple[int, int]]:
    return Counter(
        (int(document), int(start) + offset)
        for document, start in zip(regions.document, regions.start, strict=True)
        for offset in range(1, regions.size + 1)
    )


def counted_targets(windows: Windows) -> Counter[tuple[int, int]]:
    documents, offsets = windows.target_positions()
    return Counter(zip(documents.tolist(), offsets.tolist(), strict=True))


def regions_for(lengths: list[int], size: int, count: int) -> Regions | None:
    if not any((length - 1) // size > 0 for length in lengths):
        return None
    return select_regions(lengths, size=size, count=count, allow_fewer=True)


@given(lengths=document_lengths, size=st.integers(1, 120), count=st.integers(1, 30))
def test_regions_are_disjoint_inside_documents_and_spread(lengths: list[int], size: int, count: int) -> None:
    regions = regions_for(lengths, size, count)
    if regions is None:
        with pytest.raises(DataError, match="no held-out document"):
            select_regions(lengths, size=size, count=count)
        return
    room = [max(length - 1, 0) // size for length in lengths]
    assert len(regions) == min(count, sum(room))
    assert set(targets_of_regions(regions).values()) == {1}
    share = Counter(regions.document.tolist())
    for document, start in zip(regions.document, regions.start, strict=True):
        assert 0 <= start and start + size < lengths[document]
    for document, available in enumerate(room):
        fewer_than_another = share[document] < max(share.values()) - 1
        assert not fewer_than_another or share[document] == available


@given(data=st.data(), lengths=document_lengths, size=st.integers(1, 120), count=st.integers(1, 30))
def test_nonoverlapping_counts_each_target_of_the_regions_once_at_every_length(
    data: st.DataObject, lengths: list[int], size: int, count: int
) -> None:
    regions = regions_for(lengths, size, count)
    if regions is None:
        return
    length = data.draw(st.integers(1, size))
    windows = nonoverlapping(regions, length)
    assert counted_targets(windows) == targets_of_regions(regions)
    assert windows.num_targets == regions.num_targets == len(regions) * size
    assert len(windows) == len(regions) * -(-size // length)


@given(data=st.data(), lengths=document_lengths, size=st.integers(1, 120), count=st.integers(1, 30))
def test_sliding_counts_each_target_once_with_enough_context(
    data: st.DataObject, lengths: list[int], size: int, count: int
) -> None:
    regions = regions_for(lengths, size, count)
    if regions is None:
        return
    length = data.draw(st.integers(1, size))
    stride = data.draw(st.integers(1, length))
    windows = sliding(regions, length, stride)
    assert counted_targets(windows) == targets_of_regions(regions)
    begins_region = windows.start == regions.start[windows.region]
    assert (windows.first[begins_region] == 0).sum() == len(regions)
    assert (windows.first[~begins_region] >= length - stride).all()


@given(data=st.data(), lengths=document_lengths, size=st.integers(1, 120), count=st.integers(1, 30))
def test_last_targets_are_the_same_for_every_length(
    data: st.DataObject, lengths: list[int], size: int, count: int
) -> None:
    regions = regions_for(lengths, size, count)
    if regions is None:
        return
    shortest = data.draw(st.integers(1, size))
    targets = data.draw(st.integers(1, shortest))
    expected = [
        (int(d), int(s) + size - i)
        for d, s in zip(regions.document, regions.start, strict=True)
        for i in range(targets)
    ]
    for length in {shortest, size}:
        windows = last_targets(regions, length, targets)
        assert counted_targets(windows) == Counter(expected)
        assert (windows.start >= regions.start[windows.region]).all()


def test_gather_reads_the_tokens_it_says() -> None:
    corpus = load_corpus(
        {f"doc{i}": "".join(chr(97 + (i + j) % 26) for j in range(200)) for i in range(12)}, cache=False
    )
    regions = corpus.test.regions(size=100, count=2, allow_fewer=True)
    windows = sliding(regions, 40, 25)
    inputs, targets, counted = windows.gather(corpus.test)
    assert inputs.shape == targets.shape == counted.shape == (len(windows), 40)
    assert (inputs[:, 1:] == targets[:, :-1]).all()
    documents, offsets = windows.target_positions()
    tokens = [corpus.test[int(document)].tokens[offset] for document, offset in zip(documents, offsets, strict=True)]
    assert targets[counted].tolist() == tokens
    part = windows.gather(corpus.test, slice(1, 3))
    assert all((whole[1:3] == some).all() for whole, some in zip((inputs, targets, counted), part, strict=True))


def test_a_worked_example() -> None:
    regions = Regions(np.array([0]), np.array([5]), 10)
    windows = sliding(regions, 6, 3)
    assert windows.start.tolist() == [5, 8, 9]
    assert windows.first.tolist() == [0, 3, 5]
    assert nonoverlapping(regions, 4).start.tolist() == [5, 9, 11]
    assert nonoverlapping(regions, 4).first.tolist() == [0, 0, 2]
    assert last_targets(regions, 6, 2).start.tolist() == [9]


def test_prose_has_two_dozen_regions_over_as_many_documents() -> None:
    corpus = load_corpus("prose", cache=False)
    regions = corpus.test.regions(size=4096, count=24)
    assert len(regions) == 24
    assert len(set(regions.document.tolist())) == 24
    assert len(corpus.test.regions(size=16384, count=24)) == 24


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(lengths=[30, 100], size=200), "no held-out document has 201 tokens.*longest first: 100, 30"),
        (dict(lengths=[30, 450], size=200), "24 regions of 200 targets were asked for but only 2 fit"),
        (dict(lengths=[30], size=0), "size=0"),
        (dict(lengths=[], size=5), "there are no documents"),
    ],
)
def test_regions_that_cannot_be_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        select_regions(**arguments)


def test_windows_that_cannot_be_are_refused() -> None:
    regions = Regions(np.array([0]), np.array([0]), 10)
    for call in (
        lambda: nonoverlapping(regions, 11),
        lambda: sliding(regions, 0, 1),
        lambda: last_targets(regions, 11, 1),
    ):
        with pytest.raises(DataError, match="must lie between 1 and the regions' size 10"):
            call()
    for stride in (0, 6):
        with pytest.raises(DataError, match="skipped"):
            sliding(regions, 5, stride)
    with pytest.raises(DataError, match="targets=6"):
        last_targets(regions, 5, 6)
