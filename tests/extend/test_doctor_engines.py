"""The doctor against transformers, executed: files as people write them, and what its classes say by themselves."""

from __future__ import annotations

import copy
import importlib
import inspect
from typing import Any

import pytest
import torch

from milepost.encodings.frequencies import Frequencies, from_config
from milepost.extend.doctor import diagnose
from milepost.extend.doctor.classes import (
    ALPHA,
    FLAT_ONLY,
    HEAD_DIMS,
    LAYERED,
    MROPE,
    NULL_HEAD_DIM_STOPS,
    ORIGINALS,
    PARTIALS,
    SU,
    THETAS,
)
from milepost.extend.doctor.statements import describe

pytest.importorskip("transformers")
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402  # optional

LINEAR = {"rope_type": "linear", "factor": 8.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
DEEPSEEK = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}
DEEPSEEK |= {"original_max_position_embeddings": 4096}
SWAPPED = {"low_freq_factor": 4.0, "high_freq_factor": 1.0}
SECTION = {"mrope_section": [16, 24, 24]}
ALPHA_BLOCK = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
LISTS = {"short_factor": [1.0] * 48, "long_factor": [1.0 + p / 8 for p in range(48)]}


def sized(model_type: str, hidden: int = 1024, heads: int = 8, **more: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_hidden_layers": 6,
        **{"max_position_embeddings": 131072, **more},
    }


def qwen2(**more: Any) -> dict[str, Any]:
    return sized("qwen2", rope_theta=1e6, **more)


def phi3(**more: Any) -> dict[str, Any]:
    return sized("phi3", 3072, 32, rope_theta=1e4, **more)


