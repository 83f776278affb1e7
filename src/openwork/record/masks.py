"""N:M masks in a record: one bit a weight.

The mask is flattened in C order (1 = kept) and put into bytes, most significant bit first; the bytes are
filled up with zeros to a multiple of 8 and read as little-endian int64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from openwork.errors import RecordError
from openwork.record.attributes import AttributeValue, read_attributes, same_attributes, set_attribute

__all__ = ["SelectiveMaskRecord", "pack_mask", "unpack_mask"]

_WORD = 64


def pack_mask(mask: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Bits of a mask as 64-bit words.

    Args:
        mask: any shape; non-zero = kept.

    Returns:
        int64 ``[ceil(size / 64)]``.
    """
    packed = np.packbits(np.asarray(mask).reshape(-1) != 0)
    words = np.zeros(-(-packed.size // 8) * 8, np.uint8)
    words[: packed.size] = packed
    return words.view("<i8").astype(np.int64, copy=False)


def unpack_mask(words: npt.ArrayLike, shape: Sequence[int]) -> npt.NDArray[np.bool_]:
    """The mask that `pack_mask` packed.

    Args:
        words: int64 ``[ceil(product of shape / 64)]``.
        shape: the mask's shape.

    Raises:
        RecordError: the number of words does not fit the shape, or bits beyond the mask are set.
    """
    size = math.prod(shape)
    array = np.asarray(words, dtype=np.int64).reshape(-1)
    needed = -(-size // _WORD)
    if array.size != needed:
        raise RecordError(
            f"selective_mask has {array.size} integers; shape {tuple(shape)} needs {needed}, one for 64 weights"
        )
    bits = np.unpackbits(np.ascontiguousarray(array.astype("<i8")).view(np.uint8))
    if bits[size:].any():
        raise RecordError(f"selective_mask has bits set beyond the {size} weights of shape {tuple(shape)}")
    return bits[:size].astype(np.bool_).reshape(tuple(shape))


@dataclass(frozen=True, eq=False)
class SelectiveMaskRecord:
    """The mask of one layer's weight.

    Attributes:
        name: the layer's name.
        shape: shape of the weight.
        words: int64, the packed mask, see `pack_mask`.
        extra: all other attributes of the node.
    """

    name: str
    shape: tuple[int, ...]
    words: npt.NDArray[np.int64]
    extra: Mapping[str, AttributeValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name:
            raise RecordError("selective_prune has no layer name")
        if not self.shape or min(self.shape) < 1:
            raise RecordError(f"{self.name!r}: mask_shape is {self.shape}; sizes of at least 1 are needed")
        try:
            self.mask()
        except RecordError as error:
            raise RecordError(f"{self.name!r}: {error}") from error

    @classmethod
    def of(cls, name: str, mask: npt.ArrayLike) -> SelectiveMaskRecord:
        """The record of a mask, non-zero = kept."""
        array = np.asarray(mask)
        return cls(name, array.shape, pack_mask(array))

    def mask(self) -> npt.NDArray[np.bool_]:
        """The mask, in the weight's shape; True = kept."""
        return unpack_mask(self.words, self.shape)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SelectiveMaskRecord):
            return NotImplemented
        return (
            (self.name, self.shape) == (other.name, other.shape)
            and np.array_equal(self.words, other.words)
            and same_attributes(self.extra, other.extra)
        )


def fill_mask(proto: Any, record: SelectiveMaskRecord) -> None:
    """Write into a ``PruneRecord`` message."""
    node = proto.selective_prune
    node.name = record.name
    shape = np.array(record.shape, np.int64)
    for name, value in {"mask_shape": shape, "selective_mask": record.words, **record.extra}.items():
        set_attribute(node, name, value)


def read_mask(proto: Any, where: str) -> SelectiveMaskRecord:
    """Read from a ``PruneRecord`` message.

    Raises:
        RecordError: an attribute is missing or of the wrong type, or the mask has the wrong length.
    """
    node = proto.selective_prune
    where = f"{where}.selective_prune"
    attributes = read_attributes(node, f"{where} {node.name!r}")
    arrays = []
    for name in ("mask_shape", "selective_mask"):
        value = attributes.pop(name, None)
        if value is None:
            raise RecordError(f"{where} {node.name!r}: attribute {name!r} is missing")
        if not isinstance(value, np.ndarray) or value.dtype.kind != "i":
            raise RecordError(f"{where} {node.name!r}: attribute {name!r} has the wrong type; INTS is needed")
        arrays.append(value)
    try:
        return SelectiveMaskRecord(node.name, tuple(arrays[0].tolist()), arrays[1], attributes)
    except RecordError as error:
        raise RecordError(f"{where}: {error}") from error
