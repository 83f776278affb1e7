"""Writing a config file that people edit and that AMCT's own parser reads."""

from __future__ import annotations

import os

from openwork.config.retrain import LayerOverride, RetrainConfig
from openwork.config.settings import (
    ChannelSetting,
    DataQuantSetting,
    GradMode,
    NofMSetting,
    PruneSetting,
    Target,
    WeightQuantSetting,
)
from openwork.files import write_text
from openwork.prototext import format_float, quote

__all__ = ["dump_retrain_config", "save_retrain_config"]


def dump_retrain_config(config: RetrainConfig) -> str:
    """The text of a config file.

    Floats are written as decimals (0.3). Fields of our own appear only where they differ from their default,
    so a config that asks for nothing beyond AMCT is read by AMCT.

    Returns:
        Text that `parse_retrain_config` turns back into an equal config.
    """
    lines = _Lines()
    if config.batch_num != 1:
        lines.add(f"batch_num: {config.batch_num}")
    _data(lines, config.retrain_data_quant_config)
    _weight(lines, config.retrain_weight_quant_config)
    _prune(lines, config.prune_config)
    for field in (
        "skip_layers",
        "skip_layer_types",
        "regular_prune_skip_layers",
        "regular_prune_skip_types",
        "quant_skip_layers",
        "quant_skip_types",
    ):
        for name in getattr(config, field):
            lines.add(f"{field}: {quote(name)}")
    if config.force_fp16_quant:
        lines.add("fakequant_precision_mode: FORCE_FP16_QUANT")
    if config.target is not Target.ONNX:
        lines.add(f"target: {config.target.value}")
    for override in config.override_layer_configs:
        _override(lines, "override_layer_configs", "layer_name", override)
    for override in config.override_layer_types:
        _override(lines, "override_layer_types", "layer_type", override)
    return lines.text()


def save_retrain_config(config: RetrainConfig, path: str | os.PathLike[str]) -> None:
    """Write `dump_retrain_config` to a file, whole or not at all.

    Raises:
        FileError: the file cannot be written.
    """
    write_text(path, dump_retrain_config(config))


class _Lines:
    """Indented lines of text format."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._depth = 0

    def add(self, line: str) -> None:
        self._lines.append("  " * self._depth + line)

    def open(self, *names: str) -> None:
        for name in names:
            self.add(f"{name} {{")
            self._depth += 1

    def close(self, count: int = 1) -> None:
        for _ in range(count):
            self._depth -= 1
            self.add("}")

    def text(self) -> str:
        return "".join(line + "\n" for line in self._lines)


def _flag(value: bool) -> str:
    return "true" if value else "false"


def _prune(lines: _Lines, setting: PruneSetting | None) -> None:
    if isinstance(setting, ChannelSetting):
        lines.open("prune_config", "filter_pruner", "balanced_l2_norm_filter_prune")
        lines.add(f"prune_ratio: {format_float(setting.ratio)}")
        lines.add(f"ascend_optimized: {_flag(setting.aligned)}")
        lines.close(3)
    elif isinstance(setting, NofMSetting):
        lines.open("prune_config", "n_out_of_m_pruner", "l1_selective_prune")
        if (setting.n, setting.m) == (2, 4):
            lines.add("n_out_of_m_type: M4N2")
        else:
            lines.add(f"n_out_of_m {{ n: {setting.n} m: {setting.m} }}")
        lines.add(f"update_freq: {setting.update_freq}")
        default = NofMSetting()
        if setting.grad_mode is not GradMode.MASKED:
            lines.add(f"grad_mode: {setting.grad_mode.value}")
        if setting.grad_mode is GradMode.SR_STE and setting.sr_ste_decay != default.sr_ste_decay:
            lines.add(f"sr_ste_decay: {format_float(setting.sr_ste_decay)}")
        if setting.permute:
            lines.add("permute: true")
        lines.close(3)


def _data(lines: _Lines, setting: DataQuantSetting | None) -> None:
    if setting is None:
        return
    lines.open("retrain_data_quant_config", "ulq_quantize")
    if setting.clip_max is not None and setting.clip_min is not None:
        lines.open("clip_max_min")
        lines.add(f"clip_max: {format_float(setting.clip_max)}")
        lines.add(f"clip_min: {format_float(setting.clip_min)}")
        lines.close()
    if setting.fixed_min is not None:
        lines.add(f"fixed_min: {_flag(setting.fixed_min)}")
    lines.add(f"dst_type: {setting.dst_type}")
    lines.close(2)


def _weight(lines: _Lines, setting: WeightQuantSetting | None) -> None:
    if setting is None:
        return
    lines.open("retrain_weight_quant_config", setting.algorithm.value)
    lines.add(f"dst_type: {setting.dst_type}")
    lines.add(f"channel_wise: {_flag(setting.channel_wise)}")
    lines.close(2)


def _override(lines: _Lines, field: str, key: str, override: LayerOverride) -> None:
    lines.open(field)
    lines.add(f"{key}: {quote(override.name)}")
    _data(lines, override.data)
    _weight(lines, override.weight)
    _prune(lines, override.prune)
    lines.close()
