"""The sharded parameter server: servers sum the pieces of a gradient, and all ranks get the sum."""

from tf_poseidon.planning.cost import SUM
from tf_poseidon.planning.cost import Traffic
from tf_poseidon.planning.schemes.scheme import Scheme
from tf_poseidon.planning.site import Site


class ParameterServer(Scheme):
    """Takes any gradient, and so all that no other scheme can take."""

    name = "ps"
    manner = "dense"
    row = name

    def traffic(self, site: Site) -> Traffic | None:
        return None if site.num_bytes is None else Traffic(SUM, site.num_bytes)
