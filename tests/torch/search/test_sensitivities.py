"""Each sensitivity against gradients taken sample by sample, or against outputs of a masked copy."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import openwork.torch
from openwork.errors import ConfigError, WeightsError
from openwork.search import GreedySearch, SensitivityBase, get_attribute, set_attribute
from openwork.torch.analysis import analyze
from openwork.torch.search import (
    FisherMagnitudeSensitivity,
    FisherSensitivity,
    MagnitudeSensitivity,
    OutputChangeSensitivity,
    TaylorLossSensitivity,
    get_sensitivity,
)
from openwork.torch.search._graph import SearchGraph
from openwork.torch.search.testing import SensitivitySuite, small_net


class TestTaylor(SensitivitySuite):
    def make(self):
        return TaylorLossSensitivity()


class TestTaylorByPieces(SensitivitySuite):
    def make(self):
        return TaylorLossSensitivity(piece=2)


class TestFisher(SensitivitySuite):
    def make(self):
        return FisherSensitivity()


class TestMagnitude(SensitivitySuite):
    def make(self):
        return MagnitudeSensitivity()


class TestOutputChange(SensitivitySuite):
    def make(self):
        return OutputChangeSensitivity()


class Written(SensitivityBase):
    """As a user of AMCT would write it: no output_nodes, the graph's model, attributes only."""

    def setup_initialization(self, graph_tuple, input_data, test_iteration):
        graph, _ = graph_tuple
        self.model = copy.deepcopy(graph.model)

    def get_sensitivity(self, search_records):
        for record in search_records:
            node = record.producer[0]
            begin, end = get_attribute(node, "begin"), get_attribute(node, "end")
            weight = self.model.get_submodule(node.name).weight[begin:end]
            set_attribute(node, "sensitivity", weight.detach().abs().sum((1, 2, 3)).tolist())


class TestUserClass(SensitivitySuite):
    def make(self):
        return Written()


class Break(torch.autograd.Function):
    """The identity, with NaN for a gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


def scores_of(sensitivity, net, data, count=1):
    first = data[0] if isinstance(data[0], torch.Tensor) else data[0][0]
    groups = analyze(net, first).groups
    sensitivity.setup_initialization((SearchGraph(net, groups), {}), data, count)
    return groups, sensitivity.scores(groups)


def sample_gradients(net, images, labels):
    """(weights, gradients) of each sample from backward passes on a copy."""
    twin = copy.deepcopy(net).eval()
    weights = {name: p.detach().numpy().astype(np.float64) for name, p in twin.named_parameters()}
    result = []
    for image, label in zip(images, labels):
        twin.zero_grad()
        F.cross_entropy(twin(image[None]), label[None]).backward()
        result.append({name: p.grad.numpy().astype(np.float64) for name, p in twin.named_parameters()})
    return weights, result


def slopes_of(group, weights, samples):
    """float64 [samples, units]: weight * gradient of each sample, summed over all weights that read a unit."""
    slopes = np.zeros((len(samples), group.units))
    for row, sample in zip(slopes, samples):
        for member in group.consumers:
            product = weights[member.parameter] * sample[member.parameter]
            length = product.shape[member.axis]
            blocks = member.size // length
            for position, unit in zip(member.positions, member.units):
                rows = np.split(product, blocks, axis=0)[position // length]
                row[unit] += rows.take(position % length, axis=member.axis).sum()
    return slopes


@pytest.mark.parametrize("piece", [1, 4, None])
def test_taylor_against_weight_gradients_of_each_sample(piece):
    """Mean over samples of the absolute summed weight * gradient of what reads a unit."""
    net, images, labels = small_net(1)
    sensitivity = TaylorLossSensitivity(piece)
    # Equal pieces: the mean over pieces is then that over samples.
    images, labels = torch.cat([images, images[:2]]), torch.cat([labels, labels[:2]])
    groups, scores = scores_of(sensitivity, net, [images, labels])
    weights, samples = sample_gradients(net, images, labels)
    for group, values in zip(groups, scores):
        slopes = slopes_of(group, weights, samples)
        assert np.allclose(values, np.mean(np.abs(slopes), axis=0), rtol=1e-4)


def test_taylor_ranks_by_magnitude_and_silent_channels_first():
    net, images, labels = small_net(1)
    with torch.no_grad():
        net.head.weight[:, 4] = 0
    sensitivity = TaylorLossSensitivity()
    groups, scores = scores_of(sensitivity, net, [images, labels])
    _, magnitudes = scores_of(MagnitudeSensitivity(), net, [images, labels])
    assert [int((values == 0).sum()) for values in scores] == [int(group.units == 12) for group in groups]
    assert len(sensitivity.rankings) == len(groups)
    for values, ranks, magnitude in zip(scores, sensitivity.rankings, magnitudes):
        assert np.array_equal(ranks, np.where(values > 0, magnitude, 0))


def test_the_ranks_choose_the_channels(tmp_path):
    net, images, labels = small_net(1)
    sensitivity, algorithm = TaylorLossSensitivity(), GreedySearch()
    (tmp_path / "search.cfg").write_text("compress_ratio: 1.5\nascend_optimized: false\n")
    openwork.torch.auto_channel_prune_search(
        net, tmp_path / "search.cfg", [images, labels], tmp_path / "out.cfg", sensitivity, algorithm
    )
    solution = algorithm.solution
    assert solution.removed
    for group, ranks in zip(algorithm.solved.groups, sensitivity.rankings):
        gone = solution.removed.get(group.index, np.zeros(0, int))
        for block in range(group.block_of.max() + 1):
            inside = np.flatnonzero(group.block_of == block)
            lost, kept = np.intersect1d(inside, gone), np.setdiff1d(inside, gone)
            assert not len(lost) or ranks[lost].max() <= ranks[kept].min()


def test_taylor_is_averaged_over_batches():
    net, images, labels = small_net(2)
    halves = [[images[:3], labels[:3]], [images[3:], labels[3:]]]
    _, both = scores_of(TaylorLossSensitivity(), net, halves, 2)
    each = [scores_of(TaylorLossSensitivity(), net, half)[1] for half in halves]
    for total, first, second in zip(both, *each):
        assert np.allclose(total, (first + second) / 2)


def test_fisher_against_weight_gradients_of_each_sample():
    """The gate's slope at a reader is the sum of weight * gradient over its weights, sample by sample."""
    net, images, labels = small_net(3)
    groups, scores = scores_of(FisherSensitivity(), net, [images, labels])
    weights, samples = sample_gradients(net, images, labels)
    for group, values in zip(groups, scores):
        assert np.allclose(values, np.mean(slopes_of(group, weights, samples) ** 2, axis=0), rtol=1e-4)


