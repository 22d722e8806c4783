"""The command line: one file a command, each with `register(app)`; a new command is one more name in `COMMANDS`.

Exit codes: 0 done, 1 failed, 2 wrong usage. An error is one sentence on stderr with the value and the mend; `--debug`
before the command shows where it came from.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from milepost.cli.errors import explain

COMMANDS = ("compare", "train", "eval", "doctor", "export", "stretch", "bench", "list", "show", "env")
"""Modules of this package, in the order of the help. Each has `register(app)`."""

DONE, FAILED, USAGE = 0, 1, 2

EPILOG = "Example:  milepost compare --preset quick --out demo"


def build_app() -> typer.Typer:
    """The whole command line as a typer application."""
    app = typer.Typer(
        name="milepost",
        help="Positional encodings and length extrapolation for Transformers.",
        epilog=EPILOG,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )

    @app.callback()
    def everywhere(
        debug: Annotated[bool, typer.Option("--debug", help="Show the full traceback of an error.")] = False,
        version: Annotated[
            bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version and leave.")
        ] = False,
    ) -> None:
        pass

    for name in COMMANDS:
        import_module(f"milepost.cli.{name}").register(app)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        import milepost

        typer.echo(milepost.__version__)
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code."""
    sys.exit(run(sys.argv[1:] if arguments is None else [*arguments]))


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code: 0 done, 1 failed, 2 wrong usage."""
    # Nothing here may reach for a network, nor ask for a display
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        os.environ.setdefault(name, "1")
    arguments = [*arguments]
    debug = "--debug" in arguments
    if debug:
        arguments.remove("--debug")
    app = build_app()
    try:
        result = app(arguments, standalone_mode=False, prog_name="milepost")
    except BaseException as error:
        code, text = explain(error)
        if debug and code:
            raise
        if text:
            print(text, file=sys.stderr)
        return code
    return result if isinstance(result, int) else DONE
