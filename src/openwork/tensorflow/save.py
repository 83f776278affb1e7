"""save_prune_retrain_model: from a frozen graph with masks to one that is really smaller."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import tensorflow as tf

from openwork.errors import ConfigError, RecordError, nearest
from openwork.files import check_paths, check_writable, write_bytes
from openwork.graph.groups import IntArray, PruneGroup
from openwork.graph.plan import Plan
from openwork.graph.select import balanced
from openwork.record import ChannelPruneRecord, Record, SelectiveMaskRecord, load_record, save_record
from openwork.retrain.records import plan_records
from openwork.tensorflow.analysis import GraphAnalysis, analyze_graph
from openwork.tensorflow.baking import Baked, bake, without_idle_functions
from openwork.tensorflow.graphs import output_names, read_frozen
from openwork.tensorflow.inserted.channels import group_scope
from openwork.tensorflow.settings import layer_kinds
from openwork.tensorflow.surgery import cut

__all__ = ["removed_units", "save_prune_retrain_model", "saved_path", "smaller_graph"]

_LOG = logging.getLogger("openwork")


def save_prune_retrain_model(
    pb_model: str | os.PathLike[str],
    outputs: Sequence[str],
    record_file: str | os.PathLike[str],
    save_path: str | os.PathLike[str],
) -> None:
    """Write the frozen graph, really cut, to ``<save_path>.pb``; the record gets the masks in force.

    Channels that the masks in the file hold dead are cut out of weights, biases, batch norms and all sizes that the
    graph states; weights under 2:4 get exact zeros; openwork's operators are gone, output names stay. A file without
    masks is cut as the record says. Folders are made; an existing file is replaced with a warning.

    Args:
        pb_model: path of the frozen inference graph, after `create_prune_retrain_model`, restoring and freezing.
        outputs: names of its outputs.
        record_file: what create wrote for it.
        save_path: folder and prefix of the result.

    Raises:
        FileError: no such file, truncated, not frozen; or the result cannot be written.
        ConfigError: an output is not in the graph.
        RecordError: the record is damaged or of another graph.
        ModelError: the graph is inconsistent.
    """
    check_paths(pb_model=pb_model, record_file=record_file, save_path=save_path)
    graph_def = read_frozen(pb_model)
    names = output_names(graph_def, outputs)
    record = load_record(record_file)
    check_writable(record_file, "record_file")
    target = saved_path(save_path)
    if not record:
        raise RecordError(f"record file {os.fspath(record_file)} is empty; it says nothing of this graph")
    baked = bake(graph_def, names)
    smaller, _, complete = smaller_graph(baked, names, record)
    write_bytes(target, smaller.SerializeToString(deterministic=True))
    save_record(complete, record_file)


def saved_path(save_path: str | os.PathLike[str], ending: str = ".pb") -> Path:
    """The file to write.

    Raises:
        ConfigError: no file name in it.
        FileError: it cannot be written.
    """
    text = os.fspath(save_path)
    if not os.path.basename(text):
        raise ConfigError(
            f"save_path is {text!r}; a folder and a file name without ending are needed, e.g. 'out/model'"
        )
    target = Path(text + ending)
    check_writable(target, "save_path")
    if target.exists():
        _LOG.warning("%s exists and is replaced", target)
    return target


def smaller_graph(baked: Baked, outputs: Sequence[str], record: Record) -> tuple[tf.compat.v1.GraphDef, Plan, Record]:
    """Cut a baked graph.

    Args:
        baked: the graph and the masks in force.
        outputs: names of its outputs.
        record: what was to be done.

    Returns:
        the graph, the plan that made it, and the record with the channels and masks in force.

    Raises:
        RecordError: the record is of another graph.
    """
    analysis = analyze_graph(baked.graph_def, outputs)
    removed = removed_units(analysis, record, baked.alive)
    for name in record.masks:
        if name not in analysis.layers:
            raise RecordError(
                f"{record.source}: layer {name!r} is not in the graph; {nearest(name, analysis.layers)} (the record is "
                "of another graph)"
            )
    plan = Plan(analysis.plan(removed))
    smaller = without_idle_functions(cut(baked.graph_def, analysis, plan))
    masks = {name: SelectiveMaskRecord.of(name, mask) for name, mask in baked.masks.items()}
    complete = replace(record, channels=plan_records(plan, layer_kinds(analysis)), masks={**record.masks, **masks})
    return smaller, plan, complete


def removed_units(analysis: GraphAnalysis, record: Record, alive: Mapping[str, np.ndarray]) -> dict[int, IntArray]:
    """Units that go from each group: what the masks in the graph hold dead, else what the record says.

    Raises:
        RecordError: the record is of another graph.
    """
    removed: dict[int, IntArray] = {}
    scopes = {group_scope(group): group for group in analysis.groups}
    for entry in record.channels:
        group, units = _recorded(analysis, entry, record.source)
        mask = alive.get(group_scope(group))
        if mask is not None:
            if len(mask) != group.units:
                raise RecordError(
                    f"{record.source}: {entry.producers[0].name!r} has {group.units} units, its mask {len(mask)}"
                )
            if int((~mask).sum()) != len(units):
                raise RecordError(
                    f"{record.source}: {len(units)} channels of {entry.producers[0].name!r} go, the mask in the graph "
                    f"holds {int((~mask).sum())} dead; the record is of another graph or config"
                )
            units = np.flatnonzero(~mask).astype(np.int64)
        removed[group.index] = units
    for scope in alive:
        group = scopes.get(scope)  # type: ignore[assignment]
        if group is None or group.index not in removed:
            layer = scope.removeprefix("channels/").rpartition("/")[0]
            raise RecordError(f"{record.source}: it says nothing of {layer!r}, which is masked in the graph")
    return removed


def _recorded(analysis: GraphAnalysis, entry: ChannelPruneRecord, source: str) -> tuple[PruneGroup, IntArray]:
    """The group that an entry of a record speaks of, and the units that it removes."""
    node = entry.producers[0]
    found = [
        (group, member)
        for group in analysis.groups
        for member in group.producers
        if member.module == node.name or _weight_name(analysis, node.name) == member.parameter
    ]
    if not found:
        names = {member.module for group in analysis.groups for member in group.producers}
        why = "cannot lose channels" if node.name in analysis.layers else "is not in the graph"
        raise RecordError(
            f"{source}: layer {node.name!r} {why}; {nearest(node.name, names)} (another graph, or cut already)"
        )
    for group, member in found:
        inside = np.isin(node.prune_index, member.positions)
        if node.end > member.size or not inside.all():
            continue
        gone = np.isin(member.positions, node.prune_index)
        units = np.unique(member.units[gone]).astype(np.int64)
        if bool((np.isin(member.units, units) == gone).all()) and balanced(group, units):
            return group, units
    raise RecordError(
        f"{source}: layer {node.name!r}: prune_index does not fit its {found[0][1].size} channels; the record is of "
        "another graph"
    )


def _weight_name(analysis: GraphAnalysis, name: str) -> str | None:
    """The weight of a layer, if there is such a layer."""
    layer = analysis.layers.get(name)
    return None if layer is None else layer.weight.name
