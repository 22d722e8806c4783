"""Frequency methods as rope types of transformers: plain ``rope_parameters`` reach them, no model code is touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from milepost.encodings.frequencies import METHODS, from_config
from milepost.encodings.frequencies.base import Scalable

UNREGISTERED = {
    "default": "transformers computes it in each model class",
    "clex": "a network cannot be read from numbers: freeze it and use dynamic_clex",
    "log_n": "it heats the softmax by the length, and a rope type returns frequencies and one factor only",
}
"""Methods that are no rope type, and why."""


def rope_type_names() -> tuple[str, ...]:
    """Every name that `register_rope_types` can give to transformers."""
    own = [name for name in METHODS if name not in UNREGISTERED]
    grown = [f"dynamic_{name}" for name, cls in METHODS.items() if issubclass(cls, Scalable)]
    return tuple(sorted({*own, *grown}))


def rope_init_function(name: str) -> Callable[..., tuple[Tensor, float]]:
    """transformers' signature ``(config, device, seq_len, layer_type) -> (inv_freq, attention_factor)`` for one name.

    inv_freq is float32 (P,), computed in float64. Strict as `from_config`: unknown keys and missing lengths are errors.
    Raises ValueError for a method that grows with the length under a name that transformers would never recompute.
    """

    def compute(
        config: Any,
        device: torch.device | str | None = None,
        seq_len: int | Tensor | None = None,
        layer_type: str | None = None,
        head_dim_key: str = "head_dim",
    ) -> tuple[Tensor, float]:
        try:
            config = config.per_layer_config[layer_type] if layer_type is not None else config
        except (AttributeError, ValueError):
            pass
        config.standardize_rope_params()
        head_dim = getattr(config, head_dim_key, None)
        if head_dim is None and head_dim_key != "head_dim":
            head_dim = config.hidden_size // config.num_attention_heads
        method = from_config(config, layer_type=layer_type, head_dim=head_dim)
        if method.length_dependent and "dynamic" not in name and getattr(method, "growth", None) != "switch":
            raise ValueError(
                f"rope_type {name!r} would grow with the length, and transformers recomputes only types with 'dynamic' "
                "in their name: use attach, which reads each row's length"
            )
        where = torch.device(device) if device is not None else None
        found = method.frequencies(seq_len, device=where)
        return found.inv_freq.flatten().to(torch.float32), _one(found.attention_factor)

    compute.__name__ = compute.__qualname__ = f"milepost_{name}"
    return compute


def _one(value: float | Tensor) -> float:
    return float(value.flatten()[0]) if isinstance(value, Tensor) else float(value)


def _validator(name: str) -> Callable[..., None]:
    def validate(self: Any, rope_parameters: Mapping[str, Any], ignore_keys: set[str] | None = None) -> None:
        block = {key: value for key, value in rope_parameters.items() if key not in (ignore_keys or ())}
        head_dim = getattr(self, "head_dim", None) or self.hidden_size // self.num_attention_heads
        longest = getattr(self, "max_position_embeddings", None)
        from_config(block, head_dim=head_dim, max_position_embeddings=longest)

    validate.__name__ = f"_validate_{name}_rope_parameters"
    return validate


class RopeTypes:
    """What was registered; ``restore()``, or the end of a ``with`` block, puts transformers back as it was."""

    def __init__(self, names: tuple[str, ...], undo: list[Callable[[], None]]) -> None:
        self.names = names
        self._undo = undo

    def restore(self) -> None:
        """Take our rope types out again."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> RopeTypes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


def register_rope_types(override: bool = False) -> RopeTypes:
    """Add every frequency method to transformers' ``ROPE_INIT_FUNCTIONS`` under its name.

    ``rope_parameters={"rope_type": "by_parts", "factor": 8.0, "original_max_position_embeddings": 4096}`` then works in
    any model; keys are the method's fields. ``override=True`` also replaces transformers' own types by ours, which are
    float64 inside, honour ``truncate`` in nested blocks, refuse unknown keys, and never scale below the trained length.
    Types named dynamic_* are recomputed as transformers recomputes "dynamic": for the longest row, with rotated keys in
    the cache; exact answers need ``attach``.
    Raises ImportError where transformers is not installed.
    """
    try:
        from transformers import modeling_rope_utils
    except ImportError as error:
        raise ImportError("register_rope_types needs transformers: pip install transformers") from error

    functions: dict[str, Any] = modeling_rope_utils.ROPE_INIT_FUNCTIONS
    mixin: Any = modeling_rope_utils.RotaryEmbeddingConfigMixin
    names: list[str] = []
    undo: list[Callable[[], None]] = []
    for name in rope_type_names():
        before = functions.get(name)
        if before is not None and not override:
            continue
        functions[name] = rope_init_function(name)
        names.append(name)
        undo.append(partial(_put, functions, name, before))
        checker = f"_validate_{name}_rope_parameters"
        if not hasattr(mixin, checker):
            setattr(mixin, checker, _validator(name))
            undo.append(partial(delattr, mixin, checker))
    return RopeTypes(tuple(names), undo)


def _put(functions: dict[str, Any], name: str, before: Any) -> None:
    if before is None:
        functions.pop(name, None)
    else:
        functions[name] = before
