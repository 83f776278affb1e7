"""Convolutions, residual sums, concatenations: what most image networks are made of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nets.micro._registry import floats, image, micro


@micro(
    image(),
    kept={
        "conv1.weight": (8, 3, 3, 3),
        "bn.weight": (8,),
        "bn.bias": (8,),
        "bn.running_mean": (8,),
        "bn.running_var": (8,),
        "conv2.weight": (5, 8, 3, 3),
    },
    frozen=("conv1.weight", "conv2.weight"),
)
class PlainConvBn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(F.relu(self.bn(self.conv1(x))))


@micro(image(), kept={"0.weight": (8, 3, 3, 3), "0.bias": (8,), "2.weight": (6, 8, 3, 3), "5.weight": (4, 6)})
class PoolFlattenLinear(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 3),
            nn.ReLU(),
            nn.Conv2d(16, 12, 3),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(12, 4),
        )


@micro(image(), kept={"0.weight": (4, 3, 3, 3), "3.weight": (10, 36)})
class FlattenSpatialLinear(nn.Sequential):
    """Each channel feeds 3 x 3 inputs of the linear layer."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10))


@micro(
    image(),
    kept={
        "stem.weight": (8, 3, 3, 3),
        "a.weight": (8, 8, 3, 3),
        "b.weight": (8, 8, 3, 3),
        "head.weight": (4, 8, 1, 1),
    },
)
class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.a = nn.Conv2d(16, 16, 3, padding=1)
        self.bn = nn.BatchNorm2d(16)
        self.b = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(F.relu(x + self.b(F.relu(self.bn(self.a(x))))))


@micro(
    image(),
    kept={
        "stem.weight": (4, 3, 3, 3),
        "a.weight": (8, 4, 3, 3),
        "shortcut.weight": (8, 4, 1, 1),
        "head.weight": (4, 8, 1, 1),
    },
)
class ResidualProjection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.a = nn.Conv2d(8, 16, 3, padding=1, stride=2)
        self.shortcut = nn.Conv2d(8, 16, 1, stride=2)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        return self.head(F.relu(self.a(x) + self.shortcut(x)))


@micro(image(16), frozen=("a.weight",), nothing=True)
class ResidualWithInput(nn.Module):
    """The sum includes the model's input, whose channels cannot go."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.a(x))


@micro(image(), kept={"a.weight": (4, 3, 1, 1), "b.weight": (8, 3, 3, 3), "c.weight": (5, 12, 1, 1)})
class Concat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 1)
        self.b = nn.Conv2d(3, 16, 3, padding=1)
        self.c = nn.Conv2d(24, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.cat([self.a(x), F.relu(self.b(x))], dim=1))


@micro(
    image(),
    kept={
        "a.weight": (4, 3, 1, 1),
        "b.weight": (2, 4, 1, 1),
        "c.weight": (6, 6, 1, 1),
        "head.weight": (4, 12, 1, 1),
        "bn.weight": (12,),
    },
)
class ConcatOfConcat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 1)
        self.b = nn.Conv2d(8, 4, 1)
        self.c = nn.Conv2d(12, 12, 1)
        self.bn = nn.BatchNorm2d(24)
        self.head = nn.Conv2d(24, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        ab = torch.cat([a, F.relu(self.b(F.relu(a)))], dim=1)
        return self.head(F.relu(self.bn(torch.cat([ab, self.c(ab)], dim=1))))


@micro(image(), kept={"a.weight": (8, 3, 3, 3), "head.weight": (4, 16, 1, 1)})
class ConcatWithItself(nn.Module):
    """One channel at two places of the same axis."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3)
        self.head = nn.Conv2d(32, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.head(torch.cat([x, F.relu(x)], dim=1))


@micro(
    image(),
    kept={
        "a.weight": (4, 3, 1, 1),
        "b.weight": (4, 3, 1, 1),
        "c.weight": (8, 3, 1, 1),
        "head.weight": (4, 8, 1, 1),
    },
)
class ConcatPlusWhole(nn.Module):
    """Half of c is tied to a, the other half to b."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 1)
        self.b = nn.Conv2d(3, 8, 1)
        self.c = nn.Conv2d(3, 16, 1)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(torch.cat([self.a(x), self.b(x)], 1) + self.c(x)))


@micro(image(), kept={"a.weight": (4, 3, 1, 1), "head.weight": (4, 7, 1, 1)})
class ConcatWithInput(nn.Module):
    """The model's input stays whole beside channels that go."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 1)
        self.head = nn.Conv2d(11, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([x, self.a(x)], 1))


@micro(
    image(),
    kept={
        "layers.0.weight": (4, 3, 3, 3),
        "layers.1.weight": (4, 7, 3, 3),
        "layers.2.weight": (4, 11, 3, 3),
        "head.weight": (4, 15, 1, 1),
    },
)
class DenseBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 + 8 * i, 8, 3, padding=1) for i in range(3))
        self.head = nn.Conv2d(27, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(F.relu(layer(torch.cat(features, 1))))
        return self.head(torch.cat(features, 1))


@micro(image(), kept={"stem.weight": (8, 3, 3, 3), "shared.weight": (8, 8, 3, 3), "head.weight": (4, 8, 1, 1)})
class SharedConvCalledTwice(nn.Module):
    """Its output is its own input, so both axes of its weight are one set of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.shared = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(F.relu(self.shared(F.relu(self.shared(x)))))


@micro(
    image(),
    kept={
        "a.weight": (4, 3, 1, 1),
        "b.weight": (4, 3, 1, 1),
        "shared.weight": (6, 4, 3, 3),
        "head.weight": (4, 12, 1, 1),
    },
)
class SharedConvOnTwoBranches(nn.Module):
    """A shared layer ties the two branches that feed it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 1)
        self.b = nn.Conv2d(3, 8, 1)
        self.shared = nn.Conv2d(8, 12, 3)
        self.head = nn.Conv2d(24, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([F.relu(self.shared(self.a(x))), self.shared(F.relu(self.b(x)))], 1))


