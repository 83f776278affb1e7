"""Masked equivalence on graphs of one structure each, in a session and in onnxruntime."""

from __future__ import annotations

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from micro_graphs import GRAPHS  # noqa: E402
from onnx_run import run_onnx  # noqa: E402

from openwork.tensorflow.analysis import analyze_graph  # noqa: E402
from openwork.tensorflow.pruning import prune_graph  # noqa: E402
from openwork.tensorflow.verification import difference, masked_graph, run_graph, verify_graph  # noqa: E402


def constants(graph_def):
    return {node.name: tf.make_ndarray(node.attr["value"].tensor) for node in graph_def.node if node.op == "Const"}


@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_a_cut_graph_means_the_masked_one(name):
    micro = GRAPHS[name]
    original = micro.graph_def()
    analysis = analyze_graph(original, ["out"])
    smaller, plan = prune_graph(original, ["out"], 0.5, analysis=analysis)
    after = constants(smaller)
    assert {key: after[key].shape for key in micro.kept} == dict(micro.kept)
    held = {parameter for frozen in analysis.frozen for parameter, _, _ in frozen.members}
    assert set(micro.frozen) <= held
    feeds = micro.feeds(batch=3)
    if micro.session:
        assert verify_graph(original, smaller, plan, ["out"], feeds) <= 1e-4
        # The removed channels did matter.
        assert difference(*(run_graph(g, ["out:0"], feeds)[0] for g in (original, smaller))) > 1e-3
    if micro.onnx:
        shapes = {key: value.shape for key, value in feeds.items()}
        masked = masked_graph(analyze_graph(original, ["out"], {k[:-2]: v for k, v in shapes.items()}), plan)
        expected = run_onnx(masked, feeds, ["out:0"])[0]
        assert difference(expected, run_onnx(smaller, feeds, ["out:0"])[0]) <= 1e-4


def test_there_are_enough_structures():
    assert len(GRAPHS) >= 30


def test_masking_is_seen():
    """A cut of the wrong channels does not pass."""
    micro = GRAPHS["chain"]
    original = micro.graph_def()
    smaller, _ = prune_graph(original, ["out"], groups={0: np.array([0, 1])})
    _, other = prune_graph(original, ["out"], groups={0: np.array([0, 2])})
    assert verify_graph(original, smaller, other, ["out"], micro.feeds()) > 1e-3
