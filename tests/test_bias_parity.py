"""Other people's code on the same positions: transformers' T5, BLOOM, MPT and Falcon, x-transformers, attention-gym."""

from __future__ import annotations

import pytest
import torch
from attn_gym.mods import generate_alibi_bias, generate_sandwich_bias
from transformers import T5Config as HFT5Config
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_alibi
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_alibi
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention
from x_transformers.x_transformers import AlibiPositionalBias, RelativePositionBias

from milepost import Positions, build
from milepost.kernels import alibi_slopes, t5_bucket

HEADS = (1, 2, 3, 6, 8, 12, 16, 20, 25, 40, 64, 71)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(
    ("buckets", "reach"), [(32, 128), (64, 256), (32, 1024), (8, 16), (16, 20), (64, 129), (12, 500)]
)
def test_t5_buckets_are_those_of_transformers(buckets: int, reach: int, bidirectional: bool) -> None:
    distance = torch.arange(-3000, 3000)
    theirs = T5Attention._relative_position_bucket(-distance, bidirectional, buckets, reach)
    ours = t5_bucket(distance, num_buckets=buckets, max_distance=reach, bidirectional=bidirectional)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("decoder", [False, True])
def test_t5_bias_is_that_of_transformers(decoder: bool) -> None:
    config = HFT5Config(d_model=64, d_kv=16, num_heads=4, is_decoder=decoder)
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    ours = build("t5", num_heads=4, width=64)
    with torch.no_grad():
        ours.kernel.table.copy_(theirs.relative_attention_bias.weight)
    positions = Positions.full(300, queries=70, causal=decoder)
    wanted = theirs.compute_bias(70, 300, past_seen_tokens=230)
    found = ours(positions).bias.dense()
    allowed = positions.allowed()[:, None]
    assert torch.equal(found.masked_fill(~allowed, 0), wanted.masked_fill(~allowed, 0))


def test_t5_starts_as_published() -> None:
    for options, std in (({"width": 64}, 0.125), ({}, (2 / 288) ** 0.5)):
        table = build("t5", num_heads=256, **options).kernel.table
        assert table.std().item() == pytest.approx(std, rel=0.05)


@pytest.mark.parametrize("causal", [False, True])
def test_t5_bias_is_that_of_x_transformers(causal: bool) -> None:
    theirs = RelativePositionBias(scale=16**0.5, causal=causal, num_buckets=32, max_distance=128, heads=4)
    ours = build("t5", num_heads=4, head_dim=16, scale="sqrt-head-dim")
    with torch.no_grad():
        ours.kernel.table.copy_(theirs.relative_attention_bias.weight)
    positions = Positions.full(200, queries=50, causal=causal)
    allowed = positions.allowed()[:, None]
    found, wanted = ours(positions).bias.dense(), theirs(50, 200)[None]
    assert torch.equal(found.masked_fill(~allowed, 0), wanted.masked_fill(~allowed, 0))


@pytest.mark.parametrize("heads", HEADS)
def test_alibi_is_that_of_bloom(heads: int) -> None:
    theirs = bloom_alibi(torch.ones(1, 40), heads, torch.float32)
    ours = build("alibi", num_heads=heads)(Positions.full(40)).bias.dense()
    # BLOOM adds slope * key, which is the same but for a constant in each row.
    torch.testing.assert_close(ours[0, :, -1], theirs[:, 0] - theirs[:, 0, -1:], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("heads", HEADS)
def test_alibi_in_mpt_order_is_that_of_mpt(heads: int) -> None:
    theirs = build_mpt_alibi_tensor(heads, 40)
    ours = build("alibi", num_heads=heads, order="mpt")(Positions.full(40)).bias.dense()
    torch.testing.assert_close(ours[0, :, -1], theirs[:, 0], rtol=2e-6, atol=0)


@pytest.mark.parametrize("heads", [8, 12, 32, 71])
def test_alibi_for_falcon_is_its_bfloat16_bit_for_bit(heads: int) -> None:
    mask = torch.ones(2, 2048, dtype=torch.int64)
    mask[1, :100] = 0
    theirs = falcon_alibi(mask, heads, torch.float32).view(2, heads, 1, -1)
    positions = Positions.from_mask(mask, side="left", queries=1)
    ours = build("alibi", num_heads=heads, compat="falcon-bf16")(positions).bias.dense()
    present = mask[:, None, None].bool()
    assert torch.equal(ours.masked_fill(~present, 0), theirs.masked_fill(~present, 0))


@pytest.mark.parametrize("heads", HEADS)
def test_alibi_is_that_of_x_transformers(heads: int) -> None:
    theirs = AlibiPositionalBias(heads)(30, 50)
    ours = build("alibi", num_heads=heads)(Positions.full(50, queries=30, causal=False)).bias.dense()
    torch.testing.assert_close(ours[0], theirs, rtol=2e-6, atol=0)


def test_slopes_of_one_geometric_sequence_differ_where_heads_are_no_power_of_two() -> None:
    assert alibi_slopes(8, "paper") == alibi_slopes(8)
    assert alibi_slopes(6, "paper") != alibi_slopes(6)


def test_alibi_and_sandwich_are_those_of_attention_gym() -> None:
    heads, length = 8, 300
    h = torch.arange(heads)[:, None, None]
    query, key = torch.arange(length)[None, :, None], torch.arange(length)[None, None, :]
    positions = Positions.full(length)
    past = positions.allowed()
    for name, options, theirs in (
        ("alibi", {}, generate_alibi_bias(heads)),
        ("sandwich", {"index_start": 0}, generate_sandwich_bias(heads, length)),
    ):
        wanted = theirs(torch.zeros(heads, length, length), torch.zeros(()), h, query, key)
        wanted = wanted - wanted.diagonal(dim1=1, dim2=2)[:, :1, None]  # theirs is not 0 at distance 0
        found = build(name, num_heads=heads, **options)(positions).bias.dense()[0]
        torch.testing.assert_close(found.masked_fill(~past, 0), wanted.masked_fill(~past, 0), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_t5_bias_is_that_of_torchscale(bidirectional: bool) -> None:
    reason = "torchscale pins old versions of its other dependencies; install it with --no-deps to run this"
    module = pytest.importorskip("torchscale.component.relative_position_bias", reason=reason)
    theirs = module.RelativePositionBias(bidirectional=bidirectional, n_heads=4)
    ours = build("t5", num_heads=4)
    with torch.no_grad():
        ours.kernel.table.copy_(theirs.relative_attention_bias.weight)
    positions = Positions.full(300, queries=70, causal=not bidirectional)
    allowed = positions.allowed()[0].expand(4, -1, -1)
    wanted = theirs.compute_bias(70, 300, step=230)[0]
    assert torch.equal(ours(positions).bias.dense()[0][allowed], wanted[allowed])
