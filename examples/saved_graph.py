"""Saves a training step of scikit-learn's digits, rewrites it for several processes, and trains from that.

    python examples/saved_graph.py --make build/saved_graph
    python examples/saved_graph.py --train build/saved_graph/original              # alone
    mpiexec -n 2 python examples/saved_graph.py --train build/saved_graph/rewritten

The program that saves the step knows nothing of other processes; in practice, it is another program than this one. The
program that trains calls the rewritten step like the original, with the same batches in every process.
"""

import os

from absl import app
from absl import flags
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
import tensorflow as tf

import tf_poseidon as poseidon

_MAKE = flags.DEFINE_string("make", None, "Directory for the saved step, original and rewritten.")
_TRAIN = flags.DEFINE_string("train", None, "Saved step to train with.")
_EPOCHS = flags.DEFINE_integer("epochs", 20, "Epochs to train.")

_BATCH = 64  # rows


class Step(tf.Module):
    """A network of two layers with its training step: SGD with momentum, clipped by the global norm."""

    def __init__(self):
        super().__init__()
        init = tf.random_normal_initializer(stddev=0.1, seed=1)
        self.weights = [tf.Variable(init([64, 128]), name="hidden/kernel"),
                        tf.Variable(tf.zeros([128]), name="hidden/bias"),
                        tf.Variable(init([128, 10]), name="last/kernel"),
                        tf.Variable(tf.zeros([10]), name="last/bias")]
        self.velocities = [tf.Variable(tf.zeros_like(w), name=f"{w.name[:-2]}/velocity") for w in self.weights]

    @tf.function(input_signature=[tf.TensorSpec([None, 64])])
    def predict(self, images):
        """Returns a logit for each digit."""
        kernel, bias, last_kernel, last_bias = self.weights
        return {"logits": tf.tanh(images @ kernel + bias) @ last_kernel + last_bias}

    @tf.function(input_signature=[tf.TensorSpec([None, 64]), tf.TensorSpec([None], tf.int64)])
    def train(self, images, labels):
        """Runs a training step: forward, backward, update."""
        with tf.GradientTape() as tape:
            logits = self.predict(images)["logits"]
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, self.weights), 1.0)
        for weight, velocity, gradient in zip(self.weights, self.velocities, gradients):
            velocity.assign(0.9 * velocity + gradient)
            weight.assign_sub(0.1 * velocity)
        return {"loss": loss}


def make(folder):
    """Saves the step, and rewrites it."""
    step, original = Step(), os.path.join(folder, "original")
    tf.saved_model.save(step, original, signatures={"train": step.train, "predict": step.predict})
    print(poseidon.rewrite_saved_model(original, os.path.join(folder, "rewritten"), workers=2,
                                       batch_size=_BATCH // 2))


def train(path):
    """Trains with a saved step, and prints the accuracy."""
    rank, size = poseidon.load_ops()
    signatures = tf.saved_model.load(path).signatures
    images, labels = load_digits(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(images.astype("float32") / 16, labels, random_state=0)

    rng = np.random.default_rng(0)  # the same seed in all processes, which must give the step the same batches
    for epoch in range(_EPOCHS.value):
        order = rng.permutation(len(train_x))
        for begin in range(0, len(order) - _BATCH + 1, _BATCH):
            rows = order[begin:begin + _BATCH]
            loss = signatures["train"](images=tf.constant(train_x[rows]), labels=tf.constant(train_y[rows]))["loss"]
        if rank == 0:
            print(f"Epoch {epoch + 1}/{_EPOCHS.value}: loss {loss:.4f}", flush=True)

    logits = signatures["predict"](images=tf.constant(test_x))["logits"]
    accuracy = np.mean(np.argmax(logits, 1) == test_y)
    if rank == 0:
        print(f"Test accuracy with {size} process(es): {accuracy:.4f}")


def main(_):
    if _MAKE.value:
        make(_MAKE.value)
    if _TRAIN.value:
        train(_TRAIN.value)
    if not (_MAKE.value or _TRAIN.value):
        raise app.UsageError("give --make DIRECTORY, or --train SAVED_STEP")


if __name__ == "__main__":
    app.run(main)
