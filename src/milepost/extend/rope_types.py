"""Frequency methods as rope types of transformers: plain ``rope_parameters`` reach them, no model code is touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from milepost.encodings.frequencies import METHODS, ClexTable, Dynamic, FrequencyMethod, Resonance, from_config
from milepost.encodings.frequencies.base import Scalable, ladder

UNREGISTERED = {
    "default": "transformers computes it in each model class",
    "clex": "a network cannot be read from numbers: freeze it and use dynamic_clex",
    "log_n": "it heats the softmax by the length, and a rope type returns frequencies and one factor only",
}
"""Methods that are no rope type, and why."""

MUST_STATE = {"ntk": "factor", "by_parts": "factor", "part_ntk": "factor", "resonance": "method"}
"""The key without which a type, its other keys at their defaults, would leave the model as it was or say too little."""


class RopeBlockError(KeyError, ValueError):
    """A rope block that says something wrong: KeyError, as transformers raises there, and ValueError, as we do."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


def rope_type_names() -> tuple[str, ...]:
    """Every name that `register_rope_types` can give to transformers."""
    own = [name for name in METHODS if name not in UNREGISTERED]
    grown = [f"dynamic_{name}" for name, cls in METHODS.items() if issubclass(cls, Scalable)]
    return tuple(sorted({*own, *grown}))


def rope_init_function(name: str) -> Callable[..., tuple[Tensor, float]]:
    """transformers' signature ``(config, device, seq_len, layer_type) -> (inv_freq, attention_factor)`` for one name.

    inv_freq is float32 (P,): the scaling is computed in float64 and applied to transformers' own float32 ladder, so
    that an untouched pair keeps the bits that the unscaled model has. Strict as `from_config`: unknown keys and
    missing lengths are errors.
    Raises ValueError for a method that grows with the length under a name that transformers would never recompute, and
    for one that grows from another length than the ``max_position_embeddings`` beyond which transformers recomputes.
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
        try:
            method = from_config(config, layer_type=layer_type, head_dim=head_dim)
        except ValueError as error:
            raise RopeBlockError(str(error)) from error
        if method.length_dependent and "dynamic" not in name and getattr(method, "growth", None) != "switch":
            raise ValueError(
                f"rope_type {name!r} would grow with the length, and transformers recomputes only types with 'dynamic' "
                "in their name: use attach, which reads each row's length"
            )
        still = _standing_still(name, method, getattr(config, "max_position_embeddings", None))
        if still is not None:
            raise RopeBlockError(still)
        where = torch.device(device) if device is not None else None
        found = method.frequencies(seq_len, device=where)
        return _on_their_ladder(method, found.inv_freq.flatten()), _one(found.attention_factor)

    compute.__name__ = compute.__qualname__ = f"milepost_{name}"
    return compute


def _on_their_ladder(method: FrequencyMethod, inv_freq: Tensor) -> Tensor:
    """Float64 frequencies as float32: the ratio to the exact ladder, times the ladder that transformers rounds.

    Frequencies that are numbers of their own, not a ladder's, are rounded as they stand.
    """
    base = getattr(method, "base", None)
    if base is None or isinstance(method, (Resonance, ClexTable)):
        return inv_freq.to(torch.float32)
    share = torch.arange(0, method.rotary_dim, 2, device=inv_freq.device).to(torch.float32) / method.rotary_dim
    rounded = 1.0 / base**share
    return (rounded.double() * (inv_freq / ladder(method.rotary_dim, base, inv_freq.device))).to(torch.float32)


def _one(value: float | Tensor) -> float:
    return float(value.flatten()[0]) if isinstance(value, Tensor) else float(value)


def _validator(name: str) -> Callable[..., None]:
    def validate(self: Any, rope_parameters: Mapping[str, Any], ignore_keys: set[str] | None = None) -> None:
        block = {key: value for key, value in rope_parameters.items() if key not in (ignore_keys or ())}
        original = getattr(self, "original_max_position_embeddings", None)
        if original is not None:
            block.setdefault("original_max_position_embeddings", original)
        head_dim = getattr(self, "head_dim", None) or self.hidden_size // self.num_attention_heads
        longest = getattr(self, "max_position_embeddings", None)
        try:
            method = from_config(block, head_dim=head_dim, max_position_embeddings=longest)
        except ValueError as error:
            raise RopeBlockError(str(error)) from error
        problem = _unsaid(name, block) or _standing_still(name, method, longest)
        if problem is not None:
            raise RopeBlockError(problem)

    validate.__name__ = f"_validate_{name}_rope_parameters"
    return validate


def _unsaid(name: str, block: Mapping[str, Any]) -> str | None:
    """What a block that reads well still has to say, or None."""
    key = MUST_STATE.get(name)
    if key is not None and key not in block:
        return f"{key} is missing: rope_type {name!r} alone says nothing to do"
    own = ("original_max_position_embeddings", "trained_length")
    if name.startswith("dynamic_") and name not in METHODS and not any(given in block for given in own):
        return (
            f"original_max_position_embeddings is missing: {name!r} grows from the trained length, and "
            "max_position_embeddings may be a stretched one"
        )
    return None


def _standing_still(name: str, method: FrequencyMethod, longest: int | None) -> str | None:
    """Why a growing type would not grow where it should, or None."""
    trained = method.original_length if isinstance(method, Dynamic) else getattr(method, "trained_length", None)
    if not name.startswith("dynamic") or trained is None or longest is None or trained == longest:
        return None
    return (
        f"rope_type {name!r} grows beyond {trained}, and transformers recomputes beyond max_position_embeddings, here "
        f"{longest}: write max_position_embeddings: {trained}"
    )


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
    any model; keys are the method's fields. ``override=True`` also replaces transformers' own types by ours, which
    scale in float64, honour ``truncate`` in nested blocks, refuse unknown keys, and never scale below the trained
    length. Types named dynamic_* are recomputed as transformers recomputes "dynamic": beyond max_position_embeddings,
    which must be the trained length, for the longest row, with rotated keys in the cache; exact answers need
    ``attach``. A wrong block raises `RopeBlockError`, a KeyError as transformers' own and a ValueError as ours.
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
