from __future__ import annotations

import os

# Before torch, transformers and matplotlib are imported: no network, no display, one thread for each worker.
os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
    MPLBACKEND="Agg",
    OMP_NUM_THREADS="1",
)

import random
from collections.abc import Iterator

import hypothesis
import numpy
import pytest
import torch

torch.set_num_threads(1)

hypothesis.settings.register_profile(
    "default",
    deadline=None,
    max_examples=15,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("thorough", hypothesis.settings.get_profile("default"), max_examples=300)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """Each test starts from the same seeds, and leaves torch's global settings as it found them."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    dtype, threads, grad = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
    torch.set_grad_enabled(grad)
