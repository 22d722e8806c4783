"""Pictures of encodings: what each does to attention, by distance and head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from milepost.attention import attend
from milepost.encoding import Encoding
from milepost.encodings.rotary import Rotary
from milepost.positions import Positions
from milepost.report.plots import draw_bias, short
from milepost.report.style import INK, PALETTE, figure_style, head_colors
from milepost.terms import Terms

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAMPLES_AT_ONCE = 16
Geometry = Mapping[str, Any]
"""num_heads, head_dim, width, num_layers, vocab_size, trained_length: what the encoding was built for."""


def distances_up_to(length: int, count: int = 96) -> list[int]:
    """Distances 0, 1, 2, ... length - 1, thinned to about `count` at equal ratios."""
    spaced = [round(math.exp(math.log(length) * step / count)) for step in range(count + 1)]
    return sorted({0, *range(1, min(8, length)), *(min(value, length - 1) for value in spaced)})


def bias_curves(encoding: Encoding, geometry: Geometry, *, length: int) -> dict[str, Any] | None:
    """What the encoding adds to attention by distance, seen from the last of `length` positions, as plain values.

    Returns {"kind": "bias" | "rotation" | "similarity", "distances": [n], "layers": [layers][heads][n]}:
    a bias in nats; the rotation's score of equal content (1 at distance 0); the cosine of two positions' embeddings.
    None where there is no such curve (NoPE, or what depends on content). One layer where all layers share one set.
    An encoding that refuses `length` is asked at its trained length.
    """
    trained = geometry.get("trained_length")
    try:
        return _curves(encoding, geometry, length)
    except ValueError:
        if not trained or trained >= length:
            raise
        return _curves(encoding, geometry, int(trained))


def _curves(encoding: Encoding, geometry: Geometry, length: int, tokens: Tensor | None = None) -> dict[str, Any] | None:
    """As `bias_curves`; with `tokens`, the rotations of encodings that read them too."""
    positions = Positions.full(length, queries=1, trained_length=geometry.get("trained_length"))
    distances = distances_up_to(length)
    layers: list[Any] = []
    kind = ""
    with torch.no_grad():
        for layer in range(int(geometry.get("num_layers") or 1)):
            part = encoding.for_layer(layer)
            terms = _terms(part, positions, tokens)
            if terms is None or (part.needs_tokens and terms.bias is not None):
                return None
            if terms.bias is not None:
                found, values = "bias", _bias_by_distance(terms)
            elif _rotates(terms, int(geometry["head_dim"]), positions):
                found, values = "rotation", _rotation_by_distance(terms, int(geometry["head_dim"]), positions)
            elif terms.is_empty():
                similarity = _similarity_by_distance(part, int(geometry["width"]), length)
                if similarity is None:
                    continue
                found, values = "similarity", similarity
            else:
                return None
            if kind and found != kind:
                return None
            kind = found
            layers.append([[_json_number(float(head[d])) for d in distances] for head in values])
    if not kind:
        return None
    if all(layer == layers[0] for layer in layers):
        layers = layers[:1]
    return {"kind": kind, "distances": distances, "layers": layers}


def attention_by_distance(encoding: Encoding, geometry: Geometry, *, length: int, samples: int = 256) -> Tensor:
    """Mean attention of the last query by distance, over random content: (heads, length) float32.

    Serves every encoding, content-dependent ones too. Queries and keys are normal; the same seed is used for all.
    """
    heads, dim, width = int(geometry["num_heads"]), int(geometry["head_dim"]), int(geometry["width"])
    generator = torch.Generator().manual_seed(0)
    positions = Positions.full(length, queries=1, trained_length=geometry.get("trained_length"))
    everywhere = Positions.full(length, trained_length=geometry.get("trained_length"))
    tokens = _text(length)
    total = torch.zeros(heads, length)
    with torch.no_grad():
        part = encoding.for_layer(0)
        terms = part(positions, tokens if part.needs_tokens else None)
        plain = replace(terms, value=None, output=None, weights=_without_addition(terms))
        embedded = encoding.embed(torch.zeros(1, length, width), everywhere, tokens) if width == heads * dim else None
        if terms.is_empty() and (embedded is None or not bool(embedded.any())):
            return torch.full((heads, length), 1.0 / length)
        for begin in range(0, samples, SAMPLES_AT_ONCE):
            count = min(SAMPLES_AT_ONCE, samples - begin)
            q = torch.randn(count, heads, 1, dim, generator=generator)
            k = torch.randn(count, heads, length, dim, generator=generator)
            if embedded is not None and bool(embedded.any()):
                x = (
                    embedded.view(1, length, heads, dim).transpose(1, 2)
                    * math.sqrt(dim)
                    / embedded.norm()
                    * math.sqrt(length)
                )
                q, k = q + x[:, :, -1:], k + x
            v = torch.eye(length).expand(count, heads, length, length)  # attention of the identity: the weights
            total += attend(q, k, v, positions, plain)[:, :, 0].sum(0)
    return (total / samples).flip(-1)


def _text(length: int) -> Tensor:
    """(1, length): bytes of sentences of 32 tokens, four to a line, for encodings that read tokens."""
    sentence = torch.full((32,), ord("a"))
    line = sentence.repeat(4)
    line[31::32] = ord(".")
    line[-1] = ord("\n")
    return line.repeat(length // 128 + 1)[:length][None]


def _without_addition(terms: Terms) -> Any:
    """What an encoding does to the weights, without what it adds to the values."""
    weights = terms.weights
    if weights is None:
        return None
    return lambda probabilities, *, positions: (weights(probabilities, positions=positions)[0], None)


def picture(encoding: Encoding, geometry: Geometry, *, length: int, title: str | None = None) -> Figure:
    """An encoding as a figure, chosen by what it does.

    A bias: one line a head against distance. A rotation: mean score against distance, and the wavelength of every
    pair. An absolute embedding: a heat map, and the similarity of positions. Anything else: mean attention by distance
    over random content. An encoding that refuses `length` is drawn up to its trained length. Drawn as it is outside
    training, where nothing is random.
    """
    title = title or encoding.name
    trained = geometry.get("trained_length")
    training = encoding.training
    encoding.eval()
    try:
        with torch.no_grad():
            return _picture(encoding, geometry, length, title, trained)
    except ValueError:
        if not trained or trained >= length:
            raise
        with torch.no_grad():
            return _picture(encoding, geometry, int(trained), title, trained)
    finally:
        encoding.train(training)


def _picture(encoding: Encoding, geometry: Geometry, length: int, title: str, trained: int | None) -> Figure:
    curve = _curves(encoding, geometry, length, _text(length))
    if curve is not None and curve["kind"] == "bias":
        return _bias_picture(curve, title, trained)
    if curve is not None and curve["kind"] == "rotation":
        return _rotation_picture(encoding, curve, geometry, title, trained)
    if curve is not None:
        return _absolute_picture(encoding, curve, geometry, title, length)
    heat = _temperature_by_length(encoding.for_layer(0), geometry, length)
    if heat is not None:
        return _temperature_picture(*heat, title, trained)
    return _attention_picture(attention_by_distance(encoding, geometry, length=min(length, 512)), title, trained)


# ---- curves ---------------------------------------------------------------------------------------------------------


def _terms(encoding: Encoding, positions: Positions, tokens: Tensor | None = None) -> Terms | None:
    if encoding.needs_tokens and tokens is None and type(encoding).terms is not Encoding.terms:
        return None
    terms: Terms = encoding(positions, tokens if encoding.needs_tokens else None)
    content = terms.scores is not None and not isinstance(encoding, Rotary)
    return None if content or terms.weights is not None else terms


def _bias_by_distance(terms: Terms) -> Tensor:
    """(heads, length): the bias of the last query, by distance."""
    assert terms.bias is not None
    return terms.bias.dense()[0, :, 0].flip(-1).float()


def _rotates(terms: Terms, head_dim: int, positions: Positions) -> bool:
    """Keys are turned: not so where only queries are scaled, or where nothing becomes something (FLOATER adds)."""
    keys = [branch.key for branch in terms.branches if branch.key is not None]
    zeros = torch.zeros(1, 1, positions.num_keys, head_dim)
    return bool(keys or terms.scores) and not any(bool(key(zeros, at="keys").any()) for key in keys)


def _rotation_by_distance(terms: Terms, head_dim: int, positions: Positions) -> Tensor:
    """(1, length): q . k / (|q| |k| at distance 0) of a vector of ones against itself."""
    q = torch.ones(1, 1, 1, head_dim)
    k = torch.ones(1, 1, positions.num_keys, head_dim)
    scores = (q * k).sum(-1)[:, :, None]
    for branch in terms.branches:
        turned_q = branch.query(q) if branch.query is not None else q
        turned_k = branch.key(k, at="keys") if branch.key is not None else k
        scores = torch.where(branch.pairs(positions)[:, None], (turned_q * turned_k).sum(-1)[:, :, None], scores)
    if terms.scores is not None:
        scores = terms.scores(
            scores, None, q=q, k=k, positions=positions, allowed=positions.allowed()[:, None], scale=1.0
        )
    by_distance = scores[0, :, 0].flip(-1).float()
    return by_distance / by_distance[:, :1]


def _temperature_by_length(encoding: Encoding, geometry: Geometry, length: int) -> tuple[list[int], Tensor] | None:
    """Lengths, and (heads, lengths) what the last query is multiplied by; None where more than that is done."""
    lengths, found = distances_up_to(length)[1:], []
    for count in lengths:
        positions = Positions.full(count, queries=1, trained_length=geometry.get("trained_length"))
        terms = _terms(encoding, positions)
        if terms is None or len(terms.branches) != 1 or terms.branches[0].query is None:
            return None
        if not replace(terms, branches=()).is_empty() or terms.branches[0].key is not None:
            return None
        found.append(terms.branches[0].query(torch.ones(1, int(geometry["num_heads"]), 1, 1))[0, :, 0, 0])
    return lengths, torch.stack(found, 1)


def _similarity_by_distance(encoding: Encoding, width: int, length: int) -> Tensor | None:
    """(1, length): cosine of the last position's embedding and of those before it; None where nothing is embedded."""
    embedded = _embedding(encoding, width, length)
    if embedded is None:
        return None
    return torch.nn.functional.cosine_similarity(embedded[-1:], embedded, dim=-1).flip(-1)[None]


