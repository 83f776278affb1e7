"""create, restore and save with quantisation: channel pruning or N:M masks, then quantisation-aware training."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from openwork.config import QuantSetting, RetrainConfig, Target, load_retrain_config
from openwork.errors import ConfigError, FileError, RecordError
from openwork.files import check_paths, check_writable
from openwork.record import Record, load_record, save_record
from openwork.torch.quant import factors_of, integers_of, quantizable_layers, quantized_layers
from openwork.torch.quant.apply import quantize_layers
from openwork.torch.quant.export import export_quantized
from openwork.torch.retrain.channels import quantisation_asked
from openwork.torch.retrain.export import deploy_paths
from openwork.torch.retrain.flow import (
    as_tuple,
    load_weights,
    prune_as_config,
    put_masks,
    refuse_wrapped,
    save_prune_retrain_model,
)
from openwork.torch.retrain.masking import record_was_written, warn_of_left_out, with_masks
from openwork.torch.retrain.records import plan_from_record
from openwork.torch.sparse24 import masked_layers
from openwork.torch.sparse24.apply import check_finite
from openwork.torch.structure import bind_inputs, unwrap
from openwork.torch.surgery import apply_plan
from openwork.torch.weight_reads import read_past_layers

__all__ = ["create_compressed_retrain_model", "restore_compressed_retrain_model", "save_compressed_retrain_model"]

_LOG = logging.getLogger("openwork")
_ASKED = "_openwork_compression"


@dataclass(frozen=True)
class _Asked:
    """What saving needs to know of the config; it stays on the model."""

    target: Target
    force_fp16_quant: bool


@torch.inference_mode(False)  # tensors made in inference mode could not be trained
def create_compressed_retrain_model(
    model: nn.Module, input_data: Any, config_defination: str | os.PathLike[str], record_file: str | os.PathLike[str]
) -> nn.Module:
    """Prune or mask a model as a config says and let it simulate quantisation, ready for retraining.

    Args:
        model: the trained model; it is not touched.
        input_data: a tuple of tensors, or one tensor.
        config_defination: path of an ``AMCTRetrainConfig``; it may ask for pruning, for quantisation, or both.
        record_file: path of the record to write; scales and offsets follow when the model is saved.

    Returns:
        A modified copy of the same class, in train mode. The clip ranges of inputs are taken from its first
        ``batch_num`` training forwards.

    Raises:
        ConfigError: the config is wrong, or asks for nothing.
        FileError, NothingToPruneError, ModelError, UnsupportedModelError: as `create_prune_retrain_model`.
    """
    check_paths(config_defination=config_defination, record_file=record_file)
    config = load_retrain_config(config_defination)
    module = unwrap(model)
    refuse_wrapped(module)
    check_writable(record_file, "record_file", config_defination)
    inputs = as_tuple(input_data)
    prunes = bool(config.prune_settings)
    if prunes:
        result, record = prune_as_config(module, inputs, config, config_defination, record_file)
    else:
        result, record = apply_plan(module, plan_from_record(Record(), module)), Record()
    refused = _quantize(result, config, module, inputs)
    if not quantized_layers(result) and not prunes:
        unquantised = [f"; {name} is not quantised: {why}" for name, why in refused.items()]
        raise ConfigError(
            f"{config_defination}: nothing to do: neither prune_config nor retrain_data_quant_config or "
            f"retrain_weight_quant_config applies to any layer{''.join(unquantised[:3])}"
        )
    save_record(record, record_file)
    return result.train()


@torch.inference_mode(False)  # tensors made in inference mode could not be trained
def restore_compressed_retrain_model(
    model: nn.Module,
    input_data: Any,
    config_defination: str | os.PathLike[str],
    record_file: str | os.PathLike[str],
    pth_file: str | os.PathLike[str],
    state_dict_name: str | None = None,
) -> nn.Module:
    """Rebuild a model of `create_compressed_retrain_model` and load retrained weights and clip ranges.

    Args:
        model: the unpruned model.
        input_data: a tuple of tensors, or one tensor.
        config_defination: the config that the record was made with; it says what is quantised.
        record_file: what create or save wrote; the structure and the masks come from it alone.
        pth_file: the checkpoint; loaded strictly, on the CPU, without executing anything.
        state_dict_name: key of the state dict inside the file; None if the file is the state dict.

    Returns:
        The model with the weights, in train mode.

    Raises:
        RecordError, WeightsError, ConfigError, FileError, UnsupportedModelError: as `restore_prune_retrain_model`.
    """
    check_paths(config_defination=config_defination, record_file=record_file, pth_file=pth_file)
    inputs = as_tuple(input_data)
    module = unwrap(model)
    refuse_wrapped(module)
    config = load_retrain_config(config_defination)
    record = load_record(record_file)
    result = apply_plan(module, plan_from_record(record, module))
    put_masks(result, record, config, config_defination, record_file, inputs, module)
    _quantize(result, config, module, inputs)
    if not quantized_layers(result) and not record:
        raise RecordError(f"record file {record_file} is empty and the config quantises nothing; nothing to restore")
    load_weights(result, record, pth_file, state_dict_name)
    return result.train()


@torch.inference_mode(False)
def save_compressed_retrain_model(
    model: nn.Module,
    record_file: str | os.PathLike[str],
    save_path: str | os.PathLike[str],
    input_data: Any,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_axes: Mapping[str, Any] | None = None,
    *,
    opset: int = 18,
) -> None:
    """Write ``<save_path>_deploy_model.onnx`` and ``<save_path>_fake_quant_model.onnx``; complete the record.

    The deploy file has int8 weights behind QuantizeLinear / DequantizeLinear, or with ``target: ASCEND`` in the
    config AscendQuant / AscendDequant. The fake-quant file simulates with float operators. Batch norms that follow
    a quantised layer alone are folded in both. Zeros of masks are exact zeros in the integers; this is checked.

    Args:
        model: what create or restore returned, trained.
        record_file: the record; scales, offsets and the masks in force are written into it.
        save_path: folder and prefix.
        input_data: a tuple of tensors, or one tensor.
        input_names, output_names: names in the file.
        dynamic_axes: as for ``torch.onnx.export``.
        opset: ONNX operator set of the files.

    Raises:
        ModelError: no batch was run in training mode yet, so there is no clip range; training diverged; masked
            integers break their pattern; torch cannot export the model.
        FileError, ConfigError, RecordError: as `save_prune_retrain_model`; the record cannot be read.
    """
    check_paths(record_file=record_file)
    module = unwrap(model)
    inputs = as_tuple(input_data)
    if not quantized_layers(module):
        save_prune_retrain_model(module, save_path, inputs, input_names, output_names, dynamic_axes, opset=opset)
        return
    check_finite({**masked_layers(module), **quantized_layers(module)})
    paths = deploy_paths(save_path)
    check_writable(record_file, "record_file")
    for path in paths:
        if os.path.realpath(path) == os.path.realpath(record_file):
            raise FileError(
                f"record_file {os.fspath(record_file)} is the model file that is to be written; give another"
            )
    record = load_record(record_file) if os.path.exists(record_file) else Record()
    asked: _Asked = module.__dict__.get(_ASKED, _Asked(Target.ONNX, False))
    layers = integers_of(module, inputs)
    factors = factors_of(layers)
    if asked.force_fp16_quant:
        factors = {
            name: replace(factor, fakequant_precision_mode="FORCE_FP16_QUANT") for name, factor in factors.items()
        }
    export_quantized(module, layers, paths, inputs, input_names, output_names, dynamic_axes, opset, target=asked.target)
    record = replace(with_masks(record, module), factors={**record.factors, **factors})
    save_record(record, record_file)
    record_was_written(module, record, record_file)


def _quantize(model: nn.Module, config: RetrainConfig, plain: nn.Module, inputs: tuple[Any, ...]) -> dict[str, str]:
    """Quantise what the config asks for; why layers that it asks for are not quantised.

    Args:
        model: pruned or masked, or neither.
        config: the config.
        plain: the unpruned model.
        inputs: its positional inputs.
    """
    wanted = quantisation_asked(config, model)
    reasons = quantizable_layers(model)
    past = read_past_layers(plain, bind_inputs(inputs), [name for name in wanted if not reasons[name]])
    settings: dict[str, QuantSetting] = {}
    refused: dict[str, str] = {}
    for name, setting in wanted.items():
        why = reasons[name] or ("its weight is also read past the layer, unquantised" if name in past else "")
        if why:
            _LOG.info("%s is not quantised: %s", name, why)
            refused[name] = why
        else:
            settings[name] = setting
    warn_of_left_out(refused, len(wanted), "is not quantised")
    quantize_layers(model, settings, config.batch_num)
    model.__dict__[_ASKED] = _Asked(config.target, config.force_fp16_quant)
    return refused
