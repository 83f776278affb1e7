"""What a search found, for people: a table for the terminal and one self-contained HTML page."""

from openwork.report._data import LayerRow, SearchReport, budget_curve
from openwork.report._html import render_html, write_html
from openwork.report._table import print_table, search_table

__all__ = [
    "LayerRow",
    "SearchReport",
    "budget_curve",
    "print_table",
    "render_html",
    "search_table",
    "write_html",
]