def _embedding(encoding: Encoding, width: int, length: int) -> Tensor | None:
    """(length, width): what is added to the token embeddings, of one and the same token where it depends on it."""
    tokens = torch.zeros(1, length, dtype=torch.long) if encoding.needs_tokens else None
    added = encoding.embed(torch.zeros(1, length, width), Positions.full(length), tokens)[0].float()
    return added if bool(added.any()) else None


def _json_number(value: float) -> float:
    return value if math.isfinite(value) else math.copysign(1e30, value) if not math.isnan(value) else 0.0


# ---- pictures -------------------------------------------------------------------------------------------------------


def _bias_picture(curve: Mapping[str, Any], title: str, trained: int | None) -> Figure:
    from matplotlib.figure import Figure

    with figure_style():
        figure = Figure(figsize=(6.6, 4.0))
        axes = figure.add_subplot()
        draw_bias(axes, curve, trained)
        values = [v for heads in curve["layers"] for head in heads for v in head if math.isfinite(v)]
        axes.set_ylim(max(min(values), -12.0) - 0.3, min(max(values), 12.0) + 0.6)
        axes.set_xlim(0.9, max(curve["distances"]))
        _mark_trained(axes, trained)
        axes.set_title(title, pad=10)
        axes.set_xlabel("distance (tokens)")
        axes.set_ylabel("bias added to the logits (nats)")
        _head_legend(axes, len(curve["layers"][0]))
        _margins(figure, right=1.05)
    return figure


