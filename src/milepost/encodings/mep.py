"""MEP: the logarithm of a weighted average of distance kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from milepost.encoding import Encoding, EncodingConfig, register
from milepost.encodings.bias import block_of
from milepost.kernels import Kernel, Start, as_float, log_sum_exp, make_kernel, naive_log_mean, new_parameter
from milepost.positions import Positions
from milepost.terms import DistanceBias, PairBias, Terms, distance_bias

MIXES: dict[str, tuple[str, ...]] = {
    "parameter-free": ("exp", "exp*0.5", "gauss"),
    "exp-gauss": ("exp", "gauss"),
    "parameterized": ("gauss", "exp", "t5", "log"),
}
"""Named mixes: the two of the published code, and the pair that the abstract names."""


@dataclass(frozen=True, kw_only=True)
class MEPConfig(EncodingConfig):
    """Options of :class:`MEP`.

    Attributes:
        num_heads: number of attention heads.
        variant: the published mix: ``"parameter-free"`` or ``"parameterized"``.
        kernels: any other mix: names (see :data:`milepost.kernels.KERNELS`; ``"exp*0.5"`` halves the slopes), kernel
            objects, or the name of a mix, ``"exp-gauss"``. None: the variant's.
        slopes: one entry per kernel: None (ALiBi's), a number, or a number per head.
        weights: one positive number per kernel; their sum does not matter. None: the plain mean.
        learn_weights: train the weights, each head its own.
        head_dim: width of one head, where the mix holds the t5 kernel.
        init: start of the learned kernels: ``"published"``, or ``"slopes"`` (close to ALiBi).
        renormalize: False multiplies the weights after the softmax by the averaged kernel and leaves it at that, as the
            abstract words it; the code, followed by default, renormalises.
        naive_bf16: compute kernels, mean and logarithm in bfloat16, as the published code does: -inf from some
            hundred tokens on in the steepest heads. For reproduction.
    """

    num_heads: int
    variant: Literal["parameter-free", "parameterized"] = "parameter-free"
    kernels: tuple[str | Kernel, ...] | None = None
    slopes: tuple[Any, ...] | None = None
    weights: tuple[float, ...] | None = None
    learn_weights: bool = False
    head_dim: int | None = None
    init: Start = "published"
    renormalize: bool = True
    naive_bf16: bool = False

    def __post_init__(self) -> None:
        if self.variant not in ("parameter-free", "parameterized"):
            raise ValueError(f"variant is 'parameter-free' or 'parameterized'; got {self.variant!r}")
        if self.init not in ("published", "slopes"):
            raise ValueError(f"init is 'published' or 'slopes'; got {self.init!r}")
        kernels: Any = MIXES[self.variant] if self.kernels is None else self.kernels
        if isinstance(kernels, str):
            kernels = MIXES.get(kernels, (kernels,))
        elif isinstance(kernels, Kernel):
            kernels = (kernels,)
        kernels = tuple(kernels)
        if not kernels:
            raise ValueError("kernels is empty: a mix needs at least one")
        object.__setattr__(self, "kernels", kernels)
        for name in ("slopes", "weights"):
            values = getattr(self, name)
            if values is None:
                continue
            if not isinstance(values, Sequence) or len(values) != len(kernels):
                raise ValueError(f"{name} has one entry for each of the {len(kernels)} kernels; got {values!r}")
            frozen = tuple(tuple(v) if isinstance(v, Sequence) else v for v in values)
            object.__setattr__(self, name, frozen)
        if self.weights is not None and min(self.weights) <= 0:
            raise ValueError(f"weights are positive (leave a kernel out instead of weighing it 0); got {self.weights}")
        if self.naive_bf16 and (self.learn_weights or self.weights is not None):
            raise ValueError("naive_bf16 reproduces published code, which has no weights: drop them and learn_weights")
        if "t5" in kernels and self.head_dim is None:
            raise ValueError("the t5 kernel multiplies its table by sqrt(head_dim): give head_dim")


_SOURCE = "Gao 2024 (arXiv 2403.17698)"


@register(
    "mep-parameterized",
    title="MEP, parameterized",
    family="bias",
    manifestation="bias",
    learnable=True,
    integration="add",
    injection="every",
    source=_SOURCE,
    summary="The mean of a Gaussian, an exponential, T5's table and KERPLE's power law.",
    preset={"variant": "parameterized"},
)
@register(
    "mep",
    title="MEP",
    family="bias",
    manifestation="bias",
    learnable=False,
    integration="add",
    injection="every",
    source=_SOURCE,
    summary="The mean of several distance kernels instead of one: near tokens get a bonus, far ones the slower decay.",
)
class MEP(Encoding):
    """Multiple-kernel positions: ``b_h(d) = log( sum_n w_n k_nh(d) / sum_n w_n )``, by log-sum-exp.

    - ``MEP(num_heads)``: the parameter-free mix of the author's code, the mean of ``exp(-s d)``, ``exp(-s d / 2)`` and
      ``exp(-s d^2)`` with ALiBi's slopes s. Far out it is ALiBi of half the slope, lowered by ``log 3`` against d = 0;
    - ``MEP(num_heads, kernels="exp-gauss")``: the pair of the abstract, the mean of ``exp(-s d)`` and ``exp(-s d^2)``;
    - ``MEP(num_heads, variant="parameterized", head_dim=64)``: the mean of ``exp(-s d^2)``, ``exp(-s d)``,
      ``exp(sqrt(head_dim) T5(d))`` and ``(1 + a d)^-p``; its far field is constant, since T5's last bucket has no end;
    - ``kernels=[...]``: any mix, with slopes, weights, and weights that are learned.

    It is finite, with finite gradients, for every distance and parameter whose kernels' logarithms are.

    Shapes: a :class:`~milepost.terms.DistanceBias` of ``(H, n)``, float32 or better (``renormalize=False``: a change of
    the weights). The parameterized variant has ``34 H`` parameters, one set for all layers.
    Raises ValueError for kernels, slopes or weights that do not fit each other, and without ``head_dim`` where the t5
    kernel is.
    Source: Gao 2024 (arXiv 2403.17698), code vangogh0318/MEP, megatron/mpu/layers.py, classes ParallelSNOPE and
    ParallelSNOPEKerpleLog. That their active lines are the paper's two variants is an inference from its config names.
    The code computes in bfloat16 from rounded distances, and evaluates T5's kernel at distance 0 for all keys when it
    decodes with a cache; neither is followed.
    """

    Config = MEPConfig
    config: MEPConfig

    def setup(self) -> None:
        c = self.config
        assert c.kernels is not None
        self.kernels = nn.ModuleList(
            make_kernel(kernel, c.num_heads, slopes=own, head_dim=c.head_dim, start=c.init)
            for kernel, own in zip(c.kernels, c.slopes or (None,) * len(c.kernels), strict=True)
        )
        self.log_weights = new_parameter(len(c.kernels), c.num_heads) if c.learn_weights else None
        self._reset_weights()

    def reset_parameters(self) -> None:
        for kernel in self._kernels():
            kernel.reset_parameters()
        self._reset_weights()

    def _kernels(self) -> list[Kernel]:
        return [kernel for kernel in self.kernels if isinstance(kernel, Kernel)]

    def _reset_weights(self) -> None:
        if self.log_weights is not None:
            with torch.no_grad():
                self.log_weights.copy_(torch.tensor(self._log_weights(), dtype=torch.float64)[:, None])

    def _log_weights(self) -> list[float]:
        weights = self.config.weights or (1.0,) * len(self.kernels)
        return [math.log(w / sum(weights)) for w in weights]

    def log_mean(self, distance: Tensor) -> Tensor:
        """``(*shape)`` signed distances -> ``(H, *shape)``: the logarithm of the averaged kernels."""
        if self.config.naive_bf16:
            rounded = distance.to(torch.bfloat16)
            return naive_log_mean([kernel.formula(rounded) for kernel in self._kernels()]).float()
        distance = as_float(distance, *self.parameters())
        logs = torch.stack([kernel.log_kernel(distance) for kernel in self._kernels()])
        shape = (len(self.kernels), -1, *[1] * distance.dim())
        if self.log_weights is None:
            weights = torch.tensor(self._log_weights(), dtype=logs.dtype, device=logs.device)
        else:
            weights = self.log_weights.log_softmax(0).to(logs.dtype)
        return log_sum_exp(logs + weights.view(shape))

    def converges(self) -> list[bool]:
        """For each head, whether the sum of ``exp(bias)`` over all distances is finite: if every kernel's is."""
        return [all(heads) for heads in zip(*(kernel.converges() for kernel in self._kernels()), strict=True)]

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        bias = distance_bias(self.log_mean, positions)
        return Terms(bias=bias) if self.config.renormalize else Terms(weights=Penalty(bias))


class Penalty:
    """Multiplies attention weights by ``exp(bias)`` after the softmax; rows no longer sum to 1."""

    def __init__(self, bias: DistanceBias | PairBias) -> None:
        self.bias = bias

    def __call__(self, probabilities: Tensor, *, positions: Positions) -> tuple[Tensor, None]:
        bias = replace(self.bias, positions=block_of(self.bias.positions, positions))
        return probabilities * bias.dense().exp().to(probabilities.dtype), None
