"""Caches of the model: one that grows cheaply and knows how long its keys are, and one in bounded memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from milepost.attention.windows import append, largest_norms, out_of_reach, projection_bounds, windows
from milepost.model.config import MilepostConfig
from milepost.positions import Positions
from milepost.terms import DistanceBias, Terms

if TYPE_CHECKING:
    from milepost.model.decoder import Block, MilepostForCausalLM, MilepostModel


FEW_KEYS = 2048
"""Fewer keys are as fast read by attention itself: a bound cost a decoding step up to 5 % at 512 and at 1024 keys."""


class DecodingLayer(DynamicLayer):
    """Keys and values of one layer in memory kept ahead of them, and the largest norm of its keys.

    A new token is written behind the others, where transformers' layer copies all of them each time (which it does here
    too while autograd or a compiler looks on). Nothing that was handed out is ever written to: after a cut, and in a
    copy, the next token takes memory of its own. Keys come in by `update` alone; whoever sets ``keys`` otherwise makes
    the bound wrong.
    """

    def __init__(self) -> None:
        super().__init__()
        self._forget_norms()

    def _forget_norms(self) -> None:
        self._key_room: Tensor | None = None
        self._value_room: Tensor | None = None
        self._bound: Tensor | None = None
        self._measured = 0

    def __getstate__(self) -> dict[str, Any]:
        """Without the memory ahead, in which two copies would write over each other."""
        return {**self.__dict__, "_key_room": None, "_value_room": None}

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device, self.dtype = key_states.device, key_states.dtype
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._key_room, self.keys = append(self._key_room, self.keys, key_states)
        self._value_room, self.values = append(self._value_room, self.values, value_states)
        return self.keys, self.values

    def key_bound(self) -> Tensor:
        """``(1, Hkv)``: no key of this layer is longer, in any row. Costs one look at the keys that are new.

        Rows that are reordered, repeated or left out, and tokens cut off, leave it right: it may be larger than needed.
        """
        if self._measured < self.keys.shape[2]:
            new = largest_norms(self.keys[:, :, self._measured :])
            self._bound = new if self._bound is None else torch.maximum(self._bound.to(new.device), new)
            self._measured = self.keys.shape[2]
        if self._bound is None:
            return largest_norms(self.keys)
        return self._bound

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        if self.is_initialized and tokens_to_remove:
            self._measured = min(self._measured, self.keys.shape[2])
            self._key_room = self._value_room = None  # the tail may still be read by whoever was given it

    def reset(self) -> None:
        super().reset()
        self._forget_norms()


class DecodingCache(DynamicCache):
    """What `generate` and ``use_cache=True`` make: a ``DynamicCache`` of :class:`DecodingLayer`."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = [DecodingLayer() for _ in range(num_layers)]
        self.layer_class_to_replicate = DecodingLayer  # for a model with more layers than it was made for


class BoundedLayer(DecodingLayer):
    """Keys and values of one layer of a :class:`BoundedCache`; queries come to `check` before they are answered."""

    is_croppable = False

    def __init__(self, window: int, longest: int, query_bound: Tensor, key_bound: Tensor, index: int) -> None:
        super().__init__()
        self.window, self.longest, self.index = window, longest, index
        self.promised = {"query": query_bound, "key": key_bound}
        self.dropped = 0

    def get_seq_length(self) -> int:
        return self.dropped + super().get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return super().get_seq_length() + query_length, self.dropped

    def check(self, name: str, vectors: Tensor) -> None:
        """ValueError where a vector of ``(B, heads, n, D)`` is longer than promised for its head."""
        norms, bound = largest_norms(vectors)[0].double(), self.promised[name].to(vectors.device)
        # The windows were taken for a spread 0.1 % above that of the promise.
        broken = ~(norms <= bound * (1 + 2**-12))
        if bool(broken.any()):
            head = int(broken.int().argmax())
            raise ValueError(
                f"layer {self.index}, head {head}: a {name} of norm {float(norms[head]):.4g} breaks the promised "
                f"{name}_bound of {float(bound[head]):.4g}, so keys that were dropped may matter; make the cache with "
                f"a larger {name}_bound"
            )

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        total = self.get_seq_length() + key_states.shape[2]
        if total > self.longest:
            raise ValueError(f"{total} tokens, the cache was made for {self.longest}: give bounded_cache more")
        self.check("key", key_states)
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        surplus = out_of_reach(keys.shape[2], self.window)
        if surplus:
            self.key_bound()  # of all of them, before the oldest leave
            self._key_room = self._value_room = None
            self.keys, self.values = keys[:, :, surplus:].clone(), values[:, :, surplus:].clone()
            self._measured = self.keys.shape[2]
            self.dropped += surplus
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        length = self.get_seq_length() - abs(tokens_to_remove)
        if self.dropped > max(0, length - self.window + 1):
            raise ValueError(
                f"cut to {length} tokens, the next one needs keys that this cache has dropped: use another cache for "
                "decoding that goes back"
            )
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        super().reset()
        self.dropped = 0


