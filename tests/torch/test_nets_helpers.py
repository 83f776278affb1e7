"""The helpers that other tests trust are themselves checked: masking by hand, and every micro-net runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nets.checks import difference, example_call, multiply_accumulates, tensors
from nets.masking import masked_by_hand, surviving
from nets.micro import NETS
from nets.selection import some_of_each_block
from openwork.graph.groups import PruneGroup


class Small(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3)
        self.bn = nn.BatchNorm2d(width)
        self.head = nn.Linear(width * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.bn(self.conv(x))).flatten(1))


def cut_by_hand(original: Small, kept: list[int]) -> Small:
    cut = Small(len(kept)).eval()
    with torch.no_grad():
        for name in ("conv.weight", "conv.bias", "bn.weight", "bn.bias"):
            cut.get_parameter(name).copy_(original.get_parameter(name)[kept])
        for name in ("bn.running_mean", "bn.running_var"):
            cut.get_buffer(name).copy_(original.get_buffer(name)[kept])
        columns = torch.cat([torch.arange(4 * channel, 4 * channel + 4) for channel in kept])
        cut.head.weight.copy_(original.head.weight[:, columns])
        cut.head.bias.copy_(original.head.bias)
    return cut


def test_masking_by_hand_equals_cutting_by_hand() -> None:
    torch.manual_seed(0)
    original = Small(6).eval()
    for name, buffer in original.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 1.5)
    x = torch.randn(2, 3, 4, 4)
    cut = cut_by_hand(original, [0, 3, 4])
    with torch.no_grad():
        assert difference(masked_by_hand(original, cut)(x), cut(x)) <= 1e-6
        assert difference(original(x), cut(x)) > 1e-2
        cut.bn.bias.copy_(cut.bn.bias + 1)
        assert difference(masked_by_hand(original, cut)(x), cut(x)) > 1e-2


def test_surviving_refuses_numbers_from_elsewhere() -> None:
    original = torch.tensor([[1.0, 2.0, 0.0], [3.0, 4.0, 0.0]])
    assert surviving(original, torch.tensor([[1.0], [3.0]])).tolist() == [[True, False, True], [True, False, True]]
    with pytest.raises(AssertionError):
        surviving(original, torch.tensor([[1.5]]))


@pytest.mark.parametrize("name", NETS)
def test_micro_net_runs_the_same_way_twice(name: str) -> None:
    net = NETS[name]
    with torch.no_grad():
        first, second = (example_call(net.build(), net.example()) for _ in range(2))
    assert difference(first, second) == 0
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors(first))
    shapes = net.build().state_dict() | dict(net.build().named_buffers())
    for key, shape in net.kept.items():
        assert len(shape) == shapes[key].ndim
        assert all(new <= old for new, old in zip(shape, shapes[key].shape))


def test_macs_are_multiply_accumulates() -> None:
    # conv: 2 x 2 places, 6 outputs, 27 inputs; linear: 24 x 5.
    assert multiply_accumulates(Small(6).eval(), torch.zeros(1, 3, 4, 4)) == 4 * 6 * 27 + 24 * 5


def test_selection_respects_blocks() -> None:
    group = PruneGroup(0, 8, (), np.array([0, 0, 0, 0, 1, 1, 1, 1]), np.array([1, 1]))
    removed = some_of_each_block(group, 2, np.random.default_rng(0))
    assert np.bincount(group.block_of[removed]).tolist() == [2, 2]
    everything = some_of_each_block(group, 9, np.random.default_rng(0))
    assert np.bincount(group.block_of[everything]).tolist() == [3, 3]


def test_selection_respects_steps() -> None:
    group = PruneGroup(0, 12, (), np.repeat([0, 1], [4, 8]), np.array([1, 2]))
    removed = some_of_each_block(group, 2, np.random.default_rng(0))
    assert np.bincount(group.block_of[removed]).tolist() == [2, 4]
    everything = some_of_each_block(group, 9, np.random.default_rng(0))
    assert np.bincount(group.block_of[everything]).tolist() == [3, 6]