TEXT = {key: value for key, value in qwen2(rope_scaling=None).items() if value is not None}
FILES: dict[str, dict[str, Any]] = {
    "qwen2 yarn": qwen2(rope_scaling=YARN),
    "qwen2 both forms": qwen2(rope_scaling={**YARN, "type": "yarn"}, rope_parameters={**YARN, "rope_theta": 1e6}),
    "qwen2 empty scaling": qwen2(rope_scaling={}, rope_parameters={**YARN, "rope_theta": 1e6}),
    "llama3": sized("llama", rope_theta=5e5, rope_scaling=LLAMA3),
    "llama3 swapped": sized("llama", rope_theta=5e5, rope_scaling={**LLAMA3, **SWAPPED}),
    "llama partial": sized("llama", rope_theta=1e4, partial_rotary_factor=0.5),
    "phi3": phi3(original_max_position_embeddings=4096, rope_scaling={"type": "longrope", **LISTS}),
    "phi3 saved again": phi3(
        original_max_position_embeddings=4096, rope_scaling={"type": "su", "rope_type": "longrope", **LISTS}
    ),
    "phi3 original inside": phi3(rope_scaling={"type": "longrope", "original_max_position_embeddings": 8192, **LISTS}),
    "phi3 no original": phi3(rope_scaling={"type": "longrope", **LISTS}),
    "phi3 su": phi3(original_max_position_embeddings=4096, rope_scaling={"type": "su", **LISTS}),
    "phi3 su inside": phi3(rope_scaling={"type": "su", "original_max_position_embeddings": 4096, **LISTS}),
    "phi3 yarn": phi3(rope_scaling=YARN),
    "deepseek": sized(
        "deepseek_v3",
        rope_theta=10000,
        max_position_embeddings=163840,
        qk_rope_head_dim=64,
        rope_scaling=DEEPSEEK,
    ),
    "gemma3 old": sized("gemma3_text", head_dim=128, rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=LINEAR),
    "gemma3 flat": sized("gemma3_text", head_dim=128, rope_parameters={**LINEAR, "rope_theta": 1e6}),
    "gemma3 nested": sized(
        "gemma3_text",
        head_dim=128,
        rope_parameters={
            "full_attention": {**LINEAR, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "olmo3": sized("olmo3", rope_theta=5e5, rope_scaling=YARN),
    "modernbert": sized("modernbert", 768, 12, global_rope_theta=160000.0, local_rope_theta=10000.0),
    "gpt-oss": sized("gpt_oss", head_dim=64, rope_theta=150000, rope_scaling={**YARN, "truncate": False}),
    "glm4 by its class": sized("glm4", head_dim=128, rope_theta=1e4),
    "neox by its class": sized("gpt_neox", rotary_emb_base=10000),
    "neox": sized("gpt_neox", rotary_emb_base=10000, rotary_pct=0.5),
    "minimax": sized("minimax_m2", head_dim=128, rotary_dim=64, rope_theta=5e6),
    "qwen3 by its class": sized("qwen3", 2560, 32, rope_theta=1e6),
    "gemma by its class": sized("gemma", 2048, 16, rope_theta=1e4),
    "mixtral by its class": sized("mixtral"),
    "hunyuan": sized("hunyuan_v1_dense", head_dim=128, rope_theta=1e4, rope_scaling=ALPHA_BLOCK),
    "llama alpha": sized("llama", rope_theta=1e4, rope_scaling=ALPHA_BLOCK),
    "qwen2-vl old": sized("qwen2_vl", rope_theta=1e6, rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}),
    "qwen2-vl saved again": {
        "model_type": "qwen2_vl",
        "text_config": sized(
            "qwen2_vl_text",
            rope_parameters={"type": "mrope", "rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
        ),
    },
    "mrope for qwen2": qwen2(rope_scaling={"rope_type": "mrope", "mrope_section": [16, 24, 24]}),
    "su for llama": sized(
        "llama",
        3072,
        32,
        rope_theta=1e4,
        rope_scaling={"rope_type": "su", "original_max_position_embeddings": 4096, **LISTS},
    ),
    "nested for qwen2": qwen2(rope_parameters={"full_attention": {**LINEAR, "rope_theta": 1e6}}),
    "nested for llama": sized("llama", rope_parameters={"full_attention": {**LINEAR, "rope_theta": 1e6}}),
    "null base": qwen2(rope_parameters={**LINEAR, "rope_theta": None}),
    "null share": qwen2(rope_scaling={**LINEAR, "partial_rotary_factor": None}),
    "null original": qwen2(rope_scaling={**YARN, "original_max_position_embeddings": None}),
    "null type": qwen2(rope_scaling={**YARN, "rope_type": None, "type": "yarn"}),
    "null truncate": qwen2(rope_scaling={**YARN, "truncate": None}),
    "null head": qwen2(head_dim=None, rope_scaling=YARN),
    "null head, class computes": sized("mistral", head_dim=None, rope_theta=1e6, rope_scaling=YARN),
    "length with a point": {**qwen2(rope_scaling=YARN), "max_position_embeddings": 131072.0},
    "scaling beside text_config": {"model_type": "llava", "text_config": TEXT, "rope_scaling": YARN},
}
CLEAN = {
    *("qwen2 yarn", "qwen2 both forms", "qwen2 empty scaling", "llama3", "deepseek", "gemma3 old", "gemma3 nested"),
    *("olmo3", "modernbert", "gpt-oss", "glm4 by its class", "neox by its class", "neox", "minimax"),
    *("qwen3 by its class", "gemma by its class", "hunyuan", "qwen2-vl old", "qwen2-vl saved again", "null truncate"),
    "null head, class computes",
}
UNCURED = {
    *("phi3 saved again", "phi3 su inside", "phi3 yarn", "llama partial", "phi3 no original", "mixtral by its class"),
}


def executed(file: dict[str, Any]) -> dict[str, tuple[Frequencies, float]]:
    """The model's own rotary module, built from the file: frequencies and base by layer type."""
    config = CONFIG_MAPPING[file["model_type"]].from_dict(copy.deepcopy(file)).get_text_config()
    name = type(config).__module__.split(".")[-2]
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    kind: Any = next(
        value
        for key, value in vars(module).items()
        if inspect.isclass(value) and key.endswith("RotaryEmbedding") and "Vision" not in key
    )
    rotary = kind(config=config)
    found = {}
    for key, buffer in rotary.named_buffers():
        layer = key.removesuffix("inv_freq").removesuffix("_")
        if not key.endswith("inv_freq") or "original" in key:
            continue
        factor = getattr(rotary, f"{layer}_attention_scaling" if layer else "attention_scaling")
        block = config.rope_parameters.get(layer) or config.rope_parameters
        found[layer] = Frequencies(buffer.double(), float(factor)), float(block.get("rope_theta") or 1e4)
    return found


@pytest.mark.parametrize("name", FILES)
def test_what_is_said_of_transformers_is_what_it_does(name: str) -> None:
    file = FILES[name]
    report = diagnose(copy.deepcopy(file))
    try:
        found = executed(file)
    except Exception as error:
        assert report.verdict == "error", f"transformers stops with {error!r}"
        stops = all("stops" in lines["transformers"][0] for lines in report.engines.values())
        assert stops or "block-not-read" in report.rules()
        return
    for layer, (frequencies, base) in found.items():
        said = report.engines.get(layer) or next(iter(report.engines.values()))
        if said["transformers"][0].startswith("stops"):
            assert "block-not-read" in report.rules()
            continue
        assert describe(frequencies, base) in said["transformers"][0]


@pytest.mark.parametrize("name", FILES)
def test_no_false_alarm_and_no_silence(name: str) -> None:
    report = diagnose(copy.deepcopy(FILES[name]))
    assert (report.verdict == "clean") == (name in CLEAN), report.rules()


@pytest.mark.parametrize("name", [name for name in FILES if name not in CLEAN])
def test_a_corrected_file_loads_and_the_rest_of_it_survives(name: str) -> None:
    file = FILES[name]
    report = diagnose(copy.deepcopy(file))
    if report.corrected is None or "type-not-for-class" in report.left:
        assert name in UNCURED
        return
    assert set(report.left) <= {"longrope-switch", "rope-type-one-engine", "theta-missing"}
    executed(report.corrected)
    rope = ("rope", "position", "head_dim", "text_config")
    kept = {key: value for key, value in file.items() if not any(word in key for word in rope)}
    assert kept.items() <= report.corrected.items()


# ---- tables of what classes do --------------------------------------------------------------------------------------


def made(model_type: str, **values: Any) -> Any:
    return CONFIG_MAPPING[model_type](**values)


def first(config: Any) -> dict[str, Any]:
    blocks = config.rope_parameters
    return blocks.get("full_attention") or blocks


@pytest.mark.parametrize("model_type", sorted(set(HEAD_DIMS) & set(CONFIG_MAPPING)))
def test_head_widths_of_classes(model_type: str) -> None:
    config = made(model_type, hidden_size=96, num_attention_heads=4, num_key_value_heads=4)
    assert config.head_dim == HEAD_DIMS[model_type]


@pytest.mark.parametrize("model_type", sorted(set(PARTIALS) & set(CONFIG_MAPPING)))
def test_shares_of_classes(model_type: str) -> None:
    assert first(made(model_type))["partial_rotary_factor"] == PARTIALS[model_type]


@pytest.mark.parametrize("model_type", sorted(set(THETAS) & set(CONFIG_MAPPING)))
def test_bases_of_classes(model_type: str) -> None:
    assert first(made(model_type))["rope_theta"] == THETAS[model_type]


def test_bases_of_common_classes_that_are_not_listed() -> None:
    for model_type in sorted((FLAT_ONLY - set(THETAS)) & set(CONFIG_MAPPING)):
        assert first(made(model_type, rope_parameters={"rope_type": "default"}))["rope_theta"] == 10000.0, model_type


def test_original_lengths_of_classes() -> None:
    assert {name: made(name).original_max_position_embeddings for name in ORIGINALS} == ORIGINALS


def test_classes_that_rename_a_type() -> None:
    section = {"rope_type": "mrope", "mrope_section": [16, 24, 24]}
    for model_type in sorted(MROPE):
        assert first(made(model_type, rope_parameters=dict(section)).get_text_config())["rope_type"] == "default"
    for model_type in sorted(SU):
        lists = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "original_max_position_embeddings": 4096}
        block = {"rope_type": "su", **lists}
        sizes = {"hidden_size": 96 * 4, "num_attention_heads": 4, "num_key_value_heads": 4}
        assert first(made(model_type, **sizes, rope_scaling=block))["rope_type"] == "longrope"
    for model_type in sorted(ALPHA & set(CONFIG_MAPPING)):
        name = made(model_type).get_text_config().__module__.split(".")[-2]
        assert '["alpha"]' in inspect.getsource(importlib.import_module(f"transformers.models.{name}.modeling_{name}"))


@pytest.mark.parametrize("model_type", sorted(NULL_HEAD_DIM_STOPS))
def test_a_null_head_dim_stops_these_classes(model_type: str) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    sizes = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 8192}
    block = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096, "rope_theta": 1e4}
    config = made(model_type, **sizes, head_dim=None)
    config.rope_parameters = block
    with pytest.raises(TypeError):
        ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))


