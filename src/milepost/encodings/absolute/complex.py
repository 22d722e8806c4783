"""Complex-valued word embeddings: each word has an amplitude, a frequency and a phase of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from milepost.encoding import Encoding, EncodingConfig, register
from milepost.encodings.absolute.common import check_input, of_queries
from milepost.positions import Positions


@dataclass(frozen=True, kw_only=True)
class ComplexOrderConfig(EncodingConfig):
    """Options of :class:`ComplexOrder`.

    Attributes:
        vocab_size: rows of the tables.
        width: of the embeddings; half of it are complex dimensions.
        frequency: ``full`` has one frequency per word and dimension; ``dimension`` shares it over words, ``word`` over
            dimensions (the paper's smaller versions).
        phase: learn the initial phases too (the published code leaves them out).
        base: of the initial frequencies.
        std: standard deviation of the initial amplitudes.
    """

    vocab_size: int
    width: int
    frequency: Literal["full", "dimension", "word"] = "full"
    phase: bool = True
    base: float = 10000.0
    std: float = 0.02

    def __post_init__(self) -> None:
        if self.width < 2 or self.width % 2:
            raise ValueError(f"a complex dimension takes two real ones, so width is even; got {self.width}")
        if self.vocab_size < 1 or self.base <= 1:
            raise ValueError(
                f"vocab_size is at least 1 and base above 1; got vocab_size {self.vocab_size}, base {self.base}"
            )
        if self.frequency not in ("full", "dimension", "word"):
            raise ValueError(f"frequency is 'full', 'dimension' or 'word'; got {self.frequency!r}")


@register(
    "complex",
    title="Complex-order embeddings",
    family="absolute",
    manifestation="embedding",
    learnable=True,
    integration="multiply",
    injection="initial",
    source="Wang et al. 2020 (arXiv 1912.12333), equation 9",
    summary="Each word is a wave over positions, with a learned amplitude, frequency and phase per dimension.",
    survey="Complex",
)
class ComplexOrder(Encoding):
    """Complex-valued word embedding: ``f(w, t) = r_w exp(i (omega_w t + theta_w))``, held as ``[r cos | r sin]``.

    It takes the place of the token embeddings: what comes in as ``x`` is not read, the tables are looked up by token.

    Parameters: ``amplitude`` ``(V, D/2)``, N(0, 0.02); ``omega`` ``(V, D/2)``, ``(1, D/2)`` or ``(V, 1)``, initially
    ``base^(-2k/D')`` with D' = D/2 complex dimensions, the same for every word (``word``: ``base^(-w/V)``, our choice);
    ``theta`` ``(V, D/2)``, 0. Nothing bounds their signs. Gradients of omega grow with the position: clip them.
    Shapes: ``(B, Q, width)`` out, in the dtype of ``x``; angles in float32 or better. Needs the ids of all keys.
    Raises ValueError without token ids, for an id outside the tables, or an odd width.
    Source: Wang et al. 2020 (arXiv 1912.12333). The published classifier begins at frequencies ``w base^(-2k/D)`` with
    w the *number* of the word, its language model at one ladder for all words, and neither has theta.
    """

    Config = ComplexOrderConfig
    config: ComplexOrderConfig
    needs_tokens = True

    def setup(self) -> None:
        words, dims = self.config.vocab_size, self.config.width // 2
        self.amplitude = nn.Parameter(torch.empty(words, dims))
        rows = 1 if self.config.frequency == "dimension" else words
        self.omega = nn.Parameter(torch.empty(rows, 1 if self.config.frequency == "word" else dims))
        self.theta = nn.Parameter(torch.empty(words, dims)) if self.config.phase else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.amplitude, std=self.config.std)
        rows, dims = self.omega.shape
        device = self.omega.device
        if self.config.frequency == "word":
            exponent = torch.arange(rows, dtype=torch.float64, device=device)[:, None] / rows
        else:
            exponent = 2 * torch.arange(dims, dtype=torch.float64, device=device)[None] / dims
        with torch.no_grad():
            self.omega.copy_(self.config.base**-exponent)
        if self.theta is not None:
            nn.init.zeros_(self.theta)

    def embed(self, x: Tensor, positions: Positions, tokens: Tensor | None = None) -> Tensor:
        check_input(x, positions, self.config.width, self.name)
        if tokens is None or tokens.shape[-1] != positions.num_keys:
            raise ValueError(
                f"complex looks its words up by token: give the ids of all {positions.num_keys} keys, (batch, keys); "
                f"got {'none' if tokens is None else tuple(tokens.shape)}"
            )
        words = of_queries(tokens, positions)
        if not torch.compiler.is_compiling() and words.numel() and int(words.max()) >= self.config.vocab_size:
            raise ValueError(f"token id {int(words.max())} is outside the vocabulary of {self.config.vocab_size}")
        omega = self.omega if self.config.frequency == "dimension" else self.omega[words]
        angles = omega * positions.query[..., None].to(omega.dtype)
        if self.theta is not None:
            angles = angles + self.theta[words]
        amplitude = self.amplitude[words]
        return torch.cat([amplitude * angles.cos(), amplitude * angles.sin()], dim=-1).to(x.dtype)
