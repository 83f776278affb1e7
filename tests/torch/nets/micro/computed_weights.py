"""Weights that are the result of a computation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from nets.micro._registry import image, micro

ORIGINAL = "parametrizations.weight.original"


@micro(
    image(),
    kept={
        f"conv.{ORIGINAL}0": (8, 1, 1, 1),
        f"conv.{ORIGINAL}1": (8, 3, 3, 3),
        "conv.bias": (8,),
        f"head.{ORIGINAL}1": (4, 8, 1, 1),
    },
)
class WeightNorm(nn.Module):
    """Direction and length of each filter are parameters; a length is that of the inputs that are left."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = parametrizations.weight_norm(nn.Conv2d(3, 16, 3))
        self.head = parametrizations.weight_norm(nn.Conv2d(16, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.conv(x)))


@micro(
    image(),
    kept={
        f"conv.{ORIGINAL}0": (3, 1, 1, 1),
        f"conv.{ORIGINAL}1": (3, 8, 3, 3),
        "conv.bias": (8,),
        "head.weight": (4, 8, 1, 1),
    },
)
class WeightNormTransposed(nn.Module):
    """Here a length is that of an input's filter, over the outputs that are left."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = parametrizations.weight_norm(nn.ConvTranspose2d(3, 16, 3))
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.conv(x)))


@micro(image(), optional=True)
class SpectralNorm(nn.Module):
    """The weight is divided by a norm over all of its channels; whatever is done must be right."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.middle = parametrizations.spectral_norm(nn.Conv2d(16, 16, 3))
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.middle(F.relu(self.conv(x)))))


class _StandardisedConv(nn.Conv2d):
    """Weights normalised over everything but the output axis, with a gain for each filter."""

    def __init__(self, inputs: int, outputs: int, kernel: int, groups: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, groups=groups)
        self.gain = nn.Parameter(torch.ones(outputs, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.groups == 1:
            flat = weight.reshape(1, self.out_channels, -1)
            weight = F.batch_norm(flat, None, None, weight=self.gain.view(-1), training=True, momentum=0.0).reshape_as(
                weight
            )
        else:
            variance, mean = torch.var_mean(weight, dim=(1, 2, 3), keepdim=True, correction=0)
            weight = self.gain * (weight - mean) * torch.rsqrt(variance + 1e-5)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


@micro(
    image(),
    kept={"a.weight": (8, 3, 3, 3), "a.gain": (8, 1, 1, 1), "b.weight": (8, 2, 1, 1), "c.weight": (4, 8, 1, 1)},
)
class WeightStandardisation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = _StandardisedConv(3, 16, 3)
        self.b = _StandardisedConv(16, 16, 1, groups=4)
        self.c = _StandardisedConv(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(self.b(F.relu(self.a(x)))))


@micro(image(), kept={"stem.weight": (8, 3, 1, 1), "head.weight": (4, 8, 1, 1)})
class DynamicConv(nn.Module):
    """Kernels mixed by an attention over experts, shared by the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 1)
        self.router = nn.Linear(16, 3)
        self.experts = nn.Parameter(torch.randn(3, 16, 16, 3, 3) * 0.1)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        weights = self.router(x.mean((0, 2, 3))).softmax(-1)
        return self.head(F.relu(F.conv2d(x, (weights[:, None, None, None, None] * self.experts).sum(0), padding=1)))


@micro(image(), kept={"head.weight": (4, 8, 1, 1)})
class ConditionalConv(nn.Module):
    """One kernel for each sample of the batch, run as one convolution with as many groups as samples."""

    def __init__(self) -> None:
        super().__init__()
        self.channels = 16
        self.stem = nn.Conv2d(3, 16, 1)
        self.router = nn.Linear(16, 3)
        self.experts = nn.Parameter(torch.randn(3, 16 * 16 * 9) * 0.1)
        self.after = nn.Conv2d(16, 16, 1)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        batch, channels, height, width = x.shape
        kernels = torch.sigmoid(self.router(x.mean((2, 3)))) @ self.experts
        kernels = kernels.view(batch * self.channels, channels, 3, 3)
        y = F.conv2d(x.reshape(1, batch * channels, height, width), kernels, padding=1, groups=batch)
        return self.head(F.relu(self.after(y.view(batch, self.channels, height, width))))


@micro(
    image(),
    kept={
        "stem.weight": (8, 3, 3, 3),
        "identity.weight": (8,),
        "dense.weight": (8, 8, 3, 3),
        "head.weight": (4, 8, 1, 1),
    },
)
class Reparameterisable(nn.Module):
    """RepVGG while it trains: 3x3, 1x1 and a lone batch norm, summed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.dense = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.point = nn.Conv2d(16, 16, 1, bias=False)
        self.identity = nn.BatchNorm2d(16)
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(2))
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.norms[0](self.dense(x)) + self.norms[1](self.point(x)) + self.identity(x)
        return self.head(F.relu(x))


@micro(image(), kept={"a.weight": (8, 3, 1, 1), "b.weight": (8, 3, 1, 1), "head.weight": (4, 8, 1, 1)})
class WeightsAdded(nn.Module):
    """One convolution with the sum of two weights, and a bias that a buffer scales."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 16, 1)
        self.b = nn.Conv2d(3, 16, 1, bias=False)
        self.register_buffer("scale", torch.rand(16) + 0.5)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(F.conv2d(x, self.a.weight + 0.5 * self.b.weight, self.a.bias * self.scale)))


@micro(image(), kept={"conv.weight": (8, 3, 3, 3), "head.weight": (4, 8)})
class LowRankUpdate(nn.Module):
    """A weight plus a product of two thin matrices, as adapters are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.head = nn.Linear(16, 4)
        self.lora_down = nn.Parameter(torch.randn(2, 16))
        self.lora_up = nn.Parameter(torch.randn(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x)).mean((2, 3))
        return F.linear(x, self.head.weight + self.lora_up @ self.lora_down, self.head.bias)


@micro(image(), kept={"conv.weight": (8, 3, 3, 3), "head.weight": (4, 8, 1, 1)})
class QuantisedWeights(nn.Module):
    """Weights rounded to a scale of their own largest value for each filter, as in quantisation-aware training."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.conv.weight.detach().abs().amax((1, 2, 3), keepdim=True) / 127
        weight = torch.clamp(torch.round(self.conv.weight / scale), -128, 127) * scale
        weight = self.conv.weight + (weight - self.conv.weight).detach()
        return self.head(F.relu(F.conv2d(x, weight, self.conv.bias)))
