"""Calibration data of graphs: a list of feed_dicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from openwork.errors import ConfigError, nearest

__all__ = ["Feed", "batch_length", "pieces_of", "read_feeds"]

# Arrays by tensor name, `node:0`.
Feed = dict[str, np.ndarray]


def read_feeds(graph: tf.Graph, input_data: Any, count: int) -> list[Feed]:
    """The first `count` feed_dicts, checked against the graph.

    Args:
        graph: the graph.
        input_data: list of dicts from tensors, or their names with index (``input:0``), to arrays.
        count: how many are used.

    Raises:
        ConfigError: no list of dicts, too few, a name that is no tensor, or a value that does not fit.
    """
    if isinstance(input_data, Mapping):
        input_data = [input_data]
    if not isinstance(input_data, Sequence) or isinstance(input_data, (str, bytes)):
        raise ConfigError(
            f"input_data is a {type(input_data).__name__}; a list of feed_dicts is needed, e.g. [{{'input:0': array}}]"
        )
    if not input_data:
        raise ConfigError("input_data is an empty list; at least one feed_dict is needed")
    if len(input_data) < count:
        raise ConfigError(
            f"test_iteration is {count}; input_data holds {len(input_data)} feed_dict"
            f"{'' if len(input_data) == 1 else 's'}, at most that is allowed"
        )
    return [_read(graph, item, f"input_data[{index}]") for index, item in enumerate(input_data[:count])]


def _read(graph: tf.Graph, item: Any, where: str) -> Feed:
    if not isinstance(item, Mapping):
        raise ConfigError(f"{where} is a {type(item).__name__}; a feed_dict is needed, e.g. {{'input:0': array}}")
    if not item:
        raise ConfigError(f"{where} is empty; it must feed the placeholders of the graph")
    feed: Feed = {}
    for key, value in item.items():
        tensor = _tensor(graph, key, where)
        try:
            array = np.asarray(value, dtype=tensor.dtype.base_dtype.as_numpy_dtype)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{where}[{tensor.name!r}] is no {tensor.dtype.base_dtype.name} array ({error})"
            ) from error
        if not tensor.shape.is_compatible_with(array.shape):
            raise ConfigError(
                f"{where}[{tensor.name!r}] has shape {list(array.shape)}; the graph needs {_shown(tensor.shape)}"
            )
        feed[tensor.name] = array
    return feed


def _shown(shape: tf.TensorShape) -> str:
    return "any" if shape.rank is None else str(shape.as_list()).replace("None", "any")


def _tensor(graph: tf.Graph, key: Any, where: str) -> tf.Tensor:
    name = key if isinstance(key, str) else getattr(key, "name", None)
    if not isinstance(name, str):
        raise ConfigError(f"{where}: {key!r} is no name of a tensor; e.g. 'input:0'")
    node, colon, _ = name.partition(":")
    operators = {op.name for op in graph.get_operations()}
    if node not in operators:
        inputs = [op.name for op in graph.get_operations() if op.type.startswith("Placeholder")]
        raise ConfigError(f"{where}: {name!r} is not in the graph; {nearest(node, inputs or operators)}")
    if not colon:
        raise ConfigError(f"{where}: {name!r} is an operator; its tensor is needed: {name + ':0'!r}")
    try:
        return graph.get_tensor_by_name(name)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{where}: {name!r} is no tensor of the graph; did you mean {node + ':0'!r}?") from error


def _is_open(graph: tf.Graph, name: str) -> bool:
    """Whether the graph leaves the first length of a tensor open."""
    shape = graph.get_tensor_by_name(name).shape
    return shape.rank is None or (shape.rank > 0 and shape.as_list()[0] is None)


def batch_length(graph: tf.Graph, feed: Feed) -> int:
    """The number of samples: the first length that all arrays share where the graph leaves it open; else 1.

    1 also if an array of stated length has as many entries, which may be samples too.
    """
    arrays = {name: array for name, array in feed.items() if array.ndim}
    lengths = {len(array) for name, array in arrays.items() if _is_open(graph, name)}
    if len(lengths) != 1:
        return 1
    (length,) = lengths
    stated = {len(array) for name, array in arrays.items() if not _is_open(graph, name)}
    return 1 if length in stated else length


def pieces_of(graph: tf.Graph, feed: Feed, size: int) -> list[Feed]:
    """The feed in pieces of at most `size` samples; whole if it cannot be cut."""
    count = batch_length(graph, feed)
    if count <= size:
        return [feed]
    cut = {name for name, array in feed.items() if array.ndim and _is_open(graph, name)}
    return [
        {name: array[start : start + size] if name in cut else array for name, array in feed.items()}
        for start in range(0, count, size)
    ]
