"""The compiled attention kernel: found, loaded with ctypes, checked once against plain arithmetic, and called.

``MILEPOST_KERNEL`` chooses the instruction set: ``avx512``, ``avx2``, ``portable``, or ``off`` for no kernel at all.
Unset, the best one that the processor has. ``MILEPOST_KERNEL_PATH`` names another library file.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from milepost.attention.tiles import outside_the_table

DIRECTORY = Path(__file__).resolve().parent
HOW_TO_GET_IT = "compile it with `python -m milepost.attention.build` (needs g++ or clang++)"


class _View(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "row"))]


class _Call(ctypes.Structure):
    """`Call` of kernel.cpp, member for member."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "heads", "key_heads", "queries", "keys", "size", "value_size")),
        *((name, ctypes.c_int64) for name in ("first", "distances", "offset", "intervals")),
        *((name, ctypes.c_double) for name in ("scale", "skip_eps")),
        *((name, ctypes.c_int64) for name in ("dtype", "threads", "table_grad")),
        *((name, _View) for name in ("q", "k", "v", "out", "grad_out")),
        *((name, ctypes.c_void_p) for name in ("table", "lo", "hi", "key_bound", "grad_lse", "lse", "result")),
        *((name, ctypes.c_void_p) for name in ("grad_q", "grad_k", "grad_v", "grad_table")),
    ]


class _Turn(ctypes.Structure):
    """`Turn` of kernel.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "heads", "length", "size", "pairs", "interleaved", "dtype")),
        ("threads", ctypes.c_int64),
        ("rest", ctypes.c_double),
        *((name, _View) for name in ("x", "cos", "sin", "out")),
    ]


@dataclass(frozen=True)
class Kernel:
    """A loaded library that passed its self-test, and the instruction set it is asked for."""

    library: ctypes.CDLL
    name: str


def call_size() -> int:
    """Bytes of the records that calls pass to the library."""
    return ctypes.sizeof(_Call) + ctypes.sizeof(_Turn)


def unavailable() -> str | None:
    """Why there is no compiled kernel in this process, or None."""
    found = _load(os.environ.get("MILEPOST_KERNEL", ""), os.environ.get("MILEPOST_KERNEL_PATH", ""))
    return found if isinstance(found, str) else None


def instruction_set() -> str | None:
    """The instruction set in use, or None without a kernel."""
    found = _load(os.environ.get("MILEPOST_KERNEL", ""), os.environ.get("MILEPOST_KERNEL_PATH", ""))
    return None if isinstance(found, str) else found.name


def cannot(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> str | None:
    """Why the kernel does not take these tensors, or None."""
    return unfit(q, k, v, table) or unavailable()


def unfit(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None) -> str | None:
    """Why no kernel of this library would take these tensors, or None; asks nothing of the machine."""
    for x in (q, k, v):
        if x.device.type != "cpu":
            return f"it runs on the CPU, the tensors are on {x.device}"
    if q.dtype not in (torch.float32, torch.bfloat16):
        return f"it takes float32 and bfloat16, not {str(q.dtype).removeprefix('torch.')}"
    if k.dtype != q.dtype or v.dtype != q.dtype:
        return f"q, k and v are of different dtypes: {q.dtype}, {k.dtype}, {v.dtype}"
    if table is not None and table.dtype != torch.float32:
        return f"it takes a float32 table, not {str(table.dtype).removeprefix('torch.')}"
    for name, size in (("head", q.shape[3]), ("value", v.shape[3])):
        if size % 8 or not 8 <= size <= 256:
            return f"it takes {name} sizes of 8 to 256 in steps of 8, not {size}"
    return None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lo: Tensor,
    hi: Tensor,
    first: int,
    offset: int,
    scale: float,
    skip_eps: float,
    key_bound: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp) of arguments whose shapes fit."""
    return _forward(_kernel(), q, k, v, table, lo, hi, first, offset, scale, skip_eps, key_bound)


def backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lo: Tensor,
    hi: Tensor,
    out: Tensor,
    lse: Tensor,
    first: int,
    offset: int,
    scale: float,
    skip_eps: float,
    key_bound: Tensor | None,
    *,
    table_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and table (empty unless `table_grad`)."""
    arguments = (grad_out, grad_lse, q, k, v, table, lo, hi, out, lse, first, offset, scale, skip_eps, key_bound)
    return _backward(_kernel(), *arguments, table_grad=table_grad)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, *, interleaved: bool, rest: float) -> None:
    """Write to `out` (which may be x) what `rotation.turn` says.

    x and out (B, H, n, D) of one dtype, float32 or bfloat16; cos and sin (B|1, H|1, n|1, P) float32; last axes
    contiguous.
    """
    _rotate(_kernel(), x, cos, sin, out, interleaved=interleaved, rest=rest)


def _kernel() -> Kernel:
    found = _load(os.environ.get("MILEPOST_KERNEL", ""), os.environ.get("MILEPOST_KERNEL_PATH", ""))
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


# The loaded library is the one thing a process keeps: dlopen would keep it anyway.
@cache
def _load(wanted: str, path: str) -> Kernel | str:
    if wanted == "off":
        return "it is switched off by MILEPOST_KERNEL=off"
    if wanted not in ("", "avx512", "avx2", "portable"):
        return f"MILEPOST_KERNEL={wanted!r} is none of avx512, avx2, portable, off"
    from milepost.attention import build  # a program of its own, too: `python -m` wants it not yet imported

    file = Path(path) if path else DIRECTORY / build.LIBRARY
    if not file.exists():
        return f"{file.name} is not there: {HOW_TO_GET_IT}"
    try:
        library = ctypes.CDLL(str(file))
        library.milepost_source.restype = ctypes.c_char_p
        library.milepost_call_size.restype = ctypes.c_int64
        library.milepost_instruction_set.restype = ctypes.c_char_p
        library.milepost_instruction_set.argtypes = [ctypes.c_char_p]
        for function in (library.milepost_forward, library.milepost_backward):
            function.restype = ctypes.c_int
            function.argtypes = [ctypes.POINTER(_Call), ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64)]
        library.milepost_rotate.restype = ctypes.c_int
        library.milepost_rotate.argtypes = [ctypes.POINTER(_Turn), ctypes.c_char_p]
    except (OSError, AttributeError) as error:
        return f"{file.name} could not be loaded ({error}): {HOW_TO_GET_IT}"
    if library.milepost_source() != build.source_hash().encode() or library.milepost_call_size() != call_size():
        return f"{file.name} was compiled from another kernel.cpp than the one here: {HOW_TO_GET_IT}"
    name = library.milepost_instruction_set(wanted.encode())
    if name is None:
        return f"this processor does not have {wanted} (MILEPOST_KERNEL={wanted})"
    kernel = Kernel(library, name.decode())
    wrong = _self_test(kernel)
    return kernel if wrong is None else f"its self-test failed with {kernel.name}: {wrong}"


def _rows(x: Tensor) -> Tensor:
    """The tensor itself if its last axis is contiguous, else a contiguous copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _intervals(lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
    if lo.shape[0] != hi.shape[0]:
        lo, hi = torch.broadcast_tensors(lo, hi)
    return lo.long().contiguous(), hi.long().contiguous()


def _per_key_head(k: Tensor, bound: Tensor | None) -> Tensor | None:
    return None if bound is None else bound.float().expand(k.shape[0], k.shape[1]).contiguous()


def _view(x: Tensor) -> _View:
    return _View(x.data_ptr(), *x.stride()[:3])


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lo: Tensor,
    hi: Tensor,
    first: int,
    offset: int,
    scale: float,
    skip_eps: float,
    key_bound: Tensor | None,
) -> _Call:
    call = _Call()
    call.batch, call.heads, call.queries, call.size = q.shape
    call.key_heads, call.keys, call.value_size = v.shape[1:]
    call.first, call.distances, call.offset, call.intervals = first, table.shape[1], offset, lo.shape[0]
    call.scale, call.skip_eps = scale, skip_eps
    call.dtype, call.threads = int(q.dtype == torch.bfloat16), torch.get_num_threads()
    call.q, call.k, call.v = _view(q), _view(k), _view(v)
    call.table, call.lo, call.hi = table.data_ptr(), lo.data_ptr(), hi.data_ptr()
    call.key_bound = None if key_bound is None else key_bound.data_ptr()
    return call


def _run(kernel: Kernel, function: Callable[..., int], call: _Call) -> None:
    reach = (ctypes.c_int64 * 2)()
    failed = function(ctypes.byref(call), kernel.name.encode(), reach)
    if failed == 3:
        raise outside_the_table(reach[0], reach[1], call.first, call.distances)
    if failed:
        raise MemoryError("the attention kernel could not allocate its buffers")


def _forward(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lo: Tensor,
    hi: Tensor,
    first: int,
    offset: int,
    scale: float,
    skip_eps: float,
    key_bound: Tensor | None,
) -> tuple[Tensor, Tensor]:
    q, k, v, table, key_bound = _rows(q), _rows(k), _rows(v), table.contiguous(), _per_key_head(k, key_bound)
    lo, hi = _intervals(lo, hi)
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    call = _call(q, k, v, table, lo, hi, first, offset, scale, skip_eps, key_bound)
    call.result, call.lse = out.data_ptr(), lse.data_ptr()
    _run(kernel, kernel.library.milepost_forward, call)
    return out, lse


