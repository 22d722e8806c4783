"""What is measured: milepost's backends and their peers, each as a function without arguments.

Every peer computes the same causal attention over the same q, k, v; those with a bias hold the same table (or their own
method's bias, where a library builds it itself: it costs the same).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from milepost import DistanceBias, Positions, Terms, attend, build
from milepost.attention import library, rotation
from milepost.attention.blocked import distance_attention

HEADS, SIZE = 8, 64
NEG_INF = float("-inf")
Call = Callable[[], Tensor]


@dataclass
class Contender:
    """`call` is timed; `result` of it is compared with `wanted` (float64, the last rows of each head), if given."""

    name: str
    call: Callable[[], object]
    wanted: Callable[[], Tensor] | None = None
    notes: dict[str, str] = field(default_factory=dict)


def table_of(name: str, length: int) -> Tensor:
    """(H, length): kerple-log decays slowly and leaves no key out; alibi and mep decay fast."""
    distance = torch.arange(length, dtype=torch.float64)
    if name == "kerple-log":
        rate = torch.linspace(0.3, 1.5, HEADS, dtype=torch.float64)[:, None]
        return (-rate * torch.log1p(distance)).float()
    bias = build(name, num_heads=HEADS)(Positions.full(length)).bias
    assert isinstance(bias, DistanceBias)
    return bias.table.detach().float().contiguous()


def tensors(length: int, queries: int | None = None, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q = torch.randn(1, HEADS, queries or length, SIZE)
    k, v = (torch.randn(1, HEADS, length, SIZE) for _ in range(2))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def mask_of(table: Tensor, length: int) -> Tensor:
    """(1, H, L, L): the table gathered, -inf for the future."""
    place = torch.arange(length)
    distance = place[:, None] - place
    return table[:, distance.clamp(min=0)].masked_fill(distance < 0, NEG_INF)[None]


def cured(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The mask with -inf where weights are provably denormal or nothing, as milepost's own view has it."""
    spread = 2 / math.sqrt(SIZE) * float(q.norm(dim=-1).max()) * float(k.norm(dim=-1).max())
    return mask.masked_fill(mask < -(spread + math.log(mask.shape[-1]) + 28), NEG_INF)


def exact_last_rows(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, rows: int = 32) -> Tensor:
    queries, keys = q.shape[2], k.shape[2]
    rows = min(rows, queries)
    place = torch.arange(keys - rows, keys)
    distance = place[:, None] - torch.arange(keys)
    logits = q[:, :, queries - rows :].double() @ k.double().mT / math.sqrt(SIZE)
    if table is not None:
        logits = logits + table.detach().double()[:, distance.clamp(min=0)]
    return logits.masked_fill(distance < 0, NEG_INF).softmax(-1) @ v.double()


def forward(length: int, dtype: torch.dtype) -> list[Contender]:
    q, k, v = tensors(length, dtype=dtype)
    positions = Positions.full(length)
    found = [
        Contender(
            "sdpa, no bias",
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            lambda: exact_last_rows(q, k, v, None),
        )
    ]
    for name in ("kerple-log", "alibi", "mep"):
        table = table_of(name, length)
        terms = Terms(bias=DistanceBias(table, positions, 0))

        def wanted(table: Tensor = table) -> Tensor:
            return exact_last_rows(q, k, v, table)

        backends = ["native", "blocked", "sdpa"] if library.unavailable() is None else ["blocked", "sdpa"]
        for backend in backends if length <= 16384 else backends[:1]:
            found.append(
                Contender(
                    f"milepost {backend}, {name}",
                    lambda backend=backend, terms=terms: attend(q, k, v, positions, terms, backend=backend),
                    wanted,
                )
            )
        if length > 4096:
            continue
        if name == "mep":
            continue
        mask = mask_of(table, length).to(dtype)
        found.append(
            Contender(
                f"sdpa + prebuilt mask, {name}",
                lambda mask=mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
                wanted,
            )
        )
        if name == "alibi":
            fine = cured(mask, q, k)
            found.append(
                Contender(
                    f"sdpa + prebuilt mask without denormals, {name}",
                    lambda mask=fine: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
                    wanted,
                )
            )
        else:
            found.append(
                Contender(
                    f"sdpa + mask built each call, {name}",
                    lambda table=table: F.scaled_dot_product_attention(
                        q, k, v, attn_mask=mask_of(table, length).to(dtype)
                    ),
                    wanted,
                )
            )
    if length <= 4096:
        found += [*x_transformers(q, k, v), *t5(length, dtype)]
    return found


