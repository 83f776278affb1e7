"""Operators that move, select, repeat or contract channels outside of layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nets.micro._registry import floats, image, micro
from nets.micro.normalisation import CONV, _Between


@micro(image(), kept={"conv.weight": (16, 3, 1, 1), "head.weight": (4, 4, 3, 3)})
class PixelShuffle(nn.Module):
    """Four channels make one larger channel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 1)
        self.shuffle = nn.PixelShuffle(2)
        self.head = nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.shuffle(self.conv(x))))


@micro(image(), kept={"conv.weight": (4, 3, 1, 1), "head.weight": (4, 16, 1, 1)})
class PixelUnshuffle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 1)
        self.head = nn.Conv2d(32, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(F.pixel_unshuffle(self.conv(x), 2)))


@micro(image(), kept={"conv.weight": (4, 3, 1, 1), "head.weight": (4, 16, 1, 1)})
class SpaceToDepthSlices(nn.Module):
    """YOLO's focus layer: strided slices concatenated on channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 1)
        self.head = nn.Conv2d(32, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = torch.cat([x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], 1)
        return self.head(F.relu(x))


@micro(image(), kept=CONV)
class EmptySlice(_Between):
    """A part of no channels stands beside the other."""

    def __init__(self) -> None:
        super().__init__()
        self.split = self.conv.out_channels

    def between(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, : self.split].sin(), x[:, self.split :]], 1)


@micro(image(), kept=CONV)
class FlipRollPadSpace(_Between):
    def between(self, x: Tensor) -> Tensor:
        x = torch.flip(x, (-1,)) + torch.roll(x, 1, -2)
        return F.pad(F.pad(x, (1, 1, 2, 0), mode="reflect"), (1, 0), value=0.5)


@micro(image(), kept=CONV)
class FlipChannels(_Between):
    """Only the flipped order is read, so the channels keep their own places."""

    def between(self, x: Tensor) -> Tensor:
        return torch.flip(x, (1,))


@micro(image(), optional=True)
class FlipChannelsAdded(_Between):
    """Channel i meets channel 15 - i: they go in pairs."""

    def between(self, x: Tensor) -> Tensor:
        return x + torch.flip(x, (1,))


@micro(image(), kept={"conv.weight": (4, 3, 1, 1)})
class PadChannels(nn.Module):
    """The shortcut of the CIFAR ResNets: new channels of zeros around the old ones."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 1)
        self.a = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        return self.head(F.pad(x + self.a(x), (0, 0, 0, 0, 4, 4)))


@micro(image())
class PadChannelsResidual(nn.Module):
    """Padded zeros meet real channels in a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 1)
        self.a = nn.Conv2d(8, 12, 3, padding=1)
        self.b = nn.Conv2d(12, 16, 3, stride=2, padding=1)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        y = self.b(F.relu(self.a(x)))
        return self.head(F.relu(y + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 4, 4))))


@micro(image(), kept={"conv.weight": (8, 3, 1, 1), "head.weight": (4, 16, 1, 1), "interleaved.weight": (4, 16, 1, 1)})
class RepeatChannels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 1)
        self.head = nn.Conv2d(32, 4, 1)
        self.interleaved = nn.Conv2d(32, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        return self.head(x.repeat(1, 2, 1, 1)) + self.interleaved(x.repeat_interleave(2, dim=1))


@micro(image(), kept=CONV | {"second.weight": (4, 8, 1, 1)})
class StackUnbind(_Between):
    """Stacked on a new axis, flattened, unbound again."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Conv2d(16, 4, 1)

    def between(self, x: Tensor) -> Tensor:
        both = torch.stack([x, torch.sigmoid(x)], dim=2)
        first, second = both.unbind(2)
        return first * second + both.select(2, 0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.head(self.between(x)) + self.second(torch.movedim(x, 1, -1).squeeze(0).movedim(-1, 1))


@micro(image(), kept={"conv.weight": (8, 3, 1, 1), "head.weight": (4, 16, 1, 1)})
class StackInterleave(nn.Module):
    """stack then flatten puts two channels side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 1)
        self.head = nn.Conv2d(32, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.head(torch.stack([F.relu(x), F.relu(-x)], dim=2).flatten(1, 2))


@micro(image(), kept=CONV)
class MaskWhereClamp(_Between):
    def between(self, x: Tensor) -> Tensor:
        mask = x.detach().mean((0, 1), keepdim=True) > 0
        x = x.masked_fill(mask, 0.25)
        x = torch.where(x > 0, x, 0.1 * x.exp())
        return torch.minimum(torch.clamp(x, -0.7, 0.9), x.abs() + torch.tensor(0.3))


@micro(image(), kept=CONV)
class CompareAndCast(_Between):
    def between(self, x: Tensor) -> Tensor:
        keep = (x > 0.1).logical_or(x < -0.2).to(x.dtype)
        return (x * keep).double().cumsum(-1).float().contiguous().clone()


@micro(image(), optional=True)
class PermutedByIndex(_Between):
    """Channels picked in a fixed order by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.randperm(16))

    def between(self, x: Tensor) -> Tensor:
        return x[:, self.order]


