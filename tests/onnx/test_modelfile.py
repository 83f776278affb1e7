"""Reading and writing without parsing weights: equal to what the onnx package reads and writes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from convert_models import info, initializer, model_of
from openwork.errors import ConversionError, FileError
from openwork.onnx.modelfile import ModelFile, Payload
from openwork.onnx.wire import LiftedField, Placed, assemble, packed_bytes, split, varint

DTYPES = [
    *(np.float32, np.float64, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn),
    *(np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64),
    *(ml_dtypes.int4, ml_dtypes.uint4),
]


def a_model(rng, sizes=(3, 2000)):
    """Tensors of all sizes and types, in initializers, attributes, bodies and functions."""
    inits = [initializer(f"t{i}{n}", rng.integers(0, 7, n).astype(d)) for i, d in enumerate(DTYPES) for n in sizes]
    plain = helper.make_tensor("typed", TensorProto.FLOAT, [5000], rng.random(5000).astype(np.float32))
    double = helper.make_tensor("double", TensorProto.DOUBLE, [700], rng.random(700))
    assert plain.float_data
    value = numpy_helper.from_array(rng.random(3000).astype(np.float32), "value")
    constant = helper.make_node("Constant", [], ["b"], value=value)
    body = helper.make_graph([constant], "body", [], [info("b", [3000])], [initializer("in", np.ones(5))])
    nodes = [
        helper.make_node("Constant", [], ["k"], value=value),
        helper.make_node("If", ["c"], ["y"], then_branch=body, else_branch=body),
    ]
    function = helper.make_function("f", "F", [], ["z"], [nodes[0], helper.make_node("Identity", ["k"], ["z"])], [])
    inputs, outputs = [info("c", [], TensorProto.BOOL)], [info("y", [3000])]
    return model_of(nodes, inputs, outputs, [*inits, plain, double], functions=[function])


def test_written_byte_for_byte(tmp_path):
    model = a_model(np.random.default_rng(0))
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    file = ModelFile.load(path)
    assert len(file.model.SerializeToString()) < path.stat().st_size / 4
    assert file.save(tmp_path / "o.onnx") == [tmp_path / "o.onnx"]
    assert (tmp_path / "o.onnx").read_bytes() == path.read_bytes()


def test_arrays_are_those_of_the_onnx_package(tmp_path):
    model = a_model(np.random.default_rng(1))
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    file = ModelFile.load(path)
    for tensor, original in zip(file.model.graph.initializer, model.graph.initializer, strict=True):
        expected = numpy_helper.to_array(original)
        found = file.array(tensor)
        if expected.dtype.name in ("int4", "uint4"):
            assert (found == expected.astype(np.int8)).all()
        else:
            assert found.dtype == expected.dtype
            assert found.tobytes() == expected.tobytes()
        assert not found.size or found.shape == tuple(original.dims)
        file.check(tensor)


def test_signalling_nan_in_float_data(tmp_path):
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2])
    raw = np.array([0x7FA00001, 0x3F800000], np.uint32)
    # Written as bytes: Python's own numbers would lose the payload.
    data = tensor.SerializeToString() + b"\x22\x08" + raw.tobytes()
    model = model_of([], [], [], [TensorProto.FromString(data)])
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    file = ModelFile.load(path)
    assert file.array(file.model.graph.initializer[0]).tobytes() == raw.tobytes()


def test_replaced_data_is_made_when_the_file_is_written(tmp_path):
    model = model_of([], [], [], [initializer("a", np.zeros(4000, np.float32)), initializer("b", np.ones(3, np.int8))])
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    file = ModelFile.load(path)
    calls = []
    new = np.arange(6, dtype=np.int16)

    def content():
        calls.append(1)
        return new

    file.replace(file.model.graph.initializer[0], TensorProto.INT16, (2, 3), Payload(12, content))
    assert not calls
    steps = []
    file.save(tmp_path / "o.onnx", lambda done, total: steps.append((done, total)))
    assert len(calls) == 1
    back = onnx.load(tmp_path / "o.onnx").graph.initializer
    assert numpy_helper.to_array(back[0]).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert numpy_helper.to_array(back[1]).tolist() == [1, 1, 1]
    assert steps[-1] == ((tmp_path / "o.onnx").stat().st_size,) * 2


def test_more_than_two_gigabytes_go_to_a_second_file(tmp_path, monkeypatch):
    monkeypatch.setattr("openwork.onnx.modelfile._LIMIT", 100_000)
    model = model_of([], [], [], [initializer(f"w{i}", np.full((100, 100), i, np.float32)) for i in range(5)])
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    written = ModelFile.load(path).save(tmp_path / "o.onnx")
    assert [file.name for file in written] == ["o.onnx", "o.onnx.data"]
    assert onnx.load(tmp_path / "o.onnx", load_external_data=False).graph.initializer[4].data_location == 1
    for place, tensor in enumerate(onnx.load(tmp_path / "o.onnx").graph.initializer):
        assert (numpy_helper.to_array(tensor) == place).all()
    # and again from there
    again = ModelFile.load(tmp_path / "o.onnx")
    assert again.external
    again.save(tmp_path / "p.onnx")
    assert (tmp_path / "p.onnx.data").read_bytes() == (tmp_path / "o.onnx.data").read_bytes()


def test_a_file_that_is_being_read_is_not_replaced(tmp_path):
    path = tmp_path / "m.onnx"
    path.write_bytes(model_of([], [], [], []).SerializeToString())
    with pytest.raises(ConversionError, match="being read"):
        ModelFile.load(path).save(path)
    with pytest.raises(FileError, match="does not exist"):
        ModelFile.load(tmp_path / "nothing.onnx")


def test_data_in_two_places_is_refused(tmp_path):
    tensor = initializer("w", np.zeros(2000, np.float32))
    tensor.float_data.append(1.0)
    path = tmp_path / "m.onnx"
    path.write_bytes(model_of([], [], [], [tensor]).SerializeToString())
    with pytest.raises(ConversionError, match="data in two places"):
        ModelFile.load(path)


@given(st.integers(0, 2**63 - 1))
def test_varint(number):
    coded = varint(number)
    value = sum((byte & 127) << 7 * place for place, byte in enumerate(coded))
    assert value == number
    assert all(byte >= 128 for byte in coded[:-1])
    assert coded[-1] < 128


@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_split_or_refused(data):
    lifted: list[LiftedField] = []
    try:
        result = split(data, lambda field: lifted.append(field) or "mark")
    except ConversionError:
        return
    assert result == data  # nothing in it is large
    assert not lifted


def test_split_and_assemble(tmp_path):
    model = a_model(np.random.default_rng(3))
    data = model.SerializeToString()
    fields: list[LiftedField] = []

    def mark(field: LiftedField) -> str:
        fields.append(field)
        return f"token:{len(fields) - 1}"

    structure = split(data, mark)
    assert len(fields) == 12  # of 4 kB and more
    assert {field.field for field in fields} == {4, 9, 10}

    def place(text: str) -> Placed:
        field = fields[int(text.split(":")[1])]
        return Placed(field.length, data[field.start : field.start + field.length], field.field)

    pieces, total = assemble(structure, b"token:", place)
    assert total == len(data)
    assert b"".join(pieces) == data
    tensor = model.graph.initializer[1].SerializeToString()
    assert packed_bytes(tensor, 9) == model.graph.initializer[1].raw_data
