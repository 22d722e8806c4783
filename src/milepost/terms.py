"""What attention must do, as data: branches, biases and the hooks around the softmax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from milepost.positions import Positions

DistanceFunction = Callable[[Tensor], Tensor]
"""``(*shape)`` signed distances (int64 or float) -> ``(H, *shape)`` biases in float32 or better."""


@dataclass(frozen=True, eq=False)
class DistanceBias:
    """A function of the signed distance ``i - j`` between slots, held as one line per head.

    Attributes:
        table: ``(H, n)`` float32 or better; column ``c`` is the bias at distance ``first + c``.
        positions: where it is used; ``positions.slot_distance`` holds.
        first: distance of the first column (0 for causal tables).
    """

    table: Tensor
    positions: Positions
    first: int

    def dense(self) -> Tensor:
        slots = self.positions.query_slots()[:, None] - self.positions.key_slots()[None, :]
        index = (slots - self.first).clamp(0, self.table.shape[1] - 1)
        return self.table[:, index][None]

    def rows(self, start: int, stop: int) -> DistanceBias:
        return replace(self, positions=self.positions.rows(start, stop))

    def as_pairs(self) -> PairBias:
        table, first = self.table, self.first

        def lookup(query: Tensor, key: Tensor) -> Tensor:
            index = (query[:, :, None] - key[:, None, :] - first).clamp(0, table.shape[1] - 1)
            return table[:, index].transpose(0, 1)

        return PairBias(lookup, self.positions)


@dataclass(frozen=True, eq=False)
class PairBias:
    """A function of a query's and a key's position, evaluated only where it is asked for.

    Attributes:
        function: ``(query positions (B|1, q), key positions (B|1, k)) -> (B|1, H, q, k)`` float32 or better; finite,
            with finite gradients, for pairs that are not allowed too.
        positions: the (possibly mapped) positions it reads.
    """

    function: Callable[[Tensor, Tensor], Tensor]
    positions: Positions

    def dense(self) -> Tensor:
        return self.function(self.positions.query, self.positions.key)

    def rows(self, start: int, stop: int) -> PairBias:
        return replace(self, positions=self.positions.rows(start, stop))


@dataclass(frozen=True, eq=False)
class DenseBias:
    """Anything else: a ``(B|1, H, Q, K)`` tensor in float32 or better."""

    tensor: Tensor
    positions: Positions

    def dense(self) -> Tensor:
        return self.tensor

    def rows(self, start: int, stop: int) -> DenseBias:
        return DenseBias(self.tensor[:, :, start:stop], self.positions.rows(start, stop))


Bias: TypeAlias = DistanceBias | PairBias | DenseBias
"""A number added to the scaled logits: three kinds, no more, each bound to the positions it was made from.

``dense()`` ``(B|1, H, Q, K)`` is its meaning (entries of pairs that are not allowed have none); ``rows(start, stop)``
is the bias of those queries alone.
"""


def distance_bias(function: DistanceFunction, positions: Positions) -> DistanceBias | PairBias:
    """The bias ``function(i - j)``: a line per head where slots tell the distance, otherwise a function of pairs.

    In causal attention the function is never asked about negative distances.
    """
    if positions.slot_distance:
        first, _ = positions.distance_range()
        return DistanceBias(function(positions.distances()), positions, first)
    causal = positions.causal

    def pairs(query: Tensor, key: Tensor) -> Tensor:
        distance = query[:, :, None] - key[:, None, :]
        return function(distance.clamp(min=0) if causal else distance).transpose(0, 1)

    return PairBias(pairs, positions)


def add_biases(a: Bias | None, b: Bias | None) -> Bias | None:
    """The sum of two biases, in the leanest kind that can hold it."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, DistanceBias) and isinstance(b, DistanceBias):
        if a.first == b.first and a.table.shape[1] == b.table.shape[1]:
            return DistanceBias(a.table + b.table, a.positions, a.first)
    pair_a = a.as_pairs() if isinstance(a, DistanceBias) else a
    pair_b = b.as_pairs() if isinstance(b, DistanceBias) else b
    if isinstance(pair_a, PairBias) and isinstance(pair_b, PairBias) and same_positions(a.positions, b.positions):
        f, g = pair_a.function, pair_b.function
        return PairBias(lambda query, key: f(query, key) + g(query, key), a.positions)
    return DenseBias(a.dense() + b.dense(), a.positions)


def same_positions(a: Positions, b: Positions) -> bool:
    """Both read the very same position tensors (identity, so that nothing is compared on a device)."""
    return a is b or (a.query is b.query and a.key is b.key)


