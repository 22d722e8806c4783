"""Published numbers of the rotary family, and identities between its methods."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from milepost import Encoding, Positions, attend, build
from milepost.analysis import scaling_laws
from milepost.encodings.axial import MRoPE, RoPE2D, RoPE2DMixed, grid_positions
from milepost.encodings.chunked import ThreeDRPE
from milepost.encodings.fourier import FoPE, HoPE
from milepost.encodings.frequencies import log_n_scale
from milepost.encodings.irope import IRoPE
from milepost.encodings.lrpe import LRPE, PermutationPowers
from milepost.encodings.none import ScaledNoPE, llama4_temperature
from milepost.encodings.relmaps import (
    SelfExtend,
    Stair,
    lampe_mapped_length,
    leaky_rerope_distance,
    mesa_chunk,
    rerope_distance,
    self_extend_distance,
    self_extend_reach,
    stair_distance,
)
from milepost.encodings.rotary import RoPE, layout_permutation, rotate
from milepost.encodings.scaled import ResonanceRoPE
from milepost.encodings.value import VORoPE
from milepost.encodings.xpos import XPos
from milepost.terms import Terms
from tests.vectors import cases, check, distances, vector_id


def at(query: list[int], key: list[int]) -> Positions:
    """Bidirectional positions of these queries and keys, standing wherever they say."""
    positions = Positions.cross(len(query), len(key))
    return positions.mapped(torch.tensor([query]), torch.tensor([key]))


def vector(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def logits(terms: Terms, q: Tensor, k: Tensor, positions: Positions) -> Tensor:
    """Unscaled logits (Q, K) of one head: what the single branch makes of q and k, multiplied."""
    (branch,) = terms.branches
    turned_q = q[None, None] if branch.query is None else branch.query(q[None, None])
    turned_k = k[None, None] if branch.key is None else branch.key(k[None, None], at="keys")
    return (turned_q @ turned_k.mT)[0, 0]


def rope_apply(layout: str, i: dict[str, Any]) -> Tensor:
    x = vector(i["x"])
    angles = RoPE(head_dim=len(i["x"]), base=float(i["base"])).inv_freq() * i["pos"]
    return rotate(x.view(1, 1, 1, -1), angles.view(1, 1, -1), layout).flatten()  # type: ignore[arg-type]


def score_pairs(encoding: Encoding, i: dict[str, Any]) -> Tensor:
    q, k = vector(i["q"]), vector(i["k"])
    found = []
    for m, n in i["pairs"]:
        positions = Positions.full(m + 1, queries=1)
        terms = encoding(positions)
        found.append(logits(terms, q[None], k.expand(m + 1, -1), positions)[0, n])
    return torch.stack(found)


def xpos_zeta(i: dict[str, Any], v: dict[str, Any]) -> dict[str, float]:
    zeta = XPos(head_dim=i["head_dim"], gamma=i["gamma"]).zeta()
    return {key: float(zeta[int(key)]) for key in v["expected"]}


def xpos_decay(i: dict[str, Any]) -> Tensor:
    encoding = XPos(head_dim=i["head_dim"], scale_base=float(i["scale_base"]))
    return torch.exp(-encoding.rate() * i["delta"])[i["pairs"]]


def self_extend_row(i: dict[str, Any]) -> Tensor:
    return self_extend_distance(torch.tensor(i["query"]), torch.arange(i["query"] + 1), i["group"], i["window"])


def self_extend_pairs(i: dict[str, Any]) -> Tensor:
    query, key = torch.tensor(i["pairs"]).T
    return self_extend_distance(query, key, i["group"], i["window"])


def mesa_row(i: dict[str, Any]) -> dict[str, Any]:
    last = i["kv_len"] - 1
    push = last % i["context_window_length"]
    distance = last - torch.arange(i["kv_len"])
    return {"push_pos": push, "rel": stair_distance(distance, push, i["push_width"], "floor").tolist()}


def axial_freqs(i: dict[str, Any], v: dict[str, Any]) -> dict[str, float]:
    encoding = RoPE2D(head_dim=i["head_dim"], base=float(i["theta"]))
    per_axis = encoding.axis_of_pair().count(0)
    freqs = encoding.inv_freq()[:per_axis]
    return {key: per_axis if key == "n_per_axis" else float(freqs[int(key)]) for key in v["expected"]}


def axial_angles(i: dict[str, Any]) -> dict[str, float]:
    encoding = RoPE2D(head_dim=i["head_dim"], base=float(i["theta"]))
    cell = grid_positions((3, i["grid_w"]))[:, i["token"]][:, None]
    (branch,) = encoding(Positions.cross(1, 1).mapped(cell, cell)).branches
    eye = torch.eye(i["head_dim"], dtype=torch.float64)[:, None, None]
    turned = branch.query(eye)[:, 0, 0]
    angles = torch.stack([torch.atan2(turned[2 * p, 2 * p + 1], turned[2 * p, 2 * p]) for p in range(32)])
    return {
        "t_x": int(cell[0, 0, 1]),
        "t_y": int(cell[0, 0, 0]),
        "first_x": float(angles[0]),
        "first_y": float(angles[16]),
        "second_x": float(angles[1]),
    }


def mixed_init(i: dict[str, Any]) -> dict[str, float]:
    encoding = RoPE2DMixed(num_heads=1, head_dim=i["head_dim"], base=float(i["theta"]))
    fx, fy = encoding.directions(torch.tensor([i["angle"]], dtype=torch.float64))
    return {"fx0": float(fx[0, 0]), "fx16": float(fx[0, 16]), "fy0": float(fy[0, 0]), "fy16": float(fy[0, 16])}


def hf_axial(i: dict[str, Any], v: dict[str, Any]) -> dict[str, float]:
    encoding = RoPE2D(head_dim=i["head_dim"], base=float(i["theta"]), axis_order="hw", layout="half")
    freqs = encoding.inv_freq()
    return {key: float(freqs[int(key)]) for key in v["expected"]}


def three_d_apply(i: dict[str, Any]) -> Tensor:
    """The poster's formula against our rotation: ours lacks the constant quarter turn, which cancels in scores."""
    h = complex(i["h"].replace("i", "j"))
    encoding = ThreeDRPE(head_dim=2, chunk=1, local=0, phase=i["phi"], scheme="poster")
    angle = encoding.phases(vector([i["m_theta"]]))(vector([[[1.0, 1.0]]]))
    turned = rotate(vector([h.real, h.imag]).view(1, 1, 1, 2), angle, "interleaved").flatten()
    ours = complex(float(turned[0]), float(turned[1])) * 1j
    poster = complex(math.cos(i["m_theta"]), math.sin(i["m_theta"])) * (
        math.cos(i["phi"]) * complex(-h.imag, h.real) + math.sin(i["phi"]) * h
    )
    assert abs(poster - ours) < 1e-12
    return vector([ours.real, ours.imag])


