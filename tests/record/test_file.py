"""Record files: round trips, protobuf's own reader as the judge of what is written, and damaged files."""

from __future__ import annotations

import string
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from openwork.errors import FileError, RecordError
from openwork.prototext import load_messages
from openwork.record import (
    ChannelPruneRecord,
    KVCacheFactors,
    PruneNode,
    QuantFactors,
    Record,
    SelectiveMaskRecord,
    dump_record,
    get_attribute,
    load_record,
    parse_record_text,
    save_record,
)

MESSAGES = load_messages("openwork.record")

NODE = """  %s {
    name: "%s"
    attr { name: "type" type: STRING s: "%s" }
    attr { name: "begin" type: INT i: %d }
    attr { name: "end" type: INT i: %d }
    attr { name: "prune_index" type: INTS %s }
  }
"""


def node(side: str, name: str, kind: str, begin: int, end: int, *index: int) -> str:
    return NODE % (side, name, kind, begin, end, " ".join(f"ints: {position}" for position in index))


# Two convolutions, 8 and 12 channels, concatenated: AMCT's own layout, operators that are no module included.
CONCAT = (
    "prune_record {\n"
    + node("producer", "a", "Conv", 0, 8, 1, 4)
    + node("consumer", "/Concat", "Concat", 0, 8, 1, 4)
    + node("consumer", "c", "Conv", 0, 8, 1, 4)
    + "}\nprune_record {\n"
    + node("producer", "b", "Conv", 0, 12, 0, 2, 3, 7, 10, 11)
    + node("consumer", "c", "Conv", 8, 20, 8, 10, 11, 15, 18, 19)
    + "}\n"
)


def test_amct_record() -> None:
    first, second = parse_record_text(CONCAT).channels
    assert [item.name for item in first.nodes] == ["a", "/Concat", "c"]
    consumer = second.consumers[0]
    assert (consumer.name, consumer.type, consumer.begin, consumer.end) == ("c", "Conv", 8, 20)
    assert consumer.prune_index.tolist() == [8, 10, 11, 15, 18, 19]
    assert second.producers[0].kept == 6


def test_attributes_in_the_order_of_amct() -> None:
    group = ChannelPruneRecord((PruneNode("a", "Conv", 0, 16, [3], group=4, prune_group=2, extra={"own": 1}),))
    proto = text_format.Parse(dump_record(Record(channels=[group])), MESSAGES["ScaleOffsetRecord"]())
    written = proto.prune_record[0].producer[0]
    names = ["type", "begin", "end", "group", "prune_group", "prune_index", "own"]
    assert [item.name for item in written.attr] == names
    assert [get_attribute(written, name) for name in names[:-2]] == ["Conv", 0, 16, 4, 2]
    assert get_attribute(written, "prune_index").tolist() == [3]
    assert get_attribute(written, "absent", 7) == 7


NAMES = st.text(string.printable + "äß漢", min_size=1, max_size=12)
FLOATS = st.floats(width=32, allow_nan=False)
SCALES = st.floats(2**-100, 2**100, width=32)
INT64 = st.integers(-(2**63), 2**63 - 1)
VALUES = st.one_of(
    INT64,
    FLOATS,
    st.text(max_size=20),
    st.binary(max_size=20).filter(lambda value: not _is_utf8(value)),
    st.lists(INT64, max_size=80).map(lambda values: np.array(values, np.int64)),
    st.lists(FLOATS, max_size=80).map(lambda values: np.array(values, np.float32)),
    st.lists(st.text(max_size=5), max_size=4).map(tuple),
)


def _is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


@st.composite
def nodes(draw: st.DrawFn, keep: bool) -> PruneNode:
    begin, length = draw(st.integers(0, 50)), draw(st.integers(1, 200))
    count = draw(st.integers(0, length - 1 if keep else length))
    order = np.random.default_rng(draw(st.integers(0, 1000))).permutation(length)[:count]
    some = st.one_of(st.none(), st.integers(1, 8))
    extra = draw(st.dictionaries(NAMES.map(lambda name: "x" + name), VALUES, max_size=3))
    return PruneNode(draw(NAMES), draw(NAMES), begin, begin + length, begin + order, draw(some), draw(some), extra)


