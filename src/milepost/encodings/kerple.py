"""KERPLE: biases from conditionally positive definite kernels, with two or three learned numbers per head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from milepost.encoding import EncodingConfig, register
from milepost.encodings.bias import KernelBias
from milepost.kernels import Logarithmic, Power, Start

_SOURCE = "Chi et al. 2022 (arXiv 2205.09921)"


@dataclass(frozen=True, kw_only=True)
class KERPLEConfig(EncodingConfig):
    """Options of :class:`KERPLE`.

    Attributes:
        num_heads: number of attention heads.
        kernel: ``"log"``, ``"power"`` or ``"3param"``.
        init: ``"published"`` (uniform), or ``"slopes"``: exponents 1 and ALiBi's slopes as factors.
        floor: smallest value of a parameter.
    """

    num_heads: int
    kernel: Literal["log", "power", "3param"] = "log"
    init: Start = "published"
    floor: float = 1e-2

    def __post_init__(self) -> None:
        if self.kernel not in ("log", "power", "3param"):
            raise ValueError(f"kernel is 'log', 'power' or '3param'; got {self.kernel!r}")
        if self.init not in ("published", "slopes"):
            raise ValueError(f"init is 'published' or 'slopes'; got {self.init!r}")
        if not 0 < self.floor < 1:
            raise ValueError(f"floor is in (0, 1); got {self.floor}")


@register(
    "kerple-3param",
    title="KERPLE, 3 parameters",
    family="bias",
    manifestation="bias",
    learnable=True,
    integration="add",
    injection="every",
    source=_SOURCE,
    summary="-p log(1 + a d^r) with learned p, a and r per head.",
    preset={"kernel": "3param"},
)
@register(
    "kerple-power",
    title="KERPLE-power",
    family="bias",
    manifestation="bias",
    learnable=True,
    integration="add",
    injection="every",
    source=_SOURCE,
    summary="-a d^p with learned a and p <= 2 per head.",
    preset={"kernel": "power"},
)
@register(
    "kerple-log",
    title="KERPLE-log",
    family="bias",
    manifestation="bias",
    learnable=True,
    integration="add",
    injection="every",
    source=_SOURCE,
    summary="-p log(1 + a d) with learned p and a per head: a power law of distance.",
    survey="KERPLE",
    preset={"kernel": "log"},
)
class KERPLE(KernelBias):
    """Kernelised relative positions, learned per head.

    - ``log``: ``b(d) = -p log(1 + a |d|)``, start ``p ~ U(0, 2)``, ``a ~ U(0, 1)``;
    - ``power``: ``b(d) = -a |d|^p``, ``p <= 2``, start ``a ~ U(0, 1)``, ``p ~ U(0, 2)``;
    - ``3param``: ``b(d) = -p log(1 + a |d|^r)``, ``r <= 2`` (in the paper only; its start is our choice).

    Every value of the parameters gives a bias that is finite, at most 0 and does not rise with distance: a parameter
    is used as it is inside its range and folded back into it outside (:func:`~milepost.kernels.folded`). The published
    code overwrites parameters below 0.01 with 0.01 before each forward pass; where that never happens both are the
    same, so its checkpoints can be loaded as they are.

    Shapes: a :class:`~milepost.terms.DistanceBias` of ``(H, n)``, float32 or better; 2 H parameters (3 H).
    Raises ValueError for an unknown kernel or start, or a floor outside (0, 1).
    Source: Chi et al. 2022 (arXiv 2205.09921). Its equation 1 divides the bias by sqrt(head_dim) together with the
    product of q and k; its code adds it after the scaling, which is followed here. One set serves all layers.
    """

    Config = KERPLEConfig
    config: KERPLEConfig

    def setup(self) -> None:
        c = self.config
        if c.kernel == "power":
            self.kernel = Power(c.num_heads, start=c.init, floor=c.floor)
        else:
            self.kernel = Logarithmic(c.num_heads, start=c.init, floor=c.floor, exponent=c.kernel == "3param")
