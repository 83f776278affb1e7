"""Grouped and depthwise convolutions, channel shuffle, splits: the same number must go from each block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nets.micro._registry import floats, image, micro


def conv_bn(inputs: int, outputs: int, kernel: int = 3, **options: object) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, kernel, **options), nn.BatchNorm2d(outputs))  # type: ignore[arg-type]


def shuffle(x: Tensor, groups: int) -> Tensor:
    batch, channels, height, width = x.shape
    return (
        x.view(batch, groups, channels // groups, height, width).transpose(1, 2).reshape(batch, channels, height, width)
    )


@micro(image(), kept={"stem.weight": (8, 3, 1, 1), "grouped.weight": (12, 2, 3, 3), "head.weight": (5, 12, 1, 1)})
class GroupedConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 1)
        self.grouped = nn.Conv2d(16, 24, 3, groups=4)
        self.head = nn.Conv2d(24, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.grouped(F.relu(self.stem(x)))))


@micro(
    image(),
    kept={"0.weight": (8, 3, 1, 1), "1.weight": (8, 2, 3, 3), "3.weight": (8, 4, 1, 1), "5.weight": (4, 8, 1, 1)},
)
class GroupedChain(nn.Sequential):
    """Four groups feed two groups: blocks of one size nest in blocks of another."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 1),
            nn.Conv2d(16, 16, 3, groups=4, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 1, groups=2),
            nn.ReLU(),
            nn.Conv2d(16, 4, 1),
        )


@micro(image(), kept={"0.weight": (12, 3, 1, 1)})
class GroupedChainCoprime(nn.Sequential):
    """Two groups feed three groups: the blocks cross, so sixths are the common measure."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 24, 1),
            nn.ReLU(),
            nn.Conv2d(24, 24, 3, groups=2),
            nn.ReLU(),
            nn.Conv2d(24, 24, 1, groups=3),
            nn.ReLU(),
            nn.Conv2d(24, 4, 1),
        )


@micro(
    image(),
    kept={
        "stem.weight": (8, 3, 1, 1),
        "a.weight": (8, 2, 3, 3),
        "b.weight": (8, 8, 1, 1),
        "head.weight": (4, 8, 1, 1),
    },
)
class GroupedResidual(nn.Module):
    """The grouped layer's blocks bind the whole residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 1)
        self.a = nn.Conv2d(16, 16, 3, groups=4, padding=1)
        self.b = nn.Conv2d(16, 16, 1)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + F.relu(self.a(x))
        return self.head(x + F.relu(self.b(x)))


@micro(image())
class GroupedAfterConcat(nn.Module):
    """The first block holds a (8) and a third of b; what goes from each block must agree."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 1)
        self.b = nn.Conv2d(3, 16, 1)
        self.grouped = nn.Conv2d(24, 16, 1, groups=2)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.grouped(torch.cat([self.a(x), self.b(x)], 1))))


@micro(
    image(),
    kept={
        "0.weight": (8, 3, 1, 1),
        "2.weight": (8, 1, 3, 3),
        "2.bias": (8,),
        "3.weight": (8,),
        "5.weight": (4, 8, 1, 1),
    },
)
class Depthwise(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 1),
            nn.ReLU6(),
            nn.Conv2d(16, 16, 3, groups=16),
            nn.BatchNorm2d(16),
            nn.ReLU6(),
            nn.Conv2d(16, 4, 1),
        )


@micro(
    image(),
    kept={"0.weight": (8, 3, 1, 1), "2.weight": (16, 1, 3, 3), "3.weight": (16,), "5.weight": (4, 16, 1, 1)},
)
class DepthwiseMultiplier(nn.Sequential):
    """Two output channels per input channel: they go with it."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, groups=16),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 4, 1),
        )


