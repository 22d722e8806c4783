"""CONTRIBUTING.md promises an encoding in 30 lines: this runs its text."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def test_the_example_has_at_most_30_lines_of_its_own() -> None:
    code = [line for line in BLOCKS[0].splitlines() if line.strip() and not re.match(r"(from|import) ", line)]
    assert len(code) <= 30


def test_the_example_runs_as_written(tmp_path: Path) -> None:
    # In a process of its own: it registers an encoding that the catalogue of this process must not have.
    script = tmp_path / "octaves.py"
    script.write_text("\n".join(BLOCKS) + "\nprint('ran', octaves.name, tuple(whole.shape))\n")
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "ran octaves (1, 4, 12, 16)\n"


@pytest.mark.parametrize("target", re.findall(r"^make (\w+)", TEXT, re.MULTILINE))
def test_every_make_target_it_names_exists(target: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)
