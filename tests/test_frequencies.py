"""Frequency methods: published numbers, identities between methods, transformers' own functions, known faults."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from milepost.encodings.frequencies import (
    ABF,
    METHODS,
    NTK,
    ByParts,
    Clex,
    ClexTable,
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
    check_inv_freq,
    dynamic_ntk,
    fope_kept_pairs,
    full_turn_pairs,
    log_n_scale,
    method_class,
    ntk_path,
)

DATA = Path(__file__).parent / "data"
VECTORS = json.loads((DATA / "vectors-b.json").read_text())["vectors"]
REPORTS = {case["id"]: case for case in json.loads((DATA / "public-reports.json").read_text())}

LLAMA2 = {"rotary_dim": 128, "base": 10000.0}


def close(found: Tensor | float, wanted: Tensor | float | list[float], tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=torch.float64),
        torch.as_tensor(wanted, dtype=torch.float64),
        rtol=tolerance,
        atol=1e-300,
    )


# ---- published numbers ----------------------------------------------------------------------------------------------


def _d(i: dict[str, Any]) -> dict[str, Any]:
    return {"rotary_dim": i["dim"], "base": float(i["base"])}


def _partial(i: dict[str, Any]) -> FrequencyMethod:
    return Default(rotary_dim=int(i["head_dim"] * i["partial_rotary_factor"]), base=float(i["base"]))


FREQUENCY_VECTORS: dict[str, Any] = {
    "rope.inv_freq": lambda i: Default(**_d(i)),
    "rope.partial_inv_freq": _partial,
    "p_rope.inv_freq": lambda i: Proportional(rotary_dim=i["head_dim"], base=i["base"], proportion=i["p"]),
    "pi.inv_freq": lambda i: Linear(**_d(i), factor=i["factor"]),
    "ntk.inv_freq": lambda i: NTK(**_d(i), factor=i["factor"]),
    "ntk_mixed.inv_freq": lambda i: NTK(**_d(i), factor=i["k"], mixed_b=i["b"]),
    "ntk_fixed.inv_freq": lambda i: NTK(**_d(i), factor=i["k"], mixed_b=i["b"]),
    "dynamic_ntk.inv_freq_hf": lambda i: dynamic_ntk(**_d(i), trained_length=i["orig"], factor=i["factor"]),
    "ntk_by_parts.inv_freq_paper": lambda i: ByParts(
        **_d(i), factor=i["factor"], trained_length=i["orig"], alpha=i["alpha"], beta=i["beta"]
    ),
    "yarn.inv_freq": lambda i: Yarn(**_d(i), factor=i["factor"], trained_length=i["orig"], truncate=i["truncate"]),
    "ntk_by_parts_old.inv_freq": lambda i: PartNTK(
        **_d(i), factor=i["factor"], trained_length=i["orig"], beta=tuple(i["beta"]), gamma=tuple(i["gamma"])
    ),
    "llama3.inv_freq": lambda i: Llama3(
        **_d(i),
        factor=i["factor"],
        trained_length=i["orig"],
        low_freq_factor=i["low"],
        high_freq_factor=i["high"],
    ),
    "longrope.inv_freq": lambda i: LongRope(
        **_d(i),
        trained_length=i["orig"],
        short_factor=(1.0,) * (i["dim"] // 2),
        long_factor=tuple(1 + p / 8 for p in range(i["dim"] // 2)),
    ),
    "truncated_basis.inv_freq": lambda i: Truncated(**_d(i), trained_length=i["truncate"]),
    "power_basis.inv_freq": lambda i: Power(**_d(i), exponent=i["power"]),
    "resonance.inv_freq": lambda i: Resonance(method=Default(**_d(i))),
    "clex.inv_freq_at_init": lambda i: Clex(**_d(i), trained_length=64, max_factor=4, time_dt=1.0),
}

VALUE_VECTORS: dict[str, Any] = {
    "ntk.base": lambda i: NTK(**_d(i), factor=i["factor"]).scaled_base(),
    "dynamic_ntk.base_hf": lambda i: _base_at(dynamic_ntk(**_d(i), trained_length=i["orig"], factor=i["factor"]), i),
    "dynamic_ntk.base_paper": lambda i: _base_at(dynamic_ntk(**_d(i), trained_length=i["orig"], form="paper"), i),
    "dynamic_ntk.partial": lambda i: _base_at(
        dynamic_ntk(
            rotary_dim=int(i["head_dim"] * i["partial"]),
            base=i["base"],
            trained_length=i["orig"],
            factor=i["factor"],
        ),
        i,
    ),
    "yarn.range": lambda i: _range(Yarn(**_d(i), trained_length=i["orig"], factor=2.0)),
    "yarn.attention_factor": lambda i: Yarn(**LLAMA2, trained_length=4096, factor=i["factor"]).factors()[0],
    "yarn.attention_factor_deepseek": lambda i: dict(
        zip(("cos_sin", "softmax_scale_multiplier"), Yarn(**LLAMA2, trained_length=4096, **i).factors(), strict=True)
    ),
    "yarn.attention_factor_mscale_only": lambda i: {
        "hf": Yarn(**LLAMA2, trained_length=4096, **i, mscale_rule="transformers").factors()[0],
        "deepseek_reference": Yarn(**LLAMA2, trained_length=4096, **i).factors()[0],
    },
    "longrope.attention_factor": lambda i: (
        _longrope(trained_length=i["orig"], max_length=i["max"]).frequencies().attention_factor
    ),
    "longrope.dynamic_factor": lambda i: (
        1
        / float(
            _longrope(
                trained_length=i["orig"],
                max_length=i["max"],
                growth="dynamic",
                long_factor=(i["lambda_i"],) * 64,
            )
            .frequencies(i["seq_len"])
            .inv_freq[0]
        )
    ),
    "resonance.wavelengths": lambda i: Resonance(method=Default(**_d(i))).wavelengths(),
    "clex.d_freq_dt": lambda i: ntk_path(
        Default(**_d(i)).plain(), torch.tensor([float(i["t"])], dtype=torch.float64), i["dim"]
    )[1],
    "hope.n_fast_pairs": lambda i: HoPECut(**_d(i), trained_length=i["train_len"]).kept_pairs,
    "fope.kept_pairs": lambda i: dict(
        zip(("input_dim", "output_dim"), fope_kept_pairs(i["head_dim"], i["base"], i["L"]), strict=True)
    ),
    "rerope.logn_scale": lambda i: log_n_scale(torch.tensor(i["pos_plus_1"]) - 1, i["train_len"]),
}


def _base_at(method: Dynamic, inputs: dict[str, Any]) -> Any:
    assert isinstance(method.method, NTK)
    base = float(torch.as_tensor(method.method.scaled_base(method.stretch(inputs["seq_len"]))))
    return {"base": base} if "partial" in inputs else base


def _range(method: Yarn) -> dict[str, float]:
    low, high = method.correction_range()
    exact = Yarn(**LLAMA2, trained_length=method.trained_length, factor=2.0, truncate=False).correction_range()
    return {"low": low, "high": high, "low_real": exact[0], "high_real": exact[1]}


def _longrope(**options: Any) -> LongRope:
    lists = {"short_factor": (1.0,) * 64, "long_factor": (4.0,) * 64}
    return LongRope(**{**LLAMA2, **lists, **options})


def _cases(table: dict[str, Any]) -> list[Any]:
    found = [v for v in VECTORS if v["method"] in table]
    assert {v["method"] for v in found} == set(table), "a vector of the table is missing from the data"
    return [pytest.param(v, id=v["id"]) for v in found]


@pytest.mark.parametrize("vector", _cases(FREQUENCY_VECTORS))
def test_frequency_vector(vector: dict[str, Any]) -> None:
    inputs, expected = vector["inputs"], vector["expected"]
    method = FREQUENCY_VECTORS[vector["method"]](inputs)
    length = inputs.get("seq_len", method.trained_length * inputs["t"] if "t" in inputs else None)
    inv_freq = method.frequencies(length).inv_freq
    assert inv_freq.dtype == torch.float64
    for key, wanted in expected.items():
        if key.isdigit():
            close(inv_freq[int(key)], wanted)
        elif key in ("n_nonzero", "n"):
            assert int((inv_freq != 0).sum()) == wanted
        else:
            facts = {
                "a": method.thresholds()[0],
                "cutoff": method.thresholds()[1],
                "rho": method.thresholds()[2],
                "n_zero": int((inv_freq == 0).sum()),
                "n_rho": int((inv_freq == method.thresholds()[2]).sum()),
                "n_kept": int((inv_freq == method.plain()).sum()),
            }
            close(facts[key], wanted)


@pytest.mark.parametrize("vector", _cases(VALUE_VECTORS))
def test_value_vector(vector: dict[str, Any]) -> None:
    found, expected = VALUE_VECTORS[vector["method"]](vector["inputs"]), vector["expected"]
    if isinstance(expected, dict):
        for key, wanted in expected.items():
            close(found[int(key)] if key.isdigit() else found[key], wanted)
    else:
        close(found, expected)


def test_no_frequency_vector_is_left_out() -> None:
    other = "xpos rope2d mrope 3d_rpe vo_rope pope lampe lrpe self_extend stair mesa leaky irope trap rope_base small"
    other += " extrapolation critical rope.apply rope.layout rope.score rerope.rel"
    here = {*FREQUENCY_VECTORS, *VALUE_VECTORS}
    left = {v["method"] for v in VECTORS} - here
    assert not [m for m in left if not m.startswith(tuple(other.split()))]


# ---- identities between methods -------------------------------------------------------------------------------------


def test_llama3_is_by_parts_with_the_rotations_ramp() -> None:
    common = {"rotary_dim": 128, "base": 5e5, "trained_length": 8192, "factor": 8.0}
    wanted = ByParts(**common, alpha=1.0, beta=4.0).frequencies().inv_freq
    close(Llama3(**common).frequencies().inv_freq, wanted)


def test_yarn_without_its_temperature_is_by_parts_with_the_index_ramp() -> None:
    common = {**LLAMA2, "trained_length": 4096, "factor": 8.0}
    yarn = Yarn(**common, attention_factor=1.0).frequencies()
    close(yarn.inv_freq, ByParts(**common, ramp="index").frequencies().inv_freq)
    assert yarn.attention_factor == yarn.softmax_factor == 1.0
    rotations = Yarn(**common, ramp="rotations").frequencies().inv_freq
    close(rotations, ByParts(**common).frequencies().inv_freq)
    assert float((rotations / yarn.inv_freq - 1).abs().max()) > 0.5  # the two ramps are far apart in the middle


def test_hope_is_p_rope_with_its_cut() -> None:
    hope = HoPECut(**LLAMA2, trained_length=4096)
    p_rope = Proportional(**LLAMA2, proportion=hope.kept_pairs / 64)
    assert hope.kept_pairs == p_rope.rotated_pairs == full_turn_pairs(128, 10000.0, 4096)
    close(hope.frequencies().inv_freq, p_rope.frequencies().inv_freq)


def test_ntk_keeps_the_first_pair_and_divides_the_last_as_pi_does() -> None:
    ntk, pi = NTK(**LLAMA2, factor=8.0).frequencies().inv_freq, Linear(**LLAMA2, factor=8.0).frequencies().inv_freq
    assert ntk[0] == 1.0
    close(ntk[-1], pi[-1])
    close(ABF(**LLAMA2, new_base=float(NTK(**LLAMA2, factor=8.0).scaled_base())).frequencies().inv_freq, ntk)


def test_clex_at_the_start_is_dynamic_ntk_with_factor_2_at_whole_stretches() -> None:
    clex = Clex(**LLAMA2, trained_length=64, max_factor=8, time_dt=0.5)
    hf = dynamic_ntk(**LLAMA2, trained_length=64, factor=2.0)
    lengths = torch.tensor([10, 64, 128, 320, 512])
    close(clex.frequencies(lengths).inv_freq.detach(), hf.frequencies(lengths).inv_freq)


@pytest.mark.parametrize("name", ["linear", "ntk", "by_parts", "part_ntk", "yarn", "proportional", "power"])
def test_factor_1_changes_nothing(name: str) -> None:
    extra = {"by_parts": {"trained_length": 4096}, "yarn": {"trained_length": 4096}, "power": {"exponent": 1e-12}}
    extra |= {"part_ntk": {"trained_length": 4096}, "proportional": {"proportion": 1.0}}
    found = METHODS[name](**LLAMA2, **extra.get(name, {})).frequencies()
    close(found.inv_freq, Default(**LLAMA2).frequencies().inv_freq)
    assert found.attention_factor == 1.0


@pytest.mark.parametrize(
    "inner",
    [Linear(**LLAMA2), NTK(**LLAMA2), ByParts(**LLAMA2, trained_length=64), Yarn(**LLAMA2, trained_length=64)],
    ids=lambda m: m.name,
)
def test_dynamic_is_the_fixed_method_at_the_row_s_own_stretch(inner: Any) -> None:
    own = None if hasattr(inner, "trained_length") else 64
    found = Dynamic(method=inner, trained_length=own).frequencies(torch.tensor([3, 64, 96, 256]))
    for row, factor in enumerate((1.0, 1.0, 1.5, 4.0)):
        wanted = type(inner)(**{**inner.__dict__, "factor": factor}).frequencies()
        close(found.inv_freq[row], wanted.inv_freq)
        attention = torch.as_tensor(found.attention_factor, dtype=torch.float64).expand(4, 1)[row, 0]
        close(attention, wanted.attention_factor)


def test_dynamic_never_falls_below_the_factor_a_model_was_tuned_for() -> None:
    tuned = Dynamic(method=Yarn(**LLAMA2, trained_length=64, factor=4.0))
    close(tuned.stretch(torch.tensor([10, 128, 256, 512])).squeeze(-1), [4.0, 4.0, 4.0, 8.0])


def test_resonance_rounds_over_any_method_and_leaves_stopped_pairs_alone() -> None:
    method = Resonance(method=HoPECut(**LLAMA2, trained_length=4096))
    waves, inv_freq = method.wavelengths(), method.frequencies().inv_freq
    assert torch.equal(inv_freq[46:], torch.zeros(18, dtype=torch.float64)) and bool(torch.isinf(waves[46:]).all())
    close(2 * math.pi / inv_freq[:46], waves[:46])
    assert torch.equal(waves[:46], waves[:46].round())
    yarn = Yarn(**LLAMA2, trained_length=4096, factor=8.0)
    assert Resonance(method=yarn).frequencies().attention_factor == yarn.factors()[0]


def test_log_n_heats_rows_by_their_own_length() -> None:
    method = LogN(method=Default(**LLAMA2), trained_length=4096)
    found = method.frequencies(torch.tensor([1, 4096, 8192, 16384]))
    close(torch.as_tensor(found.softmax_factor)[:, 0], log_n_scale(torch.tensor([0, 4095, 8191, 16383]), 4096))
    assert found.inv_freq.shape == (64,)


def test_longrope_dynamic_runs_from_the_plain_ladder_to_the_long_list() -> None:
    long = tuple(1 + p / 8 for p in range(64))
    method = _longrope(trained_length=64, max_length=256, long_factor=long, growth="dynamic")
    rows = method.frequencies(torch.tensor([16, 64, 256, 4096])).inv_freq
    plain = Default(**LLAMA2).frequencies().inv_freq
    wanted = plain / torch.tensor(long, dtype=torch.float64)
    for row, expected in zip(rows, (plain, plain, wanted, wanted), strict=True):
        close(row, expected)


def test_longrope_mscale_lists_switch_row_by_row() -> None:
    method = _longrope(trained_length=64, short_mscale=1.1, long_mscale=1.25)
    found = torch.as_tensor(method.frequencies(torch.tensor([64, 65])).attention_factor)
    close(found[:, 0], [1.1, 1.25])


# ---- shapes, rows, purity, compilation ------------------------------------------------------------------------------

LENGTH_DEPENDENT = {
    "dynamic_hf": dynamic_ntk(rotary_dim=32, base=10000.0, trained_length=64, factor=4.0),
    "dynamic_yarn": Dynamic(method=Yarn(rotary_dim=32, base=10000.0, trained_length=64)),
    "longrope": LongRope(
        rotary_dim=32, base=10000.0, trained_length=64, short_factor=(1.0,) * 16, long_factor=(4.0,) * 16, factor=4.0
    ),
    "resonance": Resonance(method=dynamic_ntk(rotary_dim=32, base=10000.0, trained_length=64, factor=2.0)),
    "clex_table": Clex(rotary_dim=32, base=10000.0, trained_length=64, max_factor=4, time_dt=1.0).frozen(),
}
STATIC = {
    "default": Default(rotary_dim=32, base=10000.0),
    "linear": Linear(rotary_dim=32, base=10000.0, factor=4.0),
    "yarn": Yarn(rotary_dim=32, base=10000.0, trained_length=64, factor=4.0),
    "llama3": Llama3(rotary_dim=32, base=10000.0, trained_length=64, factor=4.0),
}
ALL = {**LENGTH_DEPENDENT, **STATIC}


@pytest.mark.parametrize("name", LENGTH_DEPENDENT)
def test_each_row_has_its_own_length(name: str) -> None:
    method = LENGTH_DEPENDENT[name]
    assert method.length_dependent and isinstance(method, FrequencyMethod)
    rows = method.frequencies(torch.tensor([30, 64, 65, 200])).inv_freq
    assert rows.shape == (4, 16)
    for row, length in zip(rows, (30, 64, 65, 200), strict=True):
        assert torch.equal(row, method.frequencies(length).inv_freq)
        assert torch.equal(row, method.frequencies(torch.tensor(length)).inv_freq)
        assert torch.equal(row, method.frequencies(torch.tensor([length])).inv_freq[0])
    assert torch.equal(rows[1], method.frequencies().inv_freq)  # None is the trained length
    assert not torch.equal(rows[1], rows[3])


@pytest.mark.parametrize("name", STATIC)
def test_static_methods_answer_one_row(name: str) -> None:
    method = STATIC[name]
    assert not method.length_dependent
    assert torch.equal(method.frequencies(torch.tensor([30, 200])).inv_freq, method.frequencies().inv_freq), (
        "a static method reads no length"
    )


@pytest.mark.parametrize("name", ALL)
def test_methods_are_immutable_and_hashable(name: str) -> None:
    method = ALL[name]
    assert hash(method) == hash(method)
    with pytest.raises((AttributeError, TypeError)):
        method.base = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("name", [*ALL, "clex", "log_n"])
def test_pe_63_one_graph_serves_every_length(name: str) -> None:
    """At most two graphs and no break over many lengths and batch sizes, with fullgraph."""
    more = {
        "clex": Clex(rotary_dim=32, base=10000.0, trained_length=64, max_factor=4, time_dt=1.0),
        "log_n": LogN(method=STATIC["yarn"], trained_length=64),
    }
    case, method = REPORTS["PE-63"], {**ALL, **more}[name]
    graphs = []

    def backend(graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    def call(length: Tensor) -> Tensor:
        found = method.frequencies(length)
        return found.inv_freq * found.attention_factor * found.softmax_factor

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=backend)
    for longest in case["input"]["lengths"]:
        lengths = torch.tensor([16, longest, longest + 1])
        assert torch.equal(compiled(lengths), call(lengths))
    assert len(graphs) <= case["expected"]["graphs_max"]


@pytest.mark.parametrize("name", ["dynamic_hf", "longrope", "yarn"])
def test_a_python_int_length_compiles_to_at_most_two_graphs(name: str) -> None:
    method, graphs = ALL[name], []

    def backend(graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda x: method.frequencies(x.shape[0]).inv_freq, dynamic=True, backend=backend)
    for length in (32, 64, 80, 100, 200):
        assert torch.equal(compiled(torch.empty(length)), method.frequencies(length).inv_freq)
    assert len(graphs) <= 2


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 64).map(lambda p: 2 * p),
    st.floats(1.5, 1e8),
    st.floats(1.0, 1e3),
    st.integers(16, 1_000_000),
    st.integers(1, 10_000_000),
)
def test_frequencies_are_finite_and_never_faster_than_trained(
    dim: int, base: float, factor: float, trained: int, length: int
) -> None:
    common = {"rotary_dim": dim, "base": base, "factor": factor}
    plain = Default(rotary_dim=dim, base=base).frequencies().inv_freq
    methods: list[FrequencyMethod] = [
        Linear(**common),
        ByParts(**common, trained_length=trained),
        Yarn(**common, trained_length=trained),
        Llama3(**common, trained_length=trained),
        Truncated(**common, trained_length=trained, a=0.0, rho=0.0),
        Power(**common, exponent=0.5),
        HoPECut(rotary_dim=dim, base=base, trained_length=trained),
    ]
    if dim > 2:
        methods += [NTK(**common), PartNTK(**common, trained_length=trained)]
        methods += [dynamic_ntk(**common, trained_length=trained, form=form) for form in ("paper", "hf")]
    for method in methods:
        inv_freq = method.frequencies(length).inv_freq
        assert bool(torch.isfinite(inv_freq).all()), method
        assert bool((inv_freq <= plain * (1 + 1e-12)).all()) and bool((inv_freq >= 0).all()), method


# ---- CLEX -----------------------------------------------------------------------------------------------------------


def test_clex_solution_is_torchdiffeq_s_of_the_published_equation() -> None:
    torchdiffeq = pytest.importorskip("torchdiffeq")
    torch.manual_seed(0)
    clex = Clex(rotary_dim=16, base=10000.0, trained_length=64, max_factor=4, time_dt=0.02)
    torch.nn.init.normal_(clex.down, std=0.02)
    theta = clex.ladder.plain()

    def published(t: Tensor, z: Tensor) -> Tensor:
        path, slope = ntk_path(theta, t.reshape(1), 16)
        hidden = torch.nn.functional.silu((z + path.log()).float() @ clex.up)
        return (hidden @ clex.down).double() + slope / path

    grid = torch.tensor([1.0, 2.5], dtype=torch.float64)
    options = {"step_size": 0.005}
    wanted = torchdiffeq.odeint(published, theta.log(), grid, method="rk4", options=options)[1].exp()
    found = clex.frequencies(time=torch.tensor([2.5], dtype=torch.float64)).inv_freq[0]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    assert (
        float((found.detach() / ntk_path(theta, grid[1:], 16)[0] - 1).abs().max()) > 1e-2
    )  # the network did something


def test_clex_trains_and_its_frozen_table_serves_the_same_numbers() -> None:
    clex = Clex(rotary_dim=16, base=10000.0, trained_length=64, max_factor=3, time_dt=0.5)
    optimizer = torch.optim.SGD(clex.parameters(), lr=1e-4)
    time = clex.sample_time(4, generator=torch.Generator().manual_seed(1))
    assert bool((time >= 1).all()) and bool((time <= 3).all())
    before = clex.frequencies(time=time).inv_freq.detach()
    for _ in range(2):  # down is 0 at first: up moves from the second step on
        clex.frequencies(time=time).inv_freq.log().sum().backward()
        optimizer.step()
    assert clex.up.grad is not None and float(clex.up.grad.abs().sum()) > 0
    assert not torch.allclose(before, clex.frequencies(time=time).inv_freq.detach())
    table, lengths = clex.frozen(), torch.tensor([1, 64, 65, 192, 500])
    assert isinstance(table, ClexTable)
    close(table.frequencies(lengths).inv_freq, clex.frequencies(lengths).inv_freq.detach(), 1e-5)


def test_clex_ignores_autocast_and_half_precision_weights() -> None:
    clex = Clex(rotary_dim=16, base=10000.0, trained_length=64, max_factor=2, time_dt=1.0)
    torch.nn.init.normal_(clex.down, std=0.1)
    wanted = clex.frequencies(128).inv_freq
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(clex.frequencies(128).inv_freq, wanted)
    assert clex.bfloat16().frequencies(128).inv_freq.dtype == torch.float64


def test_clex_positions_are_sorted_distinct_and_in_range() -> None:
    clex = Clex(rotary_dim=16, base=10000.0, trained_length=64, max_factor=4)
    rows = clex.sample_positions(torch.tensor([1.0, 4.0]), 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rows[0], torch.arange(64))
    assert bool((rows[1].diff() > 0).all()) and 64 <= int(rows[1].max()) < 256
    with pytest.raises(ValueError, match="do not fit below 64"):
        clex.sample_positions(torch.tensor([1.0]), 65)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Default(rotary_dim=3, base=10000.0), "even"),
        (lambda: Default(rotary_dim=4, base=1.0), "above 1"),
        (lambda: Default(rotary_dim=4, base=float("nan")), "finite"),
        (lambda: Linear(**LLAMA2, factor=0.25), r"inverted\? 1/factor = 4"),
        (lambda: Linear(**LLAMA2, factor=True), "finite number"),
        (lambda: NTK(rotary_dim=2, base=10.0, factor=2.0), "divides by zero"),
        (lambda: ByParts(**LLAMA2, trained_length=64, alpha=32, beta=1), "swapped"),
        (lambda: ByParts(**LLAMA2, trained_length=64, ramp="turns"), "ramp must be"),  # type: ignore[arg-type]
        (lambda: Llama3(**LLAMA2, trained_length=64, low_freq_factor=4, high_freq_factor=1), "swapped"),
        (lambda: Yarn(**LLAMA2, trained_length=64, attention_factor=0.0), "attention_factor must be above 0"),
        (lambda: Yarn(**LLAMA2, trained_length=64, attention_factor=-1.0), "attention_factor must be above 0"),
        (lambda: LongRope(**LLAMA2, trained_length=64, short_factor=(1.0,), long_factor=(1.0,) * 64), "= 64 numbers"),
        (lambda: Truncated(**LLAMA2), "trained_length, or all of a, b and rho"),
        (lambda: Truncated(**LLAMA2, trained_length=64, a=1.0), "a must be below b"),
        (lambda: Proportional(**LLAMA2, proportion=1.5), r"\[0, 1\]"),
        (lambda: Dynamic(method=Linear(**LLAMA2)), "give trained_length"),
        (lambda: Dynamic(method=Yarn(**LLAMA2, trained_length=64), trained_length=32), "32 here and 64"),
        (lambda: ClexTable(**LLAMA2, trained_length=64, table=((1.0,),)), "rows of rotary_dim / 2"),
    ],
)
def test_wrong_fields_are_refused_in_words(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_every_problem_is_in_one_message() -> None:
    with pytest.raises(ValueError, match="rotary_dim.*base.*factor.*trained_length"):
        Yarn(rotary_dim=5, base=0.0, factor=0.0, trained_length=0)


def test_dynamic_refuses_what_has_no_factor() -> None:
    with pytest.raises(TypeError, match="got Default"):
        Dynamic(method=Default(**LLAMA2), trained_length=64)  # type: ignore[arg-type]


def test_names_lead_to_classes_and_a_typo_to_the_nearest() -> None:
    assert method_class("pi") is Linear and method_class("su") is LongRope and method_class("yarn") is Yarn
    with pytest.raises(KeyError, match="did you mean 'yarn'"):
        method_class("yran")
    for name, cls in METHODS.items():
        assert cls.name == name and cls.title and cls.source


def test_check_inv_freq_finds_a_dropped_scaling() -> None:
    method = Llama3(rotary_dim=128, base=5e5, trained_length=8192, factor=8.0)
    check_inv_freq(method, method.frequencies().inv_freq.float())
    with pytest.raises(ValueError, match="was dropped"):
        check_inv_freq(method, method.plain().float())
    with pytest.raises(ValueError, match="pair 0 is 2"):
        check_inv_freq(method, 2 * method.frequencies().inv_freq)
    with pytest.raises(ValueError, match="32 pairs, the method asks for 64"):
        check_inv_freq(method, torch.ones(32))


@pytest.mark.parametrize("size", [1.0, 30.0, 1e4])
def test_clex_is_finite_for_every_parameter_a_training_can_reach(size: float) -> None:
    torch.manual_seed(0)
    method = Clex(rotary_dim=16, base=10000.0, trained_length=64, max_factor=16.0)
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.normal_(std=size)
    found = method.frequencies(torch.tensor([64, 200, 1024])).inv_freq
    assert found.isfinite().all() and (found > 0).all()
    (found.float() * 1000).cos().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in method.parameters())
