"""Caches of the model: the bound of the keys, memory kept ahead, and decoding in bounded memory."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from milepost import Positions, Terms, attach, attend, build
from milepost.attention import library, windows
from milepost.attention.windows import append, largest_norms
from milepost.model import DecodingCache, MilepostConfig, MilepostForCausalLM, bounded_cache, decoder
from milepost.model.cache import DecodingLayer
from milepost.terms import Branch
from tests import tiny_models


def make(encoding: str, **options: Any) -> MilepostForCausalLM:
    torch.manual_seed(0)
    sizes = {"width": 32, "num_layers": 2, "num_heads": 4, "trained_length": 64, "initializer_range": 0.2}
    return MilepostForCausalLM(MilepostConfig(encoding=encoding, **{**sizes, **options})).eval()


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(1))


# ---- attend with a bound --------------------------------------------------------------------------------------------

SERVING = [name for name in ("native", "blocked") if name != "native" or library.unavailable() is None]


def decoding_step(length: int = 3000, queries: int = 1) -> tuple[Tensor, Tensor, Tensor, Positions, Terms]:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, queries, 16), torch.randn(2, 2, length, 16), torch.randn(2, 2, length, 16)
    positions = Positions.step(length - queries, queries=queries)
    return q, k, v, positions, build("alibi", num_heads=4, slope_scale=16.0)(positions)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("name", [*SERVING, "sdpa", "rows"])
def test_a_bound_changes_nothing_on_any_backend(name: str, queries: int) -> None:
    q, k, v, positions, terms = decoding_step(queries=queries)
    bound = largest_norms(k)
    for given in (bound, bound.expand(2, -1)):
        out = attend(q, k, v, positions, terms, backend=name, key_bound=given)
        torch.testing.assert_close(out, attend(q, k, v, positions, terms, backend="reference"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", SERVING)
def test_with_a_bound_far_keys_are_not_read(name: str) -> None:
    q, k, v, positions, terms = decoding_step()
    bound, want = largest_norms(k), attend(q, k, v, positions, terms)
    k[:, :, :1500], v[:, :, :1500] = torch.nan, torch.nan
    torch.testing.assert_close(attend(q, k, v, positions, terms, backend=name, key_bound=bound), want)
    assert bool(attend(q, k, v, positions, terms, backend=name).isnan().any())


@pytest.mark.parametrize("name", ["auto", *SERVING, "sdpa"])
def test_a_bound_is_left_unused_where_it_would_not_hold(name: str) -> None:
    """Keys that a branch makes a thousand times longer, given with a bound that is right for what was given."""
    q, k, v, positions, terms = decoding_step(1000)
    k = 1e-3 * k
    k[:, :, 0] = 0.3 * q[:, ::2, 0]
    longer = Branch(key=lambda k, at: 1e3 * k)
    terms = Terms(bias=terms.bias, branches=(longer,))
    want = attend(q, k, v, positions, terms, backend="reference")
    torch.testing.assert_close(attend(q, k, v, positions, terms, backend=name, key_bound=largest_norms(k)), want)
    plain = Terms(bias=terms.bias)
    wrong = attend(q, 1e3 * k, v, positions, plain, backend=name, key_bound=largest_norms(k))
    assert float((wrong - want).abs().max()) > 0.1


@pytest.mark.parametrize("name", SERVING)
def test_only_branches_that_keep_the_keys_use_the_bound(name: str) -> None:
    q, k, v, positions, terms = decoding_step(1000)
    k = 1e-3 * k
    k[:, :, 0] = 0.3 * q[:, ::2, 0]
    near, far = Branch(far=50), Branch(key=lambda k, at: 1e3 * k, near=50)
    terms = Terms(bias=terms.bias, branches=(near, far))
    got = attend(q, k, v, positions, terms, backend=name, key_bound=largest_norms(k))
    torch.testing.assert_close(got, attend(q, k, v, positions, terms, backend="reference"), rtol=1e-5, atol=1e-5)


def test_a_bound_of_another_shape_is_refused() -> None:
    q, k, v, positions, terms = decoding_step(20)
    with pytest.raises(ValueError, match=r"one number for each key head, \(1, 2\) or \(2, 2\); got \(2, 4\)"):
        attend(q, k, v, positions, terms, key_bound=torch.ones(2, 4))


# ---- memory kept ahead, and the bound -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_largest_norms_are_never_too_small(dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, 200, 250, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = x.double().norm(dim=-1).amax((0, 2))[None]
    got = largest_norms(x)
    assert got.dtype == torch.promote_types(dtype, torch.float32) and got.shape == (1, 4)
    assert bool((got.double() >= exact).all()) and bool((got.double() <= 1.0002 * exact).all())
    assert torch.equal(largest_norms(x[:, :, :0]), torch.zeros_like(got))


def test_appending_is_concatenation() -> None:
    generator = torch.Generator().manual_seed(0)
    room, held, want = None, None, torch.empty(2, 3, 0, 4)
    rooms = set()
    for _ in range(400):
        new = torch.randn(2, 3, 1, 4, generator=generator)
        room, held = append(room, held, new)
        want = torch.cat([want, new], 2)
        rooms.add(room.data_ptr())
        assert torch.equal(held, want)
    assert len(rooms) < 12
    _, other = append(room, held.flip(0), new)  # not the beginning of that room
    assert torch.equal(other, torch.cat([want.flip(0), new], 2)) and torch.equal(held, want)
    room, both = append(room, held, new.double())
    assert both.dtype == torch.float64 and torch.equal(both[:, :, :-1], want.double())
    with torch.inference_mode():
        room, held = append(None, None, new)
    _, both = append(room, held, new)
    assert torch.equal(both, torch.cat([new, new], 2))


@pytest.mark.parametrize("seed", range(8))
@torch.no_grad()
def test_a_layer_is_transformers_layer_and_its_bound_holds(seed: int) -> None:
    """Any sequence of updates, cuts, reordered, repeated and chosen rows, copies and resets."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    mine, theirs = DecodingCache(1), DynamicCache()
    for _ in range(60):
        batch = mine.layers[0].keys.shape[0] if mine.get_seq_length() else 2
        action = draw.choice(["update"] * 5 + ["crop", "reorder", "repeat", "select", "copy", "reset"])
        if action == "update" or not mine.get_seq_length():
            size = (batch, 3, draw.choice([1, 1, 2, 40]), 8)
            k, v = (draw.random() * torch.randn(size, generator=generator) for _ in range(2))
            for cache in (mine, theirs):
                cache.update(k, v, 0)
        elif action == "crop":
            cut = draw.randint(0, mine.get_seq_length() - 1)
            for cache in (mine, theirs):
                cache.crop(-cut)
        elif action in ("reorder", "select"):
            rows = torch.randint(0, batch, (batch,), generator=generator)
            for cache in (mine, theirs):
                cache.reorder_cache(rows) if action == "reorder" else cache.batch_select_indices(rows[:2])
        elif action == "repeat":
            if batch < 8:
                for cache in (mine, theirs):
                    cache.batch_repeat_interleave(2)
        elif action == "copy":
            mine, theirs = copy.deepcopy(mine), copy.deepcopy(theirs)
        elif draw.random() < 0.2:
            for cache in (mine, theirs):
                cache.reset()
            continue
        layer = mine.layers[0]
        assert mine.get_seq_length() == theirs.get_seq_length()
        assert torch.equal(layer.keys, theirs.layers[0].keys) and torch.equal(layer.values, theirs.layers[0].values)
        if draw.random() < 0.5:
            assert bool((layer.key_bound() >= layer.keys.norm(dim=-1).amax((0, 2))).all())


