"""The frame of auto_channel_prune_search, whatever the framework: what is searched, the search, report and config."""

from __future__ import annotations

import inspect
import io
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from openwork import importance as criteria
from openwork.config import ALIGNMENT, AutoPruneConfig, ChannelSetting, LayerSetting, RetrainConfig
from openwork.errors import ConfigError, NothingToPruneError, OpenworkError, nearest
from openwork.files import check_paths, check_writable, write_text
from openwork.graph.groups import CostTerm, Frozen, IntArray, PruneGroup
from openwork.graph.select import lowest, removable
from openwork.importance import ArraySource
from openwork.report import SearchReport, print_table, search_table, write_html
from openwork.retrain.progress import shown_progress, timed
from openwork.retrain.writing import config_text
from openwork.search import (
    SearchChannelBase,
    SearchGroup,
    SearchProblem,
    SensitivityBase,
    Solution,
    group_widths,
    make_record,
    set_attribute,
)
from openwork.search._records import GraphInfo, removed_units, shown_member, unit_scores
from openwork.search.cost import CostModel

__all__ = ["Found", "Subject", "check_outputs", "find_sensitivity", "per_sample", "publish", "run_search", "set_up"]

_LOG = logging.getLogger("openwork")
_PROBE = ChannelSetting(0.5)


def find_sensitivity(
    sensitivity: str | type[SensitivityBase] | SensitivityBase, modules: Mapping[str, str]
) -> SensitivityBase:
    """The sensitivity of that name; a class is instantiated, an object is returned as it is.

    Args:
        sensitivity: name, class or object.
        modules: the module that defines each built-in sensitivity, by name.

    Raises:
        ConfigError: no sensitivity has that name, or the object lacks a method.
    """
    if isinstance(sensitivity, str):
        if sensitivity not in modules:
            raise ConfigError(f"sensitivity {sensitivity!r} is unknown; {nearest(sensitivity, modules)}")
        module = __import__(modules[sensitivity], fromlist=[sensitivity])
        built: SensitivityBase = getattr(module, sensitivity)()
        return built
    if isinstance(sensitivity, type):
        sensitivity = sensitivity()
    for method in ("setup_initialization", "get_sensitivity"):
        if not callable(getattr(sensitivity, method, None)):
            raise ConfigError(f"sensitivity {sensitivity!r} has no method {method}")
    return sensitivity


@dataclass(frozen=True, eq=False)
class Subject:
    """An analysed model, as the search sees it.

    Attributes:
        name: of the model, for the report.
        groups: what may be pruned.
        frozen: what may not.
        settings: what a config says of each layer.
        weights: arrays by parameter name.
        order: layers in the model's order.
        types: operator type of layers, for the records.
        graph: the first half of ``graph_tuple`` that sensitivities get.
        info: its second half.
        terms: what everything costs, of one sample.
    """

    name: str
    groups: Sequence[PruneGroup]
    frozen: Sequence[Frozen]
    settings: Callable[[RetrainConfig], Mapping[str, LayerSetting]]
    weights: ArraySource
    order: Sequence[str]
    types: Mapping[str, str]
    graph: Any
    info: GraphInfo
    terms: Sequence[CostTerm]


@dataclass(frozen=True, eq=False)
class Found:
    """What a search found.

    Attributes:
        report: everything for people.
        text: the config that prunes so.
        removed: units to remove, by group; those of the override file included.
    """

    report: SearchReport
    text: str
    removed: dict[int, IntArray]


@dataclass
class _Space:
    """What may be searched in an analysed model.

    Attributes:
        searched: groups whose width is searched.
        fixed: group index -> units that the override file's ratios remove.
        layers: output channels of every layer that a config may prune.
        left_alone: (layer, why) of what is not searched.
    """

    searched: list[PruneGroup] = field(default_factory=list)
    fixed: dict[int, IntArray] = field(default_factory=dict)
    layers: dict[str, int] = field(default_factory=dict)
    left_alone: list[tuple[str, str]] = field(default_factory=list)


