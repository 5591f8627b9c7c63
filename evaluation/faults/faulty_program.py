"""Programs in which something goes wrong: faulty_program.py NAME [ARGUMENT...], on several ranks.

`fault_table.py` says how each of them must end. Just before something goes wrong, a program notes the time in the file
that the environment variable FAULT_TIME names, if there is one.
"""

from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import hashlib
import os
import pathlib
import resource
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_poseidon as poseidon
from tf_poseidon.job import runtime
from tf_poseidon.keras_hook.coordination import comparing
from tf_poseidon.one_process import partitioning

FAULT_TIME = "FAULT_TIME"


def note_fault() -> None:
    """Notes the time, once in a job."""
    if FAULT_TIME in os.environ:
        with contextlib.suppress(FileExistsError), open(os.environ[FAULT_TIME], "x") as file:
            file.write(repr(time.time()))


def train(strategy: poseidon.PoseidonStrategy, callbacks: Sequence[keras.callbacks.Callback] = (), epochs: int = 1000,
          features: int = 4, optimizer: str = "sgd") -> tuple[keras.Model, np.ndarray, np.ndarray]:
    """Trains a small model, forever unless something fails."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((features,)), keras.layers.Dense(3, name="first")])
        model.compile(optimizer, "mse")
    x, y = np.ones((64, features), "float32"), np.ones((64, 3), "float32")
    model.fit(x, y, epochs=epochs, verbose=0, callbacks=list(callbacks))
    return model, x, y


class AtBatch(keras.callbacks.Callback):
    """Calls a function at the end of one batch, on one rank."""

    def __init__(self, strategy: poseidon.PoseidonStrategy, rank: int, function: Callable[[], object],
                 batch: int = 5) -> None:
        super().__init__()
        self._left = batch if strategy.rank == rank else None
        self._function = function

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                note_fault()
                self._function()


def _raise(error: BaseException) -> None:
    raise error


def _signal_itself(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _process_of(rank: int) -> int:
    """Returns the process of another rank of this host."""
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getppid() and f"PMI_RANK={rank}\0".encode() in (path / "environ").read_bytes():
                return int(path.name)
    raise ProcessLookupError(f"There is no process of rank {rank}.")


# ---- a rank fails, leaves or waits -------------------------------------------------------------------


def raise_on_rank_1() -> None:
    strategy = poseidon.PoseidonStrategy()
    train(strategy, [AtBatch(strategy, 1, lambda: _raise(ValueError("boom on purpose")))])


def raise_a_text_on_rank_1(what: str) -> None:
    """An exception whose text is hard to pass on."""
    strategy = poseidon.PoseidonStrategy()
    text = {"no UTF-8": "cannot read " + os.fsdecode(b"photo\xe9.jpg"), "3 MB": f"begin {'x' * 3_000_000} end"}[what]
    train(strategy, [AtBatch(strategy, 1, lambda: _raise(ValueError(text)))])


def raise_and_go_on(where: str, ranks: str) -> None:
    """As tuners do, which take an exception for a trial that failed; all ranks have the same, or one has it alone."""
    strategy = poseidon.PoseidonStrategy(timeout_s=300)
    weight = tf.Variable(np.ones((3, 1)))

    @poseidon.distribute
    @tf.function
    def step(x):
        loss = tf.reduce_mean(tf.debugging.check_numerics(x, "boom on purpose") @ weight)
        weight.assign_sub(tf.ones_like(weight) * loss)
        return loss

    x = np.ones((16, 3))
    x[0 if ranks == "all" else 8:] = np.nan  # rows of rank 1
    for trial in range(2):
        try:
            if where == "a callback":
                train(strategy, [AtBatch(strategy, rank, lambda: _raise(ValueError("boom on purpose")))
                                 for rank in range(2) if ranks == "all" or rank == 1])
            else:
                note_fault()
                step(x)
        except Exception as error:
            print(f"rank {strategy.rank} caught {type(error).__name__} in trial {trial}", flush=True)
            if ranks == "one":
                time.sleep(100 if strategy.rank == 1 else 0)
                raise
    print("all ranks are done", flush=True)


def raise_in_data_on_rank_1(steps_per_execution: str = "1") -> None:
    _stop_data_on_rank_1(int(steps_per_execution), OSError("boom in the data"))


def end_data_on_rank_1(steps_per_execution: str) -> None:
    _stop_data_on_rank_1(int(steps_per_execution), None)


def end_data_of_loop_on_rank_1(method: str) -> None:
    _stop_data_on_rank_1(1, None, method)


def _stop_data_on_rank_1(steps_per_execution: int, error: Exception | None, method: str = "fit") -> None:
    strategy = poseidon.PoseidonStrategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse", steps_per_execution=steps_per_execution)

    def rows():
        for number in range(1000):
            if number == 200 and strategy.rank == 1:
                note_fault()
                if error is None:
                    return
                raise error
            yield np.ones(4), np.ones(3)

    shapes = tf.TensorSpec(4), tf.TensorSpec(3)
    dataset = tf.data.Dataset.from_generator(rows, output_signature=shapes).batch(16)
    options = {} if method == "fit" else {"steps": 20}
    getattr(model, method)(dataset, verbose=0, **options)


def raise_while_tracing_on_rank_1() -> None:
    strategy = poseidon.PoseidonStrategy()

    class Fails(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            if is_training:
                note_fault()
                raise TypeError("boom in a layer")
            return x

    is_training = False
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), Fails()])
        model.compile("sgd", "mse")
    is_training = strategy.rank == 1
    model.fit(np.ones((64, 4)), np.ones((64, 3)), verbose=0)


def fail_in_graph_on_rank_1() -> None:
    """An op of the training step fails on one rank, while gradients of that step travel."""
    strategy = poseidon.PoseidonStrategy()

    class Fails(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            # Not a constant, by which the ranks' graphs would differ.
            is_fine = tf.py_function(lambda: strategy.rank == 0, [], tf.bool)
            with tf.control_dependencies([tf.debugging.Assert(is_fine, ["boom in the graph"])]):
                return tf.identity(x)

    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), Fails()])
        model.compile("sgd", "mse")
    note_fault()
    model.fit(np.ones((64, 4)), np.ones((64, 3)), verbose=0)


def run_out_of_memory_on_rank_1() -> None:
    strategy = poseidon.PoseidonStrategy()

    def allocate():
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (64 << 30, most))
        np.ones(1 << 40)

    train(strategy, [AtBatch(strategy, 1, allocate)])


def write_to_a_full_disk_on_rank_0() -> None:
    """A backup that does not fit: the limit of a file's size stands for a disk that is full."""
    strategy = poseidon.PoseidonStrategy()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    directory = os.environ[FAULT_TIME] + ".backup"
    train(strategy, [AtBatch(strategy, 0, fill), keras.callbacks.BackupAndRestore(directory)])


