"""Micro-nets: what pruning leaves, that it runs, and that it means what the masked original means."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nets.checks import difference, example_call, forward_backward, multiply_accumulates, same_state, snapshot
from nets.masking import distinct_, masked_by_hand
from nets.micro import NETS, MicroNet
from nets.selection import half_of_each_block
from openwork.errors import NothingToPruneError
from openwork.torch import analyze, prune, verify

TOLERANCE = 2e-5

# Statistics across channels: zeros are not the same as absence there, so the hand-made reference does not apply.
ACROSS_CHANNELS = {
    "attention_across_channels": "softmax and norms over the channels of a head",
    "attention_head_norm": "norms over the channels of a head",
    "attention_linear": "ratio of sums over channels",
    "channel_buffers": "divided by a buffer, which must not be masked",
    "channel_mean_gate": "mean and maximum over channels",
    "channel_softmax": "softmax over channels",
    "class_token": "layer norm",
    "dynamic_conv": "softmax over the experts, which are channels too",
    "embedding_stream": "layer norm",
    "encoder_layer": "layer norm",
    "global_response_norm": "mean over channels",
    "gram_matrix": "activations contracted with each other: there is no weight to mask",
    "group_norm": "statistics of a group of channels",
    "group_norm_one_group": "statistics of all channels",
    "layer_norm_by_hand": "layer norm",
    "layer_norm_last": "layer norm",
    "layer_norm_permuted": "layer norm",
    "layer_norm_whole_image": "layer norm",
    "learned_positions": "layer norm",
    "low_rank_update": "the rank is contracted between two parameters",
    "mask_where_clamp": "mean over channels",
    "mlp_mixer": "layer norm",
    "normalised_vectors": "norm over channels",
    "quantised_weights": "the scale is the largest weight of a filter",
    "returns_pooled_score": "mean over channels",
    "rms_norm": "mean over channels",
    "sinusoidal_position_buffer": "layer norm",
    "sorted_channels": "sorting over channels",
    "spatial_gating_unit": "layer norm",
    "spectral_norm": "norm over all channels",
    "summed_embeddings": "layer norm",
    "tied_embedding_head": "layer norm",
    "twin_towers": "similarities over channels",
    "weight_norm": "length of a filter",
    "weight_norm_transposed": "length of a filter",
    "weight_standardisation": "mean and variance of a filter",
    "window_attention": "layer norm",
    "window_partition": "layer norm",
}

nets = pytest.mark.parametrize("net", NETS.values(), ids=list(NETS))
prunable = pytest.mark.parametrize(
    "net", [n for n in NETS.values() if not n.nothing], ids=[n.name for n in NETS.values() if not n.nothing]
)


def prune_net(net: MicroNet, model: nn.Module, inputs: Any) -> tuple[nn.Module, Any]:
    """`prune` with the net's settings; skips where freezing everything is right too."""
    try:
        return prune(model, inputs, ratio=net.ratio, round_to=net.round_to)
    except NothingToPruneError:
        if not net.optional:
            raise
        assert analyze(model, inputs).frozen
        pytest.skip("all frozen, which is right for this net")


@nets
def test_analysis_is_printed(net: MicroNet) -> None:
    model, inputs = net.build(), net.example()
    assert f"{type(model).__name__}: " in str(analyze(model, inputs))


@prunable
def test_pruned_model_means_what_the_masked_original_means(net: MicroNet) -> None:
    model, inputs = net.build(), net.example()
    with torch.no_grad():
        example_call(model, inputs)  # models that keep results of an earlier call must not bring them along
    before = snapshot(model)
    pruned, plan = prune_net(net, model, inputs)

    assert same_state(before, snapshot(model)), "prune changed the model it was given"
    assert not model.training
    assert sum(p.numel() for p in pruned.parameters()) < sum(p.numel() for p in model.parameters())
    assert multiply_accumulates(pruned, inputs) < multiply_accumulates(model, inputs)
    assert type(pruned) is type(model)
    assert list(pruned.state_dict()) == list(model.state_dict())
    assert verify(model, pruned, plan, inputs) <= TOLERANCE
    assert same_state(before, snapshot(model)), "verify changed the model it was given"
    forward_backward(pruned, inputs)
    forward_backward(pruned.train(), inputs)


@pytest.mark.parametrize("name", sorted(name for name, net in NETS.items() if net.kept))
def test_kept_shapes(name: str) -> None:
    net = NETS[name]
    model = net.build()
    pruned, _ = prune(model, net.example(), ratio=net.ratio, round_to=net.round_to)
    state = {**dict(pruned.named_parameters()), **dict(pruned.named_buffers()), **pruned.state_dict()}
    assert {key: tuple(state[key].shape) for key in net.kept} == dict(net.kept)


@prunable
def test_pruned_model_equals_hand_masked_original(net: MicroNet) -> None:
    if net.name in ACROSS_CHANNELS:
        pytest.skip(ACROSS_CHANNELS[net.name])
    model, inputs = net.build(), net.example()
    distinct_(model)
    pruned, _ = prune_net(net, model, inputs)
    with torch.no_grad():
        expected = example_call(masked_by_hand(model, pruned), inputs)
        assert difference(expected, example_call(pruned, inputs)) <= TOLERANCE


@prunable
def test_each_group_alone(net: MicroNet) -> None:
    model, inputs = net.build(), net.example()
    failures = []
    for group in analyze(model, inputs).groups:
        removed = half_of_each_block(group, np.random.default_rng(group.index))
        if not len(removed):
            continue
        try:
            pruned, plan = prune(model, inputs, groups={group.index: removed})
            error = verify(model, pruned, plan, inputs)
            forward_backward(pruned, inputs)
        except Exception as exception:
            failures.append((group.index, f"{type(exception).__name__}: {exception}"))
        else:
            if error > TOLERANCE:
                failures.append((group.index, f"error {error:.2g}"))
    assert not failures


@nets
def test_frozen_parameters_are_named_with_a_reason(net: MicroNet) -> None:
    analysis = analyze(net.build(), net.example())
    assert all(entry.reason and "\n" not in entry.reason for entry in analysis.frozen)
    named = {name for entry in analysis.frozen for name, _, _ in entry.members}
    assert set(net.frozen) <= named


@pytest.mark.parametrize("name", sorted(name for name, net in NETS.items() if net.nothing))
def test_nothing_to_prune_is_said(name: str) -> None:
    net = NETS[name]
    with pytest.raises(NothingToPruneError):
        prune(net.build(), net.example(), ratio=net.ratio)


@nets
def test_analysis_counts_what_torch_counts(net: MicroNet) -> None:
    model, inputs = net.build(), net.example()
    analysis = analyze(model, inputs)
    assert analysis.params == sum(parameter.numel() for parameter in model.parameters())
    counted = multiply_accumulates(model, inputs)
    # torch's counter knows no RNN kernels, no addmv and no einsum that it decomposes differently.
    if net.name not in {"lstm_in_the_middle", "gru_in_the_middle", "spectral_norm"}:
        assert analysis.macs == pytest.approx(counted, rel=1e-6)
