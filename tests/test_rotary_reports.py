"""Public reports of rotary code gone wrong, each by its id, and the precision of our own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from milepost import Mapped, Positions, attend, build
from milepost.encodings.axial import Grid, RoPE2D, grid_positions
from milepost.encodings.relmaps import plan_self_extend, self_extend_distance, self_extend_reach
from milepost.encodings.rotary import RoPE, apply_rotary, join_caches, rotate_cache
from milepost.encodings.xpos import XPos
from milepost.testing import AttentionLayer

CASES = {c["id"]: c for c in json.loads((Path(__file__).parent / "data" / "public-reports.json").read_text())}


def case(name: str) -> tuple[dict[str, Any], Any]:
    return CASES[name]["input"], CASES[name]["expected"]


def dot(encoding: Any, q: Tensor, k: Tensor, positions: Positions) -> Tensor:
    (branch,) = encoding(positions).branches
    return branch.query(q) @ branch.key(k, at="keys").mT


def angles_of(encoding: Any, where: Tensor) -> Tensor:
    """(n, P): angles in [-pi, pi] that the encoding gives positions ``(1, n[, axes])``."""
    positions = Positions.cross(where.shape[1], where.shape[1]).mapped(where, where)
    (branch,) = encoding(positions).branches
    pairs = encoding.config.head_dim // 2
    layout = encoding.config.layout
    x = torch.zeros(1, 1, where.shape[1], 2 * pairs, dtype=torch.float64)
    first, second = (
        (slice(0, pairs), slice(pairs, None)) if layout == "half" else (slice(0, None, 2), slice(1, None, 2))
    )
    x[..., first] = 1.0
    turned = branch.query(x)[0, 0]
    return torch.atan2(turned[..., second], turned[..., first])


def test_pe_24_xpos_at_the_lengths_that_overflow() -> None:
    given, wanted = case("PE-24")
    encoding = XPos(head_dim=given["dim"], scale_base=float(given["scale_base"]))
    zeta = encoding.zeta()
    assert float(zeta[0]) == pytest.approx(given["zeta0"], abs=1e-15)
    edge = given["L"] / 2 * float(encoding.rate()[0]) / math.log(10)
    assert edge == pytest.approx(wanted["scale_at_edge_log10"], rel=1e-6)
    assert edge > wanted["fp32_max_log10"]  # two separate factors cannot hold it
    assert float(zeta[0] ** (1000 / given["scale_base"])) == pytest.approx(
        wanted["pair_weight_distance_1000"], rel=1e-7
    )
    q, v = torch.randn(1, 1, 4, given["dim"]), torch.randn(1, 1, given["L"], 8)
    k = torch.randn(1, 1, given["L"], given["dim"])
    positions = Positions.full(given["L"], queries=4)
    found = attend(q, k, v, positions, encoding(positions))
    assert bool(torch.isfinite(found).all())
    limit = encoding.separable_length()
    assert limit is not None and limit < given["L"]
    # A million positions further on, the same tokens weigh the same: only distances count.
    here = Positions.full(3001, queries=4)
    tail_k, tail_v = k[:, :, -3001:], v[:, :, -3001:]
    near = attend(q, tail_k, tail_v, here, encoding(here))
    far = attend(q, tail_k, tail_v, here, encoding(here.mapped(here.query + 10**6, here.key + 10**6)))
    torch.testing.assert_close(far, near, atol=2e-5, rtol=0)
    half = encoding.separable_length(torch.float16)
    (branch,) = encoding(Positions.full(half + 1, queries=1)).branches  # type: ignore[operator]
    with pytest.raises(ValueError, match=f"holds {half} keys in float16"):
        branch.query(torch.randn(1, 1, 1, given["dim"], dtype=torch.float16))


def test_xpos_in_blocks_is_xpos_in_one_piece() -> None:
    """Long calls have a centre for each block of queries; the result is the definition's."""
    n, fast = 60, XPos(head_dim=8, scale_base=2.0)
    q, k, v = torch.randn(3, 1, 2, n, 8, dtype=torch.float64).unbind()
    positions = Positions.full(n)
    assert (fast.separable_length() or 0) > n
    slow = XPos(head_dim=8, scale_base=2.0)
    slow.separable_length = lambda dtype=torch.float32: 12  # type: ignore[method-assign]  # forces the blocks
    one, blocks = fast(positions), slow(positions)
    assert one.scores is None and blocks.scores is not None
    torch.testing.assert_close(attend(q, k, v, positions, blocks), attend(q, k, v, positions, one), atol=1e-9, rtol=0)


