"""Decoding with a cache that forgets: equal to full attention within its bound, in memory that stops growing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from milepost import DistanceBias, Positions, Terms, attend, build
from milepost.attention.windows import WindowedCache, projection_bound, windows


def table_of(name: str, length: int, **options) -> Tensor:
    bias = build(name, num_heads=4, **options)(Positions.full(length)).bias
    assert isinstance(bias, DistanceBias)
    return bias.table.detach().float()


def tokens(length: int, key_heads: int = 2, norm: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, length, 16), torch.randn(2, key_heads, length, 16)
    q, k = (norm * x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    return q, k, torch.randn(2, key_heads, length, 8)


@pytest.mark.parametrize("name, options", [("alibi", {"slope_scale": 4.0}), ("mep", {})])
@pytest.mark.parametrize("steps", [[1] * 300, [200, 1, 1, 98], [7] * 42 + [6]])
def test_equals_full_attention(name: str, options: dict, steps: list[int]) -> None:
    table = table_of(name, 300, **options) * 8
    q, k, v = tokens(300)
    positions = Positions.full(300)
    wanted = attend(
        q.double(),
        k.double(),
        v.double(),
        positions,
        Terms(bias=DistanceBias(table.double(), positions, 0)),
        scale=0.25,
        backend="reference",
    )
    cache = WindowedCache(table, scale=0.25, query_bound=3.0, key_bound=3.0)
    parts, start = [], 0
    for count in steps:
        part = slice(start, start + count)
        parts.append(cache.attend(q[:, :, part], k[:, :, part], v[:, :, part]))
        start += count
    torch.testing.assert_close(torch.cat(parts, 2).double(), wanted, rtol=0, atol=3e-6)
    assert cache.seen == 300


def test_memory_stops_growing() -> None:
    table = table_of("alibi", 4000, slope_scale=16.0)
    cache = WindowedCache(table, scale=0.25, query_bound=3.0, key_bound=3.0)
    assert cache.window < 800
    q, k, v = tokens(4000)
    most = 0
    for start in range(0, 4000, 100):
        part = slice(start, start + 100)
        cache.attend(q[:, :, part], k[:, :, part], v[:, :, part])
        most = max(most, cache.held)
    assert cache.seen == 4000 and most < 2 * cache.window + 64
    assert cache._keys is not None and cache._keys.shape[2] < 5 * cache.window + 500


def test_windows_hold_what_they_say() -> None:
    """A brute-force check of the definition, with a table that rises again far out."""
    table = -torch.arange(500.0).expand(3, -1) * torch.tensor([[1.0], [0.2], [0.0]])
    table = table.clone()
    table[0, 250] = -20.0
    spread, eps = 6.0, 1e-6
    got = windows(table, spread=spread, longest=500, eps=eps)
    for head in range(3):
        level = table[head, 0] - spread - math.log(500 / eps)
        far = [d for d in range(501) if bool((table[head, d:] < level).all())]
        assert got[head] == far[0]
    assert got.tolist() == [251, math.floor((spread + math.log(500 / eps)) / 0.2) + 1, 500]


@pytest.mark.parametrize("eps", [1e-1, 1e-3])
def test_the_stated_bound_holds_against_an_adversary(eps: float) -> None:
    """Far keys aligned with every query, the near ones against it: all that the bound allows."""
    length = 400
    table = -0.5 * torch.arange(length).float().expand(1, -1)
    q = torch.zeros(1, 1, length, 8)
    q[..., 0] = 3.0
    k = -q.clone()
    k[:, :, : length // 2] *= -1
    v = torch.randn(1, 1, length, 8)
    cache = WindowedCache(table, scale=1.0, query_bound=3.0, key_bound=3.0, eps=eps)
    assert cache.window < length // 2
    got = torch.cat([cache.attend(q[:, :, [i]], k[:, :, [i]], v[:, :, [i]]) for i in range(length)], 2)
    positions = Positions.full(length)
    terms = Terms(bias=DistanceBias(table, positions, 0))
    wanted = attend(q, k, v, positions, terms, scale=1.0, backend="reference")
    # Once by the cache, once by the operator within what the cache has kept.
    assert float((got - wanted).abs().max()) <= 4 * eps * float(v.abs().max()) + 1e-5


def test_broken_promises_are_errors() -> None:
    q, k, v = tokens(10)
    table = table_of("alibi", 12)
    cache = WindowedCache(table, scale=0.25, query_bound=3.0, key_bound=3.0)
    with pytest.raises(ValueError, match="a query of norm 6 breaks the promised query_bound=3"):
        cache.attend(2 * q, k, v)
    with pytest.raises(ValueError, match="a key of norm 6 breaks the promised key_bound=3"):
        cache.attend(q, 2 * k, v)
    with pytest.raises(ValueError, match="a key of norm nan"):
        cache.attend(q, k * math.nan, v)
    cache.attend(q, k, v)
    with pytest.raises(ValueError, match="20 tokens, the table was made for 12"):
        cache.attend(q, k, v)
    with pytest.raises(ValueError, match="eps is a share"):
        WindowedCache(table, scale=1.0, query_bound=1.0, key_bound=1.0, eps=0.0)


def test_projection_bound_bounds() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(32, 48).requires_grad_(False)
    bound = projection_bound(linear.weight, 6, math.sqrt(32), linear.bias)
    x = nn.functional.rms_norm(torch.randn(2000, 32), (32,))
    norms = linear(x).unflatten(-1, (6, 8)).norm(dim=-1)
    assert float(norms.max()) <= bound
    _, _, vh = torch.linalg.svd(linear.weight.unflatten(0, (6, 8)))
    reached = max(
        float((linear(sign * math.sqrt(32) * vh[h, 0])).view(6, 8)[h].norm()) for h in range(6) for sign in (1, -1)
    )
    assert bound * 0.8 < reached <= bound
