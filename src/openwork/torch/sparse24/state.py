"""The mask of one layer: when it is chosen, how often, and how pruned weights stay zero."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openwork.config import GradMode, NofMSetting
from openwork.sparsity.masks import nm_mask
from openwork.torch.sparse24.products import Rule, can_choose, for_numpy, multiply_mask_

__all__ = ["MaskState", "refresh"]

# Pieces of `counters`.
_CHOSEN, _AGE, _NEXT = range(3)
_WINDOW = 512


@dataclass
class MaskState:
    """What a masked layer carries beyond its parameters; none of it is in the state_dict.

    Attributes:
        setting: pattern, update frequency and gradient.
        axis: axis of the weight that groups run along.
        blocks: equal parts of that axis in which groups restart.
        mask: bool, of the shape of the weight, on its device; all True until it is chosen.
        counters: int64 [3], always in main memory: whether the mask is chosen; training forwards since then;
            the place in the weight to look at next. A tensor, so that compiled code does not see a new constant
            at each step.
    """

    setting: NofMSetting
    axis: int
    blocks: int
    mask: Tensor
    counters: Tensor

    @classmethod
    def of(cls, weight: Tensor, setting: NofMSetting, axis: int, blocks: int) -> MaskState:
        mask = torch.ones(weight.shape, dtype=torch.bool, device=weight.device)
        return cls(setting, axis, blocks, mask, torch.zeros(3, dtype=torch.int64))

    @property
    def in_place(self) -> bool:
        """Whether pruned weights are zeroed in the parameter: the mask never changes once chosen.

        Compiled code leaves the parameter alone (inductor loses such writes where it changes a layout); it uses
        the mask as if it could change, and the zeros come with the next eager forward or `finalize`.
        """
        return not self.changes and not torch.compiler.is_compiling()

    @property
    def decay(self) -> float | None:
        return self.setting.sr_ste_decay if self.setting.grad_mode is GradMode.SR_STE else None

    @property
    def chosen(self) -> bool:
        return bool(self.counters[_CHOSEN].item())

    def choose(self, weight: Tensor) -> Tensor:
        """The mask that `weight` asks for now."""
        mask: Tensor = nm_mask(weight.detach(), self.setting.n, self.setting.m, self.axis, self.blocks)
        return mask

    def set(self, mask: Tensor) -> None:
        """Take `mask` as the one just chosen."""
        self.mask = mask
        self.counters[_CHOSEN] = 1
        self.counters[_AGE] = 0

    @property
    def changes(self) -> bool:
        """Whether pruned weights keep values, so that a weight does not tell its mask."""
        return self.setting.changes

    def forget(self, weight: Tensor) -> None:
        """Other weights were loaded: the next forward chooses a mask for them, where they do not tell it themselves.

        Weights under a mask that never changes are zero where the mask says so: other weights are not.
        """
        if self.changes or weight.is_meta or bool((weight.detach()[~self.mask] != 0).any()):
            self.counters[_CHOSEN] = 0

    def take(self, mask: Tensor) -> None:
        """Take `mask` as the one that a training forward has chosen, see `refresh`."""
        self.mask = mask
        self.counters[_AGE] = 1

    def current(self, weight: Tensor) -> Tensor:
        """The mask in force, or the one that the first forward would choose."""
        return self.mask if self.chosen else self.choose(weight)

    def settings_for_compiled(self) -> tuple[int, int, int, int, int]:
        return self.setting.n, self.setting.m, self.axis, self.blocks, self.setting.update_freq


def _is_due(counters: Tensor, update_freq: int, training: bool) -> bool:
    """Whether a mask has to be chosen at this forward; counts the forward."""
    chosen, age, _ = counters.tolist()
    due = not chosen or (training and update_freq > 0 and age >= update_freq)
    if due:
        counters[_CHOSEN] = 1
        age = 0
    if training and update_freq:
        counters[_AGE] = age + 1
    return due


def _seems_masked(state: MaskState, weight: Tensor) -> bool:
    """Whether the mask is chosen and a window of the weight, further on at each forward, is zero where it says so.

    With a masked gradient the common optimizers leave zeros alone, and what else moves pruned weights (loading,
    averaging, an optimizer that mixes weights) moves them everywhere. So on a CPU the window tells whether the
    product has to be taken; on other devices the product is cheaper than waiting for an answer.
    """
    if weight.dtype not in (torch.float32, torch.float64) or not for_numpy(weight):
        return False
    counters = state.counters.numpy()
    if not counters[_CHOSEN]:
        return False
    start = int(counters[_NEXT])
    end = start + _WINDOW
    counters[_NEXT] = end if end < weight.numel() else 0
    values = weight.detach().numpy().reshape(-1)[start:end]
    return not values[~state.mask.numpy().reshape(-1)[start:end]].any()


def refresh(state: MaskState, weight: Tensor, training: bool, postpone: bool = False) -> tuple[Tensor, Rule | None]:
    """Called once before each forward of a layer: choose the mask when it is due.

    A forward that activation checkpointing repeats during backward neither counts nor chooses.

    Args:
        state: the layer's.
        weight: its parameter.
        training: whether this forward counts.
        postpone: a mask that takes the place of another may be left to the forward to choose, which then calls
            `MaskState.take`. Until it has, the older mask is in force and a new one due.

    Returns:
        The mask for this forward, and how to choose it; None if it is chosen.
    """
    if weight.is_meta or torch._C._current_graph_task_id() != -1:
        return state.mask, None
    if state.in_place and _seems_masked(state, weight):
        return state.mask, None
    with torch.inference_mode(False), torch.no_grad():
        weight = weight.detach()
        postpone = postpone and state.axis == 1 and state.chosen and can_choose(weight)
        if _is_due(state.counters, state.setting.update_freq, training):
            if postpone:
                state.counters[_AGE] = state.setting.update_freq
                return torch.empty_like(state.mask), (state.setting.n, state.setting.m)
            state.mask = state.choose(weight)
            if state.in_place:
                multiply_mask_(weight, state.mask)
        elif state.in_place:
            multiply_mask_(weight, state.mask)
    return state.mask, None


@torch.library.custom_op("openwork::refresh_mask", mutates_args=("counters",))
def refresh_mask(
    weight: Tensor,
    mask: Tensor,
    counters: Tensor,
    n: int,
    m: int,
    axis: int,
    blocks: int,
    update_freq: int,
    training: bool,
) -> Tensor:
    """`refresh` for compiled code, which must not look inside; returns the mask in force."""
    if torch._C._current_graph_task_id() == -1 and _is_due(counters, update_freq, training):
        chosen: Tensor = nm_mask(weight, n, m, axis, blocks)
        return chosen
    return mask.clone()


@refresh_mask.register_fake
def _(
    weight: Tensor,
    mask: Tensor,
    counters: Tensor,
    n: int,
    m: int,
    axis: int,
    blocks: int,
    update_freq: int,
    training: bool,
) -> Tensor:
    return torch.empty_like(mask)
