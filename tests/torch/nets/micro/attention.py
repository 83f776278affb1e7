"""Attention in the many ways it is written; whole heads are what can go."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nets.micro._registry import floats, image, micro

SEQUENCE = floats((2, 5, 12))


class _Attention(nn.Module):
    """embed 12 -> 32, four heads of eight with a residual sum, head 32 -> 6."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.head_dim = 8
        self.embed = nn.Linear(12, 32)
        self.proj = nn.Linear(32, 32)
        self.head = nn.Linear(32, 6)

    def attend(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(x + self.proj(self.attend(x)))


class _Fused(_Attention):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)


class _Separate(_Attention):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(32, 32)
        self.k = nn.Linear(32, 32, bias=False)
        self.v = nn.Linear(32, 32)


FUSED = {
    "embed.weight": (16, 12),
    "qkv.weight": (48, 16),
    "qkv.bias": (48,),
    "proj.weight": (16, 16),
    "head.weight": (6, 16),
}
SEPARATE = {
    "embed.weight": (16, 12),
    "q.weight": (16, 16),
    "k.weight": (16, 16),
    "v.weight": (16, 16),
    "proj.weight": (16, 16),
    "head.weight": (6, 16),
}
STREAM = {"embed.weight": (16, 12), "head.weight": (6, 16)}


@micro(SEQUENCE, kept=FUSED)
class AttentionFused(_Fused):
    """Query, key and value from one layer; sizes are attributes."""

    def attend(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        weights = ((q * self.head_dim**-0.5) @ k.transpose(-2, -1)).softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(batch, length, -1)


@micro(SEQUENCE, kept=STREAM | {"qkv.weight": (96, 16), "proj.weight": (16, 32)}, frozen=("qkv.weight",))
class AttentionConstantSizes(_Fused):
    """The number of heads stands in the source, so heads stay; the residual stream goes."""

    def attend(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * 8**-0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(batch, length, 32)


@micro(SEQUENCE, kept=STREAM)
class AttentionSizesFromInput(_Fused):
    """timm's classic: head_dim is the width of the input over the number of heads."""

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        weights = F.softmax(q @ k.transpose(-2, -1) * self.head_dim**-0.5, dim=-1)
        return (weights @ v).transpose(1, 2).reshape(batch, length, width)


@micro(SEQUENCE, kept=SEPARATE)
class AttentionSeparate(_Separate):
    """Three layers, view with -1 for the head size, scaled_dot_product_attention."""

    def attend(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (layer(x).view(batch, length, self.heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).contiguous().view(batch, length, -1)


@micro(SEQUENCE, kept=SEPARATE)
class AttentionHeadsInferred(_Separate):
    """view(..., -1, head_dim): the number of heads follows by itself."""

    def attend(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@micro(SEQUENCE, kept=SEPARATE)
class AttentionEinsum(_Separate):
    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, self.head_dim)) for layer in (self.q, self.k, self.v))
        weights = torch.softmax(torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(self.head_dim), -1)
        return torch.einsum("bhij,bjhd->bihd", weights, v).flatten(-2)


@micro(SEQUENCE, kept=SEPARATE)
class AttentionBatchedMatmul(_Separate):
    """Heads are folded into the batch axis, as in nn.MultiheadAttention and fairseq."""

    def attend(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape

        def split(t: Tensor) -> Tensor:
            t = t.view(batch, length, self.heads, self.head_dim).transpose(1, 2)
            return t.reshape(batch * self.heads, length, self.head_dim)

        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        bias = q.new_zeros(1, length, length)
        weights = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=self.head_dim**-0.5).softmax(-1)
        y = torch.bmm(weights, v).view(batch, self.heads, length, self.head_dim)
        return y.transpose(1, 2).reshape(batch, length, -1)


@micro(floats((5, 2, 12)), kept=STREAM)
class MultiheadAttentionModule(nn.Module):
    """nn.MultiheadAttention checks its own sizes against `embed_dim` and `num_heads`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 32)
        self.attention = nn.MultiheadAttention(32, 4)
        self.head = nn.Linear(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


@micro(floats((2, 5, 12), (2, 7, 10)), kept=STREAM | {"memory.weight": (8, 10)})
class CrossAttentionModule(nn.Module):
    """Keys and values of another width, batch first, weights asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 32)
        self.memory = nn.Linear(10, 16)
        self.attention = nn.MultiheadAttention(32, 4, kdim=16, vdim=16, batch_first=True)
        self.head = nn.Linear(32, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = self.embed(x), self.memory(y)
        return self.head(x + self.attention(x, y, y)[0])


@micro(floats((2, 5, 12)), kept=STREAM | {"layer.linear1.weight": (24, 16), "layer.linear2.weight": (16, 24)})
class EncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(12, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, activation="gelu", dropout=0.0)
        self.head = nn.Linear(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x)))


