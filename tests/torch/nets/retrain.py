"""Networks and config files for the tests of AMCT's flow."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from openwork.record import PruneNode, Record, load_record
from openwork.torch import create_prune_retrain_model

__all__ = [
    "ConcatNet",
    "DeepNet",
    "GroupChain",
    "GroupSums",
    "LinearNorm",
    "SmallNet",
    "channels_config",
    "create",
    "node_of",
    "override",
    "settle_",
    "written",
]


def channels_config(ratio: float | str = 0.5, aligned: bool = False, extra: str = "") -> str:
    """A config that prunes channels everywhere."""
    return (
        f"prune_config {{ filter_pruner {{ balanced_l2_norm_filter_prune {{ prune_ratio: {ratio} "
        f"ascend_optimized: {str(aligned).lower()} }} }} }}\n{extra}"
    )


def override(kind: str, name: str, ratio: float, aligned: bool = False) -> str:
    """An override of one layer (kind ``layer``) or of one type (kind ``type``)."""
    field = {"layer": "override_layer_configs", "type": "override_layer_types"}[kind]
    return f'{field} {{ layer_{"name" if kind == "layer" else "type"}: "{name}" {channels_config(ratio, aligned)} }}\n'


def written(folder: Path, text: str, name: str = "prune.cfg") -> str:
    """The path of a file with this text."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def settle_(model: nn.Module) -> nn.Module:
    """Random statistics and affine parameters for every norm, so that no channel is like another."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
                module.running_mean.copy_(torch.randn(module.num_features, generator=generator) * 0.3)
                module.running_var.copy_(torch.rand(module.num_features, generator=generator) + 0.5)
                module.weight.copy_(torch.rand(module.num_features, generator=generator) + 0.5)
                module.bias.copy_(torch.randn(module.num_features, generator=generator) * 0.3)
    return model


class SmallNet(nn.Module):
    """Three convolutions with norms, pooling, two linear layers; input [n, 3, 16, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 20, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(20)
        self.conv2 = nn.Conv2d(20, 24, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(24)
        self.conv3 = nn.Conv2d(24, 32, 3, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Linear(32, 48)
        self.fc2 = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        x = self.pool(torch.relu(self.conv3(x))).flatten(1)
        return self.fc2(torch.relu(self.fc1(x)))


class GroupSums(nn.Module):
    """Known case 1: four grouped convolutions whose results are added; input [1, 16, 28, 28]."""

    def __init__(self) -> None:
        super().__init__()

        def unit(into: int, out: int, size: int, **more: object) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(into, out, size, padding=size // 2, groups=2, **more), nn.BatchNorm2d(out))

        self.a = unit(16, 160, 3, padding_mode="circular")
        self.b, self.c, self.d = unit(16, 160, 3), unit(16, 160, 3), unit(16, 160, 3)
        self.head1, self.head2 = unit(160, 80, 1), unit(160, 80, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.a(x) + self.b(x)
        return self.head1(first + self.c(x)), self.head2(first + self.d(x))


class GroupChain(nn.Sequential):
    """Known case 2; input [1, 16, 8, 8]."""

    def __init__(self) -> None:
        convs = [nn.Conv2d(16, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1, groups=2)]
        convs += [nn.Conv2d(64, 64, 3, padding=1, groups=32), nn.Conv2d(64, 8, 1)]
        super().__init__(*(part for conv in convs for part in (conv, nn.BatchNorm2d(conv.out_channels))))


class LinearNorm(nn.Module):
    """Known case 3; input [4, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.bn1 = nn.Linear(16, 1024), nn.BatchNorm1d(1024)
        self.fc2, self.bn2 = nn.Linear(1024, 128, bias=False), nn.BatchNorm1d(128)
        self.fc3 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(torch.relu(self.bn2(self.fc2(self.bn1(self.fc1(x))))))


class DeepNet(nn.Module):
    """Known case 4: plain, depthwise and grouped convolutions, then linear layers; input [n, 2, 16, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        sizes = ((2, 16, 1), (16, 16, 1), (16, 16, 16), (16, 16, 16), (16, 32, 4), (32, 8, 8))
        for into, out, groups in sizes:
            self.layers.append(
                nn.Sequential(nn.Conv2d(into, out, 3, padding=1, groups=groups), nn.BatchNorm2d(out), nn.ReLU())
            )
        self.fc1, self.bn1 = nn.Linear(2048, 1024), nn.BatchNorm1d(1024)
        self.fc2, self.bn2 = nn.Linear(1024, 128), nn.BatchNorm1d(128)
        self.fc3 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x).flatten(1)
        return self.fc3(torch.relu(self.bn2(self.fc2(torch.relu(self.bn1(self.fc1(x)))))))


class ConcatNet(nn.Module):
    """Known case 5: a (8 channels) and b (12) concatenated into c; input [n, 3, 8, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 12, 3, padding=1)
        self.c = nn.Conv2d(20, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.cat([self.a(x), self.b(x)], 1))


def create(model: nn.Module, inputs: object, folder: Path, text: str) -> tuple[nn.Module, Record]:
    """`create_prune_retrain_model` with this config; the pruned model and the record ``record.txt``."""
    record = folder / "record.txt"
    pruned = create_prune_retrain_model(model, inputs, written(folder, text), str(record))
    return pruned, load_record(record)


def node_of(record: Record, layer: str, side: str = "producers") -> PruneNode:
    """The only node of a layer on one side of the record."""
    (found,) = [node for group in record.channels for node in getattr(group, side) if node.name == layer]
    return found