def run_search(
    subject: Subject,
    settings: AutoPruneConfig,
    cost: CostModel,
    input_data: Any,
    scorer: SensitivityBase,
    algorithm: SearchChannelBase,
    seconds: dict[str, float],
    output_nodes: Any = None,
    show: bool = True,
) -> Found:
    """One search.

    Args:
        subject: the model.
        settings: the config of the search.
        cost: what is to be reduced.
        input_data: calibration data, for the sensitivity.
        scorer, algorithm: the sensitivity and the search.
        seconds: how long each phase took; added to.
        output_nodes: outputs of the graph, for the sensitivity (TensorFlow only).
        show: whether this process may draw progress bars.

    Raises:
        ConfigError, NothingToPruneError, WeightsError: as ``auto_channel_prune_search``.
    """
    space = _space(subject, settings)
    groups = subject.groups
    units = [group.units for group in groups]
    records = [make_record(group, subject.types) for group in space.searched]
    start = [count - len(space.fixed.get(index, ())) for index, count in enumerate(units)]
    _set_gains(records, space.searched, cost, start)
    with timed(seconds, "sensitivity"), shown_progress("sensitivity", show) as progress:
        if hasattr(scorer, "progress"):
            scorer.progress = progress
        set_up(scorer, (subject.graph, subject.info), input_data, settings.test_iteration, output_nodes)
        scorer.get_sensitivity(records)
    problem = SearchProblem(
        tuple(
            _search_group(group, unit_scores(record, group), settings, scorer, number)
            for number, (record, group) in enumerate(zip(records, space.searched, strict=True))
        ),
        cost,
        tuple(units),
        settings.compress_ratio,
        tuple(start),
    )
    if problem.cost.total(start) <= problem.budget:
        _LOG.info("the ratios of the override file alone reach the target")
    with timed(seconds, "search"), shown_progress("search", show, settings.compress_ratio) as progress:
        algorithm.problem = problem
        if hasattr(algorithm, "progress"):
            algorithm.progress = progress
        wanted = (settings.compress_ratio, settings.ascend_optimized, settings.max_prune_ratio)
        masks = algorithm.channel_prune_search(subject.info, records, wanted)
    removed = dict(space.fixed)
    chosen: dict[int, IntArray] = {}
    for record, group in zip(records, space.searched, strict=True):
        gone = removed_units(record, group, masks)
        if len(gone):
            chosen[group.index] = gone
    removed.update(chosen)
    solution, shown = _solution(problem, chosen, algorithm)
    report = SearchReport(
        model=subject.name,
        problem=shown,
        solution=solution,
        sensitivity=type(scorer).__name__,
        algorithm=type(algorithm).__name__,
        tied={group.index: _tied(group) for group in space.searched},
        channels={group.index: max(1, round(shown_member(group).multiplicity)) for group in space.searched},
        seconds=seconds,
        frozen=[*space.left_alone, *((_touched(frozen), frozen.reason) for frozen in subject.frozen)],
        warnings=_warnings(problem, solution, settings),
    )
    text = config_text(settings.override, space.layers, space.searched, chosen, settings.ascend_optimized)
    return Found(report, text, removed)


def check_outputs(config: str | os.PathLike[str], output_cfg: str | os.PathLike[str]) -> None:
    """Raise before the work if its results could not be written.

    Raises:
        ConfigError: the output is the search's own config.
        FileError: the config or the report beside it cannot be written.
    """
    check_paths(config=config, output_cfg=output_cfg)
    if os.path.realpath(output_cfg) == os.path.realpath(config):
        raise ConfigError(f"output_cfg {output_cfg} is the search's own config; give another file")
    check_writable(output_cfg, "output_cfg")
    check_writable(Path(output_cfg).parent / "report.html", "report")


