"""Sinusoidal, learned, segment, complex and Legendre codes: identities, modes beyond the length, parity."""

from __future__ import annotations

import copy
import io
import json
import math
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from milepost import Encoding, Mapped, PositionMap, Positions, Sum, attend, build, catalogue
from milepost.encoding import find, names
from milepost.encodings.absolute.legendre import legendre

REPORTS = {
    case["id"]: case for case in json.loads((Path(__file__).parent / "data" / "public-reports.json").read_text())
}
GEOMETRY = {"width": 16, "trained_length": 64, "vocab_size": 40, "num_heads": 4, "head_dim": 4, "num_layers": 2}
WITH_EMBED = ["sinusoidal", "learned", "segments", "complex", "pope", "floater", "shape", "cape2021"]


def make(name: str, **options: object) -> Encoding:
    from milepost.encoding import build_for

    return build_for(name, GEOMETRY, **options).eval()


def code(encoding: Encoding, positions: Positions, tokens: Tensor | None = None) -> Tensor:
    """What the encoding adds to nothing, in float64."""
    width = encoding.config.width
    return encoding.embed(torch.zeros(1, positions.num_queries, width, dtype=torch.float64), positions, tokens)[0]


def at(values: list[float] | Tensor) -> Positions:
    here = torch.as_tensor(values)[None]
    return Positions.full(here.shape[1]).mapped(here, here)


# ---- sinusoidal -----------------------------------------------------------------------------------------------------


@given(shift=st.floats(-1e4, 1e4), start=st.floats(-1e4, 1e4))
def test_a_shift_rotates_every_pair(shift: float, start: float) -> None:
    """p(t + D) = diag(rotations by D w_k) p(t), as complex numbers: for real t and D, forwards and backwards."""
    found = code(build("sinusoidal", width=32), at(torch.tensor([start, shift, start + shift], dtype=torch.float64)))
    p = torch.complex(found[:, 1::2], found[:, 0::2])
    torch.testing.assert_close(p[1] * p[0], p[2], atol=1e-9, rtol=0)


def test_a_weighted_sum_of_neighbours_is_one_linear_map() -> None:
    """sum_j c_j p(t + D_j) = (sum_j c_j diag(p(D_j))) p(t): what a convolution over positions does to the code."""
    shifts, weights = torch.tensor([-3.0, -0.5, 2.0, 7.25], dtype=torch.float64), torch.tensor([0.2, -1.0, 3.0, 0.7])
    start = torch.linspace(-50, 900, 11, dtype=torch.float64)
    encoding = build("sinusoidal", width=24)

    def wave(positions: Tensor) -> Tensor:
        found = code(encoding, at(positions))
        return torch.complex(found[:, 1::2], found[:, 0::2])

    left = sum(c * wave(start + shift) for c, shift in zip(weights.double(), shifts, strict=True))
    right = (weights.double()[:, None] * wave(shifts)).sum(0) * wave(start)
    torch.testing.assert_close(left, right, atol=1e-9, rtol=0)


def test_layouts_are_permutations_and_options_do_what_they_say() -> None:
    positions = at([0, 1, 5, 1000])
    plain = code(build("sinusoidal", width=8), positions)
    assert torch.equal(code(build("sinusoidal", width=8, layout="concatenated"), positions)[:, :4], plain[:, 0::2])
    assert torch.equal(code(build("sinusoidal", width=8, layout="cosine-first"), positions)[:, 0::2], plain[:, 1::2])
    assert torch.equal(
        code(build("sinusoidal", width=8, offset=2), at([0])), code(build("sinusoidal", width=8), at([2]))
    )
    x = torch.randn(1, 4, 8)
    scaled = build("sinusoidal", width=8, scale_input=True).embed(x, positions)
    torch.testing.assert_close(scaled, build("sinusoidal", width=8).embed(x * math.sqrt(8), positions))


def test_codes_stay_exact_far_out_in_float32() -> None:
    encoding, far = build("sinusoidal", width=64), at([257, 10**6 + 1, 2**31 + 7])
    single = encoding.embed(torch.zeros(1, 3, 64), far)[0]
    torch.testing.assert_close(single.double(), code(encoding, far), atol=3e-7, rtol=0)


def test_pe_39_sine_and_cosine_of_a_pair_share_one_frequency() -> None:
    case = REPORTS["PE-39"]
    given_, expected = case["input"], case["expected"]
    row = code(build("sinusoidal", width=given_["d_model"], base=given_["base"]), at([given_["position"]]))[0]
    torch.testing.assert_close(row, torch.tensor(expected["row"], dtype=torch.float64), atol=case["tol"], rtol=0)
    assert abs(float(row[3]) - expected["wrong_entry3"]) > 1e-3