def vo_output(i: dict[str, Any]) -> Tensor:
    found = []
    for shift in (0, 100):
        positions = at([i["query_pos"] + shift], [p + shift for p in i["key_pos"]])
        terms = VORoPE(head_dim=8, qk=False, layout=i["layout"], base=float(i["base"]))(positions)
        v = vector(i["values"])[None, None]
        logs = vector(i["weights"]).log()
        q, k = torch.ones(1, 1, 1, 1, dtype=torch.float64), logs.view(1, 1, 2, 1)
        found.append(attend(q, k, v, positions, terms, scale=1.0).flatten())
    torch.testing.assert_close(found[0], found[1], atol=1e-12, rtol=0)
    return found[0]


def sections(i: dict[str, Any]) -> dict[str, list[int]]:
    axes = MRoPE(head_dim=i["head_dim"], sections=tuple(i["mrope_section"])).axis_of_pair()
    found = {}
    for axis, name in enumerate("thw"):
        mine = [p for p, a in enumerate(axes) if a == axis]
        assert mine == list(range(mine[0], mine[-1] + 1))
        found[name] = [mine[0], mine[-1]]
    return found


def resonance(i: dict[str, Any], v: dict[str, Any]) -> dict[str, float]:
    encoding = ResonanceRoPE(head_dim=i["dim"], base=float(i["base"]))
    freqs = encoding.inv_freq()
    values = 2 * math.pi / freqs if v["method"] == "resonance.wavelengths" else freqs
    return {key: float(values[int(key)]) for key in v["expected"]}


