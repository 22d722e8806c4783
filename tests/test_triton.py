"""The Triton kernels: run in Triton's interpreter, and compiled for accelerators that need not be there."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from milepost import Positions, attend, build, explain
from milepost.attention import fused

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (it has no build for this platform)"
)


@pytest.mark.slow
@needs_triton
def test_in_tritons_interpreter() -> None:
    """All of triton_cases.py, in a process of its own: the interpreter must be chosen before triton is imported."""
    command = [sys.executable, "-m", "pytest", str(HERE / "triton_cases.py"), "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, cwd=HERE.parent)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 30 and "skipped" not in done.stdout, done.stdout[-1000:]


@pytest.mark.slow
@needs_triton
def test_the_kernels_compile_for_an_accelerator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Down to machine code for compute capability 8.0, in bfloat16 with heads of 64; nothing is run."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from milepost.attention import triton_kernel

    pointers = {
        **dict.fromkeys(["q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v"], "*bf16"),
        **dict.fromkeys(["table", "tops", "key_norms", "lse", "delta", "grad_table"], "*fp32"),
        **dict.fromkeys(["lo", "hi", "begin", "end"], "*i32"),
        **dict.fromkeys(["scale", "log_ratio"], "fp32"),
    }
    constants = {"SKIP": True, "BM": 64, "BN": 64, "BD": 64, "BV": 64, "SPAN": 4, "TABLE": True, "WIDTH": 128}
    for kernel in (triton_kernel._forward_kernel, triton_kernel._query_kernel, triton_kernel._key_kernel):
        mine = {name: value for name, value in constants.items() if name in kernel.arg_names}
        signature = {name: "constexpr" if name in mine else pointers.get(name, "i32") for name in kernel.arg_names}
        compiled = triton.compile(ASTSource(kernel, signature, mine), target=GPUTarget("cuda", 80, 32))
        assert compiled.asm["cubin"] and compiled.metadata.shared <= 99 * 1024


def test_it_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    positions = Positions.full(20)
    q = torch.randn(1, 4, 20, 16)
    terms = build("alibi", num_heads=4)(positions)
    assert "TRITON_INTERPRET=1" in explain(q, q, q, positions, terms).reasons["triton"]
    with pytest.raises(ValueError, match="only its interpreter"):
        attend(q, q, q, positions, terms, backend="triton")
    assert "not for mps" in str(fused.unavailable(torch.device("mps")))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install triton" in str(fused.unavailable(torch.device("cuda")))


def test_what_an_accelerator_would_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decided from shapes and devices alone, so that it can be asked without one."""
    monkeypatch.setattr(fused, "unavailable", lambda device: None)
    positions = Positions.full(256)
    q = torch.empty(1, 4, 256, 64, device="meta")
    learned = build("kerple-log", num_heads=4)(positions)
    assert fused.refuses(q, q, q, positions, learned) is None
    assert fused.discouraged(q, q, q, positions, learned) is None
    plain = build("nope")(positions)
    assert fused.discouraged(q, q, q, positions, plain) == "no bias: torch's own kernel is made for it"
    few = positions.rows(250, 256)
    assert "queries" in str(fused.discouraged(q[:, :, 250:], q, q, few, build("alibi", num_heads=4)(few)))
    wide = torch.empty(1, 4, 256, 512, device="meta")
    assert "256 numbers" in str(fused.refuses(wide, wide, wide, positions, learned))
    assert "dtypes" in str(fused.refuses(q.half(), q, q, positions, learned))