def publish(found: Found, settings: AutoPruneConfig, output_cfg: str | os.PathLike[str], write: bool = True) -> None:
    """Say what was found; write the config and ``report.html`` beside it.

    Args:
        found: what the search found.
        settings: the config of the search.
        output_cfg: path of the config.
        write: whether this process writes.

    Raises:
        FileError: a file cannot be written.
    """
    report = found.report
    _LOG.info(
        "search: %s compressed %.3f times (asked for %g)",
        report.problem.cost.unit,
        report.solution.ratio,
        settings.compress_ratio,
    )
    for warning in report.warnings:
        _LOG.warning(warning)
    if not write:
        return
    write_text(output_cfg, found.text)
    _show(report)
    try:
        write_html(report, Path(output_cfg).parent / "report.html")
    except OpenworkError as error:
        if isinstance(error, OSError):
            raise
        _LOG.warning("%s", error)


def _space(subject: Subject, settings: AutoPruneConfig) -> _Space:
    """Sort the groups into searched, fixed by the override file, and left alone."""
    # A global setting marks what a global prune_config would reach; overrides and skips stand out against it.
    probe = replace(settings.override, prune_config=_PROBE)
    resolved = subject.settings(probe)
    space = _Space()
    weights = subject.weights
    criterion = criteria.get("balanced_l2")
    for group in subject.groups:
        said = {member.module: resolved[member.module] for member in group.producers if member.module in resolved}
        layers = [name for name, setting in said.items() if setting.channels is not None]
        for member in group.producers:
            if member.module in layers:
                space.layers[member.module] = member.size
        skipped = [name for name, setting in said.items() if "skip" in setting.reason.partition(" ")[0]]
        name = shown_member(group).module
        if skipped:
            space.left_alone.append((name, f"{skipped[0]}: {said[skipped[0]].reason}"))
            continue
        if not layers:
            reason = next((s.reason for s in said.values()), "no layer makes these channels")
            space.left_alone.append((name, reason))
            continue
        asked = [
            setting.channels
            for setting in said.values()
            if setting.channels is not None and setting.channels is not _PROBE
        ]
        if asked:
            ratio = min(setting.ratio for setting in asked)
            aligned = any(setting.aligned for setting in asked)
            count = removable(group, ratio, ALIGNMENT if aligned else 1)
            space.fixed[group.index] = lowest(group, np.asarray(criterion.score(group, weights)), count)
            space.left_alone.append((name, f"prune_ratio {ratio:g} in the override file"))
            continue
        space.searched.append(group)
    order = {name: number for number, name in enumerate(subject.order)}
    space.layers = dict(sorted(space.layers.items(), key=lambda item: order.get(item[0], 0)))
    if not space.searched:
        reasons = "; ".join(dict.fromkeys(f"{name}: {why}" for name, why in space.left_alone[:3]))
        frozen = subject.frozen[0].reason if subject.frozen else "it has no weights"
        raise NothingToPruneError(f"{settings.source}: nothing is left to search ({reasons or frozen})")
    return space


def _search_group(
    group: PruneGroup, scores: np.ndarray, settings: AutoPruneConfig, scorer: SensitivityBase, number: int
) -> SearchGroup:
    widths = group_widths(group, ALIGNMENT if settings.ascend_optimized else 1, settings.max_prune_ratio)
    name = shown_member(group).module
    # A class that only has the two methods is welcome too.
    rankings = getattr(scorer, "rankings", None)
    return SearchGroup(
        group.index,
        name,
        scores,
        group.block_of,
        widths,
        source=group,
        steps=group.steps,
        score_order=getattr(scorer, "score_order", 1),
        ranks=None if rankings is None else rankings[number],
    )


