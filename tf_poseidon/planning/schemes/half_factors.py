"""Half factors: all ranks get the narrow factor of all ranks, servers get columns of the wide one, and rebuild those.

Of a gradient U^T V, the wider factor is divided by columns among the servers, each of which multiplies its own with the
narrow factor, and gives all ranks this part of the gradient, or updates this part of the variable itself. So the
gradient is rebuilt once, not on every rank, and in place of the dense gradient only factors go to the servers.

The sum of the rows of the narrow factor may be the gradient of a bias, which then needs no message.

Tests: tests/unit/test_planning.py, tests/unit/test_plan.py.
"""

from tf_poseidon.planning.cost import DIVIDE
from tf_poseidon.planning.cost import Traffic
from tf_poseidon.planning.schemes.factor_broadcasting import FactorBroadcasting
from tf_poseidon.planning.schemes.scheme import Carried
from tf_poseidon.planning.site import Site


class HalfFactors(FactorBroadcasting):
    """Takes the gradients that factor broadcasting takes, but only those biases that need the narrow factor."""

    name = "hfb"
    manner = "as half factors"
    row = name

    def traffic(self, site: Site) -> Traffic:
        # Where all ranks are servers, they multiply as much as they would to have the products of their own rows.
        parts = site.factors
        assert parts is not None and site.num_bytes is not None  # else it is refused
        return Traffic(DIVIDE, parts.rows * parts.narrow * parts.itemsize + parts.extra_bytes,
                       operations=2 * parts.rows * parts.m * parts.n,
                       divided_bytes=parts.rows * parts.wide * parts.itemsize,
                       joined_bytes=0 if site.is_divided else site.num_bytes)

    def note(self, site: Site) -> str:  # its zeros travel
        if not site.is_divided or site.factors is None:
            return ""
        return f"each rank updates the {('rows', 'columns')[site.factors.divided]} that it rebuilds"

    def follow(self, site: Site, leader: Site) -> tuple[Carried, str] | None:
        return super().follow(site, leader) if _needs_narrow(site, leader) else None

    def can_follow(self, site: Site, carried: Carried, leader: Site | None) -> bool:
        return super().can_follow(site, carried, leader) and leader is not None and _needs_narrow(site, leader)


def _needs_narrow(site: Site, leader: Site) -> bool:
    """Whether a bias is the sum of the rows of the narrow factor; not if both are as wide, since one of them may be."""
    factors = leader.factors
    return factors is not None and site.shape == (factors.narrow,) and factors.narrow < factors.wide