class BoundedCache(Cache):
    """What :func:`bounded_cache` returns; its layers drop the same tokens at the same time."""

    layers: list[BoundedLayer]

    def __init__(self, layers: list[BoundedLayer]) -> None:
        super().__init__(layers=layers)

    @property
    def window(self) -> int:
        """Keys kept for later queries; fewer than ``2 * window + 64`` are held between two steps."""
        return self.layers[0].window

    @property
    def dropped(self) -> int:
        """How many of the oldest tokens are gone."""
        return self.layers[0].dropped


def known_bound(cache: Cache | None, layer: int, q: Tensor, terms: Terms) -> Tensor | None:
    """``(1, Hkv)``: what no ``|k|`` that this layer of the cache holds exceeds; None where that helps nothing.

    Queries that break the promise of a bounded cache raise ValueError.
    """
    held = None if cache is None else cache.layers[layer]
    if isinstance(held, BoundedLayer):
        why = _unbounded(terms)
        if why is not None:
            raise ValueError(f"{terms.name} {why}: the bounded cache was made for another encoding")
        held.check("query", q)
    if not isinstance(held, DecodingLayer) or (terms.bias is None and terms.window is None):
        return None
    if torch.compiler.is_compiling() or q.device.type != "cpu" or held.keys.shape[2] < FEW_KEYS:
        return None  # on an accelerator, no backend that answers a few queries reads it
    return held.key_bound()


# ---- bounded memory -------------------------------------------------------------------------------------------------


def bounded_cache(
    model: MilepostForCausalLM | MilepostModel,
    max_length: int,
    *,
    eps: float = 1e-12,
    query_bound: float | None = None,
    key_bound: float | None = None,
) -> BoundedCache:
    """A cache that drops keys which a decaying bias has put out of every head's reach, so that memory stops growing.

        cache = bounded_cache(model, max_length=100_000)
        model.generate(input_ids, cache=cache, max_new_tokens=90_000)

    For encodings that only add a decaying function of the distance in attention (ALiBi, MEP, KERPLE ...). In any later
    query of any head all dropped keys together weigh at most `eps`, so an output of attention moves by at most
    ``2 * eps * max|v|``, besides the ``2e-12 * max|v|`` of what attention itself may leave out. The proof takes bounds
    of the norms: a key is dropped where ``b(0) - b(d) > 2 * scale * query_bound * key_bound + ln(max_length / eps)``
    holds from its distance on. Every step checks them, and a longer query or key raises ValueError. By default they
    follow from the weights, for any text, and are wide. Norms measured on your text give a smaller window
    (``cache.window``); so does a larger `eps`.

    Left padding is right as ever. Masks with holes, position_ids and document_ids are refused: in them tokens are
    nearer than their places in the cache. A prompt read in one pass is held whole by the layer at work; ``generate``
    reads it in parts with ``prefill_chunk_size``.

    Args:
        model: with the weights it will decode with.
        max_length: the most tokens, prompt and new ones, that a row may have.
        eps: the weight that may be lost, of 1.
        query_bound: no query's norm is larger, in any layer and head; from the weights by default.
        key_bound: no key's norm is larger.

    Raises:
        ValueError: an encoding that does something else than a bias of the distance, or does not decay enough within
            max_length for a key to be dropped; bounds that neither the weights nor you give (post-norm blocks).
    """
    trunk = cast("MilepostModel", getattr(model, "model", model))
    config = trunk.config
    if not 0 < eps < 1:
        raise ValueError(f"eps is a share of the weight, between 0 and 1; got {eps}")
    if max_length < 1:
        raise ValueError(f"max_length is at least 1; got {max_length}")
    if not config.causal:
        raise ValueError("a model with causal=False sees tokens to come: it does not decode with a cache")
    layers = []
    with torch.no_grad():
        tables = _tables(trunk, max_length)
        for index, (block, (table, window)) in enumerate(zip(trunk.layers, tables, strict=True)):
            queries, keys = _bounds(config, cast("Block", block), query_bound, key_bound)
            group = config.num_heads // config.num_kv_heads
            spread = 2 * config.head_dim**-0.5 * queries * keys.repeat_interleave(group) * 1.001
            reach = int(windows(table, spread=spread, longest=max_length, eps=eps).max())
            layers.append(BoundedLayer(min(reach, window), max_length, queries, keys, index))
    widest = max(layers, key=lambda layer: layer.window)
    if widest.window >= max_length:
        strongest = widest.promised["query"].max(), widest.promised["key"].max()
        raise ValueError(
            f"no key could be dropped within max_length={max_length}: the bias of layer {widest.index} "
            f"({config.encoding}) does not fall far enough for queries of norm {float(strongest[0]):.4g} and keys of "
            f"norm {float(strongest[1]):.4g}; give smaller bounds that your text keeps, a larger eps, or decode with "
            "the usual cache"
        )
    for layer in layers:
        layer.window = widest.window
    return BoundedCache(layers)


