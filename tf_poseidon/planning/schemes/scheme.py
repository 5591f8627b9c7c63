"""What a scheme is: all that planning knows of one way in which gradients are synchronised."""

import abc
import dataclasses

from tf_poseidon.planning.cost import Traffic
from tf_poseidon.planning.site import Site

# The refusal of schemes that need the rows of a full batch to be known.
UNKNOWN_ROWS = "the number of rows is not known before the step; end the dataset with .batch(n)"


@dataclasses.dataclass(frozen=True)
class Carried:
    """What a decision holds for its scheme alone. A scheme that needs something derives a class with fields.

    Plans compare it as text, `str(carried)`, and files hold its fields.
    """

    @property
    def leader(self) -> str | None:
        """The site whose exchange this one uses, so that it sends nothing; None if it exchanges something itself."""
        return None


class Scheme(abc.ABC):
    """One way in which gradients are synchronised.

    Attributes:
        name: What plans, pins and policies call it.
        manner: How a gradient travels, as an adverb: "dense".
        row: In which row of a timeline its exchanges are; those of its messages.
        carried: The class of what its decisions hold for it; None if they hold nothing.
    """

    name: str
    manner: str
    row: str
    carried: type[Carried] | None = None

    def mismatch(self, site: Site) -> str:
        """Returns why this is no scheme for gradients of such a kind, a sentence without its end; else ""."""
        del site
        return ""

    def refusal(self, site: Site) -> str:
        """Returns why a gradient of the right kind cannot travel so, a sentence without its end; else ""."""
        del site
        return ""

    @abc.abstractmethod
    def traffic(self, site: Site) -> Traffic | None:
        """Returns what ranks exchange for a gradient that can travel so; None if that is not known before the step."""

    def common(self, site: Site, carried: Carried | None) -> str:
        """Returns what ranks have to have in common beside type and shape, as text: not rows, they may change."""
        del site, carried
        return ""

    def follow(self, site: Site, leader: Site) -> tuple[Carried, str] | None:
        """Returns what lets a site use the exchange of another that travels so, and why that is right.

        Args:
            site: A site with `bias_of`.
            leader: The site that it is the bias of.

        Returns:
            (what its decision carries, a sentence without its end), or None if it has an exchange of its own.
        """
        del site, leader
        return None

    def can_follow(self, site: Site, carried: Carried, leader: Site | None) -> bool:
        """Whether a decision that was read from a file can be followed, given the site whose exchange it uses.

        Args:
            site: The site.
            carried: What its decision holds.
            leader: The site `carried.leader`, if that exists, travels by this scheme and has an exchange of its own.
        """
        del site, carried, leader
        return False
