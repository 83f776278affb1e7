"""ResNet-20 for small images (He et al. 2015, section 4.2), with 1 x 1 convolutions where the width changes."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["ResNet20"]


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(inner)) + self.shortcut(x))


class ResNet20(nn.Module):
    """Images [n, 1, h, w] to logits [n, 10]; widths 16, 32 and 64."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        blocks = []
        width = 16
        for outputs, stride in ((16, 1), (32, 2), (64, 2)):
            for index in range(3):
                blocks.append(_Block(width, outputs, stride if index == 0 else 1))
                width = outputs
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.blocks(torch.relu(self.bn(self.conv(x))))
        return self.fc(features.mean((2, 3)))
