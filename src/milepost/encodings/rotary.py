"""Rotary encodings: queries and keys are rotated by angles that grow with position."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from milepost.attention import rotation
from milepost.encoding import Encoding, EncodingConfig, register
from milepost.encodings.frequencies import (
    Default,
    Dynamic,
    Frequencies,
    FrequencyMethod,
    Proportional,
    from_config,
    log_n_scale,
    method_class,
)
from milepost.positions import Positions
from milepost.terms import Branch, Terms

Layout = Literal["half", "interleaved"]
Phases = Callable[[Tensor], Tensor]
"""Positions ``(B|1, n)`` or ``(B|1, n, axes)`` -> angles in float64, ``(B|1, n, P)`` or ``(B|1, H, n, P)``."""


# ---- the rotation itself --------------------------------------------------------------------------------------------


def turn(
    x: Tensor, cos: Tensor, sin: Tensor, layout: Layout = "half", *, factor: float | Tensor | None = None
) -> Tensor:
    """Pair p of the first ``2 P`` channels becomes ``(a cos - b sin, b cos + a sin)``; the rest passes bit for bit.

    ``layout="half"`` pairs channels (p, p + P), as GPT-NeoX and Hugging Face do; ``"interleaved"`` pairs (2p, 2p+1),
    as GPT-J and Meta do. ``factor`` multiplies all channels, the rest included (a softmax temperature).

    Shapes: x ``(B, H, n, D)``; cos and sin ``(B|1, H'|1, n|1, P)``, where H' is a multiple of H (grouped queries: key
    head g takes the angles of the first query head it serves). Returns the dtype of x; computed in float32 or better.
    """
    pairs = cos.shape[-1]
    work = torch.promote_types(x.dtype, cos.dtype)
    if cos.shape[1] > 1 and cos.shape[1] != x.shape[1]:
        step = cos.shape[1] // x.shape[1]
        cos, sin = cos[:, ::step], sin[:, ::step]
    if rotation.serves(x, cos, sin, factor):
        if factor is not None:
            cos, sin = cos * factor, sin * factor
        rest_factor = factor if isinstance(factor, float | int) else 1.0
        return rotation.turn(x, cos, sin, interleaved=layout == "interleaved", rest=float(rest_factor))
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if layout == "half":
        a, b = turned[..., :pairs], turned[..., pairs:]
        parts = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        parts = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    if factor is not None:
        parts, rest = parts * factor, rest.to(work) * factor
    parts, rest = parts.to(x.dtype), rest.to(x.dtype)
    return torch.cat([parts, rest], dim=-1) if rest.shape[-1] else parts


def cos_sin(angles: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Cosine and sine of float64 angles, in ``dtype``; reduced to one turn before the cast, so exact far out.

    A million positions cost the same accuracy as ten: the largest error in float32 is 1.2e-7.
    """
    if dtype != torch.float64:
        turns = 2 * math.pi
        angles = (angles - turns * torch.round(angles / turns)).to(dtype)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, angles: Tensor, layout: Layout = "half", *, factor: float | Tensor = 1.0) -> Tensor:
    """Rotate the first ``2 P`` channels of ``x`` by ``angles``; the rest passes unchanged, bit for bit.

    ``factor`` multiplies the rotated channels (YaRN's attention factor). Layouts as in `turn`.

    Shapes: x ``(B, H, n, D)``, angles ``(B|1, n, P)`` or ``(B|1, H, n, P)`` float32 or better; the result has the dtype
    of x.
    """
    if angles.dim() == 3:
        angles = angles[:, None]
    cos, sin = cos_sin(angles, torch.promote_types(x.dtype, torch.float32))
    return turn(x, cos * factor, sin * factor, layout)


