"""Rotary encodings that keep only the pairs a model could learn in training: HoPE, and FoPE's Fourier series."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from milepost.encoding import alias, register
from milepost.encodings.frequencies import FrequencyMethod, HoPECut, fope_kept_pairs
from milepost.encodings.rotary import Rotary, RotaryConfig
from milepost.positions import Positions
from milepost.terms import Terms


@dataclass(frozen=True, kw_only=True)
class HoPEConfig(RotaryConfig):
    """Options of :class:`HoPE`: RoPE's; ``trained_length`` decides which pairs are kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scaling is not None:
            raise ValueError("hope stops the slow pairs and takes no scaling: use rope for one")


@register(
    "hope",
    title="HoPE (high-frequency)",
    family="rotary",
    manifestation="embedding",
    learnable=False,
    integration="multiply",
    injection="every",
    source="Chen et al. 2024 (arXiv 2410.21216); not Hyperbolic HoPE (2509.05218), nor that of vision-language models",
    summary="RoPE whose pairs of less than one turn in training do not rotate.",
)
class HoPE(Rotary):
    """High-frequency rotary encoding: pairs with ``theta_p >= 2 pi / trained_length`` rotate, all others stand still.

    Every rotating pair has made at least one full turn in training, so no angle is new beyond it. Equal to p-RoPE with
    the same number of pairs, and to FoPE with identity coefficients.

    Shapes: as RoPE. Raises ValueError without a trained length.
    Source: Chen et al. 2024 (arXiv 2410.21216); the criterion as later papers quote it. Other papers use the name:
    Hyperbolic HoPE (arXiv 2509.05218) and a hybrid encoding of vision-language models are different methods. A
    third-party repository tests ``theta * 2 pi * L >= 1`` and adds a learned bias: not followed.
    """

    Config = HoPEConfig
    config: HoPEConfig

    def make_method(self) -> FrequencyMethod:
        c = self.config
        if c.trained_length is None:
            raise ValueError("hope keeps pairs by the trained length: give trained_length")
        return HoPECut(rotary_dim=c.rotary_dim, base=c.base, trained_length=c.trained_length)


alias("high-frequency-rope", "hope")


@dataclass(frozen=True, kw_only=True)
class FoPEConfig(RotaryConfig):
    """Options of :class:`FoPE`.

    Attributes:
        num_heads: number of attention heads; each has coefficients of its own.
        init: ``"fourier"``: identity plus Xavier-normal noise; ``"identity"``: no noise (HoPE's frequencies).
        gain: of the noise (published: .3 at 60M parameters, .4 at 180M, .6 at 1.2B).
        learn: train the coefficients (off as published).
        sine_padding: sine of the channels without frequency: 0, no rotation; 1, the authors' code, mixes halves.
    """

    num_heads: int
    init: str = "fourier"
    gain: float = 0.3
    learn: bool = False
    sine_padding: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scaling is not None:
            raise ValueError("fope selects its own frequencies and takes no scaling: use rope for one")
        if self.init not in ("fourier", "identity"):
            raise ValueError(f"init is 'fourier' or 'identity'; got {self.init!r}")
        if self.gain < 0:
            raise ValueError(f"gain is at least 0; got {self.gain}")
        if self.trained_length is None:
            raise ValueError("fope keeps pairs by the trained length: give trained_length")
        if self.sizes[1] < 1:
            raise ValueError(
                f"no pair makes a full turn in {self.trained_length} positions (head_dim {self.head_dim}, base "
                f"{self.base:g}): give a longer trained_length"
            )

    @property
    def sizes(self) -> tuple[int, int]:
        """(pairs kept as inputs, channels made of them)."""
        assert self.trained_length is not None
        return fope_kept_pairs(self.rotary_dim, self.base, self.trained_length)


@register(
    "fope",
    title="FoPE",
    family="rotary",
    manifestation="embedding",
    learnable=False,
    integration="multiply",
    injection="every",
    source="Hua et al. 2024 (arXiv 2412.17739)",
    summary="Each pair rotates by a Fourier series of the frequencies that training completes.",
)
class FoPE(Rotary):
    """Fourier position embedding: ``COS_m = cos(m theta) C_cos`` and ``SIN_m = sin(m theta) C_sin``, then as RoPE.

    theta holds the pairs with at least one turn in the trained length; C_cos and C_sin map them to
    ``min(kept, head_dim / 4)`` channels, separately for each head. The channels left over have cosine 1 and sine
    ``sine_padding``. Not exactly relative, since C_cos and C_sin differ.

    Parameters: ``cosine`` and ``sine`` (H, kept, out) float32, fixed unless ``learn``, and saved with the checkpoint.
    At the start identity (or, where not square, ones at a stride of ``ceil(kept / out)``) plus Xavier-normal noise.
    In grouped attention a key head takes the coefficients of the first query head it serves.
    Raises ValueError without a trained length, or where it completes no pair.
    Source: Hua et al. 2024 (arXiv 2412.17739), TsinghuaC3I. Their code pads the sine with 1, which mixes the halves of
    the stopped channels and changes norms; the paper's zero frequency (and vLLM) is 0, the default here.
    """

    Config = FoPEConfig
    config: FoPEConfig

    def setup(self) -> None:
        c = self.config
        shape = (c.num_heads, *c.sizes)
        self.cosine = nn.Parameter(torch.empty(shape), requires_grad=c.learn)
        self.sine = nn.Parameter(torch.empty(shape), requires_grad=c.learn)
        self.method = self.make_method()
        self.reset_parameters()

    def make_method(self) -> FrequencyMethod:
        c = self.config
        assert c.trained_length is not None
        return HoPECut(rotary_dim=c.rotary_dim, base=c.base, trained_length=c.trained_length)

    def reset_parameters(self) -> None:
        kept, out = self.config.sizes
        stride = math.ceil(kept / out)
        with torch.no_grad():
            for weight in (self.cosine, self.sine):
                weight.zero_()
                if self.config.init == "fourier":
                    for head in weight:
                        nn.init.xavier_normal_(head, gain=self.config.gain)
                rows = torch.arange(0, kept, stride, device=weight.device)
                columns = torch.arange(len(rows), device=weight.device)
                weight[:, rows[:out], columns[:out]] += 1.0

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        kept, out = self.config.sizes
        rest = self.config.rotary_dim // 2 - out
        found = self.frequencies(positions)
        rotation = self.rotation(positions, found=found._replace(inv_freq=found.inv_freq[..., :kept]))

        def series(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
            cos, sin = cos @ self.cosine.to(cos.dtype), sin @ self.sine.to(sin.dtype)
            shape = (*cos.shape[:-1], rest)
            padding = sin.new_full(shape, self.config.sine_padding)
            return torch.cat([cos, cos.new_ones(shape)], dim=-1), torch.cat([sin, padding], dim=-1)

        rotation.finish = series
        return Terms(branches=(rotation.branch(),))
