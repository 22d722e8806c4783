"""A worker that computes nothing: results by formula, failures and pauses by method name. For tests of the sweep."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from milepost.evaluate import LengthLoss, PasskeyResult
from milepost.sweep import Reporter, worker_main


def write_text(folder: Path) -> str:
    """A folder with 24 documents of about 600 bytes; the same for every caller."""
    generator = random.Random(0)
    words = ["the", "road", "was", "long", "and", "stones", "stood", "beside", "it", "every", "mile"]
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(24):
        (folder / f"{number:02}.txt").write_text(" ".join(generator.choice(words) for _ in range(120)))
    return str(folder)


def environment() -> dict[str, str]:
    """The environment of a process that imports what this one does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def perform(job: dict[str, Any], work: Path, out: Path, report: Reporter) -> dict[str, Any]:
    method, seed, settings = job["method"], job["seed"], job["settings"]
    attempts = work / "attempts"
    attempts.write_text(str(int(attempts.read_text() if attempts.exists() else 0) + 1))
    report(0.5, "pretending", loss=1.0)
    if method == "nope":
        raise ValueError("the loss became nan at step 3")
    if method == "learned":
        raise OSError(errno.ENOSPC, "No space left on device", str(out / "model"))
    if method == "sinusoidal":
        time.sleep(600)
    (out / "model.bin").write_bytes(hashlib.sha256(f"{method}{seed}".encode()).digest() * 100)
    return result_of(method, seed, settings)


def result_of(method: str, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """A complete result whose numbers depend on the method, the seed and nothing else."""
    base = 1.0 + int(hashlib.sha256(method.encode()).hexdigest()[:4], 16) / 65536 + 0.01 * seed
    documents = np.arange(settings["regions"])
    perplexity = []
    for measure in settings["measures"]:
        counts = np.full(len(documents), max(settings["test_lengths"]) if measure == "windows" else 8)
        for step, length in enumerate(settings["test_lengths"]):
            nats = counts * (base + 0.05 * step * (method == "rope") + 0.01 * np.sin(documents + length))
            perplexity.append(LengthLoss(measure, length, nats, counts, documents).to_dict())
    passkey = [
        PasskeyResult(length, length, 4, 0.5, 0.5, (0.1, 0.3, 0.6, 0.9), (True, True, False, False)).to_dict()
        for length in settings["passkey_test_lengths"]
    ]
    return {
        "method": method,
        "seed": seed,
        "parameters": 1000,
        "encoding_parameters": 0,
        "train_losses": [2.0, 1.0],
        "perplexity": perplexity,
        "positions": [
            {"low": 1, "high": 9, "targets": 8, "mean": base},
            {"low": 9, "high": 33, "targets": 9, "mean": base},
        ],
        "passkey": passkey if settings["passkey"] else None,
        "curves": None,
        "timing": {"train_tokens_per_second": 1000.0, "run_seconds": time.time()},
    }


if __name__ == "__main__":
    sys.exit(worker_main(perform))
