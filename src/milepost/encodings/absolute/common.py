"""What the absolute encodings share: where the queries stand, and addition that keeps precision."""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.positions import Positions


def check_input(x: Tensor, positions: Positions, width: int, name: str) -> None:
    """Raises ValueError unless ``x`` is ``(B, Q, width)`` for these positions, which have one axis."""
    if positions.query.dim() != 2:
        raise ValueError(
            f"{name} reads one position axis; these positions have {positions.query.shape[-1]}: "
            "use an encoding for several axes (rope-2d, rope-3d, m-rope)"
        )
    if x.shape[-1] != width:
        raise ValueError(f"{name} was built for embeddings of width {width}; got width {x.shape[-1]}")
    if x.shape[-2] != positions.num_queries:
        raise ValueError(f"{x.shape[-2]} embeddings do not stand at {positions.num_queries} query positions")


def work_dtype(x: Tensor) -> torch.dtype:
    """float64 for float64, float32 for everything narrower."""
    return torch.promote_types(x.dtype, torch.float32)


def add(x: Tensor, code: Tensor) -> Tensor:
    """``x + code``, summed in float32 or better and returned in the dtype of ``x``."""
    return (x.to(work_dtype(x)) + code).to(x.dtype)


def of_queries(per_key: Tensor, positions: Positions) -> Tensor:
    """The entries ``(B|1, Q)`` of the key slots in which the queries stand, from ``(B|1, K)``."""
    return per_key.index_select(1, positions.query_slots())


def present_queries(positions: Positions) -> Tensor | None:
    """``(B, Q)`` bool: which queries are tokens; None when all are."""
    return None if positions.key_present is None else of_queries(positions.key_present, positions)