def _rotation_picture(
    encoding: Encoding, curve: Mapping[str, Any], geometry: Geometry, title: str, trained: int | None
) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    wavelengths = _wavelengths(encoding, geometry, max(curve["distances"]) + 1)
    with figure_style():
        figure = Figure(figsize=(8.2, 3.9) if wavelengths else (6.6, 4.0))
        left, *others = figure.subplots(1, 2, width_ratios=[1.25, 1]) if wavelengths else [figure.add_subplot()]
        distances = [max(d, 0.9) for d in curve["distances"]]
        for number, heads in enumerate(curve["layers"]):
            left.plot(distances, heads[0], color=PALETTE[number % len(PALETTE)], linewidth=1.8 if number == 0 else 0.8)
        left.set_xscale("log")
        left.axhline(0, color=INK, linewidth=0.8, alpha=0.5)
        left.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        left.xaxis.set_minor_locator(NullLocator())
        left.set_xlim(0.9, max(distances))
        _mark_trained(left, trained)
        left.set_title(title, pad=10)
        left.set_xlabel("distance (tokens)")
        left.set_ylabel("score of equal content")
        _margins(figure, right=0.2, wspace=0.34)
        if not others:
            return figure
        right = others[0]
        pairs = range(1, len(wavelengths) + 1)
        right.scatter(pairs, wavelengths, color=PALETTE[1], s=22, zorder=3)
        right.set_yscale("log")
        right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        right.yaxis.set_minor_locator(NullLocator())
        right.set_title("wavelength of each pair", fontsize=11, pad=10)
        right.set_xlabel("pair of channels")
        right.set_ylabel("tokens for a full turn")
        right.set_xlim(0, len(wavelengths) + 1)
        if trained is not None:
            right.axhline(trained, color=INK, linewidth=1.0, linestyle=(0, (4, 3)), alpha=0.7)
            rising = sum(w < trained for w in wavelengths) > 0.55 * len(wavelengths)  # free: left above, right below
            place, offset, side = (0.02, 3, "left") if rising else (0.98, -11, "right")
            right.annotate(
                f"trained length {short(trained)}", (place, trained), xycoords=("axes fraction", "data"),
                xytext=(0, offset), textcoords="offset points", fontsize=8.5, ha=side,
            )  # fmt: skip
    return figure


