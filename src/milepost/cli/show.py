"""`milepost show`: one encoding, in words and as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

EPILOG = """Examples:

  milepost show alibi

  milepost show alibi:slope_scale=2 --out alibi.png

  milepost show rope:base=500000 --head-dim 128 --length 32768 --out rope.svg"""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("show", epilog=EPILOG)(show)


def show(
    name: Annotated[str, typer.Argument(help="An encoding with options after a colon, a sum (+) or a schedule (/).")],
    out: Annotated[Path | None, typer.Option("--out", help="Write the picture here (.png or .svg).")] = None,
    heads: Annotated[int, typer.Option("--heads", min=1, help="Attention heads.")] = 8,
    head_dim: Annotated[int, typer.Option("--head-dim", min=1, help="Width of a head.")] = 64,
    layers: Annotated[int, typer.Option("--layers", min=1, help="Layers.")] = 1,
    trained_length: Annotated[int, typer.Option("--trained-length", min=1, help="Trained length, marked.")] = 512,
    length: Annotated[int, typer.Option("--length", min=2, help="Longest distance drawn, plus one.")] = 4096,
    seed: Annotated[int, typer.Option("--seed", help="Of the initial values of learned parameters.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="Properties and curve as JSON.")] = False,
) -> int:
    """What an encoding is and what it does to attention by distance, per head, at its initial values.

    The picture fits the kind: bias against distance; rotation score and wavelengths; a heat map of embeddings; for what
    depends on content, mean attention over random content.
    """
    import torch

    from milepost.cli.errors import UsageError
    from milepost.encoding import find, from_spec, parse_spec
    from milepost.report import bias_curves, picture, render

    if out is not None and out.suffix not in (".png", ".svg"):
        raise UsageError(f"--out {out} must end in .png or .svg")
    geometry = {
        "num_heads": heads,
        "head_dim": head_dim,
        "width": heads * head_dim,
        "num_layers": layers,
        "vocab_size": 258,
        "trained_length": trained_length,
    }
    torch.manual_seed(seed)
    try:
        encoding = from_spec(name, geometry)
        single = "+" not in name and "/" not in name
        entry = find(parse_spec(name)[0]) if single else None
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    if json_:
        from milepost.cli.list import as_json

        values = as_json(entry) if entry is not None else {"name": name}
        curve = bias_curves(encoding, geometry, length=length)
        typer.echo(json.dumps({**values, "geometry": geometry, "curve": curve}, indent=1))
    elif entry is not None:
        typer.echo(f"{entry.title} ({entry.name}): {entry.summary}")
        typer.echo(
            f"manifests as {entry.manifestation}; {'learned' if entry.learnable else 'fixed'}; meets content: "
            f"{entry.integration}; injected: {entry.injection}; {entry.source}"
        )
        parameters = sum(p.numel() for p in encoding.parameters())
        typer.echo(f"{type(encoding).__name__}({encoding.extra_repr()}), {parameters:,} parameters")
    else:
        typer.echo(str(encoding))
    if out is not None:
        from milepost.sweep import write_atomically

        figure = picture(encoding, geometry, length=length, title=name)
        write_atomically(out, render(figure, out.suffix[1:]))
        if not json_:
            typer.echo(f"picture: {out}")
    return 0
