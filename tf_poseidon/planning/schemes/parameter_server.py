"""The sharded parameter server: servers sum the pieces of a gradient, and all ranks get the sum.

A gradient that was cast from a type of two bytes travels in that type to the servers: the sum has the same bits.

Tests: tests/unit/test_planning.py.
"""

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
        if site.num_bytes is None or site.sent_bytes is None:
            return None
        return Traffic(SUM, site.num_bytes, sent_bytes=site.sent_bytes, takes_links=True)

    def note(self, site: Site) -> str:
        return f"sent in {site.cast_from}, from which it is cast" if site.cast_from else ""
