"""Trains networks while other jobs do, on the same accelerators; reports weights, logs and turns of each rank.

    train_crossover.py FOLDER JOB OF NAME PROGRAM...

JOB is this job's number of OF, which begin together; NAME is that of their turns, "" for none. A program is one of
train_clocks.py; "hang" or "die": while another job trains, rank 1 stops in a step, or is killed; "unlike":
TensorFlow does not run the passes on rank 1; or "ends": data end that nobody has counted.
"""

import functools
import itertools
import json
import os
import pathlib
import signal
import sys
import threading
import time

import keras
import numpy as np
import tensorflow as tf
import train_clocks

import tf_poseidon as poseidon
from tf_poseidon.job.host import accelerator_turns


def meet(folder, job, jobs, rank):
    """Waits until all jobs have come so far."""
    if rank == 0:
        (folder / f"ready{job}").touch()
    while not all((folder / f"ready{other}").exists() for other in range(jobs)):
        time.sleep(0.01)


def takers(name):
    """Returns what the table of this process's accelerator says of each process there."""
    return [taker for table in accelerator_turns.tables() if table["name"] == name for taker in table["takers"]]


def end_in_a_turn(name, number):
    """Sends this process a signal while it has a turn, and another job trains."""
    while True:
        of_all = takers(name)
        do_both_train = len({taker["job"] for taker in of_all if taker["number"]}) > 1
        # At its beginning, or it may be over when the signal comes.
        if do_both_train and any(taker["pid"] == os.getpid() and taker["state"] == "holding"
                                 and taker["seconds"] < 0.01 for taker in of_all):
            print(f"the process is {os.getpid()}", flush=True)
            os.kill(os.getpid(), number)
            return
        time.sleep(0.001)


def fail(strategy, kind, name, begin):
    """Trains until rank 1 has a turn that it does not give back, while another job trains."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(1024), keras.layers.Dense(1024),
                                  keras.layers.Dense(64)])  # a turn takes a while
        model.compile("sgd", "mse")
    x = y = np.ones((2048, 64), np.float32)
    model.fit(x, y, batch_size=1024, verbose=0)
    assert strategy.stats()["turns"]["count"] == 2
    begin()
    if strategy.rank == 1:
        number = signal.SIGSTOP if kind == "hang" else signal.SIGKILL
        threading.Thread(target=end_in_a_turn, args=(name, number), daemon=True).start()
    model.fit(x, y, batch_size=1024, epochs=10000, verbose=0)


def train_until_data_end(strategy, name):
    """Trains on data of which nobody knows how many they are; noise, which needs none of them, waits for them, too."""
    with strategy.scope():
        model = keras.Sequential([
            keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(64, activation="relu"),
            keras.layers.Dropout(0.5), keras.layers.Dense(64)])
        model.compile("sgd", "mse")

    def batches():
        for _ in range(5):
            yield np.ones((512, 4), np.float32), np.ones((512, 64), np.float32)

    data = tf.data.Dataset.from_generator(batches, output_signature=(
        tf.TensorSpec((None, 4)), tf.TensorSpec((None, 64))))
    model.fit(data, epochs=2, verbose=0)
    assert strategy.stats()["turns"]["count"] == 10
    own, = (taker for taker in takers(name) if taker["pid"] == os.getpid())
    assert own["state"] == "idle", own  # nothing is left of the step that found no batch
    model.fit(data, epochs=1, verbose=0)
    assert strategy.stats()["turns"]["count"] == 15


def main(folder, job, jobs, name, *programs):
    folder, job, jobs = pathlib.Path(folder), int(job), int(jobs)
    strategy = poseidon.PoseidonStrategy(crossover=name or None, timeout_s=20, heartbeat_timeout_s=4)
    begin = functools.partial(meet, folder, job, jobs, strategy.rank)
    if programs[0] in ("hang", "die"):
        return fail(strategy, programs[0], name, begin)
    begin()
    if programs[0] == "ends":
        return train_until_data_end(strategy, name)
    if programs[0] == "unlike":
        programs = ["plain-adam"]
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": strategy.rank == 1})
    pause = 0.0 if jobs == 1 else 0.1 if len(programs) > 1 else 0.3  # so that one that fails finds it training
    report = {"begin": time.time()}
    for program in programs:
        before = strategy.stats()["turns"]
        weights, report[program] = train_clocks.train(
            strategy, *program.split("-"), folder, itertools.repeat(pause))
        np.savez(folder / f"{program}.{job}.{strategy.rank}.npz", *weights)
        after = strategy.stats()["turns"]
        report[program]["turns"] = {key: after[key] - before[key] for key in after}
    report["end"] = time.time()
    (folder / f"{job}.{strategy.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