def test_pe_46_xpos_decodes_as_it_prefills_and_refuses_encoders() -> None:
    given, wanted = case("PE-46")
    encoding = XPos(head_dim=given["dim"], scale_base=float(given["scale_base"]))
    n = given["k_len"]
    q, k = torch.randn(1, 2, n, given["dim"]), torch.randn(1, 2, n, given["dim"])
    full = dot(encoding, q, k, Positions.full(n))
    step = dot(encoding, q[:, :, -1:], k, Positions.step(n - given["q_len"]))
    torch.testing.assert_close(step[0, :, 0], full[0, :, -1], atol=wanted["tol"], rtol=0)
    with pytest.raises(ValueError, match=r"rope, alibi or bipe"):
        encoding(Positions.full(5, causal=False))


def test_pe_34_packed_documents_start_at_their_own_zero() -> None:
    given, wanted = case("PE-34")
    lengths = [given["doc_ids"].count(d) for d in sorted(set(given["doc_ids"]))]
    positions = Positions.packed(lengths)
    assert positions.key[0].tolist() == given["position_ids"]
    encoding = RoPE(head_dim=given["dim"], base=given["base"])
    angles = encoding.phases(encoding.inv_freq())(positions.query)[0, :, 0]
    assert angles.tolist() == wanted["angles_pair0"]
    row = positions.distance()[0, 4].tolist()
    allowed = positions.allowed()[0, 4].tolist()
    assert ["masked" if not ok else d for d, ok in zip(row, allowed, strict=True)] == wanted["bias_distance_row4"]
    q, k, v = torch.randn(3, 1, 2, 7, 4).unbind()
    twice = [torch.cat([x, x], 2) for x in (q, k, v)]
    encoding, positions = RoPE(head_dim=4), Positions.packed([7, 7])
    out = attend(*twice, positions, encoding(positions))
    torch.testing.assert_close(out[:, :, :7], out[:, :, 7:], atol=1e-6, rtol=0)


def test_pe_36_partial_rotary_leaves_the_rest_bit_equal() -> None:
    given, wanted = case("PE-36")
    encoding = RoPE(head_dim=given["head_dim"], partial=given["partial_rotary_factor"], base=given["base"])
    assert encoding.config.rotary_dim == wanted["rotary_dim"]
    torch.testing.assert_close(
        encoding.inv_freq(), torch.tensor(wanted["inv_freq"], dtype=torch.float64), atol=1e-12, rtol=0
    )
    assert len(encoding.inv_freq()) != wanted["wrong_inv_freq_len"]
    x = torch.randn(1, 2, 9, given["head_dim"])
    (branch,) = encoding(Positions.full(9)).branches
    same = (branch.query(x) == x).all(dim=(0, 1, 2))
    assert same[wanted["channels_untouched"]].all() and not same[: wanted["rotary_dim"]].any()


def test_pe_40_the_order_of_axes_is_said_or_refused() -> None:
    given, wanted = case("PE-40")
    batch, length, count, width = given["q_shape"]
    inv_freq = RoPE(head_dim=width, base=given["base"]).inv_freq()
    ones, at = torch.ones(given["q_shape"], dtype=torch.float64), torch.arange(length)
    turned = apply_rotary(ones, at, inv_freq, axes="bnhd", layout="interleaved")
    scores = torch.einsum("bihd,bjhd->bhij", turned, turned)
    assert torch.allclose(scores[:, 0], scores[:, 1])
    for i in range(length):
        for j in range(i + 1):
            assert float(scores[0, 0, i, j]) == pytest.approx(
                wanted["score_distance"][str(i - j)], abs=CASES["PE-40"]["tol"]
            )
    with pytest.raises(ValueError, match="order of axes"):
        apply_rotary(ones, at, inv_freq, axes="bhnd", layout="interleaved")
    with pytest.raises(TypeError, match="axes"):
        apply_rotary(ones, at, inv_freq, layout="interleaved")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"\(batch, heads, length, head_dim\)"):
        attend(ones, ones, ones, Positions.full(length))
    square = torch.randn(1, 3, 3, 4, dtype=torch.float64)
    one = apply_rotary(square, torch.arange(3), inv_freq, axes="bhnd", layout="half")
    other = apply_rotary(square, torch.arange(3), inv_freq, axes="bnhd", layout="half")
    assert not torch.allclose(one, other)
    assert batch == 1 and count == 2


