"""Random networks: whatever is removed, the smaller model means what the masked original means."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nets.checks import difference, example_call, forward_backward, same_state, snapshot
from nets.masking import distinct_, masked_by_hand
from nets.random_nets import KINDS, Block, Spec, specs
from nets.selection import some_of_each_block
from openwork.errors import NothingToPruneError
from openwork.torch import analyze, prune, verify

TOLERANCE = 5e-5
FIXED = settings(
    max_examples=40,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
WITHOUT_NORMS = tuple(kind for kind in KINDS if kind != "norm")


def prune_or_discard(model: nn.Module, inputs: Tensor, **options: Any) -> tuple[nn.Module, Any]:
    """`prune`; a network that is frozen altogether is no example."""
    try:
        return prune(model, inputs, **options)
    except NothingToPruneError:
        assume(False)
        raise


@FIXED
@given(specs(), st.sampled_from([0.25, 0.5, 0.75]))
@example(Spec(8, (Block("shuffle", (0,), 8, 0), Block("grouped", (1,), 8, 0))), 0.5)
def test_all_groups_together(spec: Spec, ratio: float) -> None:
    model, inputs = spec.build(), spec.inputs()
    before = snapshot(model)
    pruned, plan = prune_or_discard(model, inputs, ratio=ratio)
    assert same_state(before, snapshot(model))
    assert sum(p.numel() for p in pruned.parameters()) < sum(p.numel() for p in model.parameters())
    assert verify(model, pruned, plan, inputs) <= TOLERANCE
    forward_backward(pruned.train(), inputs)


@FIXED
@given(specs(kinds=WITHOUT_NORMS))
def test_against_the_reference_by_hand(spec: Spec) -> None:
    model, inputs = spec.build(), spec.inputs()
    distinct_(model)
    pruned, _ = prune_or_discard(model, inputs, ratio=0.5)
    with torch.no_grad():
        expected = example_call(masked_by_hand(model, pruned), inputs)
        assert difference(expected, example_call(pruned, inputs)) <= TOLERANCE


@FIXED
@given(specs(), st.integers(0, 99), st.integers(1, 8))
def test_one_group_alone(spec: Spec, choice: int, count: int) -> None:
    model, inputs = spec.build(), spec.inputs()
    groups = [group for group in analyze(model, inputs).groups if group.most_steps]
    assume(groups)
    group = groups[choice % len(groups)]
    removed = some_of_each_block(group, count, np.random.default_rng(choice))
    pruned, plan = prune(model, inputs, groups={group.index: removed})
    assert verify(model, pruned, plan, inputs) <= TOLERANCE
    forward_backward(pruned, inputs)


@FIXED
@given(specs(), st.integers(0, 99))
def test_random_units_of_every_group(spec: Spec, seed: int) -> None:
    """Not the least important ones but any, another number in each group."""
    model, inputs = spec.build(), spec.inputs()
    generator = np.random.default_rng(seed)
    chosen = {}
    for group in analyze(model, inputs).groups:
        if group.most_steps:
            steps = int(generator.integers(1, group.most_steps + 1))
            chosen[group.index] = some_of_each_block(group, steps, generator)
    assume(chosen)
    pruned, plan = prune(model, inputs, groups=chosen)
    assert verify(model, pruned, plan, inputs) <= TOLERANCE
    forward_backward(pruned, inputs)


@settings(FIXED, max_examples=20)
@given(specs(max_blocks=4))
def test_pruning_twice_composes(spec: Spec) -> None:
    model, inputs = spec.build(), spec.inputs()
    first, _ = prune_or_discard(model, inputs, ratio=0.25)
    second, plan = prune_or_discard(first, inputs, ratio=0.25)
    assert verify(first, second, plan, inputs) <= TOLERANCE
