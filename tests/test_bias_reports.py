"""Faults reported in public against other libraries, each by its id, on the biases of this one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from milepost import Positions, attend, build
from milepost.encodings.fire import FIRE
from milepost.kernels import alibi_slopes
from milepost.terms import DistanceBias

REPORTS = {case["id"]: case for case in json.loads((Path(__file__).parent / "data/public-reports.json").read_text())}


def case(report: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return REPORTS[report]["input"], REPORTS[report]["expected"]


def head_with_slope(slope: float) -> int:
    return alibi_slopes(8).index(slope)


def test_pe_23_nearest_keys_differ_at_two_thousand_tokens() -> None:
    given_, expected = case("PE-23")
    positions = Positions.step(given_["L"] - 1)
    last, head = given_["last_keys"], head_with_slope(given_["slope"])

    def nearest(**options: Any) -> list[float]:
        encoding = build("alibi", num_heads=8, **options).to(torch.bfloat16)
        row = encoding(positions).bias.dense()[0, head, -1]
        return (row - row[-1]).flip(0)[:last].tolist()

    assert nearest() == expected["bias_relative_to_last"]
    assert nearest(compat="falcon-bf16") == expected["bf16_absolute_form_gives"]


def test_pe_25_slopes_of_any_number_of_heads() -> None:
    _, expected = case("PE-25")
    tolerance = REPORTS["PE-25"]["tol"]
    assert alibi_slopes(6) == pytest.approx(expected["slopes_6"], abs=tolerance)
    assert alibi_slopes(12) == pytest.approx(expected["slopes_12"], abs=tolerance)
    assert alibi_slopes(40)[:2] == pytest.approx(expected["slopes_40_first"], abs=tolerance)
    assert alibi_slopes(40)[32:] == pytest.approx(expected["slopes_40_tail"], abs=tolerance)
    paper = build("alibi", num_heads=6, order="paper").kernel.start
    assert paper == pytest.approx(expected["paper_formula_6"], abs=tolerance)


def test_pe_26_first_and_last_slope() -> None:
    given_, expected = case("PE-26")
    slopes = alibi_slopes(given_["heads"])
    assert slopes == pytest.approx(expected["slopes"], abs=REPORTS["PE-26"]["tol"])
    assert slopes[0] != expected["wrong_first"]


def test_pe_28_a_decoding_step_stands_at_the_end_of_its_keys() -> None:
    given_, expected = case("PE-28")
    head = head_with_slope(given_["slope"])
    encoding = build("alibi", num_heads=8)
    step = Positions.step(given_["k_len"] - 1)
    assert encoding(step).bias.dense()[0, head, 0].tolist() == expected["row"]
    also = given_["also"]
    chunk = Positions.step(also["k_len"] - also["q_len"], queries=also["q_len"])
    row, allowed = encoding(chunk).bias.dense()[0, head, 0].tolist(), chunk.allowed()[0, 0].tolist()
    assert [b if ok else "masked" for b, ok in zip(row, allowed, strict=True)] == expected["first_row_of_4"]


@pytest.mark.parametrize("name", ["alibi", "t5", "kerple-log", "sandwich", "mep"])
def test_pe_30_a_bias_is_a_line_per_head(name: str) -> None:
    given_, expected = case("PE-30")
    length = given_["max_len"]
    encoding = build(name, num_heads=given_["heads"])
    assert sum(t.numel() for t in (*encoding.parameters(), *encoding.buffers())) < 1000
    for causal in (True, False):
        bias = encoding(Positions.full(length, causal=causal)).bias
        assert isinstance(bias, DistanceBias)
        held = bias.table.untyped_storage().nbytes()
        assert held <= 2 * length * given_["heads"] * 4 < expected["bytes_allowed"] < expected["bytes_full"]


def test_pe_32_bias_and_mask_meet_in_float32() -> None:
    given_, expected = case("PE-32")
    assert expected["softmax_of_all_masked_row_must_be_finite"]
    q, k, v = torch.randn(3, 1, 8, 2048, 8).half()
    mask = torch.ones(1, 2048, dtype=torch.bool)
    mask[0, :100] = False
    positions = Positions.from_mask(mask, side="left")
    found = attend(q, k, v, positions, build("alibi", num_heads=8, slope_scale=16)(positions))
    assert found.isfinite().all() and (found[:, :, :100] == 0).all()
    # The naive sum in the reporter's dtype does overflow.
    naive = torch.tensor(given_["bias"], dtype=torch.float16) + given_["mask_value"]
    assert [str(x).removesuffix(".0") for x in naive.tolist()] == expected["naive_sum"]


@pytest.mark.parametrize("name", ["alibi", "t5", "kerple-log", "sandwich", "fire", "mep", "tisa"])
def test_pe_33_left_padding_changes_nothing(name: str) -> None:
    given_, expected = case("PE-33")
    pad, length = given_["pad_left"], given_["length"]
    encoding = build(name, num_heads=4)
    mask = torch.ones(1, pad + length, dtype=torch.bool)
    mask[0, :pad] = False
    padded = Positions.from_mask(mask, side="left")
    assert int(padded.query[0, pad]) == expected["position_ids_first_real_token"]
    q, k, v = torch.randn(3, 1, 4, pad + length, 8)
    alone = Positions.full(length)
    found = attend(q, k, v, padded, encoding(padded))[:, :, pad:]
    wanted = attend(q[:, :, pad:], k[:, :, pad:], v[:, :, pad:], alone, encoding(alone))
    torch.testing.assert_close(found, wanted, atol=expected["tol"], rtol=0)


@pytest.mark.parametrize("name", ["alibi", "t5", "kerple-log", "sandwich", "fire", "mep", "tisa"])
def test_pe_34_packed_documents_start_anew(name: str) -> None:
    given_, expected = case("PE-34")
    positions = Positions.packed([3, 2])
    assert positions.key[0].tolist() == given_["position_ids"]
    assert positions.key_document is not None and positions.key_document[0].tolist() == given_["doc_ids"]
    distance, allowed = positions.distance()[0, 4].tolist(), positions.allowed()[0, 4].tolist()
    assert [d if ok else "masked" for d, ok in zip(distance, allowed, strict=True)] == expected["bias_distance_row4"]
    encoding = build(name, num_heads=4)
    one = torch.randn(3, 1, 4, 7, 8)
    q, k, v = torch.cat([one, one], dim=3)
    twice = Positions.packed([7, 7])
    out = attend(q, k, v, twice, encoding(twice))
    torch.testing.assert_close(out[:, :, :7], out[:, :, 7:], atol=1e-6, rtol=1e-5)
    alone = Positions.full(7)
    torch.testing.assert_close(out[:, :, 7:], attend(*one, alone, encoding(alone)), atol=1e-6, rtol=1e-5)


@given(raw=st.lists(st.floats(-1e4, 1e4, width=32), min_size=3, max_size=3))
@pytest.mark.parametrize("name", ["kerple-log", "kerple-power", "kerple-3param"])
def test_pe_44_kerple_with_any_raw_parameters(name: str, raw: list[float]) -> None:
    encoding = build(name, num_heads=1)
    with torch.no_grad():
        for parameter, value in zip(encoding.parameters(), raw, strict=False):
            parameter.fill_(value)
    bias = encoding(Positions.step(2000)).bias.table
    assert bias.isfinite().all() and (bias <= 0).all() and (bias.diff() <= 0).all()
    bias.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in encoding.parameters())


def test_pe_44_kerple_at_the_reported_parameters() -> None:
    given_, expected = case("PE-44")
    encoding = build("kerple-log", num_heads=1)

    def at(r1: float, r2: float) -> Tensor:
        with torch.no_grad():
            encoding.kernel.p.fill_(r1)
            encoding.kernel.a.fill_(r2)
        return encoding.kernel.log_kernel(torch.tensor(given_["distances"]))[0]

    bias = at(**given_["raw"])
    assert bias.isfinite().all() and (bias <= 0).all() and (bias.diff() <= 0).all()
    naive = -given_["raw"]["r1"] * torch.log(1 + given_["raw"]["r2"] * torch.tensor(given_["distances"]))
    assert math.isinf(naive[3]) and math.isnan(naive[4])
    assert at(1.0, 1.0).tolist() == pytest.approx(expected["example_r1_1_r2_1"], rel=1e-6)


def test_pe_45_fire_divides_nothing_by_nothing() -> None:
    given_, expected = case("PE-45")

    def normalized(threshold: float | None, position: Tensor) -> list[float]:
        encoding = FIRE(2, c=given_["c"], threshold=threshold, eps=0.0).double()
        key = torch.full_like(position, given_["j"])
        bias = encoding(Positions.full(1).mapped(position, key)).bias.dense()
        assert bias.isfinite().all()
        bias.sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in encoding.parameters())
        return encoding.normalized(position, key)[:, 0, 0].tolist()

    query = torch.tensor(given_["i"])[:, None]
    assert normalized(given_["L"], query) == pytest.approx(expected["normalised"], abs=REPORTS["PE-45"]["tol"])
    assert normalized(None, query) == pytest.approx(expected["normalised"], abs=REPORTS["PE-45"]["tol"])
    assert normalized(512.0, query) == pytest.approx(expected["with_L_512"], abs=REPORTS["PE-45"]["tol"])


def test_pe_45_fire_reads_positions_and_not_row_numbers() -> None:
    encoding = FIRE(2)
    whole = encoding(Positions.full(1001)).bias.dense()[0, :, 1000]
    torch.testing.assert_close(encoding(Positions.step(1000)).bias.dense()[0, :, 0], whole)


@pytest.mark.parametrize("name", ["t5", "kerple-log", "toeplitz", "mep-parameterized"])
def test_pe_62_a_learned_bias_gets_the_gradient_of_dense_attention(name: str) -> None:
    given_, expected = case("PE-62")
    heads, length, width = given_["H"], given_["L"], given_["D"]
    options = {"toeplitz": {"trained_length": length}, "mep-parameterized": {"head_dim": width}}.get(name, {})
    encoding = build(name, num_heads=heads, **options)
    q, k, v = torch.randn(3, given_["B"], heads, length, width)
    positions = Positions.full(length, causal=False)

    def gradients(attention: Any) -> list[Tensor]:
        encoding.zero_grad()
        attention().square().sum().backward()
        return [p.grad.clone() for p in encoding.parameters()]

    def dense() -> Tensor:
        bias = encoding(positions).bias.dense().double()
        weights = torch.softmax(q.double() @ k.double().mT / width**0.5 + bias, dim=-1)
        return weights @ v.double()

    wanted = gradients(dense)
    found = gradients(lambda: attend(q, k, v, positions, encoding(positions)))
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=expected["rtol"], atol=1e-5)
        assert mine.norm() > 0 and expected["grad_norm_nonzero"]


@pytest.mark.parametrize("name", ["alibi", "t5", "kerple-log", "mep"])
def test_pe_63_one_graph_for_attention_at_all_lengths(name: str) -> None:
    given_, expected = case("PE-63")
    encoding = build(name, num_heads=2)
    assert name.partition("-")[0] in expected["methods"]

    def step(q: Tensor) -> Tensor:
        positions = Positions.full(q.shape[2])
        return attend(q, q, q, positions, encoding(positions))

    torch.compiler.reset()
    compiled = torch.compile(
        step, backend=given_["backend"], fullgraph=given_["fullgraph"], dynamic=given_["dynamic"]
    )
    for length in given_["lengths"]:
        q = torch.randn(1, 2, length, 8)
        torch.testing.assert_close(compiled(q), step(q))
    assert 1 <= len(_debug_get_cache_entry_list(step)) <= expected["graphs_max"]
