"""Public fault reports that touch several parts, and the proof that every report has a test of its name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from milepost import Positions, build
from milepost.encodings.frequencies import from_config
from milepost.extend.attach import attach
from tests.tiny_models import logits, tiny

TESTS = Path(__file__).parent
REPORTS = {report["id"]: report for report in json.loads((TESTS / "data" / "public-reports.json").read_text())}


def test_every_report_has_a_test_of_its_name() -> None:
    named = {
        found.replace("_", "-")
        for path in TESTS.rglob("test_*.py")
        for found in re.findall(r"def test_\w*(PE_\d+)", path.read_text("utf-8"))
    }
    listed = set(re.findall(r"PE-\d+", "".join(path.read_text("utf-8") for path in TESTS.rglob("test_*.py"))))
    assert not set(REPORTS) - named - listed


def test_PE_16_dynamic_ntk_decodes_as_one_full_pass() -> None:
    report = REPORTS["PE-16"]
    prefill, end = report["input"]["prefill"], report["input"]["decode_to"]
    model = tiny("llama", num_hidden_layers=2, hidden_size=64, num_attention_heads=2, num_key_value_heads=2,
                 max_position_embeddings=64,
                 rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})  # fmt: skip
    ids = torch.randint(3, 64, (1, prefill), generator=torch.Generator().manual_seed(0))
    with attach(model, "own"):
        out = model.generate(ids, max_new_tokens=end - prefill, min_new_tokens=end - prefill, do_sample=False,
                             output_logits=True, return_dict_in_generate=True)  # fmt: skip
        full = logits(model, out.sequences)[:, prefill - 1 : -1]
    error = (torch.stack(out.logits, 1) - full).abs().max()
    assert float(error) < report["expected"]["max_abs_logit_diff_full_vs_cached_lt"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_PE_20_angles_keep_their_precision_whatever_the_model(dtype: torch.dtype) -> None:
    report = REPORTS["PE-20"]
    given, expected = report["input"], report["expected"]
    position, pair = given["cell"]["position"], given["cell"]["pair"]
    rope = build("rope", head_dim=given["dim"], base=given["base"]).to(dtype)
    positions = Positions.full(given["seq_len"])
    branch = rope(positions).branches[0]
    assert branch.key is not None
    unit = torch.zeros(1, 1, given["seq_len"], given["dim"])
    unit[..., pair] = 1.0
    turned = branch.key(unit, at="keys")[0, 0, position]
    allowed = expected["max_abs_cos_err_allowed_fp32"]
    assert float(turned[pair]) == pytest.approx(expected["cos"], abs=allowed)
    assert float(turned[pair + given["dim"] // 2]) == pytest.approx(expected["sin"], abs=allowed)


def test_nested_truncate_is_honoured() -> None:
    (vector,) = [
        v for v in json.loads((TESTS / "data" / "vectors-b.json").read_text())["vectors"]
        if v["method"] == "trap.hf_nested_truncate_ignored"
    ]  # fmt: skip
    pair, expected = vector["inputs"]["pair"], vector["expected"]
    block = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 4096,
        "truncate": False,
    }  # fmt: skip
    found = from_config(
        {"rope_parameters": {"full_attention": block}, "head_dim": 128, "max_position_embeddings": 32768},
        layer_type="full_attention",
    )
    assert float(found.frequencies().inv_freq[pair]) == pytest.approx(expected["if_honoured"], rel=1e-9)
