"""Searches for hyperparameters with KerasTuner: many calls of `fit` in one job. It needs `pip install keras-tuner`.

    python examples/tuner.py                  # alone
    mpiexec -n 2 python examples/tuner.py     # on two processes, the same trials

It shows `distribution_strategy=strategy`, by which KerasTuner makes each model in the strategy's scope. The trials run
one after the other, and all ranks train each of them together. All ranks must choose the same trials, so the tuner has
a seed; and they use one directory, where rank 0 writes the checkpoints that all ranks read. It stays.

What to look at: the last lines. Each rank prints the trial that it has found to be the best, all the same one.
"""

import tempfile

from absl import app
from absl import flags
import keras
import keras_tuner
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
import tensorflow as tf

import tf_poseidon as poseidon

_TRIALS = flags.DEFINE_integer("trials", 5, "Trials.")
_EPOCHS = flags.DEFINE_integer("epochs", 4, "Epochs of each trial.")
_PARENT = flags.DEFINE_string("parent", None, "Where to make a directory for trials; on several hosts, a shared one.")

_BATCH = 64  # the global batch: each process computes its part


def build(choices):
    """Returns a model for some hyperparameters; every rank starts it with the same weights."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([
        keras.Input((64,)),
        keras.layers.Dense(choices.Int("units", 16, 256, sampling="log"),
                           activation=choices.Choice("activation", ["gelu", "tanh"])),
        keras.layers.Dropout(choices.Float("dropout", 0.0, 0.5)),
        keras.layers.Dense(10),
    ])
    model.compile(
        optimizer=keras.optimizers.SGD(choices.Float("rate", 1e-3, 1.0, sampling="log"), momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"])
    return model


def directory_of_rank_0(strategy):
    """Returns a new directory, the same on all ranks. With `overwrite=True`, they would remove it at the same time."""
    with strategy.scope():  # variables begin with rank 0's values
        directory = tf.Variable(tempfile.mkdtemp(dir=_PARENT.value) if strategy.rank == 0 else "")
    return directory.numpy().decode()


def main(_):
    images, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(images / 16, labels, random_state=0)
    fit_x, valid_x, fit_y, valid_y = train_test_split(train_x, train_y, random_state=1)

    strategy = poseidon.PoseidonStrategy()
    directory = directory_of_rank_0(strategy)
    if strategy.rank == 0:
        print(f"Trials in {directory}")
    tuner = keras_tuner.RandomSearch(
        build, objective="val_loss", max_trials=_TRIALS.value, seed=1, distribution_strategy=strategy,
        directory=directory, project_name="digits")
    tuner.search(fit_x, fit_y, validation_data=(valid_x, valid_y), batch_size=_BATCH, epochs=_EPOCHS.value,
                 verbose=2 if strategy.rank == 0 else 0)

    best = tuner.oracle.get_best_trials()[0]
    accuracy = tuner.get_best_models()[0].evaluate(test_x, test_y, verbose=0, return_dict=True)["accuracy"]
    print(f"rank {strategy.rank}: trial {best.trial_id} with {best.hyperparameters.values}, loss {best.score:.4f}",
          flush=True)
    if strategy.rank == 0:
        print(f"Test accuracy with {strategy.num_replicas_in_sync} process(es): {accuracy:.4f}")


if __name__ == "__main__":
    app.run(main)