GROUPS = st.builds(
    ChannelPruneRecord,
    st.lists(nodes(keep=True), min_size=1, max_size=3).map(tuple),
    st.lists(nodes(keep=False), max_size=3).map(tuple),
)
FACTORS = st.integers(0, 6).flatmap(
    lambda size: st.builds(
        QuantFactors,
        scale_d=st.none() | SCALES,
        offset_d=st.none() | st.integers(-128, 127),
        scale_w=st.lists(SCALES, min_size=size, max_size=size),
        offset_w=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=size, max_size=size),
        shift_bit=st.lists(st.integers(0, 2**32 - 1), max_size=3),
        tensor_balance_factor=st.lists(FLOATS, max_size=3),
        skip_fusion=st.none() | st.booleans(),
        wts_type=st.none() | st.sampled_from(["INT8", "INT4"]),
        fakequant_precision_mode=st.none() | st.just("FORCE_FP16_QUANT"),
    )
)
MASKS = st.builds(
    lambda name, seed, shape: SelectiveMaskRecord.of(name, np.random.default_rng(seed).random(shape) < 0.5),
    NAMES,
    st.integers(0, 99),
    st.lists(st.integers(1, 20), min_size=1, max_size=4).map(tuple),
)
RECORDS = st.builds(
    Record,
    channels=st.lists(GROUPS, max_size=3),
    masks=st.lists(MASKS, max_size=2).map(lambda items: {item.name: item for item in items}),
    factors=st.dictionaries(NAMES, FACTORS, max_size=2),
    kv_cache=st.dictionaries(
        NAMES, st.builds(KVCacheFactors, st.lists(SCALES, max_size=3), st.lists(st.integers(-9, 9))), max_size=1
    ),
)


@settings(max_examples=60, deadline=None)
@given(RECORDS)
def test_round_trip(record: Record) -> None:
    assert parse_record_text(dump_record(record)) == record


@settings(max_examples=60, deadline=None)
@given(RECORDS)
def test_protobuf_reads_the_same(record: Record) -> None:
    """Our fast writer and reader against protobuf's own, on the same content."""
    ours = dump_record(record)
    proto = text_format.Parse(ours, MESSAGES["ScaleOffsetRecord"]())
    for short in (False, True):
        theirs = text_format.MessageToString(proto, use_short_repeated_primitives=short, as_utf8=short)
        assert parse_record_text(theirs) == record


def test_saved_file_reads_back(tmp_path: Path) -> None:
    record = parse_record_text(CONCAT)
    path = tmp_path / "new" / "record.txt"
    save_record(record, path)
    assert load_record(path) == record
    assert load_record(path).source == str(path)


def test_an_empty_record_is_false() -> None:
    assert not parse_record_text("# nothing\n")
    assert parse_record_text(CONCAT)


def test_long_runs_keep_their_place_among_strings_and_comments() -> None:
    run = " ".join(f"ints: {value}" for value in range(100))
    text = (
        'prune_record { selective_prune { name: "a # ints: 1" # ints: 2 ints: 3\n'
        'attr { name: "mask_shape" type: INTS ints: 10 ints: 320 }'
        f'attr {{ name: "selective_mask" type: INTS {run[: run.index("ints: 50")]} }}'
        f"attr {{ name: \"x\" type: STRING s: '{run}' }}"
        f'attr {{ name: "y" type: INTS ints: 7 {run} ints: 0x10 {run} }}'
        f'attr {{ name: "z" type: INTS ints: [{", ".join(map(str, range(40)))}] }}'
        "} }"
    )
    mask = parse_record_text(text).masks["a # ints: 1"]
    assert mask.words.tolist() == list(range(50))
    assert mask.extra["x"] == run
    assert np.asarray(mask.extra["y"]).tolist() == [7, *range(100), 16, *range(100)]
    assert np.asarray(mask.extra["z"]).tolist() == list(range(40))


def test_numbers_like_our_placeholders_are_only_numbers() -> None:
    run = " ".join(f"ints: {-(2**62) + value}" for value in range(100))
    text = CONCAT.replace(
        "ints: 1 ints: 4 }\n  }\n}", f'ints: 1 ints: 4 }} attr {{ name: "x" type: INTS {run} }} }} }}'
    )
    extra = parse_record_text(text).channels[0].consumers[-1].extra["x"]
    assert np.asarray(extra).tolist() == [-(2**62) + value for value in range(100)]


