"""Trains with one step per execution, and with several, on all ranks: DIRECTORY POLICY --steps=N NAME...

Each rank writes digests to RANK.json: by program and steps per execution, of everything that training has changed.
"""

import hashlib
import json
import pathlib
import sys

import keras
from keras import layers
import numpy as np
import tensorflow as tf

import tf_poseidon as poseidon

ROWS, BATCH = 403, 8  # 51 steps, of which the last one has 3 rows
PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def numbers(*shape):
    return np.random.default_rng(len(PROGRAMS)).normal(size=shape).astype("float32")


def network(*first):
    """A model that gives every scheme something to do: 800 weights per row of a batch travel as factors."""
    return keras.Sequential([keras.Input((6, 6, 1)), *first, layers.Flatten(), layers.Dense(96, "relu"),
                             layers.Dropout(0.2), layers.Dense(64, "tanh"), layers.Dense(3)])


def fitted(model, optimizer, steps, x=None, y=None, **options):
    """Trains a model, and returns its logs."""
    model.compile(optimizer, "mse", metrics=["mae"], steps_per_execution=steps)
    x = numbers(ROWS, 6, 6, 1) if x is None else x
    y = numbers(len(x), 3) if y is None else y
    history = model.fit(x, y, batch_size=BATCH, verbose=0, **options)
    return history.history | {"evaluate": model.evaluate(x, y, batch_size=BATCH, verbose=0)}


def with_optimizer(name, make):
    def train(steps):
        model = network()
        return model, fitted(model, make(), steps)
    train.__name__ = name
    return program(train)


for _name, _make in {
        "sgd": lambda: keras.optimizers.SGD(0.05),
        "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
        "adam": lambda: keras.optimizers.Adam(),
        "global_norm": lambda: keras.optimizers.Adam(global_clipnorm=0.3),
        "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(), dynamic_growth_steps=4),
        "accumulation": lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=3),
        "averages": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_overwrite_frequency=5)}.items():
    with_optimizer(_name, _make)


@program
def batch_norm(steps):
    model = network(layers.Conv2D(4, 3), layers.BatchNormalization(), layers.Activation("relu"))
    return model, fitted(model, "adam", steps)


@program
def embedding(steps):
    model = keras.Sequential([keras.Input((5,), dtype="int32"), layers.Embedding(900, 6), layers.Flatten(),
                              layers.Dense(64, "relu"), layers.Dense(3)])
    x = np.random.default_rng(7).integers(0, 900, (ROWS, 5))
    return model, fitted(model, keras.optimizers.Adagrad(0.1), steps, x)


@program
def several_epochs_with_validation(steps):
    model = network()
    data = numbers(40, 6, 6, 1), numbers(40, 3)
    return model, fitted(model, "adam", steps, numbers(100, 6, 6, 1), epochs=3, validation_data=data)


