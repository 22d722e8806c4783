"""`milepost eval`: a saved model by test length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

EPILOG = """Examples:

  milepost eval model --lengths 128..4096

  milepost eval my-llama/ --data my-texts/ --lengths 1024..16384 --regions 8 --passkey --json

A model is a folder or a name in the local Hugging Face cache; nothing is downloaded unless HF_HUB_OFFLINE=0."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("eval", epilog=EPILOG)(evaluate)


def evaluate(
    model: Annotated[str, typer.Argument(help="A folder written by milepost train, or any Hugging Face causal model.")],
    lengths: Annotated[str, typer.Option("--lengths", help="128,512 or 128..4096 (doubling).")] = "128..4096",
    data: Annotated[
        str, typer.Option("--data", help="prose, code, a file or folder, or a Hugging Face name.")
    ] = "prose",
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="bytes, or another one than the model's own.")
    ] = None,
    measures: Annotated[str, typer.Option("--measures", help="windows, last, sliding.")] = "windows,last",
    regions: Annotated[int, typer.Option("--regions", min=1, help="Stretches of held-out text.")] = 24,
    last: Annotated[int | None, typer.Option("--last", min=1, help="Targets of the measure 'last'.")] = None,
    stride: Annotated[int | None, typer.Option("--stride", min=1, help="Stride of the measure 'sliding'.")] = None,
    passkey: Annotated[
        bool, typer.Option("--passkey", help="Passkey retrieval at the same lengths, in plain English.")
    ] = False,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Passkey prompts at each length.")] = 20,
    batch_tokens: Annotated[int, typer.Option("--batch-tokens", min=1, help="Tokens of one forward pass.")] = 8192,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    out: Annotated[Path | None, typer.Option("--out", help="Write table, plots and report into this folder.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> int:
    """Perplexity of a saved model by length (each target counted once), and passkey retrieval where asked for."""
    from milepost.cli.errors import UsageError
    from milepost.compare.settings import parse_lengths, parse_names
    from milepost.data import PasskeyTask, load_corpus
    from milepost.evaluate import MEASURES, measure_lengths, passkey_by_length

    try:
        wanted = parse_lengths(lengths)
    except ValueError as error:
        raise UsageError(f"--lengths: {error}") from error
    chosen = parse_names(measures)
    unknown = [measure for measure in chosen if measure not in MEASURES]
    if unknown or not chosen:
        raise UsageError(f"--measures {measures!r}: there are {', '.join(MEASURES)}")
    if last is not None and last > wanted[0]:
        raise UsageError(f"--last {last} targets do not fit into the shortest length {wanted[0]}")
    loaded, its_tokenizer = load_model(model, tokenizer, device)
    corpus = load_corpus(data, tokenizer=its_tokenizer)
    regions_found = corpus.test.regions(size=wanted[-1], count=regions)
    measured = measure_lengths(
        loaded,
        corpus.test,
        regions_found,
        lengths=wanted,
        measures=chosen,
        last=last,
        stride=stride,
        batch_tokens=batch_tokens,
    )
    run: dict[str, Any] = {
        "method": Path(model).name or model,
        "seed": 0,
        "parameters": sum(p.numel() for p in loaded.parameters()),
        "encoding_parameters": 0,
        "perplexity": [loss.to_dict() for loss in measured.lengths],
        "positions": [{"low": p.low, "high": p.high, "targets": p.targets, "mean": p.mean} for p in measured.positions],
    }
    trained = int(getattr(loaded.config, "max_position_embeddings", None) or wanted[0])
    task = PasskeyTask.sentences(its_tokenizer)
    if passkey:
        found = passkey_by_length(
            loaded,
            task,
            lengths=[n for n in wanted if n >= task.min_length],
            prompts=prompts,
            batch_tokens=batch_tokens,
        )
        run["passkey"] = [result.to_dict() for result in found]
    results = results_of(run, trained=trained, lengths=wanted, chance=task.chance, data=corpus.describe())
    _report(results, out, json_)
    return 0


def load_model(name: str, tokenizer: str | None, device: str) -> tuple[Any, Any]:
    """(model, tokenizer or None for bytes) from a folder or the local cache.

    Raises ValueError when there is none, or its tokenizer is missing.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import milepost.model  # noqa: F401  (registers the model type)
    from milepost.data import VOCAB_SIZE

    try:
        model = AutoModelForCausalLM.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = (
            "is a folder without a model that loads" if Path(name).is_dir() else "is no folder, nor in the local cache"
        )
        raise ValueError(
            f"{name!r} {reason} ({str(error).splitlines()[0]}); nothing is downloaded unless HF_HUB_OFFLINE=0 is set"
        ) from error
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device).eval()
    if tokenizer == "bytes" or (tokenizer is None and model.config.vocab_size == VOCAB_SIZE):
        return model, None
    try:
        return model, AutoTokenizer.from_pretrained(tokenizer or name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{tokenizer or name!r} has no tokenizer that loads: name one with --tokenizer, or bytes"
        ) from error


def results_of(
    run: dict[str, Any], *, trained: int, lengths: tuple[int, ...], chance: tuple[float, float], data: dict[str, Any]
) -> dict[str, Any]:
    """One model's measurements in the shape of a comparison's results."""
    from milepost.compare import summarise
    from milepost.sweep.environment import hardware, versions

    summary = summarise(
        [run], methods=[run["method"]], train_length=trained, passkey_train_length=trained, passkey_chance=chance
    )
    return {
        "schema": "milepost.eval/1",
        "settings": {"train_length": trained, "test_lengths": list(lengths), "methods": [run["method"]]},
        "data": data,
        "environment": {"versions": versions(), "hardware": hardware()},
        "summary": summary,
        "runs": [run],
        "failures": [],
    }


def _report(results: dict[str, Any], out: Path | None, json_: bool) -> None:
    from rich.console import Console

    from milepost.report import figures, page, render, tables
    from milepost.sweep import canonical_json, write_atomically

    made = tables(results)
    if out is not None:
        write_atomically(out / "results.json", canonical_json(results))
        write_atomically(out / "table.md", "\n".join(table.to_markdown() for table in made))
        drawn = figures(results)
        for name, figure in drawn.items():
            for kind in ("png", "svg"):
                write_atomically(out / f"{name}.{kind}", render(figure, kind, salt=name))
        title = f"{results['settings']['methods'][0]} by length"
        write_atomically(out / "report.html", page(results, made, drawn, title=title))
    if json_:
        typer.echo(json.dumps(results, indent=1))
        return
    console = Console(highlight=False)
    width = console.width if console.is_terminal else 132
    if not console.is_terminal:
        console = Console(highlight=False, width=width)
    for table in made:
        console.print(table.to_rich(width))
    if out is not None:
        console.print(f"report: {out / 'report.html'}", markup=False, soft_wrap=True)