def exit_on_rank_1(status: str, policy: str) -> None:
    strategy = poseidon.PoseidonStrategy(policy)
    train(strategy, [AtBatch(strategy, 1, lambda: sys.exit(int(status)))])


def signal_dedicated_server(name: str) -> None:
    """Rank 2, on which nothing of the program runs."""
    strategy = poseidon.PoseidonStrategy(heartbeat_timeout_s=3, dedicated_servers=1, ranks_per_node=1)
    train(strategy, [AtBatch(strategy, 0, lambda: os.kill(_process_of(2), signal.Signals[name]))])


def fail_on_rank_1_with_a_dedicated_server(how: str) -> None:
    strategy = poseidon.PoseidonStrategy("ps", dedicated_servers=1, servers=(2,), ranks_per_node=1)
    train(strategy, [AtBatch(strategy, 1, {
        "raise": lambda: _raise(ValueError("boom on purpose")), "exit": lambda: sys.exit(0),
        "kill": _signal_itself(signal.SIGKILL)}[how])])


def fail_on_rank_1_while_others_read_its_shards(how: str) -> None:
    strategy = poseidon.PoseidonStrategy("ps", shard_update=True)
    model, _, _ = train(strategy, epochs=2, features=4000, optimizer="adam")
    while strategy.rank != 1:
        _ = [variable.numpy() for variable in model.optimizer.variables]
    time.sleep(0.5)
    note_fault()
    if how == "kill":
        _signal_itself(signal.SIGKILL)()
    raise ValueError("boom on purpose")


