"""The rotation of queries and keys in one pass over memory, where the compiled kernel is at hand."""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.attention import library, tiles


def turn(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, rest: float = 1.0) -> Tensor:
    """Pair p of the first ``2 P`` channels becomes ``(a cos - b sin, b cos + a sin)``; the others times ``rest``.

    Pairs are channels (p, p + P), or (2p, 2p + 1) if `interleaved`. x (B, H, n, D); cos and sin (B|1, H|1, n|1, P) in
    float32. The result has the dtype and the layout of x, is computed in float32 and rounded once. Differentiable in x
    alone: whoever learns the angles takes other means. Raises ValueError where the shapes do not fit.
    """
    turned: Tensor = _turn(x, cos, sin, interleaved, rest)
    return turned


def turn_into(
    x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, *, interleaved: bool = False, rest: float = 1.0
) -> Tensor:
    """The same, written to `out` (of x's shape and dtype; it may be x itself) and returned; without gradients."""
    if out.shape != x.shape or out.dtype != x.dtype:
        raise ValueError(f"out must be {tuple(x.shape)} in {x.dtype} as x is, got {tuple(out.shape)} in {out.dtype}")
    with torch.no_grad():
        _compute(x, cos, sin, out, interleaved, rest)
    return out


def serves(x: Tensor, cos: Tensor, sin: Tensor, factor: float | Tensor | None) -> bool:
    """Whether the compiled kernel takes this rotation, whose rotated channels are to be multiplied with `factor`.

    Not while a graph is traced (a compiler fuses plain operations as well), nor where angles or factor are learned.
    """
    if torch.compiler.is_compiling() or tiles.transformed():
        return False
    if unfit(x, cos) is not None or library.unavailable() is not None:
        return False
    learned = cos.requires_grad or sin.requires_grad
    if isinstance(factor, Tensor):
        learned = learned or factor.requires_grad
        if x.shape[-1] != 2 * cos.shape[-1] or factor.dtype != torch.float32:
            return False
    return not (learned and torch.is_grad_enabled())


def unfit(x: Tensor, cos: Tensor) -> str | None:
    """Why the kernel does not take these tensors, or None; asks nothing of the machine."""
    if x.device.type != "cpu":
        return f"it runs on the CPU, x is on {x.device}"
    if x.dtype not in (torch.float32, torch.bfloat16) or cos.dtype != torch.float32:
        return f"it takes float32 and bfloat16 with angles in float32, not {x.dtype} with {cos.dtype}"
    return None


@torch.library.custom_op("milepost::turn", mutates_args=())
def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, rest: float) -> Tensor:
    out = torch.empty_like(x)
    _compute(x, cos, sin, out, interleaved, rest)
    return out


# Called by torch alone, with the operator's own arguments, whose types the operator's signature states: the
# registrations from here on have no annotations of their own.
@_turn.register_fake
def _(x, cos, sin, interleaved, rest):  # type: ignore[no-untyped-def]
    return torch.empty_like(x)


def _setup_context(ctx, inputs, output):  # type: ignore[no-untyped-def]
    _, cos, sin, ctx.interleaved, ctx.rest = inputs
    ctx.save_for_backward(cos, sin)


def _autograd(ctx, grad):  # type: ignore[no-untyped-def]
    cos, sin = ctx.saved_tensors
    return _turn(grad, cos, -sin, ctx.interleaved, ctx.rest), None, None, None, None


_turn.register_autograd(_autograd, setup_context=_setup_context)


def _compute(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, interleaved: bool, rest: float) -> None:
    pairs = cos.shape[-1]
    if x.dim() != 4 or cos.dim() != 4 or cos.shape != sin.shape or 2 * pairs > x.shape[3]:
        raise ValueError(
            f"x (B, H, n, D) and cos, sin (B|1, H|1, n|1, P) with 2 P <= D; got {tuple(x.shape)}, {tuple(cos.shape)}, "
            f"{tuple(sin.shape)}"
        )
    fits = all(mine in (1, theirs) for mine, theirs in zip(cos.shape[:3], x.shape[:3], strict=True))
    if not fits:
        raise ValueError(f"cos {tuple(cos.shape)} does not spread over x {tuple(x.shape)}")
    straight = out.stride(3) == 1
    if straight and x.numel() and unfit(x, cos) is None and library.unavailable() is None:
        x = x if x.stride(3) == 1 else x.contiguous()
        cos = cos if cos.stride(3) == 1 else cos.contiguous()
        sin = sin if sin.stride(3) == 1 else sin.contiguous()
        library.rotate(x, cos, sin, out, interleaved=interleaved, rest=rest)
        return
    work = torch.promote_types(x.dtype, cos.dtype)
    turned = x[..., : 2 * pairs].to(work)
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :pairs], turned[..., pairs:])
    first, second = a * cos - b * sin, b * cos + a * sin
    if interleaved:
        out[..., 0 : 2 * pairs : 2], out[..., 1 : 2 * pairs : 2] = first, second
    else:
        out[..., :pairs], out[..., pairs : 2 * pairs] = first, second
    others = x[..., 2 * pairs :]
    out[..., 2 * pairs :] = others if rest == 1.0 else others.to(work) * rest