def x_transformers(q: Tensor, k: Tensor, v: Tensor) -> list[Contender]:
    try:
        from x_transformers.attend import Attend
        from x_transformers.x_transformers import AlibiPositionalBias
    except ImportError:
        return []
    length = q.shape[2]
    bias = AlibiPositionalBias(HEADS, HEADS)
    found = []
    for flash in (True, False):
        module = Attend(flash=flash, causal=True, heads=HEADS).eval()
        found.append(
            Contender(
                f"x-transformers {'flash' if flash else 'eager'}, its alibi",
                lambda module=module: module(q, k, v, attn_bias=bias(length, length).to(q.dtype))[0],
            )
        )
    return found


def t5(length: int, dtype: torch.dtype) -> list[Contender]:
    """transformers' own attention with its projections taken out: q = k = v, at the same cost."""
    from torch import nn
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5Attention

    config = T5Config(d_model=HEADS * SIZE, d_kv=SIZE, num_heads=HEADS, is_decoder=True, dropout_rate=0.0)
    module = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
    for name in ("q", "k", "v", "o"):
        setattr(module, name, nn.Identity())
    hidden = torch.randn(1, length, HEADS * SIZE).to(dtype)
    module.relative_attention_bias.to(dtype)
    mask = torch.full((length, length), torch.finfo(dtype).min, dtype=dtype).triu(1)[None, None]
    try:
        with torch.no_grad():
            module(hidden, mask=mask)
    except (TypeError, RuntimeError, AttributeError):
        return []  # another version of transformers calls it another way

    def call() -> object:
        with torch.no_grad():
            return module(hidden, mask=mask)[0]

    return [Contender("transformers T5 eager, its bias", call)]


