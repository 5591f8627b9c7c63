"""Trains a generative adversarial network on scikit-learn's handwritten digits: two models, two optimizers, one step.

    python examples/gan.py                                # alone
    mpiexec -n 2 python examples/gan.py                   # on two processes, the same training
    mpiexec -n 2 python examples/gan.py --samples gan.png # and writes 100 digits into an image

It shows a `train_step` of one's own in `fit`, which is written as for one process: it draws noise for the global batch,
takes losses over all its rows, and applies gradients by two optimizers. Each rank computes the images of its rows. The
noise comes from a `keras.random.SeedGenerator`, whose state is the same on all ranks, and batch normalisation has the
moments of all rows (`global_batch_norm=True`).

What to look at: the last line, the Fréchet distance of 1,000 generated digits to the real ones (on pixels, not on the
features of a network as in FID), beside that of the untrained generator and that of one half of the real digits to the
other. Two networks that play against each other amplify rounding: in single precision, several processes end at another
distance than one, about as near.
"""

from absl import app
from absl import flags
import keras
from keras import layers
import numpy as np
from sklearn.datasets import load_digits
import tensorflow as tf

import tf_poseidon as poseidon

_EPOCHS = flags.DEFINE_integer("epochs", 25, "Epochs to train.")
_SAMPLES = flags.DEFINE_string("samples", None, "PNG file for generated digits.")

_NOISE = 16  # numbers that a digit is made from
_BATCH = 64  # the global batch: each process computes its part


def generator():
    """Returns a model from noise to digits."""
    hidden = [layer for _ in range(2)
              for layer in (layers.Dense(256), layers.BatchNormalization(momentum=0.9), layers.Activation("gelu"))]
    return keras.Sequential([keras.Input((_NOISE,)), *hidden, layers.Dense(64, activation="sigmoid")], name="generator")


def discriminator():
    """Returns a model from digits to a logit, which is positive for real ones."""
    hidden = [layer for width in (256, 128)
              for layer in (layers.Dense(width, activation="leaky_relu"), layers.Dropout(0.4))]
    return keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(1)], name="discriminator")


class Gan(keras.Model):
    """A generator and a discriminator, which train against each other."""

    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = generator(), discriminator()
        self.seeds = keras.random.SeedGenerator(1)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.accuracy = keras.metrics.BinaryAccuracy(name="discriminated", threshold=0.0)

    def compile(self, generator_optimizer, discriminator_optimizer):
        super().compile()
        self.generator_optimizer = generator_optimizer
        self.discriminator_optimizer = discriminator_optimizer
        self.binary = keras.losses.BinaryCrossentropy(from_logits=True)

    def call(self, noise):
        return self.generator(noise)

    def train_step(self, images):
        count = tf.shape(images)[0]
        noise = keras.random.normal((count, _NOISE), seed=self.seeds)
        with tf.GradientTape(persistent=True) as tape:
            generated = self.generator(noise, training=True)
            real = self.discriminator(images, training=True)
            fake = self.discriminator(generated, training=True)
            ones, zeros = tf.ones_like(real), tf.zeros_like(fake)
            discriminator_loss = self.binary(0.9 * ones, real) + self.binary(zeros, fake)
            generator_loss = self.binary(ones, fake)
        for loss, model, optimizer in ((discriminator_loss, self.discriminator, self.discriminator_optimizer),
                                       (generator_loss, self.generator, self.generator_optimizer)):
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        self.loss_tracker.update_state(generator_loss)
        self.accuracy.update_state(ones, real)
        self.accuracy.update_state(zeros, fake)
        return {"generator_loss": self.loss_tracker.result(), "discriminated": self.accuracy.result()}


def frechet_distance(a, b):
    """Returns the distance of two sets of images, as if both were normally distributed."""
    covariances = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    eigenvalues = np.linalg.eigvals(covariances[0] @ covariances[1]).real  # not negative but for rounding
    return (np.sum((a.mean(0) - b.mean(0))**2) + np.trace(sum(covariances))
            - 2 * np.sum(np.sqrt(np.maximum(eigenvalues, 0))))


def main(_):
    images = load_digits().data.astype("float32") / 16
    noise = np.random.default_rng(0).normal(size=(1000, _NOISE)).astype("float32")

    keras.utils.set_random_seed(1)
    strategy = poseidon.PoseidonStrategy(global_batch_norm=True)
    with strategy.scope():
        model = Gan()
        model.compile(keras.optimizers.Adam(1e-3, beta_1=0.5), keras.optimizers.Adam(1e-3, beta_1=0.5))
    untrained = model.predict(noise, verbose=0)
    model.fit(images, batch_size=_BATCH, epochs=_EPOCHS.value, verbose=2)
    digits = model.predict(noise, verbose=0)  # all ranks predict, each its rows

    if strategy.rank != 0:
        return
    if strategy.plan:
        print(strategy.plan)
    if _SAMPLES.value:
        tiles = np.pad(digits[:100].reshape(10, 10, 8, 8), ((0, 0), (0, 0), (1, 1), (1, 1)))
        grid = tiles.swapaxes(1, 2).reshape(100, 100, 1)
        tf.io.write_file(_SAMPLES.value, tf.io.encode_png(tf.image.convert_image_dtype(grid, tf.uint8)))
    print(f"Frechet distance with {strategy.num_replicas_in_sync} process(es): {frechet_distance(digits, images):.4f}; "
          f"untrained: {frechet_distance(untrained, images):.4f}; "
          f"between real digits: {frechet_distance(images[::2], images[1::2]):.4f}")


if __name__ == "__main__":
    app.run(main)
