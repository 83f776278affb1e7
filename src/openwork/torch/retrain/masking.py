"""N:M masks in AMCT's flow: which layers, the record, AMCT's own checkpoints."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from openwork.config import NofMSetting
from openwork.errors import RecordError
from openwork.record import Record, SelectiveMaskRecord, save_record
from openwork.sparsity.masks import check, nm_mask
from openwork.torch.sparse24 import load_masks, maskable_layers, masked_layers, masks_of
from openwork.torch.sparse24.apply import check_settings, mask_layers
from openwork.torch.sparse24.layers import kind_of
from openwork.torch.sparse24.module import state_of
from openwork.torch.sparse24.permute import permute_channels
from openwork.torch.structure import bind_inputs
from openwork.torch.weight_reads import read_past_layers

__all__ = [
    "attach_masks",
    "check_masks_recorded",
    "layers_to_mask",
    "plain_keys",
    "record_was_written",
    "reorder_channels",
    "restore_masks",
    "settle_masks",
    "warn_of_left_out",
    "with_masks",
    "write_masks",
]

_LOG = logging.getLogger("openwork")
_AMCT_WRAPPER = ".replaced_module."
# Attribute of a mask in the record: which weight it was written beside.
_DIGEST = "openwork_weight"


def layers_to_mask(
    model: nn.Module, wanted: Mapping[str, NofMSetting], inputs: tuple[Any, ...], plain: nn.Module
) -> tuple[dict[str, NofMSetting], dict[str, str]]:
    """Of the layers that a config masks, those that can hold the mask; and why others cannot, which is logged.

    Args:
        model: the model, without masks.
        wanted: what the config asks for.
        inputs: positional inputs, to see which weights are read past their layer.
        plain: the unpruned model, which is run with them.
    """
    result, refused = {}, {}
    changing = [name for name, setting in wanted.items() if setting.changes]
    past = read_past_layers(plain, bind_inputs(inputs), changing)
    reasons: dict[tuple[int, int], dict[str, str]] = {}
    for name, setting in wanted.items():
        pattern = setting.n, setting.m
        if pattern not in reasons:
            reasons[pattern] = maskable_layers(model, *pattern)
        why = reasons[pattern].get(name, "it is no Linear, Conv2d or ConvTranspose2d")
        if not why and name in past:
            why = "its weight is also read past the layer, where a mask that changes does not reach"
        if why:
            _LOG.info("%s gets no %d:%d mask: %s", name, setting.n, setting.m, why)
            refused[name] = why
        else:
            result[name] = setting
    odd = {name: why for name, why in refused.items() if "input channels per filter" not in why}
    warn_of_left_out(odd, len(wanted), "gets no mask")
    return result, refused


def warn_of_left_out(refused: Mapping[str, str], asked: int, what: str) -> None:
    """One warning for all layers that a config asks for and that are left alone; the log says why of each (info)."""
    if refused:
        name, why = next(iter(refused.items()))
        more = f", and {len(refused) - 1} more" if len(refused) > 1 else ""
        _LOG.warning("of %d layers that the config asks for, %s %s: %s%s", asked, name, what, why, more)


def reorder_channels(model: nn.Module, inputs: Any, settings: Mapping[str, NofMSetting]) -> None:
    """Where a config asks for ``permute``: reorder channels of `model`, in place, before it is masked.

    The record needs nothing of it: the order is in the weights, and the model computes what it did.
    """
    wanted = []
    for name, setting in settings.items():
        if setting.permute and (setting.n, setting.m) == (2, 4):
            wanted.append(name)
        elif setting.permute:
            _LOG.info("%s: channels are not reordered for %d:%d; only for 2:4", name, setting.n, setting.m)
    if wanted:
        permute_channels(model, inputs, wanted)


def attach_masks(
    model: nn.Module, settings: Mapping[str, NofMSetting], record: Record, path: str | os.PathLike[str]
) -> None:
    """Mask layers of `model` in place, and add to the record the masks that their weights ask for.

    From now on the record file follows each ``state_dict()`` of the model: see `_Keeper`.
    """
    check_settings(model, settings)
    mask_layers(model, settings)
    for name, mask in masks_of(model).items():
        record.add_mask(SelectiveMaskRecord.of(name, mask))
    _follow(model, record, path)


def restore_masks(
    model: nn.Module,
    record: Record,
    settings: Mapping[str, NofMSetting],
    path: str | os.PathLike[str],
) -> None:
    """Put the masks of a record on a model, in place.

    Args:
        model: the model, with the shapes that the masks were made for.
        record: it names the layers.
        settings: what the config says of layers; one that it does not name keeps its mask unchanged.
        path: the record file, for messages and for later writing.

    Raises:
        RecordError: a mask does not fit its layer.
    """
    layers = dict(model.named_modules())
    wanted = {}
    for name, mask in record.masks.items():
        if name not in layers:
            raise RecordError(f"{path}: selective_prune names {name!r}, which the model does not have")
        kind = kind_of(layers[name])
        if kind is None:
            raise RecordError(f"{path}: selective_prune names {name!r}, a {type(layers[name]).__name__} without a mask")
        setting = settings.get(name, NofMSetting())
        blocks = kind.blocks(layers[name])
        held = mask.mask()
        if held.ndim > kind.axis and not any(
            check(held, kind.axis, setting.n, setting.m, parts) for parts in {1, blocks}
        ):
            raise RecordError(f"{path}: the mask of {name!r} is not {setting.n}:{setting.m}")
        wanted[name] = setting
    check_settings(model, wanted)
    mask_layers(model, wanted)
    load_masks(model, {name: mask.mask() for name, mask in record.masks.items()})
    # The weights are still to come: nothing is written before `settle_masks`.
    _follow(model, record, path, waiting=True)


def check_masks_recorded(
    record: Record, wanted: Mapping[str, NofMSetting], path: str | os.PathLike[str], config: str | os.PathLike[str]
) -> None:
    """Compare the masks of a record with those that its config asks for.

    Args:
        record: the record.
        wanted: layers that the config masks, from `layers_to_mask`.
        path, config: the files, for messages.

    Raises:
        RecordError: the config asks for masks and the record has none at all. Where only some are missing, a warning
            names them: another tool may have masked fewer layers.
    """
    missing = [name for name in wanted if name not in record.masks]
    if not missing:
        return
    if not record.masks:
        raise RecordError(
            f"{path} has no masks, but {config} asks for one of {missing[0]!r}; it is another model's record"
        )
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    _LOG.warning("%s asks for a mask of %s%s, but %s has none: the layer stays dense", config, missing[0], more, path)


def settle_masks(model: nn.Module) -> None:
    """After weights were loaded: where a weight keeps its pattern by itself, its own zeros are the mask.

    A checkpoint from a mask that never changes has exact zeros, so it and its mask agree whatever the record
    says. One that keeps pruned values (also AMCT's) needs the record's mask. If the record was written beside other
    weights, it is no longer theirs: masks are chosen anew, with a warning.
    """
    for keeper in _keepers_of(model):
        keeper.waiting = False
    digests = _digests_of(model)
    others = []
    for name, layer in masked_layers(model).items():
        state = state_of(layer)
        weight: torch.Tensor = layer._parameters["weight"].detach()  # type: ignore[union-attr]
        if weight.is_meta:
            continue
        pattern = state.setting.n, state.setting.m
        if check(weight, state.axis, *pattern, state.blocks) and bool((weight[~state.mask] != 0).any()):
            _LOG.warning("%s: the weights have zeros of their own that the record's mask contradicts; they hold", name)
            state.set(nm_mask(weight, *pattern, state.axis, state.blocks))
        elif state.changes:
            written = digests.get(name, "")
            if written.partition(":")[0] == str(weight.dtype) and written != _digest(weight):
                others.append(name)
                state.set(nm_mask(weight, *pattern, state.axis, state.blocks))
            else:
                state.set(state.mask)
        else:
            state.set(state.mask)
    if others:
        _LOG.warning(
            "the record was written beside another checkpoint: the masks of %d layers (%s%s) are chosen anew from the "
            "weights; keep a copy of the record with each checkpoint to restore exactly",
            len(others),
            others[0],
            ", .." if len(others) > 1 else "",
        )


def plain_keys(state: Mapping[str, Any], masked: Collection[str], own: Iterable[str]) -> dict[str, Any]:
    """A state dict of AMCT's masked layers under plain names; its helper keys are left out.

    Args:
        state: the checkpoint.
        masked: names of the masked layers.
        own: keys of the model.
    """
    if not any(_AMCT_WRAPPER in key for key in state):
        return dict(state)
    known = set(own)
    result = {}
    for key, value in state.items():
        name = key.replace(_AMCT_WRAPPER, ".")
        helper = name not in known and any(f".{name}".find(f".{layer}.") >= 0 for layer in masked)
        if not helper:
            result[name] = value
    return result


def _digest(weight: torch.Tensor) -> str:
    """Type and checksum of a weight, to tell whether a record and a checkpoint belong together."""
    raw = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return f"{weight.dtype}:{zlib.crc32(raw):08x}"


def _digests_of(model: nn.Module) -> dict[str, str]:
    """What the record that the model follows says of the weights it was written beside, by layer."""
    found: dict[str, str] = {}
    for keeper in _keepers_of(model):
        for name, mask in keeper.record.masks.items():
            value = mask.extra.get(_DIGEST, "")
            found[name] = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return found


def with_masks(record: Record, model: nn.Module, known_only: bool = False) -> Record:
    """The record with the masks in force, and what tells the weights that they belong to.

    Args:
        record: it is not changed.
        model: the masked model.
        known_only: leave out masks of layers that the record does not name.
    """
    layers = masked_layers(model)
    masks = dict(record.masks)
    for name, mask in masks_of(model).items():
        held = masks.get(name)
        if held is None and known_only:
            continue
        extra = {} if held is None else dict(held.extra)
        weight = layers[name]._parameters["weight"]
        if state_of(layers[name]).changes and weight is not None and not weight.is_meta:
            extra[_DIGEST] = _digest(weight)
        masks[name] = replace(SelectiveMaskRecord.of(name, mask), extra=extra)
    return replace(record, masks=masks)


def record_was_written(model: nn.Module, record: Record, path: str | os.PathLike[str]) -> None:
    """Tell a model that the record file it follows has been written: its next checkpoint goes on from there."""
    for keeper in _keepers_of(model):
        if os.path.realpath(keeper.path) == os.path.realpath(path):
            keeper.record = record


def write_masks(model: nn.Module) -> None:
    """Write the masks in force to the record that the model follows, if it follows one."""
    for keeper in _keepers_of(model):
        keeper.write(model)


def _follow(model: nn.Module, record: Record, path: str | os.PathLike[str], waiting: bool = False) -> None:
    model._register_state_dict_hook(_Keeper(record, os.path.abspath(path), waiting))


def _keepers_of(model: nn.Module) -> list[_Keeper]:
    return [hook for hook in model._state_dict_hooks.values() if isinstance(hook, _Keeper)]


@dataclass
class _Keeper:
    """Keeps a record file in step with checkpoints.

    A hook on the model's ``state_dict()``: what is saved is saved with the masks in force at that moment. During
    training nothing is written. In distributed training the first rank writes.
    """

    record: Record
    path: str
    waiting: bool = False

    def __call__(self, model: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        if not self.waiting:
            self.write(model)

    def write(self, model: nn.Module) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank():
            return
        found = with_masks(self.record, model, known_only=True)
        if found.masks != self.record.masks:
            self.record = found
            save_record(self.record, self.path)
