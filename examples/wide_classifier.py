"""Trains a classifier of 21,841 classes, as many as ImageNet-22K has: the case that sufficient factors are made for.

    python examples/wide_classifier.py                  # alone
    mpiexec -n 2 python examples/wide_classifier.py     # on two processes, the same training

Nearly all weights are in the last layer, the head. Its gradient has 256 x 21,841 numbers, 22 MB. But it is a product of
the errors and the inputs of the batch's rows: with 16 rows on each of two ranks, these factors are 1.4 MB from each.

What to look at: the head in the plan travels as factors (sfb), and the line after the plan says how many bytes that
takes. `--policy=ps` sends the gradient itself, with the same result. With `--batch=1024`, the factors are larger than
the gradient, and every policy but "sfb" sums it (ps).

The data are synthetic: a class is a point in 128 dimensions, an example such a point with noise. One pass has less than
one example per class, so the accuracy cannot exceed the share of classes that were seen. The last line has both.
"""

from absl import app
from absl import flags
import keras
import numpy as np

import tf_poseidon as poseidon

_BATCH = flags.DEFINE_integer("batch", 32, "Rows of the global batch: each process computes its part.")
_STEPS = flags.DEFINE_integer("steps", 300, "Steps to train.")
_POLICY = flags.DEFINE_enum("policy", "auto", ["auto", "paper", "ps", "sfb"], "Rule by which gradients travel.")

_CLASSES, _DIMENSIONS, _FEATURES = 21_841, 128, 256


def examples(classes, count, seed):
    """Returns examples of random classes, and the numbers of these."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(_CLASSES, size=count)
    return classes[labels] + 0.5 * rng.normal(size=(count, _DIMENSIONS)), labels


def report_bytes(strategy, kernel):
    """Prints what this rank has sent of the gradient of the head."""
    counts = next(counts for site, counts in strategy.stats()["sites"].items() if site.endswith("head/kernel"))
    sent, dense = counts["sent_bytes"] / counts["count"], kernel.nbytes
    print(f"The head sends {sent / 1e6:.2f} MB from each rank in a step. Its gradient has {dense / 1e6:.2f} MB, "
          f"{dense / sent:.1f} times as much.")


def main(_):
    classes = np.random.default_rng(0).normal(size=(_CLASSES, _DIMENSIONS))
    train_x, train_y = examples(classes, _STEPS.value * _BATCH.value, seed=1)
    test_x, test_y = examples(classes, 2000, seed=2)

    keras.utils.set_random_seed(1)
    strategy = poseidon.PoseidonStrategy(policy=_POLICY.value)
    with strategy.scope():
        model = keras.Sequential([
            keras.Input((_DIMENSIONS,)),
            keras.layers.Dense(_FEATURES, activation="gelu"),
            keras.layers.LayerNormalization(),
            keras.layers.Dense(_CLASSES, kernel_initializer="zeros", name="head"),
        ])
        model.compile(
            optimizer=keras.optimizers.SGD(0.2),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"])
    model.fit(train_x, train_y, batch_size=_BATCH.value, verbose=2)
    accuracy = model.evaluate(test_x, test_y, batch_size=100, verbose=0, return_dict=True)["accuracy"]

    if strategy.rank != 0:
        return
    if strategy.plan:
        print(strategy.plan)
        report_bytes(strategy, model.get_layer("head").get_weights()[0])
    print(f"Top-1 accuracy with {strategy.num_replicas_in_sync} process(es): {accuracy:.4f}; "
          f"seen in training: {np.mean(np.isin(test_y, train_y)):.4f}; by chance: {1 / _CLASSES:.6f}")


if __name__ == "__main__":
    app.run(main)
