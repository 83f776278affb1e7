"""Which setting holds for which layer; expectations are written out by hand."""

from __future__ import annotations

import itertools

import pytest

from openwork.config import (
    PYTORCH_TYPES,
    ChannelSetting,
    DataQuantSetting,
    LayerOverride,
    NofMSetting,
    QuantSetting,
    RetrainConfig,
    WeightQuantSetting,
    resolve,
)
from openwork.errors import ConfigError

LAYERS = {
    "conv1": "Conv2d",
    "bn1": "BatchNorm2d",
    "conv2": "Conv2d",
    "depthwise": "Conv2d",
    "up": "ConvTranspose2d",
    "fc": "Linear",
}
PRUNABLE = ("conv1", "conv2", "fc")
MASKABLE = ("conv1", "conv2", "up", "fc")
QUANTIZABLE = ("conv1", "conv2", "depthwise", "fc")
GLOBAL, TYPE, NAME = ChannelSetting(0.5), ChannelSetting(0.3), ChannelSetting(0.1, False)
DATA, WEIGHT = DataQuantSetting(1.0, -1.0), WeightQuantSetting(dst_type="INT4")


def settle(config: RetrainConfig, **changes: tuple[str, ...]) -> dict:
    abilities = {"prunable": PRUNABLE, "maskable": MASKABLE, "quantizable": QUANTIZABLE, **changes}
    return resolve(config, LAYERS, known_types=PYTORCH_TYPES, **abilities)


def pruned(config: RetrainConfig, **changes: tuple[str, ...]) -> dict:
    return {name: item.prune for name, item in settle(config, **changes).items() if item.prune}


def quantized(config: RetrainConfig) -> dict:
    return {name: item.quant for name, item in settle(config).items() if item.quant}


def test_global_reaches_the_prunable_layers_only() -> None:
    assert pruned(RetrainConfig(prune_config=GLOBAL)) == dict.fromkeys(PRUNABLE, GLOBAL)
    assert pruned(RetrainConfig(prune_config=NofMSetting())) == dict.fromkeys(MASKABLE, NofMSetting())


@pytest.mark.parametrize(("by_name", "by_type", "everywhere"), list(itertools.product([True, False], repeat=3)))
def test_name_over_type_over_global(by_name: bool, by_type: bool, everywhere: bool) -> None:
    config = RetrainConfig(
        prune_config=GLOBAL if everywhere else None,
        override_layer_configs=(LayerOverride("conv1", NAME),) if by_name else (),
        override_layer_types=(LayerOverride("Conv2d", TYPE),) if by_type else (),
    )
    result = pruned(config)
    rest = TYPE if by_type else GLOBAL if everywhere else None
    assert result.get("conv1") == (NAME if by_name else rest)
    assert result.get("conv2") == rest
    assert result.get("fc") == (GLOBAL if everywhere else None)


def test_an_override_that_says_nothing_of_pruning_leaves_it_to_the_type() -> None:
    config = RetrainConfig(
        prune_config=GLOBAL,
        override_layer_configs=(LayerOverride("conv1", weight=WEIGHT),),
        override_layer_types=(LayerOverride("Conv2d", TYPE),),
    )
    assert pruned(config)["conv1"] == TYPE


@pytest.mark.parametrize(
    ("field", "name", "gone"),
    [
        ("skip_layers", "conv1", {"conv1"}),
        ("regular_prune_skip_layers", "conv1", {"conv1"}),
        ("skip_layer_types", "Conv2d", {"conv1", "conv2"}),
        ("regular_prune_skip_types", "Conv2d", {"conv1", "conv2"}),
        ("quant_skip_layers", "conv1", set()),
        ("quant_skip_types", "Conv2d", set()),
    ],
)
def test_for_pruning_a_skip_beats_every_override(field: str, name: str, gone: set[str]) -> None:
    config = RetrainConfig(
        prune_config=GLOBAL,
        override_layer_configs=(LayerOverride("conv1", NAME),),
        override_layer_types=(LayerOverride("Conv2d", TYPE),),
        **{field: (name,)},
    )
    assert set(pruned(config)) == set(PRUNABLE) - gone
    for layer in gone:
        assert settle(config)[layer].reason == f"{field} names {name!r}"


def test_skips_are_a_union() -> None:
    config = RetrainConfig(
        prune_config=GLOBAL,
        skip_layers=("conv1",),
        regular_prune_skip_layers=("conv2",),
        skip_layer_types=("Linear",),
    )
    assert pruned(config) == {}


def test_masks_and_channels_in_one_file() -> None:
    config = RetrainConfig(
        prune_config=GLOBAL,
        override_layer_configs=(LayerOverride("up", NofMSetting()),),
        override_layer_types=(LayerOverride("Linear", NofMSetting(update_freq=3)),),
    )
    result = settle(config)
    assert result["conv1"].channels == GLOBAL
    assert result["conv1"].mask is None
    assert result["up"].mask == NofMSetting()
    assert result["fc"].mask == NofMSetting(update_freq=3)
    assert result["fc"].channels is None


def test_layers_on_request() -> None:
    assert "up" not in pruned(RetrainConfig(prune_config=GLOBAL), prunable_on_request=("up",))
    by_type = RetrainConfig(override_layer_types=(LayerOverride("ConvTranspose2d", TYPE),))
    assert pruned(by_type, prunable_on_request=("up",)) == {"up": TYPE}