def _tables(trunk: MilepostModel, max_length: int) -> list[tuple[Tensor, int]]:
    """Each layer's biases at distances 0 .. max_length - 1, and its sliding window; ValueError for any other terms."""
    if any(encoding.needs_tokens for encoding in trunk.encodings):
        raise ValueError(f"{trunk.config.encoding} reads the ids of all tokens, so none can be dropped")
    _biases(trunk, min(max_length, 16))  # before anything that holds a number for every pair of tokens does so
    found = []
    shorter = _biases(trunk, (max_length + 1) // 2)
    for (table, window), (near, _) in zip(_biases(trunk, max_length), shorter, strict=True):
        if not torch.allclose(table[:, : near.shape[1]], near, rtol=1e-5, atol=1e-5):
            raise ValueError(
                f"the bias of {trunk.config.encoding} depends on the length, so a key out of reach may come back"
            )
        found.append((table.expand(trunk.config.num_heads, -1), max_length if window is None else window))
    return found


def _biases(trunk: MilepostModel, length: int) -> list[tuple[Tensor, int | None]]:
    """Each layer's table and sliding window at so many tokens."""
    positions = Positions.full(length, trained_length=trunk.config.trained_length, device=trunk.device)
    found = []
    for layer, terms in enumerate(trunk.terms(positions)):
        why = _unbounded(terms)
        if why is not None:
            name = terms.name or trunk.config.encoding
            raise ValueError(f"layer {layer} ({name}) {why} at {length} tokens, so no key can be dropped")
        found.append((cast(DistanceBias, terms.bias).table, terms.window))
    return found


def _unbounded(terms: Terms) -> str | None:
    if not isinstance(terms.bias, DistanceBias):
        return "has no bias of the distance alone"
    for name in ("branches", "scores", "weights", "value", "output", "chunk"):
        if getattr(terms, name):
            return f"does more than add a bias of the distance (it sets {name!r})"
    return None


def _bounds(
    config: MilepostConfig, block: Block, query_bound: float | None, key_bound: float | None
) -> tuple[Tensor, Tensor]:
    """What no query's and no key's norm exceeds in this layer, float64 ``(H,)`` and ``(Hkv,)``."""
    projection = block.attention.qkv_proj
    found = []
    weights = projection.weight.split(block.attention.sizes)
    biases = [None] * 3 if projection.bias is None else projection.bias.split(block.attention.sizes)
    for name, given, heads, weight, bias in (
        ("query_bound", query_bound, config.num_heads, weights[0], biases[0]),
        ("key_bound", key_bound, config.num_kv_heads, weights[1], biases[1]),
    ):
        if given is not None:
            if not 0 < given < math.inf:
                raise ValueError(f"{name} is a positive number; got {given}")
            found.append(torch.full((heads,), given, dtype=torch.float64, device=weight.device))
        elif block.post:
            raise ValueError(f"block='post' bounds no input of attention: give {name}")
        else:
            found.append(_projected(weight, bias, heads, block.norm1))
    return found[0], found[1]


def _projected(weight: Tensor, bias: Tensor | None, heads: int, norm: nn.Module) -> Tensor:
    """A norm's output is ``gain * u + shift`` with ``|u| <= sqrt(width)``."""
    matrix, size = weight.double(), weight.shape[1]
    constant = torch.zeros(weight.shape[0], dtype=torch.float64, device=weight.device)
    if bias is not None:
        constant = constant + bias.double()
    shift = getattr(norm, "bias", None)
    if shift is not None:
        constant = constant + matrix @ shift.double()
    gained = matrix * cast(Tensor, norm.weight).double()
    # Rounding of the norm, of the product and of its sum over the width.
    rounding = 1 + 16 * torch.finfo(weight.dtype).eps + 1e-4
    return projection_bounds(gained, heads, math.sqrt(size), constant) * rounding
