"""auto_channel_prune_search: from a model, data and a target to the config that prunes it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

from torch import nn

from openwork.config import Cost, load_auto_prune_config
from openwork.retrain.progress import shown_progress, timed
from openwork.retrain.search import Subject, check_outputs, find_sensitivity, per_sample, publish, run_search
from openwork.search import SearchChannelBase, SensitivityBase, get_algorithm
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
    return find_sensitivity(sensitivity, _SENSITIVITIES)


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
    if is_writer():
        check_outputs(config, output_cfg)
    module = unwrap(model)
    input_data, first = _first_batch(input_data, settings.test_iteration)
    seconds: dict[str, float] = {}
    with timed(seconds, "analysis"):
        analysis = analyze(module, first.inputs)
    while True:
        subject = _subject(analysis, first)
        show = is_writer()
        with timed(seconds, "cost"), shown_progress("latency of layers", show and settings.cost is Cost.LATENCY) as bar:
            if settings.cost is Cost.LATENCY:
                cost: CostModel = latency_cost(module, first, analysis.groups, LatencyMeter(), bar)
            else:
                cost = from_terms(settings.cost.value.lower(), subject.terms)
        found = run_search(subject, settings, cost, input_data, scorer, algorithm, seconds, show=show)
        if analysis.plan(found.removed) is not None:
            break
        # The model's code does not allow this choice: more is frozen now, and the groups have changed.
        _LOG.info("the model's code ties more channels than its operators show; searching again")
    publish(found, settings, output_cfg, is_writer())


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


def _subject(analysis: Analysis, first: Batch) -> Subject:
    """The model as the search sees it."""
    model, groups = analysis.model, analysis.groups
    terms = per_sample(analysis.costs, first.samples)
    modules = [(name, type(module).__name__) for name, module in model.named_modules()]
    return Subject(
        name=type(model).__name__,
        groups=groups,
        frozen=analysis.frozen,
        settings=lambda config: settings_of(config, analysis),
        weights=weights_of(model),
        order=[name for name, _ in modules],
        types={name: _OPERATORS[kind] for name, kind in modules if kind in _OPERATORS},
        graph=SearchGraph(model, groups),
        info=graph_info(model, terms, groups),
        terms=terms,
    )
