"""Quantisation factors in a record."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from openwork.errors import RecordError

__all__ = ["KVCacheFactors", "QuantFactors"]

FloatArray = npt.NDArray[np.float32]
Int32Array = npt.NDArray[np.int32]


def _floats() -> FloatArray:
    return np.empty(0, np.float32)


def _ints() -> Int32Array:
    return np.empty(0, np.int32)


@dataclass(frozen=True, eq=False)
class QuantFactors:
    """A ``SingleLayerRecord``: real = (integer - offset) * scale.

    Attributes:
        scale_d, offset_d: scale and offset of the layer's input; None where it was not written.
        scale_w, offset_w: float32 / int32, one for each output channel or one for all; empty: not written.
        shift_bit: uint32, one for each output channel; empty: not written.
        tensor_balance_factor: float32 for each input channel; empty: not written.
        skip_fusion: do not fold the batch norm that follows.
        dst_type, act_type, wts_type: integer types of both, of the input, of the weight; None: not written.
        fakequant_precision_mode: ``DEFAULT`` or ``FORCE_FP16_QUANT``; None: not written.
        scale_h, offset_h, scale_r, offset_r: state and recurrent weight of a recurrent layer.
    """

    scale_d: float | None = None
    offset_d: int | None = None
    scale_w: FloatArray = field(default_factory=_floats)
    offset_w: Int32Array = field(default_factory=_ints)
    shift_bit: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    tensor_balance_factor: FloatArray = field(default_factory=_floats)
    skip_fusion: bool | None = None
    dst_type: str | None = None
    act_type: str | None = None
    wts_type: str | None = None
    fakequant_precision_mode: str | None = None
    scale_h: float | None = None
    offset_h: int | None = None
    scale_r: FloatArray = field(default_factory=_floats)
    offset_r: Int32Array = field(default_factory=_ints)

    def __post_init__(self) -> None:
        for name, dtype in _ARRAYS.items():
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=dtype).reshape(-1))
        for name in ("scale_d", "scale_h"):
            value = getattr(self, name)
            # A scale is a float32 in the file; the same number must come back.
            object.__setattr__(self, name, None if value is None else float(np.float32(value)))
        self._check()

    def _check(self) -> None:
        for name in ("scale_d", "scale_w", "scale_h", "scale_r"):
            value = getattr(self, name)
            values = np.asarray([] if value is None else value, np.float32).reshape(-1)
            wrong = values[~(np.isfinite(values) & (values > 0))]
            if wrong.size:
                raise RecordError(f"{name} is {wrong[0]}; it must be greater than 0 and finite")
        for scale, offset in (("scale_w", "offset_w"), ("scale_r", "offset_r")):
            sizes = getattr(self, scale).size, getattr(self, offset).size
            if sizes[1] and sizes[0] != sizes[1]:
                raise RecordError(f"{scale} has {sizes[0]} values and {offset} {sizes[1]}; as many are needed")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, QuantFactors):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _FIELDS if name not in _ARRAYS) and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in _ARRAYS
        )


@dataclass(frozen=True, eq=False)
class KVCacheFactors:
    """A ``SingleLayerKVCacheRecord``.

    Attributes:
        scale, offset: float32 / int32, as many of both.
    """

    scale: FloatArray = field(default_factory=_floats)
    offset: Int32Array = field(default_factory=_ints)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", np.asarray(self.scale, np.float32).reshape(-1))
        object.__setattr__(self, "offset", np.asarray(self.offset, np.int32).reshape(-1))
        wrong = self.scale[~(np.isfinite(self.scale) & (self.scale > 0))]
        if wrong.size:
            raise RecordError(f"scale is {wrong[0]}; it must be greater than 0 and finite")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KVCacheFactors):
            return NotImplemented
        return np.array_equal(self.scale, other.scale) and np.array_equal(self.offset, other.offset)


_ARRAYS: dict[str, Any] = {
    "scale_w": np.float32,
    "offset_w": np.int32,
    "shift_bit": np.uint32,
    "tensor_balance_factor": np.float32,
    "scale_r": np.float32,
    "offset_r": np.int32,
}
_FIELDS = tuple(item.name for item in fields(QuantFactors))


def fill_factors(proto: Any, factors: QuantFactors) -> None:
    """Write into a ``SingleLayerRecord`` message."""
    for name in _FIELDS:
        value = getattr(factors, name)
        if name in _ARRAYS:
            getattr(proto, name).extend(value.tolist())
        elif value is not None:
            setattr(proto, name, value)


def read_factors(proto: Any, where: str) -> QuantFactors:
    """Read from a ``SingleLayerRecord`` message.

    Raises:
        RecordError: a scale that is not positive and finite, or scales and offsets of different number.
    """
    values: dict[str, Any] = {name: list(getattr(proto, name)) for name in _ARRAYS}
    for name in _FIELDS:
        if name not in _ARRAYS and proto.HasField(name):
            values[name] = getattr(proto, name)
    try:
        return QuantFactors(**values)
    except RecordError as error:
        raise RecordError(f"{where}: {error}") from error
