"""Vectors of the biases of distance, FIRE, MEP and the convergence of series; and which vectors nobody handles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from milepost import Positions, attend, build
from milepost.analysis.convergence import bias_at, series
from milepost.encoding import from_spec
from milepost.encodings.fire import FIRE
from milepost.encodings.mep import MEP
from milepost.kernels import Tanh, alibi_slopes, naive_log_mean, t5_bucket, t5_edges
from tests.vectors import cases, check, distances, missing, vector_id

Inputs = dict[str, Any]

def build64(name: str, **options: Any) -> Any:
    return build(name, **options).double()


def set_(parameter: Tensor, values: Any) -> None:
    with torch.no_grad():
        parameter.copy_(torch.tensor(values, dtype=torch.float64).reshape(parameter.shape))


def at(encoding: Any, distance: list[float]) -> Tensor:
    return bias_at(encoding, torch.tensor(distance, dtype=torch.float64))


def one_head(encoding: Any, i: Inputs) -> Tensor:
    return at(encoding, i["distance"])[0]


def kerple(name: str, i: Inputs, first: str, second: str) -> Tensor:
    encoding = build64(name, num_heads=1)
    set_(getattr(encoding.kernel, first), [i["r1"]])
    set_(getattr(encoding.kernel, second), [i["r2"]])
    if "r3" in i:
        set_(encoding.kernel.r, [i["r3"]])
    return one_head(encoding, i)


def mep_free(i: Inputs) -> Tensor:
    return one_head(MEP(1, slopes=[i["slope"]] * 3), i)


def mep_parameterized(i: Inputs) -> Tensor:
    encoding = MEP(1, variant="parameterized", head_dim=64, slopes=[i["slope"], i["slope"], None, None]).double()
    _, _, t5, log = encoding.kernels
    set_(log.p, [i["kerple_p"]])
    set_(log.a, [i["kerple_a"]])
    distance = torch.tensor(i["distance"], dtype=torch.float64)
    bucket = t5_bucket(distance, bidirectional=False)
    assert len(bucket.unique()) == len(distance), "each distance of the vector needs a bucket of its own"
    with torch.no_grad():
        t5.table[bucket, 0] = torch.tensor(i["t5_bias_after_scale"], dtype=torch.float64) / t5.scale
    return one_head(encoding, i)


def naive_first_minus_inf(i: Inputs) -> Tensor:
    encoding = MEP(12)
    assert encoding.kernels[0].start == pytest.approx(i["slopes"], rel=1e-14)
    distance = torch.arange(53000, dtype=torch.float32)
    naive = naive_log_mean([kernel.formula(distance) for kernel in encoding.kernels])
    return naive.isneginf().int().argmax(-1)


def mep_softmax(i: Inputs) -> Tensor:
    """Through attention itself: the last query's weights over three keys, read off values that are a unit matrix."""
    scores = torch.tensor(i["scores"], dtype=torch.float64)
    assert i["distance"] == [2, 1, 0]
    positions = Positions.full(3)
    q = torch.zeros(1, 1, 3, 1, dtype=torch.float64)
    q[..., -1, 0] = 1
    k, v = scores.view(1, 1, 3, 1), torch.eye(3, dtype=torch.float64).view(1, 1, 3, 3)
    torch.set_default_dtype(torch.float64)
    terms = MEP(1, slopes=[i["slope"]] * 3)(positions)
    return attend(q, k, v, positions, terms, scale=1.0)[0, 0, -1]


def ruoss(i: Inputs) -> Tensor:
    encoding = build("alibi", num_heads=8, bidirectional="offset")
    assert encoding.kernel.start[0] == i["slope"]
    positions = Positions.full(i["k"][-1] + 1, causal=False)
    return encoding(positions).bias.dense()[0, 0, i["q"], i["k"]].double()


def tisa(i: Inputs) -> Tensor:
    encoding = build64("tisa", num_heads=1, num_kernels=len(i["amplitude"]))
    for name in ("amplitude", "sharpness", "offset"):
        set_(getattr(encoding, name), i[name])
    return encoding.bias(torch.tensor(i["rel"]))[0]


def sandwich_raw(i: Inputs, index_start: int) -> Tensor:
    encoding = build64("sandwich", num_heads=8, dim=i["bar_d"], index_start=index_start)
    return encoding.kernel.raw(torch.tensor(i["distance"], dtype=torch.float64))


def sandwich(i: Inputs) -> Tensor:
    encoding = build64("sandwich", num_heads=i["num_heads"], dim=i["bar_d"])
    return at(encoding, i["distance"])[[h - 1 for h in i["head"]]]


def fire(i: Inputs, **options: Any) -> Any:
    encoding = FIRE(options.pop("num_heads", 1), c=i["c"], threshold=i["L"], eps=i.get("eps", 1e-6), **options).double()
    set_(encoding.c, [i["c"]])
    return encoding


def fire_normalized(i: Inputs) -> Tensor:
    query, key = torch.tensor(i["(i,j) zero-based"]).unbind(-1)
    return fire(i).normalized(query[:, None], key[:, None])[:, 0, 0]


def fire_rows(i: Inputs) -> Tensor:
    query = torch.tensor(i["i"])
    return fire(i).normalized(query[:, None], query[:, None] - i["distance"])[:, 0, 0]


