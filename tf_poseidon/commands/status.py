"""How a command ends: its exit status, and mistakes in command lines.

Tests: tests/saved/test_saved_commands.py.
"""

import enum
import signal


class Status(enum.IntEnum):
    """How the command ended."""

    DONE = 0
    DIFFERS = 1  # graphs, or what verify, doctor or selftest looks at from what it should be
    MISTAKE = 2  # in the command line; argparse has the same
    REFUSED = 3
    OWN_ERROR = 70  # EX_SOFTWARE of sysexits.h
    INTERRUPTED = 128 + signal.SIGINT


STATUSES = """exit status: 0 done; 1 graphs differ, or verify, doctor or selftest found an error; 2 a mistake in the
command line; 3 refused, with the reason; 70 an error of tf-poseidon itself; 130 interrupted; that of the job for run
and emulate"""


class Mistake(Exception):
    """A mistake in the command line that argparse cannot find."""


IS_STARTED = "PMI_SIZE"  # mpiexec gives it to each process
