"""Counts the zeros of factors in training, and what leaving them out saves; times the code that does it.

    mpiexec -n 2 python -m evaluation.benchmarks.bench_zeros --json out.json

Networks with ReLU are trained for an epoch on made images whose classes can be told apart; one with tanh has no zeros.
The densities are those of the inputs of dense layers and of the errors of their outputs in one more batch; the shares
of bytes are what travelled in the epoch.
"""

import functools
import statistics
import time

from absl import app
from absl import flags
import keras
from keras import layers
from mpi4py import MPI
import numpy as np
import tensorflow as tf

from evaluation import output
from evaluation import timing
import tf_poseidon as poseidon
from tf_poseidon.job import communicator as communicator_lib

_JSON = output.json_flag()
_ROWS = flags.DEFINE_integer("rows", 4096, "Images of the epoch.", lower_bound=64)
_BATCH = flags.DEFINE_integer("batch_size", 64, "Rows of a global batch.", lower_bound=2)
_REPEATS = flags.DEFINE_integer("repeats", 31, "Measurements of each matrix.", lower_bound=3)

_CLASSES, _SIDE = 20, 64


def vgg_style():
    """Convolutions and pooling with ReLU, then three dense layers with dropout, as VGG has."""
    blocks = [layer for channels in (16, 32, 64, 128) for layer in (
        layers.Conv2D(channels, 3, padding="same", activation="relu"), layers.MaxPooling2D())]
    return keras.Sequential([
        keras.Input((_SIDE, _SIDE, 3)), *blocks, layers.Flatten(),
        layers.Dense(1024, name="fc6"), layers.ReLU(), layers.Dropout(0.5, seed=1),
        layers.Dense(1024, name="fc7"), layers.ReLU(), layers.Dropout(0.5, seed=2), layers.Dense(_CLASSES, name="fc8")])


def mlp(activation="relu"):
    """Dense layers alone, of the benchmarks' network's sizes."""
    return keras.Sequential([
        keras.Input((_SIDE, _SIDE, 3)), layers.AveragePooling2D(2), layers.Conv2D(1, 1, trainable=False),
        layers.Flatten(),
        layers.Dense(4096, name="dense0"), layers.Activation(activation), layers.Dense(4096, name="dense1"),
        layers.Activation(activation), layers.Dense(_CLASSES, name="dense2")])


NETWORKS = {"vgg style": vgg_style, "mlp": mlp, "mlp, tanh": lambda: mlp("tanh")}


