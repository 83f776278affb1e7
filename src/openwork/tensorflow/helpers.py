"""Graphs without the operators that openwork inserted."""

from __future__ import annotations

import tensorflow as tf

from openwork.tensorflow.names import is_helper, seen_through

__all__ = ["without_helpers"]


def without_helpers(graph_def: tf.compat.v1.GraphDef) -> tf.compat.v1.GraphDef:
    """The graph in which every reader of a helper reads what the helper stands for; itself if there is none."""
    if not any(is_helper(node.name) for node in graph_def.node):
        return graph_def
    first = {
        node.name: next((i for i in node.input if not i.startswith("^")), "") for node in graph_def.node if node.input
    }
    result = tf.compat.v1.GraphDef()
    result.CopyFrom(graph_def)
    del result.node[:]
    for node in graph_def.node:
        if is_helper(node.name):
            continue
        copied = result.node.add()
        copied.CopyFrom(node)
        del copied.input[:]
        copied.input.extend(
            seen_through(name, first) if not name.startswith("^") else name
            for name in node.input
            if not (name.startswith("^") and is_helper(name))
        )
    return result
