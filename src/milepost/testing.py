"""Invariance checks of an encoding, for this library's tests and for encodings of your own.

    report = check_encoding(MyEncoding(num_heads=4), num_heads=4, head_dim=16)
    print(report)
    report.raise_if_failed()
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from milepost.attention import BACKENDS, attend, explain
from milepost.encoding import Encoding
from milepost.positions import Positions
from milepost.terms import DenseBias, DistanceBias, Terms

Status = Literal["ok", "failed", "refused", "not applicable"]


@dataclass(frozen=True)
class Check:
    """One row of a report: what was tried, the largest error against the tolerance, or why it was not tried."""

    name: str
    status: Status
    error: float | None = None
    tolerance: float | None = None
    note: str = ""

    def __str__(self) -> str:
        measured = "" if self.error is None else f"largest error {self.error:.1e}, allowed {self.tolerance:.0e}"
        return f"{self.status:<14} {self.name:<34} {measured or self.note}"


@dataclass(frozen=True)
class Report:
    """All checks of one encoding; prints as a table."""

    encoding: str
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.status != "failed" for check in self.checks)

    @property
    def refused(self) -> dict[str, str]:
        """Check -> the reason the encoding gave for not doing it."""
        return {check.name: check.note for check in self.checks if check.status == "refused"}

    def __getitem__(self, name: str) -> Check:
        return next(check for check in self.checks if check.name == name)

    def __str__(self) -> str:
        return "\n".join([self.encoding, *(f"  {check}" for check in self.checks)])

    def raise_if_failed(self) -> None:
        """Raises AssertionError with the whole report if a check failed."""
        if not self.ok:
            raise AssertionError(str(self))


class AttentionLayer:
    """One attention layer with fixed random projections: the bench on which an encoding is tried."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, width: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim

        def weight(heads: int) -> Tensor:
            return torch.randn(width, heads * head_dim, generator=generator, dtype=torch.float64) / width**0.5

        self.wq, self.wk, self.wv = weight(num_heads), weight(num_kv_heads), weight(num_kv_heads)

    def heads(self, x: Tensor, w: Tensor) -> Tensor:
        return (x @ w.to(x.dtype)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def run(
        self,
        encoding: Encoding,
        x: Tensor,
        tokens: Tensor,
        *,
        chunks: list[int] | None = None,
        positions: Callable[[int, int], Positions] | None = None,
        backend: str = "reference",
    ) -> Tensor:
        """Attention over ``x`` ``(B, T, width)``, fed in ``chunks`` through a cache. ``(B, H, T, head_dim)``.

        ``positions(stop, queries)`` gives the positions of a chunk; default: no padding, and a fixed total length.
        """
        total = x.shape[1]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs: list[Tensor] = []
        stop = 0
        for count in chunks or [total]:
            start, stop = stop, stop + count
            if positions is None:
                here = replace(Positions.full(stop, queries=count), length=torch.full((1,), total))
            else:
                here = positions(stop, count)
            seen = tokens[:, :stop]
            embedded = encoding.embed(x[:, start:stop], here, seen)
            terms = encoding(here, seen)
            q, k, v = (self.heads(embedded, w) for w in (self.wq, self.wk, self.wv))
            k, v = terms.prepare(k, v)
            keys.append(k)
            values.append(v)
            outputs.append(
                attend(
                    q,
                    torch.cat(keys, 2),
                    torch.cat(values, 2),
                    here,
                    terms,
                    backend=backend,
                    prepared=terms.rotated_keys_cacheable,
                )
            )
        return torch.cat(outputs, 2)


def check_encoding(
    encoding: Encoding,
    *,
    num_heads: int = 4,
    num_kv_heads: int | None = None,
    head_dim: int = 16,
    width: int | None = None,
    vocab_size: int = 64,
    length: int = 37,
    tolerance: float = 2e-5,
    seed: int = 0,
) -> Report:
    """Try everything attention can meet, against a float64 reference of the same encoding.

    Tried: one full pass, token-by-token and chunked decoding with a cache, left and right padding, packed documents,
    query offset, grouped queries, bidirectional attention, bfloat16 inputs, autocast, a model cast to half precision,
    gradients, every backend that does not refuse, and that no number of size L x L is kept where a line suffices.

    Args:
        encoding: the encoding, built for ``num_heads`` heads of ``head_dim`` and embeddings of ``width``.
        num_kv_heads: for the grouped-query check (default: half of the heads).
        width: of the embeddings (default: ``num_heads * head_dim``).
        vocab_size: token ids are drawn below it.
        length: of the sequences tried.
        tolerance: absolute, for float32 against float64 on outputs of size 1.

    Returns:
        A :class:`Report`. An encoding that cannot do something says so by raising ValueError, which is reported as
        refused, not as failed.
    """
    generator = torch.Generator().manual_seed(seed)
    width = width or num_heads * head_dim
    kv = num_kv_heads or max(1, num_heads // 2)
    was_training = encoding.training
    encoding.eval()
    double = copy.deepcopy(encoding).double()
    x = torch.randn(2, length, width, generator=generator, dtype=torch.float64)
    tokens = torch.randint(vocab_size, (2, length), generator=generator)
    layer = AttentionLayer(num_heads, num_heads, head_dim, width, seed)
    axes = encoding.axes
    checks: list[Check] = []

    def on_axes(positions: Positions) -> Positions:
        return positions if axes == 1 else on_grid(positions, axes)

    def plain(stop: int, queries: int, total: int = length) -> Positions:
        return on_axes(replace(Positions.full(stop, queries=queries), length=torch.full((1,), total)))

    def add(name: str, check: Callable[[], tuple[Tensor, Tensor]], allowed: float = tolerance) -> None:
        try:
            got, wanted = check()
        except ValueError as refusal:
            checks.append(Check(name, "refused", note=str(refusal)))
            return
        if got.shape != wanted.shape:
            note = f"shape {tuple(got.shape)} instead of {tuple(wanted.shape)}"
            checks.append(Check(name, "failed", note=note))
            return
        error = float((got.double() - wanted.double()).abs().max()) if got.numel() else 0.0
        checks.append(Check(name, "ok" if error <= allowed else "failed", error, allowed))

    with torch.no_grad():
        full = layer.run(double, x, tokens, positions=plain)
        x32 = x.float()

        for name in (*BACKENDS, "auto"):
            here = plain(length, length)
            embedded = encoding.embed(x32, here, tokens)
            terms = encoding(here, tokens)
            q, k, v = (layer.heads(embedded, w) for w in (layer.wq, layer.wk, layer.wv))
            refusal = None if name == "auto" else _refusal(name, q, k, v, here, terms)
            if refusal is not None:
                checks.append(Check(f"backend {name}", "not applicable", note=refusal))
                continue

            def served(name: str = name) -> tuple[Tensor, Tensor]:
                return layer.run(encoding, x32, tokens, positions=plain, backend=name), full

            add(f"backend {name}", served)

        def decode(chunks: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
            which = double if dtype == torch.float64 else encoding
            return layer.run(which, x.to(dtype), tokens, chunks=chunks, positions=plain, backend="auto")

        add("token by token with a cache", lambda: (decode([1] * length), full))
        add("chunked prefill", lambda: (decode([length // 3, length // 3, length - 2 * (length // 3)]), full))
        add("prefill, then steps", lambda: (decode([length - 3, 1, 1, 1]), full))
        half = length // 2
        add("query offset", lambda: (_last_rows(layer, encoding, x32, tokens, plain, half), full[:, :, half:]))

        pad = 5
        padding = torch.zeros(2, pad, width)
        junk = torch.randint(vocab_size, (2, pad), generator=generator)
        mask = torch.ones(2, pad + length, dtype=torch.long)

        def padded(side: str) -> Tensor:
            first = side == "left"
            rows = torch.cat([padding + 3.0, x32] if first else [x32, padding + 3.0], 1)
            ids = torch.cat([junk, tokens] if first else [tokens, junk], 1)
            seen = mask.clone()
            seen[:, :pad] = 0 if first else 1
            if not first:
                seen[:, length:] = 0

            def positions(stop: int, queries: int) -> Positions:
                return on_axes(Positions.from_mask(seen[:, :stop], side=side, queries=queries))

            out = layer.run(encoding, rows, ids, positions=positions, backend="auto")
            return out[:, :, pad:] if first else out[:, :, :length]

        add("left padding", lambda: (padded("left"), full))
        add("right padding", lambda: (padded("right"), full))
        add("padding of unknown side", lambda: (_holes(layer, encoding, x32, tokens, padding, junk, on_axes), full))

        lengths = [length // 3, length // 2, length - length // 3 - length // 2]

        def packed() -> tuple[Tensor, Tensor]:
            here = on_axes(Positions.packed(lengths))
            got = layer.run(encoding, x32, tokens, positions=lambda stop, queries: here, backend="auto")

            def alone(stop: int, queries: int) -> Positions:
                return replace(plain(stop, queries), length=here.length)

            apart, at = [], 0
            for n in lengths:
                part = slice(at, at + n)
                apart.append(layer.run(double, x[:, part], tokens[:, part], positions=alone))
                at += n
            return got, torch.cat(apart, 2)

        add("packed documents", packed)

        grouped = AttentionLayer(num_heads, kv, head_dim, width, seed)
        add(
            "grouped queries",
            lambda: (
                grouped.run(encoding, x32, tokens, positions=plain, backend="auto"),
                grouped.run(double, x, tokens, positions=plain),
            ),
        )

        def both_ways() -> tuple[Tensor, Tensor]:
            here = on_axes(Positions.full(length, causal=False))
            return (
                layer.run(encoding, x32, tokens, positions=lambda s, q: here, backend="auto"),
                layer.run(double, x, tokens, positions=lambda s, q: here),
            )

        add("bidirectional", both_ways)

        def low(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            rounded = x.to(dtype)
            got = layer.run(encoding, rounded, tokens, positions=plain, backend="auto")
            return got, layer.run(double, rounded.double(), tokens, positions=plain)

        add("bfloat16 inputs", lambda: low(torch.bfloat16), 6e-2)

        cast = copy.deepcopy(encoding).to(torch.bfloat16)
        add("model cast to bfloat16", lambda: _same_terms(encoding, cast, plain(length, length), tokens), 0.0)
        cast = copy.deepcopy(encoding).half()
        add("model cast to float16", lambda: _same_terms(encoding, cast, plain(length, length), tokens), 0.0)

        def under_autocast() -> tuple[Tensor, Tensor]:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return _same_terms(encoding, encoding, plain(length, length), tokens, outside=True)

        add("autocast", under_autocast, 0.0)

    add("gradients", lambda: _gradients(layer, encoding, double, x, tokens, plain), 2e-3)
    checks.append(_lean(encoding, plain(length, length), tokens))
    encoding.train(was_training)
    return Report(encoding.name, tuple(checks))


def on_grid(positions: Positions, axes: int, width: int = 5) -> Positions:
    """The same slots at coordinates of a row-major grid: position p stands at (…, p // width, p % width)."""

    def spread(at: Tensor) -> Tensor:
        coordinates = []
        for _ in range(axes - 1):
            coordinates.append(at % width)
            at = at // width
        return torch.stack([at, *reversed(coordinates)], dim=-1)

    return positions.mapped(spread(positions.query), spread(positions.key))


def _refusal(name: str, q: Tensor, k: Tensor, v: Tensor, positions: Positions, terms: Terms) -> str | None:
    reason = explain(q, k, v, positions, terms).reasons[name]
    return None if reason == "chosen" or reason.startswith("would serve") else reason


def _last_rows(
    layer: AttentionLayer,
    encoding: Encoding,
    x: Tensor,
    tokens: Tensor,
    plain: Callable[[int, int], Positions],
    start: int,
) -> Tensor:
    """Only the last queries, all keys given at once as raw keys."""
    total = x.shape[1]
    everywhere = plain(total, total)
    embedded = encoding.embed(x, everywhere, tokens)
    here = plain(total, total - start)
    q = layer.heads(embedded[:, start:], layer.wq)
    k, v = layer.heads(embedded, layer.wk), layer.heads(embedded, layer.wv)
    return attend(q, k, v, here, encoding(here, tokens))


def _holes(
    layer: AttentionLayer,
    encoding: Encoding,
    x: Tensor,
    tokens: Tensor,
    padding: Tensor,
    junk: Tensor,
    on_axes: Callable[[Positions], Positions],
) -> Tensor:
    """Padding in the middle of a row, of which the positions know nothing but the mask."""
    cut, pad, total = x.shape[1] // 2, padding.shape[1], x.shape[1]
    rows = torch.cat([x[:, :cut], padding + 3.0, x[:, cut:]], 1)
    ids = torch.cat([tokens[:, :cut], junk, tokens[:, cut:]], 1)
    mask = torch.ones(2, total + pad, dtype=torch.long)
    mask[:, cut : cut + pad] = 0
    here = on_axes(Positions.from_mask(mask))
    out = layer.run(encoding, rows, ids, positions=lambda stop, queries: here, backend="auto")
    return torch.cat([out[:, :, :cut], out[:, :, cut + pad :]], 2)


def _same_terms(
    a: Encoding, b: Encoding, positions: Positions, tokens: Tensor, *, outside: bool = False
) -> tuple[Tensor, Tensor]:
    """The numbers that two encodings put into attention, as one vector each; ``outside`` takes a's free of autocast."""

    def numbers(encoding: Encoding) -> Tensor:
        terms = encoding(positions, tokens)
        probe = torch.linspace(-1, 1, positions.num_keys * 64).view(1, 1, -1, 64).expand(len(tokens), -1, -1, -1)
        parts = [probe.new_zeros(1)]
        with torch.autocast("cpu", enabled=False):
            if terms.bias is not None:
                parts.append(terms.bias.dense().flatten())
            for branch in terms.branches:
                width = getattr(encoding.config, "head_dim", None) or 64
                if branch.key is not None:
                    parts.append(branch.key(probe[..., :width], at="keys").flatten())
        return torch.cat([part.float() for part in parts])

    if not outside:
        return numbers(b), numbers(a)
    inside = numbers(b)
    with torch.autocast("cpu", enabled=False):
        return inside, numbers(a)


def _gradients(
    layer: AttentionLayer,
    encoding: Encoding,
    double: Encoding,
    x: Tensor,
    tokens: Tensor,
    plain: Callable[[int, int], Positions],
) -> tuple[Tensor, Tensor]:
    """Gradients of the input and of every parameter, fast path against float64: each relative to its largest entry, or
    to a hundredth of the largest of all (one that ought to vanish is noise)."""

    def gradients(which: Encoding, rows: Tensor, backend: str) -> Tensor:
        rows = rows.clone().requires_grad_()
        parameters = [p for p in which.parameters() if p.requires_grad]
        out = layer.run(which, rows, tokens, positions=plain, backend=backend)
        probe = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out).sin()
        found = torch.autograd.grad((out * probe).sum(), [rows, *parameters], allow_unused=True)
        sizes = torch.stack([g.abs().max().double() for g in found if g is not None])
        sizes = torch.maximum(sizes, sizes.max() / 100).clamp(min=1e-3)
        flat = [g.flatten().double() for g in found if g is not None]
        return torch.cat([g / size for g, size in zip(flat, sizes, strict=True)])

    return gradients(encoding, x.float(), "auto"), gradients(double, x, "reference")


def _lean(encoding: Encoding, positions: Positions, tokens: Tensor) -> Check:
    """A bias of distance alone is held in one line per head."""
    bias = encoding(positions, tokens).bias
    if isinstance(bias, DenseBias):
        return Check("memory", "not applicable", note="keeps H x Q x K numbers: the bias has no smaller form")
    if isinstance(bias, DistanceBias):
        numbers = bias.table.untyped_storage().size() // bias.table.element_size()
        allowed = 8 * bias.table.shape[0] * positions.num_keys
        status: Status = "ok" if numbers <= allowed else "failed"
        return Check("memory", status, float(numbers), float(allowed))
    return Check("memory", "ok", 0.0, 0.0)