def _solution(
    problem: SearchProblem, chosen: Mapping[int, IntArray], algorithm: SearchChannelBase
) -> tuple[Solution, SearchProblem]:
    """The solution as the algorithm's own scores see it, and that problem; or worked out from the units."""
    kept = list(problem.start)
    for index, gone in chosen.items():
        kept[index] -= len(gone)
    solved = getattr(algorithm, "solved", None)
    found = algorithm.solution
    if isinstance(solved, SearchProblem) and found is not None and tuple(kept) == found.kept:
        return found, solved
    cost = problem.cost.total(kept)
    losses = {g.index: float(g.scores[chosen[g.index]].sum()) if g.index in chosen else 0.0 for g in problem.groups}
    groups = tuple(
        # An algorithm may choose a width that the rules do not name; the report shows it all the same.
        replace(group, widths=tuple(sorted({*group.widths, kept[group.index]}, reverse=True)))
        for group in problem.groups
    )
    reached = cost <= problem.budget * (1 + 1e-9)
    solution = Solution(tuple(kept), dict(chosen), losses, cost, problem.full_cost, reached)
    return solution, replace(problem, groups=groups)


def _warnings(problem: SearchProblem, solution: Solution, settings: AutoPruneConfig) -> list[str]:
    if solution.reached:
        return []
    most = problem.full_cost / problem.least_cost if problem.least_cost else float("inf")
    limits = [
        f"max_prune_ratio {settings.max_prune_ratio:g}" if settings.max_prune_ratio < 1 else "",
        "ascend_optimized" if settings.ascend_optimized else "",
        "skipped layers" if settings.override.regular_prune_skip_layers else "",
    ]
    why = ", ".join(limit for limit in limits if limit) or "what may not be pruned"
    return [
        f"compress_ratio {settings.compress_ratio:g} cannot be reached: {solution.ratio:.4g} is what was reached, "
        f"{most:.4g} is the most possible ({why})"
        if solution.ratio >= most * (1 - 1e-6)
        else f"compress_ratio {settings.compress_ratio:g} was not reached: {solution.ratio:.4g}"
    ]


def _set_gains(records: Sequence[Any], groups: Sequence[PruneGroup], cost: CostModel, start: Sequence[int]) -> None:
    """The attribute ``bitops``: what one channel of the first producer saves, everything that shrinks counted."""
    state = cost.state(start)
    for record, group in zip(records, groups, strict=True):
        per_step = int(group.steps.sum())
        channels = per_step * max(1.0, shown_member(group).multiplicity)
        gain = state.gain(group.index, group.units - per_step) if group.most_steps else 0.0
        set_attribute(record.producer[0], "bitops", float(gain / channels))


def set_up(scorer: SensitivityBase, graph_tuple: Any, input_data: Any, count: int, output_nodes: Any = None) -> None:
    """Call setup_initialization; classes written for AMCT's PyTorch side may lack the last argument."""
    parameters = inspect.signature(scorer.setup_initialization).parameters
    arguments = {"output_nodes": output_nodes} if "output_nodes" in parameters else {}
    scorer.setup_initialization(graph_tuple, input_data, count, **arguments)


def per_sample(terms: Sequence[CostTerm], samples: int) -> list[CostTerm]:
    """Costs of one sample, so that figures do not depend on the calibration batch."""
    return [
        term if term.kind == "params" else replace(term, constant=term.constant / max(1, samples)) for term in terms
    ]


def _tied(group: PruneGroup) -> list[str]:
    """The other layers that make the same channels."""
    shown = shown_member(group).module
    return [name for name in dict.fromkeys(member.module for member in group.producers) if name != shown]


def _touched(frozen: Any) -> str:
    names = dict.fromkeys(parameter.rpartition(".")[0] or parameter for parameter, _, _ in frozen.members)
    listed = list(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


def _show(report: SearchReport) -> None:
    """The table: on the terminal if there is one, else in the log."""
    if sys.stderr.isatty():
        print_table(report)
    elif _LOG.isEnabledFor(logging.INFO):
        stream = io.StringIO()
        Console(file=stream, width=118).print(search_table(report))
        _LOG.info("%s", stream.getvalue().rstrip())
