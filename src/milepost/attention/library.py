"""The compiled kernel."""

from __future__ import annotations

from torch import Tensor


def unavailable() -> str | None:
    return "not built"


def cannot(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> str | None:
    return unavailable()


def forward(*args: object) -> tuple[Tensor, Tensor]:
    raise RuntimeError("not built")


def backward(*args: object, table_grad: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    raise RuntimeError("not built")