class Gan(keras.Model):
    """Two optimizers, one of which trains with what the other one has changed."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((8,)), layers.Dense(64, "relu"), layers.Dense(36)])
        self.discriminator = keras.Sequential([keras.Input((36,)), layers.Dense(64, "relu"), layers.Dense(1)])
        self.seed = keras.random.SeedGenerator(3)

    def compile(self, **options):
        super().compile(optimizer=keras.optimizers.Adam(1e-3), **options)
        self.other = keras.optimizers.SGD(0.01)

    def train_step(self, data):
        noise = keras.random.normal((tf.shape(data)[0], 8), seed=self.seed)
        with tf.GradientTape() as tape:
            real, fake = self.discriminator(data), self.discriminator(self.generator(noise))
            loss = tf.reduce_mean(tf.nn.softplus(-real)) + tf.reduce_mean(tf.nn.softplus(fake))
        weights = self.discriminator.trainable_weights
        self.other.apply_gradients(zip(tape.gradient(loss, weights), weights))
        with tf.GradientTape() as tape:
            other = tf.reduce_mean(tf.nn.softplus(-self.discriminator(self.generator(noise))))
        weights = self.generator.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(other, weights), weights))
        return {"loss": loss, "other": other}


@program
def gan(steps):
    model = Gan()
    model.compile(steps_per_execution=steps)
    history = model.fit(numbers(ROWS, 36), batch_size=BATCH, verbose=0, shuffle=False)
    return model, history.history


@program
def loop_of_ones_own(steps):
    """One tf.function that calls strategy.run several times, each time on this rank's rows."""
    strategy, model = tf.distribute.get_strategy(), network()
    model.compile(keras.optimizers.Adam())
    model.optimizer.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x, training=True) - y)) / BATCH
        variables = model.trainable_variables
        model.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    @tf.function
    def several(batches):
        return [strategy.reduce("SUM", strategy.run(step, args=batch), axis=None) for batch in batches]

    batches = tf.data.Dataset.from_tensor_slices((numbers(24 * BATCH, 6, 6, 1), numbers(24 * BATCH, 3))).batch(BATCH)
    batches = iter(strategy.experimental_distribute_dataset(batches))
    losses = [several([next(batches) for _ in range(steps)]) for _ in range(24 // steps)]
    return model, {"losses": np.ravel(losses).tolist()}


@program
def random_ops_that_keep_their_state(steps):
    """Their copies would begin with the same numbers, so steps run one after the other."""
    class Noise(layers.Layer):
        def call(self, x):
            return x + tf.random.normal(tf.shape(x), seed=5)

    model = network(Noise())
    return model, fitted(model, "sgd", steps)


@program
def interrupted_data(steps):
    """The steps before the one whose batch is missing have trained."""
    model = network()
    model.compile("sgd", "mse", steps_per_execution=steps)

    def batches():
        for i in range(30):
            if i == 21:
                raise ValueError("no more")
            yield numbers(BATCH, 6, 6, 1) + i, numbers(BATCH, 3)

    dataset = tf.data.Dataset.from_generator(batches, output_signature=(
        tf.TensorSpec((BATCH, 6, 6, 1)), tf.TensorSpec((BATCH, 3))))
    try:
        model.fit(dataset, verbose=0)
    except tf.errors.OpError as error:
        # A graph may count its step, and draw a seed, before it notices that there is no batch.
        for variable in (model.optimizer.iterations, *model.non_trainable_variables):
            variable.assign(tf.zeros_like(variable))
        return model, {"error": [type(error).__name__]}
    raise AssertionError("fit has not failed, expected the error of its data")


@program
def batches_with_missing_parts(steps):
    """Weights that some batches could have, and none has."""
    def batches():
        for i in range(20):
            yield numbers(BATCH, 6, 6, 1) + i, numbers(BATCH, 3), None

    model = network()
    model.compile("sgd", "mse", steps_per_execution=steps)
    return model, model.fit(batches(), steps_per_epoch=20, verbose=0).history


@program
def stopped_by_a_callback(steps):
    """All batches of the execution in which it is stopped have trained; 24 is a multiple of all lengths."""
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch + 1 >= 24

    model = network()
    return model, fitted(model, "adam", steps, callbacks=[Stop()])


def digest(model, logs):
    """Returns a digest of a model's state and logs."""
    variables = [*model.variables, *model.optimizer.variables]
    bits = hashlib.sha256(b"".join(np.asarray(v).tobytes() for v in variables))
    bits.update(json.dumps(logs, sort_keys=True).encode())
    return bits.hexdigest()


def main(directory, policy, steps_option, *names):
    number = int(steps_option.partition("=")[2])
    strategy = poseidon.PoseidonStrategy(policy, timeout_s=60, strict=True)
    found = {}
    for name in names:
        found[name] = {}
        for steps in (1, number):
            keras.backend.clear_session()
            keras.utils.set_random_seed(1)
            # Names of its own: a site that another program exchanges otherwise travels dense in the first step.
            with strategy.scope(), keras.name_scope(f"{name}_{steps}"):
                model, logs = PROGRAMS[name](steps)
            found[name][steps] = digest(model, logs)
        found[name]["overlap"], found[name]["planned"] = strategy.plan.overlap, strategy.plan.steps
    (pathlib.Path(directory) / f"{strategy.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
