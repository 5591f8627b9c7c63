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
from tf_poseidon.stragglers import balancing
from tf_poseidon.stragglers import watch

SEEN = 32  # rows and columns that the model sees of an image
FEATURES, CLASSES = 64, 10


class Watching:
    """What is done because ranks may be unequal: they are watched, and shares decided. It can be left out.

    Attributes:
        is_on: Whether it is done.
        seconds: How long it has taken, with waits for other ranks.
    """

    def __init__(self):
        self.is_on, self.seconds = True, 0.0
        watch.Watch.after = self._switched(watch.Watch.after, lambda *_: None)
        watch.Watch.pause = self._switched(watch.Watch.pause, lambda *_: None)
        balancing.decide = self._switched(balancing.decide, lambda balance, *_: (balance, None))

    def _switched(self, function, otherwise):
        def run(*args):
            if not self.is_on:
                return otherwise(*args)
            begin = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds += time.perf_counter() - begin

        return run


class Epochs(keras.callbacks.Callback):
    """Notes of each epoch: its seconds, those of this process' processor, the shares of rows; and weights after one.

    Where batches are read ahead (`reads_ahead`), an epoch begins with the end of the one before: what is made between
    them would be given to it otherwise. Where ranks are watched in some epochs (`watching`), an epoch ends with the
    beginning of the next: shares are decided between them.
    """

    def __init__(self, strategy, weights_after, reads_ahead, watching):
        super().__init__()
        self.noted, self.weights = [], None
        self._strategy, self._weights_after = strategy, weights_after
        self._reads_ahead, self._watching = reads_ahead, watching

    def on_epoch_begin(self, epoch, logs=None):
        plan = self._strategy.plan
        if epoch and self._watching:
            self._note()
        self.noted.append({"shares": list(plan.row_shares) if plan else []})
        if self._watching:  # in turns of both orders
            self._watching.is_on = self.noted[-1]["is_watched"] = epoch % 4 in (0, 3)
        if epoch == 0 or not self._reads_ahead:
            self._begun = self._measured()

    def on_epoch_end(self, epoch, logs=None):
        ended = self._note()
        if self._reads_ahead:
            self._begun = ended
        if epoch == self._weights_after:
            self.weights = self.model.get_weights()

    def _note(self):
        ended = self._measured()
        self.noted[-1] |= {name: value - self._begun[name] for name, value in ended.items()}
        return ended

    def _measured(self):
        stats = self._strategy.stats()
        return {"seconds": time.perf_counter(), "processor_seconds": time.process_time(),
                "waiting_seconds": stats["waiting_seconds"], "input_seconds": stats["input_seconds"],
                "watching_seconds": self._watching.seconds if self._watching else 0.0}


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


def model_of(strategy, row_seconds):
    """Returns a compiled model.

    Args:
        strategy: The strategy.
        row_seconds: Returns how long an emulated accelerator computes for a row; None: the model sees images.
    """
    def wait(row):
        time.sleep(row_seconds())
        return row

    @tf.custom_gradient
    def on_accelerator(rows):
        """Passes rows on; a rank runs the iterations of its own ones."""
        return tf.map_fn(lambda row: tf.ensure_shape(tf.numpy_function(wait, [row], row.dtype, stateful=False),
                                                     row.shape), rows), lambda gradient: gradient

    keras.utils.set_random_seed(1)
    with strategy.scope():
        first = [keras.Input((SEEN, SEEN, 3)), keras.layers.AveragePooling2D(4), keras.layers.Flatten()] if (
            row_seconds is None) else [keras.Input((FEATURES,)), keras.layers.Dense(FEATURES, "relu"),
                                       keras.layers.Lambda(on_accelerator)]
        model = keras.Sequential([*first, keras.layers.Dense(CLASSES)])
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
    is_last = strategy.rank == options["ranks"] - 1
    row_seconds = 0.0
    model = model_of(strategy, None if options["images"] else lambda: row_seconds)
    if options["images"]:
        data = of_images(options)
        model.fit(of_images(options, counted, is_endless=False), verbose=0)
        report |= {"decoded": sum(counted.values()), "input": str(strategy.explain_input(data))}
        given = {"x": data, "steps_per_epoch": steps}
    else:
        rng = np.random.default_rng(2)
        x = rng.normal(size=(2 * batch, FEATURES)).astype(np.float32)
        data = tf.data.Dataset.from_tensor_slices((x, rng.integers(0, CLASSES, len(x))))
        model.fit(data.batch(batch), verbose=0)
        given = {"x": data.repeat(steps // 2).batch(batch)}
    first = model.get_weights()
    messages, made = [], int(model.optimizer.iterations)

    def note(record):
        messages.append([int(model.optimizer.iterations) - made, record.getMessage()])
        return False

    logging.getLogger("tf_poseidon").addFilter(note)
    row_seconds = 1e-3 * options["row_ms"] * (options["slower"] if is_last else 1)
    processor_parts.enter(pathlib.Path(options["parts"][strategy.rank]))
    epochs = Epochs(strategy, options["weights_after"], bool(options["images"]),
                    Watching() if options["is_watched_in_turns"] else None)
    model.fit(**given, epochs=options["epochs"], verbose=0, callbacks=[epochs])
    report |= {"epochs": epochs.noted, "messages": messages, "stragglers": strategy.stats()["stragglers"]}
    (directory / f"{strategy.rank}.json").write_text(json.dumps(report))
    np.savez(directory / f"{strategy.rank}.npz", *first, *(epochs.weights or []))


if __name__ == "__main__":
    main(sys.argv[-1])
