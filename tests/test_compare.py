from __future__ import annotations

import errno
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from milepost.compare import PRESETS, Settings, SettingsError, compare, preset
from milepost.compare.run import perform, thinned
from milepost.compare.settings import CONTROL, parse_lengths, parse_names
from milepost.compare.sweep import jobs_of
from milepost.data import DataError
from milepost.encoding import catalogue
from milepost.sweep import DifferentSettings, Failure, Progress, Reporter, SweepBusy, SweepDirectory, write_atomically
from milepost.sweep.files import damage, seal
from milepost.sweep.progress import duration
from tests.sweep_worker import environment, write_text

FAKE = "tests.sweep_worker"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text(tmp_path_factory.mktemp("text"))


def micro(text: str, **changes: Any) -> Settings:
    """A real comparison that trains in two seconds."""
    small: dict[str, Any] = {
        "methods": ("alibi", "rope"), "data": text, "train_length": 16, "test_lengths": (16, 64), "steps": 12,
        "batch_size": 2, "regions": 3, "checkpoint_every": 3, "passkey_steps": 8, "passkey_batch_size": 2,
        "passkey_train_length": 24, "passkey_test_lengths": (24, 48), "passkey_prompts": 4,
    }  # fmt: skip
    return preset("tiny", **{**small, **changes})


def without_timing(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_timing(part) for key, part in value.items() if key != "timing"}
    return [without_timing(part) for part in value] if isinstance(value, list) else value


def results_in(folder: Path) -> Any:
    return without_timing(json.loads((folder / "results.json").read_text()))


