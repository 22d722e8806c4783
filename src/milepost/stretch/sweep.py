"""The stretch: every method measured on the same tokens, the best tuned, all of it ranked and written down."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost.compare.summary import summarise
from milepost.encodings.frequencies import FrequencyMethod
from milepost.extend.attach import attach
from milepost.stretch import models
from milepost.stretch.folder import said_by_config, write_folder
from milepost.stretch.plan import Method, frequency_method, plan, resolve_target
from milepost.stretch.settings import Settings
from milepost.stretch.usable import UsableLength, judge
from milepost.sweep import Job, Progress, SweepDirectory, canonical_json, run_jobs, write_atomically
from milepost.sweep.directory import file_name
from milepost.sweep.environment import hardware, usable_cores, versions

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = "milepost.stretch/1"
WORKER = "milepost.stretch.worker"
RULE = (
    "Ranked by the mean loss at the target length on the same tokens (non-overlapping windows); methods whose paired "
    "difference to a better one has an interval that holds 0 share its rank."
)


@dataclass(frozen=True)
class Outcome:
    """What a stretch left behind: its folder, what results.json holds, and the ready model folder (None: none)."""

    path: Path
    results: dict[str, Any]
    folder: Path | None

    @property
    def failures(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.results["failures"]
        return found


def stretch(
    settings: Settings,
    out: str | Path,
    *,
    workers: int | None = None,
    console: Console | None = None,
    quiet: bool = False,
    command: str = "",
) -> Outcome:
    """Measure every method, tune the best where asked, rank, and write tables, plots, a report and a ready folder.

    ``out`` is the state: the same call again does only what is missing. A method that fails is reported and does not
    stop the others.

    Raises `SettingsError` and ValueError for settings, models or methods that do not fit, `DataError` for data,
    `DifferentSettings` when the folder holds another stretch.
    """
    began = time.perf_counter()
    model, tokenizer = models.load(settings)
    trained = models.trained_length(settings, model.config)
    target = resolve_target(settings.to, trained)
    text = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    methods = plan(settings.methods, trained=trained, target=target, base=_base(text))
    corpus = models.corpus(settings, tokenizer)
    corpus.test.regions(size=target, count=settings.regions, allow_fewer=True)  # raises when no text is long enough
    identity = {
        "schema": SCHEMA,
        "settings": settings.to_dict(),
        "data": corpus.fingerprint,
        "model": _fingerprint(model),
        "versions": {k: v for k, v in versions().items() if k in ("python", "milepost", "torch", "transformers")},
    }
    digest = hashlib.sha256(canonical_json(identity).encode()).hexdigest()
    first = [_job(settings, method, trained, target) for method in methods]
    count = workers or max(1, usable_cores() // settings.threads)
    tuned = min(settings.best, len(methods) - 1) + 1 if settings.finetune else 0
    directory = SweepDirectory(out)
    with directory.lock():
        directory.claim(identity)
        with Progress(len(first) + tuned, workers=count, console=console, describe=_describe, quiet=quiet) as progress:

            def do(jobs: Sequence[Job]) -> tuple[list[dict[str, Any]], dict[str, dict[str, str]]]:
                failed = run_jobs(
                    directory, jobs, worker=WORKER, workers=min(count, len(jobs)), threads=settings.threads,
                    progress=progress, identity=digest,
                )  # fmt: skip
                return [directory.result(j.name) for j in jobs if directory.is_complete(j.name)], failed

            runs, failed = do(first)
            jobs = list(first)
            if settings.finetune:
                order = _order(runs, target)
                best = [m for label in order for m in methods if m.label == label and m.spec is not None]
                second = [
                    _job(settings, m, trained, target, tune_length=trained if settings.pose else target)
                    for m in best[: settings.best]
                ]
                second.append(_job(settings, methods[0], trained, target, tune_length=trained))
                more, also = do(second)
                runs, failed, jobs = runs + more, {**failed, **also}, jobs + second
        failures = [
            {"method": job.label, "seed": settings.seed, **failed[job.name]} for job in jobs if job.name in failed
        ]
        data = corpus.describe()
        results = assemble(settings, runs, failures, data, trained, target, command, time.perf_counter() - began)
        folder = _ready(directory, settings, model, tokenizer, runs, results)
        write_report(directory.path, results)
    return Outcome(directory.path, results, folder)


def _job(settings: Settings, method: Method, trained: int, target: int, tune_length: int = 0) -> Job:
    label = method.label
    if tune_length:
        label += f", tuned at {tune_length}" + (" (PoSE)" if settings.pose and method.spec is not None else "")
    values = {
        "settings": settings.to_dict(),
        "method": method.to_dict(),
        "trained": trained,
        "target": target,
        "steps": settings.finetune if tune_length else 0,
        "tune_length": tune_length,
        "label": label,
    }
    name = file_name(label)[:60] + "-" + hashlib.sha256(canonical_json(values).encode()).hexdigest()[:8]
    return Job(name=name, label=label, values=values)


def _base(config: Any) -> float | None:
    from milepost.encodings.frequencies import from_config

    try:
        return float(getattr(from_config(config), "base", 0.0)) or None
    except (ValueError, KeyError, TypeError):
        return None


def _fingerprint(model: Any) -> str:
    """The config and a sample of every weight, so that another model in the same folder is noticed."""
    found = hashlib.sha256(model.config.to_json_string(use_diff=False).encode())
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        found.update(f"{name}{tuple(parameter.shape)}{flat[:: max(1, len(flat) // 16)].float().tolist()}".encode())
    return found.hexdigest()[:16]


def _order(runs: Sequence[Mapping[str, Any]], target: int) -> list[str]:
    def loss(run: Mapping[str, Any]) -> float:
        found = [c["mean_nats"] for c in run["perplexity"] if c["measure"] == "windows" and c["length"] == target]
        return float(found[0]) if found else float("inf")

    return [str(run["method"]) for run in sorted(runs, key=loss)]


def assemble(
    settings: Settings,
    runs: Sequence[Mapping[str, Any]],
    failures: Sequence[Mapping[str, Any]],
    data: Mapping[str, Any],
    trained: int,
    target: int,
    command: str,
    seconds: float,
) -> dict[str, Any]:
    """results.json as plain values: the summary, the ranking, what is usable, and the verdict in words."""
    labels = [str(run["method"]) for run in runs]
    summary = summarise(
        runs,
        methods=labels,
        train_length=trained,
        passkey_train_length=trained if settings.prompts else None,
        passkey_chance=(0.1, 1e-5),
    )
    if summary["passkey"]:
        summary["passkey"]["about"] = "asked of the model as it is"
    usable = {str(run["method"]): _usable(run, runs, settings, trained) for run in runs}
    ranking = _ranking(summary, target)
    results = {
        "schema": SCHEMA,
        "settings": {**settings.to_dict(), "methods": labels, "train_length": trained, "target_length": target},
        "data": dict(data),
        "environment": {"versions": versions(), "hardware": hardware()},
        "summary": summary,
        "ranking": ranking,
        "usable": {name: {"length": found.length, "reason": found.reason} for name, found in usable.items()},
        "switch": _switch(runs, trained),
        "runs": list(runs),
        "failures": list(failures),
        "ready": None,
        "verdict": _verdict(usable, ranking, trained, target, settings),
        "timing": {"seconds": seconds, "command": command},
    }
    plain: dict[str, Any] = json.loads(canonical_json(results))
    return plain


def _by_length(run: Mapping[str, Any], measure: str) -> dict[int, float]:
    return {int(c["length"]): float(c["perplexity"]) for c in run["perplexity"] if c["measure"] == measure}


def _usable(
    run: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], settings: Settings, trained: int
) -> UsableLength:
    """Counted from the untouched model's perplexity at its trained length: no method may lower its own bar."""
    base = next((r for r in runs if r["method"] == "untouched"), run)
    return judge(
        _by_length(run, "last"),
        {int(row["asked"]): float(row["exact"]) for row in run["passkey"]},
        trained=trained,
        margin=settings.margin,
        passkey_floor=settings.passkey_floor,
        reference=_by_length(base, "last")[trained],
    )


