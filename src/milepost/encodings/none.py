"""No position signal, and what changes attention without one: temperatures, windows, convolutions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from milepost.encoding import Encoding, EncodingConfig, register
from milepost.positions import Positions
from milepost.terms import Branch, Terms


@register(
    "nope",
    title="NoPE",
    family="none",
    manifestation="none",
    learnable=False,
    integration="none",
    injection="none",
    source="Haviv et al. 2022 (arXiv 2203.16634); Kazemnejad et al. 2023 (arXiv 2305.19466)",
    summary="No position signal; a causal model reads order from the mask alone.",
)
class NoPE(Encoding):
    """No positional encoding: plain dot-product attention.

    Order reaches the model only through the causal mask, so without one the model is permutation equivariant.
    Source: Haviv et al. 2022 (arXiv 2203.16634), Kazemnejad et al. 2023 (arXiv 2305.19466).
    """


# ---- temperatures ---------------------------------------------------------------------------------------------------

UNIFORM_SLOPE = 0.37098
"""a of ``1 + a ln(L' / L)``: least squares through the paper's 1.2, 1.5 and 1.8 at 2, 4 and 8 times the length."""


def uniform_scale(length: Tensor, trained_length: int) -> Tensor:
    """``1 + 0.37098 ln(max(1, length / trained_length))``, float64: the temperature for a stretch of the length."""
    return 1 + UNIFORM_SLOPE * (length.double() / trained_length).clamp(min=1.0).log()


def log_n_temperature(position: Tensor, trained_length: int) -> Tensor:
    """``max(1, ln(t + 1) / ln L)``, float64: Su's log-n by each query's own position, counted from 0."""
    return ((position.double() + 1).log() / math.log(trained_length)).clamp(min=1.0)


def llama4_temperature(position: Tensor, floor_scale: int = 8192, attn_scale: float = 0.1) -> Tensor:
    """``1 + attn_scale ln(floor((t + 1) / floor_scale) + 1)``, float64: for the queries of iRoPE's NoPE layers."""
    steps = (position.long() + 1).div(floor_scale, rounding_mode="floor")
    return 1 + attn_scale * torch.log1p(steps.double())


def scaled_queries(factor: Tensor) -> Branch:
    """The branch that multiplies queries ``(B, H, Q, D)`` by ``factor`` (broadcast), in float32 or better."""

    def query(q: Tensor) -> Tensor:
        work = torch.promote_types(q.dtype, torch.float32)
        return (q.to(work) * factor.to(work)).to(q.dtype)

    return Branch(query=query)


@dataclass(frozen=True, kw_only=True)
class ScaledNoPEConfig(EncodingConfig):
    """Options of :class:`ScaledNoPE`.

    Attributes:
        schedule: ``uniform``: one temperature for a row, by its length; ``log-n`` and ``llama4``: by the position of
            each query.
        scale: a fixed temperature for ``uniform`` (the paper: 1.2, 1.5, 1.8 at 2, 4, 8 times the trained length);
            None = fitted to the length.
        trained_length: L.
        floor_scale, attn_scale: of ``llama4``.
    """

    trained_length: int | None = None
    schedule: Literal["uniform", "log-n", "llama4"] = "uniform"
    scale: float | None = None
    floor_scale: int = 8192
    attn_scale: float = 0.1

    def __post_init__(self) -> None:
        if self.schedule not in ("uniform", "log-n", "llama4"):
            raise ValueError(f"schedule is 'uniform', 'log-n' or 'llama4'; got {self.schedule!r}")
        if self.scale is not None and (self.schedule != "uniform" or self.scale <= 0):
            raise ValueError(f"scale is positive and goes with schedule='uniform'; got {self.scale}, {self.schedule!r}")
        needs = self.schedule == "log-n" or (self.schedule == "uniform" and self.scale is None)
        if needs and (self.trained_length is None or self.trained_length < 2):
            raise ValueError(f"schedule={self.schedule!r} needs trained_length, 2 or more; got {self.trained_length}")
        if self.floor_scale < 1:
            raise ValueError(f"floor_scale is at least 1; got {self.floor_scale}")


@register(
    "nope-llama4",
    title="NoPE with Llama 4's temperature",
    family="none",
    manifestation="none",
    learnable=False,
    integration="none",
    injection="every",
    source="Meta 2025, Llama 4 (models/llama4/model.py)",
    summary="The global layers of iRoPE: no position signal, queries scaled by a slow logarithm of their position.",
    preset={"schedule": "llama4"},
)
@register(
    "nope-log-n",
    title="NoPE with log-n",
    family="none",
    manifestation="none",
    learnable=False,
    integration="none",
    injection="every",
    source="Su 2021 (kexue.fm 8823)",
    summary="No position signal; queries beyond the trained length are scaled by ln(t + 1) / ln L.",
    preset={"schedule": "log-n"},
)
@register(
    "nope-scaled",
    title="NoPE, UniformScale",
    family="none",
    manifestation="none",
    learnable=False,
    integration="none",
    injection="every",
    source="Wang et al. 2024 (arXiv 2404.12224), section 3",
    summary="No position signal; one temperature keeps attention sharp on texts longer than trained.",
)
class ScaledNoPE(Encoding):
    """NoPE with a temperature: logits are multiplied by sigma, ``sigma q . k / sqrt(d)``.

    ``uniform``: sigma = ``scale``, or ``1 + 0.37098 ln(l / L)`` of the row's length l, never below 1. ``log-n``:
    ``max(1, ln(t + 1) / ln L)``. ``llama4``: ``1 + 0.1 ln(floor((t + 1) / 8192) + 1)``.

    Shapes: one :class:`~milepost.terms.Branch`, queries only; applied in float32. The fit reads ``positions.length``:
    decoding token by token equals one pass where that is given beforehand.
    Raises ValueError for a schedule without the trained length it needs.
    Source: Wang et al. 2024 (arXiv 2404.12224): fixed sigmas; the fit through them is ours. Su 2021 (log-n). Llama 4.
    """

    Config = ScaledNoPEConfig
    config: ScaledNoPEConfig

    def factor(self, positions: Positions) -> Tensor:
        """sigma, ``(B|1, 1, Q|1, 1)`` float64."""
        options = self.config
        if options.schedule == "llama4":
            found = llama4_temperature(positions.query, options.floor_scale, options.attn_scale)
        elif options.schedule == "log-n":
            assert options.trained_length is not None
            found = log_n_temperature(positions.query, options.trained_length)
        elif options.scale is not None:
            found = torch.full((1, 1), options.scale, dtype=torch.float64, device=positions.device)
        else:
            assert options.trained_length is not None
            found = uniform_scale(positions.length, options.trained_length)[:, None]
        return found[:, None, :, None]

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        return Terms(branches=(scaled_queries(self.factor(positions)),))


@dataclass(frozen=True, kw_only=True)
class HeadScaleConfig(EncodingConfig):
    """Options of :class:`HeadScale`.

    Attributes:
        num_heads: of a layer.
        initial: every head's first temperature; the authors begin at the best uniform one (1.6 for 8192 tokens).
        minimum: temperatures below it act as it.
    """

    num_heads: int
    initial: float = 1.0
    minimum: float = 1.0

    def __post_init__(self) -> None:
        if self.initial < self.minimum or self.minimum <= 0:
            raise ValueError(
                f"initial is at least minimum, which is positive; got initial {self.initial}, minimum {self.minimum}"
            )


@register(
    "nope-headscale",
    title="NoPE, HeadScale",
    family="none",
    manifestation="none",
    learnable=True,
    integration="none",
    injection="every",
    source="Wang et al. 2024 (arXiv 2404.12224), section 4",
    summary="No position signal; one learned temperature per layer and head.",
    shared=False,
)
class HeadScale(Encoding):
    """NoPE with one learned temperature per head: ``sigma_h q . k / sqrt(d)``, ``sigma_h >= 1``.

    Parameters: ``scale`` ``(H,)`` per layer, 1 at first. Made to be tuned with the rest of the model frozen, for a few
    hundred steps on longer texts (the authors: 200 steps, learning rate 0.1, no weight decay).

    Shapes: one :class:`~milepost.terms.Branch`, queries only; float32 whatever the model's dtype.
    Raises ValueError for an initial value below the minimum.
    Source: Wang et al. 2024 (arXiv 2404.12224). Their script clamps the parameter after every optimiser step; here the
    forward pass clamps and the gradient passes through, so that a temperature can leave the minimum again. Their
    parameters are bfloat16, whose steps near 1.6 are 0.008.
    """

    Config = HeadScaleConfig
    config: HeadScaleConfig

    def setup(self) -> None:
        self.scale = nn.Parameter(torch.empty(self.config.num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, self.config.initial)

    def sigma(self) -> Tensor:
        """``(H,)``: the temperatures in use."""
        return self.scale + (self.scale.clamp(min=self.config.minimum) - self.scale).detach()

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        return Terms(branches=(scaled_queries(self.sigma()[None, :, None, None]),))


# ---- length-insensitive rows to compare with ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SlidingWindowConfig(EncodingConfig):
    """Options of :class:`SlidingWindow`.

    Attributes:
        size: keys a query sees, itself included (on each side where attention is bidirectional).
    """

    size: int = 64

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a window holds at least the token itself; got size {self.size}")


@register(
    "window",
    title="Sliding window",
    family="none",
    manifestation="none",
    learnable=False,
    integration="none",
    injection="every",
    source="Beltagy et al. 2020 (arXiv 2004.05150); Jiang et al. 2023 (arXiv 2310.06825)",
    summary="Attention to the last tokens only; add any encoding (window:size=64+rope).",
)
class SlidingWindow(Encoding):
    """A query sees the ``size`` nearest slots, itself included: the distance between them is below ``size``.

    Not an encoding but a limit on one, and a row to compare with: distances beyond the window never occur, at any
    length. ``Sum(SlidingWindow(64), RoPE(...))``, or ``window:size=64+rope`` in one line, puts it over an encoding.

    Shapes: ``Terms(window=size)``; padding takes slots. Raises ValueError for a size below 1.
    Source: Beltagy et al. 2020 (arXiv 2004.05150), Jiang et al. 2023 (arXiv 2310.06825).
    """

    Config = SlidingWindowConfig
    config: SlidingWindowConfig

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        return Terms(window=self.config.size)


@dataclass(frozen=True, kw_only=True)
class CausalConvolutionConfig(EncodingConfig):
    """Options of :class:`CausalConvolution`.

    Attributes:
        num_heads: channels of the values are shared by heads: one kernel each.
        kernel_size: taps, the token's own included.
    """

    num_heads: int
    kernel_size: int = 15

    def __post_init__(self) -> None:
        if self.kernel_size < 1 or self.num_heads < 1:
            raise ValueError(
                f"kernel_size and num_heads are at least 1; got kernel_size {self.kernel_size}, "
                f"num_heads {self.num_heads}"
            )


@register(
    "conv-nope",
    title="Causal convolution",
    family="none",
    manifestation="none",
    learnable=True,
    integration="none",
    injection="every",
    source="Wu et al. 2019 (arXiv 1901.10430), lightweight convolution; Islam et al. 2020 (arXiv 2001.08248)",
    summary="No attention: each layer is a causal convolution whose zero padding is the only absolute signal.",
    shared=False,
)
class CausalConvolution(Encoding):
    """Attention's weights replaced by a convolution: ``out_i = sum_r w_h[r] v_(i-r)``, r from 0 to kernel_size - 1.

    A length-insensitive row to compare with. Each head has one kernel, normalised by a softmax over its taps; what lies
    before the first token is zero, so the weights there sum to less than 1: the only sign of absolute position, which
    reaches ``kernel_size - 1`` tokens further with every layer. Queries and keys are not read.

    Parameters: ``taps`` ``(H, kernel_size)`` per layer, Xavier uniform. Shapes: ``Terms(weights=...)``.
    Raises ValueError for bidirectional attention.
    Source: Wu et al. 2019 (arXiv 1901.10430), lightweight convolution without its gated input (the model's value and
    output projections stand there); that zero padding tells position: Islam et al. 2020 (arXiv 2001.08248).
    """

    Config = CausalConvolutionConfig
    config: CausalConvolutionConfig

    def setup(self) -> None:
        self.taps = nn.Parameter(torch.empty(self.config.num_heads, self.config.kernel_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.taps)

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        if not positions.causal:
            raise ValueError("conv-nope is a causal convolution; use it with causal attention")
        return Terms(weights=_convolution(self.taps.softmax(-1)))


def _convolution(kernel: Tensor) -> Callable[..., tuple[Tensor, None]]:
    size = kernel.shape[1]

    def weights(probabilities: Tensor, *, positions: Positions) -> tuple[Tensor, None]:
        distance = positions.distance().round().long()
        inside = positions.allowed() & (distance >= 0) & (distance < size)
        taps = kernel.to(probabilities.dtype)[:, distance.clamp(0, size - 1)].transpose(0, 1)
        return torch.where(inside[:, None], taps, 0.0).expand_as(probabilities), None

    return weights
