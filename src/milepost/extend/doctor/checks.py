"""The checks: each looks at one rope block and yields findings. None may fail on any JSON whatever."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from milepost.extend.doctor.check_form import check_keys, check_nulls, check_numbers, check_spelling, check_type
from milepost.extend.doctor.check_lengths import (
    check_factor,
    check_length_dependence,
    check_lengths,
    check_lists,
    check_original,
    check_range,
)
from milepost.extend.doctor.check_model import check_partial, check_small_print, check_theta, check_trained
from milepost.extend.doctor.findings import Finding, View

Check = Callable[[View], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    check_numbers,
    check_nulls,
    check_spelling,
    check_type,
    check_keys,
    check_factor,
    check_original,
    check_lengths,
    check_range,
    check_lists,
    check_theta,
    check_trained,
    check_partial,
    check_length_dependence,
    check_small_print,
)