def hope_pairs(i: dict[str, Any]) -> int:
    encoding = HoPE(head_dim=i["dim"], base=i["base"], trained_length=i["train_len"])
    return int((encoding.inv_freq() > 0).sum())


def fope_sizes(i: dict[str, Any]) -> dict[str, int]:
    encoding = FoPE(num_heads=1, head_dim=i["head_dim"], base=float(i["base"]), trained_length=i["L"])
    _, kept, out = encoding.cosine.shape
    return {"input_dim": kept, "output_dim": out}


def irope_scale(i: dict[str, Any]) -> Tensor:
    return llama4_temperature(torch.tensor(i["pos"]), i["floor_scale"], i["attn_scale"])


def irope_layers(i: dict[str, Any]) -> list[int]:
    schedule = IRoPE(head_dim=8, interval=i["interval"])
    return [n for n in range(i["n_layers"]) if isinstance(schedule.for_layer(n), ScaledNoPE)]


def bf16_positions(i: dict[str, Any]) -> Tensor:
    """The trap itself: what positions become in bfloat16; `test_rotary_precision` shows that ours are not rounded."""
    return torch.tensor(i["pos"]).to(torch.bfloat16).double()


B: dict[str, Any] = {
    "rope.apply_interleaved": lambda i: rope_apply("interleaved", i),
    "rope.apply_half_split": lambda i: rope_apply("half", i),
    "rope.layout_permutation": lambda i: layout_permutation(i["dim"]),
    "rope.score_relative": lambda i: score_pairs(RoPE(head_dim=8, layout=i["layout"]), i),
    "xpos.zeta": xpos_zeta,
    "xpos.score": lambda i: score_pairs(XPos(head_dim=8, scale_base=float(i["scale_base"])), i),
    "xpos.decay": xpos_decay,
    "rerope.rel_positions": lambda i: rerope_distance(i["query"] - torch.arange(i["query"] + 1), i["window"]),
    "leaky_rerope.rel_positions": lambda i: leaky_rerope_distance(
        i["query"] - torch.arange(i["query"] + 1), i["window"], i["k"]
    ),
    "rerope.logn_scale": lambda i: log_n_scale(torch.tensor(i["pos_plus_1"]) - 1, i["train_len"]),
    "self_extend.rel_positions": self_extend_row,
    "self_extend.not_toeplitz": self_extend_pairs,
    "self_extend.max_len": lambda i: self_extend_reach(i["train"], i["group"], i["window"]),
    "stair_pe.W": lambda i: stair_distance(distances(i["d"]), i["N"], i["E"]),
    "mesa.code_rel_positions_last_query": mesa_row,
    "mesa.dynamic_split_chunk": lambda i: [mesa_chunk(n, i["train"]) for n in i["inputs"]],
    "hope.n_fast_pairs": hope_pairs,
    "fope.kept_pairs": fope_sizes,
    "resonance.wavelengths": resonance,
    "resonance.inv_freq": resonance,
    "critical_dimension": lambda i: scaling_laws.critical_dimension(i["dim"], i["base"], i["T"]),
    "critical_base": lambda i: scaling_laws.critical_base(i["T_train"], i["T_tune"]),
    "extrapolation_limit": lambda i: scaling_laws.extrapolation_limit(i["base"], i["d_extra"], i["dim"]),
    "small_base_thresholds": lambda i: list(scaling_laws.small_base_thresholds(i["T_tune"])),
    "rope_base_lower_bound_fit": lambda i: [scaling_laws.base_lower_bound(n) for n in i["context"]],
    "irope.attn_scale": irope_scale,
    "irope.nope_layers": irope_layers,
    "rope2d_axial.freqs": axial_freqs,
    "rope2d_axial.angles": axial_angles,
    "rope2d_mixed.init": mixed_init,
    "rope2d_hf_axial.inv_freq": hf_axial,
    "3d_rpe.apply": three_d_apply,
    "vo_rope.output": vo_output,
    "lampe.map_len": lambda i: lampe_mapped_length(torch.tensor(i["ctx"]), fit=i["model"]),
    "mrope.sections": sections,
    "trap.bf16_positions": bf16_positions,
    "lrpe.type1_theta": lambda i: LRPE(num_heads=i["num_heads"], head_dim=i["head_dim"]).frequencies(),
}


