"""Train, restore into the inference graph, freeze, save: the file means what the masked graph means."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from networks import CHANNELS, PATTERN, QUANT, data, freeze, minimise, residual, run  # noqa: E402

import openwork.tensorflow as amct  # noqa: E402
from bad_arguments import refuse_to_write  # noqa: E402
from openwork.errors import (  # noqa: E402
    ConfigError,
    FileError,
    ModelError,
    NothingToPruneError,
    RecordError,
    UnsupportedModelError,
)
from openwork.record import Record, load_record, save_record  # noqa: E402
from openwork.sparsity import check  # noqa: E402

tf1 = tf.compat.v1
MIXED = CHANNELS + (
    'override_layer_configs { layer_name: "second/Conv2D" prune_config { n_out_of_m_pruner { l1_selective_prune '
    "{ n_out_of_m_type: M4N2 } } } }"
)


def create(net: Any, folder: Path, quantised: bool, record: str = "record.txt") -> Any:
    if quantised:
        return amct.create_compressed_retrain_model(net.graph, folder / "c.cfg", ["logits"], folder / record)
    return amct.create_prune_retrain_model(net.graph, ["logits"], folder / record, folder / "c.cfg")


def trained(folder: Path, config: str, quantised: bool = False, resource: bool = True, steps: int = 3) -> np.ndarray:
    """Leaves ``model.pb`` and ``record.txt``; returns the outputs of the masked inference graph."""
    (folder / "c.cfg").write_text(config)
    images, labels = data()
    net = residual(True, resource)
    create(net, folder, quantised, "training.txt")
    step = minimise(net, tf1.train.AdamOptimizer(0.01))
    with net.graph.as_default(), tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        for _ in range(steps):
            session.run(step, {net.image: images, net.label: labels})
        tf1.train.Saver().save(session, str(folder / "trained.ckpt"))
    net = residual(False, resource, seed=7)
    create(net, folder, quantised)
    with net.graph.as_default(), tf1.Session() as session:
        tf1.train.Saver().restore(session, str(folder / "trained.ckpt"))
        freeze(net, session, str(folder / "model.pb"))
        return session.run(net.logits, {net.image: images})


def read(path: Path) -> Any:
    return tf1.GraphDef.FromString(path.read_bytes())


def constants(graph_def: Any) -> dict[str, np.ndarray]:
    return {n.name: tf.make_ndarray(n.attr["value"].tensor) for n in graph_def.node if n.op == "Const"}


def through_onnx(graph_def: Any, image: np.ndarray) -> np.ndarray:
    import onnxruntime
    import tf2onnx

    model, _ = tf2onnx.convert.from_graph_def(graph_def, input_names=["image:0"], output_names=["logits:0"], opset=17)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"image:0": image})[0]


def close(actual: np.ndarray, expected: np.ndarray) -> bool:
    return float(np.abs(actual - expected).max()) <= 1e-5 * float(np.abs(expected).max())


@pytest.mark.parametrize(("config", "resource"), [(CHANNELS, True), (CHANNELS, False), (MIXED, True)])
def test_channels_are_cut(tmp_path: Path, config: str, resource: bool) -> None:
    expected = trained(tmp_path, config, resource=resource)
    amct.save_prune_retrain_model(tmp_path / "model.pb", ["logits"], tmp_path / "record.txt", tmp_path / "new" / "out")
    saved = read(tmp_path / "new" / "out.pb")
    shapes = {name: value.shape for name, value in constants(saved).items()}
    assert shapes["stem/kernel"] == (3, 3, 3, 8)
    assert shapes["first/kernel"] == (3, 3, 8, 12)
    assert shapes["second/kernel"] == (3, 3, 12, 8)
    assert shapes["head/kernel"] == (8, 5)
    assert shapes["first_bn/gamma"] == shapes["first_bn/moving_variance"] == (12,)
    assert not [node.name for node in saved.node if "openwork" in node.name]
    assert not saved.library.function
    image, _ = data()
    assert close(run(saved, image), expected)
    assert close(through_onnx(saved, image), expected)
    # The record has the channels of the trained masks, not those of the freshly built inference graph.
    kernels = constants(read(tmp_path / "model.pb"))
    alive = kernels["openwork_ops/channels/first/Conv2D/0/kept"] > 0.5
    node = next(r.producers[0] for r in load_record(tmp_path / "record.txt").channels if len(r.producers) == 1)
    assert node.prune_index.tolist() == np.flatnonzero(~alive).tolist()
    if config == MIXED:
        assert check(constants(saved)["second/kernel"], 2)


@pytest.mark.parametrize("every", [0, 2])
def test_patterns_are_exact_zeros(tmp_path: Path, every: int) -> None:
    expected = trained(tmp_path, PATTERN % every)
    amct.save_prune_retrain_model(tmp_path / "model.pb", ["logits"], tmp_path / "record.txt", tmp_path / "out")
    saved = read(tmp_path / "out.pb")
    image, _ = data()
    assert close(run(saved, image), expected)
    weights = constants(saved)
    for name, axis in (("stem/kernel", 2), ("first/kernel", 2), ("second/kernel", 2), ("head/kernel", 0)):
        assert check(weights[name], axis), name
        assert (weights[name] == 0).mean() > 0.3
        recorded = load_record(tmp_path / "record.txt").masks[
            f"{name.split('/')[0]}/{'MatMul' if axis == 0 else 'Conv2D'}"
        ]
        assert ((weights[name] != 0) == recorded.mask()).all()


def test_a_graph_without_masks_is_cut_as_the_record_says(tmp_path: Path) -> None:
    (tmp_path / "c.cfg").write_text(CHANNELS)
    net = residual(False)
    images, _ = data()
    with net.graph.as_default(), tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        freeze(net, session, str(tmp_path / "plain.pb"))
    create(residual(False), tmp_path, False)
    masked = read(tmp_path / "plain.pb")
    nodes = {node.name: node for node in masked.node}
    for record in load_record(tmp_path / "record.txt").channels:
        producer = record.producers[0].name
        for name, axis in (
            (("second/kernel", 2),) if producer == "first/Conv2D" else (("first/kernel", 2), ("head/kernel", 0))
        ):
            weight = tf.make_ndarray(nodes[name].attr["value"].tensor).copy()
            np.moveaxis(weight, axis, 0)[record.producers[0].prune_index] = 0
            nodes[name].attr["value"].tensor.CopyFrom(tf.make_tensor_proto(weight))
    expected = run(masked, images)
    amct.save_prune_retrain_model(tmp_path / "plain.pb", ["logits"], tmp_path / "record.txt", tmp_path / "out")
    assert close(run(read(tmp_path / "out.pb"), images), expected)


@pytest.mark.parametrize(
    "config",
    [
        QUANT % ("arq_retrain", "true"),
        "fakequant_precision_mode: FORCE_FP16_QUANT" + QUANT % ("arq_retrain", "false"),
        QUANT % ("ulq_retrain", "true"),
        PATTERN % 1 + QUANT % ("ulq_retrain", "false"),
        CHANNELS + QUANT % ("ulq_retrain", "true"),
        CHANNELS + QUANT.replace("channel_wise: %s", "channel_wise: %s dst_type: INT4") % ("arq_retrain", "true"),
    ],
)
def test_quantised_graphs_simulate(tmp_path: Path, config: str) -> None:
    expected = trained(tmp_path, config, quantised=True)
    amct.save_compressed_retrain_model(tmp_path / "model.pb", ["logits"], tmp_path / "record.txt", tmp_path / "out")
    saved = read(tmp_path / "out.pb")
    assert not [node.name for node in saved.node if "openwork" in node.name]
    image, _ = data()
    assert close(run(saved, image), expected)
    weights, record = constants(saved), load_record(tmp_path / "record.txt")
    highest = 7 if "INT4" in config else 127
    for layer in ("stem", "first", "second"):
        integers = weights[f"{layer}/kernel/integers"]
        assert integers.dtype == np.int8
        largest = np.abs(integers.astype(int)).max()
        assert largest == highest or ("ulq" in config and highest * 0.8 < largest < highest)
        factors = record.factors[f"{layer}/Conv2D"]
        assert factors.wts_type == ("INT4" if "INT4" in config else "INT8")
        assert factors.fakequant_precision_mode == ("FORCE_FP16_QUANT" if "FORCE" in config else None)
        assert len(factors.scale_w) == (integers.shape[-1] if "channel_wise: true" in config else 1)
        if "n_out_of_m" in config:
            assert check(integers, 2)
    low, high = (weights[f"stem/Conv2D/input_quantised/{end}"] for end in ("min", "max"))
    factors = record.factors["stem/Conv2D"]
    assert factors.scale_d == pytest.approx((high - low) / 255, rel=1e-6)
    assert (-128 - factors.offset_d) * factors.scale_d == pytest.approx(low, abs=factors.scale_d)


def test_the_converter_finds_integer_patterns(tmp_path: Path) -> None:
    trained(tmp_path, PATTERN % 0 + QUANT % ("arq_retrain", "true"), quantised=True)
    amct.save_compressed_retrain_model(tmp_path / "model.pb", ["logits"], tmp_path / "record.txt", tmp_path / "out")
    done = subprocess.run(
        [sys.executable, "-m", "openwork", "convert", "--model", str(tmp_path / "out.pb"), "--framework", "3",
         "--sparsity", "1", "--output", str(tmp_path / "converted")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    for layer in ("first/Conv2D", "second/Conv2D"):
        assert " int8 " in lines[layer], done.stdout
        assert "2:4 -> Conv2DCompress" in lines[layer]
    import onnxruntime

    image, _ = data()
    session = onnxruntime.InferenceSession(str(tmp_path / "converted.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: image})
    expected = run(read(tmp_path / "out.pb"), image)
    # A value on the edge between two integers may go either way.
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()


def test_ranges_come_from_the_first_batches_and_are_learned(tmp_path: Path) -> None:
    (tmp_path / "c.cfg").write_text("batch_num: 2\n" + QUANT % ("arq_retrain", "true"))
    net = residual(True)
    added = create(net, tmp_path, True)
    step = minimise(net, tf1.train.GradientDescentOptimizer(0.5))
    images, labels = data()
    with net.graph.as_default(), tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        low, high = (next(v for v in added if f"stem/Conv2D/input/{end}" in v.name) for end in ("clip_min", "clip_max"))
        assert low in tf1.trainable_variables()
        session.run(step, {net.image: images, net.label: labels})
        assert session.run([low, high]) == pytest.approx([images.min(), images.max()])
        session.run(step, {net.image: 2 * images, net.label: labels})
        assert session.run([low, high]) == pytest.approx([2 * images.min(), 2 * images.max()])
        session.run(net.loss, {net.image: 9 * images, net.label: labels})
        for _ in range(3):
            session.run(step, {net.image: 3 * images, net.label: labels})
        assert session.run(high) != pytest.approx(2 * images.max(), rel=1e-6)
        assert session.run(high) < 3 * images.max() * 0.99


def config_error(tmp_path: Path, text: str, kind: type[Exception], words: str, **how: Any) -> None:
    (tmp_path / "c.cfg").write_text(text)
    net = residual(True, **how)
    count = len(net.graph.get_operations())
    with pytest.raises(kind, match=words):
        create(net, tmp_path, False)
    assert len(net.graph.get_operations()) == count, "the graph was changed"
    assert not (tmp_path / "record.txt").exists()


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        (CHANNELS + 'regular_prune_skip_layers: "frist/Conv2D"', ConfigError, "no layer 'frist/Conv2D'; did you mean"),
        (CHANNELS + 'skip_layers: "stem"', ConfigError, r"no layer 'stem'; did you mean 'stem/Conv2D'\?$"),
        (CHANNELS + 'skip_layers: "stem/k"', ConfigError, r"no layer 'stem/k'; did you mean 'stem/Conv2D'\?$"),
        (
            CHANNELS + 'regular_prune_skip_layers: "stem/kernel"',
            ConfigError,
            r"regular_prune_skip_layers: the model has no layer 'stem/kernel'; did you mean 'stem/Conv2D'\?$",
        ),
        (CHANNELS + 'skip_layers: "first/Conv2D" skip_layers: "stem/Conv2D"', NothingToPruneError, "tied to"),
        (CHANNELS + 'regular_prune_skip_types: "Conv2d"', ConfigError, "no layer type 'Conv2d'; did you mean 'Conv2D'"),
        (CHANNELS.replace("0.5", "0.01"), NothingToPruneError, "leaves all 16 channels"),
        (MIXED.replace("second/Conv2D", "pool"), ConfigError, "'pool', a Mean, cannot get an N:M mask"),
    ],
)
def test_wrong_configs(tmp_path: Path, text: str, kind: type[Exception], words: str) -> None:
    config_error(tmp_path, text, kind, words)


def test_a_skip_of_an_operator_that_is_no_layer_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "c.cfg").write_text(CHANNELS + 'skip_layers: "pool" skip_layers: "second/Conv2D"')
    create(residual(True), tmp_path, False)
    lines = [r.getMessage() for r in caplog.records if "skipping it does nothing" in r.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith("skip_layers: Mean 'pool' is no layer; ")


def test_a_session_that_ran_the_graph_before_is_refused(tmp_path: Path) -> None:
    """TensorFlow would go on to run the unmasked operators, without a word."""
    (tmp_path / "c.cfg").write_text(CHANNELS)
    for ran in (True, False):
        net = residual(True)
        with net.graph.as_default(), tf1.Session() as session:
            initialiser = tf1.global_variables_initializer()
            if ran:
                session.run(initialiser)
                with pytest.raises(UnsupportedModelError, match="has run the graph before"):
                    create(net, tmp_path, False)
                continue
            create(net, tmp_path, False)
            step = minimise(net)
            session.run(tf1.global_variables_initializer())
            images, labels = data()
            session.run(step, {net.image: images, net.label: labels})
            before = session.run(net.loss, {net.image: images, net.label: labels})
            dead = session.run("openwork_ops/channels/first/Conv2D/0/alive:0") == 0
            second = next(v for v in tf1.trainable_variables() if v.op.name == "second/kernel")
            second.load(np.where(dead[:, None], 9.0, session.run(second)).astype(np.float32), session)
            assert session.run(net.loss, {net.image: images, net.label: labels}) == pytest.approx(before, abs=1e-6)


def test_graphs_that_cannot_be_changed(tmp_path: Path) -> None:
    (tmp_path / "c.cfg").write_text(CHANNELS)

    def fails(graph: Any, kind: type[Exception], words: str, outputs: Any = ("logits",)) -> None:
        with pytest.raises(kind, match=words):
            amct.create_prune_retrain_model(graph, list(outputs), tmp_path / "record.txt", tmp_path / "c.cfg")

    fails(7, UnsupportedModelError, "graph is a int; a tf.Graph is needed")
    net = residual(True)
    fails(net.graph, ConfigError, "'logist' is not in the graph; did you mean 'logits'", ["logist"])
    create(net, tmp_path, False)
    fails(net.graph, UnsupportedModelError, "carries operators of openwork already")
    net = residual(True)
    net.graph.finalize()
    fails(net.graph, UnsupportedModelError, "graph is finalized")


def test_quantisation_after_the_optimizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.cfg").write_text(QUANT % ("arq_retrain", "true"))
    net = residual(True)
    minimise(net)
    with pytest.raises(UnsupportedModelError, match=r"has an optimizer already .*; call this before minimize"):
        create(net, tmp_path, True)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("placeholder", "'product' .*its weight depends on placeholder 'given'; a variable or constant is needed"),
        ("half", "'product' .*its weight is float16; float32 or float64 is needed"),
        ("computed", "'product' .*its weight is computed"),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_layers_that_cannot_be_masked_are_named(tmp_path: Path, kind: str, words: str, named: bool) -> None:
    override = f'override_layer_configs {{ layer_name: "product" {CHANNELS} }}'
    (tmp_path / "c.cfg").write_text(override if named else CHANNELS)
    dtype = tf.float16 if kind == "half" else tf.float32
    with tf.Graph().as_default() as graph:
        x = tf1.placeholder(dtype, [None, 8], name="x")
        given = tf1.placeholder(tf.float32, [8, 12], name="given")
        inner = tf1.get_variable("inner", [8, 12], dtype)
        weight = {"placeholder": tf.abs(given), "half": inner, "computed": inner * tf.exp(inner)}[kind]
        hidden = tf.nn.relu(tf.matmul(x, weight, name="product"))
        tf.matmul(hidden, tf1.get_variable("last", [12, 4], dtype), name="logits")
    with pytest.raises((ConfigError, NothingToPruneError), match=words):
        amct.create_prune_retrain_model(graph, ["logits"], tmp_path / "record.txt", tmp_path / "c.cfg")


def test_weights_inside_a_conditional_are_refused(tmp_path: Path) -> None:
    (tmp_path / "c.cfg").write_text(CHANNELS)
    for v2 in (False, True):
        graph = tf.Graph()
        with graph.as_default():
            (tf1.enable_control_flow_v2 if v2 else tf1.disable_control_flow_v2)()
            try:
                x = tf1.placeholder(tf.float32, [None, 8], name="x")
                choice = tf1.placeholder(tf.bool, [], name="choice")
                first, second = tf1.get_variable("first", [8, 12]), tf1.get_variable("second", [12, 4])
                hidden = tf.cond(choice, lambda: tf.matmul(x, first), lambda: tf.matmul(-x, first))  # noqa: B023
                tf.matmul(tf.nn.relu(hidden), second, name="logits")
            finally:
                tf1.enable_control_flow_v2()
        with pytest.raises(
            (UnsupportedModelError, NothingToPruneError), match=r"inside a conditional|hides the layers inside it"
        ):
            amct.create_prune_retrain_model(graph, ["logits"], tmp_path / "record.txt", tmp_path / "c.cfg")


@pytest.mark.parametrize("resource", [False, True])
def test_weights_that_a_loop_reads_too_are_not_masked(tmp_path: Path, resource: bool) -> None:
    (tmp_path / "c.cfg").write_text(PATTERN % 0)
    graph = tf.Graph()
    with graph.as_default():
        tf1.disable_control_flow_v2()
        try:
            x = tf1.placeholder(tf.float32, [None, 8], name="x")
            weight = tf1.get_variable("shared", [8, 8], use_resource=resource)
            hidden = tf.nn.relu(tf.matmul(x, weight, name="first"))
            hidden = tf1.while_loop(lambda i, h: i < 2, lambda i, h: (i + 1, tf.matmul(h, weight)), [0, hidden])[1]
            tf.matmul(hidden, tf1.get_variable("last", [8, 4], use_resource=resource), name="logits")
        finally:
            tf1.enable_control_flow_v2()
    # A variable of its own is refused by name; a reference is left alone, and the other weight lies behind the loop.
    with pytest.raises(UnsupportedModelError if resource else NothingToPruneError, match=r"first|nothing is pruned"):
        amct.create_prune_retrain_model(graph, ["logits"], tmp_path / "record.txt", tmp_path / "c.cfg")
    assert not (tmp_path / "record.txt").exists()


def test_wrong_files(tmp_path: Path) -> None:
    trained(tmp_path, CHANNELS, steps=1)
    model, record = tmp_path / "model.pb", tmp_path / "record.txt"

    def fails(kind: type[Exception], words: str, pb: Path = model, outputs: Any = ("logits",), **how: Any) -> None:
        with pytest.raises(kind, match=words):
            amct.save_prune_retrain_model(
                pb, list(outputs), how.get("record", record), how.get("out", tmp_path / "out")
            )
        assert not (tmp_path / "out.pb").exists()

    fails(FileError, "does not exist", tmp_path / "none.pb")
    (tmp_path / "short.pb").write_bytes(model.read_bytes()[:-5])
    fails(FileError, "truncated", tmp_path / "short.pb")
    fails(ConfigError, "did you mean 'logits'", outputs=["logit"])
    fails(FileError, "does not exist", record=tmp_path / "none.txt")
    save_record(Record(), tmp_path / "empty.txt")
    fails(RecordError, "is empty", record=tmp_path / "empty.txt")
    fails(ConfigError, "save_path is", out=f"{tmp_path}/out/")
    text = record.read_text()
    (tmp_path / "other.txt").write_text(text.replace("first/Conv2D", "other/Conv2D"))
    fails(RecordError, "'other/Conv2D' is not in the graph", record=tmp_path / "other.txt")
    net = residual(True)
    (tmp_path / "thawed.pb").write_bytes(net.graph.as_graph_def().SerializeToString())
    fails(FileError, "is not frozen: .* is a variable", tmp_path / "thawed.pb")
    amct.save_prune_retrain_model(model, ["logits"], record, tmp_path / "once")
    fails(RecordError, "another graph", tmp_path / "once.pb")


def test_a_range_that_was_never_seen(tmp_path: Path) -> None:
    trained(tmp_path, QUANT % ("arq_retrain", "true"), quantised=True, steps=0)
    with pytest.raises(ModelError, match=r"never calibrated .*; run at least one training step"):
        amct.save_compressed_retrain_model(tmp_path / "model.pb", ["logits"], tmp_path / "record.txt", tmp_path / "out")


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ({"clip_max": np.nan}, r"is not finite \(-\S+ to nan\): training diverged"),
        ({"clip_min": -np.inf}, r"is not finite \(-inf to \S+\): training diverged"),
        ({"clip_min": 0.5, "clip_max": -0.25}, r"has crossed ends \(0.5 to -0.25\): training diverged"),
        ({"clip_min": 0.0, "clip_max": 0.0}, r"has no width \(0 to 0\): training diverged"),
    ],
)
def test_ranges_that_diverged_are_told_from_missing_ones(tmp_path: Path, ends: dict[str, float], words: str) -> None:
    trained(tmp_path, QUANT % ("arq_retrain", "true"), quantised=True)
    graph_def = read(tmp_path / "model.pb")
    nodes = {node.name: node for node in graph_def.node}
    for end, value in ends.items():
        node = nodes[f"openwork_ops/quantised/stem/Conv2D/input/{end}"]
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(np.float32(value)))
    (tmp_path / "model.pb").write_bytes(graph_def.SerializeToString())
    record = (tmp_path / "record.txt").read_bytes()
    with pytest.raises(ModelError, match=f"layer 'stem/Conv2D': its learned clip range {words}") as caught:
        amct.save_compressed_retrain_model(tmp_path / "model.pb", ["logits"], tmp_path / "record.txt", tmp_path / "out")
    assert "calibrated" not in str(caught.value)
    assert not (tmp_path / "out.pb").exists()
    assert (tmp_path / "record.txt").read_bytes() == record


def test_weights_that_diverged_are_named(tmp_path: Path) -> None:
    trained(tmp_path, QUANT % ("arq_retrain", "true"), quantised=True)
    graph_def = read(tmp_path / "model.pb")
    (node,) = (node for node in graph_def.node if node.name == "stem/kernel")
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(np.full((3, 3, 3, 16), np.nan, np.float32)))
    (tmp_path / "model.pb").write_bytes(graph_def.SerializeToString())
    with pytest.raises(ModelError, match="layer 'stem/Conv2D': its weight has NaN or infinity: training diverged"):
        amct.save_compressed_retrain_model(tmp_path / "model.pb", ["logits"], tmp_path / "record.txt", tmp_path / "out")


@pytest.mark.parametrize("what", ["prune", "compressed"])
def test_a_record_that_cannot_be_written_is_found_before_the_graph_is(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of the record is checked first: no .pb without the record that belongs to it."""
    trained(
        tmp_path, CHANNELS + (QUANT % ("arq_retrain", "true") if what == "compressed" else ""), what == "compressed"
    )
    record = tmp_path / "record.txt"
    before = record.read_bytes()
    refuse_to_write(monkeypatch, "record.txt")
    save = getattr(amct, f"save_{what}_retrain_model")
    with pytest.raises(FileError, match=r"record_file .*record\.txt cannot be written: No space left"):
        save(tmp_path / "model.pb", ["logits"], record, tmp_path / "out")
    assert not (tmp_path / "out.pb").exists()
    assert record.read_bytes() == before


def test_a_config_that_asks_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "c.cfg").write_text("batch_num: 1")
    with pytest.raises((ConfigError, NothingToPruneError), match="nothing"):
        create(residual(True), tmp_path, True)


@pytest.mark.parametrize("create", [amct.create_prune_retrain_model, amct.create_compressed_retrain_model])
def test_the_config_is_not_taken_for_the_record(tmp_path: Path, create: Any) -> None:
    config = tmp_path / "c.cfg"
    config.write_text(PATTERN % 0)
    graph = tf.Graph()
    with graph.as_default():
        x = tf1.placeholder(tf.float32, [None, 8], name="x")
        tf.matmul(x, tf1.get_variable("w", [8, 4]), name="logits")
    order = (["logits"], config, config) if create is amct.create_prune_retrain_model else (config, ["logits"], config)
    with pytest.raises(FileError, match="is the config file itself"):
        create(graph, *order)
    assert config.read_text() == PATTERN % 0
