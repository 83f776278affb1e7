"""The answer to: if a channel of this layer goes, what else must go with it, and what may not go at all?"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from openwork.errors import ModelError
from openwork.graph.costs import cost_terms
from openwork.graph.groups import CostTerm, Frozen, IntArray, PruneGroup
from openwork.graph.plan import GroupCut, Repair, group_cut
from openwork.graph.select import lowest
from openwork.graph.settle import Settled, settle
from openwork.torch.layers import certain_repairs, cut_shapes
from openwork.torch.prediction import Prediction
from openwork.torch.recall import Memory
from openwork.torch.repair import Unrepairable, repair
from openwork.torch.structure import Inputs, all_modules, bind_inputs, unwrap
from openwork.torch.surgery import cut_tensor, set_attribute
from openwork.torch.trace import Trace, on_shapes, trace

__all__ = ["Analysis", "analyze"]


@dataclass(eq=False)
class Analysis:
    """Dependencies of a model's channels.

    Attributes:
        model: the model that was analysed (not touched, not copied).
        groups: units that may be removed, see `openwork.graph.groups.PruneGroup`.
        frozen: what may not, with reasons.
        macs: multiply-accumulates of one forward pass with the given inputs.
        params: number of elements of all parameters.
    """

    model: nn.Module
    inputs: Inputs
    trace: Trace
    settled: Settled
    _checked: bool = field(default=False, repr=False)
    _ties: set[tuple[tuple[int, ...], bytes]] = field(default_factory=set, repr=False)

    @cached_property
    def _memory(self) -> Memory:
        return Memory(self.trace)

    @property
    def groups(self) -> tuple[PruneGroup, ...]:
        return self.settled.groups

    @property
    def frozen(self) -> tuple[Frozen, ...]:
        return self.settled.frozen + self._unseen

    @cached_property
    def _unseen(self) -> tuple[Frozen, ...]:
        unseen = [
            (name, 0, int(tensor.shape[0]))
            for name, tensor in self.model.named_parameters()
            if name not in self.trace.parameters and tensor.dim()
        ]
        why = "not run with these inputs; if it reads channels that are pruned it will not fit"
        return (Frozen(why, tuple(unseen)),) if unseen else ()

    @cached_property
    def params(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def macs(self) -> int:
        kept = np.array([group.units for group in self.groups], dtype=np.float64)
        return round(sum(term.value(kept) for term in self.costs if term.kind == "macs"))

    @property
    def costs(self) -> list[CostTerm]:
        """What each operator, parameter and result costs as a function of the units kept in each group."""
        traced = self.trace.parameters
        labels = {name: traced.get(name, values.numel()) for name, values in self.model.named_parameters()}
        return cost_terms(self.trace.records, labels, self.trace.store, self.settled)

    def group_of(self, parameter: str, axis: int = 0) -> PruneGroup | None:
        """The group that an axis of a parameter belongs to."""
        for group in self.groups:
            if any(member.parameter == parameter and member.axis == axis for member in group.members):
                return group
        return None

    def check(self) -> None:
        """Cut part of everything on shapes and freeze what the model's code does not allow.

        Groups lose different shares, so that lengths which the code equates by chance do not stay equal.
        """
        trial = 0
        while not self._checked:
            # All groups, then every other one alone: lengths that only moved together come apart.
            chosen = [group for group in self.groups if trial == 0 or group.index % 2 == trial - 1]
            removed = {}
            for group in chosen:
                steps = max(1, round(group.most_steps * (0.35 + 0.06 * (group.index % 5)))) if group.most_steps else 0
                removed[group.index] = lowest(group, np.zeros(group.units), steps)
            # Where no code sees or states a length that changes, there is nothing to try.
            at_risk = Prediction(self.trace, self.settled.dead_labels(removed)).at_risk()
            if at_risk and self.plan(removed) is None:
                trial = 0
            elif trial == 2 or not self._memory:
                self._checked = True  # without stated lengths, one trial tells all
            else:
                trial += 1

    def plan(self, removed: Mapping[int, IntArray]) -> tuple[tuple[GroupCut, ...], tuple[Repair, ...]] | None:
        """The cuts and repairs when these units of these groups go.

        Returns:
            None if the model's code forbids it: then more is frozen, and groups have changed.
        """
        removed = {index: units for index, units in removed.items() if len(units)}
        cuts = tuple(group_cut(self.groups[index], units) for index, units in sorted(removed.items()))
        by_parameter: dict[str, list[Any]] = {}
        for group in cuts:
            for cut in group.cuts:
                by_parameter.setdefault(cut.parameter, []).append(cut)
        repairs = certain_repairs(self.model, cut_shapes(self.model, by_parameter))
        dead = self.settled.dead_labels(dict(removed))
        prediction = Prediction(self.trace, dead)
        repairs += self._bare_norms(prediction)
        if prediction.at_risk():
            with on_shapes(
                self.model,
                self.inputs,
                self.trace.mode,
                lambda name, tensor: cut_tensor(tensor, by_parameter.get(name, [])),
            ) as (twin, given):
                twin.eval()
                for change in repairs:
                    set_attribute(twin, change)
                try:
                    repairs += repair(twin, given, prediction, self._memory)
                except Unrepairable as failure:
                    self._learn(failure, dead)
                    return None
        return cuts, tuple(_merged(repairs))

    def _bare_norms(self, prediction: Prediction) -> list[Repair]:
        """Norms without parameters state a number of channels that only the trace knows."""
        bare = {
            path: module
            for path, module in all_modules(self.model).items()
            if isinstance(module, nn.modules.batchnorm._NormBase)
            and module.weight is None
            and module.running_mean is None
        }
        repairs = []
        for place, record in enumerate(self.trace.records) if bare else ():
            module = bare.get(record.module)
            if module is None or not record.inputs:
                continue
            was, now = record.inputs[0].shape, prediction.of(place)[0][0]
            axis = next((axis for axis in range(len(was)) if was[axis] != now[axis]), None)
            if axis is not None and was[axis] == module.num_features:
                repairs.append(Repair(record.module, "num_features", was[axis], now[axis]))
                del bare[record.module]
        return repairs

    def _learn(self, failure: Unrepairable, dead: np.ndarray) -> None:
        """Tie or freeze what the model's code does not allow, and settle again."""
        store = self.trace.store
        before = int(self.settled.frozen_component.sum()), len(store.rectangles)
        store.location = ""
        for labels, why in failure.frozen:
            store.freeze(labels, why)
        for labels, why in failure.ties:
            key = labels.shape, labels.tobytes()
            if key in self._ties:
                # Tied before, and still the lengths differ: not this way.
                store.freeze(labels, f"lengths that should be equal differ ({why})")
            else:
                self._ties.add(key)
                store.location = why
                store.rectangular(labels)
        self.settled = settle(store)
        if (int(self.settled.frozen_component.sum()), len(store.rectangles)) == before:
            # No channel can be named as the cause: hold all that change in the module, or around it.
            reason = failure.frozen[0][1] if failure.frozen else failure.ties[0][1]
            module = failure.module
            while True:
                inside = [
                    entry.labels.ravel()
                    for record in self.trace.records
                    if not module or record.module == module or record.module.startswith(module + ".")
                    for tensor in (*record.inputs, *record.outputs)
                    for entry in tensor.entries
                    if dead[entry.labels].any()
                ]
                if inside:
                    store.freeze(np.concatenate(inside), reason)
                    break
                if not module:
                    raise ModelError(f"the pruned model would not run: {reason}")
                module = module.rpartition(".")[0]
            self.settled = settle(store)

    def __str__(self) -> str:
        from rich.console import Console

        from openwork.report.analysis import analysis_table

        stream = io.StringIO()
        Console(file=stream, width=118).print(analysis_table(self, type(self.model).__name__))
        return stream.getvalue().rstrip()


