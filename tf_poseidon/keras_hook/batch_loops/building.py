"""Builds what Keras' own steps would otherwise create while they are traced, so that they are traced once.

`tf.function` traces a step again that has created variables: what it would do next time may be something else. Keras'
own training and test steps create those of the optimizer, and of the metrics that were given to `compile`. What creates
variables of its own in a step is traced again as ever.

Tests: tests/training/test_training.py.
"""

from typing import Any

import keras
import tensorflow as tf

from tf_poseidon.compat import keras as keras_compat


def build(model: keras.Model, element: Any, trains: bool) -> None:
    """Builds the metrics of a model for batches, and its optimizer if its step trains; as its own steps would.

    Args:
        model: The model.
        element: The `tf.TypeSpec`s of a batch.
        trains: Whether its step trains.
    """
    outputs = keras_compat.outputs(model)
    if outputs is None or not keras_compat.are_layers_built(model):
        return
    kind = type(model)
    step = "train_step" if trains else "test_step"
    if getattr(kind, step) is not getattr(keras.Model, step) or step in vars(model):
        return
    optimizer = model.optimizer if trains else None
    metrics = keras_compat.unbuilt_metrics(model) if kind.compute_metrics is keras.Model.compute_metrics else None
    with model.distribute_strategy.scope():
        # What Keras chooses by shapes, it chooses by those in the trace: of known sizes, these are the same.
        labels = _symbolic(keras.utils.unpack_x_y_sample_weight(element)[1])
        if metrics is not None and labels is not None and all(
                None not in tensor.shape[1:] for tensor in keras.tree.flatten((labels, outputs))):
            metrics.build(labels, outputs)
        if optimizer is not None and not optimizer.built and model.trainable_weights and type(
                optimizer).__module__.startswith("keras."):
            with keras.name_scope(optimizer.name, caller=optimizer):
                optimizer.build(model.trainable_weights)


def _symbolic(specs: Any) -> Any:
    """Returns tensors of Keras for the specs of tensors; None if one is no dense tensor of known rank."""
    if any(not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None for spec in tf.nest.flatten(specs)):
        return None
    return tf.nest.map_structure(lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name), specs)