def apply_rotary(
    x: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    *,
    axes: Literal["bhnd", "bnhd"],
    layout: Layout,
) -> Tensor:
    """Rotate a tensor of heads by its positions; the order of the axes is an argument without a default.

    Shapes: x ``(B, H, n, D)`` for ``axes="bhnd"``, ``(B, n, H, D)`` for ``"bnhd"``; positions ``(n,)`` or ``(B|1, n)``;
    inv_freq ``(P,)``. Raises ValueError where the positions do not fit the axis of length n.
    """
    if axes not in ("bhnd", "bnhd"):
        raise ValueError(f"axes is 'bhnd' (heads before length) or 'bnhd'; got {axes!r}")
    at = positions if positions.dim() == 2 else positions[None]
    length = x.shape[axes.index("n")]
    if at.shape[-1] != length:
        raise ValueError(
            f"{at.shape[-1]} positions for a length of {length} (axes={axes!r}): is the order of axes right?"
        )
    angles = at[..., None].double() * inv_freq.double()
    if axes == "bnhd":
        return rotate(x.transpose(1, 2), angles, layout).transpose(1, 2)
    return rotate(x, angles, layout)


class Rotation:
    """What turns queries and keys at given positions; cosines and sines are made when first asked for.

    Args:
        query_at: ``(B|1, Q|1)``, or with a last axis of several position axes: where the queries stand.
        key_at: the same for the keys.
        phases: positions -> angles.
        layout: which channels form a pair.
        factor: multiplies the rotated channels of both (attention factor): a number, or ``(B, 1)``.
        query_factor: multiplies whole queries (softmax factor, log-n): a number, or ``(B|1, Q|1)``.
        growth: (queries', keys') logarithm of an amplitude, functions like ``phases`` (xPos).
        finish: changes (cos, sin) after they are made, where a method mixes frequencies (FoPE).
        same: queries stand exactly where the keys stand, so one table serves both.
    """

    def __init__(
        self,
        query_at: Tensor,
        key_at: Tensor,
        phases: Phases,
        *,
        layout: Layout = "half",
        factor: float | Tensor = 1.0,
        query_factor: float | Tensor | None = None,
        growth: tuple[Phases, Phases] | None = None,
        finish: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
        same: bool = False,
    ) -> None:
        self.query_at, self.key_at, self.phases = query_at, key_at, phases
        self.layout, self.factor, self.query_factor = layout, factor, query_factor
        self.growth, self.finish, self.same = growth, finish, same
        self._tables: dict[tuple[str, str, torch.dtype], tuple[Tensor, Tensor]] = {}

    def table(self, at: str, dtype: torch.dtype, *, of: str = "queries") -> tuple[Tensor, Tensor]:
        """(cos, sin), each ``(B|1, H|1, n, P)``, at the "queries" or the "keys"; float32, or float64 for float64.

        ``of`` says whose they are, which matters where queries and keys grow differently.
        """
        at = "keys" if self.same else at
        of = of if self.growth is not None else ""
        dtype = torch.promote_types(dtype, torch.float32)
        if (at, of, dtype) not in self._tables:
            where = self.key_at if at == "keys" else self.query_at
            cos, sin = cos_sin(_with_heads(self.phases(where)), dtype)
            if self.finish is not None:
                cos, sin = self.finish(cos, sin)
            factor: Tensor | float = self.factor
            if isinstance(factor, Tensor):
                factor = factor.to(dtype)[:, :, None, None]
            if self.growth is not None:
                grown = self.growth[0 if of == "queries" else 1](where)
                factor = factor * _with_heads(grown).exp().to(dtype)
            if isinstance(factor, Tensor) or factor != 1.0:
                cos, sin = cos * factor, sin * factor
            self._tables[at, of, dtype] = cos, sin
        return self._tables[at, of, dtype]

    def _make_learned(self) -> None:
        """Learned tables belong to no layer: made within the first, they would be missing where that is run again.

        (So gradient checkpointing does.)
        """
        cos, _ = self.table("queries", torch.float32)
        if cos.requires_grad:
            for at in ("queries", "keys"):
                self.table(at, torch.float32, of="keys")

    def query(self, q: Tensor) -> Tensor:
        """``(B, H, Q, D) -> (B, H, Q, D)``."""
        factor = self.query_factor
        if isinstance(factor, Tensor):
            factor = factor.to(torch.promote_types(q.dtype, torch.float32))[:, None, :, None]
        return turn(q, *self.table("queries", q.dtype), self.layout, factor=factor)

    def key(self, k: Tensor, at: str = "keys") -> Tensor:
        """``(B, Hkv, n, D) -> (B, Hkv, n, D)``: all keys, or the new ones, which stand where the queries stand."""
        return turn(k, *self.table(at, k.dtype, of="keys"), self.layout)

    def back(self, x: Tensor) -> Tensor:
        """The inverse rotation at the queries (attention and softmax factors do not apply)."""
        cos, sin = self.table("queries", x.dtype)
        return turn(x, cos, -sin, self.layout)

    def rows(self, start: int, stop: int) -> Rotation:
        """The rotation of the queries ``start:stop`` alone (and of all keys)."""
        part = copy(self)
        part.query_at = self.query_at if self.query_at.shape[1] == 1 else self.query_at[:, start:stop]
        if isinstance(self.query_factor, Tensor) and self.query_factor.shape[1] > 1:
            part.query_factor = self.query_factor[:, start:stop]
        part.same = False
        part._tables = {}
        return part

    def branch(self, near: int | None = None, far: int | None = None, chunk: int | None = None) -> Branch:
        """Both, ruling these distances."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._make_learned()
        return Branch(query=self.query, key=self.key, near=near, far=far, chunk=chunk)


def _with_heads(angles: Tensor) -> Tensor:
    return angles if angles.dim() == 4 else angles[:, None]


# ---- frequencies from options ---------------------------------------------------------------------------------------

Scaling = FrequencyMethod | Mapping[str, Any] | str | None
"""A frequency method; its name; ``{"method": name, **options}``; or a transformers block ``{"rope_type": ...}``."""


def frequency_method(
    scaling: Scaling, *, rotary_dim: int, base: float, trained_length: int | None = None
) -> FrequencyMethod:
    """The method that ``scaling`` names, for these pairs; ``trained_length`` is filled in where a method has it.

    ``"dynamic_NAME"`` grows a method that has a factor. ``resonance`` and ``log_n`` wrap another: ``"of"``: a scaling.

    Raises:
        ValueError: an unknown method or option, a missing one, or one that contradicts the encoding's geometry.
    """
    if scaling is None:
        return Default(rotary_dim=rotary_dim, base=base)
    if isinstance(scaling, str):
        scaling = {"method": scaling}
    if not isinstance(scaling, Mapping):
        return _fitting(scaling, rotary_dim, base)
    if "rope_type" in scaling or "type" in scaling:
        block = {"rope_theta": base, **scaling}
        method = from_config(block, head_dim=rotary_dim, max_position_embeddings=trained_length)
        return _fitting(method, rotary_dim, base)
    options = dict(scaling)
    if "method" not in options:
        raise ValueError(f"scaling names its method: {{'method': 'yarn', 'factor': 4}}; got {dict(scaling)}")
    name = str(options.pop("method")).replace("-", "_")
    if name.startswith("dynamic_"):
        form = options.pop("form", "paper")
        inner: Any = frequency_method(
            {"method": name.removeprefix("dynamic_"), **options},
            rotary_dim=rotary_dim,
            base=base,
            trained_length=trained_length,
        )
        own = getattr(inner, "trained_length", None)
        return Dynamic(method=inner, trained_length=trained_length if own is None else None, form=form)
    try:
        cls = method_class(name)
    except KeyError as unknown:
        raise ValueError(str(unknown.args[0])) from None
    known = inspect.signature(cls).parameters
    filled: dict[str, Any] = {"rotary_dim": rotary_dim, "base": base, "trained_length": trained_length}
    if "method" in known:
        inner_scaling = options.pop("of", None)
        filled["method"] = frequency_method(
            inner_scaling, rotary_dim=rotary_dim, base=base, trained_length=trained_length
        )
    for key, value in filled.items():
        if key in known and value is not None:
            options.setdefault(key, value)
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    missing = [key for key, p in known.items() if p.default is inspect.Parameter.empty and options.get(key) is None]
    unknown_keys = sorted(set(options) - set(known))
    if missing or unknown_keys:
        parts = ([f"needs {', '.join(missing)}"] if missing else []) + (
            [f"has no option {', '.join(unknown_keys)} (its options: {', '.join(known)})"] if unknown_keys else []
        )
        raise ValueError(f"frequency method {name!r} {'; it '.join(parts)}")
    return _fitting(cls(**options), rotary_dim, base)


def _fitting(method: Any, rotary_dim: int, base: float) -> FrequencyMethod:
    if not isinstance(method, FrequencyMethod):
        raise ValueError(f"scaling is a frequency method, its name or a mapping; got {type(method).__name__}")
    if getattr(method, "unscaled_tokens", 0):
        raise ValueError(
            "unscaled_tokens is a property of positions, which a scaling cannot express: use the encoding longrope"
        )
    if method.rotary_dim != rotary_dim:
        raise ValueError(
            f"the frequency method rotates {method.rotary_dim} channels, the encoding {rotary_dim}: "
            "give both the same rotary_dim (head_dim times partial)"
        )
    if getattr(method, "base", base) != base:
        raise ValueError(
            f"two bases: {base:g} here and {getattr(method, 'base', None):g} in the frequency method; "
            "give both the same"
        )
    return method


# ---- RoPE -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RotaryConfig(EncodingConfig):
    """What every rotary encoding of one position axis can be told.

    Attributes:
        head_dim: width of one head.
        base: rope_theta.
        partial: fraction of the head that is rotated; everything that says "d" then means that part.
        layout: which channels form a pair.
        trained_length: the length a checkpoint was trained at, where the frequencies need it.
        scaling: how the frequencies are stretched: a method of ``milepost.encodings.frequencies``, its name,
            ``{"method": name, **options}``, or a transformers block with ``rope_type``.
    """

    head_dim: int
    base: float = 10000.0
    partial: float = 1.0
    layout: Layout = "half"
    trained_length: int | None = None
    scaling: Any = None

    def __post_init__(self) -> None:
        if not 0 < self.partial <= 1:
            raise ValueError(f"partial is in (0, 1]; got {self.partial}")
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(
                f"the rotated part of a head has an even width; head_dim {self.head_dim} x partial {self.partial} "
                f"gives {self.rotary_dim}"
            )
        if self.layout not in ("half", "interleaved"):
            raise ValueError(f"layout is 'half' or 'interleaved'; got {self.layout!r}")

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial)


class Rotary(Encoding):
    """Base of the rotary encodings: frequencies, phases and where they are applied. By itself, plain RoPE."""

    Config: ClassVar[type[EncodingConfig]] = RotaryConfig
    config: Any

    def setup(self) -> None:
        self.method = self.make_method()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if isinstance(self.method, nn.Module):
            self.method.reset_parameters()  # type: ignore[operator]  # nn.Module hides the method's own class

    def make_method(self) -> FrequencyMethod:
        """The frequency method of this configuration."""
        c = self.config
        return frequency_method(c.scaling, rotary_dim=c.rotary_dim, base=c.base, trained_length=c.trained_length)

    def inv_freq(self, device: torch.device | None = None, *, length: int | Tensor | None = None) -> Tensor:
        """``(P,)`` float64 at the trained length; ``(B, P)`` for ``(B,)`` lengths of a length-dependent method."""
        return self.method.frequencies(length, device=device).inv_freq

    def frequencies(self, positions: Positions) -> Frequencies:
        """Frequencies and factors at these positions, each row by its own length where the method reads it."""
        length = positions.length if self.method.length_dependent or self._reads_length() else None
        return self.method.frequencies(length, device=positions.device)

    def _reads_length(self) -> bool:
        """Log-n reads the length for its temperature, although its frequencies stand still."""
        return hasattr(self.method, "method") and not isinstance(self.method, nn.Module)

    def phases(self, inv_freq: Tensor) -> Phases:
        """Angles at positions, for frequencies ``(P,)`` or ``(B, P)``."""
        return linear_phases(inv_freq)

    def rotation(
        self,
        positions: Positions,
        *,
        query_at: Tensor | None = None,
        key_at: Tensor | None = None,
        found: Frequencies | None = None,
        query_factor: float | Tensor | None = None,
    ) -> Rotation:
        """The rotation at these positions, or at others of the same tokens."""
        found = self.frequencies(positions) if found is None else found
        temperature = found.softmax_factor if query_factor is None else query_factor * found.softmax_factor
        same = query_at is None and key_at is None and same_tokens(positions)
        return Rotation(
            positions.query if query_at is None else query_at,
            positions.key if key_at is None else key_at,
            self.phases(found.inv_freq),
            layout=self.config.layout,
            factor=found.attention_factor,
            query_factor=None if isinstance(temperature, float) and temperature == 1.0 else temperature,
            same=same,
        )

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        rotation = self.rotation(positions)
        return Terms(branches=(rotation.branch(),), rotated_keys_cacheable=not self.method.length_dependent)


def linear_phases(inv_freq: Tensor) -> Phases:
    """``position * inv_freq`` in float64, for one position axis; inv_freq ``(P,)``, or ``(B, P)`` by rows."""
    rows = inv_freq[:, None] if inv_freq.dim() == 2 else inv_freq

    def phases(at: Tensor) -> Tensor:
        if at.dim() != 2:
            raise ValueError(
                f"this rotary encoding reads one position axis; these positions have {at.shape[-1]}: "
                "use rope-2d, rope-3d or m-rope"
            )
        return at.double()[..., None] * rows

    return phases


def same_tokens(positions: Positions) -> bool:
    """Queries and keys are the same tokens, so far as the host can know without asking for a compiler's guard."""
    if torch.compiler.is_compiling() or not positions.causal or not isinstance(positions.query_start, int):
        return False
    return positions.query_start == 0 and positions.num_queries == positions.num_keys


