"""Change a live graph: find where a layer reads its weight, and let all readers read something else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from openwork.errors import UnsupportedModelError, wrong_model
from openwork.tensorflow.analysis import Layer
from openwork.tensorflow.graphs import ENTERS, VARIABLES
from openwork.tensorflow.names import COMPONENT, is_helper

__all__ = ["BODIES", "check_editable", "helper_scope", "helpers_in", "read_of", "redirect", "seen_by"]

# Readers of a variable that update, save or describe it; they go on to see the variable itself.
_STATE = ("Assign", "Apply", "Scatter", "SparseApply", "Save", "IsVariableInitialized", "CountUpTo")
BODIES = ("If", "StatelessIf", "While", "StatelessWhile", "PartitionedCall", "StatefulPartitionedCall", "Case")


def check_editable(graph: object) -> tf.Graph:
    """The graph, if operators can be put into it.

    Raises:
        UnsupportedModelError: it is no tf.Graph, is finalized, belongs to a tf.function, or trains on several devices.
    """
    if not isinstance(graph, tf.Graph):
        raise wrong_model("graph", graph, "a tf.Graph")
    if graph.finalized:
        raise UnsupportedModelError(
            "graph is finalized and cannot be changed; call this before a MonitoredSession, Supervisor or "
            "graph.finalize() closes it"
        )
    if graph.building_function:
        raise UnsupportedModelError("graph is the body of a tf.function; build the model in a tf.Graph of its own")
    if tf.distribute.has_strategy():
        raise UnsupportedModelError("a tf.distribute strategy is in force; graphs of one device only are supported")
    return graph


def helpers_in(graph: tf.Graph) -> list[str]:
    """Names of the operators that openwork inserted before."""
    return [op.name for op in graph.get_operations() if is_helper(op.name)]


@contextlib.contextmanager
def helper_scope(graph: tf.Graph, name: str) -> Iterator[None]:
    """Make operators below ``openwork_ops/<name>``, whatever scope, device or control dependency is in force."""
    with (
        graph.as_default(),
        graph.control_dependencies(None),
        tf.name_scope(f"{COMPONENT}/{name}/"),
        graph.device(None),
    ):
        yield


def read_of(graph: tf.Graph, layer: Layer, place: int) -> tf.Tensor:
    """The tensor through which a layer reads its weight, in the weight's own layout.

    Args:
        graph: the graph.
        layer: the layer.
        place: which input of its operator the weight is.

    Raises:
        UnsupportedModelError: the weight is read inside a conditional or loop, or by an operator that hides it.
    """
    tensor = graph.get_operation_by_name(layer.op).inputs[place]
    source = layer.weight.name
    while True:
        op = tensor.op
        if op.name == source:
            break  # a constant, or a reference variable that is read directly
        if op.type == "ReadVariableOp" or (op.type == "Identity" and op.inputs[0].op.name == source):
            break
        following = [i for i in op.inputs if _leads_to(i.op, source)]
        if not following:
            raise UnsupportedModelError(f"layer {layer.op!r}: its weight {source!r} is not read by operators alone")
        tensor = following[0]
    if tensor.op._get_control_flow_context() is not None:
        raise UnsupportedModelError(
            f"layer {layer.op!r} reads its weight {source!r} inside a conditional or loop; move the layer out of it or "
            "skip it (regular_prune_skip_layers, quant_skip_layers)"
        )
    _refuse_hidden_readers(graph, source, layer)
    return tensor


def _leads_to(op: tf.Operation, source: str) -> bool:
    seen: set[str] = set()
    pending = [op]
    while pending:
        current = pending.pop()
        if current.name == source:
            return True
        if current.name not in seen:
            seen.add(current.name)
            pending += [i.op for i in current.inputs]
    return False


def _refuse_hidden_readers(graph: tf.Graph, source: str, layer: Layer) -> None:
    """A function that gets the variable's handle, or a loop, may read the unmasked weight."""
    variable = graph.get_operation_by_name(source)
    reads = [variable, *(r for r in variable.outputs[0].consumers() if r.type in ("Identity", "ReadVariableOp"))]
    loop = next((r for op in reads for r in op.outputs[0].consumers() if r.type in ENTERS), None)
    if loop is not None:
        raise UnsupportedModelError(
            f"layer {layer.op!r}: a loop reads its weight {source!r} too ({loop.type} {loop.name!r}); skip the layer "
            "(regular_prune_skip_layers, quant_skip_layers) or give the loop a weight of its own"
        )
    if variable.type != "VarHandleOp":
        return
    for reader in variable.outputs[0].consumers():
        if reader.type in BODIES:
            raise UnsupportedModelError(
                f"layer {layer.op!r}: {reader.type} {reader.name!r} is given the variable {source!r} and may read it "
                "unmasked; build the graph without it (tf.compat.v1.disable_control_flow_v2() before)"
            )


def redirect(old: tf.Tensor, new: tf.Tensor, keep: Sequence[tf.Operation] = ()) -> int:
    """Let every reader of a tensor read another one, gradients that were already built included.

    Operators that update, save or describe a variable, and openwork's own, go on to read the old tensor.

    Args:
        old, new: tensors of one shape and type.
        keep: further operators that go on to read the old tensor.

    Returns:
        the number of inputs that were changed.
    """
    kept = {op.name for op in keep}
    changed = 0
    for reader in old.consumers():
        if reader.name in kept or is_helper(reader.name):
            continue
        if old.op.type in VARIABLES and reader.type.startswith(_STATE):
            continue
        for index, tensor in enumerate(reader.inputs):
            if tensor is old:
                reader._update_input(index, new)
                changed += 1
    return changed


def seen_by(graph: tf.Graph, session: tf.compat.v1.Session) -> bool:
    """Whether a session sees changes that were made to operators: none does that has run the graph before.

    Tried on an operator that depends on constants alone (of an initialiser, say), which is then as it was. True if
    there is none.
    """
    constant = {op.name for op in graph.get_operations() if op.type == "Const"}
    probed = next(
        (
            op
            for op in graph.get_operations()
            if op.inputs
            and op.outputs
            and all(tensor.op.name in constant for tensor in op.inputs)
            and not is_helper(op.name)
            and not op.control_inputs
            and op._get_control_flow_context() is None
        ),
        None,
    )
    if probed is None:
        return True
    old = probed.inputs[0]
    with helper_scope(graph, "probe"):
        counter = tf.compat.v1.Variable(0, trainable=False, collections=[], use_resource=True, name="count")
        with tf.control_dependencies([counter.assign_add(1)]):
            watched = tf.identity(old)
        count = counter.read_value()
    probed._update_input(0, watched)
    try:
        session.run(counter.initializer)
        session.run(probed.outputs[0])
        return bool(session.run(count))
    finally:
        probed._update_input(0, old)