def _backward(
    kernel: Kernel,
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lo: Tensor,
    hi: Tensor,
    out: Tensor,
    lse: Tensor,
    first: int,
    offset: int,
    scale: float,
    skip_eps: float,
    key_bound: Tensor | None,
    *,
    table_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, table, key_bound = _rows(q), _rows(k), _rows(v), table.contiguous(), _per_key_head(k, key_bound)
    lo, hi = _intervals(lo, hi)
    lse, grad_lse = lse.contiguous(), grad_lse.float().contiguous()
    out, grad_out = _rows(out), _rows(grad_out.to(q.dtype))
    grads = [torch.empty(x.shape, dtype=torch.float32) for x in (q, k, v)]
    grad_table = table.new_empty(table.shape if table_grad else (0,))
    call = _call(q, k, v, table, lo, hi, first, offset, scale, skip_eps, key_bound)
    call.out, call.grad_out = _view(out), _view(grad_out)
    call.lse, call.grad_lse = lse.data_ptr(), grad_lse.data_ptr()
    call.grad_q, call.grad_k, call.grad_v = (x.data_ptr() for x in grads)
    call.table_grad, call.grad_table = int(table_grad), grad_table.data_ptr() if table_grad else None
    _run(kernel, kernel.library.milepost_backward, call)
    return grads[0].to(q.dtype), grads[1].to(k.dtype), grads[2].to(v.dtype), grad_table


def _rotate(
    kernel: Kernel, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, *, interleaved: bool, rest: float
) -> None:
    turn = _Turn()
    turn.batch, turn.heads, turn.length, turn.size = x.shape
    turn.pairs, turn.interleaved, turn.dtype = cos.shape[3], int(interleaved), int(x.dtype == torch.bfloat16)
    turn.threads, turn.rest = torch.get_num_threads(), rest
    turn.x, turn.out = _view(x), _view(out)
    cos, sin = cos.expand(*x.shape[:3], -1), sin.expand(*x.shape[:3], -1)
    turn.cos, turn.sin = _view(cos), _view(sin)
    if kernel.library.milepost_rotate(ctypes.byref(turn), kernel.name.encode()):
        raise MemoryError("the rotation kernel could not allocate its buffers")


def _self_test(kernel: Kernel) -> str | None:
    """Forward and backward of a small grouped case with a window, against the formulas; what differs, or None."""
    length, scale = 150, 0.2
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, 24, generator=generator) for heads in (2, 1, 1))
    grad = torch.randn(q.shape, generator=generator)
    table = torch.randn(2, length, generator=generator)
    place = torch.arange(length)
    distance = place[:, None] - place
    lo, hi = (place - 99).clamp(min=0)[None], place[None] + 1
    logits = scale * q @ k.mT + table[:, distance.clamp(min=0)]
    logits = logits.masked_fill((distance < 0) | (distance > 99), -math.inf)
    p = logits.softmax(-1)
    slope = p * (grad @ v.mT - (grad * (p @ v)).sum(-1, keepdim=True))
    grad_table = torch.zeros_like(table).index_add_(1, distance.clamp(min=0).flatten(), slope[0].flatten(1))
    want = {
        "out": p @ v,
        "log-sum-exp": logits.logsumexp(-1),
        "grad q": scale * slope @ k,
        "grad k": scale * (slope.mT @ q).sum(1, keepdim=True),
        "grad v": (p.mT @ grad).sum(1, keepdim=True),
        "grad table": grad_table,
    }
    settings = (0, 0, scale, 0.0, None)
    out, lse = _forward(kernel, q, k, v, table, lo, hi, *settings)
    none = torch.zeros_like(lse)
    grads = _backward(kernel, grad, none, q, k, v, table, lo, hi, out, lse, *settings, table_grad=True)
    for (name, right), got in zip(want.items(), (out, lse, *grads), strict=True):
        error = float((got - right).abs().max())
        if not error < 1e-4:
            return f"{name} is off by {error:.2g}"
    angles = torch.randn(1, 1, length, 10, generator=generator)
    cos, sin, turned = angles.cos(), angles.sin(), torch.empty_like(q)
    _rotate(kernel, q, cos, sin, turned, interleaved=False, rest=1.0)
    a, b, rest = q.split([10, 10, 4], -1)
    error = float((turned - torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)).abs().max())
    return None if error < 1e-5 else f"a rotation is off by {error:.2g}"
