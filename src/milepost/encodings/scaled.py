"""RoPE with stretched frequencies, one name a published method. Every one is ``RoPE(scaling=...)`` spelled out."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from milepost.encoding import alias, register
from milepost.encodings.frequencies import (
    ABF,
    NTK,
    ByParts,
    Clex,
    FrequencyMethod,
    Linear,
    Llama3,
    LongRope,
    PartNTK,
    Power,
    Resonance,
    Truncated,
    Yarn,
    dynamic_ntk,
)
from milepost.encodings.rotary import (
    Phases,
    RoPE,
    RoPEConfig,
    Rotary,
    RotaryConfig,
    frequency_method,
    linear_phases,
)
from milepost.positions import Positions
from milepost.terms import Terms

FIXED: dict[str, Any] = {
    "family": "rotary",
    "manifestation": "embedding",
    "learnable": False,
    "integration": "multiply",
    "injection": "every",
}


def scaled_config(method: type[Any], name: str, **defaults: Any) -> type[RotaryConfig]:
    """A configuration with the options of RoPE and those of a frequency method; ``defaults`` replace the method's."""
    own = {field.name for field in dataclasses.fields(RotaryConfig)} | {"rotary_dim"}
    added: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(method):
        if field.name not in own:
            default = defaults.get(field.name, field.default)
            added.append((field.name, field.type, dataclasses.field(default=default)))
    made = dataclasses.make_dataclass(name, added, bases=(RotaryConfig,), frozen=True, kw_only=True)
    made.__module__ = __name__
    made.__doc__ = f"Options of :class:`Scaled` by {method.__name__}: RoPE's and the method's own."
    return made


class Scaled(Rotary):
    """RoPE at the frequencies of one published method. Shapes, caches and factors as :class:`RoPE`.

    Options are RoPE's and the method's. Raises ValueError for what the method refuses, and where it needs the trained
    length and none is given (a model gives it).
    """

    method_type: ClassVar[type[Any]]
    config: Any

    def make_method(self) -> FrequencyMethod:
        c = self.config
        self._no_second_scaling()
        names = {field.name for field in dataclasses.fields(self.method_type)} - {"rotary_dim"}
        options = {name: getattr(c, name) for name in names}
        if "trained_length" in options and options["trained_length"] is None:
            raise ValueError(f"{self.name} needs trained_length, the length that the checkpoint was trained at")
        options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
        return self.method_type(rotary_dim=c.rotary_dim, **options)

    def _no_second_scaling(self) -> None:
        if self.config.scaling is not None:
            raise ValueError(f"{self.name} is a scaling itself: use rope with scaling={self.config.scaling!r} instead")


@register(
    "pi",
    title="Position Interpolation",
    source="Chen et al. 2023 (arXiv 2306.15595), equation 4; kaiokendev",
    summary="RoPE with every frequency divided by one factor.",
    **FIXED,
)
class PI(Scaled):
    """Position Interpolation: ``theta_p / factor``, the same as positions divided by the factor, fractions kept.

    Source: Chen et al. 2023 (arXiv 2306.15595), equation 4. The default factor 4 is ours; so it is for every name here.
    """

    method_type = Linear
    Config = scaled_config(Linear, "PIConfig", factor=4.0)


PIConfig = PI.Config


@register(
    "ntk",
    title="NTK-aware scaling",
    source="bloc97 2023; Peng et al. 2023 (arXiv 2309.00071), definition 1",
    summary="RoPE with a larger base: the fastest pair keeps its speed, the slowest is divided by the factor.",
    **FIXED,
)
class NTKAware(Scaled):
    """NTK-aware scaling: ``base' = base * factor^(d/(d-2))``; ``mixed_b`` selects Su's two variants.

    Source: Peng et al. 2023 (arXiv 2309.00071), definition 1. ``mixed_b=1`` and ``.75`` are "fixed" and "mixed" of
    bojone/rerope; both slow the first pair too. An encyclopedia writes the exponent with d = number of pairs: the same
    number.
    """

    method_type = NTK
    Config = scaled_config(NTK, "NTKAwareConfig", factor=4.0)


NTKAwareConfig = NTKAware.Config


@register(
    "abf",
    title="Adjusted base frequency",
    source="Xiong et al. 2023 (arXiv 2309.16039); Roziere et al. 2023 (arXiv 2308.12950)",
    summary="RoPE trained on, or run, with another base.",
    **FIXED,
)
class AdjustedBase(Scaled):
    """Adjusted base frequency: the ladder of ``new_base``; ``base`` stays on record.

    Source: Xiong et al. 2023 (arXiv 2309.16039), 5e5, the default; Code Llama (arXiv 2308.12950) takes 1e6.
    """

    method_type = ABF
    Config = scaled_config(ABF, "AdjustedBaseConfig", new_base=500000.0)