def attribute(name: str, content: str) -> str:
    return f'attr {{ name: "{name}" {content} }}'


BAD = {
    "not a record": ("hello", "line 1: "),
    "truncated": (CONCAT[: len(CONCAT) // 2], "line 20: name: the file ends too early: Expected"),
    "truncated between nodes": (CONCAT[: CONCAT.index("  consumer")], "the file ends too early"),
    "unknown field": (
        "prune_records {}",
        "line 1: unknown field 'prune_records' in ScaleOffsetRecord; did you mean 'prune_record'",
    ),
    "unknown inner field": (CONCAT.replace("ints: 1 ", "int: 1 ", 1), "line 7: unknown field 'int' in AttrProto"),
    "name twice": (CONCAT.replace('name: "a"', 'name: "a" name: "z"'), "name is given twice in one PruneNode"),
    "no name": (CONCAT.replace('name: "a"\n', ""), "prune_record[0]: a node has no name"),
    "empty name": (CONCAT.replace('name: "a"\n', 'name: ""\n'), "prune_record[0].producer[0]: a node has no name"),
    "no producer": ("prune_record {" + node("consumer", "a", "Conv", 0, 2, 1) + "}", "has no producer"),
    "empty group": ("prune_record {}", "prune_record[0]: a prune_record has no producer"),
    "negative": (
        CONCAT.replace("ints: 1 ", "ints: -1 ", 1),
        "prune_record[0].producer[0]: 'a': prune_index holds -1; positions are at least 0",
    ),
    "too large": (CONCAT.replace("ints: 4 ", "ints: 8 ", 1), "prune_index holds 8; allowed: 0 to 7"),
    "below the range": (
        CONCAT.replace("ints: 8 ints: 10 ", "ints: 7 ints: 10 "),
        "prune_record[1].consumer[0]: 'c': prune_index holds 7; allowed: 8 to 19",
    ),
    "repeated": (CONCAT.replace("ints: 4 ", "ints: 1 ", 1), "prune_index holds 1 twice"),
    "beyond 64 bits": (
        CONCAT.replace("ints: 4 ", f"ints: {2**63} ", 1),
        f"ints is {2**63}; it must be an integer from {-(2**63)} to {2**63 - 1}",
    ),
    "beyond 64 bits in a run": (
        CONCAT.replace("ints: 4 ", f"ints: {2**63} " * 50, 1),
        "'a': attribute 'prune_index': an integer of more than 64 bits",
    ),
    "begin at end": (CONCAT.replace("i: 8 }", "i: 0 }", 1), "begin is 0 and end is 0; 0 <= begin < end"),
    "negative begin": (CONCAT.replace("i: 0 }", "i: -1 }", 1), "begin is -1 and end is 8"),
    "all channels": (
        "prune_record {" + node("producer", "a", "Conv", 0, 2, 0, 1) + "}",
        "'a': prune_index holds all channels from 0 to 1; at least one must stay",
    ),
    "no begin": (CONCAT.replace('"begin"', '"start"', 1), "producer[0] 'a': attribute 'begin' is missing"),
    "no type": (CONCAT.replace('"type"', '"kind"', 1), "attribute 'type' is missing"),
    "no prune_index": (CONCAT.replace('"prune_index"', '"x"', 1), "attribute 'prune_index' is missing"),
    "begin is text": (
        CONCAT.replace("type: INT i: 0", 'type: STRING s: "0"', 1),
        "attribute 'begin' has the wrong type; INT is needed",
    ),
    "prune_index is floats": (
        CONCAT.replace("type: INTS ints: 1 ints: 4", "type: FLOATS floats: 1", 1),
        "attribute 'prune_index' has the wrong type; INTS is needed",
    ),
    "type says otherwise than the value": (
        CONCAT.replace("type: INT i: 0", "type: INT f: 0.5", 1),
        "attribute 'begin' has type INT but a value of another type (f)",
    ),
    "attribute without a value": (CONCAT.replace("type: INT i: 0", "type: INT", 1), "'begin' has no value"),
    "attribute without a type": (CONCAT.replace("type: INT i: 0", "i: 0", 1), "'begin' has no type; allowed"),
    "attribute without a name": (CONCAT.replace('name: "begin"', "", 1), "an attribute has no name"),
    "attribute twice": (CONCAT.replace('"end"', '"begin"', 1), "attribute 'begin' is given twice"),
    "unknown attribute type": (
        CONCAT.replace("type: INTS", "type: INT64S", 1),
        "type: unknown value 'INT64S'; did you mean 'INTS'",
    ),
    "group of zero": (
        CONCAT.replace('name: "a"', 'name: "a"' + attribute("group", "type: INT i: 0"), 1),
        "group is 0; it must be at least 1",
    ),
    "mask without a shape": (
        'prune_record { selective_prune { name: "a" } }',
        "prune_record[0].selective_prune 'a': attribute 'mask_shape' is missing",
    ),
    "mask of the wrong length": (
        'prune_record { selective_prune { name: "a" '
        + attribute("mask_shape", "type: INTS ints: 8 ints: 9")
        + attribute("selective_mask", "type: INTS ints: 5")
        + "} }",
        "prune_record[0].selective_prune: 'a': selective_mask has 1 integers; shape (8, 9) needs 2",
    ),
    "mask of floats": (
        'prune_record { selective_prune { name: "a" '
        + attribute("mask_shape", "type: INTS ints: 8")
        + attribute("selective_mask", "type: FLOATS floats: 5")
        + "} }",
        "attribute 'selective_mask' has the wrong type; INTS is needed",
    ),
    "mask and channels": (
        CONCAT.replace(
            "prune_record {",
            'prune_record { selective_prune { name: "a" '
            + attribute("mask_shape", "type: INTS ints: 1")
            + attribute("selective_mask", "type: INTS ints: 128")
            + "}",
            1,
        ),
        "selective_prune and producer or consumer are both given",
    ),
    "layer without a key": ("record { value { scale_d: 1 } }", "record[0]: key is missing"),
    "layer twice": ('record { key: "a" value {} }' * 2, "record[1] 'a': the layer is given twice"),
    "scale of zero": ('record { key: "a" value { scale_d: 0 } }', "record[0] 'a': scale_d is 0.0"),
    "scale not a number": ('record { key: "a" value { scale_w: nan } }', "scale_w is nan"),
    "scales and offsets": (
        'record { key: "a" value { scale_w: 1 scale_w: 2 offset_w: 0 } }',
        "scale_w has 2 values and offset_w 1",
    ),
    "cache scale": ('record { key: "a" kv_cache_value { scale: -1 } }', "record[0] 'a': scale is -1.0"),
}


@pytest.mark.parametrize(("text", "words"), BAD.values(), ids=BAD.keys())
def test_bad_text(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "record.txt"
    path.write_text(text)
    with pytest.raises(RecordError) as caught:
        load_record(path)
    message = str(caught.value)
    assert words in message
    assert message.startswith(str(path))
    assert "\n" not in message


def test_two_masks_of_a_layer() -> None:
    text = dump_record(Record(masks={"a": SelectiveMaskRecord.of("a", [1, 0])}))
    with pytest.raises(RecordError, match=r"prune_record\[1\]: layer 'a' has two masks"):
        parse_record_text(text + text)


def test_lines_of_errors_after_a_run() -> None:
    run = "\n".join(f"ints: {value}" for value in range(50))
    text = CONCAT.replace("ints: 1 ints: 4", f"\n{run}\n", 1) + "oops: 1"
    line = text.split("\n").index("oops: 1") + 1
    with pytest.raises(RecordError, match=f"line {line}: unknown field 'oops'"):
        parse_record_text(text)


def test_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="does not exist"):
        load_record(tmp_path / "none.txt")
    with pytest.raises(FileError, match="is a folder"):
        load_record(tmp_path)


def test_values_that_no_attribute_can_hold() -> None:
    group = ChannelPruneRecord((PruneNode("a", "Conv", 0, 4, [1], extra={"x": {}}),))  # type: ignore[dict-item]
    with pytest.raises(RecordError, match="attribute 'x': a dict cannot be written"):
        dump_record(Record(channels=[group]))