class _Grouped(nn.Module):
    """Eight query heads of four, four key/value heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = 8, 4, 4
        self.repeats = self.heads // self.kv_heads
        self.embed = nn.Linear(12, 32)
        self.q = nn.Linear(32, 32, bias=False)
        self.k = nn.Linear(32, 16, bias=False)
        self.v = nn.Linear(32, 16, bias=False)
        self.proj = nn.Linear(32, 32)
        self.head = nn.Linear(32, 6)

    def widen(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, self.widen(k), self.widen(v))
        return self.head(x + self.proj(y.transpose(1, 2).flatten(2)))


GROUPED = {
    "embed.weight": (16, 12),
    "q.weight": (16, 16),
    "k.weight": (8, 16),
    "v.weight": (8, 16),
    "proj.weight": (16, 16),
}


@micro(SEQUENCE, kept=GROUPED)
class GroupedQueryExpand(_Grouped):
    """Llama's repeat_kv: a key/value head goes with the query heads that read it."""

    def widen(self, x: Tensor) -> Tensor:
        batch, heads, length, width = x.shape
        x = x[:, :, None].expand(batch, heads, self.repeats, length, width)
        return x.reshape(batch, heads * self.repeats, length, width)


@micro(SEQUENCE, kept=GROUPED)
class GroupedQueryRepeat(_Grouped):
    def widen(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.repeats, dim=1)


@micro(SEQUENCE, kept=GROUPED)
class GroupedQueryFlag(_Grouped):
    """scaled_dot_product_attention(enable_gqa=True) does the repeating inside."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.head(x + self.proj(y.transpose(1, 2).flatten(2)))


@micro(SEQUENCE)
class MultiQuery(_Separate):
    """One key/value head for all query heads, by broadcasting: query heads may go, the key's size may not."""

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Linear(32, 8)
        self.v = nn.Linear(32, 8)

    def attend(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        k, v = self.k(x).unsqueeze(1), self.v(x).unsqueeze(1)
        weights = (q @ k.mT * self.head_dim**-0.5).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


@micro(SEQUENCE, kept=SEPARATE)
class AttentionRotary(_Separate):
    """Rotary position embedding: halves of each head are swapped and mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse_frequency", 1.0 / 100 ** (torch.arange(0, 8, 2) / 8), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[2], device=x.device).float(), self.inverse_frequency)
        cosine, sine = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
        first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return x * cosine + torch.cat((-second, first), -1) * sine

    def attend(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v)
        return y.transpose(1, 2).reshape(batch, length, -1)


class _HeadBias(_Separate):
    """A bias [heads, features] on queries, as in Transformer-XL; heads and features come from one matrix each."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4, 8))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)) for f in (self.q, self.k, self.v))
        weights = (torch.einsum("binh,bjnh->bnij", q + self.bias, k) / math.sqrt(self.head_dim)).softmax(-1)
        return torch.einsum("bnij,bjnh->binh", weights, v).flatten(2)


@micro(SEQUENCE, kept=SEPARATE | {"bias": (2, 8)})
class AttentionHeadBias(_HeadBias):
    """Whole heads go, with their row of the bias; features stay."""


class _PartlyRotary(_Separate):
    """Only the first `turned` features of each head are turned; the rest, which may be none, passes by."""

    turned = 4

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.randn(5, self.turned // 2))

    def _turn(self, x: Tensor) -> Tensor:
        angles = torch.cat([self.angles, self.angles], -1)
        first, rest = x[..., : self.turned], x[..., self.turned :]
        a, b = first.chunk(2, -1)
        return torch.cat([first * angles.cos() + torch.cat([-b, a], -1) * angles.sin(), rest], -1)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = (self._turn(q) @ self._turn(k).transpose(-1, -2) / math.sqrt(self.head_dim)).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


@micro(SEQUENCE, kept=SEPARATE | {"angles": (5, 2)})
class AttentionPartlyRotary(_PartlyRotary):
    """Half of the features of each head are turned, as in Phi and GPT-NeoX."""


@micro(SEQUENCE, kept=SEPARATE | {"angles": (5, 4)})
class AttentionWhollyRotary(_PartlyRotary):
    """All features are turned, and nothing is left of the slice beside them."""

    turned = 8


@micro(SEQUENCE, kept=FUSED | {"table": (9, 2), "index": (5, 5)})
class AttentionRelativeBias(_Fused):
    """A table of biases, one column a head, gathered by relative position."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 4))
        position = torch.arange(5)
        self.register_buffer("index", position[:, None] - position[None] + 4)

    def attend(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.table[self.index.view(-1)].view(length, length, -1).permute(2, 0, 1).contiguous()
        weights = (q @ k.transpose(-2, -1) * self.head_dim**-0.5 + bias.unsqueeze(0)).softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(batch, length, -1)


@micro(SEQUENCE, kept=SEPARATE | {"scale": (2, 1, 1)})
class AttentionCosine(_Separate):
    """Normalised queries and keys, a learned temperature for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4, 1, 1), 2.0))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        weights = (weights * self.scale.clamp(max=4.6).exp()).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


