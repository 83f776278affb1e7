"""Packed layers as plain arrays, for tools that bring their own runtime: .npz or .safetensors.

Per layer two arrays: ``<weight>/values`` and ``<weight>/index`` (Ascend) or ``<weight>/metadata`` (NVIDIA). The report
says shape, axis and type of each weight. Zeros have no sign here: no hardware keeps it.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from openwork.convert.detect import Detection
from openwork.convert.layer import Layer
from openwork.errors import FileError
from openwork.files import atomic_path
from openwork.onnx.modelfile import ModelFile, tensor_bits, tensor_type_name
from openwork.sparsity.nibbles import pack_nibbles
from openwork.sparsity.nvidia import to_nvidia
from openwork.sparsity.pack24 import Array, pack24, packed_shapes

__all__ = ["CONTAINERS", "write_layers"]

CONTAINERS = ("npz", "safetensors")
_SAFETENSORS_NAMES = {
    "float": "F32",
    "double": "F64",
    "float16": "F16",
    "bfloat16": "BF16",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
}


def write_layers(
    file: ModelFile,
    detection: Detection,
    path: Path,
    target: str,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write values and index of every qualifying weight.

    Args:
        file: the model.
        detection: of that model.
        path: the file; its suffix (.npz, .safetensors) says the format.
        target: ``nvidia`` (metadata) or ``ascend`` (ATC-style int8 index).
        progress: called with (weights written, weights in all).
    """
    layers = [same[0] for same in detection.weights.values()]
    write = _write_safetensors if path.suffix == ".safetensors" else _write_npz
    with atomic_path(path) as part:
        try:
            write(part, file, layers, target, progress)
        except OSError as error:
            raise FileError(f"{path}: cannot be written: {error.strerror or error}") from error


def _arrays(file: ModelFile, layer: Layer, target: str) -> Iterator[tuple[str, Array]]:
    assert layer.source is not None
    assert layer.view is not None
    array = file.array(layer.source.tensor).reshape(layer.view.shape)
    style = "canonical" if target == "nvidia" else "atc"
    packed = pack24(array, layer.view.axis, style=style, zero_point=layer.zero_point)
    four_bits = tensor_bits(layer.source.tensor.data_type) == 4
    yield "values", pack_nibbles(packed.values) if four_bits else packed.values
    if target == "nvidia":
        yield "metadata", to_nvidia(packed)
    else:
        yield "index", packed.index.view(np.int8)


def _entries(layer: Layer, target: str) -> list[tuple[str, str, tuple[int, ...], int]]:
    """(name, safetensors type, shape, bytes) of each array of a layer, without packing it."""
    assert layer.source is not None
    assert layer.view is not None
    values, index = packed_shapes(layer.view.shape, layer.view.axis)
    kind = layer.source.tensor.data_type
    bits = tensor_bits(kind) or 8
    count = int(np.prod(values, dtype=object))
    shape: tuple[int, ...]
    if bits == 4:
        shape, name, size = ((count + 1) // 2,), "U8", (count + 1) // 2
    else:
        shape, name, size = values, _SAFETENSORS_NAMES[tensor_type_name(kind)], count * bits // 8
    second = ("metadata", "U8") if target == "nvidia" else ("index", "I8")
    return [("values", name, shape, size), (*second, index, int(np.prod(index, dtype=object)))]


def _stem(layer: Layer) -> str:
    assert layer.source is not None
    where = f"{layer.source.value.scope.where}: " if layer.source.value.scope.where else ""
    return f"{where}{layer.source.value.name}"


def _write_npz(
    part: Path, file: ModelFile, layers: list[Layer], target: str, progress: Callable[[int, int], None] | None
) -> None:
    with zipfile.ZipFile(part, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for done, layer in enumerate(layers):
            for name, array in _arrays(file, layer, target):
                # NumPy's own format knows no bfloat16: its bits are written, the report names the type.
                plain = array if array.dtype.type.__module__ == "numpy" else array.view(f"u{array.itemsize}")
                with archive.open(f"{_stem(layer)}/{name}.npy", "w", force_zip64=True) as stream:
                    np.lib.format.write_array(stream, np.ascontiguousarray(plain), allow_pickle=False)
            if progress is not None:
                progress(done + 1, len(layers))


def _write_safetensors(
    part: Path, file: ModelFile, layers: list[Layer], target: str, progress: Callable[[int, int], None] | None
) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": f"openwork 2:4 {target}"}}
    at = 0
    for layer in layers:
        for name, kind, shape, size in _entries(layer, target):
            header[f"{_stem(layer)}/{name}"] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + size]}
            at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(part, "wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for done, layer in enumerate(layers):
            for _, array in _arrays(file, layer, target):
                stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            if progress is not None:
                progress(done + 1, len(layers))
