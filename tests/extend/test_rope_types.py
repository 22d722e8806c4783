"""Rope types in transformers: ours under their names, ours in place of theirs, and theirs back afterwards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from milepost.encodings.frequencies import METHODS, Clex, from_config
from milepost.extend.rope_types import UNREGISTERED, RopeBlockError, RopeTypes, register_rope_types, rope_type_names

transformers = pytest.importorskip("transformers")
rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
FUNCTIONS = rope_utils.ROPE_INIT_FUNCTIONS
THEIRS = dict(FUNCTIONS)
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}
ORIGINAL = {"original_max_position_embeddings": 16}
TRAINED = {"original_max_position_embeddings": 64}
LISTS = {"short_factor": [1.0 + p / 8 for p in range(8)], "long_factor": [2.0 + p for p in range(8)]}
BOUNDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
BLOCKS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, **ORIGINAL},
    "longrope": {**LISTS, **ORIGINAL},
    "llama3": {"factor": 4.0, **BOUNDS, **ORIGINAL},
    "proportional": {"partial_rotary_factor": 0.5},
    "ntk": {"factor": 4.0},
    "abf": {"new_base": 5e5},
    "by_parts": {"factor": 4.0, **ORIGINAL},
    "part_ntk": {"factor": 4.0, **ORIGINAL},
    "truncated": ORIGINAL,
    "power": {"exponent": 0.5},
    "hope_cut": ORIGINAL,
    "resonance": {"method": {"rope_type": "linear", "factor": 2.0}},
    "dynamic_linear": TRAINED,
    "dynamic_ntk": TRAINED,
    "dynamic_by_parts": TRAINED,
    "dynamic_part_ntk": TRAINED,
    "dynamic_yarn": TRAINED,
    "dynamic_llama3": TRAINED,
    "dynamic_power": {"exponent": 0.5, **TRAINED},
    "dynamic_truncated": TRAINED,
    "dynamic_proportional": {"proportion": 0.5, **TRAINED},
}
BUILT_IN = ("linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


@pytest.fixture
def ours() -> Iterator[RopeTypes]:
    with register_rope_types(override=True) as registered:
        yield registered
    assert FUNCTIONS == THEIRS


def llama(kind: str, **extra: Any) -> Any:
    block = {"rope_type": kind, "rope_theta": 10000.0, **BLOCKS.get(kind, {}), **extra}
    return transformers.LlamaConfig(**SIZES, rope_parameters=block)


def test_every_method_has_a_name_or_a_reason() -> None:
    names = set(rope_type_names())
    assert names | set(UNREGISTERED) >= {*BLOCKS, "default", "clex", "log_n"}
    assert names - set(BLOCKS) == {"dynamic_clex"}


def test_registering_adds_names_and_leaves_theirs_alone_until_asked() -> None:
    with register_rope_types() as registered:
        assert set(registered.names) == set(rope_type_names()) - set(BUILT_IN)
        assert all(FUNCTIONS[name] is THEIRS[name] for name in THEIRS)
        with register_rope_types() as again:
            assert not again.names  # nothing left to add
    assert FUNCTIONS == THEIRS
    assert not hasattr(rope_utils.RotaryEmbeddingConfigMixin, "_validate_by_parts_rope_parameters")


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_model_runs_with_every_type_and_uses_its_frequencies(ours: RopeTypes, kind: str) -> None:
    config = llama(kind)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.arange(48)[None] % 50
    with torch.no_grad():
        assert bool(torch.isfinite(model(ids).logits).all())
    method = from_config(config)
    length = 48 if "dynamic" in kind or kind == "longrope" else None
    buffer = model.model.rotary_emb.inv_freq
    wanted = method.frequencies(length if length and (kind == "longrope" or length > 64) else None).inv_freq
    torch.testing.assert_close(buffer.double(), wanted.flatten(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", [k for k in BLOCKS if k.startswith("dynamic")])
def test_dynamic_types_grow_past_the_trained_length(ours: RopeTypes, kind: str) -> None:
    config = llama(kind)
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    before = rotary.inv_freq.clone()
    rotary(torch.zeros(1), torch.arange(200)[None])
    wanted = from_config(config).frequencies(200).inv_freq.flatten()
    torch.testing.assert_close(rotary.inv_freq.double(), wanted, rtol=1e-6, atol=0)
    assert not torch.equal(before, rotary.inv_freq)


def test_a_solved_clex_is_a_rope_type(ours: RopeTypes) -> None:
    table = Clex(rotary_dim=16, base=10000.0, trained_length=64, max_factor=3, time_dt=1.0).frozen()
    config = llama("dynamic_clex", table=[list(row) for row in table.table], original_max_position_embeddings=64)
    assert from_config(config) == table
    inv_freq, _ = FUNCTIONS["dynamic_clex"](config, seq_len=150)
    torch.testing.assert_close(inv_freq.double(), torch.tensor(table.table[2]).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("length", [None, 1, 15, 16, 17, 64, 65, 300])
@pytest.mark.parametrize("kind", BUILT_IN)
def test_ours_in_place_of_theirs_gives_their_numbers(ours: RopeTypes, kind: str, length: int | None) -> None:
    config = llama(kind)
    found, factor = FUNCTIONS[kind](config, device=torch.device("cpu"), seq_len=length)
    wanted, wanted_factor = THEIRS[kind](config, device=torch.device("cpu"), seq_len=length)
    assert found.dtype == wanted.dtype == torch.float32 and isinstance(factor, float)
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0)
    assert factor == pytest.approx(wanted_factor, rel=1e-12)
    if length is not None:
        again, _ = FUNCTIONS[kind](config, seq_len=torch.tensor(length))
        assert torch.equal(found, again)


@pytest.mark.parametrize("layer_type", ["sliding_attention", "full_attention"])
@pytest.mark.parametrize("kind", BUILT_IN)
def test_ours_in_place_of_theirs_in_nested_blocks(ours: RopeTypes, kind: str, layer_type: str) -> None:
    block = {"rope_type": kind, "rope_theta": 10000.0, **BLOCKS[kind]}
    if kind == "longrope":
        block |= {"short_factor": [2.0] * 128, "long_factor": [3.0] * 128}
    config = transformers.Gemma2Config(head_dim=256, max_position_embeddings=64)
    config.rope_parameters = {"sliding_attention": dict(block), "full_attention": {**block, "rope_theta": 1e6}}
    for length in (None, 16, 17, 200):
        found, factor = FUNCTIONS[kind](config, torch.device("cpu"), length, layer_type)
        wanted, wanted_factor = THEIRS[kind](config, torch.device("cpu"), length, layer_type)
        torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0)
        assert factor == pytest.approx(wanted_factor, rel=1e-12)


def test_plain_blocks_reach_our_functions_too(ours: RopeTypes) -> None:
    config = llama("default")
    found, factor = FUNCTIONS["proportional"](config, device=torch.device("cpu"))
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    torch.testing.assert_close(found, rotary.compute_default_rope_parameters(config)[0])
    assert factor == 1.0


def test_another_head_width_can_be_named(ours: RopeTypes) -> None:
    config = llama("proportional")
    config.global_head_dim = 32
    arguments = {"device": torch.device("cpu"), "head_dim_key": "global_head_dim"}
    found, _ = FUNCTIONS["proportional"](config, **arguments)
    wanted, _ = THEIRS["proportional"](config, **arguments)
    assert found.numel() == 16
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0)


# What transformers' own tests of these functions check; test_transformers_checkout.py runs those tests themselves.


def frequencies(kind: str, length: int | None = None, **block: Any) -> tuple[torch.Tensor, float]:
    config = transformers.LlamaConfig()  # head_dim 128, length 2048
    config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, **block}
    answer: tuple[torch.Tensor, float] = FUNCTIONS[kind](config, device=torch.device("cpu"), seq_len=length)
    return answer


def plain() -> torch.Tensor:
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    return rotary.compute_default_rope_parameters(transformers.LlamaConfig())[0]  # type: ignore[no-any-return]  # untyped library


def test_their_linear_checks(ours: RopeTypes) -> None:
    for factor in (2.0, 10.0, 20.0):
        inv_freq, attention = frequencies("linear", factor=factor)
        torch.testing.assert_close(inv_freq, plain() / factor)
        assert attention == 1.0


def test_their_dynamic_checks(ours: RopeTypes) -> None:
    for factor in (2.0, 10.0, 20.0):
        for length in (None, 1, 2048):
            inv_freq, attention = frequencies("dynamic", length, factor=factor)
            torch.testing.assert_close(inv_freq, plain())
            assert attention == 1.0
    grown, _ = frequencies("dynamic", 16384, factor=10.0)
    assert not torch.allclose(grown, plain() / 10.0)
    assert bool((grown <= plain() + 1e-8).all())


def test_their_yarn_checks(ours: RopeTypes) -> None:
    for factor in (2.0, 10.0, 20.0):
        assert frequencies("yarn", factor=factor)[1] == 0.1 * math.log(factor) + 1.0  # exactly
        assert frequencies("yarn", 1, factor=factor, attention_factor=0.5)[1] == 0.5
    bounded, _ = frequencies("yarn", factor=10.0, beta_fast=32, beta_slow=1)
    assert bool((bounded >= plain() / 10 - 1e-8).all()) and bool((bounded <= plain() + 1e-8).all())
    mostly, _ = frequencies("yarn", factor=10.0, beta_fast=1000, beta_slow=1)
    torch.testing.assert_close(mostly[-20:], plain()[-20:] / 10)
    assert mostly[0] == plain()[0] and bool((mostly[1:] < plain()[1:] + 1e-8).all())


def test_their_longrope_checks(ours: RopeTypes) -> None:
    lists = {"short_factor": [2.0] * 64, "long_factor": torch.ones(64).cumsum(0).tolist()}
    for factor in (2.0, 10.0, 20.0):
        wanted = math.sqrt(1 + math.log(factor) / math.log(2048))
        assert frequencies("longrope", factor=factor, **lists)[1] == wanted
        assert frequencies("longrope", 1, factor=factor, attention_factor=0.5, **lists)[1] == 0.5
    for length, divisor in ((1, lists["short_factor"]), (2048, lists["short_factor"]), (2049, lists["long_factor"])):
        inv_freq, _ = frequencies("longrope", length, factor=1.0, **lists)
        torch.testing.assert_close(inv_freq, plain() / torch.tensor(divisor))


def test_their_llama3_checks(ours: RopeTypes) -> None:
    common = {"original_max_position_embeddings": 2048, "low_freq_factor": 1.0}
    for factor in (2.0, 10.0, 20.0):
        inv_freq, attention = frequencies("llama3", factor=factor, high_freq_factor=4.0, **common)
        assert attention == 1.0
        assert bool((inv_freq >= plain() / factor - 1e-8).all()) and bool((inv_freq <= plain() + 1e-8).all())
    stretched, _ = frequencies("llama3", factor=10.0, high_freq_factor=1000, **common)
    assert bool((stretched < plain()).all())  # no pair makes 1000 turns in 2048 positions
    torch.testing.assert_close(stretched[-20:], plain()[-20:] / 10)


def test_their_proportional_checks(ours: RopeTypes) -> None:
    for share in (0.25, 0.5, 0.75, 1.0):
        inv_freq, _ = frequencies("proportional", partial_rotary_factor=share)
        kept = int(share * 64)
        torch.testing.assert_close(inv_freq[:kept], plain()[:kept])
        assert bool((inv_freq[kept:] == 0).all())
        halved, _ = frequencies("proportional", partial_rotary_factor=share, factor=2.0)
        torch.testing.assert_close(halved, inv_freq / 2)


# How a wrong block fails, and what a growing type does in a model.

EXCLUSIVE = {
    "factor": {"linear", "dynamic", "yarn", "longrope"},
    "attention_factor": {"yarn", "longrope"},
    **dict.fromkeys(("beta_fast", "beta_slow"), {"yarn"}),
    **dict.fromkeys(("short_factor", "long_factor"), {"longrope"}),
}
SHAPES = ("flat", "one layer type", "two layer types")


def unjudged(shape: str, block: dict[str, Any]) -> Any:
    """A configuration whose rope block was put in after it was judged."""
    if shape == "flat":
        config = transformers.LlamaConfig(**SIZES)
        config.rope_parameters = block
        return config
    config = transformers.Gemma3TextConfig()
    config.layer_types = ["full_attention", "sliding_attention"]
    plain_block = {"rope_type": "default", "rope_theta": 10000.0}
    config.rope_parameters = {
        "full_attention": block,
        "sliding_attention": dict(block) if shape == "two layer types" else plain_block,
    }
    return config


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", sorted({*rope_type_names()} - {"proportional"}))
def test_a_block_that_says_too_little_or_too_much_is_a_key_error(ours: RopeTypes, kind: str, shape: str) -> None:
    block = {"rope_type": kind, "rope_theta": 10000.0}
    with pytest.raises(KeyError):
        unjudged(shape, block).validate_rope()
    for key, types in EXCLUSIVE.items():
        if kind not in types:
            with pytest.raises(KeyError):
                unjudged(shape, {**block, key: True}).validate_rope()


@pytest.mark.parametrize(
    ("kind", "block", "words"),
    [
        ("ntk", {}, "factor is missing"),
        ("by_parts", ORIGINAL, "factor is missing"),
        ("resonance", {}, "method is missing"),
        ("dynamic_ntk", {}, "original_max_position_embeddings is missing"),
        ("dynamic_yarn", ORIGINAL, "write max_position_embeddings: 16"),
        ("dynamic_clex", {"table": [[1.0] * 8], **ORIGINAL}, "write max_position_embeddings: 16"),
        ("ntk", {"factor": 4.0, "beta_fast": 32}, "unknown key 'beta_fast'"),
    ],
)
def test_what_is_wrong_is_said_in_words(ours: RopeTypes, kind: str, block: dict[str, Any], words: str) -> None:
    with pytest.raises(RopeBlockError, match=words) as caught:
        unjudged("flat", {"rope_type": kind, "rope_theta": 10000.0, **block}).validate_rope()
    assert isinstance(caught.value, KeyError) and isinstance(caught.value, ValueError)
    assert not str(caught.value).startswith(("'", '"'))  # a plain KeyError shows its message in quotes


def test_a_type_that_would_stand_still_is_refused_where_it_is_computed_too(ours: RopeTypes) -> None:
    config = unjudged("flat", {"rope_type": "dynamic_yarn", "rope_theta": 10000.0, **ORIGINAL})
    with pytest.raises(RopeBlockError, match="grows beyond 16, and transformers recomputes beyond"):
        FUNCTIONS["dynamic_yarn"](config)


def test_an_original_length_beside_the_block_counts(ours: RopeTypes) -> None:
    config = unjudged("flat", {"rope_type": "by_parts", "rope_theta": 10000.0, "factor": 4.0})
    with pytest.raises(RopeBlockError, match="trained_length is missing"):
        config.validate_rope()
    config.original_max_position_embeddings = 16
    config.validate_rope()
    assert torch.equal(FUNCTIONS["by_parts"](config)[0], FUNCTIONS["by_parts"](llama("by_parts"))[0])


@pytest.mark.parametrize("kind", ["dynamic", "dynamic_ntk", "dynamic_yarn"])
@pytest.mark.parametrize("layer_type", [None, "full_attention"])
def test_growth_ends_when_short_input_returns(ours: RopeTypes, kind: str, layer_type: str | None) -> None:
    block = {"rope_type": kind, "rope_theta": 10000.0, **BLOCKS[kind]}
    config = unjudged("flat" if layer_type is None else "one layer type", block)
    config.max_position_embeddings = 64
    named, prefix = ({}, "") if layer_type is None else ({"layer_type": layer_type}, f"{layer_type}_")
    rotary = (
        transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
        if layer_type is None
        else transformers.models.gemma3.modeling_gemma3.Gemma3RotaryEmbedding
    )(config)

    def after(length: int) -> torch.Tensor:
        rotary(torch.zeros(1), torch.arange(length)[None], **named)
        found: torch.Tensor = getattr(rotary, f"{prefix}inv_freq")
        return found.clone()

    short, long, again = after(8), after(200), after(8)
    assert not torch.allclose(short, long)
    assert torch.equal(short, again)
    wanted = from_config(config, layer_type=layer_type).frequencies(200).inv_freq.flatten()
    torch.testing.assert_close(long.double(), wanted, rtol=1e-6, atol=0)


def test_scaled_pairs_stay_between_the_bits_of_the_unscaled_ladder_and_its_interpolation(ours: RopeTypes) -> None:
    common = {"factor": 10.0, "original_max_position_embeddings": 2048}
    blocks = {"llama3": BOUNDS, "yarn": {}, "by_parts": {}}
    for kind, extra in blocks.items():
        inv_freq, _ = frequencies(kind, **common, **extra)
        assert bool((inv_freq <= plain()).all()) and bool((inv_freq >= plain() / 10.0).all()), kind
        method = METHODS[kind](rotary_dim=128, base=1e4, trained_length=2048, factor=10.0)
        kept = method.frequencies().inv_freq == method.plain()
        assert int(kept.sum()) >= 10
        assert torch.equal(inv_freq[kept], plain()[kept]), kind


# Where transformers is wrong, and ours is not.


def test_truncate_in_a_nested_block_is_honoured(ours: RopeTypes) -> None:
    block = {"rope_type": "yarn", "factor": 32.0, "rope_theta": 150000.0, "truncate": False}
    block |= {"original_max_position_embeddings": 4096}
    config = transformers.LlamaConfig(head_dim=64, max_position_embeddings=131072)
    config.layer_types = ["full_attention"] * 32
    config.rope_parameters = {"full_attention": block}
    found, _ = FUNCTIONS["yarn"](config, layer_type="full_attention")
    wrong, _ = THEIRS["yarn"](config, device=torch.device("cpu"), layer_type="full_attention")
    assert float(found[17]) == pytest.approx(0.0001293187012450632, rel=1e-6)
    assert float(wrong[17]) == pytest.approx(0.00022794779579512524, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "block", "words"),
    [
        ("yarn", {"factor": 4.0, "attn_factor": 0.9}, "attn_factor"),
        ("linear", {"factor": 0.5}, "inverted"),
        ("yarn", {"factor": 4.0, "beta_fast": 1, "beta_slow": 32}, "swapped"),
        ("yarn", {"factor": 4.0, "attention_factor": 0.0}, "above 0"),
        ("longrope", {"growth": "dynamic", **LISTS}, "recomputes only types with 'dynamic'"),
    ],
)
def test_what_they_let_pass_is_refused(ours: RopeTypes, kind: str, block: dict[str, Any], words: str) -> None:
    config = llama("default")
    config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, **ORIGINAL, **block}
    if kind == "linear":
        config.rope_parameters.pop("original_max_position_embeddings")
    with pytest.raises(ValueError, match=words):
        FUNCTIONS[kind](config)


def test_a_wrong_block_of_ours_fails_when_the_config_is_made(ours: RopeTypes) -> None:
    with pytest.raises(Exception, match="did you mean 'factor'"):
        llama("ntk", factr=2.0)


def test_keys_that_a_model_family_declares_its_own_are_left_alone(ours: RopeTypes) -> None:
    config = transformers.Ministral3Config()
    assert "llama_4_scaling_beta" in config.rope_parameters
    inv_freq, _ = FUNCTIONS["yarn"](config, device=torch.device("cpu"))
    wanted, _ = THEIRS["yarn"](config, device=torch.device("cpu"))
    torch.testing.assert_close(inv_freq, wanted, rtol=2e-6, atol=0)


def test_a_wrong_block_is_a_rope_block_error_under_every_name() -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32}
    block = {"rope_type": "yarn", "rope_theta": 1e4, "factor": "4", "original_max_position_embeddings": 2048}
    with register_rope_types(override=True):
        config = transformers.LlamaConfig(**sizes, rope_parameters=dict(block))
        with pytest.raises(RopeBlockError, match="factor must be a finite number, got '4'"):
            transformers.LlamaForCausalLM(config)


def test_the_key_that_is_not_read_is_named_as_it_was_written() -> None:
    block = {"rope_type": "abf", "rope_theta": 1e4, "new_base": 1e6, "original_max_position_embeddings": 2048}
    with pytest.raises(ValueError, match="unknown key 'original_max_position_embeddings'"):
        from_config(block, head_dim=32)