def test_each_key_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(
        "milepost.model.cache.largest_norms", lambda x: (measured.append(x.shape[2]), windows.largest_norms(x))[1]
    )
    layer = DecodingLayer()
    with torch.no_grad():
        for count in (50, 1, 1, 3):
            layer.update(torch.randn(1, 2, count, 8), torch.randn(1, 2, count, 8))
            layer.key_bound()
            layer.key_bound()
    assert measured == [50, 1, 1, 3]


def test_gradients_pass_through_the_cache() -> None:
    model, ids = make("alibi"), tokens(1, 12)
    full = model(ids).logits[:, -1].sum()
    wanted = torch.autograd.grad(full, model.model.embed_tokens.weight)[0]
    cache = DecodingCache(2)
    for part in ids.split([5, 1, 6], 1):
        logits = model(part, cache=cache).logits
    got = torch.autograd.grad(logits[:, -1].sum(), model.model.embed_tokens.weight)[0]
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 4}])
@torch.no_grad()
def test_generation_hands_on_a_bound_that_holds(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def watched(q: Tensor, k: Tensor, *args: Any, key_bound: Tensor | None, **kwargs: Any) -> Tensor:
        assert key_bound is not None and bool((k.norm(dim=-1) <= key_bound[..., None]).all())
        given.append(float((key_bound / k.norm(dim=-1).amax((0, 2))).min()))
        return attend(q, k, *args, key_bound=key_bound, **kwargs)

    model, ids = make("kerple-power", num_kv_heads=2), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    monkeypatch.setattr(decoder, "attend", watched)
    monkeypatch.setattr("milepost.model.cache.FEW_KEYS", 1)
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, return_dict_in_generate=True, eos_token_id=None,
        **options,
    )  # fmt: skip
    assert type(out.cache) is DecodingCache and len(given) >= 12 and min(given) < 1.001


