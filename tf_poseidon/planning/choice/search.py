"""Searches the schemes by which a whole step takes the least time.

A second of rebuilding is worth a number of seconds on the link. For each such number there is a choice of schemes;
tried are those by which the link is about as busy as the processor, and the extremes. From the best of them, and from
the schemes that were chosen gradient by gradient, single ones are changed as long as that helps: all of them, or where
there are many those that make the greatest difference.

Tests: tests/unit/test_planning.py.
"""

import bisect
from collections.abc import Callable
from collections.abc import Mapping
import itertools

from tf_poseidon.planning.cost import Cost

Schemes = dict[str, str]  # by site
Costs = Mapping[str, Mapping[str, Cost]]  # by site and scheme

_NEIGHBORS = 2  # choices around the balanced one
_WORK = 10_000  # gradients in all choices of which one is changed
_TRIED, _ROUNDS = 8, 3  # the least number of gradients that are changed; how often


def shortest(costs: Costs, chosen: Mapping[str, str], seconds: Callable[[Schemes], float],
             is_link_busier: Callable[[Schemes], bool], size: int) -> Schemes:
    """Returns the schemes that differ from the chosen ones in the shortest step.

    The order of sites decides between equals, so that all ranks find the same.

    Args:
        costs: The costs of each site that has a choice.
        chosen: The scheme of each of these sites, gradient by gradient.
        seconds: A function that returns the time of a step in which some schemes differ from the chosen ones.
        is_link_busier: The same, whether the link is busier than the processor.
        size: The number of gradients of a step, times the number of steps for which `seconds` computes.
    """
    balanced = min((_by_worth(costs, chosen, worth) for worth in _worths(costs, chosen, is_link_busier)), key=seconds)
    spread = {site: max(cost.seconds for cost in of.values()) - min(cost.seconds for cost in of.values())
              for site, of in costs.items()}
    sites = sorted(costs, key=lambda site: -spread[site])[:max(_TRIED, _WORK // max(size, 1))]

    choices = [(site, scheme) for site in sites for scheme in costs[site]]

    def improved(changed: Schemes) -> tuple[Schemes, float]:
        best = seconds(changed)
        for _ in range(_ROUNDS):
            last_best = best
            for site, scheme in choices:
                if scheme != changed.get(site, chosen[site]):
                    tried = {**changed, site: scheme}
                    if (shorter := seconds(tried)) < best:
                        best, changed = shorter, tried
            if best == last_best:
                break
        return changed, best

    changed, _ = min((improved(start) for start in ({}, balanced)), key=lambda found: found[1])
    return {site: scheme for site, scheme in changed.items() if scheme != chosen[site]}


def _by_worth(costs: Costs, chosen: Mapping[str, str], worth: float) -> Schemes:
    """Returns the choice for which a second of rebuilding is worth so many seconds on the link."""
    best = {site: min(of, key=lambda scheme: (of[scheme].transfer + worth * of[scheme].rebuild, scheme != chosen[site]))
            for site, of in costs.items()}
    return {site: scheme for site, scheme in best.items() if scheme != chosen[site]}


def _worths(costs: Costs, chosen: Mapping[str, str], is_link_busier: Callable[[Schemes], bool]) -> list[float]:
    """Returns the numbers to try: the more rebuilding is worth, the busier is the link."""
    # Between two of these, the choice is the same.
    edges = sorted({(a.transfer - b.transfer) / (b.rebuild - a.rebuild) for of in costs.values()
                    for a in of.values() for b in of.values() if a.transfer > b.transfer and a.rebuild < b.rebuild})
    worths = [0.0, *((low + high) / 2 for low, high in itertools.pairwise([*edges, 3 * edges[-1]] if edges else []))]
    balanced = bisect.bisect_left(worths, True, key=lambda worth: is_link_busier(_by_worth(costs, chosen, worth)))
    places = {0, len(worths) - 1, *range(max(balanced - _NEIGHBORS, 0), min(balanced + _NEIGHBORS, len(worths)))}
    return [worths[place] for place in sorted(places)]