@micro(image(), nothing=True, frozen=("conv.weight",))
class ChannelsPickedInSource(nn.Module):
    """Channel numbers in the source."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.head = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        a, b, c, d = x[:, 0], x[:, 1], x[:, 2], x[:, 3]
        return self.head(torch.stack([a * b, b - c, c.exp() * d, a + d], 1))


@micro(image(), optional=True)
class SortedChannels(_Between):
    """The order after sorting belongs to no channel."""

    def between(self, x: Tensor) -> Tensor:
        return torch.sort(x, dim=1).values


@micro(image(), frozen=("conv.weight",), nothing=True)
class CumulativeChannels(_Between):
    """A running sum along channels: every channel feeds all later ones outside of any weight."""

    def between(self, x: Tensor) -> Tensor:
        return torch.cumsum(x, dim=1)


@micro(floats((2, 6, 10)), kept={"inner.weight": (8, 10), "head.weight": (4, 8)})
class GatherTokens(nn.Module):
    """Tokens chosen by a score; every token keeps all of its channels."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(10, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.inner(x))
        index = torch.arange(6, device=x.device).flip(0)[None, :4].expand(x.shape[0], -1)
        picked = torch.gather(x, 1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return self.head(picked + x[:, [0, 2, 4, 5]] + x.index_select(1, index[0]))


@micro(image(3, 6, 6), kept={"conv.weight": (8, 3, 1, 1), "mix.weight": (12, 72), "out.weight": (4, 12)})
class UnfoldLinear(nn.Module):
    """im2col by hand: each channel makes nine columns."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 1)
        self.mix = nn.Linear(144, 24)
        self.out = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        columns = F.unfold(F.relu(self.conv(x)), 3, padding=1).transpose(1, 2)
        return self.out(F.relu(self.mix(columns)))


@micro(image(3, 6, 6), kept={"conv.weight": (8, 3, 1, 1), "head.weight": (4, 8, 1, 1)})
class UnfoldFold(_Between):
    """Columns and back again."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 1)

    def between(self, x: Tensor) -> Tensor:
        size = x.shape[-2:]
        return F.fold(torch.tanh(F.unfold(x, 3, padding=1)), size, 3, padding=1)


@micro(image(3, 8, 8), kept={"conv.weight": (8, 3, 1, 1), "head.weight": (4, 8, 1, 1)})
class WindowPartition(_Between):
    """Windows out and back: view, permute, view, all sizes from the shape."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 1)
        self.norm = nn.LayerNorm(16)

    def between(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        x = x.view(batch, channels, height // 4, 4, width // 4, 4).permute(0, 2, 4, 3, 5, 1)
        x = self.norm(x.reshape(-1, 16, channels))
        x = x.view(batch, height // 4, width // 4, 4, 4, channels)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(batch, channels, height, width)


@micro(floats((2, 6, 10)), kept={"a.weight": (8, 10), "b.weight": (8, 10), "weight": (8, 4), "bias": (4,)})
class MatmulParameters(nn.Module):
    """Bare parameters contracted by matmul, addmm and einsum, without a layer around them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(10, 16)
        self.b = nn.Linear(10, 16)
        self.weight = nn.Parameter(torch.randn(16, 4) * 0.2)
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        a, b = F.relu(self.a(x)), self.b(x)
        flat = torch.addmm(self.bias, a.flatten(0, 1), self.weight).unflatten(0, (2, -1))
        return flat + b @ self.weight + torch.einsum("btc,co->bto", a * b, self.weight)


@micro(floats((2, 6, 10)), kept={"a.weight": (8, 10), "b.weight": (8, 10)})
class GramMatrix(nn.Module):
    """Two tensors contracted with each other: their channels meet and go together."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(10, 16)
        self.b = nn.Linear(10, 16)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        return torch.bmm(a, b.transpose(1, 2)) + torch.einsum("bic,bjc->bij", a, b)


@micro(
    floats((2, 6, 10)),
    kept={"token1.weight": (6, 6), "token2.weight": (6, 6), "channel1.weight": (16, 8), "embed.weight": (8, 10)},
)
class MlpMixer(nn.Module):
    """A linear layer over tokens, then one over channels; both hidden widths go."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(10, 16)
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.token1, self.token2 = nn.Linear(6, 12), nn.Linear(12, 6)
        self.channel1, self.channel2 = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.token2(F.gelu(self.token1(self.norm1(x).transpose(1, 2)))).transpose(1, 2)
        x = x + self.channel2(F.gelu(self.channel1(self.norm2(x))))
        return self.head(x.mean(1))


@micro(floats((2, 6, 10)), kept={"inner.weight": (16, 10), "spatial.weight": (6, 6), "out.weight": (4, 8)})
class SpatialGatingUnit(nn.Module):
    """gMLP: half of the channels, mixed over tokens, gates the other half."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(10, 32)
        self.norm = nn.LayerNorm(16)
        self.spatial = nn.Linear(6, 6)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        u, v = F.gelu(self.inner(x)).chunk(2, dim=-1)
        v = self.spatial(self.norm(v).transpose(-1, -2)).transpose(-1, -2)
        return self.out(u * v)


@micro(floats((2, 3, 10)), optional=True)
class OuterProduct(nn.Module):
    """Every channel of one with every channel of the other, flattened into a linear layer: 16 * 16 inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 16)
        self.second = nn.Linear(10, 16)
        self.out = nn.Linear(256, 4)

    def forward(self, x: Tensor) -> Tensor:
        outer = self.first(x).unsqueeze(-1) * self.second(x).unsqueeze(-2)
        return self.out(outer.flatten(-2))


@micro(image(), kept=CONV)
class Expressions(_Between):
    """Scalars, broadcasts and reductions over space mixed with channels."""

    def between(self, x: Tensor) -> Tensor:
        mean, variance = torch.var_mean(x, dim=(2, 3), keepdim=True)
        y = (x - variance) / (mean.abs() + 1) ** 2
        y = torch.lerp(y, x, 0.3) + torch.addcmul(x, y, y, value=0.5) + torch.logsumexp(x, dim=3, keepdim=True)
        return (
            y
            + x.amax((2, 3), keepdim=True)
            - x.std(dim=(2, 3), keepdim=True)
            + x.flatten(2).topk(3, -1)[0].sum(-1)[..., None, None]
        )
