"""CoPE, DAPE and DAPE-V2: vectors, x-transformers run on the same numbers, and their properties."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from x_transformers.x_transformers import CoPE as TheirCoPE

from milepost import Encoding, Positions, attend, build
from milepost.attention import rows
from milepost.encoding import from_spec
from milepost.encodings.content import DAPE, CoPE
from milepost.encodings.content.cope import counted_positions
from milepost.testing import check_encoding
from tests.vectors import cases, check, vector_id

GEOMETRY = {"num_heads": 4, "head_dim": 8, "width": 32, "num_layers": 3, "trained_length": 64}
DAPES = (
    "dape",
    "dape:base=alibi",
    "dape:base=fire",
    "dape:base=t5",
    "dape:base=rope",
    "dape:base=nope",
    "dape-v2",
    "dape-v2:base=alibi:kernel=5",
    "dape-v2:base=fire",
    "dape-v2:base=rope",
)
SPECS = ("cope", "cope:npos_max=5", *DAPES)


def make(spec: str, std: float | None = 0.5, **geometry: int) -> Encoding:
    encoding = from_spec(spec, {**GEOMETRY, **geometry})
    with torch.no_grad():
        for name, parameter in encoding.named_parameters():
            if std is not None and not name.startswith("base"):
                parameter.normal_(std=std)
    return encoding.double()


def qkv(queries: int, keys: int, *, heads: int = 4, kv: int = 4, head_dim: int = 8, batch: int = 2) -> list[Tensor]:
    sizes = ((heads, queries), (kv, keys), (kv, keys))
    return [torch.randn(batch, h, n, head_dim, dtype=torch.float64) for h, n in sizes]


def scores(encoding: Encoding, logits: Tensor, bias: Tensor | None, q: Tensor, positions: Positions) -> Tensor:
    allowed = positions.allowed()[:, None]
    found = encoding(positions).scores(logits, bias, q=q, k=q, positions=positions, allowed=allowed, scale=1.0)
    assert isinstance(found, Tensor)
    return found


# ---- stored vectors -------------------------------------------------------------------------------------------------


def cope_row(i: dict[str, Any], vector: dict[str, Any]) -> dict[str, Tensor]:
    logits = torch.tensor(i["visible_logits j=0..i"], dtype=torch.float64)
    values = torch.tensor(next(v for name, v in i.items() if name.startswith("q_dot_e")), dtype=torch.float64)
    encoding = CoPE(head_dim=1, npos_max=i["npos_max"]).double()
    with torch.no_grad():
        encoding.table.copy_(values[:, None])
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    row = logits[None, None, None]
    positions = Positions.full(len(logits), queries=1)
    counts = counted_positions(row, positions.allowed()[:, None])[0, 0, 0]
    gates = counts - F.pad(counts[1:], (0, 1))
    bias = scores(encoding, row, None, q, positions) - row
    name = "pos" if "pos" in vector["expected"] else "pos_clamped"
    return {"gates": gates, name: counts.clamp(max=i["npos_max"] - 1), "bias": bias[0, 0, 0]}


def dape(i: dict[str, Any]) -> Tensor:
    logits = torch.tensor(i["scores(qk/sqrt d, 2 heads)"], dtype=torch.float64).view(1, 2, 1, 1)
    bias = torch.tensor(i["bias"], dtype=torch.float64).view(1, 2, 1, 1)
    encoding = DAPE(num_heads=2, base="alibi", hidden=3).double()
    weights = {"first.weight": "W1", "first.bias": "b1", "second.weight": "W2", "second.bias": "b2"}
    encoding.load_state_dict({o: torch.tensor(i[theirs], dtype=torch.float64) for o, theirs in weights.items()})
    return scores(encoding, logits, bias, logits, Positions.full(1)).flatten()


VECTOR_HANDLERS = {"cope_row": cope_row, "dape": dape}


@pytest.mark.parametrize("vector", cases("vectors-a.json", VECTOR_HANDLERS), ids=vector_id)
def test_vector(vector: dict[str, Any]) -> None:
    check(vector, VECTOR_HANDLERS)


# ---- other people's code --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("npos_max", [3, 16, 64])
def test_cope_is_that_of_x_transformers(npos_max: int) -> None:
    theirs = TheirCoPE(dim=8, heads=4, max_pos=npos_max).double()
    nn.init.normal_(theirs.pos_emb)
    ours = CoPE(head_dim=8, npos_max=npos_max).double()
    with torch.no_grad():
        ours.table.copy_(theirs.pos_emb)
    q, k, _ = qkv(40, 40)
    positions = Positions.full(40)
    allowed = positions.allowed()[:, None]
    logits = (q @ k.mT * 8**-0.5).masked_fill(~allowed, -1e30)
    wanted = theirs(q, logits)
    found = scores(ours, logits, None, q, positions) - logits
    torch.testing.assert_close(found * allowed, wanted * allowed, rtol=0, atol=1e-12)


def published_v2(encoding: DAPE, logits: Tensor, bias: Tensor) -> Tensor:
    """The published arithmetic: two padded convolutions over the lower triangle of all logits and biases."""
    inputs = torch.cat([logits, bias.expand_as(logits)], 1).tril()
    padding = (0, encoding.config.kernel // 2)
    first, second = encoding.first, encoding.second
    hidden = F.leaky_relu(F.conv2d(inputs, first.weight, first.bias, padding=padding), 0.01)
    return logits + bias + F.conv2d(hidden, second.weight, second.bias, padding=padding)


@pytest.mark.parametrize("kernel", [3, 5])
def test_dape_v2_is_the_published_arithmetic_in_every_row_but_the_last(kernel: int) -> None:
    """The last row of the published code ends in padding; here it is what it would be with one more token."""
    encoding = make(f"dape-v2:base=alibi:kernel={kernel}")
    logits = torch.randn(2, 4, 15, 15, dtype=torch.float64)
    positions = Positions.full(15)
    bias = encoding(positions).bias.dense()
    found, wanted = scores(encoding, logits, bias, logits, positions), published_v2(encoding, logits, bias)
    whole = 15 - kernel // 2
    torch.testing.assert_close(found[:, :, :whole].tril(), wanted[:, :, :whole].tril(), rtol=0, atol=1e-12)
    more = F.pad(logits, (0, 3, 0, 3))
    longer = published_v2(encoding, more, F.pad(bias, (0, 3, 0, 3)))[:, :, :15, :15]
    torch.testing.assert_close(found.tril(), longer.tril(), rtol=0, atol=1e-12)
    assert (found - wanted)[:, :, -1, -1].abs().max() > 1e-3


# ---- properties -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_grid_of_options(spec: str) -> None:
    encoding = make(spec, std=0.1, head_dim=16, width=64).float()
    if isinstance(encoding, DAPE):  # one number more for every key changes nothing: its gradient is rounding alone
        encoding.second.bias.requires_grad_(False)
    report = check_encoding(encoding)
    report.raise_if_failed()
    assert list(report.refused) == (["bidirectional"] if spec.startswith("cope") else []), str(report)


def test_cope_starts_as_no_position_signal() -> None:
    encoding = build("cope", head_dim=8).double()
    assert encoding.table.shape == (64, 8)
    q, k, v = qkv(12, 12)
    positions = Positions.full(12)
    torch.testing.assert_close(
        attend(q, k, v, positions, encoding(positions)), attend(q, k, v, positions), rtol=0, atol=1e-14
    )


def test_cope_is_causal_only_and_says_what_is_not() -> None:
    with pytest.raises(ValueError, match="CoPE counts from the query back .* use DAPE"):
        build("cope", head_dim=8)(Positions.full(5, causal=False))


def test_cope_counts_no_padding_and_no_other_document() -> None:
    """Huge logits of keys that are not allowed would open their gates wide."""
    logits = torch.full((1, 1, 6, 6), 50.0, dtype=torch.float64)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    counts = counted_positions(logits, Positions.from_mask(mask, side="left").allowed()[:, None])
    assert counts[0, 0, 5].tolist() == [4, 4, 4, 3, 2, 1]
    counts = counted_positions(logits, Positions.packed([4, 2]).allowed()[:, None])
    assert counts[0, 0, 3].tolist() == [4, 3, 2, 1, 0, 0]
    assert counts[0, 0, 5].tolist() == [2, 2, 2, 2, 2, 1]


@pytest.mark.parametrize("spec", DAPES)
def test_a_network_of_zeros_leaves_logits_plus_bias(spec: str) -> None:
    encoding = make(spec)
    with torch.no_grad():
        for parameter in (*encoding.first.parameters(), *encoding.second.parameters()):
            parameter.zero_()
    q, k, v = qkv(13, 13)
    for causal in (True, False):
        positions = Positions.full(13, causal=causal)
        found = attend(q, k, v, positions, encoding(positions))
        wanted = attend(q, k, v, positions, encoding.base(positions))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", ["dape:base=nope", "dape:base=t5", "dape-v2:base=t5"])
def test_heads_can_be_permuted(spec: str) -> None:
    encoding = make(spec)
    q, k, v = qkv(11, 11)
    positions = Positions.full(11)
    before = attend(q, k, v, positions, encoding(positions))
    order = torch.tensor([2, 0, 3, 1])
    inputs = order if spec.endswith("nope") else torch.cat([order, order + 4])
    with torch.no_grad():
        encoding.first.weight.copy_(encoding.first.weight[:, inputs])
        encoding.second.weight.copy_(encoding.second.weight[order])
        encoding.second.bias.copy_(encoding.second.bias[order])
        for parameter in encoding.base.parameters():
            parameter.copy_(parameter[:, order])
    after = attend(q[:, order], k[:, order], v[:, order], positions, encoding(positions))
    torch.testing.assert_close(after, before[:, order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", SPECS)
def test_the_future_does_not_leak(spec: str) -> None:
    encoding = make(spec)
    q, k, v = qkv(20, 20)
    positions = Positions.full(20)
    before = attend(q, k, v, positions, encoding(positions))
    changed_k, changed_v = k.clone(), v.clone()
    changed_k[:, :, 12:] += 5.0
    changed_v[:, :, 12:] += 5.0
    after = attend(q, changed_k, changed_v, positions, encoding(positions))
    assert torch.equal(after[:, :, :12], before[:, :, :12])
    assert (after[:, :, 12:] - before[:, :, 12:]).abs().max() > 1e-3


@pytest.mark.parametrize("spec", ["cope", "dape", "dape-v2", "dape-v2:kernel=5", "dape-v2:base=rope"])
def test_padding_and_neighbouring_documents_are_never_read(spec: str) -> None:
    """Whatever stands there, the result is the same to the last bit."""
    encoding = make(spec)
    q, k, v = qkv(16, 16)
    mask = torch.ones(2, 16)
    mask[:, :4] = 0
    holes = torch.ones(2, 16)
    holes[:, 5:9] = 0
    for positions, hidden, seen in (
        (Positions.from_mask(mask, side="left"), slice(0, 4), slice(4, 16)),
        (Positions.from_mask(mask.flip(1), side="right"), slice(12, 16), slice(0, 12)),
        (Positions.from_mask(holes), slice(5, 9), [*range(5), *range(9, 16)]),
        (Positions.packed([4, 12]), slice(0, 4), slice(4, 16)),
    ):
        other_k, other_v = k.clone(), v.clone()
        other_k[:, :, hidden] = 1e3
        other_v[:, :, hidden] = -1e3
        found = [attend(q, a, b, positions, encoding(positions))[:, :, seen] for a, b in ((k, v), (other_k, other_v))]
        assert torch.equal(found[0], found[1])


def test_dape_v2_with_a_window_equals_its_last_tokens_alone() -> None:
    encoding = make("dape-v2:base=alibi")
    q, k, v = qkv(1, 20)
    positions = Positions.full(20, queries=1)
    found = attend(q, k, v, positions, replace(encoding(positions), window=6))
    alone = Positions.full(6, queries=1)
    wanted = attend(q, k[:, :, 14:], v[:, :, 14:], alone, encoding(alone))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("dape", {"base": "nope"}, 32 * 12 + 32 + 32 * 12 + 12),
        ("dape", {"base": "alibi"}, 1196),
        ("dape-v2", {"base": "alibi"}, 3500),
        ("dape", {}, 1196 + 24),
        ("dape", {"base": "fire"}, 1196 + 462),
    ],
)
def test_number_of_parameters(name: str, options: dict[str, Any], count: int) -> None:
    encoding = build(name, num_heads=12, **options)
    assert sum(p.numel() for p in encoding.parameters()) == count


@pytest.mark.parametrize("spec", [s for s in SPECS if s != "cope"])
def test_gradients(spec: str) -> None:
    encoding = make(f"{spec}:hidden=3" if "dape" in spec else spec, num_heads=2, head_dim=2, width=4)
    q, k, v = (x.requires_grad_() for x in qkv(5, 5, heads=2, kv=1, head_dim=2, batch=1))
    positions = Positions.packed([3, 2])
    parameters = [p for name, p in encoding.named_parameters() if "threshold" not in name]

    def run(q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> Tensor:
        return attend(q, k, v, positions, encoding(positions))

    assert torch.autograd.gradcheck(run, (q, k, v, *parameters))


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


@pytest.mark.parametrize("spec", ["cope", "dape", "dape:base=fire", "dape-v2"])
def test_memory_is_that_of_a_block_of_logits(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    length, block, hidden = 2048, 128, 8
    encoding = make(f"{spec}:hidden={hidden}" if "dape" in spec else spec).float()
    monkeypatch.setattr(rows, "BLOCK_NUMBERS", 4 * block * length)
    q, k, v = (x.float() for x in qkv(length, length, batch=1))
    positions = Positions.full(length)
    with torch.no_grad(), Largest() as seen:
        attend(q, k, v, positions, encoding(positions), backend="rows")
    widest = 32 if spec.endswith("fire") else 8  # FIRE's own network has 32 numbers a pair
    assert 4 * block * length <= seen.numel <= widest * block * (length + 3)  # DAPE-V2 pads its rows


# ---- bases and refusals ---------------------------------------------------------------------------------------------


def test_a_base_of_ones_own() -> None:
    base = build("alibi", num_heads=4, slope_scale=2.0)
    torch.manual_seed(0)
    encoding = DAPE(num_heads=4, base=base).double()
    torch.manual_seed(0)
    named = DAPE(num_heads=4, base="alibi:slope_scale=2.0").double()
    q, k, v = qkv(9, 9)
    positions = Positions.full(9)
    found = attend(q, k, v, positions, encoding(positions))
    assert torch.equal(found, attend(q, k, v, positions, named(positions)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": 2}, "kernel is odd"),
        ({"hidden": 0}, "hidden are at least 1"),
        ({"base": "sinusoidal", "width": 32}, "sinusoidal acts at the input"),
        ({"base": "cope", "head_dim": 8}, "cope changes scores or weights itself"),
        ({"base": "shaw", "head_dim": 8}, "shaw changes scores or weights itself"),
        ({"base": "alibbi"}, "no encoding is named 'alibbi'"),
    ],
)
def test_what_cannot_be_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build("dape", num_heads=4, **options)


def test_no_counts_without_positions() -> None:
    with pytest.raises(ValueError, match="npos_max are at least 1"):
        build("cope", head_dim=8, npos_max=0)
