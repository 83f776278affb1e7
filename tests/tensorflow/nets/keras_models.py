"""Small Keras models, each one way of writing a network; what must come out of pruning them by half."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import keras
import numpy as np
from keras import layers, ops


@dataclass(frozen=True)
class KerasNet:
    """One model.

    Attributes:
        build: makes it.
        shape: of one input sample; a dtype of int32 draws token numbers.
        kept: variable path -> shape afterwards.
        repaired: attributes that must have been set, beside those of layers with weights.
        symbolic: whether it has inputs of its own, so that no example is needed.
    """

    build: Callable[[], keras.Model]
    shape: tuple[int, ...] = (8, 8, 3)
    kept: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    repaired: tuple[str, ...] = ()
    symbolic: bool = True
    tokens: bool = False

    def example(self, batch=2):
        random = np.random.default_rng(5)
        if self.tokens:
            return random.integers(0, 20, (batch, *self.shape)).astype("int32")
        return random.normal(size=(batch, *self.shape)).astype("float32")

    def model(self):
        """The model with random weights everywhere, so that a wrongly cut norm is seen."""
        keras.utils.set_random_seed(7)
        keras.backend.clear_session()
        model = self.build()
        model(self.example())
        random = np.random.default_rng(6)
        for variable in model.variables:
            if len(variable.shape) == 1 and "seed" not in variable.name:
                variable.assign(random.uniform(0.5, 1.5, variable.shape))
        return model


NETS: dict[str, KerasNet] = {}


def net(**about):
    def enter(build):
        NETS[build.__name__] = KerasNet(build, **about)
        return build

    return enter


def image():
    return keras.Input((8, 8, 3))


def classify(inputs, x):
    return keras.Model(inputs, layers.Dense(4, name="head")(layers.GlobalAveragePooling2D()(x)))


@net(kept={"a/kernel": (3, 3, 3, 4), "n/gamma": (4,), "b/kernel": (3, 3, 4, 3), "head/kernel": (3, 4)})
def chain():
    i = image()
    x = layers.ReLU()(layers.BatchNormalization(name="n")(layers.Conv2D(8, 3, name="a")(i)))
    return classify(i, layers.Conv2D(6, 3, name="b")(x))


@net(kept={"sequential/a/kernel": (3, 3, 3, 4), "sequential/b/kernel": (3, 3, 4, 3)})
def sequential():
    return keras.Sequential(
        [image(), layers.Conv2D(8, 3, name="a"), layers.PReLU(shared_axes=[1, 2]), layers.Conv2D(6, 3, name="b"),
         layers.Flatten(), layers.Dropout(0.5), layers.Dense(4)]
    )  # fmt: skip


@net(kept={"a/kernel": (3, 3, 3, 4), "b/kernel": (3, 3, 4, 4)})
def residual():
    i = image()
    x = layers.Conv2D(8, 3, padding="same", name="a")(i)
    return classify(i, layers.Add()([x, layers.Conv2D(8, 3, padding="same", name="b")(x)]))


@net(kept={"a/kernel": (3, 3, 3, 4), "s/kernel": (4, 2), "e/kernel": (2, 4)}, repaired=("target_shape",))
def squeeze_and_excite():
    """The reshape states a width that no weight tells."""
    i = image()
    x = layers.Conv2D(8, 3, name="a")(i)
    s = layers.Reshape((1, 1, 8))(layers.GlobalAveragePooling2D()(x))
    s = layers.Dense(8, "sigmoid", name="e")(layers.Dense(4, "relu", name="s")(s))
    return classify(i, layers.Conv2D(6, 3)(layers.Multiply()([x, s])))


@net(kept={"a/kernel": (3, 3, 3, 4), "p/pointwise_kernel": (1, 1, 4, 3), "d/kernel": (3, 3, 3, 1)})
def separable():
    i = image()
    x = layers.SeparableConv2D(6, 3, name="p")(layers.Conv2D(8, 3, name="a")(i))
    return classify(i, layers.DepthwiseConv2D(3, name="d")(x))


@net(kept={"a/kernel": (3, 3, 3, 4), "t/kernel": (3, 3, 3, 4)})
def transposed():
    i = image()
    x = layers.Conv2DTranspose(6, 3, strides=2, name="t")(layers.Conv2D(8, 3, name="a")(i))
    return classify(i, layers.UpSampling2D()(x))


@net(kept={"a/kernel": (3, 3, 3, 4), "g/kernel": (3, 3, 2, 4), "b/kernel": (3, 3, 4, 3)})
def grouped():
    i = image()
    x = layers.Conv2D(8, 3, groups=2, name="g")(layers.Conv2D(8, 3, name="a")(i))
    return classify(i, layers.Conv2D(6, 3, name="b")(x))


@net(kept={"a/kernel": (3, 3, 3, 4), "c/kernel": (1, 1, 7, 2)})
def concatenated():
    i = image()
    x = layers.Concatenate()([layers.Conv2D(8, 3, name="a")(i), layers.Conv2D(6, 3, name="b")(i)])
    return classify(i, layers.Conv2D(4, 1, name="c")(x))


@net(kept={"a/kernel": (3, 3, 3, 4), "l/gamma": (4,), "g/gamma": (4,)})
def layer_and_group_norm():
    i = image()
    x = layers.LayerNormalization(name="l")(layers.Conv2D(8, 3, name="a")(i))
    return classify(i, layers.Conv2D(6, 3)(layers.GroupNormalization(2, name="g")(x)))


@net(kept={"a/kernel": (3, 3, 3, 4), "d/kernel": (3, 3, 1, 4), "l/gamma": (4,)})
def depthwise_by_groups():
    """Keras puts such a convolution into a function."""
    i = image()
    x = layers.Conv2D(8, 3, groups=8, name="d")(layers.Conv2D(8, 3, name="a")(i))
    return classify(i, layers.Conv2D(6, 3)(layers.LayerNormalization(name="l")(x)))


@net(kept={"a/kernel": (3, 3, 3, 4), "b/kernel": (3, 3, 4, 4)})
def shared_layer():
    i = image()
    again = layers.Conv2D(8, 3, padding="same", name="b")
    return classify(i, again(ops.relu(again(layers.Conv2D(8, 3, name="a")(i)))))


@net(kept={"a/kernel": (3, 3, 3, 4)})
def nested():
    j = keras.Input((6, 6, 8))
    inner = keras.Model(j, layers.Conv2D(6, 3, name="b")(j), name="inner")
    i = image()
    return classify(i, inner(layers.Conv2D(8, 3, name="a")(i)))


@net(kept={"stem/a/kernel": (3, 3, 3, 4), "inner/b/kernel": (3, 3, 4, 3)})
def nested_sequential():
    """Paths of variables name the model inside, and differ in a clone."""
    i = image()
    x = keras.Sequential([layers.Conv2D(8, 3, name="a"), layers.ReLU()], name="stem")(i)
    return classify(i, keras.Sequential([keras.Input((6, 6, 8)), layers.Conv2D(6, 3, name="b")], name="inner")(x))


@net(kept={"a/kernel": (3, 3, 3, 4)})
def two_outputs():
    i = image()
    x = layers.Conv2D(8, 3, name="a")(i)
    return keras.Model(i, {"one": layers.Conv2D(4, 1)(x), "two": layers.Conv2D(2, 1)(x)})


@net(shape=(6,), tokens=True, kept={"e/embeddings": (20, 4), "d/kernel": (4, 3)})
def embedding():
    i = keras.Input((6,), dtype="int32")
    x = layers.Dense(6, "relu", name="d")(layers.Embedding(20, 8, name="e")(i))
    return keras.Model(i, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))


@net(shape=(6, 8), kept={"m/value/kernel": (8, 2, 2), "f/kernel": (8, 8), "o/kernel": (8, 8)})
def transformer_block():
    """Only what attention reads and its width inside may go: the stream runs to the output."""
    i = keras.Input((6, 8))
    x = layers.Add()([i, layers.MultiHeadAttention(2, 4, name="m")(i, i)])
    y = layers.Dense(8, name="o")(layers.Dense(16, "gelu", name="f")(layers.LayerNormalization()(x)))
    return keras.Model(i, layers.Add()([x, y]))


@net(shape=(10, 4), kept={"a/kernel": (3, 4, 4), "b/kernel": (3, 4, 3)})
def conv1d():
    i = keras.Input((10, 4))
    x = layers.Conv1D(6, 3, name="b")(layers.MaxPooling1D()(layers.Conv1D(8, 3, padding="same", name="a")(i)))
    return keras.Model(i, layers.Dense(4)(layers.GlobalMaxPooling1D()(x)))


@net(shape=(10, 4), kept={"a/kernel": (3, 4, 8), "d/kernel": (6, 4)})
def recurrent():
    """A recurrent layer is a loop: what goes in and out of it stays."""
    i = keras.Input((10, 4))
    x = layers.LSTM(6)(layers.Conv1D(8, 3, name="a")(i))
    return keras.Model(i, layers.Dense(4)(layers.Dense(8, "relu", name="d")(x)))


@net(kept={"a/kernel": (3, 3, 3, 8), "b/kernel": (1, 1, 4, 3)})
def split_written_in_the_graph():
    """A functional graph states how long the first part is, and nothing can set it."""
    i = image()
    x, y = ops.split(layers.Conv2D(8, 3, name="a")(i), [3], axis=-1)
    x = layers.Concatenate()([layers.Conv2D(4, 1)(x), layers.Conv2D(4, 1)(y)])
    return classify(i, layers.Conv2D(6, 1, name="b")(x))


@keras.saving.register_keras_serializable("openwork_tests")
class Scale(layers.Layer):
    """A layer of a user, whose configuration states how long its weight is."""

    def __init__(self, width, **options):
        super().__init__(**options)
        self.width = width

    def build(self, shape):
        self.gain = self.add_weight(shape=(self.width,), name="gain")

    def call(self, x):
        return x * self.gain

    def get_config(self):
        return {**super().get_config(), "width": self.width}


@net(kept={"a/kernel": (3, 3, 3, 4), "scale/gain": (4,)}, repaired=("width",))
def layer_of_a_user():
    i = image()
    x = Scale(8, name="scale")(layers.Conv2D(8, 3, name="a")(i))
    return classify(i, layers.Conv2D(6, 3)(x))


class Block(layers.Layer):
    def __init__(self, width):
        super().__init__()
        self.convs = [layers.Conv2D(width, 3, padding="same") for _ in range(2)]
        self.norm = layers.BatchNormalization()

    def call(self, x, training=False):
        return x + self.norm(self.convs[1](ops.relu(self.convs[0](x))), training=training)


class Subclassed(keras.Model):
    def __init__(self, functions):
        super().__init__()
        self.function = functions[0]  # nothing that a configuration could hold
        self.stem = layers.Conv2D(8, 3, name="stem")
        self.blocks = {"one": Block(8), "two": Block(8)}
        self.head = layers.Dense(4)

    def call(self, x, training=False):
        x = self.stem(x)
        for block in self.blocks.values():
            x = self.function(block(x, training=training))
        return self.head(ops.mean(x, axis=(1, 2)))


@net(kept={"subclassed/stem/kernel": (3, 3, 3, 4), "subclassed/block/conv2d/kernel": (3, 3, 4, 4)}, symbolic=False)
def subclassed():
    return Subclassed([ops.tanh])


class Stating(keras.Model):
    """A width that the code multiplies out, kept in an attribute."""

    def __init__(self):
        super().__init__()
        self.width = 8
        self.first, self.last = layers.Conv2D(8, 3, name="first"), layers.Dense(4)

    def call(self, x):
        return self.last(ops.reshape(self.first(x), (-1, 36 * self.width)))


@net(kept={"stating/first/kernel": (3, 3, 3, 4)}, repaired=("width",), symbolic=False)
def stating_its_width():
    return Stating()


class Written(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.last = layers.Conv2D(8, 3, name="first"), layers.Conv2D(6, 3, name="last")
        self.head = layers.Dense(4)

    def call(self, x):
        x = ops.reshape(self.first(x), (-1, 6, 6, 8))
        return self.head(ops.mean(self.last(x), axis=(1, 2)))


@net(kept={"written/first/kernel": (3, 3, 3, 8), "written/last/kernel": (3, 3, 8, 3)}, symbolic=False)
def written_in_the_code():
    """No attribute holds the width: it stays, the rest goes."""
    return Written()
