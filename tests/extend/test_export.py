"""Exports: every method in every engine's words, read back; what cannot be said is refused with its reason."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from milepost.encodings.frequencies import (
    ABF,
    NTK,
    ByParts,
    Clex,
    Default,
    Dynamic,
    FrequencyMethod,
    HoPECut,
    Linear,
    Llama3,
    LogN,
    LongRope,
    PartNTK,
    Power,
    Proportional,
    Resonance,
    Truncated,
    Yarn,
    dynamic_ntk,
    from_config,
)
from milepost.extend.doctor import diagnose
from milepost.extend.engines import (
    EngineError,
    LlamaCppRope,
    executed_transformers,
    llama_cpp_frequencies,
    transformers_frequencies,
    vllm_frequencies,
    vllm_max_model_len,
)
from milepost.extend.export import ExportRefused, difference, export, into_config, llama_cpp_rope, read_back

C: dict[str, Any] = {"rotary_dim": 128, "base": 10000.0}
S: dict[str, Any] = {**C, "trained_length": 4096, "factor": 8.0}
LISTS = {"short_factor": (1.0,) * 64, "long_factor": tuple(1 + p / 8 for p in range(64))}

METHODS: dict[str, tuple[FrequencyMethod, tuple[str, str, str]]] = {
    "default": (Default(**C), ("default", "default", "none")),
    "linear": (Linear(**C, factor=4.0), ("linear", "linear", "linear")),
    "ntk": (NTK(**C, factor=4.0), ("default", "default", "none")),
    "ntk_mixed": (NTK(**C, factor=4.0, mixed_b=0.75), ("longrope", "ntk", "rope_freqs")),
    "abf": (ABF(**C, new_base=5e5), ("default", "default", "none")),
    "by_parts": (ByParts(**S), ("llama3", "llama3", "rope_freqs")),
    "by_parts_index": (ByParts(**S, ramp="index"), ("yarn", "yarn", "yarn")),
    "part_ntk": (PartNTK(**S), ("longrope", "longrope", "rope_freqs")),
    "yarn": (Yarn(**S), ("yarn", "yarn", "yarn")),
    "yarn_exact_ends": (Yarn(**S, truncate=False), ("yarn", "yarn", "rope_freqs")),
    "yarn_rotations": (Yarn(**S, ramp="rotations"), ("longrope", "longrope", "rope_freqs")),
    "yarn_explicit": (Yarn(**S, attention_factor=1.0), ("yarn", "yarn", "yarn")),
    "yarn_deepseek": (Yarn(**S, mscale=1.0, mscale_all_dim=1.0), ("yarn", "yarn", "yarn")),
    "llama3": (Llama3(**S), ("llama3", "llama3", "rope_freqs")),
    "longrope": (LongRope(**C, trained_length=4096, max_length=131072, **LISTS), ("longrope", "longrope", "longrope")),
    "longrope_long": (
        LongRope(**C, trained_length=4096, factor=4.0, growth="long", **LISTS),
        ("longrope", "longrope", "rope_freqs"),
    ),
    "power": (Power(**C, exponent=0.1), ("longrope", "longrope", "rope_freqs")),
    "resonance": (Resonance(method=Yarn(**S)), ("longrope", "longrope", "rope_freqs")),
    "p_rope": (Proportional(**C, proportion=0.75), ("proportional", "proportional", "refused")),
    "p_rope_stretched": (Proportional(**C, proportion=0.75, factor=2.0), ("proportional", "refused", "refused")),
    "p_rope_still": (Proportional(**C, proportion=0.0), ("proportional", "proportional", "refused")),
    "hope": (HoPECut(**C, trained_length=4096), ("proportional", "proportional", "refused")),
    "truncated": (Truncated(**C, trained_length=2048), ("refused", "refused", "refused")),
    "dynamic_ntk": (dynamic_ntk(**C, trained_length=4096, factor=2.0), ("dynamic", "refused", "refused")),
    "dynamic_paper": (dynamic_ntk(**C, trained_length=4096, form="paper"), ("dynamic", "refused", "refused")),
    "dynamic_yarn": (Dynamic(method=Yarn(**C, trained_length=4096)), ("refused", "refused", "refused")),
    "log_n": (LogN(method=Default(**C), trained_length=4096), ("refused", "refused", "refused")),
    "clex": (Clex(**C, trained_length=4096, max_factor=2, time_dt=1.0).frozen(), ("refused", "refused", "refused")),
}
ENGINES = ("transformers", "vllm", "llama.cpp")


def trained(method: FrequencyMethod) -> int:
    return getattr(method, "trained_length", None) or 4096


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_method_is_written_exactly_or_refused_with_its_reason(name: str, engine: Any) -> None:
    method, expected = METHODS[name]
    wanted = expected[ENGINES.index(engine)]
    if wanted == "refused":
        with pytest.raises(ExportRefused, match="do not rotate|length|grow|fixed"):
            export(method, engine, trained_length=trained(method))
        return
    made = export(method, engine, trained_length=trained(method))
    assert made.error <= 1e-6
    if engine == "llama.cpp":
        kind = made.gguf_keys.get("rope.scaling.type", "none")
        assert wanted == ("rope_freqs" if "rope_freqs.weight" in made.gguf_tensors else kind)
        assert bool(made.flags) != bool(made.gguf_tensors or "rope.scaling.attn_factor" in made.gguf_keys)
    else:
        assert made.rope_parameters["rope_type"] == wanted
    for length in (100, trained(method), 5 * trained(method)):  # once more, here, at other lengths
        found = read_back(made, head_dim=128, length=length)
        assert difference(found, method.frequencies(length), softmax_folded=True) <= 1e-6
    assert made.text() and json.loads(json.dumps(made.to_dict()))["engine"] == engine


@pytest.mark.parametrize("name", [n for n, (_, e) in METHODS.items() if e[0] != "refused"])
def test_our_reader_reads_what_was_written_for_transformers(name: str) -> None:
    method = METHODS[name][0]
    made = export(method, "transformers", trained_length=trained(method))
    v5 = {"head_dim": 128, "rope_parameters": made.rope_parameters}
    v4 = {"head_dim": 128, "rope_theta": made.rope_theta, "rope_scaling": made.rope_scaling}
    for form in (v5, v4):
        read = from_config({**form, "max_position_embeddings": made.max_position_embeddings})
        for length in (100, 3 * trained(method)):
            assert difference(read.frequencies(length), method.frequencies(length), softmax_folded=True) <= 1e-9


@pytest.mark.parametrize("length", [None, 100, 4096, 4097, 20000])
@pytest.mark.parametrize("name", [n for n, (_, e) in METHODS.items() if e[0] != "refused"])
def test_our_writing_of_transformers_is_what_transformers_does(name: str, length: int | None) -> None:
    method = METHODS[name][0]
    made = export(method, "transformers", trained_length=trained(method))
    sizes = {"head_dim": 128, "max_position_embeddings": made.max_position_embeddings or 0, "length": length}
    ours = transformers_frequencies(made.rope_parameters, **sizes)
    assert difference(executed_transformers(made.rope_parameters, **sizes), ours) <= 1e-6


def test_silent_rules_of_transformers_are_in_our_writing_too() -> None:
    sizes = {"head_dim": 128, "max_position_embeddings": 131072}
    block = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}  # no original length: the stretched one is taken
    ours = transformers_frequencies(block, **sizes)
    assert difference(executed_transformers(block, **sizes), ours) <= 1e-6
    plain = Default(rotary_dim=128, base=1e6).frequencies().inv_freq
    assert float(plain[32] / ours.inv_freq[32]) == pytest.approx(1.0968, abs=1e-4)
    alone = {**block, "original_max_position_embeddings": 32768, "mscale": 0.5}
    assert transformers_frequencies(alone, **sizes).attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    nested = {**block, "original_max_position_embeddings": 32768, "truncate": False}
    flat, deep = (transformers_frequencies(nested, **sizes, nested=n) for n in (False, True))
    assert difference(flat, deep) > 1e-3


def test_a_changed_number_does_not_read_back() -> None:
    method = Yarn(**S)
    made = export(method, "transformers")
    for key, value in (("factor", 7.9), ("beta_fast", 16.0), ("attention_factor", 1.2), ("rope_theta", 10001.0)):
        broken = type(made)(**{**made.__dict__, "rope_parameters": {**made.rope_parameters, key: value}})
        assert difference(read_back(broken, head_dim=128, length=4096), method.frequencies()) > 1e-6, key


def test_partial_rotary_keeps_its_share() -> None:
    method = Yarn(**{**S, "rotary_dim": 32})
    made = export(method, "transformers", head_dim=128)
    assert made.rope_parameters["partial_rotary_factor"] == 0.25
    assert any("ignore partial_rotary_factor" in note for note in made.notes)
    assert export(method, "llama.cpp", head_dim=128).gguf_keys["rope.dimension_count"] == 32


def test_a_softmax_factor_is_folded_where_that_is_exact_and_refused_elsewhere() -> None:
    method = Yarn(**{**S, "factor": 40.0}, mscale=1.0, mscale_all_dim=1.0)
    made = export(method, "transformers")
    assert made.rope_parameters["attention_factor"] == pytest.approx(math.sqrt(1.8738542070926265))
    with pytest.raises(ExportRefused, match="partly rotated"):
        export(method, "transformers", head_dim=256)


def test_vllm_gets_the_keys_its_classes_read() -> None:
    long = json.loads(export(METHODS["longrope"][0], "vllm").overrides or "")
    assert long["max_position_embeddings"] == 131072
    assert (
        long["rope_parameters"]["short_mscale"] == long["rope_parameters"]["long_mscale"] == pytest.approx(1.19023807)
    )
    plain = json.loads(export(Yarn(**S), "vllm").overrides or "")["rope_parameters"]
    assert "attention_factor" not in plain and "attn_factor" not in plain  # the default of every version
    both = json.loads(export(Yarn(**S, attention_factor=1.0), "vllm").overrides or "")["rope_parameters"]
    assert both["attention_factor"] == 1.0 and both["attn_factor"] == pytest.approx(1 / (0.1 * math.log(8) + 1))
    assert json.loads(export(NTK(**C, factor=4.0), "vllm", trained_length=64).overrides or "")["rope_parameters"][
        "rope_theta"
    ] == pytest.approx(40889.94243248622)


def test_vllm_takes_one_list_and_one_dynamic_base_for_its_whole_life() -> None:
    block = dict(export(METHODS["longrope"][0], "vllm").rope_parameters)
    sizes = {"head_dim": 128, "max_position_embeddings": 131072}
    short, long = (vllm_frequencies(block, **sizes, max_model_len=n) for n in (4096, 4097))
    assert difference(short, long) > 0.5
    block = {"rope_type": "dynamic", "factor": 4.0}
    still = vllm_frequencies(block, head_dim=128, max_position_embeddings=16384)
    assert difference(still, Default(**C).frequencies()) < 1e-12
    block["max_trained_positions"] = 4096
    dynamic = vllm_frequencies(block, head_dim=128, max_position_embeddings=16384)
    grown = dynamic_ntk(**C, trained_length=4096, factor=4.0).frequencies(16384)
    assert difference(dynamic, grown) < 1e-12
    ntk = vllm_frequencies({"rope_type": "ntk", "factor": 8.0}, head_dim=128, max_position_embeddings=4096)
    assert difference(ntk, NTK(**C, factor=8.0, mixed_b=1.0).frequencies()) < 1e-12  # Su's "fixed", not NTK-aware
    for block, wanted in (
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}, 16384),
        ({"rope_type": "linear", "factor": 4.0}, 65536),
        ({"type": "su", "factor": 4.0}, 16384),
        ({"rope_type": "llama3", "factor": 8.0}, 16384),
    ):
        assert vllm_max_model_len(block, 16384) == wanted
    assert vllm_max_model_len({"rope_type": "longrope"}, 16384, original_at_top=4096) == 4096
    assert vllm_max_model_len({"rope_type": "linear", "factor": 8.0}, 16384, model_type="gemma3_text") == 16384


def test_vllm_is_told_what_it_multiplies_itself_and_how_long_to_serve() -> None:
    made = export(Linear(**C, factor=4), "vllm", trained_length=4096)
    said = json.loads(made.overrides or "")
    assert said["max_position_embeddings"] == 4096 and made.max_model_len == 16384  # 4 times that, and not 16 times
    assert isinstance(said["rope_parameters"]["factor"], float)  # an integer stops its linear type
    assert "vllm serve MODEL --max-model-len 16384 --hf-overrides '{" in made.text()
    with pytest.raises(ExportRefused, match="32768 positions .* and 65536 were asked for: raise the factor"):
        export(Yarn(**S), "vllm", target_length=65536)


def test_an_odd_rotary_dimension_has_the_pair_that_it_has_half_of() -> None:
    block = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.4}  # 51 of 128
    sizes = {"head_dim": 128, "max_position_embeddings": 4096}
    executed = executed_transformers(block, **sizes)
    assert executed.inv_freq.numel() == 26
    for formula in (transformers_frequencies, vllm_frequencies):
        assert difference(executed, formula(block, **sizes)) <= 1e-6


def test_llama_cpp_flags_and_keys_of_yarn() -> None:
    made = export(Yarn(**S), "llama.cpp")
    flags = "--rope-freq-base 10000 --rope-scaling yarn --rope-scale 8 --yarn-orig-ctx 4096 "
    assert " ".join(made.flags) == flags + "--yarn-beta-fast 32 --yarn-beta-slow 1"
    assert made.gguf_keys["context_length"] == 32768 and "rope.scaling.attn_factor" not in made.gguf_keys
    cold = export(Yarn(**S, attention_factor=1.0), "llama.cpp")
    assert cold.gguf_keys["rope.scaling.attn_factor"] == pytest.approx(1 / (0.1 * math.log(8) + 1))
    assert llama_cpp_frequencies(llama_cpp_rope(cold.gguf_keys)).attention_factor == pytest.approx(1.0)


def test_llama_cpp_without_an_original_length_takes_the_stretched_one() -> None:
    common: dict[str, Any] = {"dimension_count": 128, "freq_base": 1e4, "context_length": 32768, "scaling_factor": 8.0}
    right = llama_cpp_frequencies(LlamaCppRope(**common, scaling_type="yarn", original_context_length=4096))
    wrong = llama_cpp_frequencies(LlamaCppRope(**common, scaling_type="yarn"))
    assert difference(right, Yarn(**S).frequencies()) < 1e-12 and difference(wrong, right) > 0.1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: transformers_frequencies({"rope_type": "ntk"}, head_dim=8, max_position_embeddings=8), "KeyError"),
        (lambda: executed_transformers({"rope_type": "ntk"}, head_dim=8, max_position_embeddings=8), "KeyError"),
        (lambda: vllm_frequencies({"rope_type": "x"}, head_dim=8, max_position_embeddings=8), "Unknown RoPE"),
        (
            lambda: transformers_frequencies(
                {"rope_type": "linear", "factor": "4"}, head_dim=8, max_position_embeddings=8
            ),
            "not a number",
        ),
        (
            lambda: vllm_frequencies(
                {
                    "rope_type": "longrope",
                    "short_factor": [1.0],
                    "long_factor": [1.0],
                    "original_max_position_embeddings": 4,
                },
                head_dim=8,
                max_position_embeddings=8,
            ),
            "size mismatch",
        ),
    ],
)
def test_engines_stop_where_they_would(call: Any, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        call()


def test_the_page_s_table_is_what_is_written() -> None:
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| ")
    ]
    assert {row[0]: tuple(row[1:]) for row in rows[1:]} == {name: words for name, (_, words) in METHODS.items()}


@pytest.mark.parametrize("form", ["v4", "v5"])
@pytest.mark.parametrize("name", [n for n, (_, e) in METHODS.items() if e[0] not in ("refused", "dynamic")])
def test_a_folder_with_an_export_in_its_config_loads_with_the_method_s_frequencies(
    tmp_path: Path, name: str, form: str
) -> None:
    transformers = pytest.importorskip("transformers")
    method = METHODS[name][0]
    made = export(method, "transformers", trained_length=trained(method))
    config: dict[str, Any] = {"model_type": "llama", "head_dim": 128, "hidden_size": 128, "num_attention_heads": 1}
    config |= {"max_position_embeddings": trained(method), "vocab_size": 7, "num_hidden_layers": 1}
    base = {"rope_theta": 10000.0}
    config |= base if form == "v4" else {"rope_parameters": {"rope_type": "default", **base}}
    merged = into_config(config, made)
    assert merged["vocab_size"] == 7 and ("rope_theta" in merged) == (form == "v4")
    (tmp_path / "config.json").write_text(json.dumps(merged))
    loaded = transformers.AutoConfig.from_pretrained(tmp_path)
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(loaded)
    wanted = method.frequencies(trained(method))
    torch.testing.assert_close(rotary.inv_freq.double(), wanted.inv_freq.flatten(), rtol=1e-6, atol=0)
    folded = float(wanted.attention_factor) * math.sqrt(float(wanted.softmax_factor))
    assert rotary.attention_scaling == pytest.approx(folded)
    assert loaded.max_position_embeddings == made.max_position_embeddings
    assert diagnose(tmp_path).verdict in ("clean", "warning")


def test_only_exports_for_transformers_go_into_config_json() -> None:
    with pytest.raises(ValueError, match="not for vllm"):
        into_config({"rope_theta": 1e4}, export(Yarn(**S), "vllm"))


def test_missing_or_contradicting_lengths_are_named() -> None:
    with pytest.raises(ValueError, match="pass trained_length"):
        export(Linear(**C, factor=2.0), "transformers")
    with pytest.raises(ValueError, match="4096"):
        export(Yarn(**S), "transformers", trained_length=64)
    with pytest.raises(ValueError, match="engine must be"):
        export(Yarn(**S), "tgi")  # type: ignore[arg-type]


def test_a_configuration_can_be_exported_directly() -> None:
    config = {
        "head_dim": 128,
        "rope_theta": 5e5,
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
    made = export(config, "llama.cpp", trained_length=8192, target_length=131072)
    divisors = torch.tensor(made.gguf_tensors["rope_freqs.weight"], dtype=torch.float64)
    assert bool((divisors[:29] == 1).all()) and float(divisors[-1]) == pytest.approx(8.0)
    assert made.gguf_keys["context_length"] == 131072


# ---- whole files ----------------------------------------------------------------------------------------------------

LLAMA3_BLOCK = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("block", "declared", "length"),
    [
        ({**LLAMA3_BLOCK, "original_max_position_embeddings": 8192}, 131072, 131072),  # not 8 * 8192
        ({"rope_type": "dynamic", "alpha": 1000.0}, 32768, 32768),  # not 1000 times
        ({"rope_type": "linear", "factor": 8.0}, 131072, 131072),  # already stretched
        ({"rope_type": "linear", "factor": 8.0, "original_max_position_embeddings": 4096}, 4096, 32768),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 32768, 131072),
    ],
)
def test_a_file_s_length_is_never_multiplied_twice(block: dict[str, Any], declared: int, length: int) -> None:
    config = {"head_dim": 128, "rope_theta": 1e6, "max_position_embeddings": declared, "rope_scaling": block}
    made = export(config, "transformers")
    assert made.max_position_embeddings == length
    assert into_config(config, made, replace_trained=True)["max_position_embeddings"] == length
    assert export(config, "vllm").max_model_len == length
    assert export(config, "llama.cpp").gguf_keys["context_length"] == length


@pytest.mark.parametrize("mscale", [1.0, 0.707])
def test_deepseek_s_file_keeps_what_its_class_scales_the_softmax_by(mscale: float) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

    block = {"type": "yarn", "factor": 40, "mscale": mscale, "mscale_all_dim": mscale, "beta_fast": 32, "beta_slow": 1}
    sizes = {"qk_rope_head_dim": 64, "rope_theta": 10000, "max_position_embeddings": 163840}
    config = {**sizes, "rope_scaling": {**block, "original_max_position_embeddings": 4096}}
    made = export(config, "transformers")
    before = transformers.DeepseekV3Config(**json.loads(json.dumps(config)))
    after = transformers.DeepseekV3Config(**sizes, rope_parameters=dict(made.rope_parameters))
    scales = [yarn_apply_mscale(one.rope_parameters, 1.0) for one in (before, after)]
    assert scales[0] == scales[1] == pytest.approx((0.1 * mscale * math.log(40) + 1) ** 2)
    frequencies = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"]
    found = [frequencies(one, torch.device("cpu")) for one in (before, after)]
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1] == pytest.approx(1.0)
    override = json.loads(export(config, "vllm").overrides or "")["rope_parameters"]
    assert override["mscale_all_dim"] == mscale and not {"attention_factor", "attn_factor"} & set(override)
    with pytest.raises(ExportRefused, match="yarn_log_multiplier"):
        export(config, "llama.cpp")


def test_two_blocks_that_disagree_are_not_exported() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = {"head_dim": 128, "rope_theta": 1e6, "max_position_embeddings": 131072, "rope_scaling": yarn}
    with pytest.raises(ValueError, match="say different things"):
        export({**config, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "vllm")
    assert export({**config, "rope_parameters": {**yarn, "rope_theta": 1e6}}, "vllm").max_model_len == 131072
    assert export({**config, "rope_parameters": {}}, "transformers").rope_parameters["rope_type"] == "yarn"


def test_a_file_is_exported_as_its_class_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from milepost.cli import run

    path = tmp_path / "config.json"
    sizes = {"hidden_size": 2560, "num_attention_heads": 32, "rope_theta": 1e6, "max_position_embeddings": 40960}
    for model_type, width in (("qwen3", 128), ("llama", 80), ("gemma", 256)):
        path.write_text(json.dumps({"model_type": model_type, **sizes}))
        assert run(["export", str(path), "--engine", "llama.cpp", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)[0]["gguf_keys"]["rope.dimension_count"] == width
    path.write_text(json.dumps({"model_type": "glm4", **sizes}))
    assert run(["export", str(path), "--engine", "transformers", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["rope_parameters"]["partial_rotary_factor"] == 0.5
