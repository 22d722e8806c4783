"""DAPE: a small network over the heads that sees the logits and a base bias, and corrects their sum."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from milepost.encoding import Encoding, EncodingConfig, from_spec, register
from milepost.positions import Positions
from milepost.terms import Terms


@dataclass(frozen=True, kw_only=True)
class DAPEConfig(EncodingConfig):
    """Options of :class:`DAPE`.

    Attributes:
        num_heads: number of attention heads.
        base: name of the base encoding (``"alibi"``, ``"kerple-log"``, ``"fire"``; any that gives a bias), or an
            encoding. ``"nope"`` and rotary ones give none: the network then sees the logits alone.
        hidden: width of the network.
        kernel: keys it sees at once: 1 for DAPE, 3 for DAPE-V2. Odd.
        head_dim, width, trained_length: of the model, for bases that need them.
    """

    num_heads: int
    base: str | Encoding = "kerple-log"
    hidden: int = 32
    kernel: int = 1
    head_dim: int | None = None
    width: int | None = None
    trained_length: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.hidden < 1:
            raise ValueError(
                f"num_heads and hidden are at least 1; got num_heads {self.num_heads}, hidden {self.hidden}"
            )
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel is odd, so that it has a middle; got {self.kernel}")


@register(
    "dape-v2",
    title="DAPE-V2",
    family="content",
    manifestation="bias",
    learnable=True,
    integration="add",
    injection="every",
    source="Zheng et al. 2024 (arXiv 2410.04798)",
    summary="DAPE whose network sees neighbouring keys too: a convolution over the attention map.",
    preset={"kernel": 3},
    shared=False,
)
@register(
    "dape",
    title="DAPE",
    family="content",
    manifestation="bias",
    learnable=True,
    integration="add",
    injection="every",
    source="Zheng et al. 2024 (arXiv 2405.14722)",
    summary="A small network of all heads' logits and biases is added to them; first published as CAPE.",
    survey="CAPE (Zheng)",
    shared=False,
)
class DAPE(Encoding):
    """Data-adaptive positional encoding: logits ``A + B + f([A; B])`` over a base bias B.

    f is Linear(2H, hidden), LeakyReLU(0.01), Linear(hidden, H), for each pair of query and key; in DAPE-V2 the linear
    maps are convolutions of ``kernel`` keys. Where the base has no bias (NoPE, rotary) it reads A alone, by H inputs.

    With neighbours in sight, V2 must see nothing that a query may not: what is not allowed is 0 in its input, and what
    lies before the first token of a row or document, or outside the window, is 0 in its hidden layer too, as the
    published code has it by its zero padding at a row's start. Slots after a causal query are computed from zeros, as
    in that code in every row but the last, where its padding ends; here all rows are alike, so that a row is the same
    with a cache. Padding inside a row (a mask with holes) is left out before the convolution.

    Shapes: the base's terms and ``scores`` of :class:`~milepost.terms.Terms`, for blocks of queries, float32 or better;
    memory ``O(max(2H, hidden) * block * K)``. Parameters per layer: ``first`` and ``second`` with torch's default
    start, and the base's own.
    Raises ValueError for an even kernel, or a base that acts at the input or changes scores or weights itself.
    Source: Zheng et al. 2024 (arXiv 2405.14722 and 2410.04798); code of chuanyang-Zheng/DAPE. Its class of V2 for NoPE
    and RoPE declares 2H inputs and feeds H, so it does not run.
    """

    Config = DAPEConfig
    config: DAPEConfig

    def setup(self) -> None:
        c = self.config
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        names = ("num_heads", "head_dim", "width", "trained_length")
        geometry = {name: getattr(c, name) for name in names if getattr(c, name) is not None}
        self.base = from_spec(c.base, geometry) if isinstance(c.base, str) else c.base
        self.needs_tokens = self.base.needs_tokens  # type: ignore[misc]  # per instance
        inputs = c.num_heads * (2 if self._base_has_bias() else 1)
        if c.kernel == 1:
            self.first: nn.Module = nn.Linear(inputs, c.hidden, dtype=dtype)
            self.second: nn.Module = nn.Linear(c.hidden, c.num_heads, dtype=dtype)
        else:
            self.first = nn.Conv2d(inputs, c.hidden, (1, c.kernel), dtype=dtype)
            self.second = nn.Conv2d(c.hidden, c.num_heads, (1, c.kernel), dtype=dtype)

    def _base_has_bias(self) -> bool:
        if type(self.base).embed is not Encoding.embed:
            name = self.base.name
            raise ValueError(f"{name} acts at the input, so it is no base of DAPE; add the two: {name}+dape:base=nope")
        with torch.no_grad():
            terms = self.base(Positions.full(1), torch.zeros(1, 1, dtype=torch.int64))
        if terms.scores is not None or terms.weights is not None:
            raise ValueError(f"{self.base.name} changes scores or weights itself, so DAPE cannot stand over it")
        return terms.bias is not None

    def reset_parameters(self) -> None:
        self.first.reset_parameters()  # type: ignore[operator]  # Linear and Conv2d both have it
        self.second.reset_parameters()  # type: ignore[operator]
        self.base.reset_parameters()

    def correction(self, inputs: Tensor, allowed: Tensor, future: Tensor | None) -> Tensor:
        """``f`` of ``(B, 2H, q, K)``: ``(B, H, q, K)``.

        Args:
            inputs: logits and biases.
            allowed: ``(B|1, 1, q, K)`` which pairs the network may see.
            future: ``(1, 1, q, K)`` which keys come after the query, in causal attention; None in bidirectional.
        """
        p = self.config.kernel // 2
        first, second = self._kernel(self.first, inputs), self._kernel(self.second, inputs)
        if p == 0:
            return F.conv2d(F.leaky_relu(F.conv2d(inputs, *first)), *second)
        hidden = F.leaky_relu(F.conv2d(F.pad(inputs.masked_fill(~allowed, 0.0), (p, 2 * p)), *first))
        kept = allowed if future is None else allowed | future
        kept = F.pad(kept, (0, p), value=future is not None)
        return F.conv2d(F.pad(hidden.masked_fill(~kept, 0.0), (p, 0)), *second)

    def _kernel(self, layer: nn.Module, like: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(layer, nn.Linear | nn.Conv2d) and layer.bias is not None
        weight = layer.weight.to(like.dtype)
        return (weight[:, :, None, None] if weight.dim() == 2 else weight), layer.bias.to(like.dtype)

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        terms = self.base(positions, tokens)

        def scores(
            logits: Tensor,
            bias: Tensor | None,
            *,
            q: Tensor,
            k: Tensor,
            positions: Positions,
            allowed: Tensor,
            scale: float,
        ) -> Tensor:
            if bias is None:
                total, inputs = logits, logits
            else:
                total = logits + bias
                inputs = torch.cat([logits, bias.expand_as(logits)], dim=1)
            future = None
            if positions.causal:
                future = (positions.key_slots() > positions.query_slots()[:, None])[None, None]
            if positions.slot_distance or positions.key_present is None or self.config.kernel == 1:
                return total + self.correction(inputs, allowed, future)
            absent = ~positions.key_present[:, None, None]
            order = absent.to(torch.int8).argsort(dim=-1, stable=True)  # tokens first, side by side

            def ordered(x: Tensor) -> Tensor:
                return x.expand(order.shape[0], *x.shape[1:]).gather(-1, order.expand(-1, *x.shape[1:3], -1))

            if future is not None:
                future = ordered(future | absent)
            found = self.correction(ordered(inputs), ordered(allowed), future)
            return total + found.gather(-1, order.argsort(-1).expand_as(found))

        return replace(terms, name="", scores=scores)