@dataclass(frozen=True, kw_only=True)
class RoPEConfig(RotaryConfig):
    """Options of :class:`RoPE`.

    Attributes:
        log_n: multiply each query by ``max(1, ln(position + 1) / ln(trained_length))``.
    """

    log_n: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.log_n and (self.trained_length is None or self.trained_length < 2):
            raise ValueError(
                f"log_n compares with the trained length: give trained_length >= 2; got {self.trained_length}"
            )


@register(
    "rope",
    title="RoPE",
    family="rotary",
    manifestation="embedding",
    learnable=False,
    integration="multiply",
    injection="every",
    source="Su et al. 2021 (arXiv 2104.09864)",
    summary="Queries and keys are rotated by position; their product depends on the distance.",
    survey="RoPE",
)
class RoPE(Rotary):
    """Rotary position embedding: pair p of q and k at position m is turned by ``m * base^(-2p/d)``.

    ``q'_i . k'_j`` then depends on q, k and ``i - j`` alone; values are not rotated. ``partial`` rotates the first
    ``int(head_dim * partial)`` channels and lets the rest pass; ``scaling`` stretches the frequencies by any published
    method; its attention factor multiplies the rotated channels of q and k (as transformers does), its softmax factor
    the whole query.

    Shapes: one :class:`~milepost.terms.Branch`. Phases are float64, cosines and sines float32 (float64 for float64).
    Raises ValueError when the rotated part of a head is odd or empty, or a scaling lacks what it needs.
    Source: Su et al. 2021 (arXiv 2104.09864), equation 34. The paper pairs neighbouring channels
    (``layout="interleaved"``); transformers pairs halves, which is the default here. Partial rotary: GPT-NeoX.
    """

    Config = RoPEConfig
    config: RoPEConfig

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        factor = None
        if self.config.log_n:
            assert self.config.trained_length is not None
            factor = log_n_scale(positions.query, self.config.trained_length)
        rotation = self.rotation(positions, query_factor=factor)
        return Terms(branches=(rotation.branch(),), rotated_keys_cacheable=not self.method.length_dependent)


