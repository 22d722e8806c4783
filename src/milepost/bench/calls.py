"""The groups whose rows are times of single calls: forward, training, flex, decoding, batches, rotation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from milepost.attention import attend, library, rotation
from milepost.attention.blocked import distance_attention
from milepost.bench import floor, ours, peers
from milepost.bench.case import HEAD_DIM, HEADS, SCALE, Case, Contender, NotRun
from milepost.bench.exact import Exact
from milepost.bench.race import Racer
from milepost.positions import Positions
from milepost.terms import DistanceBias, Terms


def contenders(training: bool) -> list[Contender]:
    """All that run side by side; the first is what the others are compared with."""
    return [ours.plain(), *ours.mileposts(training), *ours.masked(training), *peers.peers(training)]


def forward(length: int, dtype: torch.dtype) -> list[Racer]:
    return _attention(Case(length, dtype), contenders(training=False))


def training(length: int, dtype: torch.dtype) -> list[Racer]:
    """Forward and backward."""
    return _attention(Case(length, dtype, training=True), contenders(training=True))


def flex(length: int, dtype: torch.dtype) -> list[Racer]:
    """FlexAttention beside the two it is compared with."""
    return _racers(Case(length, dtype), _flex_contenders())


def flex_training(length: int, dtype: torch.dtype) -> list[Racer]:
    """The same, forward and backward: torch 2.13 has no backward of FlexAttention on a CPU, and says so."""
    return _racers(Case(length, dtype, training=True), _flex_contenders())


def _flex_contenders() -> list[Contender]:
    return [ours.plain(), ours.milepost("native", "kerple-log"), peers.flex()]


def _attention(case: Case, found: list[Contender]) -> list[Racer]:
    return [*_racers(case, found), floor.racer(case)]


def _racers(case: Case, found: list[Contender]) -> list[Racer]:
    exact = Exact(case)
    racers = []
    for contender in found:
        racer = Racer(
            contender.name,
            None,
            contender.bias,
            contender.learned,
            exact.error(contender.bias),
            ours=contender.ours,
            best=contender.best,
        )
        try:
            racer.call = contender.call(case)
        except NotRun as reason:
            racer.absent = str(reason)
        except Exception as error:  # a peer of another version; ours must not fail
            if contender.ours:
                raise
            racer.absent = f"{type(error).__name__}: {error}"
        racers.append(racer)
    return racers


def decoding(length: int, dtype: torch.dtype) -> list[Racer]:
    """One query against a cache; `known bound`: the cache keeps the largest norm of its keys."""
    case = Case(length, dtype, queries=1)
    q, k, v = case.q, case.k, case.v
    exact = Exact(case)
    bound = k.float().norm(dim=-1).amax(-1)
    lo = torch.zeros(1, 1, dtype=torch.int64)
    positions = Positions.step(length - 1)
    racers = [Racer("sdpa, no bias", lambda: F.scaled_dot_product_attention(q, k, v), error=exact.error(None))]

    def add(name: str, bias: str, call: Callable[[], object], ours: bool = False, best: bool = False) -> None:
        racers.append(Racer(name, call, bias, error=exact.error(bias), ours=ours, best=best))

    def one(bias: str) -> None:
        table = case.table(bias)
        terms = Terms(bias=DistanceBias(table, positions, 0))
        row = table.flip(1)[None, :, None].to(dtype)
        places = (length - 1 - torch.arange(length)).clamp(min=0)

        def direct(implementation: str, key_bound: Tensor | None) -> Callable[[], object]:
            options: dict[str, Any] = {"key_bound": key_bound, "implementation": implementation}
            shape: dict[str, Any] = {"first": 0, "offset": length - 1, "scale": SCALE}
            return lambda: distance_attention(q, k, v, table, lo, lo + length, **shape, **options)[0]

        implementations = ("native", "torch") if library.unavailable() is None else ("torch",)
        for implementation in implementations:
            best = implementation == implementations[0]
            add(f"milepost {implementation}, known bound", bias, direct(implementation, bound), ours=True, best=best)
            add(f"milepost {implementation}", bias, direct(implementation, None), ours=True)
        add("milepost attend, known bound", bias, lambda: attend(q, k, v, positions, terms, key_bound=bound), ours=True)
        add("milepost attend", bias, lambda: attend(q, k, v, positions, terms), ours=True)
        add("sdpa + row of biases", bias, lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=row))
        add(
            "sdpa + row built each call",
            bias,
            lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=table[:, places][None, :, None].to(dtype)),
        )

    for bias in ours.DECAYING:
        one(bias)
    return racers


def batches(length: int, dtype: torch.dtype) -> list[Racer]:
    """Packed documents and left padding, against one full causal row without bias."""
    case = Case(length, dtype)
    q, k, v = case.q, case.k, case.v
    present = torch.ones(1, length, dtype=torch.bool)
    present[:, : length // 8] = False
    table = case.table("kerple-log")
    places = {
        "packed, 8 documents": Positions.packed([length // 8] * 8),
        "packed, 2 documents": Positions.packed([length // 2] * 2),
        "packed on the device": Positions.from_documents(torch.arange(length)[None] // (length // 8)),
        "left padding": Positions.from_mask(present, side="left"),
    }
    racers = [Racer("sdpa, no bias, one whole row", lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))]

    def add(backend: str, place: str, positions: Positions) -> None:
        terms = Terms(bias=DistanceBias(table, positions, 0))
        call = partial(attend, q, k, v, positions, terms, backend=backend)
        racers.append(Racer(f"milepost {backend}, {place}", call, "kerple-log", ours=True))

    for place, positions in places.items():
        for backend in ("native", "blocked") if library.unavailable() is None else ("blocked",):
            add(backend, place, positions)
    return racers


def rotating(length: int, dtype: torch.dtype) -> list[Racer]:
    """q and k as a projection leaves them, (B, n, H, D), seen as (B, H, n, D)."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    random = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, length, HEADS, HEAD_DIM, generator=random).to(dtype).transpose(1, 2) for _ in range(2))
    half = HEAD_DIM // 2
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[None, None], angles.sin()[None, None]
    whole = [torch.cat([x, x], -1)[0].to(dtype) for x in (cos, sin)]

    def error(found: object) -> float:
        assert isinstance(found, tuple)
        a, b = q.double().chunk(2, -1)
        return float((found[0].double() - torch.cat([a * cos - b * sin, b * cos + a * sin], -1)).abs().max())

    def turned(**options: bool) -> Callable[[], object]:
        return lambda: (rotation.turn(q, cos, sin, **options), rotation.turn(k, cos, sin, **options))

    scratch = q.clone(), k.clone()
    racers = [
        Racer("clone of q and k", lambda: (q.clone(), k.clone())),
        Racer("milepost", turned(), "rope", error=error, ours=True, best=True),
        Racer("milepost, in place", lambda: [rotation.turn_into(x, cos, sin, x) for x in scratch], ours=True),
        Racer("milepost, interleaved", turned(interleaved=True), ours=True),
        Racer("transformers apply_rotary_pos_emb", lambda: apply_rotary_pos_emb(q, k, *whole), "rope", error=error),
    ]
    try:
        from x_transformers.x_transformers import apply_rotary_pos_emb as turn
    except ImportError:
        missing = "x-transformers is not installed (pip install x-transformers)"
        return [*racers, Racer("x-transformers apply_rotary_pos_emb", None, absent=missing)]
    # Its pairs are channels (2p, 2p + 1)
    paired = angles.repeat_interleave(2, -1)[None]
    name = "x-transformers apply_rotary_pos_emb, interleaved"
    return [*racers, Racer(name, lambda: (turn(q, paired), turn(k, paired)), "rope")]


CALLS: dict[str, Callable[[int, torch.dtype], list[Racer]]] = {
    "forward": forward,
    "training": training,
    "flex": flex,
    "flex-training": flex_training,
    "decoding": decoding,
    "batches": batches,
    "rotation": rotating,
}