def test_a_type_override_passes_over_single_layers_that_cannot() -> None:
    result = settle(RetrainConfig(override_layer_types=(LayerOverride("Conv2d", TYPE),)))
    assert result["depthwise"].prune is None
    assert "override_layer_types['Conv2d']" in result["depthwise"].reason


def test_quantisation_on_everywhere() -> None:
    config = RetrainConfig(retrain_data_quant_config=DATA)
    assert quantized(config) == dict.fromkeys(QUANTIZABLE, QuantSetting(DATA, WeightQuantSetting()))
    assert quantized(RetrainConfig(prune_config=GLOBAL)) == {}


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("skip_layers", "conv1"),
        ("quant_skip_layers", "conv1"),
        ("skip_layer_types", "Conv2d"),
        ("quant_skip_types", "Conv2d"),
    ],
)
@pytest.mark.parametrize("level", ["override_layer_configs", "override_layer_types", None])
def test_for_quantisation_an_override_beats_a_skip(field: str, name: str, level: str | None) -> None:
    overrides = {
        "override_layer_configs": (LayerOverride("conv1", weight=WEIGHT),),
        "override_layer_types": (LayerOverride("Conv2d", weight=WEIGHT),),
    }
    chosen = {level: overrides[level]} if level else {}
    config = RetrainConfig(retrain_data_quant_config=DATA, **{field: (name,)}, **chosen)
    result = quantized(config)
    assert result.get("conv1") == (QuantSetting(DATA, WEIGHT) if level else None)
    assert result["fc"] == QuantSetting(DATA, WeightQuantSetting())


def test_a_prune_skip_does_not_stop_quantisation() -> None:
    config = RetrainConfig(retrain_data_quant_config=DATA, regular_prune_skip_layers=("conv1",))
    assert "conv1" in quantized(config)


def test_quantisation_of_one_layer_only() -> None:
    config = RetrainConfig(prune_config=GLOBAL, override_layer_configs=(LayerOverride("fc", data=DATA),))
    assert quantized(config) == {"fc": QuantSetting(DATA, WeightQuantSetting())}


def test_each_half_of_quantisation_is_inherited_by_itself() -> None:
    config = RetrainConfig(
        retrain_weight_quant_config=WEIGHT,
        override_layer_types=(LayerOverride("Conv2d", data=DATA),),
        override_layer_configs=(LayerOverride("conv1", weight=WeightQuantSetting(channel_wise=True)),),
    )
    assert quantized(config)["conv1"] == QuantSetting(DATA, WeightQuantSetting(channel_wise=True))
    assert quantized(config)["conv2"] == QuantSetting(DATA, WEIGHT)


LAYER_FIELDS = ("skip_layers", "regular_prune_skip_layers", "quant_skip_layers")
TYPE_FIELDS = ("skip_layer_types", "regular_prune_skip_types", "quant_skip_types")


@pytest.mark.parametrize("field", LAYER_FIELDS)
def test_unknown_layer(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"net\.cfg: {field}: the model has no layer 'conv3'; did you mean 'conv"):
        settle(RetrainConfig(**{field: ("conv3",)}, source="net.cfg"))


@pytest.mark.parametrize("field", TYPE_FIELDS)
def test_unknown_type(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"{field}: .* no layer type 'Conv2D'; did you mean 'Conv2d'"):
        settle(RetrainConfig(**{field: ("Conv2D",)}))


def test_unknown_override() -> None:
    with pytest.raises(ConfigError, match="override_layer_configs: the model has no layer 'fcc'; did you mean 'fc'"):
        settle(RetrainConfig(override_layer_configs=(LayerOverride("fcc", NAME),)))
    with pytest.raises(ConfigError, match="override_layer_types: the model has no layer type 'Lin'"):
        settle(RetrainConfig(override_layer_types=(LayerOverride("Lin", NAME),)))


def test_a_known_type_that_the_model_lacks_is_fine() -> None:
    layers = {"fc": "Linear"}
    config = RetrainConfig(prune_config=GLOBAL, skip_layer_types=("Conv2d",))
    assert resolve(config, layers, prunable=("fc",), known_types=PYTORCH_TYPES)["fc"].prune == GLOBAL


def test_an_override_that_the_layer_cannot_follow() -> None:
    with pytest.raises(ConfigError, match="'bn1', a BatchNorm2d, cannot lose channels"):
        settle(RetrainConfig(override_layer_configs=(LayerOverride("bn1", NAME),)))
    with pytest.raises(ConfigError, match="'depthwise', a Conv2d, cannot get an N:M mask"):
        settle(RetrainConfig(override_layer_configs=(LayerOverride("depthwise", NofMSetting()),)))
    with pytest.raises(ConfigError, match="'BatchNorm2d' cannot lose channels"):
        settle(RetrainConfig(override_layer_types=(LayerOverride("BatchNorm2d", NAME),)))
    with pytest.raises(ConfigError, match="'up', a ConvTranspose2d, cannot be quantised"):
        settle(RetrainConfig(override_layer_configs=(LayerOverride("up", data=DATA),)))
