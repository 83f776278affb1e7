"""Embeddings, tokens and positions, recurrent layers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nets.micro._registry import floats, image, micro, tokens


class _Stream(nn.Module):
    """A token embedding of width 16, one feed-forward block on the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16, padding_idx=0)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.head = nn.Linear(16, 50, bias=False)

    def start(self, ids: Tensor) -> Tensor:
        return self.embed(ids)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.start(ids)
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


STREAM = {
    "embed.weight": (50, 8),
    "norm.weight": (8,),
    "up.weight": (16, 8),
    "down.weight": (8, 16),
    "head.weight": (50, 8),
}


@micro(tokens(50, 6), kept=STREAM)
class EmbeddingStream(_Stream):
    """The width of the embedding goes with the residual stream; the vocabulary stays."""


@micro(tokens(50, 6), kept=STREAM)
class TiedEmbeddingHead(_Stream):
    """The head is the embedding; its rows are the model's output."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight

    def start(self, ids: Tensor) -> Tensor:
        return self.embed(ids) * math.sqrt(16)


@micro(tokens(50, 6), kept=STREAM | {"position.weight": (10, 8), "segment.weight": (2, 8)})
class SummedEmbeddings(_Stream):
    """Token, position and segment tables are added, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Embedding(10, 16)
        self.segment = nn.Embedding(2, 16)

    def start(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        return self.embed(ids) + self.position(positions) + self.segment(torch.zeros_like(ids))


@micro(tokens(50, 6), kept=STREAM | {"table": (1, 9, 8)})
class LearnedPositions(_Stream):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 9, 16))

    def start(self, ids: Tensor) -> Tensor:
        return self.embed(ids) + self.table[:, : ids.shape[1]]


@micro(tokens(50, 6), kept=STREAM | {"table": (9, 8)})
class SinusoidalPositionBuffer(_Stream):
    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(9)[:, None] / 100 ** (torch.arange(8) / 8)
        self.register_buffer("table", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))

    def start(self, ids: Tensor) -> Tensor:
        return self.embed(ids) + self.table[: ids.shape[1]].unsqueeze(0)


@micro(
    image(3, 8, 8),
    kept={"patch.weight": (8, 3, 4, 4), "token": (1, 1, 8), "position": (1, 5, 8), "head.weight": (4, 8)},
)
class ClassToken(nn.Module):
    """Patches, a class token in front, positions added, the class token read."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.position = nn.Parameter(torch.randn(1, 5, 16))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        return self.head(self.norm(x)[:, 0])


@micro(
    floats((2, 6, 8)),
    kept={"before.weight": (16, 8), "after.weight": (8, 12), "head.weight": (4, 8)},
    frozen=("before.weight", "lstm.weight_ih_l0"),
)
class LstmInTheMiddle(nn.Module):
    """Recurrent layers may be frozen; what is behind them is not."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 16)
        self.lstm = nn.LSTM(16, 12, batch_first=True)
        self.after = nn.Linear(12, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(F.relu(self.before(x)))
        return self.head(F.relu(self.after(y)))


@micro(floats((2, 6, 8)), kept={"after.weight": (8, 24), "head.weight": (4, 8)})
class GruInTheMiddle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 12, bidirectional=True, num_layers=2)
        self.after = nn.Linear(24, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.after(self.gru(x)[0])))


@micro(floats((2, 8, 12)), kept={"inner.weight": (8, 8, 1), "depthwise.weight": (8, 1, 5), "out.weight": (4, 8, 1)})
class CausalConvGate(nn.Module):
    """Convolution over time, padded on the left, gated: the core of conformer and of Mamba's stem."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(8, 16, 1)
        self.gate = nn.Conv1d(8, 16, 1)
        self.depthwise = nn.Conv1d(16, 16, 5, groups=16)
        self.out = nn.Conv1d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(F.pad(self.inner(x), (4, 0)))
        return self.out(F.silu(y) * torch.sigmoid(self.gate(x)))


@micro(floats((2, 6, 8)), kept={"inner.weight": (8, 8), "decay": (8,), "out.weight": (4, 8)})
class RecurrentLoop(nn.Module):
    """A recurrence written as a Python loop over time, one decay for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 16)
        self.decay = nn.Parameter(torch.zeros(16))
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        state = torch.zeros_like(x[:, 0])
        states = []
        for step in range(x.shape[1]):
            state = torch.sigmoid(self.decay) * state + x[:, step]
            states.append(state)
        return self.out(torch.stack(states, dim=1))


@micro(floats((2, 6, 8)), kept={"cell.weight": (8, 16), "out.weight": (4, 8)})
class RecurrentCellByHand(nn.Module):
    """The state is a layer's output and part of its next input."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = 16
        self.cell = nn.Linear(8 + 16, 16)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], self.hidden)
        for step in range(x.shape[1]):
            state = torch.tanh(self.cell(torch.cat([x[:, step], state], -1)))
        return self.out(state)


@micro(image(3, 8, 8), kept={"conv.weight": (8, 3, 3, 3), "query": (5, 8), "head.weight": (4, 8)})
class LearnedQueries(nn.Module):
    """Attention pooling: learned queries read the feature map."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.query = nn.Parameter(torch.randn(5, 16))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.conv(x).flatten(2)
        weights = (self.query @ keys).softmax(-1)
        return self.head(weights @ keys.transpose(1, 2))
