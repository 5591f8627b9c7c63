"""`Communication`: a callback that reports what steps of `fit` exchange and wait for, to logs, TensorBoard, Prometheus.

Tests: tests/training/test_slow_ranks.py.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import functools
import importlib.util
import logging
import os
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_poseidon.base import files
from tf_poseidon.errors import ConfigurationError
from tf_poseidon.job import log_lines
from tf_poseidon.job.host import launching
from tf_poseidon.reports import open_metrics
from tf_poseidon.stragglers import watch

_log = logging.getLogger("tf_poseidon")

PATH = "TF_POSEIDON_OPENMETRICS_PATH"  # the environment variable that names a file, for jobs whose programs name none
_SECONDS = 5.0  # from one refreshing of OpenMetrics to the next; Prometheus asks every 15 s or more


class Communication(keras.callbacks.Callback):
    """Reports what the steps of `fit` exchange and wait for, and which rank is the slowest.

    ```python
    model.fit(x, y, batch_size=256, callbacks=[
        poseidon.callbacks.Communication(log_dir="logs", openmetrics_path="/var/lib/node_exporter/poseidon.prom")])
    ```

    The logs of an epoch get these numbers of this rank, on rank 0 TensorBoard too: "step_ms", the time of a step;
    "exposed_ms", how long a step waits for other ranks, which nothing hides; "input_ms", how long for its batch;
    "sent_bytes", the bytes that it sends in a step; "slowest_rank", whose parts came latest to all, -1 if that is not
    known yet, which takes 7 steps; "speedup", how many times as fast as one process the steps were, if that has the
    work of all ranks. The first execution of `fit` is left out. All ranks may have this callback; it
    exchanges nothing.

    Args:
        log_dir: Directory for TensorBoard's scalars, written by rank 0. None writes none.
        openmetrics_path: File for OpenMetrics text, which is replaced every few seconds, by rank 0; by every rank, if
            it has "{rank}" in it, for its number. None writes none.
        openmetrics_port: Port on which rank 0 serves the same text, as long as `fit` runs. None serves nothing.
        openmetrics_address: Address of that port. Whoever can reach it can read it.

    Raises:
        PoseidonError: If TensorBoard, or prometheus_client for OpenMetrics, is not installed; in `fit`, if a file
            cannot be written or the port cannot be had.
    """

    def __init__(self, log_dir: str | os.PathLike[str] | None = None,
                 openmetrics_path: str | os.PathLike[str] | None = None, openmetrics_port: int | None = None,
                 openmetrics_address: str = "127.0.0.1") -> None:
        super().__init__()
        if log_dir is not None and importlib.util.find_spec("tensorboard") is None:
            raise ConfigurationError(f"log_dir={files.quoted(log_dir)} is written by TensorBoard, which is not "
                                     "installed; run pip install tensorboard.")
        self._log_dir, self._path = log_dir, None if openmetrics_path is None else os.fspath(openmetrics_path)
        self._port, self._address = openmetrics_port, openmetrics_address
        has_metrics = self._path is not None or openmetrics_port is not None
        self._metrics = open_metrics.OpenMetrics() if has_metrics else None
        self._writer: Any = None
        # Of the training steps of all calls of `fit`: their number, their time, and what `_measure` returns.
        self._sums, self._measured, self._is_in_steps = np.zeros(5), np.zeros(3), False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._is_first, self._refreshed = True, time.monotonic()
        if self._log_dir is not None and self._rank == 0 and self._writer is None:
            self._writer = tf.summary.create_file_writer(os.fspath(self._log_dir))
        if self._metrics is None:
            return
        try:
            self._refresh()
            if self._port is not None and self._rank == 0:
                self._metrics.serve(self._port, self._address)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(f"Communication(openmetrics_path={self._path!r}, openmetrics_port={self._port}) "
                                     f"cannot write there: {files.reason(error)}.") from error

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._is_in_steps, self._measured = True, self._measure()
        self._sums_before, self._late_before = self._sums.copy(), self._late()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._begin, self._from = time.perf_counter(), batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        if self._is_first:  # tracing takes longer than many steps
            self._is_first = False
            self._measured = self._measure()
            return
        self._sums[:2] += batch - self._from + 1, time.perf_counter() - self._begin
        if self._metrics is not None and time.monotonic() - self._refreshed > _SECONDS:
            self._add()
            self._try_to_refresh()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._end_steps()  # what validation exchanges belongs to no step

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._end_steps()
        if self._metrics is not None:
            self._try_to_refresh()
        late = {rank: seconds - self._late_before[rank] for rank, seconds in self._late().items()}
        numbers = per_step(self._sums - self._sums_before, late, self._ranks)
        if logs is not None:
            logs.update(numbers)
        if self._writer is not None:
            with self._writer.as_default(epoch):
                for name, number in numbers.items():
                    tf.summary.scalar(f"communication/{name}", number)
            self._writer.flush()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._metrics is not None:
            self._try_to_refresh()
            self._metrics.close()

    @property
    def has_metrics(self) -> bool:
        """Whether it writes, or serves, OpenMetrics."""
        return self._metrics is not None

    @property
    def _rank(self) -> int:
        return getattr(self.model.distribute_strategy, "rank", 0)

    @property
    def _ranks(self) -> int:
        return self.model.distribute_strategy.num_replicas_in_sync

    def _stats(self) -> dict[str, Any]:
        """Returns `strategy.stats()`; nothing where the model is not of a PoseidonStrategy."""
        stats = getattr(self.model.distribute_strategy, "stats", None)
        return stats() if stats else {}

    def _late(self) -> dict[int, float]:
        """Returns by rank how late its parts were to all ranks."""
        job = getattr(self.model.distribute_strategy.extended, "job", None)
        return {} if job is None else dict(watch.of(job).late_seconds)

    def _measure(self) -> np.ndarray:
        """Returns how long this rank has waited for others, how long for its batches, and the bytes it has sent."""
        stats, plan = self._stats(), getattr(self.model.distribute_strategy, "plan", None)
        # Of steps that overlap, the wait of the last one alone is measured; the others wait as long.
        times = 1 if plan is None else plan.steps
        sent = sum(site["sent_bytes"] for site in stats.get("sites", {}).values())
        return np.array([times * stats.get("waiting_seconds", 0.0), stats.get("input_seconds", 0.0),
                         sent + stats.get("header_bytes", 0)])

    def _add(self) -> None:
        """Adds what steps have measured since this was last called."""
        now = self._measure()
        self._sums[2:] += now - self._measured
        self._measured = now

    def _end_steps(self) -> None:
        if self._is_in_steps:
            self._is_in_steps = False
            self._add()

    def _refresh(self) -> None:
        """Renews what Prometheus reads; raises OSError if the file cannot be written."""
        assert self._metrics is not None
        self._refreshed = time.monotonic()
        steps, seconds, exposed, inputs, sent = self._sums.tolist()
        self._metrics.counts = open_metrics.RankCounts(
            self._rank, int(steps), seconds, exposed, inputs, int(sent), self._late(),
            self._stats().get("stragglers", []), speedup(self._ranks, seconds, exposed, inputs) if steps else None,
            int(os.environ.get(launching.RESTARTS, 0)), log_lines.job())
        if self._path is not None and (self._rank == 0 or "{rank}" in self._path):
            files.write(self._path.replace("{rank}", str(self._rank)), self._metrics.text())

    def _try_to_refresh(self) -> None:
        try:
            self._refresh()
        except OSError as error:
            _log.warning("%s cannot be written: %s; training goes on.", files.quoted(self._path), files.reason(error))
            self._path = None


class EnvironmentMetrics(Communication):
    """Writes OpenMetrics where the environment says so; what programs log of an epoch stays as it is."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch)


