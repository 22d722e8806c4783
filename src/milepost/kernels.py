"""Distance kernels: ``exp(bias)`` as a function of distance, one for each head, and the slopes they use.

A kernel gives its logarithm, ``log_kernel(distance)``, so that it can be added to logits as it is and mixed with others
by log-sum-exp (:class:`~milepost.encodings.mep.MEP`). The static and learned biases of this library that depend on
distance alone are kernels; ``KERNELS`` names those that a mix can ask for.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

Order = Literal["official", "mpt", "paper"]
Start = Literal["published", "slopes"]

LOWEST = -1e30
"""Biases are cut here, so that sums of them stay finite in float32."""

TANH_SLOPES = (
    0.25737, 0.12873, 0.06437, 0.03219, 0.0163, 0.00849, 0.00457, 0.00256, 0.36406, 0.18203, 0.09103, 0.04552,
)  # fmt: skip
"""Slopes of the tanh kernel in the code of MEP, for twelve heads."""


def alibi_slopes(num_heads: int, order: str = "official") -> list[float]:
    """One slope per head, as the authors of ALiBi chose them.

    ``2^(-8h/H)``, h = 1..H, for a power of two. Other numbers of heads:

    - ``"official"``, the authors' code and BLOOM: the slopes of the largest power of two c <= H, then every second
      slope of 2c;
    - ``"mpt"``: the odd and then the even entries of the next power of two, cut to H;
    - ``"paper"``: the sentence of the paper, ``2^(-8h/H)`` for any H. No trained model is known to use it.

    Source: Press, Smith, Lewis 2021 (arXiv 2108.12409), section 3 and fairseq/models/transformer.py.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads is at least 1; got {num_heads}")
    if order == "paper":
        return [2.0 ** (-8.0 * h / num_heads) for h in range(1, num_heads + 1)]
    if order == "official":
        closest = 2 ** math.floor(math.log2(num_heads))
        own = [2.0 ** (-8.0 * h / closest) for h in range(1, closest + 1)]
        extra = [2.0 ** (-8.0 * h / (2 * closest)) for h in range(1, 2 * closest + 1, 2)]
        return own + extra[: num_heads - closest]
    if order == "mpt":
        ceil = 2 ** math.ceil(math.log2(num_heads))
        all_slopes = [2.0 ** (-8.0 * h / ceil) for h in range(1, ceil + 1)]
        return all_slopes if ceil == num_heads else (all_slopes[1::2] + all_slopes[::2])[:num_heads]
    raise ValueError(f"order is 'official', 'mpt' or 'paper'; got {order!r}")


# ---- helpers --------------------------------------------------------------------------------------------------------


def new_parameter(*shape: int) -> nn.Parameter:
    """An uninitialised parameter in float32 or better, whatever torch's default dtype is while a model is built."""
    return nn.Parameter(torch.empty(shape, dtype=torch.promote_types(torch.get_default_dtype(), torch.float32)))


def as_float(distance: Tensor, *parameters: Tensor) -> Tensor:
    """``distance`` in the dtype a bias is computed in: float32, or float64 where the distance, a parameter or torch's
    default dtype is."""
    dtype = distance.dtype if distance.is_floating_point() else torch.get_default_dtype()
    dtype = torch.promote_types(dtype, torch.float32)
    for parameter in parameters:
        dtype = torch.promote_types(dtype, parameter.dtype)
    return distance.to(dtype)


def per_head(values: Tensor | Sequence[float], like: Tensor) -> Tensor:
    """``(H,)`` numbers as ``(H, 1, ..., 1)``, in the dtype of ``like`` and broadcasting against it."""
    if not isinstance(values, Tensor):
        values = torch.tensor(values, dtype=like.dtype, device=like.device)
    return values.to(like.dtype).view(-1, *[1] * like.dim())


