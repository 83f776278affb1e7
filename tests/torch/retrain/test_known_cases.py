"""Networks for which AMCT's answers, or its faults, are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from nets.retrain import (
    ConcatNet,
    DeepNet,
    GroupChain,
    GroupSums,
    LinearNorm,
    channels_config,
    create,
    node_of,
    override,
    settle_,
)
from openwork.torch import restore_prune_retrain_model, save_prune_retrain_model


def test_added_grouped_convolutions_keep_120_and_are_one_record(tmp_path: Path) -> None:
    pruned, record = create(GroupSums(), torch.randn(1, 16, 28, 28), tmp_path, channels_config(0.25))
    for unit in (pruned.a, pruned.b, pruned.c, pruned.d):
        assert (unit[0].out_channels, unit[0].weight.shape) == (120, (120, 8, 3, 3))
        assert (unit[1].num_features, unit[1].weight.shape) == (120, (120,))
    for head in (pruned.head1, pruned.head2):
        assert (head[0].in_channels, head[0].weight.shape) == (120, (80, 60, 1, 1))
    (group,) = record.channels
    assert {node.name for node in group.producers} == {"a.0", "b.0", "c.0", "d.0"}
    assert {node.name for node in group.consumers} == {"a.1", "b.1", "c.1", "d.1", "head1.0", "head2.0"}
    for node in group.producers:
        assert (node.type, node.begin, node.end, node.group, node.prune_group) == ("Conv", 0, 160, 2, 2)
        # Both halves lose the same number, or the grouped readers could not run.
        assert [(node.prune_index < 80).sum(), (node.prune_index >= 80).sum()] == [20, 20]
    assert {node.type for node in group.consumers} == {"Conv", "BatchNormalization"}


def test_circular_padding_is_cut_like_any_other(tmp_path: Path) -> None:
    model, inputs = settle_(GroupSums()).eval(), torch.randn(1, 16, 28, 28)
    pruned, record = create(model, inputs, tmp_path, channels_config(0.25))
    gone = torch.from_numpy(node_of(record, "a.0").prune_index)
    with torch.no_grad():
        for head in (model.head1[0], model.head2[0]):
            # Readers of the removed channels, zeroed by hand: position i of half h is entry i of that half's rows.
            for position in gone.tolist():
                head.weight[(position // 80) * 40 : (position // 80 + 1) * 40, position % 80] = 0
        for ours, masked in zip(pruned.eval()(inputs), model(inputs)):
            torch.testing.assert_close(ours, masked, rtol=1e-4, atol=1e-4)


def test_chain_of_groups_is_aligned(tmp_path: Path) -> None:
    pruned, _ = create(GroupChain(), torch.randn(1, 16, 8, 8), tmp_path, channels_config(0.5, aligned=True))
    assert (pruned[0].out_channels, pruned[2].out_channels) == (32, 32)
    assert (pruned[2].groups, pruned[2].weight.shape) == (2, (32, 16, 3, 3))
    # In groups of 2, the third is cut to one channel a group, which leaves it 32 groups.
    assert (pruned[4].groups, pruned[4].weight.shape) == (32, (32, 1, 3, 3))
    assert pruned[6].weight.shape == (8, 32, 1, 1)


def test_linear_without_bias_before_a_norm_is_pruned_too(tmp_path: Path) -> None:
    pruned, record = create(LinearNorm(), torch.randn(4, 16), tmp_path, channels_config(0.5))
    assert (pruned.fc1.out_features, pruned.fc2.in_features, pruned.fc2.out_features) == (512, 512, 64)
    assert (pruned.bn1.num_features, pruned.bn2.num_features, pruned.fc3.in_features) == (512, 64, 64)
    assert (node_of(record, "fc1").type, node_of(record, "fc2").type) == ("Gemm", "MatMul")


def test_deep_net_restores_exactly(tmp_path: Path) -> None:
    model, inputs = settle_(DeepNet()), torch.randn(2, 2, 16, 16)
    pruned, _ = create(model, inputs, tmp_path, channels_config(0.5))
    assert pruned.layers[0][0].out_channels == 8
    pruned.train()(inputs)  # moves the statistics
    torch.save(pruned.state_dict(), tmp_path / "w.pth")
    restored = restore_prune_retrain_model(
        DeepNet(), inputs, str(tmp_path / "record.txt"), str(tmp_path / "prune.cfg"), str(tmp_path / "w.pth")
    )
    with torch.no_grad():
        assert torch.equal(restored.eval()(inputs), pruned.eval()(inputs))


def test_deep_net_with_masks_and_one_layer_of_channels(tmp_path: Path) -> None:
    """2:4 everywhere, chosen again at each step, and half of the first convolution's channels."""
    text = "prune_config { n_out_of_m_pruner { l1_selective_prune { n_out_of_m_type: M4N2 update_freq: 1 } } }\n"
    inputs = torch.randn(2, 2, 16, 16)
    pruned, _ = create(settle_(DeepNet()), inputs, tmp_path, text + override("layer", "layers.0.0", 0.5))
    assert [pruned.layers[0][0].out_channels, pruned.layers[1][0].in_channels] == [8, 8]
    assert [pruned.layers[1][0].out_channels, pruned.fc1.out_features] == [16, 1024]
    pruned(inputs).sum().backward()
    pruned(inputs)
    torch.save(pruned.state_dict(), tmp_path / "w.pth")
    restored = restore_prune_retrain_model(
        DeepNet(), inputs, tmp_path / "record.txt", tmp_path / "prune.cfg", tmp_path / "w.pth"
    )
    with torch.no_grad():
        assert torch.equal(restored.eval()(inputs), pruned.eval()(inputs))
    save_prune_retrain_model(restored, tmp_path / "m", inputs)
    for name in ("m_deploy_model.onnx", "m_fake_quant_model.onnx"):
        weights = {item.name: numpy_helper.to_array(item) for item in onnx.load(tmp_path / name).graph.initializer}
        assert weights["layers.0.0.weight"].shape == (8, 2, 3, 3)
        # Groups of four along the inputs of each output: two zeros each.
        assert ((weights["fc1.weight"].reshape(1024, 512, 4) == 0).sum(2) == 2).all()


