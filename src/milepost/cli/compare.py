"""`milepost compare`: encodings against each other, trained short and tested long."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from milepost.cli.options import with_settings

EPILOG = """Examples:

  milepost compare --preset quick --out demo

  milepost compare --methods mep,alibi,alibi:slope_scale=2 --test-lengths 128..4096 --seeds 2 --out sweep

  milepost compare --methods all-trainable --preset tiny --out check

The folder is the state: stop it at any moment, run the same command again, and only what is missing is done.
Exit codes: 0 done, 1 a run failed (the others are in the report), 2 wrong usage."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("compare", epilog=EPILOG)(compare)


@with_settings()
def compare(
    *,
    out: Annotated[Path, typer.Option("--out", help="Folder of the sweep, made when it is not there.")],
    changes: dict[str, Any],
    preset: Annotated[
        str, typer.Option("--preset", help="quick, small, kerple or tiny; flags replace its values.")
    ] = "quick",
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="Processes side by side (default: by cores).")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the summary as JSON; no tables, no progress.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> int:
    """Train encodings short, test them long, and write one table, plots and a report page.

    A preset gives every value; each has a flag of its own name. The tables come to stdout, progress to stderr.
    """
    from milepost.compare import compare as run
    from milepost.compare import preset as settings_of

    settings = settings_of(preset, **changes)
    outcome = run(
        settings,
        out,
        workers=workers,
        quiet=quiet or json_,
        command="milepost " + shlex.join(sys.argv[1:]) if sys.argv else "",
    )
    if json_:
        results = {key: outcome.results[key] for key in ("schema", "settings", "summary", "failures", "timing")}
        typer.echo(json.dumps({**results, "report": str(outcome.path / "report.html")}, indent=1))
    else:
        _print(outcome)
    return 1 if outcome.failures else 0


def _print(outcome: Any) -> None:
    from rich.console import Console

    from milepost.report import tables

    console = Console(highlight=False)
    width = console.width if console.is_terminal else 132
    if not console.is_terminal:
        console = Console(highlight=False, width=width)
    for table in tables(outcome.results):
        console.print(table.to_rich(width))
    for failure in outcome.failures:
        text = f"FAILED {failure['method']}, seed {failure['seed']}: {failure['message']}"
        Console(stderr=True, highlight=False).print(text, markup=False, soft_wrap=True)
    console.print(f"report: {outcome.path / 'report.html'}", markup=False, soft_wrap=True)
