"""Every form of calibration data, and what is refused."""

from __future__ import annotations

import pytest
import torch

from openwork.errors import ConfigError
from openwork.torch.search._batches import read_batches

X, Z, Y = torch.randn(4, 3), torch.randn(4, 2), torch.arange(4)


def one(data):
    (batch,) = read_batches(data, 1)
    return batch


@pytest.mark.parametrize("data", [[X, Y], (X, Y), [(X,), Y], [[X, Y]], [(X, Y), (X, Y)], iter([(X, Y)])])
def test_one_input(data):
    batch = one(data)
    assert batch.inputs.args == (X,)
    assert batch.label is Y
    assert batch.samples == 4


@pytest.mark.parametrize("data", [[(X, Z), Y], [((X, Z), Y)], [(X, Z, Y)]])
def test_two_inputs(data):
    batch = one(data)
    assert batch.inputs.args == (X, Z)
    assert batch.label is Y


@pytest.mark.parametrize("name", ["label", "labels", "target"])
def test_named_arguments(name):
    batch = one([{"ids": X, name: Y}])
    assert batch.label is Y
    assert set(batch.inputs.kwargs) == {"ids", name}
    assert one([{"ids": X}, Y]).inputs.kwargs == {"ids": X}


def test_data_loader():
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=2)
    batches = read_batches(loader, 2)
    assert torch.equal(torch.cat([batch.inputs.args[0] for batch in batches]), X)
    assert torch.equal(torch.cat([batch.label for batch in batches]), Y)


def test_only_as_many_as_asked_for_are_read():
    def endless():
        while True:
            yield X, Y

    assert len(read_batches(endless(), 3)) == 3


def test_split():
    pieces = one([(X, Z), Y]).split(3)
    assert [piece.samples for piece in pieces] == [3, 1]
    assert torch.equal(torch.cat([piece.inputs.args[1] for piece in pieces]), Z)
    assert torch.equal(torch.cat([piece.label for piece in pieces]), Y)
    assert len(one([(X, torch.randn(5)), Y]).split(1)) == 1  # no common first axis


@pytest.mark.parametrize(
    ("data", "count", "message"),
    [
        (X, 1, "input_data is a tensor"),
        (3, 1, "input_data is a int"),
        ([X, Y], 2, "test_iteration is 2; input_data holds 1 batch,"),
        ([(X, Y)] * 3, 5, "test_iteration is 5; input_data holds 3 batches,"),
        ([], 1, "holds 0 batches"),
        (["a", "b"], 1, r"input_data\[0\] is a str"),
        ([X, X, X, [X]], 1, r"input_data\[0\] is a Tensor"),
    ],
)
def test_refused(data, count, message):
    with pytest.raises(ConfigError, match=message):
        read_batches(data, count)
