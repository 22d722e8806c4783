"""Position maps: what is drawn, that it is drawn once, that caches and rows keep it, and the levels of a text."""

from __future__ import annotations

import textwrap
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from milepost import Encoding, Mapped, PositionMap, Positions, attend, build
from milepost.encoding import build_for
from milepost.encodings.maps import CAPE, SHAPE, HiRoPE, PoSE, Randomized, RandomizedDistances, Segmented
from milepost.encodings.maps.draws import below, mix, uniform
from milepost.encodings.maps.hirope import python_levels
from milepost.encodings.maps.randomized import SortedDraw
from milepost.encodings.separators import segments

GEOMETRY = {"width": 16, "trained_length": 32, "vocab_size": 256, "num_heads": 4, "head_dim": 4, "num_layers": 2}
RANDOM = [
    "shape", "cape2021", "pose-rope", "randomized-sinusoidal", "randomized-learned", "randomized-rope",
    "randomized-alibi",
]  # fmt: skip


def make(name: str, **options: object) -> Encoding:
    return build_for(name, GEOMETRY, **options)


def run(encoding: Encoding, x: Tensor, positions: Positions, tokens: Tensor | None = None) -> Tensor:
    h = encoding.embed(x, positions, tokens).unflatten(-1, (4, 4)).transpose(1, 2)
    return attend(h, h.flip(1), h, positions, encoding(positions, tokens))


# ---- draws ----------------------------------------------------------------------------------------------------------


