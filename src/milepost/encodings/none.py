"""No position signal: NoPE."""

from __future__ import annotations

from milepost.encoding import Encoding, register


@register(
    "nope",
    title="NoPE",
    family="none",
    manifestation="none",
    learnable=False,
    integration="none",
    injection="none",
    source="Haviv et al. 2022 (arXiv 2203.16634); Kazemnejad et al. 2023 (arXiv 2305.19466)",
    summary="No position signal; a causal model reads order from the mask alone.",
)
class NoPE(Encoding):
    """No positional encoding: plain dot-product attention.

    Order reaches the model only through the causal mask, so without one the model is permutation equivariant.
    Source: Haviv et al. 2022 (arXiv 2203.16634), Kazemnejad et al. 2023 (arXiv 2305.19466).
    """
