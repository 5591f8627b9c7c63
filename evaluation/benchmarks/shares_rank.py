"""A rank of bench_input_and_shares.py, or one process: trains with a part of a processor, and notes how long it takes.

The last argument is a folder with options.json; RANK.json and RANK.npz are written there.
"""

import collections
import json
import logging
import pathlib
import sys
import time

import keras
import numpy as np
import tensorflow as tf

from evaluation.clusters import processor_parts
import tf_poseidon as poseidon

SIDE, SEEN = 160, 32  # of images, and of what the model sees of them
CLASSES = 10


class Epochs(keras.callbacks.Callback):
    """Notes of each epoch: its seconds, those of this process' processor, the shares of rows; and weights after one."""

    def __init__(self, strategy, weights_after):
        super().__init__()
        self.noted, self.weights = [], None
        self._strategy, self._weights_after = strategy, weights_after

    def on_epoch_begin(self, epoch, logs=None):
        plan = self._strategy.plan
        self.noted.append({"shares": list(plan.row_shares) if plan else []})
        self._begun = self._measured()

    def on_epoch_end(self, epoch, logs=None):
        self.noted[-1] |= {name: value - self._begun[name] for name, value in self._measured().items()}
        if epoch == self._weights_after:
            self.weights = self.model.get_weights()

    def _measured(self):
        stats = self._strategy.stats()
        return {"seconds": time.perf_counter(), "processor_seconds": time.process_time(),
                "waiting_seconds": stats["waiting_seconds"], "input_seconds": stats["input_seconds"]}


def decode(file, label):
    """Returns what the model sees of an image, and its label."""
    image = tf.io.decode_jpeg(tf.io.read_file(file), channels=3)
    return tf.image.resize(tf.cast(image, tf.float32) / 128 - 1, [SEEN, SEEN], antialias=True), label


def of_images(options, counted=None, is_endless=True):
    """Returns the dataset of the images; `counted` counts by name of file how often this process decodes it."""
    files = sorted(map(str, pathlib.Path(options["images"]).iterdir()))
    labels = [i % CLASSES for i in range(len(files))]

    def note(file):
        counted[file] += 1
        return file

    def counting(file, label):
        return tf.ensure_shape(tf.numpy_function(note, [file], tf.string, stateful=False), []), label

    def batches():
        data = tf.data.Dataset.from_tensor_slices((files, labels)).shuffle(len(files), seed=3)
        data = data.repeat() if is_endless else data
        data = data if counted is None else data.map(counting)
        return data.map(decode).batch(options["batch"]).prefetch(2)

    # Maps within a function of a dataset have no rule: every rank runs them for all rows.
    return batches() if options["own_rows"] else tf.data.Dataset.range(1).flat_map(lambda _: batches())


def model_of(strategy, layers):
    """Returns a compiled model; `layers` convolutions make it expensive."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        convolutions = [keras.layers.Conv2D(24, 3, activation="relu") for _ in range(layers)]
        model = keras.Sequential([keras.Input((SEEN, SEEN, 3)), *convolutions, keras.layers.AveragePooling2D(4),
                                  keras.layers.Flatten(), keras.layers.Dense(CLASSES)])
        model.compile(keras.optimizers.SGD(0.05), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def main(directory):
    directory = pathlib.Path(directory)
    options = json.loads((directory / "options.json").read_text())
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    rows = options["rows"]
    strategy = poseidon.PoseidonStrategy("ps", rows=tuple(rows) if isinstance(rows, list) else rows, timeout_s=120)
    steps, batch, report = options["steps"], options["batch"], {}
    counted = collections.Counter()
    model = model_of(strategy, options["layers"])
    if options["images"]:
        data = of_images(options)
        model.fit(of_images(options, counted, is_endless=False), verbose=0)
        report |= {"decoded": sum(counted.values()), "input": str(strategy.explain_input(data))}
        given = {"x": data, "steps_per_epoch": steps}
    else:
        rng = np.random.default_rng(2)
        x = rng.normal(size=(steps * batch, SEEN, SEEN, 3)).astype(np.float32)
        y = rng.integers(0, CLASSES, len(x))
        model.fit(x[:2 * batch], y[:2 * batch], batch_size=batch, shuffle=False, verbose=0)
        given = {"x": x, "y": y, "batch_size": batch, "shuffle": False}
    first = model.get_weights()
    messages, made = [], int(model.optimizer.iterations)

    def note(record):
        messages.append([int(model.optimizer.iterations) - made, record.getMessage()])
        return False

    logging.getLogger("tf_poseidon").addFilter(note)
    processor_parts.enter(pathlib.Path(options["parts"][strategy.rank]))
    epochs = Epochs(strategy, options["weights_after"])
    model.fit(**given, epochs=options["epochs"], verbose=0, callbacks=[epochs])
    report |= {"epochs": epochs.noted, "messages": messages, "stragglers": strategy.stats()["stragglers"]}
    (directory / f"{strategy.rank}.json").write_text(json.dumps(report))
    np.savez(directory / f"{strategy.rank}.npz", *first, *(epochs.weights or []))


if __name__ == "__main__":
    main(sys.argv[-1])
