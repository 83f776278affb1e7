"""A copy of a training graph in which nothing is updated and everything behaves as in inference.

Variables become constants of their values. Operators that change state are left out, so that no update runs whatever
hangs on them by control dependencies. Batch norms take their moving statistics (also in their gradients), dropout
keeps everything. The copy gives the gradients that the original would give for the inference behaviour.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from openwork.errors import ConfigError, ModelError
from openwork.tensorflow.graphs import VARIABLES, const_node, first_line, node_name, tensor_of
from openwork.tensorflow.names import is_helper

__all__ = ["InferenceCopy", "variables_behind"]

_LOG = logging.getLogger("openwork")
# What a reader of a resource variable becomes when the variable is a constant.
_READERS = {"ReadVariableOp": "Identity", "ResourceGather": "GatherV2", "VariableShape": "Shape"}
_PASSED_ON = {"Switch", "RefSwitch", "Enter", "RefEnter", "Identity", "RefIdentity"}
_UPDATES = ("Assign", "Apply", "ResourceApply", "ResourceScatter", "Scatter", "SparseApply", "ResourceSparseApply",
            "CountUpTo")  # fmt: skip
# Operators between a batch statistic and the assignment of the moving one.
_ARITHMETIC = {"Sub", "Mul", "AddV2", "Add", "Identity", "Cast", "Reshape", "Squeeze", "Neg", "StopGradient"}


def _data(node: Any) -> list[str]:
    return [name for name in node.input if not name.startswith("^")]


def _is_update(node: Any) -> bool:
    kind: str = node.op
    return kind.startswith(_UPDATES) and not kind.startswith("ApplyTo")


class _Nodes:
    """A graph's nodes by name."""

    def __init__(self, graph_def: tf.compat.v1.GraphDef) -> None:
        self.by_name = {node.name: node for node in graph_def.node}

    def needed(self, outputs: Sequence[str]) -> dict[str, Any]:
        """What outputs need, without anything that changes state, in the graph's order."""
        seen: set[str] = set()
        pending = [node_name(name) for name in outputs]
        while pending:
            name = pending.pop()
            if name in seen:
                continue
            seen.add(name)
            node = self.by_name[name]
            if _is_update(node):
                pending += [node_name(i) for i in _data(node)[:1]]  # what it hands on is the variable itself
                continue
            pending += [node_name(i) for i in node.input if not (i.startswith("^") and self._updates(node_name(i)))]
        return {name: node for name, node in self.by_name.items() if name in seen}

    def _updates(self, name: str) -> bool:
        """Whether a control dependency is on something that changes state, or is a group of such."""
        seen: set[str] = set()
        pending = [name]
        while pending:
            current = pending.pop()
            if current in seen or current not in self.by_name:
                continue
            seen.add(current)
            node = self.by_name[current]
            if _is_update(node) or is_helper(current):
                return True
            if node.op == "NoOp":
                pending += [node_name(i) for i in node.input]
        return False

    def variable_of(self, name: str) -> str | None:
        """The resource variable whose handle a node hands on; None for any other node."""
        while True:
            node = self.by_name.get(name)
            if node is None or node.op == "VarHandleOp":
                return None if node is None else name
            if node.op not in _PASSED_ON:
                return None
            name = node_name(node.input[0])

    def _variable_behind(self, name: str) -> Any:
        """The variable that an assignment's first input leads to, through the switches of a conditional."""
        node = self.by_name.get(name)
        while node is not None and node.op in _PASSED_ON:
            node = self.by_name.get(node_name(node.input[0]))
        return node if node is not None and node.op in VARIABLES else None

    def moving_statistics(self) -> dict[str, dict[int, str]]:
        """For each fused batch norm: output index (1 mean, 2 variance) -> variable that is updated with it."""
        found: dict[str, dict[int, str]] = {}
        for node in self.by_name.values():
            if not node.op.startswith("Assign") or len(_data(node)) < 2:
                continue
            variable = self._variable_behind(node_name(_data(node)[0]))
            if variable is None:
                continue
            for norm, index in self._statistics(_data(node)[1]):
                found.setdefault(norm, {}).setdefault(index, variable.name)
        return found

    def _statistics(self, tensor: str) -> list[tuple[str, int]]:
        found, seen, pending = [], set(), [tensor]
        while pending:
            name, index = tensor_of(pending.pop())
            node = self.by_name.get(name)
            if node is None or (name, index) in seen:
                continue
            seen.add((name, index))
            if node.op.startswith("FusedBatchNorm") and "Grad" not in node.op and index in (1, 2):
                found.append((name, index))
            elif node.op in _ARITHMETIC:
                pending += _data(node)
        return found