@pytest.mark.parametrize("name", ["learned", "sinusoidal"])
def test_pe_33_left_padding_changes_nothing(name: str) -> None:
    case = REPORTS["PE-33"]
    assert name in case["input"]["encodings"]
    pad, length, tol = case["input"]["pad_left"], case["input"]["length"], case["expected"]["tol"]
    encoding = make(name)
    x = torch.randn(1, length, 16)
    mask = torch.cat([torch.zeros(1, pad), torch.ones(1, length)], 1)
    positions = Positions.from_mask(mask, side="left")
    assert int(positions.key[0, pad]) == case["expected"]["position_ids_first_real_token"]

    def run(rows: Tensor, here: Positions) -> Tensor:
        h = encoding.embed(rows, here).unflatten(-1, (4, 4)).transpose(1, 2)
        return attend(h, h, h, here)

    padded = run(torch.cat([torch.full((1, pad, 16), 3.0), x], 1), positions)[:, :, pad:]
    torch.testing.assert_close(padded, run(x, Positions.full(length)), atol=tol, rtol=0)


# ---- learned --------------------------------------------------------------------------------------------------------


def table(rows: int, beyond: str) -> Encoding:
    encoding = build("learned", width=2, trained_length=rows, beyond=beyond).double()
    with torch.no_grad():
        encoding.table.copy_(torch.arange(float(rows))[:, None].expand(-1, 2))
    return encoding


def test_learned_modes_beyond_the_table() -> None:
    with torch.no_grad():
        assert code(table(4, "raise"), at([0, 2, 3]))[:, 0].tolist() == [0, 2, 3]
        assert code(table(4, "clamp"), at([3, 4, 100]))[:, 0].tolist() == [3, 3, 3]
        assert code(table(4, "modulo"), at([4 + 3, 4, 9]))[:, 0].tolist() == [3, 0, 1]
        assert code(table(4, "interpolate"), Positions.full(7))[:, 0].tolist() == [0, 0.5, 1, 1.5, 2, 2.5, 3]
        assert code(table(4, "interpolate"), Positions.full(3))[:, 0].tolist() == [0, 1, 2]
        assert code(table(4, "raise"), at([0.25, 2.5]))[:, 0].tolist() == [0.25, 2.5]
    with pytest.raises(ValueError, match=r"position 4 is outside the learned table of 4 rows.*beyond='clamp'"):
        code(table(4, "raise"), at([0, 4]))
    with pytest.raises(ValueError, match="position -1 is outside"):
        code(table(4, "raise"), at([-1]))


def test_learned_interpolation_is_torchs_linear_resize() -> None:
    encoding = build("learned", width=6, trained_length=10, beyond="interpolate").double()
    with torch.no_grad():
        resized = torch.nn.functional.interpolate(encoding.table.T[None], size=23, mode="linear", align_corners=True)
        torch.testing.assert_close(code(encoding, Positions.full(23)), resized[0].T, atol=1e-12, rtol=0)


def test_padding_is_not_looked_up() -> None:
    mask = torch.tensor([[1, 1, 0, 0]])
    found = make("learned", trained_length=2).embed(torch.zeros(1, 4, 16), Positions.from_mask(mask, side="right"))
    assert found.shape == (1, 4, 16)


def test_learned_is_drawn_as_published() -> None:
    weights = build("learned", width=512, trained_length=512).table.detach()
    assert abs(float(weights.std()) - 0.02) < 2e-4 and abs(float(weights.mean())) < 2e-4


# ---- segments -------------------------------------------------------------------------------------------------------


def bert(width: int = 16) -> tuple[torch.nn.Module, Encoding]:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertEmbeddings

    config = BertConfig(vocab_size=40, hidden_size=width, max_position_embeddings=64, type_vocab_size=2)
    theirs, ours = BertEmbeddings(config).eval(), make("segments", width=width)
    with torch.no_grad():
        theirs.LayerNorm.weight.normal_()
        theirs.LayerNorm.bias.normal_()
        ours.table.copy_(theirs.token_type_embeddings.weight)
        ours.position.table.copy_(theirs.position_embeddings.weight)
        ours.norm.load_state_dict(theirs.LayerNorm.state_dict())
    return theirs, ours


