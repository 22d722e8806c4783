"""Shaw, Transformer-XL, TUPE and DeBERTa: vectors, other people's code on the same numbers, and properties."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DebertaConfig, DebertaV2Config, Wav2Vec2BertConfig, XLNetConfig, XLNetModel
from transformers.models.deberta.modeling_deberta import DisentangledSelfAttention
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention as DisentangledSelfAttentionV2
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position
from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import Wav2Vec2BertSelfAttention
from transformers.models.xlnet.modeling_xlnet import XLNetRelativeAttention

from milepost import Encoding, Mapped, PerLayer, PositionMap, Positions, attend, build
from milepost.attention import rows
from milepost.encoding import from_spec
from milepost.encodings.relative import DeBERTa, Shaw, TransformerXL, deberta
from milepost.kernels import t5_bucket
from milepost.model import MilepostConfig, MilepostForCausalLM
from milepost.testing import check_encoding
from tests.vectors import cases, check, vector_id

GEOMETRY = {"num_heads": 4, "head_dim": 8, "width": 32, "num_layers": 3, "trained_length": 64}
SPECS = (
    "shaw",
    "shaw:clip=(-3,9)",
    "shaw:heads_share=False:values=False",
    "transformer-xl",
    "transformer-xl:clamp=7",
    "tupe",
    "tupe-r",
    "tupe-r:cls_reset=False",
    "deberta",
    "deberta:clip=5",
    "deberta:c2p=False",
)


def make(spec: str, std: float = 0.5, **geometry: int) -> Encoding:
    encoding = from_spec(spec, {**GEOMETRY, **geometry})
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_(std=std)
    return encoding.double()


def qkv(queries: int, keys: int, *, heads: int = 4, kv: int = 4, head_dim: int = 8, batch: int = 2) -> list[Tensor]:
    sizes = ((heads, queries), (kv, keys), (kv, keys))
    return [torch.randn(batch, h, n, head_dim, dtype=torch.float64) for h, n in sizes]


# ---- stored vectors -------------------------------------------------------------------------------------------------


def shaw_index(i: dict[str, Any]) -> Tensor:
    encoding = Shaw(num_heads=1, head_dim=2, clip=i["max_relative_position"])
    return encoding.row(i["i"] - torch.tensor(i["j"]))


def shaw_attention(i: dict[str, Any]) -> dict[str, Tensor]:
    encoding = Shaw(num_heads=1, head_dim=2, clip=i["clip"]).double()
    with torch.no_grad():
        encoding.key.copy_(torch.tensor(i["aK"], dtype=torch.float64))
        encoding.value.copy_(torch.tensor(i["aV"], dtype=torch.float64))
    q, k, v = (torch.tensor(i[name], dtype=torch.float64)[None, None] for name in "qkv")
    positions = Positions.full(3, causal=i["causal"])
    terms = encoding(positions)
    allowed = positions.allowed()[:, None]
    scale = 2**-0.5
    logits = terms.scores(q @ k.mT * scale, None, q=q, k=k, positions=positions, allowed=allowed, scale=scale)
    logits = logits.masked_fill(~allowed, -torch.inf)
    return {"logits": logits[0, 0], "out": attend(q, k, v, positions, terms)[0, 0]}


VECTOR_HANDLERS = {"shaw_index": shaw_index, "shaw_attention": shaw_attention}


@pytest.mark.parametrize("vector", cases("vectors-a.json", VECTOR_HANDLERS), ids=vector_id)
def test_vector(vector: dict[str, Any]) -> None:
    check(vector, VECTOR_HANDLERS)


# ---- other people's code --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("left", "right"), [(16, 16), (5, 2), (64, 8)])
def test_shaw_keys_are_those_of_wav2vec2_bert(left: int, right: int) -> None:
    config = Wav2Vec2BertConfig(
        hidden_size=32,
        num_attention_heads=4,
        position_embeddings_type="relative_key",
        left_max_position_embeddings=left,
        right_max_position_embeddings=right,
        attn_implementation="eager",
    )
    theirs = Wav2Vec2BertSelfAttention(config).double().eval()
    torch.nn.init.normal_(theirs.distance_embedding.weight)
    ours = Shaw(num_heads=4, head_dim=8, clip=(-right, left), values=False).double()
    with torch.no_grad():
        ours.key.copy_(theirs.distance_embedding.weight)
    x = torch.randn(2, 30, 32, dtype=torch.float64)
    wanted, _ = theirs(x)
    q, k, v = (f(x).unflatten(-1, (4, 8)).transpose(1, 2) for f in (theirs.linear_q, theirs.linear_k, theirs.linear_v))
    positions = Positions.full(30, causal=False)
    found = theirs.linear_out(attend(q, k, v, positions, ours(positions)).transpose(1, 2).flatten(2))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("memory", [0, 7])
def test_transformer_xl_is_the_relative_attention_of_xlnet(causal: bool, memory: int) -> None:
    config = XLNetConfig(vocab_size=10, d_model=32, n_head=4, d_inner=8, n_layer=1, attn_type="uni" if causal else "bi")
    theirs = XLNetRelativeAttention(config).double().eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    queries, keys = 20, 20 + memory
    code = XLNetModel(config).relative_positional_encoding(queries, keys, bsz=2).double()
    q, k, v = qkv(queries, keys)
    mask = torch.ones(queries, keys, dtype=torch.float64).triu(memory + 1) if causal else torch.zeros(queries, keys)
    wanted = theirs.rel_attn_core(
        *(x.permute(2, 0, 1, 3) for x in (q, k, v)),
        torch.einsum("ibh,hnd->ibnd", code, theirs.r),
        attn_mask=mask.double()[:, :, None, None].expand(-1, -1, 2, 4),
    )
    ours = TransformerXL(num_heads=4, head_dim=8, width=32).double()
    with torch.no_grad():
        ours.u.copy_(theirs.r_w_bias)
        ours.v.copy_(theirs.r_r_bias)
        ours.w_r.copy_(theirs.r.flatten(1).mT)
    positions = Positions.full(keys, queries=queries, causal=causal)
    found = attend(q, k, v, positions, ours(positions)).permute(2, 0, 1, 3)
    # Their sinusoids are made in float32.
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("parts", [("c2p", "p2c"), ("c2p",), ("p2c",)])
@pytest.mark.parametrize("clip", [4, 512])
def test_deberta_is_that_of_transformers(clip: int, parts: tuple[str, ...]) -> None:
    config = DebertaConfig(
        hidden_size=32,
        num_attention_heads=4,
        relative_attention=True,
        max_relative_positions=clip,
        pos_att_type=list(parts),
    )
    theirs = DisentangledSelfAttention(config).double().eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    table = torch.randn(2 * clip, 32, dtype=torch.float64)
    x = torch.randn(2, 23, 32, dtype=torch.float64)
    distance = (torch.arange(23)[:, None] - torch.arange(23))[None]
    mask = torch.ones(2, 1, 23, 23).tril()
    wanted, _ = theirs(x, mask, relative_pos=distance, rel_embeddings=table)
    q, k, v = theirs.in_proj(x).unflatten(-1, (4, 24)).transpose(1, 2).chunk(3, dim=-1)
    q = q + theirs.q_bias.view(4, 1, 8)
    v = v + theirs.v_bias.view(4, 1, 8)
    ours = DeBERTa(num_heads=4, head_dim=8, width=32, clip=clip, c2p="c2p" in parts, p2c="p2c" in parts).double()
    with torch.no_grad():
        ours.table.copy_(table)
        if "c2p" in parts:
            ours.key[0].weight.copy_(theirs.pos_proj.weight)
        if "p2c" in parts:
            ours.query[0].load_state_dict(theirs.pos_q_proj.state_dict())
    positions = Positions.full(23)
    found = attend(q, k, v, positions, ours(positions)).transpose(1, 2).flatten(2)
    # Their scale is made in float32.
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_deberta_is_that_of_version_2_whose_bias_on_keys_changes_nothing() -> None:
    config = DebertaV2Config(
        hidden_size=32,
        num_attention_heads=4,
        relative_attention=True,
        max_relative_positions=6,
        position_buckets=-1,
        share_att_key=False,
        pos_att_type=["c2p", "p2c"],
    )
    theirs = DisentangledSelfAttentionV2(config).double().eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    table = torch.randn(12, 32, dtype=torch.float64)
    x = torch.randn(2, 23, 32, dtype=torch.float64)
    distance = build_relative_position(x, x)
    wanted, _ = theirs(x, torch.ones(2, 1, 23, 23), relative_pos=distance, rel_embeddings=table)
    projections = (theirs.query_proj, theirs.key_proj, theirs.value_proj)
    q, k, v = (f(x).unflatten(-1, (4, 8)).transpose(1, 2) for f in projections)
    ours = DeBERTa(num_heads=4, head_dim=8, width=32, clip=6).double()
    with torch.no_grad():
        ours.table.copy_(table)
        ours.key[0].weight.copy_(theirs.pos_key_proj.weight)
        ours.query[0].load_state_dict(theirs.pos_query_proj.state_dict())
    positions = Positions.full(23, causal=False)
    found = attend(q, k, v, positions, ours(positions)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_tupe_is_its_equation_written_out(causal: bool, reset: bool) -> None:
    encoding = make(f"tupe-r:cls_reset={reset}:num_buckets=8:max_distance=16")
    q, k, v = qkv(12, 12, batch=1)
    position = torch.nn.functional.layer_norm(encoding.position, (32,), encoding.norm.weight, encoding.norm.bias)
    side = 4 if not causal else 8
    for head in range(4):
        part = slice(8 * head, 8 * head + 8)

        def product(a: int, b: int, part: slice = part) -> Tensor:
            left = encoding.query.weight[part] @ position[a] + encoding.query.bias[part]
            return left @ (encoding.key.weight[part] @ position[b] + encoding.key.bias[part])

        for i in range(12):
            logits = []
            for j in range(i + 1 if causal else 12):
                bucket = t5_bucket(torch.tensor(float(i - j)), num_buckets=8, max_distance=16, bidirectional=not causal)
                assert (int(bucket) >= side) == (not causal and j > i)
                place, row = product(i + 1, j + 1), int(bucket)
                if reset and i == 0:
                    place, row = product(0, 0), 4
                elif reset and j == 0:
                    place, row = product(1, 1), 8
                logits.append((q[0, head, i] @ k[0, head, j] + place) / 16**0.5 + encoding.relative[row, head])
            wanted = torch.softmax(torch.stack(logits), 0) @ v[0, head, : len(logits)]
            if i in (0, 1, 11):
                positions = Positions.full(12, causal=causal)
                found = attend(q, k, v, positions, encoding(positions))[0, head, i]
                torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


# ---- properties -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_grid_of_options(spec: str) -> None:
    encoding = make(spec, std=0.1, head_dim=16, width=64).float().for_layer(0)
    report = check_encoding(encoding)
    report.raise_if_failed()
    assert not report.refused, str(report)


def test_shaw_counts_into_the_past_from_row_zero() -> None:
    """A table that favours one row shows which distance reads it: a port that adds i and j would not pass."""
    encoding = Shaw(num_heads=1, head_dim=1, clip=4, values=False).double()
    q, k = torch.ones(1, 1, 12, 1, dtype=torch.float64), torch.zeros(1, 1, 12, 1, dtype=torch.float64)
    v = torch.arange(12, dtype=torch.float64).view(1, 1, 12, 1)
    for row, distance in ((1, 3), (3, 1), (4, 0), (6, -2), (7, -3)):
        with torch.no_grad():
            encoding.key.zero_()[row] = 60.0
        positions = Positions.full(12, causal=False)
        found = attend(q, k, v, positions, encoding(positions), scale=1.0)[0, 0, 4:8, 0]
        torch.testing.assert_close(found, torch.arange(4, 8, dtype=torch.float64) - distance, rtol=0, atol=1e-9)


def test_shaw_values_are_read_like_its_keys_and_dropped_with_their_weights() -> None:
    encoding = make("shaw:clip=3")
    q, k, v = qkv(9, 9)
    with torch.no_grad():
        encoding.value.copy_(torch.ones(7, 8))
    positions = Positions.full(9)
    terms = encoding(positions)
    outs = []
    for values in (terms, replace(terms, weights=None)):
        torch.manual_seed(3)
        outs.append(attend(q, k, torch.ones_like(v), positions, values, dropout=0.5))
    torch.testing.assert_close(outs[0], 2 * outs[1], rtol=0, atol=1e-12)
    assert outs[1].std() > 0.1


def test_shaw_starts_as_published_and_has_its_number_of_parameters() -> None:
    encoding = Shaw(num_heads=12, head_dim=64)
    assert sum(p.numel() for p in encoding.parameters()) == 4224
    bound = math.sqrt(6 / (33 + 64))
    assert 0.95 * bound < encoding.key.abs().max() <= bound
    assert Shaw(num_heads=12, head_dim=64, clip=(0, 16)).key.shape == (17, 64)
    own = Shaw(num_heads=12, head_dim=64, heads_share=False)
    assert own.key.shape == (33, 12, 64)
    assert own.key.abs().max() <= math.sqrt(6 / (33 * (12 + 64)))


def test_shaw_heads_with_tables_of_their_own_can_be_permuted() -> None:
    encoding = make("shaw:heads_share=False")
    q, k, v = qkv(10, 10)
    positions = Positions.full(10)
    before = attend(q, k, v, positions, encoding(positions))
    order = torch.tensor([2, 0, 3, 1])
    with torch.no_grad():
        encoding.key.copy_(encoding.key[:, order])
        encoding.value.copy_(encoding.value[:, order])
    after = attend(q[:, order], k[:, order], v[:, order], positions, encoding(positions))
    torch.testing.assert_close(after, before[:, order], rtol=0, atol=1e-12)


class Moved(PositionMap):
    """All positions by one number."""

    by: float = 5

    def forward(self, positions: Positions, tokens: Tensor | None = None) -> Positions:
        return positions.mapped(positions.query + self.by, positions.key + self.by)


class Stretched(PositionMap):
    def forward(self, positions: Positions, tokens: Tensor | None = None) -> Positions:
        return positions.mapped(positions.query * 2, positions.key * 2)


@pytest.mark.parametrize("by", [5, 0.25])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spec", [s for s in SPECS if not s.startswith("tupe")])
def test_only_differences_of_positions_count(spec: str, causal: bool, by: float) -> None:
    """The way over products of sines and cosines, or rows by number, equals the way over slots."""
    encoding = make(spec)
    moved = Moved()
    moved.by = by
    q, k, v = qkv(8, 20, kv=2)
    positions = Positions.full(20, queries=8, causal=causal)
    found = attend(q, k, v, positions, Mapped(moved, encoding)(positions))
    torch.testing.assert_close(found, attend(q, k, v, positions, encoding(positions)), rtol=0, atol=1e-12)


def test_a_distance_between_two_rows_is_read_between_them() -> None:
    encoding = make("shaw:clip=4")
    q, k, v = qkv(1, 1)
    for share in (0.0, 0.25, 1.0):
        positions = Positions.full(1, causal=False).mapped(torch.tensor([[1.0 + share]]), torch.zeros(1, 1))
        found = attend(q, k, v, Positions.full(1, causal=False), encoding(positions))
        wanted = v + (1 - share) * encoding.value[3] + share * encoding.value[2]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", SPECS)
def test_blocks_of_queries_read_their_own_mapped_positions(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = Mapped(Stretched(), make(spec).for_layer(0))
    q, k, v = qkv(50, 60)
    q, k, v = (x[..., :30, :] if x.shape[2] == 60 else x[..., :25, :] for x in (q, k, v))
    monkeypatch.setattr(rows, "BLOCK_NUMBERS", 1)
    for start in (5, torch.tensor([5])):
        positions = replace(Positions.full(30, queries=25), query_start=start)
        terms = encoding(positions)
        found = attend(q, k, v, positions, terms, backend="rows")
        torch.testing.assert_close(found, attend(q, k, v, positions, terms, backend="reference"), rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", [s for s in SPECS if s != "deberta"])  # 1024 rows, of which 5 are in reach
def test_gradients(spec: str) -> None:
    spec = "deberta:c2p=False:clip=3" if "c2p" in spec else spec.replace("deberta:clip=5", "deberta:clip=3")
    encoding = make(spec, num_heads=2, head_dim=2, width=4, trained_length=5, num_layers=1)
    q, k, v = (x.requires_grad_() for x in qkv(5, 5, heads=2, kv=1, head_dim=2, batch=1))
    positions = Positions.full(5, causal="cls" in spec)

    def run(q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> Tensor:
        return attend(q, k, v, positions, encoding(positions))

    assert torch.autograd.gradcheck(run, (q, k, v, *encoding.parameters()))


class Largest(TorchDispatchMode):
    """The largest number of elements that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf._base is None:
                self.numel = max(self.numel, leaf.untyped_storage().size() // leaf.element_size())
        return out


@pytest.mark.parametrize("spec", [s for s in SPECS if "tupe" not in s])
def test_memory_is_that_of_a_block_of_logits(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    length, block = 2048, 128
    encoding = make(spec, num_layers=1).float()
    monkeypatch.setattr(rows, "BLOCK_NUMBERS", 4 * block * length)
    monkeypatch.setattr(deberta, "CHUNK_NUMBERS", 4 * block * length)
    q, k, v = (x.float() for x in qkv(length, length, batch=1))
    positions = Positions.full(length)
    with torch.no_grad(), Largest() as seen:
        attend(q, k, v, positions, encoding(positions), backend="rows")
    assert 4 * block * length <= seen.numel <= 2 * 4 * block * length


@pytest.mark.parametrize("spec", ["transformer-xl", "transformer-xl:clamp=7", "tupe-r", "deberta:clip=6"])
def test_few_queries_take_the_cheaper_order_of_products(spec: str) -> None:
    """One query, fewer than a head is wide, and as many: the same rows."""
    encoding = make(spec)
    q, k, v = qkv(20, 30, kv=2)
    many = Positions.full(30, queries=20)
    wanted = attend(q, k, v, many, encoding(many))
    for count in (1, 7, 8):
        few = Positions.full(30, queries=count)
        found = attend(q[:, :, -count:], k, v, few, encoding(few))
        torch.testing.assert_close(found, wanted[:, :, -count:], rtol=0, atol=1e-12)


# ---- DeBERTa's shared table, and refusals ---------------------------------------------------------------------------


def test_deberta_has_one_table_and_projections_for_each_layer(tmp_path: Path) -> None:
    config = MilepostConfig(
        vocab_size=16, width=32, num_layers=3, num_heads=4, trained_length=32, encoding="deberta:clip=8"
    )
    torch.manual_seed(0)
    model = MilepostForCausalLM(config).eval()
    names = [name for name, _ in model.named_parameters() if name.endswith("table")]
    assert len(names) == 1
    encoding = DeBERTa(num_heads=4, head_dim=8, width=32, num_layers=3, clip=8)
    counted = sum(p.numel() for name, p in model.named_parameters() if "encodings" in name)
    assert counted == sum(p.numel() for p in encoding.parameters()) == 16 * 32 + 3 * (2 * 32 * 32 + 32)
    tokens = torch.randint(16, (2, 20))
    wanted = model(tokens).logits
    wanted.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for name, p in model.named_parameters() if "encodings" in name)
    model.save_pretrained(tmp_path)
    again = MilepostForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(tokens).logits, wanted, rtol=0, atol=1e-6)


