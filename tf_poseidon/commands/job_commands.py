"""The commands about jobs and machines: run, doctor, selftest.

Tests: tests/unit/test_launching.py, tests/unit/test_doctor.py.
"""

import argparse
import os
import sys

from tf_poseidon.commands import command_files
from tf_poseidon.commands import status
from tf_poseidon.commands.status import Mistake
from tf_poseidon.commands.status import Status
from tf_poseidon.job import engines
from tf_poseidon.job.host import launching


def run(given: argparse.Namespace) -> int:
    """Starts a job with mpiexec, and starts it again when it fails."""
    program = given.program[given.program[:1] == ["--"]:]
    if not program:
        raise Mistake("there is no program; give run a command: tf-poseidon run -n 4 -- python train.py.")
    return launching.run(program, given.n, given.hosts, given.restarts, given.mpiexec,
                         lambda text: print(f"tf-poseidon run: {text}", file=sys.stderr, flush=True))


def doctor(given: argparse.Namespace) -> Status:
    """Prints what is installed, and what would keep a job from running here and on other hosts, with remedies."""
    from tf_poseidon.commands import progress
    with progress.shown() as show:
        show("looking")
        from tf_poseidon.commands import doctor as doctor_lib
        report = doctor_lib.examine(given.hosts, given.mpiexec)
    with command_files.printing(report):
        pass
    return Status.DIFFERS if report.has_problems else Status.DONE


def selftest(given: argparse.Namespace) -> int:
    """Compares every scheme with one process, and measures links: on the ranks that mpiexec has started, or its own."""
    launched, ranks = engines.launch(given.engine).size > 1, given.n or max(2, len(given.hosts))
    is_started = launched or status.IS_STARTED in os.environ
    if is_started and (given.n or given.hosts):
        raise Mistake("-n and --hosts are for a selftest that starts its ranks itself; omit them, or mpiexec.")
    if not is_started and (ranks > 1 or given.hosts):
        engine = ["--engine", given.engine] if given.engine else []
        again = [sys.executable, "-m", "tf_poseidon", "selftest", *engine]
        return launching.run(again, ranks, given.hosts, 0, given.mpiexec,
                             lambda text: None)  # its ranks have said everything
    import tensorflow as tf

    from tf_poseidon.job import runtime
    tf.get_logger().setLevel("ERROR")
    from tf_poseidon.commands.selftest import run_selftest
    report = run_selftest.run(given.engine)
    communicator = runtime.communicator()
    if communicator is None or communicator.rank == 0:
        with command_files.printing(report):
            pass
    return Status.DIFFERS if report.problems else Status.DONE