AdjustedBaseConfig = AdjustedBase.Config


@register(
    "ntk-by-parts",
    title="NTK-by-parts",
    source="Peng et al. 2023 (arXiv 2309.00071), equations 17-20",
    summary="RoPE with fast pairs kept and slow pairs interpolated.",
    **FIXED,
)
class NTKByParts(Scaled):
    """NTK-by-parts: pairs with many turns in training are kept, pairs with few divided by the factor.

    ``ramp="rotations"`` (default) is the paper's, linear in turns; ``"index"`` every engine's, linear in pair index.
    Source: Peng et al. 2023 (arXiv 2309.00071), equations 17-20; where the two ramps differ, the paper's is followed.
    """

    method_type = ByParts
    Config = scaled_config(ByParts, "NTKByPartsConfig", factor=4.0)


NTKByPartsConfig = NTKByParts.Config


@register(
    "ntk-by-parts-old",
    title="NTK-by-parts, first form",
    source="jquesnelle/yarn, LlamaPartNTKScaledRotaryEmbedding",
    summary="The first, two-ramp form of NTK-by-parts.",
    **FIXED,
)
class NTKByPartsOld(Scaled):
    """Two ramps: interpolated to NTK-aware, then to unscaled. Source: jquesnelle/yarn (superseded by YaRN)."""

    method_type = PartNTK
    Config = scaled_config(PartNTK, "NTKByPartsOldConfig", factor=4.0)


NTKByPartsOldConfig = NTKByPartsOld.Config


@register(
    "yarn",
    title="YaRN",
    source="Peng et al. 2023 (arXiv 2309.00071), equations 17-22",
    summary="NTK-by-parts and a temperature that grows with the logarithm of the factor.",
    **FIXED,
)
class YaRN(Scaled):
    """YaRN: NTK-by-parts with cosines and sines multiplied by ``0.1 ln(factor) + 1``.

    Logits of rotated channels so carry the square of it, at every length. ``ramp="index"`` as in every engine.
    Source: Peng et al. 2023 (arXiv 2309.00071), equations 17-22; see `Yarn` for mscale and where engines differ.
    """

    method_type = Yarn
    Config = scaled_config(Yarn, "YaRNConfig", factor=4.0)


YaRNConfig = YaRN.Config


@register(
    "llama3",
    title="Llama-3 scaling",
    source="meta-llama/llama-models, apply_scaling",
    summary="NTK-by-parts between one and four turns, without a temperature.",
    **FIXED,
)
class Llama3Scaled(Scaled):
    """Llama 3.1's scaling: wavelengths below L/4 kept, above L divided by the factor, blended between.

    Source: meta-llama/llama-models; equal to NTK-by-parts with ``alpha=1, beta=4`` and the rotations ramp.
    """

    method_type = Llama3
    Config = scaled_config(Llama3, "Llama3ScaledConfig", factor=8.0)


Llama3ScaledConfig = Llama3Scaled.Config


@register(
    "truncated",
    title="Truncated basis",
    source="Pal et al. 2023 (arXiv 2308.10882), section 3.3",
    summary="Fast pairs kept, middle pairs at one slow frequency, slow pairs stopped.",
    **FIXED,
)
class TruncatedBasis(Scaled):
    """Giraffe's truncated basis. Thresholds from the trained length as in abacusai's code: rho below a.

    Source: Pal et al. 2023 (arXiv 2308.10882), section 3.3.
    """

    method_type = Truncated
    Config = scaled_config(Truncated, "TruncatedBasisConfig")


TruncatedBasisConfig = TruncatedBasis.Config


@register(
    "power",
    title="Power basis",
    source="Pal et al. 2023 (arXiv 2308.10882), section 3.2",
    summary="Slow pairs slowed further by a power of their place in the ladder.",
    **FIXED,
)
class PowerBasis(Scaled):
    """Giraffe's power basis: ``theta_p (1 - p/P)^exponent``. Source: Pal et al. 2023 (arXiv 2308.10882), section 3.2.

    The default exponent 0.5 is ours.
    """

    method_type = Power
    Config = scaled_config(Power, "PowerBasisConfig", exponent=0.5)


PowerBasisConfig = PowerBasis.Config


# ---- methods that read the length -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DynamicNTKConfig(RotaryConfig):
    """Options of :class:`DynamicNTK`.

    Attributes:
        factor: the stretch that the model was already tuned for (1: none).
        form: ``"paper"``: ``s = max(factor, l/L)``; ``"hf"``: ``factor l/L - (factor - 1)``, as transformers.
    """

    factor: float = 1.0
    form: Literal["paper", "hf"] = "paper"