def folded(raw: Tensor, low: float, high: float | None = None) -> Tensor:
    """A parameter that is kept inside ``[low, high]`` by folding: inside, it is ``raw`` itself.

    Below ``low`` it is the mirror image ``2 low - raw``; above ``high`` it falls as ``1 / raw`` towards ``low``. So it
    is in range and has a gradient for every ``raw``, where a clamp would have none and training could never come back.
    """
    low *= 1 - 1e-6  # a limit rounded to float32 counts as inside, in float64 too
    value = torch.where(raw < low, 2 * low - raw, raw)
    if high is None:
        return value
    high *= 1 + 1e-6
    width = high - low
    above = value > high
    return torch.where(above, low + width**2 / torch.where(above, value - low, width), value)


def start_slopes(num_heads: int, slopes: Sequence[float] | None, scale: float = 1.0) -> tuple[float, ...]:
    """``num_heads`` positive slopes times ``scale``; ALiBi's where none are given.

    Raises:
        ValueError: a wrong number of slopes, or one that is not positive.
    """
    found = tuple(scale * float(s) for s in (alibi_slopes(num_heads) if slopes is None else slopes))
    if len(found) != num_heads or min(found) <= 0:
        raise ValueError(f"{num_heads} positive slopes are needed, one for each head; got {list(found)}")
    return found


def t5_edges(num_buckets: int, max_distance: int) -> list[int]:
    """The first distance of each of ``num_buckets`` one-sided T5 buckets, ascending; computed in integers, exactly.

    Half of the buckets hold one distance each; the others are equal steps of ``log d`` up to ``max_distance``.

    Raises:
        ValueError: fewer than two buckets, or a ``max_distance`` that leaves no room for the logarithmic half.
    """
    exact = num_buckets // 2
    if exact < 1:
        raise ValueError(f"each direction needs at least two buckets; got {num_buckets}")
    if max_distance <= exact:
        raise ValueError(
            f"max_distance {max_distance} is not above {exact}, the distances that have a bucket each "
            f"({num_buckets} buckets in each direction)"
        )
    steps = num_buckets - exact
    edges = list(range(exact))
    for k in range(steps):
        d = max(exact, math.floor(exact * (max_distance / exact) ** (k / steps)) - 2)
        while d**steps * exact**k < max_distance**k * exact**steps:
            d += 1
        edges.append(d)
    return edges


def t5_bucket(distance: Tensor, *, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool) -> Tensor:
    """T5's bucket of each signed distance ``i - j``, int64 of the same shape.

    ``bidirectional=False``: keys in the future (negative distances) share bucket 0. ``bidirectional=True``: half of the
    buckets for each side, the future's after the past's.

    Source: Raffel et al. 2020 (arXiv 1910.10683), code of mesh-tensorflow and of transformers. There is no logarithm
    here, only a search among exact integer edges; it takes fractional distances too.
    """
    side = num_buckets // 2 if bidirectional else num_buckets
    edges = torch.tensor(t5_edges(side, max_distance), dtype=distance.dtype, device=distance.device)
    size = distance.abs() if bidirectional else distance.clamp(min=0)
    bucket = torch.bucketize(size.contiguous(), edges, right=True) - 1
    return bucket + side * (distance < 0) if bidirectional else bucket


def log_sum_exp(logs: Tensor) -> Tensor:
    """``log(sum(exp(logs)))`` over the first axis, as torch.logsumexp, in a fifth of its time where summands underflow.

    Summands below e^-80 of the largest count as that, which no precision adds to 1: denormal numbers are slow on CPUs.
    """
    top = logs.detach().amax(0)
    apart = logs - torch.where(top.isfinite(), top, 0.0)
    return apart.clamp_(min=-80.0).exp_().sum(0).log_().add_(top)


def naive_log_mean(kernels: Sequence[Tensor]) -> Tensor:
    """``log(mean(exp(...)))`` step by step in the dtype of its inputs, as the published code of MEP computes it.

    For reproduction only: it is -inf from a few hundred tokens on, with NaN gradients.
    """
    total = kernels[0].exp()
    for kernel in kernels[1:]:
        total = total + kernel.exp()
    return (total / len(kernels)).log()


# ---- kernels --------------------------------------------------------------------------------------------------------