def test_deberta_layers_differ_and_are_counted() -> None:
    encoding = make("deberta:clip=6")
    q, k, v = qkv(9, 9)
    positions = Positions.full(9)
    outs = [attend(q, k, v, positions, encoding.for_layer(layer)(positions)) for layer in range(3)]
    assert (outs[0] - outs[1]).abs().max() > 1e-3 and (outs[1] - outs[2]).abs().max() > 1e-3
    torch.testing.assert_close(outs[0], attend(q, k, v, positions, encoding(positions)))
    assert len(list(encoding.for_layer(1).parameters())) == 0
    schedule = PerLayer([encoding, build("nope")])
    scheduled = attend(q, k, v, positions, schedule.for_layer(2)(positions))
    assert torch.equal(scheduled, outs[2]) and schedule.for_layer(1).name == "nope"
    with pytest.raises(ValueError, match="layer 3 of a DeBERTa encoding made for num_layers=3"):
        encoding.for_layer(3)


def test_tupe_beyond_its_table() -> None:
    encoding = build("tupe", num_heads=4, head_dim=8, width=32, trained_length=10)
    with pytest.raises(ValueError, match="position 10 has no embedding: trained_length is 10"):
        encoding(Positions.full(11))
    mask = torch.ones(1, 14)
    mask[:, 10:] = 0
    encoding(Positions.from_mask(mask, side="right"))
    clamped = build("tupe", num_heads=4, head_dim=8, width=32, trained_length=10, beyond="clamp")
    bias = clamped(Positions.full(20)).bias.dense()
    assert torch.equal(bias[..., 10:, 10:], bias[..., 9:10, 9:10].expand(-1, -1, 10, 10))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("shaw", {"clip": (1, 4)}, "r_min <= 0 <= r_max; got"),
        ("shaw", {"clip": (1, 2, 3)}, "one number or"),
        ("shaw", {"clip": "far"}, "one number or"),
        ("transformer-xl", {"width": 7}, "width is even"),
        ("transformer-xl", {"width": 8, "clamp": -1}, "clamp is not negative"),
        ("tupe", {"width": 8, "trained_length": 4, "beyond": "wrap"}, "beyond is 'raise' or 'clamp'"),
        ("tupe-r", {"width": 8, "trained_length": 4, "num_buckets": 7}, "num_buckets is 7, odd"),
        ("deberta", {"width": 8, "clip": 0}, "clip is at least 1"),
        ("deberta", {"width": 8, "c2p": False, "p2c": False}, "no position signal"),
    ],
)
def test_what_cannot_be_is_said(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, num_heads=2, head_dim=4, **options)


@pytest.mark.parametrize("spec", ["shaw", "transformer-xl", "tupe", "deberta"])
def test_one_axis_only(spec: str) -> None:
    positions = Positions.full(4)
    twice = positions.mapped(positions.query[..., None].expand(-1, -1, 2), positions.key[..., None].expand(-1, -1, 2))
    with pytest.raises(ValueError, match="one position axis"):
        make(spec)(twice)


def test_tupe_wants_whole_positions() -> None:
    positions = Positions.full(4)
    with pytest.raises(ValueError, match="whole position"):
        make("tupe")(positions.mapped(positions.query / 2, positions.key / 2))
