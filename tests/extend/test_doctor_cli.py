"""`milepost doctor` and `milepost export`: exit codes, JSON, copies beside, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from milepost.cli import run

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
GOOD = {"head_dim": 128, "rope_theta": 1e6, "max_position_embeddings": 131072, "rope_scaling": YARN}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GOOD))
    return path


def changed(path: Path, **values: Any) -> str:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return str(path)


def test_doctor_exit_codes(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", str(config)]) == 0
    assert run(["doctor", changed(config, max_position_embeddings=40960)]) == 0  # a warning
    assert "warning [length-mismatch]" in capsys.readouterr().out
    assert run(["doctor", changed(config, rope_theta="1e6")]) == 1
    assert run(["doctor", "no-such-file.json"]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert run(["doctor", str(config), "--kind", "x"]) == 2
    assert run(["doctor", str(config), "--checkpoint", "nowhere.json"]) == 2
    assert run(["doctor"]) == 2


def test_doctor_json_and_fix(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = changed(config, rope_scaling={**YARN, "factor": "4.0"})
    assert run(["doctor", source, "--fix", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "error" and report["findings"][0]["id"] == "not-a-number"
    assert report["fixed"] == str(config.with_name("config.fixed.json"))
    assert json.loads(Path(report["fixed"]).read_text()) == GOOD == report["corrected"]
    assert run(["doctor", report["fixed"]]) == 0
    assert run(["doctor", source, "--fix"]) == 1
    assert "corrected copy" in capsys.readouterr().out and config.with_name("config.fixed-2.json").exists()
    assert run(["doctor", report["fixed"], "--fix"]) == 0
    assert "nothing here can be corrected" in capsys.readouterr().out


def test_doctor_reports_even_where_it_cannot_write(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import milepost.extend.doctor as doctor

    def refused(*_: Any) -> Path:
        raise PermissionError(13, "Permission denied", "config.fixed.json")

    monkeypatch.setattr(doctor, "write_fixed", refused)
    source = changed(config, max_position_embeddings=40960)
    assert run(["doctor", source, "--fix"]) == 1
    said = capsys.readouterr()
    assert "length-mismatch" in said.out and "could not be written" in said.err and "Permission denied" in said.err
    assert run(["doctor", source, "--fix", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "warning"


def test_doctor_reads_an_override_with_its_checkpoint(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    override = json.dumps({"rope_parameters": {"rope_type": "linear", "factor": 2.0}})
    arguments = ["doctor", override, "--checkpoint", str(config), "--json"]
    assert run(arguments) == 1
    report = json.loads(capsys.readouterr().out)
    assert {item["id"] for item in report["findings"]} == {"theta-lost", "trained-scaling-replaced"}
    assert run([*arguments, "--replace-trained"]) == 1
    assert {item["id"] for item in json.loads(capsys.readouterr().out)["findings"]} == {"theta-lost"}


def test_export_of_a_file_for_all_engines(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", str(config.parent), "--json"]) == 0
    made = {item["engine"]: item for item in json.loads(capsys.readouterr().out)}
    assert set(made) == {"transformers", "vllm", "llama.cpp"}
    assert made["transformers"]["rope_parameters"]["factor"] == 4.0
    assert json.loads(made["vllm"]["overrides"])["max_position_embeddings"] == 131072
    assert made["llama.cpp"]["gguf_keys"]["rope.scaling.type"] == "yarn"
    assert all(item.get("error", 0.0) <= 1e-6 for item in made.values())


def test_export_of_a_method_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--head-dim", "128", "--theta", "10000", "--trained-length", "4096"]
    assert run(["export", "ntk", *sizes, "--option", "factor=4", "--engine", "llama.cpp"]) == 0
    assert "--rope-freq-base 40889.9424" in capsys.readouterr().out
    assert run(["export", "truncated", *sizes]) == 1
    assert capsys.readouterr().out.count("refused") == 3
    assert run(["export", "dynamic_yarn", *sizes]) == 1
    assert "transformers grows NTK in its own form only" in capsys.readouterr().out
    assert run(["export", "hope_cut", *sizes, "--json"]) == 0  # llama.cpp cannot
    found = json.loads(capsys.readouterr().out)
    assert [("refused" in item) for item in found] == [False, False, True]


def test_export_in_place_of_the_file_s_own_method(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", str(config), "--method", "llama3", "--option", "factor=4", "--json"]) == 2
    assert "low_freq_factor is missing" in capsys.readouterr().err
    options = ["--option", "factor=4", "--option", "beta=16", "--engine", "transformers", "--json"]
    assert run(["export", str(config), "--method", "by_parts", *options]) == 0
    block = json.loads(capsys.readouterr().out)[0]["rope_parameters"]
    assert (block["rope_type"], block["rope_theta"], block["high_freq_factor"]) == ("llama3", 1e6, 16)
    assert block["original_max_position_embeddings"] == 32768


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["yran"], "did you mean 'yarn'"),
        (["nowhere/config.json"], "does not exist"),
        (["yarn", "--option", "factor"], "must be name=value"),
        (["yarn", "--engine", "tgi"], "must be transformers, vllm, llama.cpp or all"),
        (["linear", "--option", "factor=2"], "rope_theta missing"),
        (["linear", "--option", "factor=2", "--theta", "1e4", "--head-dim", "8"], "pass trained_length"),
    ],
)
def test_export_mistakes_of_the_call(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_export_of_a_file_that_is_no_configuration(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text("[]")
    assert run(["export", str(config)]) == 2
    config.write_text("{")
    assert run(["export", str(config)]) == 2
    assert capsys.readouterr().err.count("milepost doctor") == 2
    config.write_text(json.dumps(GOOD))
    assert run(["export", str(config), "--option", "factor=2"]) == 2
