"""What a language model does beyond the length it was trained on, and how sure we are of it.

    regions = corpus.test.regions(size=4096, count=24)
    measured = perplexity_by_length(model, corpus.test, regions, lengths=(128, 1024, 4096))
    for row in measured:
        print(row.measure, row.length, row.perplexity, row.interval(), row.targets)

`perplexity` measures by length in three ways, `passkey` retrieval by length and depth, `stats` gives intervals over
documents and paired differences on the same tokens. Nothing here knows how a model was made: any module that maps
`input_ids` to logits will do, a Hugging Face causal model among them.
"""

from __future__ import annotations

from milepost.evaluate.passkey import PasskeyResult, passkey_by_length
from milepost.evaluate.perplexity import (
    MEASURES,
    LengthLoss,
    Measured,
    NotFinite,
    PositionLoss,
    loss_by_position,
    measure_lengths,
    perplexity_by_length,
    token_losses,
)
from milepost.evaluate.stats import (
    Interval,
    bootstrap_mean,
    mean_and_spread,
    paired_difference,
    wilson_interval,
)

__all__ = [
    "MEASURES",
    "Interval",
    "LengthLoss",
    "Measured",
    "NotFinite",
    "PasskeyResult",
    "PositionLoss",
    "bootstrap_mean",
    "loss_by_position",
    "mean_and_spread",
    "measure_lengths",
    "paired_difference",
    "passkey_by_length",
    "perplexity_by_length",
    "token_losses",
    "wilson_interval",
]
