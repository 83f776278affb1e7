"""The config file of pruning, 2:4 sparsity and quantisation: reading and checking."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from openwork.config.settings import (
    ChannelSetting,
    DataQuantSetting,
    GradMode,
    NofMSetting,
    PruneSetting,
    Target,
    WeightAlgorithm,
    WeightQuantSetting,
)
from openwork.errors import ConfigError
from openwork.files import read_text
from openwork.prototext import exact_decimal, load_messages, parse_text

__all__ = ["LayerOverride", "RetrainConfig", "load_retrain_config", "parse_retrain_config"]

# A config is written by hand or by the search, which adds a line for each layer.
LARGEST_CONFIG = 32 << 20

messages = functools.cache(functools.partial(load_messages, "openwork.config"))


@dataclass(frozen=True)
class LayerOverride:
    """Settings of one layer, or of all layers of one type.

    Attributes:
        name: layer name (in ``override_layer_configs``) or type (in ``override_layer_types``).
        prune, data, weight: None where the next wider setting applies.
    """

    name: str
    prune: PruneSetting | None = None
    data: DataQuantSetting | None = None
    weight: WeightQuantSetting | None = None


@dataclass(frozen=True)
class RetrainConfig:
    """An ``AMCTRetrainConfig``, checked. Field names are those of the file.

    Attributes:
        prune_config: what to do with all layers that nothing more special is said about; None: nothing.
        retrain_data_quant_config: the same for the quantisation of inputs.
        retrain_weight_quant_config: the same for the quantisation of weights.
        skip_layers, skip_layer_types: left alone by pruning and by quantisation.
        override_layer_configs, override_layer_types: settings of single layers and of types.
        batch_num: batches that the first clip range of activations is estimated from.
        force_fp16_quant: ``fakequant_precision_mode: FORCE_FP16_QUANT``.
        target: what the deploy file is written for.
        source: the file it was read from, for messages.
    """

    batch_num: int = 1
    retrain_data_quant_config: DataQuantSetting | None = None
    retrain_weight_quant_config: WeightQuantSetting | None = None
    skip_layers: tuple[str, ...] = ()
    override_layer_configs: tuple[LayerOverride, ...] = ()
    skip_layer_types: tuple[str, ...] = ()
    override_layer_types: tuple[LayerOverride, ...] = ()
    prune_config: PruneSetting | None = None
    regular_prune_skip_layers: tuple[str, ...] = ()
    regular_prune_skip_types: tuple[str, ...] = ()
    quant_skip_layers: tuple[str, ...] = ()
    quant_skip_types: tuple[str, ...] = ()
    force_fp16_quant: bool = False
    target: Target = Target.ONNX
    source: str = field(default="config", compare=False)

    def __post_init__(self) -> None:
        if self.batch_num < 1:
            raise ConfigError(f"{self.source}: batch_num is {self.batch_num}; it must be at least 1")
        for where, overrides in (
            ("override_layer_configs", self.override_layer_configs),
            ("override_layer_types", self.override_layer_types),
        ):
            _refuse_repeated(self.source, where, (override.name for override in overrides))

    @property
    def overrides(self) -> tuple[LayerOverride, ...]:
        """All overrides, of layers and of types."""
        return self.override_layer_configs + self.override_layer_types

    @property
    def prune_settings(self) -> tuple[PruneSetting, ...]:
        """Every prune setting in the file; empty when it turns pruning on nowhere."""
        settings = (self.prune_config, *(override.prune for override in self.overrides))
        return tuple(setting for setting in settings if setting is not None)

    @property
    def prunes_channels(self) -> bool:
        """Whether any layer may lose channels."""
        return any(isinstance(setting, ChannelSetting) for setting in self.prune_settings)

    @property
    def masks_weights(self) -> bool:
        """Whether any layer may get an N:M mask."""
        return any(isinstance(setting, NofMSetting) for setting in self.prune_settings)

    @property
    def quantizes(self) -> bool:
        """Whether quantisation is turned on for any layer."""
        return any(
            part is not None
            for part in (
                self.retrain_data_quant_config,
                self.retrain_weight_quant_config,
                *(override.data for override in self.overrides),
                *(override.weight for override in self.overrides),
            )
        )


def load_retrain_config(path: str | os.PathLike[str]) -> RetrainConfig:
    """Read a pruning / quantisation config file.

    Args:
        path: the ``.cfg`` file, protobuf text format.

    Raises:
        FileError: missing, a folder, unreadable, too large, or not UTF-8.
        ConfigError: anything in it is wrong; the message names file, line or field, value and what is allowed.
    """
    return parse_retrain_config(read_text(path, "config file", LARGEST_CONFIG), os.fspath(path))


def parse_retrain_config(text: str, source: str = "config") -> RetrainConfig:
    """Read a pruning / quantisation config from its text.

    Args:
        text: the content, protobuf text format.
        source: its name, for messages.

    Raises:
        ConfigError: as in `load_retrain_config`.
    """
    proto = parse_text(text, messages()["AMCTRetrainConfig"], source, ConfigError)
    reader = _Reader(source)
    return RetrainConfig(
        batch_num=proto.batch_num,
        retrain_data_quant_config=reader.data(proto, "retrain_data_quant_config"),
        retrain_weight_quant_config=reader.weight(proto, "retrain_weight_quant_config"),
        skip_layers=reader.names(proto, "skip_layers"),
        override_layer_configs=reader.overrides(proto, "override_layer_configs", "layer_name"),
        skip_layer_types=reader.names(proto, "skip_layer_types"),
        override_layer_types=reader.overrides(proto, "override_layer_types", "layer_type"),
        prune_config=reader.prune(proto, "prune_config"),
        regular_prune_skip_layers=reader.names(proto, "regular_prune_skip_layers"),
        regular_prune_skip_types=reader.names(proto, "regular_prune_skip_types"),
        quant_skip_layers=reader.names(proto, "quant_skip_layers"),
        quant_skip_types=reader.names(proto, "quant_skip_types"),
        force_fp16_quant=proto.HasField("fakequant_precision_mode"),
        target=Target(_enum_name(proto, "target")),
        source=source,
    )


@dataclass(frozen=True)
class _Reader:
    """Turns messages into settings; `path` says where in the file it is."""

    source: str
    path: str = ""

    def inside(self, field_name: str) -> _Reader:
        return _Reader(self.source, f"{self.path}.{field_name}" if self.path else field_name)

    def fail(self, words: str) -> ConfigError:
        return ConfigError(f"{self.source}: {self.path + ': ' if self.path else ''}{words}")

    @contextlib.contextmanager
    def located(self) -> Iterator[None]:
        """Put file and field before the message of a setting that checks itself."""
        try:
            yield
        except ConfigError as error:
            raise self.fail(str(error)) from error

    def names(self, proto: Any, field_name: str) -> tuple[str, ...]:
        values = tuple(dict.fromkeys(getattr(proto, field_name)))
        if "" in values:
            raise self.fail(f"{field_name} holds an empty string; give a name")
        return values

    def arm(self, proto: Any, oneof: str) -> str:
        """Name of the member of a oneof that is set; an empty message is refused."""
        chosen: str | None = proto.WhichOneof(oneof)
        if chosen is None:
            allowed = [member.name for member in proto.DESCRIPTOR.oneofs_by_name[oneof].fields]
            raise self.fail(f"it is empty; one of {', '.join(allowed)} is needed")
        return chosen

    def required(self, proto: Any, field_name: str) -> Any:
        if not proto.HasField(field_name):
            raise self.fail(f"{field_name} is missing; it is required")
        return getattr(proto, field_name)

    def prune(self, proto: Any, field_name: str) -> PruneSetting | None:
        if not proto.HasField(field_name):
            return None
        reader, strategy = self.inside(field_name), getattr(proto, field_name)
        chosen = reader.arm(strategy, "regular_prune_strategy")
        pruner = getattr(strategy, chosen)
        reader = reader.inside(chosen)
        if chosen == "filter_pruner":
            name = reader.arm(pruner, "filter_pruner_algo")
            return reader.inside(name).channels(getattr(pruner, name))
        name = reader.arm(pruner, "n_out_of_m_pruner_algo")
        return reader.inside(name).mask(getattr(pruner, name))

    def channels(self, proto: Any) -> ChannelSetting:
        ratio = self.required(proto, "prune_ratio")
        with self.located():
            return ChannelSetting(exact_decimal(ratio), proto.ascend_optimized)

    def mask(self, proto: Any) -> NofMSetting:
        n, m = 2, 4
        if proto.HasField("n_out_of_m"):
            if proto.HasField("n_out_of_m_type"):
                raise self.fail("n_out_of_m_type and n_out_of_m are both given; only one of them is allowed")
            pattern = self.inside("n_out_of_m")
            n, m = pattern.required(proto.n_out_of_m, "n"), pattern.required(proto.n_out_of_m, "m")
        with self.located():
            setting = NofMSetting(
                n=n,
                m=m,
                update_freq=proto.update_freq,
                grad_mode=GradMode(_enum_name(proto, "grad_mode")),
                sr_ste_decay=exact_decimal(proto.sr_ste_decay),
                permute=proto.permute,
            )
        if proto.HasField("sr_ste_decay") and setting.grad_mode is not GradMode.SR_STE:
            raise self.fail(f"sr_ste_decay is given, but grad_mode is {setting.grad_mode.value}; it needs SR_STE")
        return setting

    def data(self, proto: Any, field_name: str) -> DataQuantSetting | None:
        if not proto.HasField(field_name):
            return None
        # There is one algorithm, so an empty message means it with its defaults.
        algorithm = getattr(proto, field_name).ulq_quantize
        reader = self.inside(field_name).inside("ulq_quantize")
        high = low = None
        if algorithm.HasField("clip_max_min"):
            clip = reader.inside("clip_max_min")
            high = exact_decimal(clip.required(algorithm.clip_max_min, "clip_max"))
            low = exact_decimal(clip.required(algorithm.clip_max_min, "clip_min"))
        with reader.located():
            return DataQuantSetting(
                clip_max=high,
                clip_min=low,
                fixed_min=algorithm.fixed_min if algorithm.HasField("fixed_min") else None,
                dst_type=_enum_name(algorithm, "dst_type"),
            )

    def weight(self, proto: Any, field_name: str) -> WeightQuantSetting | None:
        if not proto.HasField(field_name):
            return None
        reader, config = self.inside(field_name), getattr(proto, field_name)
        name = config.WhichOneof("weights_retrain_algo") or WeightAlgorithm.ARQ.value
        algorithm = getattr(config, name)
        with reader.inside(name).located():
            return WeightQuantSetting(WeightAlgorithm(name), _enum_name(algorithm, "dst_type"), algorithm.channel_wise)

    def overrides(self, proto: Any, field_name: str, key: str) -> tuple[LayerOverride, ...]:
        result = []
        for index, override in enumerate(getattr(proto, field_name)):
            name = self.inside(f"{field_name}[{index}]").required(override, key)
            if not name:
                raise self.inside(f"{field_name}[{index}]").fail(f"{key} is empty; give a name")
            reader = self.inside(f"{field_name}[{name!r}]")
            result.append(
                LayerOverride(
                    name=name,
                    prune=reader.prune(override, "prune_config"),
                    data=reader.data(override, "retrain_data_quant_config"),
                    weight=reader.weight(override, "retrain_weight_quant_config"),
                )
            )
        return tuple(result)


def _enum_name(proto: Any, field_name: str) -> str:
    values = proto.DESCRIPTOR.fields_by_name[field_name].enum_type.values_by_number
    name: str = values[getattr(proto, field_name)].name
    return name


def _refuse_repeated(source: str, where: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigError(f"{source}: {where}: {name!r} is given twice; keep one of the two")
        seen.add(name)