def lrpe_query(encoding: LRPE, x: list[float], positions: list[int]) -> Tensor:
    (branch,) = encoding(at(positions, [0])).branches
    return branch.query(vector(x).view(1, 1, 1, -1).expand(1, 1, len(positions), -1))[0, 0]


def householder(i: dict[str, Any]) -> Tensor:
    encoding = LRPE(num_heads=1, head_dim=4, projection="householder").double()
    with torch.no_grad():
        encoding.mirror.copy_(vector(i["v"]))
    return lrpe_query(encoding, i["x"], [0])[0]


def unitary(i: dict[str, Any]) -> Tensor:
    encoding = LRPE(num_heads=1, head_dim=4, kind="unitary")
    torch.testing.assert_close(encoding.frequencies()[0], vector(i["theta"]), atol=0, rtol=1e-12)
    return lrpe_query(encoding, i["x"], i["pos"])


def unitary_dot(i: dict[str, Any]) -> Tensor:
    encoding = LRPE(num_heads=1, head_dim=4, kind="unitary")
    positions = at([i["s"]], [i["t"]])
    return logits(encoding(positions), vector([i["q"]]), vector([i["k"]]), positions)[0, 0]


def mixed(i: dict[str, Any]) -> Tensor:
    encoding = LRPE(num_heads=1, head_dim=4, kind="mixed", ladder="head")
    assert encoding.config.rotated == i["rotated_dims"]
    return lrpe_query(encoding, i["x"], [i["pos"]])[0]


def permuted(i: dict[str, Any]) -> Tensor:
    return vector(i["x"])[PermutationPowers(i["perm"])(torch.tensor(i["pos"]))]


A: dict[str, Any] = {
    "lrpe_unitary": unitary,
    "lrpe_unitary_dot": unitary_dot,
    "lrpe_householder": householder,
    "lrpe_orthogonal_mixed": mixed,
    "lrpe_permutation": permuted,
}
VECTOR_HANDLERS = {**A, **B}


@pytest.mark.parametrize("vector", [*cases("vectors-a.json", A), *cases("vectors-b.json", B)], ids=vector_id)
def test_vector(vector: dict[str, Any]) -> None:
    check(vector, VECTOR_HANDLERS)


# ---- identities -----------------------------------------------------------------------------------------------------


def test_p_rope_is_rope_at_one_and_nope_at_zero() -> None:
    torch.testing.assert_close(build("p-rope", head_dim=16, proportion=1.0).inv_freq(), RoPE(head_dim=16).inv_freq())
    assert not build("p-rope", head_dim=16, proportion=0.0).inv_freq().any()


@pytest.mark.parametrize(("base", "length"), [(10000.0, 4096), (500000.0, 4096), (10000.0, 100)])
def test_hope_is_p_rope_with_its_cut(base: float, length: int) -> None:
    hope = HoPE(head_dim=128, base=base, trained_length=length)
    share = int((hope.inv_freq() > 0).sum()) / 64
    p_rope = build("p-rope", head_dim=128, base=base, proportion=share)
    torch.testing.assert_close(hope.inv_freq(), p_rope.inv_freq(), atol=0, rtol=1e-15)


def test_fope_with_identity_coefficients_is_hope() -> None:
    q, k = torch.randn(2, 9, 64, dtype=torch.float64).unbind()
    positions = Positions.full(9)
    fope = FoPE(num_heads=1, head_dim=64, trained_length=512, init="identity")
    assert fope.config.sizes == (16, 16)
    hope = HoPE(head_dim=64, trained_length=512)
    torch.testing.assert_close(
        logits(fope(positions), q, k, positions), logits(hope(positions), q, k, positions), atol=1e-12, rtol=0
    )