def variables_behind(graph_def: tf.compat.v1.GraphDef, outputs: Sequence[str]) -> list[str]:
    """Names of the variables whose values an `InferenceCopy` of these outputs needs."""
    nodes = _Nodes(graph_def)
    statistics = [name for pair in nodes.moving_statistics().values() for name in pair.values()]
    needed = nodes.needed([*outputs, *statistics])
    return [name for name, node in needed.items() if node.op in VARIABLES]


class InferenceCopy:
    """The copy, in a session of its own.

    Args:
        graph_def: the training graph; not changed.
        outputs: tensors that will be asked for, ``node:index``.
        values: values of its variables, by name; `variables_behind` lists them.

    Raises:
        ModelError: control flow hides variables, or the copy cannot be made.
    """

    def __init__(
        self, graph_def: tf.compat.v1.GraphDef, outputs: Sequence[str], values: Mapping[str, np.ndarray]
    ) -> None:
        nodes = _Nodes(graph_def)
        statistics = nodes.moving_statistics()
        needed = nodes.needed([*outputs, *(name for pair in statistics.values() for name in pair.values())])
        self._added: list[Any] = []
        copy = tf.compat.v1.GraphDef(versions=graph_def.versions)
        copy.library.CopyFrom(graph_def.library)
        for name, node in needed.items():
            if node.op in VARIABLES:
                copy.node.append(const_node(name, np.asarray(values[name])))
            elif not _is_update(node):
                self._copy(copy.node.add(), node, nodes, needed)
        copy.node.extend(self._added)
        made = {node.name: node for node in copy.node}
        self._settle_norms(made, statistics)
        self._keep_all(copy, made)
        self.graph = tf.Graph()
        try:
            with self.graph.as_default():
                tf.import_graph_def(copy, name="")
        except (ValueError, TypeError, tf.errors.OpError, RuntimeError) as error:
            raise ModelError(f"the graph cannot be measured: {first_line(error)}") from error
        self._session = tf.compat.v1.Session(graph=self.graph)

    def _copy(self, copied: Any, node: Any, nodes: _Nodes, needed: Mapping[str, Any]) -> None:
        copied.CopyFrom(node)
        copied.device = ""
        del copied.input[:]
        for name in node.input:
            if not name.startswith("^"):
                copied.input.append(self._around(name, nodes))
            elif node_name(name) in needed and not _is_update(needed[node_name(name)]):
                copied.input.append(name)
        for attribute in ("_class", "_output_shapes"):
            if attribute in copied.attr:
                del copied.attr[attribute]
        handles = [nodes.variable_of(node_name(i)) for i in _data(copied)]
        if not any(handles):
            return
        if node.op in _READERS:
            self._reader(copied, node, nodes.by_name[str(handles[0])].attr["dtype"])
        elif node.op in _PASSED_ON:
            copied.attr["T"].CopyFrom(nodes.by_name[str(handles[0])].attr["dtype"])
        else:
            raise ModelError(
                f"{node.op} {node.name} reads variable {next(filter(None, handles))!r} where openwork cannot see it; "
                "build the graph without it (for tf.cond and tf.while_loop: "
                "tf.compat.v1.disable_control_flow_v2() first)"
            )

    @staticmethod
    def _around(name: str, nodes: _Nodes) -> str:
        """The tensor, or the variable where an update hands it on."""
        while _is_update(nodes.by_name[node_name(name)]):
            name = _data(nodes.by_name[node_name(name)])[0]
        return name

    def _reader(self, copied: Any, node: Any, dtype: Any) -> None:
        """Let a reader of a variable read a constant."""
        copied.op = _READERS[node.op]
        copied.ClearField("attr")
        if node.op == "ResourceGather":
            axis = const_node(f"{node.name}/openwork_axis", np.asarray(0, np.int32))
            self._added.append(axis)
            copied.input.insert(2, axis.name)
            copied.attr["Tparams"].CopyFrom(dtype)
            copied.attr["Tindices"].CopyFrom(node.attr["Tindices"])
            copied.attr["Taxis"].type = tf.int32.as_datatype_enum
            return
        copied.attr["T"].CopyFrom(dtype)
        if node.op == "VariableShape":
            copied.attr["out_type"].CopyFrom(node.attr["out_type"])

    def _settle_norms(self, made: dict[str, Any], statistics: Mapping[str, Mapping[int, str]]) -> None:
        """Batch norms and their gradients take the moving statistics."""
        settled: dict[str, tuple[str, str]] = {}
        for name, node in made.items():
            if not node.op.startswith("FusedBatchNorm") or "Grad" in node.op or not node.attr["is_training"].b:
                continue
            moving = statistics.get(name, {})
            if set(moving) != {1, 2}:
                _LOG.warning("batch norm %s keeps no moving statistics; it is measured with those of the batch", name)
                continue
            node.attr["is_training"].b = False
            node.input[3], node.input[4] = moving[1], moving[2]
            settled[name] = moving[1], moving[2]
        for node in made.values():
            if node.op.startswith("FusedBatchNormGrad") and node.attr["is_training"].b:
                norm = node_name(node.input[3])
                if norm in settled:
                    node.attr["is_training"].b = False
                    node.input[3], node.input[4] = settled[norm]

    def _keep_all(self, copy: Any, made: dict[str, Any]) -> None:
        """Dropout: random numbers become 1, above any rate, and the scale that makes up for it becomes 1."""
        readers: dict[str, list[Any]] = {}
        for node in made.values():
            for name in _data(node):
                readers.setdefault(node_name(name), []).append(node)
        for name, node in list(made.items()):
            if node.op != "RandomUniform":
                continue
            comparisons = [reader for reader in readers.get(name, []) if reader.op == "GreaterEqual"]
            masks = [user for one in comparisons for user in readers.get(one.name, [])]
            masks += [user for one in masks if one.op == "Cast" for user in readers.get(one.name, [])]
            scaled = [
                made[node_name(i)]
                for user in masks
                if user.op in ("SelectV2", "Select", "Mul")
                for i in _data(user)
                if made[node_name(i)].op == "Mul"
            ]
            scales = {
                node_name(i)
                for one in scaled
                for i in _data(one)
                if made[node_name(i)].op in ("Const", "RealDiv", "Sub") and self._is_scale(made[node_name(i)])
            }
            if not comparisons or not scales:
                continue
            for scale in scales:
                dtype = tf.as_dtype(made[scale].attr["dtype" if made[scale].op == "Const" else "T"].type)
                made[scale].CopyFrom(const_node(scale, np.ones((), dtype.as_numpy_dtype)))
            dtype = tf.as_dtype(node.attr["dtype"].type)
            one = const_node(f"{name}/openwork_one", np.ones((), dtype.as_numpy_dtype))
            copy.node.append(one)
            kind, shape = node.attr["T"].type, node.input[0]
            node.ClearField("attr")
            node.op = "Fill"
            node.attr["T"].type = dtype.as_datatype_enum
            node.attr["index_type"].type = kind
            del node.input[:]
            node.input.extend([shape, one.name])

    @staticmethod
    def _is_scale(node: Any) -> bool:
        return node.op != "Const" or not node.attr["value"].tensor.tensor_shape.dim

    def run(self, tensors: Sequence[str], feed: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Values of tensors; any tensor may be fed, variables by ``name:0``.

        Raises:
            ConfigError: a placeholder is not fed.
            ModelError: TensorFlow cannot compute them; says what it says.
        """
        given = {name: value for name, value in feed.items() if node_name(name) in self._names}
        try:
            return list(self._session.run(list(tensors), feed_dict=given))
        except (tf.errors.OpError, ValueError, TypeError) as error:
            text = str(getattr(error, "message", None) or error)
            missing = re.search(r"must feed a value for placeholder tensor '([^']+)'", text)
            if missing:
                raise ConfigError(f"input_data does not feed the placeholder {missing[1]!r}") from error
            words = [line.strip() for line in text.splitlines() if line.strip() and "Detected at" not in line]
            told = next((line for line in words if not line.startswith(("Graph execution error", "Node:"))), words[0])
            raise ModelError(f"the graph fails on input_data: {told[:300]}") from error

    @property
    def _names(self) -> set[str]:
        if not hasattr(self, "_known"):
            self._known = {op.name for op in self.graph.get_operations()}
        return self._known

    def close(self) -> None:
        """Free the session."""
        self._session.close()
