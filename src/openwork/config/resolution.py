"""Which setting holds for which layer.

An override by layer name wins over one by type, which wins over the global setting. Skips are the union of
the general and the specific lists. For pruning a skip beats an override; for quantisation an override beats a
skip.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from openwork.config.retrain import LayerOverride, RetrainConfig
from openwork.config.settings import (
    ChannelSetting,
    DataQuantSetting,
    NofMSetting,
    PruneSetting,
    QuantSetting,
    WeightQuantSetting,
)
from openwork.errors import ConfigError, nearest

__all__ = ["PYTORCH_TYPES", "TENSORFLOW_TYPES", "LayerSetting", "resolve"]

PYTORCH_TYPES = ("Conv2d", "ConvTranspose2d", "Linear")
"""Layer types that a config for PyTorch may name even where the model has none of them."""

TENSORFLOW_TYPES = ("Conv2D", "Conv2DBackpropInput", "MatMul")
"""The same for TensorFlow."""


@dataclass(frozen=True)
class LayerSetting:
    """What is to be done with one layer.

    Attributes:
        prune: the effective prune setting; None: not pruned on its own account.
        quant: the effective quantisation; None: not quantised.
        reason: where `prune` comes from, or why it is None, as a field of the config.
        quant_reason: the same for `quant`.
    """

    prune: PruneSetting | None = None
    quant: QuantSetting | None = None
    reason: str = ""
    quant_reason: str = ""

    @property
    def channels(self) -> ChannelSetting | None:
        """`prune` if it removes channels."""
        return self.prune if isinstance(self.prune, ChannelSetting) else None

    @property
    def mask(self) -> NofMSetting | None:
        """`prune` if it masks N of M weights."""
        return self.prune if isinstance(self.prune, NofMSetting) else None


def resolve(
    config: RetrainConfig,
    layers: Mapping[str, str],
    *,
    prunable: Collection[str] = (),
    maskable: Collection[str] = (),
    quantizable: Collection[str] = (),
    prunable_on_request: Collection[str] = (),
    known_types: Iterable[str] = (),
    suggested: Collection[str] = (),
) -> dict[str, LayerSetting]:
    """Settle what is done with each layer.

    Args:
        config: the settings.
        layers: type of every layer of the model by its name, prunable or not.
        prunable: names of the layers whose channels a global setting removes.
        maskable: names of the layers that can get an N:M mask.
        quantizable: names of the layers that can be quantised.
        prunable_on_request: further layers whose channels go only when an override asks for it.
        known_types: types that may be named though no layer has them, e.g. `PYTORCH_TYPES`.
        suggested: names that a message offers in place of a wrong one; empty: those of `layers`.

    Returns:
        The setting of every layer, in the order of `layers`. That nothing at all is pruned is for the caller
        to judge; each `LayerSetting.reason` says why.

    Raises:
        ConfigError: a layer name or type that does not exist (with the nearest ones), or an override that asks
            for what the layer cannot do.
    """
    capable = {
        ChannelSetting: set(prunable) | set(prunable_on_request),
        NofMSetting: set(maskable),
        QuantSetting: set(quantizable),
    }
    _check_names(config, layers, set(known_types), suggested or layers)
    _check_abilities(config, layers, capable, set(known_types))
    by_name = {override.name: override for override in config.override_layer_configs}
    by_type = {override.name: override for override in config.override_layer_types}
    by_default = {ChannelSetting: set(prunable), NofMSetting: capable[NofMSetting]}
    result = {}
    for name, kind in layers.items():
        # Narrowest first: the first level that says something wins.
        levels = [
            (f"override_layer_configs[{name!r}]", by_name.get(name)),
            (f"override_layer_types[{kind!r}]", by_type.get(kind)),
        ]
        prune, reason = _prune_setting(config, name, kind, levels, capable, by_default)
        quant, quant_reason = None, "cannot be quantised"
        if name in capable[QuantSetting]:
            quant, quant_reason = _quant_setting(config, name, kind, levels)
        result[name] = LayerSetting(prune, quant, reason, quant_reason)
    return result


_Levels = list[tuple[str, LayerOverride | None]]


def _prune_setting(
    config: RetrainConfig,
    name: str,
    kind: str,
    levels: _Levels,
    capable: Mapping[type, set[str]],
    by_default: Mapping[type, set[str]],
) -> tuple[PruneSetting | None, str]:
    skipped = _skip(config, name, kind, "regular_prune")
    if skipped:
        return None, skipped
    for where, override in levels:
        if override is not None and override.prune is not None:
            if name in capable[type(override.prune)]:
                return override.prune, where
            # A type's setting that this one layer cannot follow (a depthwise Conv2d, say): it stays as it is.
            return None, f"{where} does not apply to this layer"
    if config.prune_config is None:
        return None, "prune_config is not set"
    if name not in by_default[type(config.prune_config)]:
        return None, f"{kind} layers like this are not pruned unless something they are tied to is"
    return config.prune_config, "prune_config"


def _quant_setting(config: RetrainConfig, name: str, kind: str, levels: _Levels) -> tuple[QuantSetting | None, str]:
    overrides = [(where, item) for where, item in levels if item is not None and (item.data or item.weight)]
    skipped = _skip(config, name, kind, "quant")
    if skipped and not overrides:
        return None, skipped
    data = [item.data for _, item in overrides] + [config.retrain_data_quant_config]
    weight = [item.weight for _, item in overrides] + [config.retrain_weight_quant_config]
    if not any(data) and not any(weight):
        return None, "neither retrain_data_quant_config nor retrain_weight_quant_config is set"
    setting = QuantSetting(
        next((item for item in data if item is not None), DataQuantSetting()),
        next((item for item in weight if item is not None), WeightQuantSetting()),
    )
    return setting, overrides[0][0] if overrides else "retrain_data_quant_config"


def _skip(config: RetrainConfig, name: str, kind: str, what: str) -> str:
    """The list that skips a layer, empty if none; `what` is ``regular_prune`` or ``quant``."""
    for field, value in (
        ("skip_layers", name),
        (f"{what}_skip_layers", name),
        ("skip_layer_types", kind),
        (f"{what}_skip_types", kind),
    ):
        if value in getattr(config, field):
            return f"{field} names {value!r}"
    return ""


def _named(config: RetrainConfig) -> Iterator[tuple[str, str, bool]]:
    """(field, name, whether it is a type) of everything that the config names."""
    for field in ("skip_layers", "regular_prune_skip_layers", "quant_skip_layers"):
        yield from ((field, name, False) for name in getattr(config, field))
    yield from (("override_layer_configs", override.name, False) for override in config.override_layer_configs)
    for field in ("skip_layer_types", "regular_prune_skip_types", "quant_skip_types"):
        yield from ((field, name, True) for name in getattr(config, field))
    yield from (("override_layer_types", override.name, True) for override in config.override_layer_types)


def _check_names(
    config: RetrainConfig, layers: Mapping[str, str], known_types: set[str], suggested: Collection[str]
) -> None:
    types = known_types | set(layers.values())
    for field, name, is_type in _named(config):
        allowed: Collection[str] = types if is_type else layers
        if name not in allowed:
            what = "layer type" if is_type else "layer"
            close = nearest(name, types if is_type else suggested)
            raise ConfigError(f"{config.source}: {field}: the model has no {what} {name!r}; {close}")


def _check_abilities(
    config: RetrainConfig, layers: Mapping[str, str], capable: Mapping[type, set[str]], known_types: set[str]
) -> None:
    """Refuse an override that no layer it names can follow, rather than pass over it in silence."""
    words = {
        ChannelSetting: "lose channels (filter_pruner)",
        NofMSetting: "get an N:M mask (n_out_of_m_pruner)",
        QuantSetting: "be quantised",
    }
    for is_type, overrides in ((False, config.override_layer_configs), (True, config.override_layer_types)):
        field = "override_layer_types" if is_type else "override_layer_configs"
        for override in overrides:
            wanted: list[type] = [] if override.prune is None else [type(override.prune)]
            if (override.data or override.weight) and capable[QuantSetting]:
                wanted.append(QuantSetting)
            for ability in wanted:
                able = capable[ability]
                types = {layers[name] for name in able if name in layers}
                if is_type:
                    fine = override.name in types | known_types
                else:
                    fine = override.name in able
                if not fine:
                    kind = "" if is_type else f", a {layers[override.name]},"
                    able_names = sorted(types | known_types) if is_type else sorted(able)
                    raise ConfigError(
                        f"{config.source}: {field}: {override.name!r}{kind} cannot {words[ability]}; "
                        f"{nearest(override.name, able_names) if able_names else 'no layer of the model can'}"
                    )