@pytest.mark.parametrize("model_type", sorted(FLAT_ONLY))
def test_blocks_per_layer_type_never_reach_a_flat_class(model_type: str) -> None:
    block = {"full_attention": {**LINEAR, "rope_theta": 12345.0}}
    try:
        found = executed(sized(model_type, rope_parameters=block))
    except KeyError:
        return
    assert all(float(one.inv_freq.flatten()[0]) == 1.0 for one, _ in found.values())  # nothing was divided by 8


@pytest.mark.parametrize("model_type", sorted(set(LAYERED) & set(CONFIG_MAPPING)))
def test_classes_that_make_blocks_per_layer_type(model_type: str) -> None:
    layered = LAYERED[model_type]
    given = made(model_type, rope_scaling=dict(LINEAR), **{layered.full[0]: 111.0}).rope_parameters
    assert given["full_attention"]["rope_type"] == "linear" and given["full_attention"]["rope_theta"] == 111.0
    assert given["sliding_attention"]["rope_type"] == ("linear" if layered.both else "default")
    usual = made(model_type).rope_parameters
    assert {key: block["rope_theta"] for key, block in usual.items()} == {
        "full_attention": layered.full[1],
        "sliding_attention": layered.sliding[1],
    }
    if layered.sliding[0] != layered.full[0]:
        own = made(model_type, **{layered.sliding[0]: 222.0}).rope_parameters
        assert own["sliding_attention"]["rope_theta"] == 222.0


def test_a_saved_legacy_type_is_no_contradiction_for_our_reader_either() -> None:
    method = from_config(FILES["qwen2-vl saved again"]["text_config"])
    assert type(method).__name__ == "Default" and getattr(method, "base", None) == 1e6
    assert type(from_config(FILES["phi3 saved again"])).__name__ == "LongRope"
    with pytest.raises(ValueError, match="keep rope_type only"):
        from_config(qwen2(rope_scaling={**YARN, "type": "su"}))
