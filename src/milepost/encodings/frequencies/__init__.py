"""Frequencies of rotary positions: every published way to stretch them, as pure functions of (fields, length).

    >>> from milepost.encodings.frequencies import Yarn
    >>> method = Yarn(rotary_dim=128, base=10000.0, trained_length=4096, factor=8.0)
    >>> inv_freq, attention_factor, softmax_factor = method.frequencies()

All arithmetic is float64; casting is the caller's, last. No method keeps state, so a long call never changes a later
short one, and rows of a batch never touch each other.
"""

from __future__ import annotations

from milepost.encodings.frequencies.base import Frequencies, FrequencyMethod, check_inv_freq
from milepost.encodings.frequencies.byparts import ByParts, Llama3, PartNTK, Yarn, yarn_temperature
from milepost.encodings.frequencies.clex import Clex, ClexTable, ntk_path
from milepost.encodings.frequencies.config import (
    ALIASES,
    METHODS,
    UsableLength,
    from_config,
    merge_scaling,
    method_class,
    rope_fields,
    usable_length,
)
from milepost.encodings.frequencies.longrope import LongRope
from milepost.encodings.frequencies.static import (
    ABF,
    NTK,
    Default,
    HoPECut,
    Linear,
    Power,
    Proportional,
    Truncated,
    fope_kept_pairs,
    full_turn_pairs,
    log_n_scale,
)
from milepost.encodings.frequencies.wrappers import Dynamic, LogN, Resonance, dynamic_ntk

__all__ = [
    "ABF",
    "ALIASES",
    "METHODS",
    "NTK",
    "ByParts",
    "Clex",
    "ClexTable",
    "Default",
    "Dynamic",
    "Frequencies",
    "FrequencyMethod",
    "HoPECut",
    "Linear",
    "Llama3",
    "LogN",
    "LongRope",
    "PartNTK",
    "Power",
    "Proportional",
    "Resonance",
    "Truncated",
    "UsableLength",
    "Yarn",
    "check_inv_freq",
    "dynamic_ntk",
    "fope_kept_pairs",
    "from_config",
    "full_turn_pairs",
    "log_n_scale",
    "merge_scaling",
    "method_class",
    "ntk_path",
    "rope_fields",
    "usable_length",
    "yarn_temperature",
]