def _temperature_picture(lengths: Sequence[int], heat: Tensor, title: str, trained: int | None) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    heads = heat.shape[0]
    with figure_style():
        figure = Figure(figsize=(6.6, 4.0))
        axes = figure.add_subplot()
        for head, color in reversed(list(enumerate(head_colors(heads)))):
            axes.plot(lengths, heat[head].tolist(), color=color, linewidth=1.8)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(0.9, max(lengths))
        axes.set_ylim(0, max(2.0, 1.1 * float(heat.max())))
        _mark_trained(axes, trained)
        axes.set_title(title, pad=10)
        axes.set_xlabel("length (tokens)")
        axes.set_ylabel("factor of the last query's logits")
        _head_legend(axes, heads)
        _margins(figure, right=1.05)
    return figure


def _absolute_picture(
    encoding: Encoding, curve: Mapping[str, Any], geometry: Geometry, title: str, length: int
) -> Figure:
    from matplotlib.figure import Figure

    embedded = _embedding(encoding, int(geometry["width"]), length)
    assert embedded is not None
    with figure_style():
        figure = Figure(figsize=(8.2, 3.9))
        left, right = figure.subplots(1, 2, width_ratios=[1.2, 1])
        bound = float(embedded.abs().quantile(0.995)) or 1.0
        image = left.imshow(
            embedded.T.numpy(), aspect="auto", cmap="PuOr", vmin=-bound, vmax=bound, origin="lower",
            extent=(0, length, 0, embedded.shape[1]), interpolation="nearest",
        )  # fmt: skip
        left.grid(False)
        left.set_title(title, pad=10)
        left.set_xlabel("position")
        left.set_ylabel("channel")
        figure.colorbar(image, ax=left, pad=0.02, fraction=0.05)
        right.plot([max(d, 0.9) for d in curve["distances"]], curve["layers"][0][0], color=PALETTE[0])
        right.set_xscale("log")
        from matplotlib.ticker import FuncFormatter, NullLocator

        right.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        right.xaxis.set_minor_locator(NullLocator())
        right.axhline(0, color=INK, linewidth=0.8, alpha=0.5)
        right.set_title("cosine of two positions", fontsize=11, pad=10)
        right.set_xlabel("distance (tokens)")
        _margins(figure, right=0.2, wspace=0.34)
    return figure