@micro(
    image(),
    kept={
        "stem.weight": (8, 3, 1, 1),
        "a.weight": (8, 8, 1, 1),
        "b.weight": (8, 8, 1, 1),
        "a.bias": (8,),
        "b.bias": (8,),
    },
)
class TiedParameters(nn.Module):
    """Two layers, one Parameter, own biases."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 1)
        self.a = nn.Conv2d(16, 16, 1)
        self.b = nn.Conv2d(16, 16, 1)
        self.b.weight = self.a.weight
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.b(F.relu(self.a(self.stem(x))))))


@micro(
    image(),
    kept={
        "conv.weight": (8, 3, 3, 3),
        "reduce.weight": (4, 8, 1, 1),
        "expand.weight": (8, 4, 1, 1),
        "head.weight": (4, 8, 1, 1),
    },
)
class SqueezeExcitationConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.reduce = nn.Conv2d(16, 8, 1)
        self.expand = nn.Conv2d(8, 16, 1)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        scale = self.expand(F.relu(self.reduce(x.mean((2, 3), keepdim=True))))
        return self.head(x * torch.sigmoid(scale))


@micro(
    image(),
    kept={
        "conv.weight": (8, 3, 3, 3),
        "reduce.weight": (4, 8),
        "expand.weight": (8, 4),
        "head.weight": (4, 8, 1, 1),
    },
)
class SqueezeExcitationLinear(nn.Module):
    """Pooled, viewed flat, gated by view back: sizes come from x.size()."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.reduce = nn.Linear(16, 8)
        self.expand = nn.Linear(8, 16)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        batch, channels, _, _ = x.size()
        scale = F.adaptive_avg_pool2d(x, 1).view(batch, channels)
        scale = torch.sigmoid(self.expand(F.relu(self.reduce(scale)))).view(batch, channels, 1, 1)
        return self.head(x * scale.expand_as(x))


@micro(image(), kept={"conv.weight": (8, 3, 3, 3), "eca.weight": (1, 1, 3), "head.weight": (4, 8, 1, 1)}, ratio=0.5)
class ChannelMeanGate(nn.Module):
    """A gate from the mean over channels (spatial attention): a statistic across channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.gate = nn.Conv2d(2, 1, 3, padding=1)
        self.eca = nn.Conv1d(1, 1, 3, padding=1)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        pooled = torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)
        pooled = self.gate(pooled)
        pooled = self.eca(pooled.flatten(2).mean(-1, keepdim=True).transpose(1, 2)).transpose(1, 2).unsqueeze(-1)
        return self.head(x * torch.sigmoid(pooled))


@micro(image(), frozen=("conv.weight",), nothing=True)
class ConvAcrossChannels(nn.Module):
    """Efficient channel attention: a 1-d convolution runs along the channel axis, so neighbours matter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.eca = nn.Conv1d(1, 1, 3, padding=1)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        pooled = x.mean((2, 3)).unsqueeze(1)
        return self.head(x * torch.sigmoid(self.eca(pooled)).transpose(1, 2).unsqueeze(-1))


