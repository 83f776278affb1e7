"""Variables of a graph: where they are read, what they hold, which gradient reaches them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from openwork.errors import ConfigError, ModelError
from openwork.tensorflow.graphs import VARIABLES, first_line

__all__ = ["Gradient", "Values", "apply_operators", "gradients", "read_values", "session_for"]

# How an operator's definition calls the gradient that it applies.
_GRADIENTS = ("grad", "delta")


@dataclass(frozen=True)
class Gradient:
    """The gradient of one variable, as its optimizer sees it.

    Attributes:
        variable: name of the variable operator.
        operator: the operator that applies it.
        place: which input of the operator it is.
        tensor: the gradient.
        indices: rows of the variable that `tensor` holds, if it is sparse.
    """

    variable: str
    operator: tf.Operation
    place: int
    tensor: tf.Tensor
    indices: tf.Tensor | None


def apply_operators(graph: tf.Graph) -> list[tf.Operation]:
    """Operators by which an optimizer updates a variable (ApplyMomentum, ResourceApplyAdam and their kin)."""
    return [
        op
        for op in graph.get_operations()
        if op.type.removeprefix("Resource").removeprefix("Sparse").startswith("Apply") and op.inputs
    ]


def gradients(graph: tf.Graph) -> dict[str, list[Gradient]]:
    """The gradients of all variables that an optimizer updates, by the variable's name."""
    found: dict[str, list[Gradient]] = {}
    for op in apply_operators(graph):
        names = [argument.name for argument in op.op_def.input_arg]
        place = next((names.index(name) for name in _GRADIENTS if name in names), None)
        if place is None or op.inputs[0].op.type not in VARIABLES:
            continue
        indices = op.inputs[names.index("indices")] if "indices" in names else None
        name = op.inputs[0].op.name
        found.setdefault(name, []).append(Gradient(name, op, place, op.inputs[place], indices))
    return found


def session_for(graph: tf.Graph, session: Any) -> tf.compat.v1.Session | None:
    """The session whose variables count: the given one, else the default one if it runs this graph.

    Raises:
        ConfigError: the given session is none, or runs another graph; or the session is closed.
    """
    if session is None:
        default = tf.compat.v1.get_default_session()
        return _open(default, "the default session") if default is not None and default.graph is graph else None
    if not isinstance(session, (tf.compat.v1.Session, tf.compat.v1.InteractiveSession)):
        raise ConfigError(f"session is a {type(session).__name__}; a tf.compat.v1.Session is needed")
    if session.graph is not graph:
        raise ConfigError("session runs another graph; one that was made with graph=graph is needed")
    return _open(session, "session")


def _open(session: Any, what: str) -> tf.compat.v1.Session:
    """The session, if it was not closed; TensorFlow itself says so only when it is run."""
    if getattr(session, "_closed", False):
        raise ConfigError(f"{what} is closed; one that is open and holds the variables is needed")
    return session


def read_values(
    graph: tf.Graph, names: Iterable[str], session: tf.compat.v1.Session | None = None, strict: bool = False
) -> dict[str, np.ndarray]:
    """Values of variables, by the names of their operators. The graph and the variables are not changed.

    Args:
        graph: the graph.
        names: variable operators.
        session: where the values are; None: each variable's initialiser is run in a session of its own.
        strict: whether variables without a value in `session` are an error; else initial values stand for all.

    Raises:
        ConfigError: a variable has no value and no initialiser.
    """
    wanted = list(dict.fromkeys(names))
    if not wanted:
        return {}
    fetches = {name: _readable(graph, name) for name in wanted}
    if session is not None:
        try:
            return dict(session.run(fetches))
        except tf.errors.FailedPreconditionError as error:
            if strict:
                missing = next(
                    (name for name in sorted(wanted, key=len, reverse=True) if name in str(error)), wanted[0]
                )
                raise ConfigError(
                    f"variable {missing!r} has no value in the session; run its initialiser or restore a checkpoint "
                    "first"
                ) from error
    initialisers = _initialisers(graph)
    lacking = next((name for name in wanted if name not in initialisers), None)
    if lacking is not None:
        raise ConfigError(f"variable {lacking!r} has no initialiser; give a session that holds its value")
    with tf.compat.v1.Session(graph=graph) as private:
        try:
            # All of them: an initialiser may read other variables, in which case the order counts.
            _initialise(private, [initialisers[name] for name in {**dict.fromkeys(wanted), **initialisers}])
            return dict(private.run(fetches))
        except (tf.errors.OpError, ValueError) as error:
            raise ConfigError(
                f"the variables cannot be initialised ({first_line(error)}); give a session that holds their values"
            ) from error


class Values:
    """Values of a graph's variables, each read once: without a session, random initial values are drawn only once.

    Args:
        graph, session, strict: see `read_values`.
    """

    def __init__(self, graph: tf.Graph, session: tf.compat.v1.Session | None = None, strict: bool = False) -> None:
        self._source = graph, session, strict
        self._known: dict[str, np.ndarray] = {}

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Values by the names of variable operators.

        Raises:
            ConfigError: as `read_values`.
        """
        wanted = list(names)
        graph, session, strict = self._source
        self._known.update(read_values(graph, [n for n in wanted if n not in self._known], session, strict))
        return {name: self._known[name] for name in wanted}


def _initialise(session: tf.compat.v1.Session, operators: list[tf.Operation]) -> None:
    """Run initialisers; those that need other variables first come after these."""
    pending = operators
    while pending:
        left = []
        try:
            session.run(pending)
            return
        except tf.errors.FailedPreconditionError:
            for op in pending:
                try:
                    session.run(op)
                except tf.errors.FailedPreconditionError:
                    left.append(op)
        if len(left) == len(pending):
            session.run(left[0])  # raises, and says which variable is missing
        pending = left


def _readable(graph: tf.Graph, name: str) -> tf.Tensor:
    """A tensor that holds the variable's value and whose computation changes nothing."""
    op = graph.get_operation_by_name(name)
    if op.type != "VarHandleOp":
        return op.outputs[0]
    for reader in op.outputs[0].consumers():
        if reader.type == "ReadVariableOp" and not reader.control_inputs:
            return reader.outputs[0]
    if graph.finalized:
        raise ModelError(f"the graph is finalized and variable {name!r} is read nowhere; its value cannot be had")
    with graph.as_default(), graph.control_dependencies(None), tf.name_scope(f"{name}/openwork_ops/"):
        return tf.raw_ops.ReadVariableOp(resource=op.outputs[0], dtype=op.get_attr("dtype"))


def _initialisers(graph: tf.Graph) -> dict[str, tf.Operation]:
    """The operator that gives each variable its first value, by the variable's name."""
    found: dict[str, tf.Operation] = {}
    for key in (tf.compat.v1.GraphKeys.GLOBAL_VARIABLES, tf.compat.v1.GraphKeys.LOCAL_VARIABLES):
        for variable in graph.get_collection(key):
            if isinstance(getattr(variable, "initializer", None), tf.Operation):
                found[variable.op.name] = variable.initializer
    for op in graph.get_operations():
        if op.type in ("Assign", "AssignVariableOp") and op.inputs[0].op.type in VARIABLES:
            name = op.inputs[0].op.name
            if op.name == f"{name}/Assign":
                found.setdefault(name, op)
    return found
