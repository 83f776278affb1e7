"""Which lengths a forward reads, and what it gets."""

from __future__ import annotations

import copy
import importlib
import math
import operator
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from openwork.torch import analyze, prune, verify
from openwork.torch.size_reads import WatchedSize

CHANNELS = {
    "unpack": lambda x: [*x.shape],
    "index": lambda x: x.shape[1],
    "negative index": lambda x: x.shape[-3],
    "slice": lambda x: x.shape[:2],
    "size()": lambda x: x.size()[1],
    "size(1)": lambda x: x.size(1),
    "tuple": lambda x: tuple(x.shape),
    "list": lambda x: list(x.shape),
    "math.prod": lambda x: math.prod(x.shape),
    "np.prod": lambda x: np.prod(x.shape),
    "numel": lambda x: x.shape.numel(),
    "sum": lambda x: x.shape + (1,),  # noqa: RUF005
    "sum from the left": lambda x: (1,) + x.shape,  # noqa: RUF005
    "equal": lambda x: x.shape == (2, 8, 6, 6),
    "equal from the right": lambda x: (2, 8, 6, 6) == x.shape,  # noqa: SIM300
    "hash": lambda x: {x.shape: 1},
    "contains": lambda x: 8 in x.shape,
    "text": lambda x: f"{x.shape}",
    "torch function": lambda x: torch.zeros(x.shape),
    "list in torch function": lambda x: torch.zeros([*x.shape[:1], x.shape[1]]),
    "method": lambda x: x.expand(x.shape),
    "itemgetter": lambda x: operator.itemgetter(1)(x.shape),
    "copy": lambda x: copy.deepcopy(x.shape),
    "reversed": lambda x: list(reversed(x.shape)),
    "iterator": lambda x: next(iter(x.shape)),
}
OTHERS = {
    "slice": lambda x: x.shape[-2:],
    "index": lambda x: x.shape[-1] + x.shape[0],
    "unpacked slice": lambda x: [*x.size()[2:]],
    "length": lambda x: len(x.shape),
    "type": lambda x: isinstance(x.shape, torch.Size) and isinstance(x.shape, tuple),
    "interpolate": lambda x: F.interpolate(x, size=x.shape[-2:], mode="bilinear"),
}


class Reader(nn.Module):
    def __init__(self, read) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)
        self.read = read
        self.given = None

    def forward(self, x):
        x = self.first(x)
        self.read(x)
        return self.second(x).mean((2, 3))


@pytest.mark.parametrize("name", CHANNELS)
def test_a_read_of_channels_is_noticed(name) -> None:
    assert analyze(Reader(CHANNELS[name]), torch.randn(2, 3, 8, 8)).trace.lengths_read


@pytest.mark.parametrize("name", OTHERS)
def test_reads_of_other_lengths_cost_nothing(name) -> None:
    model, x = Reader(OTHERS[name]), torch.randn(2, 3, 8, 8)
    analysis = analyze(model, x)
    assert not analysis.trace.lengths_read
    pruned, plan = prune(model, x, ratio=0.5)
    assert verify(model, pruned, plan, x) < 1e-5


@pytest.mark.parametrize("name", [*CHANNELS, *OTHERS])
def test_code_gets_what_a_size_would_give(name) -> None:
    read = CHANNELS.get(name) or OTHERS[name]
    got = []
    model = Reader(lambda x: got.append(read(x)))
    x = torch.randn(2, 3, 8, 8)
    model(x)
    analyze(model, x)
    real, traced = got[:2]
    if isinstance(real, torch.Tensor):
        assert traced.shape == real.shape
    else:
        assert traced == real
        assert type(traced) is type(real)


def test_a_watched_size_pickles_and_shows_as_a_size() -> None:
    watched = WatchedSize(torch.Size([2, 3]), lambda axis: None)
    assert pickle.loads(pickle.dumps(watched)) == torch.Size([2, 3])
    assert repr(watched) == "torch.Size([2, 3])"
    assert watched < (2, 4)
    assert watched * 2 == torch.Size([2, 3, 2, 3])
    assert 2 * watched == torch.Size([2, 3, 2, 3])
    assert watched.index(3) == 1
    assert watched.count(2) == 1
    with pytest.raises(IndexError):
        watched[2]


class _Same(nn.Conv2d):
    """A convolution with a forward of its own, as many libraries have for padding."""

    def forward(self, x):
        return F.conv2d(F.pad(x, (1, 1, 1, 1)), self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class _Literal(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(F.pad(x, (1, 1, 1, 1)), self.weight, self.bias, self.stride, 0, self.dilation, 8)


@pytest.mark.parametrize(("kind", "kept"), [(_Same, 4), (_Literal, 8)])
def test_groups_that_a_forward_reads_or_states(kind, kept, monkeypatch) -> None:
    """Read from the attribute they follow the cut, which needs no other run; written in the code they hold."""
    repair = importlib.import_module("openwork.torch.repair")
    runs = []
    real = repair.replay
    monkeypatch.setattr(repair, "replay", lambda *args, **kwargs: runs.append(1) or real(*args, **kwargs))
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), kind(8, 8, 3, groups=8), nn.Conv2d(8, 6, 1), nn.ReLU(), nn.Conv2d(6, 4, 1)
    ).eval()
    x = torch.randn(2, 3, 8, 8)
    pruned, plan = prune(model, x, ratio=0.5)
    assert verify(model, pruned, plan, x) < 1e-5
    assert pruned[1].groups == kept
    assert type(model[1].groups) is type(pruned[1].groups) is int
    assert bool(runs) == (kind is _Literal)
