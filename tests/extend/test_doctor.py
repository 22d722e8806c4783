"""The doctor: cases from the field by id, every rule by its own example, cures, sources, and any JSON whatever."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from milepost.encodings.frequencies import from_config, usable_length
from milepost.extend.doctor import RULES, Report, SourceError, diagnose, guess_layout, pages, write_fixed
from milepost.extend.doctor.check_form import NUMBERS as DOCTOR_NUMBERS
from milepost.extend.doctor.classes import IGNORES_PARTIAL
from milepost.extend.doctor.findings import ROTARY
from milepost.extend.doctor.layout import INTERLEAVED

DATA = Path(__file__).parents[1] / "data"
CASES = json.loads((DATA / "doctor.json").read_text())
REPORTS = {case["id"]: case for case in json.loads((DATA / "public-reports.json").read_text())}
DOCS = Path(__file__).parents[2] / "docs" / "doctor"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
GOOD = {
    "model_type": "qwen2",
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "rope_theta": 1e6,
    "max_position_embeddings": 131072,
    "rope_scaling": YARN,
}

# Which rule each case is about; the cure that the case asks for is looked for in the finding's words.
EXPECTED = {
    "DOC-01": ("original-length-missing", "32768"),
    "DOC-02": ("length-mismatch", "131072"),
    "DOC-04": ("attn-factor", "attention_factor: 1"),
    "DOC-05": ("rope-type-missing", "add rope_type"),
    "DOC-07": ("original-length-missing", "8192"),
    "DOC-08": ("trained-scaling-replaced", "keep the llama3 block"),
    "DOC-10": ("dynamic-length", "max_position_embeddings: 4096"),
    "DOC-11": ("range-backwards", "beta_fast: 32, beta_slow: 1"),
    "DOC-13": ("not-a-number", "factor: 4.0"),
    "DOC-14": ("list-length", "original checkpoint"),
    "DOC-16": ("original-lengths-disagree", "32768"),
    "DOC-17": ("type-disagrees", "keep rope_type only"),
}


def errors(report: Report) -> list[str]:
    return [finding.rule for finding in report.findings if finding.severity == "error"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_case_from_the_field(case: dict[str, Any]) -> None:
    report = diagnose(case["fragment"])
    rule, fix = EXPECTED[case["id"]]
    assert report.verdict == case["verdict"]
    found = next(finding for finding in report.findings if finding.rule == rule)
    assert found.severity == case["verdict"] and fix in (found.fix or "")
    assert report.exit_code == (case["verdict"] == "error")
    if case["id"] == "DOC-14":
        assert "64 numbers" in found.words


def test_every_case_has_a_rule() -> None:
    assert set(EXPECTED) == {case["id"] for case in CASES}


CURED = ["DOC-01", "DOC-02", "DOC-04", "DOC-07", "DOC-10", "DOC-11", "DOC-13", "DOC-16", "DOC-17"]


@pytest.mark.parametrize("name", CURED)
def test_the_corrected_copy_is_free_of_the_fault(name: str) -> None:
    case = next(case for case in CASES if case["id"] == name)
    report = diagnose(case["fragment"])
    again = diagnose(report.corrected)
    assert EXPECTED[name][0] not in again.rules() and not errors(again)
    assert diagnose(case["fragment"]).findings == report.findings  # the original is untouched


def test_a_clean_file_is_clean_and_says_what_happens() -> None:
    report = diagnose(GOOD)
    assert report.verdict == "clean" and not report.findings and report.corrected is None
    said = report.engines[""]
    assert set(said) == {"transformers", "vllm", "llama.cpp", "reach"}
    assert "24 of 64 pairs as trained, slowed by up to 4; cosine and sine times 1.1386" in said["transformers"][0]
    assert "max_model_len 131072" in said["vllm"][0]
    assert "--yarn-orig-ctx 32768" in said["llama.cpp"][1] and "32768 * 4 = 131072" in said["reach"][0]


def test_engines_differ_in_words_where_they_differ_in_numbers() -> None:
    lists = {"short_factor": [1.0] * 64, "long_factor": [4.0] * 64, "attention_factor": 1.3}
    block = {"rope_type": "longrope", "original_max_position_embeddings": 4096, **lists}
    said = diagnose({**GOOD, "rope_scaling": block}).engines[""]
    assert said["transformers"][0].startswith("at 4096 tokens: 64 of 64 pairs as trained")
    assert said["transformers"][1].startswith("at 4097 tokens: 0 of 64 pairs as trained, slowed by 4 to 4")
    assert "attention_factor is not read" in said["vllm"][1] and "0 of 64" in said["vllm"][0]
    assert "rope_factors_long.weight" in said["llama.cpp"][1]
    dynamic = diagnose({**GOOD, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}).engines[""]
    assert "64 of 64 pairs as trained" in dynamic["vllm"][0] and "max_model_len 262144" in dynamic["vllm"][0]
    assert "ends at 131072" in dynamic["vllm"][1] and "max_trained_positions only" in dynamic["vllm"][2]
    assert "grow with the length" in dynamic["llama.cpp"][0]
    short = diagnose({**GOOD, "rope_scaling": {**GOOD["rope_scaling"], "factor": 2.0}}).engines[""]
    assert "ends at 65536" in short["vllm"][1] and "--max-model-len 65536" in short["vllm"][1]
    sections = diagnose({**GOOD, "rope_scaling": {**GOOD["rope_scaling"], "mrope_section": [16, 24, 24]}}).engines[""]
    assert "4 times the original length" in sections["vllm"][1]
    integer = diagnose({**GOOD, "rope_scaling": {"rope_type": "linear", "factor": 4}}).engines[""]
    assert "takes factor 4.0, and not the integer 4" in integer["vllm"][0]
    assert "at 262144 tokens" in dynamic["transformers"][1]
    unknown = diagnose({**GOOD, "rope_scaling": {"rope_type": "yran", "factor": 2.0}}).engines[""]
    assert "KeyError" in unknown["transformers"][0] and "Unknown RoPE" in unknown["vllm"][0]


def test_overrides_are_read_as_vllm_reads_them() -> None:
    checkpoint = {**BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    block = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    sizes = {"max_position_embeddings": 131072, "head_dim": 128}
    for document, lost in (({"rope_parameters": block}, True), ({"text_config": {"rope_parameters": block}}, False)):
        for known in (None, checkpoint):
            said = diagnose(json.dumps(document), checkpoint=known)
            assert any(finding.rule == "theta-lost" for finding in said.findings) == lost
    old = {**{key: value for key, value in block.items() if key != "rope_type"}, "type": "yarn", "rope_theta": 1e6}
    assert "KeyError: 'rope_type'" in diagnose(json.dumps({**sizes, "rope_parameters": old})).engines[""]["vllm"][0]
    trained = {"rope_type": "dynamic", "factor": 4.0, "max_trained_positions": 32768, "rope_theta": 1e6}
    said = diagnose(json.dumps({**sizes, "rope_parameters": trained}))
    assert not any(finding.rule == "unknown-key" for finding in said.findings)


# ---- every rule by example ------------------------------------------------------------------------------------------

BASE = {"rope_theta": 1e6, "hidden_size": 1024, "num_attention_heads": 8}
EXAMPLES: dict[str, tuple[Any, dict[str, Any]]] = {
    "not-json": ("{'rope_theta': 1}", {}),
    "not-an-object": ([1, 2], {}),
    "block-not-an-object": ({**BASE, "rope_scaling": '{"rope_type": "linear", "factor": 2.0}'}, {}),
    "two-blocks": ({**BASE, "rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}}, {}),
    "nested-mixed": ({**BASE, "rope_parameters": {"full_attention": {"rope_type": "linear"}, "factor": 2.0}}, {}),
    "nested-unknown-layer": (
        {**BASE, "layer_types": ["full_attention"], "rope_parameters": {"full_atention": {"rope_type": "default"}}},
        {},
    ),
    "rope-type-missing": ({**BASE, "rope_scaling": {"factor": 4.0}}, {}),
    "rope-type-case": ({**BASE, "rope_scaling": {**YARN, "rope_type": "YaRN"}}, {}),
    "rope-type-unknown": ({**BASE, "rope_scaling": {**YARN, "rope_type": "yran"}}, {}),
    "rope-type-one-engine": ({**BASE, "rope_scaling": {"rope_type": "ntk", "factor": 4.0}}, {}),
    "type-disagrees": ({**BASE, "rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2.0}}, {}),
    "legacy-type-key": ({**BASE, "rope_scaling": {"type": "linear", "factor": 2.0}}, {}),
    "not-a-number": ({**BASE, "rope_scaling": {"rope_type": "linear", "factor": True}}, {}),
    "number-out-of-range": ({**BASE, "rope_theta": 1}, {}),
    "factor-below-one": ({**BASE, "rope_scaling": {"rope_type": "linear", "factor": 0.25}}, {}),
    "key-missing": ({**BASE, "rope_scaling": {"rope_type": "linear"}}, {}),
    "unknown-key": ({**BASE, "rope_scaling": {**YARN, "betafast": 32}}, {}),
    "attn-factor": ({**BASE, "rope_scaling": {**YARN, "attn_factor": 0.9}}, {}),
    "attention-factor-unusual": ({**BASE, "rope_scaling": {**YARN, "attention_factor": 8.0}}, {}),
    "original-length-missing": ({**BASE, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {}),
    "original-lengths-disagree": ({**BASE, "original_max_position_embeddings": 4096, "rope_scaling": YARN}, {}),
    "length-mismatch": ({**BASE, "max_position_embeddings": 40960, "rope_scaling": YARN}, {}),
    "llama3-length": (
        {
            **BASE,
            "max_position_embeddings": 8192,
            "rope_scaling": {
                **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
                "original_max_position_embeddings": 8192,
            },
        },
        {},
    ),
    "range-backwards": ({**BASE, "rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 32}}, {}),
    "list-length": (
        {
            **BASE,
            "rope_scaling": {
                **{"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0] * 64},
                "original_max_position_embeddings": 4096,
            },
        },
        {},
    ),
    "theta-missing": ({"max_position_embeddings": 4096}, {}),
    "theta-disagrees": ({**BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, {}),
    "theta-lost": ({"rope_parameters": YARN}, {"kind": "override"}),
    "override-not-read": (
        {"rope_theta": 5e6},
        {
            "kind": "override",
            "checkpoint": {**BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        },
    ),
    "trained-scaling-replaced": (
        {**BASE, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"checkpoint": {**BASE, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}},
    ),
    "partial-ignored": ({**BASE, "model_type": "llama", "partial_rotary_factor": 0.5}, {}),
    "share-missing": ({**BASE, "rope_parameters": {"rope_type": "proportional", "rope_theta": 1e6}}, {}),
    "rotary-dim-odd": ({"rope_theta": 1e4, "head_dim": 15}, {}),
    "dynamic-length": (
        {
            **BASE,
            "max_position_embeddings": 16384,
            "rope_scaling": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 4096},
        },
        {},
    ),
    "dynamic-cache": (
        {**BASE, "max_position_embeddings": 4096, "rope_scaling": {"rope_type": "dynamic", "factor": 2}},
        {},
    ),
    "longrope-switch": (
        {
            **BASE,
            "rope_scaling": {
                **{"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64},
                "original_max_position_embeddings": 4096,
            },
        },
        {},
    ),
    "mscale-alone": ({**BASE, "rope_scaling": {**YARN, "mscale": 0.5}}, {}),
    "nested-truncate": ({**BASE, "rope_parameters": {"full_attention": {**YARN, "truncate": False}}}, {}),
    "half-precision-note": ({**BASE, "torch_dtype": "bfloat16"}, {}),
    "size-implausible": ({"rope_theta": 1e4, "head_dim": 10**8}, {}),
}
EXAMPLES |= {
    "block-not-read": ({"text_config": {**BASE, "model_type": "qwen2"}, "rope_scaling": YARN}, {}),
    "type-not-for-class": ({**GOOD, "rope_scaling": {"rope_type": "mrope", "mrope_section": [16, 24, 24]}}, {}),
    "null-value": ({**BASE, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": None}}, {}),
    "truncate-not-boolean": ({**BASE, "rope_scaling": {**YARN, "truncate": "false"}}, {}),
    "head-dim-null": ({**GOOD, "head_dim": None}, {}),
    "mrope-sections": ({**GOOD, "rope_scaling": {"rope_type": "default", "mrope_section": [32, 48, 48]}}, {}),
    "partial-disagrees": (
        {**BASE, "partial_rotary_factor": 0.5, "rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}},
        {},
    ),
    "lists-swapped": (
        {
            **BASE,
            "rope_scaling": {
                **{"rope_type": "longrope", "short_factor": [2.0] * 64, "long_factor": [1.0] * 64},
                "original_max_position_embeddings": 4096,
            },
        },
        {},
    ),
    "theta-lowered": (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        {"kind": "override", "checkpoint": BASE},
    ),
    "factor-integer": ({**BASE, "rope_scaling": {"rope_type": "linear", "factor": 4}}, {}),
}
ELSEWHERE = {
    "duplicate-key",
    *("gguf-base-missing", "gguf-scaling-incomplete", "gguf-scaling-unknown", "gguf-config-disagree"),
    *("layout-mismatch", "phases-half", "inv-freq-wrong"),
}


def test_every_rule_has_an_example_or_its_own_test() -> None:
    assert set(RULES) == set(EXAMPLES) | ELSEWHERE


@pytest.mark.parametrize("rule", EXAMPLES)
def test_rule_fires_on_its_example_and_not_on_a_clean_file(rule: str) -> None:
    document, options = EXAMPLES[rule]
    report = diagnose(document, **options)
    finding = next(finding for finding in report.findings if finding.rule == rule)
    assert finding.words and finding.severity == RULES[rule].severity
    assert rule not in diagnose(GOOD).rules()
    assert f"[{rule}]" in report.text() and rule in json.dumps(report.to_dict())


@pytest.mark.parametrize("rule", RULES)
def test_the_page_s_own_json_example_breaks_its_rule(rule: str) -> None:
    def document(text: str) -> Any:
        for form in (text, f"{{{text}}}"):
            try:
                found = json.loads(form)
            except ValueError:
                continue
            return found if isinstance(found, (dict, list)) else None
        return None

    kinds = {"theta-lowered": "override", "theta-lost": "override", "override-not-read": "override"}
    wrong, right = document(RULES[rule].wrong), document(RULES[rule].right)
    if wrong is not None and rule not in ELSEWHERE and rule not in kinds and rule != "trained-scaling-replaced":
        assert rule in diagnose({"model_type": "llama", **wrong} if isinstance(wrong, dict) else wrong).rules()
    if right is not None and rule not in ("half-precision-note", "longrope-switch"):
        assert rule not in diagnose(right).rules()


# ---- findings in detail ---------------------------------------------------------------------------------------------


def test_pe_04_the_declared_length_to_write_is_printed() -> None:
    case = REPORTS["PE-04"]["input"]
    report = diagnose(case)
    assert report.rules() == ("length-mismatch",) and "131072" in (report.findings[0].fix or "")
    assert report.corrected["max_position_embeddings"] == 131072


def test_pe_14_an_override_without_the_base_is_mended_from_the_checkpoint() -> None:
    case = REPORTS["PE-14"]
    report = diagnose(json.dumps(case["input"]["override"]), checkpoint=case["input"]["checkpoint"])
    assert report.kind == "override" and "theta-lost" in errors(report)
    assert "was 500000" in report.findings[0].words
    assert report.corrected["rope_scaling"]["rope_theta"] == 500000.0
    assert "theta-lost" not in diagnose(json.dumps(report.corrected), checkpoint=case["input"]["checkpoint"]).rules()


def test_json_on_the_command_line_is_an_override_or_a_bare_block() -> None:
    assert diagnose(json.dumps({"rope_parameters": YARN})).kind == "override"
    bare = diagnose(json.dumps({**YARN, "factor": "4"}))
    assert bare.kind == "parameters" and errors(bare) == ["not-a-number"]


def test_pe_36_classes_that_ignore_the_partial_factor_are_named() -> None:
    report = diagnose({**GOOD, "partial_rotary_factor": REPORTS["PE-36"]["input"]["partial_rotary_factor"]})
    assert errors(report) == ["partial-ignored"]
    assert not errors(diagnose({**GOOD, "model_type": "gpt_neox", "rotary_pct": 0.25}))


@pytest.mark.parametrize("model_type", sorted(IGNORES_PARTIAL))
def test_classes_said_to_ignore_the_partial_factor_do(model_type: str) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]()
    blocks = config.rope_parameters
    nested = all(isinstance(value, dict) for value in blocks.values())
    for block in blocks.values() if nested else (blocks,):
        block.update(partial_rotary_factor=0.5, rope_type="default")
        block.setdefault("rope_theta", 10000.0)
    module = __import__(
        f"transformers.models.{type(config).__module__.split('.')[-2]}.modeling_{type(config).__module__.split('.')[-2]}",
        fromlist=["x"],
    )
    rotary = next(
        value
        for name, value in vars(module).items()
        if name.endswith("RotaryEmbedding") and hasattr(value, "compute_default_rope_parameters")
    )
    layer = {"layer_type": next(iter(blocks))} if nested else {}
    inv_freq = rotary.compute_default_rope_parameters(config, **layer)[0]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert inv_freq.numel() == head_dim // 2 and transformers.__version__


def test_default_configurations_of_transformers_are_clean() -> None:
    pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    others = ("bert", "gpt2", "t5", "bloom", "vit", "segformer", "llava")
    names = [name for name in (*sorted(ROTARY), *others) if name in CONFIG_MAPPING]
    assert len(names) > 30
    assert {name: diagnose(CONFIG_MAPPING[name]()).verdict for name in names} == dict.fromkeys(names, "clean")


def test_a_model_without_rotary_positions_is_not_asked_for_a_base() -> None:
    assert diagnose({"model_type": "bert", "hidden_size": 64, "num_attention_heads": [1, 2]}).verdict == "clean"
    assert diagnose({"model_type": "llama", "hidden_size": 64}).rules() == ("theta-missing",)


@pytest.mark.parametrize("length", [131072, 32768])
def test_pe_55_the_original_length_is_proposed_from_what_the_file_says(length: int) -> None:
    case = REPORTS["PE-55"]
    report = diagnose({**case["input"], "max_position_embeddings": length})
    finding = next(finding for finding in report.findings if finding.rule == "original-length-missing")
    for word in case["expected"]["error_contains"]:
        assert word in f"{finding.words} {finding.fix}"
    assert report.corrected["rope_scaling"]["original_max_position_embeddings"] == 32768
    assert f"measures against {length}" in finding.words


def test_both_attention_keys_of_an_override_for_vllm_may_agree() -> None:
    from milepost.encodings.frequencies import Yarn
    from milepost.extend.export import export

    method = Yarn(rotary_dim=128, base=1e6, trained_length=32768, factor=4.0, attention_factor=1.0)
    made = export(method, "vllm")
    assert diagnose(made.overrides).verdict == "clean"
    wrong = json.loads(made.overrides or "")
    wrong["rope_parameters"]["attn_factor"] = 1.0
    assert "attn-factor" in errors(diagnose(json.dumps(wrong)))


def test_our_own_exports_are_clean() -> None:
    from milepost.encodings.frequencies import Linear, Llama3, Yarn
    from milepost.extend.export import export

    common: dict[str, Any] = {"rotary_dim": 128, "base": 1e6}
    for method in (
        Yarn(**common, trained_length=32768, factor=4.0),
        Llama3(**common, trained_length=8192, factor=8.0),
        Linear(**common, factor=4.0),
    ):
        made = export(method, "transformers", trained_length=getattr(method, "trained_length", 4096))
        declared = {"max_position_embeddings": made.max_position_embeddings, "head_dim": 128}
        assert diagnose({**declared, "rope_parameters": made.rope_parameters}).verdict == "clean"
        old = {"rope_theta": made.rope_theta, "rope_scaling": made.rope_scaling}
        assert diagnose({**declared, **old}).verdict == "clean"


def test_a_multimodal_file_is_read_where_its_language_model_is() -> None:
    report = diagnose({"model_type": "llava", "text_config": {**GOOD, "rope_scaling": {**YARN, "factor": "4.0"}}})
    assert report.findings[0].where == ("text_config", "rope_scaling", "factor")
    assert report.corrected["text_config"]["rope_scaling"]["factor"] == 4.0


def test_layer_types_are_examined_one_by_one() -> None:
    nested = {"full_attention": {**YARN, "rope_theta": 1e6}, "sliding_attention": {"rope_type": "linear"}}
    gemma = {**GOOD, "model_type": "gemma3_text"}
    report = diagnose({**gemma, "rope_scaling": None, "rope_parameters": nested, "rope_theta": None})
    assert errors(report) == ["key-missing"]
    assert report.findings[0].where == ("rope_parameters", "sliding_attention", "factor")
    assert set(report.engines) == {"full_attention", "sliding_attention"}


def test_flat_keys_beside_layer_types_move_into_them() -> None:
    document, _ = EXAMPLES["nested-mixed"]
    assert diagnose(document).corrected["rope_parameters"] == {"full_attention": {"rope_type": "linear", "factor": 2.0}}


# ---- sources --------------------------------------------------------------------------------------------------------


def test_a_file_a_folder_and_a_configuration_object_give_the_same(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**GOOD, "max_position_embeddings": 40960}))
    reports = [diagnose(source) for source in (tmp_path, tmp_path / "config.json", str(tmp_path))]
    assert {report.rules() for report in reports} == {("length-mismatch",)}
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(**{**json.loads(json.dumps(GOOD)), "max_position_embeddings": 40960})
    assert "length-mismatch" in diagnose(config).rules()


def test_a_corrected_copy_is_written_beside_and_never_over(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    text = json.dumps({**GOOD, "max_position_embeddings": 40960})
    path.write_text(text)
    report = diagnose(path)
    first, second = write_fixed(report), write_fixed(report)
    assert first.name == "config.fixed.json" and second.name == "config.fixed-2.json"
    assert path.read_text() == text and json.loads(first.read_text())["max_position_embeddings"] == 131072
    with pytest.raises(FileExistsError):
        write_fixed(report, path)
    with pytest.raises(ValueError, match="nothing that can be corrected"):
        write_fixed(diagnose(GOOD))


def test_nothing_to_read_is_a_mistake_of_the_call(tmp_path: Path) -> None:
    for source in (tmp_path, tmp_path / "config.json", "no-such-file.json", object()):
        with pytest.raises(SourceError):
            diagnose(source)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_is_an_error_and_the_rest_is_read(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**GOOD, "max_position_embeddings": 40960, "name": "ü"}), encoding=encoding)
    report = diagnose(path)
    assert errors(report) == ["not-json"] and "length-mismatch" in report.rules()
    assert encoding in report.findings[0].words and "UTF-8" in (report.findings[0].fix or "")
    fixed = write_fixed(report)
    assert diagnose(fixed).verdict == "clean" and json.loads(fixed.read_text(encoding="utf-8"))["name"] == "ü"


def test_a_key_that_stands_twice_is_found_where_it_matters(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    text = json.dumps(GOOD)
    path.write_text(text.replace('"rope_theta": 1000000.0', '"rope_theta": 10000.0, "rope_theta": 1000000.0'))
    report = diagnose(path)
    assert errors(report) == ["duplicate-key"] and "10000.0 and 1000000.0" in report.findings[0].words
    assert report.corrected == GOOD
    path.write_text(text.replace('"rope_theta": 1000000.0', '"rope_theta": 1000000.0, "rope_theta": 1000000.0'))
    assert diagnose(path).verdict == "clean"
    path.write_text(text.replace('"factor": 4.0', '"factor": 8.0, "factor": 4.0'))
    assert errors(diagnose(path)) == ["duplicate-key"]


def test_links_pipes_and_names_that_are_no_paths(tmp_path: Path) -> None:
    import os
    import threading

    target = tmp_path / "real.json"
    target.write_text(json.dumps(GOOD))
    link, broken, pipe = tmp_path / "link.json", tmp_path / "broken.json", tmp_path / "pipe.json"
    link.symlink_to(target)
    broken.symlink_to("nowhere.json")
    assert diagnose(link).verdict == "clean"
    for source, words in (
        (broken, "a link to nowhere.json"),
        ("/dev/null", "neither a file nor a folder"),
        ("", "is no path"),
        ("x" * 5000, "cannot be a path"),
    ):
        with pytest.raises(SourceError, match=words):
            diagnose(source)
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text(json.dumps(GOOD)))
    writer.start()
    assert diagnose(pipe).verdict == "clean"
    writer.join()


def test_inner_configurations_are_found_wherever_the_language_model_is() -> None:
    text = {**GOOD, "rope_scaling": {**YARN, "factor": "4.0"}}
    for document, path in (
        ({"model_type": "internvl_chat", "llm_config": text}, ("llm_config",)),
        ({"model_type": "qwen2_5_omni", "thinker_config": {"text_config": text}}, ("thinker_config", "text_config")),
        ({"language_config": text, "vision_config": {"rope_theta": 1}}, ("language_config",)),
    ):
        report = diagnose(document)
        assert errors(report) == ["not-a-number"]
        assert report.findings[0].where == (*path, "rope_scaling", "factor")


def test_a_block_beside_text_config_moves_into_it() -> None:
    text = {key: value for key, value in GOOD.items() if key != "rope_scaling"}
    report = diagnose({"model_type": "llava", "rope_scaling": YARN, "text_config": text})
    assert errors(report) == ["block-not-read"]
    assert report.corrected == {"model_type": "llava", "text_config": GOOD}
    saved_twice = {"model_type": "qwen2_5_vl", "rope_scaling": {**YARN, "type": "yarn"}, "text_config": GOOD}
    assert diagnose(saved_twice).verdict == "clean"
    other = {"model_type": "llava", "rope_scaling": {**YARN, "factor": 8.0}, "text_config": GOOD}
    assert errors(diagnose(other)) == ["block-not-read"]
    override = json.dumps({"rope_parameters": {**YARN, "rope_theta": 1e6}})
    report = diagnose(override, checkpoint={"model_type": "llava", "text_config": text})
    assert errors(report) == ["block-not-read"] and set(report.corrected) == {"text_config"}


def test_an_override_is_told_as_it_arrives_in_the_model() -> None:
    def said(override: Any, checkpoint: Any) -> Report:
        return diagnose(json.dumps(override), checkpoint=checkpoint)

    old = {key: value for key, value in GOOD.items() if key != "rope_scaling"}
    new = {**{k: v for k, v in old.items() if k != "rope_theta"}, "rope_parameters": {"rope_theta": 1e6}}
    for checkpoint in (old, new):
        lost = said({"rope_parameters": YARN}, checkpoint)  # the base is 10000 then, whatever the checkpoint's form
        assert errors(lost) == ["theta-lost"] and "63 pairs faster" in lost.engines[""]["vllm"][0]
        named = said({"rope_scaling": YARN}, checkpoint)
        assert errors(named) == ["theta-lost"] and "rope_theta is null" in named.engines[""]["vllm"][0]
        base = said({"rope_theta": 5e6}, checkpoint)
        assert errors(base) == ["override-not-read"] and "64 of 64 pairs as trained" in base.engines[""]["vllm"][0]
        longer = said({"max_position_embeddings": 262144}, {**checkpoint, "rope_scaling": YARN, "rope_theta": 1e6})
        assert "24 of 64 pairs as trained" in longer.engines[""]["vllm"][0]
        inside = said({"text_config": {"rope_parameters": YARN}}, {"model_type": "llava", "text_config": checkpoint})
        assert not errors(inside) and "24 of 64 pairs as trained" in inside.engines[""]["vllm"][0]


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
def test_an_override_that_takes_the_block_away_is_an_error(name: str) -> None:
    report = diagnose(json.dumps({name: None}), checkpoint=GOOD)
    assert errors(report) == ["trained-scaling-replaced", "theta-lost"] and report.corrected == {}
    meant = diagnose(json.dumps({name: None}), checkpoint=GOOD, replace_trained=True)
    assert errors(meant) == ["theta-lost"]
    assert meant.corrected == {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}


def test_a_flat_override_does_not_replace_blocks_per_layer_type() -> None:
    blocks = {layer: {"rope_type": "default", "rope_theta": 1e6} for layer in ("full_attention", "sliding_attention")}
    checkpoint = {**GOOD, "model_type": "gemma3_text", "rope_scaling": None, "rope_parameters": blocks}
    report = diagnose(json.dumps({"rope_parameters": {"rope_type": "linear", "factor": 8.0}}), checkpoint=checkpoint)
    assert "block-not-read" in errors(report)
    assert report.corrected["rope_parameters"]["full_attention"]["factor"] == 8.0
    assert report.corrected["rope_parameters"]["sliding_attention"] == blocks["sliding_attention"]


def test_an_old_type_key_in_an_override_is_an_error() -> None:
    block = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}
    override = {"rope_parameters": block, "max_position_embeddings": 131072}
    report = diagnose(json.dumps(override))
    assert errors(report) == ["key-missing"]
    assert diagnose(json.dumps(report.corrected)).verdict == "clean"


def test_faster_and_backward_pairs_are_not_called_trained() -> None:
    for factor, words in ((0.25, "pairs faster, by up to 4"), (-4.0, "pairs turning backwards")):
        assert words in diagnose({**GOOD, "rope_scaling": {**YARN, "factor": factor}}).engines[""]["transformers"][0]


def test_almost_right_names_are_named() -> None:
    for wrong in ("rope_scalling", "ropeScaling", "rope_parameter"):
        report = diagnose({**GOOD, "rope_scaling": None, wrong: YARN})
        assert errors(report) == ["unknown-key"] and "did you mean" in (report.findings[0].fix or "")
        assert diagnose(report.corrected).verdict == "clean"
    document = {key: value for key, value in GOOD.items() if key != "rope_theta"}
    assert "did you mean 'rope_theta'" in str(diagnose({**document, "ropeTheta": 1e6}).findings)
    block = {"ropeType": "yarn", "Factor": 4.0, "original_max_position_embeddings": 32768}
    report = diagnose({**GOOD, "rope_scaling": block})
    assert errors(report) == ["rope-type-missing"] and report.corrected == GOOD


def test_of_two_types_the_one_is_kept_whose_keys_are_there() -> None:
    report = diagnose({**GOOD, "rope_scaling": {**YARN, "rope_type": "default", "type": "yarn"}})
    assert errors(report) == ["type-disagrees"] and report.corrected == GOOD
    other = diagnose({**BASE, "rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2.0}})
    assert other.corrected["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_a_type_that_is_not_near_enough_is_not_replaced() -> None:
    for name in ("rope", "ntk-aware", "none", "su2"):
        report = diagnose({**GOOD, "rope_scaling": {**YARN, "rope_type": name}})
        assert "rope-type-unknown" in errors(report) and report.corrected is None
    old = diagnose({**GOOD, "rope_scaling": {"type": "ntk-aware", "factor": 4.0}})
    assert old.left == ("rope-type-unknown",) and "Corrected, except for rope-type-unknown" in old.text()


def test_alibi_asks_for_no_base_and_no_frequencies_are_told_without_rotation() -> None:
    falcon = {"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "max_position_embeddings": 2048}
    assert diagnose(falcon).rules() == ("theta-missing",)
    assert diagnose({**falcon, "alibi": True}).verdict == "clean"
    roberta = {"model_type": "roberta", "hidden_size": 768, "num_attention_heads": 12, "max_position_embeddings": 514}
    assert not diagnose(roberta).engines


def test_a_missing_original_length_is_not_guessed_for_longrope() -> None:
    lists = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    report = diagnose({**GOOD, "rope_scaling": {"rope_type": "longrope", **lists}})
    assert "original-length-missing" in errors(report) and report.corrected is None
    beyond = {"rope_type": "longrope", "original_max_position_embeddings": 262144, **lists}
    assert "never used" in str(diagnose({**GOOD, "rope_scaling": beyond}).findings)


def test_what_vllm_makes_of_a_file_goes_through_transformers() -> None:
    file = {**GOOD, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    assert "31 of 64 pairs" in diagnose(file).engines[""]["vllm"][0]  # measured against 131072
    top = {**file, "original_max_position_embeddings": 32768}
    assert "24 of 64 pairs" in diagnose(top).engines[""]["vllm"][0]
    below = diagnose({**GOOD, "rope_scaling": {**YARN, "factor": 0}}).engines[""]
    assert len(below["vllm"]) == 1 and "reach" not in below


def test_a_file_that_is_no_text_and_deep_nesting_get_a_verdict(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x00")
    assert diagnose(path).rules() == ("not-json",)
    path.write_text("[" * 100_000)
    assert diagnose(path).rules() == ("not-json",)
    wrong = json.dumps({**GOOD, "rope_scaling": {**YARN, "factor": "4.0"}})
    for depth, rules in ((150, ("not-a-number",)), (600, ("not-json",)), (900, ("not-json",))):
        path.write_text(f'{wrong[:-1]}, "x": {"[" * depth}{"]" * depth}}}')
        report = diagnose(path)
        assert report.rules() == rules and report.text() and json.dumps(report.to_dict(), indent=1)
        assert (report.corrected is None) == (rules == ("not-json",))
    inner: dict[str, Any] = {}
    for _ in range(2000):
        inner = {"x": inner}
    assert diagnose(inner).rules() == ("not-json",)


@pytest.mark.parametrize("value", [[], {}, {"a": 1}, [None], 10**400, math.nan, True, "NaN", ""])
def test_any_value_under_any_key_gets_a_verdict(value: Any) -> None:
    keys = ("model_type", "text_config", "llm_config", "layer_types", "head_dim", "rope_theta", "rotary_dim")
    blocks = ("rope_scaling", "rope_parameters", "max_position_embeddings", "original_max_position_embeddings", "alibi")
    for key in (*keys, *blocks):
        for kind in ("config", "override"):
            assert diagnose({**GOOD, key: value}, kind=kind).text()  # type: ignore[arg-type]  # one of the kinds
        assert diagnose(json.dumps({"rope_parameters": YARN}), checkpoint={**GOOD, key: value}).text()
    for key in (*YARN, "type", "mrope_section", "alpha", "truncate", "short_factor", "partial_rotary_factor"):
        assert diagnose({**GOOD, "rope_scaling": {**YARN, key: value}}).text()


def test_half_a_character_can_be_printed(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 2.0, "fac\\ud800tor": 2.0}}')
    report = diagnose(path)
    assert errors(report) == ["unknown-key"] and report.text().encode() and write_fixed(report).exists()


# ---- GGUF -----------------------------------------------------------------------------------------------------------


def write_gguf(path: Path, keys: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Path:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in keys.items():
        name = f"llama.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


KEYS: dict[str, Any] = {"context_length": 32768, "rope.dimension_count": 128, "rope.freq_base": 1e6}


def test_pe_54_a_gguf_file_without_its_base_is_an_error_and_compared_with_config_json(tmp_path: Path) -> None:
    case = REPORTS["PE-54"]
    path = write_gguf(tmp_path / "model.gguf", {k: v for k, v in KEYS.items() if k != "rope.freq_base"})
    assert errors(diagnose(path)) == ["gguf-base-missing"]
    config = {**GOOD, "rope_theta": case["input"]["rope_theta_config"], "max_position_embeddings": 32768}
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_scaling": None}))
    report = diagnose(path)
    finding = report.findings[0]
    assert "config.json says 1000000" in finding.words and "--rope-freq-base 1000000" in (finding.fix or "")
    right, wrong = (1000 * base ** (-64 / 128) for base in (1e6, 1e4))
    assert (right, wrong) == pytest.approx((case["expected"]["angle"], case["expected"]["angle_with_default"]))


def test_gguf_and_config_must_agree(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", {**KEYS, "rope.freq_base": 1e4})
    assert diagnose(path).verdict == "clean"
    (tmp_path / "config.json").write_text(json.dumps({**GOOD, "rope_scaling": None, "max_position_embeddings": 32768}))
    report = diagnose(path)
    assert report.rules() == ("gguf-config-disagree",) and "1000000" in report.findings[0].words


@pytest.mark.parametrize(
    ("keys", "rule", "words"),
    [
        ({"rope.scaling.type": "yarn"}, "gguf-scaling-incomplete", "factor is missing"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
            "gguf-scaling-incomplete",
            "measures against 32768",
        ),
        ({"rope.scaling.type": "longrope"}, "gguf-scaling-incomplete", "rope_factors_long.weight"),
        ({"rope.scaling.type": "dynamic"}, "gguf-scaling-unknown", "none of none, linear, yarn, longrope"),
        ({"rope.freq_base": 0.5}, "number-out-of-range", "above 1"),
    ],
)
def test_gguf_rules(tmp_path: Path, keys: dict[str, Any], rule: str, words: str) -> None:
    report = diagnose(write_gguf(tmp_path / "m.gguf", {**KEYS, **keys}))
    assert any(finding.rule == rule and words in finding.words for finding in report.findings)
    assert report.exit_code == 1


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rope.scaling.factor": 4.0}, "slowed by 4 to 4"),  # linear where no type is named
        ({"rope.scale_linear": 4.0}, "slowed by 4 to 4"),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, "64 of 64 pairs as trained"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, "64 of 64 pairs as trained"),
    ],
)
def test_a_gguf_factor_is_told_as_llama_cpp_reads_it(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    report = diagnose(write_gguf(tmp_path / "m.gguf", {**KEYS, **keys}))
    assert words in report.engines[""]["llama.cpp"][0]


GGUF_YARN = {
    **{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32768},
    "context_length": 131072,
}


@pytest.mark.parametrize(
    ("keys", "tensor", "rule"),
    [
        ({**GGUF_YARN, "rope.scaling.factor": 0.25}, None, "factor-below-one"),
        ({**GGUF_YARN, "context_length": 40960}, None, "length-mismatch"),
        ({**GGUF_YARN, "rope.scaling.attn_factor": 0.0}, None, "number-out-of-range"),
        ({**GGUF_YARN, "rope.scaling.yarn_beta_fast": 0.5}, None, "range-backwards"),
        ({}, torch.full((64,), -8.0), "number-out-of-range"),
        ({}, torch.full((64,), math.nan), "number-out-of-range"),
    ],
)
def test_gguf_numbers_are_in_their_range(tmp_path: Path, keys: dict[str, Any], tensor: Any, rule: str) -> None:
    tensors = {} if tensor is None else {"rope_freqs.weight": tensor}
    assert diagnose(write_gguf(tmp_path / "m.gguf", {**KEYS, **keys}, tensors)).rules() == (rule,)
    assert diagnose(write_gguf(tmp_path / "good.gguf", {**KEYS, **GGUF_YARN})).verdict == "clean"


def test_gguf_and_config_must_ask_for_the_same_frequencies(tmp_path: Path) -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 |= {"original_max_position_embeddings": 8192}
    long = {**KEYS, "context_length": 131072}
    for keys, block, same in (
        ({**KEYS, **GGUF_YARN}, YARN, True),
        (long, YARN, False),
        ({**KEYS, **GGUF_YARN}, None, False),
        ({**KEYS, **GGUF_YARN, "rope.scaling.factor": 8.0}, YARN, False),
        (long, llama3, False),  # rope_freqs.weight was lost
        (long, None, True),
    ):
        write_gguf(tmp_path / "model.gguf", keys)
        (tmp_path / "config.json").write_text(json.dumps({**GOOD, "rope_scaling": block}))
        assert ("gguf-config-disagree" not in errors(diagnose(tmp_path / "model.gguf"))) == same
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 2560, **BARE}))
    write_gguf(tmp_path / "model.gguf", long)
    assert diagnose(tmp_path / "model.gguf").verdict == "clean"  # 128 channels a head by the class, not 80


BARE = {"num_attention_heads": 32, "rope_theta": 1e6, "max_position_embeddings": 131072}


def test_gguf_tensors_are_counted_and_what_llama_cpp_does_is_said(tmp_path: Path) -> None:
    bad = write_gguf(tmp_path / "bad.gguf", KEYS, {"rope_freqs.weight": torch.ones(32)})
    assert errors(diagnose(bad)) == ["list-length"]
    good = write_gguf(tmp_path / "good.gguf", KEYS, {"rope_freqs.weight": torch.full((64,), 8.0)})
    report = diagnose(good)
    assert report.verdict == "clean" and "slowed by 8 to 8" in report.engines[""]["llama.cpp"][0]
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    assert diagnose(tmp_path / "broken.gguf").rules() == ("not-json",)


# ---- loaded models --------------------------------------------------------------------------------------------------


def tiny(**extra: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        **sizes, intermediate_size=64, vocab_size=40, max_position_embeddings=64, rope_theta=1e4, **extra
    )
    return transformers.LlamaForCausalLM(config)


def test_a_model_cast_to_half_precision_has_its_phases_named() -> None:
    model = tiny()
    assert not errors(diagnose(model))
    report = diagnose(model.to(torch.bfloat16))
    assert "phases-half" in errors(report) and "inv_freq" in report.findings[0].where[0]


def test_a_model_whose_scaling_was_dropped_is_found() -> None:
    block = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = tiny(rope_parameters={**block, "original_max_position_embeddings": 16, "rope_theta": 1e4})
    assert not errors(diagnose(model))
    rotary = model.model.rotary_emb
    rotary.inv_freq.copy_(1e4 ** (-torch.arange(8) / 8))
    report = diagnose(model)
    assert errors(report) == ["inv-freq-wrong"] and "was dropped" in report.findings[0].words


def planted(layout: str, heads: int = 4, head_dim: int = 32, hidden: int = 96, layers: int = 4) -> list[Any]:
    """Projections with the coupling that training leaves in rotated pairs, and noise."""
    generator = torch.Generator().manual_seed(3)
    pairs = head_dim // 2
    order = torch.arange(head_dim).view(2, pairs).T if layout == "half" else torch.arange(head_dim).view(pairs, 2)
    found = []
    for _ in range(layers):
        q, k = (torch.randn(heads, head_dim, hidden, generator=generator) for _ in range(2))
        first, second = order[:, 0], order[:, 1]
        k[:, second] += 0.5 * q[:, first]
        k[:, first] -= 0.5 * q[:, second]
        found.append((q.flatten(0, 1), k.flatten(0, 1)))
    return found


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_the_layout_is_read_from_coupled_channels(layout: str) -> None:
    assert guess_layout(planted(layout), 32).layout == layout
    generator = torch.Generator().manual_seed(0)
    noise = [tuple(torch.randn(128, 96, generator=generator) for _ in range(2)) for _ in range(4)]
    assert guess_layout(noise, 32).layout is None  # type: ignore[arg-type]  # pairs


def test_weights_in_the_wrong_layout_are_found_in_a_folder(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    config = {**GOOD, "model_type": "llama", "hidden_size": 96, "num_attention_heads": 4, "head_dim": 32}
    for layout, wrong in (("half", False), ("interleaved", True)):
        folder = tmp_path / layout
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        tensors = {}
        for layer, (q, k) in enumerate(planted(layout)):
            tensors[f"model.layers.{layer}.self_attn.q_proj.weight"] = q.contiguous()
            tensors[f"model.layers.{layer}.self_attn.k_proj.weight"] = k.contiguous()
        safetensors.save_file(tensors, folder / "model.safetensors")
        assert ("layout-mismatch" in errors(diagnose(folder))) == wrong
        cohere = {**config, "model_type": "cohere"}
        (folder / "config.json").write_text(json.dumps(cohere))
        assert ("layout-mismatch" in errors(diagnose(folder))) != wrong


def test_classes_said_to_interleave_do() -> None:
    pytest.importorskip("transformers")
    import importlib.util

    for model_type in sorted(INTERLEAVED):
        family = model_type.removesuffix("_text")
        spec = importlib.util.find_spec(f"transformers.models.{family}.modeling_{family}")
        assert spec is not None and spec.origin is not None
        text = Path(spec.origin).read_text()
        marks = ("0::2]", "[..., ::2]", "view_as_complex", "rotate_every_two", "rope_interleave", ":, :, :, ::2")
        assert any(mark in text for mark in marks), model_type


# ---- documentation --------------------------------------------------------------------------------------------------


def test_pages_are_the_rules() -> None:
    wanted = pages()
    assert {path.name for path in DOCS.glob("*.md")} == set(wanted)
    for name, text in wanted.items():
        assert (DOCS / name).read_text() == text, f"{name}: run python scripts/doctor_docs.py"


# ---- anything whatever ----------------------------------------------------------------------------------------------

NAMES = [
    *("rope_scaling", "rope_parameters", "rope_theta", "rope_type", "type", "factor", "head_dim", "hidden_size"),
    *("original_max_position_embeddings", "max_position_embeddings", "short_factor", "long_factor", "beta_fast"),
    *("beta_slow", "low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim", "truncate", "attention_factor"),
    *("attn_factor", "partial_rotary_factor", "layer_types", "full_attention", "text_config", "model_type", "method"),
    *("num_attention_heads", "_checkpoint_had", "torch_dtype", "alpha", "rope_local_base_freq", "qk_rope_head_dim"),
]
VALUES = [
    *("yarn", "linear", "dynamic", "longrope", "llama3", "proportional", "default", "su", "YARN", "ntk", "4.0", ""),
    *("full_attention", "llama", "bfloat16", "1e400", 0, 1, -1, 2, 4, 64, 128, 4096, 32768, 131072, 10**400, 2**60),
    *(0.25, 0.5, 1.0, 4.0, 1e-320, 1e308, math.nan, math.inf, None, True, False, [], {}, [1.0] * 64, ["x"], [[1]]),
]
KEYS_ = st.sampled_from(NAMES) | st.text(max_size=6)
LEAVES = st.sampled_from(VALUES) | st.floats() | st.integers() | st.text(max_size=8) | st.none() | st.booleans()
ANYTHING = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS_, inner, max_size=8), max_leaves=25
)


TYPES = ("yarn", "linear", "dynamic", "longrope", "llama3", "proportional", "default", "su", "YARN", "ntk", "yran")
NUMBER = st.sampled_from([0.5, 1, 1.0, 2, 4.0, 8, 32, 64, 128, 4096, 8192, 32768, 131072, 1e6, 5e5, 0.25]) | LEAVES
LIST = st.sampled_from([[1.0] * 64, [2.0] * 64, [1.0] * 32, "[1.0]*32"]) | st.lists(NUMBER, max_size=4) | LEAVES


def some(**values: Any) -> Any:
    """A dictionary with any of these keys, now and then one key more."""
    known = st.fixed_dictionaries({}, optional=values)
    return st.builds(lambda a, b: {**b, **a}, known, st.just({}) | st.dictionaries(KEYS_, LEAVES, max_size=1))


BLOCK = some(
    rope_type=st.sampled_from(TYPES) | LEAVES,
    type=st.sampled_from(TYPES),
    short_factor=LIST,
    long_factor=LIST,
    truncate=st.booleans() | LEAVES,
    **{name: NUMBER for name in NAMES if name in DOCTOR_NUMBERS},
)
CONFIG = some(
    rope_scaling=BLOCK | LEAVES,
    rope_parameters=BLOCK | st.dictionaries(st.sampled_from(["full_attention", "x", "factor"]), BLOCK | NUMBER),
    layer_types=st.just(["full_attention"]) | LEAVES,
    text_config=st.just({}) | st.builds(lambda b: {"rope_scaling": b, "hidden_size": 64}, BLOCK),
    model_type=st.sampled_from(["llama", "qwen2", "phi3", "ministral3"]) | LEAVES,
    _checkpoint_had=BLOCK | LEAVES,
    **{name: NUMBER for name in ("rope_theta", "max_position_embeddings", "head_dim", "hidden_size")},
    **{name: NUMBER for name in ("num_attention_heads", "original_max_position_embeddings", "partial_rotary_factor")},
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(CONFIG | BLOCK | ANYTHING, st.sampled_from([None, "config", "parameters", "override"]))
def test_any_json_gets_a_verdict_and_cures_come_to_an_end(document: Any, kind: Any) -> None:
    report = diagnose(document if isinstance(document, (dict, list)) else [document], kind=kind)
    assert report.verdict in ("clean", "warning", "error")
    assert report.text() and json.dumps(report.to_dict())
    if report.corrected is not None:
        again = diagnose(report.corrected, kind=report.kind)
        assert not {finding.rule for finding in again.findings if finding.changes}  # cures end, whatever they unmask


@settings(max_examples=80, deadline=None)
@given(st.text(max_size=60) | st.builds(json.dumps, CONFIG | ANYTHING))
def test_any_text_in_a_file_gets_a_verdict(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert diagnose(path).verdict in ("clean", "warning", "error")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(CONFIG | BLOCK, st.sampled_from([None, "full_attention"]), st.sampled_from([None, 128]))
def test_any_configuration_is_read_or_refused_in_words(document: Any, layer_type: Any, head_dim: Any) -> None:
    theta = None if head_dim is None else 1e4
    for call in (
        lambda: from_config(document, layer_type=layer_type, head_dim=head_dim, rope_theta=theta).frequencies(100),
        lambda: usable_length(document, layer_type=layer_type),
    ):
        try:
            call()
        except ValueError as error:
            assert str(error)


@settings(max_examples=80, deadline=None)
@given(CONFIG | BLOCK, CONFIG | BLOCK)
def test_any_checkpoint_is_survived(document: Any, checkpoint: Any) -> None:
    assert diagnose(json.dumps(document), checkpoint=checkpoint).verdict in ("clean", "warning", "error")
