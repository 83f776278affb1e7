"""create, restore and save: AMCT's flow for pruning with retraining."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from openwork.config import RetrainConfig, load_retrain_config
from openwork.errors import ConfigError, NothingToPruneError, RecordError, UnsupportedModelError
from openwork.files import check_paths, check_writable, read_text
from openwork.record import Record, load_record, save_record
from openwork.torch.analysis import _analyze
from openwork.torch.quant import quantized_layers
from openwork.torch.retrain.channels import masks_asked, plan_channels, report, why_nothing
from openwork.torch.retrain.export import deploy_paths, export_onnx
from openwork.torch.retrain.masking import (
    attach_masks,
    check_masks_recorded,
    layers_to_mask,
    plain_keys,
    reorder_channels,
    restore_masks,
    settle_masks,
    write_masks,
)
from openwork.torch.retrain.records import plan_from_record, records_from_plan
from openwork.torch.retrain.weights import load_state, read_checkpoint, without_prefix
from openwork.torch.sparse24 import finalize, masked_layers
from openwork.torch.sparse24.apply import check_finite
from openwork.torch.structure import unwrap
from openwork.torch.surgery import apply_plan

__all__ = ["create_prune_retrain_model", "restore_prune_retrain_model", "save_prune_retrain_model"]

_LOG = logging.getLogger("openwork")


def as_tuple(input_data: Any) -> tuple[Any, ...]:
    """AMCT's convention: a tuple of tensors, or one tensor meaning a 1-tuple.

    Raises:
        TypeError: anything else.
        ConfigError: a tensor without elements, from which no layout of channels can be read.
    """
    if not isinstance(input_data, (torch.Tensor, tuple, list)):
        raise TypeError(f"input_data is a {type(input_data).__name__}; allowed: a tensor or a tuple of tensors")
    values = (input_data,) if isinstance(input_data, torch.Tensor) else tuple(input_data)
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor) and not value.numel():
            raise ConfigError(f"input_data[{index}] has shape {list(value.shape)}; each length must be at least 1")
    return values


@torch.inference_mode(False)  # tensors made in inference mode could not be trained
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
    check_paths(config_defination=config_defination, record_file=record_file)
    config = load_retrain_config(config_defination)
    if config.quantizes:
        _LOG.warning(
            "%s asks for quantisation, which create_compressed_retrain_model adds; here it is left out",
            os.fspath(config_defination),
        )
    check_writable(record_file, "record_file", config_defination)
    pruned, record = prune_as_config(unwrap(model), as_tuple(input_data), config, config_defination, record_file)
    save_record(record, record_file)
    return pruned.train()


def prune_as_config(
    module: nn.Module,
    inputs: tuple[Any, ...],
    config: RetrainConfig,
    config_file: str | os.PathLike[str],
    record_file: str | os.PathLike[str],
) -> tuple[nn.Module, Record]:
    """The pruned and masked copy, and its record, which is not yet written."""
    refuse_wrapped(module)
    text = read_text(config_file, "config file")
    analysis = _analyze(module, inputs)
    plan, settings = plan_channels(analysis, config, text)
    report(analysis, plan, settings)
    pruned = apply_plan(module, plan)
    wanted = {name: setting.mask for name, setting in settings.items() if setting.mask is not None}
    masks, refused = layers_to_mask(pruned, wanted, inputs, module)
    if not plan.groups and not masks:
        unmasked = [f"; {name} gets no mask: {why}" for name, why in refused.items()]
        raise NothingToPruneError(why_nothing(analysis, settings, config_file) + "".join(unmasked[:3]))
    record = Record(channels=records_from_plan(plan, module))
    reorder_channels(pruned, inputs, masks)
    if masks:
        attach_masks(pruned, masks, record, record_file)
    return pruned, record


def refuse_wrapped(module: nn.Module) -> None:
    """Raise if a model has been through create already.

    Raises:
        UnsupportedModelError: it carries masks or simulates quantisation.
    """
    for what, names in (
        ("carries a mask", masked_layers(module)),
        ("simulates quantisation", quantized_layers(module)),
    ):
        if names:
            raise UnsupportedModelError(
                f"layer {next(iter(names))!r} {what} already; give the model that create was given, or the one that "
                "openwork.torch.sparse24.finalize returns"
            )


@torch.inference_mode(False)  # tensors made in inference mode could not be trained
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
    check_paths(record_file=record_file, config_defination=config_defination, pth_file=pth_file)
    inputs = as_tuple(input_data)
    module = unwrap(model)
    refuse_wrapped(module)
    config = load_retrain_config(config_defination)
    record = load_record(record_file)
    if not record:
        raise RecordError(f"record file {record_file} is empty; it restores nothing")
    pruned = apply_plan(module, plan_from_record(record, module))
    put_masks(pruned, record, config, config_defination, record_file, inputs, module)
    load_weights(pruned, record, pth_file, state_dict_name)
    return pruned.train()


def put_masks(
    pruned: nn.Module,
    record: Record,
    config: RetrainConfig,
    config_file: str | os.PathLike[str],
    record_file: str | os.PathLike[str],
    inputs: tuple[Any, ...],
    plain: nn.Module,
) -> None:
    """Put the masks of a record on the pruned model, in place, after a look at what the config asks for."""
    asked = masks_asked(config, plain)
    if asked:
        check_masks_recorded(record, layers_to_mask(pruned, asked, inputs, plain)[0], record_file, config_file)
    if record.masks:
        restore_masks(pruned, record, asked, record_file)


def load_weights(
    model: nn.Module, record: Record, pth_file: str | os.PathLike[str], state_dict_name: str | None
) -> None:
    """Load a checkpoint of a pruned or masked model, openwork's or AMCT's."""
    state = read_checkpoint(pth_file, state_dict_name)
    own = model.state_dict()
    load_state(model, plain_keys(without_prefix(state, own), record.masks, own), os.fspath(pth_file))
    settle_masks(model)


@torch.inference_mode(False)
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

    Without quantisation both are the plain pruned model, with masked weights exactly zero. A path that ends in /
    gives ``deploy_model.onnx`` and ``fake_quant_model.onnx`` in that folder. Folders are made; existing files are
    replaced with a warning.

    Args:
        model: what create or restore returned.
        save_path: folder and prefix.
        input_data: a tuple of tensors, or one tensor.
        input_names, output_names: names in the file.
        dynamic_axes: as for ``torch.onnx.export``: ``{name: {axis: name}}`` or ``{name: [axes]}``.
        opset: ONNX operator set of the files. Below 18 torch's older exporter is used, which folds batch norms.

    Raises:
        ConfigError: no such operator set.
        UnsupportedModelError: the model simulates quantisation.
        FileError: the files cannot be written (found before the export).
        ModelError: torch cannot export the model, or a masked weight has NaN or infinity.
    """
    module = unwrap(model)
    given = as_tuple(input_data)
    if quantized_layers(module):
        raise UnsupportedModelError("the model simulates quantisation; save_compressed_retrain_model saves it")
    if masked_layers(module):
        check_finite(masked_layers(module))
        write_masks(module)
        module = finalize(module)
    export_onnx(module, deploy_paths(save_path), given, input_names, output_names, dynamic_axes, opset)
