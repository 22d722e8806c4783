"""Relative maps of rotary and of biases: distances seen pair by pair, caches, chunks, memory, prefill."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from milepost import Encoding, Positions, attend, build, explain
from milepost.encodings.bias import ALiBi
from milepost.encodings.lrpe import LRPE, linear_attention, quadratic_attention
from milepost.encodings.relmaps import (
    LaMPE,
    ReRoPE,
    Stair,
    leaky_rerope_distance,
    mesa_chunk,
    rerope_distance,
    self_extend_distance,
    stair_distance,
    triangular_prefill,
)
from milepost.encodings.remapped import Remapped
from milepost.encodings.rotary import RoPE, rotate
from milepost.terms import DistanceBias

N = 40
QUERY, KEY = torch.arange(N)[:, None], torch.arange(N)[None, :]


def lampe(i: Tensor, j: Tensor) -> Tensor:
    ratio = min(1.0, 12 / (N - 1))
    far = torch.floor(ratio * i) - torch.floor(ratio * j) + 5 - math.floor(ratio * 5) - 1
    return torch.where(i - j < 5, (i - j).double(), far.double())


MAPS: dict[str, tuple[dict[str, Any], Any]] = {
    "rerope": ({"window": 7}, lambda i, j: rerope_distance(i - j, 7)),
    "leaky-rerope": ({"window": 7, "factor": 4.0}, lambda i, j: leaky_rerope_distance(i - j, 7, 4.0)),
    "self-extend": ({"window": 8, "group": 4}, lambda i, j: self_extend_distance(i, j, 4, 8)),
    "self-extend, odd": ({"window": 7, "group": 3}, lambda i, j: self_extend_distance(i, j, 3, 7)),
    "stair": ({"window": 4, "step": 3}, lambda i, j: stair_distance(i - j, 4, 3)),
    "stair, floor": ({"window": 4, "step": 3, "rounding": "floor"}, lambda i, j: stair_distance(i - j, 4, 3, "floor")),
    "lampe": ({"window": 5, "mapped_length": 12, "attention_factor": 1.0}, lampe),
}


def make(name: str, **more: Any) -> Encoding:
    options, _ = MAPS[name]
    return build(name.split(",")[0], head_dim=16, **options, **more)


def tensors(n: int = N, kv: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(2, h, n, 16, dtype=torch.float64) for h in (4, kv, kv))  # type: ignore[return-value]


def by_definition(q: Tensor, k: Tensor, v: Tensor, distance: Tensor, **options: Any) -> Tensor:
    """Every pair of tokens rotated by its own relative position: q . R(-distance) k, one matrix an entry."""
    inv_freq = RoPE(head_dim=16, **options).inv_freq()
    angles = distance.double()[..., None] * inv_freq
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    turned = rotate(q[:, :, :, None, :].expand(-1, -1, -1, N, -1).flatten(2, 3), angles.flatten(0, 1)[None])
    logits = (turned.unflatten(2, (N, N)) * k[:, :, None]).sum(-1) / 4
    logits = logits.masked_fill(KEY > QUERY, -torch.inf)
    return torch.softmax(logits, -1) @ v


@pytest.mark.parametrize("name", MAPS)
def test_every_pair_sees_its_mapped_distance(name: str) -> None:
    q, k, v = tensors()
    positions = Positions.full(N)
    wanted = by_definition(q, k, v, MAPS[name][1](QUERY, KEY))
    for backend in ("auto", "reference"):
        found = attend(q, k, v, positions, make(name)(positions), backend=backend)
        torch.testing.assert_close(found, wanted, atol=1e-9, rtol=0)
    plain = attend(q, k, v, positions, RoPE(head_dim=16)(positions))
    assert (found - plain).abs().max() > 1e-3


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("chunks", [[1] * N, [13, 1, 20, 6]], ids=["token by token", "chunked prefill"])
def test_cache_and_chunks_are_the_full_pass(name: str, chunks: list[int]) -> None:
    """Where official patches are wrong: chunks that begin behind the window, with raw keys cached."""
    q, k, v = tensors()
    encoding = make(name)
    full = Positions.full(N)
    whole = attend(q, k, v, full, encoding(full))
    stop, parts = 0, []
    for count in chunks:
        start, stop = stop, stop + count
        here = Positions.full(stop, queries=count)
        here = here.mapped(here.query, here.key, length=torch.tensor([N]))  # the total length is known
        terms = encoding(here)
        assert not terms.rotated_keys_cacheable
        kept_k, kept_v = terms.prepare(k[:, :, :stop], v[:, :, :stop])
        assert kept_k.data_ptr() == k.data_ptr()
        parts.append(attend(q[:, :, start:stop], kept_k, kept_v, Positions.full(stop, queries=count), terms))
    torch.testing.assert_close(torch.cat(parts, 2), whole, atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", [name for name in MAPS if not name.startswith("stair")])
def test_branches_share_one_softmax_without_a_matrix_of_all_pairs(name: str) -> None:
    """Rows without a far key, gradients included; the blocked backend merges log-sum-exps."""
    q, k, v = (x.float().requires_grad_() for x in tensors())
    positions = Positions.full(N)
    terms = make(name)(positions)
    assert explain(q, k, v, positions, terms).chosen in ("blocked", "native")
    found = []
    for backend in ("blocked", "reference"):
        out = attend(q, k, v, positions, terms, backend=backend)
        found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for mine, wanted in zip(*found, strict=True):
        torch.testing.assert_close(mine, wanted, atol=2e-5, rtol=1e-5)


def test_memory_of_a_long_pass_is_linear() -> None:
    from torch.profiler import ProfilerActivity, profile

    peaks = []
    for n in (1024, 4096):
        q, k, v = torch.randn(3, 1, 1, n, 16).unbind()
        positions = Positions.full(n)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace, torch.no_grad():
            attend(q, k, v, positions, ReRoPE(head_dim=16, window=100)(positions))
        held = peak = 0
        for event in trace.events():
            if event.name == "[memory]":
                held += event.cpu_memory_usage
                peak = max(peak, held)
        peaks.append(peak)
    assert peaks[1] < 4 * n * n / 4  # a matrix of float32 logits would be 64 MiB
    assert peaks[1] < 8 * peaks[0]


@pytest.mark.parametrize("name", ["rerope", "leaky-rerope", "self-extend", "stair", "lampe"])
def test_inside_the_window_it_is_rope(name: str) -> None:
    q, k, v = tensors()
    positions = Positions.full(N)
    plain = attend(q, k, v, positions, RoPE(head_dim=16)(positions))
    encoding = build(name, head_dim=16, window=N, **({"attention_factor": 1.0} if name == "lampe" else {}))
    torch.testing.assert_close(attend(q, k, v, positions, encoding(positions)), plain, atol=1e-9, rtol=0)


def test_log_n_heats_queries_beyond_the_trained_length() -> None:
    q, k, v = tensors()
    positions = Positions.full(N)
    heated = attend(q, k, v, positions, make("rerope", log_n=True, trained_length=8)(positions))
    factor = (torch.arange(1, N + 1).double().log() / math.log(8)).clamp(min=1)
    plain = attend(q * factor[:, None], k, v, positions, make("rerope")(positions))
    torch.testing.assert_close(heated, plain, atol=1e-9, rtol=0)
    with pytest.raises(ValueError, match="trained_length"):
        make("rerope", log_n=True)


def test_maps_run_over_stretched_frequencies() -> None:
    q, k, v = tensors()
    positions = Positions.full(N)
    scaling = {"method": "yarn", "factor": 4.0, "attention_factor": 1.0}
    encoding = make("rerope", trained_length=16, scaling=scaling)
    wanted = by_definition(q, k, v, MAPS["rerope"][1](QUERY, KEY), trained_length=16, scaling=scaling)
    torch.testing.assert_close(attend(q, k, v, positions, encoding(positions)), wanted, atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", ["rerope", "leaky-rerope", "self-extend", "stair", "lampe"])
def test_bidirectional_attention_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="past only"):
        build(name, head_dim=16)(Positions.full(5, causal=False))


def test_bad_options_are_named() -> None:
    for name, options in (
        ("rerope", {"window": 0}),
        ("leaky-rerope", {"factor": 0.5}),
        ("self-extend", {"group": 0}),
        ("stair", {"step": 0}),
        ("stair", {"rounding": "up"}),
        ("lampe", {"fit": "gpt"}),
    ):
        with pytest.raises(ValueError, match=next(iter(options))):
            build(name, head_dim=16, **options)


# ---- maps of biases -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["rerope", "leaky-rerope", "stair"])
def test_a_bias_is_read_at_the_mapped_distance(kind: str, causal: bool) -> None:
    encoding = Remapped(num_heads=4, map=kind, window=5, factor=3.0, step=4)  # type: ignore[arg-type]
    positions = Positions.full(N, causal=causal)
    bias = encoding(positions).bias
    assert isinstance(bias, DistanceBias)  # one line per head: exact and fast on every backend
    distance = {
        "rerope": rerope_distance(QUERY - KEY, 5),
        "leaky-rerope": leaky_rerope_distance(QUERY - KEY, 5, 3.0),
        "stair": stair_distance(QUERY - KEY, 5, 4),
    }[kind]
    slopes = ALiBi(4).slopes()
    wanted = -slopes[:, None, None] * distance.abs()
    if causal:
        wanted = wanted.masked_fill(KEY > QUERY, 0)
    found = bias.dense()[0]
    torch.testing.assert_close((found.masked_fill(KEY > QUERY, 0) if causal else found).double(), wanted.double())


def test_a_learned_bias_stays_learned_under_a_map() -> None:
    encoding = build("remapped-bias", num_heads=4, over="kerple-log", window=5)
    positions = Positions.full(20)
    encoding(positions).bias.table.sum().backward()  # type: ignore[union-attr]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in encoding.parameters())


def test_what_is_no_bias_of_distance_is_refused() -> None:
    for over in ("fire", RoPE(head_dim=16)):
        with pytest.raises(ValueError, match="not a bias of distance alone"):
            build("remapped-bias", num_heads=4, over=over, window=5)(Positions.full(9))
    with pytest.raises(ValueError, match="window"):
        build("remapped-bias", num_heads=4)


# ---- Mesa's prefill -------------------------------------------------------------------------------------------------


def test_triangular_prefill_covers_every_query_once_and_ends_exact() -> None:
    n, encoding = 90, Stair(head_dim=16, window=6, step=5, trained_length=40)
    q, k, v = tensors(n)
    pieces = list(triangular_prefill(encoding, n, first=8, last=20, chunk=25))
    assert [p.kind for p in pieces] == ["first", "middle", "middle", "middle", "last"]
    assert [i for p in pieces for i in range(n)[p.queries]] == list(range(n))
    for piece in pieces:
        keys = [torch.cat([x[:, :, part] for part in piece.keys], 2) for x in (k, v)]
        assert piece.kind == "last" or keys[0].shape[2] <= 8 + 25  # memory grows with the chunk, not with n
        found = attend(q[:, :, piece.queries], *keys, piece.positions, piece.encoding(piece.positions))
        if piece.kind == "middle":
            mine = torch.tensor([*range(8), *range(n)[piece.keys[1]]])
            here = Positions.full(len(mine), queries=found.shape[2])
            rope = RoPE(head_dim=16)
            wanted = attend(q[:, :, piece.queries], k[:, :, mine], v[:, :, mine], here, rope(here))
            torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)
    whole = Positions.full(n)
    exact = attend(q, k, v, whole, encoding(whole))
    torch.testing.assert_close(found, exact[:, :, -20:], atol=1e-9, rtol=0)


def test_triangular_prefill_of_a_short_input_is_one_exact_piece() -> None:
    (piece,) = triangular_prefill(Stair(head_dim=16), 30, first=8, last=40)
    assert piece.kind == "last" and piece.queries == slice(0, 30)
    with pytest.raises(ValueError, match="give chunk"):
        list(triangular_prefill(Stair(head_dim=16), 2000))
    chunk = mesa_chunk(3000, 2048)
    pieces = list(triangular_prefill(Stair(head_dim=16, trained_length=2048), 3000))
    assert max(p.queries.stop - p.queries.start for p in pieces if p.kind == "middle") == chunk
    with pytest.raises(ValueError, match="do not fit"):
        mesa_chunk(3000, 150)


# ---- LaMPE and linear attention -------------------------------------------------------------------------------------


def test_lampe_positions_stay_within_the_mapped_length() -> None:
    """Every relative position is below mapped length + window, however long the input; each row by its own length."""
    n = 5000
    encoding = LaMPE(head_dim=2, trained_length=128, attention_factor=1.0)
    window = encoding.config.near
    positions = Positions.full(n, queries=1)
    (near, far) = encoding(positions).branches
    assert near.far == far.near == window == 16
    q = torch.tensor([1.0, 0.0], dtype=torch.float64).view(1, 1, 1, 2)
    turned = far.key(q.expand(1, 1, n, 2), at="keys")[0, 0]
    assert len(torch.unique(turned.round(decimals=6), dim=0)) <= 128
    short = Positions.full(12)
    x = torch.randn(1, 1, 12, 16, dtype=torch.float64)
    plain = attend(x, x, x, short, RoPE(head_dim=16)(short))
    mine = LaMPE(head_dim=16, trained_length=128, attention_factor=1.0)(short)
    torch.testing.assert_close(attend(x, x, x, short, mine), plain, atol=1e-9, rtol=0)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"kind": "unitary"}, {"kind": "permutation"}, {"kind": "mixed", "projection": "householder"}],
    ids=["rotation", "unitary", "permutation", "mixed"],
)
@pytest.mark.parametrize("n", [1, 64, 150])
def test_linear_attention_is_its_quadratic_form(normalize: bool, options: dict[str, Any], n: int) -> None:
    encoding = LRPE(num_heads=4, head_dim=16, **options).double()
    q, k, v = tensors(n)
    q, k = q.exp(), k.exp()
    terms = encoding(Positions.full(n))
    wanted = quadratic_attention(q, k, v, terms, normalize=normalize)
    found, _ = linear_attention(q, k, v, terms, normalize=normalize)
    torch.testing.assert_close(found, wanted, atol=1e-9, rtol=1e-9)
    cut = n // 3
    first, state = (
        linear_attention(
            q[:, :, :cut], k[:, :, :cut], v[:, :, :cut], encoding(Positions.full(cut)), normalize=normalize, chunk=7
        )
        if cut
        else (v.new_zeros(2, 4, 0, 16), None)
    )
    here = encoding(Positions.full(n, queries=n - cut))
    rest, _ = linear_attention(
        q[:, :, cut:], k[:, :, cut:], v[:, :, cut:], here, normalize=normalize, state=state, chunk=16
    )
    torch.testing.assert_close(torch.cat([first, rest], 2), wanted, atol=1e-9, rtol=1e-9)


def test_linear_attention_refuses_what_it_cannot_use() -> None:
    q, k, v = tensors(5)
    positions = Positions.full(5)
    with pytest.raises(ValueError, match="bias"):
        linear_attention(q, k, v, ALiBi(4)(positions))
    with pytest.raises(ValueError, match="several branches"):
        linear_attention(q, k, v, ReRoPE(head_dim=16)(positions))
