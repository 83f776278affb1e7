"""Networks, data and training that the search benchmarks share.

Data, offline: scikit-learn's digits (enlarged to 16x16) and Fashion-MNIST, read from idx.gz files in the folder
that FASHION_MNIST names (Debian package dataset-fashion-mnist puts them under /usr/share/datasets).
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

FASHION_MNIST = os.environ.get("FASHION_MNIST", "/usr/share/datasets/fashion-mnist")
Split = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Basic residual block."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.downsample = (
            nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))
            if stride != 1 or inner != outer
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x))


def resnet20(width: int = 16) -> nn.Module:
    """ResNet-20 for small images (He et al., 2016)."""
    layers: list[nn.Module] = [nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inner = width
    for stage in range(3):
        for block in range(3):
            outer = width << stage
            layers.append(Block(inner, outer, 2 if stage and not block else 1))
            inner = outer
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, 10))


def vgg(widths: tuple[int, ...] = (32, 32, 64, 64, 128, 128)) -> nn.Module:
    """Six convolutions with batch norm, pooling after every second."""
    layers: list[nn.Module] = []
    inner = 1
    for index, outer in enumerate(widths):
        layers += [nn.Conv2d(inner, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU()]
        if index % 2:
            layers.append(nn.MaxPool2d(2))
        inner = outer
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, 10))


class Inverted(nn.Module):
    """Inverted residual block."""

    def __init__(self, inner: int, outer: int, stride: int, expand: int = 4) -> None:
        super().__init__()
        hidden = inner * expand
        self.body = nn.Sequential(
            nn.Conv2d(inner, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(),
            nn.Conv2d(hidden, outer, 1, bias=False),
            nn.BatchNorm2d(outer),
        )
        self.add = stride == 1 and inner == outer

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return x + y if self.add else y


def mobilenet(width: int = 16) -> nn.Module:
    """A small net of inverted residual blocks, MobileNetV2 in kind (Sandler et al., 2018)."""
    layers: list[nn.Module] = [nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU6()]
    inner = width
    for outer, stride in ((16, 1), (24, 2), (24, 1), (40, 2), (40, 1), (40, 1)):
        layers.append(Inverted(inner, outer * width // 16, stride))
        inner = outer * width // 16
    head = 8 * width
    layers += [nn.Conv2d(inner, head, 1, bias=False), nn.BatchNorm2d(head), nn.ReLU6()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(head, 10))


class Attention(nn.Module):
    """Multi-head self-attention with one fused qkv layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, self.head_width).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        return self.proj(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Transformer encoder layer, norm first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A small vision transformer; tokens are averaged before the head."""

    def __init__(self, size: int, width: int = 64, depth: int = 4, heads: int = 8, patch: int = 4) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, patch, patch)
        self.position = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2, width))
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.layers(x)).mean(1))


def build(name: str, size: int, width: float = 1.0) -> nn.Module:
    """A network by name (resnet20, vgg, mobilenet, vit), for images of `size`, its channels times `width`."""
    makers: dict[str, Callable[[], nn.Module]] = {
        "resnet20": lambda: resnet20(int(16 * width)),
        "vgg": lambda: vgg(tuple(int(channels * width) for channels in (32, 32, 64, 64, 128, 128))),
        "mobilenet": lambda: mobilenet(int(16 * width)),
        "vit": lambda: ViT(size, int(64 * width), heads=int(8 * width), patch=size // 4),
    }
    return makers[name]()


def digits() -> tuple[Split, Split]:
    """scikit-learn's digits at 16x16: 1347 to train, 450 to test."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    images = F.interpolate(images, scale_factor=2, mode="bilinear", align_corners=False)
    labels = torch.tensor(data.target)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
    train, test = order[:1347], order[1347:]
    return (images[train], labels[train]), (images[test], labels[test])


def fashion(train_images: int = 6000, size: int = 28, tuning: bool = False) -> tuple[Split, Split]:
    """Fashion-MNIST: the first `train_images` to train, all 10,000 test images; 14 averages 2x2 pixels.

    `tuning`: for choosing constants, the next `train_images` to train and training images 50,000 to 53,999 to judge by.
    """

    def read(name: str) -> Tensor:
        with gzip.open(Path(FASHION_MNIST) / name) as stream:
            content = stream.read()
        dimensions = content[3]
        shape = [int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions)]
        return torch.from_numpy(np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy())

    def split(part: str, first: int, end: int) -> Split:
        pixels = read(f"{part}-images-idx3-ubyte.gz")[first:end, None].float() / 127.5 - 1
        if size == 14:
            pixels = F.avg_pool2d(pixels, 2)
        return pixels, read(f"{part}-labels-idx1-ubyte.gz")[first:end].long()

    if tuning:
        return split("train", train_images, 2 * train_images), split("train", 50_000, 54_000)
    return split("train", 0, train_images), split("t10k", 0, 10_000)


def load(data: str) -> tuple[Split, Split, int]:
    """Training split, test split and image size of ``digits``, ``fashion14``, ``fashion28`` or ``tuning14``."""
    if data == "digits":
        return (*digits(), 16)
    size = int(data[-2:])
    return (*fashion(size=size, tuning=data.startswith("tuning")), size)


def train(
    model: nn.Module, split: Split, epochs: float, rate: float, seed: int, batch: int = 64, is_vit: bool = False
) -> nn.Module:
    """Train with one-cycle SGD (AdamW for the transformer); the same for every method that is compared."""
    images, labels = split
    generator = torch.Generator().manual_seed(seed)
    optimizer: torch.optim.Optimizer
    if is_vit:
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate / 50, weight_decay=0.05)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4, nesterov=True)
    steps = max(1, round(epochs * (len(labels) // batch)))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=[group["lr"] for group in optimizer.param_groups], total_steps=steps, pct_start=0.2
    )
    model.train()
    done = 0
    while done < steps:
        order = torch.randperm(len(labels), generator=generator)
        for start in range(0, len(order) - batch + 1, batch):
            if done == steps:
                break
            pick = order[start : start + batch]
            loss = F.cross_entropy(model(images[pick]), labels[pick])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            done += 1
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, split: Split) -> float:
    """Share of right answers in eval mode."""
    model.eval()
    images, labels = split
    right = 0
    for start in range(0, len(labels), 500):
        right += int((model(images[start : start + 500]).argmax(1) == labels[start : start + 500]).sum())
    return right / len(labels)
