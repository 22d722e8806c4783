"""MEP: finite everywhere, the algebra of kernels, the literal reading, and the published arithmetic."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from milepost import Mapped, PositionMap, Positions, attend, build, explain
from milepost.analysis.convergence import bias_at
from milepost.encodings.mep import MEP, MIXES
from milepost.kernels import KERNELS, Exponential, Gaussian, Kernel, alibi_slopes, make_kernel, naive_log_mean

FAR = [0, 1, 46341, 10_000_000]


def parameterized(heads: int = 4, **options: Any) -> MEP:
    return MEP(heads, variant="parameterized", head_dim=64, **options)


def log_mean(encoding: MEP, distance: list[int]) -> Tensor:
    return encoding.log_mean(torch.tensor(distance))


@pytest.mark.parametrize("kernels", [*MIXES, *KERNELS, tuple(KERNELS)])
def test_finite_forward_and_backward_at_every_distance(kernels: Any) -> None:
    encoding = MEP(4, kernels=kernels, head_dim=64, learn_weights=True)
    bias = log_mean(encoding, FAR)
    assert bias.dtype == torch.float32 and bias.isfinite().all()
    bias.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in encoding.parameters())


# The floor of KERPLE's parameters, 0.01; far below and above it; beyond what exp holds in float32; and where steps end.
EXTREMES = [-1e30, -100.0, -1.0, 0.0, 0.005, 0.01, 2.0, 100.0, 1e6, 1e30]


@pytest.mark.parametrize("value", EXTREMES)
@pytest.mark.parametrize("kernels", ["parameterized", "power", "log"])
def test_finite_with_parameters_at_and_beyond_their_ranges(kernels: str, value: float) -> None:
    encoding = MEP(4, kernels=kernels, head_dim=64)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.fill_(value)
    bias = log_mean(encoding, FAR)
    assert bias.isfinite().all()
    bias.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in encoding.parameters())


@pytest.mark.parametrize("value", EXTREMES)
def test_finite_with_extreme_weights(value: float) -> None:
    encoding = parameterized(learn_weights=True)
    with torch.no_grad():
        encoding.log_weights[1].fill_(value)
    bias = log_mean(encoding, FAR)
    assert bias.isfinite().all()
    bias.sum().backward()
    assert encoding.log_weights.grad.isfinite().all()


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "t5"])
def test_a_mix_of_one_kernel_is_that_kernel(name: str) -> None:
    kernel = make_kernel(name, 4)
    mix = MEP(4, kernels=[kernel])
    torch.testing.assert_close(log_mean(mix, FAR), kernel.log_kernel(torch.tensor(FAR)), rtol=0, atol=0)


def test_the_named_encodings_are_kernels_of_the_algebra() -> None:
    distance = torch.arange(300)
    pairs = {
        "alibi": "exp", "rpe-type1": "cauchy", "rpe-type2": "log-square", "sandwich": "sandwich",
        "rpe-divergent-log": "harmonic", "rpe-divergent-loglog": "harmonic-log", "nope": "uniform",
    }  # fmt: skip
    for name, kernel in pairs.items():
        encoding = build(name) if name == "nope" else build(name, num_heads=4)
        torch.testing.assert_close(
            bias_at(encoding, distance).float().expand(4, -1), make_kernel(kernel, 4).log_kernel(distance)
        )


def test_weights_are_an_average_whatever_their_sum() -> None:
    distance = torch.arange(40)
    mix = MEP(4, kernels=["exp", "gauss"], weights=[1, 3]).log_mean(distance)
    exp, gauss = (make_kernel(name, 4).log_kernel(distance).exp() for name in ("exp", "gauss"))
    torch.testing.assert_close(mix, ((exp + 3 * gauss) / 4).log())
    torch.testing.assert_close(MEP(4, kernels=["exp", "gauss"], weights=[0.5, 1.5]).log_mean(distance), mix)
    learned = MEP(4, kernels=["exp", "gauss"], weights=[1, 3], learn_weights=True)
    assert learned.log_weights.shape == (2, 4)
    torch.testing.assert_close(learned.log_mean(distance), mix)


def test_each_kernel_has_slopes_of_its_own() -> None:
    distance = torch.arange(40)
    mix = MEP(2, kernels=["exp", "exp*0.5", "gauss", "log"], slopes=[0.3, None, [0.1, 0.2], 0.25])
    assert [k.start for k in list(mix.kernels)[:3]] == [(0.3, 0.3), (0.03125, 0.001953125), (0.1, 0.2)]
    torch.testing.assert_close(mix.kernels[3].a.detach(), torch.tensor([0.25, 0.25]))
    same = MEP(2, kernels=[Exponential(2, [0.3, 0.3]), Exponential(2, slope_scale=0.5), Gaussian(2, [0.1, 0.2]), "log"])
    same.kernels[3].load_state_dict(mix.kernels[3].state_dict())
    torch.testing.assert_close(same.log_mean(distance), mix.log_mean(distance))


def test_presets_are_the_published_mixes() -> None:
    assert MEP(4).config.kernels == build("mep", num_heads=4).config.kernels == ("exp", "exp*0.5", "gauss")
    built = build("mep-parameterized", num_heads=12, head_dim=64)
    assert built.config.kernels == ("gauss", "exp", "t5", "log")
    assert built.kernels[2].scale == 8 and built.info.learnable and not MEP.info.learnable
    assert MEP(4, kernels="exp-gauss").config.kernels == ("exp", "gauss")
    big = parameterized(4000)
    p, a, table = (dict(big.named_parameters())[n] for n in ("kernels.3.p", "kernels.3.a", "kernels.2.table"))
    assert 0.95 < p.mean().item() < 1.05 and p.max() <= 2 and p.min() >= 0.01
    assert 0.47 < a.mean().item() < 0.53 and a.max() <= 1 and a.min() >= 0.01
    assert table.std().item() == pytest.approx(math.sqrt(2 / (32 + 4000)), rel=0.02)


def test_slopes_as_a_start_put_every_learned_kernel_near_alibi() -> None:
    start = parameterized(8, init="slopes")
    near = torch.arange(8)
    alibi = make_kernel("exp", 8).log_kernel(near)
    exp, t5, log = (start.kernels[n].log_kernel(near).detach() for n in (1, 2, 3))
    assert torch.equal(exp, alibi)
    torch.testing.assert_close(t5, alibi)
    assert (log[:, 1:] < 0).all() and (log[:, 1:] > 1.01 * alibi[:, 1:] - 0.05).all()


def test_near_tokens_get_a_bonus_and_far_ones_half_the_slope() -> None:
    mix, alibi = MEP(8), make_kernel("exp*0.5", 8)
    far = torch.tensor([200_000])
    lead = mix.log_mean(far) - alibi.log_kernel(far)
    torch.testing.assert_close(lead, torch.full((8, 1), -math.log(3)), atol=0.1, rtol=0)
    assert mix.log_mean(torch.tensor([0])).abs().max() < 1e-6


class Halved(PositionMap):
    def forward(self, positions: Positions, tokens: Tensor | None = None) -> Positions:
        return positions.mapped(positions.query / 2, positions.key / 2)


def test_without_renormalising_the_penalty_multiplies_the_weights() -> None:
    literal, usual = MEP(4, renormalize=False), MEP(4)
    q, k, v = torch.randn(3, 1, 4, 20, 8)
    positions = Positions.full(20)
    weights = torch.softmax((q @ k.mT / 8**0.5).masked_fill(~positions.allowed()[:, None], -torch.inf), -1)
    penalty = usual(positions).bias.dense().exp()
    found = attend(q, k, v, positions, literal(positions))
    torch.testing.assert_close(found, (weights * penalty) @ v)
    normalised = (weights * penalty) / (weights * penalty).sum(-1, keepdim=True)
    torch.testing.assert_close(attend(q, k, v, positions, usual(positions)), normalised @ v)
    step = Positions.step(17, queries=3)
    torch.testing.assert_close(attend(q[:, :, 17:], k, v, step, literal(step)), found[:, :, 17:])
    assert explain(q, k, v, positions, literal(positions)).chosen == "rows"


def test_without_renormalising_blocks_and_mapped_positions_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    from milepost.attention import rows

    encoding = Mapped(Halved(), MEP(2, renormalize=False))
    q, k, v = torch.randn(3, 1, 2, 50, 8)
    positions = Positions.full(50)
    whole = attend(q, k, v, positions, encoding(positions), backend="reference")
    monkeypatch.setattr(rows, "BLOCK_NUMBERS", 1)
    torch.testing.assert_close(attend(q, k, v, positions, encoding(positions), backend="rows"), whole)


def test_published_arithmetic_in_bfloat16_cuts_heads_off() -> None:
    encoding = MEP(12, naive_bf16=True)
    table = encoding(Positions.full(2100)).bias.table
    assert table.dtype == torch.float32
    first = table.isneginf().int().argmax(-1)
    # Positions in bfloat16 are exact to 256 only, so heads of slope 0.5 and 0.7 end inside 512 tokens, as in training.
    steep = [0, 1, 2, 8, 9, 10, 11]
    assert first[steep].tolist() == [367, 734, 1468, 259, 518, 1036, 2072]
    exact = MEP(12)(Positions.full(2100)).bias.table
    assert exact.isfinite().all()
    torch.testing.assert_close(table[:, :200], exact[:, :200], atol=0.9, rtol=0)


def test_naive_mean_in_float32_agrees_where_it_is_finite() -> None:
    encoding = MEP(12)
    distance = torch.arange(250, dtype=torch.float32)
    naive = naive_log_mean([kernel.formula(distance) for kernel in encoding.kernels])
    torch.testing.assert_close(naive, encoding.log_mean(distance), rtol=1e-5, atol=1e-5)


@given(
    slope=st.floats(1e-4, 2.0),
    distance=st.integers(0, 10_000_000),
)
def test_closed_form(slope: float, distance: int) -> None:
    found = bias_at(MEP(1, slopes=[slope] * 3), torch.tensor([distance]))[0, 0].item()
    x = slope * distance
    wanted = -x / 2 + math.log1p(math.exp(-x / 2) + math.exp(-x * (distance - 0.5))) - math.log(3)
    assert found == pytest.approx(wanted, rel=1e-9, abs=1e-9)


class Plateau(Kernel):
    """A user's own kernel: 1 up to a distance, a power law beyond."""

    def formula(self, distance: Tensor) -> Tensor:
        return -torch.log(distance.abs().clamp(min=16) / 16).expand(self.num_heads, *distance.shape) * 2

    def converges(self) -> list[bool]:
        return [True] * self.num_heads


