"""The base class of every encoding, the three combinators, and the registry behind ``build`` and ``catalogue``."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from milepost.positions import Positions
from milepost.terms import Terms


@dataclass(frozen=True, kw_only=True)
class EncodingConfig:
    """Base of every configuration: frozen, keyword-only, checked at construction."""


@dataclass(frozen=True, kw_only=True)
class Info:
    """What the catalogue knows about an encoding. The four survey properties follow Zhao et al. 2023, Table 1.

    Attributes:
        name: the name that ``build`` takes.
        title: how papers call it.
        family: absolute, relative, bias, content, rotary, none, map or schedule.
        manifestation: embedding, bias, position map, or none.
        learnable: it has parameters that training changes.
        integration: how it meets the content: add, multiply, or none.
        injection: layers that receive it: initial, every, or none.
        source: paper and where it is defined.
        summary: one sentence.
        survey: the row's name in the survey's Table 1, where it has one.
        cls: the class that ``build`` makes.
        preset: configuration that this name stands for.
        shared: one set serves all layers, as published.
        trainable: can be trained from scratch in the language model of this library.
    """

    name: str
    title: str
    family: str
    manifestation: Literal["embedding", "bias", "position map", "none"]
    learnable: bool
    integration: Literal["add", "multiply", "none"]
    injection: Literal["initial", "every", "none"]
    source: str
    summary: str
    cls: type[Encoding]
    survey: str | None = None
    preset: tuple[tuple[str, Any], ...] = ()
    shared: bool = True
    trainable: bool = True


class Encoding(nn.Module):
    """A positional encoding: looks at positions and returns data.

    A subclass names its ``Config`` and overrides ``terms`` (everything that acts in attention), ``embed`` (the
    absolute family), or both. It knows nothing of caches, padding, packing or kernels.

    ``ALiBi(8)``, ``ALiBi(num_heads=8, learn_slopes=True)`` and ``ALiBi(ALiBi.Config(num_heads=8))`` are the same;
    positional arguments follow the order of the configuration's fields.

    Parameters stay in float32 (or float64) under ``.half()``, ``.to(torch.bfloat16)`` and autocast. Constants are
    computed from the configuration whenever they are needed, so that nothing has to be restored after loading.

    Raises:
        TypeError: an option the configuration does not have (the nearest one is named) or one that is missing.
        ValueError: values that contradict each other.
    """

    Config: ClassVar[type[EncodingConfig]] = EncodingConfig
    info: ClassVar[Info | None] = None
    needs_tokens: ClassVar[bool] = False
    """``embed`` or ``forward`` must be given the token ids of all keys."""
    axes: ClassVar[int] = 1
    """Position axes it reads: 2 for images, 3 for video; positions are then ``(B|1, n, axes)``."""

    config: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()
        if len(args) == 1 and isinstance(args[0], self.Config) and not options:
            self.config = args[0]
        else:
            names = [f.name for f in fields(self.Config)]
            if len(args) > len(names):
                raise TypeError(f"{type(self).__name__} takes at most {len(names)} options; got {len(args)}")
            self.config = make_config(self.Config, {**dict(zip(names, args, strict=False)), **options})
        self.setup()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        try:
            cls.__signature__ = inspect.signature(cls.Config)  # type: ignore[attr-defined]  # help() shows the options
        except (TypeError, ValueError):
            pass

    # ---- what a subclass writes -------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Create parameters and submodules; then call ``reset_parameters``. Default: none."""

    def reset_parameters(self) -> None:
        """Give every parameter its published initial value, in place. Called again after loading on a meta device."""

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        """What attention must do at these positions. Default: nothing."""
        return Terms()

    def embed(self, x: Tensor, positions: Positions, tokens: Tensor | None = None) -> Tensor:
        """``(B, Q, width)`` token embeddings -> the same with the position in them. Default: unchanged."""
        return x

    # ---- what others call -------------------------------------------------------------------------------------------

    def forward(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        """The :class:`Terms` of these positions, computed outside autocast.

        Args:
            positions: where queries and keys stand.
            tokens: ``(B, K)`` ids of all keys; only encodings with ``needs_tokens`` read them.
        """
        device = positions.device.type
        with torch.autocast("cpu" if device == "meta" else device, enabled=False):  # autocast does not know meta
            terms = self.terms(positions, tokens)
        return terms if terms.name else replace(terms, name=self.name)

    @property
    def name(self) -> str:
        """The name in the catalogue, or the class's own."""
        return self.info.name if self.info is not None else type(self).__name__

    def for_layer(self, layer: int) -> Encoding:
        """The encoding of one layer: itself, unless it is a schedule."""
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Encoding:
        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if tensor.is_floating_point() and moved.dtype in (torch.float16, torch.bfloat16):
                return tensor.to(device=moved.device)
            return moved

        super()._apply(keep_precision, recurse)
        return self

    def extra_repr(self) -> str:
        return ", ".join(f"{f.name}={getattr(self.config, f.name)!r}" for f in fields(self.config))


class PositionMap(nn.Module):
    """Moves positions: randomized, shifted, interpolated, segmented. Used through :class:`Mapped`.

    A subclass names its ``Config`` and overrides ``forward(positions, tokens=None) -> positions`` by way of
    ``positions.mapped(query, key)``. Queries are mapped exactly as the keys in whose slots they stand.
    """

    Config: ClassVar[type[EncodingConfig]] = EncodingConfig
    needs_tokens: ClassVar[bool] = False
    config: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()
        if len(args) == 1 and isinstance(args[0], self.Config) and not options:
            self.config = args[0]
        else:
            names = [f.name for f in fields(self.Config)]
            self.config = make_config(self.Config, {**dict(zip(names, args, strict=False)), **options})

    def forward(self, positions: Positions, tokens: Tensor | None = None) -> Positions:
        """The same slots at other positions. Default: unchanged."""
        return positions

    def extra_repr(self) -> str:
        return ", ".join(f"{f.name}={getattr(self.config, f.name)!r}" for f in fields(self.config))


# ---- combinators ----------------------------------------------------------------------------------------------------


class Mapped(Encoding):
    """``encoding`` at the positions that ``position_map`` gives: ``Mapped(Randomized(2048), RoPE(head_dim=64))``."""

    def __init__(self, position_map: PositionMap, encoding: Encoding) -> None:
        nn.Module.__init__(self)
        self.config = EncodingConfig()
        self.position_map = position_map
        self.encoding = encoding
        self.needs_tokens = position_map.needs_tokens or encoding.needs_tokens  # type: ignore[misc]  # per instance

    # A map is asked only where its answer is read: an unread draw would move torch's generator, but not when compiled.

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        if type(self.encoding).terms is Encoding.terms:
            return self.encoding(positions, tokens)
        return self.encoding(self.position_map(positions, tokens), tokens)

    def embed(self, x: Tensor, positions: Positions, tokens: Tensor | None = None) -> Tensor:
        if type(self.encoding).embed is Encoding.embed:
            return x
        return self.encoding.embed(x, self.position_map(positions, tokens), tokens)

    def for_layer(self, layer: int) -> Encoding:
        inner = self.encoding.for_layer(layer)
        return self if inner is self.encoding else Mapped(self.position_map, inner)

    @property
    def name(self) -> str:
        return f"{type(self.position_map).__name__.lower()}({self.encoding.name})"

    def extra_repr(self) -> str:
        return ""


class Sum(Encoding):
    """Several encodings at once: embeddings one after the other, ``Terms`` added (a clash is an error)."""

    def __init__(self, *parts: Encoding) -> None:
        nn.Module.__init__(self)
        if len(parts) < 2:
            raise ValueError(f"Sum needs at least two encodings; got {len(parts)}")
        self.config = EncodingConfig()
        self.parts = nn.ModuleList(parts)
        self.needs_tokens = any(part.needs_tokens for part in parts)  # type: ignore[misc]  # per instance

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        total = self.parts[0](positions, tokens)
        for part in self.parts[1:]:
            total = total + part(positions, tokens)
        return total

    def embed(self, x: Tensor, positions: Positions, tokens: Tensor | None = None) -> Tensor:
        for part in self.parts:
            x = part.embed(x, positions, tokens)  # type: ignore[operator]  # ModuleList hides the class
        return x

    def for_layer(self, layer: int) -> Encoding:
        parts = [part.for_layer(layer) for part in self.parts]  # type: ignore[operator]
        return self if all(a is b for a, b in zip(parts, self.parts, strict=True)) else Sum(*parts)

    @property
    def name(self) -> str:
        return " + ".join(str(part.name) for part in self.parts)

    def extra_repr(self) -> str:
        return ""


class PerLayer(Encoding):
    """A schedule: layer ``l`` uses ``encodings[l % len(encodings)]``.

    ``PerLayer([rope, rope, rope, nope])`` is NoPE in every fourth layer. The same object may stand in several places.
    ``embed`` applies the part of every distinct encoding once, in order of first appearance.
    """

    def __init__(self, encodings: Sequence[Encoding]) -> None:
        nn.Module.__init__(self)
        if not encodings:
            raise ValueError("PerLayer needs at least one encoding")
        self.config = EncodingConfig()
        self.encodings = nn.ModuleList(encodings)
        self.needs_tokens = any(e.needs_tokens for e in encodings)  # type: ignore[misc]  # per instance

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        raise TypeError("a PerLayer schedule has no terms of its own: call schedule.for_layer(layer)(positions)")

    def for_layer(self, layer: int) -> Encoding:
        return self.encodings[layer % len(self.encodings)].for_layer(layer)  # type: ignore[operator]  # ModuleList hides

    def embed(self, x: Tensor, positions: Positions, tokens: Tensor | None = None) -> Tensor:
        for part in dict.fromkeys(self.encodings):
            x = part.embed(x, positions, tokens)  # type: ignore[operator]
        return x

    @property
    def name(self) -> str:
        return "/".join(dict.fromkeys(str(e.name) for e in self.encodings))

    def extra_repr(self) -> str:
        return ""


# ---- registry -------------------------------------------------------------------------------------------------------

_REGISTRY: dict[str, Info] = {}
_MISLEADING: dict[str, str] = {}
_ALIASES: dict[str, str] = {}

E = TypeVar("E", bound=type[Encoding])
C = TypeVar("C", bound=EncodingConfig)


def register(name: str, *, preset: dict[str, Any] | None = None, **info: Any) -> Callable[[E], E]:
    """Class decorator: puts an encoding into the catalogue under ``name`` (see :class:`Info` for the rest).

    A class may be registered under several names with different presets; the decorator written nearest to the class
    gives ``cls.info``.
    """

    def decorate(cls: E) -> E:
        if name in _REGISTRY:
            raise ValueError(f"an encoding named {name!r} exists already: {_REGISTRY[name].cls.__qualname__}")
        entry = Info(name=name, cls=cls, preset=tuple((preset or {}).items()), **info)
        _REGISTRY[name] = entry
        if "info" not in cls.__dict__:
            cls.info = entry
        return cls

    return decorate


def alias(name: str, target: str) -> None:
    """Another spelling of a registered name."""
    _ALIASES[name] = target


def misleading(name: str, message: str) -> None:
    """A name that two papers use: ``build(name)`` raises with ``message`` instead of guessing."""
    _MISLEADING[name] = message


def make_config(cls: type[C], options: dict[str, Any]) -> C:
    """``cls(**options)``, with errors that name the nearest option and what is missing."""
    known = {f.name: f for f in fields(cls)}
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise TypeError(
                f"{cls.__qualname__} has no option {key!r}; {hint}its options are: {', '.join(known) or 'none'}"
            )
    missing = [
        n
        for n, f in known.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and n not in options
    ]
    if missing:
        raise TypeError(f"{cls.__qualname__} needs {', '.join(missing)}")
    return cls(**options)


def find(name: str) -> Info:
    """The catalogue's entry for a name.

    Raises:
        ValueError: an unknown name (the nearest are given) or one that several papers use.
    """
    import milepost.encodings  # noqa: F401  (fills the registry; not imported above, because it imports this module)

    key = name.strip().lower().replace("_", "-")
    key = _ALIASES.get(key, key)
    if key in _REGISTRY:
        return _REGISTRY[key]
    if key in _MISLEADING:
        raise ValueError(_MISLEADING[key])
    near = difflib.get_close_matches(key, [*_REGISTRY, *_ALIASES, *_MISLEADING], n=3, cutoff=0.5)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    raise ValueError(f"no encoding is named {name!r}{hint}. `milepost list` shows all names")


def build(name: str, **config: Any) -> Encoding:
    """The encoding of this name: ``build("alibi", num_heads=8)``.

    Raises:
        ValueError: an unknown or ambiguous name.
        TypeError: an option it does not have, one that is missing, or words where it is a yes or a no.
    """
    entry = find(name)
    for field in fields(entry.cls.Config):
        if field.type == "bool" and isinstance(config.get(field.name), str):
            raise TypeError(f"{name}: {field.name} is True or False; got {config[field.name]!r}")
    encoding = entry.cls(**{**dict(entry.preset), **config})
    encoding.info = entry  # type: ignore[misc]  # the instance answers to the name it was built by
    return encoding


GEOMETRY = ("num_heads", "head_dim", "width", "num_layers", "vocab_size", "trained_length")
"""Options that a model fills in when an encoding's configuration has them."""


def build_for(name: str, geometry: dict[str, Any], **options: Any) -> Encoding:
    """``build`` for a model: takes from ``geometry`` what the configuration has and ``options`` leave out."""
    entry = find(name)
    known = {f.name for f in fields(entry.cls.Config)}
    taken = {k: v for k, v in geometry.items() if k in known and k not in options and k not in dict(entry.preset)}
    return build(name, **taken, **options)


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """``"t5:num_buckets=8:max_distance=16"`` -> ``("t5", {"num_buckets": 8, "max_distance": 16})``.

    Values are Python literals, in which true and false may be small; anything else is a string.

    Raises:
        ValueError: an option without ``=``.
    """
    name, *pairs = spec.strip().split(":")
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"{spec!r}: options are written name:option=value:option=value; got {pair!r}")
        text = text.strip()
        try:
            value = ast.literal_eval(text.title() if text in ("true", "false") else text)
        except (ValueError, SyntaxError):
            value = text
        options[key.strip().replace("-", "_")] = value
    return name.strip(), options


def from_spec(spec: str, geometry: dict[str, Any]) -> Encoding:
    """The encoding that a line of text describes, for a model of this geometry.

    ``"alibi:slope_scale=2"`` is one encoding with options, ``"sinusoidal+alibi"`` a :class:`Sum` and
    ``"rope/rope/rope/nope"`` a :class:`PerLayer` schedule (a part that occurs twice is one object).
    """
    built: dict[str, Encoding] = {}

    def layer(text: str) -> Encoding:
        if text not in built:
            parts = []
            for part in text.split("+"):
                name, options = parse_spec(part)
                parts.append(build_for(name, geometry, **options))
            built[text] = parts[0] if len(parts) == 1 else Sum(*parts)
        return built[text]

    layers = [layer(text.strip()) for text in spec.split("/")]
    return layers[0] if len(layers) == 1 else PerLayer(layers)


def catalogue() -> tuple[Info, ...]:
    """Every encoding, in the order of the families' files."""
    import milepost.encodings  # noqa: F401  (fills the registry)

    return tuple(_REGISTRY.values())


def names(entries: Iterable[Info] | None = None) -> list[str]:
    """The names ``build`` takes."""
    return [entry.name for entry in (catalogue() if entries is None else entries)]
