"""How models are called, what they return, and sizes written down in many places."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from nets.micro._registry import floats, image, micro
from nets.micro.normalisation import CONV, _Between


class _Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.head = nn.Conv2d(16, 4, 1)
        self.aux = nn.Conv2d(16, 5, 1)

    def trunk(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x))


TRUNK = CONV | {"aux.weight": (5, 8, 1, 1)}


@micro(image(), kept=TRUNK)
class ReturnsDict(_Trunk):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.trunk(x)
        return OrderedDict(out=self.head(x), aux=self.aux(x))


@micro(image(), kept=TRUNK)
class ReturnsNestedTuple(_Trunk):
    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor | None], int]:
        x = self.trunk(x)
        return self.head(x), [self.aux(x), None], 3


@dataclass
class Result:
    logits: Tensor
    aux: Tensor | None = None


@micro(image(), kept=TRUNK)
class ReturnsDataclass(_Trunk):
    def forward(self, x: Tensor) -> Result:
        x = self.trunk(x)
        return Result(self.head(x), self.aux(x))


@micro(image(), frozen=("conv.weight",), nothing=True)
class ReturnsFeatures(_Trunk):
    """The features themselves are an output, so their channels stay."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.trunk(x)
        return self.head(x), self.aux(x), x


@micro(image(), kept=TRUNK)
class ReturnsPooledScore(_Trunk):
    """Besides the heads, one number for each image: the mean over channels."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.trunk(x)
        return self.head(x), self.aux(x), x.mean((1, 2, 3))


@micro(lambda: {"image": torch.randn(2, 3, 8, 8), "scale": torch.rand(2, 1, 1, 1)}, kept=TRUNK)
class KeywordInputs(_Trunk):
    def forward(self, scale: Tensor | None = None, image: Tensor | None = None) -> Tensor:
        x = self.trunk(image) * scale
        return torch.cat([self.head(x), self.aux(x)], 1)


@micro(image(), kept=CONV, frozen=("head.weight",))
class HeadWithBatchNorm(nn.Module):
    """The output's channels stay, through the batch norm and the permutation behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.head = nn.Conv2d(16, 4, 1)
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.head(F.relu(self.conv(x)))).permute(0, 2, 3, 1).flatten(1).log_softmax(-1)


@micro(image(), frozen=("conv.weight",), nothing=True)
class SizeInSource(_Between):
    """16 stands in the forward: nothing can be repaired."""

    def between(self, x: Tensor) -> Tensor:
        return x.reshape(-1, 16, 36).view(x.shape)


@micro(image(), frozen=("conv.weight",), nothing=True)
class NormSizeInSource(_Between):
    def between(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.permute(0, 2, 3, 1), (16,)).permute(0, 3, 1, 2)


@micro(image(), kept=CONV)
class SizeInAttributes(_Between):
    """One size in an int, a tuple, a list, a dictionary and a submodule's attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.channels = 16
        self.shape = (16, 6, 6)
        self.sizes = [16, 36]
        self.unflatten = nn.Unflatten(1, (16, 36))

    def between(self, x: Tensor) -> Tensor:
        x = x.view(-1, *self.shape)
        x = x.reshape(-1, self.channels, 36)
        x = x.view(-1, *self.sizes).flatten(1)
        return self.unflatten(x).view(-1, *self.shape)


@micro(image(), kept=CONV)
class SizeOnParentModule(nn.Module):
    """The block asks the model that holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.width = 16
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        for _ in range(2):
            x = F.relu(x.view(x.shape[0], self.width, 6, 6))
        return self.head(x)


@micro(image(), kept={"conv.weight": (8, 3, 3, 3), "fc.weight": (6, 8 * 36), "head.weight": (4, 6)})
class ProductInAttribute(nn.Module):
    """The attribute holds channels times space."""

    def __init__(self) -> None:
        super().__init__()
        self.features = 16 * 36
        self.conv = nn.Conv2d(3, 16, 3)
        self.fc = nn.Linear(16 * 36, 12)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.fc(F.relu(self.conv(x)).view(-1, self.features))))


