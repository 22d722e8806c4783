"""`milepost env`: versions and hardware, for bug reports."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

EPILOG = """Examples:

  milepost env

  milepost env --json"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("env", epilog=EPILOG)(env)


def env(json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> int:
    """Versions and hardware, for bug reports."""
    from milepost.sweep.environment import hardware, versions

    values: dict[str, Any] = {"versions": versions(), "hardware": hardware(), "attention": attention_backends()}
    if json_:
        typer.echo(json.dumps(values, indent=1))
        return 0
    for group in values.values():
        for name, value in group.items():
            text = ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
            typer.echo(f"{name:<16} {text}")
    return 0


def attention_backends() -> dict[str, str]:
    """For each attention backend, whether it would serve a small ALiBi call here, and why not."""
    import torch

    from milepost.attention import explain
    from milepost.encoding import build
    from milepost.positions import Positions

    q = torch.zeros(1, 2, 8, 64)
    positions = Positions.full(8)
    return dict(explain(q, q, q, positions, build("alibi", num_heads=2)(positions)).reasons)