class Kernel(nn.Module, ABC):
    """A positive function of distance for each head, given by its logarithm.

    A subclass writes ``formula``, in the dtype of the distance it is given, and says which heads ``converge``. Kernels
    are even in the distance, so that they serve attention in both directions.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        if num_heads < 1:
            raise ValueError(f"num_heads is at least 1; got {num_heads}")
        self.num_heads = num_heads

    def log_kernel(self, distance: Tensor) -> Tensor:
        """``(*shape)`` signed distances, int64 or float -> ``(H, *shape)`` in float32 or better."""
        return self.formula(as_float(distance, *self.parameters()))

    @abstractmethod
    def formula(self, distance: Tensor) -> Tensor:
        """``(*shape)`` floating distances -> ``(H, *shape)`` in the same dtype."""

    def reset_parameters(self) -> None:
        """Give every parameter its initial value, in place."""

    @abstractmethod
    def converges(self) -> list[bool]:
        """For each head, whether the kernel's sum over all distances ``d >= 0`` is finite."""

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"


class SlopeKernel(Kernel):
    """A kernel with one positive slope per head: ALiBi's by default, given, or learned through their logarithm.

    ``slope_scale`` multiplies the slopes.
    """

    def __init__(
        self,
        num_heads: int,
        slopes: Sequence[float] | None = None,
        *,
        slope_scale: float = 1.0,
        learn: bool = False,
    ) -> None:
        super().__init__(num_heads)
        self.start = start_slopes(num_heads, self.default_slopes() if slopes is None else slopes, slope_scale)
        self.log_slopes = new_parameter(num_heads) if learn else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.log_slopes is not None:
            with torch.no_grad():
                self.log_slopes.copy_(torch.tensor(self.start, dtype=torch.float64).log())

    def default_slopes(self) -> Sequence[float]:
        return alibi_slopes(self.num_heads)

    def slopes(self, like: Tensor) -> Tensor:
        """The slopes now in use, ready to multiply ``like``."""
        return per_head(self.start if self.log_slopes is None else self.log_slopes.exp(), like)

    def converges(self) -> list[bool]:
        return [True] * self.num_heads


class Exponential(SlopeKernel):
    """``exp(-s |d|)``: ALiBi."""

    def formula(self, distance: Tensor) -> Tensor:
        return -self.slopes(distance) * distance.abs()


class Gaussian(SlopeKernel):
    """``exp(-s d^2)``, without a factor 1/2."""

    def formula(self, distance: Tensor) -> Tensor:
        return (-self.slopes(distance) * distance**2).clamp(min=LOWEST)


class Cauchy(SlopeKernel):
    """``1 / (1 + (s d)^2)``: RPE type 1 of "Exploring Transformer Extrapolation"."""

    def formula(self, distance: Tensor) -> Tensor:
        return -torch.log1p((self.slopes(distance) * distance) ** 2)


class LogSquare(SlopeKernel):
    """``exp(-ln^2(3 + s |d|))``: RPE type 2 of "Exploring Transformer Extrapolation"."""

    def formula(self, distance: Tensor) -> Tensor:
        return -(torch.log(3 + self.slopes(distance) * distance.abs()) ** 2)


class Harmonic(SlopeKernel):
    """``1 / (1 + s |d|)``: the paper's first divergent control."""

    def formula(self, distance: Tensor) -> Tensor:
        return -torch.log1p(self.slopes(distance) * distance.abs())

    def converges(self) -> list[bool]:
        return [False] * self.num_heads


class HarmonicLog(SlopeKernel):
    """``1 / (z ln z)`` with ``z = 3 + s |d|``: the second divergent control, as slow as ``ln ln n``."""

    def formula(self, distance: Tensor) -> Tensor:
        log = torch.log(3 + self.slopes(distance) * distance.abs())
        return -(log + log.log())

    def converges(self) -> list[bool]:
        return [False] * self.num_heads


