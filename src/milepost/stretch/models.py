"""Loading a model, its tokenizer and its corpus, the same way in every process."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost.stretch.settings import Settings

if TYPE_CHECKING:
    from milepost.data import Corpus, PasskeyTask

SMALL_VOCABULARY = 512
"""Below it a model reads bytes, and a passkey prompt in plain English would fill its whole trained length."""


def model_path(name: str) -> str:
    """The folder of ``demo``, any other name as it is."""
    return str(resources.files("milepost.stretch") / "demo_model") if name == "demo" else name


def load(settings: Settings) -> tuple[Any, Any]:
    """(model in eval mode, tokenizer).

    Raises ValueError when there is no such model or no tokenizer beside it.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    import milepost.model  # noqa: F401  (registers the model type of this library)

    disable_progress_bar()
    path = model_path(settings.model)
    dtype: Any = settings.dtype
    if dtype == "auto":
        cuda = torch.cuda.is_available() and settings.device != "cpu"
        dtype = "auto" if cuda else torch.float32
    elif isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    options: dict[str, Any] = {}
    ggufs = sorted(Path(path).glob("*.gguf")) if Path(path).is_dir() else []
    if ggufs and not (Path(path) / "config.json").exists():
        options["gguf_file"] = ggufs[0].name
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{settings.model!r} cannot be loaded ({first}); give a folder with a model and its tokenizer, a name in "
            "the local Hugging Face cache, or 'demo'"
        ) from error
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device).eval(), tokenizer


def trained_length(settings: Settings, config: Any) -> int:
    """The length the checkpoint was trained at: as given, or the original length of its config.

    Raises ValueError where the config says none.
    """
    from milepost.encodings.frequencies import from_config

    if settings.trained:
        return settings.trained
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    try:
        found = getattr(from_config(text), "trained_length", None)
    except (ValueError, KeyError, TypeError):
        found = None
    found = found or getattr(text, "max_position_embeddings", None)
    if not found:
        raise ValueError(f"the config of {settings.model!r} names no trained length: give --trained")
    return int(found)


def corpus(settings: Settings, tokenizer: Any) -> Corpus:
    from milepost.data import load_corpus

    return load_corpus(settings.data, tokenizer=None if reads_bytes(tokenizer) else tokenizer)


def reads_bytes(tokenizer: Any) -> bool:
    return len(tokenizer) <= SMALL_VOCABULARY


def passkey_task(tokenizer: Any) -> PasskeyTask:
    """Plain English for real tokenizers, the short task for models that read bytes."""
    from milepost.data import PasskeyTask

    return PasskeyTask.small() if reads_bytes(tokenizer) else PasskeyTask.sentences(tokenizer)


def lengths(trained: int, target: int) -> list[int]:
    """Half the trained length, the trained length, just beyond it, then doubling to the target."""
    found = [max(1, trained // 2), trained, trained + max(1, trained // 8)]
    at = 2 * trained
    while at < target:
        found.append(at)
        at *= 2
    return sorted({*found, target})
