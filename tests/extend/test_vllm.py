"""vLLM's own rope code, executed, against our writing of it, our exports, and what the doctor says of overrides.

vLLM installs with gigabytes that none of this needs: unzip its wheel and point MILEPOST_VLLM at the folder. The rope
classes, the derivation of max_model_len and the handling of --hf-overrides run as they are; what they import from the
rest of vLLM is replaced by stand-ins.
"""

from __future__ import annotations
import __future__

import ast
import importlib
import json
import logging
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from milepost import Positions, build
from milepost.encodings.axial import MRoPE
from milepost.encodings.frequencies import NTK, Frequencies, FrequencyMethod, Linear, LongRope, Proportional, Yarn
from milepost.extend.doctor import diagnose
from milepost.extend.engines import EngineError, vllm_frequencies, vllm_max_model_len, vllm_table_length
from milepost.extend.export import difference, export
from tests.extend.test_export import LISTS, METHODS, C, S, trained

transformers = pytest.importorskip("transformers")

ROOT = os.environ.get("MILEPOST_VLLM")
FOLDER = Path(ROOT or ".").resolve()
ROPE = "vllm.model_executor.layers.rotary_embedding"

pytestmark = pytest.mark.skipif(
    ROOT is None,
    reason="vLLM's wheel is not unpacked: pip download --no-deps vllm, unzip it and set MILEPOST_VLLM to the folder",
)


class Plain(torch.nn.Module):
    """Stands in for CustomOp: a module that is never replaced by a kernel."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    @staticmethod
    def register(_: str) -> Any:
        return lambda cls: cls

    @classmethod
    def enabled(cls) -> bool:
        return False


class Nothing:
    """Stands in for a module of kernels: any name, any call, no answer."""

    def __getattr__(self, name: str) -> Nothing:
        return self

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        return arguments[0] if arguments and callable(arguments[0]) else self

    def __bool__(self) -> bool:
        return False


class Vllm:
    """get_rope with the rest of vLLM stood in for, and functions taken out of modules that import too much."""

    def __init__(self) -> None:
        self.model = SimpleNamespace(max_model_len=0)
        log: Any = logging.getLogger("vllm")
        log.warning_once, log.info_once = log.warning, log.info
        self.log = log
        platform = Nothing()
        stand_ins: dict[str, dict[str, Any]] = {
            "vllm._aiter_ops": {"rocm_aiter_ops": Nothing()},
            "vllm.config": {"get_current_vllm_config": lambda: SimpleNamespace(model_config=self.model)},
            "vllm.distributed": dict.fromkeys(
                ("get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size"), Nothing()
            ),
            "vllm.logger": {"init_logger": lambda _: log},
            "vllm.model_executor.custom_op": {"CustomOp": Plain, "PluggableLayer": Plain},
            "vllm.platforms": {"current_platform": platform},
            "vllm.triton_utils": {"tl": Nothing(), "triton": Nothing()},
            "vllm.utils.flashinfer": {"has_flashinfer": lambda: False},
            "vllm.utils.torch_utils": {"direct_register_custom_op": Nothing(), "async_tensor_h2d": Nothing()},
        }
        for name in ("vllm", "vllm.model_executor", "vllm.model_executor.layers", "vllm.utils"):
            module: Any = ModuleType(name)
            module.__path__ = [str(FOLDER.joinpath(*name.split(".")))]
            sys.modules[name] = module
        for name, members in stand_ins.items():
            module = ModuleType(name)
            module.__dict__.update(members)
            sys.modules[name] = module
        self.rope: Any = importlib.import_module(ROPE)

    def table(
        self, block: dict[str, Any], head_dim: int, max_position: int, max_model_len: int | None = None
    ) -> tuple[Frequencies, torch.Tensor]:
        """What a model would rotate by: frequencies and factor read from position 1, and the whole table."""
        self.model.max_model_len = max_model_len or max_position
        self.rope._ROPE_DICT.clear()  # its key takes 4 and 4.0 for the same
        made = self.rope.get_rope(head_dim, max_position, True, dict(block), torch.float64)
        if hasattr(made, "long_short_cos_sin_cache"):
            original = made.original_max_position_embeddings
            whole = made.long_short_cos_sin_cache
            table = whole[original:] if made.use_long_rope else whole[:original]
        else:
            table = made.cos_sin_cache
        cos, sin = table[1].double().chunk(2)
        return Frequencies(torch.atan2(sin, cos), float(torch.hypot(cos, sin)[0])), table

    def taken(self, path: str, *names: str, **given: Any) -> dict[str, Any]:
        """Functions of a module, or of classes in it, executed without the module's imports."""
        tree = ast.parse((FOLDER / "vllm" / path).read_text(encoding="utf-8"))
        found: list[ast.stmt] = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name in names]
        assert {getattr(node, "name", "") for node in found} == set(names), f"{path} has no {names}: another version?"
        code = compile(
            ast.Module(found, []), path, "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True
        )
        space: dict[str, Any] = {"logger": self.log, "math": math, "PreTrainedConfig": transformers.PreTrainedConfig}
        space |= given
        exec(code, space)
        return space


