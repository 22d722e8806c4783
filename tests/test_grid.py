"""Every encoding of the catalogue against everything attention can meet, and the list of what each refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.eval_frame import _debug_get_cache_entry_list as cache_entries

from milepost import Encoding, Positions, attend
from milepost.encoding import find, from_spec, names
from milepost.testing import AttentionLayer, check_encoding, on_grid

GEOMETRY = {
    "num_heads": 4, "head_dim": 16, "width": 64, "num_layers": 4, "vocab_size": 64, "trained_length": 128,
}  # fmt: skip
REFUSALS = json.loads((Path(__file__).parent / "data" / "refusals.json").read_text())


def make(name: str, **geometry: int) -> Encoding:
    torch.manual_seed(0)
    encoding = from_spec(name, {**GEOMETRY, **geometry})
    with torch.no_grad():
        for parameter in encoding.parameters():  # zeros would hide mistakes
            if not parameter.any():
                parameter.normal_(std=0.1)
    return encoding.for_layer(0)


@pytest.mark.parametrize("name", names())
def test_grid(name: str) -> None:
    report = check_encoding(make(name))
    report.raise_if_failed()
    assert sorted(report.refused) == sorted(REFUSALS.get(name, [])), str(report)


def test_no_refusal_is_listed_for_an_encoding_that_is_gone() -> None:
    assert set(REFUSALS) <= set(names())


@settings(max_examples=40)
@given(
    name=st.sampled_from(names()),
    length=st.integers(1, 60),
    cut=st.floats(0, 1),
    kv=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 99),
)
def test_any_split_of_a_sequence_gives_the_same(name: str, length: int, cut: float, kv: int, seed: int) -> None:
    encoding = make(name).double().eval()
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, length, 64, generator=generator, dtype=torch.float64)
    tokens = torch.randint(64, (2, length), generator=generator)
    layer = AttentionLayer(4, kv, 16, 64, seed)
    first = round(cut * length)
    chunks = [n for n in (first, length - first) if n]

    def positions(stop: int, queries: int) -> Positions:
        from dataclasses import replace

        here = replace(Positions.full(stop, queries=queries), length=torch.full((1,), length))
        return here if encoding.axes == 1 else on_grid(here, encoding.axes)

    whole = layer.run(encoding, x, tokens, positions=positions)
    parts = layer.run(encoding, x, tokens, positions=positions, chunks=chunks, backend="auto")
    torch.testing.assert_close(parts, whole, atol=1e-9, rtol=0)


class Attention(torch.nn.Module):
    def __init__(self, encoding: Encoding) -> None:
        super().__init__()
        self.encoding = encoding

    def forward(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        positions = Positions.full(x.shape[1])
        if self.encoding.axes > 1:
            positions = on_grid(positions, self.encoding.axes)
        x = self.encoding.embed(x, positions, tokens)
        q = x.unflatten(-1, (4, 16)).transpose(1, 2)
        return attend(q, q.flip(1), q, positions, self.encoding(positions, tokens))


LEARNED = [name for name in names() if find(name).learnable]
SLOW_TO_TRACE = ("floater", "floater-layers")
"""Their differential equation is unrolled into the graph."""


@pytest.mark.parametrize("name", names())
def test_one_graph_serves_all_lengths(name: str) -> None:
    """Lengths that cross the chunk boundaries of every backend; at most two dynamo cache entries."""
    lengths = (32, 80, 127, 200) if name in SLOW_TO_TRACE else (32, 127, 1030)
    compile_and_compare(name, lengths, training=False)


@pytest.mark.parametrize("name", [name for name in LEARNED if name not in SLOW_TO_TRACE])
def test_one_graph_serves_all_lengths_of_training(name: str) -> None:
    compile_and_compare(name, (32, 64, 65, 80, 100, 127, 200, 300, 1030, 1100), training=True)


def compile_and_compare(name: str, lengths: tuple[int, ...], *, training: bool) -> None:
    torch._dynamo.reset()
    eager = Attention(make(name, trained_length=2048).train(training))
    compiled = torch.compile(eager, fullgraph=True, dynamic=True, backend="eager")
    generator = torch.Generator().manual_seed(0)
    for length in lengths:
        x = torch.randn(1, length, 64, generator=generator, requires_grad=training)
        tokens = torch.randint(64, (1, length), generator=generator)
        with torch.set_grad_enabled(training):
            torch.manual_seed(1)
            got = compiled(x, tokens)
            if training:
                got.square().sum().backward()
            if length == lengths[-1]:
                torch.manual_seed(1)
                torch.testing.assert_close(got, eager(x, tokens), atol=2e-5, rtol=0)
    assert len(cache_entries(type(eager).forward.__code__)) <= 2
    torch._dynamo.reset()
