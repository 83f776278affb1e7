"""The report's figures against the problem, and the page against the rules of HTML and of being alone."""

from __future__ import annotations

import io
import itertools
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from rich.console import Console

from openwork.report import SearchReport, budget_curve, print_table, render_html, write_html
from openwork.report._data import format_quantity
from openwork.report._svg import ticks
from openwork.search import solve_greedy
from search.synthetic import chain, cost_of


@pytest.fixture
def example():
    problem, terms = chain(0, depth=6, units=32, ratio=2.0, evenness=2.0, power=2.0)
    groups = (replace(problem.groups[0], name='block<0>.conv&"x"'), *problem.groups[1:])
    problem = replace(problem, groups=groups)
    report = SearchReport(
        "Net<T>",
        problem,
        solve_greedy(problem),
        "TaylorLossSensitivity",
        "GreedySearch",
        tied={1: ("conv7", "conv8", "conv9", "conv10")},
        seconds={"analysis": 0.25},
        frozen=[("head", "its channels are the model's output")],
        warnings=["a warning"],
    )
    return report, terms


class Checker(HTMLParser):
    """Counts open elements, collects text and attributes."""

    EMPTY = frozenset(("meta", "line", "path", "circle", "rect", "br"))

    def __init__(self):
        super().__init__()
        self.open, self.words, self.links = [], [], []

    def handle_starttag(self, tag, attributes):
        if tag not in self.EMPTY:
            self.open.append(tag)
        self.links += [value for key, value in attributes if key in ("src", "href", "xlink:href")]

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_page_is_well_formed_and_alone(example):
    report, _ = example
    page = render_html(report)
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.links == []
    assert not re.search(r"https?://|@import|url\(", page)
    text = " ".join(" ".join(checker.words).split())
    assert 'block<0>.conv&"x"' in text  # names are escaped, so they come back whole
    assert "Net<T>" in text
    for expected in (
        f"{report.solution.ratio:.3f}x",
        "asked for 2x",
        "a warning",
        "its channels are the model's output",
        "and 1 more",
    ):
        assert expected in text
    assert "NaN" not in text
    assert "nan" not in page


def test_page_shows_every_group(example):
    report, _ = example
    page = render_html(report)
    assert page.count("<figure>") == len(report.rows) == 6
    for row in report.rows:
        assert f"{row.before} → {row.after}" in page or row.before == row.after


def test_rows(example):
    report, terms = example
    for row, group in zip(report.rows, report.problem.groups):
        kept = list(report.solution.kept)
        kept[group.index] = group.units
        assert row.saved == pytest.approx(cost_of(terms, kept) - cost_of(terms, report.solution.kept))
        assert (row.before, row.after) == (group.units, report.solution.kept[group.index])
        assert row.curve[0] == (group.units, 0.0)
        # People read plain sums of scores, however the search weighs them.
        plain = np.sort(group.scores)[: row.before - row.after].sum()
        assert row.loss == pytest.approx(plain)
        assert dict(row.curve)[row.after] == row.loss
    assert report.loss == pytest.approx(sum(row.loss for row in report.rows))
    assert 0 < report.loss < report.total_loss
    before = sum(cost for _, cost, _ in report.layer_costs)
    after = sum(cost for _, _, cost in report.layer_costs)
    assert before / after == pytest.approx(report.solution.ratio)


def test_budget_curve_rises(example):
    report, _ = example
    curve = budget_curve(report.problem)
    assert curve[0] == (1.0, 0.0)
    assert all(a[0] < b[0] and a[1] <= b[1] for a, b in itertools.pairwise(curve))
    assert curve[-1][0] >= 2.0 * 1.6 * (1 - 1e-9)
    assert curve[-1][1] < report.total_loss


def test_table(example):
    report, _ = example
    stream = io.StringIO()
    print_table(report, Console(file=stream, width=120))
    text = stream.getvalue()
    assert f"{report.solution.ratio:.3f}x less MACs (asked for 2x)" in text
    for row in report.rows:
        assert row.name in text
        assert f"{row.before} -> {row.after}" in text or row.before == row.after
    assert "(+4 tied)" in text


def test_written_file(example, tmp_path):
    report, _ = example
    write_html(report, tmp_path / "new" / "report.html")
    assert (tmp_path / "new" / "report.html").read_text(encoding="utf-8") == render_html(report)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999.6, "1000"), (7, "7"), (1234, "1.23 k"), (45_600_000, "45.6 M"), (1e9, "1.00 G"),
     (0.00123, "1.23 m"), (math.inf, "inf")],
)  # fmt: skip
def test_quantities(value, text):
    assert format_quantity(value) == text


def test_ticks_are_round_and_inside():
    assert ticks(0, 10) == [0, 2.5, 5, 7.5, 10]
    assert ticks(1, 3.2, 8) == [1, 1.5, 2, 2.5, 3]
    assert ticks(2, 2) == [2]
