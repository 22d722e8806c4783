"""Rotary values: VO-RoPE, also called RoPER."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from milepost.encoding import alias, register
from milepost.encodings.rotary import Rotary, RotaryConfig
from milepost.positions import Positions
from milepost.terms import Terms


@dataclass(frozen=True, kw_only=True)
class VORoPEConfig(RotaryConfig):
    """Options of :class:`VORoPE`.

    Attributes:
        qk: rotate queries and keys too.
    """

    qk: bool = True


@register(
    "vo-rope",
    title="VO-RoPE (RoPER)",
    family="rotary",
    manifestation="embedding",
    learnable=False,
    integration="multiply",
    injection="every",
    source="Su 2025 (kexue.fm 10862); RoPER (encyclopedia)",
    summary="Values are rotated by their position and the result back by the query's.",
)
class VORoPE(Rotary):
    """VO-RoPE: ``o_i = R_i^T sum_j a_ij R_j v_j``, so that each value arrives turned by its distance.

    The weights ``a_ij`` come from rotated q and k as in RoPE (``qk=True``), or from plain ones. Values are cached
    rotated; the inverse rotation is the query's own and comes before the output projection.

    Shapes: values ``(B, Hkv, n, head_dim)``. Raises ValueError where values are narrower than the rotated part.
    Source: Su 2025 (kexue.fm 10862); an encyclopedia calls it RoPER. No claim to extrapolate is made there: 1B models
    trained with it reach a loss of 2.719 with ``qk`` (RoPE: 2.712) and 2.770 without (NoPE: 2.795).
    """

    Config = VORoPEConfig
    config: VORoPEConfig

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        rotation = self.rotation(positions)
        plain = self.rotation(positions, found=self.frequencies(positions)._replace(attention_factor=1.0))

        def value(v: Tensor, at: str = "keys") -> Tensor:
            if v.shape[-1] < self.config.rotary_dim:
                raise ValueError(f"values of width {v.shape[-1]} cannot carry {self.config.rotary_dim} channels")
            return plain.key(v, at)

        return Terms(
            branches=(rotation.branch(),) if self.config.qk else (),
            value=value,
            output=plain.back,
            rotated_keys_cacheable=not self.method.length_dependent,
        )


alias("roper", "vo-rope")