@micro(image(), kept=CONV | {"a.weight": (8, 8, 3, 3)})
class ShapeAsserted(_Between):
    """The block checks what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.channels = 16
        self.a = nn.Conv2d(16, 16, 3, padding=1)

    def between(self, x: Tensor) -> Tensor:
        if x.shape[1] != self.channels:
            raise ValueError(f"{x.shape[1]} channels, not {self.channels}")
        return x + self.a(x) if self.a.in_channels == self.a.out_channels else self.a(x)


@micro(image(), kept=CONV | {"a.weight": (8, 8, 3, 3)})
class StochasticDepth(_Between):
    """Whole branches dropped at random while training; dropout of channels as well."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(16, 16, 3, padding=1)
        self.dropout = nn.Dropout2d(0.2)

    def between(self, x: Tensor) -> Tensor:
        y = self.dropout(self.a(x))
        if self.training:
            y = y * torch.empty(x.shape[0], 1, 1, 1, device=x.device).bernoulli_(0.8) / 0.8
        return x + y


@micro(floats((1, 3, 8, 8)), kept=CONV | {"a.weight": (8, 8, 3, 3)})
class DataDependentBranch(_Between):
    """Which branch runs hangs on values, which shapes alone do not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(16, 16, 3, padding=1)

    def between(self, x: Tensor) -> Tensor:
        if float(x.abs().mean()) > 1e6:
            return x
        return x + self.a(x)


@micro(image(), kept={"conv.weight": (8, 3, 3, 3)})
class UnusedLayer(_Trunk):
    """A layer that the forward never calls stays as it is."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


@micro(
    image(),
    kept={"blocks.a.0.weight": (8, 3, 1, 1), "blocks.a.1.weight": (8, 8, 1, 1), "heads.0.weight": (4, 8, 1, 1)},
)
class NestedContainers(nn.Module):
    """Lists in dictionaries of modules, a parameter list, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"a": nn.ModuleList([nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 1)])})
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(16, 1, 1)) for _ in range(2)])
        self.heads = nn.ModuleList([nn.Conv2d(16, 4, 1)])
        self.blocks["a"][1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block, scale in zip(self.blocks["a"], self.scales):
            x = F.relu(block(x) * scale)
        return self.heads[0](x)


@micro(
    image(),
    kept={"encoder.0.weight": (8, 3, 3, 3), "decoder.0.weight": (4, 24, 3, 3), "head.weight": (4, 4, 1, 1)},
)
class UNet(nn.Module):
    """Down, up, and the skip concatenated; sizes made to agree by cropping."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)])
        self.up = nn.ConvTranspose2d(32, 32, 2, stride=2)
        self.decoder = nn.ModuleList([nn.Conv2d(48, 8, 3, padding=1)])
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.encoder[0](x))
        deep = self.up(F.relu(self.encoder[1](F.max_pool2d(skip, 2))))
        x = torch.cat([skip[..., : deep.shape[-2], : deep.shape[-1]], deep], 1)
        return self.head(F.relu(self.decoder[0](x)))


@micro(floats((2, 8), (2, 8)), optional=True)
class TwinTowers(nn.Module):
    """Two inputs through one tower, compared by a dot product and a distance: no weight reads the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Linear(8, 12)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = self.tower(a), self.tower(b)
        return (a * b).sum(-1) + F.cosine_similarity(a, b, dim=-1) + (a - b).pow(2).mean(-1)


@micro(lambda: (torch.randn(2, 3, 8, 8), torch.ones(2, 1, 6, 6, dtype=torch.int64)), kept=CONV)
class MaskLookedAt(_Between):
    """As transformers do: a mask of ones is dropped, unless the values cannot be looked at while tracing."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        x = self.conv(x)
        if isinstance(mask, FakeTensor) or not bool(mask.all()):
            x = x.masked_fill(mask.logical_not(), 0.0)
        return self.head(F.relu(x))