@dataclass(frozen=True, eq=False)
class Branch:
    """One way of comparing queries with keys, and the distances it rules.

    Attributes:
        query: ``(B, H, Q, D) -> (B, H, Q, D')``, or None for the identity. Temperatures live here.
        key: ``(k, at="keys" | "queries") -> k'``: with ``at="keys"``, ``k`` is ``(B, Hkv, K, D)`` and stands at the
            keys; with ``at="queries"``, ``k`` holds only the new keys, which stand where the queries stand.
        near: smallest distance this branch rules (None: no lower bound).
        far: first distance it no longer rules (None: no upper bound). Distances are of slots, unmapped, and
            absolute where attention is bidirectional.
        chunk: near and far then count chunks of this many slots from the row's (or document's) first token:
            ``near=0, far=1`` is the query's own chunk.
    """

    query: Callable[[Tensor], Tensor] | None = None
    key: Callable[..., Tensor] | None = None
    near: int | None = None
    far: int | None = None
    chunk: int | None = None

    def pairs(self, positions: Positions) -> Tensor:
        """``(B|1, Q, K)`` bool: which pairs this branch rules, allowed or not."""
        return self.rules(positions.token_distance(chunk=self.chunk))

    def rules(self, distance: Tensor) -> Tensor:
        """Which of these slot distances this branch rules, as a bool tensor of the same shape."""
        distance = distance.abs()
        ok = torch.ones_like(distance, dtype=torch.bool)
        if self.near is not None:
            ok = ok & (distance >= self.near)
        if self.far is not None:
            ok = ok & (distance < self.far)
        return ok


class Scores(Protocol):
    """A content-dependent score: sees whole rows of logits of all heads, for a block of queries.

    Called as ``scores(logits, bias, q=, k=, positions=, allowed=, scale=)`` with ``logits`` = ``scale * q.k``
    ``(B, H, q, K)``, ``bias`` the dense bias of the block or None, ``q`` ``(B, H, q, D)`` and ``k`` ``(B, Hkv, K, D)``
    as they were multiplied, ``positions`` of the block and ``allowed`` ``(B|1, 1, q, K)``. Returns the logits that the
    softmax takes, bias included; pairs that are not allowed are masked afterwards.
    """

    def __call__(
        self,
        logits: Tensor,
        bias: Tensor | None,
        *,
        q: Tensor,
        k: Tensor,
        positions: Positions,
        allowed: Tensor,
        scale: float,
    ) -> Tensor: ...


class Weights(Protocol):
    """A change after the softmax: ``weights(probabilities, positions=) -> (probabilities, addition | None)``.

    ``probabilities`` are ``(B, H, q, K)``; ``addition`` ``(B, H, q, Dv)`` is added to the attention's output.
    """

    def __call__(self, probabilities: Tensor, *, positions: Positions) -> tuple[Tensor, Tensor | None]: ...


@dataclass(frozen=True, eq=False, kw_only=True)
class Terms:
    """What attention must do for one set of positions. Lives for one forward pass; never stored on a module.

    Attributes:
        name: the encoding that made them, for messages.
        branches: none = plain dot product; one = rotary; two or more rule disjoint distances and share one softmax.
        bias: added to the scaled logits.
        scores: content-dependent scores (DAPE, CoPE, Shaw keys).
        weights: a change after the softmax (Shaw values, MEP's penalty read literally).
        value: ``(v, at="keys" | "queries") -> v'`` before aggregation (VO-RoPE).
        output: ``(B, H, Q, Dv) -> (B, H, Q, Dv)`` after it.
        window: sliding window in slots: distances below it are seen.
        chunk: chunked local attention: only keys of the query's own chunk are seen.
        rotated_keys_cacheable: False where a key's transform depends on the current length or on the query, so that
            a cache must hold raw keys.
    """

    name: str = ""
    branches: tuple[Branch, ...] = ()
    bias: Bias | None = None
    scores: Scores | None = None
    weights: Weights | None = None
    value: Callable[..., Tensor] | None = None
    output: Callable[[Tensor], Tensor] | None = None
    window: int | None = None
    chunk: int | None = None
    rotated_keys_cacheable: bool = True

    def __add__(self, other: Terms) -> Terms:
        """Both at once: rotary + bias, bias + bias, the tighter window. What cannot be both is an error."""
        merged: dict[str, Any] = {
            "name": " + ".join(name for name in (self.name, other.name) if name),
            "bias": add_biases(self.bias, other.bias),
            "window": _tighter(self.window, other.window),
            "chunk": self._one_of(other, "chunk") if self.chunk != other.chunk else self.chunk,
            "rotated_keys_cacheable": self.rotated_keys_cacheable and other.rotated_keys_cacheable,
        }
        for name in ("scores", "weights", "value", "output"):
            merged[name] = self._one_of(other, name)
        merged["branches"] = self._one_of(other, "branches") or ()
        return Terms(**merged)

    def _one_of(self, other: Terms, field: str) -> Any:
        mine, theirs = getattr(self, field), getattr(other, field)
        if mine and theirs:
            raise ValueError(
                f"{self.name or 'the first encoding'} and {other.name or 'the second'} both set {field!r}; "
                "attention can have only one: drop one of them"
            )
        return mine or theirs or None

    def is_empty(self) -> bool:
        """Plain dot-product attention."""
        return all(getattr(self, f.name) == f.default for f in fields(self) if f.name != "name")

    def prepare(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """New keys and values as a cache of transformed keys holds them; they stand where the queries stand.

        A cache that holds these calls ``attend(..., prepared=True)``. Where ``rotated_keys_cacheable`` is False the
        cache holds raw keys and values, and ``attend`` transforms all of them.
        """
        if not self.rotated_keys_cacheable:
            return k, v
        if self.branches and self.branches[0].key is not None:
            k = self.branches[0].key(k, at="queries")
        if self.value is not None:
            v = self.value(v, at="queries")
        return k, v


def _tighter(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)
