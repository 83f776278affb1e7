"""Masked equivalence on graphs drawn at random: at several ratios, and each group alone."""

from __future__ import annotations

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from random_graphs import Drawing  # noqa: E402

from openwork.graph.select import lowest  # noqa: E402
from openwork.tensorflow.analysis import analyze_graph  # noqa: E402
from openwork.tensorflow.pruning import prune_graph  # noqa: E402
from openwork.tensorflow.verification import verify_graph  # noqa: E402


@pytest.mark.parametrize("seed", [*range(7), 56])
def test_random_graphs_mean_the_same_when_cut(seed):
    original = Drawing(seed).graph_def(blocks=5)
    analysis = analyze_graph(original, ["out"])
    feeds = {"x0:0": np.random.default_rng(seed).normal(size=(2, 8, 8, 3)).astype("f")}
    for ratio in (0.3, 0.6):
        smaller, plan = prune_graph(original, ["out"], ratio, analysis=analysis)
        assert plan.groups
        assert verify_graph(original, smaller, plan, ["out"], feeds) <= 1e-4
    group = analysis.groups[seed % len(analysis.groups)]
    alone = lowest(group, np.random.default_rng(seed).random(group.units), min(1, group.most_steps))
    if len(alone):
        smaller, plan = prune_graph(original, ["out"], groups={group.index: alone}, analysis=analysis)
        assert verify_graph(original, smaller, plan, ["out"], feeds) <= 1e-4
