"""The backend `triton`: Triton kernels for a distance table, on accelerators."""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from milepost.attention import blocked
from milepost.positions import Positions
from milepost.terms import DistanceBias, Terms

BLOCK = 128
"""Fewer queries than this leave most of a tile empty."""


def refuses(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Positions,
    terms: Terms,
    *,
    dropout: float = 0.0,
    softcap: float | None = None,
) -> str | None:
    reason = blocked.refuses(q, k, v, positions, terms, dropout=dropout, softcap=softcap)
    if reason is not None:
        return reason
    table = terms.bias.table if isinstance(terms.bias, DistanceBias) else q
    if torch.float64 in (q.dtype, k.dtype, v.dtype, table.dtype):
        return "float64: the kernels sum in float32"
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k and v have different dtypes: {q.dtype}, {k.dtype}, {v.dtype}"
    if max(q.shape[3], v.shape[3]) > 256:
        return f"heads of more than 256 numbers; got {q.shape[3]} and {v.shape[3]}"
    return unavailable(q.device)


def unavailable(device: torch.device) -> str | None:
    """Why the kernels cannot run on this device; None where they can."""
    if device.type == "cpu" and not interpreted():
        return "Triton compiles for accelerators; on a CPU only its interpreter runs it (TRITON_INTERPRET=1)"
    if device.type not in ("cpu", "cuda"):
        return f"the Triton kernels are written for CUDA and ROCm devices, not for {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    return None


def interpreted() -> bool:
    """Triton's interpreter was asked for: kernels run on the host, slowly, to be tested."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def discouraged(q: Tensor, k: Tensor, v: Tensor, positions: Positions, terms: Terms) -> str | None:
    """Why ``backend="auto"`` should not take it, though it would serve."""
    if q.device.type == "cpu":
        return "Triton's interpreter is for tests: only by name"
    if terms.bias is None and not terms.branches and positions.plain():
        return "no bias: torch's own kernel is made for it"
    if positions.num_queries < BLOCK:
        return f"fewer than {BLOCK} queries"
    return None


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Positions,
    terms: Terms,
    *,
    scale: float,
    dropout: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Memory linear in the length; tiles of keys whose weight is provably nothing are left out, in both directions."""
    return blocked.serve(q, k, v, positions, terms, scale, "triton")