def _ranking(summary: Mapping[str, Any], target: int) -> list[dict[str, Any]]:
    pairs = {
        (pair["a"], pair["b"]): pair
        for pair in summary["pairs"]
        if pair["measure"] == "windows" and pair["length"] == target
    }
    rows: list[dict[str, Any]] = []
    for place, entry in enumerate(summary["methods"]):
        rank = place + 1
        for before in rows:
            pair = pairs.get((before["method"], entry["method"]))
            if pair is not None and (pair["low"] is None or pair["low"] <= 0 <= pair["high"]):
                rank = min(rank, before["rank"])
                break
        rows.append({"rank": rank, "method": entry["method"]})
    return rows


def _switch(runs: Sequence[Mapping[str, Any]], trained: int) -> list[dict[str, Any]]:
    """What a hard switch costs: static methods against the untouched model and their dynamic forms."""
    found = {str(run["method"]): run for run in runs if not run["steps"]}
    untouched = _by_length(found["untouched"], "windows") if "untouched" in found else {}
    beyond = min((length for length in untouched if length > trained), default=trained)
    rows = []
    for label, run in found.items():
        if not run["plan"]["static"] or not untouched:
            continue
        mine = _by_length(run, "windows")
        row = {
            "method": label, "at": trained, "beyond": beyond, "untouched": untouched[trained], "static": mine[trained],
            "static_beyond": mine[beyond], "untouched_beyond": untouched[beyond], "dynamic": None,
            "dynamic_beyond": None,
        }  # fmt: skip
        partner = run["plan"]["partner"]
        if partner in found:
            other = _by_length(found[partner], "windows")
            row |= {"dynamic": other[trained], "dynamic_beyond": other[beyond]}
        rows.append(row)
    return rows


