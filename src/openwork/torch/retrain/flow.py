"""create, restore and save: AMCT's flow for pruning with retraining."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from openwork import importance as criteria
from openwork.config import (
    PYTORCH_TYPES,
    LayerSetting,
    RetrainConfig,
    load_retrain_config,
    read_chosen_channels,
    resolve,
)
from openwork.errors import NothingToPruneError, RecordError
from openwork.files import check_writable, read_text
from openwork.graph.groups import IntArray, PruneGroup, Role
from openwork.graph.select import balanced, lowest, removable
from openwork.record import Record, load_record, save_record
from openwork.torch.analysis import Analysis, _analyze
from openwork.torch.prune import PrunePlan, weights_of
from openwork.torch.retrain.export import deploy_paths, export_onnx
from openwork.torch.retrain.records import plan_from_record, records_from_plan
from openwork.torch.retrain.weights import load_state, read_checkpoint
from openwork.torch.structure import unwrap
from openwork.torch.surgery import apply_plan

__all__ = ["create_prune_retrain_model", "restore_prune_retrain_model", "save_prune_retrain_model"]

_LOG = logging.getLogger("openwork")


def as_tuple(input_data: Any) -> tuple[Any, ...]:
    """AMCT's convention: a tuple of tensors, or one tensor meaning a 1-tuple.

    Raises:
        TypeError: anything else.
    """
    if isinstance(input_data, torch.Tensor):
        return (input_data,)
    if isinstance(input_data, (tuple, list)):
        return tuple(input_data)
    raise TypeError(f"input_data is a {type(input_data).__name__}; allowed: a tensor or a tuple of tensors")


def _is_depthwise(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.conv._ConvNd) and module.groups == module.in_channels and module.groups != 1


def settings_of(config: RetrainConfig, analysis: Analysis) -> dict[str, LayerSetting]:
    """What the config says of every layer of the model."""
    model = analysis.model
    layers = {name: type(module).__name__ for name, module in model.named_modules() if name}
    producers = {member.module for group in analysis.groups for member in group.producers}
    prunable = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Conv2d, nn.Linear)) and not _is_depthwise(module)
    ]
    maskable = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Conv2d, nn.Linear, nn.ConvTranspose2d)) and not _is_depthwise(module)
    ]
    return resolve(
        config,
        layers,
        prunable=prunable,
        maskable=maskable,
        prunable_on_request=[name for name in producers if name not in prunable],
        known_types=PYTORCH_TYPES,
    )


def _group_setting(group: PruneGroup, settings: Mapping[str, LayerSetting]) -> tuple[float, bool]:
    """Ratio and alignment of tied layers: the smallest of the ratios, aligned if any asks; 0 if one is skipped."""
    ratio, aligned = 1.0, False
    asked = False
    for member in group.producers:
        setting = settings.get(member.module)
        if setting is None:
            continue
        if setting.channels is not None:
            asked = True
            ratio = min(ratio, setting.channels.ratio)
            aligned = aligned or setting.channels.aligned
        elif "skip" in setting.reason.partition(" ")[0]:
            return 0.0, False
    return (ratio, aligned) if asked else (0.0, False)


def choose(
    analysis: Analysis, settings: Mapping[str, LayerSetting], remembered: Mapping[str, IntArray]
) -> dict[int, IntArray]:
    """Units to remove from each group.

    Args:
        analysis: the model's groups.
        settings: what the config says of each layer.
        remembered: channels that a search chose, by layer; they go before any ranking.
    """
    criterion = criteria.get("balanced_l2")
    weights = weights_of(analysis.model)
    chosen: dict[int, IntArray] = {}
    for group in analysis.groups:
        ratio, aligned = _group_setting(group, settings)
        if ratio <= 0:
            continue
        exact = _remembered_units(group, remembered)
        if exact is not None:
            chosen[group.index] = exact
            continue
        count = removable(group, ratio, 16 if aligned else 1)
        if count:
            chosen[group.index] = lowest(group, np.asarray(criterion.score(group, weights)), count)
    return {index: units for index, units in chosen.items() if len(units)}


def _remembered_units(group: PruneGroup, remembered: Mapping[str, IntArray]) -> IntArray | None:
    for member in group.producers:
        positions = remembered.get(member.module)
        if positions is None:
            continue
        gone = np.isin(member.positions, positions)
        units = np.unique(member.units[gone])
        whole = np.isin(member.units, units)
        if bool((whole == gone).all()) and balanced(group, units.astype(np.int64)):
            return units.astype(np.int64)
        _LOG.warning("the channels remembered for %s do not fit this model; they are ranked anew", member.module)
    return None


def plan_channels(analysis: Analysis, config: RetrainConfig, text: str) -> tuple[PrunePlan, dict[str, LayerSetting]]:
    """The plan that a config asks for; empty if it asks for no channel pruning."""
    while True:
        settings = settings_of(config, analysis)
        remembered = read_chosen_channels(text, {name: s.channels for name, s in settings.items()})
        for layer, why in remembered.stale.items():
            _LOG.warning("channels that a search chose for %s are not used: %s", layer, why)
        chosen = choose(analysis, settings, remembered.removed)
        if not chosen:
            return PrunePlan(), settings
        found = analysis.plan(chosen)
        if found is not None:
            return PrunePlan(*found), settings


def create_prune_retrain_model(
    model: nn.Module, input_data: Any, config_defination: str | os.PathLike[str], record_file: str | os.PathLike[str]
) -> nn.Module:
    """Prune a model as a config says, ready for retraining, and write what was done to a record file.

    Args:
        model: the trained model; it is not touched. A DataParallel or DistributedDataParallel wrapper is looked
            through: its module is pruned.
        input_data: a tuple of tensors, or one tensor.
        config_defination: path of an ``AMCTRetrainConfig`` in protobuf text format.
        record_file: path of the record to write.

    Returns:
        A modified copy of the same class, in train mode.

    Raises:
        ConfigError: the config is wrong (names file, field, value and what is allowed).
        FileError: the config cannot be read or the record cannot be written.
        NothingToPruneError: nothing would be pruned; says why.
        ModelError: the forward fails (says where).
        UnsupportedModelError: not an nn.Module, or a ScriptModule.
    """
    config = load_retrain_config(config_defination)
    text = read_text(config_defination, "config file")
    module = unwrap(model)
    check_writable(record_file, "record_file")
    analysis = _analyze(module, as_tuple(input_data))
    plan, settings = plan_channels(analysis, config, text)
    masks = {name: setting.mask for name, setting in settings.items() if setting.mask is not None}
    if masks:
        raise NotImplementedError(
            f"{config_defination}: n_out_of_m_pruner for {next(iter(masks))!r}: 2:4 sparsity is not available yet"
        )
    if not plan.groups:
        raise NothingToPruneError(_why_nothing(analysis, settings, config_defination))
    _report(analysis, plan, settings)
    pruned = apply_plan(module, plan)
    save_record(Record(channels=records_from_plan(plan, module)), record_file)
    return pruned.train()


def _why_nothing(analysis: Analysis, settings: Mapping[str, LayerSetting], source: Any) -> str:
    asked = [name for name, setting in settings.items() if setting.channels is not None]
    if not asked:
        reasons = sorted({setting.reason for setting in settings.values() if "skip" in setting.reason})
        why = "; ".join(reasons[:3]) or "none is named"
        return f"{source}: nothing is pruned: no layer that can be pruned is left ({why})"
    tied = {member.module: group for group in analysis.groups for member in group.producers}
    name = next((name for name in asked if name in tied), None)
    if name is None:
        reason = analysis.frozen[0].reason if analysis.frozen else "it has no channels that depend on it"
        return f"{source}: nothing is pruned: {asked[0]!r} cannot lose channels: {reason}"
    setting = settings[name].channels
    assert setting is not None
    return (
        f"{source}: nothing is pruned: prune_ratio {setting.ratio} leaves all {tied[name].units} channels of {name!r}"
        + (" (ascend_optimized rounds up to a multiple of 16)" if setting.aligned else "")
    )


def _report(analysis: Analysis, plan: PrunePlan, settings: Mapping[str, LayerSetting]) -> None:
    for group in plan.groups:
        names = [cut.parameter.rpartition(".")[0] for cut in group.cuts if cut.role is Role.PRODUCES]
        _LOG.info("%s: %d of %d channels stay", ", ".join(dict.fromkeys(names)), group.units_after, group.units_before)
    produced = {member.module for group in analysis.groups for member in group.producers}
    for name, setting in settings.items():
        if setting.channels is not None and name not in produced:
            reason = next(
                (
                    f.reason
                    for f in analysis.frozen
                    if any(p == f"{name}.weight" and axis == 0 for p, axis, _ in f.members)
                ),
                "it is not run by the forward pass",
            )
            _LOG.info("%s keeps all its channels: %s", name, reason)


def restore_prune_retrain_model(
    model: nn.Module,
    input_data: Any,
    record_file: str | os.PathLike[str],
    config_defination: str | os.PathLike[str],
    pth_file: str | os.PathLike[str],
    state_dict_name: str | None = None,
) -> nn.Module:
    """Rebuild a pruned model from its record, without analysis, and load retrained weights.

    Args:
        model: the unpruned model.
        input_data: a tuple of tensors, or one tensor.
        record_file: what `create_prune_retrain_model` wrote; AMCT's own records restore as well.
        config_defination: the config that the record was made with; it is checked. The structure comes from the
            record alone.
        pth_file: weights of the pruned model, saved by ``torch.save``; loaded strictly, on the CPU, without
            executing anything.
        state_dict_name: key of the state dict inside the file; None if the file is the state dict.

    Returns:
        The pruned model with the weights, in train mode.

    Raises:
        RecordError: the record is damaged or of another model.
        WeightsError: the weights do not fit.
        ConfigError, FileError, UnsupportedModelError: as in create.
    """
    as_tuple(input_data)
    load_retrain_config(config_defination)
    record = load_record(record_file)
    module = unwrap(model)
    if not record:
        raise RecordError(f"record file {record_file} is empty; it restores nothing")
    if record.masks:
        raise NotImplementedError(f"{record_file}: selective_prune: 2:4 sparsity is not available yet")
    plan = plan_from_record(record, module)
    pruned = apply_plan(module, plan)
    load_state(pruned, read_checkpoint(pth_file, state_dict_name), os.fspath(pth_file))
    return pruned.train()


def save_prune_retrain_model(
    model: nn.Module,
    save_path: str | os.PathLike[str],
    input_data: Any,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_axes: Mapping[str, Any] | None = None,
    *,
    opset: int = 18,
) -> None:
    """Export a retrained model to ``<save_path>_deploy_model.onnx`` and ``<save_path>_fake_quant_model.onnx``.

    Without quantisation both are the plain pruned model. A path that ends in / gives ``deploy_model.onnx`` and
    ``fake_quant_model.onnx`` in that folder. Folders are made; existing files are replaced with a warning.

    Args:
        model: what create or restore returned.
        save_path: folder and prefix.
        input_data: a tuple of tensors, or one tensor.
        input_names, output_names: names in the file.
        dynamic_axes: as for ``torch.onnx.export``: ``{name: {axis: name}}`` or ``{name: [axes]}``.
        opset: ONNX operator set of the files.

    Raises:
        FileError: the files cannot be written (found before the export).
        ModelError: torch cannot export the model.
    """
    module = unwrap(model)
    given = as_tuple(input_data)
    paths = deploy_paths(save_path)
    for path in paths:
        export_onnx(module, path, given, input_names, output_names, dynamic_axes, opset)
