"""Records the timeline of a job, for `strategy.timeline`.

Tests: tests/training/test_timeline.py.
"""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import gzip
import json
import os
import pathlib
import socket
from typing import Any
import zlib

import numpy as np

from tf_poseidon import planning
from tf_poseidon.base import files
from tf_poseidon.errors import ConfigurationError
from tf_poseidon.job.communicator import Communicator
from tf_poseidon.reports import page
from tf_poseidon.timelines import clocks
from tf_poseidon.timelines import step_table as table_lib
from tf_poseidon.timelines import timeline_page
from tf_poseidon.timelines import trace
from tf_poseidon.timelines import xplane
from tf_poseidon.timelines.recorded_steps import places_of
from tf_poseidon.timelines.recorded_steps import Rank

# Exchanges of the recording itself, which are not part of training.
_CLOCKS, _LENGTHS, _EVENTS = (f"strategy.timeline/{what}" for what in ("clocks", "lengths", "events"))
SITES = frozenset({_CLOCKS, _LENGTHS, _EVENTS})

_CAPACITY = 1 << 18  # events that a rank keeps, of 56 bytes
_TRIES = 30


class Timeline:
    """The result of `strategy.timeline`: the recorded steps, once its context is left.

    `print(timeline)` shows where the time of this rank's steps went.

    Attributes:
        path: The file of the trace, which rank 0 writes.
        ranks: The recorded `Rank`s; empty until the context is left.
    """

    def __init__(self, path: pathlib.Path, rank: int) -> None:
        self.path = path
        self.ranks: list[Rank] = []
        self._rank = rank
        self._plan: planning.Plan | None = None

    def table(self, rank: int | None = None, plan: planning.Plan | None = None) -> str:
        """Returns the table of a rank as text.

        Args:
            rank: The rank; None for this one.
            plan: The `Plan` that its steps have followed; None for `strategy.plan`.
        """
        if not self.ranks:
            return "The timeline is not complete yet: leave strategy.timeline first."
        return table_lib.table(self.ranks, self._rank if rank is None else rank, plan or self._plan)

    def __str__(self) -> str:
        return self.table()

    def finish(self, ranks: list[Rank], plan: planning.Plan | None) -> None:
        """Takes the recorded steps, and writes the trace on rank 0."""
        self.ranks, self._plan = ranks, plan
        if self._rank == 0:
            self._write()

    def _write(self) -> None:
        if self.path.name.endswith(page.SUFFIX):
            data = timeline_page.html_report(self.ranks, self._rank, self._plan).encode()
        elif self.path.name.endswith(xplane.SUFFIX):
            data = xplane.xspace(trace.trace(self.ranks)).SerializeToString()
        else:
            data = json.dumps(trace.trace(self.ranks)).encode()
        try:
            files.write(self.path, gzip.compress(data) if self.path.suffix == ".gz" else data)
        except OSError as error:
            raise _cannot_write(self.path, error) from error


def _cannot_write(path: pathlib.Path, error: Exception) -> ConfigurationError:
    return ConfigurationError(f"strategy.timeline cannot write the trace {files.quoted(path)} ({files.reason(error)}); "
                              "give it the path of a file that rank 0 may write, on a disk with room.")


_recording: set[Communicator] = set()  # communicators that record


@contextlib.contextmanager
def record(communicator: Communicator, path: str | os.PathLike[str],
           plan: Callable[[], planning.Plan | None]) -> Iterator[Timeline]:
    """Records what all ranks do inside; see `PoseidonStrategy.timeline`.

    Args:
        communicator: This process's `Communicator`.
        path: Where rank 0 writes the trace.
        plan: A function that returns the `Plan` at the end.
    """
    if communicator in _recording:
        raise ConfigurationError(f"strategy.timeline('{path}') was entered inside another one; leave that one "
                                 "first.")
    path = pathlib.Path(path)
    if communicator.rank == 0:  # now, not after hours of training
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.check(path)
        except (OSError, ValueError) as error:
            raise _cannot_write(path, error) from error
        if path.name.endswith(page.SUFFIX):
            page.check(path)
    timeline = Timeline(path, communicator.rank)
    _recording.add(communicator)
    try:
        clocks_before = _try_clocks(communicator)
        communicator.record_events(_CAPACITY)
        yield timeline
        communicator.record_events(0)
        own_events = communicator.events()
        own_events.update(host=socket.gethostname(), before=clocks_before, after=_try_clocks(communicator))
        followed = plan()
        timeline.finish(clocks.aligned(_gather(communicator, own_events), places_of(followed)), followed)
    finally:
        communicator.record_events(0)
        _recording.discard(communicator)


def _try_clocks(communicator: Communicator) -> list[tuple[float, float]]:
    """Returns (begin, end) of several all-to-all exchanges, in seconds of this rank's clock."""
    def exchange() -> None:
        for _ in range(_TRIES):
            communicator.submit_factors(_CLOCKS, [np.zeros((1, 1), np.uint8)])()

    return [(1e-9 * begin, 1e-9 * end) for _, _, begin, end, *_ in communicator.events_of(_CLOCKS, exchange, _TRIES)]


def _gather(communicator: Communicator, value: Any) -> list[Any]:
    """Returns the values of all ranks in rank order; JSON must be able to express them."""
    data = zlib.compress(json.dumps(value).encode())
    lengths = communicator.gather(_LENGTHS, np.array([[len(data)]]))
    everything = communicator.gather(_EVENTS, np.frombuffer(data, np.uint8).reshape(-1, 1))
    ends = np.cumsum(lengths)
    return [json.loads(zlib.decompress(everything[end - length:end].tobytes()))
            for end, length in zip(ends, lengths[:, 0])]
