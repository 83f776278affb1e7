"""Masks chosen by compiled loops on the way through a weight, against the same training with NumPy alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from openwork.config import GradMode, NofMSetting
from openwork.sparsity import compiled, nm_mask
from openwork.torch.sparse24 import apply_24, masked_layers
from openwork.torch.sparse24.module import state_of

pytest.importorskip("numba")

SETTINGS = {
    "once": NofMSetting(),
    "always": NofMSetting(update_freq=1),
    "every third": NofMSetting(update_freq=3),
    "1:3": NofMSetting(update_freq=1, n=1, m=3),
    "sr_ste": NofMSetting(update_freq=1, grad_mode=GradMode.SR_STE, sr_ste_decay=0.05),
}


class _Net(nn.Module):
    """Large weights with few rows and with many, a grouped and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(60, 260, 3, padding=1)
        self.grouped = nn.Conv2d(260, 512, 3, groups=4, bias=False)
        self.transposed = nn.ConvTranspose2d(512, 40, 2)
        self.linear = nn.Linear(360, 250)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.convolution(x).relu()
        x = self.transposed(self.grouped(x).relu())
        return self.linear(x.flatten(1))


def _train(setting: NofMSetting, dtype: torch.dtype, batch: int) -> nn.Module:
    torch.manual_seed(0)
    net = _Net().to(dtype)
    net = apply_24(net, dict.fromkeys(("convolution", "grouped", "transposed", "linear"), setting))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(5):
        optimizer.zero_grad()
        net(torch.randn(batch, 60, 4, 4, dtype=dtype)).square().mean().backward()
        optimizer.step()
    return net


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize(("dtype", "batch"), [(torch.float32, 1), (torch.float32, 9), (torch.float64, 1)])
def test_training_is_that_with_numpy(setting, dtype, batch):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "kernels", lambda: None)
        expected = _train(setting, dtype, batch)
    net = _train(setting, dtype, batch)
    for name, layer in masked_layers(net).items():
        assert torch.equal(state_of(layer).mask, state_of(masked_layers(expected)[name]).mask), name
    for name, value in expected.state_dict().items():
        assert torch.equal(net.state_dict()[name], value), name


@pytest.mark.parametrize("batch", [4, 64])
def test_a_forward_that_fails_leaves_the_older_mask_and_a_new_one_due(batch):
    torch.manual_seed(0)
    net = apply_24(nn.Sequential(nn.Linear(600, 300)), {"0": NofMSetting(update_freq=2)})
    for _ in range(2):
        net(torch.randn(batch, 600))
    older = state_of(net[0]).mask
    with torch.no_grad():
        net[0].weight.copy_(torch.randn(300, 600))
    with pytest.raises(RuntimeError):
        net(torch.randn(batch, 599))
    assert state_of(net[0]).mask is older
    net(torch.randn(batch, 600))
    assert torch.equal(state_of(net[0]).mask, nm_mask(net[0].weight.detach()))
    with torch.no_grad():
        net[0].weight.copy_(torch.randn(300, 600))
    chosen = state_of(net[0]).mask
    net(torch.randn(batch, 600))
    assert state_of(net[0]).mask is chosen


def test_two_forwards_before_one_backward_use_the_mask_of_each():
    torch.manual_seed(0)
    net = apply_24(nn.Sequential(nn.Linear(600, 300, bias=False)), {"0": NofMSetting(update_freq=1)})
    net(torch.randn(4, 600))
    first, second = torch.randn(4, 600), torch.randn(4, 600)
    out = net(first).sum()
    other = copy.deepcopy(net)
    out = out + net(second).sum()
    out.backward()
    mask = nm_mask(net[0].weight.detach())
    torch.testing.assert_close(net[0].weight.grad, (first + second).sum(0).expand(300, 600) * mask)
    assert torch.equal(state_of(other[0]).mask, mask)
