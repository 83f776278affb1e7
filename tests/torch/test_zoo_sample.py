"""The quick part of the zoo; `benchmarks/zoo_coverage.py` runs all of it."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from nets.checks import forward_backward, multiply_accumulates, same_state, snapshot
from nets.selection import half_of_each_block
from nets.zoo import SAMPLE, ZOO, find
from openwork.torch import analyze, prune, verify

pytestmark = pytest.mark.zoo
TOLERANCE = 1e-4
GROUPS_ALONE = 3


@pytest.mark.parametrize("name", SAMPLE)
def test_all_groups_together(name: str) -> None:
    net = find(name)
    model, inputs = net.build(), net.inputs(size=SAMPLE[name] or None)
    before = snapshot(model)
    pruned, plan = prune(model, inputs, ratio=0.5)
    assert same_state(before, snapshot(model))
    assert list(pruned.state_dict()) == list(model.state_dict())
    assert verify(model, pruned, plan, inputs) <= TOLERANCE
    forward_backward(pruned, inputs)

    kept = multiply_accumulates(pruned, inputs) / multiply_accumulates(model, inputs)
    baseline = net.torch_pruning_kept
    assert kept <= (0.40 if baseline is not None and baseline <= 0.36 else 0.60)
    after = dict(pruned.named_parameters())
    for pattern in net.shrink:
        rows = [(p.shape[0], after[key].shape[0]) for key, p in model.named_parameters() if re.search(pattern, key)]
        assert rows, f"{pattern} names no parameter"
        assert any(new < old for old, new in rows), f"{pattern} lost no rows"


@pytest.mark.parametrize("name", SAMPLE)
def test_some_groups_alone(name: str) -> None:
    """A fixed sample of the groups, spread over the depth of the network."""
    net = find(name)
    model, inputs = net.build(), net.inputs(size=SAMPLE[name] or None)
    groups = [group for group in analyze(model, inputs).groups if group.most_steps]
    picked = [groups[i] for i in sorted({round(x) for x in np.linspace(0, len(groups) - 1, GROUPS_ALONE)})]
    for group in picked:
        removed = half_of_each_block(group, np.random.default_rng(group.index))
        pruned, plan = prune(model, inputs, groups={group.index: removed})
        assert verify(model, pruned, plan, inputs) <= TOLERANCE, f"group {group.index}"
        with torch.no_grad():
            assert multiply_accumulates(pruned, inputs) <= multiply_accumulates(model, inputs)


def test_the_zoo_has_all_its_networks() -> None:
    images = [net for net in ZOO.values() if net.source != "transformers"]
    assert len(images) == 68
    assert sum(net.torch_pruning_kept is not None for net in images) == 38
    assert {"hf_bert", "hf_gpt2", "hf_llama", "hf_vit", "hf_t5"} <= set(ZOO)
