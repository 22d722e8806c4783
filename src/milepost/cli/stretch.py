"""`milepost stretch`: which method makes a model read longer, with which numbers, and whether it worked."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

EPILOG = """Examples:

  milepost stretch demo --to 4x --out stretched

  milepost stretch my-llama/ --to 16384 --methods yarn,dynamic-ntk,self-extend --data my-texts/ --out stretched

  milepost stretch my-llama/ --to 4x --finetune 200 --best 1 --pose --out stretched

The folder is the state: stop it at any moment, run the same command again, and only what is missing is done.
Exit codes: 0 done, 1 a method failed (the others are in the report), 2 wrong usage."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("stretch", epilog=EPILOG)(stretch)


def stretch(
    model: Annotated[str, typer.Argument(help="A model folder, a name in the local Hugging Face cache, or demo.")],
    to: Annotated[str, typer.Option("--to", help="Target length: 16384, 16k, or 4x the trained length.")],
    out: Annotated[Path, typer.Option("--out", help="Folder of the results, made when it is not there.")],
    methods: Annotated[
        str, typer.Option("--methods", help="auto, or names with options: yarn,ntk:factor=8,rerope:window=512.")
    ] = "auto",
    trained: Annotated[int, typer.Option("--trained", min=0, help="Trained length (0: from the config).")] = 0,
    data: Annotated[
        str, typer.Option("--data", help="prose, code, a file or folder, or a Hugging Face name.")
    ] = "prose",
    regions: Annotated[int, typer.Option("--regions", min=1, help="Held-out stretches of the target length.")] = 16,
    prompts: Annotated[int, typer.Option("--prompts", min=0, help="Passkey prompts at each length (0: none).")] = 24,
    finetune: Annotated[int, typer.Option("--finetune", min=0, help="Tuning steps for the best methods.")] = 0,
    best: Annotated[int, typer.Option("--best", min=1, help="How many methods are tuned.")] = 2,
    tuning: Annotated[str, typer.Option("--tuning", help="lora or full.")] = "lora",
    rank: Annotated[int, typer.Option("--rank", min=1, help="Rank of the adapters.")] = 8,
    lr: Annotated[float, typer.Option("--lr", help="Learning rate of tuning.")] = 1e-4,
    batch_tokens: Annotated[int, typer.Option("--batch-tokens", min=1, help="Tokens of one pass.")] = 4096,
    pose: Annotated[bool, typer.Option("--pose", help="Tune at the trained length with skipped positions.")] = False,
    margin: Annotated[float, typer.Option("--margin", help="Usable: perplexity within this share.")] = 0.10,
    passkey_floor: Annotated[float, typer.Option("--passkey-floor", help="Usable: passkey at least this.")] = 0.90,
    generations: Annotated[int, typer.Option("--generations", min=1, help="Of the LongRoPE search.")] = 3,
    population: Annotated[int, typer.Option("--population", min=1, help="Of the LongRoPE search.")] = 8,
    seed: Annotated[int, typer.Option("--seed", help="Of prompts, data order and search.")] = 0,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Of each worker.")] = 1,
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Processes side by side.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the ranking as JSON; no tables, no progress.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> int:
    """Measure a RoPE model at a longer length under every method, rank them, and write a folder ready to use.

    The untouched model is measured first; then every method on the same tokens, by perplexity and passkey retrieval.
    Says plainly when no method keeps the model usable, and what its longest usable length is.
    """
    from milepost.cli.errors import UsageError
    from milepost.compare.settings import parse_names
    from milepost.stretch import Settings
    from milepost.stretch import stretch as run
    from milepost.stretch.settings import SettingsError

    try:
        settings = Settings(
            model=model, to=to, methods=tuple(parse_names(methods)), trained=trained, data=data, regions=regions,
            prompts=prompts, finetune=finetune, best=best, tuning=tuning, rank=rank, lr=lr,  # type: ignore[arg-type]  # checked by Settings
            batch_tokens=batch_tokens, pose=pose, margin=margin, passkey_floor=passkey_floor, generations=generations,
            population=population, seed=seed, threads=threads, dtype=dtype, device=device,
        )  # fmt: skip
    except SettingsError as error:
        raise UsageError(str(error)) from error
    outcome = run(
        settings,
        out,
        workers=workers,
        quiet=quiet or json_,
        command="milepost " + shlex.join(sys.argv[1:]) if sys.argv else "",
    )
    if json_:
        keys = ("schema", "ranking", "usable", "verdict", "switch", "failures", "ready")
        typer.echo(json.dumps({key: outcome.results[key] for key in keys}, indent=1))
    else:
        _print(outcome)
    return 1 if outcome.failures else 0


def _print(outcome: Any) -> None:
    from rich.console import Console

    from milepost.stretch.tables import tables

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    for table in tables(outcome.results):
        console.print(table.to_rich(console.width))
    for failure in outcome.failures:
        text = f"FAILED {failure['method']}: {failure['message']}"
        Console(stderr=True, highlight=False).print(text, markup=False, soft_wrap=True)
    console.print(outcome.results["verdict"], markup=False, soft_wrap=True)
    if outcome.folder is not None:
        ready = f"model with {outcome.results['ready']}: {outcome.folder} (see EXPORT.md there)"
        console.print(ready, markup=False, soft_wrap=True)
    console.print(f"report: {outcome.path / 'report.html'}", markup=False, soft_wrap=True)
