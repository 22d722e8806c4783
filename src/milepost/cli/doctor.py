"""`milepost doctor`: what a configuration makes each engine do, and what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

EPILOG = """Examples:

  milepost doctor config.json

  milepost doctor model.gguf --json

  milepost doctor '{"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}' --checkpoint config.json

  milepost doctor config.json --fix"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor", epilog=EPILOG)(doctor)


def doctor(
    source: Annotated[str, typer.Argument(help="config.json, a folder, a .gguf file, or the JSON of --hf-overrides.")],
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="The configuration that an override applies to.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", help="What the source is: config, parameters or override.")
    ] = None,
    replace_trained: Annotated[
        bool, typer.Option("--replace-trained", help="Replacing the scaling of the checkpoint is meant.")
    ] = False,
    fix: Annotated[bool, typer.Option("--fix", help="Write a corrected copy beside the file, never over it.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="The report as JSON.")] = False,
) -> int:
    """Say what will happen at which length in transformers, vLLM and llama.cpp, what is wrong, why, and the cure.

    Exit code 0: no errors; 1: errors; 2: nothing to read. Nothing in a file is executed.
    """
    from milepost.cli.errors import UsageError
    from milepost.extend.doctor import SourceError, diagnose, write_fixed

    if kind not in (None, "config", "parameters", "override"):
        raise UsageError(f"--kind {kind} must be config, parameters or override")
    if checkpoint is not None and not checkpoint.exists():
        raise UsageError(f"--checkpoint {checkpoint} does not exist")
    try:
        report = diagnose(
            source,
            kind=kind,  # type: ignore[arg-type]  # one of the three, checked above
            checkpoint=checkpoint,
            replace_trained=replace_trained,
        )
    except SourceError as error:
        raise UsageError(str(error)) from error
    written, unwritten = None, None
    try:
        written = write_fixed(report) if fix and report.corrected is not None else None
    except OSError as error:  # the report is worth more than the copy
        unwritten = error
    if json_:
        fixed = {"fixed": str(written)} if written is not None else {}
        typer.echo(json.dumps({**report.to_dict(), **fixed}, indent=1))
    else:
        typer.echo(report.text())
        if written is not None:
            typer.echo(f"\ncorrected copy: {written}")
        elif fix and unwritten is None:
            typer.echo("\nnothing here can be corrected without knowing the model")
    if unwritten is not None:
        typer.echo(f"error: the corrected copy could not be written: {unwritten}", err=True)
        return 1
    return report.exit_code