def test_pe_41_axes_of_an_image_that_is_not_square() -> None:
    given, wanted = case("PE-41")
    cells = grid_positions((given["H"], given["W"]))
    assert cells[0].tolist() == wanted["coords"]
    assert cells[0, 3].tolist() == wanted["token3"] != wanted["swapped_would_give_token3"]
    mapped = Grid(shape=(given["H"], given["W"]))(Positions.full(6, causal=False))
    assert torch.equal(mapped.query, cells)
    for packing, key in (("segments", "angles_token5_segmented"), ("interleaved", "angles_token5_interleaved_hw")):
        encoding = RoPE2D(
            head_dim=given["dim"],
            base=given["base"],
            axis_order="hw",
            packing=packing,  # type: ignore[arg-type]
        )
        found = angles_of(encoding, cells)[5]
        torch.testing.assert_close(found, torch.tensor(wanted[key], dtype=torch.float64), atol=1e-9, rtol=0)
        swapped = RoPE2D(
            head_dim=given["dim"],
            base=given["base"],
            axis_order="wh",
            packing=packing,  # type: ignore[arg-type]
        )
        assert not torch.allclose(angles_of(swapped, cells)[5], found)


def test_pe_48_group_and_window_for_a_wished_length() -> None:
    given, wanted = case("PE-48")
    for c, formula, largest in zip(
        given["cases"], wanted["formula"], wanted["largest_L_with_all_distances_below_trained"], strict=True
    ):
        trained, window, group = c["trained"], c["window"], c["group"]
        assert (trained - window) * group + window == formula
        reach = self_extend_reach(trained, group, window)
        assert reach == largest

        def longest(n: int, group: int = group, window: int = window) -> int:
            return int(self_extend_distance(torch.tensor(n - 1), torch.arange(n), group, window).max())

        assert longest(reach) == trained - 1 and longest(reach + 1) == trained
    plan = plan_self_extend(4096, 16384)
    assert plan.reach >= 16384 and plan.used <= 2 / 3
    assert str(plan.reach) in str(plan) and "16384" in str(plan) and "weak" not in str(plan)
    tight = plan_self_extend(4096, 16384, window=3000)
    assert tight.reach >= 16384 and "weak" in str(tight)
    assert plan_self_extend(4096, 16384, window=3000).group == tight.group
    with pytest.raises(ValueError, match="window lies between"):
        plan_self_extend(4096, 16384, window=4096)


def test_pe_50_positions_after_eviction_are_stored_not_counted() -> None:
    given, wanted = case("PE-50")
    kept, total = given["kept_suffix"], given["prefix"] + given["kept_suffix"]
    encoding = RoPE(head_dim=16)
    q, k = torch.randn(1, 2, kept + 1, 16), torch.randn(1, 2, kept + 1, 16)
    ids = torch.arange(given["prefix"], total + 1)[None]
    assert int(ids[0, -1]) == wanted["next_position"] != wanted["wrong"]
    evicted = Positions.from_mask(torch.ones(1, kept + 1), queries=1, position_ids=ids)
    alone = Positions.step(kept)
    torch.testing.assert_close(
        dot(encoding, q[:, :, -1:], k, evicted), dot(encoding, q[:, :, -1:], k, alone), atol=1e-5, rtol=0
    )


def test_pe_51_joined_caches_are_rotated_first() -> None:
    given, wanted = case("PE-51")
    first, second = given["fragment_lengths"]
    for head_dim in (given["dim"], 16):
        encoding = RoPE(head_dim=head_dim, base=given["base"])
        k = torch.randn(1, 2, first + second, head_dim)
        q = torch.randn(1, 2, 1, head_dim)

        def cached(x: Tensor, encoding: RoPE = encoding) -> tuple[Tensor, Tensor]:
            positions = Positions.full(x.shape[2])
            return encoding(positions).prepare(x, x)[0], positions.key

        a, b = cached(k[:, :, :first]), cached(k[:, :, first:])
        with pytest.raises(ValueError, match="rotate_cache"):
            join_caches([a, b])
        delta = wanted["rerotate_second_by"]
        joined, where = join_caches([a, (rotate_cache(encoding, b[0], delta), b[1] + delta)])
        whole, at = cached(k)
        assert torch.equal(where, at)
        positions = Positions.full(first + second, queries=1)
        (branch,) = encoding(positions).branches
        torch.testing.assert_close(branch.query(q) @ joined.mT, branch.query(q) @ whole.mT, atol=wanted["tol"], rtol=0)
    growing = build("dynamic-ntk", head_dim=16, trained_length=8)
    with pytest.raises(ValueError, match="cache raw keys"):
        rotate_cache(growing, k, 5)  # type: ignore[arg-type]


