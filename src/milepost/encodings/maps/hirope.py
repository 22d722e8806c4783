"""HiRoPE: slow rotary pairs count a higher level of the text, such as lines or functions."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from milepost.encoding import Encoding, EncodingConfig, register
from milepost.encodings.absolute.common import of_queries
from milepost.encodings.rotary import Layout, rotate
from milepost.encodings.separators import NEWLINE, segments
from milepost.positions import Positions
from milepost.terms import Branch, Terms

LevelName = Literal["lines", "blank-lines", "functions"]
Decode = Callable[[Sequence[int]], list[str]]
"""Token ids -> the text of each token."""


def bytes_text(ids: Sequence[int]) -> list[str]:
    """The text of byte tokens; an id above 255 is no text."""
    return [chr(i) if 0 <= i < 256 else "" for i in ids]


def line_levels(tokens: Tensor, positions: Positions, newline: tuple[int, ...]) -> Tensor:
    """``(B, K)``: how many newlines came before each token."""
    return segments(tokens, positions, newline)[0]


def blank_line_levels(tokens: Tensor, positions: Positions, newline: tuple[int, ...]) -> Tensor:
    """``(B, K)``: how many empty lines came before each token."""
    line, place = segments(tokens, positions, newline)
    ends = torch.zeros_like(tokens, dtype=torch.bool)
    for ident in newline:
        ends = ends | (tokens == ident)
    if positions.key_present is not None:
        ends = ends & positions.key_present
    blank = (ends & (place == 0) & (line > 0)).long()
    count = blank.cumsum(-1) - blank
    return count - _at_document_start(count, positions)


def function_levels(tokens: Tensor, positions: Positions, decode: Decode = bytes_text) -> Tensor:
    """``(B, K)``: how many Python functions and classes began in the lines before each token, found by ``ast``.

    Read on the host, row by row. The level of a token depends on earlier tokens only, as decoding demands: a header
    counts from the line after it, once the text up to it, with ``pass`` for its body, parses.
    """
    rows = []
    present = positions.key_present
    document = positions.key_document
    for row, ids in enumerate(tokens.tolist()):
        slots = list(range(len(ids)))
        if present is not None:
            kept = present[min(row, present.shape[0] - 1)].tolist()
            slots = [slot for slot in slots if kept[slot]]
        which = [0] * len(ids) if document is None else document[min(row, document.shape[0] - 1)].tolist()
        level = [0] * len(ids)
        for name in dict.fromkeys(which[slot] for slot in slots):
            mine = [slot for slot in slots if which[slot] == name]
            for slot, value in zip(mine, python_levels(decode([ids[s] for s in mine])), strict=True):
                level[slot] = value
        rows.append(level)
    return torch.tensor(rows, dtype=torch.int64, device=tokens.device).view(tokens.shape)


_HEADER = re.compile(r"[ \t]*(async[ \t]+def|def|class)\b")


def python_levels(pieces: Sequence[str]) -> list[int]:
    """For each piece of a source text: how many functions and classes began in the lines before the piece's own."""
    text = "".join(pieces)
    lines = text.split("\n")
    begun = [0]  # begun[i]: headers complete before line i
    header = -1
    for number, line in enumerate(lines[:-1]):
        if header < 0 and _HEADER.match(line):
            header = number
        found = 0
        if header >= 0:
            state = _begins(lines, header, number)
            found = int(state is True)
            if state is not None:
                header = -1
        begun.append(begun[-1] + found)
    levels, number = [], 0
    for piece in pieces:
        levels.append(begun[number])
        number += piece.count("\n")
    return levels


def _begins(lines: list[str], header: int, number: int) -> bool | None:
    """Whether lines ``header .. number`` are the head of a definition; None when more lines may complete it."""
    indent = lines[header][: len(lines[header]) - len(lines[header].lstrip())]
    body = f"{indent} pass"
    try:
        tree = ast.parse("\n".join([*lines[: number + 1], body]))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        whole = "\n".join(lines[header : number + 1])
        opened = sum(whole.count(c) for c in "([{") - sum(whole.count(c) for c in ")]}")
        return None if opened > 0 and number - header < 200 else _one_liner(lines, header, number)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.lineno == header + 1:
            return True
    return False


def _one_liner(lines: list[str], header: int, number: int) -> bool:
    """``def f(): return 1`` has its body in the line itself."""
    try:
        tree = ast.parse("\n".join(lines[: number + 1]))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return any(isinstance(node, kinds) and node.lineno == header + 1 for node in ast.walk(tree))


def _at_document_start(count: Tensor, positions: Positions) -> Tensor:
    """The value of a count that never falls, at the first slot of each slot's document."""
    if positions.key_document is None:
        return torch.zeros_like(count)
    document = positions.key_document.expand_as(count)
    first = torch.zeros_like(count, dtype=torch.bool)
    first[:, 1:] = document[:, 1:] != document[:, :-1]
    return torch.where(first, count, 0).cummax(-1).values