@pytest.fixture(scope="module")
def finished(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete sweep of `micro`, to be copied."""
    folder = tmp_path_factory.mktemp("finished") / "sweep"
    assert not fake(micro(text), folder, command="milepost compare").failures
    return folder


@pytest.fixture
def sweep(finished: Path, tmp_path: Path) -> Path:
    """A copy of a complete sweep."""
    return Path(shutil.copytree(finished, tmp_path / "sweep"))


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than all the rest."""
    monkeypatch.setattr("milepost.report.figures", lambda results: {})


def fake(settings: Settings, folder: Path, **options: Any) -> Any:
    return compare(settings, folder, workers=2, quiet=True, worker=FAKE, **options)


# ---- settings ----


def test_presets_are_sound_and_quick_is_what_is_promised() -> None:
    for name in PRESETS:
        preset(name).check()
    quick = preset("quick")
    assert quick.methods == ("mep", "mep-parameterized", "alibi", "rope", "sinusoidal", CONTROL)
    assert (quick.layers, quick.width, quick.heads, quick.train_length) == (3, 128, 4, 128)
    assert (quick.steps, quick.batch_size, quick.lr, quick.seeds, quick.tokenizer) == (400, 8, 3e-3, 1, "bytes")
    assert min(quick.test_lengths) == 128 and max(quick.test_lengths) >= 2048
    assert quick.regions >= 24 and quick.passkey
    kerple = preset("kerple")
    assert (kerple.layers, kerple.width, kerple.heads, kerple.train_length, kerple.steps) == (12, 768, 12, 512, 50_000)


def test_every_value_survives_json_and_every_field_has_help() -> None:
    settings = preset("small", seeds=3)
    assert Settings.from_dict(json.loads(json.dumps(settings.to_dict()))) == settings
    from dataclasses import fields

    assert all(f.metadata["help"] for f in fields(Settings))


def test_all_trainable_is_the_catalogue() -> None:
    methods = preset("tiny", methods=("alibi", "all-trainable")).methods
    assert methods[0] == "alibi"
    assert sorted(methods) == sorted(entry.name for entry in catalogue() if entry.trainable)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"methods": ("alibbi",)}, ["'alibbi'", "alibi"]),
        ({"methods": ("alibi:slope_scal=2",)}, ["slope_scal", "slope_scale"]),
        ({"methods": ("alibi", "alibi")}, ["alibi twice"]),
        ({"methods": ()}, ["--methods is empty"]),
        ({"width": 130}, ["--width 130", "--heads 4", "--width 128"]),
        ({"passkey_width": 30}, ["--passkey-width 30", "--passkey-heads 4"]),
        ({"kv_heads": 3}, ["--heads 4", "--kv-heads 3"]),
        ({"test_lengths": (32, 64)}, ["64", "--train-length 128", "nothing beyond"]),
        ({"passkey_test_lengths": (32,)}, ["--passkey-test-lengths [32]", "--passkey-train-length 64"]),
        ({"passkey_train_length": 8}, ["--passkey-train-length 8"]),
        ({"last": 500}, ["--last 500", "128"]),
        ({"measures": ("slidin",)}, ["'slidin'", "'sliding'"]),
        ({"lr": 0.0, "steps": 0, "dropout": 1.0}, ["--lr 0.0", "--steps 0", "--dropout 1.0"]),
        ({"train_length": 1}, ["--train-length 1"]),
        ({"precision": "fp8"}, ["'fp8'", "bfloat16"]),
        ({"methods": ("rope",), "width": 12, "heads": 4}, ["rope", "even"]),
    ],
)
def test_settings_that_cannot_be_name_value_and_mend(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        preset("quick", **changes).check()
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_an_unknown_preset_or_setting_names_the_nearest() -> None:
    with pytest.raises(SettingsError, match="'quick'"):
        preset("quik")
    with pytest.raises(SettingsError, match="'batch_size'"):
        preset("quick", batchsize=3)


def test_lengths_and_names_as_text() -> None:
    assert parse_lengths("128..4096") == (128, 256, 512, 1024, 2048, 4096)
    assert parse_lengths("100..350, 64") == (64, 100, 200, 350)
    assert parse_lengths("7") == (7,)
    for wrong in ("", "a", "5..3", "0", "1..b", "-4"):
        with pytest.raises(ValueError, match="length"):
            parse_lengths(wrong)
    assert parse_names("mep:kernels=['exponential','gaussian'], rope") == (
        "mep:kernels=['exponential','gaussian']",
        "rope",
    )


# ---- the state directory, with a worker that computes nothing ----


def test_a_sweep_leaves_everything_that_is_promised(text: str, finished: Path) -> None:
    found = {path.name for path in finished.iterdir()}
    expected = {"results.json", "table.md", "table.tex", "report.html", "settings.json", "runs", "lock"}
    stems = ("perplexity", "perplexity-last", "positions", "passkey")
    assert found == expected | {f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")}
    results = json.loads((finished / "results.json").read_text())
    assert results["schema"] == "milepost.compare/1"
    assert results["settings"] == micro(text).to_dict() and len(results["runs"]) == 2
    assert results["environment"]["versions"]["torch"] and results["environment"]["hardware"]["cores"] >= 1
    assert results["timing"]["command"] == "milepost compare"


def test_the_second_call_does_nothing_twice(text: str, sweep: Path, no_plots: None) -> None:
    before = results_in(sweep)
    marks = {path: path.stat().st_mtime_ns for path in sweep.glob("runs/*/result.json")}
    second = fake(micro(text), sweep)
    assert {path: path.stat().st_mtime_ns for path in marks} == marks
    assert without_timing(second.results) == before == results_in(sweep)


@pytest.mark.parametrize("harm", ["truncate", "flip", "remove", "manifest", "other run"])
def test_a_damaged_run_is_found_and_done_again(
    text: str, sweep: Path, no_plots: None, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = results_in(sweep)
    run = sweep / "runs" / "alibi.seed0"
    if harm == "truncate":
        (run / "result.json").write_text((run / "result.json").read_text()[:100])
    elif harm == "flip":
        data = bytearray((run / "model.bin").read_bytes())
        data[7] ^= 1
        (run / "model.bin").write_bytes(data)
    elif harm == "remove":
        (run / "model.bin").unlink()
    elif harm == "manifest":
        (run / "manifest.json").write_text("{}")
    else:
        shutil.rmtree(run)
        shutil.copytree(sweep / "runs" / "rope.seed0", run)
    (sweep / "results.json").unlink()
    notes: list[str] = []

    class Recorder(Progress):
        def note(self, text: str) -> None:
            notes.append(text)

    monkeypatch.setattr("milepost.compare.sweep.Progress", Recorder)
    after = without_timing(fake(micro(text), sweep).results)
    assert after == before
    assert any(note.startswith("alibi: the finished run is damaged") for note in notes)
    assert any(note.startswith("rope: complete") for note in notes)
    assert damage(run, json.loads((run / "manifest.json").read_text())["about"]) is None


def test_other_settings_are_refused_with_the_difference_and_change_nothing(text: str, sweep: Path) -> None:
    before = {path: path.read_bytes() for path in sweep.rglob("*") if path.is_file() and path.name != "lock"}
    with pytest.raises(DifferentSettings) as caught:
        fake(micro(text, steps=13, methods=("alibi", "mep")), sweep)
    assert caught.value.differences["settings.steps"] == (12, 13)
    assert "settings.steps: 12 there, 13 asked for" in str(caught.value)
    assert "settings.methods: ['alibi', 'rope'] there, ['alibi', 'mep'] asked for" in str(caught.value)
    assert {path: path.read_bytes() for path in before} == before


def test_other_data_under_the_same_name_is_refused(text: str, sweep: Path) -> None:
    changed = Path(text) / "00.txt"
    before = changed.read_text()
    changed.write_text("changed " * 200)
    try:
        with pytest.raises(DifferentSettings, match="data:"):
            fake(micro(text), sweep)
    finally:
        changed.write_text(before)


def test_a_failed_run_does_not_lose_the_others_and_is_tried_again(text: str, tmp_path: Path, no_plots: None) -> None:
    outcome = fake(micro(text, methods=("alibi", "nope", "learned")), tmp_path)
    assert [run["method"] for run in outcome.results["runs"]] == ["alibi"]
    messages = {failure["method"]: failure["message"] for failure in outcome.failures}
    assert messages["nope"] == "the loss became nan at step 3"
    assert "No space left on device" in messages["learned"] and "free some space" in messages["learned"]
    assert "the loss became nan" in (tmp_path / "report.html").read_text()
    again = fake(micro(text, methods=("alibi", "nope", "learned")), tmp_path)
    assert [failure["method"] for failure in again.failures] == ["nope", "learned"]
    assert (tmp_path / "work" / "nope.seed0" / "attempts").read_text() == "2"
    assert not list(tmp_path.glob("work/*/out/manifest.json"))


def test_a_folder_with_something_else_in_it_is_left_alone(text: str, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("words")
    with pytest.raises(Failure, match=r"thesis\.tex"):
        fake(micro(text), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"thesis.tex", "lock"}


def test_two_sweeps_do_not_share_a_folder(text: str, tmp_path: Path) -> None:
    with SweepDirectory(tmp_path).lock(), pytest.raises(SweepBusy, match=str(os.getpid())):
        fake(micro(text), tmp_path)


def test_wrong_data_is_said_before_anything_is_written(text: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "a.txt").write_text("")
    for settings, message in (
        (micro(str(empty)), "holds no text"),
        (micro(text, test_lengths=(16, 4096)), "no held-out document has 4097 tokens"),
        (micro(text, regions=500), "500 regions of 64 targets were asked for"),
        (micro(str(tmp_path / "absent")), "no such file or folder"),
    ):
        with pytest.raises(DataError, match=message):
            fake(settings, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_workers_die_with_their_parent(text: str, tmp_path: Path) -> None:
    """Killed without a chance to clean up, the parent leaves no worker behind; the lock is free at once."""
    code = (
        "from tests.test_compare import micro, fake; from pathlib import Path; import sys; "
        f"fake(micro({text!r}, methods=('sinusoidal',)), Path(sys.argv[1]))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=environment())
    wait_for(lambda: (tmp_path / "work" / "sinusoidal.seed0" / "attempts").exists(), 120)
    children = descendants(parent.pid)
    assert children
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_for(lambda: not any(alive(pid) for pid in children), 20)
    with SweepDirectory(tmp_path).lock():
        pass


# ---- one real run ----


def run_once(settings: Settings, folder: Path, method: str = "alibi") -> dict[str, Any]:
    work, out = folder / "work", folder / "out"
    work.mkdir(parents=True, exist_ok=True)
    out.mkdir()
    job = {"method": method, "seed": 0, "settings": settings.to_dict()}
    return perform(job, work, out, Reporter())


def test_a_real_run_measures_what_it_says(text: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    import milepost.model  # noqa: F401

    settings = micro(text, measures=("windows", "last", "sliding"))
    result = run_once(settings, tmp_path)
    assert [(row["measure"], row["length"], row["targets"]) for row in result["perplexity"]] == [
        ("windows", 16, 192), ("windows", 64, 192), ("last", 16, 48), ("last", 64, 48),
        ("sliding", 16, 192), ("sliding", 64, 192),
    ]  # fmt: skip
    assert [row["prompts"] for row in result["passkey"]] == [4, 4]
    assert result["curves"]["kind"] == "bias" and len(result["curves"]["layers"]) == 1
    assert len(result["train_losses"]) == 12 and result["train_losses"][-1] < result["train_losses"][0]
    assert result["timing"]["train_tokens_per_second"] > 0 and result["refused"] == {}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert sum(p.numel() for p in model.parameters()) == result["parameters"]


def test_a_table_that_ends_is_left_out_beyond_its_end(text: str, tmp_path: Path) -> None:
    result = run_once(micro(text, passkey=False), tmp_path, "learned")
    assert {row["length"] for row in result["perplexity"]} == {16}
    assert "outside the learned table of 16 rows" in result["refused"]["64"]


def test_a_loss_that_is_no_number_ends_the_run_with_a_sentence(text: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"the loss of alibi became (nan|inf) at step \d+ of 12: lower lr"):
        run_once(micro(text, lr=1e30, clip=1e30, warmup=0.0), tmp_path)
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.slow
def test_the_published_setting_builds_and_takes_a_step_on_a_cpu(text: str, tmp_path: Path) -> None:
    changes = {"data": text, "tokenizer": "bytes", "steps": 1, "batch_size": 1, "test_lengths": (512,), "regions": 1}
    settings = preset("kerple", **changes, device="cpu", measures=("windows",), passkey=False, precision="float32")
    result = run_once(settings, tmp_path, "kerple-log")
    assert result["parameters"] > 80_000_000 and len(result["train_losses"]) == 1
    assert result["encoding_parameters"] == 24


def test_a_hub_name_says_how_to_allow_a_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match="HF_HUB_OFFLINE=0"):
        fake(preset("tiny", data="nobody/nothing"), tmp_path / "out")


def test_thinned_losses_keep_the_mean() -> None:
    losses = tuple(float(x) for x in np.random.default_rng(0).normal(2, 1, 1000))
    assert len(thinned(losses)) == 200 and np.mean(thinned(losses)) == pytest.approx(np.mean(losses))
    assert thinned((1.0, 2.0)) == [1.0, 2.0]


# ---- killed, five times, at random moments ----


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_five_random_moments_and_resumed_it_is_as_if_nothing_had_happened(text: str, tmp_path: Path) -> None:
    started = time.monotonic()
    undisturbed = command(text, tmp_path / "undisturbed").wait()
    length = time.monotonic() - started
    assert undisturbed == 0
    moments = random.Random(7)
    kills = 0
    for _ in range(5):
        process = command(text, tmp_path / "killed")
        try:
            process.wait(moments.uniform(0.25, 0.95) * length)
        except subprocess.TimeoutExpired:
            children = descendants(process.pid)
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            wait_for(lambda pids=tuple(children): not any(alive(pid) for pid in pids), 20)
            broken = [p for p in tmp_path.glob("killed/runs/*") if not (p / "manifest.json").exists()]
            assert not broken, "a run appeared before it was whole"
    assert kills >= 3
    assert command(text, tmp_path / "killed").wait() == 0
    assert results_in(tmp_path / "killed") == results_in(tmp_path / "undisturbed")
    assert not (tmp_path / "killed" / "work").exists()
    assert not list(tmp_path.glob("killed/.*"))


def command(text: str, folder: Path) -> subprocess.Popen[bytes]:
    flags: list[str] = []
    for name, value in micro(text).to_dict().items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            flags += [flag, ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    arguments = [sys.executable, "-m", "milepost", "compare", "--out", str(folder), "--workers", "2", "--quiet", *flags]
    return subprocess.Popen(arguments, env=environment(), stdout=subprocess.DEVNULL)


def descendants(pid: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue
        if parent == pid:
            found.append(int(status.parent.name))
    return found


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in ("Z", "X")


def wait_for(condition: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


# ---- files ----


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "results.json"
    write_atomically(target, "old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"results\.json cannot be written: No space left on device; free some space"):
        write_atomically(target, "new")
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


def test_a_full_disk_during_the_report_keeps_the_runs(
    text: str, sweep: Path, no_plots: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from milepost.compare import sweep as module

    original = module.write_atomically

    def full(path: Path, content: Any) -> None:
        if path.name == "table.tex":
            raise OSError(errno.ENOSPC, f"{path} cannot be written: No space left on device; free some space")
        original(path, content)

    monkeypatch.setattr(module, "write_atomically", full)
    with pytest.raises(OSError, match="free some space"):
        fake(micro(text), sweep)
    assert len(list(sweep.glob("runs/*/manifest.json"))) == 2
    monkeypatch.setattr(module, "write_atomically", original)
    assert not fake(micro(text), sweep).failures


def test_sealed_folders_know_their_damage(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "a.bin").write_bytes(b"abc")
    seal(tmp_path, {"run": "x"})
    assert damage(tmp_path, {"run": "x"}) is None
    assert "not {'run': 'y'}" in str(damage(tmp_path, {"run": "y"}))
    (tmp_path / "part" / "a.bin").write_bytes(b"abd")
    assert damage(tmp_path, {"run": "x"}) == "part/a.bin does not match its checksum"
    (tmp_path / "part" / "a.bin").unlink()
    assert damage(tmp_path, {"run": "x"}) == "part/a.bin is missing"


def test_job_names_are_distinct_and_safe() -> None:
    settings = preset("quick", methods=("alibi", "alibi:slope_scale=2", "rope/nope", "rope_nope"), seeds=2)
    names = [job.name for job in jobs_of(settings)]
    assert len(set(names)) == 8
    assert all("/" not in name and ":" not in name for name in names)


# ---- progress ----


def test_time_left_follows_what_was_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    jobs = jobs_of(preset("quick", methods=("alibi", "rope", "mep", "nope")))
    with Progress(4, quiet=True) as progress:
        progress.already(jobs[0])
        progress.started(jobs[1])
        assert progress.seconds_left() is None
        clock[0] += 10
        progress.advanced(jobs[1], {"fraction": 0.04, "phase": "training"})
        clock[0] += 10
        progress.advanced(jobs[1], {"fraction": 0.5, "phase": "training"})
        assert progress.seconds_left() == pytest.approx(20 / 0.5 * 2.5)
        progress.finished(jobs[1], {}, 20.0)
        assert progress.seconds_left() == pytest.approx(20 / 1.0 * 2.0)


def test_a_terminal_gets_bars_and_the_lines_that_stay(text: str) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    jobs = jobs_of(preset("quick", methods=("alibi", "rope", "mep")))
    with Progress(3, console=console, describe=lambda result: f"perplexity {result['value']}") as progress:
        progress.already(jobs[0])
        for job in jobs[1:]:
            progress.started(job)
            progress.advanced(job, {"fraction": 0.5, "phase": "training 5/10", "loss": 1.5})
        progress.finished(jobs[1], {"value": 6.5}, 61.0)
        progress.failed(jobs[2], "the loss became nan")
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    for words in (
        "alibi: complete, kept",
        "rope: done in 1 min 1 s · perplexity 6.5",
        "mep: FAILED: the loss became nan",
    ):
        assert words in shown
    assert "training 5/10, loss 1.5" in shown


def test_durations_are_words() -> None:
    assert [duration(s) for s in (4.4, 185, 7805)] == ["4 s", "3 min 5 s", "2 h 10 min"]
