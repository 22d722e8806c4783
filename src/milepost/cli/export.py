"""`milepost export`: a frequency method in the words of transformers, vLLM and llama.cpp, read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

EPILOG = """Examples:

  milepost export config.json --engine llama.cpp

  milepost export yarn --head-dim 128 --theta 10000 --trained-length 4096 --option factor=8

  milepost export config.json --method ntk --option factor=4 --engine vllm --json"""

ENGINES = ("transformers", "vllm", "llama.cpp")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("export", epilog=EPILOG)(export)


def export(
    source: Annotated[str, typer.Argument(help="config.json or a folder with one, or the name of a method.")],
    method: Annotated[str | None, typer.Option("--method", help="A method in place of the file's own.")] = None,
    option: Annotated[list[str] | None, typer.Option("--option", help="A key of the method: name=value.")] = None,
    engine: Annotated[str, typer.Option("--engine", help="transformers, vllm, llama.cpp or all.")] = "all",
    head_dim: Annotated[int | None, typer.Option("--head-dim", min=2, help="Width of a head.")] = None,
    theta: Annotated[float | None, typer.Option("--theta", help="The base, where no file states it.")] = None,
    trained_length: Annotated[
        int | None, typer.Option("--trained-length", min=1, help="Length before scaling, where no file states it.")
    ] = None,
    to: Annotated[int | None, typer.Option("--to", min=1, help="Length that the file should declare.")] = None,
    layer_type: Annotated[str | None, typer.Option("--layer-type", help="Which block of a nested file.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> int:
    """Write a method in the words of transformers, vLLM and llama.cpp, each read back and compared to 1e-6.

    What an engine has no name for is written as LongRoPE divisors where that is exact, and refused with the reason
    where it is not. Exit code 1 when the engine asked for refuses.
    """
    from milepost.cli.errors import UsageError
    from milepost.encodings.frequencies import from_config
    from milepost.extend import export as exports

    engines = ENGINES if engine == "all" else (engine,)
    if engine != "all" and engine not in ENGINES:
        raise UsageError(f"--engine {engine} must be transformers, vllm, llama.cpp or all")
    config, name = _config(source), method
    if config is None:
        config, name = {}, method or source
    block = _block(name, option or [], config, trained_length)
    try:
        chosen = from_config(
            block if name is not None else config,
            layer_type=layer_type if name is None else None,
            head_dim=head_dim if head_dim is not None else _head_dim(config),
            rope_theta=theta,
            checkpoint=config or None,
            max_position_embeddings=trained_length if name is not None else None,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    trained = trained_length or _trained_length(config)
    target = to if name is not None else to or exports.reached(config, layer_type=layer_type)
    in_model = config.get("qk_rope_head_dim") is not None
    trained = None if getattr(chosen, "trained_length", None) else trained
    width = head_dim if head_dim is not None else _head_dim(config)
    results: list[dict[str, Any]] = []
    refused = 0
    for one in engines:
        try:
            made = exports.export(
                chosen,
                one,  # type: ignore[arg-type]  # checked above
                head_dim=width,
                trained_length=trained,
                target_length=target,
                softmax_in_model=in_model,
            )
            results.append(made.to_dict())
            text = made.text()
        except exports.ExportRefused as error:
            refused += 1
            results.append({"engine": one, "method": type(chosen).__name__, "refused": str(error)})
            text = f"{type(chosen).__name__} for {one}: refused\n\n- {error}"
        except ValueError as error:
            raise UsageError(str(error)) from error
        if not json_:
            typer.echo(f"{text}\n")
    if json_:
        typer.echo(json.dumps(results, indent=1))
    return int(refused == len(engines))


def _config(source: str) -> dict[str, Any] | None:
    """The config.json at a path, or None where the source is a name."""
    from milepost.cli.errors import UsageError
    from milepost.extend.doctor import as_its_class_reads

    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        if path.suffix == ".json" or "/" in source:
            raise UsageError(f"{path} does not exist")
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}; `milepost doctor {path}` says more") from error
    if not isinstance(found, dict):
        raise UsageError(f"{path} is not an object; `milepost doctor {path}` says more")
    return as_its_class_reads(found)


def _head_dim(config: dict[str, Any]) -> int | None:
    """The width of a head as the file states it."""
    from milepost.encodings.frequencies import rope_fields

    found = rope_fields({key: config[key] for key in SIZES if key in config}).head_dim
    return found if isinstance(found, int) and not isinstance(found, bool) else None


SIZES = ("head_dim", "hidden_size", "num_attention_heads", "qk_rope_head_dim", "n_embd")


def _block(name: str | None, options: list[str], config: dict[str, Any], trained_length: int | None) -> dict[str, Any]:
    """The rope block of a method named on the command line."""
    from milepost.cli.errors import UsageError
    from milepost.encodings.frequencies.config import ALIASES, METHODS, ROPE_KEYS, nearest

    if name is None:
        if options:
            raise UsageError("--option changes a method: name one with --method")
        return {}
    kind = ALIASES.get(name, name)
    if kind not in METHODS and kind not in ROPE_KEYS and not kind.startswith("dynamic_"):
        raise UsageError(
            f"no method {name!r}{nearest(name, [*METHODS, *ALIASES])}; known: {', '.join(sorted(METHODS))}"
        )
    block: dict[str, Any] = {"rope_type": kind}
    for text in options:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--option {text} must be name=value")
        try:
            block[key.strip()] = json.loads(value)
        except ValueError:
            block[key.strip()] = value
    trained = trained_length or _trained_length(config)
    needs = {field for field in ("trained_length",) if field in _fields(kind)}
    if needs and trained is not None and not {"trained_length", "original_max_position_embeddings"} & set(block):
        block["original_max_position_embeddings"] = trained
    return block


def _trained_length(config: dict[str, Any]) -> int | None:
    """The length before any scaling, as the file states it."""
    from milepost.encodings.frequencies import rope_fields

    try:
        fields = rope_fields(config)
    except ValueError:
        return config.get("max_position_embeddings")
    return fields.original_length or fields.max_length


def _fields(kind: str) -> set[str]:
    """Names of a method's fields."""
    import dataclasses

    from milepost.encodings.frequencies.config import METHODS

    cls = METHODS.get(kind.removeprefix("dynamic_") if kind not in METHODS else kind)
    return {field.name for field in dataclasses.fields(cls)} if cls and dataclasses.is_dataclass(cls) else set()
