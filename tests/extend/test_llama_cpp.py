"""llama.cpp's own rotation, executed where its Python package is installed, against our writing of its formula."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from milepost.encodings.frequencies import NTK, ByParts, FrequencyMethod, Linear, Llama3, LongRope, PartNTK, Yarn
from milepost.extend.engines import llama_cpp_frequencies
from milepost.extend.export import export, llama_cpp_rope

llama_cpp = pytest.importorskip("llama_cpp", reason="builds llama.cpp on installation: pip install llama-cpp-python")

F32, I32 = 0, 26  # ggml_type


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def libraries() -> tuple[Any, Any]:
    folder = Path(llama_cpp.__file__).parent / "lib"
    base, cpu = (
        ctypes.CDLL(str(next(folder.glob(f"libggml-{part}.*"))), mode=ctypes.RTLD_GLOBAL) for part in ("base", "cpu")
    )
    pointer, integer, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
    for name, result, arguments in (
        ("ggml_init", pointer, [InitParams]),
        ("ggml_new_tensor_1d", pointer, [pointer, integer, ctypes.c_int64]),
        ("ggml_new_tensor_3d", pointer, [pointer, integer, *[ctypes.c_int64] * 3]),
        ("ggml_get_data", pointer, [pointer]),
        ("ggml_rope_ext", pointer, [*[pointer] * 4, *[integer] * 3, *[real] * 6]),
        ("ggml_new_graph", pointer, [pointer]),
        ("ggml_build_forward_expand", None, [pointer, pointer]),
        ("ggml_free", None, [pointer]),
    ):
        function = getattr(base, name)
        function.restype, function.argtypes = result, arguments
    cpu.ggml_graph_compute_with_ctx.argtypes = [pointer, pointer, integer]
    return base, cpu


def rotated(settings: Any, n_ctx: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Angle and length of every pair (1, 0) that ggml turns from position 1, as llama.cpp would call it."""
    base, cpu = libraries()
    dim = settings.dimension_count
    context = base.ggml_init(InitParams(1 << 24, None, False))
    x = base.ggml_new_tensor_3d(context, F32, dim, 1, 1)
    ctypes.memmove(base.ggml_get_data(x), (ctypes.c_float * dim)(*[1.0, 0.0] * (dim // 2)), 4 * dim)
    position = base.ggml_new_tensor_1d(context, I32, 1)
    ctypes.memmove(base.ggml_get_data(position), (ctypes.c_int32 * 1)(1), 4)
    original = settings.original_context_length or settings.context_length
    divisors = settings.rope_freqs
    if divisors is None:
        divisors = settings.rope_factors_long if n_ctx > original else settings.rope_factors_short
    factors = None
    if divisors is not None:
        factors = base.ggml_new_tensor_1d(context, F32, dim // 2)
        ctypes.memmove(base.ggml_get_data(factors), (ctypes.c_float * (dim // 2))(*divisors), 2 * dim)
    yarn = settings.scaling_type == "yarn"
    scale = 1 / settings.scaling_factor if settings.scaling_type in ("linear", "yarn") else 1.0
    result = base.ggml_rope_ext(
        *(context, x, position, factors, dim, 0, original, settings.freq_base, scale, float(yarn)),
        *(settings.attn_factor, settings.beta_fast, settings.beta_slow),
    )
    graph = base.ggml_new_graph(context)
    base.ggml_build_forward_expand(graph, result)
    cpu.ggml_graph_compute_with_ctx(context, graph, 1)
    values = torch.tensor((ctypes.c_float * dim).from_address(base.ggml_get_data(result))[:]).double().view(-1, 2)
    base.ggml_free(context)
    return torch.atan2(values[:, 1], values[:, 0]), values.norm(dim=1)


C: dict[str, Any] = {"rotary_dim": 128, "base": 10000.0}
S: dict[str, Any] = {**C, "trained_length": 4096, "factor": 8.0}
METHODS: dict[str, FrequencyMethod] = {
    "linear": Linear(**C, factor=4.0),
    "ntk": NTK(**C, factor=4.0),
    "by_parts": ByParts(**S),
    "by_parts_index": ByParts(**S, ramp="index"),
    "part_ntk": PartNTK(**S),
    "yarn": Yarn(**S),
    "yarn_explicit": Yarn(**S, attention_factor=1.0),
    "yarn_exact_ends": Yarn(**S, truncate=False),
    "llama3": Llama3(**S),
    "longrope": LongRope(
        **C,
        trained_length=4096,
        max_length=131072,
        short_factor=(1.0,) * 64,
        long_factor=tuple(1 + p / 8 for p in range(64)),
    ),
}


@pytest.mark.parametrize("n_ctx", [2048, 4096, 8192])
@pytest.mark.parametrize("name", METHODS)
def test_ggml_turns_pairs_as_the_export_says(name: str, n_ctx: int) -> None:
    method = METHODS[name]
    made = export(method, "llama.cpp", trained_length=4096)
    settings = llama_cpp_rope(made.gguf_keys, made.gguf_tensors)
    angles, lengths = rotated(settings, n_ctx)
    ours, wanted = llama_cpp_frequencies(settings, n_ctx=n_ctx), method.frequencies(n_ctx)
    for found in (ours, wanted):
        # ggml multiplies angles up pair by pair in float32: 64 roundings of 6e-8
        torch.testing.assert_close(angles, found.inv_freq.flatten(), rtol=1e-5, atol=0)
        assert float((lengths / float(found.attention_factor) - 1).abs().max()) < 1e-6
    if name == "yarn":
        assert float(lengths[0]) == pytest.approx(0.1 * math.log(8) + 1)
