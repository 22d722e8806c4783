"""Relative encodings whose position part depends on the content of the query or the key."""

from __future__ import annotations

from milepost.encodings.relative.deberta import DeBERTa
from milepost.encodings.relative.shaw import Shaw
from milepost.encodings.relative.transformer_xl import TransformerXL
from milepost.encodings.relative.tupe import TUPE

__all__ = ["DeBERTa", "Shaw", "TUPE", "TransformerXL"]
