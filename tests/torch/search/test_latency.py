"""Latency tables: lengths against the pruned model, measuring once, the runtime's result against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import openwork.torch as ow
from openwork.retrain.latency import axis_length, node_graph
from openwork.retrain.search import per_sample
from openwork.torch.search import LatencyMeter, latency_cost
from openwork.torch.search._batches import Batch
from openwork.torch.search._latency import _shape_of
from openwork.torch.search.testing import small_net
from openwork.torch.structure import bind_inputs


@pytest.mark.parametrize(
    ("module", "size", "widths"),
    [
        (nn.Conv2d(6, 10, 3, stride=2, padding=1), (4, 6, 9, 9), (5, 7)),
        (nn.Conv2d(8, 12, (1, 3), padding="same", dilation=2, groups=4), (2, 8, 7, 7), (8, 12)),
        (nn.Conv2d(8, 8, 3, groups=8, padding=2), (2, 8, 6, 6), (5, 5)),
        (nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1, output_padding=1), (2, 6, 5, 5), (3, 4)),
        (nn.Conv1d(6, 10, 5), (2, 6, 20), (4, 4)),
        (nn.Linear(6, 9), (2, 3, 6), (5, 8)),
    ],
)
def test_measured_node_is_the_layer(module, size, widths):
    """A one-layer graph at other widths gives what a torch layer of these widths gives, for one sample."""
    import onnxruntime

    shape = _shape_of(module, size, size[0])
    model, feeds = node_graph(shape, [widths])
    (result,) = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feeds)
    import onnx
    from onnx import numpy_helper

    weight = torch.from_numpy(numpy_helper.to_array(onnx.load_model_from_string(model).graph.initializer[0]).copy())
    x = torch.from_numpy(next(iter(feeds.values())))
    with torch.no_grad():
        if isinstance(module, nn.Linear):
            expected = x @ weight
        else:
            module.weight, module.bias = nn.Parameter(weight), None
            module.groups = widths[0] if shape.depthwise else module.groups
            module.in_channels, module.out_channels = widths
            expected = module(x)
    assert np.allclose(result, expected.numpy(), atol=1e-4)


def test_kinds_that_are_not_measured():
    assert _shape_of(nn.BatchNorm2d(4), (1, 4, 3, 3), 1) is None
    assert _shape_of(nn.Conv2d(4, 4, 1), (4, 3, 3), 1) is None


def test_lengths_are_those_of_the_pruned_model():
    net, images, _ = small_net()
    groups = ow.analyze(net, images).groups
    removed = {group.index: np.flatnonzero(np.arange(group.units) % (group.units // 2) == 0) for group in groups}
    pruned, _ = ow.prune(net, images, groups=removed)
    kept = [group.units - len(removed[group.index]) for group in groups]
    for name in ("first", "second", "grouped"):
        before, after = net.get_submodule(name), pruned.get_submodule(name)
        assert axis_length(f"{name}.weight", 0, before.out_channels, groups).length(kept) == after.out_channels
        assert axis_length(f"{name}.weight", 1, before.in_channels, groups).length(kept) == after.in_channels


def test_table_and_meter():
    net, images, labels = small_net()
    groups = ow.analyze(net, images).groups
    meter = LatencyMeter(repeats=2, points=2)
    cost = latency_cost(net, Batch(bind_inputs(images), labels), groups, meter)
    full = [group.units for group in groups]
    assert set(cost.by_layer(full)) == {"first", "second", "grouped", "head"}
    assert cost.total(full) == pytest.approx(sum(cost.by_layer(full).values()))
    assert all(seconds >= 0 for seconds in cost.by_layer(full).values())
    assert cost.total(full) > 0
    measured = dict(meter.measured)
    latency_cost(net, Batch(bind_inputs(images), labels), groups, meter)
    assert meter.measured == measured


def test_costs_do_not_depend_on_the_batch():
    net, images, _ = small_net()
    one = ow.analyze(net, images[:1]).costs
    six = per_sample(ow.analyze(net, images).costs, 6)
    full = [8, 12]
    assert [term.value(full) for term in six] == pytest.approx([term.value(full) for term in one])
