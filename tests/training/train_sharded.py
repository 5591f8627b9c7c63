"""Programs whose ranks update shards: train_sharded.py OUT POLICY [--whole] [--hfb] NAME...

With --whole, they update all; with --hfb, gradients of matrices travel as half factors.
"""

import functools
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf
import wrappers

import tf_poseidon as poseidon

# With epsilon=1e-3, updates depend continuously on gradients.
OPTIMIZERS = {
    "sgd": keras.optimizers.SGD,
    "momentum": functools.partial(keras.optimizers.SGD, momentum=0.9),
    "nesterov": functools.partial(keras.optimizers.SGD, momentum=0.9, nesterov=True),
    "rmsprop": functools.partial(keras.optimizers.RMSprop, momentum=0.5, centered=True, epsilon=1e-3),
    "adagrad": functools.partial(keras.optimizers.Adagrad, epsilon=1e-3),
    "adadelta": functools.partial(keras.optimizers.Adadelta, epsilon=1e-3),
    "adam": functools.partial(keras.optimizers.Adam, epsilon=1e-3, amsgrad=True),
    "adamw": functools.partial(keras.optimizers.AdamW, epsilon=1e-3, weight_decay=0.01),
    "adamax": functools.partial(keras.optimizers.Adamax, epsilon=1e-3),
    "nadam": functools.partial(keras.optimizers.Nadam, epsilon=1e-3),
    "lion": keras.optimizers.Lion,
    "ftrl": keras.optimizers.Ftrl,
    "adafactor": keras.optimizers.Adafactor,
    "muon": keras.optimizers.Muon,
    "lamb": functools.partial(keras.optimizers.Lamb, epsilon=1e-3),
}
# Whose updates of matrices are not computed element by element, nor of norms: how many slots these have together.
OWNED = {"adafactor": 9, "muon": 3}
ELEMENTWISE = [name for name in OPTIMIZERS if name not in ("sgd", *OWNED)]
ROWS, BATCH = 97, 32


def _model(name=None, dtype=None, **kwargs):
    """Returns a model with one kernel of several KV pairs, that of the layer `name`; `dtype` is that of the last."""
    x = keras.Input((8,))
    h = keras.layers.Dense(300, "tanh", **kwargs)(x)
    return keras.Model(x, keras.layers.Dense(3, dtype=dtype)(keras.layers.Dense(160, "tanh", name=name)(h)))


def _data(columns=8):
    rng = np.random.default_rng(2)
    return tuple(rng.integers(-3, 4, (ROWS, n)).astype("float64") for n in (columns, 3))


def _arrays(*models_and_optimizers):
    variables = [variable for one in models_and_optimizers for variable in one.variables]
    weights = [variable.value for variable in variables if hasattr(variable.value, "copy")]
    slots = [variable.value for variable in variables if hasattr(variable.value, "division")
             and not variable.value.trainable]
    held = np.array([(tf.size(slot._holding.read()), slot.shape.num_elements()) for slot in slots]).reshape(-1, 2)
    return {"local/weights": np.array([(tf.size(weight._holding.read()), weight.shape.num_elements())
                                       for weight in weights]).reshape(-1, 2),
            "local/held": held.sum(0), "local/slots": held,
            "local/owned": held[[slot.division.owner >= 0 for slot in slots]],
            **{f"variables/{i:02}": variable.numpy() for i, variable in enumerate(variables)}}


