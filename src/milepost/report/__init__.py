"""Tables, plots and one self-contained page from a results dictionary, and pictures of encodings.

Nothing here computes a measurement: `tables(results)` and `figures(results)` read the "summary" of results.json (its
shape is described in `milepost.compare.summary`), `page` puts them into one HTML file, `picture` draws an encoding.
matplotlib and rich are imported on use.
"""

from __future__ import annotations

from milepost.report.html import page
from milepost.report.plots import figures, render
from milepost.report.show import bias_curves, picture
from milepost.report.table import Column, Table, measures_in, tables

__all__ = ["Column", "Table", "bias_curves", "figures", "measures_in", "page", "picture", "render", "tables"]
