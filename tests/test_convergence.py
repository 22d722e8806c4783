"""The sum of a bias's weights over all distances, and the receptive field that holds most of it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from milepost import Encoding, build
from milepost.analysis.convergence import bias_at, converges, partial_sums, receptive_field, series, tail
from milepost.encodings.mep import MEP


def kerple(p: list[float], a: float = 1.0) -> Encoding:
    encoding = build("kerple-log", num_heads=len(p)).double()
    with torch.no_grad():
        encoding.kernel.p.copy_(torch.tensor(p, dtype=torch.float64))
        encoding.kernel.a.fill_(a)
    return encoding


def zeta(s: float) -> float:
    return float(torch.special.zeta(torch.tensor(s, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)))


def test_sums_with_a_closed_form() -> None:
    alibi = build("alibi", num_heads=8)
    expected = [1 / -math.expm1(-s) for s in alibi.kernel.start]
    assert series(alibi).total == pytest.approx(expected, rel=1e-12)

    cauchy = build("rpe-type1", num_heads=8)
    expected = [(1 + math.pi / k / math.tanh(math.pi / k)) / 2 for k in cauchy.kernel.start]
    assert series(cauchy).total == pytest.approx(expected, rel=1e-12)

    # A power law so slow that a billion terms hold two thirds of it.
    assert series(kerple([2.0, 1.5, 1.05])).total == pytest.approx([zeta(2.0), zeta(1.5), zeta(1.05)], rel=1e-9)


def test_a_tail_is_what_a_longer_head_adds() -> None:
    encoding = build("rpe-type2", num_heads=4)
    sums = partial_sums(encoding, 60_000)
    added = tail(encoding, 4096) - tail(encoding, 60_000)
    torch.testing.assert_close(sums[:, 59_999] - sums[:, 4_095], added, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["alibi", "rpe-type2", "mep"])
def test_receptive_field_is_the_smallest_length_that_holds_its_share(name: str) -> None:
    encoding = build(name, num_heads=4)
    found = series(encoding, eps=0.05)
    sums = partial_sums(encoding, 8192)
    for head, n in enumerate(found.receptive_field):
        assert n is not None
        wanted = 0.95 * found.total[head]
        assert sums[head, n - 1] >= wanted * (1 - 1e-12) and (n == 1 or sums[head, n - 2] < wanted)


def test_receptive_field_beyond_what_can_be_added_up() -> None:
    (n,) = receptive_field(kerple([1.5]), eps=0.001)
    # Tail of zeta(1.5) beyond n is about 2 / sqrt(n).
    assert n is not None and n == pytest.approx((2 / (0.001 * zeta(1.5))) ** 2, rel=1e-3)


STATUS = {
    "alibi": True, "kerple-power": True, "rpe-type1": True, "rpe-type2": True, "mep": True,
    "rpe-divergent-log": False, "rpe-divergent-loglog": False, "t5": False, "tisa": False, "fire": False,
    "mep-parameterized": False, "sandwich": False, "toeplitz": False, "gcdf-like": False,
}  # fmt: skip


@pytest.mark.parametrize("name", STATUS)
def test_which_series_converge(name: str) -> None:
    options = {"mep-parameterized": {"head_dim": 8}, "toeplitz": {"trained_length": 8}}.get(name, {})
    encoding = build(name, num_heads=4, **options)
    assert converges(encoding) == (STATUS[name],) * 4
    found = series(encoding)
    assert found.extrapolates is STATUS[name]
    assert all(math.isfinite(total) is STATUS[name] for total in found.total)
    assert all((n is not None) is STATUS[name] for n in found.receptive_field)


@pytest.mark.parametrize("name", [n for n, c in STATUS.items() if not c and n != "fire"])
def test_divergent_series_keep_growing(name: str) -> None:
    """Numbers agree with the verdict where they can: a decade far out adds no less than a tenth of what the last did.

    (FIRE reads the query's own position, not the distance alone.)
    """
    options = {"mep-parameterized": {"head_dim": 8}, "toeplitz": {"trained_length": 8}}.get(name, {})
    encoding = build(name, num_heads=2, **options)

    def decade(start: float) -> Tensor:
        at = torch.linspace(math.log(start), math.log(10 * start), 4001, dtype=torch.float64)
        return ((bias_at(encoding, at.exp()) + at).exp()).mean(-1)

    assert (decade(1e7) > 0.1 * decade(1e6)).all()


def test_kerple_log_converges_only_for_exponents_above_one() -> None:
    found = series(kerple([0.8, 1.0, 1.2]))
    assert found.converges == (False, False, True) and not found.extrapolates
    assert found.total[:2] == (math.inf, math.inf) and found.receptive_field[0] is None
    three = build("kerple-3param", num_heads=2)
    with torch.no_grad():
        three.kernel.p.fill_(1.5)
        three.kernel.r.copy_(torch.tensor([0.5, 0.8]))
    assert converges(three) == (False, True)


def test_a_mix_converges_when_all_its_kernels_do() -> None:
    assert converges(MEP(2, kernels=["exp", "cauchy"])) == (True, True)
    assert converges(MEP(2, kernels=["exp", "uniform"])) == (False, False)


def test_no_position_signal_diverges_and_rotation_has_no_series() -> None:
    assert series(build("nope")).total == (math.inf,)
    with pytest.raises(ValueError, match="rope does not say whether its series converges"):
        series(build("rope", head_dim=8))
    with pytest.raises(ValueError, match="rope is not a bias of distance alone"):
        bias_at(build("rope", head_dim=8), torch.arange(3))
    with pytest.raises(ValueError, match="eps is a share"):
        series(build("alibi", num_heads=2), eps=1.0)
