"""What can be computed without training."""

from __future__ import annotations
