"""Times what a user waits for besides the steps: the first step, the next call of `fit`, `evaluate` and `predict`.

    python -m evaluation.benchmarks.bench_first_step --json out.json

Plain Keras in one process and a job of several ranks take turns, each in processes of its own, on the same rows in
all. Each starts with a `fit` of one step, whose weights are compared with those of plain Keras; those of networks with
batch normalisation, whose moments are of each rank's rows, only have to be finite. The difference of each turn is what
the job costs; the table shows medians and quartiles over the turns.
"""

import contextlib
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile

from absl import app
from absl import flags
import keras
import numpy as np
import rich.progress

from evaluation import modules
from evaluation import output
from evaluation import timing

_JSON = output.json_flag()
_NETWORKS = flags.DEFINE_list("networks", None, "Networks, by default all.")
_RANKS = flags.DEFINE_integer("ranks", 2, "Ranks of the job.", lower_bound=2)
_TURNS = flags.DEFINE_integer("turns", 5, "Turns of plain Keras and the job.", lower_bound=2)
_WORKER = flags.DEFINE_string("worker", None, "Measures one network, for the job that this script has started.")
_OUT = flags.DEFINE_string("out", None, "File for what a worker has measured.")
_ROWS = 32
_STEPS = 200  # of evaluate and predict
_IMAGES, _WORDS, _CLASSES = (32, 32, 3), 100, 10
# What is measured, by its name in the results: its unit in the table, and its factor.
_MEASURES = {"first_fit_s": ("first fit, s", 1), "second_fit_s": ("second fit, ms", 1e3),
             "evaluate_s": ("evaluate, ms a step", 1e3 / _STEPS), "predict_s": ("predict, ms a step", 1e3 / _STEPS),
             "memory_mb": ("memory, MB", 1)}


def _mlp():
    return keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(256, "relu"),
                             keras.layers.Dense(_CLASSES)])


def _transformer(blocks):
    inputs = keras.Input((_ROWS,), dtype="int32")
    x = keras.layers.Embedding(_WORDS, 64)(inputs)
    for _ in range(blocks):
        x = keras.layers.LayerNormalization()(x + keras.layers.MultiHeadAttention(4, 16)(x, x))
        hidden = keras.layers.Dense(128, "gelu")(x)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dense(64)(hidden))
    return keras.Model(inputs, keras.layers.Dense(_CLASSES)(keras.layers.GlobalAveragePooling1D()(x)))


def _application(name):
    return getattr(keras.applications, name)(weights=None, classes=_CLASSES, classifier_activation=None,
                                             input_shape=_IMAGES)


