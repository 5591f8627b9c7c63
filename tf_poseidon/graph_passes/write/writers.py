"""The functions that write the nodes of a site, by engine and scheme.

The planner uses a scheme only if the engine has such a function for it. To add a scheme, write one of a `SiteWriter`
that leaves the sum under the marker's name, and add a line below for each engine that can carry it out.

Such a function
  * leaves the sum in the marker's type and shape, and passes on the controls of the gradient;
  * counts nothing of a rank whose `contributes` is false;
  * sends `wire_dtype`, and sums halves in float, where the marker does;
  * gives the sum the bits of a plain sum, or is verified within a bound (`SiteWriter._verify_by`).
By SendReceive, ranks do not agree before a graph runs. A rank whose graph was not rewritten sends what PoseidonSync
sends, so a writer that uses other messages needs a branch for such ranks, as `factors` has; without one the job ends
with the name of the site.

Tests: tests/unit/test_schemes.py, tests/graphs/test_passes.py.
"""

from collections.abc import Callable
from typing import Any

from tf_poseidon import planning
from tf_poseidon.graph_passes.find import foreign
from tf_poseidon.graph_passes.find.markers import Marker
from tf_poseidon.graph_passes.write.collectives import Collectives
from tf_poseidon.graph_passes.write.horovod_ops import HorovodOps
from tf_poseidon.graph_passes.write.send_receive import SendReceive
from tf_poseidon.graph_passes.write.site_writer import PlannedGraph
from tf_poseidon.graph_passes.write.site_writer import SiteWriter
from tf_poseidon.graph_passes.write.tensorflow_ops import TensorFlowOps

# By the class of an engine, or a base class, and the name of a scheme. The functions take an object of that class.
WRITERS: dict[tuple[type[SiteWriter], str], Callable[[Any], None]] = {
    (SendReceive, "ps"): SendReceive.summed,
    (SendReceive, "sfb"): SendReceive.factors,
    (SendReceive, "hfb"): SendReceive.factors,
    (SendReceive, "sparse"): SendReceive.slices,
    (Collectives, "ps"): Collectives.summed,
    (Collectives, "sfb"): Collectives.factors,
    (HorovodOps, "ps"): HorovodOps.summed,
    (HorovodOps, "sparse"): HorovodOps.slices,
}


def schemes_of(writer: type[SiteWriter]) -> tuple[str, ...]:
    """Returns the names of the schemes that the engine of a writer can carry out."""
    return tuple(name for name in planning.SCHEMES if any((kind, name) in WRITERS for kind in writer.__mro__))


def write(planned: PlannedGraph, marker: Marker, writer: type[SiteWriter]) -> SiteWriter:
    """Writes the nodes of one site.

    Args:
        planned: The `PlannedGraph`.
        marker: The site's marker.
        writer: The class whose ops replace Poseidon's markers; those of another library are replaced with its ops.

    Returns:
        The writer that was used.
    """
    site = _kind(planned, marker, writer)(planned, marker)
    way = next(WRITERS[kind, site.decision.scheme] for kind in type(site).__mro__
               if (kind, site.decision.scheme) in WRITERS)
    way(site)
    return site


def _kind(planned: PlannedGraph, marker: Marker, writer: type[SiteWriter]) -> type[SiteWriter]:
    if not marker.is_foreign:
        return writer
    return HorovodOps if planned.training.graph.nodes[marker.node].op in foreign.HOROVOD else TensorFlowOps