def fail_on_rank_1_while_others_run_ahead(how: str) -> None:
    """When it makes its 10th batch; rank 0 is ahead, with stale weights."""
    strategy = poseidon.PoseidonStrategy(synchrony=poseidon.SSP(3), timeout_s=3)
    fail = {"raise": lambda: _raise(ValueError("boom on purpose")), "kill": _signal_itself(signal.SIGKILL),
            "stall": lambda: time.sleep(100)}[how]

    def rows() -> Any:
        for number in range(40):
            if strategy.rank == 1:
                time.sleep(0.02)
                if number == 10:
                    note_fault()
                    fail()
            yield np.ones((8, 4), np.float32), np.ones((8, 1), np.float32)

    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(tf.data.Dataset.from_generator(rows, output_signature=(
        tf.TensorSpec((None, 4)), tf.TensorSpec((None, 1)))), epochs=2, verbose=0)


def differ_in_dedicated_servers(who: str) -> None:
    """One rank means another number, or other servers, than the others."""
    differs = os.environ["PMI_RANK"] == who
    note_fault()
    train(poseidon.PoseidonStrategy(timeout_s=30, dedicated_servers=0 if differs else 1))


def receive_signal_on_rank_1(name: str) -> None:
    strategy = poseidon.PoseidonStrategy()
    train(strategy, [AtBatch(strategy, 1, _signal_itself(signal.Signals[name]))])


def signal_launcher(name: str) -> None:
    """The launcher is the parent of the first process whose environment is not a rank's."""
    strategy = poseidon.PoseidonStrategy()

    def end():
        process = os.getpid()
        while True:
            with open(f"/proc/{process}/comm") as file:
                if file.read().startswith(("mpiexec", "horovodrun")):
                    return os.kill(process, signal.Signals[name])
            with open(f"/proc/{process}/stat") as file:
                process = int(file.read().rpartition(")")[2].split()[1])

    train(strategy, [AtBatch(strategy, 0, end)])


def leave_without_a_word_on_rank_1(status: str) -> None:
    """Python's exit handlers do not run."""
    strategy = poseidon.PoseidonStrategy(timeout_s=30)
    train(strategy, [AtBatch(strategy, 1, lambda: os._exit(int(status)))])


def stall_on_rank_1(policy: str) -> None:
    strategy = poseidon.PoseidonStrategy(policy, timeout_s=2)
    model, x, y = train(strategy, epochs=1)
    model.train_on_batch(x, y)
    if strategy.rank == 1:
        note_fault()
        time.sleep(100)
    model.train_on_batch(x, y)


def stall_in_callback_on_rank_1() -> None:
    strategy = poseidon.PoseidonStrategy(timeout_s=2)
    train(strategy, [AtBatch(strategy, 1, lambda: time.sleep(100))])


def lose_a_worker_on_rank_1() -> None:
    """A process that prepares batches dies, and Keras waits for its batch."""
    strategy = poseidon.PoseidonStrategy(timeout_s=5)

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 50

        def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
            if number == 20 and strategy.rank == 1:
                note_fault()
                os.kill(os.getpid(), signal.SIGKILL)
            return np.ones((16, 4)), np.ones((16, 3))

    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    model.fit(Batches(workers=2, use_multiprocessing=True), shuffle=False, verbose=0)


