from __future__ import annotations

import copy
import io
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread
from matplotlib.text import Annotation, Text
from rich.console import Console

from milepost.compare import Settings, preset, summarise
from milepost.compare.sweep import assemble, headline
from milepost.encoding import catalogue, from_spec
from milepost.report import Column, Table, bias_curves, figures, page, picture, render, tables
from milepost.report.html import inline_svg
from milepost.report.plots import short
from milepost.report.show import attention_by_distance
from milepost.report.style import look, spread_labels
from milepost.report.table import Cell, number
from tests.sweep_worker import result_of

METHODS = ("alibi", "rope", "mep", "alibi:slope_scale=2", "kerple_log|50%")
GEOMETRY = {"num_heads": 2, "head_dim": 8, "width": 16, "num_layers": 2, "vocab_size": 258, "trained_length": 32}


def settings_of(methods: tuple[str, ...] = METHODS, **changes: Any) -> Settings:
    return preset("tiny", methods=methods, **{"regions": 6, "passkey_prompts": 4, **changes})


def results_of(methods: tuple[str, ...] = METHODS, seeds: int = 1, **changes: Any) -> dict[str, Any]:
    settings = settings_of(methods, seeds=seeds, **changes)
    runs = [result_of(method, seed, settings.to_dict()) for seed in range(seeds) for method in methods]
    for run in runs:
        if run["method"].startswith("alibi"):
            run["curves"] = bias_curves(from_spec(run["method"], GEOMETRY), GEOMETRY, length=128)
    return assemble(settings, runs, [], {"name": "prose"}, timing={"seconds": 1.0})


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return results_of()


# ---- tables ----


def cell_text(table: Table, method: str, column: str) -> str:
    index = [c.title for c in table.columns].index(column)
    row = next(row for row in table.rows if row[0].text == method)
    return row[index].text


def test_tables_hold_every_method_length_and_measure(results: dict[str, Any]) -> None:
    made = {table.name: table for table in tables(results)}
    assert list(made) == ["perplexity-windows", "perplexity-last", "passkey", "pairs"]
    for cell in results["summary"]["perplexity"]["windows"]["cells"]:
        assert cell_text(made["perplexity-windows"], cell["method"], str(cell["length"])) == number(cell["value"])
    groups = [column.group for column in made["perplexity-windows"].columns]
    assert groups == ["", "", "trained", "longer", "longer", ""]
    assert "768 targets" in made["perplexity-windows"].caption and "6 documents" in made["perplexity-windows"].caption
    assert "48 targets" in made["perplexity-last"].caption


def test_one_document_gives_no_interval(results: dict[str, Any]) -> None:
    alone = copy.deepcopy(results)
    for table in alone["summary"]["perplexity"].values():
        table["documents"] = 1
        for cell in table["cells"]:
            cell.update(low=None, high=None, spread=None)
    for pair in alone["summary"]["pairs"]:
        pair.update(low=None, high=None)
    made = {table.name: table for table in tables(alone)}
    for name in ("perplexity-windows", "pairs"):
        assert not any("±" in cell.detail for row in made[name].rows for cell in row)
    assert "of one document" in made["perplexity-windows"].caption
    gaps = [cell.text for row in made["pairs"].rows for cell in row[1:]]
    assert gaps and all(text.endswith("?") for text in gaps)
    assert figures(alone)


def test_the_best_of_a_column_is_the_smallest_perplexity(results: dict[str, Any]) -> None:
    table = tables(results)[0]
    for index, column in enumerate(table.columns):
        if column.group:
            values = {row[0].text: float(row[index].text) for row in table.rows}
            best = {row[0].text for row in table.rows if row[index].best}
            assert best == {method for method, value in values.items() if value == min(values.values())}


def test_rows_are_ranked_and_differences_are_to_the_best(results: dict[str, Any]) -> None:
    made = {table.name: table for table in tables(results)}
    longest = [float(row[4].text) for row in made["perplexity-windows"].rows]
    assert longest == sorted(longest)
    first = made["perplexity-windows"].rows[0][0].text
    assert made["pairs"].title.endswith(first)
    assert all(float(row[-1].text.rstrip(" ?")) >= 0 for row in made["pairs"].rows)


