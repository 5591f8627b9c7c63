"""Trains with a loop of one's own: clipped gradients, a schedule, metrics, checkpoints, evaluation.

    python examples/own_loop.py                  # alone
    mpiexec -n 2 python examples/own_loop.py     # on two processes, the same training
    mpiexec -n 2 python examples/own_loop.py --checkpoints build/own_loop --epochs 20    # resumes where it ended

It shows `@poseidon.distribute`. The step is that of one process: its loss is the mean over all rows, and its norm that
of the whole gradient. Nothing is divided by the number of processes, and nothing is reduced. Every rank gives it the
global batch, and computes its rows.

What to look at: `train_step.report`, which lists what ranks exchange in a step, and which ops all of them run whole.
Its sizes are those of whole gradients; `strategy.plan` says which of them travel as factors.
"""

from absl import app
from absl import flags
import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
import tensorflow as tf

import tf_poseidon as poseidon

_EPOCHS = flags.DEFINE_integer("epochs", 15, "Epochs to train.")
_CHECKPOINTS = flags.DEFINE_string("checkpoints", None, "Directory for a checkpoint of each epoch, to resume from.")

_BATCH = 64  # the global batch: each process computes its part


class Trainer:
    """A model with its optimizer and metrics."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer
        self.optimizer.build(model.trainable_variables)  # before a checkpoint is restored
        self.loss, self.norm = keras.metrics.Mean(), keras.metrics.Mean()
        self.accuracy = keras.metrics.SparseCategoricalAccuracy()

    @poseidon.distribute
    @tf.function
    def train_step(self, x, y):
        """Updates the model by a global batch."""
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, self.model(x, training=True), from_logits=True)
            loss = tf.reduce_mean(losses)
        variables = self.model.trainable_variables
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, variables), 1.0)
        self.optimizer.apply(gradients, variables)
        self.loss.update_state(losses)
        self.norm.update_state(norm)

    @poseidon.distribute
    @tf.function
    def test_step(self, x, y):
        """Counts right answers."""
        self.accuracy.update_state(y, self.model(x, training=False))


def main(_):
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(keras.config.floatx())
    train_x, test_x, train_y, test_y = train_test_split(images, labels, random_state=0)
    train = tf.data.Dataset.from_tensor_slices((train_x, train_y)).batch(_BATCH)
    test = tf.data.Dataset.from_tensor_slices((test_x, test_y)).batch(_BATCH)

    keras.utils.set_random_seed(1)
    strategy = poseidon.PoseidonStrategy()
    with strategy.scope():
        model = keras.Sequential([
            keras.Input((64,)),
            keras.layers.Dense(256, activation="gelu"),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(256, activation="gelu"),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(10),
        ])
        schedule = keras.optimizers.schedules.ExponentialDecay(0.3, decay_steps=len(train), decay_rate=0.8)
        trainer = Trainer(model, keras.optimizers.SGD(schedule, momentum=0.9))
        epoch = tf.Variable(0, dtype=tf.int64)
    manager = None
    if _CHECKPOINTS.value:
        # Not `model` itself, whose checkpoints lack the state of the dropouts' random numbers.
        variables = [variable.value for variable in model.variables]
        checkpoint = tf.train.Checkpoint(variables=variables, optimizer=trainer.optimizer, epoch=epoch)
        manager = tf.train.CheckpointManager(checkpoint, _CHECKPOINTS.value, max_to_keep=2)
        manager.restore_or_initialize()  # on all ranks; rank 0 writes

    while epoch < _EPOCHS.value:
        for x, y in train.shuffle(100, seed=int(epoch)):
            trainer.train_step(x, y)
        epoch.assign_add(1)
        loss, norm = float(trainer.loss.result()), float(trainer.norm.result())
        if strategy.rank == 0:
            print(f"Epoch {int(epoch)}/{_EPOCHS.value}: loss {loss:.4f}, norm of gradients {norm:.4f}", flush=True)
            if manager:
                manager.save()
        trainer.loss.reset_state()
        trainer.norm.reset_state()

    for x, y in test:
        trainer.test_step(x, y)
    accuracy = float(trainer.accuracy.result())
    if strategy.rank == 0:
        if trainer.train_step.report:
            print(trainer.train_step.report)
        print(f"Test accuracy with {strategy.num_replicas_in_sync} process(es): {accuracy:.4f}")


if __name__ == "__main__":
    app.run(main)
