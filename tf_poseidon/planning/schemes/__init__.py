"""The schemes: the ways in which gradients are synchronised, one file per scheme.

To add one: a file here, a line below, and a writer of its nodes in graph_passes/write/writers.py. Policies consider it
from then on, so printed plans and golden texts change.
"""

from tf_poseidon.planning.schemes.factor_broadcasting import FactorBroadcasting
from tf_poseidon.planning.schemes.factor_broadcasting import Rider
from tf_poseidon.planning.schemes.parameter_server import ParameterServer
from tf_poseidon.planning.schemes.scheme import Carried
from tf_poseidon.planning.schemes.scheme import Scheme
from tf_poseidon.planning.schemes.slice_broadcasting import SliceBroadcasting

PS, SFB, SPARSE = ParameterServer.name, FactorBroadcasting.name, SliceBroadcasting.name

# By name. The first takes every gradient.
SCHEMES: dict[str, Scheme] = {scheme.name: scheme for scheme in (
    ParameterServer(), FactorBroadcasting(), SliceBroadcasting())}

__all__ = ["Carried", "FactorBroadcasting", "PS", "ParameterServer", "Rider", "SCHEMES", "SFB", "SPARSE", "Scheme",
           "SliceBroadcasting"]