def test_a_kernel_of_the_users_own_can_be_mixed() -> None:
    mix = MEP(4, kernels=["exp", Plateau(4)], weights=[3, 1])
    assert mix.converges() == [True] * 4
    q, k, v = torch.randn(3, 1, 4, 64, 8)
    positions = Positions.full(64)
    assert attend(q, k, v, positions, mix(positions)).isfinite().all()
    with pytest.raises(TypeError, match="abstract"):
        Kernel(4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "learned"}, "variant is 'parameter-free' or 'parameterized'"),
        ({"variant": "parameterized"}, "give head_dim"),
        ({"kernels": []}, "kernels is empty"),
        ({"kernels": ["exp", "cosine"]}, "no kernel is named 'cosine'; there are: exp, gauss"),
        ({"kernels": ["exp"], "slopes": [0.1, 0.2]}, "slopes has one entry for each of the 1 kernels"),
        ({"kernels": ["exp"], "slopes": [[0.1, 0.2]]}, "4 positive slopes are needed"),
        ({"kernels": ["exp"], "slopes": [-0.1]}, "4 positive slopes are needed"),
        ({"kernels": ["sandwich"], "slopes": [0.1]}, "sandwich kernel has no slopes"),
        ({"kernels": ["uniform*2"]}, "uniform kernel has no slopes"),
        ({"kernels": [Exponential(3)]}, "Exponential has 3 heads; the encoding has 4"),
        ({"kernels": [Exponential(4)], "slopes": [0.1]}, "slopes of its own"),
        ({"weights": [1, 2]}, "weights has one entry for each of the 3 kernels"),
        ({"weights": [1, 0, 2]}, "weights are positive"),
        ({"naive_bf16": True, "learn_weights": True}, "naive_bf16 reproduces published code"),
        ({"init": "zeros"}, "init is 'published' or 'slopes'"),
    ],
)
def test_bad_mixes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MEP(4, **options)


def test_own_slopes_of_tanh_are_those_of_the_code() -> None:
    assert make_kernel("tanh", 12).start[0] == 0.25737 and make_kernel("tanh", 4).start == tuple(alibi_slopes(4))
