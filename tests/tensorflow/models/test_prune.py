"""Keras models: really smaller, trainable, and of the same meaning as the masked original."""

from __future__ import annotations

import re

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import keras  # noqa: E402
from keras_models import NETS  # noqa: E402

from openwork.errors import (  # noqa: E402
    ConfigError,
    ModelError,
    NothingToPruneError,
    RecordError,
    UnsupportedModelError,
)
from openwork.graph.plan import Plan  # noqa: E402
from openwork.tensorflow.models import PrunePlan, analyze, prune, verify  # noqa: E402


@pytest.mark.parametrize("name", sorted(NETS))
def test_a_pruned_model_means_the_masked_one(name, tmp_path):
    net = NETS[name]
    model, inputs = net.model(), net.example(batch=3)
    before = [value.copy() for value in model.get_weights()]
    smaller, plan = prune(model, None if net.symbolic else inputs, ratio=0.5)
    shapes = {variable.path: tuple(variable.shape) for variable in smaller.variables}
    assert {path: shapes[path] for path in net.kept} == dict(net.kept)
    assert set(net.repaired) <= {repair.attribute for repair in plan.repairs}
    assert verify(model, smaller, plan, inputs) <= 1e-4
    for value, now in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(value, now)  # the original is as it was
    output = smaller(inputs)
    if net.symbolic:
        # The configuration holds the new sizes.
        smaller.save(tmp_path / "smaller.keras")
        loaded = keras.models.load_model(tmp_path / "smaller.keras")
        keras.tree.map_structure(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4), loaded(inputs), output)