def record(monkeypatch: pytest.MonkeyPatch, name: str, bounds: list[Tensor | None]) -> None:
    def watched(*args: Any, key_bound: Tensor | None, **kwargs: Any) -> Tensor:
        bounds.append(key_bound)
        return attend(*args, key_bound=key_bound, **kwargs)

    monkeypatch.setattr(name, watched)


@torch.no_grad()
def test_other_caches_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make("alibi"), tokens(1, 9)
    given = []
    record(monkeypatch, "milepost.model.decoder.attend", given)
    for options in ({"cache": DynamicCache()}, {"cache_implementation": "static"}, {"use_cache": False}):
        model.generate(ids, max_new_tokens=2, **options)
    assert given and all(bound is None for bound in given)


@torch.no_grad()
def test_an_attached_model_uses_the_bound_of_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.tiny("bloom")
    ids, given = torch.randint(3, 64, (1, 9)), []
    options = {"max_new_tokens": 5, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with attach(model):
        wanted = model.generate(ids, **options)
        record(monkeypatch, "milepost.extend.attach.attend", given)
        got = model.generate(ids, cache=DecodingCache(2), **options)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(wanted.logits), rtol=1e-5, atol=1e-5)
    assert given and all(bound is not None for bound in given)


# ---- bounded memory -------------------------------------------------------------------------------------------------

STEEP = [f"{name}alibi:slope_scale=256" for name in ("", "mep+", "kerple-power+", "sinusoidal+")]


