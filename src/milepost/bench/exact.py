"""Attention and its gradients in float64, block by block, by the formula: what errors are measured against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from milepost.bench.case import NEG_INF, SCALE, Case

ROWS = 32
"""Rows of the result that are compared, spread over the length, the last among them."""
WHOLE = 4096
"""Up to this length all gradients are compared; beyond it those of the last rows and keys."""
BLOCK = 256


@dataclass
class Exact:
    """The float64 results of a case, computed on demand and kept for each table."""

    case: Case

    def __post_init__(self) -> None:
        self._gradients: dict[str | None, list[Tensor]] = {}

    def error(self, bias: str | None) -> Callable[[object], float]:
        """What a contender returns -> its error: absolute for results, relative to the largest for gradients."""
        return lambda found: self.of_gradients(found, bias) if self.case.training else self.of_result(found, bias)

    def table(self, bias: str | None) -> Tensor | None:
        return None if bias is None else self.case.table(bias)

    def of_result(self, found: object, bias: str | None) -> float:
        """Largest absolute difference over `ROWS` rows."""
        assert isinstance(found, Tensor)
        queries = found.shape[2]
        rows = torch.linspace(0, queries - 1, min(ROWS, queries)).round().long()
        return float((found[:, :, rows].detach().double() - result(self.case, self.table(bias), rows)).abs().max())

    def of_gradients(self, found: object, bias: str | None) -> float:
        """Largest difference of a gradient, relative to the largest entry of that gradient; over q, k, v and table.

        Beyond `WHOLE` only the last `ROWS` queries and keys are exact without the whole: the table is left out.
        """
        assert isinstance(found, tuple)
        if bias not in self._gradients:
            first = 0 if self.case.length <= WHOLE else self.case.length - ROWS
            self._gradients[bias] = gradients(self.case, self.table(bias), first)
        wanted = self._gradients[bias]
        errors = []
        for mine, want in zip(found, wanted, strict=False):
            compared = mine.detach().double()
            if want.dim() == 4:
                compared = compared[:, :, -want.shape[2] :]
            elif compared.shape != want.shape or self.case.length > WHOLE:
                continue  # a peer's own parameters, or a table whose gradient needs every row
            errors.append(float((compared - want).abs().max() / want.abs().max()))
        return max(errors)


def probabilities(case: Case, table: Tensor | None, rows: Tensor) -> Tensor:
    """(B, H, rows, K) weights of some queries; the queries are the last of the keys' places."""
    keys = case.k.shape[2]
    places = rows + keys - case.q.shape[2]
    distance = places[:, None] - torch.arange(keys)
    logits = case.q.detach()[:, :, rows].double() @ case.k.detach().double().mT * SCALE
    if table is not None:
        logits = logits + table.detach().double()[:, distance.clamp(min=0)]
    return logits.masked_fill(distance < 0, NEG_INF).softmax(-1)


def result(case: Case, table: Tensor | None, rows: Tensor) -> Tensor:
    return probabilities(case, table, rows) @ case.v.detach().double()


def gradients(case: Case, table: Tensor | None, first: int = 0) -> list[Tensor]:
    """Of q, k, v and the table, from the rows `first` and later: exact for those rows and, of a causal case, keys.

    With S = P (dP - rowsum(P dP)): dq = S k scale, dk = S^T q scale, dv = P^T dout, and the table's gradient at a
    distance is the sum of S over the pairs that far apart.
    """
    length = case.length
    q, k, v = (x.detach().double() for x in (case.q, case.k, case.v))
    grad = case.grad.double()
    of_q, of_k, of_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    of_table = torch.zeros(q.shape[1], length, dtype=torch.float64)
    for start in range(first, length, BLOCK):
        rows = torch.arange(start, min(start + BLOCK, length))
        p = probabilities(case, table, rows)
        of_p = grad[:, :, rows] @ v.mT
        s = p * (of_p - (p * of_p).sum(-1, keepdim=True))
        of_q[:, :, rows] = s @ k * SCALE
        of_k += s.mT @ q[:, :, rows] * SCALE
        of_v += p.mT @ grad[:, :, rows]
        if first == 0:
            distance = (rows[:, None] - torch.arange(length)).clamp(min=0)
            of_table.index_add_(1, distance.flatten(), s.sum(0).flatten(1))
    return [of_q[:, :, first:], of_k[:, :, first:], of_v[:, :, first:], of_table]
