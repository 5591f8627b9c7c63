"""What a model of the table is: how it is built, and on what batches it is usually trained."""

from collections.abc import Callable
import dataclasses

import keras
from keras import layers


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A model that people train.

    Attributes:
        name: Its usual name.
        family: What it is for, one word or two.
        batch_size: Rows on each worker.
        build: Returns it, with one input or a dictionary of inputs, not compiled.
        loss: A loss of Keras, by name.
        source: Who has described it, and where its sizes come from.
    """

    name: str
    family: str
    batch_size: int
    build: Callable[[], keras.Model]
    source: str
    loss: str = "sparse_categorical_crossentropy"

    def compiled(self) -> keras.Model:
        """Returns it, compiled for training with Adam."""
        model = self.build()
        model.compile("adam", self.loss)
        return model


def of_fixed_shapes(model: keras.Model, **shapes: tuple[int, ...]) -> keras.Model:
    """Returns a model with inputs of fixed shapes, by their names, in place of those of any length."""
    types = {tensor.name: tensor.dtype for tensor in keras.tree.flatten(model.input)}
    inputs = {name: keras.Input(shape, dtype=types[name], name=name) for name, shape in shapes.items()}
    return keras.Model(inputs, model(inputs))


def perceptron(width: int, *sizes: int) -> keras.Model:
    """Returns dense layers of these sizes, which end in logits."""
    return keras.Sequential([keras.Input((width,)), *(layers.Dense(size, "relu") for size in sizes[:-1]),
                             layers.Dense(sizes[-1])])