def images(rows):
    """Returns (images, labels): a pattern for each class, shifted, with noise."""
    rng = np.random.default_rng(0)
    patterns = rng.normal(size=(_CLASSES, _SIDE // 8, _SIDE // 8, 3)).astype(np.float32)
    patterns = patterns.repeat(8, 1).repeat(8, 2)
    labels = rng.integers(_CLASSES, size=rows)
    shifts = rng.integers(-3, 4, size=rows)
    made = np.stack([np.roll(patterns[label], shift, 0) for label, shift in zip(labels, shifts)])
    return made + rng.normal(size=made.shape).astype(np.float32), labels


def densities(model, x, y):
    """Returns {dense layer: (share of its input, of the errors of its output, that is not zero)}."""
    inputs, outputs = {}, {}
    with tf.GradientTape() as tape:
        value = tf.constant(x)
        for layer in model.layers:
            inputs[layer.name] = value
            value = outputs[layer.name] = layer(value, training=True)
            tape.watch(value)
        loss = keras.losses.sparse_categorical_crossentropy(y, value, from_logits=True)
    dense = [layer.name for layer in model.layers if isinstance(layer, layers.Dense)]
    errors = tape.gradient(loss, [outputs[name] for name in dense])
    return {name: tuple(float(np.count_nonzero(value) / tf.size(value)) for value in (inputs[name], error))
            for name, error in zip(dense, errors)}


def trained(build, strategy):
    """Trains a network for an epoch; returns its results."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = build()
        model.compile(keras.optimizers.Adam(5e-4),
                      keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    x, y = images(_ROWS.value)
    history = model.fit(x, y, batch_size=_BATCH.value, shuffle=False, verbose=0).history
    plan = strategy.plan.measured(strategy.stats())
    factors = {d.site: site.factors for site, d in zip(plan.sites, plan.decisions)
               if d.scheme == "sfb" and not d.leader}
    shares = {site: each.sent_share for site, each in factors.items()}
    whole = {site: each.rows * (each.m + each.n) * each.itemsize for site, each in factors.items()}
    x, y = images(_ROWS.value + _BATCH.value)
    return {"accuracy": history["accuracy"][-1], "shares": shares,
            "bytes": sum(whole.values()), "sent_bytes": sum(shares[site] * whole[site] for site in whole),
            "densities": densities(model, x[-_BATCH.value:], y[-_BATCH.value:])}


def times_of_zeros():
    """Returns [{"megabytes", "itemsize", "density", seconds of copying, leaving out and putting back}]."""
    rng, results = np.random.default_rng(0), []
    for megabytes in (1, 16):
        for dtype in (np.float16, np.float32, np.float64):
            for density in (0.1, 0.5, 0.9, 1.0):
                matrix = rng.normal(size=(megabytes << 20) // np.dtype(dtype).itemsize).astype(dtype)
                matrix[rng.random(matrix.size) >= density] = 0
                results.append({"megabytes": megabytes, "dtype": np.dtype(dtype).name, "density": density,
                                **_times(matrix)})
    return results


def _times(matrix):
    times, other = {"copy": [], "leave_out": [], "put_back": []}, np.empty_like(matrix)
    for _ in range(_REPEATS.value):
        times["copy"].append(timing.seconds(lambda: np.copyto(other, matrix)))
        begin = time.perf_counter()
        left = communicator_lib.WithoutZeros(matrix)
        times["leave_out"].append(time.perf_counter() - begin)
        if left.num_bytes is None:
            continue
        times["put_back"].append(timing.seconds(functools.partial(left.put_back, other)))
        np.testing.assert_array_equal(other.view(np.uint8), matrix.view(np.uint8))
    return {f"{name}_ms": 1e3 * statistics.median(seconds) if seconds else None for name, seconds in times.items()}


def main(_):
    keras.utils.set_random_seed(1)
    cluster = poseidon.Cluster(MPI.COMM_WORLD.size, bandwidth_gbps=1)
    strategy = poseidon.PoseidonStrategy("sfb", ranks_per_node=1, cluster=cluster)
    networks = {name: trained(build, strategy) for name, build in NETWORKS.items()}
    if strategy.rank != 0:
        return
    results = {"networks": networks, "zeros": times_of_zeros()}
    rows = []
    for name, found in networks.items():
        for layer, shares in found["densities"].items():
            share = next(share for site, share in found["shares"].items() if layer in site)
            accuracy, *others = (f"{number:.2f}" for number in (found["accuracy"], *shares, share))
            rows.append((name, accuracy, layer, *others))
        rows.append((name, "", "all", "", "", f"{found['sent_bytes'] / found['bytes']:.3f}"))
    output.show("bytes of factors that travel, as a share of all",
                ("network", "accuracy", "layer", "input not zero", "errors not zero", "share"), rows)
    rows = [(str(row["megabytes"]), row["dtype"], f"{row['density']}", *(
        f"{row['megabytes'] * 1.048576 / row[f'{what}_ms']:.1f}" if row[f"{what}_ms"] else "as it is"
        for what in ("copy", "leave_out", "put_back"))) for row in results["zeros"]]
    output.show("GB/s of a matrix on one thread",
                ("MiB", "type", "not zero", "copying", "leaving out", "putting back"), rows)
    output.write_json(_JSON.value, results)


if __name__ == "__main__":
    app.run(main)
