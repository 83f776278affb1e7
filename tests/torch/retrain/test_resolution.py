"""Overrides, skips and tied layers, through real models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nets.retrain import SmallNet, channels_config, create, override
from openwork.errors import ConfigError, NothingToPruneError

IMAGE = torch.randn(2, 3, 16, 16)


def widths(model: nn.Module) -> dict[str, int]:
    """Output channels of all convolutions and linear layers."""
    return {
        name: module.weight.shape[0]
        for name, module in model.named_modules()
        if isinstance(module, (nn.Conv2d, nn.Linear))
    }


FULL = {"conv1": 20, "conv2": 24, "conv3": 32, "fc1": 48, "fc2": 10}
HALF = {"conv1": 10, "conv2": 12, "conv3": 16, "fc1": 24, "fc2": 10}


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        (channels_config(0.5), {}),
        (channels_config(0.5, extra='skip_layers: "conv2"'), {"conv2": 24}),
        (channels_config(0.5, extra='regular_prune_skip_layers: "conv2"'), {"conv2": 24}),
        (
            channels_config(0.5, extra='skip_layers: "conv1" regular_prune_skip_layers: "conv2"'),
            {"conv1": 20, "conv2": 24},
        ),
        (channels_config(0.5, extra='skip_layer_types: "Linear"'), {"fc1": 48}),
        (channels_config(0.5, extra='regular_prune_skip_types: "Conv2d"'), {"conv1": 20, "conv2": 24, "conv3": 32}),
        # A skip for quantisation says nothing about pruning.
        (channels_config(0.5, extra='quant_skip_layers: "conv2" quant_skip_types: "Linear"'), {}),
        (channels_config(0.5, extra=override("layer", "conv2", 0.25)), {"conv2": 18}),
        (channels_config(0.5, extra=override("type", "Linear", 0.25)), {"fc1": 36}),
        # By name beats by type beats global.
        (
            channels_config(0.5, extra=override("type", "Conv2d", 0.25) + override("layer", "conv3", 0.75)),
            {"conv1": 15, "conv2": 18, "conv3": 8},
        ),
        # A skip beats an override, by name and by type.
        (channels_config(0.5, extra=override("layer", "conv2", 0.25) + 'skip_layers: "conv2"'), {"conv2": 24}),
        (channels_config(0.5, extra=override("layer", "fc1", 0.25) + 'skip_layer_types: "Linear"'), {"fc1": 48}),
        # An override alone turns on its own layer only.
        (override("layer", "conv2", 0.25), {**FULL, "conv2": 18}),
        (override("type", "Linear", 0.25), {**FULL, "fc1": 36}),
        (channels_config(0.5, extra=override("layer", "conv2", 0.5, aligned=True)), {"conv2": 16}),
        # A skip that names a module holds for everything in it: here the model's parts are layers already.
        (channels_config("0.3"), {"conv1": 14, "conv2": 17, "conv3": 22, "fc1": 34}),
    ],
)
def test_setting_of_each_layer(text: str, changed: dict[str, int], tmp_path: Path) -> None:
    pruned, _ = create(SmallNet(), IMAGE, tmp_path, text)
    assert widths(pruned) == {**HALF, **changed}


def test_skip_of_a_module_skips_what_is_inside(tmp_path: Path) -> None:
    net = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 12, 1)), nn.Conv2d(12, 16, 1), nn.Conv2d(16, 2, 1)
    )
    pruned, _ = create(net, IMAGE, tmp_path, channels_config(0.5, extra='skip_layers: "0"'))
    assert widths(pruned) == {"0.0": 8, "0.2": 12, "1": 8, "2": 2}


class OwnConv(nn.Conv2d):
    """A subclass, as libraries have them."""


def test_subclass_counts_as_the_class_it_extends(tmp_path: Path) -> None:
    net = nn.Sequential(OwnConv(3, 8, 1), nn.Conv2d(8, 12, 1), nn.Flatten(), nn.Linear(12 * 256, 8), nn.Linear(8, 2))
    pruned, _ = create(net, IMAGE, tmp_path, channels_config(0.5, extra='skip_layer_types: "Conv2d"'))
    assert widths(pruned) == {"0": 8, "1": 12, "3": 4, "4": 2}
    pruned, _ = create(net, IMAGE, tmp_path, channels_config(0.5, extra='skip_layer_types: "OwnConv"'))
    assert widths(pruned) == {"0": 8, "1": 6, "3": 4, "4": 2}


class Tied(nn.Module):
    """a and b are added; c reads the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 40, 1), nn.Conv2d(3, 40, 1), nn.Conv2d(40, 24, 1)
        self.d = nn.Conv2d(24, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(self.c(self.a(x) + self.b(x)))


@pytest.mark.parametrize(
    ("extra", "kept"),
    [
        ("", 20),
        (override("layer", "a", 0.25), 30),  # the smallest of the ratios
        (override("layer", "a", 0.75), 20),
        (override("layer", "a", 0.5, aligned=True), 32),  # aligned if any asks
        (override("layer", "a", 0.75) + override("layer", "b", 0.6, aligned=True), 16),
        ('skip_layers: "b"', 40),  # one that must not change keeps all
    ],
)
def test_tied_layers_agree(extra: str, kept: int, tmp_path: Path) -> None:
    pruned, _ = create(Tied(), IMAGE, tmp_path, channels_config(0.5, extra=extra))
    assert (pruned.a.out_channels, pruned.b.out_channels, pruned.c.in_channels) == (kept, kept, kept)
    assert pruned.c.out_channels == 12


def test_layer_without_a_setting_follows_its_tie(tmp_path: Path) -> None:
    pruned, _ = create(Tied(), IMAGE, tmp_path, override("layer", "a", 0.5))
    assert widths(pruned) == {"a": 20, "b": 20, "c": 24, "d": 2}


class SharedWeight(nn.Module):
    """The weight of the first layer is that of the last too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(8, 32), nn.Linear(32, 16)
        self.again, self.last = nn.Linear(8, 32), nn.Linear(32, 4)
        self.again.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.middle(self.first(x)).sum(1, keepdim=True) + self.last(self.again(x))


def test_skip_of_the_second_owner_of_a_weight_counts(tmp_path: Path) -> None:
    model, inputs = SharedWeight(), torch.randn(2, 8)
    pruned, _ = create(model, inputs, tmp_path, channels_config(0.5))
    assert widths(pruned) == {"first": 16, "middle": 8, "again": 16, "last": 4}
    assert pruned.first.weight is pruned.again.weight
    pruned, _ = create(model, inputs, tmp_path, channels_config(0.5, extra='skip_layers: "again"'))
    assert widths(pruned) == {"first": 32, "middle": 8, "again": 32, "last": 4}


def test_other_layers_are_pruned_on_request_only(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ConvTranspose2d(8, 12, 2), nn.ReLU(), nn.Conv2d(12, 2, 1))
    pruned, _ = create(net, IMAGE, tmp_path, channels_config(0.5))
    assert (pruned[0].out_channels, pruned[1].in_channels, pruned[1].out_channels) == (4, 4, 12)
    pruned, _ = create(net, IMAGE, tmp_path, channels_config(0.5, extra=override("type", "ConvTranspose2d", 0.25)))
    assert (pruned[1].out_channels, pruned[3].in_channels) == (9, 9)


def test_depthwise_follows_and_is_not_asked_for_by_itself(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 16, 3, groups=8), nn.Conv2d(16, 2, 1))
    pruned, record = create(net, IMAGE, tmp_path, channels_config(0.5))
    assert (pruned[0].out_channels, pruned[1].groups, pruned[1].out_channels, pruned[2].in_channels) == (4, 4, 8, 8)
    (group,) = record.channels
    assert [node.name for node in group.producers] == ["0"]
    assert [node.name for node in group.consumers] == ["1", "2"]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ('skip_layers: "conv9"', ["skip_layers", "'conv9'", "did you mean", "'conv1'"]),
        ('regular_prune_skip_types: "Conv2D"', ["regular_prune_skip_types", "'Conv2D'", "did you mean 'Conv2d'"]),
        (override("layer", "covn1", 0.5), ["override_layer_configs", "'covn1'", "'conv1'"]),
        (override("type", "Lineer", 0.5), ["override_layer_types", "'Lineer'", "'Linear'"]),
        (override("layer", "pool", 0.5), ["override_layer_configs", "'pool'", "cannot lose channels"]),
        (
            override("layer", "conv1", 0.5) + override("layer", "conv1", 0.25),
            ["override_layer_configs", "'conv1'", "twice"],
        ),
    ],
)
def test_names_that_do_not_fit(extra: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        create(SmallNet(), IMAGE, tmp_path, channels_config(0.5, extra=extra))
    message = str(caught.value)
    assert "\n" not in message
    for word in ["prune.cfg", *words]:
        assert word in message
    assert not (tmp_path / "record.txt").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (channels_config(0.5, extra='skip_layer_types: "Conv2d" skip_layer_types: "Linear"'), ["skip_layer_types"]),
        (override("layer", "fc2", 0.5), ["'fc2'", "the caller sees these channels"]),
        (channels_config(0.01), ["prune_ratio 0.01", "20", "'conv1'"]),
        (override("layer", "conv1", 0.1, aligned=True), ["multiple of 16", "'conv1'"]),
    ],
)
def test_nothing_to_prune_says_why(text: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(NothingToPruneError) as caught:
        create(SmallNet(), IMAGE, tmp_path, text)
    for word in ["prune.cfg", *words]:
        assert word in str(caught.value)
    assert not (tmp_path / "record.txt").exists()


def test_nothing_to_prune_for_a_tie(tmp_path: Path) -> None:
    with pytest.raises(NothingToPruneError, match=r"'a' is tied to 'b', and skip_layers names 'b'"):
        create(Tied(), IMAGE, tmp_path, override("layer", "a", 0.5) + 'skip_layers: "b"')


def test_never_less_than_amct_prunes(tmp_path: Path) -> None:
    """What stops all pruning in AMCT (activations, mul, split, norms, attention's products) does not stop it here."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 32, 1)
            self.norm, self.up = nn.GroupNorm(4, 16), nn.ConvTranspose2d(16, 8, 2, stride=2)
            self.c = nn.Conv2d(8, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.silu(self.a(x))
            left, right = self.b(nn.functional.hardswish(x)).chunk(2, 1)
            return self.c(self.up(self.norm(left * right.sigmoid())))

    pruned, _ = create(Gated(), IMAGE, tmp_path, channels_config(0.5))
    assert (pruned.a.out_channels, pruned.b.out_channels, pruned.norm.num_channels) == (8, 16, 8)
    assert pruned(IMAGE).shape == (2, 2, 32, 32)
