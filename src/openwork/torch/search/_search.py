"""auto_channel_prune_search: from a model, data and a target to the config that prunes it."""

from __future__ import annotations

import inspect
import io
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

from openwork import importance as criteria
from openwork.config import ALIGNMENT, AutoPruneConfig, ChannelSetting, Cost, load_auto_prune_config
from openwork.errors import ConfigError, NothingToPruneError, OpenworkError, nearest
from openwork.files import check_writable, write_text
from openwork.graph.groups import CostTerm, IntArray, PruneGroup
from openwork.graph.select import lowest, removable
from openwork.report import SearchReport, print_table, search_table, write_html
from openwork.retrain.writing import config_text
from openwork.search import (
    SearchChannelBase,
    SearchGroup,
    SearchProblem,
    SensitivityBase,
    Solution,
    get_algorithm,
    group_widths,
    make_record,
    set_attribute,
)
from openwork.search._records import removed_units, shown_member, unit_scores
from openwork.search.cost import CostModel, from_terms
from openwork.torch.analysis import Analysis, analyze
from openwork.torch.prune import weights_of
from openwork.torch.retrain.channels import settings_of
from openwork.torch.search._batches import Batch, read_batches
from openwork.torch.search._distributed import is_writer
from openwork.torch.search._graph import SearchGraph, graph_info
from openwork.torch.search._latency import LatencyMeter, latency_cost
from openwork.torch.structure import unwrap

__all__ = ["auto_channel_prune_search", "get_sensitivity"]

_LOG = logging.getLogger("openwork")
_PROBE = ChannelSetting(0.5)
# ONNX operator types of modules, for the records' attribute ``type``.
_OPERATORS = {
    "BatchNorm1d": "BatchNormalization",
    "BatchNorm2d": "BatchNormalization",
    "BatchNorm3d": "BatchNormalization",
    "Conv1d": "Conv",
    "Conv2d": "Conv",
    "Conv3d": "Conv",
    "ConvTranspose1d": "ConvTranspose",
    "ConvTranspose2d": "ConvTranspose",
    "ConvTranspose3d": "ConvTranspose",
    "Linear": "Gemm",
}
_SENSITIVITIES = {
    "FisherMagnitudeSensitivity": "openwork.torch.search._blend",
    "FisherSensitivity": "openwork.torch.search._fisher",
    "MagnitudeSensitivity": "openwork.torch.search._magnitude",
    "OutputChangeSensitivity": "openwork.torch.search._output_change",
    "TaylorLossSensitivity": "openwork.torch.search._taylor",
}


def get_sensitivity(sensitivity: str | type[SensitivityBase] | SensitivityBase) -> SensitivityBase:
    """The sensitivity of that name; a class is instantiated, an object is returned as it is.

    Raises:
        ConfigError: no sensitivity has that name, or the object lacks a method.
    """
    if isinstance(sensitivity, str):
        if sensitivity not in _SENSITIVITIES:
            raise ConfigError(f"sensitivity {sensitivity!r} is unknown; {nearest(sensitivity, _SENSITIVITIES)}")
        module = __import__(_SENSITIVITIES[sensitivity], fromlist=[sensitivity])
        built: SensitivityBase = getattr(module, sensitivity)()
        return built
    if isinstance(sensitivity, type):
        sensitivity = sensitivity()
    for method in ("setup_initialization", "get_sensitivity"):
        if not callable(getattr(sensitivity, method, None)):
            raise ConfigError(f"sensitivity {sensitivity!r} has no method {method}")
    return sensitivity


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


