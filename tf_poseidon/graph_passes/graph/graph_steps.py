"""Names of the sites of a graph that makes several steps: those of the first one have no mark.

Tests: tests/graphs/test_priorities.py, tests/training/test_timeline.py.
"""

from collections.abc import Collection
import dataclasses

UNROLLED = "@"  # the mark in a graph that was unrolled


@dataclasses.dataclass(frozen=True)
class GraphSteps:
    """The steps of a graph, which all have the same sites.

    Attributes:
        number: How many.
        mark: What stands between the name of a site in the first step and the number of another step.
    """

    number: int = 1
    mark: str = UNROLLED

    def site_in(self, step: int, site: str) -> str:
        """Returns the name of a site of the first step in another one."""
        return f"{site}{self.mark}{step}" if step else site

    def step_of(self, site: str) -> int:
        """Returns the number of the step to which a site belongs."""
        mark, number = site.rpartition(self.mark)[1:]
        return int(number) if mark and number.isdecimal() and 0 < int(number) < self.number else 0

    def in_first(self, site: str) -> str:
        """Returns the name of a site in the first step."""
        return site.rpartition(self.mark)[0] if self.step_of(site) else site


def in_any(sites: Collection[str]) -> dict[str, tuple[str, int]]:
    """Returns what people call each site, its name in the first step, and the number of its step in an unrolled graph.

    A step may have sites that the first one lacks: the last one alone has those that only results need.

    Args:
        sites: The names of all sites.
    """
    parts = {site: (first, int(number)) for site in sites for first, mark, number in [site.rpartition(UNROLLED)]
             if mark and number.isdecimal()}
    numbers = {number for first, number in parts.values() if first in sites}
    return {site: parts[site] if site in parts and parts[site][1] in numbers else (site, 0) for site in sites}
