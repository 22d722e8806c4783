"""transformers' own tests of its rope functions, run as they are with our functions beside and in place of theirs.

Its test files are not in its package: point MILEPOST_TRANSFORMERS_TESTS at a checkout of the installed version.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("transformers")

CHECKOUT = os.environ.get("MILEPOST_TRANSFORMERS_TESTS")
TESTS = Path(CHECKOUT or ".", "tests", "utils", "test_modeling_rope_utils.py")

pytestmark = [
    pytest.mark.skipif(
        CHECKOUT is None,
        reason="transformers' test files are not in its package: set MILEPOST_TRANSFORMERS_TESTS to a checkout of it",
    ),
    pytest.mark.skipif(find_spec("parameterized") is None, reason="their tests need it: pip install parameterized"),
]

PLUGIN = """
import milepost

def pytest_configure(config):
    milepost.register_rope_types(override={override})
"""


def outcomes(folder: Path, override: bool | None) -> dict[str, str]:
    """Each of their tests: "passed", "skipped" or how it failed. ``override=None`` leaves our types out."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "ours.py").write_text("" if override is None else PLUGIN.format(override=override))
    options = ["-q", "-p", "no:cacheprovider", "-p", "ours", "--noconftest", "-c", "pytest.ini", f"--rootdir={folder}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(TESTS.resolve()), *options, "--junitxml=found.xml"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr  # 2 and above: the file could not be run
    found = {}
    for case in ElementTree.parse(folder / "found.xml").iter("testcase"):
        wrong = [part for part in case if part.tag in ("failure", "error")]
        skipped = case.find("skipped") is not None
        found[case.attrib["name"]] = wrong[0].attrib["message"] if wrong else "skipped" if skipped else "passed"
    return found


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """How their tests do without us; a checkout of another version than the installed one may fail some."""
    assert TESTS.is_file(), f"{TESTS} is no file: MILEPOST_TRANSFORMERS_TESTS must be a checkout of transformers"
    found = outcomes(tmp_path_factory.mktemp("theirs"), override=None)
    passed = sum(outcome == "passed" for outcome in found.values())
    assert passed > len(found) / 2, f"only {passed} of {len(found)} pass without us: check out the installed version"
    return found


@pytest.mark.parametrize("override", [False, True], ids=["beside", "in place"])
def test_what_passes_without_us_passes_with_us(theirs: dict[str, str], tmp_path: Path, override: bool) -> None:
    ours = outcomes(tmp_path, override)
    assert set(ours) == set(theirs)
    assert {name: ours[name] for name in ours if ours[name] != "passed" and theirs[name] == "passed"} == {}
