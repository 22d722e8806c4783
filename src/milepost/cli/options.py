"""Command-line options made from the settings' fields, so that each value of a preset has a flag of its own name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any

import typer

from milepost.cli.errors import UsageError
from milepost.compare.settings import PARSERS, Settings


def with_settings(names: Sequence[str] | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the function gets the settings that were given as `changes`, and typer sees one option for each.

    names: which settings (default all). An option that is not given is not in `changes`.
    """
    chosen = [f for f in fields(Settings) if names is None or f.name in names]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name != "changes"]
        options = [_parameter(f) for f in chosen]

        def command(**values: Any) -> Any:
            changes = {}
            for option in options:
                value = values.pop(option.name)
                if value is not None:
                    changes[option.name] = parse(option.name, value)
            return function(**values, changes=changes)

        command.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]  # what typer reads
        command.__annotations__ = {p.name: p.annotation for p in [*own, *options]}
        command.__doc__ = function.__doc__
        command.__name__ = function.__name__
        return command

    return decorate


def parse(name: str, value: Any) -> Any:
    """The value of a setting from its option.

    Raises `UsageError` for text that cannot be read.
    """
    if name not in PARSERS:
        return value
    try:
        return PARSERS[name](value)
    except ValueError as error:
        raise UsageError(f"--{name.replace('_', '-')}: {error}") from error


def _parameter(entry: Field[Any]) -> inspect.Parameter:
    default = entry.default if entry.default is not MISSING else None
    kind: Any = str if isinstance(default, tuple) else type(default)
    flag = "--" + entry.name.replace("_", "-")
    names = [f"{flag}/--no-{flag[2:]}"] if kind is bool else [flag]
    option = typer.Option(*names, help=f"{entry.metadata['help']}.", show_default=False)
    return inspect.Parameter(
        entry.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )
