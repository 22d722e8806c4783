"""The position maps that have a name of their own, each over an encoding that is named too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from milepost.encoding import Encoding, EncodingConfig, Mapped, PositionMap, from_spec, misleading, register
from milepost.encodings.maps.pose import PoSE
from milepost.encodings.maps.randomized import Randomized, RandomizedDistances
from milepost.encodings.maps.shifted import CAPE, SHAPE
from milepost.positions import Positions
from milepost.terms import Terms


@dataclass(frozen=True, kw_only=True)
class MappedConfig(EncodingConfig):
    """What every named map takes.

    Attributes:
        encoding: the encoding underneath, as one line of text (``"rope"``, ``"alibi:slope_scale=2"``).
        num_heads, head_dim, width, num_layers, vocab_size, trained_length: of the model, for that encoding.
    """

    encoding: str
    num_heads: int | None = None
    head_dim: int | None = None
    width: int | None = None
    num_layers: int | None = None
    vocab_size: int | None = None
    trained_length: int | None = None


class MappedEncoding(Encoding):
    """A position map over an encoding, both made from one configuration. A subclass says which map."""

    Config = MappedConfig
    config: MappedConfig

    def position_map(self) -> PositionMap:
        """The map these options describe."""
        return PositionMap()

    def mapped_length(self) -> int | None:
        """Positions the encoding underneath must be built for: those the map gives in training."""
        return self.config.trained_length

    def inner(self) -> Encoding:
        """The encoding underneath."""
        known = ("num_heads", "head_dim", "width", "num_layers", "vocab_size")
        geometry = {name: getattr(self.config, name) for name in known}
        geometry["trained_length"] = self.mapped_length()
        return from_spec(self.config.encoding, {k: v for k, v in geometry.items() if v is not None})

    def setup(self) -> None:
        self.mapped: Encoding = Mapped(self.position_map(), self.inner())

    @property
    def needs_tokens(self) -> bool:  # type: ignore[override]  # in training tokens tell the rows apart, which draw apart
        return self.training or self.mapped.needs_tokens

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        return self.mapped(positions, tokens)

    def embed(self, x: Tensor, positions: Positions, tokens: Tensor | None = None) -> Tensor:
        return self.mapped.embed(x, positions, tokens)

    def for_layer(self, layer: int) -> Encoding:
        mine = self.mapped.for_layer(layer)
        return self if mine is self.mapped else mine


# ---- shifts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ShiftedConfig(MappedConfig):
    """Options of :class:`ShiftedEncoding`: those of :class:`SHAPE`, and the encoding underneath."""

    encoding: str = "sinusoidal"
    max_shift: int = 500
    test_shift: Literal["full", "half", "zero"] = "full"


@register(
    "shape",
    title="SHAPE",
    family="absolute",
    manifestation="embedding",
    learnable=False,
    integration="add",
    injection="initial",
    source="Kiyono et al. 2021 (arXiv 2109.05644)",
    summary="Sinusoids at positions that a training pass shifts by one random number per sequence.",
    survey="SHAPE",
)
class ShiftedEncoding(MappedEncoding):
    """Shifted absolute position embedding: ``x_t + p(t + k)``, the map :class:`SHAPE` over sinusoids.

    One k per sequence from 0 .. 499 in training, the constant 500 at test time (official code). Any other absolute
    encoding may stand underneath (``encoding="learned"``); a relative one does not notice the shift.

    Parameters and shapes: those of the encoding underneath, which is built for ``trained_length + max_shift``.
    Raises ValueError for options that :class:`SHAPE` refuses.
    Source: Kiyono et al. 2021 (arXiv 2109.05644), where source and target sides draw separately.
    """

    Config = ShiftedConfig
    config: ShiftedConfig

    def position_map(self) -> PositionMap:
        return SHAPE(max_shift=self.config.max_shift, test_shift=self.config.test_shift)

    def mapped_length(self) -> int | None:
        trained = self.config.trained_length
        return None if trained is None else trained + self.config.max_shift


@dataclass(frozen=True, kw_only=True)
class ContinuousConfig(MappedConfig):
    """Options of :class:`ContinuousEncoding`: those of :class:`CAPE`, and the encoding underneath."""

    encoding: str = "sinusoidal"
    max_global_shift: float = 5.0
    max_local_shift: float = 1.0
    max_scale: float = 1.03
    normalize: bool = False


@register(
    "cape2021",
    title="CAPE (2021)",
    family="absolute",
    manifestation="embedding",
    learnable=False,
    integration="add",
    injection="initial",
    source="Likhomanenko et al. 2021 (arXiv 2106.03143)",
    summary="Sinusoids at real positions that training shifts, jitters and scales.",
    survey="CAPE",
)
class ContinuousEncoding(MappedEncoding):
    """Continuous augmented position embedding: ``x_t + p((t + D + e_t) exp(u))``, the map :class:`CAPE` over sinusoids.

    Augmentation in training only; at test time these are plain sinusoids. Not the CAPE of 2024, which is ``dape``.

    Parameters and shapes: those of the encoding underneath; it must accept positions that are no integers.
    Raises ValueError for options that :class:`CAPE` refuses, and for ``normalize`` in causal attention.
    Source: Likhomanenko et al. 2021 (arXiv 2106.03143), equations 4-7; defaults are the authors' example for text.
    """

    Config = ContinuousConfig
    config: ContinuousConfig

    def position_map(self) -> PositionMap:
        options = self.config
        return CAPE(
            max_global_shift=options.max_global_shift,
            max_local_shift=options.max_local_shift,
            max_scale=options.max_scale,
            normalize=options.normalize,
        )


misleading(
    "cape",
    "two papers were called CAPE: build('cape2021') is Continuous Augmented Positional Embeddings (arXiv 2106.03143), "
    "build('dape') is Context-Adaptive Positional Encoding, later renamed DAPE (arXiv 2405.14722)",
)


# ---- skips ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SkippedConfig(MappedConfig):
    """Options of :class:`SkippedEncoding`.

    Attributes:
        target_length: M of :class:`PoSE`; None = 8 times ``trained_length`` (the paper: 2048 to 16384).
    """

    encoding: str = "rope"
    target_length: int | None = None


@register(
    "pose-rope",
    title="PoSE with RoPE",
    family="map",
    manifestation="position map",
    learnable=False,
    integration="multiply",
    injection="every",
    source="Zhu et al. 2023 (arXiv 2309.10400)",
    summary="RoPE trained at positions that skip once per row, so that short rows meet long distances.",
)
class SkippedEncoding(MappedEncoding):
    """Positional skip-wise training under an encoding: the map :class:`PoSE`, over RoPE as published.

    Only training positions skip; at test time this is the encoding underneath. The authors stretch its frequencies to
    the target too (PI, NTK, YaRN): name such an encoding in ``encoding``.

    Parameters and shapes: those of the encoding underneath.
    Raises ValueError without ``target_length`` and ``trained_length``, and for training rows longer than the target.
    Source: Zhu et al. 2023 (arXiv 2309.10400).
    """

    Config = SkippedConfig
    config: SkippedConfig

    def position_map(self) -> PositionMap:
        options = self.config
        if options.target_length is None and options.trained_length is None:
            raise ValueError("PoSE needs target_length, or trained_length (the target is then 8 times as long)")
        return PoSE(target_length=options.target_length or 8 * (options.trained_length or 1))


# ---- random positions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RandomizedEncodingConfig(MappedConfig):
    """Options of :class:`RandomizedEncoding`.

    Attributes:
        relative: draw distances instead of positions (biases of distance only).
        max_position: M; None = 2048 or 32 times ``trained_length``, whichever is more.
        test_tokens: see :class:`Randomized`; None = ``trained_length``.
        seed: of the draw outside training.
    """

    relative: bool = False
    max_position: int | None = None
    test_tokens: int | None = None
    seed: int = 0


_RUOSS = "Ruoss et al. 2023 (arXiv 2305.16843)"


@register(
    "randomized-learned",
    title="Randomized learned",
    family="map",
    manifestation="position map",
    learnable=True,
    integration="add",
    injection="initial",
    source=_RUOSS,
    summary="Learned absolute codes at sorted random positions from a long range.",
    preset={"encoding": "learned"},
)
@register(
    "randomized-alibi",
    title="Randomized ALiBi",
    family="map",
    manifestation="position map",
    learnable=False,
    integration="add",
    injection="every",
    source=_RUOSS,
    summary="ALiBi over sorted random distances from a long range, the same for all queries.",
    preset={"encoding": "alibi", "relative": True},
)
@register(
    "randomized-rope",
    title="Randomized RoPE",
    family="map",
    manifestation="position map",
    learnable=False,
    integration="multiply",
    injection="every",
    source=_RUOSS,
    summary="RoPE at sorted random positions from a long range.",
    preset={"encoding": "rope"},
)
@register(
    "randomized-sinusoidal",
    title="Randomized sinusoidal",
    family="map",
    manifestation="position map",
    learnable=False,
    integration="add",
    injection="initial",
    source=_RUOSS,
    summary="Sinusoids at sorted random positions from a long range.",
    preset={"encoding": "sinusoidal"},
)
class RandomizedEncoding(MappedEncoding):
    """Randomized positions under an encoding: the map :class:`Randomized`, or :class:`RandomizedDistances`.

    A text of n tokens stands at n sorted random positions below M, so that training on short texts meets the positions
    (or the distances) of long ones. The encoding underneath is built for M positions.

    Parameters: those of the encoding underneath. Shapes: as that encoding.
    Raises ValueError as :class:`Randomized` and :class:`RandomizedDistances` do.
    Source: Ruoss et al. 2023 (arXiv 2305.16843); M = 2048 for training lengths up to 40.
    """

    Config = RandomizedEncodingConfig
    config: RandomizedEncodingConfig

    def mapped_length(self) -> int:
        return self.config.max_position or max(2048, 32 * (self.config.trained_length or 1))

    def position_map(self) -> Randomized:
        options, size = self.config, self.mapped_length()
        drawn = options.test_tokens or min(options.trained_length or 1, size)
        return Randomized(max_position=size, test_tokens=drawn, seed=options.seed)

    def setup(self) -> None:
        kind = RandomizedDistances if self.config.relative else Mapped
        self.mapped = kind(self.position_map(), self.inner())
