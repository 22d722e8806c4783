"""Reading frequency methods from configurations, against transformers' own functions and faults seen in the wild."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from milepost.encodings.frequencies import (
    ABF,
    NTK,
    ByParts,
    Default,
    Dynamic,
    FrequencyMethod,
    Linear,
    Llama3,
    LongRope,
    Proportional,
    Resonance,
    Yarn,
    check_inv_freq,
    dynamic_ntk,
    from_config,
    merge_scaling,
    usable_length,
)

DATA = Path(__file__).parent / "data"
REPORTS = {case["id"]: case for case in json.loads((DATA / "public-reports.json").read_text())}
MAIN = {"rope_theta": 1e6, "head_dim": 128, "max_position_embeddings": 32768}


def report(name: str) -> tuple[Any, Any]:
    return REPORTS[name]["input"], REPORTS[name]["expected"]


def near(found: Any, wanted: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=torch.float64),
        torch.as_tensor(wanted, dtype=torch.float64),
        rtol=tolerance,
        atol=1e-12,
    )


# ---- transformers' functions, executed ------------------------------------------------------------------------------

LISTS = {"short_factor": [1.0 + p / 64 for p in range(16)], "long_factor": [1.0 + p / 4 for p in range(16)]}
BLOCKS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear_partial": {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "dynamic_partial": {"rope_type": "dynamic", "factor": 3.0, "partial_rotary_factor": 0.5},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    "yarn_exact_ends": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
        "beta_fast": 16,
        "beta_slow": 2,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
    },
    "yarn_mscale_alone": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.707,
    },
    "yarn_explicit": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.9,
    },
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 64, **LISTS},
    "longrope_factor": {"rope_type": "longrope", "original_max_position_embeddings": 64, "factor": 4.0, **LISTS},
    "longrope_explicit": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 64,
        "attention_factor": 1.1,
        **LISTS,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "llama4": {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
        "original_max_position_embeddings": 64,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.4},
    "proportional_factor": {"rope_type": "proportional", "partial_rotary_factor": 0.75, "factor": 2.0},
}


def llama_config(block: dict[str, Any]) -> Any:
    transformers = pytest.importorskip("transformers")
    block = {"rope_theta": 10000.0, **block}
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 512}
    return transformers.LlamaConfig(**sizes, rope_parameters=json.loads(json.dumps(block)))


@pytest.mark.parametrize("length", [None, 32, 64, 65, 512, 513, 1500])
@pytest.mark.parametrize("name", BLOCKS)
def test_transformers_rope_function_gives_the_same(name: str, length: int | None) -> None:
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    config = llama_config(BLOCKS[name])
    function = rope_utils.ROPE_INIT_FUNCTIONS[BLOCKS[name]["rope_type"]]
    wanted, wanted_factor = function(config, device=torch.device("cpu"), seq_len=length)
    for source in (config, {**config.to_dict()}):
        found = from_config(source).frequencies(length)
        near(found.inv_freq.flatten(), wanted, 1e-6)  # theirs is float32
        near(found.attention_factor, wanted_factor)
        assert found.softmax_factor == 1.0


def test_transformers_default_rotary_gives_the_same() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama_config({"rope_type": "default"})
    near(from_config(config).frequencies().inv_freq, llama.LlamaRotaryEmbedding(config).inv_freq, 1e-6)


def test_deepseek_gets_its_softmax_factor_and_its_rope_head_dim() -> None:
    transformers = pytest.importorskip("transformers")
    block = {"type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    block |= {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    config = transformers.DeepseekV3Config(rope_scaling=block, rope_theta=10000.0, max_position_embeddings=163840)
    method = from_config(config)
    assert method.rotary_dim == config.qk_rope_head_dim == 64
    near(method.frequencies().attention_factor, 1.0)
    near(method.frequencies().softmax_factor, 1.8738542070926265)


# ---- forms ----------------------------------------------------------------------------------------------------------


def test_v4_v5_and_bare_forms_are_one() -> None:
    block = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    forms = [
        from_config({**MAIN, "rope_scaling": block}),
        from_config({**MAIN, "rope_scaling": {**{k: v for k, v in block.items() if k != "rope_type"}, "type": "yarn"}}),
        from_config({"head_dim": 128, "rope_parameters": {**block, "rope_theta": 1e6}, "max_position_embeddings": 1}),
        from_config({**block, "rope_theta": 1e6}, head_dim=128),
        from_config(block, head_dim=128, rope_theta=1e6),
        from_config({"text_config": {**MAIN, "rope_scaling": block}, "vision_config": {}}),
        from_config({**MAIN, "rope_scaling": {**block, "attention_factor": None}}),
    ]
    assert len(set(forms)) == 1 and isinstance(forms[0], Yarn)


def test_nested_per_layer_type() -> None:
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = {"head_dim": 128, "rope_parameters": nested}
    assert from_config(config, layer_type="full_attention") == Linear(rotary_dim=128, base=1e6, factor=8.0)
    assert from_config(config, layer_type="sliding_attention") == Default(rotary_dim=128, base=1e4)
    with pytest.raises(ValueError, match=r"one of \['full_attention', 'sliding_attention'\]; got None"):
        from_config(config)
    old = {**MAIN, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert from_config(old, layer_type="sliding_attention") == Default(rotary_dim=128, base=1e4)
    assert from_config(old, layer_type="full_attention") == Linear(rotary_dim=128, base=1e6, factor=8.0)


def test_our_own_methods_are_read_by_name() -> None:
    common: dict[str, Any] = {"rotary_dim": 128, "base": 1e6}
    cases: list[tuple[dict[str, Any], FrequencyMethod]] = [
        ({"rope_type": "ntk", "factor": 4.0}, NTK(**common, factor=4.0)),
        ({"rope_type": "abf", "new_base": 5e6}, ABF(**common, new_base=5e6)),
        (
            {"rope_type": "by_parts", "factor": 4.0, "original_max_position_embeddings": 64, "beta": 8},
            ByParts(**common, factor=4.0, trained_length=64, beta=8),
        ),
        ({"rope_type": "dynamic_linear"}, Dynamic(method=Linear(**common), trained_length=32768)),
        (
            {"rope_type": "dynamic_yarn", "original_max_position_embeddings": 64},
            Dynamic(method=Yarn(**common, trained_length=64), trained_length=64),
        ),
        (
            {"rope_type": "resonance", "method": {"rope_type": "linear", "factor": 4.0}},
            Resonance(method=Linear(**common, factor=4.0)),
        ),
        ({"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "mscale": 1.0}, NTK(**common, factor=1000.0)),
    ]
    for block, wanted in cases:
        assert from_config({**MAIN, "rope_scaling": block}) == wanted, block


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"rope_type": "yran", "factor": 2.0}, "did you mean 'yarn'"),
        ({"rope_type": "YaRN", "factor": 2.0}, "did you mean 'yarn'"),
        ({"rope_type": "linear", "factr": 2.0}, "factor is missing.*unknown key 'factr'.*did you mean 'factor'"),
        ({"rope_type": "linear", "factor": "4.0"}, "finite number, got '4.0'"),
        ({"rope_type": "linear", "type": "dynamic", "factor": 2.0}, "keep rope_type only"),
        ({"factor": 4.0}, "rope_type is missing"),
        ({"rope_type": 3}, "must be text"),
        ({"rope_type": "axial"}, "two-dimensional"),
        ({"rope_type": "clex"}, "build Clex in code"),
        ({"rope_type": "dynamic_default"}, "no factor to grow|has no factor"),
        ({"rope_type": "by_parts", "fator": 2.0}, "unknown key 'fator'.*'factor'.*trained_length is missing"),
        ({"rope_type": "longrope", "short_factor": "[1.0]*64", "long_factor": [1.0] * 64}, "must be a list"),
        ({"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.9}, "attn_factor.*multiplies"),
        ([1, 2], "must be a mapping"),
    ],
)
def test_wrong_blocks_are_refused_in_words(block: Any, words: str) -> None:
    extra = {"original_max_position_embeddings": 32768} if isinstance(block, dict) and "long_factor" in block else {}
    with pytest.raises(ValueError, match=words):
        from_config({**MAIN, **extra, "rope_scaling": block})


def test_missing_sizes_and_base_are_named() -> None:
    with pytest.raises(ValueError, match="rope_theta missing.*head_dim missing"):
        from_config({"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    with pytest.raises(ValueError, match="head_dim must be a number above 0, got '128'"):
        from_config({"head_dim": "128", "rope_theta": 1e4})


def test_merging_keeps_everything_and_never_replaces_a_trained_scaling_unasked() -> None:
    trained = {**MAIN, "rope_scaling": dict(BLOCKS["llama3"]), "vocab_size": 7}
    linear = {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(ValueError, match="trained with rope_type 'llama3'"):
        merge_scaling(trained, linear)
    forced = merge_scaling(trained, linear, replace_trained=True)
    assert forced["rope_scaling"] == {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
    assert forced["vocab_size"] == 7 and trained["rope_scaling"] == BLOCKS["llama3"]
    widened = merge_scaling(trained, {"rope_type": "llama3", "factor": 16.0})
    assert widened["rope_scaling"]["factor"] == 16.0 and widened["rope_scaling"]["low_freq_factor"] == 1.0
    nested = {"head_dim": 8, "rope_parameters": {"a": {"rope_type": "default", "rope_theta": 5.0}, "b": None}}
    merged = merge_scaling(nested, linear, layer_type="a")["rope_parameters"]
    assert merged == {"a": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}, "b": None}
    with pytest.raises(ValueError, match="rope_theta missing"):
        merge_scaling({"head_dim": 8}, linear)


# ---- faults reported in public, by id -------------------------------------------------------------------------------


def test_pe_01_dynamic_ntk_below_the_trained_length_is_plain() -> None:
    i, wanted = report("PE-01")
    method = dynamic_ntk(rotary_dim=i["dim"], base=i["base"], trained_length=i["original_max"], factor=i["factor"])
    inv_freq = method.frequencies(i["seq_len"]).inv_freq
    near(inv_freq[:4], wanted["inv_freq_first4"])
    near(inv_freq[-1], wanted["inv_freq_last"])
    near(NTK(rotary_dim=i["dim"], base=i["base"]).scaled_base(method.stretch(i["seq_len"])), [wanted["base"]])
    assert bool(torch.isfinite(inv_freq).all()) and not inv_freq.is_complex()
    with pytest.raises(ValueError, match="divides by zero"):  # what crashes elsewhere is refused here
        dynamic_ntk(rotary_dim=2, base=1000.0, trained_length=64)


def test_pe_03_dynamic_moves_the_base_and_never_the_positions() -> None:
    i, wanted = report("PE-03")
    config = {"head_dim": i["dim"], "rope_theta": i["base"], "max_position_embeddings": i["original_max"]}
    method = from_config({**config, "rope_scaling": {"type": "dynamic", "factor": i["factor"]}})
    assert isinstance(method, Dynamic) and isinstance(method.method, NTK)
    for case, base in zip(i["cases"], (wanted["base_at_100"], wanted["base_at_65536"]), strict=True):
        angle = case["position"] * method.frequencies(case["seq_len"]).inv_freq[0]
        near(angle, wanted["angle_pair0_pos10"])
        near(method.method.scaled_base(method.stretch(case["seq_len"])), [base])
    near(method.stretch(65536), [wanted["inner_at_65536"]])


def test_pe_04_the_explicit_factor_wins() -> None:
    i, wanted = report("PE-04")
    method = from_config(i)
    assert isinstance(method, Yarn) and method.factor == wanted["factor"]
    found = method.frequencies()
    near(found.attention_factor, wanted["attention_factor"])
    near(method.plain()[-1] / found.inv_freq[-1], wanted["last_pair_stretch"])
    assert "write max_position_embeddings: 131072" in usable_length(i).rule


@pytest.mark.parametrize("given", [1.0, 1, 0.5])
def test_pe_05_an_explicit_attention_factor_is_used_as_it_is(given: float) -> None:
    i, wanted = report("PE-05")
    block = {**i["rope_scaling"], "attention_factor": given}
    assert from_config({**i, "rope_scaling": block}).frequencies().attention_factor == given
    del block["attention_factor"]
    near(from_config({**i, "rope_scaling": block}).frequencies().attention_factor, wanted["wrong"])
    for bad in (0.0, -1.0):
        with pytest.raises(ValueError, match="attention_factor must be above 0"):
            from_config({**i, "rope_scaling": {**block, "attention_factor": bad}})


def test_pe_07_one_function_returns_both_mscale_numbers() -> None:
    i, wanted = report("PE-07")
    for n, case in enumerate(i["cases"]):
        dim = case.pop("qk_head_dim")
        cos_sin, softmax = Yarn(rotary_dim=64, base=1e4, trained_length=4096, **case).factors()
        near(cos_sin, wanted["cos_sin_factor"][n])
        near(softmax, wanted["softmax_scale_multiplier"][n])
        near(float(softmax) / math.sqrt(dim), wanted["softmax_scale"][n])


def test_pe_08_truncate_false_is_honoured_also_when_nested() -> None:
    i, wanted = report("PE-08")
    outer = {"head_dim": i["head_dim"]}
    nested = {"full_attention": {**i["rope_scaling"], "rope_theta": i["rope_theta"]}}
    flat = from_config({**outer, "rope_theta": i["rope_theta"], "rope_scaling": i["rope_scaling"]})
    for method in (flat, from_config({**outer, "rope_parameters": nested}, layer_type="full_attention")):
        assert isinstance(method, Yarn)
        near(method.correction_range(), [wanted["low"], wanted["high"]], 1e-8)
        inv_freq = method.frequencies().inv_freq
        for pair, value in wanted["inv_freq_pairs"].items():
            near(inv_freq[int(pair)], value)
    rounded = from_config(
        {**outer, "rope_theta": i["rope_theta"], "rope_scaling": {**i["rope_scaling"], "truncate": True}}
    )
    assert isinstance(rounded, Yarn) and list(rounded.correction_range()) == wanted["truncated"]
    for pair, value in wanted["inv_freq_pairs_truncated"].items():
        near(rounded.frequencies().inv_freq[int(pair)], value)
    difference = (flat.frequencies().inv_freq / rounded.frequencies().inv_freq - 1).abs().max()
    back = (rounded.frequencies().inv_freq / flat.frequencies().inv_freq - 1).abs().max()
    near(max(float(difference), float(back)), wanted["max_rel_diff"], 1e-5)


def test_pe_10_the_range_is_clamped_at_d_minus_1() -> None:
    i, wanted = report("PE-10")
    common = {"rotary_dim": i["head_dim"], "base": i["rope_theta"], "trained_length": 131072, "factor": i["factor"]}
    method = Yarn(**common)
    assert list(method.correction_range()) == wanted["range"]
    near(Yarn(**common, truncate=False).correction_range()[1], wanted["raw_high"], 1e-6)
    near(method.plain()[63] / method.frequencies().inv_freq[63], wanted["inv_freq_pair63_stretch"], 1e-6)


def test_pe_12_the_factor_never_multiplies_a_stretched_length() -> None:
    i, wanted = report("PE-12")
    for case, length, wrong in zip(i["cases"], wanted["usable_length"], wanted["wrong"], strict=True):
        block = {"rope_type": case.get("rope_type", "yarn"), "factor": case["factor"]}
        block["original_max_position_embeddings"] = case["original"]
        found = usable_length({"max_position_embeddings": case["max_position_embeddings"], "rope_scaling": block})
        assert found.length == length and found.declared == case["max_position_embeddings"]
        assert length == wrong or found.length != wrong
        assert str(length) in found.rule
    assert (
        "declares 32768"
        in usable_length(
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            }
        ).rule
    )
    with pytest.raises(ValueError, match="no length stated"):
        usable_length({"rope_scaling": {"rope_type": "linear", "factor": 4.0}})


def test_pe_13_llama3_in_numbers_and_a_self_check_for_its_loss() -> None:
    i, wanted = report("PE-13")
    method = from_config(i)
    assert isinstance(method, Llama3)
    stretch = method.plain() / method.frequencies().inv_freq
    for pair, value in wanted["stretch"].items():
        near(stretch[int(pair)], value, 1e-6)
    assert int((stretch < 1 + 1e-12).sum()) == wanted["pairs_unchanged"]
    assert int((stretch > 8 - 1e-12).sum()) == wanted["pairs_divided_by_8"]
    assert 64 - wanted["pairs_unchanged"] - wanted["pairs_divided_by_8"] == wanted["pairs_blended"]
    with pytest.raises(ValueError, match="was dropped"):
        check_inv_freq(method, method.plain())


def test_pe_14_an_override_keeps_the_base() -> None:
    i, wanted = report("PE-14")
    merged = merge_scaling(i["checkpoint"], i["override"]["rope_scaling"])
    assert merged["rope_theta"] == wanted["rope_theta"]
    near(from_config(merged).frequencies().inv_freq[:4], wanted["inv_freq"])
    lost = {**i["override"], "head_dim": 32, "max_position_embeddings": 64}
    with pytest.raises(ValueError, match="rope_theta missing"):
        from_config(lost)
    near(from_config(lost, checkpoint=i["checkpoint"]).frequencies().inv_freq[:4], wanted["inv_freq"])


def test_pe_17_a_long_call_never_changes_a_later_short_one() -> None:
    i, wanted = report("PE-17")
    config = {"head_dim": i["head_dim"], "rope_theta": 1e4, "max_position_embeddings": i["max_position_embeddings"]}
    method = from_config({**config, "rope_scaling": {"rope_type": i["rope_type"], "factor": i["factor"]}})
    fresh = from_config({**config, "rope_scaling": {"rope_type": i["rope_type"], "factor": i["factor"]}})
    first, second = (method.frequencies(length).inv_freq for length in i["call_lengths"])
    plain = Default(rotary_dim=32, base=1e4).frequencies().inv_freq
    near(second.flatten(), plain)
    near(plain[-1] / second.flatten()[-1], wanted["last_pair_ratio"])
    assert not torch.equal(first, second)
    assert torch.equal(method.frequencies(128).inv_freq, fresh.frequencies(128).inv_freq)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_pe_19_a_long_row_does_not_switch_its_short_neighbour(kind: str) -> None:
    i, _ = report("PE-19")
    methods: dict[str, FrequencyMethod] = {
        "longrope": LongRope(
            rotary_dim=32,
            base=1e4,
            trained_length=i["original"],
            short_factor=(1.0,) * 16,
            long_factor=(3.0,) * 16,
        ),
        "dynamic": dynamic_ntk(rotary_dim=32, base=1e4, trained_length=i["original"], factor=2.0),
    }
    short, long = methods[kind].frequencies(torch.tensor(i["batch"])).inv_freq
    assert torch.equal(short, methods[kind].frequencies(torch.tensor(i["batch"][:1])).inv_freq[0])
    assert not torch.equal(short, long)


def test_pe_36_the_partial_factor_sets_the_exponent() -> None:
    i, wanted = report("PE-36")
    config = {"head_dim": i["head_dim"], "rope_theta": i["base"]}
    forms = (
        {**config, "partial_rotary_factor": i["partial_rotary_factor"]},
        {**config, "rotary_pct": i["partial_rotary_factor"]},
        {**config, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25, "rope_theta": 1e4}},
        {**config, "rotary_dim": 4},
    )
    for form in forms:
        method = from_config(form)
        assert method.rotary_dim == wanted["rotary_dim"]
        near(method.frequencies().inv_freq, wanted["inv_freq"], 1e-12)
    p_rope = from_config({**config, "rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.25}})
    assert isinstance(p_rope, Proportional) and p_rope.rotary_dim == 16


def test_pe_37_head_dim_wins_over_the_division() -> None:
    i, wanted = report("PE-37")
    sizes = {"hidden_size": i["hidden_size"], "num_attention_heads": i["num_attention_heads"], "rope_theta": i["base"]}
    inv_freq = from_config({**sizes, "head_dim": i["head_dim"]}).frequencies().inv_freq
    assert inv_freq.numel() == wanted["n_freqs"]
    near(inv_freq[-1], wanted["last"], 1e-9)
    assert from_config(sizes).rotary_dim == 2 * wanted["wrong_n_freqs"]


def test_pe_54_a_base_is_never_invented() -> None:
    i, wanted = report("PE-54")
    with pytest.raises(ValueError, match="rope_theta missing"):
        from_config({"head_dim": i["head_dim"]})
    method = from_config({"head_dim": i["head_dim"], "rope_theta": i["rope_theta_config"]})
    near(i["position"] * method.frequencies().inv_freq[i["pair"]], wanted["angle"])


@pytest.mark.parametrize("length", [131072, 32768])
def test_pe_55_a_missing_original_length_is_proposed_not_assumed(length: int) -> None:
    i, wanted = report("PE-55")
    with pytest.raises(ValueError) as error:
        from_config({**i, "max_position_embeddings": length})
    for word in wanted["error_contains"]:
        assert word in str(error.value)
    fixed = {**i["rope_scaling"], "original_max_position_embeddings": 32768}
    method = from_config({**i, "rope_scaling": fixed})
    assert isinstance(method, Yarn)
    near(method.plain()[32] / method.frequencies().inv_freq[32], wanted["stretch_pair32_right"], 1e-6)


def test_importing_needs_no_transformers() -> None:
    import subprocess
    import sys

    code = "import sys, milepost.encodings.frequencies as f; assert 'transformers' not in sys.modules, 'heavy'"
    with warnings.catch_warnings():
        subprocess.run([sys.executable, "-c", code], check=True)
