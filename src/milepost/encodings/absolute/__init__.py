"""Absolute encodings: what is added to (or multiplied into) the input of the first layer."""

from __future__ import annotations

from milepost.encodings.absolute.complex import ComplexOrder
from milepost.encodings.absolute.floater import FLOATER
from milepost.encodings.absolute.learned import Learned
from milepost.encodings.absolute.legendre import Legendre
from milepost.encodings.absolute.segments import Segments
from milepost.encodings.absolute.sinusoidal import Sinusoidal

__all__ = ["ComplexOrder", "FLOATER", "Learned", "Legendre", "Segments", "Sinusoidal"]
