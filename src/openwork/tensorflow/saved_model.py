"""SavedModels in and out: one signature is frozen, pruned, and written as a SavedModel of the same signature."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from openwork.errors import ConfigError, FileError, ModelError, nearest
from openwork.files import path_text
from openwork.graph.plan import Plan
from openwork.tensorflow.graphs import first_line
from openwork.tensorflow.pruning import prune_graph

__all__ = ["freeze_saved_model", "prune_saved_model"]


def freeze_saved_model(
    path: str | os.PathLike[str], signature: str = "serving_default"
) -> tuple[tf.compat.v1.GraphDef, dict[str, str], dict[str, str]]:
    """One signature of a SavedModel as a frozen graph.

    Returns:
        the graph, and its input and output tensors by the signature's names.

    Raises:
        FileError: no SavedModel.
        ConfigError: no such signature.
        ModelError: it cannot be frozen.
    """
    folder = path_text(path, "source")
    if not os.path.isfile(os.path.join(folder, "saved_model.pb")):
        raise FileError(f"saved model {folder} is no folder with a saved_model.pb")
    try:
        loaded = tf.saved_model.load(folder)
    except Exception as error:
        raise FileError(f"saved model {folder} cannot be loaded: {first_line(error)}") from error
    if signature not in loaded.signatures:
        names = list(loaded.signatures)
        raise ConfigError(
            f"signature {signature!r} is not in {folder}; {nearest(signature, names) if names else 'it has none'}"
        )
    function = loaded.signatures[signature]
    try:
        frozen = convert_variables_to_constants_v2(function)
    except Exception as error:
        raise ModelError(f"saved model {folder} cannot be frozen: {first_line(error)}") from error
    _, given = function.structured_input_signature
    inputs = {name: _placeholder(frozen, name, spec) for name, spec in given.items()}
    outputs = dict(zip(sorted(function.structured_outputs), (t.name for t in frozen.outputs), strict=True))
    return frozen.graph.as_graph_def(), inputs, outputs


def _placeholder(frozen: Any, name: str, spec: tf.TensorSpec) -> str:
    """The placeholder of an argument; signatures name it after the argument."""
    names = [tensor.name for tensor in frozen.inputs]
    for candidate in (spec.name, name):
        if candidate is not None and f"{candidate}:0" in names:
            return f"{candidate}:0"
    raise ModelError(f"input {name!r} of the signature is not in the frozen graph; it has {', '.join(names)}")


def prune_saved_model(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    ratio: float = 0.5,
    round_to: int = 1,
    importance: Any = "balanced_l2",
    skip: Collection[str] = (),
    signature: str = "serving_default",
) -> Plan:
    """Prune one signature of a SavedModel.

    Args:
        source: folder of the SavedModel.
        target: folder to write; it must not exist, or be empty.
        ratio, round_to, importance, skip: see `prune_graph`.
        signature: which signature.

    Returns:
        The plan. The result has constants in place of variables; to go on training, use `prune` on the Keras model.

    Raises:
        FileError: no SavedModel, or the target cannot be written.
        ConfigError: a bad argument.
        NothingToPruneError: no group may be pruned.
        ModelError: it cannot be frozen.
    """
    folder = Path(path_text(target, "target"))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileError(f"target {folder} exists and is not an empty folder")
    graph_def, inputs, outputs = freeze_saved_model(source, signature)
    smaller, plan = prune_graph(graph_def, list(outputs.values()), ratio, round_to, importance, skip)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent)
    except OSError as error:
        raise FileError(f"target {folder} cannot be written: {error.strerror or error}") from error
    try:
        _write(smaller, os.path.join(part, "model"), signature, inputs, outputs)
        if folder.exists():
            folder.rmdir()
        os.replace(os.path.join(part, "model"), folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return plan


def _write(
    graph_def: tf.compat.v1.GraphDef, path: str, signature: str, inputs: dict[str, str], outputs: dict[str, str]
) -> None:
    v1 = tf.compat.v1
    builder = v1.saved_model.Builder(path)
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(graph_def, name="")
        present = {op.name for op in graph.get_operations()}
        described = v1.saved_model.signature_def_utils.predict_signature_def(
            {name: graph.get_tensor_by_name(t) for name, t in inputs.items() if t.partition(":")[0] in present},
            {name: graph.get_tensor_by_name(t) for name, t in outputs.items()},
        )
        with v1.Session(graph=graph) as session:
            builder.add_meta_graph_and_variables(
                session, [v1.saved_model.tag_constants.SERVING], signature_def_map={signature: described}
            )
        builder.save()
