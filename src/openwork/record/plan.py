"""A whole prune plan inside a record.

AMCT's nodes say which channels of which layers went, along the one axis that it cuts. A plan touches any axis
of any parameter and repairs attributes of modules. So the first producer of each group carries one more string
attribute, ``openwork_plan``: JSON with all cuts of the group; equal sets of positions are stored once, as
ranges. The first group also carries ``openwork_repairs``. AMCT looks attributes up by name and passes over both.

JSON of a group::

    {"version": 1, "groups": 2, "index": 0, "before": 64, "after": 48, "blocks": 1, "removed": ["0-3,7-18"],
     "cuts": [["conv1.weight", 0, "produces", 64, 1, 0, 64, 0], ...]}

``groups`` is the number of groups of the plan, so that a missing one is noticed; a cut is parameter, axis, role,
size, blocks, begin, end, number of its set in ``removed``, and the layer where parameter names do not say it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from openwork.errors import RecordError
from openwork.indices import format_ranges, parse_ranges
from openwork.record.channels import ChannelPruneRecord, PruneNode

__all__ = ["LayerKind", "PlanCut", "PlanGroup", "PlanRepair", "decode_plan", "encode_plan"]

PLAN = "openwork_plan"
REPAIRS = "openwork_repairs"
_VERSION = 1
_ROLES = ("produces", "consumes", "carries")
_TUPLE = "tuple"


@dataclass(frozen=True, eq=False)
class PlanCut:
    """Positions removed from one axis of one parameter or buffer.

    Attributes:
        parameter: qualified name.
        axis: the axis.
        role: ``produces``, ``consumes`` or ``carries``.
        size: length of the channel axis before; for the inputs of a grouped convolution those of the layer.
        blocks: equal consecutive blocks of `size`, each of which loses the same number.
        removed: int64, ascending, in ``begin..end-1``.
        begin, end: the range that the group's channels span on this axis; `end` None: `size`.
        layer: name of the layer, where parameter names do not say it.
    """

    parameter: str
    axis: int
    role: str
    size: int
    blocks: int
    removed: npt.NDArray[np.int64]
    begin: int = 0
    end: int | None = None
    layer: str = ""

    @property
    def module(self) -> str:
        """Path of the module (name of the layer) that owns the parameter."""
        return self.layer or self.parameter.rpartition(".")[0]


@dataclass(frozen=True, eq=False)
class PlanGroup:
    """What one group lost.

    Attributes:
        index: the group's number in the analysis.
        units_before, units_after: channels (units) of the group.
        cuts: everything that shrinks with it; plain tuples in the order of `PlanCut` will do.
        blocks: blocks that each lose the same number of units.
    """

    index: int
    units_before: int
    units_after: int
    cuts: Sequence[PlanCut | tuple[Any, ...]]
    blocks: int = 1


@dataclass(frozen=True)
class PlanRepair:
    """An attribute of a module that holds a size.

    Attributes:
        module: module path; empty for the root.
        attribute: the attribute's name.
        old, new: its value before and after: None, bool, int, float, str, and lists and tuples of them.
    """

    module: str
    attribute: str
    old: Any
    new: Any


class LayerKind(NamedTuple):
    """What a module is to AMCT.

    Attributes:
        type: ONNX operator type.
        group: groups of a convolution.
    """

    type: str
    group: int = 1


def encode_plan(
    groups: Iterable[PlanGroup | Mapping[str, Any]],
    repairs: Iterable[PlanRepair | tuple[str, str, Any, Any]],
    kinds: Mapping[str, LayerKind],
) -> list[ChannelPruneRecord]:
    """A plan as records that AMCT reads too.

    A module in `kinds` becomes a producer where one of its parameters produces the group's channels, a consumer
    where one consumes them, or where it only carries them (batch norms, depthwise convolutions). A group in
    which AMCT would see no producer gets its first module as one.

    Args:
        groups: the groups, in the order in which they are to be applied.
        repairs: the repaired attributes.
        kinds: the modules that AMCT knows, by path.

    Returns:
        One record for each group.

    Raises:
        RecordError: a cut is impossible, or a repaired value cannot be written.
    """
    plan = [group if isinstance(group, PlanGroup) else PlanGroup(**group) for group in groups]
    records = []
    for number, group in enumerate(plan):
        cuts = _cuts(group)
        extra = {PLAN: _group_json(group, cuts, len(plan))}
        if number == 0:
            items = (item if isinstance(item, PlanRepair) else PlanRepair(*item) for item in repairs)
            extra[REPAIRS] = _compact([[i.module, i.attribute, _pack(i.old), _pack(i.new)] for i in items])
        records.append(_amct_record(group, cuts, kinds).with_extra(extra))
    return records


def decode_plan(
    records: Sequence[ChannelPruneRecord], source: str = "record"
) -> tuple[list[PlanGroup], list[PlanRepair]] | None:
    """The plan that `encode_plan` put into records.

    Args:
        records: ``Record.channels``.
        source: the record's file, for messages.

    Returns:
        Groups and repairs; None when the records hold no plan (AMCT wrote them).

    Raises:
        RecordError: part of the plan is missing, damaged, or contradicts the nodes beside it.
    """
    texts = [record.producers[0].extra.get(PLAN) for record in records]
    if all(text is None for text in texts):
        return None
    groups: list[PlanGroup] = []
    for number, (record, text) in enumerate(zip(records, texts, strict=True)):
        where = f"{source}: prune_record[{number}].producer[0] {record.producers[0].name!r}: {PLAN}"
        group = _read_group(_json(text, where), where, len(records))
        _compare(record, group, where)
        groups.append(group)
    where = f"{source}: prune_record[0].producer[0]: {REPAIRS}"
    repairs = []
    for item in _expect(_json(records[0].producers[0].extra.get(REPAIRS), where), list, where):
        module, attribute, old, new = _expect(item, list, where, length=4)
        _expect(module, str, where)
        _expect(attribute, str, where)
        repairs.append(PlanRepair(module, attribute, _unpack(old, where), _unpack(new, where)))
    return groups, repairs


def _cuts(group: PlanGroup) -> list[PlanCut]:
    return [cut if isinstance(cut, PlanCut) else PlanCut(*cut) for cut in group.cuts]


def _group_json(group: PlanGroup, cuts: Sequence[PlanCut], count: int) -> str:
    sets: dict[str, int] = {}
    rows = []
    for cut in cuts:
        end = cut.size if cut.end is None else cut.end
        try:
            ranges = format_ranges(cut.removed)
            _check_cut(replace(cut, end=end), np.asarray(cut.removed))
        except ValueError as error:
            raise RecordError(f"{cut.parameter!r}, axis {cut.axis}: {error}") from error
        number = sets.setdefault(ranges, len(sets))
        row = [cut.parameter, cut.axis, str(cut.role), cut.size, cut.blocks, cut.begin, end, number]
        rows.append([*row, cut.layer] if cut.layer else row)
    return _compact(
        {
            "version": _VERSION,
            "groups": count,
            "index": group.index,
            "before": group.units_before,
            "after": group.units_after,
            "blocks": group.blocks,
            "removed": list(sets),
            "cuts": rows,
        }
    )


def _check_cut(cut: PlanCut, removed: npt.NDArray[np.int64]) -> None:
    end = cut.size if cut.end is None else cut.end
    if cut.role not in _ROLES:
        raise ValueError(f"role is {cut.role!r}; allowed: {', '.join(_ROLES)}")
    if cut.axis < 0 or not 0 <= cut.begin < end <= cut.size:
        raise ValueError(f"axis {cut.axis}, range {cut.begin} to {end} do not fit size {cut.size}")
    if cut.blocks < 1 or cut.size % cut.blocks:
        raise ValueError(f"blocks is {cut.blocks}; it must divide {cut.size}")
    if len(removed) and not (cut.begin <= removed[0] and removed[-1] < end):
        raise ValueError(f"positions {removed[0]} to {removed[-1]} are not in {cut.begin} to {end - 1}")


def _read_group(content: Any, where: str, count: int) -> PlanGroup:
    data = _expect(content, dict, where)
    if data.get("version") != _VERSION:
        raise RecordError(f"{where}: version is {data.get('version')!r}; this openwork reads {_VERSION}")
    numbers = {}
    for key in ("groups", "index", "before", "after", "blocks"):
        numbers[key] = _expect(data.get(key), int, f"{where}: {key}")
    if numbers["groups"] != count:
        raise RecordError(f"{where}: the plan has {numbers['groups']} groups, the record {count}; it is not whole")
    if not 1 <= numbers["after"] <= numbers["before"] or numbers["index"] < 0 or numbers["blocks"] < 1:
        raise RecordError(f"{where}: sizes are impossible: {numbers}")
    sets = [_expect(text, str, where) for text in _expect(data.get("removed"), list, where)]
    decoded: dict[tuple[int, int], npt.NDArray[np.int64]] = {}
    cuts = []
    for row in _expect(data.get("cuts"), list, where):
        named = isinstance(row, list) and len(row) == 9
        *row, layer = row if named else [*_expect(row, list, where, length=8), ""]
        parameter, axis, role, size, blocks, begin, end, number = row
        _expect(parameter, str, where)
        _expect(layer, str, where)
        for value in (axis, size, blocks, begin, end, number):
            _expect(value, int, where)
        if not 0 <= number < len(sets):
            raise RecordError(f"{where}: {parameter!r}: set {number} of positions does not exist")
        try:
            if (number, size) not in decoded:
                decoded[number, size] = parse_ranges(sets[number], size)
            cut = PlanCut(parameter, axis, role, size, blocks, decoded[number, size], begin, end, layer)
            _check_cut(cut, cut.removed)
        except ValueError as error:
            raise RecordError(f"{where}: {parameter!r}: {error}") from error
        cuts.append(cut)
    return PlanGroup(numbers["index"], numbers["before"], numbers["after"], cuts, numbers["blocks"])


def _amct_record(group: PlanGroup, cuts: Sequence[PlanCut], kinds: Mapping[str, LayerKind]) -> ChannelPruneRecord:
    producers: dict[str, PruneNode] = {}
    consumers: dict[str, PruneNode] = {}
    carriers: dict[str, PruneNode] = {}
    sides = {"produces": producers, "consumes": consumers, "carries": carriers}
    for cut in cuts:
        module = cut.module
        if module in kinds:
            sides[cut.role].setdefault(module, _node(module, kinds[module], cut, group))
    # A layer that makes channels carries them too, in its bias; it is listed once.
    readers = {**{name: node for name, node in carriers.items() if name not in producers}, **consumers}
    if not producers:
        if readers:
            first = next(iter(readers))
            producers[first] = readers.pop(first)
        elif cuts:
            cut = next((cut for cut in cuts if cut.role == "produces"), cuts[0])
            # The root module's own parameter has no module path; its own name stands for it.
            module = cut.module or cut.parameter
            producers[module] = _node(module, LayerKind("Parameter"), cut, group)
    return ChannelPruneRecord(tuple(producers.values()), tuple(readers.values()))


def _node(module: str, kind: LayerKind, cut: PlanCut, group: PlanGroup) -> PruneNode:
    return PruneNode(
        name=module,
        type=kind.type,
        begin=cut.begin,
        end=cut.size if cut.end is None else cut.end,
        prune_index=cut.removed,
        group=kind.group if kind.group > 1 else None,
        prune_group=group.blocks if group.blocks > 1 and cut.role == "produces" else None,
    )


def _compare(record: ChannelPruneRecord, group: PlanGroup, where: str) -> None:
    """Someone may have edited the nodes by hand; the plan must not silently win."""
    cuts: dict[str, list[PlanCut]] = {}
    for cut in _cuts(group):
        cuts.setdefault(cut.module or cut.parameter, []).append(cut)
    for node in record.nodes:
        candidates = cuts.get(node.name, [])
        if not any(np.array_equal(cut.removed, node.prune_index) for cut in candidates):
            raise RecordError(f"{where}: prune_index of {node.name!r} differs from it; edit both or neither")


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _json(text: Any, where: str) -> Any:
    if not isinstance(text, str):
        raise RecordError(f"{where} is missing; it is required in every group of the plan")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{where} is not JSON: {error}") from error


def _expect(value: Any, kind: type, where: str, length: int | None = None) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise RecordError(f"{where}: {str(value)[:60]!r} found where {kind.__name__} is needed")
    if isinstance(value, list) and length not in (None, len(value)):
        raise RecordError(f"{where}: {len(value)} values found where {length} are needed")
    return value


def _pack(value: Any) -> Any:
    """JSON for an attribute's value; tuples are marked, as JSON has only lists."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return {_TUPLE: [_pack(item) for item in value]}
    if isinstance(value, list):
        return [_pack(item) for item in value]
    raise RecordError(f"a repaired attribute holds a {type(value).__name__}, which cannot be written to a record")


def _unpack(value: Any, where: str) -> Any:
    if isinstance(value, dict):
        if list(value) != [_TUPLE]:
            raise RecordError(f"{where}: {str(value)[:60]!r} is no attribute's value")
        return tuple(_unpack(item, where) for item in _expect(value[_TUPLE], list, where))
    if isinstance(value, list):
        return [_unpack(item, where) for item in value]
    return value
