"""What the package promises as a package: version, import rules, a light import, an optional compiler."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import milepost

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def python(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_version_is_the_same_everywhere() -> None:
    assert milepost.__version__ == PROJECT["version"] == importlib.metadata.version("milepost")
    assert f"## {milepost.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_dependency_is_pinned_within_its_range() -> None:
    pinned = constraints()
    extras = PROJECT["optional-dependencies"].values()
    for requirement in map(Requirement, [*PROJECT["dependencies"], *(r for extra in extras for r in extra)]):
        assert Version(pinned[requirement.name]) in requirement.specifier, requirement


def test_import_rules_hold() -> None:
    command = [shutil.which("lint-imports", path=str(Path(sys.executable).parent)), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


def test_import_brings_only_torch() -> None:
    loaded = python("import sys, milepost; milepost.catalogue(); print(*sys.modules)").split()
    heavy = {"accelerate", "datasets", "matplotlib", "rich", "tensorboard", "torchdiffeq", "transformers", "typer"}
    assert "torch" in loaded
    assert heavy.isdisjoint(loaded)


def test_the_front_page_is_what_all_says() -> None:
    assert sorted(milepost.__all__) == milepost.__all__
    for name in milepost.__all__:
        assert getattr(milepost, name) is not None


# Without the build requirements at hand pip would fetch them; setuptools comes with torch.
PIP_WHEEL = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]


def wheel(tree: Path, out: Path, path: str) -> Path:
    command = [*PIP_WHEEL, "--wheel-dir", str(out), str(tree)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, "PATH": path})
    assert result.returncode == 0, result.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(
        ROOT / "src" / "milepost", copy / "src" / "milepost", ignore=shutil.ignore_patterns("_kernel*", "__pycache__")
    )
    return copy


def contents(built: Path) -> set[str]:
    return set(zipfile.ZipFile(built).namelist())


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_a_wheel_with_a_compiler_holds_the_kernel_and_is_bound_to_the_platform(tree: Path, tmp_path: Path) -> None:
    built = wheel(tree, tmp_path, os.environ["PATH"])
    assert "-py3-none-linux_" in built.name
    assert any(re.fullmatch(r"milepost/attention/_kernel\S*", name) for name in contents(built))


def test_a_wheel_without_a_compiler_is_pure_and_complete(tree: Path, tmp_path: Path) -> None:
    built = wheel(tree, tmp_path, path="/nonexistent")
    names = contents(built)
    assert built.name.endswith("-py3-none-any.whl")
    assert not any(name.startswith("milepost/attention/_kernel") for name in names)
    tracked = {
        path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "milepost").rglob("*") if path.is_file()
    }
    missing = {name for name in tracked - names if "__pycache__" not in name and "/_kernel" not in name}
    assert not missing
