"""Encodings without a position signal: equivariance, temperatures, sliding windows, the causal convolution."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from milepost import Encoding, Positions, attend, build
from milepost.encoding import from_spec
from milepost.encodings.frequencies import log_n_scale
from milepost.encodings.none import log_n_temperature, uniform_scale

GEOMETRY = {"width": 16, "trained_length": 32, "vocab_size": 64, "num_heads": 4, "head_dim": 4, "num_layers": 2}
VECTORS = json.loads((Path(__file__).parent / "data" / "vectors-a.json").read_text())["vectors"]


def heads(length: int, batch: int = 2) -> list[Tensor]:
    return [torch.randn(batch, 4, length, 4, dtype=torch.float64) for _ in range(3)]


def run(encoding: Encoding, q: Tensor, k: Tensor, v: Tensor, positions: Positions) -> Tensor:
    return attend(q, k, v, positions, encoding(positions))


# ---- NoPE -----------------------------------------------------------------------------------------------------------


def test_nope_without_a_causal_mask_is_permutation_equivariant_and_with_one_is_not() -> None:
    q, k, v = heads(11)
    order = torch.randperm(11)
    shuffled = [x[:, :, order] for x in (q, k, v)]
    nope = build("nope")
    assert nope(Positions.full(11)).is_empty()
    both_ways, causal = Positions.full(11, causal=False), Positions.full(11)
    torch.testing.assert_close(run(nope, *shuffled, both_ways), run(nope, q, k, v, both_ways)[:, :, order])
    assert not torch.allclose(run(nope, *shuffled, causal), run(nope, q, k, v, causal)[:, :, order])


# ---- temperatures ---------------------------------------------------------------------------------------------------


def test_uniform_scale_is_fitted_to_the_papers_three_temperatures() -> None:
    (vector,) = [v for v in VECTORS if v["method"] == "nope_uniform_scale"]
    published = {int(name[:-1]): sigma for name, sigma in vector["inputs"]["lambda_times_sqrt_d"].items()}
    stretch = torch.tensor(list(published), dtype=torch.float64)
    sigma = torch.tensor(list(published.values()), dtype=torch.float64)
    logs = stretch.log()
    slope = float((logs * (sigma - 1)).sum() / logs.square().sum())
    found = uniform_scale(stretch * 2048, 2048)
    torch.testing.assert_close(found, 1 + slope * logs, atol=1e-5, rtol=0)
    assert float((found - sigma).abs().max()) < 0.07
    assert uniform_scale(torch.tensor([1, 2048]), 2048).tolist() == [1, 1]


def test_scaled_nope_multiplies_the_logits() -> None:
    q, k, v = heads(9)
    positions = Positions.full(9)
    fixed = build("nope-scaled", scale=1.5)
    torch.testing.assert_close(run(fixed, q, k, v, positions), run(build("nope"), 1.5 * q, k, v, positions))
    fitted = build("nope-scaled", trained_length=4)
    sigma = float(uniform_scale(torch.tensor([9]), 4))
    torch.testing.assert_close(run(fitted, q, k, v, positions), run(build("nope"), sigma * q, k, v, positions))
    log_n = build("nope-log-n", trained_length=4)
    per_query = log_n_temperature(torch.arange(9), 4)[:, None]
    torch.testing.assert_close(run(log_n, q, k, v, positions), run(build("nope"), per_query * q, k, v, positions))
    llama4 = build("nope-llama4", floor_scale=3)
    steps = torch.tensor([0, 0, 1, 1, 1, 2, 2, 2, 3], dtype=torch.float64)[:, None]
    torch.testing.assert_close(
        run(llama4, q, k, v, positions), run(build("nope"), (1 + 0.1 * (steps + 1).log()) * q, k, v, positions)
    )


def test_each_row_has_its_own_temperature() -> None:
    mask = (torch.arange(12)[None] < torch.tensor([6, 12])[:, None]).long()
    positions = Positions.from_mask(mask, side="right")
    (branch,) = build("nope-scaled", trained_length=6)(positions).branches
    assert branch.query is not None
    scaled = branch.query(torch.ones(2, 1, 12, 1, dtype=torch.float64))[:, 0, 0, 0]
    torch.testing.assert_close(scaled, uniform_scale(torch.tensor([6, 12]), 6))


def test_log_n_is_that_of_the_frequency_methods() -> None:
    at = torch.tensor([0, 5, 4095, 4096, 100_000])
    assert torch.equal(log_n_temperature(at, 4096), log_n_scale(at, 4096))


def test_llama4_temperature_is_transformers() -> None:
    from transformers import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

    config = Llama4TextConfig(
        hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_hidden_layers=4, floor_scale=5,
        attn_scale=0.3, attn_temperature_tuning=True, no_rope_layers=[1, 1, 1, 0], use_qk_norm=False,
    )  # fmt: skip
    config._attn_implementation = "eager"
    theirs = Llama4TextAttention(config, layer_idx=3).double()
    x, positions = torch.randn(1, 23, 16, dtype=torch.float64), Positions.full(23)
    mask = torch.full((1, 1, 23, 23), -torch.inf, dtype=torch.float64).triu(1)
    with torch.no_grad():
        wanted, _ = theirs(
            x, position_embeddings=torch.ones(1), attention_mask=mask, position_ids=positions.key,
            cache_position=positions.key[0],
        )  # fmt: skip
        q, k, v = (
            project(x).unflatten(-1, (-1, 8)).transpose(1, 2)
            for project in (theirs.q_proj, theirs.k_proj, theirs.v_proj)
        )
        ours = attend(q, k, v, positions, build("nope-llama4", floor_scale=5, attn_scale=0.3)(positions))
        torch.testing.assert_close(theirs.o_proj(ours.transpose(1, 2).flatten(2)), wanted, atol=1e-6, rtol=0)


def test_head_scale_acts_per_head_and_never_below_one() -> None:
    encoding, positions = build("nope-headscale", num_heads=4).double(), Positions.full(7)
    q, k, v = heads(7)
    torch.testing.assert_close(run(encoding, q, k, v, positions), run(build("nope"), q, k, v, positions))
    with torch.no_grad():
        encoding.scale.copy_(torch.tensor([0.5, 1.0, 1.5, 2.0]))
    sigma = torch.tensor([1.0, 1.0, 1.5, 2.0], dtype=torch.float64)
    assert torch.equal(encoding.sigma(), sigma)
    out = run(encoding, q, k, v, positions)
    torch.testing.assert_close(out, run(build("nope"), sigma[:, None, None] * q, k, v, positions))
    (gradient,) = torch.autograd.grad(out.square().sum(), encoding.scale)
    assert bool((gradient != 0).all())  # a head at the minimum can leave it
    assert build("nope-headscale", num_heads=2, initial=1.6).scale.tolist() == pytest.approx([1.6, 1.6])


def test_temperatures_are_applied_in_float32() -> None:
    encoding = build("nope-headscale", num_heads=4, initial=1.6).to(torch.bfloat16)
    (branch,) = encoding(Positions.full(3)).branches
    assert branch.query is not None
    q = torch.randn(1, 4, 3, 8).bfloat16()
    assert torch.equal(branch.query(q), (q.float() * 1.6).bfloat16())


# ---- sliding windows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec", ["window:size=5", "window:size=5+rope", "alibi+window:size=5", "window:size=9+window:size=5"]
)
def test_a_window_over_an_encoding_hides_what_lies_outside(spec: str) -> None:
    q, k, v = heads(20)
    positions = Positions.full(20)
    found = run(from_spec(spec, GEOMETRY), q, k, v, positions)
    inner = spec.replace("window:size=5+", "").replace("+window:size=5", "").replace("window:size=5", "nope")
    inner = "nope" if inner.startswith("window") else inner
    for i in (3, 4, 5, 19):
        first = max(0, i - 4)
        here = Positions.full(i + 1 - first, queries=1)
        here = here.mapped(here.query + first, here.key + first)
        rows = slice(first, i + 1)
        alone = run(from_spec(inner, GEOMETRY), q[:, :, i : i + 1], k[:, :, rows], v[:, :, rows], here)
        torch.testing.assert_close(found[:, :, i : i + 1], alone, atol=1e-9, rtol=0)


def test_one_layer_with_a_window_does_not_see_the_length() -> None:
    q, k, v = heads(50)
    window = build("window", size=8)
    late = run(window, q[:, :, 30:], k[:, :, 30:], v[:, :, 30:], Positions.full(20))
    torch.testing.assert_close(run(window, q, k, v, Positions.full(50))[:, :, 37:], late[:, :, 7:])


# ---- the causal convolution -----------------------------------------------------------------------------------------


def test_the_causal_convolution_is_torchs_with_zero_padding() -> None:
    encoding, positions = build("conv-nope", num_heads=4, kernel_size=6).double(), Positions.full(15)
    q, k, v = heads(15)
    kernel = encoding.taps.softmax(-1)  # (H, taps); one for each head's 4 channels
    weight = kernel.flip(-1).repeat_interleave(4, 0)[:, None]
    wanted = F.conv1d(F.pad(v.transpose(2, 3).flatten(1, 2), (5, 0)), weight, groups=16)
    torch.testing.assert_close(run(encoding, q, k, v, positions), wanted.unflatten(1, (4, 4)).transpose(2, 3))
    torch.testing.assert_close(run(encoding, 3 * q, -k, v, positions), run(encoding, q, k, v, positions))


def test_zero_padding_is_the_only_position_signal() -> None:
    """Constant content: outputs differ only where the kernel reaches over the beginning, and one layer further each."""
    layers = [build("conv-nope", num_heads=4, kernel_size=4).double() for _ in range(2)]
    positions, x = Positions.full(20), torch.ones(1, 4, 20, 4, dtype=torch.float64)
    for depth, layer in enumerate(layers, start=1):
        x = run(layer, x, x, x, positions)
        reach = 3 * depth
        torch.testing.assert_close(x[:, :, reach:], torch.ones_like(x[:, :, reach:]))
        assert float(x[0, 0, reach - 1, 0].detach()) < 1 - 1e-6
    with pytest.raises(ValueError, match="causal convolution"):
        layers[0](Positions.full(4, causal=False))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nope-scaled", {}, "needs trained_length, 2 or more; got None"),
        ("nope-log-n", {}, "needs trained_length"),
        ("nope-scaled", {"scale": -1.0}, "scale is positive"),
        ("nope-log-n", {"scale": 2.0, "trained_length": 8}, "goes with schedule='uniform'"),
        ("nope-scaled", {"schedule": "yarn", "trained_length": 8}, "got 'yarn'"),
        ("nope-llama4", {"floor_scale": 0}, "floor_scale is at least 1"),
        ("nope-headscale", {"num_heads": 2, "initial": 0.5}, "initial is at least minimum"),
        ("window", {"size": 0}, "got size 0"),
        ("conv-nope", {"num_heads": 4, "kernel_size": 0}, "kernel_size 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, **options)
