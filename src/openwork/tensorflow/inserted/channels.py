"""Channel masks in a graph.

One variable for each group says which of its units are alive. It is decided in the first training step, from the
weights as they are then (a checkpoint may be restored after the graph was built), by the criterion of
`openwork.importance`'s balanced_l2; a choice that a search made is a constant. Weights that make or read channels are
multiplied by masks that follow from these variables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from openwork.graph.groups import IntArray, Member, PruneGroup, Role
from openwork.search._records import shown_member
from openwork.tensorflow.inserted.steps import Steps

__all__ = ["ALIVE", "alive_units", "group_scope", "weight_mask"]

ALIVE = "alive"


def group_scope(group: PruneGroup) -> str:
    """Scope of a group's operators, the same for the same layers in any graph."""
    member = shown_member(group)
    return f"channels/{member.module}/{int(member.positions[0])}"


def alive_units(
    steps: Steps, group: PruneGroup, removed: IntArray, weights: Mapping[str, tf.Tensor], exact: bool
) -> tf.Tensor:
    """float32 [units], 1 for a unit that is alive. Call it inside the scope of `group_scope`.

    Args:
        steps: the training steps.
        group: the group.
        removed: as many units as are to go; these ones if `exact`.
        weights: tensors of the producers' weights, by parameter name.
        exact: whether `removed` is fixed rather than ranked again.
    """
    initial = np.ones(group.units, np.float32)
    initial[removed] = 0
    if exact:
        variable = tf.compat.v1.Variable(initial, trainable=False, use_resource=True, name="kept")
        steps.variables.append(variable)
        return tf.identity(variable.read_value(), name=ALIVE)
    counts = np.bincount(group.block_of[removed], minlength=group.blocks)
    value = steps.decided("kept", initial, steps.is_first(), lambda: _lowest_die(group, counts, weights))
    return tf.identity(tf.stop_gradient(value), name=ALIVE)


def _lowest_die(group: PruneGroup, counts: IntArray, weights: Mapping[str, tf.Tensor]) -> tf.Tensor:
    scores = tf.add_n([_votes(member, group.units, weights[member.parameter]) for member in group.producers])
    for member in group.members:
        units = np.unique(member.units)
        if len(member.positions) == member.size and len(units) < group.units:
            # A layer that reads a part of the group only must keep the best of it.
            best = tf.gather(tf.constant(units), tf.argmax(tf.gather(scores, units)))
            scores = tf.where(tf.equal(tf.range(group.units, dtype=tf.int64), best), np.float64(np.inf), scores)
    dead = []
    for block, count in enumerate(counts.tolist()):
        inside = np.flatnonzero(group.block_of == block)
        order = tf.argsort(tf.gather(scores, inside), stable=True)
        dead.append(tf.gather(tf.constant(inside), order[:count]))
    hit = tf.math.unsorted_segment_sum(tf.ones(int(counts.sum())), tf.concat(dead, 0), group.units)
    return 1.0 - hit


def _votes(member: Member, units: int, weight: tf.Tensor) -> tf.Tensor:
    """float64 [units]: the member's norms, from 0 to 1, the mean over the positions of each unit."""
    size = int(np.prod(weight.shape.as_list()))
    others = [axis for axis in range(weight.shape.rank) if axis != member.axis]
    norms = tf.sqrt(tf.reduce_sum(tf.cast(tf.square(weight), tf.float64), others)) * (member.size / size)
    low, high = tf.reduce_min(norms), tf.reduce_max(norms)
    balanced = tf.math.divide_no_nan(norms - low, high - low)
    share = np.maximum(np.bincount(member.units, minlength=units), 1)
    sums = tf.math.unsorted_segment_sum(tf.gather(balanced, member.positions), tf.constant(member.units), units)
    return sums / share


def weight_mask(
    parameter: str, shape: Sequence[int], groups: Sequence[PruneGroup], alive: Mapping[int, tf.Tensor], dtype: tf.DType
) -> tf.Tensor | None:
    """The mask of a weight: zeros where channels that it makes or reads are dead. None if it has no such axis.

    Args:
        parameter: the weight's name.
        shape: its shape.
        groups: all groups.
        alive: `alive_units` of the groups that lose channels, by index.
        dtype: of the weight.

    Returns:
        of the weight's rank; axes along which it does not vary have length 1.
    """
    axes: dict[tuple[int, int], list[tuple[int, Member]]] = {}
    for group in groups:
        for member in group.members:
            if member.parameter == parameter and group.index in alive and member.role is not Role.CARRIES:
                axes.setdefault((member.axis, member.blocks), []).append((group.index, member))
    mask: tf.Tensor | None = None
    for (axis, blocks), parts in axes.items():
        positions, places, start = np.zeros(parts[0][1].size, np.int64), [tf.ones(1)], 1
        for index, member in parts:
            positions[member.positions] = start + member.units
            places.append(alive[index])
            start += int(alive[index].shape[0])
        vector = tf.cast(tf.gather(tf.concat(places, 0), positions), dtype)
        if blocks > 1:  # [inputs of a block, outputs]: the outputs of a block read its inputs
            columns = tf.transpose(tf.reshape(vector, (blocks, -1)))
            part = tf.repeat(columns, shape[-1] // blocks, axis=1)
            part = tf.reshape(part, [1] * (len(shape) - 2) + [shape[axis], shape[-1]])
        else:
            part = tf.reshape(vector, [-1 if place == axis else 1 for place in range(len(shape))])
        mask = part if mask is None else mask * part
    return mask
