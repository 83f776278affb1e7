"""Masked equivalence: the proof that a smaller model means the same as the masked original.

The original runs with every consumer's weights zeroed at the removed positions, so the removed channels reach
nothing. Operators that take statistics along channels (norms, softmax, means) take them over the surviving
positions, as the smaller model does. The results must be equal up to rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from openwork.errors import RecordError
from openwork.graph.labels import LabelMap
from openwork.graph.plan import Plan, given_plan
from openwork.graph.settle import Settled, settle
from openwork.graph.sizes import surviving_shape
from openwork.torch.composites import Composite
from openwork.torch.structure import Inputs, bind_inputs, copy_structure, unwrap
from openwork.torch.surgery import check_plan
from openwork.torch.trace import Trace, trace
from openwork.torch.watch import Call, Watcher, outputs_in, tensors_in

__all__ = ["verify"]

# Operators that mix positions along an axis with statistics of their own.
_STATISTICS = {
    "torch.layer_norm", "torch.rms_norm", "torch.group_norm", "aten.native_layer_norm", "aten._fused_rms_norm",
    "aten.rms_norm", "aten._softmax", "aten._log_softmax", "aten._safe_softmax", "aten.softmax", "aten.log_softmax",
    "aten.sum", "aten.mean", "aten.var", "aten.std", "aten.var_mean", "aten.std_mean", "aten.norm",
    "aten.linalg_vector_norm", "aten.amax", "aten.amin", "aten.max", "aten.min", "aten.logsumexp", "aten.prod",
    "aten._weight_norm", "aten._weight_norm_interface",
    "torch.batch_norm", "aten.all", "aten.any", "aten.native_batch_norm", "aten._native_batch_norm_legit",
}  # fmt: skip
_PRODUCTS = {"torch.matmul", "torch.linear", "aten.linear", "aten.convolution", "aten._convolution",
             "aten.mkldnn_convolution", "aten.bmm", "aten.mm", "torch.einsum", "aten.baddbmm", "aten.mv", "aten.dot",
             "aten.addmv", "torch.scaled_dot_product_attention", "aten._grouped_mm",
             "transformers.grouped_mm_fallback"}  # fmt: skip


def _dead_labels(plan: Plan, traced: Trace, settled: Settled) -> np.ndarray:
    """bool [labels]: labels that die with the plan's cuts (a parameter may be known by another name of it)."""
    owned = {(axis.parameter, axis.axis, axis.blocks): axis for axis in traced.store.owned}
    dead = np.zeros(len(settled.group_of), dtype=bool)
    for cut in plan.cuts:
        axis = owned.get((cut.parameter, cut.axis, cut.blocks))
        if axis is not None:
            dead[settled.component[axis.start + cut.removed]] = True
    return dead[settled.component]


def _consumed(traced: Trace, settled: Settled) -> set[tuple[str, int, int]]:
    return {
        (axis.parameter, axis.axis, axis.blocks)
        for axis, consumed in zip(traced.store.owned, settled.consumed, strict=True)
        if consumed
    }


def _masked(tensor: torch.Tensor, axis: int, blocks: int, removed: np.ndarray, size: int) -> torch.Tensor:
    """The tensor with the removed positions of one axis set to zero."""
    alive = np.ones(size, dtype=bool)
    alive[removed] = False
    if blocks == 1:
        shape = [1] * tensor.dim()
        shape[axis] = size
        mask = alive.reshape(shape)
    else:
        rows = tensor.shape[0] // blocks
        mask = np.repeat(alive.reshape(blocks, -1), rows, axis=0).reshape(
            tensor.shape[0], -1, *(1,) * (tensor.dim() - 2)
        )
    return torch.where(
        torch.from_numpy(mask).to(tensor.device), tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device)
    )


