"""Cases in which TensorFlow's or Keras' own replication, or Horovod, is wrong or fails; scenarios.

One Dense(3) on 4 inputs, one step on 32 rows. With MirroredStrategy on two replicas, weights differ from
those of one device by 0.02 to 0.03 when gradients are clipped, and become infinite when the second
replica alone sees an infinity. MultiWorkerMirroredStrategy raises a ValueError in `fit`. Horovod's
optimizer trains each process separately.
"""

import keras
import numpy as np
import tensorflow as tf

ROWS = 32


def _data(scale=1.0):
    rng = np.random.default_rng(7)
    return rng.normal(size=(ROWS, 4)), scale * rng.normal(size=(ROWS, 3))


def _model(strategy, optimizer):
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile(optimizer(), "mse")
    return model


def _weights(model):
    return {f"weights/{i}": w for i, w in enumerate(model.get_weights())}


def _clipping(**options):
    def recipe(strategy):
        model = _model(strategy, lambda: keras.optimizers.SGD(0.1, **options))
        model.fit(*_data(scale=5.0), batch_size=ROWS, verbose=0)
        return _weights(model)

    return recipe


def _infinity(rows):
    def recipe(strategy):
        model = _model(strategy, lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=1024.0))
        x, y = np.ones((ROWS, 4)), np.zeros((ROWS, 3))
        x[rows] = np.inf
        before = model.get_weights()
        model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
        unchanged = [np.array_equal(a, b) for a, b in zip(before, model.get_weights())]
        return {"scale": model.optimizer.dynamic_scale.numpy(), "unchanged": unchanged}

    return recipe


def dataset_of_several_workers(strategy):
    model = _model(strategy, lambda: keras.optimizers.SGD(0.1))
    model.fit(tf.data.Dataset.from_tensor_slices(_data()).batch(ROWS // 2), epochs=2, verbose=0)
    return _weights(model)


def half_of_the_rows(strategy):
    """The weights that two processes would train without synchronisation."""
    x, y = _data()
    half = slice(0, ROWS // 2)
    model = _model(strategy, lambda: keras.optimizers.SGD(0.1))
    model.fit(x[half], y[half], batch_size=ROWS, verbose=0)
    return _weights(model)


def all_rows(strategy):
    model = _model(strategy, lambda: keras.optimizers.SGD(0.1))
    model.fit(*_data(), batch_size=ROWS, verbose=0)
    return _weights(model)


RECIPES = {
    "recipe_not_clipped": _clipping(),
    "recipe_global_clipnorm": _clipping(global_clipnorm=0.5),
    "recipe_clipvalue": _clipping(clipvalue=0.3),
    "recipe_infinity_on_rank_0": _infinity(slice(0, 16)),
    "recipe_infinity_on_rank_1": _infinity(slice(16, 32)),
    "recipe_dataset": dataset_of_several_workers,
    "recipe_half_of_the_rows": half_of_the_rows,
    "recipe_all_rows": all_rows,
}