class Packed(nn.Module):
    """A reader that is no module with one input."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.weight = nn.Parameter(torch.randn(3, 6))

    def forward(self, x):
        return F.linear(torch.relu(self.inner(x)), self.weight)


@pytest.mark.parametrize(("kind", "power"), [(FisherSensitivity, 2), (TaylorLossSensitivity, 1)])
def test_packed_weights_are_taken_by_their_gradients(kind, power):
    """Batches are cut, so that each of 20 samples counts for itself though their inputs cannot be seen."""
    torch.manual_seed(0)
    net = Packed()
    images, labels = torch.randn(20, 4), torch.arange(20) % 3
    _, (values,) = scores_of(kind(), net, [images, labels])
    weights, samples = sample_gradients(net, images, labels)
    slopes = [(weights["weight"] * sample["weight"]).sum(0) for sample in samples]
    assert np.allclose(values, np.mean(np.abs(slopes) ** power, axis=0), rtol=1e-4)


@pytest.mark.parametrize("kind", [FisherSensitivity, TaylorLossSensitivity])
def test_nan_gradient_of_packed_weights_is_named(kind):
    net = Packed()
    net.register_forward_hook(lambda module, arguments, output: Break.apply(output))
    with pytest.raises(WeightsError, match=r"gradient of inner\.weight is NaN or infinite"):
        scores_of(kind(), net, [torch.randn(2, 4), torch.tensor([0, 1])])


def test_output_change_against_a_masked_copy():
    net, images, labels = small_net(4)
    groups, scores = scores_of(OutputChangeSensitivity(), net, [images, labels])
    net.eval()
    with torch.no_grad():
        before = net(images)
        for unit in range(12):
            twin = copy.deepcopy(net)
            twin.head.weight[:, unit] = 0
            expected = float((twin(images) - before).square().mean())
            index = next(i for i, g in enumerate(groups) if g.units == 12)
            assert scores[index][unit] == pytest.approx(expected, rel=1e-4)


def test_output_change_of_a_grouped_reader():
    net, images, labels = small_net(4)
    groups, scores = scores_of(OutputChangeSensitivity(), net, [images, labels])
    index = next(i for i, g in enumerate(groups) if g.units == 8)
    net.eval()
    with torch.no_grad():
        for unit in range(8):
            twin = copy.deepcopy(net)
            twin.second.weight[:, unit] = 0
            block, inner = divmod(unit, 4)
            twin.grouped.weight[6 * block : 6 * block + 6, inner] = 0
            expected = float((twin(images) - net(images)).square().mean())
            assert scores[index][unit] == pytest.approx(expected, rel=1e-4)


def test_change_of_the_loss():
    net, images, labels = small_net(4)
    groups, scores = scores_of(OutputChangeSensitivity(of="loss"), net, [images, labels])
    index = next(i for i, g in enumerate(groups) if g.units == 12)
    net.eval()
    with torch.no_grad():
        before = F.cross_entropy(net(images), labels)
        for unit in range(12):
            twin = copy.deepcopy(net)
            twin.head.weight[:, unit] = 0
            expected = abs(float(F.cross_entropy(twin(images), labels) - before))
            assert scores[index][unit] == pytest.approx(expected, rel=1e-3, abs=1e-6)
    with pytest.raises(ValueError, match="of is 'x'"):
        OutputChangeSensitivity(of="x")


def test_estimates_agree_with_the_ground_truth_in_order():
    """Fisher and Taylor rank channels as the measured change of the loss does, far better than chance."""
    net, images, labels = small_net(5)
    _, truth = scores_of(OutputChangeSensitivity(piece=1, of="loss"), net, [images, labels])
    for estimate in (FisherSensitivity(), TaylorLossSensitivity()):
        _, scores = scores_of(estimate, net, [images, labels])
        for one, two in zip(truth, scores):
            ranks = np.corrcoef(np.argsort(np.argsort(one)), np.argsort(np.argsort(two)))[0, 1]
            assert ranks > 0.5


def test_loss_can_be_set():
    net, images, labels = small_net(6)
    sensitivity = TaylorLossSensitivity()
    _, first = scores_of(sensitivity, net, [images, labels])
    sensitivity.set_loss_func(lambda output, label: 3 * F.cross_entropy(output, label))
    _, second = scores_of(sensitivity, net, [images, labels])
    assert all(np.allclose(3 * one, two, rtol=1e-4) for one, two in zip(first, second))


@pytest.mark.parametrize("kind", [FisherSensitivity, TaylorLossSensitivity])
@pytest.mark.parametrize(("behind", "named"), [("norm", "first"), ("grouped", "(first|second|grouped)")])
def test_nan_gradient_names_the_parameter(kind, behind, named):
    """Also where it spoils only what makes the channels, not what reads them."""
    net, images, labels = small_net()
    net.get_submodule(behind).register_forward_hook(lambda module, arguments, output: Break.apply(output))
    with pytest.raises(WeightsError, match=rf"gradient of {named}\.weight is NaN or infinite"):
        scores_of(kind(), net, [images, labels])


@pytest.mark.parametrize("kind", [TaylorLossSensitivity, FisherSensitivity])
def test_layer_that_no_gradient_reaches_is_named(kind):
    net, images, labels = small_net()
    with torch.no_grad():
        net.head.weight.zero_()
    with pytest.raises(WeightsError, match="layer 'first': the sensitivity of all its 8 channels is 0"):
        scores_of(kind(), net, [images, labels])


def test_names():
    assert isinstance(get_sensitivity("FisherSensitivity"), FisherSensitivity)
    assert isinstance(get_sensitivity(MagnitudeSensitivity), MagnitudeSensitivity)
    with pytest.raises(ConfigError, match="sensitivity 'Taylor' is unknown"):
        get_sensitivity("Taylor")
    with pytest.raises(ConfigError, match="has no method setup_initialization"):
        get_sensitivity(object())


class TestFisherMagnitude(SensitivitySuite):
    def make(self):
        return FisherMagnitudeSensitivity()


def test_fisher_between_layers_and_magnitude_inside():
    net, images, labels = small_net(8)
    groups, scores = scores_of(FisherMagnitudeSensitivity(), net, [images, labels])
    _, fisher = scores_of(FisherSensitivity(), net, [images, labels])
    _, magnitude = scores_of(MagnitudeSensitivity(), net, [images, labels])
    for group, values, means, order in zip(groups, scores, fisher, magnitude):
        assert values.mean() == pytest.approx(means.mean())
        assert np.corrcoef(values, order)[0, 1] == pytest.approx(1.0)
        assert len(values) == group.units
