"""Tell layer by layer whether the N:M pattern holds, in a torch model or an ONNX file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from openwork.errors import FileError
from openwork.files import path_text
from openwork.sparsity.masks import check
from openwork.torch.sparse24.apply import maskable_layers
from openwork.torch.sparse24.layers import kind_of
from openwork.torch.sparse24.module import is_masked, state_of
from openwork.torch.sparse24.onnx_weights import contractions

__all__ = ["LayerSparsity", "SparsityReport", "verify_sparsity"]


@dataclass(frozen=True)
class LayerSparsity:
    """One layer of a report.

    Attributes:
        name: module path, or the name of the ONNX node.
        kind: layer class or ONNX operator.
        shape: shape of the weight.
        holds: no group has more than N non-zeros.
        zeros: share of zeros, 0 to 1.
        reason: where the pattern breaks, or why the layer cannot hold one; empty when it holds.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    holds: bool
    zeros: float
    reason: str = ""


@dataclass(frozen=True)
class SparsityReport:
    """All layers that contract with a weight, in the order of the model. Prints as a table."""

    layers: tuple[LayerSparsity, ...]
    n: int
    m: int

    def __iter__(self) -> Iterator[LayerSparsity]:
        return iter(self.layers)

    def __getitem__(self, name: str) -> LayerSparsity:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(name)

    @property
    def held(self) -> tuple[str, ...]:
        """Names of the layers in which the pattern holds."""
        return tuple(layer.name for layer in self.layers if layer.holds)

    def __str__(self) -> str:
        rows = [("layer", "type", "weight", f"{self.n}:{self.m}", "zeros", "why not")]
        for layer in self.layers:
            size = "x".join(map(str, layer.shape))
            rows.append(
                (layer.name, layer.kind, size, "yes" if layer.holds else "no", f"{layer.zeros:.1%}", layer.reason)
            )
        widths = [max(len(row[column]) for row in rows) for column in range(6)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        lines.append(f"{len(self.held)} of {len(self.layers)} layers hold {self.n}:{self.m}")
        return "\n".join(lines)


def verify_sparsity(model: nn.Module | str | os.PathLike[str], n: int = 2, m: int = 4) -> SparsityReport:
    """Check the N:M pattern of every layer that can have one.

    Args:
        model: a torch module (masked layers are judged by their weights under the mask in force), or the path
            of an ONNX file: Conv, ConvTranspose, Gemm and MatMul nodes and their integer forms whose weight is
            constant, also behind Identity, Transpose, Cast, Reshape of constants and DequantizeLinear.
        n: allowed non-zeros of each group.
        m: size of a group.

    Returns:
        The report; ``print(report)`` gives a table.

    Raises:
        FileError: the path does not exist or is no ONNX file.
    """
    if isinstance(model, nn.Module):
        return SparsityReport(tuple(_of_module(model, n, m)), n, m)
    path = Path(path_text(model, "model"))
    if not path.is_file():
        raise FileError(f"model {path} {'is a folder; a file is needed' if path.exists() else 'does not exist'}")
    return SparsityReport(tuple(_of_file(path, n, m)), n, m)


def _judge(name: str, kind: str, weight: Any, axis: int, blocks: int, n: int, m: int, reason: str) -> LayerSparsity:
    result = check(weight, axis, n, m, blocks)
    channels = weight.shape[axis] // blocks
    holds = result.holds and channels > n
    if not reason and channels <= n:
        reason = f"it has {channels} input channels per filter; {n}:{m} keeps {n} of {m}"
    if not reason and not result.holds:
        reason = (
            f"{result.broken:,} of {result.groups:,} groups have more than {n} non-zeros, first at "
            f"{list(result.first or ())}"
        )
    return LayerSparsity(name, kind, tuple(weight.shape), holds, result.zeros, "" if holds else reason)


def _of_module(model: nn.Module, n: int, m: int) -> Iterator[LayerSparsity]:
    reasons = maskable_layers(model, n, m)
    for name, layer in model.named_modules():
        kind = kind_of(layer)
        weight = layer._parameters.get("weight")
        if kind is None or not isinstance(weight, Tensor):
            continue
        reason = reasons.get(name, "")
        values = weight.detach()
        if is_masked(layer):
            reason = ""
            values = values * state_of(layer).current(values)
        yield _judge(name, type(layer).__name__, values, kind.axis, kind.blocks(layer), n, m, reason)


def _of_file(path: Path, n: int, m: int) -> Iterator[LayerSparsity]:
    for found in contractions(path):
        if found.nonzero is None:
            yield LayerSparsity(found.name, found.operator, (), False, 0.0, found.reason)
        else:
            yield _judge(found.name, found.operator, found.nonzero, found.axis, found.blocks, n, m, "")