@pytest.mark.parametrize("encoding", STEEP)
@pytest.mark.parametrize("steps", [[1] * 500, [7] * 71 + [3], [400, 1, 1, 98]])
@torch.no_grad()
def test_decoding_in_bounded_memory_is_a_full_pass(encoding: str, steps: list[int]) -> None:
    model, ids = make(encoding, num_kv_heads=2), tokens(2, 500)
    cache = bounded_cache(model, 500)
    assert cache.window < 150
    parts = [model(part, cache=cache).logits for part in ids.split(steps, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits, rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == 500 and cache.dropped >= 500 - 2 * cache.window - 64


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 64}])
@torch.no_grad()
def test_generation_in_bounded_memory(options: dict[str, Any]) -> None:
    """Left padding too, of which some lies beyond what is dropped in the first step and some beyond a later one."""
    model, ids = make("sinusoidal+alibi:slope_scale=512"), tokens(3, 240)
    mask = torch.ones_like(ids)
    mask[0, :100], mask[1, :236] = 0, 0
    asked = {
        "attention_mask": mask, "max_new_tokens": 80, "do_sample": False, "output_logits": True, "eos_token_id": None,
        "return_dict_in_generate": True, **options,
    }  # fmt: skip
    cache = bounded_cache(model, 320)
    got = model.generate(ids, cache=cache, **asked)
    assert got.cache is cache and cache.dropped > 236
    want = model.generate(ids, **asked)
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_memory_stays_bounded_over_thousands_of_steps() -> None:
    model = make("alibi:slope_scale=1024", num_layers=1)
    cache = bounded_cache(model, 5000)
    token, held, room = tokens(1, 1), 0, 0
    for _ in range(4000):
        model.model(token, cache=cache)
        layer = cache.layers[0]
        held = max(held, layer.keys.shape[2])
        room = max(room, layer.keys.untyped_storage().nbytes() // (4 * 32))
    assert cache.window < 60 and held < 2 * cache.window + 64 and room < 2 * held + 64
    assert cache.get_seq_length() == 4000 and cache.dropped == 4000 - layer.keys.shape[2]


@torch.no_grad()
def test_bounds_from_the_weights_hold_for_any_input() -> None:
    """Inputs along the directions that each head's projections stretch most, under every kind of norm and bias."""
    for options in ({}, {"norm": "rms"}, {"bias": True}):
        model = make("alibi:slope_scale=512", width=64, num_kv_heads=2, head_dim=8, **options)
        block = model.model.layers[0]
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5)
        layer = bounded_cache(model, 3000).layers[0]
        weights = block.attention.qkv_proj.weight.split(block.attention.sizes)
        for name, weight in (("query", weights[0]), ("key", weights[1])):
            gained = (weight * block.norm1.weight).unflatten(0, (-1, 8))
            worst = torch.linalg.svd(gained).Vh[:, 0]
            x = 100 * torch.cat([worst, -worst, torch.randn(500, 64)])
            parts = block.attention.qkv_proj(block.norm1(x)).split(block.attention.sizes, -1)
            made = parts[0 if name == "query" else 1].unflatten(-1, (-1, 8)).transpose(0, 1)[None]
            norms = largest_norms(made)[0]
            assert bool((norms <= layer.promised[name]).all())
            assert bool((norms >= 0.7 * layer.promised[name]).all())
            layer.check(name, made)


@torch.no_grad()
def test_the_stated_error_holds_against_an_adversary() -> None:
    """Far keys along every query, near ones against it, with all the weight that eps allows."""
    model = make("alibi:slope_scale=64", num_layers=1, num_heads=1, width=8)
    for eps in (0.3, 1e-2, 1e-4):
        cache = bounded_cache(model, 400, eps=eps, query_bound=3.0, key_bound=3.0)
        q = torch.zeros(1, 1, 1, 8)
        q[..., 0] = 3.0
        most, v = 0.0, torch.randn(1, 1, 400, 8, generator=torch.Generator().manual_seed(2))
        k = torch.cat([q.expand(-1, -1, 200, -1), -q.expand(-1, -1, 200, -1)], 2)
        for i in range(400):
            start = cache.dropped
            held_k, held_v = cache.update(k[:, :, i : i + 1], v[:, :, i : i + 1], 0)
            here, whole = Positions.step(i - start), Positions.step(i)
            got = attend(q, held_k, held_v, here, model.model.terms(here)[0])
            want = attend(q, k[:, :, : i + 1], v[:, :, : i + 1], whole, model.model.terms(whole)[0])
            most = max(most, float((got - want).abs().max()))
        assert cache.dropped and most <= 2 * eps * float(v.abs().max()) + 1e-5