def test_fope_starts_at_identity_plus_noise_and_is_fixed_but_saved() -> None:
    fope = FoPE(num_heads=3, head_dim=64, trained_length=1024, gain=0.3)
    noise = FoPE(num_heads=3, head_dim=64, trained_length=1024, gain=0.0)
    kept, out = 18, 16
    assert noise.cosine.shape == (3, kept, out)
    assert int(noise.cosine.sum()) == 3 * 9  # a stride of two gives nine of sixteen columns an entry
    spread = float((fope.cosine - noise.cosine).std())
    assert spread == pytest.approx(0.3 * math.sqrt(2 / (kept + out)), rel=0.1)
    assert not fope.cosine.requires_grad and "cosine" in fope.state_dict()
    assert not torch.equal(fope.cosine, fope.sine)
    mixing = FoPE(num_heads=1, head_dim=16, trained_length=512, init="identity", sine_padding=1.0)
    (branch,) = mixing(Positions.full(1)).branches
    x = torch.randn(1, 1, 1, 16)
    assert not torch.allclose(branch.query(x).norm(), x.norm())  # the published padding changes norms


def test_m_rope_on_text_is_rope() -> None:
    x = torch.randn(1, 2, 9, 32, dtype=torch.float64)
    positions = Positions.full(9)
    for interleaved in (False, True):
        (mine,) = MRoPE(head_dim=32, interleaved=interleaved)(positions).branches
        (rope,) = RoPE(head_dim=32)(positions).branches
        torch.testing.assert_close(mine.query(x), rope.query(x), atol=0, rtol=0)


def test_lrpe_rotation_with_one_ladder_a_head_is_rope() -> None:
    x = torch.randn(1, 2, 9, 16, dtype=torch.float64)
    positions = Positions.full(9)
    (mine,) = LRPE(num_heads=2, head_dim=16, ladder="head")(positions).branches
    (rope,) = RoPE(head_dim=16, layout="interleaved")(positions).branches
    torch.testing.assert_close(mine.query(x), rope.query(x), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "rotation", "projection": "householder"},
        {"kind": "mixed", "projection": "dct"},
        {"kind": "permutation", "projection": "odd-even"},
        {"kind": "unitary", "projection": "dft"},
        {"kind": "cosformer", "trained_length": 40, "ladder": "slow"},
        {"kind": "rotation", "ladder": "slow"},
    ],
    ids=lambda o: "-".join(map(str, o.values())),
)
def test_lrpe_depends_on_the_distance_alone(options: dict[str, Any]) -> None:
    encoding = LRPE(num_heads=1, head_dim=8, **options).double()
    q, k = torch.randn(2, 1, 8, dtype=torch.float64).unbind()
    found = []
    for shift in (0, 7, 1000):
        positions = at([9 + shift], [4 + shift])
        found.append(logits(encoding(positions), q, k, positions))
    torch.testing.assert_close(found[0], found[1], atol=1e-11, rtol=0)
    torch.testing.assert_close(found[0], found[2], atol=1e-9, rtol=0)
    other = at([10], [4])
    assert not torch.allclose(found[0], logits(encoding(other), q, k, other))


def test_three_d_rpe_without_phase_inside_one_chunk_is_rope() -> None:
    q, k, v = torch.randn(3, 1, 2, 12, 16, dtype=torch.float64).unbind()
    positions = Positions.full(12)
    rope = attend(q, k, v, positions, RoPE(head_dim=16)(positions))
    mine = attend(q, k, v, positions, ThreeDRPE(head_dim=16, chunk=12, phase=0.7)(positions))
    torch.testing.assert_close(mine, rope, atol=1e-12, rtol=0)


