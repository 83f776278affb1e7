"""Names of dynamic axes, on programs as a release of torch writes them that invents its own."""

from __future__ import annotations

from types import SimpleNamespace

import onnx_ir as ir
import pytest

from openwork.torch.retrain.axis_names import name_axes


def program():
    """Two inputs whose first axes are equal, one axis of the second of its own, and a value of a computed size."""
    first = ir.Value(name="x", shape=ir.Shape(["s7", 3]))
    second = ir.Value(name="y", shape=ir.Shape(["s7", "s77"]))
    node = ir.node("Concat", [first, second], attributes={"axis": 1}, name="joined")
    node.outputs[0].name, node.outputs[0].shape = "z", ir.Shape(["s7", "s77 + 3"])
    plain = ir.node("Relu", [node.outputs[0]])
    graph = ir.Graph([first, second], [plain.outputs[0]], nodes=[node, plain], opset_imports={"": 18})
    return SimpleNamespace(model=ir.Model(graph, ir_version=10))


def shapes(exported):
    graph = exported.model.graph
    values = [*graph.inputs, *(value for node in graph.all_nodes() for value in node.outputs)]
    return [
        None if value.shape is None else [str(getattr(dim, "value", dim)) for dim in value.shape] for value in values
    ]


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ({"x": {0: "batch"}, "y": {1: "width"}}, [["batch", "3"], ["batch", "width"], ["batch", "width + 3"], None]),
        # Equal axes have one name, the first input's; an axis that is fixed after all has none.
        ({"x": {0: "batch", 1: "depth"}, "y": {0: "n"}},
         [["batch", "3"], ["batch", "s77"], ["batch", "s77 + 3"], None]),
        # Names that swap places.
        ({"x": {0: "s77"}, "y": {1: "s7"}}, [["s77", "3"], ["s77", "s7"], ["s77", "s7 + 3"], None]),
    ],
)  # fmt: skip
def test_names_everywhere(axes, expected):
    exported = program()
    name_axes(exported, axes)
    assert shapes(exported) == expected


@pytest.mark.parametrize("axes", [None, {}, {"x": [0]}, {"z": {0: "batch"}}, {"x": {0: "s7"}}])
def test_nothing_to_rename(axes):
    exported = program()
    before, kept = shapes(exported), [value.shape for value in exported.model.graph.inputs]
    name_axes(exported, axes)
    assert shapes(exported) == before
    assert all(value.shape is shape for value, shape in zip(exported.model.graph.inputs, kept, strict=True))