@torch.no_grad()
def test_broken_promises_are_errors() -> None:
    model, ids = make("alibi:slope_scale=256"), tokens(1, 100)
    parts = model.model.layers[0].attention.qkv_proj(model.model.layers[0].norm1(model.model.embed_tokens(ids)))
    norms = [part.unflatten(-1, (4, 8)).norm(dim=-1).amax().item() for part in parts.split([32, 32, 32], -1)]
    for name, norm, other in (("query", norms[0], "key"), ("key", norms[1], "query")):
        bounds = {f"{name}_bound": 0.9 * norm, f"{other}_bound": 100.0}
        cache = bounded_cache(model, 4000, eps=1e-4, **bounds)
        with pytest.raises(ValueError, match=rf"layer 0, head \d: a {name} of norm .* breaks the .* {name}_bound"):
            model(ids, cache=cache)
    cache = bounded_cache(model, 200, query_bound=12.0, key_bound=12.0)
    model(ids, cache=cache)
    with pytest.raises(ValueError, match="201 tokens, the cache was made for 200"):
        model(tokens(1, 101), cache=cache)
    model.model.embed_tokens.weight[5] = torch.nan
    with pytest.raises(ValueError, match="norm nan breaks"):
        model(torch.tensor([[5]]), cache=cache)
    model = make("alibi:slope_scale=256")
    for layer in model.model.layers:
        layer.attention.qkv_proj.weight.zero_()  # bounds of 0, which zeros keep
    cache = bounded_cache(model, 200)
    model(ids, cache=cache)
    cache.reset()
    model.model.set_encoding("nope")
    with pytest.raises(ValueError, match="the bounded cache was made for another encoding"):
        model(ids, cache=cache)


@torch.no_grad()
def test_what_a_bounded_cache_cannot_serve_is_refused() -> None:
    def refusal(encoding: str, length: int = 2000, **options: Any) -> str:
        given = {name: options.pop(name) for name in ("eps", "query_bound", "key_bound") if name in options}
        with pytest.raises(ValueError) as error:
            bounded_cache(make(encoding, **options), length, **given)
        return str(error.value)

    assert "layer 1 (nope) has no bias of the distance alone" in refusal("alibi:slope_scale=256/nope")
    assert "layer 0 (rope + alibi) does more than add a bias" in refusal("rope+alibi:slope_scale=256")
    assert "layer 0 (rope) has no bias" in refusal("rope")
    assert "has no bias of the distance alone" in refusal("fire")
    assert "ids of all tokens" in refusal("bipe-rope")
    assert "no key could be dropped within max_length=2000: the bias of layer" in refusal("kerple-log")
    assert "no key could be dropped" in refusal("alibi", length=50)
    assert "a model with causal=False" in refusal("alibi", causal=False)
    assert "block='post' bounds no input of attention: give query_bound" in refusal("alibi", block="post")
    assert "give key_bound" in refusal("alibi", block="post", query_bound=1.0)
    assert "eps is a share of the weight, between 0 and 1; got 1" in refusal("alibi", eps=1)
    assert "query_bound is a positive number; got nan" in refusal("alibi", query_bound=float("nan"))
    assert "max_length is at least 1; got 0" in refusal("alibi", length=0)
    bounded_cache(make("alibi:slope_scale=256", block="post"), 2000, query_bound=9.0, key_bound=9.0)
    model, ids = make("alibi:slope_scale=256"), tokens(1, 20)
    cache = bounded_cache(model, 2000)
    for inputs in ({"position_ids": torch.arange(20)[None]}, {"document_ids": torch.zeros_like(ids)}):
        with pytest.raises(ValueError, match="goes with neither position_ids nor document_ids"):
            model(ids, cache=cache, **inputs)
    mask = torch.ones_like(ids)
    mask[0, 5:8] = 0
    with pytest.raises(ValueError, match="pad the prompts on the left"):
        model(ids, cache=cache, attention_mask=mask)
    with pytest.raises(ValueError, match=r"covers all 20 tokens, cached and new; got shape \(1, 19\)"):
        model(ids, cache=cache, attention_mask=mask[:, 1:])


