"""The benchmark measures the right things: contenders agree with float64, ratios are ratios, a folder is resumed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from milepost.attention import attend, library
from milepost.bench import GROUPS, Settings, SettingsError, bench, calls, case, exact, floor, measure, memory, model
from milepost.bench.case import Case, NotRun
from milepost.bench.ours import milepost
from milepost.bench.peers import flex, peers
from milepost.bench.plots import write_plots
from milepost.bench.race import Racer, race
from milepost.bench.run import MEMORY_CONTENDERS
from milepost.bench.tables import essence, markdown
from milepost.cli import run
from milepost.encoding import build
from milepost.positions import Positions

# ---- what is measured ----


def plain(small: Case, table: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    logits = q @ k.mT / 8
    if table is not None:
        place = torch.arange(small.length)
        logits = logits + table[:, (place[:, None] - place).clamp(min=0)]
    future = torch.ones(small.length, small.length).triu(1).bool()
    return logits.masked_fill(future, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("bias", [None, "kerple-log", "alibi", "mep", "t5"])
@pytest.mark.parametrize("first", [0, 272])
def test_exact_gradients_are_autograds(bias: str | None, first: int) -> None:
    small = Case(304, torch.float32, training=True)
    table = None if bias is None else small.table(bias).double().requires_grad_()
    q, k, v = (x.detach().double().requires_grad_() for x in (small.q, small.k, small.v))
    inputs = (q, k, v) if table is None else (q, k, v, table)
    wanted = torch.autograd.grad(plain(small, table, q, k, v), inputs, small.grad.double())
    found = exact.gradients(small, None if bias is None else small.table(bias), first)
    for mine, want in zip(found[:3], wanted, strict=False):
        torch.testing.assert_close(mine, want[:, :, first:])
    if table is not None and first == 0:
        torch.testing.assert_close(found[3], wanted[3])


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_contenders_compute_the_same(training: bool, dtype: torch.dtype) -> None:
    small = Case(72, dtype, training=training)
    truth = exact.Exact(small)
    contenders = calls.contenders(training)
    assert {c.name for c in contenders} > {"x-transformers flash", "transformers BLOOM eager", "transformers T5 eager"}
    for contender in contenders:
        if contender.name == "milepost native" and library.unavailable() is not None:
            continue
        error = truth.error(contender.bias)(contender.call(small)())
        limit = 1e-4 if dtype == torch.float32 else 0.2  # BLOOM's biases are large numbers in bfloat16
        assert error < limit, (contender.name, contender.bias, contender.learned)


def test_errors_are_seen() -> None:
    small = Case(48, torch.float32, training=True)
    truth = exact.Exact(small)
    gradients = [g.float().clone() for g in exact.gradients(small, small.table("alibi"))]
    assert truth.of_gradients(tuple(gradients), "alibi") < 1e-6
    gradients[3][2, 5] += 0.5 * gradients[3].abs().max()
    assert truth.of_gradients(tuple(gradients), "alibi") > 0.1
    result = exact.result(small, None, torch.arange(48)).float()
    assert truth.of_result(result, None) < 1e-6
    assert truth.of_result(result, "alibi") > 0.1


def test_long_cases_are_compared_where_few_rows_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "WHOLE", 64)
    small = Case(128, torch.float32, training=True)
    found = milepost("blocked", "kerple-log", learned=True).call(small)()
    truth = exact.Exact(small)
    assert truth.error("kerple-log")(found) < 1e-5
    assert [g.shape[2] for g in truth._gradients["kerple-log"][:3]] == [exact.ROWS] * 3


@pytest.mark.parametrize("group", ["decoding", "batches", "rotation"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_other_calls_run_and_those_compared_are_right(group: str, dtype: torch.dtype) -> None:
    racers = calls.CALLS[group](64, dtype)
    for racer in racers:
        assert racer.call is not None
        found = racer.call()
        if racer.error is not None:
            assert racer.error(found) < (1e-4 if dtype == torch.float32 else 0.05), racer.name
    assert any(racer.best for racer in racers) or group == "batches"


def test_what_does_not_fit_or_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case, "SQUARE_LIMIT", 8 * 64 * 64 * 4 - 1)
    monkeypatch.setitem(sys.modules, "x_transformers.attend", None)
    small, smaller = Case(64, torch.float32), Case(56, torch.float32)
    flash = peers(training=False)[0]
    with pytest.raises(NotRun, match="GiB for each"):
        flash.call(small)
    with pytest.raises(NotRun, match="pip install x-transformers"):
        flash.call(smaller)
    with pytest.raises(NotRun, match="minutes; see length 16384"):
        milepost("blocked", "alibi").prepare(Case(16392, torch.float32))


def test_flex_has_its_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without compiling it, which takes a process of its own."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    small = Case(128, torch.float32)
    assert exact.Exact(small).error("kerple-log")(flex().call(small)()) < 1e-5


def test_products_count_what_causal_attention_needs() -> None:
    racer = floor.racer(Case(320, torch.float32))
    assert racer.share == pytest.approx((320 * 321 / 2) / (256 * 256 + 64 * 320))
    assert racer.work == 2 * 2 * 8 * 64 * (256 * 256 + 64 * 320)
    assert racer.call is not None
    racer.call()


def test_memory_is_what_a_call_adds() -> None:
    def prepare() -> Any:
        held = torch.ones(4 << 20)  # 16 MiB
        return lambda: held + torch.ones(4 << 20)

    assert 32 <= memory.growth(prepare) < 64


# ---- how it is timed ----


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleeper(self, seconds: float) -> Any:
        def call() -> object:
            self.now += seconds
            return torch.zeros(1)

        return call


def test_rows_of_a_race() -> None:
    clock = Clock()

    def broken() -> object:
        raise RuntimeError("no such device\nsecond line")

    racers = [
        Racer("base", clock.sleeper(2.0)),
        Racer("ours", clock.sleeper(1.0), "alibi", ours=True, best=True, error=lambda found: 1e-7),
        Racer("peer", clock.sleeper(3.0), "alibi", error=lambda found: float("nan")),
        Racer("learned peer", clock.sleeper(8.0), "alibi", learned=True),
        Racer("absent", None, "alibi", absent="4 GiB"),
        Racer("broken", broken, "alibi"),
        Racer("products", clock.sleeper(1.0), floor=True, share=0.5, work=1e9),
    ]
    base, ours, peer, learned, absent, fails, products = race(racers, clock, rounds=3)
    assert base["ratio"] == 1.0 and "faster" not in base
    assert ours["milliseconds"] == pytest.approx(1000) and ours["ratio"] == 0.5 and ours["error"] == 1e-7
    assert peer["faster"] == 3.0 and peer["faster_spread"] == [3.0, 3.0]
    assert "error" not in peer and "not finite" in peer["note"]
    assert learned["ratio"] == 4.0 and "faster" not in learned
    assert absent["not_run"] == "4 GiB" and fails["not_run"] == "RuntimeError: no such device"
    assert products["milliseconds"] == pytest.approx(500) and products["gflops"] == pytest.approx(1.0)
    assert base["to_floor"] == 4.0 and ours["to_floor"] == 2.0


def test_short_calls_are_repeated_and_our_own_failures_are_not_hidden() -> None:
    clock, count = Clock(), 0

    def quick() -> object:
        nonlocal count
        count += 1
        clock.now += 0.001
        return None

    race([Racer("quick", quick)], clock, rounds=2)
    assert count == 1 + 1 + 2 * 20

    def broken() -> object:
        raise RuntimeError("wrong")

    with pytest.raises(RuntimeError, match="wrong"):
        race([Racer("base", quick), Racer("milepost", broken, ours=True)], clock, rounds=1)


# ---- training ----


@pytest.mark.parametrize("encoding", model.MASKED)
def test_an_explicit_mask_is_the_same_attention(encoding: str) -> None:
    options = {"head_dim": 16} if encoding == "mep-parameterized" else {}
    positions = Positions.full(24)
    terms = build(encoding, num_heads=4, **options)(positions)
    q, k, v = torch.randn(3, 2, 4, 24, 16)
    torch.testing.assert_close(model.explicit_mask(q, k, v, positions, terms), attend(q, k, v, positions, terms))


def test_a_training_is_timed_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from milepost.compare.run import load_data, model_config, train_config
    from milepost.compare.settings import preset

    settings = preset("tiny")
    corpus = load_data(settings)
    config = dataclasses.replace(train_config(settings, seed=0), steps=model.WARM + 3, checkpoint_every=0)
    shape = model_config(settings, "mep", vocab_size=corpus.vocab_size)
    ticks = iter([0, 9, 9, 9, 10, 12, 15])
    seen = []

    def attention(q: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        seen.append(q.shape)
        return model.plain(q, *rest, **options)

    with model.attending(attention):
        assert model.step_seconds(shape, config, corpus, tmp_path, lambda: float(next(ticks))) == 2.0
    assert seen
    count = len(seen)
    with model.attending(None):
        model.step_seconds(shape, dataclasses.replace(config, steps=6), corpus, tmp_path / "own", lambda: 0.0)
    assert len(seen) == count


def test_the_first_model_is_plain_and_has_no_encoding() -> None:
    first = model.variants()[0]
    assert first.encoding == "nope" and first.attend is model.plain
    assert {v.encoding for v in model.variants() if v.attend is None} == set(model.ENCODINGS)


# ---- settings, jobs, folder, report ----


def test_jobs_have_names_of_their_own_and_memory_names_contenders() -> None:
    jobs = Settings().check().jobs()
    assert len({job.name for job in jobs}) == len(jobs)
    assert {job.values["group"] for job in jobs} == set(GROUPS)
    for training in (False, True):
        known = {(c.name, c.bias, c.learned) for c in [*calls.contenders(training), flex()]}
        asked = {tuple(j.values["contender"]) for j in jobs if j.values.get("training") is training if
                 j.values["group"] == "memory"}  # fmt: skip
        assert asked <= known and asked <= set(MEMORY_CONTENDERS)
    long = [job for job in jobs if job.values["group"] == "forward" and job.values["length"] == 32768]
    assert [job.values["rounds"] for job in long] == [3]


def test_settings_say_what_is_wrong_all_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        Settings(groups=("forwards",), dtypes=("float16",), rounds=0, lengths=(100,)).check()
    text = str(caught.value)
    for words in ("'forwards'", "'forward'", "'float16'", "--rounds 0", "--lengths has 100"):
        assert words in text
    with pytest.raises(SettingsError, match="add float32 to --dtypes"):
        Settings(groups=("flex",), dtypes=("bfloat16",)).check()


def results_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    settings = {"clock": "cpu", "threads": 1, "rounds": 2, "versions": {"torch": "2"}, "shape": "batch 1"}
    machine = {"cpu": "a processor", "cores": 2, "memory_gib": 8, "system": "Linux", "cpu_capability": "AVX2"}
    return {"settings": settings, "hardware": machine, "commands": ["milepost bench"], "runs": runs, "failures": {}}


def run_of(group: str, rows: list[dict[str, Any]], length: int = 512, **more: Any) -> dict[str, Any]:
    job = {"group": group, "length": length, "dtype": "float32", **more}
    return {"job": job, "rows": rows, "date": "2026-01-02T03:04", "load": [0.5, 1.0], "kernel": "avx2", "code": "abc"}


def rows_for_report() -> list[dict[str, Any]]:
    clock = Clock()
    racers = [
        Racer("sdpa, no bias", clock.sleeper(2.0)),
        Racer("milepost native", clock.sleeper(1.0), "alibi", ours=True, best=True, error=lambda found: 1e-7),
        Racer("x-transformers flash", clock.sleeper(3.0), "alibi"),
        Racer("transformers BLOOM eager", None, "alibi", absent="a | b GiB"),
    ]
    return race(racers, clock, rounds=2)


def test_the_report_shows_every_row_and_its_reason(tmp_path: Path) -> None:
    peak = {"name": "milepost native", "bias": "kerple-log", "learned": False, "training": False, "mebibytes": 9.2}
    contender = ["milepost native", "kerple-log", False]
    runs = [run_of("forward", rows_for_report(), n) for n in (512, 1024)]
    runs.append(run_of("memory", [peak], training=False, contender=contender))
    results = results_of(runs)
    text = markdown(results)
    assert "| forward | float32 | 512 | alibi | 1000 | 0.50 | x-transformers flash | 3.00 |" in text
    assert "| transformers BLOOM eager | alibi | not run: a \\| b GiB |" in text
    assert "1.0e-07" in text and "| milepost native | kerple-log | 512 | 9 |" in text and "a processor" in text
    section = text.split("### Length 512, float32")[1].split("###")[0]
    assert len({line.replace("\\|", "").count("|") for line in section.splitlines() if line}) == 1
    assert len(essence(results["runs"])) == 4
    assert [path.name for path in write_plots(results, tmp_path)] == ["forward.png", "memory.png"]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("forward.png", "memory.png"))


@pytest.mark.slow
def test_a_folder_is_resumed_extended_and_guarded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench"
    line = ["bench", "--out", str(out), "--dtypes", "float32", "--rounds", "1", "--lengths", "64", "--groups"]
    assert run([*line, "rotation"]) == 0
    shown = capsys.readouterr()
    assert "| rotation | float32 | 64 | rope |" in shown.out and "started" in shown.err
    first = json.loads((out / "results.json").read_text("utf-8"))
    assert [r["job"]["group"] for r in first["runs"]] == ["rotation"] and first["runs"][0]["code"]
    assert run([*line, "rotation,terms", "--json"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert [r["job"]["group"] for r in both["runs"]] == ["rotation", "terms"]
    assert both["runs"][0] == first["runs"][0]
    assert run([*line, "rotation", "--rounds", "2"]) == 2
    assert "rounds: 1 there, 2 asked for" in capsys.readouterr().err
    assert run([*line, "rotations"]) == 2
    assert "did you mean 'rotation'?" in capsys.readouterr().err


def test_a_job_that_fails_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    settings = Settings(groups=("rotation",), lengths=(64,), dtypes=("float32",), rounds=1)
    outcome = bench(settings, tmp_path, quiet=True, worker="tests.no_such_worker")
    assert list(outcome.failures) == ["rotation, length 64, float32"]
    assert "## Failed" in (tmp_path / "report.md").read_text("utf-8")


def test_measurements_of_order_and_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    def quiet(fraction: float, phase: str) -> None:
        assert 0 <= fraction <= 1

    timing = {"clock": "cpu", "rounds": 1, "threads": 1, "dtype": "float32", "length": 64}
    rows = measure.rows_of({"group": "order", **timing}, quiet)
    assert {row["place"] for row in rows} == {"full", "left padding", "one query"}
    assert all(row["milliseconds"][row["fastest"]] == min(row["milliseconds"].values()) for row in rows)
    rows = measure.rows_of({"group": "terms", **timing}, quiet)
    assert {"alibi", "rope", "fire"} < {row["name"] for row in rows}
    text = markdown(results_of([run_of("terms", rows, 64)]))
    assert "| alibi |" in text
