"""The schemes: the ways in which gradients are synchronised, one file per scheme.

To add one: a file here, a line below, and a writer of its nodes in graph_passes/write/writers.py. Policies consider it
from then on, so printed plans and golden texts change.

Tests: tests/unit/test_schemes.py, tests/unit/test_planning.py.
"""

from collections.abc import Iterable

from tf_poseidon.planning.cluster import Cluster
from tf_poseidon.planning.cost import Cost
from tf_poseidon.planning.schemes.factor_broadcasting import FactorBroadcasting
from tf_poseidon.planning.schemes.factor_broadcasting import Rider
from tf_poseidon.planning.schemes.half_factors import HalfFactors
from tf_poseidon.planning.schemes.parameter_server import ParameterServer
from tf_poseidon.planning.schemes.scheme import Carried
from tf_poseidon.planning.schemes.scheme import Scheme
from tf_poseidon.planning.schemes.slice_broadcasting import SliceBroadcasting
from tf_poseidon.planning.site import Site

PS, SFB, HFB, SPARSE = ParameterServer.name, FactorBroadcasting.name, HalfFactors.name, SliceBroadcasting.name

# By name. The first takes every gradient.
SCHEMES: dict[str, Scheme] = {scheme.name: scheme for scheme in (
    ParameterServer(), FactorBroadcasting(), HalfFactors(), SliceBroadcasting())}


def costs_of(site: Site, cluster: Cluster, names: Iterable[str] = SCHEMES) -> dict[str, Cost]:
    """Returns {name of a scheme: `Cost`} of all schemes by which a site can travel.

    Empty if the cost of the parameter server is unknown; then there is nothing to compare with.

    Args:
        site: The `Site`.
        cluster: The `Cluster`.
        names: The schemes to consider.
    """
    possible = [scheme for scheme in map(SCHEMES.__getitem__, names)
                if not scheme.mismatch(site) and not scheme.refusal(site)]
    # What a host carries inside a node has no cost, so it cannot be compared with what links between GPUs carry.
    costs = {scheme.name: traffic.cost(cluster) for scheme in possible if (traffic := scheme.traffic(site)) is not None
             and (traffic.takes_links or not cluster.gpu_link_gbps)}
    return costs if PS in costs else {}


__all__ = ["Carried", "FactorBroadcasting", "HFB", "HalfFactors", "PS", "ParameterServer", "Rider", "SCHEMES", "SFB",
           "SPARSE", "Scheme", "SliceBroadcasting", "costs_of"]
