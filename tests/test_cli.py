from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from milepost.cli import COMMANDS, build_app, run
from milepost.cli.errors import UsageError, explain
from milepost.compare import Settings, SettingsError
from milepost.data import DataError
from milepost.encoding import catalogue
from tests.sweep_worker import environment, write_text

SURFACE = Path(__file__).parent / "data" / "cli.json"
MICRO = (
    "--preset tiny --train-length 16 --steps 6 --batch-size 2 --layers 1 --width 16 --heads 2 --checkpoint-every 100"
).split()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"))


def surface() -> dict[str, Any]:
    """Every command with its arguments and options, as the parser knows them."""
    group: Any = typer.main.get_command(build_app())

    def options(command: Any) -> list[str]:
        return sorted(
            " ".join([*p.opts, *p.secondary_opts]) + (" (required)" if p.required else "") for p in command.params
        )

    return {"milepost": options(group), **{name: options(command) for name, command in group.commands.items()}}


def test_the_surface_is_frozen() -> None:
    """An intended change is written down by `python tests/test_cli.py`."""
    assert surface() == json.loads(SURFACE.read_text("utf-8"))


def test_every_setting_has_a_flag_of_its_own_name() -> None:
    from dataclasses import fields

    flags = " ".join(surface()["compare"]).split()
    assert all("--" + f.name.replace("_", "-") in flags for f in fields(Settings))


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_that_parse(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    shown = capsys.readouterr().out
    examples = [line.split() for line in shown.splitlines() if line.strip().startswith(f"milepost {command}")]
    assert examples, shown
    known = {flag for entry in surface()[command] for flag in entry.split()}
    for example in examples:
        flags = [word for word in example if word.startswith("--")]
        assert all(flag in known for flag in flags), example


def test_help_version_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in COMMANDS)
    assert run(["--version"]) == 0
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", capsys.readouterr().out)
    assert run(["env", "--wrong"]) == 2
    assert run(["no-such-command"]) == 2
    assert run(["compare", "--preset", "quick"]) == 2
    assert run(["compare", "--out", "x", "--steps", "many"]) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["show", "alibbi"], 2, ["'alibbi'", "alibi"]),
        (["show", "alibi:slope=2"], 2, ["'slope'", "slope_scale"]),
        (["show", "alibi", "--out", "a.gif"], 2, ["a.gif", ".png or .svg"]),
        (["list", "--family", "rotry"], 2, ["'rotry'", "rotary"]),
        (["eval", "no/model"], 1, ["'no/model'", "nothing is downloaded"]),
        (["eval", "m", "--lengths", "5..x"], 2, ["--lengths", "'5..x'"]),
        (["eval", "m", "--measures", "all"], 2, ["'all'", "sliding"]),
        (["eval", "m", "--lengths", "64", "--last", "65"], 2, ["--last 65", "64"]),
        (["compare", "--out", "OUT", "--methods", "ropee"], 2, ["'ropee'", "rope"]),
        (["compare", "--out", "OUT", "--width", "130"], 2, ["--width 130", "--heads 4"]),
        (["compare", "--out", "OUT", "--test-lengths", "32"], 2, ["32", "--train-length 128"]),
        (["compare", "--out", "OUT", "--test-lengths", "9..1"], 2, ["--test-lengths", "9..1"]),
        (["compare", "--out", "OUT", "--preset", "quik"], 2, ["'quik'", "'quick'"]),
        (["compare", "--out", "OUT", "--data", "prosa"], 1, ["'prosa'", "'prose'"]),
        (["train", "alibbi", "--out", "OUT"], 2, ["'alibbi'", "alibi"]),
        (["train", "alibi", "--out", "OUT", "--heads", "7"], 2, ["--width 128", "--heads 7"]),
    ],
)
def test_errors_are_one_sentence_with_the_value_and_the_mend(
    arguments: list[str], code: int, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tmp_path / "out") if word == "OUT" else word for word in arguments]
    assert run(arguments) == code
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ") and "Traceback" not in shown.err
    assert all(word in shown.err for word in words), shown.err
    assert not (tmp_path / "out").exists()


def test_debug_shows_where(tmp_path: Path) -> None:
    with pytest.raises(SettingsError):
        run(["--debug", "compare", "--out", str(tmp_path), "--width", "130"])


def test_what_each_error_means() -> None:
    assert explain(SettingsError(["a", "b"])) == (2, "error: a\n       b")
    assert explain(UsageError("x"))[0] == 2
    assert explain(DataError("no text"))[0] == 1
    code, words = explain(OSError(28, "No space left on device", "f"))
    assert code == 1 and words.startswith("error: f: No space left") and "free some space" in words
    assert explain(KeyboardInterrupt())[0] == 1
    assert explain(ZeroDivisionError("x")) == (
        1, "error: ZeroDivisionError: x; run again with --debug before the command to see where",
    )  # fmt: skip


