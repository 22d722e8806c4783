"""Decoding in bounded memory: a cache that forgets keys which a decaying bias has put out of every head's reach."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from milepost.attention.blocked import distance_attention


def windows(table: Tensor, *, spread: float | Tensor, longest: int, eps: float = 1e-12) -> Tensor:
    """For each head the distance from which on no key can weigh more than ``eps / longest``.

    Formula: the smallest W with ``max over d >= W of b(d) < b(0) - spread - ln(longest / eps)``; n where there is none.
    A query sees its own key, at distance 0, whose logit is at least ``b(0) - spread / 2``; the logit of a key at
    distance d is at most ``b(d) + spread / 2``. So all keys beyond W together weigh at most eps, and leaving them out
    moves the output by at most ``2 * eps * max|v|``. The table need not be monotone.

    Args:
        table: ``(H, n)``, biases at distances 0 .. n-1.
        spread: twice the largest ``|scale * q.k|`` that can occur, or ``(H,)`` of them.
        longest: the most keys a query may ever have.
        eps: the weight that may be lost.

    Returns:
        ``(H,)`` int64.
    """
    biases = table.detach().double()
    reach = biases.flip(1).cummax(1).values.flip(1)
    spread = torch.as_tensor(spread, dtype=torch.float64, device=biases.device).view(-1, 1)
    return (reach >= biases[:, :1] - spread - math.log(longest / eps)).sum(1)


def projection_bound(weight: Tensor, num_heads: int, input_norm: float, bias: Tensor | None = None) -> float:
    """The largest norm of any head's query (or key) that this projection can make of an input of norm `input_norm`.

    weight ``(num_heads * head_dim, width)`` as in ``nn.Linear``. After an RMSNorm with weight g, inputs have norms of
    at most ``sqrt(width) * max|g|``; a rotation changes no norm.
    """
    return float(projection_bounds(weight, num_heads, input_norm, bias).max())


def projection_bounds(weight: Tensor, num_heads: int, input_norm: float, bias: Tensor | None = None) -> Tensor:
    """``(num_heads,)`` float64: the same for each head, ``|W_h|_2 * input_norm + |bias_h|``."""
    heads = weight.detach().double().unflatten(0, (num_heads, -1))
    bound = torch.linalg.matrix_norm(heads, ord=2) * input_norm
    if bias is not None:
        bound = bound + bias.detach().double().unflatten(0, (num_heads, -1)).norm(dim=-1)
    return bound


def largest_norms(x: Tensor) -> Tensor:
    """``(1, heads)``: what no norm of a vector of x ``(B, heads, n, D)`` exceeds.

    In float32 (float64 for float64), a little above the computed norm, which rounding may have made too small. NaN
    where x holds NaN; 0 where it is empty.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.numel() == 0:
        return torch.zeros((1, x.shape[1]), dtype=dtype, device=x.device)
    norms = torch.linalg.vector_norm(x.detach(), dim=-1, dtype=dtype)
    return norms.amax((0, 2))[None] * (1 + 2**-14)