def of_environment(callbacks: Sequence[keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
    """Returns what writes OpenMetrics in `fit` by the environment, unless one of the program's callbacks does."""
    path = os.environ.get(PATH)
    if not path or any(isinstance(callback, Communication) and callback.has_metrics for callback in callbacks):
        return []
    return [_of_path(path.replace("{job}", log_lines.job() or "job"))]


@functools.cache  # counters go on from one `fit` to the next
def _of_path(path: str) -> EnvironmentMetrics:
    return EnvironmentMetrics(openmetrics_path=path)


def speedup(ranks: int, seconds: float, exposed: float, inputs: float) -> float:
    """Returns how many times as fast as one process, which computes for all ranks, steps were.

    Args:
        ranks: Number of ranks.
        seconds: How long the steps took.
        exposed: How much of that they waited for other ranks.
        inputs: How much of that they waited for data, as one process would.
    """
    computing = max(seconds - exposed - inputs, 0.0)
    return (ranks * computing + inputs) / seconds


def per_step(sums: np.ndarray, late: Mapping[int, float], ranks: int) -> dict[str, float]:
    """Returns the numbers of an epoch; none, if it has no steps.

    Args:
        sums: The number of its steps; seconds that they took, waited for others, and for their batches; bytes sent.
        late: By rank, how many seconds its parts were late.
        ranks: Number of ranks.
    """
    steps, seconds, exposed, inputs, sent = sums.tolist()
    if not steps:
        return {}
    slowest = max(late, key=lambda rank: late[rank], default=-1)
    return {"step_ms": 1e3 * seconds / steps, "exposed_ms": 1e3 * exposed / steps, "input_ms": 1e3 * inputs / steps,
            "sent_bytes": sent / steps, "slowest_rank": slowest if late.get(slowest, 0.0) > 0 else -1,
            "speedup": speedup(ranks, seconds, exposed, inputs)}