def test_spread_is_over_seeds_where_there_are_several() -> None:
    summary = results_of(("alibi",), seeds=3)["summary"]
    values = [np.exp(np.log(1)) for _ in range(3)]
    cell = summary["perplexity"]["windows"]["cells"][0]
    runs = [result_of("alibi", seed, settings_of(("alibi",)).to_dict()) for seed in range(3)]
    values = [run["perplexity"][0]["perplexity"] for run in runs]
    assert cell["spread"] == pytest.approx(np.std(values, ddof=1))
    assert cell["value"] == pytest.approx(np.exp(np.mean(np.log(values))))
    assert "standard deviation over seeds" in tables(results_of(("alibi", "mep"), seeds=2))[0].caption


def test_markdown_and_latex_escape_what_they_must(results: dict[str, Any]) -> None:
    table = tables(results)[0]
    markdown, latex = table.to_markdown(), table.to_latex()
    assert "kerple_log\\|50%" in markdown
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in rows}) == 1
    assert r"kerple\_log|50\%" in latex
    assert all(
        line.count("&") - line.count(r"\&") == len(table.columns) - 1
        for line in latex.splitlines()
        if line.endswith(r"\\") and "multi" not in line
    )
    assert latex.count("{") == latex.count("}")


@pytest.mark.parametrize("width", [60, 120, 200])
def test_terminal_tables_never_break_a_number(results: dict[str, Any], width: int) -> None:
    out = io.StringIO()
    table = tables(results)[0]
    Console(file=out, width=max(width, 78)).print(table.to_rich(width))
    for row in table.rows:
        line = next(line for line in out.getvalue().splitlines() if line.strip().startswith(row[0].text + " "))
        assert all(cell.text in line for cell in row)
        assert ("±" in line) == (width >= 120)


