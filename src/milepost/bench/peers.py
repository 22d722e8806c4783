"""Attention with a bias as other libraries do it: x-transformers, transformers' T5 and BLOOM, FlexAttention.

Modules of transformers have their projections replaced by given q, k and v, so that only attention is measured and
the result can be compared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from milepost.bench.case import HEAD_DIM, HEADS, SCALE, Attention, Case, Contender, NotRun, t5_weights

WIDTH = HEADS * HEAD_DIM


def peers(training: bool) -> list[Contender]:
    """Those that run in one process with all others."""
    found = [
        Contender("x-transformers flash", _x_transformers(flash=True), "alibi", square=True),
        Contender("x-transformers eager", _x_transformers(flash=False), "alibi", square=True),
        Contender("transformers BLOOM eager", _bloom, "alibi", square=True),
        Contender("transformers T5 eager", _t5(learned=False), "t5", square=True),
    ]
    if training:
        found.append(Contender("transformers T5 eager", _t5(learned=True), "t5", learned=True, square=True))
    return found


def flex() -> Contender:
    """Compiled for fixed shapes, which wants a process of its own."""
    return Contender("FlexAttention, compiled", _flex, "kerple-log")


def _x_transformers(*, flash: bool) -> Any:
    def make(case: Case) -> tuple[Attention, tuple[Tensor, ...]]:
        try:
            from x_transformers.attend import Attend
            from x_transformers.x_transformers import AlibiPositionalBias
        except ImportError as error:
            raise NotRun("x-transformers is not installed (pip install x-transformers)") from error
        bias = AlibiPositionalBias(HEADS, HEADS)
        module = Attend(flash=flash, causal=True, heads=HEADS).eval()

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out: Tensor = module(q, k, v, attn_bias=bias(q.shape[2], k.shape[2]).to(q.dtype))[0]
            return out

        return function, ()

    return make


class _Given(nn.Module):
    """Stands where a projection stood and returns what it is told."""

    def forward(self, x: Tensor) -> Tensor:
        return self.value

    value: Tensor


def _rows(x: Tensor) -> Tensor:
    """(B, H, L, D) -> (B, L, H D), as a projection leaves it."""
    return x.transpose(1, 2).flatten(2)


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)


def _future(case: Case) -> Tensor:
    """(1, 1, L, L): what these models add to hide the future."""
    shape = (1, 1, case.length, case.length)
    return torch.full(shape, torch.finfo(case.dtype).min, dtype=case.dtype).triu(1)


def _t5(*, learned: bool) -> Any:
    def make(case: Case) -> tuple[Attention, tuple[Tensor, ...]]:
        from transformers import T5Config
        from transformers.models.t5.modeling_t5 import T5Attention

        config = T5Config(d_model=WIDTH, d_kv=HEAD_DIM, num_heads=HEADS, is_decoder=True, dropout_rate=0.0)
        module: Any = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
        given = {name: _Given() for name in ("q", "k", "v")}
        for name, projection in given.items():
            setattr(module, name, projection)
        module.o = nn.Identity()
        module.to(case.dtype)
        weight = module.relative_attention_bias.weight
        weight.requires_grad_(learned)
        with torch.no_grad():
            weight.copy_(t5_weights())
        mask, hidden = _future(case), _rows(case.v)

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # T5 does not scale its products
            given["q"].value, given["k"].value, given["v"].value = _rows(q * SCALE), _rows(k), _rows(v)
            return _heads(module(hidden, mask=mask)[0])

        return function, (weight,) if learned else ()

    return make


def _bloom(case: Case) -> tuple[Attention, tuple[Tensor, ...]]:
    from transformers import BloomConfig
    from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor

    config = BloomConfig(hidden_size=WIDTH, n_head=HEADS, hidden_dropout=0.0, attention_dropout=0.0)
    module: Any = BloomAttention(config, layer_idx=0).eval()
    module.query_key_value, module.dense = _Given(), nn.Identity()
    # BLOOM writes its bias for the keys alone, k_j instead of -(i - j): equal after the softmax
    alibi = build_alibi_tensor(torch.ones(1, case.length, dtype=torch.long), HEADS, case.dtype)
    mask = _future(case)
    hidden = residual = torch.zeros(1, case.length, WIDTH, dtype=case.dtype)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        fused = torch.stack([x.transpose(1, 2) for x in (q, k, v)], dim=3)  # (B, L, H, 3, D)
        module.query_key_value.value = fused.flatten(2)
        return _heads(module(hidden, residual, alibi, mask)[0])

    return function, ()


def _flex(case: Case) -> tuple[Attention, tuple[Tensor, ...]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length, table = case.length, case.table("kerple-log")
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cpu")

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + table[h, (i - j).clamp(min=0)]

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = compiled(q, k, v, score_mod=score, block_mask=block_mask)
        return out

    return function, ()
