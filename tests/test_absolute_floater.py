"""FLOATER: the path equals torchdiffeq's, its gradient autograd's, and what is kept in evaluation is never stale."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from milepost import Encoding, Positions, Sum, attend, build
from milepost.encodings.absolute.floater import FLOATER, floater

DELTA, SUBSTEPS = 0.1, 3


def weights(width: int = 4, states: int = 2) -> list[Tensor]:
    shapes = [(states, width), (width, width + 1), (width,), (width, width + 1), (width,)]
    return [torch.randn(shape, dtype=torch.float64).div(2).requires_grad_() for shape in shapes]


def speed(t: Tensor, p: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    time = t.expand(*p.shape[:-1], 1)
    hidden = F.linear(torch.cat([p, time], -1), w1, b1).relu()
    return F.linear(torch.cat([hidden, time], -1), w2, b2)


def with_torchdiffeq(count: int, start: Tensor, *field: Tensor) -> Tensor:
    from torchdiffeq import odeint

    times = torch.arange(count, dtype=torch.float64) * DELTA
    path = odeint(lambda t, p: speed(t, p, *field), start, times, method="rk4", options={"step_size": DELTA / SUBSTEPS})
    return path.movedim(0, 1)


def test_the_path_and_its_gradients_are_those_of_torchdiffeq() -> None:
    given = weights()
    ours = floater(torch.arange(9), *given, DELTA, SUBSTEPS)
    theirs = with_torchdiffeq(9, *given)
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)
    probe = torch.randn_like(ours)
    mine = torch.autograd.grad((ours * probe).sum(), given)
    for found, wanted in zip(mine, torch.autograd.grad((theirs * probe).sum(), given), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-9, rtol=0)


def test_the_operator_passes_gradcheck_and_opcheck() -> None:
    given, at = weights(3), torch.tensor([[0, 2, 2], [3, 1, 0]])
    assert torch.autograd.gradcheck(lambda *w: floater(at, *w, DELTA, 2), given)
    torch.library.opcheck(torch.ops.milepost.floater, (at, *given, DELTA, 2))
    only_start = floater(torch.zeros(1, 2).long(), *given, DELTA, 2)
    assert torch.equal(only_start[:, 0, 1], given[0])
    only_start.sum().backward()
    assert torch.equal(given[0].grad, torch.full_like(given[0], 2.0)) and not given[1].grad.any()


def code(encoding: Encoding, positions: Positions) -> Tensor:
    x = torch.zeros(1, positions.num_queries, encoding.config.width, dtype=torch.float64)
    return encoding.embed(x, positions)[0]


def test_the_path_kept_in_evaluation_grows_and_is_forgotten_when_weights_change() -> None:
    encoding = FLOATER(width=6).double().eval()
    fresh = code(encoding, Positions.full(30)).detach()
    with torch.no_grad():
        assert torch.equal(code(encoding, Positions.full(5)), fresh[:5])
        kept = encoding._known[1]
        steps = torch.cat([code(encoding, Positions.step(n)) for n in range(5, 30)])
        assert encoding._known[1].shape[0] == 30 > kept.shape[0] == 5
        torch.testing.assert_close(steps, fresh[5:], atol=1e-12, rtol=0)
        for change in (encoding.start, encoding.dynamics.w1, encoding.dynamics.b2):
            before = code(encoding, Positions.full(30))
            change.data = change.data + 0.1
            changed = code(encoding, Positions.full(30))
            assert not torch.allclose(before, changed)
            torch.testing.assert_close(changed, code(copy.deepcopy(encoding).train(), Positions.full(30)))
        assert pickle.loads(pickle.dumps(encoding))._known is None
        assert code(encoding.float(), Positions.full(4)).shape == (4, 6)


def test_positions_that_are_no_integers_are_refused() -> None:
    half = torch.tensor([[0.5]])
    with pytest.raises(ValueError, match="integer positions"):
        code(FLOATER(width=4), Positions.full(1).mapped(half, half))


def layers(**options: object) -> FLOATER:
    encoding = build("floater-layers", width=16, num_layers=3, num_heads=4, head_dim=4, **options)
    assert isinstance(encoding, FLOATER)
    return encoding


def test_one_dynamics_serves_all_layers_and_each_has_its_own_states() -> None:
    encoding = layers()
    shapes = {name: tuple(parameter.shape) for name, parameter in encoding.named_parameters()}
    assert [name for name in shapes if "dynamics" in name] == [
        f"layers.0.dynamics.{n}" for n in ("w1", "b1", "w2", "b2")
    ]
    assert [shape for name, shape in shapes.items() if name.endswith("start")] == [(3, 16)] * 3
    assert encoding.for_layer(1) is encoding.for_layer(4)
    again = copy.deepcopy(encoding)
    again.layers[0].dynamics.w2.data.zero_()
    positions = Positions.full(5)
    moved, kept = again.for_layer(2).states(positions.query), encoding.for_layer(2).states(positions.query)
    assert not torch.allclose(moved[:, 0, 1:], kept[:, 0, 1:]) and torch.equal(moved[:, 0, 0], kept[:, 0, 0])
    with pytest.raises(TypeError, match="for_layer"):
        encoding(positions)
    with pytest.raises(ValueError, match="needs num_layers"):
        FLOATER(width=16, layers="every")


def test_a_layer_adds_to_projected_queries_keys_and_values() -> None:
    layer, positions = layers().double().for_layer(1), Positions.full(7)
    q, k, v = (torch.randn(2, 4, 7, 4, dtype=torch.float64) for _ in range(3))
    bq, bk, bv = (state.unflatten(-1, (4, 4)).transpose(1, 2) for state in layer.states(positions.query))
    found = attend(q, k, v, positions, layer(positions))
    torch.testing.assert_close(found, attend(q + bq, k + bk, v + bv, positions))
    grouped = attend(q, k[:, :2], v[:, :2], positions, layer(positions))
    torch.testing.assert_close(grouped, attend(q + bq, k[:, :2] + bk[:, :2], v[:, :2] + bv[:, :2], positions))


def test_a_warm_start_changes_nothing_and_can_be_trained() -> None:
    base, warm = build("sinusoidal", width=16), FLOATER(width=16, warm_start=True)
    x, positions = torch.randn(2, 9, 16), Positions.full(9)
    assert torch.equal(Sum(base, warm).embed(x, positions), base.embed(x, positions))
    terms = layers(warm_start=True).for_layer(0)(positions)
    q = torch.randn(1, 4, 9, 4)
    assert torch.equal(attend(q, q, q, positions, terms), attend(q, q, q, positions))
    warm.embed(x, positions).square().sum().backward()
    assert warm.start.grad.any() and warm.dynamics.w2.grad.any() and warm.dynamics.b2.grad.any()


def test_published_initial_values() -> None:
    encoding = build("floater-layers", width=64, num_layers=8, num_heads=4, head_dim=16)
    reference = torch.nn.init.xavier_uniform_(torch.empty(3, 8, 64))
    starts = torch.stack([layer.start for layer in encoding.layers]).detach()
    assert float(starts.abs().max()) == pytest.approx(float(reference.abs().max()), rel=0.02)
    dynamics = encoding.layers[0].dynamics
    assert float(dynamics.w1.detach().std()) == pytest.approx((2 / (64 + 65)) ** 0.5, rel=0.05)
    assert not dynamics.b1.any() and not dynamics.b2.any()
