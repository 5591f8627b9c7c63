"""Trains a convolutional network with batch normalisation and augmentation on scikit-learn's handwritten digits.

    python examples/image_classifier.py                  # alone
    mpiexec -n 2 python examples/image_classifier.py     # on two processes, the same training

It shows a pipeline of `tf.data` whose random transformations are the same on all ranks. Every rank reads the same
global batches, so `shuffle` has a seed, and each image brings the seed of its own augmentation; a map that drew from a
common state would give images other numbers on each rank. Layers of augmentation in the model need no care.

What to look at: the last line, which is that of one process but for rounding, which may turn an image or two of 450.
With `global_batch_norm=True`, batch normalisation has the moments of all rows. The plan shows its price, four small
sums for each such layer. It sums the gradients of convolutions (ps), which have no factors.
"""

from absl import app
from absl import flags
import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
import tensorflow as tf

import tf_poseidon as poseidon

_EPOCHS = flags.DEFINE_integer("epochs", 15, "Epochs to train.")

_BATCH = 64  # the global batch: each process computes its part


def augment(image, label, seed):
    """Moves an image by up to two pixels, and changes its contrast."""
    padded = tf.pad(image, [[2, 2], [2, 2], [0, 0]])
    image = tf.image.stateless_random_crop(padded, tf.shape(image), seed)
    return tf.image.stateless_random_contrast(image, 0.7, 1.3, seed), label


def training_batches(images, labels):
    """Returns global batches: shuffled and augmented anew in each epoch, and the same on all ranks."""
    examples = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(images), seed=2)
    seeds = tf.data.Dataset.random(seed=3, rerandomize_each_iteration=True).batch(2, drop_remainder=True)
    return (tf.data.Dataset.zip(examples, seeds)
            .map(lambda example, seed: augment(*example, seed), num_parallel_calls=tf.data.AUTOTUNE)
            .batch(_BATCH)
            .prefetch(tf.data.AUTOTUNE))


def block(channels):
    return [keras.layers.Conv2D(channels, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.Activation("relu"),
            keras.layers.MaxPooling2D()]


def main(_):
    images, labels = load_digits(return_X_y=True)
    images = tf.image.resize(images.reshape(-1, 8, 8, 1).astype("float32") / 16, [16, 16]).numpy()
    train_x, test_x, train_y, test_y = train_test_split(images, labels, random_state=0)
    train = training_batches(train_x, train_y)

    keras.utils.set_random_seed(1)
    strategy = poseidon.PoseidonStrategy(global_batch_norm=True)
    with strategy.scope():
        model = keras.Sequential([
            keras.Input((16, 16, 1)),
            keras.layers.RandomZoom(0.1),
            *block(16), *block(32), *block(64),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10),
        ])
        schedule = keras.optimizers.schedules.CosineDecay(0.003, _EPOCHS.value * len(train))
        model.compile(
            optimizer=keras.optimizers.AdamW(schedule, weight_decay=1e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"])
    model.fit(train, epochs=_EPOCHS.value, shuffle=False, verbose=2)
    accuracy = model.evaluate(test_x, test_y, verbose=0, return_dict=True)["accuracy"]

    if strategy.rank == 0:
        if strategy.plan:
            print(strategy.plan)
        print(f"Test accuracy with {strategy.num_replicas_in_sync} process(es): {accuracy:.4f}")


if __name__ == "__main__":
    app.run(main)
