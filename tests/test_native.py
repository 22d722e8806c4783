"""The compiled kernel: how it is built, chosen, checked, switched off, and what it leaves alone."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from milepost.attention import attend, build, explain, library
from milepost.attention.blocked import distance_attention
from milepost.positions import Positions
from milepost.terms import DistanceBias, Terms

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler on this machine")
needs_kernel = pytest.mark.skipif(library.unavailable() is not None, reason=f"no kernel: {library.unavailable()}")


def inputs(length: int = 200, heads: int = 4, key_heads: int = 2, size: int = 24, seed: int = 0):
    torch.manual_seed(seed)
    q = torch.randn(2, heads, length, size)
    k, v = (torch.randn(2, key_heads, length, size) for _ in range(2))
    table = -torch.rand(heads, 1) * torch.arange(length)
    place = torch.arange(length)[None]
    return q, k, v, table, torch.zeros_like(place), place + 1


def both_directions(implementation: str = "native", **options):
    *tensors, lo, hi = inputs(**options)
    leaves = [x.requires_grad_() for x in tensors]
    out, lse = distance_attention(*leaves, lo, hi, first=0, offset=0, scale=0.2, implementation=implementation)
    generator = torch.Generator().manual_seed(1)
    loss = (out * torch.randn(out.shape, generator=generator)).sum() + lse.sum()
    return out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)


# ---- building --------------------------------------------------------------------------------------------------------


@needs_compiler
def test_build_makes_a_library_that_passes_its_self_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build.build(tmp_path, extra=["-O0"])
    assert made == tmp_path / "_kernel.so" and list(tmp_path.iterdir()) == [made]
    monkeypatch.setenv("MILEPOST_KERNEL_PATH", str(made))
    assert library.unavailable() is None


def test_without_a_compiler_nothing_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.compiler() is None
    assert build.build(tmp_path) is None and not list(tmp_path.iterdir())
    said = subprocess.run(
        [sys.executable, build.__file__], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert said.returncode == 1 and "install g++ or clang++" in said.stderr


@needs_compiler
def test_a_failing_compiler_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match="no-such-flag"):
        build.build(tmp_path, extra=["-no-such-flag"])
    assert not list(tmp_path.iterdir())


def test_the_build_script_needs_no_torch() -> None:
    code = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path(sys.argv[1], run_name='not_main')"
    subprocess.run([sys.executable, "-c", code, build.__file__], check=True)


def other_compiler(program: str, target: str) -> list[str]:
    """That program, or clang as the package ziglang brings it (`pip install ziglang`), where it is installed."""
    if shutil.which(program) is not None:
        return [program]
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip(f"neither {program} nor the package ziglang, which could stand in for it, is on this machine")
    return [sys.executable, "-m", "ziglang", "c++", "-target", target]


def test_it_compiles_for_arm(tmp_path: Path) -> None:
    command = other_compiler("aarch64-linux-gnu-g++", "aarch64-linux-gnu")
    made = build.build(tmp_path, extra=["-O0"], command=command)
    assert made is not None and int.from_bytes(made.read_bytes()[18:20], "little") == 183  # AArch64, in an ELF header


def test_clang_compiles_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build.build(tmp_path, extra=["-O0"], command=other_compiler("clang++", "x86_64-linux-gnu"))
    monkeypatch.setenv("MILEPOST_KERNEL_PATH", str(made))
    assert library.unavailable() is None


# ---- choosing and refusing -------------------------------------------------------------------------------------------


def served(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """Where there is no kernel: `explain` says why, "native" refuses, and attention is computed all the same."""
    assert reason in str(library.unavailable())
    q, k, v, table, *_ = inputs()
    positions = Positions.full(200)
    terms = Terms(bias=DistanceBias(table, positions, 0))
    explanation = explain(q, k, v, positions, terms)
    assert explanation.chosen != "native" and reason in explanation.reasons["native"]
    with pytest.raises(ValueError, match="backend 'native' refuses"):
        attend(q, k, v, positions, terms, backend="native")
    with pytest.raises(RuntimeError, match="the compiled attention kernel cannot run here"):
        both_directions("native")
    wanted = attend(q, k, v, positions, terms, backend="reference")
    torch.testing.assert_close(attend(q, k, v, positions, terms), wanted, atol=1e-5, rtol=0)
    for got, right in zip(both_directions("auto"), both_directions("torch"), strict=True):
        assert torch.equal(got, right)


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILEPOST_KERNEL", "off")
    served(monkeypatch, "switched off by MILEPOST_KERNEL=off")
    assert library.instruction_set() is None


def test_an_unknown_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILEPOST_KERNEL", "avx1024")
    served(monkeypatch, "MILEPOST_KERNEL='avx1024' is none of avx512, avx2, portable, off")


def test_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MILEPOST_KERNEL_PATH", str(tmp_path / "_kernel.so"))
    served(monkeypatch, "python -m milepost.attention.build")


def test_a_library_that_does_not_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"\x7fELF but not for long")
    monkeypatch.setenv("MILEPOST_KERNEL_PATH", str(broken))
    served(monkeypatch, "broken.so could not be loaded")


STUB = """
#include <stdint.h>
extern "C" {
const char *milepost_source() { return "SOURCE"; }
int64_t milepost_call_size() { return SIZE; }
const char *milepost_instruction_set(const char *) { return NAME; }
int milepost_forward(void *, const char *, int64_t *) { return 0; }
int milepost_backward(void *, const char *, int64_t *) { return 0; }
int milepost_rotate(void *, const char *) { return 0; }
}
"""


@needs_compiler
@pytest.mark.parametrize(
    "made_from, name, wanted, reason",
    [
        ("an older kernel.cpp", '"x"', "", "compiled from another kernel.cpp than the one here"),
        (build.source_hash(), "0", "avx512", "this processor does not have avx512"),
        (build.source_hash(), '"x"', "", "its self-test failed with x: out is off by"),
    ],
)
def test_a_library_that_must_not_be_used(
    made_from: str, name: str, wanted: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source, made = tmp_path / "stub.cpp", tmp_path / "stub.so"
    size = library.call_size()
    source.write_text(STUB.replace("SOURCE", made_from).replace("SIZE", str(size)).replace("NAME", name))
    command = build.compiler()
    assert command is not None
    subprocess.run([*command, "-shared", "-fPIC", str(source), "-o", str(made)], check=True)
    monkeypatch.setenv("MILEPOST_KERNEL_PATH", str(made))
    monkeypatch.setenv("MILEPOST_KERNEL", wanted)
    served(monkeypatch, reason)


@needs_kernel
@pytest.mark.parametrize("name", ["avx512", "avx2", "portable"])
def test_every_instruction_set_says_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILEPOST_KERNEL", name)
    reason = library.unavailable()
    if reason is not None and "this processor does not have" in reason:
        pytest.skip(reason)
    assert library.instruction_set() == name
    for size in (24, 64, 80):
        for got, right in zip(both_directions(size=size), both_directions("torch", size=size), strict=True):
            torch.testing.assert_close(got, right, atol=2e-4, rtol=1e-5)


# ---- manners ---------------------------------------------------------------------------------------------------------


@needs_kernel
def test_threads_change_no_bit() -> None:
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(both_directions(length=700, heads=2, key_heads=1, size=64))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


@needs_kernel
def test_denormals_are_left_to_the_caller() -> None:
    both_directions()
    tiny = torch.tensor([1e-30]) * torch.tensor([1e-10])
    assert float(tiny) > 0.0


ASAN = """
import itertools, os, torch
from milepost.attention import library
from milepost.attention.blocked import distance_attention
torch.manual_seed(0)
cases = [
    # queries, keys, heads, key heads, size, value size, window
    (1, 1, 1, 1, 8, 8, 0), (1, 130, 4, 2, 16, 24, 0), (7, 65, 3, 1, 40, 8, 0), (127, 129, 2, 2, 80, 80, 0),
    (100, 100, 2, 1, 24, 64, 11), (1, 77, 2, 1, 32, 16, 0), (6, 6, 1, 1, 256, 256, 0), (65, 200, 8, 1, 32, 32, 3),
]
for name, case in itertools.product(("avx512", "avx2", "portable"), cases):
    os.environ["MILEPOST_KERNEL"] = name
    if "this processor does not have" in str(library.unavailable()):
        continue
    assert library.instruction_set() == name, library.unavailable()
    queries, keys, heads, key_heads, size, value_size, window = case
    for dtype in (torch.float32, torch.bfloat16):
        for steep in (0.0, 3.0):
            q = torch.randn(2, heads, queries, size).to(dtype).requires_grad_()
            k = torch.randn(2, key_heads, keys, size).to(dtype).requires_grad_()
            v = torch.randn(2, key_heads, keys, value_size).to(dtype).requires_grad_()
            # A table of exactly the distances that are seen, and intervals that begin and end everywhere.
            place = torch.arange(keys - queries, keys)[None]
            lo = (place - window).clamp(min=0) if window else torch.zeros_like(place)
            count = int((place - lo).max()) + 1
            table = (torch.randn(heads, count) - steep * torch.arange(count)).requires_grad_()
            out, lse = distance_attention(q, k, v, table, lo, place + 1, first=0, offset=keys - queries, scale=0.3,
                                          implementation="native")
            (out.float().sum() + lse.sum()).backward()
            table = torch.randn(heads, 2 * keys + queries)
            hi = torch.randint(0, keys + 1, (2, queries))
            lo = torch.randint(0, keys + 1, (2, queries))
            distance_attention(q, k, v, table, lo, hi, first=-keys, offset=0, scale=0.3, implementation="native")
print("clean")
"""


@needs_kernel
@needs_compiler
@pytest.mark.slow
def test_no_read_or_write_outside_a_buffer(tmp_path: Path) -> None:
    """The kernel under AddressSanitizer, which guards every buffer of torch's and of its own."""
    command = build.compiler()
    assert command is not None
    runtime = [
        subprocess.run([*command, f"-print-file-name={file}"], capture_output=True, text=True).stdout.strip()
        for file in ("libasan.so", "libstdc++.so")
    ]
    if not all(os.path.isabs(file) for file in runtime):
        pytest.skip("the compiler has no AddressSanitizer")
    made = build.build(tmp_path, extra=["-fsanitize=address", "-O0"])
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(runtime),
        "ASAN_OPTIONS": "detect_leaks=0",
        "MILEPOST_KERNEL_PATH": str(made),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(library.__file__).parents[2]),
    }
    done = subprocess.run([sys.executable, "-c", ASAN], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "clean", done.stderr[-3000:]
