"""The compiled schemas against the numbers of AMCT's files, and against the .proto files beside them."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from openwork.prototext import load_messages

# Message -> field -> number, as AMCT has them.
AMCT = {
    "openwork.config": {
        "AMCTRetrainConfig": {
            "batch_num": 1,
            "retrain_data_quant_config": 2,
            "retrain_weight_quant_config": 3,
            "skip_layers": 4,
            "override_layer_configs": 5,
            "skip_layer_types": 6,
            "override_layer_types": 7,
            "prune_config": 8,
            "regular_prune_skip_layers": 9,
            "regular_prune_skip_types": 10,
            "quant_skip_layers": 11,
            "quant_skip_types": 12,
            "fakequant_precision_mode": 21,
        },
        "RetrainOverrideLayer": {
            "layer_name": 1,
            "retrain_data_quant_config": 2,
            "retrain_weight_quant_config": 3,
            "prune_config": 4,
        },
        "RetrainOverrideLayerType": {
            "layer_type": 1,
            "retrain_data_quant_config": 2,
            "retrain_weight_quant_config": 3,
            "prune_config": 4,
        },
        "PruneConfig": {"filter_pruner": 1, "n_out_of_m_pruner": 2},
        "FilterPruner": {"balanced_l2_norm_filter_prune": 1},
        "BalancedL2NormFilterPruner": {"prune_ratio": 1, "ascend_optimized": 2},
        "NOutOfMPruner": {"l1_selective_prune": 1},
        "L1SelectivePruner": {"n_out_of_m_type": 1, "update_freq": 2},
        "RetrainDataQuantConfig": {"ulq_quantize": 13},
        "ActULQquantize": {"clip_max_min": 1, "fixed_min": 2, "dst_type": 3},
        "ClipMaxMin": {"clip_max": 3, "clip_min": 5},
        "RetrainWeightQuantConfig": {"arq_retrain": 1, "ulq_retrain": 2},
        "ARQRetrain": {"dst_type": 1, "channel_wise": 2},
        "WtsULQRetrain": {"dst_type": 1, "channel_wise": 2},
        "AutoChannelPruneConfig": {
            "compress_ratio": 1,
            "ascend_optimized": 2,
            "max_prune_ratio": 3,
            "test_iteration": 4,
            "override_prune_cfg": 10,
        },
    },
    "openwork.record": {
        "ScaleOffsetRecord": {"record": 1, "prune_record": 2},
        "MapFiledEntry": {"key": 1, "value": 2, "kv_cache_value": 3},
        "SingleLayerRecord": {
            "scale_d": 1,
            "offset_d": 2,
            "scale_w": 3,
            "offset_w": 4,
            "shift_bit": 5,
            "tensor_balance_factor": 6,
            "skip_fusion": 9,
            "dst_type": 10,
            "act_type": 11,
            "wts_type": 12,
            "fakequant_precision_mode": 13,
        },
        "PruneRecord": {"producer": 1, "consumer": 2, "selective_prune": 3},
        "PruneNode": {"name": 1, "attr": 2},
        "AttrProto": {
            "name": 1,
            "type": 2,
            "f": 3,
            "i": 4,
            "s": 5,
            "floats": 6,
            "ints": 7,
            "strings": 8,
        },
    },
}
CASES = [(package, message) for package, messages in AMCT.items() for message in messages]


@pytest.mark.parametrize(("package", "message"), CASES)
def test_numbers(package: str, message: str) -> None:
    descriptor = load_messages(package)[message].DESCRIPTOR
    expected = AMCT[package][message]
    assert {field.name: field.number for field in descriptor.fields if field.name in expected} == expected
    if package == "openwork.config":
        ours = [field.number for field in descriptor.fields if field.name not in expected]
        assert all(number >= 1000 for number in ours)


def test_enums_and_defaults() -> None:
    config, record = load_messages("openwork.config"), load_messages("openwork.record")
    weight = config["ARQRetrain"].DESCRIPTOR.fields_by_name["dst_type"]
    assert {value.name: value.number for value in weight.enum_type.values} == {"INT4": 0, "INT8": 1, "INT16": 2}
    assert weight.default_value == 1
    precision = config["AMCTRetrainConfig"].DESCRIPTOR.fields_by_name["fakequant_precision_mode"]
    assert {value.name: value.number for value in precision.enum_type.values} == {"FORCE_FP16_QUANT": 1}
    mask = config["L1SelectivePruner"]()
    assert (mask.n_out_of_m_type, mask.update_freq) == (0, 0)
    search = config["AutoChannelPruneConfig"]()
    assert (search.ascend_optimized, search.max_prune_ratio, search.test_iteration) == (True, 1.0, 1)
    assert config["BalancedL2NormFilterPruner"]().ascend_optimized is True
    kinds = record["AttrProto"].DESCRIPTOR.fields_by_name["type"].enum_type.values
    assert {kind.name: kind.number for kind in kinds if kind.number} == {
        "FLOAT": 1,
        "INT": 2,
        "STRING": 3,
        "FLOATS": 4,
        "INTS": 5,
        "STRINGS": 6,
    }
    layer = record["SingleLayerRecord"]()
    assert (layer.dst_type, layer.fakequant_precision_mode) == ("INT8", "DEFAULT")
    assert config["AMCTRetrainConfig"].DESCRIPTOR.full_name == "AMCTPytorchProto.AMCTRetrainConfig"
    assert config["AutoChannelPruneConfig"].DESCRIPTOR.full_name == "AMCTProto.AutoChannelPruneConfig"


@pytest.mark.parametrize("package", AMCT)
def test_compiled_schema_is_that_of_the_proto_files(package: str) -> None:
    """Every `label type name = number` of the .proto files, read with a regular expression."""
    written = set()
    for file in resources.files(package).iterdir():
        if file.name.endswith(".proto"):
            text = re.sub(r"//[^\n]*", "", file.read_text())
            written |= set(re.findall(r"^\s*(?:(?:optional|required|repeated) )?[\w.]+ (\w+) = (\d+)", text, re.M))
    compiled = {
        (field.name, str(field.number)) for kind in load_messages(package).values() for field in kind.DESCRIPTOR.fields
    }
    assert {pair for pair in written if pair[0] != "syntax"} == compiled


def test_they_meet_nothing_in_the_default_pool() -> None:
    """A process may hold AMCT's own generated modules: other messages under the same names."""
    from google.protobuf import descriptor_pb2, descriptor_pool

    file = descriptor_pb2.FileDescriptorProto(name="foreign_retrain.proto", package="AMCTPytorchProto")
    file.message_type.add(name="PruneRecord").field.add(name="other", number=1, label=1, type=5)
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
    names = [field.name for field in load_messages("openwork.record")["PruneRecord"].DESCRIPTOR.fields]
    assert names == ["producer", "consumer", "selective_prune"]