def test_three_d_rpe_distances() -> None:
    """The angle of every pair of tokens, from the definition, with the chunk's phase apart from the position."""
    size, local, phase, n = 4, 2, 0.3, 14
    encoding = ThreeDRPE(head_dim=2, chunk=size, local=local, phase=phase)
    positions = Positions.full(n)
    terms = encoding(positions)
    q = torch.tensor([1.0, 0.0], dtype=torch.float64).expand(1, 1, n, 2)
    for branch in terms.branches:
        turned_q, turned_k = branch.query(q)[0, 0], branch.key(q, at="keys")[0, 0]
        mine = branch.pairs(positions)[0]
        for i in range(n):
            for j in range(i + 1):
                chunks = i // size - j // size
                if not mine[i, j]:
                    continue
                place = {0: i % size, 1: min(i % size + size, size + local)}.get(
                    chunks, min(2 * size - 1, size + local)
                )
                wanted = math.cos(place - j % size - chunks * phase)
                assert float(turned_q[i] @ turned_k[j]) == pytest.approx(wanted, abs=1e-12)
    ruled = sum(branch.pairs(positions).long() for branch in terms.branches)
    assert bool((ruled[0].tril() == torch.ones(n, n).tril()).all())


def test_stair_is_self_extend_where_the_paper_says() -> None:
    """Rounded down, with a window that the group divides, for a query at the start of a group."""
    group, window, i = 4, 8, 24
    j = torch.arange(i + 1)
    stair = stair_distance(i - j, window, group, "floor")
    extended = self_extend_distance(torch.tensor(i), j, group, window)
    same = (j % group == 0) | (i - j < window)
    assert torch.equal(stair[same], extended[same])


def test_stair_without_stairs_is_rope() -> None:
    q, k, v = torch.randn(3, 1, 2, 20, 16, dtype=torch.float64).unbind()
    positions = Positions.full(20)
    rope = attend(q, k, v, positions, RoPE(head_dim=16)(positions))
    for options in ({"window": 20, "step": 9}, {"window": 3, "step": 1}):
        mine = attend(q, k, v, positions, Stair(head_dim=16, **options)(positions))
        torch.testing.assert_close(mine, rope, atol=1e-12, rtol=0)
    grouped = attend(q, k, v, positions, SelfExtend(head_dim=16, group=1, window=3)(positions))
    torch.testing.assert_close(grouped, rope, atol=1e-12, rtol=0)


def test_xpos_scalar_form() -> None:
    q, k = torch.randn(2, 9, 8, dtype=torch.float64).unbind()
    v = torch.eye(9, dtype=torch.float64)
    positions = Positions.full(9)
    terms = XPos(head_dim=8, decay="scalar", gamma=0.8)(positions)
    rope = logits(RoPE(head_dim=8, layout="interleaved")(positions), q, k, positions)
    i = torch.arange(9)
    decayed = rope * 0.8 ** (i[:, None] - i).clamp(min=0).double()
    wanted = torch.softmax(decayed.masked_fill(i[:, None] < i, -torch.inf), -1)
    found = attend(q[None, None], k[None, None], v[None, None], positions, terms, scale=1.0)[0, 0]
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)


def test_reach_of_a_checkpoint() -> None:
    untouched = scaling_laws.reach(rotary_dim=128, trained_length=4096)
    assert (untouched.limit, untouched.bound_by) == (4096, "training")
    large = scaling_laws.reach(rotary_dim=128, trained_length=4096, tuned_base=1e6, tuned_length=16384)
    assert large.limit == pytest.approx(scaling_laws.extrapolation_limit(1e6, 92, 128))
    assert large.bound_by == "critical dimension" and "critical dimension" in str(large)
    small = scaling_laws.reach(rotary_dim=128, trained_length=4096, tuned_base=20000.0, tuned_length=16384)
    assert small.bound_by == "tuned length" and small.limit >= 16384
    for call in (
        lambda: scaling_laws.critical_dimension(7, 10000.0, 4096),
        lambda: scaling_laws.critical_dimension(128, 1.0, 4096),
        lambda: scaling_laws.critical_base(6, 4096),
        lambda: scaling_laws.extrapolation_limit(1e4, 200, 128),
        lambda: scaling_laws.small_base_thresholds(0),
        lambda: scaling_laws.base_lower_bound(0),
    ):
        with pytest.raises(ValueError):
            call()