def test_concatenated_channels_are_absolute_in_their_reader(tmp_path: Path) -> None:
    model = ConcatNet()
    with torch.no_grad():
        # What is to go gets small weights: a's 1 3 4 7 and b's 0 2 3 7 10 11.
        model.a.weight[[1, 3, 4, 7]] *= 1e-3
        model.b.weight[[0, 2, 3, 7, 10, 11]] *= 1e-3
    pruned, record = create(model, torch.randn(1, 3, 8, 8), tmp_path, channels_config(0.5))
    assert (pruned.a.out_channels, pruned.b.out_channels, pruned.c.in_channels) == (4, 6, 10)
    first, second = record.channels
    assert [node.name for node in (*first.producers, *first.consumers)] == ["a", "c"]
    assert [node.name for node in (*second.producers, *second.consumers)] == ["b", "c"]
    (reader,) = first.consumers
    assert (reader.begin, reader.end, reader.prune_index.tolist()) == (0, 8, [1, 3, 4, 7])
    assert second.producers[0].prune_index.tolist() == [0, 2, 3, 7, 10, 11]
    (reader,) = second.consumers
    assert (reader.begin, reader.end, reader.prune_index.tolist()) == (8, 20, [8, 10, 11, 15, 18, 19])


# Kept channels by AMCT's rule for ratios .3, .5, .9: plain, aligned to 16, and with tied blocks.
COUNTS = [
    (5, 1, (3, 3, 1), (5, 5, 5)),
    (10, 1, (7, 5, 1), (10, 10, 10)),
    (20, 1, (14, 10, 2), (16, 16, 16)),
    (24, 1, (17, 12, 2), (24, 16, 16)),
    (33, 1, (23, 17, 3), (32, 32, 16)),
    (48, 1, (34, 24, 5), (48, 32, 16)),
    (48, 3, (33, 24, 3), (48, 30, 15)),
    (36, 6, (24, 18, 6), None),
]


@pytest.mark.parametrize(
    ("total", "blocks", "aligned", "counts"),
    [(n, g, False, plain) for n, g, plain, _ in COUNTS] + [(n, g, True, known) for n, g, _, known in COUNTS if known],
)
def test_counting_table(total: int, blocks: int, aligned: bool, counts: tuple[int, ...], tmp_path: Path) -> None:
    for ratio, kept in zip((0.3, 0.5, 0.9), counts):
        # A second pair that is always pruned, as nothing at all to prune would be an error.
        model = nn.Sequential(
            nn.Conv2d(3 * blocks, total, 1, groups=blocks),
            nn.Conv2d(total, 2 * blocks, 1, groups=blocks),
            nn.Conv2d(2 * blocks, 32, 1),
            nn.Conv2d(32, 2, 1),
        )
        inputs = torch.randn(1, 3 * blocks, 4, 4)
        text = channels_config(ratio, aligned, override("layer", "2", 0.5))
        pruned, _ = create(model, inputs, tmp_path, text)
        assert pruned[0].out_channels == kept
        assert pruned[1].in_channels == kept
        assert pruned(inputs).shape == (1, 2, 4, 4)


@pytest.mark.parametrize(("ratio", "aligned", "kept"), [(0.25, False, 15), (0.25, True, 16)])
def test_a_quarter_of_20(ratio: float, aligned: bool, kept: int, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 20, 1), nn.Conv2d(20, 5, 1))
    pruned, _ = create(net, torch.randn(1, 3, 4, 4), tmp_path, channels_config(ratio, aligned))
    assert pruned[0].out_channels == kept


def test_the_weakest_by_balanced_norm_go(tmp_path: Path) -> None:
    """Two tied producers: each norm is scaled to 0..1 inside its layer, then the mean decides (NumPy by hand)."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(3, 12, 3), nn.Conv2d(3, 12, 3), nn.Conv2d(12, 4, 1)
            with torch.no_grad():
                self.b.weight *= 100  # a larger layer must not decide alone

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.a(x) + self.b(x))

    torch.manual_seed(5)
    model = Sum()
    scores = np.zeros(12)
    for layer in (model.a, model.b):
        norm = np.linalg.norm(layer.weight.detach().double().numpy().reshape(12, -1), axis=1) / layer.weight[0].numel()
        scores += (norm - norm.min()) / (norm.max() - norm.min()) / 2
    _, record = create(model, torch.randn(1, 3, 8, 8), tmp_path, channels_config(0.5))
    assert node_of(record, "a").prune_index.tolist() == sorted(np.argsort(scores, kind="stable")[:6].tolist())


def test_equal_channels_go_by_lowest_index(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 10, 1), nn.Conv2d(10, 5, 1))
    with torch.no_grad():
        net[0].weight.fill_(0.5)
    _, record = create(net, torch.randn(1, 3, 4, 4), tmp_path, channels_config(0.3))
    assert node_of(record, "0").prune_index.tolist() == [0, 1, 2]


def test_config_file_is_not_changed(tmp_path: Path) -> None:
    text = channels_config(0.5, extra="# mine\n")
    create(ConcatNet(), torch.randn(1, 3, 8, 8), tmp_path, text)
    assert (tmp_path / "prune.cfg").read_text() == text
