"""From the runs of a sweep to what a report needs: means over seeds, intervals over documents, paired differences.

A summary is plain JSON values and is what `milepost.report` reads:

    perplexity   measure -> {"targets", "cells": [{method, length, value, low, high, spread, in_range}]}
    positions    [{method, low, high, targets, mean}]: loss by tokens of context, at the longest length
    passkey      {"chance_token", "chance_exact", "prompts", "train_length",
                  "cells": [{method, length, exact, low, high, spread, token, in_range}]}
    pairs        [{measure, length, a, b, difference, low, high}]: nats a token, a minus b, on the same targets
    methods      [{method, parameters, encoding_parameters, seeds}] in the order of the ranking
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from milepost.evaluate import LengthLoss, bootstrap_mean, mean_and_spread, paired_difference, wilson_interval
from milepost.evaluate.perplexity import safe_exp


def summarise(
    runs: Sequence[Mapping[str, Any]],
    *,
    methods: Sequence[str],
    train_length: int,
    passkey_train_length: int | None = None,
    passkey_chance: tuple[float, float] = (0.0, 0.0),
) -> dict[str, Any]:
    """The summary of complete runs. Methods without a complete run are left out.

    value: over seeds, the exponential of the mean loss (that is, the geometric mean of the seeds' perplexities).
    spread: standard deviation of the seeds' perplexities, None for one seed. low, high: 95 % bootstrap over documents
    of the loss averaged over seeds.
    """
    by_method = {method: [run for run in runs if run["method"] == method] for method in methods}
    by_method = {method: found for method, found in by_method.items() if found}
    losses = {method: _by_key(found) for method, found in by_method.items()}
    perplexity = _perplexity(losses, train_length)
    order = _ranking(perplexity, list(by_method))
    return {
        "methods": [
            {
                "method": method,
                "title": by_method[method][0].get("title", method),
                "seeds": [run["seed"] for run in by_method[method]],
                "parameters": by_method[method][0]["parameters"],
                "encoding_parameters": by_method[method][0]["encoding_parameters"],
            }
            for method in order
        ],
        "perplexity": perplexity,
        "positions": _positions(by_method),
        "passkey": _passkey(by_method, passkey_train_length, passkey_chance),
        "pairs": _pairs(losses, order),
    }


def _by_key(runs: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], list[LengthLoss]]:
    found: dict[tuple[str, int], list[LengthLoss]] = {}
    for run in runs:
        for values in run["perplexity"]:
            loss = LengthLoss.from_dict(values)
            found.setdefault((loss.measure, loss.length), []).append(loss)
    return found


def _mean_nats(losses: Sequence[LengthLoss]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Loss of each region, averaged over seeds."""
    mean: np.ndarray[Any, np.dtype[np.float64]] = np.mean([loss.nats for loss in losses], axis=0)
    return mean


def _perplexity(
    losses: Mapping[str, Mapping[tuple[str, int], Sequence[LengthLoss]]], train_length: int
) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for method, found in losses.items():
        for (measure, length), seeds in found.items():
            table = tables.setdefault(measure, {"targets": seeds[0].targets, "documents": 0, "cells": []})
            table["documents"] = len(set(seeds[0].documents.tolist()))
            mean = bootstrap_mean(_mean_nats(seeds), seeds[0].counts, seeds[0].documents)
            _, spread = mean_and_spread([loss.perplexity for loss in seeds])
            table["cells"].append(
                {
                    "method": method,
                    "length": length,
                    "value": safe_exp(mean.value),
                    **{name: None if end is None else safe_exp(end) for name, end in mean.ends().items()},
                    "spread": spread,
                    "in_range": length <= train_length,
                }
            )
    return tables


def _ranking(perplexity: Mapping[str, Any], methods: list[str]) -> list[str]:
    """Best first, by perplexity at the longest length, of the windows where they were measured."""
    if not perplexity:
        return methods
    cells = perplexity.get("windows", next(iter(perplexity.values())))["cells"]
    longest = max(cell["length"] for cell in cells)
    value = {cell["method"]: cell["value"] for cell in cells if cell["length"] == longest}
    return sorted(methods, key=lambda method: (value.get(method, float("inf")), methods.index(method)))


def _positions(by_method: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    rows = []
    for method, runs in by_method.items():
        groups = zip(*(run.get("positions", []) for run in runs), strict=True)
        for bins in groups:
            mean = float(np.mean([entry["mean"] for entry in bins]))
            rows.append({"method": method, **{k: bins[0][k] for k in ("low", "high", "targets")}, "mean": mean})
    return rows


def _passkey(
    by_method: Mapping[str, Sequence[Mapping[str, Any]]], train_length: int | None, chance: tuple[float, float]
) -> dict[str, Any] | None:
    cells = []
    prompts = 0
    for method, runs in by_method.items():
        for entries in zip(*(run.get("passkey") or [] for run in runs), strict=True):
            hits = sum(sum(entry["hits"]) for entry in entries)
            trials = sum(entry["prompts"] for entry in entries)
            share = wilson_interval(hits, trials)
            exact, spread = mean_and_spread([entry["exact"] for entry in entries])
            prompts = entries[0]["prompts"]
            cells.append(
                {
                    "method": method,
                    "length": entries[0]["length"],
                    "exact": exact,
                    "low": share.low,
                    "high": share.high,
                    "spread": spread,
                    "token": float(np.mean([entry["token"] for entry in entries])),
                    "in_range": train_length is not None and entries[0]["asked"] <= train_length,
                }
            )
    if not cells:
        return None
    return {
        "chance_token": chance[0],
        "chance_exact": chance[1],
        "prompts": prompts,
        "train_length": train_length,
        "cells": cells,
    }


def _pairs(
    losses: Mapping[str, Mapping[tuple[str, int], Sequence[LengthLoss]]], order: Sequence[str]
) -> list[dict[str, Any]]:
    rows = []
    for a, b in itertools.combinations(order, 2):
        for key in losses[a]:
            if key not in losses[b]:
                continue
            first, second = losses[a][key], losses[b][key]
            gap = paired_difference(_mean_nats(first), _mean_nats(second), first[0].counts, first[0].documents)
            rows.append(
                {
                    "measure": key[0],
                    "length": key[1],
                    "a": a,
                    "b": b,
                    "difference": gap.value,
                    **gap.ends(),
                }
            )
    return rows
