"""`poseidon.run`: results, exceptions, ends and interrupts of jobs that programs start; most import no TensorFlow."""

import _thread
import atexit
import contextlib
import itertools
import linecache
import os
import pathlib
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback

import numpy as np
import pytest

import tf_poseidon as poseidon
from tf_poseidon.job.function_jobs import rank_listener
from tf_poseidon.job.function_jobs import rank_messages
from tf_poseidon.job.host import launching

OFFSET = np.arange(3)


class OwnError(Exception):
    """An exception that needs two arguments."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def own_rank():
    return int(os.environ["PMI_RANK"])


def on_rank(rank, action):
    """Returns a function that does something on one rank, while the others sleep."""

    def act():
        import os
        import time
        if int(os.environ["PMI_RANK"]) == rank:
            return action()
        time.sleep(60)

    return act


def raises(kind, *arguments):
    def act():
        raise kind(*arguments)

    return act


def kills_itself():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("function, options, expected", [
    (lambda a, *, b: ((OFFSET + a + b).tolist(), own_rank(), os.environ["OWN"]),
     {"args": (1,), "kwargs": {"b": 2}, "environment": {"OWN": "ä"}}, ([3, 4, 5], 0, "ä")),
    (lambda: sys.exit() if own_rank() == 1 else bytes(10_000_000) + bytes([own_rank()]),
     {"all_results": True, "ranks": 3}, [bytes(10_000_001), None, bytes(10_000_000) + b"\2"])], ids=["one", "all"])
def test_results(function, options, expected):
    assert poseidon.run(function, **options) == expected


@pytest.mark.parametrize("function, kind, message", [
    (on_rank(1, raises(ValueError, "wrong")), ValueError, "^wrong$"),
    (on_rank(0, raises(OwnError, 1, 2)), poseidon.JobError, r"^Rank 0 on \S+ failed: .*OwnError: 1 and 2"),
    (on_rank(1, lambda: sys.exit(3)), poseidon.JobError, r"^Rank 1 on \S+ failed: SystemExit: 3"),
    (on_rank(1, kills_itself), poseidon.JobError, r"^Rank 1 on \S+ was ended by signal 9 \(SIGKILL\)"),
    (on_rank(1, lambda: os._exit(5)), poseidon.JobError, r"^Rank 1 on \S+ has ended before the function .* status"),
    (threading.Lock, poseidon.ConfigurationError, "^The result of rank 0, <unlocked .* cannot be sent"),
    (lambda: poseidon.run(own_rank), poseidon.ConfigurationError, r"was called in a rank of a job \(PMI_SIZE=2\)")],
    ids=["ValueError", "OwnError", "exit", "killed", "os._exit", "result", "nested"])
def test_what_has_failed_first_is_raised(function, kind, message, monkeypatch, capfd):
    # That os._exit ends nobody else: here the job ends a moment after it.
    from tf_poseidon.job.function_jobs import function_job
    monkeypatch.setattr(function_job, "_END_S", 1.0)
    begin = time.monotonic()
    with pytest.raises(kind, match=message) as raised:
        poseidon.run(function)
    assert time.monotonic() - begin < 20
    text = "".join(traceback.format_exception(raised.value))
    assert "signal" in message or "has ended" in message or "Traceback (most recent call last)" in text.partition(
        "direct cause")[0]
    assert "Traceback" not in capfd.readouterr().err  # it is raised, and not printed besides


def test_traceback_has_the_source_of_cells():
    """Of functions that the one that is called names, too; but not of two with the same name and line."""
    cells = {"__name__": "__main__"}
    for file, source in {"<cell 1>": "def fails():\n    raise ValueError('wrong')  # of a cell\n",
                         "<cell 2>": "def twice(): fails()\nfirst = twice\n", "<cell 3>": "def twice(): first()\n",
                         "<cell 4>": "def train():\n    [twice() for _ in range(2)]\n"}.items():
        linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
        exec(compile(source, file, "exec"), cells)
    with pytest.raises(ValueError) as raised:
        poseidon.run(cells["train"], ranks=1)
    trace = str(raised.value.__cause__)
    assert 'File "<cell 1>", line 2, in fails\n    raise ValueError(\'wrong\')  # of a cell\n' in trace
    assert 'File "<cell 4>", line 2, in train\n    [twice() for _ in range(2)]\n' in trace
    assert trace.count('File "<dynamic-code>", line 1, in twice\n') == 2


def greeted(listener, rank):
    """Returns the connection of a rank that has come, as rank."""
    (address,), key = rank_messages.take_environment(dict(listener.environment))
    connection = rank_messages.authenticated(socket.create_connection(address), key, is_caller=False)
    connection.send(rank_messages.RankGreeting(rank, "host"))
    assert connection.recv_bytes() == b"call"
    return connection


def failure(text, is_echo=False):
    return rank_messages.RankFailure(None, text, "", is_echo, True)


@pytest.mark.parametrize("words, first", [
    ([(1, None), (0, failure("ValueError: wrong"))], 0),
    ([(1, None), (0, failure("ConnectionError: the network to rank 1 failed"))], 1),
    ([(1, None), (0, failure("Rank 1 has left", is_echo=True))], 1),
    ([(0, failure("ValueError: not for rank 1")), (1, None)], 0),
    ([(1, None), (0, failure("ValueError: Shape must be at least rank 2 but is rank 1"))], 0),
    ([(0, failure("Rank 0 has heard nothing of rank 2", is_echo=True)), (1, None)], 2),
    ([(0, failure("TimeoutError: rank 2 is late")), (1, failure("JobEndedError", is_echo=True))], 2),
    ([(0, None), (1, None)], 2), ([(0, None), (1, None), (2, rank_messages.RankResult(b""))], 0),
    ([(rank, rank_messages.RankResult(b"")) for rank in range(3)], None)],
    ids=["own error", "names one that left", "echo", "left for it", "of a tensor", "silent", "names a silent one",
         "silent of three", "left in order", "none"])
def test_what_others_say_of_a_rank_that_has_left_is_no_cause(words, first, monkeypatch):
    """Ranks leave (None) or say something, in an order; those that do neither are on a host that is cut off."""
    monkeypatch.setattr(rank_listener, "_SETTLE_S", 0.2)
    with contextlib.closing(rank_listener.RankListener(b"call", [])) as listener:
        ranks = 3 if first in (2, None) or len(words) == 3 else 2
        connections = [greeted(listener, rank) for rank in range(ranks)]
        for number, (rank, word) in enumerate(words):
            if word is not None:
                connections[rank].send(word)
            connections[rank].close()
            while len([*listener.results, *listener.failures, *listener.lost]) <= number:
                time.sleep(0.002)
        listener.settle()
        cause = listener.first_cause()
    assert (cause and cause.greeting.rank) == first


def test_ranks_that_come_while_there_is_no_descriptor_are_heard_later():
    with contextlib.closing(rank_listener.RankListener(b"call", [])) as listener:
        (address,), key = rank_messages.take_environment(dict(listener.environment))
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket() as own_end:
            resource.setrlimit(resource.RLIMIT_NOFILE, (own_end.fileno() + 1, limits[1]))
            try:
                own_end.connect(address)
                with pytest.raises(OSError, match="Too many open files"):
                    os.dup(0)
                time.sleep(0.1)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            rank_messages.authenticated(own_end, key, is_caller=False).close()


LOCK = threading.Lock()


@pytest.mark.parametrize("function, options, message", [
    (3, {}, "was given 3, expected a function"), (own_rank, {"ranks": 0}, "ranks=0, expected a whole number of at"),
    (own_rank, {"restarts": -1}, "restarts=-1, expected"), (own_rank, {"args": 3}, r"args=3, expected a tuple"),
    (own_rank, {"timeout_s": 0}, "timeout_s=0, expected seconds"), (own_rank, {"timeout_s": True}, "timeout_s=True"),
    (own_rank, {"timeout_s": "1"}, "timeout_s='1', expected"),
    (own_rank, {"hosts": "a"}, "hosts='a', expected a list"),
    (own_rank, {"hosts": ["a", "b"], "ranks": 1}, "1 ranks cannot run on 2 hosts"),
    (own_rank, {"mpiexec": "/no/mpiexec"}, "There is no launcher"),
    (own_rank, {"args": (1, LOCK)}, r"^Argument 1 of poseidon.run's function, <unlocked .* cannot be sent to ranks"),
    (own_rank, {"kwargs": {"x": LOCK}}, "^Argument 'x' of"),
    (lambda lock=LOCK: (lambda: lock), {}, "^The function <function .* of poseidon.run cannot be sent")])
def test_what_cannot_be_a_job_is_refused(function, options, message):
    with pytest.raises(poseidon.ConfigurationError, match=message):
        poseidon.run(function, **options)


def test_variables_that_cannot_be_sent_are_named():
    lock = threading.Lock()
    with pytest.raises(poseidon.ConfigurationError, match="^'lock', which poseidon.run's function uses"):
        poseidon.run(lambda: lock)


def test_a_rank_is_no_caller(monkeypatch):
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(poseidon.ConfigurationError, match="HOROVOD_SIZE=2"):
        poseidon.run(own_rank)


def test_output_appears_as_it_comes(capsys):
    """In the streams of the caller, also in a thread; progress bars rewrite their line."""

    def shows():
        import os
        import sys
        if os.environ["PMI_RANK"] == "0":
            print("1/2\b\b\b\r2/2 ━", flush=True)
            print("warning", file=sys.stderr)

    thread = threading.Thread(target=poseidon.run, args=(shows,))
    thread.start()
    thread.join(30)
    assert capsys.readouterr() == ("1/2\b\b\b\r2/2 ━\n", "warning\n")


def test_interrupt_ends_all_ranks(tmp_path):
    def waits(folder):
        import os
        import time
        open(os.path.join(folder, str(os.getpid())), "w").close()
        time.sleep(60)

    def interrupt():
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.02)
        _thread.interrupt_main()

    threading.Thread(target=interrupt, daemon=True).start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        poseidon.run(waits, (str(tmp_path),))
    assert time.monotonic() - begin < 10
    assert not any(os.path.exists(f"/proc/{path.name}") for path in tmp_path.iterdir())


def test_restarted_function_succeeds(capfd):
    def fails_once():
        import os
        if os.environ["TF_POSEIDON_RESTARTS"] == "0":
            raise OSError("once")
        return os.environ["TF_POSEIDON_RESTARTS"]

    assert poseidon.run(fails_once, restarts=2) == "1"
    assert "poseidon.run: the job ended with status 1; it starts again on 2 ranks (1 more" in capfd.readouterr().err


def returns_late(rank):
    """Returns a function that ranks from `rank` on do not return from."""
    return lambda: time.sleep(60) if own_rank() >= rank else None


@pytest.mark.parametrize("function, options, message", [
    (returns_late(1), {}, r"^Rank 1 had not returned when the timeout_s=3 of poseidon.run had passed, and the job"),
    (returns_late(0), {"restarts": 3}, "^Ranks 0, 1 had not returned when"),
    (lambda: atexit.register(time.sleep, 60) and None, {}, "^All ranks had returned from the function, but")],
    ids=["one", "all", "at their end"])
def test_late_ranks_are_ended_and_named(function, options, message, capfd):
    begin = time.monotonic()
    with pytest.raises(poseidon.JobError, match=message):
        poseidon.run(function, timeout_s=3, **options)
    assert 3 <= time.monotonic() - begin < 13
    assert "starts again" not in capfd.readouterr().err


def test_time_that_is_not_up_changes_nothing():
    assert poseidon.run(own_rank, timeout_s=60, all_results=True) == [0, 1]


@pytest.mark.parametrize("variables, expected", [
    ({}, [f"{socket.gethostname()}-{os.getpid()}-1", f"{socket.gethostname()}-{os.getpid()}-2"]),
    ({"SLURM_JOB_ID": "7"}, ["7-1", "7-2"]), ({"SLURM_JOB_ID": "7", "TF_POSEIDON_JOB": "own"}, ["own", "own"])],
    ids=["none", "batch", "own"])
def test_each_call_is_a_job(variables, expected, monkeypatch):
    from tf_poseidon.job.function_jobs import function_job
    monkeypatch.setattr(function_job, "_numbers", itertools.count(1))
    for name in ("TF_POSEIDON_JOB", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"):
        monkeypatch.delenv(name, raising=False)
    assert [poseidon.run(lambda: os.environ["TF_POSEIDON_JOB"], ranks=1, environment=variables)
            for _ in range(2)] == expected


def test_ranks_of_other_hosts_connect(tmp_path):
    launcher = tmp_path / "mpiexec"
    launcher.write_text(f'#!/bin/sh\nexec {launching.find()} -launcher fork "$@"\n')
    launcher.chmod(0o755)
    assert poseidon.run(lambda: 5, hosts=["127.0.0.2", "127.0.0.3"], mpiexec=str(launcher), all_results=True) == [5, 5]


def test_main_modules_need_no_guard(tmp_path):
    """Of programs that nobody imports; their modules are in a folder that only they know of; TensorFlow stays away."""
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "own_module.py").write_text("def add(a, b):\n    return a + b\n")
    program = tmp_path / "program.py"
    program.write_text("import sys\nsys.path.insert(0, sys.argv[1])\n"
                       "import own_module\nimport tf_poseidon as poseidon\n"
                       "def function():\n    return own_module.add(1, 2)\n"
                       "print(poseidon.run(function), 'tensorflow' in sys.modules)\n")
    root = str(pathlib.Path(poseidon.__file__).parents[1])
    done = subprocess.run([sys.executable, str(program), str(tmp_path / "more")], capture_output=True, text=True,
                          timeout=60, env={**os.environ, "PYTHONPATH": root})
    assert done.stdout == "3 False\n", done.stderr


def test_training():
    def trains():
        import keras

        import tf_poseidon as poseidon
        keras.utils.set_random_seed(1)
        with poseidon.PoseidonStrategy(policy="ps").scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
            model.compile("sgd", "mse")
        x = np.arange(32, dtype="float32").reshape(8, 4) / 32
        model.fit(x, x[:, :2], batch_size=8, verbose=0)
        return model.get_weights()

    one, two = poseidon.run(trains, all_results=True, environment={"TF_CPP_MIN_LOG_LEVEL": "2"})
    for weight, other in zip(one, two):
        np.testing.assert_array_equal(weight, other)
