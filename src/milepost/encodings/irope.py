"""iRoPE: local rotary layers and global layers without positions, as in Llama 4."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from milepost.encoding import Encoding, EncodingConfig, PerLayer, register
from milepost.encodings.none import ScaledNoPE
from milepost.encodings.rotary import Layout, Rotary, RotaryConfig
from milepost.positions import Positions
from milepost.terms import Terms


@dataclass(frozen=True, kw_only=True)
class LocalRoPEConfig(RotaryConfig):
    """Options of :class:`LocalRoPE`: RoPE's, and the chunk.

    Attributes:
        chunk: a query sees only its own chunk of this many tokens.
    """

    chunk: int = 8192


class LocalRoPE(Rotary):
    """RoPE inside chunks: a query attends to its own chunk only (the local layers of :class:`IRoPE`)."""

    Config = LocalRoPEConfig
    config: LocalRoPEConfig

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        return Terms(
            branches=(self.rotation(positions).branch(),),
            chunk=self.config.chunk,
            rotated_keys_cacheable=not self.method.length_dependent,
        )


@dataclass(frozen=True, kw_only=True)
class IRoPEConfig(EncodingConfig):
    """Options of :class:`IRoPE`.

    Attributes:
        head_dim: width of one head.
        base: rope_theta of the local layers.
        layout: which channels form a pair.
        interval: every interval-th layer is global and has no positions.
        trained_length: default of chunk and floor_scale.
        chunk: tokens of a chunk of the local layers (None: trained_length, or 8192 as published).
        floor_scale: positions over which the temperature stands still (None: as chunk).
        attn_scale: strength of the temperature; 0 turns it off.
        scaling: frequency method of the local layers (see RoPE).
    """

    head_dim: int
    base: float = 500000.0
    layout: Layout = "interleaved"
    interval: int = 4
    trained_length: int | None = None
    chunk: int | None = None
    floor_scale: int | None = None
    attn_scale: float = 0.1
    scaling: dict[str, object] | None = None

    def __post_init__(self) -> None:
        if self.interval < 2:
            raise ValueError(
                f"interval is at least 2: one global layer after interval - 1 local ones; got {self.interval}"
            )
        for name in ("chunk", "floor_scale"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is at least 1; got {value}")


@register(
    "irope",
    title="iRoPE",
    family="schedule",
    manifestation="embedding",
    learnable=False,
    integration="multiply",
    injection="every",
    source="Llama 4 (meta-llama/llama-models, transformers' llama4)",
    summary="Three layers of RoPE in local chunks, then one global layer without positions and with a temperature.",
)
class IRoPE(PerLayer):
    """iRoPE: layers are local with RoPE, except every fourth, which is global without positions.

    Layer l (from 0) is global iff ``(l + 1) % interval == 0``. Local layers attend inside chunks; global layers
    multiply queries by ``1 + attn_scale * ln(floor((position + 1) / floor_scale) + 1)``.

    A schedule: ``for_layer(l)`` is the encoding of a layer. Raises ValueError for an interval below 2.
    Source: Llama 4's code. Its configuration inverts the name: ``no_rope_layers`` holds 1 where a layer *does* rotate.
    The models also normalise q and k after rotating them, in local layers: that is the model's matter, not done here.
    """

    Config = IRoPEConfig
    config: IRoPEConfig

    def __init__(self, *args: object, **options: object) -> None:
        Encoding.__init__(self, *args, **options)

    def setup(self) -> None:
        c = self.config
        chunk = c.chunk or c.trained_length or 8192
        local = LocalRoPE(
            head_dim=c.head_dim,
            base=c.base,
            layout=c.layout,
            trained_length=c.trained_length,
            scaling=c.scaling,
            chunk=chunk,
        )
        everywhere = ScaledNoPE(schedule="llama4", floor_scale=c.floor_scale or chunk, attn_scale=c.attn_scale)
        self.encodings = nn.ModuleList([*[local] * (c.interval - 1), everywhere])

    @property
    def name(self) -> str:
        return "irope"
