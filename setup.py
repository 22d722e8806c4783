"""Compiles the attention kernel where a compiler is at hand; everything else stands in pyproject.toml.

The kernel is optional: whatever goes wrong here, the package installs and computes attention in torch alone.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ATTENTION = Path("milepost", "attention")
SOURCE = Path(__file__).resolve().parent / "src" / ATTENTION


def compile_kernel(target: Path) -> Path | None:
    """Compile `kernel.cpp` into `target` and return the library, or None where there is no kernel or no compiler."""
    script = SOURCE / "build.py"
    if not script.exists() or not (SOURCE / "kernel.cpp").exists():
        return None
    for stale in target.glob("_kernel*"):
        stale.unlink()
    try:
        spec = importlib.util.spec_from_file_location("milepost_kernel_build", script)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up by name
        spec.loader.exec_module(module)
        library = module.build(target)
    except Exception as error:  # no fault of a compiler may fail an installation
        print(f"milepost: the attention kernel was not compiled ({type(error).__name__}: {error})", file=sys.stderr)
        return None
    return None if library is None else Path(library)


class KernelDistribution(Distribution):
    """A distribution that is bound to a platform exactly when the kernel was compiled into it."""

    kernel: Path | None = None

    def has_ext_modules(self) -> bool:
        return self.kernel is not None


class BuildWithKernel(build_py):
    def run(self) -> None:
        super().run()
        target = SOURCE if self.editable_mode else Path(self.build_lib) / ATTENTION
        if target.is_dir():
            self.distribution.kernel = compile_kernel(target)


class KernelWheel(bdist_wheel):
    def run(self) -> None:
        self.run_command("build")
        self.root_is_pure = self.distribution.kernel is None
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform  # the kernel is loaded by ctypes: any Python 3 of this platform


setup(distclass=KernelDistribution, cmdclass={"build_py": BuildWithKernel, "bdist_wheel": KernelWheel})
