"""Relative maps of rotary: far distances made smaller, without training. Two ways of comparing q and k, one softmax."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from milepost.encoding import alias, register
from milepost.encodings.frequencies import Frequencies, log_n_scale
from milepost.encodings.rotary import Rotary, RotaryConfig, Rotation
from milepost.encodings.xpos import block_bounds, per_group
from milepost.positions import Positions
from milepost.terms import Terms

UNKNOWN_LENGTH = 4096
"""The trained length that defaults are made for where none is given: that of the checkpoints of these papers."""

RELMAP: dict[str, Any] = {
    "family": "rotary",
    "manifestation": "embedding",
    "learnable": False,
    "integration": "multiply",
    "injection": "every",
}


# ---- what the maps mean ---------------------------------------------------------------------------------------------


def rerope_distance(distance: Tensor, window: int) -> Tensor:
    """``d`` below the window, the window itself from there on; odd in d."""
    return distance.clamp(-window, window)


def leaky_rerope_distance(distance: Tensor, window: int, factor: float) -> Tensor:
    """``d`` below the window, ``window + (d - window) / factor`` from there on; float64, odd in d."""
    d = distance.double().abs()
    return torch.where(d < window, d, window + (d - window) / factor) * distance.sign()


def stair_distance(distance: Tensor, window: int, step: int, rounding: Literal["ceil", "floor"] = "ceil") -> Tensor:
    """``d`` up to the window, ``window + ceil((d - window) / step)`` beyond it; int64, odd in d.

    Source: Mesa-Extrapolation (arXiv 2410.15859), equation 3; its code rounds down.
    """
    d = distance.abs()
    up = step - 1 if rounding == "ceil" else 0
    return torch.where(d <= window, d, window + (d - window + up) // step) * distance.sign()


def self_extend_distance(query: Tensor, key: Tensor, group: int, window: int) -> Tensor:
    """``i - j`` below the window, ``(i // G + W - W // G) - j // G`` from there on: not a function of ``i - j``."""
    distance = query - key
    return torch.where(distance < window, distance, query // group + window - window // group - key // group)


# ---- shared parts ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RelMapConfig(RotaryConfig):
    """Options of every relative map, besides RoPE's.

    Attributes:
        log_n: multiply each query by ``max(1, ln(position + 1) / ln(trained_length))``.
    """

    log_n: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.log_n and (self.trained_length is None or self.trained_length < 2):
            raise ValueError(f"log_n needs a trained_length of at least 2; got {self.trained_length}")

    def default_window(self, share: int) -> int:
        """The trained length, or 4096, divided by ``share``."""
        return max(1, (self.trained_length or UNKNOWN_LENGTH) // share)


class RelMap(Rotary):
    """Base of the relative maps: causal, raw keys cached."""

    def two(
        self, positions: Positions, near: int, far_query: Tensor, far_key: Tensor, found: Frequencies | None = None
    ) -> Terms:
        """Plain RoPE below slot distance ``near``, and these positions of queries and keys from there on."""
        found = self.frequencies(positions) if found is None else found
        factor = self.query_factor(positions)
        plain = self.rotation(positions, found=found, query_factor=factor)
        mapped = self.rotation(positions, query_at=far_query, key_at=far_key, found=found, query_factor=factor)
        return Terms(branches=(plain.branch(0, near), mapped.branch(near)), rotated_keys_cacheable=False)

    def query_factor(self, positions: Positions) -> Tensor | None:
        """Log-n of each query, where it is on."""
        if not self.config.log_n:
            return None
        return log_n_scale(positions.query, self.config.trained_length)

    def forward(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        """Refuses bidirectional attention, for which none of the papers says what a far distance ahead is."""
        if not positions.causal:
            raise ValueError(
                f"{self.name} maps distances to the past only; for bidirectional attention use rope, or a remapped bias"
            )
        return super().forward(positions, tokens)


# ---- ReRoPE ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ReRoPEConfig(RelMapConfig):
    """Options of :class:`ReRoPE`.

    Attributes:
        window: distances from here on all count as it (None: a quarter of the trained length; best between a quarter
            and a half; at the whole trained length it collapses).
    """

    window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is at least 1; got {self.window}")

    @property
    def near(self) -> int:
        """window, after its default."""
        return self.window if self.window is not None else self.default_window(4)


@register(
    "rerope",
    title="ReRoPE",
    source="Su 2023 (kexue.fm 9708)",
    summary="RoPE up to a window; every key farther away counts as that far.",
    **RELMAP,
)
class ReRoPE(RelMap):
    """Rectified RoPE: relative position ``min(i - j, window)``.

    Two branches: ``(R_i q).(R_j k)`` below the window, ``(R_w q).k`` from there on. No position beyond the window is
    ever used, so length is unbounded. Keys are cached raw; a cache, chunked prefill and a full pass agree.

    Raises ValueError for a window below 1 and bidirectional attention.
    Source: Su 2023 (kexue.fm 9708), bojone/rerope: window 512 for a trained length of 4096, best a quarter to a half.
    The official patch is right for a full prefill and single tokens only; log-n (``log_n``) is on there, off here.
    """

    Config = ReRoPEConfig
    config: ReRoPEConfig

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        nowhere = torch.zeros(1, 1, dtype=torch.int64, device=positions.device)
        return self.two(positions, self.config.near, nowhere + self.config.near, nowhere)


@dataclass(frozen=True, kw_only=True)
class LeakyReRoPEConfig(ReRoPEConfig):
    """Options of :class:`LeakyReRoPE`.

    Attributes:
        factor: beyond the window positions grow this many times slower.
    """

    factor: float = 16.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.factor < 1:
            raise ValueError(f"factor is at least 1; got {self.factor}")


@register(
    "leaky-rerope",
    title="Leaky ReRoPE",
    source="Su 2023 (kexue.fm 9708)",
    summary="RoPE up to a window; beyond it positions grow a factor slower.",
    **RELMAP,
)
class LeakyReRoPE(RelMap):
    """Leaky ReRoPE: relative position ``i - j`` below the window w, ``w + (i - j - w) / factor`` from there on.

    The far branch compares ``R_((i + w (factor - 1)) / factor) q`` with ``R_(j / factor) k``. Positions stay below the
    trained length while ``w + (n - w) / factor`` does.

    Raises ValueError for a factor below 1 and bidirectional attention.
    Source: Su 2023 (kexue.fm 9708), bojone/rerope (factor 16).
    """

    Config = LeakyReRoPEConfig
    config: LeakyReRoPEConfig

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        near, factor = self.config.near, self.config.factor
        query = (positions.query.double() + near * (factor - 1)) / factor
        return self.two(positions, near, query, positions.key.double() / factor)


# ---- Self-Extend ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SelfExtendConfig(RelMapConfig):
    """Options of :class:`SelfExtend`.

    Attributes:
        group: tokens that share one position far away (LongLM's group_size_1).
        window: distances below it are exact (LongLM's group_size_2; None: a quarter of the trained length).
    """

    group: int = 8
    window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group < 1 or (self.window is not None and self.window < 1):
            raise ValueError(f"group and window are at least 1; got {self.group} and {self.window}")

    @property
    def near(self) -> int:
        """window, after its default."""
        return self.window if self.window is not None else self.default_window(4)


@register(
    "self-extend",
    title="Self-Extend",
    source="Jin et al. 2024 (arXiv 2401.01325)",
    summary="RoPE up to a window; beyond it groups of tokens share one position.",
    **RELMAP,
)
class SelfExtend(RelMap):
    """Self-Extend: ``i - j`` below the window W, ``(i // G + W - W // G) - j // G`` from there on.

    The far branch rotates queries and keys at grouped positions. The map is no function of ``i - j`` (a difference of
    floors), so no single bias table can replace it. See `plan_self_extend` for G and W.

    Raises ValueError for a group or window below 1 and bidirectional attention.
    Source: Jin et al. 2024 (arXiv 2401.01325), datamllab/LongLM (group 8, window 1024 of 4096). Where G does not divide
    W its flash prefill takes W / G as a fraction and its eager path floors: floored here. Where everything is nearer
    than W it drops the shift, which only renames positions that nobody compares.
    """

    Config = SelfExtendConfig
    config: SelfExtendConfig

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        near, group = self.config.near, self.config.group

        def grouped(at: Tensor) -> Tensor:
            return at.div(group, rounding_mode="floor")

        shift = near - near // group
        return self.two(positions, near, grouped(positions.query) + shift, grouped(positions.key))


class SelfExtendPlan(NamedTuple):
    """Group and window for a wished length, and how far they reach. Prints what to know about them.

    ``reach``: longest input whose positions all stay below the trained length. ``used``: share of the trained length
    that the far positions of the wished length occupy.
    """

    group: int
    window: int
    trained_length: int
    target_length: int
    reach: int
    used: float

    def __str__(self) -> str:
        text = (
            f"group {self.group}, window {self.window}: reaches {self.reach} tokens; {self.target_length} tokens use "
            f"positions up to {self.used:.0%} of the trained {self.trained_length}"
        )
        if self.used > 2 / 3:
            text += "; above two thirds: slow positions near the trained edge were seen rarely in training and are weak"
        return text


def self_extend_reach(trained_length: int, group: int, window: int) -> int:
    """Longest input for which every relative position stays below the trained length.

    ``(L - W) G + W`` where G divides W (the paper's equation 4); exact elsewhere too.
    """
    if window >= trained_length:
        return trained_length
    return (trained_length - window + window // group) * group


def plan_self_extend(trained_length: int, target_length: int, *, window: int | None = None) -> SelfExtendPlan:
    """The smallest group (and a window of a quarter of the trained length) that serves a target length comfortably.

    Comfortably: ``W + (N - W) / G`` within two thirds of the trained length, the authors' rule of thumb; where the
    window leaves too little room for that, positions merely stay below the trained length.
    Raises ValueError where no group can do it.
    """
    window = max(1, trained_length // 4) if window is None else window
    if not 1 <= window < trained_length:
        raise ValueError(f"window lies between 1 and the trained length {trained_length}; got {window}")
    rest = target_length - window

    def plan(group: int) -> SelfExtendPlan:
        used = (window + max(rest, 0) / group) / trained_length
        reach = self_extend_reach(trained_length, group, window)
        return SelfExtendPlan(group, window, trained_length, target_length, reach, used)

    room = trained_length * 2 // 3 - window
    if room > 0:
        return plan(max(1, math.ceil(rest / room)))
    group = max(1, math.ceil(rest / (trained_length - window)))
    while self_extend_reach(trained_length, group, window) < target_length:
        group += 1
    return plan(group)


# ---- Stair ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StairConfig(RelMapConfig):
    """Options of :class:`Stair`.

    Attributes:
        window: distances up to it are exact (N; None: a quarter of the trained length, 512 of 2048).
        step: tokens of one stair beyond it (E).
        rounding: of the last stair: ``"ceil"``, the paper's; ``"floor"``, its code's.
    """

    window: int | None = None
    step: int = 50
    rounding: Literal["ceil", "floor"] = "ceil"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step < 1 or (self.window is not None and self.window < 0):
            raise ValueError(f"step is at least 1 and window at least 0; got {self.step} and {self.window}")
        if self.rounding not in ("ceil", "floor"):
            raise ValueError(f"rounding is 'ceil' or 'floor'; got {self.rounding!r}")

    @property
    def near(self) -> int:
        """window, after its default."""
        return self.window if self.window is not None else self.default_window(4)


@register(
    "stair",
    title="Stair PE (Mesa-Extrapolation)",
    source="Ma et al. 2024 (arXiv 2410.15859)",
    summary="RoPE up to a window; beyond it distances grow one step in many tokens.",
    **RELMAP,
)
class Stair(RelMap):
    """Stair positions: ``W(d) = d`` up to the window N, ``N + ceil((d - N) / E)`` beyond it, for every query exactly.

    The ceiling couples query and key: with ``i - N = E a + r`` and ``j = E b + s`` it is ``a - b + [r > s]``, so far
    logits come from ``R_(N + a) q`` or ``R_(N + a + 1) q`` against ``R_b k``, chosen pair by pair. Logits are made for
    a block of rows at a time. Keys are cached raw. `triangular_prefill` gives the paper's linear prefill.

    Shapes: a ``scores`` hook. Raises ValueError for a step below 1 and bidirectional attention.
    Source: Ma et al. 2024 (arXiv 2410.15859), equation 3 (N = 512, E = 50). Their code rounds down, takes N from the
    length, and gives only the last token its exact positions; queries there carry log-n (``log_n``).
    """

    Config = StairConfig
    config: StairConfig

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        c = self.config
        found, factor = self.frequencies(positions), self.query_factor(positions)

        def turned(query_at: Tensor, key_at: Tensor) -> Rotation:
            return self.rotation(positions, query_at=query_at, key_at=key_at, found=found, query_factor=factor)

        stair = (positions.query - c.near).div(c.step, rounding_mode="floor")
        shelf = positions.key.div(c.step, rounding_mode="floor")
        place = positions.query - c.near - stair * c.step
        key_place = positions.key - shelf * c.step
        rotations = (
            turned(positions.query, positions.key),
            turned(stair + c.near, shelf),
            turned(stair + c.near + (1 if c.rounding == "ceil" else -1), shelf),
        )
        scores = _StairScores(positions, rotations, place, key_place, c.near, c.rounding)
        return Terms(scores=scores, rotated_keys_cacheable=False)


class _StairScores:
    """Logits at stair distances, for a block of queries."""

    def __init__(
        self,
        positions: Positions,
        rotations: tuple[Rotation, Rotation, Rotation],
        place: Tensor,
        key_place: Tensor,
        window: int,
        rounding: str,
    ) -> None:
        self.positions, self.rotations = positions, rotations
        self.place, self.key_place = place, key_place
        self.window, self.rounding = window, rounding

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
        bounds = block_bounds(self.positions, positions)

        def product(rotation: Rotation) -> Tensor:
            part = rotation if bounds is None else rotation.rows(*bounds)
            return per_group(part.query(q), rotation.key(k).mT) * scale

        near, shelf, next_shelf = map(product, self.rotations)
        place, key_place = self.place[..., None], self.key_place[:, None, :]
        if bounds is not None:
            place = place[:, bounds[0] : bounds[1]]
        other = place > key_place if self.rounding == "ceil" else place < key_place
        far = torch.where(other[:, None], next_shelf, shelf)
        distance = positions.token_distance()[:, None]
        logits = torch.where(distance <= self.window, near, far)
        return logits if bias is None else logits + bias


alias("mesa", "stair")
alias("stair-pe", "stair")


class Segment(NamedTuple):
    """One piece of a chunk-triangular prefill: these queries attend to these keys, at these positions.

    ``attend(q[:, :, queries], torch.cat([k[:, :, part] for part in keys], 2), ..., positions, encoding(positions))``
    """

    kind: Literal["first", "middle", "last"]
    queries: slice
    keys: tuple[slice, ...]
    positions: Positions
    encoding: Rotary


def mesa_chunk(length: int, trained_length: int, *, first: int = 100, last: int = 512, push: int = 50) -> int:
    """Size of the middle chunks, as Mesa's code splits an input: filling the trained length, or evenly.

    With T = trained_length - 2 first, M = length + push - first - last and n = M // T: T where fewer than 200 tokens
    would remain, else ``M // (n + 1)``.
    Source: soacker/Mesa-Extrapolation. The paper subtracts ``first`` once and no ``push``.
    """
    most = trained_length - 2 * first
    middle = length + push - first - last
    if most < 1:
        raise ValueError(f"chunks beside a first chunk of {first} do not fit a trained length of {trained_length}")
    whole, rest = divmod(max(middle, 0), most)
    return most if rest < 200 else middle // (whole + 1)


def triangular_prefill(
    encoding: Stair,
    length: int,
    *,
    first: int = 100,
    last: int = 512,
    chunk: int | None = None,
    device: torch.device | None = None,
) -> Iterator[Segment]:
    """Mesa's prefill with memory and time linear in the length, piece by piece.

    The first chunk attends to itself; each middle chunk to the first chunk and itself, standing right after the first
    chunk, with plain RoPE; the last ``last`` tokens to everything, with stair positions. The pieces' outputs, end to
    end, are the layer's. Short inputs are one piece with stair positions.

    Raises ValueError without a chunk or a trained length to derive it from.
    Source: Ma et al. 2024 (arXiv 2410.15859), section 4.
    """
    plain = Rotary(
        RotaryConfig(
            **{name: getattr(encoding.config, name) for name in RotaryConfig.__dataclass_fields__},
        )
    )
    begin = max(length - last, 0)
    if begin > first:
        if chunk is None:
            if encoding.config.trained_length is None:
                raise ValueError("the size of chunks follows from the trained length: give chunk")
            chunk = mesa_chunk(length, encoding.config.trained_length, first=first, last=last)
        here = Positions.full(first, device=device)
        yield Segment("first", slice(0, first), (slice(0, first),), here, plain)
        for start in range(first, begin, chunk):
            stop = min(start + chunk, begin)
            count = stop - start
            here = Positions.step(first, queries=count, device=device)
            yield Segment("middle", slice(start, stop), (slice(0, first), slice(start, stop)), here, plain)
    else:
        begin = 0
    here = Positions.full(length, queries=length - begin, device=device)
    yield Segment("last", slice(begin, length), (slice(0, length),), here, encoding)


# ---- LaMPE ----------------------------------------------------------------------------------------------------------

LAMPE_SIGMOIDS: dict[str, tuple[int, float, float, float]] = {
    "llama2": (4096, 8.673006440952035e-05, -0.648012322406978, 2489.1055552214357),
    "llama3": (8192, 0.00010493097327094324, -2.466638011138158, 6204.409324666837),
}
"""Fitted (trained length, a, b, C) of the mapped length ``C / (1 + exp(-(a n + b)))``."""


def lampe_mapped_length(length: Tensor, trained_length: int = 4096, fit: str = "llama2") -> Tensor:
    """Positions that a length is squeezed into: 1536 below 8192 tokens, ``int(C / (1 + exp(-(a n + b))))`` from there.

    The fit belongs to one checkpoint; for another trained length both axes are scaled by it (ours). int64.
    Source: LaMPE, scar-on/LaMPE remap_uselen.
    """
    own, a, b, c = LAMPE_SIGMOIDS[fit]
    scale = trained_length / own
    n = length.double() / scale
    mapped = torch.where(n < 8192, 1536.0, (c / (1 + torch.exp(-(a * n + b)))).floor())
    return (mapped * scale).floor().long()


@dataclass(frozen=True, kw_only=True)
class LaMPEConfig(RelMapConfig):
    """Options of :class:`LaMPE`.

    Attributes:
        window: distances below it are exact (None: an eighth of the trained length, 512 of 4096).
        mapped_length: positions that all farther tokens are squeezed into (None: by the length, as fitted).
        fit: which fitted sigmoid: ``"llama2"`` or ``"llama3"``.
        attention_factor: multiplies rotated channels (None: ``0.1 ln 2 + 1`` as published).
    """

    window: int | None = None
    mapped_length: int | None = None
    fit: str = "llama2"
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fit not in LAMPE_SIGMOIDS:
            raise ValueError(f"fit is one of {', '.join(LAMPE_SIGMOIDS)}; got {self.fit!r}")
        for name in ("window", "mapped_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is at least 1; got {value}")

    @property
    def near(self) -> int:
        """window, after its default."""
        return self.window if self.window is not None else self.default_window(8)


@register(
    "lampe",
    title="LaMPE",
    source="LaMPE, ACL 2026 (scar-on/LaMPE)",
    summary="RoPE up to a window; all farther tokens squeezed into a number of positions that follows the length.",
    **RELMAP,
)
class LaMPE(RelMap):
    """Length-aware multi-grained positions: ``i - j`` below the window W, a squeezed distance from there on.

    It is ``floor(c i) - floor(c j) + W - floor(c W) - 1`` with ``c = U(n) / (n - 1)``, n the row's length and U its
    mapped length (`lampe_mapped_length`); c never exceeds 1, so short inputs are not stretched. Cosines and sines carry
    a factor of ``0.1 ln 2 + 1``. Positions follow the current length, so keys are cached raw.

    Raises ValueError for an unknown fit and bidirectional attention.
    Source: scar-on/LaMPE. Their two passes both include distance W; here it is the far branch's alone. Published fits
    are of Llama-2 and Llama-3; other trained lengths scale them (ours). The paper's third, middle grain is not in its
    code.
    """

    Config = LaMPEConfig
    config: LaMPEConfig

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        c = self.config
        length = positions.length
        if c.mapped_length is None:
            mapped = lampe_mapped_length(length, c.trained_length or UNKNOWN_LENGTH, c.fit)
        else:
            mapped = torch.full_like(length, c.mapped_length)
        ratio = (mapped.double() / (length - 1).clamp(min=1)).clamp(max=1.0)[:, None]
        shift = c.near - torch.floor(ratio * c.near) - 1
        query = torch.floor(positions.query * ratio) + shift
        factor = 0.1 * math.log(2) + 1 if c.attention_factor is None else c.attention_factor
        found = self.frequencies(positions)
        found = found._replace(attention_factor=found.attention_factor * factor)
        return self.two(positions, c.near, query, torch.floor(positions.key * ratio), found)
