"""Random networks: a directed acyclic graph of blocks, drawn by hypothesis from the structures of the micro-nets.

A network is a `Spec`, plain data that prints and shrinks well. Every block reads earlier feature maps of one
spatial size and makes a new one; what nobody reads is concatenated into the head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from nets.micro import perturb

__all__ = ["KINDS", "Block", "RandomNet", "Spec", "specs"]

SIZE = 4
INPUTS, OUTPUTS = 3, 5
WIDTHS = (4, 8, 12, 16, 24)


@dataclass(frozen=True)
class Block:
    """One block: what it is, which earlier features it reads, a width and a small number that it may use."""

    kind: str
    sources: tuple[int, ...]
    width: int
    number: int


@dataclass(frozen=True)
class Spec:
    """A whole network: width of the stem, the blocks, the seed of the weights."""

    stem: int
    blocks: tuple[Block, ...]
    seed: int = 0

    def build(self) -> RandomNet:
        """The network in evaluation mode."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = RandomNet(self)
            perturb(model)
        return model.eval()

    def inputs(self) -> Tensor:
        """Example inputs [2, 3, 4, 4]."""
        return torch.randn(2, INPUTS, SIZE, SIZE, generator=torch.Generator().manual_seed(self.seed + 1))


class _Conv(nn.Module):
    def __init__(self, channels: list[int], width: int, number: int) -> None:
        super().__init__()
        kernel = (1, 3, 3)[number % 3]
        self.layer = nn.Conv2d(channels[0], width, kernel, padding=kernel // 2, bias=number % 2 == 0)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.layer(x)))


class _Grouped(nn.Module):
    def __init__(self, channels: list[int], width: int, number: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(channels[0], width, 3, padding=1, groups=(2, 4)[number % 2])

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.layer(x))


class _Depthwise(nn.Module):
    def __init__(self, channels: list[int], width: int, number: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(channels[0], channels[0] * (1 + number % 2), 3, padding=1, groups=channels[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class _Add(nn.Module):
    """A sum, with a projection where widths differ."""

    def __init__(self, channels: list[int], width: int, number: int) -> None:
        super().__init__()
        same = channels[0] == channels[1]
        self.project = nn.Identity() if same else nn.Conv2d(channels[1], channels[0], 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + self.project(y)


class _Residual(nn.Module):
    def __init__(self, channels: list[int], width: int, number: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(channels[0], width, 1)
        self.b = nn.Conv2d(width, channels[0], 3, padding=1)
        self.gamma = nn.Parameter(torch.ones(channels[0], 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma * self.b(F.gelu(self.a(x)))


class _Concat(nn.Module):
    def __init__(self, channels: list[int], width: int, number: int) -> None:
        super().__init__()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y], 1)


class _SplitSwap(nn.Module):
    """Two halves change places; one is scaled."""

    def __init__(self, channels: list[int], width: int, number: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, 1)
        return torch.cat([second, torch.sigmoid(first)], 1)


class _Gate(nn.Module):
    """A channel and its gate: one convolution twice as wide."""

    def __init__(self, channels: list[int], width: int, number: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(channels[0], 2 * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.glu(self.layer(x), 1)


class _Excite(nn.Module):
    def __init__(self, channels: list[int], width: int, number: int) -> None:
        super().__init__()
        self.reduce = nn.Linear(channels[0], width)
        self.expand = nn.Linear(width, channels[0])

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.sigmoid(self.expand(F.relu(self.reduce(x.mean((2, 3))))))
        return x * scale[:, :, None, None]


class _Shuffle(nn.Module):
    def __init__(self, channels: list[int], width: int, number: int) -> None:
        super().__init__()
        self.groups = 2

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        x = x.view(batch, self.groups, channels // self.groups, height, width)
        return x.transpose(1, 2).reshape(batch, channels, height, width)


class _Norm(nn.Module):
    """Group norm or layer norm over channels."""

    def __init__(self, channels: list[int], width: int, number: int) -> None:
        super().__init__()
        self.layers = number % 2 == 1
        self.norm = nn.LayerNorm(channels[0]) if self.layers else nn.GroupNorm(2, channels[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) if self.layers else self.norm(x)


class _Attention(nn.Module):
    """Tokens attend to each other; heads of four channels; a residual sum."""

    def __init__(self, channels: list[int], width: int, number: int) -> None:
        super().__init__()
        self.heads, self.head_dim = 2 + number % 3, 4
        self.qkv = nn.Linear(channels[0], 3 * self.heads * self.head_dim)
        self.proj = nn.Linear(self.heads * self.head_dim, channels[0])

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        batch, length, _ = tokens.shape
        qkv = self.qkv(tokens).reshape(batch, length, 3, self.heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, -1)
        return x + self.proj(y).transpose(1, 2).reshape(x.shape)


class _Twice(nn.Module):
    """One layer called twice."""

    def __init__(self, channels: list[int], width: int, number: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(channels[0], channels[0], 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layer(F.relu(self.layer(x))))


class _Pieces(nn.Module):
    """Equal pieces, each convolved after the one before is added."""

    def __init__(self, channels: list[int], width: int, number: int) -> None:
        super().__init__()
        self.width = channels[0] // 2
        self.layer = nn.Conv2d(self.width, self.width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = torch.split(x, self.width, 1)
        return torch.cat([first, F.relu(self.layer(first + second))], 1)


class _Resize(nn.Module):
    """Down by a strided convolution, up by a transposed one."""

    def __init__(self, channels: list[int], width: int, number: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(channels[0], width, 2, stride=2)
        self.up = nn.ConvTranspose2d(width, channels[0], 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(F.hardswish(self.down(x)))


class _PixelShuffle(nn.Module):
    def __init__(self, channels: list[int], width: int, number: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(channels[0], 4 * width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(F.pixel_shuffle(self.layer(x), 2), 2)


class _Multiply(nn.Module):
    def __init__(self, channels: list[int], width: int, number: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(channels[1], channels[0], 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * torch.tanh(self.layer(y))


# Kind -> (class, number of sources).
KINDS: dict[str, tuple[type[nn.Module], int]] = {
    "conv": (_Conv, 1),
    "grouped": (_Grouped, 1),
    "depthwise": (_Depthwise, 1),
    "add": (_Add, 2),
    "residual": (_Residual, 1),
    "concat": (_Concat, 2),
    "split_swap": (_SplitSwap, 1),
    "gate": (_Gate, 1),
    "excite": (_Excite, 1),
    "shuffle": (_Shuffle, 1),
    "norm": (_Norm, 1),
    "attention": (_Attention, 1),
    "twice": (_Twice, 1),
    "pieces": (_Pieces, 1),
    "resize": (_Resize, 1),
    "pixel_shuffle": (_PixelShuffle, 1),
    "multiply": (_Multiply, 2),
}


class RandomNet(nn.Module):
    """The network of a `Spec`."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.stem = nn.Conv2d(INPUTS, spec.stem, 3, padding=1)
        self.blocks = nn.ModuleList()
        channels = [spec.stem]
        for block in spec.blocks:
            made = KINDS[block.kind][0]([channels[s] for s in block.sources], block.width, block.number)
            self.blocks.append(made.eval())
            probes = [torch.zeros(1, channels[s], SIZE, SIZE) for s in block.sources]
            with torch.no_grad():
                channels.append(made(*probes).shape[1])
        read = {source for block in spec.blocks for source in block.sources}
        self.loose = tuple(index for index in range(len(channels)) if index not in read)
        self.head = nn.Conv2d(sum(channels[index] for index in self.loose), OUTPUTS, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for block, module in zip(self.spec.blocks, self.blocks):
            features.append(module(*(features[source] for source in block.sources)))
        return self.head(torch.cat([features[index] for index in self.loose], 1))


@st.composite
def specs(draw: st.DrawFn, max_blocks: int = 6, kinds: tuple[str, ...] = tuple(KINDS)) -> Spec:
    """Draw a network of up to `max_blocks` blocks of the given kinds. All widths are multiples of four."""
    blocks: list[Block] = []
    for index in range(draw(st.integers(2, max_blocks))):
        kind = draw(st.sampled_from(kinds))
        # Mostly the newest features, so that networks get deep.
        source = st.one_of(st.just(index), st.integers(0, index))
        sources = tuple(draw(source) for _ in range(KINDS[kind][1]))
        blocks.append(Block(kind, sources, draw(st.sampled_from(WIDTHS)), draw(st.integers(0, 5))))
    return Spec(draw(st.sampled_from(WIDTHS)), tuple(blocks), draw(st.integers(0, 3)))