class Tanh(SlopeKernel):
    """``floor + 1 + tanh(-s |d|)``: an optional kernel in the code of MEP that neither published mix uses.

    The floor keeps it from 0, so the far field is constant. ``TANH_SLOPES`` are the code's slopes for twelve heads.
    """

    def __init__(
        self,
        num_heads: int,
        slopes: Sequence[float] | None = None,
        *,
        slope_scale: float = 1.0,
        learn: bool = False,
        floor: float = 1e-6,
    ) -> None:
        super().__init__(num_heads, slopes, slope_scale=slope_scale, learn=learn)
        self.floor = floor

    def default_slopes(self) -> Sequence[float]:
        return TANH_SLOPES if self.num_heads == len(TANH_SLOPES) else super().default_slopes()

    def formula(self, distance: Tensor) -> Tensor:
        # 1 + tanh(-x) = 2 sigmoid(-2x), which keeps its digits far out.
        return torch.log(self.floor + 2 * torch.sigmoid(-2 * self.slopes(distance) * distance.abs()))

    def converges(self) -> list[bool]:
        return [self.floor == 0] * self.num_heads


class Uniform(Kernel):
    """``1`` at every distance: no bias. In a mix it keeps a share of attention that ignores distance."""

    def formula(self, distance: Tensor) -> Tensor:
        return torch.zeros(self.num_heads, *distance.shape, dtype=distance.dtype, device=distance.device)

    def converges(self) -> list[bool]:
        return [False] * self.num_heads


