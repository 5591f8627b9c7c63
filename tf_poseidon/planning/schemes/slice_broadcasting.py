"""Slices to all: each rank gets the other ranks' rows of an embedding's gradient, with their indices.

Tests: tests/unit/test_planning.py.
"""

from tf_poseidon.planning.cost import GATHER
from tf_poseidon.planning.cost import Traffic
from tf_poseidon.planning.schemes.scheme import Carried
from tf_poseidon.planning.schemes.scheme import Scheme
from tf_poseidon.planning.schemes.scheme import UNKNOWN_ROWS
from tf_poseidon.planning.site import Site


class SliceBroadcasting(Scheme):
    """Takes gradients that are slices. Its bytes are an upper bound: slices with the same index are summed first."""

    name = "sparse"
    manner = "as slices"
    row = name

    def mismatch(self, site: Site) -> str:
        return "it is not slices" if site.slices is None else ""

    def refusal(self, site: Site) -> str:
        return UNKNOWN_ROWS if site.slices is not None and site.slices.k is None else ""

    def traffic(self, site: Site) -> Traffic:
        assert site.slices is not None  # else it is a mismatch
        return Traffic(GATHER, site.slices.num_bytes, can_wait=False, takes_links=True)

    def common(self, site: Site, carried: Carried | None) -> str:
        return ", no slices" if site.slices is None else f", slices of {site.slices.row_bytes} bytes"