# ---- list, show, env ----


def test_list_shows_the_catalogue_three_ways(capsys: pytest.CaptureFixture[str]) -> None:
    names = [entry.name for entry in catalogue()]
    assert run(["list"]) == 0
    table = capsys.readouterr().out
    assert run(["list", "--tree"]) == 0
    tree = capsys.readouterr().out
    for name in names:
        assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", table)
        assert len(re.findall(rf"(?<![\w-]){re.escape(name)}  ", tree)) >= 1
    assert run(["list", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in entries] == names
    alibi = next(entry for entry in entries if entry["name"] == "alibi")
    assert alibi["options"]["slope_scale"] == 1.0 and alibi["options"]["num_heads"] == "required"
    assert run(["list", "--family", "none", "--json"]) == 0
    assert {entry["family"] for entry in json.loads(capsys.readouterr().out)} == {"none"}


@pytest.mark.parametrize(("name", "kind"), [("alibi:slope_scale=2", "png"), ("rope", "svg")])
def test_show_writes_the_picture(name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / f"picture.{kind}"
    assert run(["show", name, "--out", str(out), "--length", "256", "--heads", "2", "--trained-length", "64"]) == 0
    assert out.read_bytes().startswith(b"\x89PNG" if kind == "png" else b"<?xml")
    assert name.split(":")[0] in capsys.readouterr().out.lower()


def test_show_as_json_and_for_sums(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", "alibi", "--json", "--length", "64"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["curve"]["kind"] == "bias" and len(shown["curve"]["layers"][0]) == 8
    assert run(["show", "rope/nope", "--layers", "2"]) == 0
    assert "RoPE" in capsys.readouterr().out


def test_env_for_people_and_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["env"]) == 0
    assert "torch" in capsys.readouterr().out
    assert run(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] and found["hardware"]["cores"] >= 1 and "chosen" in found["attention"].values()


# ---- train and eval ----


def test_a_trained_model_is_a_folder_that_eval_reads(
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = tmp_path / "model"
    assert run(["train", "alibi:slope_scale=2", "--out", str(model), "--data", text, "--json", *MICRO]) == 0
    trained = json.loads(capsys.readouterr().out)
    assert trained["steps"] == 6 and trained["method"] == "alibi:slope_scale=2"
    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert loaded.config.encoding == "alibi:slope_scale=2"
    assert AutoTokenizer.from_pretrained(model).decode([104, 105]) == "hi"

    report = tmp_path / "report"
    arguments = ["eval", str(model), "--data", text, "--lengths", "16,64", "--regions", "3", "--out", str(report)]
    assert run(arguments) == 0
    shown = capsys.readouterr().out
    assert "192 targets" in shown and "trained" in shown and "longer" in shown
    assert {"results.json", "table.md", "report.html", "perplexity.png"} <= {p.name for p in report.iterdir()}
    assert run([*arguments, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [row["targets"] for row in results["runs"][0]["perplexity"]] == [192, 192, 48, 48]
    # the same command again finds the finished training
    assert run(["train", "alibi:slope_scale=2", "--out", str(model), "--data", text, *MICRO]) == 0
    assert "loss of the last steps" in capsys.readouterr().out


def test_train_refuses_another_training_in_its_folder(
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "training.json").write_text("{}")
    assert run(["train", "alibi", "--out", str(tmp_path), "--data", text, "--quiet", *MICRO]) == 1
    assert "holds another training" in capsys.readouterr().err


# ---- compare, as its own process ----


def test_compare_reports_failed_runs_with_exit_code_1(
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import milepost.compare
    from milepost.compare import compare

    monkeypatch.setattr(
        milepost.compare, "compare", lambda *a, **k: compare(*a, **{**k, "worker": "tests.sweep_worker"})
    )
    monkeypatch.setattr("milepost.report.figures", lambda results: {})
    arguments = ["compare", "--methods", "alibi,nope", "--out", str(tmp_path / "out"), "--data", text, "--regions", "3"]
    arguments += ["--preset", "tiny", "--workers", "2"]
    assert run(arguments) == 1
    shown = capsys.readouterr()
    assert "alibi" in shown.out and "report: " in shown.out
    assert "FAILED nope, seed 0: the loss became nan" in shown.err
    assert "alibi: started" in shown.err  # plain lines where there is no terminal
    assert run([*arguments, "--json"]) == 1
    results = json.loads(capsys.readouterr().out)
    assert [failure["method"] for failure in results["failures"]] == ["nope"]
    assert run([*arguments, "--steps", "21"]) == 2
    assert "settings.steps: 20 there, 21 asked for" in capsys.readouterr().err


def test_python_m_milepost_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "milepost", "show", "alibbi"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and done.stderr.startswith("error: no encoding is named 'alibbi'")


if __name__ == "__main__":
    SURFACE.write_text(json.dumps(surface(), indent=1) + "\n", "utf-8")