@pytest.mark.parametrize("name", ["chain", "subclassed"])
def test_a_pruned_model_trains_and_the_original_does_not_move(name):
    net = NETS[name]
    model, inputs = net.model(), net.example(batch=8)
    model.compile("adam", "mse")
    model.fit(inputs, np.zeros((8, 4)), verbose=0)
    before = keras.ops.convert_to_numpy(model(inputs))
    smaller, _ = prune(model, inputs)
    start = smaller.get_weights()
    smaller.compile(keras.optimizers.Adam(0.01), "mse")
    losses = smaller.fit(inputs, np.ones((8, 4)), epochs=8, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert any((a != b).any() for a, b in zip(start, smaller.get_weights(), strict=True))
    np.testing.assert_array_equal(before, keras.ops.convert_to_numpy(model(inputs)))


def test_a_pruned_model_is_exported_and_read(tmp_path):
    net = NETS["subclassed"]
    smaller, _ = prune(net.model(), net.example())
    smaller.export(str(tmp_path / "saved"), verbose=False, input_signature=[tf.TensorSpec((None, 8, 8, 3))])
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    x = net.example()
    np.testing.assert_allclose(loaded.serve(x), smaller(x), 1e-5, 1e-5)


def test_the_table_names_layers_and_reasons():
    text = str(analyze(NETS["residual"].model()))
    assert "a, b" in text
    assert "the caller sees these channels" in text


def test_skipped_layers_keep_their_channels():
    model = NETS["chain"].model()
    smaller, _ = prune(model, skip=["a"])
    assert {v.path: v.shape[-1] for v in smaller.variables}["a/kernel"] == 8
    assert {v.path: v.shape[-1] for v in smaller.variables}["b/kernel"] == 3


def test_round_to_keeps_multiples():
    model = NETS["chain"].model()
    smaller, _ = prune(model, ratio=0.3, round_to=4)
    assert {v.path: v.shape[-1] for v in smaller.variables}["a/kernel"] == 8


def test_a_plan_is_stored_and_read(tmp_path):
    net = NETS["chain"]
    model, inputs = net.model(), net.example()
    smaller, plan = prune(model)
    plan.save(tmp_path / "plan.json")
    assert verify(model, smaller, Plan.load(tmp_path / "plan.json"), inputs) <= 1e-4


@pytest.mark.parametrize("name", sorted(NETS))
def test_a_stored_plan_makes_the_same_model_without_choosing(name, tmp_path):
    net = NETS[name]
    model, inputs = net.model(), net.example()
    before = model.get_weights()
    smaller, plan = prune(model, None if net.symbolic else inputs)
    assert type(plan) is PrunePlan
    plan.save(tmp_path / "plan.json")
    again = PrunePlan.load(tmp_path / "plan.json").apply(model)
    for kept, value in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(kept, value)
    for first, second in zip(smaller.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_array_equal(first, second)
    keras.tree.map_structure(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), again(inputs), smaller(inputs))


class Named(keras.Model):
    def __init__(self, width=8):
        super().__init__()
        self.width = width
        self.stem, self.head = keras.layers.Conv2D(width, 3, name="stem"), keras.layers.Dense(4, name="head")

    def call(self, x):
        return self.head(keras.ops.reshape(keras.ops.relu(self.stem(x)), (-1, 36 * self.width)))


def test_a_subclassed_model_comes_back_from_its_plan_and_weights(tmp_path):
    inputs = NETS["subclassed"].example()
    model, fresh = Named(), Named()
    model(inputs)
    fresh(inputs)
    assert model.name != fresh.name  # Keras numbers models of one class
    smaller, plan = prune(model, inputs)
    assert "width" in {repair.attribute for repair in plan.repairs}
    smaller.set_weights([value + 0.01 for value in smaller.get_weights()])  # as if retrained
    smaller.save_weights(tmp_path / "small.weights.h5")
    plan.save(tmp_path / "plan.json")
    loaded = PrunePlan.load(tmp_path / "plan.json").apply(fresh)
    loaded.load_weights(tmp_path / "small.weights.h5")
    np.testing.assert_allclose(loaded(inputs), smaller(inputs), 1e-6, 1e-6)


class Described(Named):
    def get_config(self):
        return {"width": self.width}


def test_a_model_that_its_config_cannot_make_is_warned_of(tmp_path, caplog):
    inputs = NETS["subclassed"].example()
    for kind, warned in ((Named, True), (Described, False)):
        caplog.clear()
        model = kind()
        model(inputs)
        smaller, _ = prune(model, inputs)
        assert ("a .keras file of it will not load" in caplog.text) is warned
        path = tmp_path / f"{kind.__name__}.keras"
        smaller.save(path)
        if warned:
            with pytest.raises(Exception, match=r"could not be loaded|[Ss]hape"):
                keras.models.load_model(path, custom_objects={kind.__name__: kind})
        else:
            loaded = keras.models.load_model(path, custom_objects={kind.__name__: kind})
            np.testing.assert_allclose(loaded(inputs), smaller(inputs), 1e-6, 1e-6)
    caplog.clear()
    prune(NETS["chain"].model())
    assert not caplog.records


def test_layers_that_the_code_ties_are_named_with_the_reason(caplog):
    net = NETS["written_in_the_code"]
    model, inputs = net.model(), net.example()
    analysis = analyze(model, inputs)
    index = next(g.index for g in analysis.groups if any("first" in m.module for m in g.producers))
    with pytest.raises(
        ConfigError, match=r"^groups: the model's code does not allow this choice: .*: Written.call\(\): Dimension size"
    ) as raised:
        prune(model, inputs, groups={index: np.array([1])})
    assert "\n" not in str(raised.value)
    assert "Exception encountered" not in str(raised.value)
    prune(model, inputs, ratio=0.5, analysis=analysis)
    (line,) = [r.getMessage() for r in caplog.records if "stay" in r.getMessage()]
    assert re.search("^all channels of .*first stay: a size is written in the code", line)
    assert any("written in the code" in item.reason for item in analysis.frozen)


def test_an_error_of_the_models_code_says_its_reason():
    class Failing(keras.Model):
        def call(self, x):
            raise RuntimeError("the valve is shut")

    with pytest.raises(ModelError, match=r"cannot be run: Failing\.call\(\): the valve is shut$"):
        analyze(Failing(), np.zeros((2, 3), "f"))


def test_a_plan_does_not_apply_to_another_model_nor_twice():
    smaller, plan = prune(NETS["chain"].model())
    with pytest.raises(RecordError, match=r"it is of another graph, or already cut"):
        plan.apply(smaller)
    with pytest.raises(RecordError, match="of the plan is not in the graph"):
        plan.apply(NETS["squeeze_and_excite"].model())
    net = NETS["stating_its_width"]
    model = net.model()
    _, plan = prune(model, net.example())
    model.width = 5
    with pytest.raises(RecordError, match=r"width is 5; the plan needs 8 \(it is of another model\)"):
        plan.apply(model)
    with pytest.raises(UnsupportedModelError, match="model is a int"):
        plan.apply(3)


def test_wrong_plans_do_not_pass():
    net = NETS["chain"]
    model, inputs = net.model(), net.example()
    smaller, _ = prune(model, groups={0: np.array([0, 1])})
    _, other = prune(model, groups={0: np.array([0, 2])})
    assert verify(model, smaller, other, inputs) > 1e-3


def test_bad_arguments_are_named():
    model = NETS["chain"].model()
    with pytest.raises(UnsupportedModelError, match="model is a int; a Keras 3 model is needed"):
        analyze(3)
    with pytest.raises(ConfigError, match=r"ratio is 1\.5; it must be greater than 0 and less than 1"):
        prune(model, ratio=1.5)
    with pytest.raises(ConfigError, match="skip: 'aa' is no layer of"):
        prune(model, skip=["aa"])
    with pytest.raises(ConfigError, match="groups: 9 is no group"):
        prune(model, groups={9: np.array([0])})
    with pytest.raises(ConfigError, match="has no symbolic inputs; give inputs"):
        analyze(NETS["subclassed"].model())
    with pytest.raises(ConfigError, match=r"an input of shape \[0, 8, 8, 3\] has no elements"):
        analyze(NETS["subclassed"].model(), np.zeros((0, 8, 8, 3)))
    with pytest.raises(ModelError, match="cannot be run"):
        analyze(NETS["subclassed"].model(), np.zeros((2, 8, 8, 5), "f"))
    with pytest.raises(ConfigError, match="analysis is of another model"):
        prune(model, analysis=analyze(NETS["residual"].model()))


def test_a_plan_of_another_model_is_refused():
    model = NETS["chain"].model()
    smaller, _ = prune(model)
    _, other = prune(NETS["squeeze_and_excite"].model())
    with pytest.raises(RecordError, match="of the plan is not in the graph"):
        verify(model, smaller, other, NETS["chain"].example())


def test_nothing_to_prune_says_why():
    inputs = keras.Input((4,))
    with pytest.raises(NothingToPruneError, match="the caller sees these channels"):
        prune(keras.Model(inputs, keras.layers.Dense(3)(inputs)))


def test_statistics_beside_a_loop_are_not_proved():
    """The loop keeps the model from being masked as a graph; masked weights alone would give another norm."""
    inputs = keras.Input((10, 4))
    x = keras.layers.LayerNormalization()(keras.layers.Dense(8)(inputs))
    x = keras.layers.LSTM(3)(keras.layers.Dense(6)(x))
    model = keras.Model(inputs, keras.layers.Dense(2)(x))
    smaller, plan = prune(model)
    assert smaller.count_params() < model.count_params()
    with pytest.raises(ModelError, match=r"cannot be verified: .* takes statistics across channels that go"):
        verify(model, smaller, plan, np.zeros((2, 10, 4), "f"))
