"""`milepost bench`: attention, decoding, rotation, memory and training, measured beside their peers."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

EPILOG = """Examples:

  milepost bench --groups forward,training --lengths 1024,4096 --dtypes float32

  milepost bench --groups memory,model --out bench

  milepost bench --threads 2 --clock wall --out bench-wall

All groups at all lengths take an hour or two. The folder is the state: stop it at any moment, run the same command
again, and only what is missing is measured; other groups and lengths can be added to it.
Exit codes: 0 done, 1 a job failed (the others are in the report), 2 wrong usage."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("bench", epilog=EPILOG)(bench)


def bench(
    out: Annotated[Path, typer.Option("--out", help="Folder of the results.")] = Path("bench"),
    groups: Annotated[
        str,
        typer.Option(
            "--groups",
            help="forward, training, flex, decoding, batches, rotation, memory, model, order, terms, or all.",
        ),
    ] = "all",
    lengths: Annotated[
        str, typer.Option("--lengths", help="512,1024 or 512..4096 (default: each group's own).")
    ] = "",
    dtypes: Annotated[str, typer.Option("--dtypes", help="float32, bfloat16 or both.")] = "float32,bfloat16",
    threads: Annotated[int, typer.Option("--threads", help="Threads of each measurement.")] = 1,
    clock: Annotated[
        str, typer.Option("--clock", help="cpu: seconds computed, for a machine that is shared; or wall.")
    ] = "cpu",
    rounds: Annotated[int, typer.Option("--rounds", help="How often contenders take turns.")] = 5,
    again: Annotated[bool, typer.Option("--again", help="Measure what is there already, too.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the results as JSON; no progress.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> int:
    """Measure attention with biases beside torch, FlexAttention, x-transformers and transformers.

    Times in turns within one process, as medians with their spread; errors against float64; peak memory; tokens a
    second of training. Writes report.md, results.json and plots.
    """
    from milepost.bench import GROUPS, Settings
    from milepost.bench import bench as run
    from milepost.bench.tables import essence
    from milepost.cli.errors import UsageError
    from milepost.compare.settings import parse_lengths, parse_names

    try:
        asked = parse_lengths(lengths) if lengths else None
    except ValueError as error:
        raise UsageError(f"--lengths: {error}") from error
    settings = Settings(
        groups=tuple(GROUPS) if groups == "all" else tuple(parse_names(groups)),
        lengths=asked,
        dtypes=tuple(parse_names(dtypes)),
        threads=threads,
        clock=clock,  # type: ignore[arg-type]  # checked by Settings
        rounds=rounds,
    )
    outcome = run(
        settings,
        out,
        again=again,
        quiet=quiet or json_,
        command="milepost " + shlex.join(sys.argv[1:]) if sys.argv else "",
    )
    if json_:
        typer.echo(json.dumps(outcome.results, indent=1))
    else:
        for line in essence(outcome.results["runs"]):
            typer.echo(line)
        for name, message in outcome.failures.items():
            typer.echo(f"FAILED {name}: {message}", err=True)
        typer.echo(f"report: {outcome.path / 'report.md'}")
    return 1 if outcome.failures else 0