def flex(length: int) -> list[Contender]:
    """FlexAttention, compiled with fixed shapes: in a process of its own."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = tensors(length)
    table = table_of("kerple-log", length)
    compiled = torch.compile(flex_attention, dynamic=False)
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cpu")

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + table[h, (i - j).clamp(min=0)]

    return [
        Contender("sdpa, no bias", lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
        Contender(
            "FlexAttention compiled, kerple-log",
            lambda: compiled(q, k, v, score_mod=score, block_mask=block_mask),
            lambda: exact_last_rows(q, k, v, table),
        ),
    ]


def training(length: int, dtype: torch.dtype) -> list[Contender]:
    """Forward and backward."""
    q, k, v = (x.requires_grad_() for x in tensors(length, dtype=dtype))
    grad = torch.randn(q.shape).to(dtype)
    positions = Positions.full(length)

    def both(out: Callable[[], Tensor], *more: Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(out(), (q, k, v, *more), grad)

    found = [Contender("sdpa, no bias", both(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)))]
    backends = ["native", "blocked"] if library.unavailable() is None else ["blocked"]
    for name in ("kerple-log", "alibi"):
        for backend in backends:
            for learned in (False, True):
                table = table_of(name, length).requires_grad_(learned)
                terms = Terms(bias=DistanceBias(table, positions, 0))
                found.append(
                    Contender(
                        f"milepost {backend}, {name}, {'learned' if learned else 'fixed'}",
                        both(
                            lambda backend=backend, terms=terms: attend(q, k, v, positions, terms, backend=backend),
                            *([table] if learned else []),
                        ),
                    )
                )
    if length <= 2048:
        fixed = table_of("kerple-log", length)
        mask = mask_of(fixed, length).to(dtype)
        found.append(
            Contender(
                "sdpa + prebuilt mask, kerple-log, fixed",
                both(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)),
            )
        )
        learned_table = fixed.clone().requires_grad_()
        found.append(
            Contender(
                "sdpa + gathered mask, kerple-log, learned",
                both(
                    lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask_of(learned_table, length).to(dtype)),
                    learned_table,
                ),
            )
        )
    return found


def decoding(length: int, dtype: torch.dtype) -> list[Contender]:
    """One query against a cache; `known bound`: the cache keeps the largest norm of its keys."""
    q, k, v = tensors(length, queries=1, dtype=dtype)
    bound = k.float().norm(dim=-1).amax(-1)
    lo = torch.zeros(1, 1, dtype=torch.int64)
    found = [
        Contender(
            "sdpa, no bias",
            lambda: F.scaled_dot_product_attention(q, k, v),
            lambda: exact_last_rows(q, k, v, None),
        )
    ]
    for name in ("kerple-log", "alibi", "mep"):
        table = table_of(name, length)

        def wanted(table: Tensor = table) -> Tensor:
            return exact_last_rows(q, k, v, table)

        row = table.flip(1)[None, :, None].to(dtype)
        found.append(
            Contender(
                f"sdpa + row of biases, {name}",
                lambda row=row: F.scaled_dot_product_attention(q, k, v, attn_mask=row),
                wanted,
            )
        )
        for implementation in ("native", "torch") if library.unavailable() is None else ("torch",):
            for given in (None, bound):
                found.append(
                    Contender(
                        f"milepost {implementation}, {name}{'' if given is None else ', known bound'}",
                        lambda table=table, given=given, implementation=implementation: distance_attention(
                            q,
                            k,
                            v,
                            table,
                            lo,
                            lo + length,
                            first=0,
                            offset=length - 1,
                            scale=SIZE**-0.5,
                            key_bound=given,
                            implementation=implementation,
                        )[0],
                        wanted,
                    )
                )
    return found


def batches(length: int, dtype: torch.dtype) -> list[Contender]:
    """Packed documents and left padding, against one full causal row without bias."""
    q, k, v = tensors(length, dtype=dtype)
    mask = torch.ones(1, length, dtype=torch.bool)
    mask[:, : length // 8] = False
    table = table_of("kerple-log", length)
    places = {
        "packed, 8 documents": Positions.packed([length // 8] * 8),
        "packed, 2 documents": Positions.packed([length // 2] * 2),
        "packed on the device": Positions.from_documents(torch.arange(length)[None] // (length // 8)),
        "left padding": Positions.from_mask(mask, side="left"),
    }
    found = [Contender("sdpa, no bias", lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))]
    for name, positions in places.items():
        terms = Terms(bias=DistanceBias(table, positions, 0))
        for backend in ("native", "blocked") if library.unavailable() is None else ("blocked",):
            found.append(
                Contender(
                    f"milepost {backend}, kerple-log, {name}",
                    lambda backend=backend, terms=terms, positions=positions: attend(
                        q, k, v, positions, terms, backend=backend
                    ),
                )
            )
    return found


def rotating(length: int, dtype: torch.dtype) -> list[Contender]:
    """q and k as a projection leaves them: (B, n, H, D), seen as (B, H, n, D)."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    torch.manual_seed(0)
    q, k = (torch.randn(1, length, HEADS, SIZE).to(dtype).transpose(1, 2) for _ in range(2))
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(SIZE // 2) / (SIZE // 2))
    cos, sin = angles.cos()[None, None], angles.sin()[None, None]
    whole = [torch.cat([x, x], -1)[0].to(dtype) for x in (cos, sin)]

    def wanted() -> Tensor:
        a, b = q.double().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def ours(**options: bool) -> Call:
        return lambda: (rotation.turn(q, cos, sin, **options), rotation.turn(k, cos, sin, **options))[0]

    scratch = q.clone(), k.clone()
    return [
        Contender("clone of q and k", lambda: (q.clone(), k.clone())),
        Contender("transformers apply_rotary_pos_emb", lambda: apply_rotary_pos_emb(q, k, *whole)[0], wanted),
        Contender("milepost", ours(), wanted),
        Contender("milepost, interleaved", ours(interleaved=True)),
        Contender("milepost, in place", lambda: [rotation.turn_into(x, cos, sin, x) for x in scratch]),
    ]


GROUPS: dict[str, Callable[..., list[Contender]]] = {
    "forward": forward,
    "training": training,
    "decoding": decoding,
    "batches": batches,
    "rotation": rotating,
}
