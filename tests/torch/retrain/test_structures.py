"""Every micro-net and random nets through the flow: the record states the whole truth about the pruned model."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from nets.checks import difference, example_call, same_state, snapshot
from nets.micro import NETS, MicroNet
from nets.random_nets import Spec, specs
from nets.retrain import channels_config, create
from openwork.errors import NothingToPruneError
from openwork.torch import restore_prune_retrain_model, verify
from openwork.torch.retrain.records import plan_from_record

# AMCT's interface takes positional inputs only.
POSITIONAL = [name for name, net in NETS.items() if not isinstance(net.example(), dict)]


def must_shrink(net: MicroNet) -> bool:
    """Whether a layer of a type that is pruned by default is known to lose outputs."""
    model = net.build()
    for name, shape in net.kept.items():
        module = model.get_submodule(name.rpartition(".")[0])
        if isinstance(module, (nn.Conv2d, nn.Linear)) and shape[0] < module.weight.shape[0]:
            return True
    return False


@pytest.mark.parametrize("name", POSITIONAL)
def test_restored_model_is_the_created_one(name: str, tmp_path: Path) -> None:
    net = NETS[name]
    model, inputs = net.build(), net.example()
    try:
        pruned, record = create(model, inputs, tmp_path, channels_config(0.5))
    except NothingToPruneError:
        assert net.nothing or net.optional or not must_shrink(net)
        return
    torch.save(pruned.state_dict(), tmp_path / "w.pth")
    restored = restore_prune_retrain_model(
        net.build(), inputs, tmp_path / "record.txt", tmp_path / "prune.cfg", tmp_path / "w.pth"
    )
    assert repr(restored) == repr(pruned)
    assert same_state(snapshot(restored), snapshot(pruned))
    with torch.no_grad():
        assert difference(example_call(restored.eval(), inputs), example_call(pruned.eval(), inputs)) == 0
    assert verify(model, pruned, plan_from_record(record, model), inputs) <= 2e-5


@settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(specs(max_blocks=5), st.sampled_from([0.1, 0.3, 0.5, 0.75, 0.9]), st.booleans())
def test_random_nets_restore(spec: Spec, ratio: float, aligned: bool) -> None:
    inputs = spec.inputs()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            pruned, record = create(spec.build(), inputs, folder, channels_config(ratio, aligned))
        except NothingToPruneError:
            assume(False)
        torch.save(pruned.state_dict(), folder / "w.pth")
        restored = restore_prune_retrain_model(
            spec.build(), inputs, folder / "record.txt", folder / "prune.cfg", folder / "w.pth"
        )
    assert repr(restored) == repr(pruned)
    assert same_state(snapshot(restored), snapshot(pruned))
    with torch.no_grad():
        assert difference(example_call(restored.eval(), inputs), example_call(pruned.eval(), inputs)) == 0
    model = spec.build()
    assert verify(model, pruned, plan_from_record(record, model), inputs) <= 2e-5
