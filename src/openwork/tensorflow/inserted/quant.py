"""Fake quantisation in a graph, on TensorFlow's own fake-quantise operators.

Inputs, ULQ: 256 levels between a lower and an upper end, 0 among them. Both ends are variables that the operator's own
gradient trains; their first values are the extremes of the first batches. Weights are symmetric, -127 .. 127 (INT4:
-7 .. 7) times a scale, so that zeros stay exact zeros. ARQ takes the scale from the largest magnitude in each step;
ULQ learns it, starting from there.
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from openwork.config import DataQuantSetting, QuantSetting, WeightAlgorithm, WeightQuantSetting
from openwork.errors import UnsupportedModelError
from openwork.tensorflow.analysis import GraphAnalysis, Layer
from openwork.tensorflow.inserted.apply import weight_places
from openwork.tensorflow.inserted.editing import helper_scope, read_of, redirect
from openwork.tensorflow.inserted.steps import Steps, passed_on
from openwork.tensorflow.variables import apply_operators

__all__ = ["LARGEST", "data_place", "insert_quantisation", "quantisable_reads"]

# The last part of the name of a weight's largest magnitude.
LARGEST = "largest"
_SMALLEST = 1e-8


def data_place(layer: Layer, weight_place: int) -> int:
    """Which input of a layer's operator its data is."""
    return 2 if "Backprop" in layer.type else 1 - weight_place


def quantisable_reads(
    graph: tf.Graph, analysis: GraphAnalysis, settings: Mapping[str, QuantSetting]
) -> dict[str, tf.Tensor]:
    """The tensors through which layers read their weights, before anything is changed.

    Raises:
        UnsupportedModelError: gradients were built already, or a weight cannot be reached.
    """
    present = apply_operators(graph)
    if settings and present:
        raise UnsupportedModelError(
            f"graph has an optimizer already ({present[0].name!r}), whose gradients would not see the quantisation; "
            "call this before minimize"
        )
    places = weight_places(analysis)
    return {name: read_of(graph, analysis.layers[name], places[name]) for name in settings}


def insert_quantisation(
    graph: tf.Graph,
    analysis: GraphAnalysis,
    settings: Mapping[str, QuantSetting],
    reads: Mapping[str, tf.Tensor],
    batches: int,
    steps: Steps,
) -> None:
    """Let layers simulate quantisation; after the masks, which they see.

    Args:
        graph: the graph; changed.
        analysis: of it, from before any change.
        settings: how to quantise each layer.
        reads: what `quantisable_reads` found.
        batches: training steps that the first clip ranges are taken from.
        steps: of the graph; `close_steps` is still to come.
    """
    places = weight_places(analysis)
    for name, setting in settings.items():
        layer = analysis.layers[name]
        operator = graph.get_operation_by_name(name)
        with helper_scope(graph, f"quantised/{name}/weight"):
            # What the layer's readers see now: a masked weight, or the weight itself.
            current = _last(reads[name])
            made = _weight(steps, passed_on(graph, current), layer, setting.weight)
        redirect(current, made)
        place = data_place(layer, places[name])
        with helper_scope(graph, f"quantised/{name}/input"):
            quantised = _input(steps, operator.inputs[place], setting.data, batches)
        operator._update_input(place, quantised)


def _last(read: tf.Tensor) -> tf.Tensor:
    """The masked weight that stands for a read one."""
    while True:
        products = [op for op in read.consumers() if op.type == "Mul" and op.name.endswith("/masked")]
        if not products:
            return read
        read = products[0].outputs[0]


def _input(steps: Steps, x: tf.Tensor, setting: DataQuantSetting, batches: int) -> tf.Tensor:
    values = tf.cast(x, tf.float32)
    given = setting.clip_max is not None
    watching = tf.less(steps.count, 0 if given else batches)
    seen = tf.stop_gradient(values)
    first_low = 0.0 if setting.fixed_min else float(setting.clip_min or 0.0)
    if setting.fixed_min:
        low = tf.zeros(())
    else:
        low = steps.extreme("clip_min", first_low, watching, lambda old: tf.minimum(old, tf.reduce_min(seen)))
        if setting.fixed_min is None:
            # Data without negative values keep the lower end at 0; it is decided in the watched batches.
            rests = steps.decided("rests", 1.0, watching, lambda: tf.cast(low >= 0, tf.float32))
            low = low * (1.0 - tf.stop_gradient(rests))
        low = tf.minimum(low, 0.0)
    high = steps.extreme(
        "clip_max", float(setting.clip_max or 0.0), watching, lambda old: tf.maximum(old, tf.reduce_max(seen))
    )
    high = tf.maximum(high, low + _SMALLEST)
    made = tf.quantization.fake_quant_with_min_max_vars(values, low, high, num_bits=8, name="fake_quant")
    return tf.cast(made, x.dtype, name="simulated") if x.dtype != tf.float32 else made


def _weight(steps: Steps, weight: tf.Tensor, layer: Layer, setting: WeightQuantSetting) -> tf.Tensor:
    rank, axis = weight.shape.rank, layer.out_axis
    last = [place for place in range(rank) if place != axis] + [axis]
    moved = tf.cast(weight, tf.float32)
    if axis != rank - 1 and setting.channel_wise:
        moved = tf.transpose(moved, last)
    magnitude = tf.stop_gradient(tf.abs(moved))
    largest = tf.reduce_max(magnitude, list(range(rank - 1)) if setting.channel_wise else None)
    if setting.algorithm is WeightAlgorithm.ULQ:
        shape = largest.shape.as_list()
        learned = steps.extreme("clip", tf.zeros(shape), steps.is_first(), lambda _: largest)
        largest = tf.abs(learned)
    largest = tf.maximum(largest, _SMALLEST, name=LARGEST)
    bits = 8 if setting.dst_type == "INT8" else 4
    quantise = (
        tf.quantization.fake_quant_with_min_max_vars_per_channel
        if setting.channel_wise
        else tf.quantization.fake_quant_with_min_max_vars
    )
    made = quantise(moved, -largest, largest, num_bits=bits, narrow_range=True)
    if axis != rank - 1 and setting.channel_wise:
        made = tf.transpose(made, [last.index(place) for place in range(rank)])
    return tf.cast(made, weight.dtype, name="simulated") if weight.dtype != tf.float32 else made
