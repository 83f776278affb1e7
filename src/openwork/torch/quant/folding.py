"""Find the batch norms that follow a layer alone, and fold them: gamma * (W x + b - mean) / sigma + beta.

In integers nothing changes but signs: the factor gamma / sigma of a channel multiplies that channel's scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from openwork.torch.sparse24.apply import through_forward
from openwork.torch.sparse24.module import has_own_forward
from openwork.torch.structure import check_forward

__all__ = ["evaluating", "norm_factors", "norms_after"]


class _Uses(TorchDispatchMode):
    """Counts how often operators take each watched tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and id(leaf) in self.counts:
                self.counts[id(leaf)] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation, without gradients; training flags come back as they were."""
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in flags.items():
            module.training = training


def norms_after(model: nn.Module, inputs: Sequence[Any], layers: Sequence[str]) -> tuple[dict[str, str], set[str]]:
    """Layers whose result goes to a batch norm and nowhere else, layer name -> batch norm's name; layers that run.

    Args:
        model: it is run once, in evaluation.
        inputs: positional inputs.
        layers: names to look at.
    """
    modules = dict(model.named_modules())
    names = {id(module): name for name, module in modules.items()}
    wanted = {id(modules[name]) for name in layers}
    uses = _Uses()
    results: dict[int, tuple[str, Tensor]] = {}
    calls: dict[str, int] = {}
    pairs: dict[str, tuple[str, int]] = {}

    def after(module: nn.Module, arguments: Any, result: Any) -> None:
        name = names[id(module)]
        calls[name] = calls.get(name, 0) + 1
        if id(module) in wanted and isinstance(result, Tensor):
            # Keeping the tensor keeps its identity unique.
            results[id(result)] = (name, result)
            uses.counts[id(result)] = 0

    def before(module: nn.Module, arguments: Any) -> None:
        if arguments and id(arguments[0]) in results and not module.training:
            layer, tensor = results[id(arguments[0])]
            pairs[layer] = (names[id(module)], id(tensor))

    # With a hook or a forward of its own, a layer or a norm may do more than its weights say.
    plain = {id(module) for module in modules.values() if _is_plain(module)}
    hooks = []
    for module in modules.values():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            hooks.append(module.register_forward_pre_hook(before))
            hooks.append(module.register_forward_hook(after))
        elif id(module) in wanted:
            hooks.append(module.register_forward_hook(after))
    try:
        with evaluating(model), uses:
            output = check_forward(model, tuple(inputs))
    finally:
        for hook in hooks:
            hook.remove()
    returned = {id(leaf) for leaf in tree_leaves(output)}
    found = {}
    for layer, (norm, tensor_id) in pairs.items():
        once = calls[layer] == 1 and calls[norm] == 1 and uses.counts[tensor_id] == 1 and tensor_id not in returned
        grouped = isinstance(modules[layer], nn.ConvTranspose2d) and getattr(modules[layer], "groups", 1) > 1
        simple = id(modules[layer]) in plain and id(modules[norm]) in plain
        if once and simple and not grouped and getattr(modules[norm], "running_var", None) is not None:
            found[layer] = norm
    return found, set(calls) & set(layers)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def _is_plain(module: Any) -> bool:
    """Whether a layer or batch norm computes what torch's own does, and no hook comes between."""
    if any(hook is not through_forward for table in _HOOKS for hook in getattr(module, table).values()):
        return False
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return type(module).forward in (nn.modules.batchnorm._BatchNorm.forward, nn.SyncBatchNorm.forward)
    return not has_own_forward(getattr(type(module), "_openwork_plain", type(module)))


@torch.no_grad()
def norm_factors(norm: Any) -> tuple[Tensor, Tensor]:
    """A batch norm in evaluation as y = factor * x + shift; float64 [channels] each."""
    deviation = torch.sqrt(norm.running_var.double() + norm.eps)
    factor = (norm.weight.double() if norm.weight is not None else torch.ones_like(deviation)) / deviation
    shift = (norm.bias.double() if norm.bias is not None else 0.0) - norm.running_mean.double() * factor
    return factor, shift
