"""What a process tells people about its job: text or, with TF_POSEIDON_LOGS=json, a line of JSON for each message.

A line says when, how bad it is, and of which job, rank, host and process, for programs that collect the logs of many.

Tests: tests/unit/test_log_lines.py, tests/faults/test_failures.py.
"""

from collections.abc import Mapping
import contextlib
import datetime
import json
import logging
import os
import socket
import sys

from tf_poseidon.errors import ConfigurationError
from tf_poseidon.errors import shown

VARIABLE = "TF_POSEIDON_LOGS"
# Variables that name a job: our launcher's, or the user's own, and those of batch systems.
JOB = "TF_POSEIDON_JOB"
_JOBS = (JOB, "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")

_log = logging.getLogger("tf_poseidon")


class _Lines(logging.Formatter):
    """Formats messages as lines of JSON.

    Attributes:
        rank: This process's rank, None before it has joined its job.
    """

    rank: int | None = None

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
        return json.dumps({
            "time": at.isoformat(timespec="milliseconds"), "level": record.levelname.lower(), "job": job(),
            "rank": self.rank, "host": socket.gethostname(), "pid": record.process, "message": record.getMessage()})


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]  # which Python 3.10 does not take
    """Writes lines to the standard error that the process has by then; other ranks must hear of an end without it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        pass


_lines = _Lines()


def begin() -> None:
    """Has messages written as TF_POSEIDON_LOGS says.

    Raises:
        ConfigurationError: If it says neither "json" nor "text".
    """
    how = os.environ.get(VARIABLE) or "text"
    if how not in ("json", "text"):
        raise ConfigurationError(f"The environment variable {VARIABLE} is {shown(how)}, expected json or text; change "
                                 "it, or unset it.")
    if how == "json" and not _is_json():
        handler = _Handler()
        handler.setFormatter(_lines)
        _log.addHandler(handler)
        _log.propagate = False
        if _log.level == logging.NOTSET:
            _log.setLevel(logging.INFO)


def is_rank(rank: int | None) -> None:
    """Notes this process's rank, for messages from here on."""
    _lines.rank = rank


def say(text: str, level: int = logging.INFO) -> None:
    """Writes a message to the standard error at once, if that is possible, as on a full disk it is not."""
    if _is_json():  # whatever the logger's level: text would be written, too
        _log.handle(_log.makeRecord(_log.name, level, "", 0, "%s", (text.rstrip("\n"),), None))
        return
    with contextlib.suppress(OSError, ValueError):
        print(text, end="" if text.endswith("\n") else "\n", file=sys.stderr, flush=True)


def job(environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns the name of the job of processes with an environment; None if that has none."""
    return next((environment[name] for name in _JOBS if environment.get(name)), None)


def _is_json() -> bool:
    return any(isinstance(handler, _Handler) for handler in _log.handlers)