@dataclass(frozen=True, kw_only=True)
class HiRoPEConfig(EncodingConfig):
    """Options of :class:`HiRoPE`.

    Attributes:
        head_dim: width of one head.
        levels: what the higher level counts: ``lines``, ``blank-lines`` (paragraphs), or Python ``functions``.
        split: fraction of the pairs, the fast ones, that keep the token's position.
        window: keys nearer than this, in tokens, are compared by plain RoPE; 0 = none; None = a quarter of
            ``trained_length``, or 512 where that is not known.
        newline: token ids that end a line; default: a byte tokenizer's.
        base: rope_theta. layout: which channels form a pair.
    """

    head_dim: int
    levels: LevelName = "lines"
    split: float = 0.5
    window: int | None = None
    trained_length: int | None = None
    newline: tuple[int, ...] = (NEWLINE,)
    base: float = 10000.0
    layout: Layout = "half"

    def __post_init__(self) -> None:
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim is even and positive; got {self.head_dim}")
        if not 0 <= self.split <= 1 or (self.window is not None and self.window < 0):
            raise ValueError(f"split lies in 0 .. 1 and window is not negative; got {self.split} and {self.window}")
        if self.levels not in ("lines", "blank-lines", "functions"):
            raise ValueError(f"levels is 'lines', 'blank-lines' or 'functions'; got {self.levels!r}")

    @property
    def near(self) -> int:
        """The window in use."""
        if self.window is not None:
            return self.window
        return 512 if self.trained_length is None else max(1, self.trained_length // 4)


@register(
    "hirope",
    title="HiRoPE",
    family="map",
    manifestation="position map",
    learnable=False,
    integration="multiply",
    injection="every",
    source="Zhang et al. 2024 (arXiv 2403.19115); the formula is this library's reading",
    summary="Slow rotary pairs count lines, paragraphs or functions instead of tokens; near keys see plain RoPE.",
)
class HiRoPE(Encoding):
    """Hierarchical RoPE: fast pairs at the token's position, slow pairs at the count of a higher level.

    Pairs ``p < split * P`` turn by ``t * base^(-2p/d)``, the others by ``level(t) * base^(-2p/d)``; a key nearer than
    ``window`` is compared by plain RoPE in all pairs. Two branches under one softmax, so a cache holds raw keys.

    Shapes: one or two :class:`~milepost.terms.Branch`; angles in float32. Needs the token ids of all keys. Levels are a
    pure function of earlier tokens. For ``functions`` with another tokenizer than bytes, set ``decode`` on the object.
    Raises ValueError without token ids, for options out of range, and for ``functions`` under ``torch.compile``.
    Source: Zhang et al. 2024 (arXiv 2403.19115). No code is published; that the dimensions are split between levels and
    that a window keeps plain RoPE is in the paper, the split by speed and the providers of levels are our reading.
    """

    Config = HiRoPEConfig
    config: HiRoPEConfig
    needs_tokens = True
    decode: Decode = staticmethod(bytes_text)

    def levels(self, positions: Positions, tokens: Tensor | None) -> Tensor:
        """``(B, K)`` int64: the higher level's count at every key."""
        if tokens is None:
            raise ValueError("hirope reads the structure of the text: give it the token ids of all keys")
        if self.config.levels == "lines":
            return line_levels(tokens, positions, self.config.newline)
        if self.config.levels == "blank-lines":
            return blank_line_levels(tokens, positions, self.config.newline)
        if torch.compiler.is_compiling():
            raise ValueError("levels='functions' parses text on the host and cannot be compiled; use levels='lines'")
        return function_levels(tokens, positions, self.decode)

    def terms(self, positions: Positions, tokens: Tensor | None = None) -> Terms:
        options = self.config
        pairs = options.head_dim // 2
        index = torch.arange(pairs, device=positions.device)
        inv_freq = options.base ** -(index.double() / pairs)
        fast = index < round(options.split * pairs)
        level = self.levels(positions, tokens)

        def plain(at: Tensor) -> Tensor:
            return (at[..., None].double() * inv_freq).float()

        def mixed(at: Tensor, level: Tensor) -> Tensor:
            return (torch.where(fast, at[..., None], level[..., None]).double() * inv_freq).float()

        def branch(at_queries: Tensor, at_keys: Tensor, near: int | None, far: int | None) -> Branch:
            return Branch(
                query=lambda q: rotate(q, at_queries, options.layout),
                key=lambda k, at: rotate(k, at_keys if at == "keys" else at_queries, options.layout),
                near=near,
                far=far,
            )

        query, key = positions.query, positions.key
        distant = (mixed(query, of_queries(level, positions)), mixed(key, level))
        if options.near == 0:
            return Terms(branches=(branch(*distant, None, None),))
        near = branch(plain(query), plain(key), None, options.near)
        return Terms(branches=(near, branch(*distant, options.near, None)), rotated_keys_cacheable=False)
