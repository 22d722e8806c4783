"""What every bias of distance promises: gradients, precision, one graph for all lengths, and identities."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.func import functional_call

from milepost import Encoding, Mapped, PositionMap, Positions, attend, build
from milepost.encoding import find
from milepost.encodings.mep import MEP
from milepost.kernels import KERNELS, alibi_slopes, folded, t5_bucket
from milepost.terms import DistanceBias, PairBias

HEADS, HEAD_DIM = 4, 8

STATIC: dict[str, dict[str, Any]] = {
    "alibi": {},
    "sandwich": {},
    "rpe-type1": {},
    "rpe-type2": {},
    "rpe-divergent-log": {},
    "rpe-divergent-loglog": {},
    "mep": {},
}
LEARNED: dict[str, dict[str, Any]] = {
    "alibi:learn_slopes": {"learn_slopes": True},
    "t5": {"num_buckets": 8, "max_distance": 16},
    "t5:neox": {"num_buckets": 8, "max_distance": 16, "scale": "sqrt-head-dim", "head_dim": HEAD_DIM},
    "t5:slopes": {"num_buckets": 8, "max_distance": 16, "init": "slopes"},
    "kerple-log": {},
    "kerple-power": {},
    "kerple-3param": {},
    "kerple-log:slopes": {"init": "slopes"},
    "fire": {"hidden": 3, "threshold": 4.0},
    "fire:identity": {"hidden": 3, "transform": "identity", "threshold": None},
    "tisa": {},
    "toeplitz": {"trained_length": 5},
    "gcdf-like": {"num_features": 3},
    "mep-parameterized": {"head_dim": HEAD_DIM},
    "mep-parameterized:slopes": {"head_dim": HEAD_DIM, "init": "slopes"},
    "mep:weights": {"learn_weights": True, "weights": (1.0, 2.0, 3.0)},
    "mep:all": {"kernels": tuple(KERNELS), "head_dim": HEAD_DIM, "learn_weights": True},
}
ALL = {**STATIC, **LEARNED}


def make(key: str) -> Encoding:
    return build(key.partition(":")[0], num_heads=HEADS, **ALL[key])


def dense(encoding: Encoding, positions: Positions) -> Tensor:
    bias = encoding(positions).bias
    assert bias is not None
    return bias.dense().masked_fill(~positions.allowed()[:, None], 0.0)


# ---- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key", LEARNED)
def test_gradcheck(key: str, causal: bool) -> None:
    encoding = make(key).double()
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter += 0.01  # off the edges of its range, where there is no derivative
    names = [name for name, _ in encoding.named_parameters()]
    positions = Positions.full(7, queries=5, causal=causal)

    def function(*values: Tensor) -> Tensor:
        terms = functional_call(encoding, dict(zip(names, values, strict=True)), (positions,))
        return terms.bias.dense().masked_fill(~positions.allowed()[:, None], 0.0)

    assert names
    assert torch.autograd.gradcheck(function, tuple(encoding.parameters()))


def test_gradcheck_of_content_dependent_buckets() -> None:
    encoding = build("lfhc-like", head_dim=4, num_buckets=8, max_distance=6).double()
    positions = Positions.full(9, causal=False)
    q, k, v = torch.randn(3, 1, 2, 9, 4, dtype=torch.float64)

    def function(table: Tensor) -> Tensor:
        return attend(q, k, v, positions, functional_call(encoding, {"table": table}, (positions,)))

    assert torch.autograd.gradcheck(function, (encoding.table,))


@pytest.mark.parametrize("key", LEARNED)
def test_every_parameter_gets_a_finite_gradient_through_attention(key: str) -> None:
    encoding = make(key)
    positions = Positions.full(64)
    q, k, v = torch.randn(3, 1, HEADS, 64, HEAD_DIM)
    attend(q, k, v, positions, encoding(positions)).square().sum().backward()
    for name, parameter in encoding.named_parameters():
        assert parameter.dim() > 0, f"{name} is a scalar, which FSDP2 refuses"
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        if name != "mlp.2.bias":  # FIRE's last constant shifts whole rows, which the softmax does not see
            assert parameter.grad.abs().max() > 1e-5, name


# ---- precision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [*ALL, "lfhc-like"])
def test_half_precision_changes_nothing(key: str) -> None:
    encoding = build("lfhc-like", head_dim=HEAD_DIM) if key == "lfhc-like" else make(key)
    positions = Positions.full(600, queries=20)
    qkv = [torch.randn(1, HEADS, length, HEAD_DIM) for length in (20, 600, 600)]
    want = attend(*qkv, positions, encoding(positions), backend="reference")
    for convert in (lambda e: e.half(), lambda e: e.to(torch.bfloat16), lambda e: torch.nn.Sequential(e).bfloat16()[0]):
        converted = convert(copy.deepcopy(encoding))
        assert torch.equal(attend(*qkv, positions, converted(positions), backend="reference"), want)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attend(*qkv, positions, encoding(positions), backend="reference"), want)
    if key != "lfhc-like":
        assert encoding(positions).bias.dense().dtype == torch.float32


@pytest.mark.parametrize("key", [*ALL, "lfhc-like"])
def test_built_under_a_half_default_dtype_it_is_float32(key: str) -> None:
    torch.set_default_dtype(torch.bfloat16)
    encoding = build("lfhc-like", head_dim=HEAD_DIM) if key == "lfhc-like" else make(key)
    assert all(parameter.dtype == torch.float32 for parameter in encoding.parameters())
    if key != "lfhc-like":
        assert encoding(Positions.full(5)).bias.dense().dtype == torch.float32


@pytest.mark.parametrize("key", ALL)
def test_float32_agrees_with_float64_far_out(key: str) -> None:
    encoding = make(key)
    far = Positions.step(9999, queries=1)
    found = dense(encoding, far)
    torch.set_default_dtype(torch.float64)
    exact = dense(copy.deepcopy(encoding).double(), far)
    assert exact.dtype == torch.float64 and found.dtype == torch.float32
    # Relative to the bias; sums of cosines (Sandwich) to a few units of their phases' rounding.
    cosines = key in ("sandwich", "mep:all")
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=5e-3 if cosines else 2e-5)


@pytest.mark.parametrize("key", ALL)
def test_reset_restores_constants_and_redraws_the_rest(key: str) -> None:
    encoding = make(key)
    shapes = {name: p.shape for name, p in encoding.named_parameters()}
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.fill_(torch.nan)
    encoding.reset_parameters()
    assert all(p.isfinite().all() and p.shape == shapes[name] for name, p in encoding.named_parameters())
    with torch.device("meta"):
        empty = make(key)
    loaded = empty.to_empty(device="cpu")
    loaded.load_state_dict(encoding.state_dict())
    assert torch.equal(dense(loaded, Positions.full(9)), dense(encoding, Positions.full(9)))


# ---- where it stands ------------------------------------------------------------------------------------------------


class Halved(PositionMap):
    def forward(self, positions: Positions, tokens: Tensor | None = None) -> Positions:
        return positions.mapped(positions.query / 2, positions.key / 2)


class Same(PositionMap):
    def forward(self, positions: Positions, tokens: Tensor | None = None) -> Positions:
        return positions.mapped(positions.query, positions.key)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key", ALL)
def test_a_line_per_head_and_a_function_of_pairs_agree(key: str, causal: bool) -> None:
    encoding, positions = make(key), Positions.full(40, causal=causal)
    own = dense(encoding, positions)
    torch.testing.assert_close(own, dense(Mapped(Same(), encoding), positions), rtol=1e-6, atol=2e-6)
    kind = PairBias if key.startswith("fire") else DistanceBias
    assert isinstance(encoding(positions).bias, kind)
    assert dense(Mapped(Halved(), encoding), positions).isfinite().all()


@pytest.mark.parametrize("key", ALL)
def test_a_row_is_the_same_alone_in_a_chunk_and_in_the_whole(key: str) -> None:
    encoding = make(key)
    whole = encoding(Positions.full(40)).bias.dense()
    step = encoding(Positions.step(39)).bias.dense()
    chunk = encoding(Positions.step(32, queries=8)).bias.dense()
    allowed = Positions.step(32, queries=8).allowed()[:, None]
    torch.testing.assert_close(step[:, :, 0], whole[:, :, -1])
    torch.testing.assert_close(chunk.masked_fill(~allowed, 0), whole[:, :, 32:].masked_fill(~allowed, 0))


@pytest.mark.parametrize("key", [key for key in ALL if not key.endswith((":slopes", ":neox", "-log", "-loglog"))])
def test_one_graph_serves_all_lengths(key: str) -> None:
    encoding = make(key)

    def step(x: Tensor) -> Tensor:
        positions = Positions.full(x.shape[0])
        return encoding(positions).bias.dense().sum()

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="eager")
    for length in (2, 3, 4, 9, 31, 64, 80, 128, 129, 200):
        found = compiled(torch.zeros(length))
        torch.testing.assert_close(found, step(torch.zeros(length)))
        if found.requires_grad:
            found.backward()
    assert 1 <= len(_debug_get_cache_entry_list(step)) <= 2


# ---- identities -----------------------------------------------------------------------------------------------------


def test_kerple_power_with_exponent_one_is_alibi() -> None:
    power = build("kerple-power", num_heads=4)
    with torch.no_grad():
        power.kernel.a.copy_(torch.tensor(alibi_slopes(4)))
        power.kernel.p.fill_(1.0)
    far = Positions.step(9999)
    alibi = build("alibi", num_heads=4)
    low = torch.tensor(alibi_slopes(4)) < 0.01
    assert low.tolist() == [False, False, False, True], "the smallest slope lies below KERPLE's floor"
    found, wanted = dense(power, far)[:, ~low], dense(alibi, far)[:, ~low]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    started = build("kerple-power", num_heads=4, init="slopes", floor=1e-3)
    torch.testing.assert_close(dense(started, far), dense(alibi, far), rtol=1e-6, atol=0)


def test_kerple_with_three_parameters_and_exponent_one_is_the_logarithmic_one() -> None:
    three, two = build("kerple-3param", num_heads=4), build("kerple-log", num_heads=4)
    with torch.no_grad():
        three.kernel.r.fill_(1.0)
        two.kernel.p.copy_(three.kernel.p)
        two.kernel.a.copy_(three.kernel.a)
    torch.testing.assert_close(dense(three, Positions.step(5000)), dense(two, Positions.step(5000)))


def test_slopes_start_learned_biases_near_alibi() -> None:
    positions = Positions.step(15)
    alibi = dense(build("alibi", num_heads=8), positions)
    t5 = dense(build("t5", num_heads=8, init="slopes"), positions)
    torch.testing.assert_close(t5, alibi)  # the first 16 distances have a bucket each
    log = dense(build("kerple-log", num_heads=8, init="slopes", floor=1e-3), positions)
    gentle = [5, 6, 7]
    torch.testing.assert_close(log[:, gentle], alibi[:, gentle], rtol=0.15, atol=0)


def test_toeplitz_with_a_table_of_alibi_is_alibi() -> None:
    alibi = build("alibi", num_heads=4)
    toeplitz = build("toeplitz", num_heads=4, trained_length=9)
    positions = Positions.full(9, causal=False)
    with torch.no_grad():
        toeplitz.table.copy_(alibi(positions).bias.table)
    assert torch.equal(dense(toeplitz, positions), dense(alibi, positions))


def test_sum_of_kernels_orders_of_the_future_and_forms_of_alibi() -> None:
    positions = Positions.full(6, causal=False)
    symmetric = dense(build("alibi", num_heads=4), positions)
    assert torch.equal(symmetric, symmetric.mT)
    offset = dense(build("alibi", num_heads=4, bidirectional="offset"), positions)
    left = torch.ones(6, 6).tril(-1).bool()
    half = torch.tensor(alibi_slopes(4)).view(1, -1, 1, 1) / 2
    assert torch.equal(offset, torch.where(left, symmetric + half, symmetric))
    sided = build("alibi", num_heads=4, bidirectional="nonsymmetric")
    q, k, v = torch.randn(3, 1, 4, 6, 8)
    out = attend(q, k, v, positions, sided(positions))
    two = build("alibi", num_heads=2)
    causal = attend(q[:, :2], k[:, :2], v[:, :2], Positions.full(6), two(Positions.full(6)))
    torch.testing.assert_close(out[:, :2], causal)
    mirrored = attend(*(x[:, 2:].flip(2) for x in (q, k, v)), Positions.full(6), two(Positions.full(6))).flip(2)
    torch.testing.assert_close(out[:, 2:], mirrored)
    for form in ("offset", "nonsymmetric"):
        causal_form = dense(build("alibi", num_heads=4, bidirectional=form), Positions.full(6))
        assert (causal_form <= 0).all()
    assert torch.equal(
        dense(build("alibi", num_heads=4, bidirectional="offset"), Positions.full(6)),
        dense(build("alibi", num_heads=4), Positions.full(6)),
    )


def test_t5_of_the_survey_and_of_the_attention() -> None:
    # The survey: positions 1-4 to themselves, 5-6 to 5, 7-8 to 6, 9-12 to 7.
    one_based = [1 + int(b) for b in t5_bucket(torch.arange(16), num_buckets=8, max_distance=16, bidirectional=False)]
    assert one_based == [1, 2, 3, 4, 5, 5, 6, 6, 7, 7, 7, 7, 8, 8, 8, 8]
    t5 = build("t5", num_heads=2, num_buckets=8, max_distance=16)
    causal, both = t5(Positions.full(9)).bias.table, t5(Positions.full(9, causal=False)).bias.table
    assert torch.equal(causal[:, 5], t5.kernel.table[4]) and torch.equal(both[:, 8 + 5], t5.kernel.table[2])
    assert torch.equal(both[:, 8 - 1], t5.kernel.table[4 + 1])
    fixed = build("t5", num_heads=2, num_buckets=8, max_distance=16, bidirectional=False)
    table = fixed(Positions.full(9, causal=False)).bias.table
    assert torch.equal(table[:, :9], fixed.kernel.table[0][:, None].expand(2, 9))


def test_sandwich_is_the_product_of_sinusoidal_vectors() -> None:
    dim, p = 16, torch.arange(12, dtype=torch.float64)
    angles = p[:, None] * 10000.0 ** (-2 * torch.arange(dim // 2) / dim)
    vectors = torch.cat([angles.sin(), angles.cos()], dim=-1)
    sandwich = build("sandwich", num_heads=2, dim=dim, index_start=0)
    torch.set_default_dtype(torch.float64)
    bias = sandwich(Positions.full(12, causal=False)).bias.dense()
    torch.testing.assert_close(bias[0, 1], (vectors @ vectors.T - dim / 2) / 8)
    torch.testing.assert_close(bias[0, 0], (vectors @ vectors.T - dim / 2) / 4)


def test_fire_without_transform_and_threshold_is_the_surveys_equation_20() -> None:
    fire = build("fire", num_heads=2, transform="identity", threshold=None)
    assert set(dict(fire.named_parameters())) == {"mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias"}
    i, j = torch.tensor([[1, 7, 1000]]), torch.tensor([[0, 1]])
    quotient = (i[..., None] - j) / i[..., None]
    assert torch.equal(fire.normalized(i, j), quotient)
    bias = fire(Positions.full(3)).bias.function(i, j)
    torch.testing.assert_close(bias, fire.mlp(quotient[..., None]).movedim(-1, 1))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("transform", ["log", "identity"])
def test_fire_below_its_threshold_is_a_line_with_the_same_gradients(causal: bool, transform: str) -> None:
    fire = build("fire", num_heads=3, transform=transform, threshold=12.0).double()
    positions = Positions.full(12, causal=causal)
    line = fire(positions).bias
    assert isinstance(line, DistanceBias)
    assert isinstance(fire(Positions.full(13, causal=causal)).bias, PairBias)  # position 12 is not below 12
    pairs = fire.mlp(fire.normalized(positions.query, positions.key, causal=causal)[..., None]).movedim(-1, 1)
    seen = positions.allowed()[:, None].expand(-1, 3, -1, -1)
    weight = torch.randn(seen.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * seen
    torch.testing.assert_close(line.dense() * seen, pairs * seen, rtol=1e-12, atol=1e-12)
    names, parameters = zip(*fire.named_parameters(), strict=True)
    gradients = [torch.autograd.grad((bias * weight).sum(), parameters) for bias in (line.dense(), pairs)]
    for name, got, right in zip(names, *gradients, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-10, atol=1e-10, msg=name)
    assert fire.threshold_scale.grad is None and float(gradients[0][names.index("threshold_scale")].abs()) > 0


def test_fire_in_both_directions_is_symmetric_and_bounded() -> None:
    fire = build("fire", num_heads=2, threshold=4.0)
    bias = dense(fire, Positions.full(20, causal=False))
    torch.testing.assert_close(bias, bias.mT)
    at = torch.arange(3000)[None]
    inputs = fire.normalized(at[:, -5:], at)
    assert inputs.min() >= 0 and inputs.max() <= 1


def test_tisa_with_the_official_offset_is_one_off() -> None:
    ours, theirs = build("tise", num_heads=2), build("tisa", num_heads=2, official_offset=True)
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(theirs.bias(torch.arange(-5, 6)), ours.bias(torch.arange(-6, 5)))


def test_toeplitz_beyond_its_length() -> None:
    clamp = build("toeplitz", num_heads=2, trained_length=4, beyond="clamp")
    table = clamp(Positions.full(9)).bias.table
    assert torch.equal(table[:, 3:], table[:, 3:4].expand(2, 6))
    strict = build("toeplitz", num_heads=2, trained_length=4, beyond="raise")
    strict(Positions.full(4, causal=False))
    with pytest.raises(ValueError, match="distance of 8 is beyond the table of toeplitz, trained for 4"):
        strict(Positions.full(9))
    with pytest.raises(ValueError, match="distance of 8 is beyond"):
        Mapped(Same(), strict)(Positions.full(9)).bias.dense()


def test_lfhc_like_buckets_are_monotone_and_blockwise_scores_agree() -> None:
    bucket = t5_bucket(torch.arange(0, 4000), num_buckets=64, max_distance=512, bidirectional=True)
    assert (bucket.diff() >= 0).all() and bucket.max() == 31
    encoding = build("lfhc-like", head_dim=8)
    q, k, v = torch.randn(1, 4, 30, 8), torch.randn(1, 2, 30, 8), torch.randn(1, 2, 30, 8)
    positions = Positions.full(30, causal=False)
    whole = attend(q, k, v, positions, encoding(positions))
    step = Positions.full(30, queries=3, causal=False)
    torch.testing.assert_close(attend(q[:, :, -3:], k, v, step, encoding(step)), whole[:, :, -3:])
    with torch.no_grad():
        encoding.table.zero_()
    torch.testing.assert_close(attend(q, k, v, positions, encoding(positions)), attend(q, k, v, positions))


def test_gcdf_like_features_rise_from_0_to_1() -> None:
    encoding = build("gcdf-like", num_heads=2, num_features=4)
    features = torch.stack(encoding.features(torch.arange(-20, 21)))
    assert (features.diff() >= 0).all() and features.min() >= 0 and features.max() <= 1
    standard = torch.special.ndtr(torch.tensor([0.0, 1.0, -2.0], dtype=torch.float64))
    centre = torch.tensor(encoding.centres())
    at_centre = torch.stack(encoding.features(centre)).diagonal()
    torch.testing.assert_close(at_centre, torch.full_like(at_centre, standard[0].item()))
    assert standard.tolist() == pytest.approx([0.5, 0.5 * (1 + math.erf(2**-0.5)), 0.5 * (1 - math.erf(2**0.5))])


# ---- configuration --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("alibi", {"bidirectional": "left"}, "'symmetric', 'offset' or 'nonsymmetric'; got 'left'"),
        ("alibi", {"num_heads": 3, "bidirectional": "nonsymmetric"}, "num_heads is 3, odd"),
        ("alibi", {"num_heads": 0}, "num_heads is at least 1; got 0"),
        ("alibi", {"order": "sorted"}, "order is .* got 'sorted'"),
        ("alibi", {"compat": "falcon"}, "compat is None or 'falcon-bf16'"),
        ("alibi", {"compat": "falcon-bf16", "learn_slopes": True}, "learn_slopes=True"),
        ("t5", {"num_buckets": 7}, "num_buckets is 7, odd"),
        ("t5", {"max_distance": 16}, "max_distance 16 is not above 16"),
        ("t5", {"scale": "sqrt-head-dim"}, "needs head_dim"),
        ("t5", {"init": "zeros"}, "init is 'published' or 'slopes'; got 'zeros'"),
        ("kerple-log", {"kernel": "exp"}, "kernel is 'log', 'power' or '3param'; got 'exp'"),
        ("kerple-log", {"floor": 0.0}, "floor is in"),
        ("sandwich", {"dim": 7}, "dim is even"),
        ("sandwich", {"index_start": 2}, "index_start is 0 or 1; got 2"),
        ("fire", {"threshold": -1.0}, "threshold is not negative"),
        ("fire", {"c": 0.0}, "c is positive"),
        ("tisa", {"num_kernels": 0}, "num_kernels is at least 1"),
        ("toeplitz", {"trained_length": 8, "beyond": "wrap"}, "beyond is 'raise' or 'clamp'; got 'wrap'"),
        ("rpe-type1", {"kind": "type3"}, "kind is one of type1, type2"),
    ],
)
def test_bad_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, **{"num_heads": 4, **options})


def test_sets_are_shared_by_layers_as_published() -> None:
    shared = {name: find(name).shared for name in ("alibi", "t5", "kerple-log", "mep", "mep-parameterized", "sandwich")}
    assert all(shared.values())
    assert not any(find(name).shared for name in ("tisa", "fire"))


@given(raw=st.floats(-1e6, 1e6), low=st.floats(1e-3, 0.5), width=st.floats(0.1, 10.0))
def test_folding_stays_in_range_and_keeps_a_gradient(raw: float, low: float, width: float) -> None:
    x = torch.tensor([raw], dtype=torch.float64, requires_grad=True)
    value = folded(x, low, low + width)
    value.backward()
    assert low * (1 - 2e-6) <= value.item() <= (low + width) * (1 + 2e-6)
    assert x.grad.abs().item() > 0
    if low <= raw <= low + width:
        assert value.item() == raw and x.grad.item() == 1


@pytest.mark.parametrize("limit", [0.01, 0.3])
def test_a_limit_rounded_to_float32_has_the_same_gradient_in_both_precisions(limit: float) -> None:
    raw = torch.tensor([limit])
    for low, high in ((limit, None), (1e-3, limit)):
        single, double = raw.clone().requires_grad_(), raw.double().requires_grad_()
        folded(single, low, high).backward()
        folded(double, low, high).backward()
        assert single.grad.item() == double.grad.item() == 1


def test_mean_of_one_kernel_is_that_kernel() -> None:
    positions = Positions.full(9)
    assert torch.equal(dense(MEP(4, kernels=["exp"]), positions), dense(build("alibi", num_heads=4), positions))