@pytest.fixture(scope="module")
def vllm() -> Iterator[Vllm]:
    folder = FOLDER.joinpath(*ROPE.split("."))
    assert folder.is_dir(), f"{folder} is no folder: MILEPOST_VLLM must hold vLLM's unzipped wheel"
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "vllm"}
    for name in before:
        del sys.modules[name]
    yield Vllm()
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.modules.update(before)


ORIGINAL = {"original_max_position_embeddings": 2048}
YARN = {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}
DEEPSEEK = {**YARN, "rope_type": "deepseek_yarn"}
SHORT, LONG = [1.0 + p / 64 for p in range(64)], [2.0 + p / 8 for p in range(64)]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, **ORIGINAL}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}
SECTION = {"mrope_section": [16, 24, 24]}
BLOCKS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "no type": {"rope_theta": 5e5},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "ntk": {"rope_type": "ntk", "factor": 4.0},
    "ntk mixed": {"rope_type": "ntk", "factor": 4.0, "mixed_b": 0.625},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "dynamic trained": {"rope_type": "dynamic", "factor": 4.0, "max_trained_positions": 2048},
    "dynamic alpha": {"rope_type": "dynamic", "alpha": 1000.0},
    "yarn": YARN,
    "yarn factor": {**YARN, "attention_factor": 0.9},
    "yarn mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn mscale alone": {**YARN, "mscale": 0.5},
    "yarn betas": {**YARN, "beta_fast": 16, "beta_slow": 2},
    "yarn exact ends": {**YARN, "truncate": False},
    "yarn integer": {**YARN, "factor": 4},
    "yarn mrope": {**YARN, **SECTION},
    "deepseek": DEEPSEEK,
    "deepseek mscale": {**DEEPSEEK, "mscale": 0.707, "mscale_all_dim": 0.5},
    "deepseek no mscale": {**DEEPSEEK, "mscale": 0},
    "deepseek llama": {**DEEPSEEK, "rope_type": "deepseek_llama_scaling", "beta_fast": 16},
    "longrope": LONGROPE,
    "longrope mscale": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3},
    "llama3": LLAMA3,
    "llama3 step": {**LLAMA3, "low_freq_factor": 3.0, "high_freq_factor": 3.0},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.3},
    "mrope": {"rope_type": "default", **SECTION},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.4},
    "partial yarn": {**YARN, "partial_rotary_factor": 0.25},
    "rope_dim": {"rope_type": "linear", "factor": 2.0, "rope_dim": 32, "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("length", [1024, 2048, 2049, 8192])
@pytest.mark.parametrize("name", BLOCKS)
def test_our_writing_of_vllm_is_what_vllm_does(vllm: Vllm, name: str, length: int) -> None:
    block = {"rope_theta": 1e6, **BLOCKS[name]}
    found, table = vllm.table(block, 128, 8192, length)
    ours = vllm_frequencies(block, head_dim=128, max_position_embeddings=8192, max_model_len=length)
    assert difference(found, ours) <= 3e-6  # float32 there
    rows = vllm_table_length(block, 8192)
    if BLOCKS[name].get("rope_type") != "longrope" or length > 2048:  # the short list is only used below the original
        assert len(table) == rows
    position = min(len(table), 2000) - 1
    angle, factor = position * ours.inv_freq, float(ours.attention_factor)
    wanted = torch.cat([angle.cos(), angle.sin()]) * factor
    torch.testing.assert_close(table[position].double(), wanted, rtol=0, atol=1e-3)  # float32 phases


@pytest.mark.parametrize("length", [2048, 4096, 8192])
@pytest.mark.parametrize("name", [n for n, (_, e) in METHODS.items() if e[1] != "refused"])
def test_every_export_is_the_method_when_vllm_runs_it(vllm: Vllm, name: str, length: int) -> None:
    method, kinds = METHODS[name]
    made = export(method, "vllm", trained_length=trained(method))
    said = json.loads(made.overrides or "")  # as the command line would hand it over
    assert said["rope_parameters"]["rope_type"] == kinds[1]
    found, table = vllm.table(said["rope_parameters"], 128, said["max_position_embeddings"], length)
    assert difference(found, method.frequencies(length), softmax_folded=True) <= 3e-6
    if length > trained(method):
        assert len(table) >= (made.max_model_len or 0)


def test_a_partly_rotated_head_keeps_its_share(vllm: Vllm) -> None:
    method = Yarn(**{**S, "rotary_dim": 32})
    made = export(method, "vllm", head_dim=128)
    found, _ = vllm.table(dict(made.rope_parameters), 128, made.max_position_embeddings or 0)
    assert difference(found, method.frequencies()) <= 3e-6


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("partial", [1.0, 0.25])
def test_what_vllm_turns_is_what_our_rope_turns(vllm: Vllm, layout: str, partial: float) -> None:
    block = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": partial}
    vllm.rope._ROPE_DICT.clear()
    theirs = vllm.rope.get_rope(32, 64, layout == "half", block, torch.float64)
    q, k = torch.randn(2, 20, 4 * 32, dtype=torch.float64)
    wanted = theirs.forward_native(torch.arange(20), q, k)
    branch = build("rope", head_dim=32, partial=partial, layout=layout)(Positions.full(20)).branches[0]
    assert branch.query is not None and branch.key is not None
    for turn, x, turned in zip((branch.query, branch.key), (q, k), wanted, strict=True):
        ours = turn(x.view(20, 4, 32).transpose(0, 1)[None])[0].transpose(0, 1).reshape(20, 128)
        torch.testing.assert_close(ours, turned, rtol=0, atol=1e-5)  # float32 phases there


@pytest.mark.parametrize("interleaved", [False, True])
def test_what_vllm_turns_by_three_axes_is_what_our_m_rope_turns(vllm: Vllm, interleaved: bool) -> None:
    sections = (6, 5, 5)
    block = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections, "mrope_interleaved": interleaved}
    vllm.rope._ROPE_DICT.clear()
    theirs = vllm.rope.get_rope(32, 64, True, block, torch.float64)
    at = torch.randint(0, 60, (3, 20))
    q = torch.randn(20, 4 * 32, dtype=torch.float64)
    wanted, _ = theirs.forward_native(at, q, q)
    encoding = build("m-rope", head_dim=32, sections=sections, interleaved=interleaved)
    assert isinstance(encoding, MRoPE)
    rotation = encoding.rotation(Positions.full(20), query_at=at.T[None], key_at=at.T[None])
    ours = rotation.query(q.view(20, 4, 32).transpose(0, 1)[None])[0].transpose(0, 1).reshape(20, 128)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("block", "ignored"),
    [
        (BLOCKS["default"], {"factor": 2.0, **ORIGINAL, "attention_factor": 2.0}),
        (BLOCKS["linear"], {**ORIGINAL, "attention_factor": 2.0}),
        (BLOCKS["ntk"], ORIGINAL),
        (BLOCKS["dynamic"], ORIGINAL),
        (BLOCKS["dynamic"], {"beta_fast": 16}),
        (YARN, {"attn_factor": 2.0, "extrapolation_factor": 0.5, "apply_yarn_scaling": False}),
        (YARN, {"mscale": 0.5}),
        (DEEPSEEK, {"attention_factor": 2.0, "truncate": False}),
        (LONGROPE, {"attention_factor": 2.0, "factor": 8.0}),
        (LLAMA3, {"attention_factor": 2.0}),
        (BLOCKS["proportional"], {"factor": 2.0}),
    ],
)
def test_the_keys_that_vllm_does_not_read(vllm: Vllm, block: dict[str, Any], ignored: dict[str, Any]) -> None:
    before, table = vllm.table(block, 128, 8192)
    after, again = vllm.table({**block, **ignored}, 128, 8192)
    assert torch.equal(table, again)
    ours = vllm_frequencies({**block, **ignored}, head_dim=128, max_position_embeddings=8192)
    assert difference(after, ours) <= 3e-6 and difference(before, ours) <= 3e-6


