"""Distance kernels, ``exp(bias)`` as a function of distance, and the slopes their heads use."""

from __future__ import annotations

import math


def alibi_slopes(num_heads: int, order: str = "official") -> list[float]:
    """One slope per head, as the authors of ALiBi chose them.

    ``2^(-8h/H)``, h = 1..H, for a power of two. Otherwise the slopes of the largest power of two c <= H, then every
    second slope of 2c (``order="official"``, the authors' code and BLOOM); ``order="mpt"`` is MPT's construction: the
    odd and then the even entries of the next power of two, cut to H.

    Source: Press, Smith, Lewis 2021 (arXiv 2108.12409), code fairseq/models/transformer.py.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads is at least 1; got {num_heads}")
    if order == "official":
        closest = 2 ** math.floor(math.log2(num_heads))
        own = [2.0 ** (-8.0 * h / closest) for h in range(1, closest + 1)]
        extra = [2.0 ** (-8.0 * h / (2 * closest)) for h in range(1, 2 * closest + 1, 2)]
        return own + extra[: num_heads - closest]
    if order == "mpt":
        ceil = 2 ** math.ceil(math.log2(num_heads))
        all_slopes = [2.0 ** (-8.0 * h / ceil) for h in range(1, ceil + 1)]
        return all_slopes if ceil == num_heads else (all_slopes[1::2] + all_slopes[::2])[:num_heads]
    raise ValueError(f"order is 'official' or 'mpt'; got {order!r}")