@dataclass(frozen=True, kw_only=True)
class PRoPEConfig(RotaryConfig):
    """Options of :class:`PRoPE`.

    Attributes:
        proportion: share of the pairs that rotate, the fastest ones: 0 is NoPE, 1 is RoPE.
    """

    proportion: float = 0.75

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.partial != 1 or self.scaling is not None:
            raise ValueError("p-rope spreads its exponents over the whole head: leave partial and scaling out")


@register(
    "p-rope",
    title="p-RoPE",
    family="rotary",
    manifestation="embedding",
    learnable=False,
    integration="multiply",
    injection="every",
    source="Barbero et al. 2024 (arXiv 2410.06205)",
    summary="RoPE whose slowest pairs do not rotate, so that they carry content alone.",
)
class PRoPE(Rotary):
    """p-RoPE: ``theta_p = base^(-2p/head_dim)`` for the fastest share of the pairs, 0 for the others.

    Unlike partial rotary (``rope:partial=...``) the exponents run over the whole head, so the kept pairs turn exactly
    as they would in RoPE. The number of kept pairs is ``int(proportion * head_dim // 2)``, floored.

    Shapes: as :class:`RoPE`. Raises ValueError for a proportion outside [0, 1].
    Source: "Round and Round We Go", Barbero et al. 2024 (arXiv 2410.06205); equal to transformers' ``proportional``.
    """

    Config = PRoPEConfig
    config: PRoPEConfig

    def make_method(self) -> FrequencyMethod:
        c = self.config
        return Proportional(rotary_dim=c.head_dim, base=c.base, proportion=c.proportion)