def test_segments_equal_the_bert_embeddings_of_transformers() -> None:
    theirs, ours = bert()
    ids, types = torch.randint(40, (3, 20)), torch.randint(2, (3, 20))
    x = theirs.word_embeddings(ids)
    positions = Positions.full(20)
    wanted = theirs(input_ids=ids, token_type_ids=types)
    torch.testing.assert_close(ours.embed(x, positions, segments=types), wanted, atol=1e-6, rtol=0)
    from dataclasses import replace

    torch.testing.assert_close(ours.embed(x, replace(positions, query_segment=types)), wanted, atol=1e-6, rtol=0)
    torch.testing.assert_close(ours.embed(x, positions), theirs(input_ids=ids), atol=1e-6, rtol=0)


def test_segments_from_separators_are_the_ids_of_a_pair_of_sentences() -> None:
    """[CLS] A [SEP] B [SEP] [PAD], with [SEP] = 3: as a BERT tokenizer types them."""
    theirs, _ = bert()
    ids = torch.tensor([[2, 7, 8, 3, 9, 9, 3, 0], [2, 7, 3, 9, 8, 9, 3, 0]])
    types = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1]])
    ours = make("segments", separators=(3,))
    positions = Positions.from_mask(torch.tensor([[1] * 7 + [0]] * 2), side="right")
    assert ours.needs_tokens and not make("segments").needs_tokens
    assert torch.equal(ours.segment_ids(positions, ids, None)[:, :7], types[:, :7])
    with pytest.raises(ValueError, match="ids of all 8 keys"):
        ours.embed(torch.zeros(2, 8, 16), positions)


def test_segment_ids_outside_the_table_are_refused() -> None:
    with pytest.raises(ValueError, match="segment id 2 is outside the table of 2"):
        make("segments").embed(torch.zeros(1, 2, 16), Positions.full(2), segments=torch.tensor([[0, 2]]))
    with pytest.raises(ValueError, match="those of the 2 queries; got 3"):
        make("segments").embed(torch.zeros(1, 2, 16), Positions.full(2), segments=torch.zeros(1, 3).long())


# ---- complex --------------------------------------------------------------------------------------------------------


def test_complex_is_a_wave_with_a_learned_amplitude_frequency_and_phase() -> None:
    encoding = make("complex").double()
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.normal_()
    tokens = torch.randint(40, (1, 9))
    found = code(encoding, Positions.full(9), tokens)
    word = tokens[0]
    angle = encoding.omega[word] * torch.arange(9.0, dtype=torch.float64)[:, None] + encoding.theta[word]
    wave = encoding.amplitude[word] * torch.exp(1j * angle)
    torch.testing.assert_close(found, torch.cat([wave.real, wave.imag], -1), atol=1e-12, rtol=0)
    found.square().sum().backward()  # |wave|^2 = r^2: neither frequency nor phase can change it
    assert float(encoding.omega.grad.abs().max()) < 1e-9 < float(encoding.amplitude.grad.abs().max())


def test_complex_replaces_the_token_embedding() -> None:
    encoding, tokens = make("complex"), torch.randint(40, (2, 5))
    a, b = (encoding.embed(torch.randn(2, 5, 16), Positions.full(5), tokens) for _ in range(2))
    assert torch.equal(a, b)
    with pytest.raises(ValueError, match="ids of all 5 keys"):
        encoding.embed(torch.randn(2, 5, 16), Positions.full(5))
    with pytest.raises(ValueError, match="token id 40 is outside the vocabulary of 40"):
        encoding.embed(torch.randn(1, 1, 16), Positions.full(1), torch.tensor([[40]]))


@pytest.mark.parametrize(("frequency", "shape"), [("full", (40, 8)), ("dimension", (1, 8)), ("word", (40, 1))])
def test_complex_frequencies_can_be_shared(frequency: str, shape: tuple[int, int]) -> None:
    encoding = make("complex", frequency=frequency, phase=False)
    assert tuple(encoding.omega.shape) == shape and encoding.theta is None
    assert float(encoding.omega.detach().max()) == 1.0 and bool((encoding.omega > 0).all())
    code(encoding, Positions.full(4), torch.zeros(1, 4).long()).sum().backward()
    assert encoding.omega.grad is not None and bool(encoding.omega.grad.any())


# ---- Legendre -------------------------------------------------------------------------------------------------------


def test_legendre_polynomials_are_numpys_and_stay_bounded_at_high_orders() -> None:
    x = torch.linspace(-1, 1, 41, dtype=torch.float64)
    wanted = numpy.polynomial.legendre.legvander(x.numpy(), 59)
    torch.testing.assert_close(legendre(x, 60), torch.from_numpy(wanted), atol=1e-12, rtol=0)
    assert float(legendre(x, 800).abs().max()) <= 1 + 1e-9
    torch.library.opcheck(torch.ops.milepost.legendre, (x, 7))


