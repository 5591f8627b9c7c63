"""Jobs that share the accelerators of their hosts take turns there, one step at a time: `crossover="name"`.

What processes of an accelerator know of each other is a table in shared memory, `kernels/communicator/turn_table.h`;
nothing else runs beside them. docs/synchrony.md describes the turns.

Tests: tests/training/test_crossover.py, tests/unit/test_doctor.py.
"""

from collections.abc import Iterator
import hashlib
import os
import pathlib
import secrets
import sys
from typing import Any

import numpy as np

from tf_poseidon.errors import ConfigurationError
from tf_poseidon.job import communicator as communicator_lib
from tf_poseidon.job.host import gpus

# What is exchanged here.
SITES = frozenset({"turns/ready", "turns/grant", "turns/job", "turns/accelerators", "turns/refused",
                   "turns/refused/length", "turns/refused/text"})
NAME_VARIABLE = "TF_POSEIDON_ACCELERATOR"
_FOLDER = pathlib.Path("/dev/shm")
_PREFIX = "tf_poseidon-turns-"
_DEADLINES_IN_TIMEOUT = 10  # a job that is not waited for is no reason to end this one
_BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")
_NAME_BYTES, _LONGEST_PROGRAM = 256, 100
_taken: str | None = None  # the name of this process's turns


def take(communicator: communicator_lib.Communicator, name: str, timeout_s: float) -> None:
    """Has this process take turns with other jobs on its accelerator; called by all ranks.

    Args:
        communicator: This rank's communicator.
        name: The name that these jobs have in common.
        timeout_s: Same as in `PoseidonStrategy`. A process that does not give back its turn for a tenth of that is not
            waited for.

    Raises:
        ConfigurationError: If a rank cannot.
    """
    global _taken
    if _taken is not None and _taken != name:
        raise ConfigurationError(f"crossover='{name}', but this process takes turns by the name '{_taken}' already; "
                                 "give every PoseidonStrategy of a process the same one.")
    if _taken is not None:
        return
    own = _accelerator()
    padded = np.frombuffer(own.encode()[:_NAME_BYTES].ljust(_NAME_BYTES), np.uint8)
    names = [bytes(row).decode(errors="replace").rstrip() for row in
             communicator.gather("turns/accelerators", padded.reshape(1, -1))]
    job = int(communicator.broadcast("turns/job", np.int64(secrets.randbits(62) | 1)))
    refusal = gpus.refusal_to_share(name) or communicator.take_turns(
        str(_path(name, own)), name, own, job, _digest(sorted(names)),
        os.path.basename(sys.argv[0])[-_LONGEST_PROGRAM:] or "python",
        names.index(min(names)), timeout_s / _DEADLINES_IN_TIMEOUT)
    refused = communicator.gather("turns/refused", np.array([[bool(refusal)]], np.int32))[:, 0]
    if refused.any():
        communicator.leave_turns()
        raise ConfigurationError(communicator.broadcast_text("turns/refused", refusal, int(np.argmax(refused))))
    _taken = name


def tables() -> Iterator[dict[str, Any]]:
    """Yields what the tables of this user on this host say of processes that take turns, those of each accelerator.

    Yields:
        {"name", "accelerator", "takers": [{"job", "pid", "rank", "program", "state": "idle", "waiting" or "holding",
        "number", "seconds": for how long}]}, if there are any takers.
    """
    for path in sorted(_FOLDER.glob(f"{_PREFIX}{os.getuid()}-*")):
        table = communicator_lib.turn_table(str(path))
        if table is not None and table["takers"]:
            yield table


def _accelerator() -> str:
    """Returns the name of the accelerator of this process, by which other processes know it."""
    if (gpu := gpus.name()) is not None:
        return gpu  # the same in all containers
    # Not the name of the host: containers on it have their own.
    return f"{_BOOT.read_text().strip()}/{os.environ.get(NAME_VARIABLE, 'processors')}"


def _path(name: str, accelerator: str) -> pathlib.Path:
    return _FOLDER / f"{_PREFIX}{os.getuid()}-{_digest([name, accelerator]):016x}"


def _digest(texts: list[str]) -> int:
    return int.from_bytes(hashlib.sha256("\0".join(texts).encode()).digest()[:8], "little")