def optimizer(name, strategy):
    with strategy.scope():
        model = _model()
        model.compile(OPTIMIZERS[name](0.01), "mse")
    model.fit(*_data(), batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return _arrays(model, model.optimizer)


def mixed_bfloat16(strategy):
    """Gradients are cast from bfloat16."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        with strategy.scope():
            model = _model("cast")
            model.compile(OPTIMIZERS["adam"](0.01), "mse")
    finally:
        keras.config.set_dtype_policy("float64")
    model.fit(*_data(), batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    sites = strategy.stats()["sites"]
    ways = ("cast/kernel", "shards/cast/kernel")
    return {"local/sent": [sites[way]["sent_bytes"] for way in ways if way in sites],
            **_arrays(model, model.optimizer)}


class Gan(keras.Model):
    """Two optimizers, which train parts of one model in turn."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = keras.layers.Dense(700, "tanh"), keras.layers.Dense(70)

    def compile(self, first, second):
        super().compile()
        self.optimizers = [first, second]

    def call(self, x):
        return self.critic(self.generator(x))

    def train_step(self, data):
        x, _ = data
        for layer, sign, one in zip((self.critic, self.generator), (-1.0, 1.0), self.optimizers):
            with tf.GradientTape() as tape:
                loss = sign * tf.reduce_mean(tf.sin(self(x)))
            one.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
        return {"loss": loss}


def gan(strategy):
    with strategy.scope():
        model = Gan()
        model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), keras.optimizers.SGD(0.01, momentum=0.9))
    model.fit(*_data(), batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return _arrays(model, *model.optimizers)


def _steps(model, one):
    """Trains a model by a step of one's own; yields the loss of each."""
    @poseidon.distribute
    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        one.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    x, y = _data()
    for begin in range(0, ROWS, BATCH):
        yield step(x[begin:begin + BATCH], y[begin:begin + BATCH]).numpy()


def alone(strategy, name="adam"):
    """After each step one rank reads slots, whatever the others do."""
    found = {}
    with strategy.scope():
        model, one = _model(), OPTIMIZERS[name](0.01)
        for i, _ in enumerate(_steps(model, one)):
            reads = strategy.rank == i % strategy.num_replicas_in_sync
            found |= {f"local/alone/{i}/{j:02}": variable.numpy() if reads else np.empty(0)
                      for j, variable in enumerate(one.variables)}
    return {**found, **_arrays(model, one)}


def distributed(strategy):
    """A step of one's own, and slots that the program reads and assigns between steps."""
    with strategy.scope():
        model, adam = _model(), keras.optimizers.Adam(0.01, epsilon=1e-3)
        losses = []
        for loss in _steps(model, adam):
            losses.append(loss)
            for variable in adam.variables:
                if "momentum" in variable.path:
                    variable.assign(0.5 * variable.numpy())
    return {"losses": np.array(losses), **_arrays(model, adam)}


def overlapping(strategy, name="adam"):
    with strategy.scope():
        model = _model()
        model.compile(OPTIMIZERS[name](0.01), "mse", steps_per_execution=4)
    model.fit(*_data(), batch_size=8, epochs=2, shuffle=False, verbose=0)
    return _arrays(model, model.optimizer)


def recompiled(strategy, name="adam"):
    """An optimizer that trains another loss, in another function, from where it is; then all weights again."""
    with strategy.scope():
        model = _model()
        model.compile(OPTIMIZERS[name](0.01), "mse")
        model.fit(*_data(), batch_size=BATCH, shuffle=False, verbose=0)
        model.compile(model.optimizer, "mae")
    model.fit(*_data(), batch_size=BATCH, shuffle=False, verbose=0)
    model.optimizer.set_weights([0.5 * variable.numpy() for variable in model.optimizer.variables])
    model.fit(*_data(), batch_size=BATCH, shuffle=False, verbose=0)
    return _arrays(model, model.optimizer)


def looped(strategy):
    """A loop over strategy.run needs slots whole that fit has divided."""
    x, y = _data()
    with strategy.scope():
        model = _model()
        model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "mse")
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)

    def step(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(batch[0], training=True) - batch[1])) / ROWS
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, variables), variables)

    run = tf.function(lambda batch: strategy.run(step, args=(batch,)))
    for batch in strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(ROWS)):
        run(batch)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return _arrays(model, model.optimizer)