@micro(image(3), frozen=("0.weight",), nothing=True)
class DepthwiseOnInput(nn.Sequential):
    """Depthwise over the model's input: its channels follow the input, which stays."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 12, 3, groups=3), nn.ReLU(), nn.Conv2d(12, 4, 1))


@micro(
    image(),
    kept={
        "0.weight": (8, 3, 1, 1),
        "2.weight": (8, 3, 3, 3),
        "4.weight": (12, 1, 2, 2),
        "6.weight": (12, 4, 1, 1),
    },
)
class GroupedTransposed(nn.Sequential):
    """Transposed convolutions keep inputs on axis 0 and outputs per group on axis 1; grouped, then depthwise."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 1),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 24, 3, groups=4),
            nn.ReLU(),
            nn.ConvTranspose2d(24, 24, 2, groups=24),
            nn.ReLU(),
            nn.ConvTranspose2d(24, 4, 1),
        )


@micro(floats((2, 4, 16)), kept={"0.weight": (8, 4, 3), "1.weight": (8, 2, 3), "3.weight": (4, 8, 1)})
class GroupedConv1d(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv1d(4, 16, 3), nn.Conv1d(16, 16, 3, groups=4), nn.ReLU(), nn.Conv1d(16, 4, 1))


@micro(
    image(),
    kept={
        "stem.weight": (8, 3, 1, 1),
        "a.weight": (8, 4, 1, 1),
        "depthwise.weight": (8, 1, 3, 3),
        "b.weight": (8, 4, 1, 1),
    },
)
class ShuffleUnit(nn.Module):
    """ShuffleNet V1: grouped 1x1, shuffle, depthwise, grouped 1x1, residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 1)
        self.a = nn.Conv2d(16, 16, 1, groups=2)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.b = nn.Conv2d(16, 16, 1, groups=2)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(F.relu(x + self.b(self.depthwise(shuffle(F.relu(self.a(x)), 2)))))


@micro(
    image(),
    kept={
        "stem.weight": (8, 3, 1, 1),
        "pw.0.weight": (4, 4, 1, 1),
        "dw.0.weight": (4, 1, 3, 3),
        "head.weight": (4, 8, 1, 1),
    },
)
class ShuffleSplit(nn.Module):
    """ShuffleNet V2: half passes by, half is convolved, concatenated and shuffled."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 1)
        self.pw = conv_bn(8, 8, 1)
        self.dw = conv_bn(8, 8, 3, padding=1, groups=8)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.stem(x).chunk(2, dim=1)
        return self.head(shuffle(torch.cat([left, F.relu(self.dw(self.pw(right)))], 1), 2))


