"""Stored vectors of the absolute encodings, the position maps and the encodings without a position signal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from milepost import PairBias, Positions, attend, build
from milepost.encodings.absolute.legendre import legendre
from milepost.encodings.maps.pose import pose_position
from milepost.encodings.maps.shifted import cape_position, mean_position
from milepost.encodings.none import llama4_temperature
from milepost.encodings.separators import segments
from tests.vectors import cases, check, vector_id

Inputs = dict[str, Any]


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def at(positions: list[Any]) -> Positions:
    here = torch.tensor([positions])
    return Positions.full(len(positions)).mapped(here, here)


def embedded(name: str, positions: Positions, width: int, **options: Any) -> Tensor:
    x = torch.zeros(1, positions.num_queries, width, dtype=torch.float64)
    return build(name, width=width, **options).eval().embed(x, positions)[0]


def sinusoidal(layout: str, exponent: str = "paper") -> Any:
    def handler(inputs: Inputs) -> Tensor:
        return embedded("sinusoidal", at(inputs["pos"]), inputs["d"], layout=layout, exponent=exponent)

    return handler


def shape(inputs: Inputs) -> Tensor:
    positions, k = at([inputs["pos"]]), inputs["offset"]
    return embedded("shape", positions, inputs["d"], encoding="sinusoidal", max_shift=k)[0]


def cape(inputs: Inputs) -> Tensor:
    positions = at(inputs["positions"])
    mean = mean_position(positions)[0] if inputs["mean_normalize"] else 0
    shift, jitter, scale = f64(inputs["delta"]), f64(inputs["delta_local"]), f64(inputs["log_lambda"])
    moved = cape_position(positions.query - mean, shift, jitter, scale)
    return embedded("sinusoidal", positions.mapped(moved, moved), inputs["d"])


def complex_order(inputs: Inputs) -> Tensor:
    encoding = build("complex", vocab_size=1, width=4).double()
    with torch.no_grad():
        encoding.amplitude.copy_(f64([inputs["r"]]))
        encoding.omega.copy_(f64([inputs["omega"]]))
        encoding.theta.copy_(f64([inputs["theta"]]))
        positions = at(inputs["pos"])
        x = torch.zeros(1, len(inputs["pos"]), 4, dtype=torch.float64)
        return encoding.embed(x, positions, torch.zeros(1, len(inputs["pos"]), dtype=torch.int64))[0]


def floater(
    start: Any, w1: Any, b1: Any, w2: Any, b2: Any, delta: float, substeps: int, positions: list[int]
) -> Tensor:
    encoding = build("floater", width=len(start), delta=delta, substeps=substeps).double()
    h = encoding.dynamics
    with torch.no_grad():
        for parameter, value in ((encoding.start, [start]), (h.w1, w1), (h.b1, b1), (h.w2, w2), (h.b2, b2)):
            parameter.copy_(f64(value))
    x = torch.zeros(1, len(positions), len(start), dtype=torch.float64)
    return encoding.embed(x, at(positions))[0].detach()


def floater_rk4(inputs: Inputs) -> Tensor:
    names = ("p0", "W1", "b1", "W2", "b2", "dt", "substeps", "positions")
    return floater(*(inputs[name] for name in names))


def floater_linear(inputs: Inputs) -> Tensor:
    """h = -p as ``-relu(p)``, p > 0."""
    return floater([inputs["p0"]], [[1, 0]], [0], [[-1, 0]], [0], inputs["dt"], 10, inputs["positions"])[:, 0]


def bipe_ids(inputs: Inputs) -> dict[str, Tensor]:
    tokens = torch.tensor([inputs["ids"]])
    index, place = segments(tokens, Positions.full(tokens.shape[1]), tuple(inputs["separators"]))
    return {"intra": place[0].clamp(max=inputs.get("clamp", 1024) - 1), "segment": index[0]}


def bipe_slopes(inputs: Inputs) -> Tensor:
    heads = inputs["num_heads"]
    bipe = build("bipe-alibi", num_heads=heads, width=8)
    bias = bipe(Positions.full(2), torch.tensor([[46, 7]])).bias
    assert isinstance(bias, PairBias)
    return -bias.function(bias.positions.query.double(), bias.positions.key.double())[0, :, 1, 0]


def bipe_bias(inputs: Inputs) -> Tensor:
    """Four segments of one token each, seen from the last; the first of 12 heads has the slope asked for."""
    bipe = build("bipe-alibi", num_heads=12, width=8)
    tokens = torch.full((1, len(inputs["key_segment"])), 10)
    bias = bipe(Positions.full(tokens.shape[1]), tokens).bias
    assert bias is not None
    return bias.dense()[0, 0, inputs["query_segment"]].double()


def randomized(inputs: Inputs) -> dict[str, Tensor]:
    positions = at(inputs["sampled_sorted"])
    return {"positions": positions.key[0], "pairwise i-j": positions.distance()[0]}


def pose(inputs: Inputs) -> Tensor:
    return pose_position(torch.arange(inputs["len"]), inputs["rt1"], inputs["rt"])


def pose_max(inputs: Inputs) -> Tensor:
    """The last token under the largest skip."""
    length, top = inputs["len"], inputs["scaled_max"]
    return pose_position(torch.tensor(length - 1), 1, top - length)


def uniform_scale(inputs: Inputs) -> dict[str, float]:
    """The factor of q.k: the temperature over sqrt(d)."""
    q = torch.ones(1, 1, 1, inputs["d"], dtype=torch.float64)
    found = {}
    for name, scale in inputs["lambda_times_sqrt_d"].items():
        (branch,) = build("nope-scaled", scale=scale)(Positions.full(1)).branches
        assert branch.query is not None
        found[name] = float(branch.query(q)[0, 0, 0, 0]) / inputs["d"] ** 0.5
    return found


def scaled_softmax(inputs: Inputs) -> list[list[float]]:
    scores = f64(inputs["scores_after_1/sqrt(d)"])
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k, v = scores.view(1, 1, -1, 1), torch.eye(len(scores), dtype=torch.float64)[None, None]
    positions = Positions.step(len(scores) - 1)
    return [
        attend(q, k, v, positions, build("nope-scaled", scale=s)(positions))[0, 0, 0].tolist() for s in inputs["scale"]
    ]


def head_scale_count(inputs: Inputs) -> int:
    layers = [build("nope-headscale", num_heads=inputs["heads"]) for _ in range(inputs["layers"])]
    return sum(parameter.numel() for layer in layers for parameter in layer.parameters())


def polynomials(inputs: Inputs) -> Tensor:
    return legendre(f64([inputs["x"]]), max(inputs["n"]) + 1)[0, inputs["n"]]


def llama4(inputs: Inputs) -> Tensor:
    return llama4_temperature(torch.tensor(inputs["pos"]), inputs["floor_scale"], inputs["attn_scale"])


A = {
    "sinusoidal_interleaved": sinusoidal("interleaved"),
    "sinusoidal_concat": sinusoidal("concatenated"),
    "sinusoidal_tensor2tensor": sinusoidal("concatenated", "tensor2tensor"),
    "shape": shape,
    "cape": cape,
    "complex_order": complex_order,
    "floater_rk4": floater_rk4,
    "floater_linear_exact": floater_linear,
    "bipe_ids": bipe_ids,
    "bipe_alibi_slopes": bipe_slopes,
    "bipe_alibi_bias": bipe_bias,
    "randomized_pe_relative_sample": randomized,
    "pose_positions": pose,
    "pose_max_position": pose_max,
    "nope_uniform_scale": uniform_scale,
    "nope_scaled_softmax": scaled_softmax,
    "nope_head_scale_param_count": head_scale_count,
}
B = {"pope.legendre": polynomials, "irope.attn_scale": llama4}
VECTOR_HANDLERS = {**A, **B}


@pytest.mark.parametrize("vector", cases("vectors-a.json", A) + cases("vectors-b.json", B), ids=vector_id)
def test_vector(vector: Inputs) -> None:
    check(vector, VECTOR_HANDLERS)
