"""From what Hugging Face hands to a model (masks, caches, ids) to :class:`~milepost.positions.Positions`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache

from milepost.model.cache import BoundedCache
from milepost.model.config import MilepostConfig
from milepost.positions import Positions


def padding_of(mask: Tensor) -> Literal["none", "left", "right", "holes"]:
    """Where the zeros of a ``(B, K)`` mask stand. Looks at the values: one synchronisation on accelerators."""
    present = mask.bool()
    steps = present[:, 1:].int() - present[:, :-1].int()
    full, rises, falls = torch.stack([present.all(), (steps > 0).any(), (steps < 0).any()]).tolist()
    return "none" if full else "holes" if rises and falls else "left" if rises else "right"


def positions_of(
    x: Tensor,
    cache: Cache | None,
    mask: Tensor | None,
    position_ids: Tensor | None,
    document_ids: Tensor | None,
    side: str | None,
    config: MilepostConfig,
) -> Positions:
    """Where the new tokens ``x`` and all keys stand. A static cache's start stays on the device."""
    if x.dim() != 3:
        raise ValueError(
            f"input_ids has shape (batch, length), inputs_embeds (batch, length, {config.width}); "
            f"embedded, they have shape {tuple(x.shape)}"
        )
    for name, given in (("attention_mask", mask), ("position_ids", position_ids), ("document_ids", document_ids)):
        if given is not None and (given.dim() != 2 or given.shape[0] not in (1, x.shape[0])):
            raise ValueError(f"{name} has shape ({x.shape[0]}, all tokens); got {tuple(given.shape)}")
    if mask is not None and mask.is_floating_point() and not torch.compiler.is_compiling():
        if bool(((mask != 0) & (mask != 1)).any()):
            raise ValueError(
                "attention_mask is 1 for a token and 0 for padding; got a number that is neither, as masks have that "
                "are added to logits: give attention_mask == 0 instead"
            )
    if isinstance(cache, BoundedCache):
        return _bounded_positions(x, cache, mask, position_ids, document_ids, config)
    queries, device = x.shape[1], x.device
    start: int | Tensor = 0 if cache is None else cache.get_seq_length()
    static = isinstance(start, Tensor)
    if isinstance(start, Tensor):
        start = start.to(device).reshape(1).clone()  # the cache counts on in place
        keys = cache.get_max_length() if cache is not None else queries
    else:
        keys = start + queries
    known: dict[str, Any] = {"causal": config.causal, "trained_length": config.trained_length}
    if is_static(cache) and not static:  # its first use: nothing stands beyond these tokens
        mask = None if mask is None else mask[:, :keys]
        position_ids = None if position_ids is None else position_ids[:, :keys]
    for name, given in (("attention_mask", mask), ("position_ids", position_ids), ("document_ids", document_ids)):
        if given is not None and not static and given.shape[1] != keys:
            raise ValueError(f"{name} covers all {keys} tokens, cached and new; got shape {tuple(given.shape)}")
    if side is None and mask is not None:
        side = config.padding_side if torch.compiler.is_compiling() else padding_of(mask)
    if side == "none":
        mask = None
    if document_ids is not None:
        if static or position_ids is not None or side == "holes":
            raise ValueError("document_ids go with neither a static cache, position_ids, nor a mask with holes")
        if mask is not None:
            document_ids = document_ids.masked_fill(mask == 0, -1)
        return Positions.from_documents(document_ids, queries=queries, key_present=mask, **known)
    if mask is None and position_ids is None:
        key = torch.arange(keys, device=device)[None]
        query = torch.arange(queries, device=device)[None] + start
        length = start + queries if isinstance(start, Tensor) else torch.full((1,), keys, device=device)
        return Positions(query=query, key=key, query_start=start, length=length, slot_distance=True, **known)
    mask = torch.ones(x.shape[0], keys, device=device, dtype=torch.bool) if mask is None else mask
    if static:
        mask = F.pad(mask, (0, keys - mask.shape[1]), value=1)
        if position_ids is not None:
            position_ids = F.pad(position_ids, (0, keys - position_ids.shape[1]))
    side = side if side in ("left", "right") else None
    positions = Positions.from_mask(
        mask, side=side, queries=queries, query_start=start, position_ids=position_ids, **known
    )
    return replace(positions, length=positions.query[:, -1] + 1) if static else positions


def _bounded_positions(
    x: Tensor,
    cache: BoundedCache,
    mask: Tensor | None,
    position_ids: Tensor | None,
    document_ids: Tensor | None,
    config: MilepostConfig,
) -> Positions:
    """The same where the oldest tokens are gone: slots count from the first key that is held, positions go on."""
    if position_ids is not None or document_ids is not None:
        raise ValueError("a bounded cache goes with neither position_ids nor document_ids: use the usual cache")
    start, dropped, queries = cache.get_seq_length(), cache.dropped, x.shape[1]
    keys = start + queries
    before: int | Tensor = dropped
    if mask is not None:
        if mask.shape[1] != keys:
            raise ValueError(f"attention_mask covers all {keys} tokens, cached and new; got shape {tuple(mask.shape)}")
        if padding_of(mask) == "holes":
            raise ValueError(
                "a bounded cache drops keys by their place, and in a mask with holes tokens are nearer than their "
                "places: pad the prompts on the left, or use the usual cache"
            )
        before, mask = mask[:, :dropped].sum(-1, keepdim=True), mask[:, dropped:]
    known: dict[str, Any] = {"causal": True, "trained_length": config.trained_length}
    side = "none" if mask is None else padding_of(mask)
    if mask is None or side == "none":
        positions = Positions.full(keys - dropped, queries=queries, device=x.device, **known)
    else:
        positions = Positions.from_mask(mask, side=side, queries=queries, **known)
    more = before.view(-1) if isinstance(before, Tensor) else before
    query, key = positions.query + before, positions.key + before
    return replace(positions, query=query, key=key, length=positions.length + more)


def all_tokens(tokens: Tensor | None, positions: Positions, cache: Cache | None) -> Tensor:
    if tokens is not None and is_static(cache):
        tokens = to_capacity(tokens, cache, 0)[:, : positions.num_keys]
    if tokens is None or tokens.shape[1] != positions.num_keys:
        raise ValueError(
            f"this encoding reads the ids of all {positions.num_keys} tokens, cached and new; "
            f"got {'none' if tokens is None else tokens.shape[1]}: pass context_tokens"
        )
    return tokens


def is_static(cache: Cache | None) -> bool:
    return cache is not None and len(cache.layers) > 0 and cache.is_compileable


def to_capacity(tokens: Tensor, cache: Cache | None, value: int) -> Tensor:
    """Padded to a static cache's size, so that a compiled step sees one shape; unchanged for any other cache."""
    if cache is None or not is_static(cache):
        return tokens
    return F.pad(tokens, (0, max(cache.get_max_length() - tokens.shape[1], 0)), value=value)
