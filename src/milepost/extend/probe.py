"""What a Hugging Face decoder does with positions, found by running it on a few tokens rather than by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from milepost.encodings.frequencies import FrequencyMethod, from_config
from milepost.encodings.rotary import rotate
from milepost.extend.own_attention import attention_modules

PROBE_KEY = "milepost-probe"
TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 8e-3}
"""Largest error, relative to the largest channel, at which a model's rotation counts as the one its config names."""


@dataclass(frozen=True)
class LayerRotation:
    """How one layer turns its queries and keys: not at all, or by a frequency method in a channel layout."""

    layout: Literal["none", "half", "interleaved"]
    method: FrequencyMethod | None = None

    @property
    def rotary_dim(self) -> int:
        return 0 if self.method is None else self.method.rotary_dim


def decoder_of(model: nn.Module) -> nn.Module:
    """The module that holds the decoder layers and makes their masks."""
    get: Any = getattr(model, "get_decoder", None)
    inner = model if get is None else get()
    return inner if isinstance(inner, nn.Module) else model


def text_config(model: Any) -> Any:
    return model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config


def rotary_modules(model: nn.Module) -> list[nn.Module]:
    """Modules that make cosines and sines, e.g. ``LlamaRotaryEmbedding``."""
    return [m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")]


@contextmanager
def identity_rotary(model: nn.Module) -> Iterator[None]:
    """Inside, every rotary module answers cos = 1, sin = 0, so that queries and keys come out as projected."""
    undo = [make_identity(module) for module in rotary_modules(model)]
    try:
        yield
    finally:
        for restore in undo:
            restore()


def make_identity(module: nn.Module) -> Callable[[], None]:
    """Let a rotary module answer the identity; returns a function that restores it."""
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        if isinstance(made, Tensor):  # complex phases (Llama 4)
            return torch.ones_like(made)
        cos, sin = made
        return torch.ones_like(cos), torch.zeros_like(sin)

    return _override(module, forward)


def _fresh(module: nn.Module) -> Callable[[], None]:
    """Let a rotary module answer as a new one would: a long call leaves transformers' dynamic types changed."""
    if "forward" in module.__dict__ or not hasattr(module, "config"):
        return lambda: None
    return _override(module, type(module)(module.config).to(_device_of(module)).forward)


def _override(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    before = module.__dict__.get("forward")
    module.forward = forward  # the instance's own forward, undone by the caller

    def restore() -> None:
        if before is None:
            module.__dict__.pop("forward", None)
        else:
            module.forward = before

    return restore


def _device_of(module: nn.Module) -> torch.device:
    return next((buffer.device for buffer in module.buffers()), torch.device("cpu"))


def capture(model: Any, positions: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    """Queries and keys of every layer, ``(1, H, n, D)`` float32, with all attention outputs replaced by zeros.

    Because attention returns zeros, hidden states do not depend on the rotation, and two captures differ by it alone.

    Raises:
        ValueError: the model does not route its attention through transformers' attention interface.
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **kwargs: Any) -> tuple[Tensor, None]:
        seen[int(module.layer_idx)] = (q.float(), k.float())  # type: ignore[arg-type]
        return torch.zeros_like(q[..., :1]).expand(*q.shape[:3], v.shape[-1]).transpose(1, 2).contiguous(), None

    undo = [_fresh(module) for module in rotary_modules(model)]
    AttentionInterface.register(PROBE_KEY, attention)
    AttentionMaskInterface.register(PROBE_KEY, lambda *args, **kwargs: None)
    before = model.config._attn_implementation
    was_training = model.training
    model.eval()
    try:
        model.set_attn_implementation(PROBE_KEY)
        tokens = (torch.arange(positions.shape[1]) * 7 + 3)[None] % text_config(model).vocab_size
        inputs = {"input_ids": tokens.to(model.device), "position_ids": positions.to(model.device)}
        with torch.no_grad():
            decoder_of(model)(**inputs, use_cache=False)
    except ValueError as error:
        raise ValueError(f"{type(model).__name__} does not let its attention be replaced: {error}") from error
    finally:
        model.set_attn_implementation(before)
        model.train(was_training)
        for restore in reversed(undo):
            restore()
        AttentionInterface._global_mapping.pop(PROBE_KEY, None)
        AttentionMaskInterface._global_mapping.pop(PROBE_KEY, None)
    if not seen:
        raise ValueError(
            f"{type(model).__name__} does not route its attention through transformers' attention interface, so "
            "another encoding cannot be attached to it"
        )
    return seen


def layer_rotations(model: Any) -> dict[int, LayerRotation]:
    """Layer index -> how that layer rotates. The frequencies come from the config and are checked on the model.

    Raises:
        ValueError: latent-attention models, or a model whose rotation is not the one its config names.
    """
    config = text_config(model)
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(
            f"{type(model).__name__} uses latent attention (kv_lora_rank={config.kv_lora_rank}): its keys are cached "
            "compressed and only a part of each head is rotated, so no other encoding can be attached to it"
        )
    own = attention_modules(model)
    if own:
        return {layer: LayerRotation("none") for layer in sorted(own)}
    limit = min(int(getattr(config, "max_position_embeddings", None) or 1024), 1024) - 1
    positions = torch.tensor([[0, 1, 2, limit // 8, limit // 3, limit]])
    turned = capture(model, positions)
    if not rotary_modules(model):
        return {layer: LayerRotation("none") for layer in turned}
    with identity_rotary(model):
        plain = capture(model, positions)
    types = getattr(config, "layer_types", None)
    found: dict[int, LayerRotation] = {}
    for layer, (q, k) in sorted(turned.items()):
        q0, k0 = plain[layer]
        if torch.equal(q, q0) and torch.equal(k, k0):
            found[layer] = LayerRotation("none")
            continue
        layer_type = types[layer] if types is not None and layer < len(types) else None
        found[layer] = _identify(model, config, layer, layer_type, positions, k, k0)
    return found


def _identify(
    model: Any, config: Any, layer: int, layer_type: str | None, positions: Tensor, k: Tensor, k0: Tensor
) -> LayerRotation:
    methods: list[FrequencyMethod] = []
    problems: list[str] = []
    for kind in dict.fromkeys((layer_type, None)):
        try:
            method = from_config(config, layer_type=kind)
        except (ValueError, KeyError, TypeError) as problem:
            problems.append(str(problem))
            continue
        if method not in methods:
            methods.append(method)
    at = positions.to(k.device)
    errors: list[str] = []
    for method in methods:
        length = (at.amax() + 1).view(1)
        inv_freq, factor, _ = method.frequencies(length)
        if 2 * inv_freq.shape[-1] > k0.shape[-1]:
            continue
        angles = at[..., None].double() * inv_freq.to(k.device)
        for layout in ("half", "interleaved"):
            error = (rotate(k0.double(), angles, layout, factor=factor) - k.double()).abs().max() / k0.abs().max()
            if float(error) < TOLERANCE.get(model.dtype, 2e-3):
                return LayerRotation(layout, method)
            errors.append(f"{layout}: {float(error):.2g}")
    raise ValueError(
        f"layer {layer} of {type(model).__name__} does not rotate as its config says "
        f"({', '.join(errors) or '; '.join(problems)}); a scaling may have been dropped or a class ignores a key: "
        "run `milepost doctor` on the config"
    )