def _verdict(
    usable: Mapping[str, UsableLength],
    ranking: Sequence[Mapping[str, Any]],
    trained: int,
    target: int,
    settings: Settings,
) -> str:
    good = [row["method"] for row in ranking if row["method"] in usable and usable[row["method"]].length >= target]
    rule = f"perplexity within {settings.margin:.0%} of the untouched model's at {trained}"
    if settings.prompts:
        rule += f" and passkey at {settings.passkey_floor:.0%} or more"
    if good:
        return f"Usable at {target} tokens ({rule}): {', '.join(good)}."
    if not usable:
        return "Nothing was measured."
    best = max(usable, key=lambda name: usable[name].length)
    found = usable[best]
    return (
        f"No method keeps this model usable at {target} tokens ({rule}). The longest usable length is {found.length}, "
        f"with {best}: {found.reason}."
    )


def _ready(
    directory: SweepDirectory,
    settings: Settings,
    model: Any,
    tokenizer: Any,
    runs: Sequence[Mapping[str, Any]],
    results: dict[str, Any],
) -> Path | None:
    """The folder of the best method that a config.json can say (of the best at all where none can)."""
    trained, target = results["settings"]["train_length"], results["settings"]["target_length"]
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    types = getattr(config, "layer_types", None) or []
    by_name = {str(run["method"]): run for run in runs if run["plan"]["spec"] is not None}
    ranked = [by_name[row["method"]] for row in results["ranking"] if row["method"] in by_name]
    if not ranked:
        return None
    found: dict[str, FrequencyMethod | None] = {}
    for run in ranked:
        method = Method.from_dict(run["plan"])
        with attach(model, method.spec or "own", trained_length=trained, **method.options) as attachment:
            found[run["method"]] = frequency_method(attachment)
    sayable = [run for run in ranked if said_by_config(found[run["method"]], trained, target, head_dim)]
    chosen = (sayable or ranked)[0]
    results["ready"] = chosen["method"]
    measured = results["verdict"]
    if chosen is not ranked[0]:
        measured += (
            f" The best method, {ranked[0]['method']}, is more than a config.json can say; this folder holds "
            f"{chosen['method']}, the best that one can."
        )
    temporary = directory.path / ".source"
    source = _weights(directory, settings, model, tokenizer, chosen, temporary)
    try:
        return write_folder(
            directory.path / "model",
            source,
            Method.from_dict(chosen["plan"]),
            found[chosen["method"]],
            trained=trained,
            target=target,
            head_dim=head_dim,
            measured=measured,
            layer_type="full_attention" if len(set(types)) > 1 else None,
        )
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _weights(
    directory: SweepDirectory, settings: Settings, model: Any, tokenizer: Any, run: Mapping[str, Any], temporary: Path
) -> Path:
    """A folder with the weights that were measured: the tuned ones, the model's own, or a converted copy of a GGUF."""
    folders = (path.parent for path in (directory.path / "runs").glob("*/model"))
    named = {json.loads((path / "result.json").read_text("utf-8"))["method"]: path / "model" for path in folders}
    own = Path(models.model_path(settings.model))
    tuned = named.get(run["method"])
    if tuned is None and (own / "config.json").exists():
        return own
    shutil.rmtree(temporary, ignore_errors=True)
    if tuned is not None:
        shutil.copytree(tuned, temporary)
    else:
        model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    return temporary


def write_report(folder: Path, results: Mapping[str, Any]) -> None:
    """results.json, table.md, table.tex, the plots and report.html, each atomically."""
    from milepost.report import figures, page, render
    from milepost.stretch.tables import tables

    write_atomically(folder / "results.json", canonical_json(results))
    made = tables(results)
    trained, target = results["settings"]["train_length"], results["settings"]["target_length"]
    title = f"Stretching {results['settings']['model']} from {trained} to {target} tokens"
    notes = [RULE]
    notes += [f"{failure['method']} failed: {failure['message']}" for failure in results["failures"]]
    head = f"# {title}\n\n{results['verdict']}\n\n" + "".join(f"{note}\n\n" for note in notes)
    write_atomically(folder / "table.md", head + "\n".join(table.to_markdown() for table in made))
    write_atomically(folder / "table.tex", "\n".join(table.to_latex() for table in made))
    drawn = figures(results)
    for name, figure in drawn.items():
        for kind in ("png", "svg"):
            write_atomically(folder / f"{name}.{kind}", render(figure, kind, salt=name))
    write_atomically(
        folder / "report.html", page(results, made, drawn, title=title, lead=results["verdict"], notes=notes)
    )


def _describe(result: Mapping[str, Any]) -> str:
    found = _by_length(result, "windows")
    words = [f"perplexity {found[min(found)]:.2f} at {min(found)}, {found[max(found)]:.2f} at {max(found)}"]
    if result["passkey"]:
        last = result["passkey"][-1]
        words.append(f"passkey {last['exact']:.2f} at {last['asked']}")
    return "; ".join(words)