def append(room: Tensor | None, held: Tensor | None, new: Tensor) -> tuple[Tensor, Tensor]:
    """``(room, both)``: `held` ``(B, H, n, D)`` and `new` behind it, as a view of memory kept ahead of them.

    Where `held` is the beginning of `room` and there is room enough, only `new` is written; otherwise a larger room is
    taken. So a token costs a fixed number of copies on average, where concatenation copies everything each time.
    Whoever cut tokens off and appends others overwrites what was cut. Not for tensors that autograd has seen.
    """
    length = 0 if held is None else held.shape[2]
    end = length + new.shape[2]
    if room is None or end > room.shape[2] or not _begins(room, held, new):
        dtype = new.dtype if held is None else torch.promote_types(held.dtype, new.dtype)
        room = new.new_empty((*new.shape[:2], end + max(64, end // 4), new.shape[3]), dtype=dtype)
        if held is not None:
            room[:, :, :length] = held
    room[:, :, length:end] = new
    return room, room[:, :, :end]


def _begins(room: Tensor, held: Tensor | None, new: Tensor) -> bool:
    """Whether `held` is a view of the first tokens of `room`, to which `new` may be written."""
    if held is None or (room.is_inference() and not torch.is_inference_mode_enabled()):
        return False
    same = held.data_ptr() == room.data_ptr() and held.stride() == room.stride()
    return same and held.shape[:2] == room.shape[:2] and room.dtype == torch.promote_types(room.dtype, new.dtype)


def out_of_reach(held: int, window: int) -> int:
    """How many of the oldest `held` keys to drop: those the next query stands `window` or more from.

    0 until there are as many of them as are to be kept, and 64: so each token is moved about once. Below
    ``2 * window + 64`` keys are then held.
    """
    kept = window - 1
    surplus = held - kept
    return surplus if surplus > max(64, kept) else 0


class WindowedCache:
    """Keys and values of one layer, and attention over them, in memory that the length does not grow.

    For encodings whose bias decays with the distance (ALiBi, MEP, KERPLE-power ...). Keys farther than the widest
    head's window are dropped, since no later query can give all of them together a weight above eps: see `windows`.
    That rests on two promises, both checked at every step: no query's norm exceeds `query_bound`, no key's
    `key_bound`. `projection_bound` computes such numbers from a model's weights. An output is off by at most
    ``4 * eps * max|v|``: half of it for keys that were dropped, half for kept ones that attention leaves out.

    Args:
        table: ``(H, n)`` biases at distances 0 .. n-1; n is the longest context that may be decoded. Without decay
            within n nothing is ever dropped (``window == n``).
        scale: of the dot product.
        query_bound: no ``|q|`` is larger.
        key_bound: no ``|k|`` is larger.
        eps: the weight that may be lost, of 1.
    """

    def __init__(
        self, table: Tensor, *, scale: float, query_bound: float, key_bound: float, eps: float = 1e-12
    ) -> None:
        if table.dim() != 2 or table.shape[1] < 1:
            raise ValueError(f"table must be (heads, distances), got {tuple(table.shape)}")
        if not 0 < eps < 1:
            raise ValueError(f"eps is a share of the weight, between 0 and 1, got {eps}")
        spread = 2 * abs(scale) * query_bound * key_bound
        self.longest = table.shape[1]
        self.windows = windows(table, spread=spread, longest=self.longest, eps=eps)
        self.window = int(self.windows.max())
        self.table = table.detach()[:, : self.window].contiguous()
        self.scale, self.eps = scale, eps
        self.query_bound, self.key_bound = query_bound, key_bound
        self.seen = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._rooms: list[Tensor | None] = [None, None]

    @property
    def held(self) -> int:
        """How many keys are kept: below ``2 * window + 64`` after a step."""
        return 0 if self._keys is None else self._keys.shape[2]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append the keys and values of new tokens, and attend from their queries: ``(B, H, n, Dv)``.

        Shapes: q ``(B, H, n, D)``, k ``(B, Hkv, n, D)``, v ``(B, Hkv, n, Dv)``. Raises ValueError where a norm exceeds
        its bound, and beyond the longest context.
        """
        count = k.shape[2]
        if self.seen + count > self.longest:
            raise ValueError(f"{self.seen + count} tokens, the table was made for {self.longest}: make it longer")
        for name, x, bound in (("query", q, self.query_bound), ("key", k, self.key_bound)):
            norm = float(torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).max()) if x.numel() else 0.0
            if not norm <= bound * (1 + 1e-5):
                raise ValueError(f"a {name} of norm {norm:.4g} breaks the promised {name}_bound={bound:.4g}")
        keys, values = self._append(k, v)
        slots = torch.arange(self.held - count, self.held, device=q.device)[None]
        out, _ = distance_attention(
            q,
            keys,
            values,
            self.table,
            (slots - self.window + 1).clamp(min=0),
            slots + 1,
            first=0,
            offset=self.held - count,
            scale=self.scale,
            skip_eps=self.eps,
            key_bound=torch.full((1, k.shape[1]), self.key_bound, device=k.device),
        )
        self._forget()
        return out

    def _append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self._rooms[0], self._keys = append(self._rooms[0], self._keys, k)
        self._rooms[1], self._values = append(self._rooms[1], self._values, v)
        self.seen += k.shape[2]
        return self._keys, self._values

    def _forget(self) -> None:
        """Drop keys that the next query stands too far from; in strides, so that few steps move memory."""
        assert self._keys is not None and self._values is not None
        surplus = out_of_reach(self.held, self.window)
        if surplus:
            self._rooms = [None, None]
            self._keys, self._values = self._keys[:, :, surplus:].clone(), self._values[:, :, surplus:].clone()