@register(
    "dynamic-ntk",
    title="Dynamic NTK",
    source="emozilla 2023; Peng et al. 2023 (arXiv 2309.00071), section 3.4",
    summary="NTK-aware scaling by each row's own length, never below the trained length.",
    **FIXED,
)
class DynamicNTK(Scaled):
    """Dynamic NTK: ``base * s^(d/(d-2))`` with s from each row's current length; no effect inside the trained length.

    Keys are cached raw, so decoding with a cache equals a full pass at the same length in every single layer. The two
    forms agree for factor 1 only. To grow another method: ``rope`` with ``scaling={"method": "dynamic_yarn", ...}``.
    Source: emozilla; Peng et al. 2023 (arXiv 2309.00071), section 3.4; transformers' ``dynamic`` for the second form.
    """

    Config = DynamicNTKConfig

    def make_method(self) -> FrequencyMethod:
        c = self.config
        self._no_second_scaling()
        if c.trained_length is None:
            raise ValueError(f"{self.name} needs trained_length, the length that the checkpoint was trained at")
        return dynamic_ntk(
            rotary_dim=c.rotary_dim, base=c.base, trained_length=c.trained_length, factor=c.factor, form=c.form
        )


@dataclass(frozen=True, kw_only=True)
class LongRoPEConfig(RotaryConfig):
    """Options of :class:`LongRoPE`; those of `LongRope`, with lists that may be left out.

    Attributes:
        short_factor: one divisor a pair up to the trained length (None: ones).
        long_factor: one divisor a pair beyond it (None: NTK-aware scaling by ``factor``, a seed of the paper's search).
        factor: the stretch; attention factor and default ``long_factor`` follow from it.
        unscaled_tokens: tokens at positions below it are rotated as trained, whichever list serves the rest.
    """

    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    factor: float | None = 4.0
    max_length: int | None = None
    attention_factor: float | None = None
    short_mscale: float | None = None
    long_mscale: float | None = None
    growth: Literal["switch", "dynamic", "short", "long"] = "switch"
    unscaled_tokens: int = 0


