"""Training steps: what is decided anew in some of them, and kept in variables between them.

A step is counted, and what was decided in it is stored, when a backward pass runs. This is what tells training from
evaluation, whatever the graph looks like: the operators that store hang on the gradient of each masked weight (built
later, by ``minimize``), or on the optimizer's operators if they are there already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from openwork.tensorflow.inserted.editing import helper_scope
from openwork.tensorflow.names import COMPONENT, GRADIENT

__all__ = ["COMMIT", "PASSED_ON", "Steps", "masked_product", "passed_on"]

COMMIT = "commit"
PASSED_ON = "OpenworkPassedOn"
_DECAY = "_openwork_decay"


class Steps:
    """The counter of training steps of a graph, and what is to be stored in each.

    Attributes:
        count: int64, steps done so far.
        variables: all variables that were made.
    """

    def __init__(self, graph: tf.Graph) -> None:
        self.graph = graph
        self.variables: list[tf.Variable] = []
        self._stores: list[tf.Operation] = []
        with helper_scope(graph, "steps"):
            self._variable = tf.compat.v1.Variable(
                tf.zeros((), tf.int64), trainable=False, use_resource=True, name="count"
            )
            # One reader for all: what is stored must not be read before it is decided.
            self.count = self._variable.read_value()
            self._first = tf.equal(self.count, 0)
        self.variables.append(self._variable)

    def is_first(self) -> tf.Tensor:
        """Whether no step was done yet."""
        return self._first

    def due(self, every: int) -> tf.Tensor:
        """Whether the coming step is the first one, or (if `every` is not 0) one in so many."""
        return tf.equal(self.count % every, 0) if every else self._first

    def decided(
        self, name: str, initial: Any, when: tf.Tensor, decide: Callable[..., tf.Tensor], trainable: bool = False
    ) -> tf.Tensor:
        """A value that is decided in some steps and kept until the next of these.

        Args:
            name: of the variable that keeps it, in the scope in force.
            initial: its first value, an array.
            when: whether it is decided now.
            decide: builds the decision; of a trainable value from what is kept.
            trainable: whether the optimizer may change the variable in other steps.
        """
        variable = tf.compat.v1.Variable(initial, trainable=trainable, use_resource=True, name=name)
        kept = variable.read_value()
        value = tf.cond(when, (lambda: tf.stop_gradient(decide(kept))) if trainable else decide, lambda: kept)
        value.set_shape(variable.shape)
        with tf.control_dependencies([value]):
            store = tf.cond(when, lambda: tf.group(variable.assign(value)), tf.no_op)
        self._stores.append(store if isinstance(store, tf.Operation) else store.op)
        self.variables.append(variable)
        return value

    def extreme(
        self, name: str, initial: Any, watching: tf.Tensor, update: Callable[[tf.Tensor], tf.Tensor]
    ) -> tf.Tensor:
        """A value that is gathered in the first steps and learned from then on; inside a helper scope.

        Args:
            name: of the variable that keeps it.
            initial: its first value.
            watching: whether it is still gathered.
            update: from the value so far to the one with this step's data.
        """
        return self.decided(name, initial, watching, update, trainable=True)

    def finish(self) -> tf.Operation:
        """The operator that stores everything and counts the step."""
        with helper_scope(self.graph, "steps"):
            count = self._variable.assign(self.count + 1, read_value=False)
        with self.graph.as_default(), tf.name_scope(f"{COMPONENT}/"), self.graph.control_dependencies(None):
            return tf.group(*self._stores, count, name=COMMIT)


def _commit(op: tf.Operation) -> list[tf.Operation]:
    """The operator of `Steps.finish` that belongs to a helper; none if the graph was cut."""
    scope = op.name[: op.name.rindex(f"{COMPONENT}/")]
    try:
        return [op.graph.get_operation_by_name(f"{scope}{COMPONENT}/{COMMIT}")]
    except KeyError:
        return []


@tf.RegisterGradient(GRADIENT)
def _masked_gradient(op: tf.Operation, gradient: tf.Tensor) -> list[tf.Tensor | None]:
    """Of weight * mask: the mask gets none; dead weights get none, or are pulled to zero."""
    weight, mask = op.inputs
    with tf.control_dependencies(_commit(op)):
        passed = gradient * mask
    decay = op.get_attr(_DECAY)
    if decay:
        passed = gradient + decay * (1.0 - mask) * weight
    return [passed, None]


@tf.RegisterGradient(PASSED_ON)
def _passed_gradient(op: tf.Operation, gradient: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies(_commit(op)):
        return tf.identity(gradient)


def masked_product(graph: tf.Graph, weight: tf.Tensor, mask: tf.Tensor, decay: float = 0.0) -> tf.Tensor:
    """weight * mask, whose backward pass counts as a training step.

    Args:
        graph: the graph.
        weight: the weight.
        mask: zeros and ones, of the weight's type; its shape may be broadcast.
        decay: see ``sr_ste_decay`` of the config; 0: dead weights get no gradient.
    """
    with graph.gradient_override_map({"Mul": GRADIENT}):
        product = tf.multiply(weight, mask, name="masked")
    product.op._set_attr(_DECAY, tf.compat.v1.AttrValue(f=decay))
    return product


def passed_on(graph: tf.Graph, weight: tf.Tensor) -> tf.Tensor:
    """The weight itself; its backward pass counts as a training step."""
    with graph.gradient_override_map({"Identity": PASSED_ON}):
        return tf.identity(weight, name="passed_on")
