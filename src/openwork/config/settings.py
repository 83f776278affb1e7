"""What a config asks of a layer: channels, N:M masks, quantisation. Values are checked when they are made."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TypeVar

from openwork.config.counting import kept_channels
from openwork.errors import ConfigError

__all__ = [
    "ChannelSetting",
    "Cost",
    "DataQuantSetting",
    "GradMode",
    "NofMSetting",
    "PruneSetting",
    "QuantSetting",
    "Target",
    "WeightAlgorithm",
    "WeightQuantSetting",
]

LARGEST_M = 16
_UINT32 = 2**32
_LARGEST_CLIP = 1e30  # float32 holds ranges of such ends, and their steps


class GradMode(enum.StrEnum):
    """What happens to the gradient of a masked weight."""

    MASKED = "MASKED"  # it is dropped
    SR_STE = "SR_STE"  # it passes, and a decay pulls the masked weight to zero (Zhou et al. 2021)


class WeightAlgorithm(enum.StrEnum):
    """How the scale of a quantised weight is found."""

    ARQ = "arq_retrain"  # from the largest magnitude
    ULQ = "ulq_retrain"  # learned


class Target(enum.StrEnum):
    """What the deploy file is written for."""

    ONNX = "ONNX"  # QuantizeLinear / DequantizeLinear
    ASCEND = "ASCEND"  # AscendQuant / AscendDequant


class Cost(enum.StrEnum):
    """What the channel search counts."""

    BITOPS = "BITOPS"
    MACS = "MACS"
    PARAMS = "PARAMS"
    ACTIVATION_MEMORY = "ACTIVATION_MEMORY"
    LATENCY = "LATENCY"


Kind = TypeVar("Kind", bound=enum.StrEnum)


def _member(kind: type[Kind], value: str, field_name: str) -> Kind:
    """The member that a word stands for: code compares members by identity."""
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{field_name} is {value!r}; allowed: {', '.join(kind)}") from None


@dataclass(frozen=True)
class ChannelSetting:
    """Remove whole channels.

    Attributes:
        ratio: share of the channels to remove, in (0, 1).
        aligned: round the kept channels up to a multiple of 16 (``ascend_optimized``).
    """

    ratio: float
    aligned: bool = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.ratio) and 0.0 < self.ratio < 1.0):
            raise ConfigError(f"prune_ratio is {self.ratio}; it must be greater than 0 and less than 1")

    def kept(self, total: int, blocks: int = 1) -> int:
        """Channels that stay of `total`, see `kept_channels`."""
        return kept_channels(total, self.ratio, self.aligned, blocks)


@dataclass(frozen=True)
class NofMSetting:
    """Keep `n` of each `m` weights along the input channels.

    Attributes:
        n: weights kept of each group, ``1 <= n < m``.
        m: size of a group, at most 16.
        update_freq: 0: the mask is chosen once, at the first forward; k: again every k training forwards.
        grad_mode: what happens to the gradient of masked weights.
        sr_ste_decay: strength of the pull to zero with ``SR_STE``; at least 0.
        permute: reorder input channels first, so that the mask keeps more magnitude.
    """

    n: int = 2
    m: int = 4
    update_freq: int = 0
    grad_mode: GradMode = GradMode.MASKED
    sr_ste_decay: float = 2e-4
    permute: bool = False

    def __post_init__(self) -> None:
        if type(self.n) is not int or type(self.m) is not int or not 1 <= self.n < self.m <= LARGEST_M:
            raise ConfigError(
                f"n_out_of_m is {self.n}:{self.m}; n must be an integer from 1 to m - 1, m one of at most {LARGEST_M}"
            )
        if not isinstance(self.update_freq, int) or not 0 <= self.update_freq < _UINT32:
            raise ConfigError(f"update_freq is {self.update_freq!r}; it must be an integer of at least 0")
        object.__setattr__(self, "grad_mode", _member(GradMode, self.grad_mode, "grad_mode"))
        if not (math.isfinite(self.sr_ste_decay) and self.sr_ste_decay >= 0):
            raise ConfigError(f"sr_ste_decay is {self.sr_ste_decay}; it must be at least 0 and finite")

    @property
    def changes(self) -> bool:
        """Whether pruned weights keep values, so that a weight does not tell its mask."""
        return self.update_freq != 0 or self.grad_mode is not GradMode.MASKED


PruneSetting = ChannelSetting | NofMSetting


@dataclass(frozen=True)
class DataQuantSetting:
    """Quantisation of a layer's input, ULQ: a learned clip range.

    Attributes:
        clip_max: upper end of the first clip range; None: taken from the first batches.
        clip_min: lower end; given exactly when `clip_max` is.
        fixed_min: keep the lower end fixed at 0 (True) or learn it (False); None: fixed when the data has no
            negative value.
    """

    clip_max: float | None = None
    clip_min: float | None = None
    fixed_min: bool | None = None
    dst_type: str = "INT8"

    def __post_init__(self) -> None:
        if self.dst_type != "INT8":
            why = "4 bits lose too much" if self.dst_type == "INT4" else "no integer kernel multiplies them"
            raise ConfigError(f"dst_type of activations is {self.dst_type}; only INT8 is allowed ({why})")
        low, high = self.clip_min, self.clip_max
        if (low is None) != (high is None):
            raise ConfigError("clip_max and clip_min must be given together")
        if low is None or high is None:
            return
        for name, value in (("clip_max", high), ("clip_min", low)):
            if not abs(value) <= _LARGEST_CLIP:
                raise ConfigError(f"{name} is {value}; it must be from {-_LARGEST_CLIP:g} to {_LARGEST_CLIP:g}")
        if high <= low:
            raise ConfigError(f"clip_max is {high} and clip_min is {low}; clip_max must be greater")
        if low > 0 or high < 0:
            raise ConfigError(f"clip_min {low} to clip_max {high} leaves out 0, which padding needs")


@dataclass(frozen=True)
class WeightQuantSetting:
    """Quantisation of a layer's weight.

    Attributes:
        algorithm: ARQ or ULQ.
        dst_type: ``INT8`` or ``INT4``.
        channel_wise: one scale for each output channel, rather than one for the tensor.
    """

    algorithm: WeightAlgorithm = WeightAlgorithm.ARQ
    dst_type: str = "INT8"
    channel_wise: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "algorithm", _member(WeightAlgorithm, self.algorithm, "algorithm"))
        if self.dst_type not in ("INT8", "INT4"):
            raise ConfigError(f"dst_type of weights is {self.dst_type}; allowed: INT8, INT4")


@dataclass(frozen=True)
class QuantSetting:
    """Quantisation of one layer: its input and its weight."""

    data: DataQuantSetting = field(default_factory=DataQuantSetting)
    weight: WeightQuantSetting = field(default_factory=WeightQuantSetting)
