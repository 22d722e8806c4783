"""The configuration of the language model."""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import Any, ClassVar, Literal

from transformers.configuration_utils import PreTrainedConfig


class MilepostConfig(PreTrainedConfig):
    """Configuration of :class:`MilepostForCausalLM`, under the field's names or Hugging Face's (``attribute_map``).

    ``encoding`` is a line for :func:`milepost.encoding.from_spec`: ``"rope"``, ``"alibi:slope_scale=2"``, the sum
    ``"sinusoidal+alibi"``, the schedule ``"rope/rope/rope/nope"``. ``share_encoding``: one set for all layers, or one a
    layer; None is as published. ``trained_length`` is only told to encodings; the model reads any length.
    ``padding_side`` is what a compiled graph may believe of masks; outside compilation it is found from the mask.

    Raises:
        ValueError: heads that do not divide, a negative size, or an unknown choice; all errors at once.
        TypeError: an option that does not exist.
    """

    model_type: ClassVar[str] = "milepost"
    attribute_map: ClassVar[dict[str, str]] = {
        "width": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "inner_width": "intermediate_size",
        "trained_length": "max_position_embeddings",
    }
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache"]

    vocab_size: int = 258
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    max_position_embeddings: int = 512
    encoding: str = "rope"
    share_encoding: bool | None = None
    block: Literal["pre", "post"] = "pre"
    norm: Literal["layer", "rms"] = "layer"
    activation: Literal["swiglu", "gelu", "relu"] = "swiglu"
    bias: bool = False
    causal: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    padding_side: Literal["left", "right"] | None = None
    pad_token_id: int | None = 256
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 257
    use_cache: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        for name in [name for name in kwargs if name in self.attribute_map]:
            setattr(self, name, kwargs.pop(name))
        for name in kwargs:
            near = difflib.get_close_matches(name, [f.name for f in fields(self)] + [*self.attribute_map], 1, 0.8)
            if near and near[0] != name:
                raise TypeError(f"MilepostConfig has no option {name!r}; did you mean {near[0]!r}?")
        if self.head_dim is None:
            self.head_dim = self.hidden_size // max(self.num_attention_heads, 1)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.intermediate_size is None:
            gated = self.activation == "swiglu"
            self.intermediate_size = 32 * round(self.hidden_size / 12) if gated else 4 * self.hidden_size
        for name in ("pad_token_id", "eos_token_id"):
            token = getattr(self, name)
            if isinstance(token, int) and token >= self.vocab_size:
                setattr(self, name, None)
        super().__post_init__(**kwargs)
        self._check()

    def _check(self) -> None:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads or 0
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
        wrong = [f"{name} is at least 1; got {getattr(self, name)}" for name in sizes if getattr(self, name) < 1]
        if not wrong and self.head_dim == self.hidden_size // heads and self.hidden_size % heads:
            wrong.append(f"width {self.hidden_size} does not divide into {heads} heads; choose another or set head_dim")
        if kv_heads < 1 or heads % kv_heads:
            wrong.append(f"num_kv_heads divides num_heads {heads}; got {kv_heads}")
        choices: dict[str, tuple[str | None, ...]] = {
            "block": ("pre", "post"),
            "norm": ("layer", "rms"),
            "activation": ("swiglu", "gelu", "relu"),
            "padding_side": ("left", "right", None),
        }
        wrong += [
            f"{name} is one of {allowed}; got {getattr(self, name)!r}"
            for name, allowed in choices.items()
            if getattr(self, name) not in allowed
        ]
        wrong += [
            f"{name} is in [0, 1); got {getattr(self, name)}"
            for name in ("dropout", "attention_dropout")
            if not 0 <= getattr(self, name) < 1
        ]
        if wrong:
            raise ValueError("; ".join(wrong))

    def geometry(self) -> dict[str, Any]:
        """What an encoding may ask of a model."""
        return {
            "num_heads": self.num_attention_heads,
            "head_dim": self.head_dim,
            "width": self.hidden_size,
            "num_layers": self.num_hidden_layers,
            "vocab_size": self.vocab_size,
            "trained_length": self.max_position_embeddings,
        }
