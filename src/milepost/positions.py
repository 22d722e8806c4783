"""Where every query and every key stands, and who may see whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Positions:
    """Where the queries and keys of one attention call stand.

    The only place that knows about caches, padding and packed documents. Two notions are kept apart:

    - a *slot* is an index on the key axis. Who may see whom is decided by slots, so that a
      :class:`~milepost.encoding.PositionMap` can never change the mask;
    - a *position* is the number an encoding reads. A map may change it, and it may be a float.

    Attributes:
        query: ``(B|1, Q)`` or ``(B|1, Q, axes)``, int64 (float after a map): positions of the queries.
        key: ``(B|1, K)`` or ``(B|1, K, axes)``: positions of the keys.
        query_start: key slot in which the first query stands; the others follow it. A Python int, or a one-element
            int64 tensor where only the device knows it (decoding with a static cache).
        query_document: ``(B|1, Q)`` document ids, or None when every row is one document.
        key_document: ``(B|1, K)`` document ids. Documents are contiguous and their ids ascend along the slots.
        key_present: ``(B|1, K)`` bool, False = padding (or a static cache's empty slots); None = all present.
        causal: a query sees its own slot and earlier ones only.
        trained_length: the length L a checkpoint was trained at, where an encoding needs it.
        length: ``(B|1,)`` int64, each row's own current length; read by length-dependent frequencies only.
        slot_distance: wherever a pair is allowed, its distance in positions equals its distance in slots, so that a
            bias may be read from one line per head.
        document_lengths: lengths of the packed documents, where the host knows them.
        query_segment: ``(B|1, Q)`` segment ids of the queries (BERT's token types), for encodings that embed them.
    """

    query: Tensor
    key: Tensor
    query_start: int | Tensor
    length: Tensor
    query_document: Tensor | None = None
    key_document: Tensor | None = None
    key_present: Tensor | None = None
    causal: bool = True
    trained_length: int | None = None
    slot_distance: bool = False
    document_lengths: tuple[int, ...] | None = None
    query_segment: Tensor | None = None

    # ---- constructors -----------------------------------------------------------------------------------------------

    @classmethod
    def full(
        cls,
        length: int,
        *,
        queries: int | None = None,
        causal: bool = True,
        trained_length: int | None = None,
        device: torch.device | str | None = None,
    ) -> Positions:
        """One unpadded sequence of ``length`` keys; the last ``queries`` of them (default: all) are queries."""
        queries = length if queries is None else queries
        _check_queries(queries, length)
        key = torch.arange(length, device=device)[None]
        return cls(
            query=key[:, length - queries :],
            key=key,
            query_start=length - queries,
            length=torch.full((1,), length, device=device),
            causal=causal,
            trained_length=trained_length,
            slot_distance=True,
        )

    @classmethod
    def step(
        cls,
        cache_length: int,
        *,
        queries: int = 1,
        trained_length: int | None = None,
        device: torch.device | str | None = None,
    ) -> Positions:
        """``queries`` new tokens after ``cache_length`` cached ones (decoding, chunked prefill)."""
        return cls.full(cache_length + queries, queries=queries, trained_length=trained_length, device=device)

    @classmethod
    def cross(cls, queries: int, keys: int, *, device: torch.device | str | None = None) -> Positions:
        """Cross-attention: two sequences that share the origin 0; every query sees every key."""
        return cls(
            query=torch.arange(queries, device=device)[None],
            key=torch.arange(keys, device=device)[None],
            query_start=0,
            length=torch.full((1,), keys, device=device),
            causal=False,
            slot_distance=True,
        )

    @classmethod
    def from_mask(
        cls,
        mask: Tensor,
        *,
        side: str | None = None,
        queries: int | None = None,
        query_start: int | Tensor | None = None,
        position_ids: Tensor | None = None,
        causal: bool = True,
        trained_length: int | None = None,
    ) -> Positions:
        """A padded batch, from its ``(B, K)`` mask (True or 1 = a token, False or 0 = padding).

        Positions are ``cumsum(mask) - 1``, clipped at 0, so that a padded row equals the same row without padding (with
        ``side="right"`` they run on over the padding, which changes nothing for the tokens).

        Args:
            mask: ``(B, K)`` bool or integer.
            side: where the padding stands: ``"left"``, ``"right"``, or None when the mask may have holes (no bias can
                then be read from a line). Outside ``torch.compile`` a wrong claim is an error.
            queries: how many of the last slots are queries (default: all).
            query_start: slot of the first query, where it is not the last ``queries`` slots (static caches).
            position_ids: ``(B, K)`` positions of all keys, where they are not the count of tokens.

        Raises:
            ValueError: a mask that is not two-dimensional, an unknown side, or a mask that contradicts ``side``.
        """
        if mask.dim() != 2:
            raise ValueError(f"a padding mask has shape (batch, keys); got {tuple(mask.shape)}")
        if side not in ("left", "right", None):
            raise ValueError(f"side is 'left', 'right' or None; got {side!r}")
        present = mask.bool()
        if side is not None and not torch.compiler.is_compiling():
            steps = present[:, 1:].int() - present[:, :-1].int()
            wrong = (steps < 0 if side == "left" else steps > 0).any(-1).nonzero()
            if wrong.numel():
                raise ValueError(
                    f"row {int(wrong[0])} of the mask is not padded on the {side} alone; "
                    "pass side=None for masks with holes"
                )
        keys = mask.shape[1]
        count = present.long().cumsum(-1)
        if position_ids is not None:
            key = position_ids
        elif side == "right":
            key = torch.arange(keys, device=mask.device).expand_as(mask)
        else:
            key = (count - 1).clamp(min=0)
        queries = keys if queries is None else queries
        _check_queries(queries, keys)
        start: int | Tensor = keys - queries if query_start is None else query_start
        if isinstance(start, int):
            query = key[:, start : start + queries]
        else:
            query = key.index_select(1, start + torch.arange(queries, device=key.device))
        return cls(
            query=query,
            key=key,
            query_start=start,
            length=count[:, -1],
            key_present=present,
            causal=causal,
            trained_length=trained_length,
            slot_distance=side is not None and position_ids is None,
        )

    @classmethod
    def packed(
        cls,
        lengths: Sequence[int],
        *,
        reset: bool = True,
        causal: bool = True,
        trained_length: int | None = None,
        device: torch.device | str | None = None,
    ) -> Positions:
        """Several documents in one row, one after the other; no query sees another document.

        ``reset=True`` starts every document at position 0; ``reset=False`` lets positions run on.
        """
        if not lengths or min(lengths) < 1:
            raise ValueError(f"packed documents have at least one token each; got lengths {list(lengths)}")
        counts = torch.tensor(lengths, device=device)
        total = sum(lengths)
        document = torch.repeat_interleave(torch.arange(len(lengths), device=device), counts, output_size=total)
        key = torch.arange(total, device=device)
        if reset:
            key = key - (counts.cumsum(0) - counts)[document]
        length = max(lengths) if reset else total
        return cls(
            query=key[None],
            key=key[None],
            query_start=0,
            length=torch.full((1,), length, device=device),
            query_document=document[None],
            key_document=document[None],
            causal=causal,
            trained_length=trained_length,
            slot_distance=True,
            document_lengths=tuple(lengths),
        )

    @classmethod
    def from_documents(
        cls,
        document: Tensor,
        *,
        queries: int | None = None,
        key_present: Tensor | None = None,
        causal: bool = True,
        trained_length: int | None = None,
    ) -> Positions:
        """Packed rows from ``(B, K)`` document ids on the device; a new id starts a new document at position 0.

        Documents are runs of equal ids: an id that comes back later is another document.
        """
        change = torch.zeros_like(document)
        change[:, 1:] = (document[:, 1:] != document[:, :-1]).long()
        run = change.cumsum(-1)
        slot = torch.arange(document.shape[1], device=document.device).expand_as(run)
        begin = torch.where(change.bool(), slot, 0).cummax(-1).values
        key = slot - begin
        if key_present is not None:
            # Padding inside a run would shift positions against slots; it is legal only at a row's ends.
            key = torch.where(key_present.bool(), key, 0)
        keys = document.shape[1]
        queries = keys if queries is None else queries
        _check_queries(queries, keys)
        return cls(
            query=key[:, keys - queries :],
            key=key,
            query_start=keys - queries,
            length=key.amax(-1) + 1,
            query_document=run[:, keys - queries :],
            key_document=run,
            key_present=None if key_present is None else key_present.bool(),
            causal=causal,
            trained_length=trained_length,
            slot_distance=True,
        )

    # ---- what encodings and backends ask ----------------------------------------------------------------------------

    @property
    def num_queries(self) -> int:
        return self.query.shape[1]

    @property
    def num_keys(self) -> int:
        return self.key.shape[1]

    @property
    def device(self) -> torch.device:
        return self.key.device

    def query_slots(self) -> Tensor:
        """``(Q,)`` int64: the key slots in which the queries stand."""
        return torch.arange(self.num_queries, device=self.device) + self.query_start

    def key_slots(self) -> Tensor:
        """``(K,)`` int64."""
        return torch.arange(self.num_keys, device=self.device)

    def distance(self) -> Tensor:
        """``(B|1, Q, K)``: query position minus key position, signed; positive for keys in the past."""
        if self.query.dim() != 2:
            raise ValueError(
                f"distance is defined for one position axis; these positions have {self.query.shape[-1]}: "
                "use an encoding for several axes (rope-2d, rope-3d, m-rope)"
            )
        return self.query[:, :, None] - self.key[:, None, :]

    def token_distance(self, *, chunk: int | None = None) -> Tensor:
        """``(1|B, Q, K)`` int64: distance in tokens whatever a map made of the positions; in chunks where one is given.

        The distance of slots, less the padding between them where a mask has holes.
        """
        query, key = self.query_slots()[None], self.key_slots()[None]
        if self.key_present is not None and not self.slot_distance:
            key = self.key_present.long().cumsum(-1) - 1
            query = key[:, query[0]]
        if chunk is not None:
            begin = self._row_start()
            if self.key_present is not None and not self.slot_distance:
                begin = key.gather(1, begin.flatten(1).expand(key.shape[0], -1))[..., None]
            return (query[..., None] - begin) // chunk - (key[:, None, :] - begin) // chunk
        return query[..., None] - key[:, None, :]

    def distance_range(self) -> tuple[int, int]:
        """Half-open range ``(first, stop)`` that holds the slot distance of every allowed pair."""
        if self.causal:
            return 0, self.num_keys
        if isinstance(self.query_start, Tensor):
            return 1 - self.num_keys, self.num_keys
        return self.query_start + 1 - self.num_keys, self.query_start + self.num_queries

    def distances(self) -> Tensor:
        """``(stop - first,)`` int64: the distances a table must cover, ascending."""
        first, stop = self.distance_range()
        return torch.arange(first, stop, device=self.device)

    def allowed(self, *, window: int | None = None, chunk: int | None = None) -> Tensor:
        """``(B|1, Q, K)`` bool: which query may see which key. Decided by slots, documents and padding only.

        ``window`` keeps distances below it, in tokens (on both sides where attention is bidirectional); ``chunk`` keeps
        keys of the query's own chunk of that many tokens, counted from the row's (or document's) first token.
        """
        query, key = self.query_slots()[None, :, None], self.key_slots()[None, None, :]
        ok = key <= query if self.causal else torch.ones_like(key <= query)
        if window is not None:
            ok = ok & (self.token_distance().abs() < window)
        if self.query_document is not None and self.key_document is not None:
            ok = ok & (self.query_document[:, :, None] == self.key_document[:, None, :])
        if self.key_present is not None:
            ok = ok & self.key_present[:, None, :]
        if chunk is not None:
            ok = ok & (self.token_distance(chunk=chunk) == 0)
        return ok

    def intervals(self, *, window: int | None = None, chunk: int | None = None) -> tuple[Tensor, Tensor] | None:
        """Half-open key-slot intervals ``(lo, hi)``, each ``(B|1, Q)`` int64, equal to :meth:`allowed` row by row.

        None where a row's allowed keys are not one interval as far as the host can know (masks with holes).
        """
        if not self.slot_distance and (self.key_present is not None or self.key_document is not None):
            return None
        query = self.query_slots()[None]
        lo = torch.zeros_like(query)
        hi = torch.full_like(query, self.num_keys)
        if self.causal:
            hi = torch.minimum(hi, query + 1)
        if window is not None:
            lo = torch.maximum(lo, query - window + 1)
            hi = torch.minimum(hi, query + window)
        if self.query_document is not None and self.key_document is not None:
            ids, wanted = self.key_document.contiguous(), self.query_document.contiguous()
            lo = torch.maximum(lo, torch.searchsorted(ids, wanted))
            hi = torch.minimum(hi, torch.searchsorted(ids, wanted, right=True))
        if self.key_present is not None:
            first = self.key_present.int().argmax(-1, keepdim=True)
            lo = torch.maximum(lo, first)
            hi = torch.minimum(hi, first + self.key_present.sum(-1, keepdim=True))
        if chunk is not None:
            begin = self._row_start()[..., 0]
            mine = begin + (query - begin).div(chunk, rounding_mode="floor") * chunk
            lo, hi = torch.maximum(lo, mine), torch.minimum(hi, mine + chunk)
        return lo, hi

    def _row_start(self) -> Tensor:
        """``(B|1, Q|1, 1)``: the slot of the first token of each query's row or document."""
        if self.key_document is not None and self.query_document is not None:
            return torch.searchsorted(self.key_document.contiguous(), self.query_document.contiguous())[..., None]
        if self.slot_distance and self.query.dim() == 2:  # right too where a cache has dropped its oldest keys
            return (self.query_slots()[None] - self.query)[..., None]
        if self.key_present is not None:
            return self.key_present.int().argmax(-1)[:, None, None]
        return torch.zeros(1, 1, 1, dtype=torch.int64, device=self.device)

    def plain(self) -> bool:
        """No padding, no documents: every row of the batch sees the same keys."""
        return self.key_present is None and self.key_document is None

    def without_absent(self, x: Tensor) -> Tensor:
        """x ``(B, H, K, D)`` of the keys, 0 where a key is padding: ``0 * NaN`` would carry a NaN from there."""
        return x if self.key_present is None else x.masked_fill(~self.key_present[:, None, :, None], 0.0)

    def rows(self, start: int, stop: int) -> Positions:
        """The same positions for the queries ``start:stop`` only."""
        return replace(
            self,
            query=self.query[:, start:stop],
            query_start=self.query_start + start,
            query_document=None if self.query_document is None else self.query_document[:, start:stop],
            query_segment=None if self.query_segment is None else self.query_segment[:, start:stop],
        )

    def mapped(self, query: Tensor, key: Tensor, *, length: Tensor | None = None) -> Positions:
        """The same slots at other positions: what a :class:`~milepost.encoding.PositionMap` returns."""
        return replace(
            self, query=query, key=key, slot_distance=False, length=self.length if length is None else length
        )

    def of_keys(self) -> Positions:
        """Positions in which the keys are the queries too (all slots): for transforms that act on the keys."""
        return replace(self, query=self.key, query_start=0, query_document=self.key_document, query_segment=None)


def _check_queries(queries: int, keys: int) -> None:
    if not torch.compiler.is_compiling() and not 0 <= queries <= keys:
        raise ValueError(f"the queries are the last of the {keys} keys, 0 to {keys} of them; got {queries}")
