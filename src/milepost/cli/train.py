"""`milepost train`: one language model with any encoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from milepost.cli.options import with_settings

EPILOG = """Examples:

  milepost train alibi --out model

  milepost train rope:base=50000 --data my-texts/ --train-length 256 --steps 2000 --layers 6 --width 384 --out model

Stopped, the same command goes on from the last checkpoint. The folder loads with AutoModelForCausalLM.from_pretrained
after `import milepost.model`."""

SETTINGS = (
    "train_length", "data", "tokenizer", "text_field", "max_documents", "layers", "width", "heads", "kv_heads",
    "dropout", "init_std", "steps", "batch_size", "accumulation", "lr", "warmup", "weight_decay", "clip",
    "encoding_lr_scale", "precision", "device", "checkpoint_every", "threads",
)  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("train", epilog=EPILOG)(train)


@with_settings(SETTINGS)
def train(
    method: Annotated[str, typer.Argument(help="An encoding with options after a colon, a sum (+) or a schedule (/).")],
    *,
    out: Annotated[Path, typer.Option("--out", help="Folder of the model; its training/ holds the checkpoints.")],
    changes: dict[str, Any],
    preset: Annotated[
        str, typer.Option("--preset", help="quick, small, kerple or tiny; flags replace its values.")
    ] = "quick",
    seed: Annotated[int, typer.Option("--seed", help="Of weights and data order.")] = 0,
    log_to: Annotated[str, typer.Option("--log-to", help="none, tensorboard or trackio.")] = "none",
    json_: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> int:
    """Train one language model, and save it as a Hugging Face folder with its tokenizer."""
    import torch

    from milepost.compare.run import load_data, model_config, thinned, train_config
    from milepost.compare.settings import preset as settings_of

    lengths = (changes["train_length"],) if "train_length" in changes else None
    base = settings_of(preset, **changes)
    settings = settings_of(
        preset,
        **changes,
        methods=(method,),
        passkey=False,
        test_lengths=lengths or (base.train_length,),
        measures=("windows",),
    ).check()
    torch.set_num_threads(settings.threads)
    corpus = load_data(settings)
    from milepost.train import train as run

    with _Bar(settings.steps, quiet=quiet or json_) as bar:
        trained = run(
            model_config(settings, method, vocab_size=corpus.vocab_size),
            train_config(settings, seed=seed, log_to=log_to),
            corpus,
            out / "training",
            progress=bar,
        )
    trained.model.save_pretrained(out)
    corpus.tokenizer.save_pretrained(out)
    last = sum(trained.losses[-20:]) / len(trained.losses[-20:])
    if json_:
        values = trained.to_dict() | {
            "losses": thinned(trained.losses),
            "method": method,
            "seed": seed,
            "model": str(out),
        }
        typer.echo(json.dumps(values, indent=1))
    else:
        typer.echo(
            f"{method}: {trained.parameters:,} parameters, {trained.tokens:,} tokens at "
            f"{trained.tokens_per_second:,.0f} a second; loss of the last steps {last:.3f} nats a token"
        )
        typer.echo(f"model: {out}")
    return 0


class _Bar:
    """Steps, loss and time left: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, steps: int, *, quiet: bool) -> None:
        self.steps, self.quiet = steps, quiet
        self._bars: Any = None
        self._next = 0

    def __enter__(self) -> _Bar:
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False)
        if self._console.is_terminal and not self.quiet:
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(),
                TextColumn("loss {task.fields[loss]:.3f}"),
                TimeRemainingColumn(),
            )
            self._bars = Progress(*columns, console=self._console, transient=True)
            self._bars.start()
            self._task = self._bars.add_task("", total=self.steps, loss=float("nan"))
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, step: int, steps: int, loss: float) -> None:
        if self._bars is not None:
            self._bars.update(self._task, completed=step, loss=loss)
        elif not self.quiet and (step >= self._next or step == steps):
            self._next = step + max(steps // 10, 1)
            self._console.print(f"step {step}/{steps}, loss {loss:.3f}", markup=False)
