"""Randomized positions: sorted random positions from a range far longer than the text."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from milepost.encoding import Encoding, EncodingConfig, PositionMap
from milepost.encodings.maps.draws import fresh_seed, mix, row_index
from milepost.positions import Positions
from milepost.terms import DistanceBias, PairBias, Terms


@dataclass(frozen=True, kw_only=True)
class RandomizedConfig(EncodingConfig):
    """Options of :class:`Randomized`.

    Attributes:
        max_position: M; positions are drawn from 0 .. M - 1, so no text may have more than M tokens.
        test_tokens: outside training, positions are drawn for this many tokens at least (a longer text: for its own
            length). A text that grows in a cache keeps the positions it has for as long as it has no more tokens.
        seed: of the draw outside training, where every row has the same.
    """

    max_position: int = 2048
    test_tokens: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_position < 1 or not 1 <= self.test_tokens <= self.max_position:
            raise ValueError(
                "max_position is at least 1 and test_tokens lies in 1 .. max_position; got max_position "
                f"{self.max_position}, test_tokens {self.test_tokens}"
            )


class SortedDraw:
    """Sorted draws without replacement: row r has ``count[r]`` distinct numbers from 0 .. size - 1.

    A pure function of ``numbers``, which broadcast with ``count`` ``(R|1, 1)``. Called with int64 indices ``(R|1, n)``,
    it gives the ``index[r]``-th smallest numbers of each row, ``(R, n)`` int64.
    """

    def __init__(self, count: Tensor, size: int, *numbers: Tensor | int) -> None:
        every = torch.arange(size, device=count.device)[None]
        order = mix(*numbers, every).argsort(dim=-1, stable=True)
        rank = torch.empty_like(order).scatter_(1, order, every.expand_as(order))
        self.seen = (rank < count).long().cumsum(-1)
        self.last = size - 1

    def __call__(self, index: Tensor) -> Tensor:
        rows = max(self.seen.shape[0], index.shape[0])
        seen, wanted = self.seen.expand(rows, -1).contiguous(), (index + 1).expand(rows, -1).contiguous()
        return torch.searchsorted(seen, wanted).clamp(max=self.last)


class Randomized(PositionMap):
    """Randomized positions: the n tokens of a row stand at n distinct sorted positions from 0 .. M - 1.

    Training draws anew for every row and pass; outside training the draw is fixed by ``seed``, so average a few seeds
    as the paper averages draws.

    Shapes: int64 positions. Every row has its own draw where the rows are known (from the positions or ``tokens``).
    Raises ValueError for more tokens than ``max_position``, for positions that are not integers, and for a cache that
    outgrows ``test_tokens``: the positions of tokens already cached would have to move.
    Source: Ruoss et al. 2023 (arXiv 2305.16843). Their code draws once for the whole batch, and once more in each layer
    for encodings that act in attention; here one draw serves the whole pass.
    """

    Config = RandomizedConfig
    config: RandomizedConfig

    def forward(self, positions: Positions, tokens: Tensor | None = None) -> Positions:
        count, seed, row = self.plan(positions, tokens)
        draw = SortedDraw(count, self.config.max_position, seed, row)
        return positions.mapped(draw(positions.query), draw(positions.key))

    def plan(self, positions: Positions, tokens: Tensor | None = None) -> tuple[Tensor, Tensor | int, Tensor | int]:
        """How many positions each row draws ``(B|1, 1)``, and the numbers the draw is hashed from."""
        if positions.key.is_floating_point() or positions.key.dim() != 2:
            raise ValueError("randomized positions replace integer positions on one axis; put the map first")
        length = positions.length[:, None]
        if not torch.compiler.is_compiling():
            self._check(positions)
        if self.training:
            return length, fresh_seed(positions.device), row_index(positions, tokens)
        return length.clamp(min=self.config.test_tokens), self.config.seed, torch.zeros_like(length[:1])

    def _check(self, positions: Positions) -> None:
        size, drawn = self.config.max_position, self.config.test_tokens
        if positions.num_keys > size and int(positions.length.max()) > size:
            raise ValueError(
                f"a text of {int(positions.length.max())} tokens has no {size} distinct positions; "
                f"raise max_position (now {size})"
            )
        if positions.causal and positions.num_queries < positions.num_keys and int(positions.length.max()) > drawn:
            raise ValueError(
                f"with a cache, the positions of all tokens are drawn beforehand, here for {drawn} tokens; this text "
                f"has {int(positions.length.max())}: give test_tokens=N, the most tokens a text will have"
            )


class RandomizedDistances(Encoding):
    """The relative form: distances, not positions, are drawn, sorted and mirrored to the future.

    Of 1 .. M - 1 a pass draws n - 1 sorted distances ``f(1) < f(2) < …``; the bias at distance d is the inner bias at
    ``f(d)``, at ``-d`` the one at ``-f(d)``, and at 0 unchanged: a function of ``i - j``, held in one line per head.

    Shapes: a :class:`~milepost.terms.DistanceBias`, or a PairBias where slots do not tell the distance. One draw serves
    the batch, as in the authors' code.
    Raises ValueError for an encoding whose terms are not a bias of distance alone, and as :class:`Randomized` does.
    Source: Ruoss et al. 2023 (arXiv 2305.16843), their ALiBi and relative variants (``randomize_both_sides`` off).
    """

    def __init__(self, position_map: Randomized, encoding: Encoding) -> None:
        torch.nn.Module.__init__(self)
        self.config = EncodingConfig()
        self.position_map = position_map
        self.encoding = encoding

    def extra_repr(self) -> str:
        return ""

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        size = self.position_map.config.max_position
        every = Positions.full(size, causal=positions.causal, device=positions.device)
        inner = self.encoding(replace(every, trained_length=positions.trained_length), tokens)
        bias = inner.bias
        if not isinstance(bias, DistanceBias) or inner.branches or inner.scores or inner.weights or inner.value:
            raise ValueError(
                f"randomized distances need a bias of distance alone; {inner.name} is not one: use relative=False"
            )
        table, first = bias.table, bias.first
        count, seed, _ = self.position_map.plan(positions)
        draw = SortedDraw(count - 1, size - 1, seed, 0)

        def drawn(distance: Tensor) -> Tensor:
            """``(R, n)`` distances -> drawn ones, with their sign."""
            index = distance.abs()
            return distance.sign() * torch.where(index == 0, 0, 1 + draw((index - 1).clamp(min=0)))

        def inner_bias(distance: Tensor) -> Tensor:
            return table[:, (distance - first).clamp(0, table.shape[1] - 1)]

        if positions.slot_distance and positions.length.shape[0] == 1:
            at, _ = positions.distance_range()
            line = inner_bias(drawn(positions.distances()[None])[0])
            return replace(inner, bias=DistanceBias(line, positions, at))

        def pairs(query: Tensor, key: Tensor) -> Tensor:
            distance = query[:, :, None] - key[:, None, :]
            rows = max(distance.shape[0], count.shape[0])
            flat = drawn(distance.flatten(1).expand(rows, -1))
            return inner_bias(flat.view(rows, *distance.shape[1:])).transpose(0, 1)

        return replace(inner, bias=PairBias(pairs, positions))