def fire_bias(i: Inputs) -> Tensor:
    encoding = fire(i, num_heads=len(i["b2"]), hidden=len(i["W1"]))
    first, last = encoding.mlp[0], encoding.mlp[2]
    for parameter, name in ((first.weight, "W1"), (first.bias, "b1"), (last.weight, "W2"), (last.bias, "b2")):
        set_(parameter, i[name])
    query, key = torch.tensor(i["(i,j)"]).unbind(-1)
    return encoding(Positions.full(1).mapped(query[:, None], key[:, None])).bias.dense()[:, :, 0, 0]


def series_bias(kind: str) -> Any:
    def handler(i: Inputs) -> Tensor:
        # The slope of one head is 2^-8, so that scale makes k.
        return one_head(build(kind, num_heads=1, slope_scale=256 * i["k"]), i)

    return handler


def series_sum(i: Inputs) -> float:
    name, factor = ("alibi", i["slope"]) if i["kernel"] == "alibi" else ("rpe-type1", i["k"])
    return series(build(name, num_heads=1, slope_scale=256 * factor)).total[0]


def edges(side: Any) -> Any:
    def handler(i: Inputs) -> list[list[int]]:
        return [[d, bucket] for bucket, d in enumerate(t5_edges(side(i["num_buckets"]), i["max_distance"]))]

    return handler


def buckets(key: str, sign: int, bidirectional: bool) -> Any:
    def handler(i: Inputs) -> Tensor:
        options = {"num_buckets": i["num_buckets"], "max_distance": i["max_distance"]}
        return t5_bucket(sign * distances(i[key]), bidirectional=bidirectional, **options)

    return handler


COUNTED = {
    "alibi": "alibi",
    "mep_param_free": "mep",
    "kerple_shared": "kerple-log",
    "t5_shared_32": "t5",
    "mep_parameterized_shared": "mep-parameterized",
    "tisa_K5_per_layer": "tisa",
    "fire_per_layer_width32": "fire",
    "dape_mlp_per_layer_width32": "dape:base=alibi",
    "dape_v2_1x3_per_layer_width32": "dape-v2:base=alibi",
    "cope_npos64_per_layer": "cope",
    "shaw_clip16_K_and_V_per_layer": "shaw:clip=16",
    "nope_head_scale_per_layer": "nope-headscale",
}
"""Entries of the vector of parameter counts; DAPE's are those of its network, without its base."""


def counts(i: Inputs) -> dict[str, int]:
    geometry = {
        "num_heads": i["H"], "head_dim": i["d_head"], "width": i["H"] * i["d_head"], "num_layers": i["layers"],
        "vocab_size": 256, "trained_length": 512,
    }  # fmt: skip
    return {
        entry: sum(p.numel() for p in from_spec(spec, geometry).parameters()) for entry, spec in COUNTED.items()
    }


VECTOR_HANDLERS: dict[str, Any] = {
    "alibi_slopes": lambda i: alibi_slopes(i["num_heads"]),
    "alibi_slopes_mpt": lambda i: alibi_slopes(i["num_heads"], "mpt"),
    "alibi_bias": lambda i: at(build("alibi", num_heads=i["num_heads"]), i["distance"])[i["head"]],
    "alibi_bias_bidirectional_ruoss": ruoss,
    "t5_bucket_causal": buckets("distance", 1, False),
    "t5_bucket_bidirectional_past": buckets("rel=j-i", -1, True),
    "t5_bucket_bidirectional_future": buckets("rel=j-i", -1, True),
    "t5_bucket_edges_causal": edges(lambda n: n),
    "t5_bucket_edges_bidirectional_past": edges(lambda n: n // 2),
    "t5_bucket_edges_causal_64_256": edges(lambda n: n),
    "kerple_log": lambda i: kerple("kerple-log", i, "p", "a"),
    "kerple_power": lambda i: kerple("kerple-power", i, "a", "p"),
    "kerple_3para_log": lambda i: kerple("kerple-3param", i, "p", "a"),
    "mep_mean_exp_gauss": lambda i: one_head(
        MEP(1, kernels="exp-gauss", slopes=[i["slope_exp"], i["slope_gauss"]]), i
    ),
    "mep_param_free": mep_free,
    "mep_param_free_12heads": lambda i: at(MEP(i["num_heads"]), i["distance"]),
    "mep_param_free_naive_fp32_first_minus_inf": naive_first_minus_inf,
    "mep_parameterized": mep_parameterized,
    "mep_stable_closed_form": mep_free,
    "mep_softmax_equivalence": mep_softmax,
    "mep_tanh_kernel_log": lambda i: one_head(
        MEP(1, kernels=[Tanh(1, [i["tanh_slope"]], floor=i["epsilon"])]), i
    ),
    "tisa": tisa,
    "sandwich_raw_dot": lambda i: sandwich_raw(i, 1),
    "sandwich_raw_dot_i0": lambda i: sandwich_raw(i, 0),
    "sandwich_bias": sandwich,
    "fire_normalized_distance": fire_normalized,
    "fire_row_invariance": fire_rows,
    "fire_bias": fire_bias,
    "qin_type1": series_bias("rpe-type1"),
    "qin_type2": series_bias("rpe-type2"),
    "qin_divergent_log": series_bias("rpe-divergent-log"),
    "qin_divergent_loglog": series_bias("rpe-divergent-loglog"),
    "qin_series_sum": series_sum,
    "param_counts_12heads_dhead64_12layers": counts,
}


@pytest.mark.parametrize("vector", cases("vectors-a.json", VECTOR_HANDLERS), ids=vector_id)
def test_vector(vector: dict[str, Any]) -> None:
    check(vector, VECTOR_HANDLERS)


def test_every_vector_has_a_handler() -> None:
    assert not missing("vectors-a.json")
