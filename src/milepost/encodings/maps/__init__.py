"""Position maps: random, shifted and hierarchical positions, under any encoding."""

from __future__ import annotations

from milepost.encodings.maps.hirope import HiRoPE
from milepost.encodings.maps.named import MappedEncoding, RandomizedEncoding
from milepost.encodings.maps.pose import PoSE
from milepost.encodings.maps.randomized import Randomized, RandomizedDistances
from milepost.encodings.maps.segmented import BiPE, Segmented
from milepost.encodings.maps.shifted import CAPE, SHAPE

__all__ = [
    "BiPE",
    "CAPE",
    "HiRoPE",
    "MappedEncoding",
    "PoSE",
    "Randomized",
    "RandomizedDistances",
    "RandomizedEncoding",
    "SHAPE",
    "Segmented",
]
