"""Runs Python blocks of the documentation on the ranks of a job, each with names that a reader would have.

    mpiexec -n 2 python run_documented.py README.md:8 docs/planning.md:120
    mpiexec -n 2 python run_documented.py --save step        # the saved step of docs/saved_graphs.md

It runs in a directory of its own, where blocks write their files.
"""

import os
import pathlib
import sys

import documented
import keras
import numpy as np
import tensorflow as tf

import tf_poseidon as poseidon

ROWS, FEATURES = 64, 64


def save_step(path):
    """Saves a training step of one process."""
    class Step(tf.Module):
        def __init__(self):
            super().__init__()
            self.weights = tf.Variable(np.ones([FEATURES, 1], np.float32), name="weights")

        @tf.function(input_signature=[tf.TensorSpec([None, FEATURES]), tf.TensorSpec([None, 1])])
        def train(self, x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ self.weights - y) ** 2)
            self.weights.assign_sub(0.1 * tape.gradient(loss, self.weights))
            return {"loss": loss}

    step = Step()
    tf.saved_model.save(step, path, signatures={"train": step.train})


def arrays():
    """Returns rows and their labels, the same on all ranks."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(ROWS, FEATURES)).astype("float32"), rng.integers(0, 10, ROWS)


def names_of(page, strategy):
    """Returns the names that blocks of a page use without defining them."""
    x, y = arrays()
    with strategy.scope():
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(10)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, batch_size=ROWS, verbose=0)
    names = {"keras": keras, "np": np, "tf": tf, "poseidon": poseidon, "strategy": strategy, "model": model,
             "x": x, "y": y, "images": x, "labels": y, "optimizer": model.optimizer,
             "loss_of": lambda outputs, labels: model.loss(labels, outputs)}
    if page == "docs/semantics.md":
        names["images"] = tf.data.Dataset.from_tensor_slices(x.reshape(-1, 8, 8, 1))
        names["labels"] = tf.data.Dataset.from_tensor_slices(y)
    if page == "docs/graph_passes.md":
        names["graph"] = tf.function(lambda: tf.zeros([2])).get_concrete_function().graph
    return names


def main(places):
    if places[0] == "--save":
        save_step(places[1])
        return
    if places[0].startswith("docs/engines.md"):  # which do without a strategy
        strategy, own = None, {"tf": tf}
    elif places[0].startswith("docs/saved_graphs.md"):
        x, _ = arrays()
        strategy, own = None, {"tf": tf, "poseidon": poseidon, "batches": [(x, x[:, :1])]}
    else:
        strategy, own = poseidon.PoseidonStrategy(), None
        folder = pathlib.Path(f"rank{strategy.rank}")  # what is written "on one rank" is written by each here
        folder.mkdir()
        os.chdir(folder)
    for place in places:
        page = place.partition(":")[0]
        block, = (block for block in documented.blocks(page) if block.place == place)
        names = dict(own or names_of(page, strategy))
        source = pathlib.Path(f"{place.replace('/', '_')}.{os.getpid()}.py")  # where AutoGraph finds it
        source.write_text(block.text)
        exec(compile(block.text, str(source.resolve()), "exec"), names)
        if callable(names.get("step")):  # blocks that define a step do not call it
            names["step"](tf.constant(names["x"]), tf.constant(names["y"]))
        print(f"ran {place}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
