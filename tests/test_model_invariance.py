"""Every encoding that can be trained, inside the language model: what a user must never notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from milepost.encoding import Encoding, catalogue
from milepost.model import MilepostConfig, MilepostForCausalLM

NAMES = [entry.name for entry in catalogue() if entry.trainable]
LENGTH = 19
SPECS = {name: f"{name}:test_tokens=32" for name in NAMES if name.startswith("randomized")}
"""Positions that are drawn for a whole text need its length beforehand, or a cache moves them."""


def make(name: str, **options: Any) -> MilepostForCausalLM:
    """A random model, large enough in its weights that positions matter."""
    torch.manual_seed(1)
    spec = SPECS.get(name, name)
    config = MilepostConfig(
        width=64, num_layers=2, num_heads=4, num_kv_heads=2, trained_length=64, encoding=spec, initializer_range=0.1
    )
    model = MilepostForCausalLM(config, **options).eval()
    with torch.no_grad():
        for parameter in model.model.encodings.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def tokens() -> Tensor:
    return torch.randint(0, 256, (2, LENGTH), generator=torch.Generator().manual_seed(2))


def assert_near(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_cached_logits_equal_full_logits(name: str) -> None:
    model, ids = make(name), tokens()
    full = model(ids).logits
    chunks = [(0, 7), (7, 12), *[(i, i + 1) for i in range(12, LENGTH)]]
    for cache in (DynamicCache(), StaticCache(config=model.config, max_cache_len=24)):
        parts = [model(ids[:, a:b], cache=cache, context_tokens=ids[:, :b]).logits for a, b in chunks]
        assert_near(torch.cat(parts, dim=1), full)
    stepwise = DynamicCache()
    parts = [model(ids[:, i : i + 1], cache=stepwise, context_tokens=ids[:, : i + 1]).logits for i in range(LENGTH)]
    assert_near(torch.cat(parts, dim=1), full)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_a_padded_row_equals_the_row_alone(name: str, side: str) -> None:
    model, ids, real = make(name), tokens(), LENGTH - 6
    mask = torch.ones_like(ids)
    at = slice(6, None) if side == "left" else slice(None, real)
    mask[0] = 0
    mask[0, at] = 1
    batch = model(ids, attention_mask=mask).logits
    assert_near(batch[0, at], model(ids[:1, at]).logits[0])
    assert_near(batch[1], model(ids[1:]).logits[0])


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_packed_documents_equal_separate_ones(name: str) -> None:
    model, ids = make(name), tokens()
    lengths = [5, 11, 3]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None].expand(2, -1)
    packed = model(ids, document_ids=documents).logits
    alone = [model(part).logits for part in ids.split(lengths, dim=1)]
    assert_near(packed, torch.cat(alone, dim=1))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_saved_models_load_the_same_and_keep_encodings_in_float32(name: str, tmp_path: Path) -> None:
    model, ids = make(name), tokens()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(ids).logits, model(ids).logits)

    halved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    saved = dict(model.named_parameters())
    for key, parameter in halved.named_parameters():
        if key.startswith("model.encodings."):
            assert parameter.dtype == torch.float32, key
            assert torch.equal(parameter, saved[key]), key
        else:
            assert parameter.dtype == torch.bfloat16, key
    assert halved(ids).logits.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_of_an_encoding_learns(name: str) -> None:
    model, ids = make(name).train(), tokens()
    model(ids, labels=ids).loss.backward()
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.isfinite().all(), key


@pytest.mark.parametrize("name", NAMES)
def test_one_seed_gives_one_trunk_whatever_the_encoding(name: str) -> None:
    plain, other = make("nope"), make(name)
    ours = dict(other.named_parameters())
    for key, parameter in plain.named_parameters():
        assert torch.equal(parameter, ours[key]), key


def largest_value(model: MilepostForCausalLM) -> float:
    return max((float(p.detach().abs().max()) for p in model.model.encodings.parameters()), default=0.0)


@pytest.mark.parametrize("name", NAMES)
def test_encodings_begin_as_published_when_a_model_is_made(name: str) -> None:
    """Hugging Face's own initialisation (N(0, initializer_range) for every Linear) must not reach into an encoding."""
    torch.manual_seed(3)
    sizes = {"width": 64, "num_layers": 2, "num_heads": 4, "trained_length": 64}
    model = MilepostForCausalLM(MilepostConfig(encoding=name, initializer_range=7.0, **sizes))
    largest = largest_value(model)
    for module in model.model.encodings:
        assert isinstance(module, Encoding)
        module.reset_parameters()
    again = largest_value(model)
    assert largest <= 1.5 * again + 1.0
