"""Content-dependent encodings: the position signal is made from the logits themselves."""

from __future__ import annotations

from milepost.encodings.content.cope import CoPE
from milepost.encodings.content.dape import DAPE

__all__ = ["CoPE", "DAPE"]
