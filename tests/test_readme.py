"""Every command and every code block of README.md is run; long commands with small numbers."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text("utf-8")
FENCES = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
CONSOLE = "".join(body for language, body in FENCES if language == "console")
COMMANDS = re.findall(r"^\$ (milepost .*)$", CONSOLE, re.MULTILINE)
SMALL = {
    "compare": (
        "--methods mep,alibi --train-length 32 --test-lengths 32,64 --steps 2 --layers 1 --width 32 --heads 2 "
        "--regions 2 --no-passkey --quiet --workers 1"
    ),
}
"""Flags that make a command of the README short; it runs as it stands otherwise."""


def test_every_block_is_of_a_kind_that_is_run() -> None:
    assert {language for language, _ in FENCES} <= {"python", "text", "console", "sh"}
    assert "python" in dict(FENCES) and COMMANDS


def test_code_runs_and_prints_what_stands_below_it() -> None:
    space: dict[str, Any] = {}
    for number, (language, body) in enumerate(FENCES):
        if language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            torch.manual_seed(0)
            exec(compile(body, f"README.md, block {number}", "exec"), space)  # the README's own code, in order
        if number + 1 < len(FENCES) and FENCES[number + 1][0] == "text":
            assert printed.getvalue() == FENCES[number + 1][1]


def test_the_example_is_short() -> None:
    example = next(body for language, body in FENCES if language == "python")
    lines = [line for line in example.splitlines() if line.strip()]
    assert len([line for line in lines if not line.startswith(("import ", "from ", "print("))]) <= 4


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from milepost.cli import run

    monkeypatch.chdir(tmp_path)
    arguments = shlex.split(command)[1:]
    code = run([*arguments, *shlex.split(SMALL.get(arguments[0], ""))])
    out = capsys.readouterr()
    assert code == 0, out.err
    if "--out" in arguments:
        assert (tmp_path / arguments[arguments.index("--out") + 1]).exists()
    if arguments[0] == "compare":
        folder = tmp_path / arguments[arguments.index("--out") + 1]
        assert (folder / "report.html").exists() and (folder / "perplexity.png").exists()
        assert len(json.loads((folder / "results.json").read_text())["summary"]["methods"]) == 2
        assert headings(out.out) & headings(CONSOLE) or not headings(CONSOLE)


def headings(text: str) -> set[str]:
    """The titles of the tables in a terminal's output."""
    return set(re.findall(r"^(Perplexity .*?)\s*$", text, re.MULTILINE))


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`milepost ([a-z]+)", TEXT))))
def test_every_command_it_names_exists(command: str) -> None:
    from milepost.cli import COMMANDS as KNOWN

    assert command in KNOWN


@pytest.mark.parametrize("target", re.findall(r"`make (\w+)`", TEXT))
def test_every_make_target_it_names_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)


def test_the_install_line_installs_this_folder() -> None:
    lines = "".join(body for language, body in FENCES if language == "sh").split("\n")
    assert [line for line in lines if line] == ["pip install ."]
    assert (ROOT / "pyproject.toml").exists()


def test_it_says_what_it_is_not_and_lists_what_there_is() -> None:
    for part in ("## As a library", "## As a command", "## Install", "## Encodings", "## What it is not"):
        assert f"\n{part}\n" in TEXT
