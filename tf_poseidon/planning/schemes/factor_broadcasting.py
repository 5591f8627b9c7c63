"""Sufficient factor broadcasting: all ranks get the factors of all ranks, and each rebuilds the gradient from them.

If K is small, a gradient U^T V has far more numbers than U [K, M] and V [K, N]. The gradient of a dense layer's bias is
the sum of the rows of one of these factors, so it costs nothing if they travel (H. Zhang et al., USENIX ATC 2017,
section 3.2).

Behind a ReLU, a pooling or a dropout, factors are mostly zeros, and the errors behind a ReLU are too. They travel
without them where that saves enough, which each rank finds out in each step.

Tests: tests/unit/test_planning.py, tests/unit/test_plan.py.
"""

import dataclasses

from tf_poseidon.planning.cluster import Cluster
from tf_poseidon.planning.cost import GATHER
from tf_poseidon.planning.cost import Traffic
from tf_poseidon.planning.schemes.scheme import Carried
from tf_poseidon.planning.schemes.scheme import Scheme
from tf_poseidon.planning.schemes.scheme import UNKNOWN_ROWS
from tf_poseidon.planning.site import Site

# Bytes of a matrix per second in which a processor leaves out its zeros, or puts them back; with AVX-512 it is three
# times as many (evaluation/benchmarks/bench_zeros.py).
_BYTES_PER_SECOND = 4e9


def least_saving(cluster: Cluster) -> float:
    """Returns the share of a factor's bytes that must be zeros for it to travel without them; 1 if it never pays.

    From there on, sending them takes longer than leaving them out and putting back those of all other ranks. Between
    linked GPUs, zeros travel.
    """
    sending = 0.0 if cluster.are_all_linked else cluster.send_seconds(cluster.ranks_per_node * (cluster.nodes - 1))
    return min(1.0, cluster.workers / _BYTES_PER_SECOND / sending) if sending else 1.0


@dataclasses.dataclass(frozen=True)
class Rider(Carried):
    """What the decision of a bias holds.

    Attributes:
        rides_on: The site from whose factors it is computed.
    """

    rides_on: str

    @property
    def leader(self) -> str:
        return self.rides_on

    def __str__(self) -> str:
        return f" with '{self.rides_on}'"


class FactorBroadcasting(Scheme):
    """Takes gradients that are products of factors, and those of their biases."""

    name = "sfb"
    manner = "as factors"
    row = name
    carried = Rider

    def mismatch(self, site: Site) -> str:
        return "its gradient is slices" if site.slices is not None else ""

    def refusal(self, site: Site) -> str:
        if site.factors is None:
            return site.refusal or "it is not a product of factors"
        return UNKNOWN_ROWS if site.factors.k is None else ""

    def traffic(self, site: Site) -> Traffic:
        # The matrix product of this rank's own rows is part of training.
        parts = site.factors
        assert parts is not None  # else it is refused
        return Traffic(GATHER, parts.num_bytes, operations=2 * parts.rows * parts.m * parts.n, takes_links=True)

    def note(self, site: Site) -> str:
        factors = site.factors
        if factors is None or factors.sent_share == 1:
            return ""
        return f"without their zeros, factors had {factors.sent_share:.3g} of their bytes"

    def common(self, site: Site, carried: Carried | None) -> str:
        if carried is not None:
            return f", a bias of '{site.bias_of}'" if site.bias_of else ", no bias of a layer"
        if site.factors is None:
            return ", without factors"
        return f", factors with {site.factors.m} and {site.factors.n} columns"

    def follow(self, site: Site, leader: Site) -> tuple[Carried, str] | None:
        return Rider(leader.name), f"the sum of the rows of a factor of '{leader.name}'"

    def can_follow(self, site: Site, carried: Carried, leader: Site | None) -> bool:
        return leader is not None and site.bias_of == leader.name
