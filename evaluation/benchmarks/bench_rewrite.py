"""Times the rewriting of saved training graphs of keras.applications.

    python -m evaluation.benchmarks.bench_rewrite --models ResNet152 --json rewrite.json

Each model is built with random weights, and its training step is saved as by a program that knows nothing of this
project. The rewritten step is stripped again, and must equal the original byte for byte before a time counts.
"""

import collections
import os
import statistics
import tempfile
import time

from absl import app
from absl import flags
import keras
import tensorflow as tf

from evaluation import output
import tf_poseidon as poseidon
from tf_poseidon.saved_graphs import formats

_MODELS = flags.DEFINE_list("models", ["MobileNetV2", "ResNet50", "ResNet152"], "Names in keras.applications.")
_WORKERS = flags.DEFINE_integer("workers", 8, "Number of ranks to plan for.")
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 32, "Rows on each rank.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "How often each model is rewritten.")
_JSON = output.json_flag()


def save_training_step(name, path, row=(224, 224, 3), **options):
    """Saves the training step of a model: forward, backward, and SGD with momentum.

    Args:
        name: The model's name in keras.applications.
        path: The directory to write.
        row: Shape of an image.
        **options: Further arguments of the model.
    """
    model = getattr(keras.applications, name)(input_shape=row, weights=None, **options)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    module = tf.Module()
    module.variables_of_step = [v.value for v in (*model.variables, *optimizer.variables)]

    @tf.function(input_signature=[tf.TensorSpec([None, *row]), tf.TensorSpec([None], tf.int32)])
    def train(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x, training=True)))
        optimizer.apply(tape.gradient(loss, [v.value for v in model.trainable_variables]),
                        model.trainable_variables)
        return {"loss": loss}

    module.train = train
    tf.saved_model.save(module, path, signatures={"train": train})


def time_rewriting(path):
    """Returns {phase: seconds} of one rewriting, with the whole as "total", and the `Step`."""
    with tempfile.TemporaryDirectory() as folder:
        target, back = os.path.join(folder, "out"), os.path.join(folder, "back")
        phases, last = collections.OrderedDict(), ["loading the file", time.perf_counter()]

        def progress(what):
            now = time.perf_counter()
            phases[last[0]] = now - last[1]
            last[:] = what, now

        begin = time.perf_counter()
        report = poseidon.rewrite_saved_model(path, target, workers=_WORKERS.value, batch_size=_BATCH_SIZE.value,
                                              progress=progress)
        progress("")
        phases["total"] = time.perf_counter() - begin
        poseidon.strip(target, back)
        if _bytes(back) != _bytes(path):
            raise AssertionError(f"'{path}' is not the original any more once it is stripped.")
        return phases, report.steps["train"]


def _bytes(path):
    return formats.read(path).graph_def.SerializeToString(deterministic=True)


def main(_):
    results = {}
    for name in _MODELS.value:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, name)
            save_training_step(name, path)
            graph_def = formats.read(path).graph_def
            nodes = len(graph_def.node) + sum(len(f.node_def) for f in graph_def.library.function)
            timed = [time_rewriting(path) for _ in range(_REPEATS.value)]
        phases, step = {phase: [seconds[phase] for seconds, _ in timed] for phase in timed[0][0]}, timed[0][1]
        exchanges, whole = len(step.exchanges.exchanges), len(step.exchanges.whole)
        results[name] = {"nodes": nodes, "exchanges": exchanges, "whole": whole, "seconds": phases}
        print(f"{name}: {nodes:,} nodes, {exchanges} exchanges, {whole} nodes run whole; rewritten in "
              f"{statistics.median(phases['total']):.2f} s ({min(phases['total']):.2f} to "
              f"{max(phases['total']):.2f})", flush=True)
        for phase, seconds in phases.items():
            if phase != "total":
                print(f"    {statistics.median(seconds):6.2f} s  {phase}")
    output.write_json(_JSON.value, {"workers": _WORKERS.value, "batch_size": _BATCH_SIZE.value, "models": results})


if __name__ == "__main__":
    app.run(main)
