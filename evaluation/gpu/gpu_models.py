"""The models that gpu_train.py trains: small ones of each kind, whose steps have all that is exchanged."""

from collections.abc import Callable
import dataclasses

import keras
from keras import layers
import numpy as np

CLASSES, VOCABULARY = 10, 1000
ROWS = 32  # of a global batch
STEPS = 4  # and one with fewer rows


@dataclasses.dataclass(frozen=True)
class Model:
    """A model and its inputs.

    Attributes:
        build: Returns the model, whose layers have a multiple of a given number of units.
        inputs: Returns inputs for a number of rows.
    """

    build: Callable[[int], keras.Model]
    inputs: Callable[[np.random.Generator, int], np.ndarray]


def _mlp(unit: int) -> keras.Model:
    return keras.Sequential([keras.Input((784,)), layers.Dense(16 * unit, "relu"), layers.Dense(16 * unit, "relu"),
                             layers.Dense(CLASSES)])


def _vgg(unit: int) -> keras.Model:
    blocks = [[layers.Conv2D(filters * unit, 3, padding="same", activation="relu"),
               layers.Conv2D(filters * unit, 3, padding="same", activation="relu"), layers.MaxPooling2D()]
              for filters in (1, 2, 4)]
    return keras.Sequential([keras.Input((32, 32, 3)), *(layer for block in blocks for layer in block),
                             layers.Flatten(), layers.Dense(16 * unit, "relu"), layers.Dense(16 * unit, "relu"),
                             layers.Dense(CLASSES)])


def _transformer(unit: int) -> keras.Model:
    inputs = keras.Input((64,), dtype="int32")
    width = 8 * unit
    x = layers.Embedding(VOCABULARY, width)(inputs)
    for _ in range(2):
        attended = layers.MultiHeadAttention(4, width // 4)(x, x)
        x = layers.LayerNormalization()(layers.add([x, attended]))
        hidden = layers.Dense(width)(layers.Dense(4 * width, "gelu")(x))
        x = layers.LayerNormalization()(layers.add([x, hidden]))
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling1D()(x)))


MODELS = {
    "mlp": Model(_mlp, lambda rng, rows: rng.standard_normal((rows, 784), np.float32)),
    "vgg": Model(_vgg, lambda rng, rows: rng.standard_normal((rows, 32, 32, 3), np.float32)),
    "transformer": Model(_transformer, lambda rng, rows: rng.integers(0, VOCABULARY, (rows, 64)).astype(np.int32))}


def made(name: str, unit: int) -> keras.Model:
    """Returns a compiled model, with the same weights at every call."""
    keras.utils.set_random_seed(0)
    model = MODELS[name].build(unit)
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    if keras.config.dtype_policy().name == "mixed_float16":
        # Keras' scale is so large that gradients overflow until it has been halved several times; those that are made
        # of factors do not (docs/semantics.md).
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0 ** 7)
    # XLA does not compile what a strategy trains, so the plain model is not compiled by it either.
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    return model


def trained(model: keras.Model, name: str) -> dict[str, np.ndarray]:
    """Trains a model for a few steps; returns its variables by number and name."""
    rng = np.random.default_rng(0)
    rows = ROWS * STEPS + ROWS // 2 - 3
    inputs, labels = MODELS[name].inputs(rng, rows), rng.integers(0, CLASSES, rows)
    model.fit(inputs, labels, batch_size=ROWS, epochs=1, shuffle=False, verbose=0)
    return {f"{number} {variable.name}": np.asarray(variable) for number, variable in enumerate(model.weights)}