@micro(SEQUENCE, kept=SEPARATE | {"q_norm.weight": (8,), "k_norm.weight": (8,)})
class AttentionHeadNorm(_Separate):
    """Queries and keys are normalised inside each head; the norm's weights are shared by all heads and stay."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm = nn.RMSNorm(8)
        self.k_norm = nn.LayerNorm(8)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.q, self.k, self.v))
        q, k, v = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), v.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@micro(SEQUENCE, kept=STREAM)
class AttentionTalkingHeads(_Fused):
    """CaiT: linear layers mix the heads before and after the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.after = nn.Linear(4, 4)

    def attend(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = self.before((q @ k.transpose(-2, -1)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2).softmax(-1)
        weights = self.after(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return (weights @ v).transpose(1, 2).reshape(batch, length, -1)


@micro(SEQUENCE, kept=STREAM)
class AttentionAcrossChannels(_Fused):
    """XCiT: attention between the channels of a head; tokens are contracted."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(4, 1, 1))

    def attend(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, self.heads, -1).permute(2, 0, 3, 4, 1)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        weights = ((q @ k.transpose(-2, -1)) * self.temperature).softmax(-1)
        return (weights @ v).permute(0, 3, 1, 2).reshape(batch, length, -1)


@micro(SEQUENCE)
class AttentionLinear(_Separate):
    """Keys and values are contracted first; the feature map has no softmax over tokens."""

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        context = k.transpose(-2, -1) @ v
        normaliser = (q * k.sum(2, keepdim=True)).sum(-1, keepdim=True)
        return (q @ context / normaliser).transpose(1, 2).flatten(2)


@micro(image(3, 8, 8), kept={"embed.weight": (16, 3, 1, 1), "head.weight": (6, 16, 1, 1)})
class WindowAttention(_Fused):
    """Swin: roll, cut into windows, attend with a mask, put back, roll back."""

    def __init__(self) -> None:
        super().__init__()
        self.window, self.shift = 4, 2
        self.embed = nn.Conv2d(3, 32, 1)  # type: ignore[assignment]
        self.head = nn.Conv2d(32, 6, 1)  # type: ignore[assignment]
        self.norm = nn.LayerNorm(32)
        regions = torch.zeros(8, 8)
        regions[4:6] += 1
        regions[6:] += 2
        regions[:, 4:6] += 3
        regions[:, 6:] += 6
        regions = regions.view(2, 4, 2, 4).transpose(1, 2).reshape(4, 16)
        self.register_buffer("mask", (regions[:, None] != regions[:, :, None]) * -100.0)

    def attend(self, x: Tensor) -> Tensor:
        windows, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(windows, length, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        weights = q @ k.transpose(-2, -1) * self.head_dim**-0.5
        weights = weights.view(-1, 4, self.heads, length, length) + self.mask[None, :, None]
        weights = weights.view(windows, self.heads, length, length).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(windows, length, -1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).permute(0, 2, 3, 1)
        batch, height, width, channels = x.shape
        size = self.window
        y = torch.roll(self.norm(x), shifts=(-self.shift, -self.shift), dims=(1, 2))
        y = y.view(batch, height // size, size, width // size, size, channels).permute(0, 1, 3, 2, 4, 5)
        y = self.attend(y.reshape(-1, size * size, channels))
        y = y.view(batch, height // size, width // size, size, size, -1).permute(0, 1, 3, 2, 4, 5)
        y = torch.roll(y.reshape(batch, height, width, -1), shifts=(self.shift, self.shift), dims=(1, 2))
        return self.head((x + y).permute(0, 3, 1, 2))


@micro(image(3, 6, 6), kept={"conv.weight": (8, 3, 1, 1), "head.weight": (4, 8, 1, 1)})
class NonLocalBlock(nn.Module):
    """Embedded Gaussian: three 1x1 convolutions, attention between positions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 1)
        self.theta = nn.Conv2d(16, 8, 1)
        self.phi = nn.Conv2d(16, 8, 1)
        self.g = nn.Conv2d(16, 8, 1)
        self.out = nn.Conv2d(8, 16, 1)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        theta, phi, g = (layer(x).flatten(2) for layer in (self.theta, self.phi, self.g))
        weights = torch.softmax(theta.transpose(1, 2) @ phi, -1)
        y = (g @ weights.transpose(1, 2)).view(x.shape[0], -1, *x.shape[2:])
        return self.head(x + self.out(y))


@micro(SEQUENCE, kept=FUSED | {"table": (2, 9)})
class AttentionCachedBias(_Fused):
    """LeViT: the gathered biases are kept in a dictionary after the first call in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 9))
        position = torch.arange(5)
        self.register_buffer("index", position[:, None] - position[None] + 4, persistent=False)
        self.cache: dict[str, Tensor] = {}

    def biases(self, device: torch.device) -> Tensor:
        if self.training:
            return self.table[:, self.index]
        if str(device) not in self.cache:
            self.cache[str(device)] = self.table[:, self.index]
        return self.cache[str(device)]

    def attend(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, self.heads, -1).split([8, 8, 8], dim=3)
        q, k, v = q.permute(0, 2, 1, 3), k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3)
        weights = (q @ k * self.head_dim**-0.5 + self.biases(x.device)).softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(batch, length, -1)
