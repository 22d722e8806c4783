"""LRPE: unitary relative encodings that linear attention can use, and causal linear attention itself."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from milepost.encoding import Encoding, EncodingConfig, alias, register
from milepost.encodings.rotary import Layout, Rotation, same_tokens
from milepost.positions import Positions
from milepost.terms import Branch, Terms

Kind = Literal["rotation", "mixed", "permutation", "unitary", "cosformer"]
Projection = Literal["identity", "householder", "dct", "odd-even", "dft"]
Ladder = Literal["heads", "head", "slow"]


@dataclass(frozen=True, kw_only=True)
class LRPEConfig(EncodingConfig):
    """Options of :class:`LRPE`.

    Attributes:
        num_heads: number of attention heads.
        head_dim: width of one head.
        kind: what a position does to a vector: ``"rotation"`` of pairs; ``"mixed"``: of the first half of the channels;
            ``"permutation"``: the s-th power of a fixed one; ``"unitary"``: a phase for every channel, in its real form
            ``[x cos, x sin]`` of twice the width; ``"cosformer"``: one phase ``pi/2 / trained_length`` for all.
        ladder: frequencies: ``"heads"``: one ladder over all heads, of which each head has a slice; ``"head"``: a full
            ladder in every head; ``"slow"``: the first slice of the ladder over all heads, in every head.
        projection: fixed unitary map before it: ``"identity"``, ``"householder"`` (a learned mirror), ``"dct"``,
            ``"odd-even"`` (a permutation), or ``"dft"`` (kind unitary only: channels become complex).
        learn: train the frequencies (published: for unitary and cosformer).
        base: of the ladder.
        layout: which channels form a pair.
        trained_length: the cosformer's length.
        seed: of the fixed permutation.
    """

    num_heads: int
    head_dim: int
    kind: Kind = "rotation"
    ladder: Ladder = "heads"
    projection: Projection = "identity"
    learn: bool = False
    base: float = 10000.0
    layout: Layout = "interleaved"
    trained_length: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        known = {
            "kind": ("rotation", "mixed", "permutation", "unitary", "cosformer"),
            "ladder": ("heads", "head", "slow"),
            "projection": ("identity", "householder", "dct", "odd-even", "dft"),
        }
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} is one of {', '.join(values)}; got {getattr(self, name)!r}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is even; got {self.head_dim}")
        if self.projection == "dft" and self.kind != "unitary":
            raise ValueError(f"projection='dft' makes complex channels: it needs kind='unitary'; got {self.kind!r}")
        if self.kind == "cosformer" and self.trained_length is None:
            raise ValueError("kind='cosformer' spreads a quarter turn over the trained length: give trained_length")
        if self.kind == "permutation" and self.learn:
            raise ValueError("kind='permutation' has no frequencies to learn")

    @property
    def rotated(self) -> int:
        """Channels that are rotated: all, or for the mixed kind the first half, rounded up to even."""
        half = self.head_dim // 2
        return half + half % 2 if self.kind == "mixed" else self.head_dim

    @property
    def num_frequencies(self) -> int:
        """Frequencies of one head."""
        if self.kind == "cosformer":
            return 1
        return self.head_dim if self.kind == "unitary" else self.rotated // 2


@register(
    "lrpe",
    title="LRPE",
    family="rotary",
    manifestation="embedding",
    learnable=False,
    integration="multiply",
    injection="every",
    source="Qin et al. 2023, Linearized Relative Positional Encoding (arXiv 2307.09270)",
    summary="Unitary maps of q and k whose product depends on the distance, for linear attention too.",
)
class LRPE(Encoding):
    """Linearized relative positional encoding: ``q_s = Lambda^s P q``, so that ``q_s . k_t`` depends on ``s - t``.

    Lambda is unitary: rotations (RoPE is ``ladder="head"``), rotations of half of the channels, powers of a
    permutation, or phases; P a fixed unitary map. As each side is transformed on its own, linear attention can use it:
    `linear_attention`.

    Frequencies ``base^(-2j/d)``: d is ``num_heads * head_dim`` for the ladder over all heads, whose heads then see
    different bands; head_dim for ``"head"``. The unitary kind has ``j = 0..head_dim - 1``, the others half as many.
    Types of the authors' code (Doraemonzzz/xmixers): 1 rotation, 2 mixed, 3 unitary with learn, 4 cosformer with learn
    (all ``ladder="heads"``); 5 rotation with ``"head"``, 6 with ``"slow"``.

    Parameters: ``theta`` (H, n) if learn, ``mirror`` (head_dim,) for the Householder map; float32.
    Shapes: queries and keys keep their width, or double it (unitary, cosformer), with the same scale.
    Raises ValueError for float positions under the permutation kind.
    Source: Qin et al. 2023 (arXiv 2307.09270); xmixers for the ladders. The code's cosformer angles that grow with the
    current length are not relative and are not offered. The code's mirror is normalised with eps 1e-6; here exactly.
    """

    Config = LRPEConfig
    config: LRPEConfig

    def setup(self) -> None:
        c = self.config
        self._power = PermutationPowers(self.permutation())
        if c.learn:
            self.theta = nn.Parameter(torch.empty(c.num_heads, c.num_frequencies))
        if c.projection == "householder":
            self.mirror = nn.Parameter(torch.empty(c.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            if self.config.learn:
                self.theta.copy_(self._published(self.theta.device))
            if self.config.projection == "householder":
                self.mirror.normal_()

    def _published(self, device: torch.device | None) -> Tensor:
        c = self.config
        if c.kind == "cosformer":
            assert c.trained_length is not None
            return torch.full((c.num_heads, 1), math.pi / 2 / c.trained_length, dtype=torch.float64, device=device)
        count = c.num_frequencies
        width = c.head_dim if c.ladder == "head" else c.num_heads * c.head_dim
        total = count * c.num_heads if c.ladder == "heads" else count
        theta = c.base ** (-2.0 / width * torch.arange(total, dtype=torch.float64, device=device))
        return theta.view(c.num_heads, count) if c.ladder == "heads" else theta.expand(c.num_heads, count)

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        """``(H, n)`` float64: frequencies now in use."""
        return self.theta.double() if self.config.learn else self._published(device)

    def projected(self, x: Tensor) -> Tensor:
        """P x, channel by channel; complex channels come out as ``[real, imaginary]``."""
        c = self.config
        if c.projection == "identity":
            return x
        work = x.to(torch.promote_types(x.dtype, torch.float32))
        if c.projection == "householder":
            v = self.mirror.to(work.dtype)
            v = v / v.norm().clamp(min=1e-6)
            return (work - 2 * (work @ v)[..., None] * v).to(x.dtype)
        if c.projection == "odd-even":
            return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
        if c.projection == "dct":
            return (work @ dct_matrix(c.head_dim, work).mT).to(x.dtype)
        z = torch.fft.fft(work, norm="ortho")
        return torch.cat([z.real, z.imag], dim=-1)

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        c = self.config
        if c.kind == "permutation":
            return self._permuted(positions)
        theta = self.frequencies(positions.device)

        def phases(at: Tensor) -> Tensor:
            return at.double()[:, None, :, None] * theta[None, :, None, :]

        turned = Rotation(positions.query, positions.key, phases, layout=c.layout, same=same_tokens(positions))
        if c.kind in ("rotation", "mixed"):

            def query(q: Tensor) -> Tensor:
                return turned.query(self.projected(q))

            def key(k: Tensor, at: str = "keys") -> Tensor:
                return turned.key(self.projected(k), at)

            return Terms(branches=(Branch(query=query, key=key),))

        def doubled(x: Tensor, at: str) -> Tensor:
            cos, sin = turned.table(at, x.dtype)
            step = cos.shape[1] // x.shape[1]
            cos, sin = cos[:, ::step], sin[:, ::step]
            y = self.projected(x)
            if c.projection == "dft":
                real, imaginary = y.chunk(2, dim=-1)
                parts = [real * cos - imaginary * sin, real * sin + imaginary * cos]
            else:
                parts = [y * cos, y * sin]
            return torch.cat(parts, dim=-1).to(x.dtype)

        branch = Branch(query=lambda q: doubled(q, "queries"), key=lambda k, at="keys": doubled(k, at))
        return Terms(branches=(branch,), rotated_keys_cacheable=False)

    def _permuted(self, positions: Positions) -> Terms:
        if positions.query.is_floating_point():
            raise ValueError("kind='permutation' takes whole powers: positions must be integers")
        power = self._power

        def moved(x: Tensor, at: Tensor) -> Tensor:
            index = power(at)[:, None].expand(x.shape[0], x.shape[1], -1, -1)
            return self.projected(x).gather(-1, index)

        def key(k: Tensor, at: str = "keys") -> Tensor:
            return moved(k, positions.key if at == "keys" else positions.query)

        return Terms(branches=(Branch(query=lambda q: moved(q, positions.query), key=key),))

    def permutation(self) -> list[int]:
        """The fixed permutation of the channels, drawn from ``seed``."""
        return random.Random(self.config.seed).sample(range(self.config.head_dim), self.config.head_dim)


alias("linearized-rpe", "lrpe")


def dct_matrix(size: int, like: Tensor) -> Tensor:
    """The orthonormal DCT-II, ``(size, size)``, in the dtype and on the device of ``like``."""
    n = torch.arange(size, dtype=torch.float64, device=like.device)
    matrix = torch.cos(math.pi / size * (n + 0.5) * n[:, None]) * math.sqrt(2 / size)
    scale = torch.where(n == 0, math.sqrt(0.5), 1.0)[:, None]
    return (matrix * scale).to(like.dtype)


class PermutationPowers:
    """``s -> index_s`` with ``index_s = index_(s-1)[images]``, from the cycles: no table grows with s.

    Shapes: ``(B|1, n)`` int64 -> ``(B|1, n, D)`` int64.
    """

    def __init__(self, images: Sequence[int]) -> None:
        size = len(images)
        self.place, self.begin, self.length, self.order = [0] * size, [0] * size, [0] * size, list[int]()
        for channel in range(size):
            if channel in self.order:
                continue
            cycle = [channel]
            while images[cycle[-1]] != channel:
                cycle.append(images[cycle[-1]])
            for i, member in enumerate(cycle):
                self.place[member], self.begin[member], self.length[member] = i, len(self.order), len(cycle)
            self.order += cycle

    def __call__(self, s: Tensor) -> Tensor:
        lists = (self.place, self.begin, self.length, self.order)
        place, begin, length, order = (torch.tensor(x, device=s.device) for x in lists)
        return order[begin + (place + s[..., None]) % length]


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Terms | None = None,
    *,
    chunk: int = 64,
    normalize: bool = True,
    state: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Causal linear attention in chunks: cost and memory grow linearly with the length.

    ``o_i = sum_(j <= i) (q'_i . k'_j) v_j``, where q' and k' are what the single branch of ``terms`` makes of q and k;
    divided, if ``normalize``, by ``sum_(j <= i) q_i . k_j`` of the untransformed features, which stays positive
    (RoFormer, equation 19). Equal to `quadratic_attention` up to rounding.

    Shapes: q ``(B, H, n, D)`` and k ``(B, Hkv, n, D)``: features, positive where normalize; v ``(B, Hkv, n, Dv)``.
    Returns ``(B, H, n, Dv)`` and the state after the last token, which continues the sequence: pass it as ``state``
    with the next tokens and the terms of their positions (new keys stand where the new queries stand).
    Raises ValueError for terms with more than one branch, a bias, scores, weights, a window or a chunk.
    Source: Qin et al. 2023 (arXiv 2307.09270); Katharopoulos et al. 2020 (arXiv 2006.16236).
    """
    turned_q, turned_k = _features(q, k, terms)
    groups = q.shape[1] // k.shape[1]
    k, turned_k, v = (x.repeat_interleave(groups, dim=1) for x in (k, turned_k, v))
    batch, heads, _, width = turned_q.shape
    if state is None:
        memory = v.new_zeros(batch, heads, width, v.shape[-1])
        total = k.new_zeros(batch, heads, q.shape[-1])
    else:
        memory, total = state
    outputs = []
    for start in range(0, q.shape[2], chunk):
        part = slice(start, start + chunk)
        a, b, values = turned_q[:, :, part], turned_k[:, :, part], v[:, :, part]
        out = (a @ b.mT).tril() @ values + a @ memory
        memory = memory + b.mT @ values
        if normalize:
            running = total[:, :, None] + k[:, :, part].cumsum(2)
            out = out / (q[:, :, part] * running).sum(-1, keepdim=True)
            total = running[:, :, -1]
        outputs.append(out)
    return torch.cat(outputs, dim=2), (memory, total)


def quadratic_attention(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms | None = None, *, normalize: bool = True
) -> Tensor:
    """What `linear_attention` means: the same through the n x n matrix."""
    turned_q, turned_k = _features(q, k, terms)
    groups = q.shape[1] // k.shape[1]
    k, turned_k, v = (x.repeat_interleave(groups, dim=1) for x in (k, turned_k, v))
    out = (turned_q @ turned_k.mT).tril() @ v
    return out / (q @ k.mT).tril().sum(-1, keepdim=True) if normalize else out


def _features(q: Tensor, k: Tensor, terms: Terms | None) -> tuple[Tensor, Tensor]:
    if terms is None:
        return q, k
    other = [
        name
        for name in ("bias", "scores", "weights", "value", "output", "window", "chunk")
        if getattr(terms, name) is not None
    ]
    if other or len(terms.branches) > 1:
        raise ValueError(
            f"linear attention can use a transform of q and of k alone; {terms.name or 'these terms'} also set "
            f"{', '.join(other) or 'several branches'}"
        )
    for branch in terms.branches:
        q = q if branch.query is None else branch.query(q)
        k = k if branch.key is None else branch.key(k, at="queries")
    return q, k
