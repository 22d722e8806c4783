"""Encodings against each other: trained short, tested long, one table.

    from milepost.compare import compare, preset

    outcome = compare(preset("quick", methods=("alibi", "rope")), "sweep")
    print(outcome.results["summary"]["perplexity"]["windows"])

`settings` has every value and the presets, `run` trains and measures one (method, seed) in a worker process, `sweep`
starts what is missing, `summary` makes means, intervals and paired differences of it.
"""

from __future__ import annotations

from milepost.compare.settings import PRESETS, Settings, SettingsError, preset
from milepost.compare.summary import summarise
from milepost.compare.sweep import SCHEMA, Outcome, compare

__all__ = ["PRESETS", "SCHEMA", "Outcome", "Settings", "SettingsError", "compare", "preset", "summarise"]