@micro(image())
class ShuffleSplitTwice(nn.Module):
    """Two such units: the second splits what the first has shuffled."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 1)
        self.units = nn.ModuleList(
            nn.Sequential(conv_bn(8, 8, 1), nn.ReLU(), conv_bn(8, 8, 3, padding=1, groups=8)) for _ in range(2)
        )
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for unit in self.units:
            left, right = x.chunk(2, dim=1)
            x = shuffle(torch.cat([left, F.relu(unit(right))], 1), 2)
        return self.head(x)


@micro(
    image(),
    kept={
        "conv1.weight": (16, 3, 1, 1),
        "convs.0.weight": (4, 4, 3, 3),
        "convs.1.weight": (4, 4, 3, 3),
        "convs.2.weight": (4, 4, 3, 3),
        "head.weight": (4, 16, 1, 1),
    },
)
class Res2NetScale(nn.Module):
    """Equal pieces run through convolutions one after the other, each added to the next piece."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 8
        self.conv1 = nn.Conv2d(3, 32, 1)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.head = nn.Conv2d(32, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        pieces = torch.split(F.relu(self.conv1(x)), self.width, 1)
        outputs = [pieces[0]]
        previous = torch.zeros_like(pieces[0])
        for convolution, piece in zip(self.convs, pieces[1:]):
            previous = F.relu(convolution(piece + previous))
            outputs.append(previous)
        return self.head(torch.cat(outputs, 1))


@micro(image(), frozen=("conv.weight",), nothing=True)
class SplitConstantSizes(nn.Module):
    """The sizes stand in the source, so the channels must stay."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 1)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.split(F.relu(self.conv(x)), [4, 12], 1)
        return self.head(torch.cat([b, torch.sigmoid(a)], 1))


@micro(
    image(),
    kept={
        "conv.weight": (8, 3, 1, 1),
        "a.weight": (2, 1, 3, 3),
        "b.weight": (6, 1, 5, 5),
        "head.weight": (4, 8, 1, 1),
    },
)
class SplitAttributeSizes(nn.Module):
    """MixNet: pieces of unequal size in a list attribute, a depthwise convolution on each."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = [4, 12]
        self.conv = nn.Conv2d(3, 16, 1)
        self.a = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.b = nn.Conv2d(12, 12, 5, padding=2, groups=12)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.split(self.conv(x), self.sizes, 1)
        return self.head(torch.cat([self.a(a), self.b(b)], 1))


@micro(image(), kept={"conv.weight": (8, 3, 1, 1), "a.weight": (6, 4, 1, 1), "head.weight": (4, 10, 1, 1)})
class CrossStagePartial(nn.Module):
    """Slices by half of the shape; one half is convolved to another width."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 1)
        self.a = nn.Conv2d(8, 12, 1)
        self.head = nn.Conv2d(20, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        half = x.shape[1] // 2
        return self.head(torch.cat([x[:, :half], F.relu(self.a(x[:, half:]))], 1))


@micro(image(), kept={"conv.weight": (16, 3, 1, 1), "head.weight": (4, 8, 1, 1)})
class GatedLinearUnit(nn.Module):
    """A channel and its gate go together."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 1)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.glu(self.conv(x), dim=1))


@micro(floats((2, 5, 8)), kept={"gate.weight": (16, 8), "up.weight": (16, 8), "down.weight": (4, 16)})
class SwiGlu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 32)
        self.up = nn.Linear(8, 32, bias=False)
        self.down = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


@micro(floats((2, 5, 8)), kept={"both.weight": (32, 8), "both.bias": (32,), "down.weight": (4, 16)})
class SwiGluFused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(8, 64)
        self.down = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


