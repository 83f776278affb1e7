"""`verify` against a reference by hand, and that it fails when it must."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from nets.checks import difference, example_call
from nets.masking import distinct_, masked_by_hand
from nets.micro import NETS
from openwork.errors import ConfigError
from openwork.torch import prune, verify

# Nets without statistics across channels, for which the reference by hand holds.
PLAIN = ["plain_conv_bn", "residual", "concat", "flatten_spatial_linear", "grouped_conv", "depthwise_multiplier"]
PLAIN += ["transposed_conv", "known_case_linear_norm", "squeeze_excitation_conv", "attention_fused", "swi_glu"]


def error_by_hand(model: nn.Module, reference: nn.Module, pruned: nn.Module, inputs: object) -> float:
    with torch.no_grad():
        return difference(example_call(masked_by_hand(model, reference), inputs), example_call(pruned, inputs))


def roll_(tensor: Tensor, axis: int) -> None:
    with torch.no_grad():
        tensor.copy_(tensor.roll(1, axis))


@pytest.mark.parametrize("name", PLAIN)
def test_right_cut_passes(name: str) -> None:
    net = NETS[name]
    model, inputs = net.build(), net.example()
    distinct_(model)
    pruned, plan = prune(model, inputs, ratio=0.5)
    assert error_by_hand(model, pruned, pruned, inputs) <= 1e-5
    assert verify(model, pruned, plan, inputs) <= 1e-5


@pytest.mark.parametrize(
    ("name", "corrupt"),
    [
        ("plain_conv_bn", lambda m: roll_(m.conv1.weight, 0)),
        ("plain_conv_bn", lambda m: roll_(m.conv2.weight, 1)),
        ("plain_conv_bn", lambda m: roll_(m.bn.weight, 0)),
        ("plain_conv_bn", lambda m: roll_(m.bn.bias, 0)),
        ("plain_conv_bn", lambda m: roll_(m.bn.running_mean, 0)),
        ("plain_conv_bn", lambda m: roll_(m.bn.running_var, 0)),
        ("residual", lambda m: roll_(m.b.weight, 0)),
        ("concat", lambda m: roll_(m.c.weight, 1)),
        ("flatten_spatial_linear", lambda m: roll_(m.get_submodule("3").weight, 1)),
        ("grouped_conv", lambda m: roll_(m.grouped.weight, 1)),
        ("depthwise_multiplier", lambda m: roll_(m.get_submodule("2").weight, 0)),
        ("transposed_conv", lambda m: roll_(m.up.weight, 0)),
        ("attention_fused", lambda m: roll_(m.qkv.bias, 0)),
        ("layer_norm_last", lambda m: roll_(m.norm.weight, 0)),
        ("embedding_stream", lambda m: roll_(m.embed.weight, 1)),
    ],
)
def test_wrong_cut_fails(name: str, corrupt: Callable[[nn.Module], None]) -> None:
    """The right number of channels, but not the right ones: everything runs, and only the numbers tell."""
    net = NETS[name]
    model, inputs = net.build(), net.example()
    distinct_(model)
    pruned, plan = prune(model, inputs, ratio=0.5)
    corrupt(pruned)
    assert verify(model, pruned, plan, inputs) > 1e-2


def test_error_is_the_largest_difference_over_the_largest_output() -> None:
    net = NETS["plain_conv_bn"]
    model, inputs = net.build(), net.example()
    distinct_(model)
    pruned, plan = prune(model, inputs, ratio=0.5)
    reference = pruned.conv2.bias.detach().clone()
    for offset in (0.01, 0.5):
        with torch.no_grad():
            pruned.conv2.bias.copy_(reference + offset)
            largest = example_call(masked_by_hand(model, pruned), inputs).abs().max()
        assert verify(model, pruned, plan, inputs) == pytest.approx(offset / float(largest), rel=1e-3)


def test_worst_of_several_outputs_counts() -> None:
    net = NETS["returns_nested_tuple"]
    model, inputs = net.build(), net.example()
    distinct_(model)
    pruned, plan = prune(model, inputs, ratio=0.5)
    roll_(pruned.aux.weight, 1)
    assert verify(model, pruned, plan, inputs) > 1e-2


def test_pruned_model_that_does_not_run_is_no_pass() -> None:
    net = NETS["plain_conv_bn"]
    model, inputs = net.build(), net.example()
    distinct_(model)
    pruned, plan = prune(model, inputs, ratio=0.5)
    pruned.conv2.weight = nn.Parameter(pruned.conv2.weight[:, 1:].detach().clone())
    with pytest.raises(Exception, match=r".+"):
        verify(model, pruned, plan, inputs)


def test_criteria_that_need_gradients_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    for name in ("taylor", "fisher"):
        with pytest.raises(ConfigError, match=f"importance is '{name}', which needs gradients.* one of 'balanced_l2'"):
            prune(model, torch.rand(2, 8), importance=name)