def die_with_a_child_on_rank_1() -> None:
    """The child goes on, and has the files of its rank, so the launcher notices nothing by these."""

    def die() -> None:
        if os.fork() == 0:
            time.sleep(100)
        os.kill(os.getpid(), signal.SIGKILL)

    strategy = poseidon.PoseidonStrategy()
    train(strategy, [AtBatch(strategy, 1, die)])


def stop_on_rank_1() -> None:
    """Freezes a rank, as when its host is frozen; before, it computes for longer than a rank may be silent."""
    strategy = poseidon.PoseidonStrategy(heartbeat_timeout_s=3)
    train(strategy, [AtBatch(strategy, 1, lambda: time.sleep(6), batch=3),
                     AtBatch(strategy, 1, _signal_itself(signal.SIGSTOP))])


def never_come() -> None:
    note_fault()
    if int(os.environ.get("PMI_RANK") or os.environ["HOROVOD_RANK"]) == 1:
        time.sleep(100)
    poseidon.PoseidonStrategy(startup_timeout_s=3)


def come_late() -> None:
    if int(os.environ.get("PMI_RANK") or os.environ["HOROVOD_RANK"]) == 1:
        note_fault()
        time.sleep(8)
    strategy = poseidon.PoseidonStrategy(startup_timeout_s=60)
    train(strategy, epochs=1)
    print("all ranks are done", flush=True)


def fork_on_rank_1() -> None:
    """Children of a rank end in all ways, and cannot exchange; the rank goes on."""
    strategy = poseidon.PoseidonStrategy(timeout_s=30)
    model, x, y = train(strategy, epochs=1)

    def forked(end: Callable[[], None]) -> int:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            end()
            sys.exit(7)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def exchange() -> None:
        try:
            runtime.communicator().sum("x", np.float32(1))
        except poseidon.PoseidonError as error:
            print(f"child: {error}", flush=True)

    if strategy.rank == 1:
        note_fault()
        statuses = [forked(end) for end in (lambda: None, exchange, lambda: os._exit(0),
                                            lambda: _raise(ValueError("boom in the child")))]
        print(f"children ended with {statuses}", flush=True)
    model.fit(x, y, verbose=0)


def start_a_subprocess() -> None:
    """A process that a rank starts is refused, or runs alone where the variables are removed."""
    strategy = poseidon.PoseidonStrategy(timeout_s=60)
    if strategy.rank == 0:
        note_fault()
        program = "import tf_poseidon; print(tf_poseidon.PoseidonStrategy().num_replicas_in_sync, 'process')"
        for environment in (os.environ, {k: v for k, v in os.environ.items() if not k.startswith("PMI_")}):
            child = subprocess.run([sys.executable, "-c", program], env=environment, text=True, capture_output=True)
            print(f"status {child.returncode}:", (child.stdout or child.stderr).strip().splitlines()[-1], flush=True)


def take_steps(count: str, directory: str) -> None:
    """Trains for some seconds while something outside of the program breaks; rank 0 tells its steps.

    It resumes from its backups in a directory, and writes the weights there.
    """
    strategy = poseidon.PoseidonStrategy("sfb")  # "auto" measures, and could plan otherwise: other bits

    class Tell(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if strategy.rank == 0:
                print("step", batch, flush=True)
            time.sleep(0.1)

    keras.utils.set_random_seed(1)
    keras.config.set_floatx("float64")
    with strategy.scope():
        model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(256, "tanh"), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    rng = np.random.default_rng(1)
    rows = 30 * int(count)
    model.fit(rng.normal(size=(rows, 256)), rng.normal(size=(rows, 2)), batch_size=30, verbose=0, callbacks=[
        Tell(), keras.callbacks.BackupAndRestore(os.path.join(directory, "backup"), save_freq=7)])
    if strategy.rank == 0:
        np.savez(os.path.join(directory, "weights.npz"), *model.get_weights())
    digest = hashlib.sha256(b"".join(value.tobytes() for value in model.get_weights())).hexdigest()
    sys.stdout.write(f"weights {digest}\n")
    if strategy.rank == 0:
        waited_for = strategy.stats()["waited_for"]
        sys.stdout.write(f"rank 0 has waited most for rank {max(waited_for, key=waited_for.get)}\n")


def diverge_to_nan() -> None:
    """All ranks stop together, by Keras' own callback."""
    strategy = poseidon.PoseidonStrategy(timeout_s=30)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse")
    x, y = np.ones((64, 4)), np.ones((64, 3))
    x[40] = np.nan  # a row of rank 1
    note_fault()
    history = model.fit(x, y, shuffle=False, epochs=5, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN()])
    print(f"stopped after {len(history.epoch)} epoch", flush=True)


