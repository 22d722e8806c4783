"""Shared machinery for the stored vectors: one handler for each method, and a list of what has none.

A test file names its handlers in a module-level dict and runs them:

    VECTOR_HANDLERS = {"alibi_slopes": lambda inputs: alibi_slopes(inputs["num_heads"])}

    @pytest.mark.parametrize("vector", cases("vectors-a.json", VECTOR_HANDLERS), ids=vector_id)
    def test_vector(vector):
        check(vector, VECTOR_HANDLERS)

A handler takes a vector's ``inputs`` and returns what its ``expected`` holds, in float64 or in integers. A handler that
takes two arguments is given the whole vector as the second.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TESTS = Path(__file__).parent
TOLERANCE = 1e-9

Handlers = Mapping[str, Callable[..., Any]]


def load(file: str) -> list[dict[str, Any]]:
    """All vectors of a file in ``tests/data``."""
    return list(json.loads((TESTS / "data" / file).read_text())["vectors"])


def cases(file: str, handlers: Handlers) -> list[dict[str, Any]]:
    """The vectors of these handlers' methods. A handler whose method the file does not have is an error."""
    vectors = load(file)
    unknown = set(handlers) - {v["method"] for v in vectors}
    assert not unknown, f"{file} has no vectors of {sorted(unknown)}"
    return [v for v in vectors if v["method"] in handlers]


def vector_id(vector: dict[str, Any]) -> str:
    return str(vector["id"])


def distances(text: str) -> Tensor:
    """``"0..130"`` or ``"0,-1,..,-130"`` -> the integers from the first to the last."""
    first, last = int(text.replace(",", ".").split(".")[0]), int(text.replace(",", ".").split(".")[-1])
    return torch.arange(first, last + 1) if last >= first else torch.arange(first, last - 1, -1)


def check(vector: dict[str, Any], handlers: Handlers) -> None:
    """Run the vector's handler and compare: integers exactly, the rest to 1e-9 relative or absolute."""
    handler = handlers[vector["method"]]
    takes_vector = len(inspect.signature(handler).parameters) == 2
    found = handler(vector["inputs"], vector) if takes_vector else handler(vector["inputs"])
    compare(found, vector["expected"], vector["id"])


def compare(found: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict):
        assert set(found) == set(expected), f"{where}: {sorted(found)} instead of {sorted(expected)}"
        for key, value in expected.items():
            compare(found[key], value, f"{where}.{key}")
        return
    wanted = torch.tensor(_numbers(expected), dtype=torch.float64)
    tensor = found.detach() if isinstance(found, Tensor) else torch.tensor(found, dtype=torch.float64)
    if tensor.is_floating_point():
        assert tensor.dtype == torch.float64, f"{where}: vectors are compared in float64, found {tensor.dtype}"
    assert tensor.shape == wanted.shape, f"{where}: shape {tuple(tensor.shape)} instead of {tuple(wanted.shape)}"
    exact = _is_integer(expected)
    torch.testing.assert_close(
        tensor.double(),
        wanted,
        rtol=0.0 if exact else TOLERANCE,
        atol=0.0 if exact else TOLERANCE,
        msg=lambda text: f"{where}: {text}",
    )


def missing(file: str) -> list[str]:
    """Methods of a file for which no test module names a handler, in the order of the file."""
    handled: set[str] = set()
    for path in sorted(TESTS.rglob("test_*.py")):
        if "VECTOR_HANDLERS" in path.read_text(encoding="utf-8"):
            module = importlib.import_module(".".join(("tests", *path.relative_to(TESTS).with_suffix("").parts)))
            handled |= set(getattr(module, "VECTOR_HANDLERS", {}))
    return [m for m in dict.fromkeys(v["method"] for v in load(file)) if m not in handled]


def _numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_numbers(v) for v in value]
    return float(value)


def _is_integer(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_integer(v) for v in value)
    return isinstance(value, int)
