"""A learned vector per position, added to the input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from milepost.encoding import Encoding, EncodingConfig, register
from milepost.encodings.absolute.common import add, check_input, present_queries
from milepost.positions import Positions

Beyond = Literal["raise", "clamp", "modulo", "interpolate"]


@dataclass(frozen=True, kw_only=True)
class LearnedConfig(EncodingConfig):
    """Options of :class:`Learned`.

    Attributes:
        width: of the embeddings.
        trained_length: rows of the table (BERT 512, GPT-2 1024).
        beyond: what happens at positions the table does not have: ``raise``; ``clamp`` to the last row, so that all
            later tokens share one code; ``modulo`` begins again at row 0; ``interpolate`` stretches the table linearly
            over the row's current length, which changes the codes of early positions too.
        std: standard deviation of the initial table.
    """

    width: int
    trained_length: int
    beyond: Beyond = "raise"
    std: float = 0.02

    def __post_init__(self) -> None:
        if self.width < 1 or self.trained_length < 1:
            raise ValueError(
                f"width and trained_length are at least 1; got width {self.width}, trained_length {self.trained_length}"
            )
        if self.beyond not in ("raise", "clamp", "modulo", "interpolate"):
            raise ValueError(f"beyond is 'raise', 'clamp', 'modulo' or 'interpolate'; got {self.beyond!r}")


@register(
    "learned",
    title="Learned absolute",
    family="absolute",
    manifestation="embedding",
    learnable=True,
    integration="add",
    injection="initial",
    source="Gehring et al. 2017 (arXiv 1705.03122); Devlin et al. 2018 (arXiv 1810.04805); Radford et al. 2019 (GPT-2)",
    summary="A table with one learned vector per position, added to the token embeddings.",
)
class Learned(Encoding):
    """Learned absolute position embedding: ``x_t + E[t]``.

    Parameters: ``table`` ``(trained_length, width)``, N(0, 0.02); one table, at the input.
    Shapes: ``(B, Q, width)`` in and out, in the dtype of the input. A position that is no integer lies on the line
    between its two neighbouring rows.
    Raises ValueError for a token at a position the table does not have, with ``beyond="raise"`` (under
    ``torch.compile`` the lookup itself fails), or for an input that does not fit. Padding is never looked at.
    Source: Gehring et al. 2017 (arXiv 1705.03122), Devlin et al. 2018 (arXiv 1810.04805). fairseq draws the table from
    N(0, 1/D) instead: ``std=width**-0.5``.
    """

    Config = LearnedConfig
    config: LearnedConfig

    def setup(self) -> None:
        self.table = nn.Parameter(torch.empty(self.config.trained_length, self.config.width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table, std=self.config.std)

    def rows(self, at: Tensor, length: Tensor | None = None) -> Tensor:
        """The code ``(B|1, n, width)`` of positions ``(B|1, n)``; ``length`` ``(B|1,)`` is read by interpolation."""
        last = self.config.trained_length - 1
        if self.config.beyond == "clamp":
            at = at.clamp(0, last)
        elif self.config.beyond == "modulo":
            at = at.remainder(last + 1)
        elif self.config.beyond == "interpolate":
            if length is None:
                raise ValueError("interpolation needs the length of each row")
            stretch = last / (length[:, None] - 1).clamp(min=max(last, 1)).double()
            at = (at * stretch).clamp(0, last)
        if not at.is_floating_point():
            return self.table[at]
        below = at.floor().clamp(0, max(last - 1, 0))
        share = (at - below)[..., None].to(self.table.dtype)
        lower = below.long()
        upper = (lower + 1).clamp(max=last)
        return self.table[lower] * (1 - share) + self.table[upper] * share

    def code(self, positions: Positions) -> Tensor:
        """The codes ``(B|1, Q, width)`` of the queries; raises as the class says."""
        at = positions.query
        present = present_queries(positions)
        if present is not None:
            at = torch.where(present, at, 0)
        if self.config.beyond == "raise" and not torch.compiler.is_compiling() and at.numel():
            first, last = float(at.min()), float(at.max())
            if first < 0 or last > self.config.trained_length - 1:
                raise ValueError(
                    f"position {last if first >= 0 else first:g} is outside the learned table of "
                    f"{self.config.trained_length} rows; shorten the input, or say what to do there with "
                    "beyond='clamp', 'modulo' or 'interpolate'"
                )
        return self.rows(at, positions.length)

    def embed(self, x: Tensor, positions: Positions, tokens: Tensor | None = None) -> Tensor:
        check_input(x, positions, self.config.width, self.name)
        return add(x, self.code(positions))
