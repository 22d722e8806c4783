"""Which method makes a pretrained RoPE model read longer, with which numbers, and whether it worked.

    from milepost.stretch import Settings, stretch

    outcome = stretch(Settings(model="demo", to=1024), "stretched")
    print(outcome.results["verdict"])

`plan` turns names into methods with the right factor, `run` measures (and tunes) one of them in a worker process,
`search` looks for LongRoPE factors, `sweep` does what is missing and ranks, `folder` writes a model folder that is
ready to use. `usable_length` answers how far a model can be read as it is.
"""

from __future__ import annotations

from milepost.stretch.plan import AUTO, Method, plan, resolve_target
from milepost.stretch.settings import Settings
from milepost.stretch.sweep import Outcome, stretch
from milepost.stretch.usable import UsableLength, usable_length

__all__ = [
    "AUTO",
    "Method",
    "Outcome",
    "Settings",
    "UsableLength",
    "plan",
    "resolve_target",
    "stretch",
    "usable_length",
]
