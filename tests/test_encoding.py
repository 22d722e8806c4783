from __future__ import annotations

import copy
from dataclasses import FrozenInstanceError

import pytest
import torch

from milepost import Encoding, Mapped, PerLayer, PositionMap, Positions, Sum, build, catalogue
from milepost.encoding import build_for, find, from_spec, names, parse_spec

GEOMETRY = {
    "num_heads": 4, "head_dim": 16, "width": 64, "num_layers": 4, "vocab_size": 64, "trained_length": 128,
}  # fmt: skip


def test_unknown_names_and_options_name_the_nearest() -> None:
    with pytest.raises(ValueError, match="'alibo'; nearest: alibi"):
        build("alibo", num_heads=4)
    with pytest.raises(TypeError, match="did you mean 'slope_scale'"):
        build("alibi", num_heads=4, slope_scal=2)
    with pytest.raises(TypeError, match="needs num_heads"):
        build("alibi")
    with pytest.raises(ValueError, match="slope_scale is positive; got -1"):
        build("alibi", num_heads=4, slope_scale=-1)


def test_config_is_frozen_and_every_way_of_building_agrees() -> None:
    cls = find("alibi").cls
    ways = [cls(8), cls(num_heads=8), cls(cls.Config(num_heads=8)), build("alibi", num_heads=8)]
    assert all(way.config == ways[0].config for way in ways)
    with pytest.raises(FrozenInstanceError):
        ways[0].config.num_heads = 3


def test_specs() -> None:
    assert parse_spec("t5:num-buckets=8:max_distance=16:x=[1,2]:kind=abc") == (
        "t5",
        {"num_buckets": 8, "max_distance": 16, "x": [1, 2], "kind": "abc"},
    )
    with pytest.raises(ValueError, match="name:option=value"):
        parse_spec("alibi:slope_scale")
    assert parse_spec("clex:sample=false:a=true:scale=none:c=None") == (
        "clex",
        {"sample": False, "a": True, "scale": "none", "c": None},
    )
    with pytest.raises(TypeError, match="clex: sample is True or False; got 'no'"):
        from_spec("clex:sample=no", GEOMETRY)
    schedule = from_spec("rope/rope/rope/nope", GEOMETRY)
    assert isinstance(schedule, PerLayer)
    assert [schedule.for_layer(i).name for i in range(5)] == ["rope", "rope", "rope", "nope", "rope"]
    assert schedule.for_layer(0) is schedule.for_layer(1)
    both = from_spec("rope+alibi:slope_scale=2", GEOMETRY)
    assert isinstance(both, Sum) and both.name == "rope + alibi"
    assert build_for("rope", GEOMETRY, head_dim=8).config.head_dim == 8


def test_schedule_has_no_terms_of_its_own() -> None:
    with pytest.raises(TypeError, match="for_layer"):
        from_spec("rope/nope", GEOMETRY)(Positions.full(3))


class Doubled(PositionMap):
    def forward(self, positions: Positions, tokens: torch.Tensor | None = None) -> Positions:
        return positions.mapped(positions.query * 2, positions.key * 2)


def test_a_mapped_encoding_reads_the_map_and_keeps_the_mask() -> None:
    positions = Positions.full(6)
    bias = Mapped(Doubled(), build("alibi", num_heads=4))(positions).bias
    plain = build("alibi", num_heads=4, slope_scale=2.0)(positions).bias
    assert bias is not None and plain is not None
    allowed = positions.allowed()[:, None].expand(1, 4, 6, 6)
    assert torch.equal(bias.dense()[allowed], plain.dense()[allowed])


def test_catalogue_is_complete_and_unambiguous() -> None:
    assert len(set(names())) == len(catalogue())
    for info in catalogue():
        assert issubclass(info.cls, Encoding)
        assert info.title and info.summary.endswith(".") and info.source
        assert info.cls.__doc__ and len(info.cls.__doc__) > 100, info.name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_stay_float32_but_may_become_float64(dtype: torch.dtype) -> None:
    encoding = build("alibi", num_heads=4, learn_slopes=True)
    before = [p.detach().clone() for p in encoding.parameters()]
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), copy.deepcopy(encoding)).to(dtype)
    assert model[0].weight.dtype == dtype and before
    assert all(torch.equal(a, b) for a, b in zip(model[1].parameters(), before, strict=True))
    assert all(p.dtype == torch.float64 for p in encoding.double().parameters())


def test_options_show_in_the_signature_and_the_repr() -> None:
    import inspect

    assert "slope_scale" in inspect.signature(find("alibi").cls).parameters
    assert "slope_scale=2" in repr(build("alibi", num_heads=4, slope_scale=2))
