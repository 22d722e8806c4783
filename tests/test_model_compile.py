"""torch.compile of the whole model: one graph for all lengths, training and decoding included."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from transformers import StaticCache

from milepost.model import MilepostConfig, MilepostForCausalLM

LENGTHS = (17, 32, 48, 100, 130, 257, 513, 700, 1000, 1100)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make(encoding: str) -> MilepostForCausalLM:
    torch.manual_seed(0)
    sizes = {"width": 16, "num_layers": 1, "num_heads": 2, "trained_length": 2048, "initializer_range": 0.3}
    return MilepostForCausalLM(MilepostConfig(encoding=encoding, **sizes))


def entries() -> int:
    return len(_debug_get_cache_entry_list(MilepostForCausalLM.forward.__code__))


def tokens(length: int) -> Tensor:
    return torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("encoding", ["rope", "kerple-log", "fire", "mep-parameterized"])
def test_training_is_one_graph_for_all_lengths(encoding: str) -> None:
    model = make(encoding).train()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in LENGTHS:
        ids = tokens(length)
        compiled(ids, labels=ids).loss.backward()
        if length == LENGTHS[-1]:
            found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            model.zero_grad()
            model(ids, labels=ids).loss.backward()
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(parameter.grad, found[name], atol=1e-4, rtol=1e-3)
        model.zero_grad()
    assert entries() <= 2


@torch.no_grad()
def test_padded_batches_are_one_graph_for_all_lengths() -> None:
    model = make("rope").eval()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in LENGTHS[:3]:
        ids = tokens(length).repeat(2, 1)
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        out = compiled(ids, attention_mask=mask, padding_side="left").logits
        expected = model(ids, attention_mask=mask).logits
        torch.testing.assert_close(out[mask == 1], expected[mask == 1], atol=1e-4, rtol=1e-3)
    assert entries() <= 2


@pytest.mark.parametrize("encoding", ["rope", "kerple-log", "bipe-rope"])
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_decoding_with_a_static_cache_is_one_graph(encoding: str, padded: bool) -> None:
    model, ids = make(encoding).eval(), tokens(20).repeat(2, 1)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :4] = 0
    full = model(ids, attention_mask=mask).logits
    cache = StaticCache(config=model.config, max_cache_len=32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for start, stop in [(0, 12), *[(i, i + 1) for i in range(12, 20)]]:
        inputs = model.prepare_inputs_for_generation(
            ids[:, :stop],
            next_sequence_length=stop - start,
            cache=cache,
            attention_mask=mask[:, :stop] if padded else None,
        )
        out = (compiled if start else model)(**inputs).logits
        here = mask[:, start:stop] == 1
        torch.testing.assert_close(out[here], full[:, start:stop][here], atol=1e-4, rtol=1e-3)
    assert entries() == 1
