"""Masks in a live graph: which channels die, when masks change, and that dead weights stay out of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from networks import CHANNELS, PATTERN, data, minimise, residual  # noqa: E402

import openwork.tensorflow as amct  # noqa: E402
from openwork.record import load_record  # noqa: E402
from openwork.sparsity import nm_mask  # noqa: E402

tf1 = tf.compat.v1


def masked(tmp_path: Path, config: str, late: bool = False, resource: bool = True, **how: Any) -> tuple[Any, Any]:
    """A network with masks and its training operator; `late`: the optimizer was there first."""
    (tmp_path / "c.cfg").write_text(config)
    net = residual(True, resource)
    step = minimise(net, **how) if late else None
    amct.create_prune_retrain_model(net.graph, ["logits"], tmp_path / "record.txt", tmp_path / "c.cfg")
    return net, step if late else minimise(net, **how)


def value(session: Any, name: str) -> np.ndarray:
    return session.run(f"{name}/Read/ReadVariableOp:0")


def norms(kernel: np.ndarray) -> np.ndarray:
    """Balanced L2 norms of output channels, written down anew."""
    flat = kernel.reshape(-1, kernel.shape[-1]).astype(np.float64)
    found = np.sqrt((flat**2).sum(0)) / len(flat)
    return (found - found.min()) / (found.max() - found.min())


def test_the_first_step_ranks_the_weights_of_a_checkpoint_restored_after_create(tmp_path: Path) -> None:
    net, step = masked(tmp_path, CHANNELS)
    random = np.random.default_rng(3)
    images, labels = data()
    with net.graph.as_default(), tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        for variable in tf1.trainable_variables():
            variable.load(random.standard_normal(variable.shape.as_list()).astype(np.float32), session)
        stem, second, first = (value(session, f"{name}/kernel") for name in ("stem", "second", "first"))
        session.run(step, {net.image: images, net.label: labels})
        tied = value(session, "openwork_ops/channels/stem/Conv2D/0/kept")
        alone = value(session, "openwork_ops/channels/first/Conv2D/0/kept")
        for _ in range(3):  # decided once
            session.run(step, {net.image: images, net.label: labels})
        assert (tied == value(session, "openwork_ops/channels/stem/Conv2D/0/kept")).all()
    assert np.flatnonzero(tied == 0).tolist() == sorted(np.argsort((norms(stem) + norms(second)) / 2)[:8].tolist())
    assert np.flatnonzero(alone == 0).tolist() == sorted(np.argsort(norms(first))[:12].tolist())


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("resource", [False, True])
def test_dead_weights_neither_matter_nor_move(tmp_path: Path, late: bool, resource: bool) -> None:
    net, step = masked(tmp_path, CHANNELS, late, resource)
    images, labels = data()
    feed = {net.image: images, net.label: labels}
    with net.graph.as_default(), tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        session.run(step, feed)
        dead = session.run("openwork_ops/channels/first/Conv2D/0/kept/Read/ReadVariableOp:0") == 0
        first = next(v for v in tf1.trainable_variables() if v.op.name == "first/kernel")
        second = next(v for v in tf1.trainable_variables() if v.op.name == "second/kernel")
        before = session.run(net.loss, feed)
        first.load(np.where(dead, 100.0, session.run(first)).astype(np.float32), session)
        second.load(np.where(dead[:, None], -100.0, session.run(second)).astype(np.float32), session)
        assert session.run(net.loss, feed) == pytest.approx(before, abs=1e-6)
        for _ in range(3):
            session.run(step, feed)
        assert (session.run(first)[..., dead] == 100).all()
        assert (session.run(second)[:, :, dead] == -100).all()
        assert session.run(net.loss, feed) < before


@pytest.mark.parametrize("resource", [False, True])
@pytest.mark.parametrize("config", [CHANNELS, PATTERN % 2])
@pytest.mark.parametrize("optimizer", ["GradientDescent", "Momentum", "Adam", "RMSProp"])
def test_before_and_after_the_optimizer_train_alike(
    tmp_path: Path, config: str, optimizer: str, resource: bool
) -> None:
    images, labels = data()
    losses = []
    for late in (False, True):
        made = getattr(tf1.train, f"{optimizer}Optimizer")(*((0.05, 0.9) if optimizer == "Momentum" else (0.01,)))
        net, step = masked(tmp_path, config, late, resource, optimizer=made)
        with net.graph.as_default(), tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            losses.append([session.run([net.loss, step], {net.image: images, net.label: labels})[0] for _ in range(5)])
    assert losses[0] == pytest.approx(losses[1], rel=2e-5)
    assert losses[0][-1] < losses[0][0]


def codes(session: Any, layer: str) -> np.ndarray:
    return value(session, f"openwork_ops/patterns/{layer}/codes")


def mask_of(found: np.ndarray, length: int) -> np.ndarray:
    """[h, w, in, out] from codes [h, w, groups, out], the lowest bit first."""
    bits = (found[..., None, :] >> np.arange(4)[:, None]) & 1
    return bits.reshape(*found.shape[:2], -1, found.shape[-1])[:, :, :length].astype(bool)


@pytest.mark.parametrize("every", [0, 1, 3])
def test_patterns_are_chosen_anew_in_training_steps_only(tmp_path: Path, every: int) -> None:
    net, step = masked(tmp_path, PATTERN % every, optimizer=tf1.train.GradientDescentOptimizer(0.5))
    images, labels = data()
    feed = {net.image: images, net.label: labels}
    with net.graph.as_default(), tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        kept: dict[str, np.ndarray] = {}
        changed = 0
        for number in range(7):
            for _ in range(number % 3):  # evaluation between the steps
                session.run(net.loss, feed)
            assert value(session, "openwork_ops/steps/count") == number
            if number == 0 or (every and number % every == 0):
                for name in ("stem", "first", "second"):
                    weight = value(session, f"{name}/kernel")
                    changed += name in kept and not (nm_mask(weight, axis=2) == kept[name]).all()
                    kept[name] = nm_mask(weight, axis=2)
            session.run(step, feed)
            for name, mask in kept.items():
                assert (mask_of(codes(session, f"{name}/Conv2D"), mask.shape[2]) == mask).all(), (number, name)
        assert bool(changed) == bool(every)


def test_scopes_in_force_do_not_reach_the_helpers(tmp_path: Path) -> None:
    (tmp_path / "c.cfg").write_text(CHANNELS)
    net = residual(True)
    with (
        net.graph.as_default(),
        tf.name_scope("outer"),
        tf1.variable_scope("inner"),
        tf.control_dependencies([tf.no_op()]),
        tf.device("/device:CPU:0"),
    ):
        amct.create_prune_retrain_model(net.graph, ["logits"], tmp_path / "record.txt", tmp_path / "c.cfg")
    new = [op for op in net.graph.get_operations() if "openwork_ops" in op.name]
    assert all(op.name.startswith("openwork_ops/") for op in new)
    assert not [op for op in new if any(not o.name.startswith("openwork_ops/") for o in op.control_inputs)]
    assert "openwork_ops/channels/first/Conv2D/0/kept:0" in [v.name for v in net.graph.get_collection("variables")]


def test_ties_and_lengths_that_four_does_not_divide(tmp_path: Path) -> None:
    net, _ = masked(tmp_path, PATTERN % 0)
    with net.graph.as_default(), tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        stem = next(v for v in tf1.trainable_variables() if v.op.name == "stem/kernel")  # three input channels
        for pattern in ([1, 1, 1], [0, 0, 0], [1, 2, 3], [2, -2, 1], [-1, 5, 1]):
            weight = np.broadcast_to(np.array(pattern, np.float32)[:, None], stem.shape.as_list())
            stem.load(weight, session)
            product = session.run("openwork_ops/patterns/stem/Conv2D/masked:0")
            assert (product == weight * nm_mask(np.ascontiguousarray(weight), axis=2)).all()


def test_patterns_run_over_the_channels_that_stay(tmp_path: Path) -> None:
    config = CHANNELS + (
        'override_layer_configs { layer_name: "second/Conv2D" prune_config { n_out_of_m_pruner { l1_selective_prune '
        "{ n_out_of_m_type: M4N2 } } } }"
    )
    net, step = masked(tmp_path, config)
    images, labels = data()
    with net.graph.as_default(), tf1.Session() as session:
        session.run(tf1.global_variables_initializer())
        weight = value(session, "second/kernel")
        session.run(step, {net.image: images, net.label: labels})
        alive = value(session, "openwork_ops/channels/first/Conv2D/0/kept") > 0
        product = session.run("openwork_ops/patterns/second/Conv2D/masked:0")
        made = value(session, "openwork_ops/channels/stem/Conv2D/0/kept") > 0
    survivors = np.ascontiguousarray(weight[:, :, alive][..., made])
    assert ((product[:, :, alive][..., made] != 0) == nm_mask(survivors, axis=2)).all()
    assert (product[:, :, ~alive] == 0).all()
    recorded = load_record(tmp_path / "record.txt").masks["second/Conv2D"].mask()
    assert recorded.shape == weight.shape


def test_masks_hardly_enlarge_the_checkpoint(tmp_path: Path) -> None:
    net, _ = masked(tmp_path, PATTERN % 1, optimizer=tf1.train.GradientDescentOptimizer(0.1))
    with net.graph.as_default():
        size = {v.op.name: v.dtype.size * int(np.prod(v.shape.as_list())) for v in tf1.global_variables()}
    added = sum(count for name, count in size.items() if name.startswith("openwork_ops"))
    assert 0 < added < 0.08 * sum(size.values())


def test_a_pull_to_zero_reaches_dead_weights(tmp_path: Path) -> None:
    config = (PATTERN % 0).replace("update_freq: 0", "update_freq: 0 grad_mode: SR_STE sr_ste_decay: 0.5")
    results = []
    for late in (False, True):
        net, step = masked(tmp_path, config, late, optimizer=tf1.train.GradientDescentOptimizer(0.1))
        images, labels = data()
        with net.graph.as_default(), tf1.Session() as session:
            session.run(tf1.global_variables_initializer())
            before = value(session, "first/kernel")
            raw = tf1.gradients(net.loss, net.graph.get_tensor_by_name("openwork_ops/patterns/first/Conv2D/masked:0"))
            slope = session.run(raw[0], {net.image: images, net.label: labels})
            session.run(step, {net.image: images, net.label: labels})
            results.append(value(session, "first/kernel"))
        mask = nm_mask(before, axis=2)
        expected = before - 0.1 * (slope + 0.5 * ~mask * before)
        np.testing.assert_allclose(results[-1], expected, atol=1e-6)
    np.testing.assert_allclose(results[0], results[1], atol=1e-6)


def test_the_default_session_gets_the_new_variables(tmp_path: Path) -> None:
    (tmp_path / "c.cfg").write_text(CHANNELS)
    net = residual(True)
    with net.graph.as_default(), tf1.Session() as session:
        own = tf1.global_variables_initializer()
        amct.create_prune_retrain_model(net.graph, ["logits"], tmp_path / "record.txt", tmp_path / "c.cfg")
        session.run(own)
        stem, second = value(session, "stem/kernel"), value(session, "second/kernel")
        images, labels = data()
        assert np.isfinite(session.run(net.loss, {net.image: images, net.label: labels}))
        dead = session.run("openwork_ops/channels/stem/Conv2D/0/alive:0") == 0
    assert np.flatnonzero(dead).tolist() == sorted(np.argsort((norms(stem) + norms(second)) / 2)[:8].tolist())