def auto_channel_prune_search(
    model: nn.Module,
    config: str | os.PathLike[str],
    input_data: Any,
    output_cfg: str | os.PathLike[str],
    sensitivity: str | SensitivityBase | type[SensitivityBase] = "TaylorLossSensitivity",
    search_alg: str | SearchChannelBase | type[SearchChannelBase] = "GreedySearch",
) -> None:
    """Find which channels to remove for a given budget, and write the config that removes them.

    The config goes to `output_cfg`, for `create_prune_retrain_model`; ``report.html`` goes beside it. Under an
    initialised ``torch.distributed`` each process scores its share of the data, all find the same, and the
    first one writes.

    Args:
        model: the trained model; it is not touched, nor are its gradients, mode and statistics.
        config: path of an ``AutoChannelPruneConfig`` in protobuf text format.
        input_data: calibration data: ``[data, label]``, where data is a tensor, a tuple of tensors or a dict of
            arguments; or any iterable of such batches. ``test_iteration`` batches are used.
        output_cfg: path of the config to write.
        sensitivity: ``TaylorLossSensitivity``, ``FisherSensitivity``, ``MagnitudeSensitivity``,
            ``OutputChangeSensitivity``, or an object or class with `SensitivityBase`'s methods.
        search_alg: ``GreedySearch``, ``DynamicProgrammingSearch``, or an object or class with
            `SearchChannelBase`'s methods.

    Raises:
        ConfigError: config, data, sensitivity or algorithm are wrong (names the field or layer).
        FileError: a file is missing or cannot be written (found before the work).
        NothingToPruneError: nothing is left to search; says why.
        WeightsError: a gradient is NaN, or none reaches a layer (named).
        ModelError: the forward fails (says where).
        UnsupportedModelError: not an nn.Module, or a ScriptModule.
    """
    settings = load_auto_prune_config(config)
    scorer, algorithm = get_sensitivity(sensitivity), get_algorithm(search_alg)
    report_path = Path(output_cfg).parent / "report.html"
    if is_writer():
        check_writable(output_cfg, "output_cfg")
        check_writable(report_path, "report")
    module = unwrap(model)
    input_data, first = _first_batch(input_data, settings.test_iteration)
    seconds: dict[str, float] = {}
    with _timed(seconds, "analysis"):
        analysis = analyze(module, first.inputs)
    while True:
        report, text, removed = _search(analysis, settings, input_data, first, scorer, algorithm, seconds)
        if analysis.plan(removed) is not None:
            break
        # The model's code does not allow this choice: more is frozen now, and the groups have changed.
        _LOG.info("the model's code ties more channels than its operators show; searching again")
    solution = report.solution
    _LOG.info(
        "search: %s compressed %.3f times (asked for %g)",
        report.problem.cost.unit,
        solution.ratio,
        settings.compress_ratio,
    )
    for warning in report.warnings:
        _LOG.warning(warning)
    if not is_writer():
        return
    write_text(output_cfg, text)
    _show(report)
    try:
        write_html(report, report_path)
    except OpenworkError as error:
        if isinstance(error, OSError):
            raise
        _LOG.warning("%s", error)


def _first_batch(input_data: Any, count: int) -> tuple[Any, Batch]:
    """The data, made repeatable if it can be read only once, and its first batch."""
    if isinstance(input_data, Iterator):
        items = []
        for item in input_data:
            items.append(item)
            if len(items) == count:
                break
        input_data = items
    read = read_batches(input_data, count)
    return input_data, read[0]


