"""SavedModels in and out."""

from __future__ import annotations

import pytest

tf = pytest.importorskip("tensorflow")

from keras_models import NETS  # noqa: E402

from openwork.errors import ConfigError, FileError  # noqa: E402
from openwork.tensorflow.saved_model import freeze_saved_model, prune_saved_model  # noqa: E402
from openwork.tensorflow.verification import verify_graph  # noqa: E402


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("models") / "two_outputs")
    NETS["two_outputs"].model().export(path, verbose=False)
    return path


def test_a_saved_model_is_pruned_under_its_own_signature(saved, tmp_path):
    plan = prune_saved_model(saved, tmp_path / "small", 0.5)
    x = NETS["two_outputs"].example()
    before, inputs, outputs = freeze_saved_model(saved)
    after, inputs_after, outputs_after = freeze_saved_model(tmp_path / "small")
    assert (list(inputs), list(outputs)) == (list(inputs_after), list(outputs_after))
    assert len(after.SerializeToString()) < len(before.SerializeToString())
    (name,) = inputs
    loaded = tf.saved_model.load(str(tmp_path / "small")).signatures["serving_default"](**{name: tf.constant(x)})
    assert {key: value.shape[-1] for key, value in loaded.items()} == {"one": 4, "two": 2}
    small = tf.compat.v1.GraphDef.FromString(after.SerializeToString())
    feeds = {inputs[name]: x}
    assert verify_graph(before, _renamed(small, outputs_after, outputs), plan, list(outputs.values()), feeds) <= 1e-4


def _renamed(graph_def, old, new):
    """The graph with identities that give its outputs the names they had before."""
    for key, tensor in old.items():
        name = new[key].partition(":")[0]
        if name not in {node.name for node in graph_def.node}:
            node = graph_def.node.add(name=name, op="Identity", input=[tensor])
            node.attr["T"].type = tf.float32.as_datatype_enum
    return graph_def


def test_bad_folders_and_signatures_are_named(saved, tmp_path):
    with pytest.raises(FileError, match=r"is no folder with a saved_model\.pb"):
        prune_saved_model(tmp_path / "none", tmp_path / "out")
    with pytest.raises(ConfigError, match=r"signature 'serve_default' is not in .*did you mean 'serving_default'"):
        prune_saved_model(saved, tmp_path / "out", signature="serve_default")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    with pytest.raises(FileError, match="exists and is not an empty folder"):
        prune_saved_model(saved, tmp_path / "full")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "saved_model.pb").write_bytes(b"\x08\x01garbage")
    with pytest.raises(FileError, match="cannot be loaded"):
        prune_saved_model(tmp_path / "broken", tmp_path / "out")