# ---- ranks differ ------------------------------------------------------------------------------------


def differ_on_rank_1(what: str) -> None:
    """Ranks whose models, or calls, differ in one thing."""
    strategy = poseidon.PoseidonStrategy(timeout_s=60)
    differs = strategy.rank == 1

    def given(name: str, here: Any, there: Any) -> Any:
        return there if differs and name == what else here

    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([
            keras.Input((4,)), keras.layers.Dense(3, given("activation", "relu", "tanh")),
            keras.layers.Dropout(given("rate", 0.1, 0.2)), keras.layers.Dense(3)])
        model.compile(
            keras.optimizers.SGD(0.1, clipnorm=given("clipnorm", None, 1.0),
                                 gradient_accumulation_steps=given("accumulation", None, 2)),
            given("loss", "mse", "mae"), metrics=given("metrics", ["mae"], ["mse"]))
    model.layers[0].trainable = given("trainable", True, False)
    x, y = np.ones((64, 4)), np.ones((64, 3))
    note_fault()
    if what == "call" and differs:
        model.evaluate(x, y, verbose=0)
    if what == "one batch":
        getattr(model, "test_on_batch" if differs else "train_on_batch")(x, y)
    model.fit(x, y, batch_size=given("batch", 16, 32), verbose=0, epochs=given("epochs", 2, 3),
              steps_per_epoch=given("steps", 4, 2), validation_data=given("validation", None, (x, y)))