@pytest.mark.parametrize("width", [72, 80, 120])
def test_in_a_narrow_terminal_sentences_wrap_and_nothing_is_cut(width: int) -> None:
    columns = (Column("rank"), Column("method", left=True), Column("1024", "perplexity"), Column("why", prose=True))
    reason = "at 1024 passkey retrieval is 75%, below 90% of what was asked"
    table = Table("Ranking", columns, ((Cell("1"), Cell("self-extend G=10 W=64"), Cell("3.53"), Cell(reason)),))
    out = io.StringIO()
    Console(file=out, width=width).print(table.to_rich(width))
    text = " ".join(out.getvalue().split())
    assert "…" not in text and "self-extend G=10 W=64 3.53" in text
    assert all(word in text for word in (*reason.split(), "rank", "method", "perplexity", "1024", "why"))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (6.907, "6.91"),
        (9.996, "10.0"),
        (12.34, "12.3"),
        (99.96, "100"),
        (1234.5, "1234"),
        (2.1e6, "2.1e+06"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_a_length_that_an_encoding_refuses_is_a_dash() -> None:
    settings = settings_of(("alibi", "learned"))
    runs = [result_of(method, 0, settings.to_dict()) for method in settings.methods]
    runs[1]["perplexity"] = [row for row in runs[1]["perplexity"] if row["length"] <= 32]
    results = assemble(settings, runs, [], {}, timing={})
    table = tables(results)[0]
    assert cell_text(table, "learned", "128") == "–" and cell_text(table, "learned", "32") != "–"
    assert "refuses that length" in table.caption
    assert "refuse 128: learned" in headline(results)[1]
    assert set(figures(results)) == {"perplexity", "perplexity-last", "positions", "passkey"}


def test_the_verdict_names_who_rises(results: dict[str, Any]) -> None:
    _, lead, notes = headline(results_of(("alibi", "rope", "mep", "alibi:slope_scale=2")))
    assert re.search(r"rise: rope \(1\.1\d? times\)|rise: rope \(1\.1 times\)", lead)
    assert any("control" in note for note in notes)


# ---- plots ----


def test_figures_are_drawn_and_equal_results_give_equal_bytes(results: dict[str, Any]) -> None:
    first, second = figures(results), figures(results)
    assert list(first) == ["perplexity", "perplexity-last", "positions", "passkey", "curves"]
    for name in first:
        svg = render(first[name], "svg", salt=name)
        assert svg == render(second[name], "svg", salt=name)
        assert svg.startswith(b"<?xml") and b"<svg" in svg
    image = imread(io.BytesIO(render(first["perplexity"], "png")))
    assert image.shape[0] > 500 and image.std() > 0.01


@pytest.mark.parametrize("name", ["perplexity", "positions", "passkey"])
def test_labels_do_not_overlap(name: str) -> None:
    many = (
        "mep",
        "mep-parameterized",
        "alibi",
        "kerple-log",
        "kerple-power",
        "t5",
        "sandwich",
        "fire",
        "rope",
        "nope",
        "alibi:slope_scale=2",
    )
    figure = figures(results_of(many))[name]
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    axes = figure.axes[0]
    labels = [t for t in axes.texts if isinstance(t, Annotation)] + [axes.title, axes.xaxis.label, axes.yaxis.label]
    labels += [t for t in (*axes.get_xticklabels(), *axes.get_yticklabels()) if t.get_text()]
    labels += [t for t in (axes.title, getattr(axes, "_left_title", None)) if isinstance(t, Text) and t.get_text()]
    boxes = {}
    for place, text in enumerate(labels):
        if text.get_text():  # the box of the words, without the leader line
            box = Text.get_window_extent(text, renderer)
            boxes[f"{place} {text.get_text()}"] = box
    names = list(boxes)
    assert sum(method in " ".join(names) for method in many) == len(many)
    for i, a in enumerate(names):
        assert boxes[a].x0 >= 0 and boxes[a].x1 <= figure.bbox.width, f"{a} leaves the figure"
        assert boxes[a].y0 >= 0 and boxes[a].y1 <= figure.bbox.height, f"{a} leaves the figure"
        for b in names[i + 1 :]:
            if a.split(" ", 1)[1] != b.split(" ", 1)[1]:
                shrunk = boxes[b].shrunk(0.98, 0.9)
                assert not boxes[a].overlaps(shrunk), f"{a} lies on {b}"


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_label_places_keep_order_and_distance(heights: list[float]) -> None:
    places = spread_labels(heights, gap=0.07)
    order = np.argsort(heights, kind="stable")
    assert np.all(np.diff(np.array(places)[order]) >= 0.07 - 1e-9)
    assert min(places) >= -1e-9 and max(places) <= 1 + 1e-9
    if len(heights) == 1 or np.min(np.diff(np.sort(heights))) >= 0.07:
        np.testing.assert_allclose(places, heights, atol=1e-9)


def test_two_dozen_series_look_different() -> None:
    assert len({(look(i)["color"], str(look(i)["linestyle"])) for i in range(24)}) == 24


def test_short_numbers() -> None:
    assert [short(v) for v in (1, 100, 512, 1024, 4096, 1000, 100_000, 2_000_000)] == [
        "1", "100", "512", "1k", "4k", "1k", "100k", "2M",
    ]  # fmt: skip


# ---- the page ----


def test_the_page_needs_nothing_from_elsewhere(results: dict[str, Any]) -> None:
    title, lead, notes = headline(results)
    text = page(results, tables(results), figures(results), title=title, lead=lead, notes=notes)
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert not re.search(r"https?://|<script|<link|<img|@import|src=", without_namespaces)
    assert text.count("<svg") == 5 and text.count("<table") >= 4
    assert 'name="viewport"' in text and "prefers-color-scheme: dark" in text
    for method in METHODS[:4]:
        assert method in text
    assert "kerple_log|50%" in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)), "ids must be unique in one page"
    targets = set(re.findall(r'(?:xlink:href="|url\()#([^")]+)', text))
    assert targets <= set(ids)