@micro(image(), kept={"primary.weight": (4, 3, 1, 1), "cheap.weight": (4, 1, 3, 3)})
class GhostModule(nn.Module):
    """Half of the features come from a depthwise convolution of the other half; the surplus is sliced away."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs = 16
        self.primary = nn.Conv2d(3, 8, 1)
        self.cheap = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.primary(x))
        return self.head(torch.cat([x, F.relu(self.cheap(x))], 1)[:, : self.outputs])


class _FourGroupedConvs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1 = conv_bn(16, 160, groups=2, padding=1, padding_mode="circular")
        self.layer2 = conv_bn(16, 160, groups=2, padding=1)
        self.layer3 = conv_bn(16, 160, groups=2, padding=1)
        self.layer4 = conv_bn(16, 160, groups=2, padding=1)
        self.layer5 = conv_bn(160, 80, groups=2)
        self.layer6 = conv_bn(160, 80, groups=2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.layer1(x) + self.layer2(x)
        return self.layer5(first + self.layer3(x)), self.layer6(first + self.layer4(x))


@micro(
    image(16, 28, 28, batch=1),
    kept={f"layer{i}.0.weight": (120, 8, 3, 3) for i in (1, 2, 3, 4)}
    | {f"layer{i}.0.weight": (80, 60, 3, 3) for i in (5, 6)},
    ratio=0.25,
)
class KnownCaseSumsOfGrouped(_FourGroupedConvs):
    """Four grouped convolutions tied by sums; 160 * 0.75 = 120."""


@micro(
    image(16, 10, 10),
    kept={"0.0.weight": (32, 16, 3, 3), "1.0.weight": (32, 16, 3, 3)},
    round_to=16,
)
class KnownCaseGroupsOfTwo(nn.Sequential):
    """64 channels in 2, then in 32 blocks of two: one of each pair stays."""

    def __init__(self) -> None:
        super().__init__(conv_bn(16, 64), conv_bn(64, 64, groups=2), conv_bn(64, 64, groups=32), conv_bn(64, 8))


@micro(
    floats((4, 16)),
    kept={
        "0.weight": (512, 16),
        "1.weight": (512,),
        "2.weight": (64, 512),
        "3.weight": (64,),
        "5.weight": (10, 64),
    },
)
class KnownCaseLinearNorm(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(16, 1024),
            nn.BatchNorm1d(1024),
            nn.Linear(1024, 128, bias=False),
            nn.BatchNorm1d(128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )


@micro(
    image(2, 16, 16),
    kept={"0.0.weight": (8, 2, 3, 3), "9.weight": (512, 2048), "13.weight": (10, 64)},
)
class KnownCaseMixedGroups(nn.Sequential):
    """Ungrouped, depthwise and grouped layers, flattened. The eight groups of one output each all stay."""

    def __init__(self) -> None:
        super().__init__(
            conv_bn(2, 16, padding=1),
            conv_bn(16, 16, padding=1),
            conv_bn(16, 16, padding=1, groups=16),
            conv_bn(16, 16, padding=1, groups=16),
            conv_bn(16, 32, padding=1, groups=4),
            conv_bn(32, 8, padding=1, groups=8),
            nn.ReLU(),
            nn.Identity(),
            nn.Flatten(),
            nn.Linear(2048, 1024),
            nn.BatchNorm1d(1024),
            nn.Linear(1024, 128),
            nn.BatchNorm1d(128),
            nn.Linear(128, 10),
        )


@micro(image(), kept={"a.weight": (4, 3, 1, 1), "b.weight": (6, 3, 1, 1), "c.weight": (8, 10, 3, 3)})
class KnownCaseConcat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 1)
        self.b = nn.Conv2d(3, 12, 1)
        self.c = nn.Conv2d(20, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.cat([self.a(x), self.b(x)], 1))


@micro(image(), kept={"conv.weight": (16, 3, 1, 1), "attend.weight": (16, 8), "head.weight": (4, 8, 1, 1)})
class SplitAttention(nn.Module):
    """ResNeSt: radix pieces of a grouped layer are summed, and weighted by a softmax across the pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.radix = 2
        self.conv = nn.Conv2d(3, 32, 1)
        self.attend = nn.Linear(16, 32)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        batch, channels, height, width = x.shape
        x = x.reshape(batch, self.radix, channels // self.radix, height, width)
        weights = self.attend(x.sum(1).mean((2, 3))).view(batch, self.radix, -1).softmax(1)
        return self.head((x * weights[..., None, None]).sum(1))


@micro(image(), kept={"stem.weight": (8, 3, 1, 1), "head.weight": (4, 8, 1, 1)})
class GroupedConvIntoHeads(nn.Module):
    """EfficientViT: each group of a grouped convolution makes the queries, keys or values of one head.

    A head is three whole groups of that convolution: it may not go without their inputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 4
        self.stem = nn.Conv2d(3, 16, 1)
        self.qkv = nn.Conv2d(16, 48, 1)
        self.mix = nn.Conv2d(48, 48, 1, groups=12)
        self.proj = nn.Conv2d(32, 16, 1)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        qkv = self.qkv(x)
        qkv = torch.cat([qkv, self.mix(qkv)], 1).reshape(x.shape[0], -1, 3 * self.head_dim, x.shape[-2] * x.shape[-1])
        q, k, v = qkv.chunk(3, dim=2)
        weights = (q.transpose(-1, -2) @ k).softmax(-1)
        y = (v @ weights.transpose(-1, -2)).reshape(x.shape[0], -1, *x.shape[2:])
        return self.head(x + self.proj(y))


@micro(image())
class GroupedConvWholeGroups(nn.Sequential):
    """Pixel shuffle makes one channel of each group's outputs, so a channel cannot go without the group's inputs."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 1), nn.Conv2d(16, 32, 1, groups=8), nn.PixelShuffle(2), nn.ReLU(), nn.Conv2d(8, 4, 1)
        )
