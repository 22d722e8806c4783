"""LongRoPE's first tokens that stay unscaled: by a direct formula, in a model, and where nothing can store them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import milepost
from milepost import Positions, attend, build
from milepost.encodings.frequencies import Linear, LogN, LongRope, Resonance, Yarn, from_config
from milepost.extend.export import ExportRefused, export
from milepost.testing import check_encoding

PAIRS, TRAINED = 4, 8
SHORT, LONG = (1.0, 1.1, 1.3, 1.7), (1.0, 2.0, 3.0, 4.0)
OPTIONS: dict[str, Any] = {
    "trained_length": TRAINED, "short_factor": SHORT, "long_factor": LONG, "factor": 4.0,
}  # fmt: skip
MODEL: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": TRAINED, "pad_token_id": 0,
}  # fmt: skip


def angles(length: int, first: int, base: float = 10000.0) -> torch.Tensor:
    """n theta_p for n < first, n theta_p / lambda_p from there on: (length, P), one number at a time."""
    divisors = LONG if length > TRAINED else SHORT
    rows = [
        [n * base ** (-p / PAIRS) / (1.0 if n < first else divisors[p]) for p in range(PAIRS)] for n in range(length)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def rotated(x: torch.Tensor, angle: torch.Tensor, factor: float) -> torch.Tensor:
    """Pairs as complex numbers, turned and multiplied."""
    pairs = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.full_like(angle, factor), angle)
    return torch.cat([pairs.real, pairs.imag], dim=-1)


@pytest.mark.parametrize("first", [0, 1, 3, 20])
@pytest.mark.parametrize("length", [TRAINED, TRAINED + 1, 20])
def test_attention_is_that_of_the_direct_formula(length: int, first: int) -> None:
    encoding = build("longrope", head_dim=2 * PAIRS, unscaled_tokens=first, **OPTIONS)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, length, 2 * PAIRS, dtype=torch.float64)
    found = attend(q, k, v, Positions.full(length), encoding(Positions.full(length)), backend="reference")
    factor = (1 + torch.tensor(4.0).double().log() / torch.tensor(float(TRAINED)).double().log()).sqrt().item()
    turn = angles(length, first)
    logits = rotated(q, turn, factor) @ rotated(k, turn, factor).mT / (2 * PAIRS) ** 0.5
    logits = logits.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(found, logits.softmax(-1) @ v, rtol=0, atol=1e-12)


def test_none_unscaled_is_plain_longrope_and_all_unscaled_is_rope() -> None:
    positions = Positions.full(20)
    tables = {
        first: build("longrope", head_dim=8, **OPTIONS, unscaled_tokens=first, attention_factor=1.0)
        for first in (0, 3, 20)
    }
    q = torch.randn(1, 2, 20, 8)
    turned = {first: encoding(positions).branches[0].query(q) for first, encoding in tables.items()}  # type: ignore[misc]  # rotary
    plain = build("longrope", head_dim=8, **OPTIONS, attention_factor=1.0)(positions).branches[0].query
    rope = build("rope", head_dim=8)(positions).branches[0].query
    assert plain is not None and rope is not None
    assert torch.equal(turned[0], plain(q)) and torch.equal(turned[20], rope(q))
    assert torch.equal(turned[3][:, :, :3], rope(q)[:, :, :3]) and torch.equal(turned[3][:, :, 3:], plain(q)[:, :, 3:])


def test_packed_documents_each_have_their_first_tokens() -> None:
    encoding = build("longrope", head_dim=8, unscaled_tokens=3, growth="long", **OPTIONS)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 12, 8, dtype=torch.float64)
    packed = Positions.packed([5, 7], reset=True)
    whole = attend(q, k, v, packed, encoding(packed))
    for start, stop in ((0, 5), (5, 12)):
        alone = Positions.full(stop - start)
        part = attend(*(x[:, :, start:stop] for x in (q, k, v)), alone, encoding(alone))
        torch.testing.assert_close(whole[:, :, start:stop], part, rtol=0, atol=1e-12)


@pytest.mark.parametrize("growth", ["switch", "long"])
def test_caches_padding_and_packing(growth: str) -> None:
    encoding = build("longrope", head_dim=8, unscaled_tokens=3, growth=growth, **OPTIONS)
    report = check_encoding(encoding, num_heads=2, head_dim=8)
    report.raise_if_failed()


def tiny_llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    block = {"rope_type": "default", "rope_theta": 10000.0}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODEL, rope_parameters=block)).eval()


def test_in_a_pretrained_model_it_is_the_direct_formula_and_decodes_exactly() -> None:
    model = tiny_llama()
    ids = torch.arange(1, 21)[None]
    factor = (1 + torch.tensor(4.0).log() / torch.tensor(float(TRAINED)).log()).sqrt().item()
    own = model.model.rotary_emb.forward

    def formula(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = angles(20, 3)[position_ids].repeat(1, 1, 2)
        return (angle.cos() * factor).to(x.dtype), (angle.sin() * factor).to(x.dtype)

    with torch.no_grad():
        model.model.rotary_emb.forward = formula
        wanted = model(ids).logits
        model.model.rotary_emb.forward = own
        with milepost.attach(model, "longrope", unscaled_tokens=3, **OPTIONS) as attached:
            torch.testing.assert_close(model(ids).logits, wanted, rtol=0, atol=2e-6)
            attached.expect(20)
            cache = pytest.importorskip("transformers").DynamicCache(config=model.config)
            parts = [model(part, cache=cache, use_cache=True).logits for part in ids.split([12, 7, 1], dim=1)]
            torch.testing.assert_close(torch.cat(parts, 1), wanted, rtol=0, atol=2e-6)


LONGROPE = LongRope(
    rotary_dim=2 * PAIRS, base=1e4, trained_length=TRAINED, short_factor=SHORT, long_factor=LONG, unscaled_tokens=4
)


@pytest.mark.parametrize("engine", ["transformers", "vllm", "llama.cpp"])
def test_no_engine_can_store_it(engine: Any) -> None:
    with pytest.raises(ExportRefused, match="first 4 tokens stay unscaled .* no engine has a word for it"):
        export(LONGROPE, engine)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: build("rope", head_dim=8, scaling=LONGROPE), "use the encoding longrope"),
        (lambda: build("resonance-rope", head_dim=8, scaling=LONGROPE), "use the encoding longrope"),
        (lambda: Resonance(method=LONGROPE), "only the encoding longrope applies it"),
        (lambda: LogN(method=LONGROPE, trained_length=8), "only the encoding longrope applies it"),
        (lambda: build("longrope", head_dim=8, **OPTIONS, unscaled_tokens=-1), "0 for none, got -1"),
        (lambda: build("longrope", head_dim=8, **OPTIONS, unscaled_tokens=True), "0 for none, got True"),
        (
            lambda: from_config(
                {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": SHORT, "long_factor": LONG,
                 "original_max_position_embeddings": 8, "unscaled_tokens": 4},
                head_dim=8,
            ),
            "unknown key 'unscaled_tokens'",
        ),
    ],
)  # fmt: skip
def test_what_would_lose_it_refuses(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def test_other_methods_over_methods_are_as_before() -> None:
    assert Resonance(method=Linear(rotary_dim=8, base=1e4, factor=2.0)).rotary_dim == 8
    assert LogN(method=Yarn(rotary_dim=8, base=1e4, trained_length=8), trained_length=8).rotary_dim == 8
