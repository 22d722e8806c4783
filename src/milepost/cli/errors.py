"""What went wrong as an exit code and one sentence."""

from __future__ import annotations

import errno

import click
import typer

_USAGE = ("SettingsError", "DifferentSettings", "UsageError", "BadParameter")


class UsageError(ValueError):
    """An argument that cannot be; the message says what it may be."""


def explain(error: BaseException) -> tuple[int, str]:
    """(exit code, text for stderr) of anything that a command raised.

    Wrong usage (2): unknown options and values that cannot be. Failed (1): data, files, training and the rest.
    """
    if isinstance(error, typer.Exit | click.exceptions.Exit):
        return error.exit_code, ""
    if isinstance(error, KeyboardInterrupt | click.Abort | typer.Abort):
        return 1, "stopped; run the same command again to go on from here"
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # of click, or of the copy that typer brings
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        return int(
            error.exit_code
        ), f"error: {error.format_message().rstrip('.')}{hint}" if error.format_message() else ""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds.intersection(_USAGE):
        problems = getattr(error, "problems", None)
        if problems and len(problems) > 1:
            return 2, "error: " + "\n       ".join(problems)
        return 2, f"error: {error}"
    if isinstance(error, OSError):
        return 1, f"error: {_os_error(error)}"
    if isinstance(error, ValueError | TypeError | RuntimeError | KeyError | ImportError):
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        return 1, f"error: {text or type(error).__name__}"
    return 1, f"error: {type(error).__name__}: {error}; run again with --debug before the command to see where"


def _os_error(error: OSError) -> str:
    text = error.strerror or str(error)
    if error.filename is not None:
        text = f"{error.filename}: {text}"
    if error.errno == errno.ENOSPC and "free some space" not in text:
        text += "; free some space and run the same command again"
    return text