def test_pe_52_offsets_are_arguments_not_cache_keys() -> None:
    given, wanted = case("PE-52")
    encoding = RoPE2D(head_dim=given["dim"], axis_order="hw")
    found = []
    for call in (*given["calls"], given["calls"][0]):
        cells = grid_positions(call["axial"], offsets=call.get("offsets"))
        found.append(float(encoding.inv_freq()[0] * cells[0, 0, 0]))
        turned = angles_of(encoding, cells)[0, 0]
        assert math.cos(float(turned) - found[-1]) == pytest.approx(1.0)
    assert found == [wanted["wrong"], wanted["second_call_angle_000"], 0.0]
    with pytest.raises(ValueError, match="one offset an axis"):
        grid_positions((4, 4), offsets=(5,))


def test_a_class_token_is_not_rotated() -> None:
    encoding = Mapped(Grid(shape=(2, 3), prefix=1), RoPE2D(head_dim=8))
    x = torch.randn(1, 1, 7, 8)
    (branch,) = encoding(Positions.full(7, causal=False)).branches
    turned = branch.query(x)
    assert torch.equal(turned[:, :, :2], x[:, :, :2])  # the class token, and the cell at the origin
    assert not torch.allclose(turned[:, :, 2:], x[:, :, 2:])


# ---- precision ------------------------------------------------------------------------------------------------------


def test_phases_at_a_million_are_exact_to_float32() -> None:
    encoding = RoPE(head_dim=128)
    at = torch.tensor([[0, 4097, 131072, 999_999, 2_097_151, 10**9]])
    x = torch.zeros(1, 1, 6, 128)
    x[..., :64] = 1.0
    (branch,) = encoding(Positions.cross(6, 6).mapped(at, at)).branches
    exact = (at[0, :, None].double() * encoding.inv_freq()).cos()
    torch.testing.assert_close(branch.query(x)[0, 0, :, :64].double(), exact, atol=3e-7, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_cast_model_keeps_its_positions(dtype: torch.dtype) -> None:
    given = next(
        v
        for v in json.loads((Path(__file__).parent / "data" / "vectors-b.json").read_text())["vectors"]
        if v["method"] == "trap.hf_to_bf16_phase_error"
    )
    inputs = given["inputs"]
    encoding = RoPE(head_dim=inputs["head_dim"], base=float(inputs["base"])).to(dtype)
    at = torch.tensor([[inputs["pos"]]])
    x = torch.zeros(1, 1, 1, inputs["head_dim"], dtype=dtype)
    x[..., : inputs["head_dim"] // 2] = 1.0
    (branch,) = encoding(Positions.cross(1, 1).mapped(at, at)).branches
    exact = (inputs["pos"] * encoding.inv_freq()).cos()
    found = branch.query(x)[0, 0, 0, : inputs["head_dim"] // 2]
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, atol=4e-3, rtol=0)
    cast = encoding.inv_freq().to(dtype).double() * inputs["pos"]
    trap = float((cast - inputs["pos"] * encoding.inv_freq()).abs().max())
    assert trap > given["expected"] / 10  # what a rounded table would have cost, in radians


def test_one_row_never_changes_another() -> None:
    """Length-dependent frequencies of a padded batch: each row is what it is alone (PE-19)."""
    layer = AttentionLayer(2, 2, 16, 32)
    encoding = build("dynamic-ntk", head_dim=16, trained_length=8).double()
    x = torch.randn(2, 30, 32, dtype=torch.float64)
    mask = torch.ones(2, 30)
    mask[1, 6:] = 0
    tokens = torch.zeros(2, 30, dtype=torch.long)
    both = layer.run(
        encoding, x, tokens, positions=lambda stop, n: Positions.from_mask(mask[:, :stop], side="right", queries=n)
    )
    short = layer.run(encoding, x[1:, :6], tokens[1:, :6])
    torch.testing.assert_close(both[1:, :, :6], short, atol=1e-12, rtol=0)
    plain = layer.run(RoPE(head_dim=16), x[1:, :6], tokens[1:, :6])
    torch.testing.assert_close(short, plain, atol=1e-12, rtol=0)
    assert not torch.allclose(both[:1], layer.run(RoPE(head_dim=16), x[:1], tokens[:1]))
