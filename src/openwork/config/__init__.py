"""Config files in AMCT's format: reading, checking, resolving for each layer, writing."""

from __future__ import annotations

from openwork.config.chosen import ChosenChannels, read_chosen_channels, write_chosen_channels
from openwork.config.counting import ALIGNMENT, kept_channels, ratio_of
from openwork.config.resolution import PYTORCH_TYPES, TENSORFLOW_TYPES, LayerSetting, resolve
from openwork.config.retrain import LayerOverride, RetrainConfig, load_retrain_config, parse_retrain_config
from openwork.config.search import AutoPruneConfig, load_auto_prune_config, parse_auto_prune_config
from openwork.config.settings import (
    ChannelSetting,
    Cost,
    DataQuantSetting,
    GradMode,
    NofMSetting,
    PruneSetting,
    QuantSetting,
    Target,
    WeightAlgorithm,
    WeightQuantSetting,
)
from openwork.config.writing import dump_retrain_config, save_retrain_config

__all__ = [
    "ALIGNMENT",
    "PYTORCH_TYPES",
    "TENSORFLOW_TYPES",
    "AutoPruneConfig",
    "ChannelSetting",
    "ChosenChannels",
    "Cost",
    "DataQuantSetting",
    "GradMode",
    "LayerOverride",
    "LayerSetting",
    "NofMSetting",
    "PruneSetting",
    "QuantSetting",
    "RetrainConfig",
    "Target",
    "WeightAlgorithm",
    "WeightQuantSetting",
    "dump_retrain_config",
    "kept_channels",
    "load_auto_prune_config",
    "load_retrain_config",
    "parse_auto_prune_config",
    "parse_retrain_config",
    "ratio_of",
    "read_chosen_channels",
    "resolve",
    "save_retrain_config",
    "write_chosen_channels",
]
