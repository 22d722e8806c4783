"""Our designs in the spirit of LFHC-RPE and GCDF-RPE, whose formulas are not public."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from milepost.encoding import Encoding, EncodingConfig, register
from milepost.encodings.bias import block_of
from milepost.kernels import as_float, new_parameter, per_head, t5_bucket, t5_edges
from milepost.positions import Positions
from milepost.terms import Terms, distance_bias

_SOURCE = "our design after the abstract of Qu, Niu, Mo 2021 (EMNLP, 2021.emnlp-main.237)"


@dataclass(frozen=True, kw_only=True)
class LFHCLikeConfig(EncodingConfig):
    """Options of :class:`LFHCLike`.

    Attributes:
        head_dim: width of one head.
        num_buckets: vectors in the table, half of them for each side.
        max_distance: distances from here on share a vector.
        std: standard deviation of the normal start; None: ``head_dim^-1/2``.
    """

    head_dim: int
    num_buckets: int = 64
    max_distance: int = 512
    std: float | None = None

    def __post_init__(self) -> None:
        if self.num_buckets % 2:
            raise ValueError(f"each side gets half of the buckets; num_buckets is {self.num_buckets}, odd")
        t5_edges(self.num_buckets // 2, self.max_distance)


@register(
    "lfhc-like",
    title="LFHC-like (our design)",
    family="content",
    manifestation="embedding",
    learnable=True,
    integration="add",
    injection="every",
    source=_SOURCE,
    summary="Shaw's learned key vectors, fine for near and coarse for far distances.",
    shared=False,
)
class LFHCLike(Encoding):
    """Fine near, coarse far: ``logit_ij = scale * q_i . (k_j + a[bucket(i - j)])`` with T5's two-sided buckets.

    **Not a reproduction.** The paper describes LFHC-RPE, "low-level fine-grained, high-level coarse-grained", as an
    improved table of Shaw's; its boundaries are not published. The buckets, their number and the start are ours.

    Shapes: content-dependent scores, ``O(B H q num_buckets)`` extra memory and one gather per block of queries; the
    table is ``(num_buckets, head_dim)``, shared by heads.
    Raises ValueError for an odd number of buckets or a ``max_distance`` inside the exact ones.
    Source: the abstract of Qu, Niu, Mo 2021 (EMNLP, 2021.emnlp-main.237); Shaw et al. 2018 for the form.
    """

    Config = LFHCLikeConfig
    config: LFHCLikeConfig

    def setup(self) -> None:
        self.table = new_parameter(self.config.num_buckets, self.config.head_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.table.normal_(0.0, self.config.head_dim**-0.5 if self.config.std is None else self.config.std)

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        return Terms(scores=_BucketScores(self.table, self.config, positions))


class _BucketScores:
    """Adds ``scale * q . a[bucket]`` to the logits of a block of queries."""

    def __init__(self, table: Tensor, config: LFHCLikeConfig, positions: Positions) -> None:
        self.table, self.config, self.positions = table, config, positions

    def __call__(
        self,
        logits: Tensor,
        bias: Tensor | None,
        *,
        q: Tensor,
        k: Tensor,
        positions: Positions,
        allowed: Tensor,
        scale: float,
    ) -> Tensor:
        bucket = t5_bucket(
            block_of(self.positions, positions).distance(),
            num_buckets=self.config.num_buckets,
            max_distance=self.config.max_distance,
            bidirectional=True,
        )
        products = (q @ self.table.t().to(q.dtype)) * scale
        logits = logits + products.gather(-1, bucket[:, None].expand(*logits.shape))
        return logits if bias is None else logits + bias


@dataclass(frozen=True, kw_only=True)
class GCDFLikeConfig(EncodingConfig):
    """Options of :class:`GCDFLike`.

    Attributes:
        num_heads: number of attention heads.
        num_features: features on each side; centre k stands at distance ``2^k``, k = 0, 1, ...
        std: standard deviation of the normal start of the weights.
    """

    num_heads: int
    num_features: int = 10
    std: float = 0.02

    def __post_init__(self) -> None:
        if not 1 <= self.num_features <= 30:
            raise ValueError(f"num_features is between 1 and 30; got {self.num_features}")


@register(
    "gcdf-like",
    title="GCDF-like (our design)",
    family="bias",
    manifestation="bias",
    learnable=True,
    integration="add",
    injection="every",
    source=_SOURCE,
    summary="A learned sum of Gaussian distribution functions of the signed distance.",
    shared=False,
)
class GCDFLike(Encoding):
    """Steps of distance: ``b_h(d) = sum_k W_kh Phi((d - mu_k) / sigma_k)``, Phi the normal distribution function.

    ``mu_k = ±2^k`` and ``sigma_k = 2^k / 2``: smooth steps that widen with distance, on both sides.

    **Not a reproduction.** The paper puts a Gaussian cumulative distribution function where Transformer-XL has its
    sinusoidal prior; its centres, widths and use are not published. Those here are ours.

    Shapes: a :class:`~milepost.terms.DistanceBias` of ``(H, n)``, float32 or better; W is ``(2 num_features, H)``.
    Raises ValueError for fewer than 1 or more than 30 features.
    Source: the abstract of Qu, Niu, Mo 2021 (EMNLP, 2021.emnlp-main.237).
    """

    Config = GCDFLikeConfig
    config: GCDFLikeConfig

    def setup(self) -> None:
        self.weight = new_parameter(2 * self.config.num_features, self.config.num_heads)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.normal_(0.0, self.config.std)

    def centres(self) -> list[float]:
        """The ``2 num_features`` centres, ascending."""
        sizes = [2.0**k for k in range(self.config.num_features)]
        return [-size for size in reversed(sizes)] + sizes

    def features(self, distance: Tensor) -> list[Tensor]:
        """Each feature at these signed distances, in (0, 1) and rising with distance."""
        x = as_float(distance, self.weight)
        return [torch.special.ndtr((x - centre) / (abs(centre) / 2)) for centre in self.centres()]

    def bias(self, distance: Tensor) -> Tensor:
        """``(*shape)`` signed distances -> ``(H, *shape)``."""
        total = torch.zeros((), dtype=torch.float32, device=distance.device)
        for feature, weight in zip(self.features(distance), self.weight, strict=True):
            total = total + per_head(weight, feature) * feature
        return total

    def converges(self) -> list[bool]:
        """For each head, whether the sum of ``exp(bias)`` over all distances is finite: never, it ends flat."""
        return [False] * self.config.num_heads

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        return Terms(bias=distance_bias(self.bias, positions))
