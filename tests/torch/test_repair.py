"""Sizes that Python code states: attributes, checks, caches, branches of training, odd contexts."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from openwork.errors import ConfigError, NothingToPruneError, RecordError
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


class EarlyExit(nn.Module):
    """Scores that only Python looks at: they must stay."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.early, self.late = nn.Linear(6, 12), nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        y = self.early(x)
        return y if y.softmax(-1).max() > 2 else self.late(x)


def test_channels_that_only_python_reads_stay() -> None:
    model, x = EarlyExit().eval(), torch.randn(4, 6)
    pruned, plan = prune(model, x)
    assert pruned.early.out_features == 4
    assert pruned.a.out_features == 6
    assert verify(model, pruned, plan, x) <= TOLERANCE


class Branches(nn.Module):
    """Which layer runs depends on values: the one that did not run reads the same channels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.o = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = self.b(x) if x.sum() > 0 else self.c(x)
        return self.o(F.relu(x))


def test_branches_on_values_hold_what_they_may_run() -> None:
    model, x = Branches().eval(), torch.randn(4, 6)
    with pytest.raises(NothingToPruneError, match="depends on values"):
        prune(model, x)


class ThroughNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Linear(6, 12), nn.Linear(12, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.o(self.b(x)) * float(x.detach().numpy().sum())


def test_values_that_leave_through_numpy_hold_their_channels() -> None:
    model, x = ThroughNumpy().eval(), torch.randn(4, 6)
    pruned, plan = prune(model, x)
    assert (pruned.a.out_features, pruned.b.out_features) == (12, 4)
    assert verify(model, pruned, plan, x) <= TOLERANCE


def test_layers_that_did_not_run_are_named() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.cond, self.o = nn.Linear(6, 12), nn.Linear(3, 12), nn.Linear(12, 2)

        def forward(self, x: Tensor, cond: Tensor | None = None) -> Tensor:
            x = self.a(x)
            return self.o(x if cond is None else x + self.cond(cond))

    frozen = analyze(Optional(), torch.randn(4, 6)).frozen
    assert [
        names for reason, names in ((f.reason, [m[0] for m in f.members]) for f in frozen) if "not run" in reason
    ] == [["cond.weight", "cond.bias"]]


def test_strided_channels_are_frozen() -> None:
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(6, 16), nn.Linear(8, 12), nn.Linear(12, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(F.relu(self.b(self.a(x)[:, ::2])))

    model, x = Strided().eval(), torch.randn(4, 6)
    pruned, plan = prune(model, x)
    assert (pruned.a.out_features, pruned.b.out_features) == (16, 6)
    assert verify(model, pruned, plan, x) <= TOLERANCE


def test_verify_proves_nothing_with_nan_and_leaves_no_trace() -> None:
    class Memory(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.o = nn.Linear(6, 12), nn.Linear(12, 2)
            self.mem: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            y = x if self.mem is None else x + self.mem
            self.mem = x.detach()
            return self.o(y)

    model, x = Memory().eval(), torch.randn(4, 6)
    pruned, plan = prune(model, x)
    assert pruned.mem is None
    assert [verify(model, pruned, plan, x) <= TOLERANCE for _ in range(2)] == [True, True]
    assert pruned.mem is None
    assert model.mem is None
    assert verify(model, pruned, plan, x * float("nan")) == float("inf")
    with pytest.raises(RecordError, match="plan"):
        verify(pruned, model, plan, x)


def test_criteria_must_score_every_unit() -> None:
    class Broken:
        def __init__(self, scores: object) -> None:
            self.scores = scores

        def score(self, group: object, weights: object) -> object:
            return self.scores

    model, x = ThroughNumpy().eval(), torch.randn(4, 6)
    for scores in ([1.0], None, [float("nan")] * 8):
        with pytest.raises(ConfigError, match="scores of group"):
            prune(model, x, importance=Broken(scores))
    with pytest.raises(ConfigError, match="unit numbers"):
        prune(model, x, groups={0: [1.5]})


def test_an_analysis_can_be_given() -> None:
    model, x = Auxiliary().eval(), torch.randn(2, 3, 8, 8)
    analysis = analyze(model, x)
    given, plan = prune(model, x, analysis=analysis)
    own, _ = prune(model, x)
    assert all(torch.equal(a, b) for a, b in zip(given.state_dict().values(), own.state_dict().values(), strict=True))
    assert verify(model, given, plan, x) <= TOLERANCE
    with pytest.raises(ConfigError, match="analysis is of another Auxiliary"):
        prune(Auxiliary(), x, analysis=analysis)


@pytest.mark.parametrize("skip", [None, 3, [3]])
def test_skip_of_another_kind(skip) -> None:
    with pytest.raises(ConfigError, match="a list of paths is needed"):
        prune(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.randn(1, 4), skip=skip)


def test_groups_of_another_kind() -> None:
    with pytest.raises(ConfigError, match="groups is a list; a dict is needed"):
        prune(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.randn(1, 4), groups=[1])


def test_layers_that_fail_alike_are_mended_together(monkeypatch) -> None:
    """What lets the first attention of a stack run is set in the others at once: runs do not grow with the depth."""
    from openwork.torch import repair as module

    runs = []
    real = module.replay
    monkeypatch.setattr(module, "replay", lambda *args, **kwargs: runs.append(1) or real(*args, **kwargs))
    counts = []
    for depth in (2, 8):
        layers = [nn.TransformerEncoderLayer(32, 4, 48, batch_first=True) for _ in range(depth)]
        model = nn.Sequential(nn.Linear(16, 32), *layers, nn.Linear(32, 8)).eval()
        runs.clear()
        x = torch.randn(2, 5, 16)
        pruned, plan = prune(model, x, ratio=0.5)
        counts.append(len(runs))
        assert verify(model, pruned, plan, x) < 1e-5
    assert counts[1] <= counts[0] + 1
    assert counts[0] > 0


def test_pooling_of_channels_that_lie_last(monkeypatch) -> None:
    """torch's adaptive pooling restates sizes for such tensors; they are not the model's."""

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.pool, self.head = (
                nn.Linear(3, 16), nn.LayerNorm(16), nn.AdaptiveAvgPool2d(1), nn.Linear(16, 5)
            )  # fmt: skip

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.norm(self.up(x))).permute(0, 3, 1, 2)
            return self.head(self.pool(x).flatten(1))

    model, x = Last().eval(), torch.randn(2, 6, 6, 3)
    pruned, plan = prune(model, x, ratio=0.5)
    assert pruned.up.out_features == 8
    assert verify(model, pruned, plan, x) < TOLERANCE
