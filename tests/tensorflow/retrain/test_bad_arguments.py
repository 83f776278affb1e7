"""Every argument of AMCT's functions and of the native ones, wrong in every way: one line that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import keras  # noqa: E402
from networks import CHANNELS, data, minimise, residual  # noqa: E402

import openwork.tensorflow as amct  # noqa: E402
from bad_arguments import NO_PATHS, leftovers, refusal, wrong_calls  # noqa: E402
from openwork.tensorflow import PrunePlan  # noqa: E402

tf1 = tf.compat.v1
PATHS = ("config_defination", "record_file", "pb_model", "save_path", "config", "output_cfg", "path", "source",
         "target")  # fmt: skip


def frozen(net: Any) -> Any:
    with net.graph.as_default(), tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        return tf1.graph_util.convert_variables_to_constants(session, net.graph.as_graph_def(), ["logits"])


def small_model() -> Any:
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(8, 3, activation="relu", name="conv")(inputs)
    return keras.Model(inputs, keras.layers.Dense(4, name="head")(keras.layers.GlobalAveragePooling2D()(x)))


@pytest.fixture
def calls(tmp_path: Path) -> dict[Any, dict[str, Any]]:
    """Arguments with which each function works."""
    (tmp_path / "c.cfg").write_text(CHANNELS)
    (tmp_path / "search.cfg").write_text("compress_ratio: 1.5")
    net = residual(False)
    amct.create_prune_retrain_model(net.graph, ["logits"], tmp_path / "record.txt", tmp_path / "c.cfg")
    (tmp_path / "model.pb").write_bytes(frozen(net).SerializeToString())
    images, labels = data(4)
    training = residual(True)
    minimise(training)
    feeds = [{"image:0": images, "label:0": labels}]
    create = {
        "graph": residual(False).graph, "outputs": ["logits"], "record_file": str(tmp_path / "record.txt"),
        "config_defination": str(tmp_path / "c.cfg"),
    }  # fmt: skip
    save = {
        "pb_model": str(tmp_path / "model.pb"), "outputs": ["logits"], "record_file": str(tmp_path / "record.txt"),
        "save_path": str(tmp_path / "out"),
    }  # fmt: skip
    plan = amct.prune(small_model())[1]
    plan.save(tmp_path / "plan.json")
    return {
        amct.create_prune_retrain_model: create,
        amct.create_compressed_retrain_model: create,
        amct.save_prune_retrain_model: save,
        amct.save_compressed_retrain_model: save,
        amct.auto_channel_prune_search: {
            "graph": training.graph, "output_nodes": ["logits"], "config": str(tmp_path / "search.cfg"),
            "input_data": feeds, "output_cfg": str(tmp_path / "found.cfg"),
        },
        amct.prune_saved_model: {"source": str(tmp_path / "saved"), "target": str(tmp_path / "smaller")},
        PrunePlan.load: {"path": tmp_path / "plan.json"},
        plan.save: {"path": tmp_path / "plan.json"},
    }  # fmt: skip


def test_paths(calls: dict[Any, dict[str, Any]], tmp_path: Path) -> None:
    small_model().export(tmp_path / "saved", verbose=False)
    before = leftovers(tmp_path, set())
    tried = 0
    for call, name, value, arguments in wrong_calls(calls, PATHS, NO_PATHS):
        message = refusal(call, arguments)
        assert message.startswith(f"{name} is {value!r}"), (call, message)
        tried += 1
    assert tried > 120
    assert not leftovers(tmp_path, before)


@pytest.mark.parametrize("graph", [None, tf.Graph, "model.pb", b"x", 3, tf1.GraphDef])
def test_graphs(calls: dict[Any, dict[str, Any]], graph: Any) -> None:
    every = calls | {
        amct.analyze_graph: {"graph": None, "outputs": ["logits"]},
        amct.prune_graph: {"graph_def": None, "outputs": ["logits"]},
    }
    tried = 0
    for call, name, value, arguments in wrong_calls(every, ("graph", "graph_def"), (graph,)):
        message = refusal(call, arguments)
        assert name.partition("_")[0] in message, message
        if isinstance(value, type):
            assert f"the class {value.__name__}" in message, message
        tried += 1
    assert tried == 5


@pytest.mark.parametrize("model", [None, keras.Model, keras.layers.Dense, "m.keras", residual])
def test_models(calls: dict[Any, dict[str, Any]], model: Any, tmp_path: Path) -> None:
    plan = PrunePlan.load(tmp_path / "plan.json")
    image = np.zeros((1, 8, 8, 3), np.float32)
    whole = small_model()
    every = {
        amct.analyze: {"model": whole},
        amct.prune: {"model": whole},
        amct.verify: {"model": whole, "pruned": whole, "plan": plan, "inputs": image},
        plan.apply: {"model": whole},
    }
    for call, name, value, arguments in wrong_calls(every, ("model", "pruned"), (model,)):
        message = refusal(call, arguments)
        assert message.startswith(f"{name} is"), message
        assert not isinstance(value, type) or f"the class {value.__name__}" in message, message


def test_other_arguments(calls: dict[Any, dict[str, Any]], tmp_path: Path) -> None:
    """Of the wrong kind, whatever they are."""
    strange = (3, b"x", object(), "text", {"a": "b"}, {0: object()}, {"0": [0]}, {0: [[1], [2, 3]]})
    whole = frozen(residual(False))
    smaller, plan = amct.prune_graph(whole, ["logits"])
    feeds = {"image:0": data(4)[0]}
    assert amct.verify_graph(whole, smaller, plan, ["logits"], feeds) < 1e-4
    model = small_model()
    options = {"ratio": 0.5, "round_to": 1, "importance": "l2", "skip": (), "groups": None, "analysis": None}
    image = np.zeros((1, 8, 8, 3), np.float32)
    native = {
        amct.analyze_graph: {"graph": whole, "outputs": ["logits"], "sizes": None, "layers": None},
        amct.prune_graph: {"graph_def": whole, "outputs": ["logits"], "sizes": None, **options},
        amct.verify_graph: {
            "original": whole, "smaller": smaller, "plan": plan, "outputs": ["logits"], "feeds": feeds,
        },
        amct.prune: {"model": model, **options},
        amct.verify: {"model": model, "pruned": model, "plan": PrunePlan.load(tmp_path / "plan.json"), "inputs": image},
    }  # fmt: skip
    names = ("ratio", "importance", "skip", "groups", "analysis", "sizes", "layers", "original", "smaller", "plan",
             "outputs", "feeds")  # fmt: skip
    for call, name, value, arguments in wrong_calls(native, names, strange):
        if name == "layers" and isinstance(value, dict):
            continue  # names of weights that the graph does not have say nothing
        message = refusal(call, arguments)
        assert name in message, (call, name, value, message)
    for name in ("original", "smaller", "plan", "outputs", "feeds"):
        arguments = native[amct.verify_graph] | {name: None}
        assert refusal(amct.verify_graph, arguments).startswith(f"{name} is ")
    odd = [{"image": None}, {"image": "text"}, {"image": np.zeros((1, 2))}, {"image": [[1], [2, 3]]}, {3: image}, {}]
    for feed in odd:
        message = refusal(amct.verify_graph, native[amct.verify_graph] | {"feeds": feed})
        assert "feeds" in message or "image" in message


def test_data(calls: dict[Any, dict[str, Any]]) -> None:
    wrong = (None, 3, "image", b"x", object(), (), [None], [3], [{}], [{"image:0": None}], [{3: 4}])
    for call, _, _, arguments in wrong_calls(calls, ("input_data",), wrong):
        assert "input_data" in refusal(call, arguments)


def test_inputs_of_keras_models(calls: dict[Any, dict[str, Any]], tmp_path: Path) -> None:
    plan = PrunePlan.load(tmp_path / "plan.json")
    model = small_model()
    smaller = plan.apply(model)
    for inputs in ("text", object(), [[1], [2, 3]], np.zeros((1, 2), np.float32), {"nothing": 1}, b"x", []):
        for call, arguments in (
            (amct.analyze, {"model": model, "inputs": inputs}),
            (amct.prune, {"model": model, "inputs": inputs}),
            (amct.verify, {"model": model, "pruned": smaller, "plan": plan, "inputs": inputs}),
        ):
            assert refusal(call, arguments)


SWAPPED = [
    ("config_defination", "record_file"), ("graph", "outputs"), ("outputs", "record_file"),
    ("outputs", "config_defination"), ("graph", "config_defination"), ("pb_model", "outputs"),
    ("pb_model", "record_file"), ("record_file", "save_path"), ("output_nodes", "config"), ("config", "input_data"),
]  # fmt: skip


@pytest.mark.parametrize("names", SWAPPED)
def test_swapped(calls: dict[Any, dict[str, Any]], names: tuple[str, str], tmp_path: Path) -> None:
    """Two arguments exchanged: a message, and every file as it was."""
    tried = 0
    for call, arguments in calls.items():
        if set(names) <= set(arguments):
            files = {path: path.read_bytes() for path in leftovers(tmp_path, set())}
            swapped = {**arguments, names[0]: arguments[names[1]], names[1]: arguments[names[0]]}
            assert refusal(call, swapped)
            assert {path: path.read_bytes() for path in leftovers(tmp_path, set())} == files
            tried += 1
    assert tried


def test_closed_sessions(calls: dict[Any, dict[str, Any]], tmp_path: Path) -> None:
    """A session that was closed holds nothing; one line says so, also where it is the default session."""
    search = calls[amct.auto_channel_prune_search]
    session = tf1.Session(graph=search["graph"])
    session.close()
    assert "session is closed" in refusal(amct.auto_channel_prune_search, {**search, "session": session})
    for create in (amct.create_prune_retrain_model, amct.create_compressed_retrain_model):
        graph = residual(False).graph
        session = tf1.Session(graph=graph)
        session.close()
        before = len(graph.get_operations())
        with session.as_default():
            message = refusal(create, calls[create] | {"graph": graph})
        assert "session is closed" in message
        assert len(graph.get_operations()) == before  # the graph is as it was
