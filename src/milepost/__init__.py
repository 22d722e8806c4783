"""milepost: how Transformers know where things are, and why they break on longer input than they were trained on."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from milepost.attention import attend, explain
from milepost.encoding import Encoding, Mapped, PerLayer, PositionMap, Sum, build, catalogue
from milepost.positions import Positions
from milepost.terms import Branch, DenseBias, DistanceBias, PairBias, Terms

if TYPE_CHECKING:
    from milepost.extend.attach import attach, detach
    from milepost.extend.doctor import diagnose
    from milepost.extend.rope_types import register_rope_types
    from milepost.stretch import usable_length

__version__ = "0.1.0"

__all__ = [
    "Branch",
    "DenseBias",
    "DistanceBias",
    "Encoding",
    "Mapped",
    "PairBias",
    "PerLayer",
    "PositionMap",
    "Positions",
    "Sum",
    "Terms",
    "attach",
    "attend",
    "build",
    "catalogue",
    "detach",
    "diagnose",
    "explain",
    "register_rope_types",
    "usable_length",
]

_ON_USE = {
    "attach": "milepost.extend.attach",
    "detach": "milepost.extend.attach",
    "diagnose": "milepost.extend.doctor",
    "register_rope_types": "milepost.extend.rope_types",
    "usable_length": "milepost.stretch",
}
"""Names that need more than torch: imported when they are first asked for."""


def __getattr__(name: str) -> Any:
    if name in _ON_USE:
        return getattr(import_module(_ON_USE[name]), name)
    raise AttributeError(f"module 'milepost' has no attribute {name!r}")
