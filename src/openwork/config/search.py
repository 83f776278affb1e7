"""The config file of the automatic channel search."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path

from openwork.config.retrain import (
    LARGEST_CONFIG,
    RetrainConfig,
    _enum_name,
    _Reader,
    load_retrain_config,
    messages,
)
from openwork.config.settings import ChannelSetting, Cost
from openwork.errors import ConfigError
from openwork.files import check_paths, read_text
from openwork.prototext import exact_decimal, parse_text

__all__ = ["AutoPruneConfig", "load_auto_prune_config", "parse_auto_prune_config"]


@dataclass(frozen=True)
class AutoPruneConfig:
    """An ``AutoChannelPruneConfig``, checked.

    Attributes:
        compress_ratio: cost before / cost after, greater than 1.
        ascend_optimized: keep multiples of 16 channels.
        max_prune_ratio: the largest share of channels that one layer may lose, in (0, 1].
        test_iteration: batches that the sensitivity is averaged over, at least 1.
        override: skips and ratios of single layers; an empty config when no file is named.
        override_path: the file that `override` was read from.
        cost: what the search counts.
        source: the file it was read from, for messages.
    """

    compress_ratio: float
    ascend_optimized: bool = True
    max_prune_ratio: float = 1.0
    test_iteration: int = 1
    override: RetrainConfig = field(default_factory=RetrainConfig)
    override_path: str | None = None
    cost: Cost = Cost.BITOPS
    source: str = field(default="config", compare=False)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.compress_ratio) and self.compress_ratio > 1):
            raise ConfigError(
                f"{self.source}: compress_ratio is {self.compress_ratio}; it must be greater than 1 and finite"
            )
        if not 0 < self.max_prune_ratio <= 1:
            raise ConfigError(
                f"{self.source}: max_prune_ratio is {self.max_prune_ratio}; it must be greater than 0 and at most 1"
            )
        if self.test_iteration < 1:
            raise ConfigError(f"{self.source}: test_iteration is {self.test_iteration}; it must be at least 1")


def load_auto_prune_config(path: str | os.PathLike[str]) -> AutoPruneConfig:
    """Read a config file of the channel search, and the override file that it names.

    Args:
        path: the ``.cfg`` file, protobuf text format.

    Raises:
        FileError: this or the override file is missing, a folder, unreadable, too large, or not UTF-8.
        ConfigError: anything in them is wrong.
    """
    check_paths(config=path)
    return parse_auto_prune_config(read_text(path, "config file", LARGEST_CONFIG), os.fspath(path))


def parse_auto_prune_config(text: str, source: str = "config") -> AutoPruneConfig:
    """Read a config of the channel search from its text; see `load_auto_prune_config`.

    Args:
        text: the content, protobuf text format.
        source: its file name: for messages, and to find an override file that lies beside it.
    """
    proto = parse_text(text, messages()["AutoChannelPruneConfig"], source, ConfigError)
    ratio = _Reader(source).required(proto, "compress_ratio")
    override, override_path = RetrainConfig(), None
    if proto.HasField("override_prune_cfg"):
        override_path = _find_override(proto.override_prune_cfg, source)
        override = load_retrain_config(override_path)
        _check_override(override)
    return AutoPruneConfig(
        compress_ratio=exact_decimal(ratio),
        ascend_optimized=proto.ascend_optimized,
        max_prune_ratio=exact_decimal(proto.max_prune_ratio),
        test_iteration=proto.test_iteration,
        override=override,
        override_path=override_path,
        cost=Cost(_enum_name(proto, "cost")),
        source=source,
    )


def _find_override(name: str, source: str) -> str:
    """The override file: as given, from the working folder, else beside the config that names it."""
    if not name:
        raise ConfigError(f"{source}: override_prune_cfg is empty; give a file name or leave the field out")
    beside = Path(source).parent / name
    return os.fspath(beside) if not Path(name).exists() and beside.exists() else name


def _check_override(override: RetrainConfig) -> None:
    """Refuse what has no meaning for the search.

    Raises:
        ConfigError: a field other than skips and channel ratios of layers and types is set.
    """
    default = RetrainConfig()
    forbidden = (
        "prune_config",
        "batch_num",
        "retrain_data_quant_config",
        "retrain_weight_quant_config",
        "quant_skip_layers",
        "quant_skip_types",
        "force_fp16_quant",
        "target",
    )
    allowed = "allowed in an override_prune_cfg: skips, and filter_pruner overrides of layers and types"
    for name in forbidden:
        if getattr(override, name) != getattr(default, name):
            shown = "fakequant_precision_mode" if name == "force_fp16_quant" else name
            raise ConfigError(f"{override.source}: {shown} must not be set; {allowed}")
    for where, overrides in (
        ("override_layer_configs", override.override_layer_configs),
        ("override_layer_types", override.override_layer_types),
    ):
        for item in overrides:
            if item.data is not None or item.weight is not None:
                raise ConfigError(f"{override.source}: {where}[{item.name!r}] must not set quantisation; {allowed}")
            if item.prune is not None and not isinstance(item.prune, ChannelSetting):
                raise ConfigError(
                    f"{override.source}: {where}[{item.name!r}] must not set n_out_of_m_pruner; {allowed}"
                )
