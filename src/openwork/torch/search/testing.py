"""Tests that any sensitivity for PyTorch models has to pass; run them on your own.

    from openwork.torch.search.testing import SensitivitySuite

    class TestMySensitivity(SensitivitySuite):
        def make(self):
            return MySensitivity()

pytest collects the inherited tests. They give AMCT's structures only.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from openwork.retrain.search import set_up
from openwork.search import SensitivityBase, get_attribute, make_record
from openwork.torch.analysis import analyze
from openwork.torch.search._graph import SearchGraph, graph_info

__all__ = ["SensitivitySuite", "small_net"]


class _Net(nn.Module):
    """Two convolutions with a residual sum, a grouped one, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.grouped = nn.Conv2d(8, 12, 3, groups=2)
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(x + self.second(x))
        return self.head(torch.relu(self.grouped(x)).mean((2, 3)))


def small_net(seed: int = 0) -> tuple[_Net, torch.Tensor, torch.Tensor]:
    """A net with residual sum, batch norm and grouped convolution, images [6, 3, 8, 8] and class labels [6]."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = _Net()
        nn.init.uniform_(net.norm.get_buffer("running_mean"), -0.5, 0.5)
        nn.init.uniform_(net.norm.get_buffer("running_var"), 0.5, 2.0)
        return net, torch.randn(6, 3, 8, 8), torch.randint(0, 5, (6,))


class SensitivitySuite:
    """Subclass it and give `make`.

    Attributes:
        dead_is_least: whether a channel that is always zero must get the least score of its layer.
    """

    dead_is_least: ClassVar[bool] = True

    def make(self) -> SensitivityBase:
        """A new sensitivity object."""
        raise NotImplementedError

    def run(self, net: nn.Module, data: Any, count: int = 1) -> dict[str, np.ndarray]:
        """The scores by layer."""
        first = data[0] if isinstance(data[0], torch.Tensor) else data[0][0]
        analysis = analyze(net, first)
        records = [make_record(group) for group in analysis.groups]
        sensitivity = self.make()
        graph = SearchGraph(net, analysis.groups)
        set_up(sensitivity, (graph, graph_info(net, analysis.costs, analysis.groups)), data, count)
        sensitivity.get_sensitivity(records)
        result = {}
        for record in records:
            node = record.producer[0]
            values = get_attribute(node, "sensitivity")
            assert values is not None, f"no attribute 'sensitivity' on {node.name}"
            assert len(values) == get_attribute(node, "end") - get_attribute(node, "begin"), node.name
            result[node.name] = np.asarray(values, dtype=np.float64)
        return result

    def test_a_finite_number_for_each_channel(self) -> None:
        """FLOATS, one value a channel, on producer[0] of every record."""
        net, images, labels = small_net()
        scores = self.run(net, [images, labels])
        assert {name: len(values) for name, values in scores.items()} == {"first": 8, "grouped": 12}
        assert all(np.isfinite(values).all() for values in scores.values())
        assert all(np.ptp(values) > 0 for values in scores.values())

    def test_leaves_the_model_alone(self) -> None:
        """Weights, statistics, gradients, modes, hooks and requires_grad stay as they were."""
        net, images, labels = small_net()
        net.train()
        net.second.eval()
        net.head.weight.requires_grad_(False)
        before = copy.deepcopy(net.state_dict())
        self.run(net, [images, labels])
        after = net.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert all(parameter.grad is None for parameter in net.parameters())
        assert [module.training for module in net.modules()].count(False) == 1
        assert not net.head.weight.requires_grad
        assert net.first.weight.requires_grad
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())

    def test_a_dead_channel_is_worth_least(self) -> None:
        """A channel with no weights, no bias and no reader."""
        if not self.dead_is_least:
            return
        net, images, labels = small_net()
        with torch.no_grad():
            for parameter in net.grouped.parameters():
                parameter[3] = 0
            net.head.weight[:, 3] = 0
        scores = self.run(net, [images, labels])["grouped"]
        assert scores.argmin() == 3

    def test_several_batches(self) -> None:
        """test_iteration batches are used, and the same data gives the same scores."""
        net, images, labels = small_net()
        batches = [(images[:3], labels[:3]), (images[3:], labels[3:])]
        first = self.run(net, batches, 2)
        again = self.run(net, batches, 2)
        assert all(np.array_equal(first[name], again[name]) for name in first)
