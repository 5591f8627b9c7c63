"""What a self-test has found, as a person reads it.

Tests: tests/unit/test_selftest.py.
"""

from collections.abc import Sequence
import dataclasses
import statistics

from tf_poseidon.base import tables
from tf_poseidon.commands.selftest import links as links_lib
from tf_poseidon.commands.selftest import scheme_checks

# A link is slow if others, of which there are a few, are this many times as fast.
_SLOW, _FEW = 2.0, 4
# More hosts have more links than one looks at: then only the slowest are shown.
_MOST_HOSTS, _MOST_LINKS = 12, 10


@dataclasses.dataclass(frozen=True)
class SelftestReport:
    """The result of a self-test. `print(report)` shows it.

    Attributes:
        job: What the job is, a line.
        results: One per training step.
        links: One per pair of hosts and direction; none in a job of one process, or where they are unknown.
        seconds: How long it took.
    """

    job: str
    results: Sequence[scheme_checks.Result]
    links: Sequence[links_lib.Link]
    seconds: float

    @property
    def problems(self) -> list[str]:
        """What is wrong, as sentences; slow links are not."""
        return [f"{result.step}, {result.what}: {result.problem}" for result in self.results if result.problem]

    def __str__(self) -> str:
        rows = [("step", "what was trained", "scheme", "against one process"),
                *((result.step, result.what, result.scheme, _found(result)) for result in self.results)]
        return "\n".join([self.job, *tables.aligned(rows, left=(0, 1, 2, 3)), *self._links(),
                          *(f"WRONG: {problem}" for problem in self.problems), self._verdict()])

    def _links(self) -> list[str]:
        if not self.links:
            return []
        hosts = list(dict.fromkeys(link.sender for link in self.links))
        lines = ["latency in µs and rate in Gbit/s of each link, from the host in a row to that in a column:"]
        if len(hosts) <= _MOST_HOSTS:
            shown = {(link.sender, link.receiver): f"{link.latency_us:.3g} / {link.gbps:.3g}" for link in self.links}
            rows = [("", *hosts), *((sender, *(shown.get((sender, receiver), "") for receiver in hosts))
                                    for sender in hosts)]
            lines += tables.aligned(rows, left=(0,))
        else:
            least = sorted((link for link in self.links if not link.is_local), key=lambda link: link.gbps)
            lines[0] = f"latency and rate of the {_MOST_LINKS} slowest links between {len(hosts)} hosts:"
            lines += tables.aligned([(link.sender, "to", link.receiver, f"{link.latency_us:.3g} µs",
                                      f"{link.gbps:.3g} Gbit/s") for link in least[:_MOST_LINKS]], left=(0, 1, 2))
        return lines

    def _verdict(self) -> str:
        verdict = f"{'wrong' if self.problems else 'all right'}, in {self.seconds:.0f} s"
        least = links_lib.slowest(self.links)
        if least is None:
            return verdict
        where = f"within {least.sender}" if least.is_local else f"from {least.sender} to {least.receiver}"
        shown = f"{verdict}; the slowest link is {where}, {least.gbps:.3g} Gbit/s"
        rates = [link.gbps for link in self.links if link.is_local == least.is_local]
        usual = statistics.median(rates)
        if len(rates) >= _FEW and usual > _SLOW * least.gbps:
            shown += (f": others have {usual:.3g}, and all wait for the slowest; look at what else uses it, at its "
                      "cable, and at which network MPI has chosen")
        return shown


def _found(result: scheme_checks.Result) -> str:
    if result.problem:
        return "WRONG"
    return "the same bits" if result.is_supported else "not supported by this engine"
