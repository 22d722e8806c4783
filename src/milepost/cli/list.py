"""`milepost list`: the catalogue."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

EPILOG = """Examples:

  milepost list

  milepost list --tree

  milepost list --family rotary --json"""

MANIFESTATIONS = {
    "embedding": "position embedding",
    "bias": "position bias",
    "position map": "other positions",
    "none": "no position signal",
}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("list", epilog=EPILOG)(show_list)


def show_list(
    tree: Annotated[bool, typer.Option("--tree", help="As the survey's taxonomy.")] = False,
    family: Annotated[str | None, typer.Option("--family", help="Only one family.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="As JSON, with every option and its default.")] = False,
) -> int:
    """Every encoding that can be built, with the four properties of the survey of Zhao et al. 2023.

    Manifestation: embedding or bias. Learnable: training changes it. Integration: added or multiplied. Injection: into
    the first layer only, or into every layer.
    """
    from milepost.cli.errors import UsageError
    from milepost.encoding import catalogue

    entries = [entry for entry in catalogue() if family is None or entry.family == family]
    if not entries:
        families = ", ".join(dict.fromkeys(entry.family for entry in catalogue()))
        raise UsageError(f"no family is named {family!r}; there are {families}")
    if json_:
        typer.echo(json.dumps([as_json(entry) for entry in entries], indent=1))
    elif tree:
        _tree(entries)
    else:
        _table(entries)
    return 0


def as_json(entry: Any) -> dict[str, Any]:
    """A catalogue entry as plain values."""
    from dataclasses import MISSING, fields

    preset = dict(entry.preset)
    options = {}
    for option in fields(entry.cls.Config):
        default = preset.get(option.name, option.default)
        options[option.name] = "required" if default is MISSING else _plain(default)
    names = ("name", "title", "family", "manifestation", "learnable", "integration", "injection")
    values = {name: getattr(entry, name) for name in names}
    more = {name: getattr(entry, name) for name in ("source", "summary", "survey", "shared", "trainable")}
    return {**values, **more, "options": options}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _table(entries: list[Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("name", "family", "manifests as", "learned", "meets content", "injected"):
        table.add_column(heading, no_wrap=True)
    table.add_column("what it does", overflow="fold")
    last = None
    for entry in entries:
        if last is not None and entry.family != last:
            table.add_section()
        last = entry.family
        name = Text(entry.name, style="bold")
        learned = "yes" if entry.learnable else "no"
        table.add_row(
            name, entry.family, entry.manifestation, learned, entry.integration, entry.injection, entry.summary
        )
    console.print(table)
    console.print(
        f"{len(entries)} encodings; options follow a colon: alibi:slope_scale=2. See milepost show NAME.", markup=False
    )


def _tree(entries: list[Any]) -> None:
    from rich.console import Console
    from rich.text import Text
    from rich.tree import Tree

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    root = Tree("positional encodings")
    for manifestation, words in MANIFESTATIONS.items():
        chosen = [entry for entry in entries if entry.manifestation == manifestation]
        if not chosen:
            continue
        branch = root.add(Text(words, style="bold"))
        for injection in dict.fromkeys(entry.injection for entry in chosen):
            words = {"initial": "into the first layer", "every": "into every layer", "none": "nowhere"}[injection]
            level = branch.add(words)
            for integration in dict.fromkeys(e.integration for e in chosen if e.injection == injection):
                words = {"add": "added", "multiply": "multiplied", "none": "no integration"}[integration]
                group = level.add(words)
                for learnable in (False, True):
                    found = [
                        e
                        for e in chosen
                        if (e.injection, e.integration, e.learnable) == (injection, integration, learnable)
                    ]
                    if found:
                        leaf = group.add("learned" if learnable else "fixed")
                        for entry in found:
                            leaf.add(Text.assemble((entry.name, "bold"), f"  {entry.title}"))
    console.print(root)
