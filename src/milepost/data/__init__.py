"""Text as token arrays: corpora, evaluation windows, training batches and passkey prompts.

    corpus = load_corpus("prose")                                     # or "code", a path, a Hugging Face name
    regions = corpus.test.regions(size=4096, count=24)                # the same held-out text for every length
    windows = nonoverlapping(regions, length=128)                     # each target counted exactly once
    inputs, targets, counted = windows.gather(corpus.test, slice(0, 8))
    dataset = WindowDataset(corpus.train, ConstantLength(128), items=steps * batch_size, seed=0)

`load_corpus` reads documents, splits them by the hash of their names, tokenises them once and maps the copy from disk.
`nonoverlapping`, `last_targets` and `sliding` say which targets a window counts. `WindowDataset` and `PasskeyDataset`
are map-style: item i is a pure function of (seed, i), so a resumed training sees what an undisturbed one saw.

Importing this package imports numpy only; torch is imported with `WindowDataset` and `PasskeyDataset`, transformers
when a tokenizer is built, datasets and pyarrow when such a source is named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from milepost.data.batches import ConstantLength, Curriculum, LengthPlan, MixedLengths, Stage, window_starts
from milepost.data.corpus import CORPORA, Corpus, Document, Split, load_corpus
from milepost.data.errors import DataError, FillError
from milepost.data.passkey import PasskeyPrompt, PasskeyTask, splice
from milepost.data.positions import PoSEPositions, PositionDraw, RandomizedPositions
from milepost.data.tokens import EOS_ID, PAD_ID, VOCAB_SIZE, byte_tokenizer, decode_bytes, encode_bytes
from milepost.data.windows import Regions, Windows, last_targets, nonoverlapping, select_regions, sliding

if TYPE_CHECKING:
    from milepost.data.dataset import PasskeyDataset, WindowDataset, collate

__all__ = [
    "CORPORA",
    "EOS_ID",
    "PAD_ID",
    "VOCAB_SIZE",
    "ConstantLength",
    "Corpus",
    "Curriculum",
    "DataError",
    "Document",
    "FillError",
    "LengthPlan",
    "MixedLengths",
    "PasskeyDataset",
    "PasskeyPrompt",
    "PasskeyTask",
    "PoSEPositions",
    "PositionDraw",
    "RandomizedPositions",
    "Regions",
    "Split",
    "Stage",
    "WindowDataset",
    "Windows",
    "byte_tokenizer",
    "collate",
    "decode_bytes",
    "encode_bytes",
    "last_targets",
    "load_corpus",
    "nonoverlapping",
    "select_regions",
    "sliding",
    "splice",
    "window_starts",
]

_NEEDS_TORCH = ("PasskeyDataset", "WindowDataset", "collate")


def __getattr__(name: str) -> Any:
    if name in _NEEDS_TORCH:
        from milepost.data import dataset

        return getattr(dataset, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
