"""The rotation kernel: both layouts, partial, any strides, into a given tensor, gradients, and when it steps aside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from milepost.attention import library, rotation
from milepost.encodings.rotary import turn as turn_anything

AVAILABLE = library.unavailable() is None


@pytest.fixture(params=["kernel", "torch"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "kernel" and not AVAILABLE:
        pytest.skip(f"no compiled kernel: {library.unavailable()}")
    if request.param == "torch":
        monkeypatch.setenv("MILEPOST_KERNEL", "off")
    return request.param


def exact(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, rest: float) -> Tensor:
    """One complex number for each pair."""
    x, turns = x.double(), torch.complex(cos.double(), sin.double())
    pairs = cos.shape[-1]
    turned = x[..., : 2 * pairs]
    numbers = torch.stack([turned[..., 0::2], turned[..., 1::2]] if interleaved else turned.chunk(2, -1), -1)
    product = torch.view_as_real(torch.view_as_complex(numbers.contiguous()) * turns)
    parts = product.flatten(-2) if interleaved else torch.cat([product[..., 0], product[..., 1]], -1)
    return torch.cat([parts, rest * x[..., 2 * pairs :]], -1)


def tensors(shape=(2, 3, 70, 48), pairs: int = 24, angles=(1, 1, 70), dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    angle = 10 * torch.randn(*angles, pairs)
    return torch.randn(shape).to(dtype), angle.cos(), angle.sin()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [1, 5, 8, 16, 24])
@pytest.mark.parametrize("rest", [1.0, 0.5])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float64, 1e-6)])
def test_equals_complex_numbers(interleaved: bool, pairs: int, rest: float, dtype, tolerance: float) -> None:
    x, cos, sin = tensors(pairs=pairs, dtype=dtype)
    got = rotation.turn(x, cos, sin, interleaved=interleaved, rest=rest)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact(x, cos, sin, interleaved, rest), rtol=0, atol=tolerance)
    if rest == 1.0:
        assert torch.equal(got[..., 2 * pairs :], x[..., 2 * pairs :])


@pytest.mark.parametrize("angles", [(1, 1, 70), (2, 1, 70), (1, 3, 70), (2, 3, 70), (2, 3, 1), (1, 1, 1)])
@pytest.mark.parametrize("layout", ["plain", "transposed", "strided"])
def test_angles_spread_and_any_strides(angles, layout: str) -> None:
    x, cos, sin = tensors(angles=angles)
    if layout == "transposed":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "strided":
        x = torch.stack([x, x], -1)[..., 0]
    torch.testing.assert_close(rotation.turn(x, cos, sin).double(), exact(x, cos, sin, False, 1.0), rtol=0, atol=2e-6)


def test_bfloat16_is_rounded_once() -> None:
    x, cos, sin = tensors(dtype=torch.bfloat16)
    assert torch.equal(rotation.turn(x, cos, sin), rotation.turn(x.float(), cos, sin).bfloat16())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [10, 24])
def test_into_a_given_tensor_and_in_place(interleaved: bool, pairs: int) -> None:
    x, cos, sin = tensors(pairs=pairs)
    want = rotation.turn(x, cos, sin, interleaved=interleaved, rest=2.0)
    out = torch.full((2, 70, 3, 48), 7.0).transpose(1, 2)
    assert rotation.turn_into(x, cos, sin, out, interleaved=interleaved, rest=2.0) is out
    torch.testing.assert_close(out, want, rtol=0, atol=1e-6)
    rotation.turn_into(x, cos, sin, x, interleaved=interleaved, rest=2.0)
    torch.testing.assert_close(x, want, rtol=0, atol=1e-6)


def test_not_finite_stays_where_it_is() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, cos, sin = tensors(dtype=dtype)
        x[0, 0, 0, 0], x[0, 0, 1, 0] = torch.nan, torch.inf
        got = rotation.turn(x, cos, sin)
        assert got[0, 0, 0, [0, 24]].isnan().all() and got[0, 0, 1, [0, 24]].isinf().all()
        assert (~got.isfinite()).sum() == 4


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients(interleaved: bool) -> None:
    x, cos, sin = tensors(pairs=20)
    a, b = x.clone().requires_grad_(), x.double().requires_grad_()
    weight = torch.randn(x.shape)
    got = torch.autograd.grad((rotation.turn(a, cos, sin, interleaved=interleaved, rest=0.5) * weight).sum(), a)
    want = torch.autograd.grad((exact(b, cos, sin, interleaved, 0.5) * weight).sum(), b)
    torch.testing.assert_close(got[0].double(), want[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_opcheck(transposed: bool) -> None:
    x, cos, sin = tensors((2, 3, 7, 48), angles=(1, 1, 7))
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if transposed else x
    torch.library.opcheck(torch.ops.milepost.turn.default, (x.requires_grad_(), cos, sin, True, 0.5))


@pytest.mark.parametrize("factor", [None, 1.5, "tensor"])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("pairs", [10, 24])
def test_encodings_turn_by_it(factor, layout: str, pairs: int) -> None:
    x, cos, sin = tensors(pairs=pairs)
    by = torch.rand(2, 1, 70, 1) if factor == "tensor" else factor
    want = exact(x, cos, sin, layout == "interleaved", 1.0) * (1.0 if by is None else by)
    torch.testing.assert_close(turn_anything(x, cos, sin, layout, factor=by).double(), want, rtol=0, atol=5e-6)


def test_it_steps_aside(implementation: str) -> None:
    x, cos, sin = tensors()
    assert rotation.serves(x, cos, sin, None) == (implementation == "kernel")
    assert not rotation.serves(x.double(), cos, sin, None)
    assert not rotation.serves(x, cos.double(), sin.double(), None)
    assert not rotation.serves(x, cos.clone().requires_grad_(), sin, None)
    with torch.no_grad():
        assert rotation.serves(x, cos.clone().requires_grad_(), sin, None) == (implementation == "kernel")
    learned = cos.clone().requires_grad_()
    turn_anything(x, learned, sin).sum().backward()
    assert learned.grad is not None and learned.grad.any()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x, c, s: (x[0], c, s), "2 P <= D"),
        (lambda x, c, s: (x[..., :40], c, s), "2 P <= D"),
        (lambda x, c, s: (x, c, s[..., :3]), "2 P <= D"),
        (lambda x, c, s: (x, c[:, :, :9], s[:, :, :9]), "does not spread over"),
    ],
)
def test_shapes_that_do_not_fit(change, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rotation.turn(*change(*tensors()))
    x, cos, sin = tensors()
    with pytest.raises(ValueError, match="out must be"):
        rotation.turn_into(x, cos, sin, x.bfloat16())
