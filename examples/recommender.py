"""Trains a recommender on ratings: embeddings of users and items, their product, and a dense network beside it.

    python examples/recommender.py                  # alone
    mpiexec -n 2 python examples/recommender.py     # on two processes, the same training

The ratings are synthetic: products of 3 hidden tastes of each user and properties of each item, and noise. A model can
predict all but the noise, so no root-mean-square error (RMSE) can be below it, and the last line shows both.

What to look at: the gradients of the embeddings in the plan. A batch touches few rows of these tables, so ranks gather
these rows with their indices and never send a gradient of the size of the table. Plain Keras optimizers then update the
tables as in one process.
"""

from absl import app
from absl import flags
import keras
from keras import layers
import numpy as np

import tf_poseidon as poseidon

_EPOCHS = flags.DEFINE_integer("epochs", 5, "Epochs to train.")

_USERS, _ITEMS, _RATINGS = 2_000, 1_000, 200_000
_TASTES, _NOISE = 3, 0.5
_WIDTH = 8  # of the embeddings
_BATCH = 512


def ratings():
    """Returns users, items and ratings, drawn as if all ranks had read the same file."""
    rng = np.random.default_rng(0)
    tastes = rng.normal(size=(_USERS, _TASTES))
    properties = rng.normal(size=(_ITEMS, _TASTES)) / np.sqrt(_TASTES)
    popularity = rng.normal(size=_ITEMS) / 2
    users, items = rng.integers(_USERS, size=_RATINGS), rng.integers(_ITEMS, size=_RATINGS)
    values = 3 + popularity[items] + np.sum(tastes[users] * properties[items], axis=1)
    return users, items, values + rng.normal(scale=_NOISE, size=_RATINGS)


def two_towers():
    """Returns a model from a user and an item to a rating."""
    user, item = keras.Input((), dtype="int32", name="user"), keras.Input((), dtype="int32", name="item")
    normal = keras.initializers.RandomNormal(stddev=0.3)
    u = layers.Embedding(_USERS, _WIDTH, normal, name="users")(user)
    v = layers.Embedding(_ITEMS, _WIDTH, normal, name="items")(item)
    side = layers.Dense(64, activation="gelu")(layers.Concatenate()([u, v]))
    rating = layers.Dense(1)(side) + layers.Dot(axes=1)([u, v])
    return keras.Model([user, item], rating)


def main(_):
    users, items, values = ratings()
    train, test = slice(0, _RATINGS * 9 // 10), slice(_RATINGS * 9 // 10, None)

    keras.utils.set_random_seed(1)
    strategy = poseidon.PoseidonStrategy()
    with strategy.scope():
        model = two_towers()
        schedule = keras.optimizers.schedules.CosineDecay(0.02, _EPOCHS.value * (_RATINGS * 9 // 10) // _BATCH)
        model.compile(keras.optimizers.Adam(schedule), "mse", metrics=[keras.metrics.RootMeanSquaredError(name="rmse")])
    model.fit([users[train], items[train]], values[train], batch_size=_BATCH, epochs=_EPOCHS.value, verbose=2)
    rmse = model.evaluate([users[test], items[test]], values[test], batch_size=_BATCH, verbose=0,
                          return_dict=True)["rmse"]

    if strategy.rank == 0:
        if strategy.plan:
            print(strategy.plan)
        print(f"RMSE with {strategy.num_replicas_in_sync} process(es): {rmse:.4f}; of the noise: {_NOISE:.4f}; "
              f"of predicting the mean: {np.std(values[test]):.4f}")


if __name__ == "__main__":
    app.run(main)
