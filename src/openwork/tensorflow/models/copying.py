"""A copy of a Keras model with variables of its own, whatever its class.

A functional or sequential model is cloned by Keras. Any other is copied object by object: layers, the lists and
dicts that hold them, and Keras' book-keeping are made anew; all else (functions, initialisers, locks) is shared.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.models.functional import Functional
from keras.src.utils import tracking

from openwork.errors import UnsupportedModelError
from openwork.tensorflow.graphs import first_line

__all__ = ["copy_model", "is_functional", "set_value"]

# Attributes of a compiled model; the copy is not compiled.
_COMPILED = {"optimizer", "_optimizer", "_compile_metrics", "_compile_loss", "_loss_tracker", "train_function",
             "test_function", "predict_function", "_compile_config", "loss"}  # fmt: skip
# Wrapped by Keras for each object when it is made.
_OWN = {"build", "quantize"}


def is_functional(model: Any) -> bool:
    """Whether Keras can rebuild the model from the configurations of its layers."""
    return isinstance(model, (Functional, keras.Sequential)) and type(model).call in (
        Functional.call, keras.Sequential.call, keras.Model.call,
    )  # fmt: skip


def set_value(variable: Any, value: np.ndarray) -> None:
    """Give a variable a value of another shape.

    Keras has no function for it; a variable holds a tf.Variable and remembers its shape.
    """
    variable._value = tf.Variable(value, dtype=variable.dtype, trainable=variable.trainable, name=variable.name)
    variable._shape = tuple(value.shape)
    variable._ndim = value.ndim


def copy_model(model: keras.Model) -> keras.Model:
    """A copy of the model, not compiled.

    Raises:
        UnsupportedModelError: Keras cannot clone it (says why).
    """
    if is_functional(model):
        try:
            twin = keras.models.clone_model(model)
            twin.set_weights(model.get_weights())
        except Exception as error:
            raise UnsupportedModelError(f"model {model.name!r} cannot be cloned: {first_line(error)}") from error
        return twin
    return _Copying().copied(model)


def _class(value: Any) -> Any:
    return type(value)


class _Copying:
    def __init__(self) -> None:
        self._memo: dict[int, Any] = {}
        self._alive: list[Any] = []  # so that no id is used twice

    def copied(self, value: Any) -> Any:
        known = self._memo.get(id(value))
        if known is not None:
            return known
        if is_functional(value):
            return self._keep(value, copy_model(value))
        if isinstance(value, keras.Variable):
            return self._variable(value)
        if isinstance(value, tracking.Tracker):
            return self._tracker(value)
        if isinstance(value, (keras.Layer, keras.optimizers.Optimizer, keras.Metric, keras.random.SeedGenerator)):
            return self._object(value)
        if hasattr(value, "__wrapped__") and isinstance(value, dict):
            return self._container(object.__getattribute__(value, "__wrapped__"))  # TensorFlow's proxy of a dict
        if isinstance(value, (list, dict, set, tuple)):
            return self._container(value)
        return value

    def _keep(self, value: Any, twin: Any) -> Any:
        self._memo[id(value)] = twin
        self._alive.append(value)
        return twin

    def _variable(self, value: Any) -> Any:
        twin = self._keep(value, object.__new__(_class(value)))
        twin.__dict__.update(value.__dict__)
        set_value(twin, keras.ops.convert_to_numpy(value))
        return twin

    def _object(self, value: Any) -> Any:
        twin = self._keep(value, _class(value).__new__(_class(value)))
        for name, attribute in list(vars(value).items()):
            if name.startswith("_self_") or (name in _OWN and callable(attribute)):
                continue
            twin.__dict__[name] = None if name in _COMPILED else self.copied(attribute)
        # TensorFlow's own book-keeping, for checkpoints and SavedModels.
        for reference in getattr(value, "_self_unconditional_checkpoint_dependencies", ()):
            if isinstance(reference.ref, (keras.Layer, keras.Variable)):
                twin._track_trackable(self.copied(reference.ref), name=reference.name, overwrite=True)
        if isinstance(value, keras.Model):
            twin._metrics.clear()
            twin.__dict__["compiled"] = False
        return twin

    def _tracker(self, value: Any) -> Any:
        twin = self._keep(value, object.__new__(_class(value)))
        twin.__dict__.update(value.__dict__)
        twin.config = {name: (test, self.copied(store)) for name, (test, store) in value.config.items()}
        twin.stored_ids = {name: {id(item) for item in store} for name, (_, store) in twin.config.items()}
        return twin

    def _container(self, value: Any) -> Any:
        if isinstance(value, tuple):
            items = [self.copied(item) for item in value]
            if all(a is b for a, b in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        twin = self._keep(value, _class(value).__new__(_class(value)))
        if vars(value) if hasattr(value, "__dict__") else False:
            twin.__dict__.update({name: self.copied(item) for name, item in vars(value).items()})
        if isinstance(value, dict):
            dict.update(twin, {name: self.copied(item) for name, item in value.items()})
        elif isinstance(value, list):
            list.extend(twin, [self.copied(item) for item in value])
        else:
            set.update(twin, {self.copied(item) for item in value})
        return twin