def _search(
    analysis: Analysis,
    settings: AutoPruneConfig,
    input_data: Any,
    first: Batch,
    scorer: SensitivityBase,
    algorithm: SearchChannelBase,
    seconds: dict[str, float],
) -> tuple[SearchReport, str, dict[int, IntArray]]:
    """One search over an analysis: the report, the config's text, the units to remove."""
    space = _space(analysis, settings)
    model, groups = analysis.model, analysis.groups
    units = [group.units for group in groups]
    terms = _per_sample(analysis.costs, first.samples)
    with _timed(seconds, "cost"), _progress("latency of layers", settings.cost is Cost.LATENCY) as progress:
        if settings.cost is Cost.LATENCY:
            cost: CostModel = latency_cost(model, first, groups, LatencyMeter(), progress)
        else:
            cost = from_terms(settings.cost.value.lower(), terms)
    types = {name: _OPERATORS[type(m).__name__] for name, m in model.named_modules() if type(m).__name__ in _OPERATORS}
    records = [make_record(group, types) for group in space.searched]
    info = graph_info(model, terms, groups)
    graph = SearchGraph(model, groups)
    start = [count - len(space.fixed.get(index, ())) for index, count in enumerate(units)]
    _set_gains(records, space.searched, cost, start)
    with _timed(seconds, "sensitivity"), _progress("sensitivity") as progress:
        if hasattr(scorer, "progress"):
            scorer.progress = progress
        _setup(scorer, (graph, info), input_data, settings.test_iteration)
        scorer.get_sensitivity(records)
    problem = SearchProblem(
        tuple(
            _search_group(group, unit_scores(record, group), settings)
            for record, group in zip(records, space.searched, strict=True)
        ),
        cost,
        tuple(units),
        settings.compress_ratio,
        tuple(start),
    )
    if problem.cost.total(start) <= problem.budget:
        _LOG.info("the ratios of the override file alone reach the target")
    with _timed(seconds, "search"), _progress("search", total=settings.compress_ratio) as progress:
        algorithm.problem = problem
        if hasattr(algorithm, "progress"):
            algorithm.progress = progress
        wanted = (settings.compress_ratio, settings.ascend_optimized, settings.max_prune_ratio)
        masks = algorithm.channel_prune_search(info, records, wanted)
    removed = dict(space.fixed)
    chosen: dict[int, IntArray] = {}
    for record, group in zip(records, space.searched, strict=True):
        gone = removed_units(record, group, masks)
        if len(gone):
            chosen[group.index] = gone
    removed.update(chosen)
    solution, shown = _solution(problem, chosen, algorithm)
    report = SearchReport(
        model=type(model).__name__,
        problem=shown,
        solution=solution,
        sensitivity=type(scorer).__name__,
        algorithm=type(algorithm).__name__,
        tied={group.index: _tied(group) for group in space.searched},
        channels={group.index: max(1, round(shown_member(group).multiplicity)) for group in space.searched},
        seconds=seconds,
        frozen=[*space.left_alone, *((_touched(frozen), frozen.reason) for frozen in analysis.frozen)],
        warnings=_warnings(problem, solution, settings),
    )
    text = config_text(settings.override, space.layers, space.searched, chosen, settings.ascend_optimized)
    return report, text, removed


def _space(analysis: Analysis, settings: AutoPruneConfig) -> _Space:
    """Sort the groups into searched, fixed by the override file, and left alone."""
    # A global setting marks what a global prune_config would reach; overrides and skips stand out against it.
    probe = replace(settings.override, prune_config=_PROBE)
    resolved = settings_of(probe, analysis)
    space = _Space()
    weights = weights_of(analysis.model)
    criterion = criteria.get("balanced_l2")
    for group in analysis.groups:
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
    order = {name: number for number, (name, _) in enumerate(analysis.model.named_modules())}
    space.layers = dict(sorted(space.layers.items(), key=lambda item: order.get(item[0], 0)))
    if not space.searched:
        reasons = "; ".join(dict.fromkeys(f"{name}: {why}" for name, why in space.left_alone[:3]))
        frozen = analysis.frozen[0].reason if analysis.frozen else "it has no weights"
        raise NothingToPruneError(f"{settings.source}: nothing is left to search ({reasons or frozen})")
    return space


def _search_group(group: PruneGroup, scores: np.ndarray, settings: AutoPruneConfig) -> SearchGroup:
    widths = group_widths(group, ALIGNMENT if settings.ascend_optimized else 1, settings.max_prune_ratio)
    name = shown_member(group).module
    return SearchGroup(group.index, name, scores, group.block_of, widths, source=group, steps=group.steps)


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


def _setup(scorer: SensitivityBase, graph_tuple: Any, input_data: Any, count: int) -> None:
    """Call setup_initialization; classes written for AMCT's PyTorch side may lack the last argument."""
    parameters = inspect.signature(scorer.setup_initialization).parameters
    arguments = {"output_nodes": None} if "output_nodes" in parameters else {}
    scorer.setup_initialization(graph_tuple, input_data, count, **arguments)


def _per_sample(terms: Sequence[CostTerm], samples: int) -> list[CostTerm]:
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


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start


@contextmanager
def _progress(what: str, show: bool = True, total: float = 1.0) -> Iterator[Callable[[float], None] | None]:
    """A bar on the terminal, as a function that takes how far the work is; None where there is no terminal."""
    if not (show and sys.stderr.isatty() and is_writer()):
        yield None
        return
    words = "{task.completed:.2f} of {task.total:g}" if total != 1.0 else "{task.percentage:.0f} %"
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn(words), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda value: bar.update(task, completed=min(value, total))