class _Gan(keras.Model):
    """A generator and a critic, each with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((16,)), keras.layers.Dense(256, "relu"),
                                           keras.layers.Dense(64)])
        self.critic = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(1)])
        self.build((None, 64))

    def call(self, x):
        return self.critic(x)

    def train_step(self, data):
        import tensorflow as tf
        x, _ = data
        noise = tf.random.stateless_normal([tf.shape(x)[0], 16], [1, 2])
        with tf.GradientTape(persistent=True) as tape:
            real, fake = self.critic(x), self.critic(self.generator(noise))
            of_critic = tf.reduce_mean(tf.nn.softplus(fake) + tf.nn.softplus(-real))
            of_generator = tf.reduce_mean(tf.nn.softplus(-fake))
        for loss, part in ((of_critic, self.critic), (of_generator, self.generator)):
            for gradient, variable in zip(tape.gradient(loss, part.trainable_variables), part.trainable_variables):
                variable.assign_sub(0.01 * gradient)
        return {"loss": of_critic}


NETWORKS = {
    "mlp": _mlp, "transformer": lambda: _transformer(2), "gan": _Gan,
    "mobilenet_v2": lambda: _application("MobileNetV2"), "transformer_12": lambda: _transformer(12),
    "resnet_50": lambda: _application("ResNet50"), "efficientnet_b0": lambda: _application("EfficientNetB0"),
}
_NORMALIZED = ("mobilenet_v2", "resnet_50", "efficientnet_b0")  # each batch, so by each rank's rows


def measure(network, scope):
    """Returns ({name in `_MEASURES`: what it takes}, the weights after the first step) of a network made in a scope."""
    keras.utils.set_random_seed(1)
    with scope:
        model = NETWORKS[network]()
        metrics = None if network == "gan" else ["accuracy"]
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=metrics)
    random = np.random.default_rng(0)
    rows = _ROWS * (_STEPS if network == "mlp" else 1)
    if network.startswith("transformer"):
        x = random.integers(0, _WORDS, (rows, _ROWS))
    else:
        shape = (64,) if network == "gan" else model.input_shape[1:]
        x = random.normal(size=(rows, *shape)).astype("float32")
    y = random.integers(0, _CLASSES, rows)
    found = {"first_fit_s": timing.seconds(lambda: model.fit(x[:_ROWS], y[:_ROWS], batch_size=_ROWS, verbose=0))}
    weights = model.get_weights()
    found["second_fit_s"] = timing.seconds(lambda: model.fit(x[:_ROWS], y[:_ROWS], batch_size=_ROWS, verbose=0))
    if network == "mlp":
        for name, method in (("evaluate_s", lambda: model.evaluate(x, y, batch_size=_ROWS, verbose=0)),
                             ("predict_s", lambda: model.predict(x, batch_size=_ROWS, verbose=0))):
            method()
            found[name] = timing.seconds(method)
    return found | {"memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}, weights


def work(network, out):
    """Measures a network in this process, which may be a rank, and writes what it has found."""
    if "TF_POSEIDON_FIRST_STEP" not in os.environ:
        scope, rank = contextlib.nullcontext(), 0
    else:
        import tf_poseidon as poseidon
        strategy = poseidon.PoseidonStrategy()
        scope, rank = strategy.scope(), strategy.rank
    found, weights = measure(network, scope)
    if rank == 0:
        np.savez(out, *weights, found=json.dumps(found))


def run(network, ranks):
    """Returns what a job of that many ranks measures, see `measure`; 1 is plain Keras."""
    with tempfile.TemporaryDirectory() as directory:
        out = pathlib.Path(directory) / "out.npz"
        program = [*modules.command("benchmarks.bench_first_step"), f"--worker={network}", f"--out={out}"]
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        if ranks > 1:
            environment["TF_POSEIDON_FIRST_STEP"] = "1"
            program = [str(pathlib.Path(sys.executable).with_name("tf-poseidon")), "run", "-n", str(ranks), "--",
                       *program]
        done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{network} on {ranks} ranks ended with {done.returncode}:\n{done.stderr[-2000:]}")
        file = np.load(out)
        return json.loads(str(file["found"])), [file[name] for name in file.files if name != "found"]


def check(network, weights, expected):
    """Raises AssertionError unless weights are those of plain Keras, as far as they should be."""
    for mine, theirs in zip(weights, expected, strict=True):
        if network in _NORMALIZED:
            assert np.isfinite(mine).all(), network
        else:
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6, err_msg=network)


def main(_):
    if _WORKER.value:
        return work(_WORKER.value, _OUT.value)
    results = {}
    for network in rich.progress.track(_NETWORKS.value or list(NETWORKS), "networks", transient=True):
        turns = []
        for turn in range(_TURNS.value):
            order = (1, _RANKS.value) if turn % 2 else (_RANKS.value, 1)
            found = {ranks: run(network, ranks) for ranks in order}
            (plain, expected), (job, weights) = found[1], found[_RANKS.value]
            check(network, weights, expected)
            turns.append({name: (plain[name], job[name]) for name in plain})
        results[network] = {name: _summary([turn[name] for turn in turns], factor)
                            for name, (_, factor) in _MEASURES.items() if name in turns[0]}
    rows = [(network, _MEASURES[name][0], f"{found['plain']:.2f}", f"{found['job']:.2f}", timing.text(
        {"median": found["difference"], "quartiles": found["quartiles"]}))
            for network, measures in results.items() for name, found in measures.items()]
    output.show(f"{_RANKS.value} ranks over plain Keras in one process, in turns of one run",
                ("network", "what", "plain Keras", "the job", "difference (quartiles)"), rows, left=2)
    output.write_json(_JSON.value, results)
    return None


def _summary(pairs, factor):
    found = timing.summary([factor * (job - plain) for plain, job in pairs])
    return {"plain": factor * statistics.median(plain for plain, _ in pairs),
            "job": factor * statistics.median(job for _, job in pairs), "difference": found["median"],
            "quartiles": found["quartiles"]}


if __name__ == "__main__":
    app.run(main)