@micro(
    image(),
    kept={
        "high.weight": (4, 3, 3, 3),
        "low.weight": (8, 3, 3, 3),
        "up.weight": (4, 8, 1, 1),
        "down.weight": (8, 4, 3, 3),
        "head.weight": (4, 12, 1, 1),
    },
)
class HighResolutionFuse(nn.Module):
    """Two resolutions exchange features by sums across sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.high = nn.Conv2d(3, 8, 3, padding=1)
        self.low = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.up = nn.Conv2d(16, 8, 1)
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.head = nn.Conv2d(24, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        high, low = F.relu(self.high(x)), F.relu(self.low(x))
        fused_high = F.relu(high + F.interpolate(self.up(low), scale_factor=2, mode="nearest"))
        fused_low = F.relu(low + self.down(high))
        resized = F.interpolate(fused_low, size=fused_high.shape[-2:], mode="bilinear", align_corners=False)
        return self.head(torch.cat([fused_high, resized], 1))


@micro(
    image(),
    kept={"conv.weight": (8, 3, 4, 4), "up.weight": (8, 6, 4, 4), "up.bias": (6,), "head.weight": (4, 6, 1, 1)},
)
class TransposedConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 4, stride=2)
        self.up = nn.ConvTranspose2d(16, 12, 4, stride=2)
        self.head = nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.up(F.relu(self.conv(x)))))


@micro(
    floats((2, 3, 20)),
    kept={"0.weight": (8, 3, 5), "1.weight": (8,), "3.weight": (8, 6, 2), "4.weight": (4, 6, 3)},
)
class Conv1d(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv1d(3, 16, 5),
            nn.BatchNorm1d(16),
            nn.GELU(),
            nn.ConvTranspose1d(16, 12, 2, stride=2),
            nn.Conv1d(12, 4, 3),
        )


@micro(
    floats((1, 2, 6, 6, 6)),
    kept={"0.weight": (8, 2, 3, 3, 3), "1.weight": (8,), "3.weight": (6, 8, 3, 3, 3), "5.weight": (6, 3, 2, 2, 2)},
)
class Conv3d(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv3d(2, 16, 3, padding=1),
            nn.BatchNorm3d(16),
            nn.SiLU(),
            nn.Conv3d(16, 12, 3),
            nn.MaxPool3d(2),
            nn.ConvTranspose3d(12, 3, 2),
        )


@micro(image(3, 12, 12), kept={"0.weight": (8, 3, 3, 3), "2.weight": (6, 8, 3, 3), "4.weight": (4, 6, 1, 1)})
class DilatedCircular(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 3, padding=2, dilation=2, padding_mode="circular"),
            nn.Hardswish(),
            nn.Conv2d(16, 12, 3, padding=1, padding_mode="reflect"),
            nn.LeakyReLU(0.2),
            nn.Conv2d(12, 4, 1, padding="same"),
        )


@micro(image(), kept={"conv.weight": (8, 3, 3, 3), "branches.0.weight": (4, 8, 1, 1), "head.weight": (4, 16, 1, 1)})
class PoolingPyramid(nn.Module):
    """Windows and resizing keep channels; pyramid pooling concatenates its sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.branches = nn.ModuleList(nn.Conv2d(16, 8, 1) for _ in range(2))
        self.head = nn.Conv2d(32, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = F.max_pool2d(F.avg_pool2d(x, 3, 1, 1), 3, 1, 1)
        pooled = [branch(F.adaptive_max_pool2d(x, k + 1)) for k, branch in enumerate(self.branches)]
        pooled = [F.interpolate(p, size=x.shape[-2:], mode="bilinear", align_corners=True) for p in pooled]
        return self.head(torch.cat([x, *pooled], 1))


@micro(image(), kept={"a.weight": (8, 3, 1, 1), "b.weight": (8, 3, 1, 1), "head.weight": (4, 8, 1, 1), "choice": (2,)})
class SupernetMixture(nn.Module):
    """Branches mixed by a softmax over architecture parameters, as in differentiable architecture search."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 16, 1)
        self.b = nn.Conv2d(3, 16, 1)
        self.choice = nn.Parameter(torch.tensor([0.3, -0.2]))
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.choice, 0)
        return self.head(F.relu(sum(w * branch(x) for w, branch in zip(weights, (self.a, self.b)))))


@micro(
    image(),
    kept={
        "a.weight": (8, 3, 1, 1),
        "b.weight": (8, 3, 1, 1),
        "fc.weight": (4, 8),
        "heads.0.weight": (8, 4),
        "heads.1.weight": (8, 4),
    },
)
class SelectiveKernel(nn.Module):
    """Branches stacked on a new axis, weighted by a softmax over the branches."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 16, 1)
        self.b = nn.Conv2d(3, 16, 1)
        self.fc = nn.Linear(16, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 16) for _ in range(2))
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        branches = torch.stack([self.a(x), self.b(x)], dim=1)
        squeezed = F.relu(self.fc(branches.sum(1).mean((-1, -2))))
        weights = torch.softmax(torch.stack([head(squeezed) for head in self.heads], dim=1), dim=1)
        return self.head((branches * weights[..., None, None]).sum(1))


@micro(image(), kept={"a.weight": (8, 3, 3, 3), "bn1.weight": (8,), "bn2.weight": (8,), "head.weight": (4, 8, 1, 1)})
class PreActivation(nn.Module):
    """Batch norms that read the residual stream, without a convolution of their own before them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(16)
        self.b = nn.Conv2d(16, 16, 3, padding=1)
        self.bn2 = nn.SyncBatchNorm(16)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = x + self.b(F.relu(self.bn1(x)))
        return self.head(F.relu(self.bn2(x)))


@micro(image(), kept={"a.weight": (8, 3, 3, 3), "b.weight": (8, 8, 3, 3), "head.weight": (4, 8, 1, 1)})
class InPlace(nn.Module):
    """In-place operators must act on the labels of the tensor they change."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 16, 3, padding=1)
        self.b = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = self.b(F.relu(x)).clamp_(-1, 1)
        y += x
        y.mul_(0.5)
        y[:, :, 0] = 0
        return self.head(F.relu_(y))
