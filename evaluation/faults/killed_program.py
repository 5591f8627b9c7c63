"""A program that is killed: killed_program.py DIRECTORY SEED DEDICATED UPDATED KILL ...; each KILL is MOMENT:RANK.

DEDICATED ranks only serve; while they do, they reach one moment: SERVING. UPDATED says what each rank updates of
variables: "whole" or "shards".

It trains with backups, and resumes from them. In its n-th start, the rank of the n-th KILL kills itself at that moment,
after it has noted the time and the files that it shares with other processes; after the last one, the program ends, and
each rank writes its weights.
"""

from collections.abc import Callable
import json
import os
import pathlib
import re
import signal
import sys
import threading
import time
from typing import Any

MOMENTS = ("before the strategy", "after the strategy", "tracing", "first step", "a step", "before a backup",
           "while a backup is written", "after a backup", "validation", "end of an epoch", "end of training",
           "after training")
SERVING = "serving"  # the first backup is there
ROWS, BATCH, EPOCHS, SAVE_FREQ = 45, 8, 3, 2  # 6 steps in an epoch


def main(directory: str, seed: str, dedicated: str, updated: str, *kills: str) -> None:
    path = pathlib.Path(directory)
    rank = int(os.environ.get("PMI_RANK") or os.environ.get("HOROVOD_RANK", 0))
    start = int(os.environ["TF_POSEIDON_RESTARTS"])
    moment, _, victim = kills[start].rpartition(":") if start < len(kills) else ("", "", "-1")

    def reach(name: str) -> None:
        if name == moment and rank == int(victim):
            (path / f"killed.{start}").write_text(json.dumps({"time": time.time(), "shared": _shared_files()}))
            os.kill(os.getpid(), signal.SIGKILL)

    reach("before the strategy")
    if moment == SERVING:
        threading.Thread(target=lambda: _wait_for(path / "backup") or reach(SERVING), daemon=True).start()
    import keras
    import numpy as np

    import tf_poseidon as poseidon

    class Reaching(keras.layers.Layer):
        """Is called when a step is traced."""

        def call(self, x: Any) -> Any:
            if self.is_watching:
                reach("tracing")
            return x

        is_watching = False

    class Reach(keras.callbacks.Callback):
        """Reaches moments of training; the steps that this start has made are counted from 1."""

        steps = 0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.steps += 1

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.steps == 1:
                reach("first step")
            if self.steps == 3 + int(seed) % 3:
                reach("a step")
            if (batch + 1) % SAVE_FREQ == 0 and self.steps > 1:
                reach("before a backup")
            if batch and batch % SAVE_FREQ == 0:
                reach("after a backup")

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            reach("validation")

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            reach("end of an epoch")

        def on_train_end(self, logs: Any = None) -> None:
            reach("end of training")

    # Where sums are taken in another order from run to run, that is all that may differ: it is far from a lost row.
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(int(seed))
    has_shards = updated == "shards"  # of sums: what travels as factors is updated whole
    strategy = poseidon.PoseidonStrategy("ps" if has_shards else "auto", timeout_s=60, shard_update=has_shards,
                                         dedicated_servers=int(dedicated), ranks_per_node=1)
    reach("after the strategy")
    with strategy.scope():
        reaching = Reaching()
        model = keras.Sequential([
            keras.Input((6,)), keras.layers.Dense(16, "tanh"), keras.layers.Dropout(0.2), reaching,
            keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(2)])
        model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "mse", metrics=["mae"])
    rng = np.random.default_rng(int(seed))
    x, y = rng.normal(size=(ROWS, 6)), rng.normal(size=(ROWS, 2))
    reaching.is_watching = True
    os.fsync = _reaching(os.fsync, lambda: reach("while a backup is written"))
    model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, validation_data=(x[:9], y[:9]), callbacks=[
        Reach(), keras.callbacks.BackupAndRestore(path / "backup", save_freq=SAVE_FREQ),
        keras.callbacks.ModelCheckpoint(path / "model.keras")])
    reach("after training")
    np.savez(path / f"weights.{rank}.npz", *model.get_weights())


def _wait_for(path: pathlib.Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def _shared_files() -> list[str]:
    """Returns the files in /dev/shm that this process has mapped, those that are removed by now among them."""
    maps = pathlib.Path("/proc/self/maps").read_text()
    return sorted(set(re.findall(r"/dev/shm/\S+", maps)))


def _reaching(original: Callable[..., Any], reach: Callable[[], None]) -> Callable[..., Any]:
    def reaching(*args: Any) -> Any:
        reach()
        return original(*args)

    return reaching


if __name__ == "__main__":
    main(*sys.argv[1:])