# ---- layouts and caches ---------------------------------------------------------------------------------------------


def layout_permutation(rotary_dim: int) -> list[int]:
    """``perm`` with ``half[j] = interleaved[perm[j]]``: even channels first, then odd ones."""
    return [*range(0, rotary_dim, 2), *range(1, rotary_dim, 2)]


def permute_projection(weight: Tensor, *, head_dim: int, rotary_dim: int | None = None, to: Layout) -> Tensor:
    """A query or key projection (its bias, or a per-channel norm) moved to the other layout; scores stay the same.

    Shapes: weight ``(heads * head_dim, ...)``: rows are permuted head by head, the first rotary_dim of each.
    Raises ValueError where the rows are not whole heads.
    """
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    if weight.shape[0] % head_dim:
        raise ValueError(f"{weight.shape[0]} rows are not a multiple of head_dim {head_dim}")
    perm = torch.tensor(layout_permutation(rotary_dim), device=weight.device)
    if to == "interleaved":
        perm = perm.argsort()
    index = torch.cat([perm, torch.arange(rotary_dim, head_dim, device=weight.device)])
    return weight.unflatten(0, (-1, head_dim))[:, index].flatten(0, 1)


def rotate_cache(encoding: Rotary, keys: Tensor, delta: int | Tensor) -> Tensor:
    """Cached rotated keys moved by ``delta`` positions, without the raw keys: they are rotated once more by delta.

    Shapes: keys ``(B, Hkv, n, D)``; delta a number, or ``(B|1, n)``.
    Raises ValueError where rotated keys may not be cached at all (frequencies that change with the length).
    """
    if type(encoding).terms not in (Rotary.terms, RoPE.terms) or encoding.method.length_dependent:
        raise ValueError(
            f"{encoding.name} keeps no rotated keys that a rotation could move: cache raw keys and positions instead"
        )
    inv_freq = encoding.inv_freq(keys.device)
    at = torch.as_tensor(delta, device=keys.device)
    at = at if at.dim() == 2 else at.reshape(1, 1).expand(1, keys.shape[2])
    return rotate(keys, at[..., None].double() * inv_freq, encoding.config.layout)


def join_caches(fragments: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Cached fragments ``(rotated keys (B, Hkv, n, D), positions (B|1, n))`` end to end, if their positions say so.

    Raises ValueError where a fragment does not continue the one before it: move it with `rotate_cache` first.
    """
    for (_, before), (_, after) in zip(fragments, fragments[1:], strict=False):
        want = before[:, -1] + 1
        if not bool((after[:, 0] == want).all()):
            raise ValueError(
                f"the second fragment's keys are rotated at positions from {after[:, 0].tolist()}, the first ends "
                f"before {want.tolist()}: rotate_cache(encoding, keys, delta) by the difference, then join"
            )
    return torch.cat([keys for keys, _ in fragments], dim=2), torch.cat([at for _, at in fragments], dim=1)
