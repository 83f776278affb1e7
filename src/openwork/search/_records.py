"""AMCT's search structures: PruneRecord messages with attributes, and the problem that they describe.

A search record stands for one group: its producers and consumers with their channel ranges. ``producer[0]``
carries ``sensitivity`` (FLOATS, one value for each channel of its range) and ``bitops`` (FLOAT, what removing
one channel saves). ``graph_info`` maps each layer to ``cin``, ``cout``, ``ori_cout`` and ``bitops``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from openwork.config.counting import ALIGNMENT
from openwork.errors import ConfigError
from openwork.graph.groups import AxisSize, CostTerm, IntArray, Member, PruneGroup, Role
from openwork.prototext import load_messages
from openwork.search._problem import SearchGroup, SearchProblem, permitted_widths
from openwork.search.cost import Macs

__all__ = [
    "GROUP",
    "GraphInfo",
    "get_attribute",
    "make_record",
    "masks_of",
    "problem_of_records",
    "refresh_gains",
    "removed_units",
    "set_attribute",
    "shown_member",
    "unit_scores",
]

GraphInfo = MutableMapping[str, MutableMapping[str, float]]

GROUP = "openwork_group"
"""Attribute of ``producer[0]``: the index of the group in the analysis."""

_messages = functools.cache(functools.partial(load_messages, "openwork.record"))
_FIELDS = {1: "f", 2: "i", 3: "s", 4: "floats", 5: "ints", 6: "strings"}


def get_attribute(node: Any, name: str, default: Any = None) -> Any:
    """Value of an attribute of a record's node; lists come as lists, strings as str."""
    for attribute in node.attr:
        if attribute.name == name:
            value = getattr(attribute, _FIELDS[attribute.type])
            if attribute.type == 3:
                return value.decode()
            return list(value) if attribute.type in (4, 5, 6) else value
    return default


def set_attribute(node: Any, name: str, value: Any) -> None:
    """Set an attribute of a record's node; its type is that of the value (float, int, str, list of them)."""
    for attribute in node.attr:
        if attribute.name == name:
            break
    else:
        attribute = node.attr.add()
        attribute.name = name
    for field in _FIELDS.values():
        attribute.ClearField(field)
    if isinstance(value, str):
        attribute.type, attribute.s = 3, value.encode()
    elif isinstance(value, (int, np.integer)):
        attribute.type, attribute.i = 2, int(value)
    elif isinstance(value, (float, np.floating)):
        attribute.type, attribute.f = 1, float(value)
    else:
        values = np.asarray(value)
        whole = values.dtype.kind in "iu"
        attribute.type = 5 if whole else 4
        getattr(attribute, "ints" if whole else "floats").extend(values.tolist())


def shown_member(group: PruneGroup) -> Member:
    """The member that stands for a group in tables and files.

    The first producer along axis 0, as of a convolution or linear layer, rather than an embedding that feeds the
    same stream; else the first producer, else the first member.
    """
    layers = [member for member in group.producers if member.axis == 0]
    return (layers or group.producers or group.members)[0]


def make_record(group: PruneGroup, types: Mapping[str, str] | None = None) -> Any:
    """The search record of a group: its layers with the ranges that their channels span.

    Args:
        group: the group.
        types: type of each module (``Conv``, ``Gemm``, ...), for the attribute ``type``; optional.
    """
    record = _messages()["PruneRecord"]()
    shown = shown_member(group)
    ordered = (shown, *(member for member in group.members if member is not shown))
    seen: set[tuple[str, bool]] = set()
    for member in ordered:
        produces = member is shown or member.role is Role.PRODUCES
        if (member.module, produces) in seen or (member.role is Role.CARRIES and (member.module, True) in seen):
            continue
        seen.add((member.module, produces))
        node = (record.producer if produces else record.consumer).add()
        node.name = member.module
        if types and member.module in types:
            set_attribute(node, "type", types[member.module])
        set_attribute(node, "begin", int(member.positions.min()))
        set_attribute(node, "end", int(member.positions.max()) + 1)
        if produces and group.blocks > 1:
            set_attribute(node, "prune_group", group.blocks)
    set_attribute(record.producer[0], GROUP, group.index)
    return record


def unit_scores(record: Any, group: PruneGroup | None = None) -> npt.NDArray[np.float64]:
    """The sensitivity of each unit, summed from the channels of ``producer[0]``.

    Raises:
        ConfigError: the attribute is missing, has the wrong length, or a value is NaN or infinite.
    """
    node = record.producer[0]
    begin, end = get_attribute(node, "begin", 0), get_attribute(node, "end", 0)
    values = get_attribute(node, "sensitivity")
    if values is None:
        raise ConfigError(
            f"sensitivity of layer {node.name!r} was not set; get_sensitivity must set the attribute "
            "'sensitivity' on producer[0] of every record"
        )
    scores = np.asarray(values, dtype=np.float64)
    if len(scores) != end - begin:
        raise ConfigError(
            f"sensitivity of layer {node.name!r} has {len(scores)} values; {end - begin} are needed, one for "
            f"each channel from {begin} to {end - 1}"
        )
    bad = np.flatnonzero(~np.isfinite(scores))
    if len(bad):
        raise ConfigError(
            f"sensitivity of layer {node.name!r}, channel {begin + bad[0]}, is {scores[bad[0]]}; "
            "finite numbers are needed"
        )
    if group is None:
        return scores
    member = shown_member(group)
    sums = np.bincount(member.units, weights=scores[member.positions - begin], minlength=group.units)
    return np.asarray(sums, dtype=np.float64)


