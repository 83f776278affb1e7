"""Norms, per-channel parameters and constants."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nets.micro._registry import floats, image, micro

CONV = {"conv.weight": (8, 3, 3, 3), "head.weight": (4, 8, 1, 1)}


class _Between(nn.Module):
    """conv 3 -> 16, `between`, 1x1 conv 16 -> 4."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.head = nn.Conv2d(16, 4, 1)

    def between(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.between(self.conv(x))))


@micro(image(), kept=CONV | {"norm.weight": (8,), "norm.bias": (8,)})
class GroupNorm(_Between):
    """Four groups of four: the statistics of each group run over what is left of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, 16)

    def between(self, x: Tensor) -> Tensor:
        return self.norm(x)


@micro(image(), kept=CONV | {"norm.weight": (8,)})
class GroupNormOneGroup(_Between):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, 16)

    def between(self, x: Tensor) -> Tensor:
        return self.norm(x)


@micro(image(), kept=CONV | {"norm.weight": (8,)})
class GroupNormEachChannel(_Between):
    """As many groups as channels: `num_groups` itself has to shrink."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(16, 16)

    def between(self, x: Tensor) -> Tensor:
        return self.norm(x)


@micro(image(), kept=CONV | {"norm.weight": (8,), "tracked.running_mean": (8,)})
class InstanceNorm(_Between):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm2d(16, affine=True)
        self.tracked = nn.InstanceNorm2d(16, affine=True, track_running_stats=True)
        self.plain = nn.InstanceNorm2d(16)

    def between(self, x: Tensor) -> Tensor:
        return self.plain(self.norm(x) + self.tracked(x))


@micro(image(), kept=CONV | {"norm.weight": (8,)})
class BatchNormWithoutStatistics(_Between):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(16, track_running_stats=False)

    def between(self, x: Tensor) -> Tensor:
        return self.norm(x)


@micro(floats((2, 5, 6)), kept={"inner.weight": (8, 6), "norm.weight": (8,), "norm.bias": (8,), "head.weight": (4, 8)})
class LayerNormLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.norm(self.inner(x))))


@micro(image(), kept=CONV | {"norm.weight": (8,)})
class LayerNormPermuted(_Between):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def between(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@micro(image(), kept=CONV | {"norm.weight": (8, 6, 6)})
class LayerNormWholeImage(_Between):
    """Normalised over channels and space, with weights of the whole shape."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm([16, 6, 6])

    def between(self, x: Tensor) -> Tensor:
        return self.norm(x)


@micro(image(), kept=CONV | {"weight": (8,), "bias": (8,)})
class LayerNormByHand(_Between):
    """ConvNeXt's channels-first norm: mean and variance written out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.bias = nn.Parameter(torch.zeros(16))

    def between(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


@micro(floats((2, 5, 6)), kept={"inner.weight": (8, 6), "norm.weight": (8,), "weight": (8,), "head.weight": (4, 8)})
class RmsNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 16)
        self.norm = nn.RMSNorm(16)
        self.weight = nn.Parameter(torch.ones(16))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.inner(x)) + 0.1
        x = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return self.head(x)


@micro(image(), kept=CONV | {"gamma": (1, 8, 1, 1), "beta": (1, 8, 1, 1)})
class GlobalResponseNorm(_Between):
    """ConvNeXt V2: the spatial norm of each channel, divided by its mean over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.zeros(1, 16, 1, 1))
        self.beta = nn.Parameter(torch.zeros(1, 16, 1, 1))

    def between(self, x: Tensor) -> Tensor:
        size = torch.norm(x, p=2, dim=(2, 3), keepdim=True)
        return x + self.gamma * (x * (size / (size.mean(1, keepdim=True) + 1e-6))) + self.beta


@micro(image(), kept=CONV)
class ChannelSoftmax(_Between):
    """A softmax across channels: the masked original must take it over what is left."""

    def between(self, x: Tensor) -> Tensor:
        return x * torch.softmax(x, dim=1)


@micro(image(), kept=CONV)
class NormalisedVectors(_Between):
    def between(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=1) + x / (1 + x.norm(dim=1, keepdim=True))


@micro(image(), kept=CONV | {"prelu.weight": (8,), "single.weight": (1,)})
class PRelu(_Between):
    def __init__(self) -> None:
        super().__init__()
        self.prelu = nn.PReLU(16)
        self.single = nn.PReLU()

    def between(self, x: Tensor) -> Tensor:
        return self.single(self.prelu(x))


@micro(image(), kept=CONV | {"mean": (8,), "variance": (8,), "weight": (8,), "bias": (8,)})
class FunctionalBatchNorm(_Between):
    """Frozen batch norm: statistics are plain buffers, once by the functional, once by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.rand(16))
        self.register_buffer("variance", torch.rand(16) + 0.5)
        self.weight = nn.Parameter(torch.ones(16))
        self.bias = nn.Parameter(torch.zeros(16))

    def between(self, x: Tensor) -> Tensor:
        x = F.batch_norm(x, self.mean, self.variance, self.weight, self.bias, False)
        scale = self.weight.view(1, -1, 1, 1) * (self.variance.view(1, -1, 1, 1) + 1e-5).rsqrt()
        return x * scale + (self.bias.view(1, -1, 1, 1) - self.mean.view(1, -1, 1, 1) * scale)


@micro(image(), kept=CONV | {"gamma": (8,), "a.weight": (8, 8, 3, 3)})
class LayerScale(_Between):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(16, 16, 3, padding=1)
        self.gamma = nn.Parameter(torch.full((16,), 0.1))

    def between(self, x: Tensor) -> Tensor:
        return x + self.a(x).mul(self.gamma.reshape(1, -1, 1, 1))


@micro(image(), kept=CONV | {"scale": (8, 1, 1), "offset": (1, 8, 1, 1)})
class ChannelBuffers(_Between):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(16, 1, 1) + 0.5)
        self.register_buffer("offset", torch.rand(1, 16, 1, 1))

    def between(self, x: Tensor) -> Tensor:
        return (x - self.offset) / self.scale


@micro(image(), frozen=("conv.weight",), nothing=True)
class ChannelConstantInForward(_Between):
    """Each channel meets its own number, made anew from the size: fewer channels would meet other numbers."""

    def between(self, x: Tensor) -> Tensor:
        return x * torch.linspace(0.5, 1.5, x.shape[1]).view(1, -1, 1, 1)


@micro(image(), frozen=("conv.weight",), nothing=True)
class ChannelConstantPlainAttribute(_Between):
    """A tensor attribute that is no buffer belongs to no state that a plan could cut."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.linspace(0.5, 1.5, 16).view(1, 16, 1, 1)

    def between(self, x: Tensor) -> Tensor:
        return x * self.scale.to(x.device)


@micro(floats((2, 3, 8, 8), (2, 16, 6, 6)), frozen=("conv.weight",), nothing=True)
class SecondInputAdded(nn.Module):
    """A second input meets every channel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(F.relu(self.conv(x) + y))


@micro(image(), frozen=("conv.weight",), nothing=True)
class LocalResponseNorm(_Between):
    """A window over neighbouring channels: without one of them its neighbours would mean something else."""

    def between(self, x: Tensor) -> Tensor:
        return F.local_response_norm(x, 3)