@torch.no_grad()
def test_a_bounded_cache_goes_back_as_far_as_it_can() -> None:
    model, ids = make("alibi:slope_scale=256"), tokens(2, 500)
    full, cache = model(ids).logits, bounded_cache(model, 600)
    for end in (300, 500):
        model(ids[:, cache.get_seq_length() : end], cache=cache)
        back = min(20, max(0, cache.get_seq_length() - cache.dropped - cache.window + 1))
        cache.crop(-back)
        got = model(ids[:, end - back : end], cache=cache).logits
        torch.testing.assert_close(got, full[:, end - back : end], rtol=1e-4, atol=1e-4)
    assert cache.dropped and not cache.is_croppable
    with pytest.raises(ValueError, match="the next one needs keys that this cache has dropped"):
        cache.crop(-(500 - cache.window - cache.dropped + 2))
    copied = copy.deepcopy(cache)
    cache.reset()
    torch.testing.assert_close(model(ids[:, :100], cache=cache).logits, full[:, :100], rtol=1e-4, atol=1e-4)
    assert cache.dropped == 0 and copied.get_seq_length() == 500
    rows = torch.tensor([1, 0])
    copied.reorder_cache(rows)
    extra = tokens(2, 501)[:, -1:]
    want = model(torch.cat([ids, extra[rows]], 1)[rows]).logits[:, -1:]
    torch.testing.assert_close(model(extra, cache=copied).logits, want, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_sliding_window_is_the_reach_where_it_is_shorter() -> None:
    model, ids = make("alibi:slope_scale=16+window:size=30"), tokens(1, 300)
    cache = bounded_cache(model, 300)
    assert cache.window == 30
    parts = [model(part, cache=cache).logits for part in ids.split(1, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits, rtol=1e-4, atol=1e-4)
    assert cache.dropped > 200


@torch.no_grad()
def test_bounded_memory_in_bfloat16() -> None:
    model, ids = make("alibi:slope_scale=256", norm="rms").bfloat16(), tokens(1, 400)
    cache = bounded_cache(model, 400)
    parts = [model(part, cache=cache).logits for part in ids.split(1, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits, rtol=0.05, atol=0.1)
    assert cache.dropped > 100


@torch.no_grad()
def test_nothing_handed_out_is_written_to() -> None:
    """Copies of a cache go on by themselves, and what was read from it before a cut stays."""
    model, ids = make("alibi"), tokens(1, 12)
    other = (ids + 1) % 60
    cache = DecodingCache(2)
    model(ids[:, :8], cache=cache)
    branch = copy.copy(cache)
    branch.layers = [copy.copy(layer) for layer in cache.layers]
    first = model(ids[:, 8:10], cache=cache).logits
    second = model(other[:, 8:10], cache=branch).logits
    torch.testing.assert_close(first, model(ids[:, :10]).logits[:, -2:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        second, model(torch.cat([ids[:, :8], other[:, 8:10]], 1)).logits[:, -2:], rtol=1e-4, atol=1e-5
    )
    third = model(ids[:, 10:], cache=cache).logits
    torch.testing.assert_close(third, model(ids).logits[:, -2:], rtol=1e-4, atol=1e-5)

    kept = [(layer.keys, layer.values) for layer in cache.layers]
    copies = [(keys.clone(), values.clone()) for keys, values in kept]
    cache.crop(-4)
    model(other[:, 8:], cache=cache)
    for (keys, values), (old_keys, old_values) in zip(kept, copies, strict=True):
        assert torch.equal(keys, old_keys) and torch.equal(values, old_values)


@torch.no_grad()
def test_a_pickled_cache_goes_on() -> None:
    model, ids = make("alibi"), tokens(1, 12)
    cache = DecodingCache(2)
    model(ids[:, :8], cache=cache)
    again = pickle.loads(pickle.dumps(cache))
    torch.testing.assert_close(
        model(ids[:, 8:], cache=again).logits, model(ids[:, 8:], cache=cache).logits, rtol=1e-4, atol=1e-5
    )


@torch.no_grad()
def test_a_cache_for_fewer_layers_grows() -> None:
    model, ids = make("alibi"), tokens(1, 12)
    cache = DecodingCache(1)
    model(ids[:, :8], cache=cache)
    assert [type(layer) for layer in cache.layers] == [DecodingLayer] * 2
    torch.testing.assert_close(
        model(ids[:, 8:], cache=cache).logits, model(ids).logits[:, 8:], rtol=1e-4, atol=1e-5
    )
