"""ResNet-20 with the same weights in PyTorch and TensorFlow: same groups, sensitivities, search, channels, outputs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import torch  # noqa: E402

import openwork.tensorflow as amct_tensorflow  # noqa: E402
import openwork.torch as amct_torch  # noqa: E402
from openwork.config import load_retrain_config  # noqa: E402
from openwork.demo.network import ResNet20  # noqa: E402
from openwork.demo_tensorflow.network import EPSILON, resnet20  # noqa: E402
from openwork.record import load_record  # noqa: E402
from openwork.tensorflow import search as search_tensorflow  # noqa: E402
from openwork.torch import search as search_torch  # noqa: E402

tf1 = tf.compat.v1
SEARCH = "compress_ratio: 2\nascend_optimized: false\n"
NAMES = {"weight": "gamma", "bias": "beta", "running_mean": "moving_mean", "running_var": "moving_variance"}


def path_of(layer: str) -> str:
    """``blocks/0/conv1/Conv2D`` -> ``blocks.0.conv1``"""
    return re.sub(r"/(Conv2D|MatMul)$", "", layer).replace("/", ".")


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    net = ResNet20().eval()
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eps = EPSILON
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
            torch.nn.init.normal_(module.bias, 0, 0.1)
            torch.nn.init.normal_(module.running_mean, 0, 0.1)
            torch.nn.init.uniform_(module.running_var, 0.5, 1.5)
    return net


def values(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """The weights by the names of TensorFlow's variables, in its layout."""
    found = {}
    for name, tensor in model.state_dict().items():
        path, _, kind = name.rpartition(".")
        array = tensor.numpy()
        if kind == "num_batches_tracked":
            continue
        if array.ndim == 4:
            found[f"{path.replace('.', '/')}/kernel"] = array.transpose(2, 3, 1, 0)
        elif array.ndim == 2:
            found[f"{path}/kernel"] = array.T
        else:
            found[f"{path.replace('.', '/')}/{'bias' if path == 'fc' else NAMES[kind]}"] = array
    return found


def load(model: torch.nn.Module, session: Any) -> None:
    variables = {variable.op.name: variable for variable in session.graph.get_collection("variables")}
    for name, array in values(model).items():
        variables[name].load(np.ascontiguousarray(array), session)


@pytest.fixture(scope="module")
def training(model: torch.nn.Module) -> Any:
    """The training graph and a session that holds the same weights."""
    net = resnet20(training=True)
    with net.graph.as_default():
        with tf.control_dependencies(tf1.get_collection(tf1.GraphKeys.UPDATE_OPS)):
            tf1.train.MomentumOptimizer(0.1, 0.9).minimize(net.loss)
        session = tf1.Session()
        session.run(tf1.global_variables_initializer())
        load(model, session)
    yield net, session
    session.close()


@pytest.fixture(scope="module")
def samples() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.standard_normal((32, 16, 16, 1), dtype=np.float32), random.integers(0, 10, 32)


def units_of(groups: Any, name: Any) -> set[frozenset[tuple[str, int]]]:
    """Each unit as the (layer, output channel) pairs that go together."""
    found = set()
    for group in groups:
        units: dict[int, set[tuple[str, int]]] = {}
        for member in group.producers:
            for position, unit in zip(member.positions.tolist(), member.units.tolist(), strict=True):
                units.setdefault(unit, set()).add((name(member.module), position))
        found |= {frozenset(unit) for unit in units.values()}
    return found


def test_same_groups(model: torch.nn.Module) -> None:
    torch_side = amct_torch.analyze(model, torch.zeros(1, 1, 16, 16))
    tensorflow_side = amct_tensorflow.analyze_graph(resnet20(training=True).graph, ["logits"])
    assert units_of(torch_side.groups, lambda name: name) == units_of(tensorflow_side.groups, path_of)
    assert torch_side.macs == tensorflow_side.macs


def keeping(base: type) -> Any:
    """An object of a sensitivity class that keeps its scores by the groups' layers."""

    class Kept(base):  # type: ignore[misc, valid-type]
        def scores(self, groups: Any) -> Any:
            found = super().scores(groups)
            self.kept = {
                frozenset(path_of(m.module) for m in group.producers): scores
                for group, scores in zip(groups, found, strict=True)
            }
            return found

    return Kept()


# The last one is made of FisherSensitivity's and MagnitudeSensitivity's scores.
@pytest.mark.parametrize("name", ["TaylorLossSensitivity", "FisherMagnitudeSensitivity"])
def test_same_sensitivities_search_channels_and_outputs(
    tmp_path: Path, model: torch.nn.Module, training: Any, samples: Any, name: str
) -> None:
    net, session = training
    images, labels = samples
    nchw = torch.from_numpy(images).permute(0, 3, 1, 2)
    (tmp_path / "search.cfg").write_text(SEARCH)
    first, second = keeping(getattr(search_torch, name)), keeping(getattr(search_tensorflow, name))
    for side in ("torch", "tensorflow"):
        (tmp_path / side).mkdir()
    amct_torch.auto_channel_prune_search(
        model, tmp_path / "search.cfg", [nchw, torch.from_numpy(labels)], tmp_path / "torch" / "out.cfg", first
    )
    feed = {"image:0": images, "label:0": labels}
    amct_tensorflow.auto_channel_prune_search(
        net.graph, ["logits"], tmp_path / "search.cfg", [feed], tmp_path / "tensorflow" / "out.cfg", second,
        session=session,
    )  # fmt: skip
    assert set(first.kept) == set(second.kept)
    for layers, scores in first.kept.items():
        np.testing.assert_allclose(second.kept[layers], scores, rtol=1e-4, atol=1e-4 * np.abs(scores).max())
    configs = [load_retrain_config(tmp_path / side / "out.cfg") for side in ("torch", "tensorflow")]
    one, two = ({path_of(item.name): item.prune for item in c.override_layer_configs} for c in configs)
    assert one == two
    assert one

    pruned = amct_torch.create_prune_retrain_model(
        model, (nchw[:2],), tmp_path / "torch" / "out.cfg", tmp_path / "torch" / "record.txt"
    ).eval()
    inference = resnet20(training=False)
    amct_tensorflow.create_prune_retrain_model(
        inference.graph, ["logits"], tmp_path / "tensorflow" / "record.txt", tmp_path / "tensorflow" / "out.cfg"
    )
    with inference.graph.as_default(), tf1.Session() as own:
        own.run(tf1.global_variables_initializer())
        load(model, own)
        frozen = tf1.graph_util.convert_variables_to_constants(own, inference.graph.as_graph_def(), ["logits"])
    (tmp_path / "frozen.pb").write_bytes(frozen.SerializeToString())
    amct_tensorflow.save_prune_retrain_model(
        tmp_path / "frozen.pb", ["logits"], tmp_path / "tensorflow" / "record.txt", tmp_path / "small"
    )
    gone = []
    for side in ("torch", "tensorflow"):
        records = load_record(tmp_path / side / "record.txt").channels
        gone.append({(path_of(n.name), tuple(n.prune_index.tolist())) for r in records for n in r.producers})
    assert gone[0] == gone[1]
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(tf1.GraphDef.FromString((tmp_path / "small.pb").read_bytes()), name="")
        with tf1.Session(graph=graph) as own:
            logits = own.run("logits:0", {"image:0": images})
    with torch.no_grad():
        expected = pruned(nchw).numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max())
