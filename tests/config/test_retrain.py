"""Reading config files: what is in them, and every way in which they can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

from openwork.config import (
    ChannelSetting,
    DataQuantSetting,
    GradMode,
    LayerOverride,
    NofMSetting,
    RetrainConfig,
    Target,
    WeightAlgorithm,
    WeightQuantSetting,
    dump_retrain_config,
    load_retrain_config,
    parse_retrain_config,
    save_retrain_config,
)
from openwork.errors import ConfigError, FileError, OpenworkError

CHANNELS = "prune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: %s } } }"
MASK = "prune_config { n_out_of_m_pruner { l1_selective_prune { %s } } }"
FULL = """
# A comment.
prune_config : {
    filter_pruner: {
        balanced_l2_norm_filter_prune: { prune_ratio: 0.3  ascend_optimized: False }
    }
}
batch_num: 2
skip_layers: "a"
skip_layers: "a"
skip_layer_types: "Linear"
regular_prune_skip_layers: ["b", "c"]
regular_prune_skip_types: "Conv2d"
quant_skip_layers: "d"
quant_skip_types: "ConvTranspose2d"
fakequant_precision_mode: FORCE_FP16_QUANT
retrain_data_quant_config: {
    ulq_quantize: { clip_max_min: { clip_max: 6.0 clip_min: -6.0 } fixed_min: true }
}
retrain_weight_quant_config: { ulq_retrain: { channel_wise: true dst_type: INT4 } }
override_layer_configs: {
    layer_name: "e"
    prune_config { n_out_of_m_pruner { l1_selective_prune { n_out_of_m_type: 0 update_freq: 4 } } }
}
override_layer_types: {
    layer_type: "Linear"
    retrain_weight_quant_config: { arq_retrain: {} }
}
target: ASCEND
"""
FULL_CONFIG = RetrainConfig(
    batch_num=2,
    retrain_data_quant_config=DataQuantSetting(clip_max=6.0, clip_min=-6.0, fixed_min=True),
    retrain_weight_quant_config=WeightQuantSetting(WeightAlgorithm.ULQ, "INT4", True),
    skip_layers=("a",),
    override_layer_configs=(LayerOverride("e", NofMSetting(update_freq=4)),),
    skip_layer_types=("Linear",),
    override_layer_types=(LayerOverride("Linear", weight=WeightQuantSetting()),),
    prune_config=ChannelSetting(0.3, aligned=False),
    regular_prune_skip_layers=("b", "c"),
    regular_prune_skip_types=("Conv2d",),
    quant_skip_layers=("d",),
    quant_skip_types=("ConvTranspose2d",),
    force_fp16_quant=True,
    target=Target.ASCEND,
)


def test_everything_is_read() -> None:
    assert parse_retrain_config(FULL) == FULL_CONFIG


def test_decimals_stay_decimals() -> None:
    for ratio in ("0.3", "0.1", "0.7", "0.33", "3e-1"):
        config = parse_retrain_config(CHANNELS % ratio)
        assert isinstance(config.prune_config, ChannelSetting)
        assert config.prune_config.ratio == float(ratio)
        assert config.prune_config.aligned


def test_own_fields() -> None:
    config = parse_retrain_config(
        MASK % "update_freq: 1 grad_mode: SR_STE sr_ste_decay: 0.001 permute: true n_out_of_m { n: 1 m: 4 }"
    )
    assert config.prune_config == NofMSetting(1, 4, 1, GradMode.SR_STE, 0.001, True)
    assert parse_retrain_config(MASK % "").prune_config == NofMSetting(2, 4, 0, GradMode.MASKED, 2e-4, False)


def test_what_a_file_turns_on() -> None:
    channels, masks = parse_retrain_config(CHANNELS % 0.5), parse_retrain_config(MASK % "")
    assert (channels.prunes_channels, channels.masks_weights, channels.quantizes) == (True, False, False)
    assert (masks.prunes_channels, masks.masks_weights, masks.quantizes) == (False, True, False)
    both = parse_retrain_config(FULL)
    assert (both.prunes_channels, both.masks_weights, both.quantizes) == (True, True, True)
    assert not parse_retrain_config("").prune_settings


def test_an_empty_quantisation_means_the_defaults() -> None:
    config = parse_retrain_config("retrain_data_quant_config {} retrain_weight_quant_config {}")
    assert config.retrain_data_quant_config == DataQuantSetting()
    assert config.retrain_weight_quant_config == WeightQuantSetting()


def test_written_text_reads_back() -> None:
    assert parse_retrain_config(dump_retrain_config(FULL_CONFIG)) == FULL_CONFIG
    mask = RetrainConfig(prune_config=NofMSetting(1, 8, 3, GradMode.SR_STE, 0.001, True))
    assert parse_retrain_config(dump_retrain_config(mask)) == mask


def test_names_are_escaped() -> None:
    config = RetrainConfig(skip_layers=('a"b\\c', "näme", "tab\tand\nline", "\x01"))
    assert parse_retrain_config(dump_retrain_config(config)) == config


def _amct_parser() -> type:
    """A message class with the fields that AMCT knows and none of ours, built here by number from its table."""
    file = descriptor_pb2.FileDescriptorProto(name="amct.proto", package="Amct", syntax="proto2")

    def message(name: str, **fields: tuple) -> None:
        kind = file.message_type.add(name=name)
        for field, (number, type_, repeated) in fields.items():
            item = kind.field.add(name=field, number=number, label=3 if repeated else 1)
            if isinstance(type_, str):
                item.type, item.type_name = 11, f".Amct.{type_}"
            else:
                item.type = type_

    float_, boolean, string, uint32 = 2, 8, 9, 13
    message("L2", prune_ratio=(1, float_, False), ascend_optimized=(2, boolean, False))
    message("Filter", balanced_l2_norm_filter_prune=(1, "L2", False))
    message("Prune", filter_pruner=(1, "Filter", False))
    message("Layer", layer_name=(1, string, False), prune_config=(4, "Prune", False))
    message(
        "Config",
        batch_num=(1, uint32, False),
        skip_layers=(4, string, True),
        override_layer_configs=(5, "Layer", True),
        prune_config=(8, "Prune", False),
        regular_prune_skip_layers=(9, string, True),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    kind: type = message_factory.GetMessageClass(pool.FindMessageTypeByName("Amct.Config"))
    return kind


def test_what_the_search_writes_needs_no_field_of_ours() -> None:
    config = RetrainConfig(
        prune_config=ChannelSetting(0.3),
        regular_prune_skip_layers=("fc",),
        override_layer_configs=(LayerOverride("conv1", ChannelSetting(0.25, False)),),
    )
    proto = text_format.Parse(dump_retrain_config(config), _amct_parser()())
    override = proto.override_layer_configs[0]
    assert override.layer_name == "conv1"
    assert override.prune_config.filter_pruner.balanced_l2_norm_filter_prune.prune_ratio == 0.25
    assert list(proto.regular_prune_skip_layers) == ["fc"]
    assert "prune_ratio: 0.3\n" in dump_retrain_config(config)


OVERRIDE = 'override_layer_configs { layer_name: "a" %s }'
DATA = "retrain_data_quant_config { ulq_quantize { %s } }"
BAD = {
    "ratio of zero": (CHANNELS % "0", "prune_ratio is 0.0; it must be greater than 0 and less than 1"),
    "ratio of one": (CHANNELS % "1.0", "prune_ratio is 1.0"),
    "negative ratio": (CHANNELS % "-0.5", "prune_ratio is -0.5"),
    "ratio not a number": (CHANNELS % "nan", "prune_ratio is nan"),
    "infinite ratio": (CHANNELS % "inf", "prune_ratio is inf"),
    "ratio beyond float": (CHANNELS % "1e60", "prune_ratio is inf"),
    "ratio that float rounds to 1": (CHANNELS % "0.9999999999", "prune_ratio is 1.0"),
    "ratio is text": (CHANNELS % '"0.5"', "line 1: prune_ratio: Couldn't parse float"),
    "ratio is missing": (
        "prune_config { filter_pruner { balanced_l2_norm_filter_prune { } } }",
        "prune_config.filter_pruner.balanced_l2_norm_filter_prune: prune_ratio is missing",
    ),
    "empty prune_config": (
        "prune_config {}",
        "prune_config: it is empty; one of filter_pruner, n_out_of_m_pruner is needed",
    ),
    "empty filter_pruner": (
        "prune_config { filter_pruner {} }",
        "prune_config.filter_pruner: it is empty; one of balanced_l2_norm_filter_prune is needed",
    ),
    "empty n_out_of_m_pruner": (
        "prune_config { n_out_of_m_pruner {} }",
        "prune_config.n_out_of_m_pruner: it is empty; one of l1_selective_prune is needed",
    ),
    "empty prune_config of a layer": (
        OVERRIDE % "prune_config {}",
        "override_layer_configs['a'].prune_config: it is empty",
    ),
    "both arms": (
        "prune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 0.5 } }\n"
        "n_out_of_m_pruner { l1_selective_prune {} } }",
        "line 2: filter_pruner and n_out_of_m_pruner are both given; only one of them is allowed",
    ),
    "both weight algorithms": (
        "retrain_weight_quant_config { arq_retrain {} ulq_retrain {} }",
        "arq_retrain and ulq_retrain are both given",
    ),
    "scalar twice": (
        CHANNELS % "0.5\nprune_ratio: 0.6",
        "line 2: prune_ratio is given twice in one BalancedL2NormFilterPruner",
    ),
    "message twice": (
        (CHANNELS % "0.5") + "\n" + (CHANNELS % "0.6"),
        "line 2: prune_config is given twice in one AMCTRetrainConfig",
    ),
    "batch_num twice": ("batch_num: 1 batch_num: 2", "batch_num is given twice"),
    "layer_name twice": (
        OVERRIDE % 'layer_name: "b"',
        "layer_name is given twice in one RetrainOverrideLayer",
    ),
    "unknown field": (
        "\nprune_confg {}",
        "line 2: unknown field 'prune_confg' in AMCTRetrainConfig; did you mean 'prune_config'",
    ),
    "unknown inner field": (
        CHANNELS % "0.5 ascend_optimised: true",
        "unknown field 'ascend_optimised' in BalancedL2NormFilterPruner; did you mean 'ascend_optimized'?",
    ),
    "unknown enum": (
        MASK % "n_out_of_m_type: M4N3",
        "n_out_of_m_type: unknown value 'M4N3'; did you mean 'M4N2'? (allowed: M4N2)",
    ),
    "unknown enum number": (MASK % "n_out_of_m_type: 9", "n_out_of_m_type: unknown value '9'"),
    "unknown target": ("target: TENSORRT", "target: unknown value 'TENSORRT' (allowed: ONNX, ASCEND)"),
    "layer overridden twice": (
        (OVERRIDE % "") * 2,
        "override_layer_configs: 'a' is given twice; keep one of the two",
    ),
    "type overridden twice": (
        'override_layer_types { layer_type: "Linear" }' * 2,
        "override_layer_types: 'Linear' is given twice",
    ),
    "override without a name": (
        "override_layer_configs { }",
        "override_layer_configs[0]: layer_name is missing",
    ),
    "override without a type": ("override_layer_types { }", "override_layer_types[0]: layer_type is missing"),
    "empty name": ('override_layer_configs { layer_name: "" }', "layer_name is empty; give a name"),
    "empty skip": ('skip_layers: ""', "skip_layers holds an empty string"),
    "skip is a number": ("skip_layers: 3", "line 1: skip_layers: Expected string"),
    "fractional update_freq": (MASK % "update_freq: 1.5", "update_freq: Couldn't parse integer: 1.5"),
    "negative update_freq": (MASK % "update_freq: -1", "update_freq is -1; it must be an integer from 0 to 4294967295"),
    "text update_freq": (MASK % 'update_freq: "2"', 'update_freq: Couldn\'t parse integer: "2"'),
    "huge update_freq": (
        MASK % "update_freq: 5000000000",
        "update_freq is 5000000000; it must be an integer from 0 to 4294967295",
    ),
    "n of m the wrong way round": (MASK % "n_out_of_m { n: 4 m: 2 }", "n_out_of_m is 4:2"),
    "m too large": (MASK % "n_out_of_m { n: 4 m: 32 }", "n_out_of_m is 4:32"),
    "n missing": (MASK % "n_out_of_m { m: 4 }", "n_out_of_m: n is missing"),
    "two patterns": (
        MASK % "n_out_of_m { n: 1 m: 4 } n_out_of_m_type: M4N2",
        "n_out_of_m_type and n_out_of_m are both given",
    ),
    "decay without SR-STE": (
        MASK % "sr_ste_decay: 0.1",
        "sr_ste_decay is given, but grad_mode is MASKED; it needs SR_STE",
    ),
    "negative decay": (MASK % "sr_ste_decay: -1", "sr_ste_decay is -1.0"),
    "clip range reversed": (
        DATA % "clip_max_min { clip_max: -1 clip_min: 1 }",
        "retrain_data_quant_config.ulq_quantize: clip_max is -1.0 and clip_min is 1.0",
    ),
    "clip range beyond float32": (
        DATA % "clip_max_min { clip_max: 1e38 clip_min: -3e38 }",
        "clip_max is 1e+38; it must be from -1e+30 to 1e+30",
    ),
    "clip range empty": (DATA % "clip_max_min { clip_max: 1 clip_min: 1 }", "clip_max must be greater"),
    "clip range half": (DATA % "clip_max_min { clip_max: 1 }", "clip_max_min: clip_min is missing"),
    "clip range without zero": (DATA % "clip_max_min { clip_max: 3 clip_min: 1 }", "leaves out 0"),
    "clip range not finite": (DATA % "clip_max_min { clip_max: inf clip_min: 1 }", "clip_max is inf"),
    "activations of 4 bits": (
        DATA % "dst_type: INT4",
        "dst_type of activations is INT4; only INT8 is allowed (4 bits lose too much)",
    ),
    "activations of 16 bits": (DATA % "dst_type: INT16", "dst_type of activations is INT16; only INT8"),
    "weights of 16 bits": (
        "retrain_weight_quant_config { arq_retrain { dst_type: INT16 } }",
        "retrain_weight_quant_config.arq_retrain: dst_type of weights is INT16; allowed: INT8, INT4",
    ),
    "batch_num of zero": ("batch_num: 0", "batch_num is 0; it must be at least 1"),
    "negative batch_num": ("batch_num: -3", "batch_num is -3; it must be an integer from 0 to 4294967295"),
    "not a config": ("%PDF-1.4", "line 1: Expected identifier or number, got %"),
    "truncated": ("prune_config { filter_pruner {", 'the file ends too early: Expected "}"'),
    "closed twice": ("prune_config { } }", "Expected identifier or number, got }"),
    "unclosed string": ('skip_layers: "abc', "skip_layers: String missing ending quote"),
    "extension": ("[a.b.c]: 3", "does not have extensions"),
    "a record": (
        "prune_record { }",
        "unknown field 'prune_record' in AMCTRetrainConfig; the file is a record, not a config",
    ),
    "a search config": (
        "compress_ratio: 1.4",
        "unknown field 'compress_ratio' in AMCTRetrainConfig; the file is a config of the search",
    ),
}


@pytest.mark.parametrize(("text", "words"), BAD.values(), ids=BAD.keys())
def test_bad_text(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "net.cfg"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_retrain_config(path)
    message = str(caught.value)
    assert words in message
    assert message.startswith(str(path))
    assert "\n" not in message


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"config file .*none\.cfg does not exist") as caught:
        load_retrain_config(tmp_path / "none.cfg")
    assert isinstance(caught.value, ValueError)


def test_folder(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="is a folder; a file is needed"):
        load_retrain_config(tmp_path)


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "net.cfg"
    path.write_bytes(b'skip_layers: "\xff\xfe"')
    with pytest.raises(FileError, match=r"is not UTF-8 text \(byte 14"):
        load_retrain_config(path)


def test_a_hundred_megabytes(tmp_path: Path) -> None:
    path = tmp_path / "net.cfg"
    with open(path, "wb") as stream:
        stream.truncate(100_000_000)
    with pytest.raises(FileError, match="has 100,000,000 bytes; at most"):
        load_retrain_config(path)


def test_saved_file_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "net.cfg"
    save_retrain_config(FULL_CONFIG, path)
    assert load_retrain_config(path) == FULL_CONFIG


def test_unwritable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OpenworkError, match="cannot be written"):
        save_retrain_config(FULL_CONFIG, tmp_path / "file" / "net.cfg")


def test_settings_take_words_for_members() -> None:
    setting = NofMSetting(update_freq=1, grad_mode="SR_STE")  # type: ignore[arg-type]
    assert setting.grad_mode is GradMode.SR_STE
    assert WeightQuantSetting(algorithm="ulq_retrain").algorithm is WeightAlgorithm.ULQ  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="grad_mode is 'STE'; allowed: MASKED, SR_STE"):
        NofMSetting(grad_mode="STE")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"n_out_of_m is 2:3\.5"):
        NofMSetting(m=3.5)  # type: ignore[arg-type]
