"""Trains a small convolutional network on scikit-learn's handwritten digits.

    python examples/digits.py                    # alone
    mpiexec -n 4 python examples/digits.py       # on four processes, the same training

It computes in double precision, where the results agree to 12 digits or so. In single precision, a relu whose input is
rounded to the other side of 0 makes runs differ visibly, even those of one process with one thread and with two.
"""

from absl import app
from absl import flags
import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tf_poseidon as poseidon

_QUIET = flags.DEFINE_bool("quiet", False, "Print results alone, without progress and plan.")
_EPOCHS = flags.DEFINE_integer("epochs", 12, "Epochs to train.")
_SAVE = flags.DEFINE_string("save", None, "Write the trained weights to this .npz file.")
_FLOATX = flags.DEFINE_enum("floatx", "float64", ["float32", "float64"], "Precision.")
_COMPARE = flags.DEFINE_string("compare", None, "Compare with the weights in this .npz file.")

_BATCH = 64  # the global batch: each process computes its part
# Largest difference from another number of processes, relative to the largest weight.
_BOUND = {"float64": 1e-9, "float32": 0.1}


def main(_):
    keras.config.set_floatx(_FLOATX.value)
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype(_FLOATX.value) / 16
    train_x, test_x, train_y, test_y = train_test_split(images, labels, random_state=0)

    keras.utils.set_random_seed(1)
    strategy = poseidon.PoseidonStrategy()
    with strategy.scope():
        model = keras.Sequential([
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(256, activation="tanh"),
            keras.layers.Dense(10),
        ])
        steps = _EPOCHS.value * -(-len(train_x) // _BATCH)
        model.compile(
            optimizer=keras.optimizers.SGD(
                keras.optimizers.schedules.CosineDecay(0.1, steps), momentum=0.9),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"])
    model.fit(train_x, train_y, batch_size=_BATCH, epochs=_EPOCHS.value, verbose=0 if _QUIET.value else "auto")
    accuracy = model.evaluate(test_x, test_y, verbose=0, return_dict=True)["accuracy"]

    if strategy.rank != 0:
        return
    if strategy.plan and not _QUIET.value:
        print(strategy.plan)
    print(f"Test accuracy with {strategy.num_replicas_in_sync} process(es): {accuracy:.4f}")
    weights = model.get_weights()
    if _SAVE.value:
        np.savez(_SAVE.value, *weights)
    if _COMPARE.value:
        other = np.load(_COMPARE.value)
        difference = max(np.abs(w - other[name]).max() for w, name in zip(weights, other))
        largest = max(np.abs(w).max() for w in weights)
        is_equal = difference <= _BOUND[_FLOATX.value] * largest
        print(f"Largest difference from the weights in {_COMPARE.value}: {difference:.1e}, of weights up to "
              f"{largest:.2f}: {'equal up to rounding' if is_equal else 'DIFFERENT'}")
        if not is_equal:
            raise SystemExit(1)


if __name__ == "__main__":
    app.run(main)
