"""CLEX: frequencies as the solution of a learned differential equation in the stretch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from milepost.encodings.frequencies.base import (
    Frequencies,
    Ladder,
    device_of,
    pair_index,
    positive,
    refuse,
    row_length,
)


def ntk_path(theta: Tensor, time: Tensor, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """NTK frequencies at stretch ``2 t - 1`` and their derivative in t: the path that CLEX starts from.

    Formula: ``theta_p a^(-2p/(d-2))``, ``a = 2t - 1``. Shapes: theta (P,), time (..., 1) -> (..., P) each; float64.
    """
    exponent = pair_index(rotary_dim, theta.device) * (-2.0 / (rotary_dim - 2))
    alpha = 2 * time - 1
    path = theta * alpha**exponent
    return path, path * exponent * 2 / alpha


RATE_LIMIT = 1.0
"""Largest |du/dt|: one more factor e for every unit of stretch. The published equation has no limit, and a step of
training that leaves the path makes its solution overflow; within the limit both are the same."""


class Clex(nn.Module):
    """Frequencies that move continuously with the stretch t, by a small network shared by all layers.

    Formula: ``dz/dt = MLP(z + ln theta_ntk(t)) + d ln theta_ntk / dt``, ``z(1) = ln theta``, ``inv_freq = exp z(t)``.
    The known part is integrated exactly: with ``z = ln theta_ntk + u`` it is ``du/dt = MLP(u + 2 ln theta_ntk)``,
    ``u(1) = 0``, solved by Runge-Kutta 4 in steps of at most ``time_dt``; the same number of steps for every row, so no
    branch on a length. (The official step is 0.01; because the known part is exact, 0.25 stays within 1e-6 up to t = 16
    while the network moves log-frequencies by less than 10.) MLP: P -> param_factor * d -> P, no bias, last layer 0 at
    the start, where CLEX is therefore dynamic NTK in transformers' form with factor 2.
    In use, ``t = ceil(l / L)`` held in [1, max_factor], each row its own; in training give ``time``.
    Parameters are float32 and solved in float32 whatever autocast says. `frozen` gives the stateless table for serving.
    Raises ValueError for rotary_dim 2, max_factor < 1 or time_dt <= 0.
    Source: CLEX (arXiv 2310.16450), section 3; DAMO-NLP-SG/CLEX, whose time is sampled in whole numbers 2..max_factor
    while the paper samples the interval: `sample_time` samples the interval.
    """

    name: ClassVar[str] = "clex"
    title: ClassVar[str] = "CLEX"
    source: ClassVar[str] = "arXiv 2310.16450"

    def __init__(
        self,
        *,
        rotary_dim: int,
        base: float,
        trained_length: int,
        max_factor: float = 16.0,
        param_factor: float = 1.0,
        act: Literal["silu", "tanh"] = "silu",
        time_dt: float = 0.25,
    ) -> None:
        super().__init__()
        self.ladder = Ladder(rotary_dim=rotary_dim, base=base)
        self.trained_length, self.max_factor, self.param_factor = trained_length, max_factor, param_factor
        self.act, self.time_dt = act, time_dt
        problems = positive(self, "trained_length", "param_factor", "time_dt")
        problems += positive(self, "max_factor", at_least=1)
        if rotary_dim == 2:
            problems.append("rotary_dim 2 has no NTK path: the exponent 2p/(d-2) divides by zero")
        if act not in ("silu", "tanh"):
            problems.append(f"act must be silu or tanh, got {act!r}")
        refuse(self, problems)
        hidden = max(1, int(param_factor * rotary_dim))
        self.up = nn.Parameter(torch.empty(rotary_dim // 2, hidden))
        self.down = nn.Parameter(torch.empty(hidden, rotary_dim // 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Kaiming-uniform up (a = sqrt 5), zero down."""
        nn.init.kaiming_uniform_(self.up, a=math.sqrt(5))
        nn.init.zeros_(self.down)

    @property
    def rotary_dim(self) -> int:
        return self.ladder.rotary_dim

    @property
    def base(self) -> float:
        return self.ladder.base

    @property
    def length_dependent(self) -> bool:
        return True

    @property
    def steps(self) -> int:
        """Runge-Kutta steps of a solution, the same for every row."""
        return max(1, math.ceil((self.max_factor - 1) / self.time_dt - 1e-9))

    def rate(self, time: Tensor, u: Tensor) -> Tensor:
        """du/dt: the learned part of the equation, held to RATE_LIMIT; float64 in and out, the network in float32."""
        path, _ = ntk_path(self.ladder.plain(u.device), time, self.rotary_dim)
        with torch.autocast(device_type=u.device.type, enabled=False):
            hidden = (u + 2 * path.log()).float() @ self.up.float()
            hidden = nn.functional.silu(hidden) if self.act == "silu" else hidden.tanh()
            return (hidden @ self.down.float()).clamp(-RATE_LIMIT, RATE_LIMIT).to(torch.float64)

    def solve(self, time: Tensor) -> Tensor:
        """inv_freq at stretches ``time`` (..., 1) -> (..., P), float64, differentiable in the parameters."""
        time = time.to(device=self.up.device, dtype=torch.float64)
        h = (time - 1) / self.steps
        now = torch.ones_like(time)
        u = torch.zeros(*time.shape[:-1], self.rotary_dim // 2, dtype=torch.float64, device=time.device)
        for _ in range(self.steps):
            k1 = self.rate(now, u)
            k2 = self.rate(now + h / 2, u + h / 2 * k1)
            k3 = self.rate(now + h / 2, u + h / 2 * k2)
            k4 = self.rate(now + h, u + h * k3)
            u = u + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            now = now + h
        path, _ = ntk_path(self.ladder.plain(time.device), time, self.rotary_dim)
        return path * u.exp()

    def time(self, length: int | Tensor | None, *, device: torch.device | None = None) -> Tensor:
        """``ceil(l / L)`` held in [1, max_factor]; (B, 1) or (1,)."""
        rows = row_length(self.trained_length if length is None else length, device)
        return (rows / self.trained_length).ceil().clamp(1.0, self.max_factor)

    def frequencies(
        self,
        length: int | Tensor | None = None,
        *,
        device: torch.device | None = None,
        time: Tensor | None = None,
    ) -> Frequencies:
        """Frequencies at each row's own stretch, or at ``time`` ((...,), training)."""
        device = device_of(length, device) or self.up.device
        at = self.time(length, device=device) if time is None else time.unsqueeze(-1)
        return Frequencies(self.solve(at).to(device))

    def forward(self, length: int | Tensor | None = None) -> Frequencies:
        """Same as `frequencies`."""
        return self.frequencies(length)

    def sample_time(self, rows: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Stretches for a training step, uniform on [1, max_factor], float64 (rows,)."""
        return 1 + (self.max_factor - 1) * torch.rand(rows, generator=generator, dtype=torch.float64)

    def sample_positions(self, time: Tensor, length: int, *, generator: torch.Generator | None = None) -> Tensor:
        """Sorted positions drawn without repeats from [0, t L) for each row; int64 (rows, length).

        Raises ValueError when a row's range holds fewer than ``length`` positions.
        """
        rows = []
        for t in time.flatten().tolist():
            end = int(t * self.trained_length)
            if end < length:
                raise ValueError(f"{length} positions do not fit below {end} (t={t:g}): shorten the rows")
            rows.append(torch.randperm(end, generator=generator)[:length].sort().values)
        return torch.stack(rows)

    @torch.no_grad()
    def frozen(self) -> ClexTable:
        """The solution at every whole stretch, as a plain stateless method for serving and export."""
        whole = torch.arange(1, math.floor(self.max_factor) + 1, dtype=torch.float64, device=self.up.device)
        table = self.solve(whole.unsqueeze(-1))
        return ClexTable(
            rotary_dim=self.rotary_dim,
            base=self.base,
            trained_length=self.trained_length,
            table=tuple(map(tuple, table.tolist())),
        )


@dataclass(frozen=True, kw_only=True)
class ClexTable(Ladder):
    """A trained `Clex` at whole stretches 1..n: ``table[t-1]`` is inv_freq at ``t = ceil(l / L)``, held in [1, n].

    Its name starts with "dynamic" because transformers recomputes frequencies of such rope types only.
    Raises ValueError unless the table has rotary_dim / 2 columns.
    """

    name: ClassVar[str] = "dynamic_clex"
    title: ClassVar[str] = "CLEX, solved"
    source: ClassVar[str] = "arXiv 2310.16450"

    trained_length: int
    table: tuple[tuple[float, ...], ...]

    def problems(self) -> list[str]:
        problems = super().problems() + positive(self, "trained_length")
        if not self.table or any(len(row) != self.rotary_dim // 2 for row in self.table):
            problems.append(f"table must be rows of rotary_dim / 2 = {self.rotary_dim // 2} frequencies")
        return problems

    @property
    def length_dependent(self) -> bool:
        return len(self.table) > 1

    def frequencies(self, length: int | Tensor | None = None, *, device: torch.device | None = None) -> Frequencies:
        """One row of the table a length."""
        device = device_of(length, device)
        rows = row_length(self.trained_length if length is None else length, device)
        index = (rows / self.trained_length).ceil().clamp(1, len(self.table)).to(torch.int64).squeeze(-1) - 1
        return Frequencies(torch.tensor(self.table, dtype=torch.float64, device=device)[index])
