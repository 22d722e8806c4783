"""Relative biases without a table: numbers added to the scaled logits, fixed functions of distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from milepost.encoding import Encoding, EncodingConfig, register
from milepost.kernels import (
    LOWEST,
    Cauchy,
    Exponential,
    Harmonic,
    HarmonicLog,
    Kernel,
    LogSquare,
    Order,
    SandwichKernel,
    SlopeKernel,
    alibi_slopes,
    as_float,
)
from milepost.positions import Positions
from milepost.terms import PairBias, Terms, distance_bias


class KernelBias(Encoding):
    """An encoding whose bias is the logarithm of one distance kernel; ``setup`` makes the kernel."""

    kernel: Kernel

    def reset_parameters(self) -> None:
        self.kernel.reset_parameters()

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        return Terms(bias=distance_bias(self.kernel.log_kernel, positions))

    def converges(self) -> list[bool]:
        """For each head, whether the sum of ``exp(bias)`` over all distances is finite."""
        return self.kernel.converges()


def block_of(own: Positions, block: Positions) -> Positions:
    """The rows of ``own``, positions an encoding reads, that stand for ``block``, a part of the unmapped ones."""
    if block.num_queries == own.num_queries:
        return own
    start = int(block.query_start - own.query_start)
    return own.rows(start, start + block.num_queries)


# ---- ALiBi ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ALiBiConfig(EncodingConfig):
    """Options of :class:`ALiBi`.

    Attributes:
        num_heads: number of attention heads.
        order: which slopes a number of heads gets that is no power of two: ``"official"`` (the authors' code, BLOOM),
            ``"mpt"``, or ``"paper"`` (one geometric sequence, as the paper's sentence has it).
        slope_scale: multiplies every slope (the authors interpolate with ``L / L'``).
        learn_slopes: train the slopes, through their logarithm (off as published).
        bidirectional: the form in attention that sees both sides; causal attention is the same in all three.
            ``"symmetric"``: ``-s |d|``. ``"offset"``: keys on the left get ``-s (d - 1/2)``, so that the sides differ.
            ``"nonsymmetric"``: the first half of the heads sees only the left, the other half only the right, with the
            slopes of ``num_heads / 2`` heads each.
        compat: ``"falcon-bf16"`` reproduces the bias of Falcon bit for bit: ``slope * key position`` rounded to
            bfloat16, in which the nearest keys share one value from 2048 tokens on. Falcon also divides it by
            ``sqrt(head_dim)`` with the logits: give ``slope_scale=head_dim**-0.5`` where that is a power of two.
    """

    num_heads: int
    order: Order = "official"
    slope_scale: float = 1.0
    learn_slopes: bool = False
    bidirectional: Literal["symmetric", "offset", "nonsymmetric"] = "symmetric"
    compat: Literal["falcon-bf16"] | None = None

    def __post_init__(self) -> None:
        alibi_slopes(self.num_heads, self.order)
        if self.slope_scale <= 0:
            raise ValueError(f"slope_scale is positive; got {self.slope_scale}")
        if self.bidirectional not in ("symmetric", "offset", "nonsymmetric"):
            raise ValueError(
                f"bidirectional is 'symmetric', 'offset' or 'nonsymmetric'; got {self.bidirectional!r}"
            )
        if self.bidirectional == "nonsymmetric" and self.num_heads % 2:
            raise ValueError(f"bidirectional='nonsymmetric' halves the heads; num_heads is {self.num_heads}, odd")
        if self.compat not in (None, "falcon-bf16"):
            raise ValueError(f"compat is None or 'falcon-bf16'; got {self.compat!r}")
        if self.compat and (self.learn_slopes or self.bidirectional != "symmetric"):
            raise ValueError(
                f"compat={self.compat!r} is a fixed causal bias; it goes with neither learn_slopes="
                f"{self.learn_slopes} nor bidirectional={self.bidirectional!r}"
            )


@register(
    "alibi",
    title="ALiBi",
    family="bias",
    manifestation="bias",
    learnable=False,
    integration="add",
    injection="every",
    source="Press, Smith, Lewis 2021 (arXiv 2108.12409)",
    summary="A linear penalty on distance, one fixed slope per head.",
    survey="ALiBi",
)
class ALiBi(Encoding):
    """Attention with linear biases: ``b_h(d) = -s_h |d|``, added after the scaling.

    Shapes: a :class:`~milepost.terms.DistanceBias` of ``(H, n)`` float32 (a :class:`~milepost.terms.PairBias` with
    ``compat``).
    Raises ValueError for fewer than one head, a scale that is not positive, an unknown form, or an odd number of heads
    with ``bidirectional="nonsymmetric"``.
    Source: Press, Smith, Lewis 2021 (arXiv 2108.12409), section 3. The authors' code adds ``+s j`` to the mask, the
    same softmax in exact arithmetic; the distance form is used here because it keeps its precision far out. The offset
    form is DeepMind's (randomized_positional_encodings); the nonsymmetric one is the authors', in issue 5 of their
    repository, with masks of finite size here.
    """

    Config = ALiBiConfig
    config: ALiBiConfig

    def setup(self) -> None:
        heads = self.config.num_heads
        halved = self.config.bidirectional == "nonsymmetric"
        slopes = alibi_slopes(heads // 2, self.config.order) * 2 if halved else alibi_slopes(heads, self.config.order)
        self.kernel = Exponential(heads, slopes, slope_scale=self.config.slope_scale, learn=self.config.learn_slopes)

    def reset_parameters(self) -> None:
        self.kernel.reset_parameters()

    def slopes(self, device: torch.device | None = None) -> Tensor:
        """``(H,)`` float32 or better: the slopes now in use."""
        return self.kernel.slopes(as_float(torch.zeros((), device=device), *self.parameters()))

    def converges(self) -> list[bool]:
        """For each head, whether the sum of ``exp(bias)`` over all distances is finite."""
        return self.kernel.converges()

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        if self.config.compat:
            return Terms(bias=PairBias(self._falcon, positions))
        both = not positions.causal and self.config.bidirectional != "symmetric"
        return Terms(bias=distance_bias(self._two_sided if both else self.kernel.log_kernel, positions))

    def _two_sided(self, distance: Tensor) -> Tensor:
        bias = self.kernel.log_kernel(distance)
        if self.config.bidirectional == "offset":
            return bias + 0.5 * self.kernel.slopes(bias[0]) * (distance > 0)
        half = self.config.num_heads // 2
        unseen = torch.stack([distance < 0, distance > 0]).repeat_interleave(half, dim=0)
        return bias.masked_fill(unseen, LOWEST)

    def _falcon(self, query: Tensor, key: Tensor) -> Tensor:
        slopes = self.slopes(key.device).bfloat16()
        bias = (slopes[None, :, None] * key[:, None, :]).bfloat16().float()
        return bias[:, :, None, :].expand(-1, -1, query.shape[1], -1)


# ---- Sandwich -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SandwichConfig(EncodingConfig):
    """Options of :class:`Sandwich`.

    Attributes:
        num_heads: number of attention heads.
        dim: width of the sinusoidal vectors whose products are the bias; independent of the model.
        index_start: index of the first frequency ``base^(-2i/dim)``: 1 in the code of NeMo and of the authors of
            "Exploring Transformer Extrapolation", 0 in the product of the usual sinusoidal embeddings.
        base: base of the frequencies.
    """

    num_heads: int
    dim: int = 128
    index_start: int = 1
    base: float = 10000.0

    def __post_init__(self) -> None:
        if self.index_start not in (0, 1):
            raise ValueError(f"index_start is 0 or 1; got {self.index_start}")


@register(
    "sandwich",
    title="Sandwich",
    family="bias",
    manifestation="embedding",
    learnable=False,
    integration="add",
    injection="every",
    source="Chi et al. 2023 (arXiv 2212.10356)",
    summary="The product of two sinusoidal embeddings as a bias, compressed differently in each head.",
    survey="Sandwich",
)
class Sandwich(KernelBias):
    """Products of sinusoidal position vectors: ``b_h(d) = (sum_i cos(d / base^(2i/m)) - m/2) / r_h``, ``r_h = 8h/H``.

    i runs over m/2 frequencies, h from 1 to H. The shift by m/2 makes ``b(0)`` 0 and leaves the softmax as it is. The
    survey counts it among the embeddings, because the vectors are.

    Shapes: a :class:`~milepost.terms.DistanceBias` of ``(H, n)``, float32 or better.
    Raises ValueError for an odd ``dim`` or an ``index_start`` other than 0 and 1.
    Source: Chi et al. 2023 (arXiv 2212.10356); NVIDIA NeMo, sandwich_relative_position_embedding.py (which takes the
    head's width for m, where the paper has 128). The authors' own repository was not available.
    """

    Config = SandwichConfig
    config: SandwichConfig

    def setup(self) -> None:
        c = self.config
        self.kernel = SandwichKernel(c.num_heads, dim=c.dim, index_start=c.index_start, base=c.base)


# ---- the series of "Exploring Transformer Extrapolation" ------------------------------------------------------------

_SERIES: dict[str, type[SlopeKernel]] = {
    "type1": Cauchy,
    "type2": LogSquare,
    "divergent-log": Harmonic,
    "divergent-loglog": HarmonicLog,
}


@dataclass(frozen=True, kw_only=True)
class SeriesBiasConfig(EncodingConfig):
    """Options of :class:`SeriesBias`.

    Attributes:
        num_heads: number of attention heads.
        kind: which series: ``"type1"``, ``"type2"``, ``"divergent-log"`` or ``"divergent-loglog"``.
        slope_scale: multiplies the factors k (ALiBi's slopes).
    """

    num_heads: int
    kind: Literal["type1", "type2", "divergent-log", "divergent-loglog"] = "type1"
    slope_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in _SERIES:
            raise ValueError(f"kind is one of {', '.join(_SERIES)}; got {self.kind!r}")


_QIN = "Qin, Zhong, Deng 2023 (arXiv 2307.10156)"


@register(
    "rpe-divergent-loglog",
    title="RPE, divergent control 1/(n ln n)",
    family="bias",
    manifestation="bias",
    learnable=False,
    integration="add",
    injection="every",
    source=_QIN,
    summary="A control whose series barely diverges: the paper predicts no extrapolation.",
    preset={"kind": "divergent-loglog"},
)
@register(
    "rpe-divergent-log",
    title="RPE, divergent control 1/n",
    family="bias",
    manifestation="bias",
    learnable=False,
    integration="add",
    injection="every",
    source=_QIN,
    summary="A control whose series diverges: the paper predicts no extrapolation.",
    preset={"kind": "divergent-log"},
)
@register(
    "rpe-type2",
    title="RPE type 2",
    family="bias",
    manifestation="bias",
    learnable=False,
    integration="add",
    injection="every",
    source=_QIN,
    summary="Weights exp(-ln^2 n): a convergent series slower than any power of distance that converges.",
    preset={"kind": "type2"},
)
@register(
    "rpe-type1",
    title="RPE type 1",
    family="bias",
    manifestation="bias",
    learnable=False,
    integration="add",
    injection="every",
    source=_QIN,
    summary="Weights 1/n^2: the simplest convergent series.",
    preset={"kind": "type1"},
)
class SeriesBias(KernelBias):
    """Biases whose weights are the terms of a known series, with factors k per head (ALiBi's slopes).

    - ``type1``: ``-ln(1 + (k d)^2)``, convergent;
    - ``type2``: ``-ln^2(3 + k d)``, convergent;
    - ``divergent-log``: ``-ln(1 + k d)`` and ``divergent-loglog``: ``-(z + ln z)``, ``z = ln(3 + k d)``: controls.

    The paper's condition: a model extrapolates if the sum of ``exp(b(d))`` over all distances is finite.

    Shapes: a :class:`~milepost.terms.DistanceBias` of ``(H, n)``, float32 or better.
    Raises ValueError for an unknown kind.
    Source: Qin, Zhong, Deng 2023 (arXiv 2307.10156); code of OpenNLPLab/fairseq-evo, transformer_rpe.py, types 4, 11,
    7 and 13. That these are the paper's "type 1" and "type 2" follows from the comments of that code.
    """

    Config = SeriesBiasConfig
    config: SeriesBiasConfig

    def setup(self) -> None:
        self.kernel = _SERIES[self.config.kind](self.config.num_heads, slope_scale=self.config.slope_scale)