def test_legendre_modes_beyond_the_length() -> None:
    options = {"width": 5, "trained_length": 9}
    inside = code(build("pope", **options), Positions.full(9))
    torch.testing.assert_close(inside, legendre(torch.linspace(-1, 1, 9, dtype=torch.float64), 6)[:, 1:])
    with pytest.raises(ValueError, match=r"position 9 is outside the 9 positions.*'clamp' or 'rescale'"):
        code(build("pope", **options), Positions.full(10))
    clamped = code(build("pope", beyond="clamp", **options), Positions.full(12))
    assert torch.equal(clamped[:9], inside) and bool((clamped[9:] == 1).all())
    rescaled = code(build("pope", beyond="rescale", **options), Positions.full(17))
    torch.testing.assert_close(rescaled[::2], inside)
    assert torch.equal(code(build("pope", beyond="rescale", **options), Positions.full(9)), inside)


def test_pope_says_which_papers_it_is_not() -> None:
    assert find("legendre").name == "pope" and "2509.10534" in find("pope").summary
    assert "Polar" in (find("pope").cls.__doc__ or "")


def test_cape_is_ambiguous_and_says_so() -> None:
    with pytest.raises(ValueError, match="cape2021.*dape"):
        build("cape")


# ---- all of them ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITH_EMBED)
def test_inputs_that_do_not_fit_are_refused(name: str) -> None:
    encoding, tokens = make(name), torch.zeros(1, 4).long()
    with pytest.raises(ValueError, match="width 16; got width 8"):
        encoding.embed(torch.zeros(1, 4, 8), Positions.full(4), tokens)
    with pytest.raises(ValueError, match="do not stand at 4 query positions"):
        encoding.embed(torch.zeros(1, 3, 16), Positions.full(4), tokens)


@pytest.mark.parametrize("name", ["sinusoidal", "learned", "segments", "complex", "pope"])
def test_several_axes_are_refused(name: str) -> None:
    grid = torch.zeros(1, 4, 2).long()
    with pytest.raises(ValueError, match="reads one position axis"):
        make(name).embed(torch.zeros(1, 4, 16), Positions.full(4).mapped(grid, grid), torch.zeros(1, 4).long())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", WITH_EMBED)
def test_codes_are_made_in_float32_whatever_the_model_is(name: str, dtype: torch.dtype) -> None:
    """The sum is rounded once: no code is rounded, whatever the model was cast to or autocast says."""
    encoding, tokens = make(name), torch.randint(40, (1, 40))
    cast = copy.deepcopy(encoding).to(dtype)
    x, positions = torch.randn(1, 40, 16).to(dtype), Positions.full(40)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = cast.embed(x, positions, tokens)
    with torch.no_grad():
        wanted = encoding.embed(x.float(), positions, tokens)
    assert found.dtype == dtype and torch.equal(found, wanted.to(dtype))


