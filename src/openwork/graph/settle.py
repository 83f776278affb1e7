"""From labels to units and prune groups.

All unify-pairs go to one connected-components call; a component is a unit. Frozen labels freeze their
component. Rectangular constraints become *blocks*: sets of units from each of which the same number must go.
Everything is array work; there is no loop over channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from openwork.graph.groups import Frozen, IntArray, Member, PruneGroup, Role
from openwork.graph.labels import RIGID, LabelStore

__all__ = ["Settled", "settle"]


@dataclass(frozen=True, eq=False)
class Settled:
    """The resolved labels.

    Attributes:
        component: int64 [labels], the unit of each label over the whole model; 0 is rigid.
        group_of: int64 [components], index of the prune group, -1 for frozen or parameterless components.
        unit_of: int64 [components], unit inside that group.
        block_of: int64 [components], block inside that group.
        frozen_component: bool [components].
        groups: the prune groups.
        frozen: what cannot go, with reasons.
        consumed: bool [owned axes], axes that read channels (for masking).
    """

    component: IntArray
    group_of: IntArray
    unit_of: IntArray
    block_of: IntArray
    frozen_component: np.ndarray
    groups: tuple[PruneGroup, ...]
    frozen: tuple[Frozen, ...]
    consumed: np.ndarray

    def dead_labels(self, removed: dict[int, IntArray]) -> np.ndarray:
        """bool [labels]: which labels die when units `removed[group]` go."""
        dead = np.zeros(len(self.group_of), dtype=bool)
        for index, units in removed.items():
            mask = np.zeros(self.groups[index].units, dtype=bool)
            mask[units] = True
            members = np.flatnonzero(self.group_of == index)
            dead[members] = mask[self.unit_of[members]]
        return dead[self.component]


def _components(store: LabelStore) -> tuple[int, IntArray]:
    first = np.concatenate([a for a, _ in store.pairs]) if store.pairs else np.zeros(0, dtype=np.int64)
    second = np.concatenate([b for _, b in store.pairs]) if store.pairs else np.zeros(0, dtype=np.int64)
    different = first != second
    first, second = first[different], second[different]
    ones = np.ones(len(first), dtype=bool)
    graph = coo_array((ones, (first, second)), shape=(store.count, store.count))
    number, component = connected_components(graph, directed=False)
    # scipy numbers components in order of first appearance, so label 0 (rigid) is component 0.
    return int(number), component.astype(np.int64)


class _Reasons:
    """Which components are frozen, and by which reason first."""

    def __init__(self, number: int) -> None:
        self.texts: list[str] = ["never a channel"]
        self.index = np.full(number, -1, dtype=np.int64)
        self.index[RIGID] = 0

    @property
    def frozen(self) -> np.ndarray:
        return self.index >= 0

    def add(self, components: IntArray, why: str) -> bool:
        new = components[self.index[components] < 0]
        if not len(new):
            return False
        self.texts.append(why)
        self.index[new] = len(self.texts) - 1
        return True

    def add_all(self, parts: list[tuple[IntArray, str]]) -> None:
        """Many at once; a component keeps the first reason given."""
        if not parts:
            return
        first = len(self.texts)
        self.texts += [why for _, why in parts]
        components = np.concatenate([part for part, _ in parts])
        which = np.repeat(np.arange(first, first + len(parts)), [len(part) for part, _ in parts])
        fresh = self.index[components] < 0
        # Written backwards, so that the first reason is the one that stays.
        self.index[components[fresh][::-1]] = which[fresh][::-1]


@dataclass(eq=False)
class _Rows:
    """A constraint after settling: all rows must lose the same number of positions.

    Attributes:
        components: units that sit in one row each.
        rows: their rows.
        weights: positions that one unit of each row takes, by row.
    """

    components: IntArray
    rows: IntArray
    weights: IntArray


def _rows_of(array: IntArray, location: str, whole_rows: bool, reasons: _Reasons) -> _Rows | bool | None:
    """Evaluate one rectangular array of components.

    Returns:
        None if it holds whatever is removed; True if components were frozen (evaluate again); else the rows.
    """
    while whole_rows and array.ndim > 1 and bool((array == array[..., :1]).all()):
        array = array[..., 0]
    if array.ndim < 2:
        return None
    matrix = array.reshape(-1, array.shape[-1])
    if bool((matrix == matrix[:1]).all()):
        return None
    different = dict.fromkeys(row.tobytes() for row in np.ascontiguousarray(matrix))
    matrix = np.frombuffer(b"".join(different), dtype=matrix.dtype).reshape(len(different), -1)
    height, width = matrix.shape
    rows = np.repeat(np.arange(height, dtype=np.int64), width)
    flat = matrix.ravel()
    live = ~reasons.frozen[flat]
    if not whole_rows:
        single_valued = (matrix == matrix[:, :1]).all(axis=1)
        lost = matrix[single_valued, 0]
        lost = lost[~reasons.frozen[lost]]
        if len(lost):
            return reasons.add(lost, f"would leave one of several equal parts empty ({location})")
    key, counts = np.unique(flat[live] * height + rows[live], return_counts=True)
    components, key_rows = key // height, key % height
    unique, start, spread = np.unique(components, return_index=True, return_counts=True)
    single = spread == 1
    # In every row with the same count: the rows stay equal by themselves.
    low = np.minimum.reduceat(counts, start) if len(start) else counts
    high = np.maximum.reduceat(counts, start) if len(start) else counts
    even = (spread == height) & (low == high)
    uneven = unique[~single & ~even]
    if len(uneven):
        return reasons.add(uneven, f"would leave parts of unequal length ({location})")
    alone, alone_rows, alone_counts = unique[single], key_rows[start[single]], counts[start[single]]
    if not len(alone):
        return None
    full_rows = np.bincount(alone_rows, minlength=height)
    if (full_rows == 0).any():
        return reasons.add(alone, f"another part of equal length cannot shrink ({location})")
    # Within a row all units must take the same number of positions; the rare ones are left alone.
    pairs, pair_count = np.unique(alone_rows * (width + 1) + alone_counts, return_counts=True)
    weights = np.zeros(height, dtype=np.int64)
    best = np.zeros(height, dtype=np.int64)
    for pair, number in zip(pairs.tolist(), pair_count.tolist(), strict=True):
        row, weight = divmod(pair, width + 1)
        if number > best[row]:
            weights[row], best[row] = weight, number
    odd = alone[alone_counts != weights[alone_rows]]
    if len(odd):
        return reasons.add(odd, f"would leave parts of unequal length ({location})")
    return _Rows(alone, alone_rows, weights)


def settle(store: LabelStore) -> Settled:
    """Resolve all labels of a traced model."""
    number, component = _components(store)
    reasons = _Reasons(number)
    reasons.add_all([(component[labels], why) for labels, why in store.frozen])
    owner, positions = _owners(store)
    owned_component = component[_owned_labels(store)]
    consumed, produced = _roles(store)
    read = np.zeros(number, dtype=bool)
    read[owned_component[consumed[owner]]] = True
    reasons.add_all([(component[labels][~read[component[labels]]], why) for labels, why in store.judged])
    constraints: list[_Rows] = []
    again = True
    arrays = [(component[labels], location, whole) for labels, location, whole in store.rectangles]
    while again:
        again = False
        constraints = []
        for array, location, whole in arrays:
            found = _rows_of(array, location, whole, reasons)
            if found is True:
                again = True
            elif isinstance(found, _Rows):
                constraints.append(found)
    while True:
        group_of, unit_of, group_count, block_of, steps, bad = _group(
            number, owned_component, owner, constraints, reasons, len(store.owned), produced
        )
        if not len(bad):
            break
        reasons.add(bad, "equal parts are tied in more than one way")
        constraints = [
            rows
            for array, location, whole in arrays
            if isinstance(rows := _rows_of(array, location, whole, reasons), _Rows)
        ]
    _align(store.multiples, component, group_of, block_of, steps)
    groups = _members(
        store, owner, positions, owned_component, group_of, unit_of, group_count, block_of, steps, consumed, produced
    )
    frozen = _frozen(store, owner, owned_component, reasons, group_of)
    return Settled(component, group_of, unit_of, block_of, reasons.frozen, groups, frozen, consumed)


def _owned_labels(store: LabelStore) -> IntArray:
    if not store.owned:
        return np.zeros(0, dtype=np.int64)
    return np.concatenate([np.arange(axis.start, axis.start + axis.size) for axis in store.owned])


def _owners(store: LabelStore) -> tuple[IntArray, IntArray]:
    """For each owned label: index of its axis in ``store.owned``, and its position there."""
    sizes = [axis.size for axis in store.owned]
    owner = np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)
    positions = np.concatenate([np.arange(size, dtype=np.int64) for size in sizes] or [np.zeros(0, np.int64)])
    return owner, positions


def _roles(store: LabelStore) -> tuple[np.ndarray, np.ndarray]:
    consumed = np.zeros(len(store.owned), dtype=bool)
    produced = np.zeros(len(store.owned), dtype=bool)
    by_start = np.argsort([axis.start for axis in store.owned], kind="stable")
    starts = np.array([store.owned[i].start for i in by_start], dtype=np.int64)
    ends = np.array([store.owned[i].start + store.owned[i].size for i in by_start], dtype=np.int64)
    for role, marked in ((Role.CONSUMES, consumed), (Role.PRODUCES, produced)):
        given = [labels for labels, given_role in store.roles if given_role is role]
        if not given or not len(starts):
            continue
        labels = np.concatenate(given)
        place = np.searchsorted(starts, labels, side="right") - 1
        place = place[(place >= 0) & (labels < ends[place])]
        marked[by_start[place]] = True
    return consumed, produced


def _mix(values: IntArray) -> np.ndarray:
    """A 64-bit mixing function (splitmix64, Steele et al. 2014): sums of results serve as set signatures."""
    x = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _group(
    number: int,
    owned_component: IntArray,
    owner: IntArray,
    constraints: list[_Rows],
    reasons: _Reasons,
    axes: int,
    produced: np.ndarray,
) -> tuple[IntArray, IntArray, int, IntArray, list[IntArray], IntArray]:
    """Group components by footprint and ties.

    Returns:
        group_of, unit_of [components], number of groups, block_of [components], steps of each group's blocks,
        and components to be frozen because their constraints contradict (then the rest is void).
    """
    live = ~reasons.frozen[owned_component]
    key, counts = np.unique(owned_component[live] * max(1, axes) + owner[live], return_counts=True)
    components, key_axes = key // max(1, axes), key % max(1, axes)
    signature = np.zeros(number, dtype=np.uint64)
    np.add.at(signature, components, _mix(key_axes * 1_000_003 + counts))
    produces = np.zeros(number, dtype=bool)
    produces[components[produced[key_axes]]] = True
    present = np.unique(components)
    _, class_of_present = np.unique(signature[present], return_inverse=True)
    class_of = np.full(number, -1, dtype=np.int64)
    class_of[present] = class_of_present
    classes = int(class_of_present.max(initial=-1)) + 1
    # Classes tied by a constraint become one group.
    first: list[IntArray] = []
    second: list[IntArray] = []
    block_key = np.zeros(number, dtype=np.uint64)
    for index, rows in enumerate(constraints):
        members = np.unique(class_of[rows.components])
        members = members[members >= 0]
        if len(members) > 1:
            first.append(members[:-1])
            second.append(members[1:])
        np.add.at(block_key, rows.components, _mix(rows.rows + (index + 1) * 1_000_003))
    if first:
        a, b = np.concatenate(first), np.concatenate(second)
        graph = coo_array((np.ones(len(a), dtype=bool), (a, b)), shape=(classes, classes))
        tied_count, tied = connected_components(graph, directed=False)
    else:
        tied_count, tied = classes, np.arange(classes)
    group_of = np.full(number, -1, dtype=np.int64)
    group_of[present] = tied[class_of_present]
    # A group that no weight produces is left alone: nothing would get cheaper by itself.
    has_producer = np.zeros(tied_count, dtype=bool)
    has_producer[group_of[present[produces[present]]]] = True
    lonely = present[~has_producer[group_of[present]]]
    group_of[lonely] = -1
    block_of = np.zeros(number, dtype=np.int64)
    inside = np.flatnonzero(group_of >= 0)
    # Most units are in no constraint: only the others are told apart.
    kind = np.zeros(len(inside), dtype=np.int64)
    bound = np.flatnonzero(block_key[inside])
    kinds, kind[bound] = np.unique(block_key[inside[bound]], return_inverse=True)
    kind[bound] += 1
    pairs, pair_of = np.unique(group_of[inside] * (len(kinds) + 1) + kind, return_inverse=True)
    pair_group = pairs // (len(kinds) + 1)
    offset = np.searchsorted(pair_group, np.arange(tied_count))
    block_of[inside] = pair_of - offset[group_of[inside]]
    void = group_of, block_of, 0, block_of, [block_of]
    held = [rows for rows in constraints if (group_of[rows.components] >= 0).any()]
    for rows in held:
        inside_rows = rows.components[group_of[rows.components] >= 0]
        if len(inside_rows) < len(rows.components):
            return *void, inside_rows
    # Block ids over all groups: rates are solved once for all of them.
    block_count = np.bincount(group_of[inside], weights=None, minlength=tied_count) * 0
    np.maximum.at(block_count, group_of[inside], block_of[inside] + 1)
    block_start = np.concatenate([[0], np.cumsum(block_count)])
    global_block = np.where(group_of >= 0, block_start[group_of] + block_of, -1)
    rates, bad = _rates(held, global_block, int(block_start[-1]))
    if len(bad):
        return *void, bad
    # Number groups by their first appearance in the model, units by component (first appearance as well).
    order = np.full(tied_count, np.iinfo(np.int64).max)
    np.minimum.at(order, group_of[inside], inside)
    ranked = np.argsort(order, kind="stable")
    used = order[ranked] < np.iinfo(np.int64).max
    renumber = np.full(tied_count, -1, dtype=np.int64)
    renumber[ranked[used]] = np.arange(int(used.sum()))
    group_of[inside] = renumber[group_of[inside]]
    unit_of = np.full(number, -1, dtype=np.int64)
    by_group = inside[_stable_order(group_of[inside], int(used.sum()))]
    sorted_groups = group_of[by_group]
    begin = np.searchsorted(sorted_groups, np.arange(int(used.sum())))
    unit_of[by_group] = np.arange(len(by_group)) - begin[sorted_groups]
    steps = [rates[block_start[old] : block_start[old + 1]] for old in ranked[used]]
    return group_of, unit_of, int(used.sum()), block_of, steps, np.zeros(0, dtype=np.int64)


def _rates(constraints: list[_Rows], block_of: IntArray, count: int) -> tuple[IntArray, IntArray]:
    """Units that each block loses in one step, so that in every constraint all rows lose the same.

    A row of n blocks, whose units take w positions each, loses n * w * rate positions.

    Returns:
        rates [blocks], integers as small as possible, and components whose constraints contradict.
    """
    rate: dict[int, Fraction] = {}
    parts = []
    for rows in constraints:
        blocks = block_of[rows.components]
        pairs = np.unique(rows.rows * count + blocks)
        row_of, block = pairs // count, pairs % count
        size = np.bincount(row_of, minlength=len(rows.weights)) * rows.weights
        if len(np.unique(block)) < len(block):
            return np.ones(count, dtype=np.int64), np.unique(rows.components)
        parts.append((block, size[row_of], rows))
    pending = list(parts)
    linked: list[set[int]] = []
    while pending:
        # Constraints that touch a block with a known rate first.
        place = next((i for i, (block, _, _) in enumerate(pending) if any(int(b) in rate for b in block)), 0)
        block, size, rows = pending.pop(place)
        known = next((i for i, b in enumerate(block) if int(b) in rate), None)
        total = Fraction(1) if known is None else rate[int(block[known])] * int(size[known])
        for b, loss in zip(block.tolist(), size.tolist(), strict=True):
            if rate.setdefault(b, total / loss) != total / loss:
                return np.ones(count, dtype=np.int64), np.unique(rows.components)
        linked.append({int(b) for b in block})
    rates = np.ones(count, dtype=np.int64)
    for members in _connected(linked):
        scale = math.lcm(*(rate[b].denominator for b in members))
        whole = [int(rate[b] * scale) for b in members]
        divisor = math.gcd(*whole)
        for b, value in zip(members, whole, strict=True):
            rates[b] = value // divisor
    return rates, np.zeros(0, dtype=np.int64)


def _align(
    multiples: list[tuple[IntArray, int]],
    component: IntArray,
    group_of: IntArray,
    block_of: IntArray,
    steps: list[IntArray],
) -> None:
    """Lengthen the steps of groups until each takes a multiple of the asked number of positions from the axes."""
    for labels, of in multiples:
        units, counts = np.unique(component[labels], return_counts=True)
        live = group_of[units] >= 0
        units, counts = units[live], counts[live]
        for group in np.unique(group_of[units]).tolist():
            inside = group_of[units] == group
            for block in np.unique(block_of[units[inside]]).tolist():
                here = inside & (block_of[units] == block)
                lost = int(np.gcd.reduce(counts[here])) * int(steps[group][block])
                steps[group] = steps[group] * (of // math.gcd(of, lost))


def _connected(sets: list[set[int]]) -> list[list[int]]:
    merged: list[set[int]] = []
    for members in sets:
        touching = [other for other in merged if other & members]
        merged = [other for other in merged if not other & members]
        merged.append(members.union(*touching))
    return [sorted(members) for members in merged]


def _stable_order(values: IntArray, count: int) -> IntArray:
    """A stable argsort of integers below `count`; NumPy sorts short ones by radix."""
    return np.argsort(values.astype(np.int16) if count < 2**15 else values, kind="stable")


def _members(
    store: LabelStore,
    owner: IntArray,
    positions: IntArray,
    owned_component: IntArray,
    group_of: IntArray,
    unit_of: IntArray,
    group_count: int,
    block_of: IntArray,
    steps: list[IntArray],
    consumed: np.ndarray,
    produced: np.ndarray,
) -> tuple[PruneGroup, ...]:
    label_group = group_of[owned_component]
    live = np.flatnonzero(label_group >= 0)
    # Owned labels stand in the order of their axes and positions already.
    order = live[_stable_order(label_group[live], group_count)]
    keys = label_group[order] * max(1, len(store.owned)) + owner[order]
    cuts = np.flatnonzero(np.diff(keys)) + 1
    members: list[list[Member]] = [[] for _ in range(group_count)]
    for part in np.split(order, cuts) if len(order) else []:
        axis_index = int(owner[part[0]])
        axis = store.owned[axis_index]
        role = Role.PRODUCES if produced[axis_index] else Role.CONSUMES if consumed[axis_index] else Role.CARRIES
        members[int(label_group[part[0]])].append(
            Member(
                axis.parameter,
                axis.axis,
                role,
                axis.size,
                positions[part],
                unit_of[owned_component[part]],
                axis.blocks,
                store.layers.get(axis.parameter, ""),
            )
        )
    inside = np.flatnonzero(group_of >= 0)
    by_unit = inside[_stable_order(group_of[inside], group_count)]  # units ascend with components
    bounds = np.searchsorted(group_of[by_unit], np.arange(group_count + 1))
    groups = []
    for index in range(group_count):
        blocks = block_of[by_unit[bounds[index] : bounds[index + 1]]]
        groups.append(PruneGroup(index, len(blocks), tuple(members[index]), blocks, steps[index]))
    return tuple(groups)


def _frozen(
    store: LabelStore, owner: IntArray, owned_component: IntArray, reasons: _Reasons, group_of: IntArray
) -> tuple[Frozen, ...]:
    why = reasons.index[owned_component]
    held = np.flatnonzero((why > 0) & (group_of[owned_component] < 0))
    if not len(held):
        return ()
    axes = max(1, len(store.owned))
    keys, counts = np.unique(why[held] * axes + owner[held], return_counts=True)
    result: dict[str, list[tuple[str, int, int]]] = {}
    for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
        if not reasons.texts[key // axes]:
            continue
        axis = store.owned[key % axes]
        result.setdefault(reasons.texts[key // axes], []).append((axis.parameter, axis.axis, count))
    return tuple(Frozen(reason, tuple(members)) for reason, members in result.items())
