"""create and save with quantisation: channel masks or N:M selection, then quantisation-aware training."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from openwork.config import LayerSetting, QuantSetting, load_retrain_config
from openwork.errors import ConfigError, ModelError, RecordError
from openwork.files import check_paths, check_writable, write_bytes
from openwork.graph.plan import Plan
from openwork.record import QuantFactors, load_record, save_record
from openwork.retrain.clipping import range_fault
from openwork.tensorflow.analysis import GraphAnalysis, analyze_graph
from openwork.tensorflow.baking import Baked, bake
from openwork.tensorflow.create import choose, initialise, refuse_edited, shared_readers
from openwork.tensorflow.graphs import const_node, output_names, read_frozen
from openwork.tensorflow.inserted.apply import close_steps, insert_masks, weight_places
from openwork.tensorflow.inserted.editing import check_editable
from openwork.tensorflow.inserted.quant import LARGEST, data_place, insert_quantisation, quantisable_reads
from openwork.tensorflow.save import saved_path, smaller_graph
from openwork.tensorflow.settings import maskable_layers
from openwork.tensorflow.values import constant_of
from openwork.tensorflow.variables import session_for

__all__ = ["create_compressed_retrain_model", "save_compressed_retrain_model"]

_LOG = logging.getLogger("openwork")
_SCOPE = "quantised"
_COUNT = "steps/count"
_LOWEST, _LEVELS = -128, 255


def create_compressed_retrain_model(
    graph: tf.Graph,
    config_defination: str | os.PathLike[str],
    outputs: Sequence[str],
    record_file: str | os.PathLike[str],
) -> list[tf.Variable]:
    """Put masks and fake quantisation into a graph, in place, as a config says; write the record.

    Call it on the training graph before the optimizer is built, and again with the same config on the inference graph.
    The clip ranges of inputs are taken from the first ``batch_num`` training steps and learned from then on.

    Args:
        graph: the graph; it is changed.
        config_defination: path of an ``AMCTRetrainConfig``; it may ask for pruning, for quantisation, or both.
        outputs: names of its outputs.
        record_file: path of the record to write; `save_compressed_retrain_model` completes it.

    Returns:
        all variables that were added; those of clip ranges are trainable.

    Raises:
        ConfigError: the config is wrong, or asks for nothing.
        UnsupportedModelError: as `create_prune_retrain_model`; or quantisation is asked for and an optimizer is in the
            graph already.
        FileError, ModelError: as `create_prune_retrain_model`.
    """
    check_paths(config_defination=config_defination, record_file=record_file)
    config = load_retrain_config(config_defination)
    graph = check_editable(graph)
    refuse_edited(graph)
    session_for(graph, None)  # a closed one is refused before the graph is changed
    check_writable(record_file, "record_file", config_defination)
    analysis = analyze_graph(graph, outputs)
    choice = choose(graph, analysis, config, config_defination)
    wanted = _quantised(analysis, choice.settings)
    if not wanted and not choice.plan.groups and not choice.patterns:
        raise ConfigError(
            f"{config_defination}: nothing to do: neither prune_config nor retrain_data_quant_config or "
            "retrain_weight_quant_config applies to any layer"
        )
    reads = quantisable_reads(graph, analysis, wanted)
    steps = insert_masks(graph, analysis, choice.masks)
    insert_quantisation(graph, analysis, wanted, reads, config.batch_num, steps)
    close_steps(graph, steps)
    session = initialise(graph, steps)
    record = choice.record(graph, analysis, config_defination, session)
    if config.force_fp16_quant:
        # Scales follow when the graph is saved; the config is not at hand then.
        forced = QuantFactors(fakequant_precision_mode="FORCE_FP16_QUANT")
        record = replace(record, factors=dict.fromkeys(wanted, forced))
    save_record(record, record_file)
    return steps.variables


def _quantised(analysis: GraphAnalysis, settings: Mapping[str, LayerSetting]) -> dict[str, QuantSetting]:
    layers = maskable_layers(analysis)
    readers = shared_readers(analysis)
    found = {}
    for name, setting in settings.items():
        if setting.quant is None:
            continue
        others = readers.get(layers[name].weight.name, set()) - {name}
        if others:
            _LOG.info("%s is not quantised: its weight is shared with %s", name, min(others))
        else:
            found[name] = setting.quant
    return found


def save_compressed_retrain_model(
    pb_model: str | os.PathLike[str],
    outputs: Sequence[str],
    record_file: str | os.PathLike[str],
    save_path: str | os.PathLike[str],
) -> None:
    """Write the frozen graph, cut and quantised, to ``<save_path>.pb``; complete the record.

    Weights of quantised layers are int8 constants behind a cast and a product with their scales; inputs pass
    TensorFlow's fake-quantise operator. The graph runs in any session. Zeros of masks are exact zeros in the integers.

    Args:
        pb_model: path of the frozen inference graph, after `create_compressed_retrain_model`, restoring and freezing.
        outputs: names of its outputs.
        record_file: the record; scales, offsets, channels and masks in force are written into it.
        save_path: folder and prefix of the result.

    Raises:
        ModelError: no training step was done, so there is no clip range; training diverged; or the graph is
            inconsistent.
        FileError, ConfigError, RecordError: as `save_prune_retrain_model`.
    """
    check_paths(pb_model=pb_model, record_file=record_file, save_path=save_path)
    graph_def = read_frozen(pb_model)
    names = output_names(graph_def, outputs)
    record = load_record(record_file)
    check_writable(record_file, "record_file")
    target = saved_path(save_path)
    baked = bake(graph_def, names, (LARGEST, "clip_min", "clip_max", "rests", "count"))
    layers = sorted(
        name.split("/weight/")[0].removeprefix(f"{_SCOPE}/") for name in baked.ranges if name.endswith(LARGEST)
    )
    if not layers and not record:
        raise RecordError(f"record file {os.fspath(record_file)} is empty and the graph quantises nothing")
    smaller, plan, complete = smaller_graph(baked, names, record)
    analysis = analyze_graph(smaller, names)
    modes = {name: factor.fakequant_precision_mode for name, factor in record.factors.items()}
    factors = {name: _Writing(smaller, analysis, baked, plan, name).run(modes.get(name)) for name in layers}
    write_bytes(target, smaller.SerializeToString(deterministic=True))
    save_record(replace(complete, factors={**record.factors, **factors}), record_file)


class _Writing:
    """Puts the quantisation of one layer into a graph that is about to be saved."""

    def __init__(self, result: Any, analysis: GraphAnalysis, baked: Baked, plan: Plan, name: str) -> None:
        if name not in analysis.layers:
            raise RecordError(f"layer {name!r} is quantised in the graph, but no output needs it")
        self.result, self.baked, self.plan, self.name = result, baked, plan, name
        self.layer = analysis.layers[name]
        self.place = weight_places(analysis)[name]
        self.nodes = {node.name: node for node in result.node}

    def run(self, mode: str | None) -> QuantFactors:
        """Write it; what the record says of it."""
        low, high = self._range()
        scale = self._weight()
        self._input(low, high)
        step = (high - low) / _LEVELS
        return QuantFactors(
            scale_d=step,
            offset_d=_LOWEST + round(-low / step),
            scale_w=scale,
            offset_w=np.zeros(scale.shape, dtype=np.int32),
            dst_type=f"INT{self._bits}",
            act_type="INT8",
            wts_type=f"INT{self._bits}",
            fakequant_precision_mode=mode,
        )

    def _value(self, part: str) -> np.ndarray | None:
        return self.baked.ranges.get(f"{_SCOPE}/{self.name}/{part}")

    def _range(self) -> tuple[float, float]:
        ends = (self._value(f"input/{part}") for part in ("clip_min", "clip_max", "rests"))
        low, high, rests = (0.0 if value is None else float(value) for value in ends)
        if low == high == 0 and not self.baked.ranges.get(_COUNT, 0):
            raise ModelError(
                f"layer {self.name!r}: its clip range was never calibrated (0 to 0); run at least one training step, "
                "and restore its checkpoint, first"
            )
        low = 0.0 if rests else low
        fault = range_fault(low, high)
        if fault:
            raise ModelError(f"layer {self.name!r}: {fault}")
        return min(low, 0.0), high

    def _weight(self) -> np.ndarray:
        """Integers times scales in place of the constant; float32 scales, one or one for each output."""
        name, axis = self.layer.weight.name, self.layer.out_axis
        node = self.nodes[name]
        value = constant_of(node)
        largest = np.atleast_1d(np.asarray(self._value(f"weight/{LARGEST}"), dtype=np.float32))
        if not np.isfinite(largest).all() or not np.isfinite(value).all():
            raise ModelError(f"layer {self.name!r}: its weight has NaN or infinity: training diverged")
        for one in self.plan.cuts:
            if one.parameter == name and one.axis == axis and len(largest) > 1:
                largest = np.delete(largest, one.removed)
        highest = 2 ** (self._bits - 1) - 1
        scale = (largest / np.float32(highest)).astype(np.float32)
        spread = scale.reshape([-1 if place == axis else 1 for place in range(value.ndim)])
        integers = np.rint(value / spread)
        exact = np.allclose(integers * spread, value, rtol=1e-4, atol=1e-6 * float(largest.max()))
        if np.abs(integers).max(initial=0) > highest or not exact:
            raise ModelError(f"layer {self.name!r}: its weights are no multiples of their scale; freeze the graph anew")
        kind = node.attr["dtype"].type
        self._add(const_node(f"{name}/integers", integers.astype(np.int8)))
        self._add(const_node(f"{name}/scale", spread.astype(value.dtype)))
        cast = tf.compat.v1.NodeDef(name=f"{name}/float", op="Cast", input=[f"{name}/integers"])
        cast.attr["SrcT"].type = tf.int8.as_datatype_enum
        cast.attr["DstT"].type = kind
        self._add(cast)
        node.Clear()
        node.name, node.op = name, "Mul"
        node.input.extend([f"{name}/float", f"{name}/scale"])
        node.attr["T"].type = kind
        return scale

    @property
    def _bits(self) -> int:
        return self.baked.bits.get(self.name, 8)

    def _input(self, low: float, high: float) -> None:
        operator = self.nodes[self.name]
        data = [index for index, name in enumerate(operator.input) if not name.startswith("^")]
        place = data[data_place(self.layer, self.place)]
        scope = f"{self.name}/input_quantised"
        kind = operator.attr["T"].type
        self._add(const_node(f"{scope}/min", np.asarray(low, np.float32)))
        self._add(const_node(f"{scope}/max", np.asarray(high, np.float32)))
        source = operator.input[place]
        single = tf.float32.as_datatype_enum
        if kind != single:
            source = self._cast(f"{scope}/single", source, kind, single)
        fake = tf.compat.v1.NodeDef(
            name=scope, op="FakeQuantWithMinMaxVars", input=[source, f"{scope}/min", f"{scope}/max"]
        )
        fake.attr["num_bits"].i = 8
        fake.attr["narrow_range"].b = False
        self._add(fake)
        operator.input[place] = scope if kind == single else self._cast(f"{scope}/double", scope, single, kind)

    def _cast(self, name: str, source: str, old: int, new: int) -> str:
        node = tf.compat.v1.NodeDef(name=name, op="Cast", input=[source])
        node.attr["SrcT"].type, node.attr["DstT"].type = old, new
        self._add(node)
        return name

    def _add(self, node: Any) -> None:
        added = self.result.node.add()
        added.CopyFrom(node)
        self.nodes[added.name] = added