def test_failures_and_markup_are_escaped_in_the_page() -> None:
    settings = settings_of(("alibi", "mep"))
    runs = [result_of("alibi", 0, settings.to_dict())]
    failures = [{"method": "mep", "seed": 0, "message": "<b>nan</b> & more"}]
    results = assemble(settings, runs, failures, {"name": "<data>"}, timing={})
    text = page(results, tables(results), figures(results), title="a < b")
    assert "&lt;b&gt;nan&lt;/b&gt; &amp; more" in text and "<b>nan" not in text
    assert "a &lt; b" in text and "<data>" not in text


def test_inline_pictures_take_the_colours_of_the_page(results: dict[str, Any]) -> None:
    svg = inline_svg(figures(results)["perplexity"], "perplexity")
    assert "currentColor" in svg and "var(--grid)" in svg and "#1b1f24" not in svg
    assert not re.search(r"fill: ?#ffffff|fill=\"#ffffff\"", svg)


# ---- pictures of encodings ----


def test_curves_are_the_encoding_s_own_numbers() -> None:
    curve = bias_curves(from_spec("alibi", GEOMETRY), GEOMETRY, length=100)
    assert curve is not None and curve["kind"] == "bias" and len(curve["layers"]) == 1
    slopes = torch.tensor([2.0**-4, 2.0**-8])
    expected = -slopes[:, None] * torch.tensor(curve["distances"])
    torch.testing.assert_close(torch.tensor(curve["layers"][0]), expected)

    rotation = bias_curves(from_spec("rope", GEOMETRY), GEOMETRY, length=100)
    assert rotation is not None and rotation["kind"] == "rotation"
    frequencies = 10000.0 ** (-torch.arange(4) / 4)
    score = (torch.tensor(rotation["distances"])[:, None] * frequencies).cos().mean(-1)
    torch.testing.assert_close(torch.tensor(rotation["layers"][0][0]), score, atol=1e-5, rtol=0)

    similarity = bias_curves(from_spec("sinusoidal", GEOMETRY), GEOMETRY, length=100)
    assert similarity is not None and similarity["kind"] == "similarity"
    assert similarity["layers"][0][0][0] == pytest.approx(1.0)
    assert bias_curves(from_spec("nope", GEOMETRY), GEOMETRY, length=100) is None


def test_layers_with_sets_of_their_own_give_a_curve_each() -> None:
    schedule = bias_curves(from_spec("alibi/alibi:slope_scale=2", GEOMETRY), GEOMETRY, length=50)
    assert schedule is not None and len(schedule["layers"]) == 2
    one, two = np.array(schedule["layers"])
    np.testing.assert_allclose(two, 2 * one)


def test_attention_by_distance_follows_the_bias() -> None:
    weights = attention_by_distance(from_spec("alibi:slope_scale=4", GEOMETRY), GEOMETRY, length=40, samples=16)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2))
    assert weights[0, :5].mean() > 5 * weights[0, 20:].mean()
    even = attention_by_distance(from_spec("nope", GEOMETRY), GEOMETRY, length=40)
    torch.testing.assert_close(even, torch.full((2, 40), 1 / 40))


@pytest.mark.parametrize("name", [entry.name for entry in catalogue()])
def test_every_encoding_draws_itself(name: str) -> None:
    torch.manual_seed(0)
    geometry = {**GEOMETRY, "head_dim": 16, "width": 32}
    figure = picture(from_spec(name, geometry), geometry, length=24)
    axes = figure.axes[0]
    assert axes.lines or axes.images or axes.collections
    assert axes.get_xlabel()


def test_wavelengths_of_rope_are_two_pi_over_its_frequencies() -> None:
    geometry = {**GEOMETRY, "head_dim": 16, "width": 32}
    figure = picture(from_spec("rope", geometry), geometry, length=24)
    drawn = np.asarray(figure.axes[1].collections[0].get_offsets())[:, 1]
    expected = 2 * np.pi * 10000.0 ** (np.arange(8) / 8)
    np.testing.assert_allclose(np.sort(drawn), expected, rtol=2e-3)


def test_a_summary_without_runs_is_empty() -> None:
    summary = summarise([], methods=("alibi",), train_length=32)
    assert summary["methods"] == [] and summary["passkey"] is None and summary["pairs"] == []
    assert tables({"summary": summary, "settings": {}}) == []
