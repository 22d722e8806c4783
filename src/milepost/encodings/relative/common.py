"""What the relative encodings share: the positions of a block of queries, and tables read by row number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from milepost.positions import Positions


def block_of(whole: Positions, block: Positions) -> Positions:
    """The part of ``whole`` (the positions an encoding was given, possibly mapped) that a block of queries covers."""
    if block.num_queries == whole.num_queries:
        return whole
    start = int(block.query_start - whole.query_start)
    return whole.rows(start, start + block.num_queries)


def check_one_axis(positions: Positions, name: str) -> None:
    """Raises ValueError for positions of several axes."""
    if positions.query.dim() != 2:
        raise ValueError(
            f"{name} reads one position axis; these positions have {positions.query.shape[-1]}: "
            "use an encoding for several axes (rope-2d, rope-3d, m-rope)"
        )


def look_up(values: Tensor, row: Tensor) -> Tensor:
    """``(B, H, q, R)`` values of each query and table row, at ``row`` ``(B|1, q, K)`` -> ``(B, H, q, K)``.

    A row number that is not whole lies on the line between its two neighbours.
    """

    def at(index: Tensor) -> Tensor:
        return values.gather(-1, index[:, None].expand(*values.shape[:3], -1))

    if not row.is_floating_point():
        return at(row)
    low = row.floor()
    share = (row - low).to(values.dtype)[:, None]
    return at(low.long()) * (1 - share) + at(row.ceil().long()) * share


def deposit(probabilities: Tensor, row: Tensor, rows: int) -> Tensor:
    """The sum of ``(B, H, q, K)`` probabilities over the keys of each table row: ``(B, H, q, rows)``.

    What :func:`look_up` reads, this writes: a row number that is not whole shares between its two neighbours.
    """
    bins = probabilities.new_zeros(*probabilities.shape[:3], rows)

    def add(index: Tensor, shares: Tensor) -> Tensor:
        return bins.scatter_add(-1, index[:, None].expand_as(probabilities), shares)

    if not row.is_floating_point():
        return add(row, probabilities)
    low = row.floor()
    share = (row - low).to(probabilities.dtype)[:, None]
    bins = add(low.long(), probabilities * (1 - share))
    return add(row.ceil().long(), probabilities * share)


def per_query_head(x: Tensor, num_heads: int) -> Tensor:
    """``(B, Hkv, ...)`` -> ``(B, H, ...)``: each key head repeated for the query heads it serves."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def sinusoids(distance: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Sines and cosines ``(*shape, width / 2)`` of ``distance * base^(-2m / width)``, in ``dtype``."""
    inv_freq = base ** (-torch.arange(0, width, 2, dtype=torch.float64, device=distance.device) / width)
    work = dtype if distance.dtype == torch.int64 else torch.promote_types(dtype, distance.dtype)
    phase = distance.to(work)[..., None] * inv_freq.to(work)
    return phase.sin().to(dtype), phase.cos().to(dtype)


def sizes(config: object, names: Sequence[str]) -> None:
    """Raises ValueError where one of these sizes is below 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is at least 1; got {getattr(config, name)}")