@pytest.mark.parametrize(
    ("block", "error"),
    [
        ({"rope_type": "linear", "factor": 4}, TypeError),
        ({"rope_type": "linear"}, KeyError),
        ({"rope_type": "yarn", "factor": 4.0}, KeyError),
        ({"rope_type": "dynamic"}, ValueError),
        ({"rope_type": "default", "partial_rotary_factor": 0.0}, ValueError),
        ({"rope_type": "default", "rope_theta": None}, TypeError),
        ({**LONGROPE, "short_factor": [1.0] * 63, "long_factor": [1.0] * 63}, RuntimeError),
        ({"rope_type": "xdrope", "alpha": 2.0}, ValueError),
        ({"rope_type": "by_parts"}, ValueError),
    ],
)
def test_vllm_stops_where_we_say_that_it_stops(vllm: Vllm, block: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        vllm.table(block, 128, 8192)
    with pytest.raises(EngineError):
        vllm_frequencies(block, head_dim=128, max_position_embeddings=8192)


@pytest.mark.parametrize("name", [n for n in BLOCKS if "rope_type" in BLOCKS[n]])
def test_the_length_that_vllm_derives_by_itself(vllm: Vllm, name: str) -> None:
    space = vllm.taken("config/model.py", "_get_and_verify_max_len", current_platform=Identity())
    space |= vllm.taken(
        "transformers_utils/config.py", "iter_rope_parameters", is_rope_parameters_nested=lambda _: False
    )
    block = BLOCKS[name]
    for top in ({}, ORIGINAL):
        config = SimpleNamespace(model_type="llama", rope_parameters=block, **top)
        sizes = SimpleNamespace(derived_max_model_len_and_key=(8192, "max_position_embeddings"))
        iterate = space["iter_rope_parameters"]
        derive = space["_get_and_verify_max_len"]
        derive.__globals__["iter_rope_parameters"] = iterate
        found = derive(config, sizes, None, None, False, None)
        beside = top.get("original_max_position_embeddings")
        assert found == vllm_max_model_len(block, 8192, original_at_top=beside)


class Identity:
    """A platform without limits."""

    @staticmethod
    def check_max_model_len(length: int) -> int:
        return length


def overridden(vllm: Vllm, config: Any, overrides: dict[str, Any]) -> Any:
    """A configuration after --hf-overrides, in vLLM's order: numbers, today's form, then objects."""
    names = ("_apply_dict_overrides", "_update_nested")
    space = vllm.taken("config/model.py", *names)
    patch = vllm.taken(
        "transformers_utils/config.py",
        "patch_legacy_rope_type",
        "is_rope_parameters_nested",
        ALLOWED_LAYER_TYPES=("full_attention", "sliding_attention"),
    )
    config.update({key: value for key, value in overrides.items() if not isinstance(value, dict)})
    for part in {id(one): one for one in (config, config.get_text_config())}.values():
        patch["patch_legacy_rope_type"](part.rope_parameters)
        part.standardize_rope_params()
    owner = SimpleNamespace()
    owner._update_nested = lambda target, updates: space["_update_nested"](owner, target, updates)
    space["_apply_dict_overrides"](owner, config, {k: v for k, v in overrides.items() if isinstance(v, dict)})
    return config


def llama(**block: Any) -> Any:
    return transformers.LlamaConfig(head_dim=128, max_position_embeddings=8192, rope_parameters=block)


def test_an_override_replaces_the_block_and_loses_the_base(vllm: Vllm) -> None:
    given = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    config = overridden(vllm, llama(rope_type="default", rope_theta=5e5), {"rope_parameters": dict(given)})
    assert config.rope_parameters == given  # no rope_theta left
    lost, _ = vllm.table(config.rope_parameters, 128, 32768)
    assert difference(lost, Yarn(**{**S, "trained_length": 8192, "factor": 4.0}).frequencies()) <= 3e-6  # base 10000
    checkpoint = {"head_dim": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    said = diagnose(json.dumps({"rope_parameters": given}), checkpoint=checkpoint)
    assert any(finding.rule == "theta-lost" for finding in said.findings)


def test_inside_text_config_an_override_merges(vllm: Vllm) -> None:
    config = transformers.Gemma3Config(text_config={"head_dim": 128, "max_position_embeddings": 8192})
    config.text_config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    given = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    text = {"text_config": {"rope_parameters": given, "max_position_embeddings": 32768}}
    space = vllm.taken("config/model.py", "_apply_dict_overrides", "_update_nested")
    owner = SimpleNamespace()
    owner._update_nested = lambda target, updates: space["_update_nested"](owner, target, updates)
    space["_apply_dict_overrides"](owner, config, text)
    assert config.get_text_config().rope_parameters == {"rope_theta": 5e5, **given}
    assert config.get_text_config().max_position_embeddings == 32768
    assert not any(finding.rule == "theta-lost" for finding in diagnose(json.dumps(text)).findings)


def test_a_base_at_the_top_is_not_read(vllm: Vllm) -> None:
    config = overridden(vllm, llama(rope_type="default", rope_theta=5e5), {"rope_theta": 1e6})
    assert config.rope_parameters["rope_theta"] == 5e5
    checkpoint = {"head_dim": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    said = diagnose(json.dumps({"rope_theta": 1e6}), checkpoint=checkpoint)
    assert any(finding.rule == "override-not-read" for finding in said.findings)


def test_an_old_type_key_in_an_override_stops_vllm(vllm: Vllm) -> None:
    given = {"type": "yarn", "factor": 4.0, "rope_theta": 5e5, "original_max_position_embeddings": 8192}
    config = overridden(vllm, llama(rope_type="default", rope_theta=5e5), {"rope_parameters": dict(given)})
    space = vllm.taken("config/model.py", "_get_and_verify_max_len", iter_rope_parameters=lambda c: [c.rope_parameters])
    sizes = SimpleNamespace(derived_max_model_len_and_key=(8192, "max_position_embeddings"))
    with pytest.raises(KeyError, match="rope_type"):
        space["_get_and_verify_max_len"](config, sizes, None, None, False, None)
    said = diagnose(json.dumps({"rope_parameters": given, "max_position_embeddings": 32768, "head_dim": 128}))
    assert "KeyError: 'rope_type'" in str(said.engines)


def test_an_exported_override_survives_the_way_into_a_model(vllm: Vllm) -> None:
    methods: list[FrequencyMethod] = [
        Linear(**C, factor=4),
        NTK(**C, factor=4.0, mixed_b=0.625),
        Yarn(**S, attention_factor=1.0),
        LongRope(**C, trained_length=4096, max_length=32768, **LISTS),
        Proportional(**C, proportion=0.3),
    ]
    for method in methods:
        made = export(method, "vllm", trained_length=4096)
        config = overridden(vllm, llama(rope_type="default", rope_theta=5e5), json.loads(made.overrides or ""))
        longest = made.max_model_len
        found, table = vllm.table(config.rope_parameters, 128, config.max_position_embeddings, longest)
        assert difference(found, method.frequencies(longest)) <= 3e-6
        derived = vllm_max_model_len(config.rope_parameters, config.max_position_embeddings)
        assert len(table) >= (longest or 0) and derived >= (longest or 0)