def test_draws_are_even_and_pure() -> None:
    index = torch.arange(100_000)
    values = uniform(7, index)
    assert torch.equal(values, uniform(7, index)) and not torch.equal(values, uniform(8, index))
    assert torch.equal(values[123:], uniform(7, index[123:]))
    counts = torch.histc(values, 20, 0, 1)
    assert float(counts.min()) > 4700 and float(counts.max()) < 5300
    pairs = torch.histc(uniform(3, index // 317, index % 317), 20, 0, 1)
    assert float(pairs.min()) > 4700 and float(pairs.max()) < 5300
    assert int(mix(index).unique().numel()) > 99_990
    assert below(3, 1, index).unique().tolist() == [0, 1, 2]
    assert abs(float(torch.corrcoef(torch.stack([values[1:], values[:-1]]))[0, 1])) < 0.02


@given(size=st.integers(1, 300), share=st.floats(0, 1), seed=st.integers(0, 2**31 - 1))
def test_a_sorted_draw_is_sorted_distinct_and_in_range(size: int, share: float, seed: int) -> None:
    count = max(1, round(share * size))
    drawn = SortedDraw(torch.tensor([[count]]), size, seed)(torch.arange(count)[None])[0]
    assert bool((drawn.diff() > 0).all()) and int(drawn[0]) >= 0 and int(drawn[-1]) < size
    assert SortedDraw(torch.tensor([[size]]), size, seed)(torch.arange(size)[None])[0].tolist() == list(range(size))


def test_every_position_is_drawn_equally_often() -> None:
    drawn = SortedDraw(torch.full((1, 1), 5), 20, torch.arange(4000)[:, None])(torch.arange(5)[None])
    share = torch.bincount(drawn.flatten(), minlength=20) / 4000
    assert float((share - 0.25).abs().max()) < 0.03


@pytest.mark.parametrize("name", RANDOM)
def test_training_draws_follow_the_seed_and_evaluation_draws_nothing(name: str) -> None:
    encoding, x, tokens, positions = make(name), torch.randn(2, 24, 16), torch.zeros(2, 24).long(), Positions.full(24)

    def once(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return run(encoding, x, positions, tokens).detach()

    assert torch.equal(once(5), once(5))
    assert not torch.allclose(once(5), once(6))
    encoding.eval()
    state = torch.random.get_rng_state()
    assert torch.equal(run(encoding, x, positions), run(encoding, x, positions, tokens))
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("name", RANDOM)
def test_gradient_checkpointing_draws_the_same_again(name: str) -> None:
    encoding, tokens, positions = make(name), torch.zeros(2, 24).long(), Positions.full(24)
    x = torch.randn(2, 24, 16, requires_grad=True)

    def gradient(kept: bool) -> Tensor:
        torch.manual_seed(3)
        if kept:
            out = run(encoding, x, positions, tokens)
        else:
            out = checkpoint(run, encoding, x, positions, tokens, use_reentrant=False)
        return torch.autograd.grad(out.square().sum(), x)[0]

    assert torch.equal(gradient(True), gradient(False))


def test_an_unread_map_draws_nothing() -> None:
    encoding = make("randomized-rope")
    state = torch.random.get_rng_state()
    encoding.embed(torch.zeros(1, 4, 16), Positions.full(4))
    assert torch.equal(torch.random.get_rng_state(), state)


# ---- SHAPE and CAPE -------------------------------------------------------------------------------------------------


def test_shape_gives_all_tokens_of_a_sequence_one_shift() -> None:
    positions, tokens = Positions.full(9), torch.zeros(50, 9).long()
    shifted = SHAPE(max_shift=10)(positions, tokens)
    shift = shifted.key - positions.key
    assert shift.shape == (50, 9) and torch.equal(shift, shift[:, :1].expand(-1, 9))
    assert sorted(shift[:, 0].unique().tolist()) == list(range(10))
    assert torch.equal(shifted.query, shifted.key) and shifted.slot_distance
    assert torch.equal(shifted.distance()[:1], positions.distance())
    packed = Positions.packed([4, 5, 3])
    per_document = (SHAPE(max_shift=1000)(packed).key - packed.key)[0]
    assert [len(set(part.tolist())) for part in per_document.split([4, 5, 3])] == [1, 1, 1]
    assert len(set(per_document.tolist())) == 3


@pytest.mark.parametrize(("test_shift", "k"), [("full", 7), ("half", 3), ("zero", 0)])
def test_shape_outside_training(test_shift: str, k: int) -> None:
    positions = Positions.step(20, queries=2)
    found = SHAPE(max_shift=7, test_shift=test_shift).eval()(positions)
    assert torch.equal(found.key, positions.key + k) and torch.equal(found.query, positions.query + k)


def test_shape_moves_absolute_codes_only() -> None:
    positions, x = Positions.full(9), torch.randn(2, 9, 16)
    inner = build("rope", head_dim=4)
    torch.testing.assert_close(run(Mapped(SHAPE(), inner), x, positions), run(inner, x, positions), atol=1e-5, rtol=0)
    code = build("sinusoidal", width=16).embed(torch.zeros(1, 9, 16), replace(positions, query=positions.query + 500))
    assert torch.equal(make("shape").eval().embed(torch.zeros(1, 9, 16), positions), code)
    assert make("shape", encoding="learned").mapped.encoding.config.trained_length == 32 + 500


def test_cape_draws_shift_jitter_and_scale_within_their_bounds() -> None:
    positions, tokens = Positions.full(40), torch.zeros(300, 40).long()
    only_shift = CAPE(max_global_shift=5.0, max_local_shift=0, max_scale=1)(positions, tokens).key - positions.key
    torch.testing.assert_close(only_shift, only_shift[:, :1].expand(-1, 40))
    assert -5 <= float(only_shift.min()) < -4.5 and 4.5 < float(only_shift.max()) <= 5
    jitter = CAPE(max_global_shift=0, max_local_shift=0.5, max_scale=1)(positions, tokens).key - positions.key
    assert -0.5 <= float(jitter.min()) < -0.49 and 0.49 < float(jitter.max()) <= 0.5
    assert float(jitter[0].std()) > 0.2 and not torch.allclose(jitter[0], jitter[1])
    scale = CAPE(max_global_shift=0, max_local_shift=0, max_scale=2.0)(positions, tokens).key[:, 1:] / torch.arange(
        1, 40
    )
    torch.testing.assert_close(scale, scale[:, :1].expand(-1, 39))
    assert 0.5 <= float(scale.min()) < 0.55 and 1.9 < float(scale.max()) <= 2
    assert CAPE().eval()(positions) is positions
    sorted_ = CAPE(max_local_shift=0.5)(positions, tokens).key
    assert bool((sorted_.diff(dim=-1) >= 0).all())


def test_cape_normalizes_by_the_mean_of_the_tokens_and_not_in_causal_attention() -> None:
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    both_ways = Positions.from_mask(mask, causal=False)
    normal = CAPE(normalize=True).eval()
    assert normal(both_ways).key.tolist()[0][1:] == [-1, 0, 1]
    assert normal(both_ways).query.tolist()[1] == [-1.5, -0.5, 0.5, 1.5]
    packed = Positions.packed([3, 2], causal=False)
    assert normal(packed).key.tolist() == [[-1, 0, 1, -0.5, 0.5]]
    assert normal(Positions.packed([3, 2], causal=False, reset=False)).query.tolist() == [[-1, 0, 1, -0.5, 0.5]]
    with pytest.raises(ValueError, match="normalize"):
        normal(Positions.full(4))


# ---- PoSE -----------------------------------------------------------------------------------------------------------


def test_pose_skips_once_within_the_target_and_only_in_training() -> None:
    positions, tokens = Positions.full(12), torch.zeros(400, 12).long()
    key = PoSE(target_length=40)(positions, tokens).key
    steps = key.diff(dim=-1)
    assert bool((key[:, 0] == 0).all()) and int(key.max()) == 39 and bool((steps >= 1).all())
    assert bool(((steps > 1).sum(-1) <= 1).all())
    cut = (steps > 1).int().argmax(-1)[(steps > 1).any(-1)] + 1
    assert sorted(cut.unique().tolist()) == [1, 2, 3, 4, 5, 6]
    assert PoSE(target_length=40).eval()(positions) is positions
    assert torch.equal(PoSE(target_length=12)(positions, tokens).key, positions.key.expand(400, -1))
    with pytest.raises(ValueError, match="12 tokens is longer than PoSE's target_length 11"):
        PoSE(target_length=11)(positions)


def test_pose_reads_each_rows_own_length() -> None:
    mask = (torch.arange(16)[None] < torch.tensor([4, 16])[:, None]).long().repeat_interleave(200, 0)
    key = PoSE(target_length=30)(Positions.from_mask(mask, side="right")).key
    assert int(key[:200, 3].max()) == 29 and int(key[200:, 15].max()) == 29
    assert make("pose-rope").mapped.position_map.config.target_length == 8 * 32
    with pytest.raises(ValueError, match="needs target_length"):
        build("pose-rope", head_dim=4)


# ---- randomized -----------------------------------------------------------------------------------------------------


def test_randomized_positions_are_those_of_one_draw() -> None:
    positions, tokens = Positions.full(12), torch.zeros(20, 12).long()
    moved = Randomized(max_position=50)(positions, tokens)
    assert bool((moved.key.diff(dim=-1) > 0).all()) and int(moved.key.max()) < 50
    assert len({tuple(row) for row in moved.key.tolist()}) == 20
    assert torch.equal(Randomized(max_position=12)(positions, tokens).key, positions.key.expand(20, -1))
    assert torch.equal(Randomized(max_position=12).eval()(positions).key, positions.key)
    fixed = Randomized(max_position=50, seed=1).eval()
    assert torch.equal(fixed(positions).key, fixed(positions, tokens).key[:1])
    assert not torch.equal(fixed(positions).key, Randomized(max_position=50, seed=2).eval()(positions).key)
    with pytest.raises(ValueError, match="12 tokens has no 11 distinct positions"):
        Randomized(max_position=11)(positions)


def test_a_cache_keeps_the_positions_it_has() -> None:
    fixed = Randomized(max_position=500, test_tokens=30).eval()
    whole = fixed(Positions.full(30)).key
    for length in range(1, 31):
        step = fixed(Positions.step(length - 1))
        assert torch.equal(step.key, whole[:, :length]) and torch.equal(step.query, whole[:, length - 1 : length])
    with pytest.raises(ValueError, match="drawn beforehand, here for 30 tokens; this text has 31.*test_tokens=N"):
        fixed(Positions.step(30))
    assert fixed(Positions.full(31)).key.shape == (1, 31)


def test_randomized_distances_are_a_sorted_list_mirrored() -> None:
    inner = build("alibi", num_heads=4)
    encoding = RandomizedDistances(Randomized(max_position=60), inner)
    bias = encoding(Positions.full(10, causal=False)).bias
    slope = build("alibi", num_heads=4)(Positions.full(2)).bias.table[:, 1]
    far = (bias.table / slope[:, None]).round()
    assert torch.equal(far, far[:1].expand(4, -1))
    line = far[0].long()
    assert line.shape == (19,) and line[9] == 0 and torch.equal(line, line.flip(0))
    assert bool((line[9:].diff() > 0).all()) and int(line.max()) < 60
    causal = RandomizedDistances(Randomized(max_position=10).eval(), inner)(Positions.full(10)).bias
    assert torch.equal(causal.table, inner(Positions.full(10)).bias.table)


def test_randomized_distances_agree_between_lines_and_pairs() -> None:
    encoding = make("randomized-alibi", max_position=100).eval()
    line = encoding(Positions.full(20)).bias.dense()
    mask = torch.ones(2, 25).long()
    mask[:, :5] = 0
    padded = encoding(Positions.from_mask(mask)).bias.dense()
    seen = torch.ones(20, 20).tril().bool()
    assert torch.equal(padded[0, :, 5:, 5:][:, seen], line[0][:, seen])


def test_randomized_distances_need_a_bias_of_distance() -> None:
    for name in ("rope", "nope"):
        with pytest.raises(ValueError, match=f"{name} is not one: use relative=False"):
            make("randomized-alibi", encoding=name)(Positions.full(5))


# ---- BiPE -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bipe-rope", "bipe-alibi"])
def test_bipe_with_one_segment_is_its_learned_part(name: str) -> None:
    bipe = make(name)
    learned = build("learned", width=16, trained_length=1024)
    with torch.no_grad():
        learned.table.copy_(bipe.table)
    x, tokens, positions = torch.randn(2, 20, 16), torch.full((2, 20), 7), Positions.full(20)
    torch.testing.assert_close(run(bipe, x, positions, tokens), run(learned, x, positions), atol=1e-6, rtol=0)


@given(
    ids=st.lists(st.sampled_from([5, 6, 10, 46]), min_size=1, max_size=30),
    pads=st.integers(0, 4),
    cut=st.integers(0, 30),
)
def test_segments_count_as_a_loop_does(ids: list[int], pads: int, cut: int) -> None:
    index, place, wanted = 0, 0, []
    for i in ids:
        wanted.append((index, place))
        index, place = (index + 1, 0) if i in (10, 46) else (index, place + 1)
    tokens = torch.tensor([[10] * pads + ids])
    mask = torch.tensor([[0] * pads + [1] * len(ids)])
    found = segments(tokens, Positions.from_mask(mask, side="left"), (10, 46))
    assert [tuple(pair) for pair in torch.stack(found, -1)[0, pads:].tolist()] == wanted
    cut = min(cut, len(ids))
    if 0 < cut < len(ids):
        packed = segments(torch.tensor([ids]), Positions.packed([cut, len(ids) - cut]), (10, 46))
        alone = segments(torch.tensor([ids[cut:]]), Positions.full(len(ids) - cut), (10, 46))
        for together, apart in zip(packed, alone, strict=True):
            assert torch.equal(together[:, cut:], apart)


def test_bipe_positions_grow_with_segments_only_and_rows_end() -> None:
    tokens = torch.tensor([[7] * 9 + [46]]).repeat(1, 5)
    moved = Segmented()(Positions.step(49), tokens)
    assert moved.key[0].tolist() == [n // 10 for n in range(50)] and moved.query.tolist() == [[4]]
    bipe = make("bipe-rope", rows=4)
    found = bipe.embed(torch.zeros(1, 50, 16), Positions.full(50), tokens)
    assert torch.equal(found[0, 3:10], bipe.table[3].expand(7, -1)) and torch.equal(found[0, 10], bipe.table[0])
    with pytest.raises(ValueError, match="ids of all 50 keys"):
        bipe(Positions.full(50))
    with pytest.raises(ValueError, match="separators are token ids"):
        make("bipe-rope", separators=(".", "\n"))
    with pytest.raises(ValueError, match="BiPE with alibi needs num_heads"):
        build("bipe-alibi", width=16)


# ---- HiRoPE ---------------------------------------------------------------------------------------------------------


def hirope(**options: object) -> HiRoPE:
    return build("hirope", head_dim=4, **options)


def test_hirope_identities() -> None:
    x, positions = torch.randn(1, 40, 16), Positions.full(40)
    tokens = torch.randint(5, 12, (1, 40))
    rope = run(build("rope", head_dim=4), x, positions)
    torch.testing.assert_close(run(hirope(split=1.0, window=3), x, positions, tokens), rope, atol=1e-5, rtol=0)
    torch.testing.assert_close(run(hirope(window=40), x, positions, tokens), rope, atol=1e-5, rtol=0)
    one_line = torch.full((1, 40), 5)
    partial = run(hirope(window=0), x, positions, one_line)
    heads = x.unflatten(-1, (4, 4)).transpose(1, 2)
    angle = positions.key[0][:, None].float()

    def fast(h: Tensor) -> Tensor:  # pairs (0, 2) and (1, 3); the slow second pair is not turned
        a, b = h[..., :1], h[..., 2:3]
        turned = torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
        return torch.cat([turned[..., :1], h[..., 1:2], turned[..., 1:], h[..., 3:]], -1)

    wanted = attend(fast(heads), fast(heads.flip(1)), heads, positions)
    torch.testing.assert_close(partial, wanted, atol=1e-5, rtol=0)


def test_hirope_window_follows_the_trained_length() -> None:
    assert hirope().config.near == 512 and hirope(trained_length=128).config.near == 32
    assert hirope(trained_length=128, window=0).config.near == 0
    with pytest.raises(ValueError, match="window is not negative; got 0.5 and -1"):
        hirope(window=-1)


def test_hirope_pairs_see_tokens_or_levels() -> None:
    """d = 128, 32 fast pairs, i = (level 3, token 40), j = (level 1, token 10): the pairs turn by 30 or by 2."""
    tokens = torch.full((1, 41), 5)
    tokens[0, [4, 20, 30]] = 10
    positions = Positions.full(41)
    encoding = build("hirope", head_dim=128, window=0)
    (branch,) = encoding(positions, tokens).branches
    ones = torch.zeros(1, 1, 41, 128, dtype=torch.float64)
    ones[..., :64] = 1
    turned = branch.query(ones)[0, 0]
    angle = torch.atan2(turned[:, 64:], turned[:, :64])
    inv_freq = 10000.0 ** -(torch.arange(64, dtype=torch.float64) / 64)
    steps = torch.where(torch.arange(64) < 32, 30, 2)
    difference = (angle[40] - angle[10] - steps * inv_freq + torch.pi) % (2 * torch.pi) - torch.pi
    torch.testing.assert_close(difference, torch.zeros(64, dtype=torch.float64), atol=1e-5, rtol=0)


SOURCE = textwrap.dedent(
    '''\
    import os
    TEXT = """
    def not_a_function():
    """
    @decorated
    def first(a,
              b=(1, 2)):
        return a

    class Second:
        async def third(self): return 1

        def fourth(self):  # with a comment:
            x = {"def": 1}
            return "class Fake:"
    last = 1
    '''
)


def test_python_levels_count_functions_and_classes_by_ast() -> None:
    levels = python_levels(list(SOURCE))
    starts = [0, *(n + 1 for n, c in enumerate(SOURCE) if c == "\n")]
    by_line = [levels[start] for start in starts[:-1]]
    assert by_line == [0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 2, 3, 3, 4, 4, 4]
    assert python_levels([]) == [] and python_levels(["def f(:\n", "x\n"]) == [0, 0]


def test_levels_are_known_at_decode_time() -> None:
    """The level of a token does not change with what follows."""
    tokens = torch.tensor([list(SOURCE.encode())])
    for levels in ("lines", "blank-lines", "functions"):
        encoding = hirope(levels=levels)
        whole = encoding.levels(Positions.full(tokens.shape[1]), tokens)
        assert bool((whole.diff(dim=-1) >= 0).all()) and int(whole.max()) >= 2
        for stop in (1, 40, 97, 130, 200):
            part = encoding.levels(Positions.full(stop), tokens[:, :stop])
            assert torch.equal(part, whole[:, :stop]), levels


def test_levels_of_packed_and_padded_rows_start_again() -> None:
    tokens = torch.tensor([list(SOURCE.encode())])
    n = tokens.shape[1]
    twice, packed = tokens.repeat(1, 2), Positions.packed([n, n])
    mask = torch.cat([torch.zeros(1, 3), torch.ones(1, n)], 1)
    padded = Positions.from_mask(mask, side="left")
    for levels in ("lines", "blank-lines", "functions"):
        encoding = hirope(levels=levels)
        alone = encoding.levels(Positions.full(n), tokens)
        assert torch.equal(encoding.levels(packed, twice), alone.repeat(1, 2)), levels
        left = torch.cat([torch.full((1, 3), 10), tokens], 1)
        assert torch.equal(encoding.levels(padded, left)[:, 3:], alone), levels


def test_functions_need_the_host() -> None:
    encoding = hirope(levels="functions")
    compiled = torch.compile(lambda t: encoding.levels(Positions.full(4), t), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="cannot be compiled"):
        compiled(torch.zeros(1, 4).long())
    with pytest.raises(ValueError, match="structure of the text"):
        encoding(Positions.full(4))


# ---- any map --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "position_map", [SHAPE(), CAPE(), PoSE(target_length=99), Randomized(max_position=99), Segmented()], ids=repr
)
@pytest.mark.parametrize("training", [False, True])
def test_queries_stand_where_their_keys_stand_and_the_mask_stays(position_map: PositionMap, training: bool) -> None:
    position_map.train(training)
    mask = torch.ones(2, 12).long()
    mask[0, :3] = 0
    tokens = torch.randint(5, 12, (2, 12))
    for positions in (Positions.full(12), Positions.from_mask(mask, side="left"), Positions.packed([5, 7])):
        moved = position_map(positions, tokens)
        assert torch.equal(moved.query, moved.key)
        assert torch.equal(moved.allowed(), positions.allowed())


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (SHAPE, {"max_shift": 0}, "got 0"),
        (SHAPE, {"test_shift": "K"}, "got 'K'"),
        (CAPE, {"max_scale": 0.5}, "max_scale is at least 1"),
        (PoSE, {"target_length": 0}, "got 0"),
        (Randomized, {"test_tokens": 4000}, "max_position 2048, test_tokens 4000"),
    ],
)
def test_options_that_make_no_sense_are_refused(cls: type[PositionMap], options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls(**options)


def test_any_encoding_may_stand_underneath() -> None:
    positions, tokens, x = Positions.full(20), torch.randint(5, 12, (2, 20)), torch.randn(2, 20, 16)
    for spec in ("rope", "alibi:slope_scale=2", "sinusoidal+alibi", "rope/nope", "learned:trained_length=4096"):
        for name in ("shape", "cape2021", "randomized-rope", "pose-rope"):
            if spec.startswith("learned") and name == "cape2021":
                continue  # a table has no rows at the negative positions of CAPE
            encoding = make(name, encoding=spec).for_layer(1)
            assert run(encoding, x, positions, tokens).isfinite().all(), (name, spec)