def _attention_picture(weights: Tensor, title: str, trained: int | None) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    heads, length = weights.shape
    with figure_style():
        figure = Figure(figsize=(6.6, 4.0))
        axes = figure.add_subplot()
        bins = distances_up_to(length, 40)
        ends = [*bins[1:], length]
        for head, color in enumerate(head_colors(heads)):
            share = [float(weights[head, low:high].mean()) * length for low, high in zip(bins, ends, strict=True)]
            axes.plot([max(b, 0.9) for b in bins], share, color=color, linewidth=1.8)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        low, high = max(min(low, 0.09), 9e-4), max(high, 11.0)
        axes.set_ylim(low, high)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.axhline(1, color=INK, linewidth=0.9, linestyle=(0, (2, 2)), alpha=0.7)
        axes.set_xlim(0.9, length)
        _mark_trained(axes, trained)
        axes.set_title(title, pad=10)
        axes.set_xlabel("distance (tokens)")
        axes.set_ylabel("attention (1 = even), random content")
        _head_legend(axes, heads)
        _margins(figure, right=1.05)
    return figure


def _wavelengths(encoding: Encoding, geometry: Geometry, length: int) -> Sequence[float]:
    """Tokens for a full turn of every pair, measured from the rotation itself at one step of distance.

    In a row of this length, and by the nearest keys' branch, where there are several.
    """
    dim = int(geometry["head_dim"])
    positions = Positions.full(2, trained_length=geometry.get("trained_length"))
    part = encoding.for_layer(0)
    tokens = torch.tensor([[ord("\n"), ord("\n")]]) if part.needs_tokens else None
    terms: Terms = part(replace(positions, length=torch.tensor([length])), tokens)
    key = terms.branches[0].key if terms.branches else None
    if key is None:
        return []
    units = torch.eye(dim)[:, None, None].expand(dim, 1, 2, dim)  # each channel alone, at positions 0 and 1
    turned = key(units, at="keys")[:, 0].double()
    cosine = (turned[:, 0] * turned[:, 1]).sum(-1) / (turned[:, 0].norm(dim=-1) * turned[:, 1].norm(dim=-1))
    sine = (1 - cosine.square()).clamp(min=0).sqrt()
    moved = (
        turned[:, 1] / turned[:, 1].norm(dim=-1, keepdim=True) - turned[:, 0] / turned[:, 0].norm(dim=-1, keepdim=True)
    ).norm(dim=-1)
    angle = torch.where(cosine < 0.9, torch.atan2(sine, cosine), 2 * torch.asin((moved / 2).clamp(max=1)))
    found = sorted(2 * math.pi / float(a) for a in angle if float(a) > 1e-7)
    return found[::2]


def _mark_trained(axes: Any, trained: int | None) -> None:
    if trained is None or not axes.get_xlim()[0] < trained < axes.get_xlim()[1]:
        return
    axes.axvline(trained, color=INK, linewidth=1.0, linestyle=(0, (4, 3)), alpha=0.7)
    axes.annotate(
        f"trained {short(trained)}", (trained, 1.0), xycoords=("data", "axes fraction"), xytext=(-4, -11),
        textcoords="offset points", fontsize=8.5, ha="right",
    )  # fmt: skip


def _head_legend(axes: Any, heads: int) -> None:
    shown = range(heads) if heads <= 8 else sorted({round(i * (heads - 1) / 5) for i in range(6)})
    colors = head_colors(heads)
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=colors[head], linewidth=2.2, label=f"head {head + 1}") for head in shown]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9, handlelength=1.4)


def _margins(figure: Figure, *, right: float, wspace: float = 0.2) -> None:
    width, height = figure.get_figwidth(), figure.get_figheight()
    figure.subplots_adjust(
        left=0.85 / width, right=1 - right / width, bottom=0.6 / height, top=1 - 0.5 / height, wspace=wspace
    )
