"""Rules of the design that hold for every encoding and every file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from milepost import Positions
from milepost.encoding import from_spec, names

SOURCE = Path(__file__).parents[1] / "src" / "milepost"
GEOMETRY = {
    "num_heads": 4, "head_dim": 16, "width": 64, "num_layers": 4, "vocab_size": 64, "trained_length": 128,
}  # fmt: skip


@pytest.mark.parametrize("name", names())
def test_parameters_are_never_scalars_and_constants_are_never_buffers(name: str) -> None:
    """FSDP2 refuses scalars; buffers filled at construction come back as garbage from a meta device."""
    encoding = from_spec(name, GEOMETRY)
    assert all(parameter.dim() > 0 for parameter in encoding.parameters())
    assert not list(encoding.buffers())


@pytest.mark.parametrize("name", names())
def test_a_forward_pass_leaves_nothing_behind(name: str) -> None:
    """No tensor is cached on the module: the same attributes before and after, and nothing the size of L x L."""
    encoding = from_spec(name, GEOMETRY).eval().for_layer(0)
    before = {id(module): set(module.__dict__) for module in encoding.modules()}
    tokens = torch.zeros(1, 40, dtype=torch.long)
    positions = Positions.full(40)
    if encoding.axes == 1:
        encoding(positions, tokens)
        encoding.embed(torch.zeros(1, 40, 64), positions, tokens)
    for module in encoding.modules():
        assert set(module.__dict__) == before[id(module)]
        kept = [value for value in module.__dict__.values() if isinstance(value, torch.Tensor)]
        assert all(tensor.numel() < 40 * 40 for tensor in kept)


def test_no_module_level_caches() -> None:
    """No functools cache, and no module-level container of tensors that a function fills."""
    found = []
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            names = [getattr(d, "id", getattr(d, "attr", "")) for d in getattr(node, "decorator_list", [])]
            names += [getattr(d.func, "id", getattr(d.func, "attr", "")) for d in getattr(node, "decorator_list", [])
                      if isinstance(d, ast.Call)]  # fmt: skip
            if {"cache", "lru_cache"} & set(names) and not str(path).endswith("attention/library.py"):
                found.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert not found
