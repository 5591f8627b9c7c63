"""What ranks exchange and wait for, as OpenMetrics text for Prometheus: in a file, or served on a port.

prometheus_client, an optional package, is imported when one of them is asked for.

Tests: tests/unit/test_open_metrics.py, tests/training/test_slow_ranks.py.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any

from tf_poseidon.errors import ConfigurationError


@dataclasses.dataclass(frozen=True)
class RankCounts:
    """What one rank has counted since it began to.

    Attributes:
        rank: The rank.
        steps: How many steps it has made.
        step_seconds: How long they took.
        exposed_seconds: How long they waited for other ranks.
        input_seconds: How long they waited for their batches.
        sent_bytes: What was sent.
        late_seconds: By rank, how much later than the median rank's its parts came, in each step the latest.
        stragglers: The present ones, as `strategy.stats` has them.
        speedup: How many times as fast as one process these steps were, which has the work of all ranks; None if no
            step was made.
        restarts: How often `tf-poseidon run` has started the job again.
        job: The name of the job, a label; None if it has none. Two jobs of a host are told apart by it.
    """

    rank: int
    steps: int
    step_seconds: float
    exposed_seconds: float
    input_seconds: float
    sent_bytes: int
    late_seconds: Mapping[int, float]
    stragglers: Sequence[Mapping[str, Any]]
    speedup: float | None = None
    restarts: int = 0
    job: str | None = None


_COUNTERS = (  # the field, and its unit, which its name ends with
    ("steps", "", "Training steps of this rank."),
    ("step_seconds", "seconds", "How long these steps took."),
    ("exposed_seconds", "seconds", "How long these steps waited for other ranks."),
    ("input_seconds", "seconds", "How long these steps waited for their batches."),
    ("sent_bytes", "bytes", "What this rank has sent to others."),
)


class OpenMetrics:
    """The latest `RankCounts`, as Prometheus reads them.

    Attributes:
        counts: They; None before the first.
    """

    def __init__(self) -> None:
        """Makes metrics without counts.

        Raises:
            PoseidonError: If prometheus_client is not installed.
        """
        try:
            import prometheus_client
        except ModuleNotFoundError as error:
            raise ConfigurationError(f"OpenMetrics are written by prometheus_client, but there is no module "
                                     f"'{error.name}'; run pip install \"tf_poseidon[metrics]\".") from error
        self.counts: RankCounts | None = None
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(self)  # asks `collect`
        self._server: Any = None

    def collect(self) -> Iterator[Any]:
        """Yields the metrics, in any thread."""
        from prometheus_client import core
        counts = self.counts
        if counts is None:
            return
        own = {"rank": str(counts.rank)} | ({"job_name": counts.job} if counts.job else {})  # "job" is Prometheus' own
        for field, unit, text in _COUNTERS:
            counter = core.CounterMetricFamily(f"tf_poseidon_{field}", text, labels=[*own], unit=unit)
            counter.add_metric([*own.values()], getattr(counts, field))
            yield counter
        late = core.CounterMetricFamily("tf_poseidon_late_seconds", "How much later than those of the median rank the "
                                        "parts of a rank came.", labels=[*own, "late_rank"], unit="seconds")
        for number, seconds in counts.late_seconds.items():
            late.add_metric([*own.values(), str(number)], seconds)
        yield late
        share = core.GaugeMetricFamily("tf_poseidon_straggler_share_ratio", "Which share of each step a rank costs the "
                                       "others.", labels=[*own, "straggler", "host", "cause"], unit="ratio")
        for straggler in counts.stragglers:
            whose = str(straggler["rank"]), straggler["host"], straggler["cause"]
            share.add_metric([*own.values(), *whose], straggler["share"])
        yield share
        restarts = core.GaugeMetricFamily("tf_poseidon_restarts", "How often the job was started again.",
                                          labels=[*own])
        restarts.add_metric([*own.values()], counts.restarts)
        yield restarts
        if counts.speedup is not None:
            speedup = core.GaugeMetricFamily("tf_poseidon_speedup_ratio", "How many times as fast as one process these "
                                             "steps were.", labels=[*own], unit="ratio")
            speedup.add_metric([*own.values()], counts.speedup)
            yield speedup

    def text(self) -> bytes:
        """Returns the text of the counts."""
        from prometheus_client.openmetrics import exposition
        return exposition.generate_latest(self._registry)

    def serve(self, port: int, address: str) -> None:
        """Serves them in a thread, unless that is done already; raises OSError if the port cannot be had."""
        import prometheus_client
        if self._server is None:
            self._server = prometheus_client.start_http_server(port, address, self._registry)

    def close(self) -> None:
        """Serves them no longer."""
        if self._server is not None:
            server, thread = self._server
            self._server = None
            server.shutdown()
            server.server_close()
            thread.join()
