"""Whatever stands in a file, reading it ends in a result or in one of our errors, on one line."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from openwork.config import (
    PYTORCH_TYPES,
    ChannelSetting,
    dump_retrain_config,
    parse_retrain_config,
    read_chosen_channels,
    resolve,
    write_chosen_channels,
)
from openwork.errors import OpenworkError
from openwork.record import (
    KVCacheFactors,
    LayerKind,
    PlanCut,
    PlanGroup,
    PlanRepair,
    QuantFactors,
    Record,
    SelectiveMaskRecord,
    decode_plan,
    dump_record,
    encode_plan,
    parse_record_text,
)

CUTS = [PlanCut("a.weight", 0, "produces", 8, 2, [1, 5]), PlanCut("b.weight", 1, "consumes", 8, 1, [1, 5])]  # type: ignore[arg-type]
RECORD = dump_record(
    Record(
        channels=encode_plan(
            [PlanGroup(0, 8, 6, CUTS, 2)],
            [PlanRepair("m", "n", (8, [1.5]), (6, [None]))],
            {"a": LayerKind("Conv", 2), "b": LayerKind("Gemm")},
        ),
        masks={"m": SelectiveMaskRecord.of("m", [[1, 1, 0, 0]] * 40)},
        factors={"q": QuantFactors(0.5, 3, [1, 2], [0, 0])},  # type: ignore[arg-type]
        kv_cache={"k": KVCacheFactors([1], [2])},  # type: ignore[arg-type]
    )
)
SETTING = ChannelSetting(0.25)
CONFIG = write_chosen_channels(
    """
    prune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 0.25 ascend_optimized: true } } }
    batch_num: 2 skip_layers: "a" skip_layer_types: "Linear" target: ONNX
    retrain_data_quant_config { ulq_quantize { clip_max_min { clip_max: 6 clip_min: -6 } dst_type: INT8 } }
    override_layer_configs { layer_name: "b" prune_config { n_out_of_m_pruner { l1_selective_prune {
        update_freq: 4 n_out_of_m { n: 1 m: 4 } grad_mode: SR_STE sr_ste_decay: 0.1 } } } }
    """,
    {"c": [0, 1]},
    {"c": 8},
    {"c": SETTING},
)
NUMBERS = ["0", "-1", "1", "2", "99", "9" * 30, "2147483648", "9223372036854775807", "1e400", "nan", "inf", "true"]
PIECES = [*NUMBERS, "{", "}", "[", "]", '"', "'", "\\", "\n", "#", ":", ",", "<", "ints: ", 'name: "x"', "\0", "é", ""]
WORD = re.compile(r'(?<![\w.])-?\d+(?:\.\d+)?(?![\w.])|"[^"\n]*"|\b[A-Z0-9]+\b')


@st.composite
def damaged(draw: st.DrawFn, text: str) -> str:
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            words = list(WORD.finditer(text))
            start, end = draw(st.sampled_from(words)).span() if words else (0, 0)
        else:
            start = draw(st.integers(0, len(text)))
            end = min(len(text), start + draw(st.sampled_from([0, 1, 2, 40])))
        text = text[:start] + draw(st.sampled_from(PIECES)) + text[end:]
    return text


@settings(max_examples=300, deadline=None)
@given(damaged(RECORD))
def test_records(text: str) -> None:
    message = ""
    try:
        record = parse_record_text(text)
        decode_plan(record.channels)
        assert parse_record_text(dump_record(record)) == record
    except OpenworkError as error:
        message = str(error)
    assert "\n" not in message


@settings(max_examples=300, deadline=None)
@given(damaged(CONFIG))
def test_configs(text: str) -> None:
    layers = {"a": "Linear", "b": "Conv2d", "c": "Conv2d"}
    names = tuple(layers)
    message = ""
    try:
        config = parse_retrain_config(text)
        assert parse_retrain_config(dump_retrain_config(config)) == config
        read_chosen_channels(text, {"c": SETTING})
        resolve(config, layers, prunable=names, maskable=names, quantizable=names, known_types=PYTORCH_TYPES)
    except OpenworkError as error:
        message = str(error)
    assert "\n" not in message