@register(
    "longrope",
    title="LongRoPE",
    source="Ding et al. 2024 (arXiv 2402.13753)",
    summary="RoPE with one searched divisor a pair, and another list beyond the trained length.",
    **FIXED,
)
class LongRoPE(Scaled):
    """LongRoPE: ``theta_p / lambda_p``; the long list serves a row as soon as its length exceeds the trained length.

    The divisors come from a search on a checkpoint; without lists this is the search's NTK seed. Positions n below
    ``unscaled_tokens`` are rotated by ``n theta_p``, as the paper's search may ask for. The distance of two tokens on
    different sides of that position is then no longer all that counts.
    Source: Ding et al. 2024 (arXiv 2402.13753) and microsoft/LongRoPE. No engine stores the number of
    unscaled tokens: it works here and is refused by export.
    """

    Config = LongRoPEConfig
    method: LongRope

    def make_method(self) -> FrequencyMethod:
        c = self.config
        self._no_second_scaling()
        if c.trained_length is None:
            raise ValueError(f"{self.name} needs trained_length, the length that the checkpoint was trained at")
        short = (1.0,) * (c.rotary_dim // 2) if c.short_factor is None else tuple(c.short_factor)
        long = self._seed() if c.long_factor is None else tuple(c.long_factor)
        names = (
            *("factor", "max_length", "attention_factor", "short_mscale", "long_mscale", "growth"),
            "unscaled_tokens",
        )
        return LongRope(
            rotary_dim=c.rotary_dim,
            base=c.base,
            trained_length=c.trained_length,
            short_factor=short,
            long_factor=long,
            **{name: getattr(c, name) for name in names},
        )

    def phases(self, inv_freq: Tensor) -> Phases:
        first = self.method.unscaled_tokens
        scaled = linear_phases(inv_freq)
        if not first:
            return scaled
        trained = linear_phases(self.method.plain(inv_freq.device))
        return lambda at: torch.where(at[..., None] < first, trained(at), scaled(at))

    def _seed(self) -> tuple[float, ...]:
        c = self.config
        if c.rotary_dim == 2:
            return (1.0,)
        return tuple((c.factor or 1.0) ** (2 * p / (c.rotary_dim - 2)) for p in range(c.rotary_dim // 2))


@dataclass(frozen=True, kw_only=True)
class CLEXConfig(RotaryConfig):
    """Options of :class:`CLEX`.

    Attributes:
        max_factor: longest stretch.
        param_factor: hidden width of the network, in rotary dims.
        act: its activation.
        time_dt: largest Runge-Kutta step.
        sample: in training, draw a stretch each pass and rotate at sorted positions drawn from below it.
    """

    max_factor: float = 16.0
    param_factor: float = 1.0
    act: Literal["silu", "tanh"] = "silu"
    time_dt: float = 0.5
    sample: bool = True


@register(
    "clex",
    title="CLEX",
    family="rotary",
    manifestation="embedding",
    learnable=True,
    integration="multiply",
    injection="every",
    source="Chen et al. 2023 (arXiv 2310.16450), section 3",
    summary="Frequencies follow a learned differential equation in the length of the input.",
)
class CLEX(Scaled):
    """CLEX: log-frequencies move along a neural ODE whose time is the stretch ``t = ceil(length / trained_length)``.

    At the start the network is 0 and CLEX is dynamic NTK (transformers' form, factor 2). In training (``sample=True``)
    each full pass draws t from [1, max_factor] and rotates at sorted positions drawn from [0, t L); in evaluation each
    row reads its own length. Keys are cached raw.

    Parameters: the ODE's two matrices, float32, shared by all layers as published.
    Source: Chen et al. 2023 (arXiv 2310.16450); DAMO-NLP-SG/CLEX (see `Clex` for where it differs). The default
    step .5 is ours; the code's .1 changes an untrained solution by nothing, since the equation is integrated as a
    correction to the NTK path.
    """

    Config = CLEXConfig

    def make_method(self) -> FrequencyMethod:
        c = self.config
        self._no_second_scaling()
        if c.trained_length is None:
            raise ValueError(f"{self.name} needs trained_length, the length that the checkpoint was trained at")
        return Clex(
            rotary_dim=c.rotary_dim,
            base=c.base,
            trained_length=c.trained_length,
            max_factor=c.max_factor,
            param_factor=c.param_factor,
            act=c.act,
            time_dt=c.time_dt,
        )

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        whole = positions.num_queries == positions.num_keys and positions.plain()
        if not (self.training and self.config.sample and whole):
            return super().terms(positions, tokens)
        method = self.method
        assert isinstance(method, Clex)
        length = positions.num_keys
        least = max(1.0, length / method.trained_length)
        most = max(method.max_factor, least)
        time = least + (most - least) * torch.rand(1, device=positions.device, dtype=torch.float64)
        found = method.frequencies(time=time, device=positions.device)
        steps = torch.rand(1, length, device=positions.device, dtype=torch.float64).sort().values
        room = (time * method.trained_length).floor() - length
        at = (steps * (room + 1)).floor().long() + positions.key  # sorted offsets + ranks: sorted, without repeats
        rotation = self.rotation(positions, query_at=at, key_at=at, found=found)
        return Terms(branches=(rotation.branch(),), rotated_keys_cacheable=False)


@register(
    "log-n",
    title="Log-n scaling",
    source="Su 2021 (kexue.fm 8823); used by ReRoPE",
    summary="RoPE with each query multiplied by the logarithm of its position, once beyond the trained length.",
    preset={"log_n": True},
    **FIXED,
)
class LogNRoPE(RoPE):
    """RoPE with ``q_i * max(1, ln(i + 1) / ln(trained_length))``.

    By each query's own position, so that decoding with a cache equals a full pass; by the row's length instead:
    ``rope`` with ``scaling={"method": "log_n"}``.
    Source: Su 2021 (kexue.fm 8823); the form by position is that of bojone/rerope.
    """


@dataclass(frozen=True, kw_only=True)
class ResonanceConfig(RoPEConfig):
    """Options of :class:`ResonanceRoPE`: RoPE's; ``scaling`` is applied before the wavelengths are rounded."""


@register(
    "resonance-rope",
    title="Resonance RoPE",
    source="Wang et al. 2024 (arXiv 2403.00071), section 4",
    summary="RoPE with wavelengths rounded to whole positions, so that every turn repeats bit for bit.",
    **FIXED,
)
class ResonanceRoPE(RoPE):
    """Resonance RoPE: ``theta = 2 pi / round(2 pi / theta')``, after any scaling; phases of position mod wavelength.

    Positions one wavelength apart have equal bits, so positions beyond training show no new feature in fast pairs.
    Source: Wang et al. 2024 (arXiv 2403.00071); sheryc/resonance_rope. The model is trained with it.
    """

    Config = ResonanceConfig
    config: ResonanceConfig

    def make_method(self) -> FrequencyMethod:
        c = self.config
        inner = frequency_method(c.scaling, rotary_dim=c.rotary_dim, base=c.base, trained_length=c.trained_length)
        return Resonance(method=inner)

    def phases(self, inv_freq: Tensor) -> Phases:
        rows = inv_freq[:, None] if inv_freq.dim() == 2 else inv_freq
        turns = 2 * torch.pi

        def repeated(at: Tensor) -> Tensor:
            where = at.double()[..., None]
            wavelength = torch.where(rows == 0, torch.inf, turns / rows)
            return torch.remainder(where, wavelength.round()) * rows

        return repeated


alias("position-interpolation", "pi")
alias("ntk-aware", "ntk")
alias("by-parts", "ntk-by-parts")
alias("linear", "pi")
alias("dynamic", "dynamic-ntk")
alias("resonance", "resonance-rope")
alias("logn", "log-n")