class Power(Kernel):
    """``exp(-a |d|^p)`` with learned ``a >= floor`` and ``floor <= p <= 2``: KERPLE-power.

    Published start: ``a ~ U(0, 1)``, ``p ~ U(0, 2)``. ``start="slopes"``: p = 1 and a = the slopes, which is ALiBi.
    """

    def __init__(
        self,
        num_heads: int,
        slopes: Sequence[float] | None = None,
        *,
        slope_scale: float = 1.0,
        start: Start = "published",
        floor: float = 1e-2,
    ) -> None:
        super().__init__(num_heads)
        self.floor, self.start = floor, start
        self.start_slopes = start_slopes(num_heads, slopes, slope_scale)
        self.a, self.p = new_parameter(num_heads), new_parameter(num_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            if self.start == "slopes":
                self.a.copy_(torch.tensor(self.start_slopes, dtype=torch.float64).clamp(min=self.floor))
                self.p.fill_(1.0)
            else:
                self.a.uniform_(0.0, 1.0).clamp_(min=self.floor)
                self.p.uniform_(0.0, 2.0).clamp_(min=self.floor)

    def formula(self, distance: Tensor) -> Tensor:
        a = per_head(folded(self.a, self.floor), distance)
        p = per_head(folded(self.p, self.floor, 2.0), distance)
        return (-a * _power(distance.abs(), p)).clamp(min=LOWEST)

    def converges(self) -> list[bool]:
        return [True] * self.num_heads


class Logarithmic(Kernel):
    """``(1 + a |d|)^-p`` with learned ``a, p >= floor``: KERPLE-log.

    Published start: ``a ~ U(0, 1)``, ``p ~ U(0, 2)``. ``start="slopes"``: p = 1 and a = the slopes, which is ALiBi for
    distances well below ``1/s`` and a power law beyond.

    ``exponent=True`` adds a third learned parameter, ``(1 + a |d|^r)^-p`` with ``floor <= r <= 2``, which the paper
    defines and its code does not have; it starts at ``U(0, 2)`` by our choice, or at 1 with ``start="slopes"``.
    """

    def __init__(
        self,
        num_heads: int,
        slopes: Sequence[float] | None = None,
        *,
        slope_scale: float = 1.0,
        start: Start = "published",
        floor: float = 1e-2,
        exponent: bool = False,
    ) -> None:
        super().__init__(num_heads)
        self.floor, self.start = floor, start
        self.start_slopes = start_slopes(num_heads, slopes, slope_scale)
        self.p, self.a = new_parameter(num_heads), new_parameter(num_heads)
        self.r = new_parameter(num_heads) if exponent else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            if self.start == "slopes":
                self.a.copy_(torch.tensor(self.start_slopes, dtype=torch.float64).clamp(min=self.floor))
                self.p.fill_(1.0)
            else:
                self.p.uniform_(0.0, 2.0).clamp_(min=self.floor)
                self.a.uniform_(0.0, 1.0).clamp_(min=self.floor)
            if self.r is not None:
                if self.start == "slopes":
                    self.r.fill_(1.0)
                else:
                    self.r.uniform_(0.0, 2.0).clamp_(min=self.floor)

    def formula(self, distance: Tensor) -> Tensor:
        size = distance.abs()
        if self.r is not None:
            size = _power(size, per_head(folded(self.r, self.floor, 2.0), distance))
        p, a = (per_head(folded(raw, self.floor), distance) for raw in (self.p, self.a))
        return -p * torch.log1p(a * size)

    def converges(self) -> list[bool]:
        p = folded(self.p.detach(), self.floor)
        if self.r is not None:
            p = p * folded(self.r.detach(), self.floor, 2.0)
        return [bool(value > 1) for value in p]


def _power(size: Tensor, exponent: Tensor) -> Tensor:
    """``size ** exponent`` for sizes >= 0, with a gradient of 0 instead of NaN where the size is 0."""
    positive = size > 0
    return torch.where(positive, torch.where(positive, size, 1.0) ** exponent, 0.0)


class T5Table(Kernel):
    """``exp(scale * T[bucket(|d|)])`` with a learned table ``(num_buckets, H)``: T5's bias in one direction.

    ``std`` is the standard deviation of its normal start; None is Xavier's, ``sqrt(2 / (num_buckets + H))``, as in
    GPT-NeoX. ``start="slopes"``: each bucket starts at ALiBi's bias for its first distance.
    """

    def __init__(
        self,
        num_heads: int,
        slopes: Sequence[float] | None = None,
        *,
        slope_scale: float = 1.0,
        start: Start = "published",
        num_buckets: int = 32,
        max_distance: int = 128,
        scale: float = 1.0,
        std: float | None = None,
        bidirectional: bool = False,
    ) -> None:
        super().__init__(num_heads)
        t5_edges(num_buckets // 2 if bidirectional else num_buckets, max_distance)
        self.start, self.scale, self.std = start, scale, std
        self.start_slopes = start_slopes(num_heads, slopes, slope_scale)
        self.num_buckets, self.max_distance, self.bidirectional = num_buckets, max_distance, bidirectional
        self.table = new_parameter(num_buckets, num_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            if self.start == "slopes":
                side = self.num_buckets // 2 if self.bidirectional else self.num_buckets
                edges = t5_edges(side, self.max_distance) * (2 if self.bidirectional else 1)
                distance = torch.zeros(self.num_buckets, dtype=torch.float64)
                distance[: len(edges)] = torch.tensor(edges, dtype=torch.float64)
                self.table.copy_(-distance[:, None] * torch.tensor(self.start_slopes, dtype=torch.float64) / self.scale)
            else:
                std = math.sqrt(2 / (self.num_buckets + self.num_heads)) if self.std is None else self.std
                self.table.normal_(0.0, std)

    def formula(self, distance: Tensor) -> Tensor:
        return self.look_up(distance if self.bidirectional else distance.abs(), self.bidirectional)

    def look_up(self, distance: Tensor, bidirectional: bool) -> Tensor:
        """``(*shape)`` floating distances -> ``(H, *shape)``, with the buckets of one direction or of both."""
        bucket = t5_bucket(
            distance,
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
            bidirectional=bidirectional,
        )
        return self.table.t()[:, bucket].to(distance.dtype) * self.scale

    def converges(self) -> list[bool]:
        return [False] * self.num_heads


class SandwichKernel(Kernel):
    """``exp((sum_i cos(d / base^(2i/m)) - m/2) / r_h)``, ``r_h = 8h/H``: the products of sinusoidal embeddings.

    ``i`` runs over ``m/2`` numbers from ``index_start``.
    """

    def __init__(self, num_heads: int, *, dim: int = 128, index_start: int = 1, base: float = 10000.0) -> None:
        super().__init__(num_heads)
        if dim < 2 or dim % 2:
            raise ValueError(f"dim is even and at least 2; got {dim}")
        self.dim, self.index_start, self.base = dim, index_start, base

    def inv_freq(self) -> list[float]:
        return [self.base ** (-2 * i / self.dim) for i in range(self.index_start, self.index_start + self.dim // 2)]

    def raw(self, distance: Tensor) -> Tensor:
        """``(*shape)`` floating distances -> ``(*shape)``: the sum of cosines, before shift and compression."""
        if distance.dim() == 1:
            inv_freq = torch.tensor(self.inv_freq(), dtype=distance.dtype, device=distance.device)
            return (distance[:, None] * inv_freq).cos().sum(-1)
        total = torch.zeros_like(distance)
        for frequency in self.inv_freq():
            total = total + (distance * frequency).cos()
        return total

    def formula(self, distance: Tensor) -> Tensor:
        compression = [self.num_heads / (8 * h) for h in range(1, self.num_heads + 1)]
        return per_head(compression, distance) * (self.raw(distance) - self.dim // 2)

    def converges(self) -> list[bool]:
        return [False] * self.num_heads


# ---- by name --------------------------------------------------------------------------------------------------------

KERNELS: dict[str, Callable[..., Kernel]] = {
    "exp": Exponential,
    "gauss": Gaussian,
    "cauchy": Cauchy,
    "log-square": LogSquare,
    "harmonic": Harmonic,
    "harmonic-log": HarmonicLog,
    "tanh": Tanh,
    "power": Power,
    "log": Logarithmic,
    "t5": T5Table,
    "sandwich": SandwichKernel,
    "uniform": Uniform,
}
"""What ``make_kernel`` and ``MEP(kernels=[...])`` take by name."""


def make_kernel(
    kernel: str | Kernel,
    num_heads: int,
    *,
    slopes: float | Sequence[float] | None = None,
    head_dim: int | None = None,
    start: Start = "published",
) -> Kernel:
    """A kernel by name: ``"exp"``, ``"gauss"``, ...; ``"exp*0.5"`` multiplies its slopes. A kernel object passes as is.

    Args:
        kernel: a name in ``KERNELS``, or a kernel.
        num_heads: number of attention heads.
        slopes: one for all heads, or one for each; default: ALiBi's. A learned kernel (power, log, t5) starts there.
        head_dim: width of one head: the t5 kernel multiplies its table by ``sqrt(head_dim)``, as published.
        start: of learned kernels.

    Raises:
        ValueError: an unknown name, slopes for a kernel that has none or has them already, or a wrong number of heads.
    """
    if isinstance(kernel, Kernel):
        if slopes is not None:
            raise ValueError(f"{type(kernel).__name__} is a kernel object with slopes of its own; give them to it")
        if kernel.num_heads != num_heads:
            raise ValueError(f"{type(kernel).__name__} has {kernel.num_heads} heads; the encoding has {num_heads}")
        return kernel
    name, _, factor = kernel.partition("*")
    name = name.strip()
    if name not in KERNELS:
        raise ValueError(f"no kernel is named {name!r}; there are: {', '.join(KERNELS)}")
    if name in ("sandwich", "uniform"):
        if factor or slopes is not None:
            raise ValueError(f"the {name} kernel has no slopes; got {kernel!r} with slopes {slopes}")
        return KERNELS[name](num_heads)
    given = [float(slopes)] * num_heads if isinstance(slopes, int | float) else slopes
    options: dict[str, Any] = {"slope_scale": float(factor or 1)}
    if name in ("power", "log", "t5"):
        options["start"] = "slopes" if factor or given is not None else start
    if name == "t5":
        if head_dim is None:
            raise ValueError("the t5 kernel multiplies its table by sqrt(head_dim): give head_dim")
        options["scale"] = math.sqrt(head_dim)
    return KERNELS[name](num_heads, given, **options)