def redivided(strategy):
    """Two optimizers divide the slots of one matrix in different ways, then one step trains by both."""
    x, y = _data()
    with strategy.scope():
        model = _model()
        optimizers = keras.optimizers.Adam(0.01, epsilon=1e-3), keras.optimizers.Muon(0.01)

        def trained(*used):
            @poseidon.distribute
            @tf.function
            def step(x, y):
                for optimizer in used:
                    with tf.GradientTape() as tape:
                        loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
                    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
                return loss

            for begin in range(0, ROWS, BATCH):
                step(x[begin:begin + BATCH], y[begin:begin + BATCH])

        for used in (optimizers[:1], optimizers[1:], optimizers):
            trained(*used)
    return _arrays(model, *optimizers)


def eager(strategy):
    """Steps that run eagerly read slots whole, and keep their shards."""
    with strategy.scope():
        model = _model()
        model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "mse", run_eagerly=True)
    model.fit(*_data(), batch_size=BATCH, shuffle=False, verbose=0)
    return _arrays(model, model.optimizer)


def mixed(strategy, policy, name, **kwargs):
    """Mixed precision: layers cast weights, but for the last one."""
    keras.config.set_floatx("float32")
    keras.mixed_precision.set_global_policy(policy)
    with strategy.scope():
        model = _model(dtype="float32")
        model.compile(OPTIMIZERS[name](0.01, **kwargs), "mse")
    model.fit(*_data(), batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return _arrays(model, model.optimizer)


def used(strategy):
    """Weights and slots that are used between steps in every way: whole, cast, by rows, in graphs of their own."""
    keras.config.set_floatx("float32")
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    with strategy.scope():
        model = _model(kernel_regularizer="l2")
        model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "mse", steps_per_execution=2)
    x, y = _data()
    kernel, results = model.weights[0], [model.evaluate(x, y, verbose=0)]

    @tf.function
    def total():
        return tf.reduce_sum(kernel) + tf.reduce_sum(model.optimizer.variables[2])

    for i in range(3):
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        results += [model.evaluate(x, y, verbose=0), model.predict(x, verbose=0).sum(), model(x[:3]).numpy().sum(),
                    tf.gather(kernel, [1]).numpy().sum(), kernel.numpy().sum()]
        model.set_weights([0.5 * weight for weight in model.get_weights()])
        if i:  # from now on, every rank holds these whole
            results.append(total().numpy())
    return {"results": np.array(results, "float64"), **_arrays(model, model.optimizer)}


MIXED = {"bfloat16-momentum": functools.partial(mixed, policy="mixed_bfloat16", name="momentum"),
         "bfloat16-adamw": functools.partial(mixed, policy="mixed_bfloat16", name="adamw"),
         "bfloat16-muon": functools.partial(mixed, policy="mixed_bfloat16", name="muon"),
         "float16-adam": functools.partial(mixed, policy="mixed_float16", name="adam"),  # with loss scaling
         "float16-ema": functools.partial(mixed, policy="mixed_float16", name="lion", use_ema=True, ema_momentum=0.75,
                                          ema_overwrite_frequency=2),
         "used": used}
PROGRAMS = {**{name: functools.partial(optimizer, name) for name in OPTIMIZERS},
            **{f"{name}-adam": cell for name, cell in ((w, wrappers.Wrapped(w, "adam")) for w in wrappers.WRAPPERS)},
            **{program.__name__: program for program in (
                alone, gan, distributed, overlapping, recompiled, looped, redivided, eager)},
            "alone-muon": functools.partial(alone, name="muon"),
            "overlapping-muon": functools.partial(overlapping, name="muon"),
            "recompiled-adafactor": functools.partial(recompiled, name="adafactor"),
            "mixed_bfloat16": mixed_bfloat16}


def main(out, policy, *names):
    strategy = poseidon.PoseidonStrategy(policy, timeout_s=60,
                                         shard_update="auto" if "--auto" in names else "--whole" not in names,
                                         pins={"*/kernel": "hfb"} if "--hfb" in names else None)
    for name in names:
        if name.startswith("--"):
            continue
        keras.backend.clear_session()
        keras.config.set_floatx("float64")
        keras.utils.set_random_seed(1)
        np.savez(pathlib.Path(out) / f"{name}.{strategy.rank}.npz", **(MIXED | PROGRAMS)[name](strategy))


if __name__ == "__main__":
    main(*sys.argv[1:])
