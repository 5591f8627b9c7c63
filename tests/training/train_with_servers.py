"""Trains in every way on ranks of which some only serve: FILE OPTIONS. Each rank that trains writes FILE.RANK.json."""

import json
import sys

import keras
import numpy as np
import tensorflow as tf

import tf_poseidon as poseidon

ROWS, BATCH = 48, 12
OPTIONS = eval(sys.argv[2])
strategy = poseidon.PoseidonStrategy(timeout_s=60, **OPTIONS)
rng = np.random.default_rng(1)
x, y = rng.normal(size=(ROWS, 32)).astype("float32"), rng.normal(size=(ROWS, 3)).astype("float32")


def network():
    keras.utils.set_random_seed(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(300, "tanh"), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


def fit():
    model = network()
    logs = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0).history
    logs |= model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    return model, logs | {"predictions": model.predict(x, batch_size=BATCH, verbose=0).tolist()}


def distribute():
    model = network()

    @poseidon.distribute
    def step(inputs, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(inputs, training=True) - targets))
        model.optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        return loss

    return model, {"losses": [float(step(tf.constant(x[i:i + BATCH]), tf.constant(y[i:i + BATCH])))
                              for i in range(0, ROWS, BATCH)]}


def run():
    model = network()
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH))

    @tf.function
    def step(batch):
        def of_rank(inputs, targets):
            with tf.GradientTape() as tape:
                errors = tf.reduce_mean(tf.square(model(inputs, training=True) - targets), axis=1)
                loss = tf.nn.compute_average_loss(errors, global_batch_size=BATCH)
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss
        return strategy.reduce("SUM", strategy.run(of_rank, batch), axis=None)

    return model, {"losses": [float(step(batch)) for batch in data]}


found = {"ranks": strategy.num_replicas_in_sync}
for train in (fit, distribute, run):
    before = network().get_weights()
    model, results = train()
    change = [(after - first).ravel().tolist() for first, after in zip(before, model.get_weights())]
    found[train.__name__] = {"change": sum(change, []), **results}
found["plan"] = str(strategy.plan)
with open(f"{sys.argv[1]}.{strategy.rank}.json", "w") as file:
    json.dump(found, file)
