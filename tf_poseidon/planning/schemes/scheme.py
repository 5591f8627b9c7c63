"""The interface of a scheme: everything that planning knows about one way of synchronising gradients.

Tests: tests/unit/test_schemes.py.
"""

import abc
import dataclasses

from tf_poseidon.planning.cost import Traffic
from tf_poseidon.planning.site import Site

# The refusal of schemes that need the rows of a full batch to be known.
UNKNOWN_ROWS = ("the number of rows is not known before the step; give the batch its shape with tf.ensure_shape or, "
                "with PoseidonStrategy, end the dataset with .batch(n)")


@dataclasses.dataclass(frozen=True)
class Carried:
    """What a decision holds only for its scheme. A scheme that needs this derives a class with fields.

    Plans compare it as text, `str(carried)`; files hold its fields.
    """

    @property
    def leader(self) -> str | None:
        """The site whose exchange this one uses, so that it sends nothing; None if it exchanges something itself."""
        return None


class Scheme(abc.ABC):
    """One way in which gradients are synchronised.

    Attributes:
        name: Its name in plans, pins and policies.
        manner: How a gradient travels, as an adverb: "dense".
        row: The row of a timeline with the exchanges of its messages.
        carried: The class of what its decisions hold for it; None if they hold nothing.
    """

    name: str
    manner: str
    row: str
    carried: type[Carried] | None = None

    def mismatch(self, site: Site) -> str:
        """Returns why this scheme cannot carry gradients of this kind, as a clause; "" if it can."""
        del site
        return ""

    def refusal(self, site: Site) -> str:
        """Returns why a gradient of the right kind cannot travel by this scheme, as a clause; "" if it can."""
        del site
        return ""

    @abc.abstractmethod
    def traffic(self, site: Site) -> Traffic | None:
        """Returns what ranks exchange for a gradient that can travel by it; None if unknown before the step."""

    def note(self, site: Site) -> str:
        """Returns what is special about how a site travels by it, as a clause; "" if nothing."""
        del site
        return ""

    def common(self, site: Site, carried: Carried | None) -> str:
        """Returns the text that must be the same on all ranks, besides type and shape; not rows, which may change."""
        del site, carried
        return ""

    def follow(self, site: Site, leader: Site) -> tuple[Carried, str] | None:
        """Returns how a site uses the exchange of another site that travels by this scheme, and why that is correct.

        Args:
            site: A site with `bias_of`.
            leader: The site whose bias it is.

        Returns:
            (what its decision carries, the reason as a clause), or None if it has its own exchange.
        """
        del site, leader
        return None

    def can_follow(self, site: Site, carried: Carried, leader: Site | None) -> bool:
        """Whether a decision from a file can be followed, given the site whose exchange it uses.

        Args:
            site: The site.
            carried: What its decision holds.
            leader: The site `carried.leader`, if it exists, travels by this scheme and has its own exchange.
        """
        del site, carried, leader
        return False
