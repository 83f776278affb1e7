"""Definitions and readings across bodies and functions; cycles, doubles and unknown names."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from convert_models import info, initializer, model_of
from openwork.errors import ConversionError
from openwork.onnx.scopes import default_opset, read_scopes


def branch(name, nodes, output, inits=()):
    return helper.make_graph(nodes, name, [], [info(output, None)], list(inits))


def test_names_resolve_from_the_inside_out():
    inner = branch("then", [helper.make_node("Add", ["w", "own"], ["a"])], "a", [initializer("own", np.float32(1))])
    other = branch("else", [helper.make_node("Identity", ["w"], ["a"])], "a")
    model = model_of(
        [helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=other)],
        [info("c", [], TensorProto.BOOL)],
        [info("y", None)],
        [initializer("w", np.float32(2))],
    )
    main, *bodies = read_scopes(model)
    bodies.sort(key=lambda scope: scope.where, reverse=True)
    assert [scope.where for scope in bodies] == ["then_branch of If of ['y']", "else_branch of If of ['y']"]
    weight = main.values["w"]
    assert {(reading.node.op_type, reading.slot) for reading in weight.readings} == {("Add", 0), ("Identity", 0)}
    assert bodies[0].find("w") is weight
    assert bodies[0].find("a") is not bodies[1].find("a")
    assert main.find("own") is None
    assert bodies[1].root is main


def test_a_function_sees_only_its_own():
    function = helper.make_function(
        "f", "F", ["a"], ["b"], [helper.make_node("Add", ["a", "w"], ["b"])], [helper.make_opsetid("", 13)]
    )
    model = model_of([], [], [], [initializer("w", np.float32(1))], functions=[function])
    with pytest.raises(ConversionError, match="function 'F': Add of \\['b'\\] reads 'w', which nothing makes"):
        read_scopes(model)


def test_opsets():
    function = helper.make_function("f", "F", [], ["b"], [helper.make_node("Constant", [], ["b"], value_int=1)], [])
    function.opset_import.append(helper.make_opsetid("", 13))
    model = model_of([], [], [], functions=[function], opset=17)
    assert [scope.opset for scope in read_scopes(model)] == [17, 13]
    assert default_opset([helper.make_opsetid("ai.onnx", 9), helper.make_opsetid("x", 50)]) == 9
    assert default_opset([]) == 0


def test_unsorted_nodes_are_no_cycle():
    nodes = [helper.make_node("Relu", ["a"], ["y"]), helper.make_node("Relu", ["x"], ["a"])]
    assert read_scopes(model_of(nodes, [info("x", [1])], [info("y", [1])]))


@pytest.mark.parametrize("through_body", [False, True])
def test_cycles(through_body):
    nodes = [
        helper.make_node("Relu", ["x"], ["s"], name="start"),
        helper.make_node("Add", ["s", "c"], ["a"], name="one"),
        helper.make_node("Relu", ["a"], ["b"], name="two"),
        helper.make_node("Relu", ["b"], ["c"], name="three"),
    ]
    if through_body:
        body = branch("then", [helper.make_node("Relu", ["b"], ["inside"])], "inside")
        nodes[3] = helper.make_node("If", ["q"], ["c"], name="three", then_branch=body, else_branch=body)
    inputs = [info("x", [1]), info("q", [], TensorProto.BOOL)]
    with pytest.raises(ConversionError, match="the graph is cyclic: ") as caught:
        read_scopes(model_of(nodes, inputs, [info("c", [1])]))
    for name in ("'one'", "'two'", "'three'"):
        assert name in str(caught.value)
    assert "'start'" not in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([helper.make_node("Relu", ["x"], ["x"])], "the name 'x' is defined twice"),
        ([helper.make_node("Relu", ["q"], ["y"])], "reads 'q', which nothing makes"),
        ([], "output 'y' is made by nothing"),
    ],
)
def test_broken_graphs(nodes, words):
    with pytest.raises(ConversionError, match=words):
        read_scopes(model_of(nodes, [info("x", [1])], [info("y", [1])]))


def test_an_initializer_may_be_an_input_too():
    model = model_of([], [info("w", [1])], [info("w", [1])], [initializer("w", np.zeros(1, np.float32))])
    value = read_scopes(model)[0].values["w"]
    assert value.is_input
    assert value.tensor is not None
    assert value.readings[0].node is None


def test_long_chains_are_no_problem():
    nodes = [helper.make_node("Relu", [f"a{i}"], [f"a{i + 1}"]) for i in range(20_000)]
    assert len(read_scopes(model_of(nodes, [info("a0", [1])], [info("a20000", [1])]))[0].nodes) == 20_000