@pytest.mark.parametrize("name", [*WITH_EMBED, "floater-layers"])
def test_state_dicts_round_trip_and_parameters_are_no_scalars(name: str) -> None:
    torch.manual_seed(1)
    encoding, other, tokens = make(name), make(name), torch.randint(40, (1, 12))
    assert all(parameter.dim() > 0 for parameter in encoding.parameters())
    assert not list(encoding.buffers())
    file = io.BytesIO()
    torch.save(encoding.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    x, positions = torch.randn(1, 12, 16), Positions.full(12)
    with torch.no_grad():
        assert torch.equal(other.embed(x, positions, tokens), encoding.embed(x, positions, tokens))
    before = [parameter.detach().clone() for parameter in encoding.parameters()]
    for module in encoding.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert [p.shape for p in encoding.parameters()] == [p.shape for p in before]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sinusoidal", {"width": 7}, "width is even and positive; got 7"),
        ("sinusoidal", {"layout": "sines"}, "got 'sines'"),
        ("sinusoidal", {"exponent": "t2t"}, "got 't2t'"),
        ("sinusoidal", {"base": 1.0}, "base is above 1; got 1.0"),
        ("learned", {"beyond": "wrap"}, "got 'wrap'"),
        ("learned", {"trained_length": 0}, "trained_length 0"),
        ("segments", {"num_segments": 0}, "got 0"),
        ("complex", {"width": 5}, "width is even; got 5"),
        ("complex", {"frequency": "none"}, "got 'none'"),
        ("pope", {"trained_length": 1}, "trained_length at least 2"),
        ("pope", {"beyond": "extend"}, "got 'extend'"),
        ("floater", {"delta": 0}, "delta is positive"),
        ("floater", {"layers": "all"}, "got 'all'"),
    ],
)
def test_options_that_make_no_sense_are_refused(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(name, **options)


SURVEY = {  # Zhao et al. 2023, Table 1: manifestation, learnable, integration, injection layer
    "Sinusoidal": ("embedding", False, "add", "initial"),
    "SHAPE": ("embedding", False, "add", "initial"),
    "CAPE": ("embedding", False, "add", "initial"),
    "Complex": ("embedding", True, "multiply", "initial"),
    "FLOATER": ("embedding", True, "add", "initial"),
}


def test_the_catalogue_has_the_surveys_properties() -> None:
    found = {i.survey: (i.manifestation, i.learnable, i.integration, i.injection) for i in catalogue() if i.survey}
    assert SURVEY.items() <= found.items()
    learnable = {
        info.name: any(True for _ in make(info.name).parameters()) for info in catalogue() if info.name in MINE
    }
    assert {info.name: info.learnable for info in catalogue() if info.name in MINE} == learnable


MINE = {
    *WITH_EMBED, "floater-layers", "nope", "nope-scaled", "nope-log-n", "nope-llama4", "nope-headscale", "window",
    "conv-nope", "randomized-sinusoidal", "randomized-learned", "randomized-rope", "randomized-alibi", "pose-rope",
    "bipe-rope", "bipe-alibi",
}  # fmt: skip


def test_all_of_them_are_named() -> None:
    assert set(names()) >= MINE


class Halved(PositionMap):
    def forward(self, positions: Positions, tokens: Tensor | None = None) -> Positions:
        return positions.mapped(positions.query / 2, positions.key / 2)


def test_absolute_codes_compose_with_maps_and_sums() -> None:
    sinusoidal, positions = build("sinusoidal", width=16), Positions.full(9)
    x = torch.zeros(1, 9, 16, dtype=torch.float64)
    halved = Mapped(Halved(), sinusoidal).embed(x, positions)[0]
    torch.testing.assert_close(halved[::2], code(sinusoidal, positions)[:5])
    both = Sum(sinusoidal, build("alibi", num_heads=4))
    assert torch.equal(both.embed(x, positions), sinusoidal.embed(x, positions))
    assert both(positions).bias is not None


# ---- in the model ---------------------------------------------------------------------------------------------------


def test_segment_ids_reach_the_encoding_through_the_model() -> None:
    from milepost.model import MilepostConfig, MilepostForCausalLM

    def model(encoding: str) -> torch.nn.Module:
        torch.manual_seed(0)
        sizes = {"vocab_size": 40, "width": 16, "num_heads": 4, "num_layers": 1, "trained_length": 32}
        return MilepostForCausalLM(MilepostConfig(encoding=encoding, **sizes)).eval()

    ids = torch.tensor([[2, 7, 8, 3, 9, 9, 3], [2, 7, 3, 9, 8, 9, 3]])
    types = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1]])
    plain = model("segments")
    with torch.no_grad():
        typed = plain(input_ids=ids, token_type_ids=types).logits
        found = model("segments:separators=(3,)")(input_ids=ids).logits
        torch.testing.assert_close(found, typed, atol=1e-6, rtol=0)
        assert not torch.allclose(plain(input_ids=ids).logits, typed)


@pytest.mark.parametrize("name", [*WITH_EMBED, "floater-layers"])
def test_generation_with_a_cache_equals_one_pass(name: str) -> None:
    from milepost.model import MilepostConfig, MilepostForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "width": 16, "num_heads": 4, "num_layers": 2, "trained_length": 32}
    model = MilepostForCausalLM(MilepostConfig(encoding=name, **sizes)).eval()
    ids, mask = torch.randint(40, (2, 9)), torch.ones(2, 9).long()
    mask[0, :4] = 0
    options = {"max_new_tokens": 5, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with torch.no_grad():
        steps = model.generate(input_ids=ids, attention_mask=mask, **options)
        longer = torch.cat([mask, torch.ones(2, 5).long()], 1)
        whole = model(input_ids=steps.sequences, attention_mask=longer).logits[:, 8:13]
    torch.testing.assert_close(torch.stack(steps.logits, 1), whole, atol=1e-5, rtol=0)
