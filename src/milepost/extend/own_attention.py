"""BLOOM and MPT attend in code of their own; here they are routed through an attention function like the rest."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

AttentionFunction = Callable[..., tuple[Tensor, None]]


def attention_modules(model: nn.Module) -> dict[int, nn.Module]:
    """Layer index -> attention module of a BLOOM or MPT model; empty for every other model."""
    return {
        int(module.layer_idx): module  # type: ignore[arg-type]
        for module in model.modules()
        if type(module).__name__ in _FORWARDS
    }


def route(module: nn.Module, attention: AttentionFunction) -> Callable[[], None]:
    """Let the module project and merge as before but attend by ``attention``; returns a function that restores it."""
    forward = _FORWARDS[type(module).__name__]

    def routed(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return forward(self, attention, *args, **kwargs)

    return put(module, "forward", types.MethodType(routed, module))


def put(module: nn.Module, name: str, value: Any) -> Callable[[], None]:
    """Give this one instance an attribute; returns a function that restores what it had, be it its own or its class's.

    Other libraries do the same: what was wrapped before stays wrapped after.
    """
    own = module.__dict__.get(name)
    module.__dict__[name] = value

    def restore() -> None:
        if own is None:
            module.__dict__.pop(name, None)
        else:
            module.__dict__[name] = own

    return restore


def _bloom(
    self: Any,
    attention: AttentionFunction,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor,
    layer_past: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    q, k, v = self._reshape(self.query_key_value(hidden_states))
    if layer_past is not None:
        k, v = layer_past.update(k, v, self.layer_idx)
    dropout = self.attention_dropout.p if self.training else 0.0
    out, _ = attention(self, q, k, v, attention_mask, scaling=self.inv_norm_factor, dropout=dropout)
    out = self.dense(out.flatten(2))
    return nn.functional.dropout(out, p=self.hidden_dropout, training=self.training) + residual, None


def _mpt(
    self: Any,
    attention: AttentionFunction,
    hidden_states: Tensor,
    position_bias: Tensor,
    cache: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    qkv = self.Wqkv(hidden_states)
    if self.clip_qkv:
        qkv = qkv.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    q, k, v = (part.unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2) for part in qkv.chunk(3, dim=2))
    if cache is not None:
        k, v = cache.update(k, v, self.layer_idx)
    dropout = self.attn_dropout_p if self.training else 0.0
    out, _ = attention(self, q, k, v, attention_mask, scaling=self.softmax_scale, dropout=dropout)
    return self.out_proj(out.flatten(2)), None


_FORWARDS: dict[str, Callable[..., tuple[Tensor, None]]] = {"BloomAttention": _bloom, "MptAttention": _mpt}
