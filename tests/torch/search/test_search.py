"""auto_channel_prune_search from config to pruned model, and its bad inputs."""

from __future__ import annotations

import copy
import logging

import numpy as np
import pytest
import torch
from torch import nn

import openwork.torch as amct
from openwork.config import load_retrain_config
from openwork.config.chosen import read_chosen_channels
from openwork.errors import ConfigError, FileError, ModelError, NothingToPruneError, UnsupportedModelError, WeightsError
from openwork.search import GreedySearch, SearchChannelBase, SensitivityBase, get_attribute, set_attribute
from openwork.torch.search.testing import small_net


def write_config(folder, ratio=1.5, aligned=False, **fields):
    lines = [f"compress_ratio: {ratio}", f"ascend_optimized: {str(aligned).lower()}"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    path = folder / "search.cfg"
    path.write_text("\n".join(lines) + "\n")
    return path


class Wide(nn.Module):
    """Enough channels for alignment: a chain, a residual stream, a depthwise layer, a linear hidden layer."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 48, 3, padding=1)
        self.a = nn.Conv2d(48, 80, 1)
        self.b = nn.Conv2d(80, 48, 3, padding=1)
        self.depth = nn.Conv2d(48, 48, 3, padding=1, groups=48)
        self.c = nn.Conv2d(48, 64, 3, stride=2)
        self.hidden = nn.Linear(64, 96)
        self.head = nn.Linear(96, 7)

    def forward(self, x):
        x = torch.relu(self.stem(x))
        x = torch.relu(x + self.b(torch.relu(self.a(x))))
        x = torch.relu(self.c(torch.relu(self.depth(x)))).mean((2, 3))
        return self.head(torch.relu(self.hidden(x)))


def macs(model, images):
    """Multiply-accumulates of convolutions and linear layers, counted by hooks."""
    total = 0

    def count(module, arguments, output):
        nonlocal total
        if isinstance(module, nn.Conv2d):
            total += output.numel() * module.weight[0].numel()
        else:
            total += arguments[0].numel() * module.out_features

    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    handles = [layer.register_forward_hook(count) for layer in layers]
    with torch.no_grad():
        model.eval()(images)
    for handle in handles:
        handle.remove()
    return total


@pytest.fixture
def wide():
    torch.manual_seed(0)
    return Wide(), torch.randn(4, 3, 10, 10), torch.randint(0, 7, (4,))


def search_and_prune(folder, model, images, labels, config, **arguments):
    amct.auto_channel_prune_search(model, config, [images, labels], folder / "out.cfg", **arguments)
    return amct.create_prune_retrain_model(model, images, folder / "out.cfg", folder / "record.txt")


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("ratio", [1.2, 1.5, 2.0, 3.0])
def test_pruned_model_has_the_asked_for_cost(tmp_path, wide, ratio, aligned):
    model, images, labels = wide
    pruned = search_and_prune(tmp_path, model, images, labels, write_config(tmp_path, ratio, aligned))
    achieved = macs(model, images) / macs(pruned, images)
    # One step of the dearest layer is the most by which a search may pass the target.
    assert ratio <= achieved * (1 + 1e-9)
    assert achieved < ratio * (1.05 if not aligned else 1.45)
    if aligned:
        for name in ("stem", "a", "c"):
            kept = pruned.get_submodule(name).out_channels
            assert kept % 16 == 0 or kept == model.get_submodule(name).out_channels


@pytest.mark.parametrize("algorithm", ["GreedySearch", "DynamicProgrammingSearch"])
@pytest.mark.parametrize("sensitivity", ["FisherSensitivity", "MagnitudeSensitivity", "OutputChangeSensitivity"])
def test_every_built_in(tmp_path, algorithm, sensitivity):
    net, images, labels = small_net()
    config = write_config(tmp_path, 1.6)
    pruned = search_and_prune(tmp_path, net, images, labels, config, sensitivity=sensitivity, search_alg=algorithm)
    assert macs(net, images) / macs(pruned, images) >= 1.6


@pytest.mark.parametrize("cost", ["MACS", "PARAMS", "ACTIVATION_MEMORY", "LATENCY"])
def test_every_cost(tmp_path, wide, cost):
    model, images, labels = wide
    pruned = search_and_prune(tmp_path, model, images, labels, write_config(tmp_path, 1.3, cost=cost))
    if cost == "PARAMS":
        before, after = (sum(p.numel() for p in m.parameters()) for m in (model, pruned))
        assert 1.3 <= before / after < 1.4


class Chosen(SearchChannelBase):
    """Remembers what it chose, so that the test can look for it in the pruned model."""

    def channel_prune_search(self, graph_info, search_records, prune_config):
        inner = GreedySearch()
        inner.problem = self.problem
        self.info = copy.deepcopy(graph_info)
        self.masks = inner.channel_prune_search(graph_info, search_records, prune_config)
        return self.masks


def test_the_chosen_channels_are_the_pruned_ones(tmp_path):
    net, images, labels = small_net(7)
    search = Chosen()
    pruned = search_and_prune(tmp_path, net, images, labels, write_config(tmp_path, 1.7), search_alg=search)
    assert set(search.masks) == {"first", "second", "grouped"}
    assert search.masks["second"] == search.masks["first"]
    for name in ("first", "grouped"):
        kept = np.flatnonzero(search.masks[name])
        assert torch.equal(pruned.get_submodule(name).bias, net.get_submodule(name).bias[kept])
    assert sum(map(sum, search.masks.values())) < sum(map(len, search.masks.values()))
    assert search.info["grouped"] == {
        "cin": 8,
        "cout": 12,
        "ori_cout": 12,
        "bitops": 1024.0 * 12 * 6 * 6 * 4 * 9,
    }


def test_an_edited_ratio_falls_back_to_ranking(tmp_path, wide, caplog):
    model, images, labels = wide
    amct.auto_channel_prune_search(model, write_config(tmp_path, 2.0), [images, labels], tmp_path / "out.cfg")
    text = (tmp_path / "out.cfg").read_text()
    config = load_retrain_config(tmp_path / "out.cfg")
    name = config.override_layer_configs[0].name
    ratio = config.override_layer_configs[0].prune.ratio
    (tmp_path / "out.cfg").write_text(text.replace(f"prune_ratio: {ratio:g}", "prune_ratio: 0.6", 2))
    with caplog.at_level(logging.WARNING, "openwork"):
        amct.create_prune_retrain_model(model, images, tmp_path / "out.cfg", tmp_path / "record.txt")
    assert f"channels that a search chose for {name} are not used" in caplog.text


def test_output_is_plain_amct(tmp_path, wide):
    """Without comments, the file holds ratios = 1 - kept / total, skips for the rest, a global prune_config."""
    model, images, labels = wide
    pruned = search_and_prune(tmp_path, model, images, labels, write_config(tmp_path, 1.3))
    config = load_retrain_config(tmp_path / "out.cfg")
    named = {item.name: item.prune for item in config.override_layer_configs}
    assert config.prune_config is not None
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Conv2d, nn.Linear)) or name in ("head", "depth"):
            continue
        total = module.weight.shape[0]
        kept = pruned.get_submodule(name).weight.shape[0]
        if name in named:
            assert named[name].kept(total) == kept < total
            assert named[name].ratio == pytest.approx(1 - kept / total, abs=0.25 / total)
        else:
            assert name in config.regular_prune_skip_layers
            assert kept == total
    chosen = read_chosen_channels((tmp_path / "out.cfg").read_text(), named)
    assert set(chosen.removed) == set(named)
    assert chosen.stale == {}


def test_override_file(tmp_path, wide):
    model, images, labels = wide
    (tmp_path / "override.cfg").write_text(
        'regular_prune_skip_layers: "hidden"\n'
        'override_layer_configs { layer_name: "a" prune_config { filter_pruner { balanced_l2_norm_filter_prune '
        "{ prune_ratio: 0.25 ascend_optimized: false } } } }\n"
    )
    config = write_config(tmp_path, 2.0, override_prune_cfg=f'"{tmp_path / "override.cfg"}"')
    pruned = search_and_prune(tmp_path, model, images, labels, config)
    assert pruned.hidden.out_features == 96
    assert pruned.a.out_channels == 60
    assert macs(model, images) / macs(pruned, images) == pytest.approx(2.0, rel=0.05)
    written = load_retrain_config(tmp_path / "out.cfg")
    assert written.override_layer_configs[0].name == "a"
    assert "hidden" in written.regular_prune_skip_layers


def test_unreachable_target_gives_the_best_and_says_so(tmp_path, wide, caplog):
    model, images, labels = wide
    config = write_config(tmp_path, 9.0, max_prune_ratio=0.5)
    with caplog.at_level(logging.WARNING, "openwork"):
        pruned = search_and_prune(tmp_path, model, images, labels, config)
    assert [pruned.get_submodule(n).weight.shape[0] for n in ("stem", "a", "c", "hidden")] == [24, 40, 32, 48]
    achieved = macs(model, images) / macs(pruned, images)
    assert f"compress_ratio 9 cannot be reached: {achieved:.4g} is what was reached" in caplog.text


class Untouched(SensitivityBase):
    """Written against AMCT: no output_nodes; notes what it was given."""

    def setup_initialization(self, graph_tuple, input_data, test_iteration):
        self.graph, self.info = graph_tuple
        self.given = input_data, test_iteration

    def get_sensitivity(self, search_records):
        self.records = search_records
        for record in search_records:
            node = record.producer[0]
            count = get_attribute(node, "end") - get_attribute(node, "begin")
            set_attribute(node, "sensitivity", np.arange(count, 0, -1) / count)


@pytest.mark.parametrize(
    ("sensitivity", "power"),
    [
        ("TaylorLossSensitivity", 2),
        ("MagnitudeSensitivity", 2),
        ("FisherSensitivity", 1),
        ("FisherMagnitudeSensitivity", 1),
        ("OutputChangeSensitivity", 1),
        (Untouched, 2),
    ],
)
def test_slopes_are_squared_and_losses_are_not(tmp_path, sensitivity, power):
    net, images, labels = small_net()
    algorithm = GreedySearch()
    amct.auto_channel_prune_search(
        net, write_config(tmp_path), [images, labels], tmp_path / "out.cfg", sensitivity, algorithm
    )
    assert {group.power for group in algorithm.solved.groups} == {power}


def test_user_sensitivity(tmp_path):
    net, images, labels = small_net()
    mine = Untouched()
    data = [images, labels]
    amct.auto_channel_prune_search(net, write_config(tmp_path, 1.5), data, tmp_path / "out.cfg", sensitivity=mine)
    assert mine.graph.model is net
    assert mine.given == (data, 1)
    assert all(get_attribute(record.producer[0], "bitops") > 0 for record in mine.records)
    chosen = read_chosen_channels(
        (tmp_path / "out.cfg").read_text(),
        {item.name: item.prune for item in load_retrain_config(tmp_path / "out.cfg").override_layer_configs},
    )
    for name, positions in chosen.removed.items():  # the last channels of each block go first
        size = net.get_submodule(name).weight.shape[0]
        blocks = 2
        expected = np.concatenate([
            np.arange((b + 1) * size // blocks - len(positions) // blocks, (b + 1) * size // blocks)
            for b in range(blocks)
        ])  # fmt: skip
        assert positions.tolist() == expected.tolist()


def test_two_inputs_and_a_loader(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.head = nn.Linear(6, 16), nn.Linear(4, 16), nn.Linear(16, 3)

        def forward(self, x, y):
            return self.head(torch.relu(self.left(x) * self.right(y)))

    torch.manual_seed(0)
    net = Two()
    batches = [(torch.randn(5, 6), torch.randn(5, 4), torch.randint(0, 3, (5,))) for _ in range(3)]
    config = write_config(tmp_path, 2.0, test_iteration=3)
    amct.auto_channel_prune_search(net, config, iter(batches), tmp_path / "out.cfg")
    pruned = amct.create_prune_retrain_model(net, batches[0][:2], tmp_path / "out.cfg", tmp_path / "record.txt")
    assert pruned.left.out_features == pruned.right.out_features == 8


def test_embedding_that_feeds_a_stream(tmp_path):
    """Every producer is in graph_info; a layer, not the embedding, stands for the group."""

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(20, 32)
            self.inner, self.outer, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 4)

        def forward(self, ids):
            x = self.words(ids)
            return self.head((x + self.outer(torch.relu(self.inner(x)))).mean(1))

    torch.manual_seed(0)
    net, ids, labels = Words(), torch.randint(0, 20, (6, 5)), torch.randint(0, 4, (6,))
    search = Chosen()
    data = [ids, labels]
    amct.auto_channel_prune_search(net, write_config(tmp_path, 3.0), data, tmp_path / "out.cfg", search_alg=search)
    assert search.info["words"] == {"cin": 0, "cout": 32, "ori_cout": 32, "bitops": 0.0}
    assert search.masks["words"] == search.masks["outer"]
    pruned = amct.create_prune_retrain_model(net, ids, tmp_path / "out.cfg", tmp_path / "record.txt")
    assert pruned.words.embedding_dim == pruned.outer.out_features == sum(search.masks["outer"]) < 32


def test_model_and_statistics_stay(tmp_path):
    net, images, labels = small_net()
    net.train()
    before = copy.deepcopy(net.state_dict())
    amct.auto_channel_prune_search(net, write_config(tmp_path), [images, labels], tmp_path / "out.cfg")
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all(module.training for module in net.modules())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_report_lies_beside_the_config(tmp_path):
    net, images, labels = small_net()
    amct.auto_channel_prune_search(net, write_config(tmp_path), [images, labels], tmp_path / "new" / "out.cfg")
    page = (tmp_path / "new" / "report.html").read_text(encoding="utf-8")
    assert "grouped" in page
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["out.cfg", "report.html"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ratio": 1.0}, "compress_ratio is 1.0; it must be greater than 1"),
        ({"ratio": "nan"}, "compress_ratio is nan"),
        ({"max_prune_ratio": 1.5}, "max_prune_ratio is 1.5"),
        ({"test_iteration": 0}, "test_iteration is 0"),
        ({"test_iteration": 2}, "test_iteration is 2; input_data holds 1 batch"),
    ],
)
def test_bad_config(tmp_path, fields, message):
    net, images, labels = small_net()
    with pytest.raises(ConfigError, match=message):
        amct.auto_channel_prune_search(net, write_config(tmp_path, **fields), [images, labels], tmp_path / "out.cfg")
    assert not (tmp_path / "out.cfg").exists()


def test_bad_files(tmp_path):
    net, images, labels = small_net()
    data = [images, labels]
    with pytest.raises(FileError, match=r"config file .*none\.cfg does not exist"):
        amct.auto_channel_prune_search(net, tmp_path / "none.cfg", data, tmp_path / "out.cfg")
    config = write_config(tmp_path, override_prune_cfg='"gone.cfg"')
    with pytest.raises(FileError, match=r"gone\.cfg does not exist"):
        amct.auto_channel_prune_search(net, config, data, tmp_path / "out.cfg")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match=r"output_cfg .* is a folder"):
        amct.auto_channel_prune_search(net, write_config(tmp_path), data, tmp_path / "empty")
    own = write_config(tmp_path)
    before = own.read_text()
    with pytest.raises(ConfigError, match="is the search's own config"):
        amct.auto_channel_prune_search(net, own, data, tmp_path / "empty" / ".." / own.name)
    assert own.read_text() == before
    (tmp_path / "file").write_text("")

    class Never(Untouched):
        def setup_initialization(self, graph_tuple, input_data, test_iteration):
            raise AssertionError("work began before the path was checked")

    with pytest.raises(FileError, match=r"output_cfg .* cannot be written"):
        amct.auto_channel_prune_search(net, write_config(tmp_path), data, tmp_path / "file" / "out.cfg", Never())


def test_nothing_left_to_search(tmp_path):
    net, images, labels = small_net()
    (tmp_path / "skip.cfg").write_text('regular_prune_skip_types: "Conv2d"\n')
    config = write_config(tmp_path, override_prune_cfg='"skip.cfg"')
    with pytest.raises(NothingToPruneError, match=r"nothing is left to search .*regular_prune_skip_types"):
        amct.auto_channel_prune_search(net, config, [images, labels], tmp_path / "out.cfg")


def test_bad_data_and_models(tmp_path):
    net, images, labels = small_net()
    config = write_config(tmp_path)
    with pytest.raises(ConfigError, match="does not fit the output's shape"):
        amct.auto_channel_prune_search(net, config, [images, torch.randn(6, 4)], tmp_path / "out.cfg")
    with pytest.raises(ModelError):
        amct.auto_channel_prune_search(net, config, [images[:, :2], labels], tmp_path / "out.cfg")
    with pytest.raises(UnsupportedModelError):
        amct.auto_channel_prune_search("net", config, [images, labels], tmp_path / "out.cfg")
    with pytest.raises(ConfigError, match="sensitivity 'TaylorLos' is unknown; did you mean 'Taylor"):
        amct.auto_channel_prune_search(net, config, [images, labels], tmp_path / "out.cfg", "TaylorLos")
    with torch.no_grad():
        net.first.weight[0, 0, 0, 0] = float("nan")
    with pytest.raises(WeightsError, match=r"first\.weight holds NaN or infinite values"):
        amct.auto_channel_prune_search(net, config, [images, labels], tmp_path / "out.cfg")


def test_wrong_answers_of_user_classes(tmp_path):
    net, images, labels = small_net()

    class Silent(Untouched):
        def get_sensitivity(self, search_records):
            pass

    class Short(SearchChannelBase):
        def channel_prune_search(self, graph_info, search_records, prune_config):
            return {record.producer[0].name: [1, 0] for record in search_records}

    arguments = net, write_config(tmp_path), [images, labels], tmp_path / "out.cfg"
    with pytest.raises(ConfigError, match="sensitivity of layer 'first' was not set"):
        amct.auto_channel_prune_search(*arguments, sensitivity=Silent())
    with pytest.raises(ConfigError, match="layer 'first' needs a list of 0 and 1 for its 8 channels"):
        amct.auto_channel_prune_search(*arguments, search_alg=Short())
