"""milepost: how Transformers know where things are, and why they break on longer input than they were trained on."""

from __future__ import annotations

from milepost.attention import attend, explain
from milepost.encoding import Encoding, Mapped, PerLayer, PositionMap, Sum, build, catalogue
from milepost.positions import Positions
from milepost.terms import Branch, DenseBias, DistanceBias, PairBias, Terms

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
    "attend",
    "build",
    "catalogue",
    "explain",
]