def change_on_rank_1(what: str, every: str) -> None:
    """A callback decides in the second epoch by a value that only one rank has."""
    strategy = poseidon.PoseidonStrategy(timeout_s=30)
    comparing.EVERY = int(every)

    class Decide(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1 and strategy.rank == 1:
                note_fault()
                if what == "rate":
                    self.model.optimizer.learning_rate = 0.5
                else:
                    if what == "kernels":
                        tf.config.experimental.enable_op_determinism()
                    self.model.set_weights([value + 1 for value in self.model.get_weights()])

    train(strategy, [Decide()])


def build_other_variables() -> None:
    strategy = poseidon.PoseidonStrategy(timeout_s=30)
    note_fault()
    train(strategy, features=4 + strategy.rank, epochs=1)


def build_other_variables_and_go_on() -> None:
    """As tuners do, which take an exception for a trial that failed."""
    strategy = poseidon.PoseidonStrategy(timeout_s=300)
    note_fault()
    try:
        train(strategy, features=4 + strategy.rank, epochs=1)
    except poseidon.PoseidonError:
        if strategy.rank == 1:
            time.sleep(5)
        raise


def trace_other_graphs(what: str) -> None:
    """A function whose graph, or what it has captured, depends on the rank; "whole": and that cannot be partitioned."""
    strategy = poseidon.PoseidonStrategy(timeout_s=60)
    other = strategy.rank == 1
    weight = tf.Variable(np.ones((3, 1)))
    table = tf.constant(np.full((200, 1), 2. if other and what == "captured" else 1.))
    if other and what == "numbers":  # which TensorFlow gives to functions, process-wide
        for _ in range(3):
            tf.function(lambda x: tf.py_function(lambda: 1., [], tf.float64) * x).get_concrete_function(1.)

    def step(x):
        with tf.GradientTape() as tape:
            y = (tf.cos if other and what == "op" else tf.sin)(x @ weight)
            if what in ("numbers", "whole"):
                y *= tf.py_function(lambda: 1., [], tf.float64)
            loss = tf.reduce_mean(y) * tf.reduce_mean(table)
        weight.assign_sub((.2 if other and what in ("constant", "whole") else .1) * tape.gradient(loss, weight))
        return loss

    def fail(*_: Any) -> None:
        raise RuntimeError(f"no pass at {id(fail):x}")  # another text on each rank

    if what in ("numbers", "whole"):
        partitioning.partition = fail
    note_fault()
    poseidon.distribute(tf.function(step))(np.ones((8, 3)))
    print("all ranks are done", flush=True)


def differ_in_kernels_on_rank_1(what: str) -> None:
    note_fault()
    if int(os.environ["PMI_RANK"]) == 1:
        if what == "deterministic":
            tf.config.experimental.enable_op_determinism()
        elif what == "threads":
            tf.config.threading.set_intra_op_parallelism_threads(3)
        elif what == "processors":
            os.sched_getaffinity = lambda _: set(range(5))
        else:
            os.environ[what] = "0"
    strategy = poseidon.PoseidonStrategy(timeout_s=60)
    train(strategy, epochs=1)
    print("all ranks are done", flush=True)


def read_other_data(how: str) -> None:
    """Trains with data that differ on rank 1."""
    strategy = poseidon.PoseidonStrategy(timeout_s=30)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    other = strategy.rank == 1
    x, y = np.ones((64, 4)), np.zeros((64, 1))
    note_fault()
    {"fit": lambda: model.fit(x + other, y, verbose=0),
     "fit with another batch size": lambda: model.fit(
         tf.data.Dataset.from_tensor_slices((x, y)).batch(16 << other), verbose=0),
     "train_on_batch": lambda: model.train_on_batch(x + other, y),
     "third call": lambda: [model.train_on_batch(x + (other and call >= 2), y) for call in range(4)],
     "rows": lambda: model.test_on_batch(x[other:], y[other:]),
     "shape": lambda: model.predict_on_batch(x if not other else np.ones((64, 5))),
     "parts": lambda: model.test_on_batch(x, y, sample_weight=np.ones(64) if other else None)}[how]()


def fit_in_two_threads() -> None:
    strategy = poseidon.PoseidonStrategy(timeout_s=30)
    x = np.ones((64, 4))
    with strategy.scope():
        models = [keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)], name=name) for name in ("one", "two")]
        for model in models:
            model.compile("sgd", "mse")
    threads = [threading.Thread(target=model.fit, args=(x, x), kwargs={"epochs": 500, "verbose": 0})
               for model in models]
    note_fault()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# ---- the start ---------------------------------------------------------------------------------------


def meet_other_mpi() -> None:
    note_fault()
    poseidon.PoseidonStrategy(startup_timeout_s=20)


def miss_mpi() -> None:
    """With a transport whose MPI library does not exist."""
    from tf_poseidon.job.host import mpi_library
    name = f"{os.environ[FAULT_TIME]}.{os.getpid()}.so"
    with open(name, "wb") as file:
        file.write(mpi_library.TRANSPORT.read_bytes().replace(b"libmpi.so.12", b"libmpX.so.12"))
    mpi_library.TRANSPORT = type(mpi_library.TRANSPORT)(name)
    note_fault()
    poseidon.PoseidonStrategy()


def have_no_shared_memory() -> None:
    from tf_poseidon.job.engines import mpi
    mpi.os.statvfs = lambda _: os.statvfs_result((4096, 4096, 16384, 700, 700, *[0] * 5))
    note_fault()
    poseidon.PoseidonStrategy()


def ask_for(option: str) -> None:
    """A job that cannot be: an option such as servers=[5]."""
    note_fault()
    poseidon.PoseidonStrategy(**eval(f"dict({option})"))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