def spread(group: PruneGroup, scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Per-channel values of ``producer[0]`` whose sums over each unit are `scores`; 0 for other channels."""
    member = shown_member(group)
    begin, end = int(member.positions.min()), int(member.positions.max()) + 1
    values = np.zeros(end - begin)
    share = np.bincount(member.units, minlength=group.units)
    values[member.positions - begin] = (scores / np.maximum(share, 1))[member.units]
    return values


def masks_of(
    groups: Iterable[tuple[Any, PruneGroup | None, IntArray]], graph_info: Mapping[str, Mapping[str, float]]
) -> dict[str, list[int]]:
    """AMCT's answer: for each producer, 1 for a channel that stays, 0 for one that goes.

    Args:
        groups: record, its group if there is one, and the removed units.
        graph_info: gives the channels of each layer (``ori_cout``).
    """
    masks: dict[str, list[int]] = {}
    for record, group, removed in groups:
        gone = set(removed.tolist())
        for node in record.producer:
            end = get_attribute(node, "end", 0)
            info = graph_info.get(node.name, {})
            mask = masks.setdefault(node.name, [1] * int(info.get("ori_cout", info.get("cout", end))))
            if group is None:
                begin = get_attribute(node, "begin", 0)
                positions = [begin + unit for unit in gone]
            else:
                positions = [
                    int(position)
                    for member in group.members
                    if member.module == node.name and (member.role is Role.PRODUCES or member is shown_member(group))
                    for position, unit in zip(member.positions.tolist(), member.units.tolist(), strict=True)
                    if unit in gone
                ]
            for position in positions:
                mask[position] = 0
    return masks


def removed_units(record: Any, group: PruneGroup, masks: Mapping[str, Sequence[int]]) -> IntArray:
    """The units that a mask removes, from ``producer[0]``'s layer.

    A unit goes when all its channels go; from the blocks go as many whole steps as all of them can take, so
    whatever an algorithm answers, the model stays whole.

    Raises:
        ConfigError: the layer is missing, or the mask's length or values are wrong.
    """
    member = shown_member(group)
    name = record.producer[0].name
    if name not in masks:
        raise ConfigError(f"channel_prune_search gave no channels for layer {name!r}")
    mask = np.asarray(masks[name])
    if len(mask) <= int(member.positions.max()) or not np.isin(mask, (0, 1)).all():
        raise ConfigError(
            f"channel_prune_search: layer {name!r} needs a list of 0 and 1 for its {member.size} channels, "
            f"got {len(mask)} values"
        )
    stays = np.bincount(member.units, weights=mask[member.positions], minlength=group.units) > 0
    removed = np.flatnonzero(~stays)
    counts = np.bincount(group.block_of[removed], minlength=group.blocks)
    most = min(int((counts // group.steps).min()), group.most_steps)
    chosen = [removed[group.block_of[removed] == block][: most * int(step)] for block, step in enumerate(group.steps)]
    return np.sort(np.concatenate(chosen)).astype(np.int64)


def refresh_gains(graph_info: Mapping[str, Mapping[str, float]], search_records: Sequence[Any]) -> None:
    """Set ``bitops`` of each record: what one channel costs in all its producers and consumers now."""
    for record in search_records:
        gain = 0.0
        for nodes, key in ((record.producer, "cout"), (record.consumer, "cin")):
            for node in nodes:
                info = graph_info.get(node.name)
                if info and info.get(key):
                    gain += info["bitops"] / info[key]
        set_attribute(record.producer[0], "bitops", float(gain))


def problem_of_records(
    graph_info: Mapping[str, Mapping[str, float]],
    search_records: Sequence[Any],
    prune_config: tuple[float, bool, float],
) -> SearchProblem:
    """The search problem that AMCT's structures describe by themselves.

    A layer costs its bit operations times the shares of input and output channels that are left.
    """
    compress_ratio, aligned, max_prune_ratio = prune_config
    ranges: dict[tuple[str, str], list[tuple[int, float]]] = {}
    groups = []
    for index, record in enumerate(search_records):
        scores = unit_scores(record)
        for nodes, side in ((record.producer, "cout"), (record.consumer, "cin")):
            for node in nodes:
                span = get_attribute(node, "end", 0) - get_attribute(node, "begin", 0)
                ranges.setdefault((node.name, side), []).append((index, span / len(scores)))
        blocks = get_attribute(record.producer[0], "prune_group", 1)
        widths = permitted_widths(len(scores), blocks, 1, ALIGNMENT if aligned else 1, max_prune_ratio)
        block_of = np.arange(len(scores)) // (len(scores) // blocks)
        groups.append(SearchGroup(index, record.producer[0].name, scores, block_of, widths))
    units = [group.units for group in groups]
    terms = []
    for name, info in graph_info.items():
        axes = []
        for side in ("cin", "cout"):
            parts = tuple(ranges.get((name, side), ()))
            moving = sum(share * units[index] for index, share in parts)
            axes.append(AxisSize(max(0.0, info[side] - moving), parts))
        constant = info["bitops"] / (info["cin"] * info["cout"])
        terms.append(CostTerm("macs", name, "", constant, tuple(axes)))
    return SearchProblem(tuple(groups), Macs(terms), tuple(units), compress_ratio)
