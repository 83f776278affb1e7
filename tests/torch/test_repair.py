"""Sizes that Python code states: attributes, checks, caches, branches of training, odd contexts."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openwork.errors import ConfigError
from openwork.torch import analyze, prune, verify

TOLERANCE = 1e-5


class Encoder(nn.Module):
    """torch's own encoder layers: each checks that heads * features is the width of the stream."""

    def __init__(self, layers: int = 3, width: int = 48, heads: int = 12) -> None:
        super().__init__()
        self.embed = nn.Linear(7, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 40, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("ratio", [0.3, 0.5])
def test_checked_lengths_are_tied_in_every_layer(batch: int, ratio: float) -> None:
    model, x = Encoder().eval(), torch.randn(batch, 6, 7)
    analysis = analyze(model, x)
    stream = analysis.group_of("embed.weight")
    assert stream is not None
    assert {member.module for member in stream.members} >= {f"layers.{i}.self_attn" for i in range(3)}
    assert sorted(set(stream.steps.tolist())) == [1, 4]

    pruned, plan = prune(model, x, ratio=ratio)
    for layer in pruned.layers:
        attention = layer.self_attn
        assert attention.embed_dim == attention.num_heads * attention.head_dim == pruned.embed.out_features < 48
    assert verify(model, pruned, plan, x) <= TOLERANCE
    pruned.train()(torch.randn(3, 4, 7)).sum().backward()


class Auxiliary(nn.Module):
    """A head that only training runs, on pruned features."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3)
        self.aux, self.head = nn.Linear(16, 5), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = F.relu(self.conv1(x))
        early = x.mean((2, 3))
        out = self.head(F.relu(self.conv2(x)).mean((2, 3)))
        return (out, self.aux(early)) if self.training else out


def test_heads_of_training_are_cut_too() -> None:
    model, x = Auxiliary().eval(), torch.randn(2, 3, 8, 8)
    pruned, plan = prune(model, x)
    assert pruned.aux.in_features == 8
    out, aux = pruned.train()(x)
    (out.sum() + aux.sum()).backward()
    assert verify(model, pruned, plan, x) <= TOLERANCE


def test_inference_mode_changes_nothing() -> None:
    model, x = Auxiliary().eval(), torch.randn(2, 3, 8, 8)
    expected, _ = prune(model, x)
    with torch.inference_mode():
        pruned, plan = prune(model, x)
        error = verify(model, pruned, plan, x)
    assert error <= TOLERANCE
    assert [p.shape for p in pruned.parameters()] == [p.shape for p in expected.parameters()]
    pruned(x).sum().backward()


def test_bare_norms_state_their_channels() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    x = torch.randn(1, 3, 9, 9)
    pruned, plan = prune(model, x)
    assert pruned[1].num_features == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pruned(x)
    assert verify(model, pruned, plan, x) <= TOLERANCE


def test_inputs_without_elements_are_refused() -> None:
    with pytest.raises(ConfigError, match="no elements"):
        analyze(Auxiliary(), torch.randn(0, 3, 8, 8))


class ScaledByWidth(nn.Module):
    """A factor computed from a channel count: pruning it would change what the rest means."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 16), nn.Linear(16, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = x * x.shape[-1] ** -0.5
        return self.c(F.relu(self.b(x)))


def test_numbers_computed_from_channel_counts_freeze_them() -> None:
    model, x = ScaledByWidth().eval(), torch.randn(2, 6)
    analysis = analyze(model, x)
    assert any("computed from a channel count" in frozen.reason for frozen in analysis.frozen)
    pruned, plan = prune(model, x)
    assert pruned.a.out_features == 16
    assert pruned.b.out_features == 6
    assert verify(model, pruned, plan, x) <= TOLERANCE
