"""Channel orders: more magnitude kept by the masks, the same function."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import openwork.torch as amct
from openwork.torch.sparse24 import maskable_layers
from openwork.torch.sparse24.permute import permute_channels


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.one = nn.Conv2d(32, 24, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(24)
        self.two = nn.Conv2d(24, 32, 3, padding=1)
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.two(functional.relu(self.norm(self.one(x))))
        return self.head(x.mean((2, 3)))


class Concat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Conv2d(3, 16, 3, padding=1)
        self.right = nn.Conv2d(3, 24, 1)
        self.join = nn.Conv2d(40, 16, 3)
        self.head = nn.Linear(16 * 16, 5)

    def forward(self, x):
        x = torch.cat([self.left(x), functional.relu(self.right(x))], 1)
        return self.head(self.join(x).flatten(1))


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3)
        self.middle = nn.Conv2d(32, 48, 3, groups=2, padding=1)
        self.norm = nn.GroupNorm(4, 48)
        self.depthwise = nn.Conv2d(48, 48, 3, groups=48)
        self.up = nn.ConvTranspose2d(48, 16, 2, stride=2)

    def forward(self, x):
        return self.up(self.depthwise(self.norm(self.middle(self.stem(x)))))


class Shuffle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 1)
        self.one = nn.Conv2d(32, 32, 1, groups=2)
        self.two = nn.Conv2d(32, 32, 1, groups=2)
        self.out = nn.Conv2d(32, 8, 1)

    def forward(self, x):
        x = self.one(self.stem(x))
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        return self.out(self.two(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 32)
        self.norm = nn.LayerNorm(32)
        self.qkv = nn.Linear(32, 96)
        self.proj = nn.Linear(32, 32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        x = self.embed(x.flatten(2)[..., :6])
        n, t, c = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, t, 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, c)
        x = x + self.proj(y)
        return self.head((x + self.down(functional.gelu(self.up(x)))).mean(1))


def _kept(model: nn.Module, names: list[str]) -> float:
    """The two largest of each four input channels, by sorting."""
    total = 0.0
    for name in names:
        layer = model.get_submodule(name)
        axis = 0 if isinstance(layer, nn.ConvTranspose2d) else 1
        values = np.abs(np.moveaxis(layer.weight.detach().double().numpy(), axis, -1))
        values = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % 4)])
        total += np.sort(values.reshape(*values.shape[:-1], -1, 4), axis=-1)[..., 2:].sum()
    return float(total)


@pytest.mark.parametrize("kind", [Residual, Concat, Grouped, Shuffle, Transformer])
def test_the_function_stays_and_masks_keep_more(kind):
    torch.manual_seed(0)
    model = kind().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            nn.init.normal_(module.weight)
    before = copy.deepcopy(model)
    names = [name for name, why in maskable_layers(model).items() if not why]
    # Another input than the one that the reordering was checked with.
    x, other = torch.randn(2, 3, 6, 6), torch.randn(2, 3, 6, 6)
    report = permute_channels(model, x, names, seconds=1.0)
    changed = [group for group in report.groups if not group.reason]
    assert changed
    with torch.no_grad():
        expected = before(other)
        assert float((model(other) - expected).abs().max() / expected.abs().max()) <= 1e-5
    assert _kept(model, names) > _kept(before, names)
    assert {name for group in report.groups for name in group.layers} | {n for n, _ in report.skipped} == set(names)
    for group in changed:
        assert group.after > group.before
    assert all(len(line) > 0 for line in str(report).splitlines())


def test_layers_that_cannot_be_reordered_are_told_one_by_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 4))
    before = copy.deepcopy(model.state_dict())
    report = permute_channels(model, torch.randn(2, 16), ["0", "2"])
    assert dict(report.skipped) == {"0": "its input channels are not free to move"}
    assert "eight or more" in report.groups[0].reason
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_config_field(tmp_path):
    (tmp_path / "config.cfg").write_text(
        "prune_config { n_out_of_m_pruner { l1_selective_prune { permute: true } } }\n"
    )
    torch.manual_seed(0)
    model = Residual().eval()
    x = torch.randn(2, 3, 6, 6)
    masked = amct.create_prune_retrain_model(model, x, tmp_path / "config.cfg", tmp_path / "record.txt")
    assert not torch.equal(masked.one.weight, model.one.weight)
    values = [sorted(weight.flatten().tolist()) for weight in (masked.one.weight, model.one.weight)]
    assert values[0] == values[1]
    plain = copy.deepcopy(model)
    plain.load_state_dict(masked.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(plain(x), model(x), rtol=1e-4, atol=1e-5)
    torch.save(masked.state_dict(), tmp_path / "weights.pth")
    restored = amct.restore_prune_retrain_model(
        model, x, tmp_path / "record.txt", tmp_path / "config.cfg", tmp_path / "weights.pth"
    )
    torch.testing.assert_close(restored.eval()(x), masked.eval()(x))
