"""From names to methods with the right numbers for a model and a target length."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from milepost.analysis.scaling_laws import critical_base
from milepost.encoding import parse_spec
from milepost.encodings.frequencies import FrequencyMethod
from milepost.encodings.relmaps import plan_self_extend

AUTO = ("pi", "ntk", "ntk-by-parts", "yarn", "dynamic-ntk", "dynamic-yarn", "rerope", "self-extend")
"""What ``auto`` tries besides the untouched model: the methods that need no training."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to read longer.

    Attributes:
        name: as given, without options.
        label: in tables.
        spec: the encoding that `milepost.extend.attach` is given; None: the model untouched.
        options: of that encoding.
        static: it changes the frequencies at every length, short ones too.
        partner: the dynamic form of a static method, or the other way round.
        search: its factors are searched for first.
    """

    name: str
    label: str
    spec: str | None
    options: Mapping[str, Any] = field(default_factory=dict)
    static: bool = False
    partner: str | None = None
    search: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "options": dict(self.options)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Method:
        return cls(**values)


def resolve_target(to: int | str, trained: int) -> int:
    """Tokens, from a number or a multiple such as ``"4x"``.

    Raises ValueError for anything else, or a target that is not beyond the trained length.
    """
    text = str(to).strip().lower()
    try:
        if text.endswith("x"):
            target = round(float(text[:-1]) * trained)
        elif text.endswith("k"):
            target = round(float(text[:-1]) * 1024)
        else:
            target = int(text)
    except ValueError:
        raise ValueError(f"--to takes tokens (16384, 16k) or a multiple of the trained (4x); got {to!r}") from None
    if target <= trained:
        raise ValueError(
            f"the target {target} is not beyond the trained length {trained}: there is nothing to stretch; "
            "give a longer --to, or --trained where the config names a stretched length"
        )
    return target


def plan(names: Sequence[str], *, trained: int, target: int, base: float | None) -> list[Method]:
    """The methods of these names for a target, the untouched model first. Options after a colon replace ours.

    ``factor`` is target / trained; ReRoPE's window is half the trained length; Self-Extend's group and window come
    from `plan_self_extend`; ``abf`` takes the smallest base that the scaling laws let reach the target.

    Raises ValueError for an unknown name (the nearest are given) or one named twice.
    """
    wanted: list[str] = []
    for name in names:
        wanted += AUTO if name == "auto" else [name]
    makers = _makers(trained, target, base)
    methods = [Method(name="untouched", label="untouched", spec=None, partner=None)]
    for text in wanted:
        name, options = parse_spec(text)
        if name in ("untouched", "none"):
            continue
        if name not in makers:
            near = difflib.get_close_matches(name, makers, n=3, cutoff=0.5)
            hint = f"; nearest: {', '.join(near)}" if near else ""
            raise ValueError(f"no stretching method is named {name!r}{hint}. There are: {', '.join(makers)}")
        made = makers[name]()
        label = text if options else made.label
        method = Method(**{**made.to_dict(), "label": label, "options": _merged(made, options)})
        if any(method.label == other.label for other in methods):
            raise ValueError(f"{method.label!r} is named twice")
        methods.append(method)
    return methods


def _merged(method: Method, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options given by the user go where ours are: into the scaling block of a dynamic method, or beside it."""
    if "scaling" in method.options:
        return {"scaling": {**method.options["scaling"], **options}}
    return {**method.options, **options}


def _makers(trained: int, target: int, base: float | None) -> dict[str, Callable[[], Method]]:
    factor = target / trained

    def static(name: str, label: str, partner: str | None = None, **options: Any) -> Callable[[], Method]:
        return lambda: Method(
            name=name, label=label, spec=name, options={"factor": factor, **options}, static=True, partner=partner
        )

    def dynamic(name: str, inner: str) -> Callable[[], Method]:
        scaling = {"method": f"dynamic_{inner}", "factor": 1.0}
        return lambda: Method(name=name, label=name, spec="rope", options={"scaling": scaling})

    def self_extend() -> Method:
        found = plan_self_extend(trained, target)
        options = {"group": found.group, "window": found.window}
        return Method(name="self-extend", label=f"self-extend G={found.group} W={found.window}", spec="self-extend",
                      options=options)  # fmt: skip

    def windowed(name: str, **options: Any) -> Callable[[], Method]:
        window = max(1, trained // 2)
        return lambda: Method(name=name, label=f"{name} w={window}", spec=name, options={"window": window, **options})

    def abf() -> Method:
        new = critical_base(trained, target, base or 10000.0)
        return Method(name="abf", label=f"abf base={new:.4g}", spec="rope", options={"base": float(f"{new:.6g}")},
                      static=True)  # fmt: skip

    def small_base() -> Method:
        return Method(name="small-base", label="base=500", spec="rope", options={"base": 500.0}, static=True)

    return {
        "pi": static("pi", f"pi x{factor:g}", "dynamic-pi"),
        "ntk": static("ntk", f"ntk x{factor:g}", "dynamic-ntk"),
        "ntk-by-parts": static("ntk-by-parts", f"ntk-by-parts x{factor:g}", "dynamic-by-parts"),
        "yarn": static("yarn", f"yarn x{factor:g}", "dynamic-yarn"),
        "llama3": lambda: Method(
            name="llama3", label=f"llama3 x{factor:g}", spec="llama3", options={"factor": factor}, static=True
        ),
        "dynamic-pi": dynamic("dynamic-pi", "pi"),
        "dynamic-ntk": lambda: Method(name="dynamic-ntk", label="dynamic-ntk", spec="dynamic-ntk"),
        "dynamic-by-parts": dynamic("dynamic-by-parts", "ntk_by_parts"),
        "dynamic-yarn": dynamic("dynamic-yarn", "yarn"),
        "rerope": windowed("rerope"),
        "leaky-rerope": windowed("leaky-rerope", factor=max(2.0, math.ceil(2 * factor))),
        "self-extend": self_extend,
        "stair": lambda: Method(
            name="stair", label="stair", spec="stair",
            options={"window": max(1, trained // 4), "step": max(2, math.ceil(2 * factor))},
        ),  # fmt: skip
        "abf": abf,
        "small-base": small_base,
        "clex": lambda: Method(name="clex", label="clex", spec="clex", options={"max_factor": max(2.0, factor)}),
        "longrope-search": lambda: Method(
            name="longrope-search", label="longrope (searched)", spec="longrope", static=True, search=True
        ),
    }


def frequency_method(attachment: Any) -> FrequencyMethod | None:
    """The frequency method that an attachment runs, None where it is more than frequencies."""
    from milepost.encodings.rotary import RoPE

    found = {id(e): e for e in attachment.encodings.values()}
    methods = [getattr(e, "method", None) for e in found.values() if isinstance(e, RoPE) or e.name in _BY_FREQUENCIES]
    if not methods or len(methods) != sum(e.name != "nope" for e in found.values()):
        return None
    return methods[-1] if isinstance(methods[-1], FrequencyMethod) else None


_BY_FREQUENCIES = ("rope", "pi", "ntk", "ntk-by-parts", "yarn", "llama3", "dynamic-ntk", "longrope", "abf")