def _merged(repairs: list[Repair]) -> list[Repair]:
    """One repair per attribute, from the first old to the last new value."""
    merged: dict[tuple[str, str], Repair] = {}
    for change in repairs:
        key = change.module, change.attribute
        first = merged.get(key)
        merged[key] = change if first is None else Repair(change.module, change.attribute, first.old, change.new)
    return list(merged.values())


@torch.inference_mode(False)
def analyze(model: nn.Module, inputs: Any) -> Analysis:
    """Find what depends on what in a model, without its weights.

    The model runs once on shapes (meta tensors); neither it nor its weights are touched or copied.

    Args:
        model: any nn.Module; a DataParallel, DistributedDataParallel or compiled wrapper is looked through.
        inputs: what forward takes: a tensor, a tuple of positional arguments, or a dict of keyword arguments.

    Returns:
        The analysis: ``groups`` that may be pruned, ``frozen`` with reasons, ``macs``, ``params``, ``costs``.

    Raises:
        ModelError: the forward fails (says in which module), or returns no tensor.
        UnsupportedModelError: not an nn.Module, or a ScriptModule.
    """
    analysis = _analyze(model, inputs)
    analysis.check()
    return analysis


def _analyze(model: nn.Module, inputs: Any) -> Analysis:
    """An analysis whose groups are not yet tried on the model's code."""
    module = unwrap(model)
    bound = bind_inputs(inputs)
    traced = trace(module, bound)
    return Analysis(module, bound, traced, settle(traced.store))