class _Masked(Watcher):
    """Runs the original with statistics over surviving positions."""

    def __init__(self, traced: Trace, dead: np.ndarray) -> None:
        super().__init__()
        self.trace = traced
        self.dead = dead
        self.position = 0
        self.parameters = {id(labels) for labels in traced.parameters.values()}

    def on_call(self, call: Call, run: Callable[[], Any]) -> Any:
        with self.pause():
            packet = call.name.rpartition(".")[0] if call.name.count(".") == 2 else call.name
            record = self.trace.records[self.position] if self.position < len(self.trace.records) else None
            if record is None or record.name != call.name:
                # Calls without a tensor result have no record.
                return run()
            if packet == "torch.batch_norm" and not call.get("training"):
                result = run()
            elif packet in _STATISTICS and any(self.dead[e.labels].any() for m in record.inputs for e in m.entries):
                result = self._over_survivors(call, record)
            elif packet in _PRODUCTS and self._without_parameter(record):
                result = self._product(call, record)
            else:
                result = run()
            if any(True for _ in tensors_in(result)):
                self.position += 1
            return result

    def _cut(self, tensor: torch.Tensor, labels: LabelMap) -> torch.Tensor:
        mask = self._alive(labels)
        if mask is None:
            return tensor
        selected = tensor[mask.expand(tensor.shape).to(tensor.device)]
        return selected.reshape(surviving_shape(labels, self.dead))

    def _alive(self, labels: LabelMap) -> torch.Tensor | None:
        mask: np.ndarray | None = None
        for entry in labels.entries:
            if self.dead[entry.labels].any():
                shape = [size if axis in entry.axes else 1 for axis, size in enumerate(labels.shape)]
                part = ~self.dead[entry.labels].reshape(shape)
                mask = part if mask is None else mask & part
        return None if mask is None else torch.from_numpy(np.ascontiguousarray(mask))

    def _over_survivors(self, call: Call, record: Any) -> Any:
        arguments = dict(call.arguments)
        maps = iter(record.inputs)
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                arguments[name] = self._cut(value, next(maps))
        if record.rule is not None and record.rule.expected is not None:
            inputs = [surviving_shape(m, self.dead) for m in record.inputs]
            outputs = [surviving_shape(m, self.dead) for m in record.outputs]
            sizes = record.rule.expected(record, inputs, outputs, self.dead)
            name = "normalized_shape" if "normalized_shape" in arguments else "num_groups"
            arguments[name] = sizes if name == "normalized_shape" else sizes[0]
        result = _call(call, arguments)
        outputs = iter(record.outputs)

        def scatter(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                labels = next(outputs)
                mask = self._alive(labels)
                if mask is None:
                    return value
                # Ones, so that nothing at the dead positions divides by zero.
                full = torch.ones(labels.shape, dtype=value.dtype, device=value.device)
                full[mask.expand(labels.shape).to(value.device)] = value.reshape(-1)
                return full
            if isinstance(value, (list, tuple)):
                return type(value)(scatter(item) for item in value)
            return value

        return scatter(result)

    def _without_parameter(self, record: Any) -> bool:
        """Neither factor is a parameter, whose removed positions are zero already."""
        return not any(id(m) in self.parameters for m in record.inputs[:2]) and any(
            self.dead[e.labels].any() for m in record.inputs for e in m.entries
        )

    def _product(self, call: Call, record: Any) -> Any:
        """A product of activations or computed weights: dead channels of either must not reach the sum."""
        arguments = dict(call.arguments)
        maps = iter(record.inputs)
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                mask = self._alive(next(maps))
                if mask is not None:
                    arguments[name] = value.masked_fill(~mask.to(value.device), 0)
        return _call(call, arguments)


def _call(call: Call, arguments: dict[str, Any]) -> Any:
    if isinstance(call.function, Composite):
        return call.function.call(arguments)
    names = [argument.name for argument in call.function._schema.arguments if not argument.kwarg_only]
    args = []
    rest = dict(arguments)
    for name in names:
        if name not in rest:
            break
        args.append(rest.pop(name))
    return call.function(*args, **rest)


@torch.inference_mode(False)
def verify(model: nn.Module, pruned: nn.Module, plan: Plan, inputs: Any) -> float:
    """Masked equivalence of a pruned model.

    Both run in eval mode; their training flags are left as they were and neither is changed.

    Args:
        model: the original.
        pruned: what the plan made of it (not retrained).
        plan: the plan.
        inputs: as for `analyze`.

    Returns:
        max |difference| / max |output| over all output tensors (not over a transformer's cache); infinite if shapes
        differ, values are not finite where the masked original's are, or the masked original gives NaN (then nothing
        is proved).

    Raises:
        RecordError: the plan is of another model.
        ModelError: a forward fails.
    """
    original, smaller = unwrap(model), unwrap(pruned, "pruned")
    given = bind_inputs(inputs)
    check_plan(original, given_plan(plan))
    with _same_random_numbers():
        traced = trace(original, given, modes=("real",))
    settled = settle(traced.store)
    dead = _dead_labels(plan, traced, settled)
    consumed = _consumed(traced, settled)
    by_name: dict[str, list[Any]] = {}
    for cut in plan.cuts:
        if (cut.parameter, cut.axis, cut.blocks) in consumed:
            by_name.setdefault(cut.parameter, []).append(cut)
    names = dict(original.named_parameters()) | dict(original.named_buffers())
    for name in by_name:
        if name not in names:
            raise RecordError(f"parameter {name!r} of the plan is not in {type(original).__name__}")

    def convert(name: str, tensor: torch.Tensor) -> torch.Tensor:
        result = tensor.detach().clone()
        for cut in by_name.get(name, ()):
            result = _masked(result, cut.axis, cut.blocks, cut.removed, cut.size)
        return result

    masked = copy_structure(original, convert)
    masked.eval()
    own = given.to(torch.clone)  # a forward may write into its inputs
    with _same_random_numbers(), _Masked(traced, dead):
        expected = [tensor.detach() for tensor in outputs_in(masked(*own.args, **own.kwargs))]
    # A copy of the structure, so that what the forward leaves on the model (caches, memories) is not kept.
    twin = copy_structure(smaller, lambda name, tensor: tensor if isinstance(tensor, nn.Parameter) else tensor.clone())
    with _same_random_numbers():
        actual = _run_eval(twin, given.to(torch.clone))
    return (
        max((_difference(e, a) for e, a in zip(expected, actual, strict=True)), default=0.0)
        if len(expected) == len(actual)
        else float("inf")
    )


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Some models draw numbers in evaluation too (masked autoencoders)."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def _run_eval(model: nn.Module, inputs: Inputs) -> list[torch.Tensor]:
    flags = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            return [tensor.detach() for tensor in outputs_in(model(*inputs.args, **inputs.kwargs))]
    finally:
        for module, training in flags.items():
            module.training = training


def _difference(expected: torch.Tensor, actual: torch.Tensor) -> float:
    if expected.shape != actual.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    if not expected.is_floating_point():
        return 0.0 if bool((expected == actual).all()) else float("inf")
    a, b = expected.double().cpu(), actual.double().cpu()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, torch.zeros_like(a), (a - b).abs())
    finite = a[a.isfinite()]
    if a.isnan().any() or not finite.numel():
        return float("inf")  # nothing can be proved
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    worst = float(difference.max())
    return worst / max(scale, 1e-30) if np.isfinite(worst) else float("inf")
