"""Makes the plans of a job: by a policy, or from a given plan.

Tests: tests/unit/test_plan.py.
"""

from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math

from tf_poseidon.planning.choice import merging
from tf_poseidon.planning.choice.policies import make_plan
from tf_poseidon.planning.choice.policies import pinned
from tf_poseidon.planning.cluster import Cluster
from tf_poseidon.planning.exchange import Exchange
from tf_poseidon.planning.partition_facts import COLUMNS
from tf_poseidon.planning.plan import Plan
from tf_poseidon.planning.site import Site

# Fewer elements of a matrix, or of a vector, are not worth dividing.
_LEAST_ELEMENTS, _LEAST_OF_VECTOR = 1 << 20, 1 << 10


def is_worth_dividing(shape: Sequence[int]) -> bool:
    """Whether plans look at all at dividing a weight of a shape."""
    return math.prod(shape) >= (_LEAST_ELEMENTS if len(shape) == 2 else _LEAST_OF_VECTOR)


@dataclasses.dataclass(frozen=True)
class Planner:
    """Makes a plan for each training graph of a job.

    Attributes:
        cluster: The `Cluster` to plan for.
        policy: Same as in `make_plan`.
        pins, schemes: Same as in `make_plan`.
        merge: Whether small messages wait for each other, see merging.py.
        given: A `Plan` to follow instead.
    """

    cluster: Cluster
    policy: str = "auto"
    pins: tuple[tuple[str, str], ...] = ()
    merge: bool = False
    given: Plan | None = None
    schemes: tuple[str, ...] | None = None

    def plan(self, sites: Sequence[Site], operations: float | None = None, exchanges: Sequence[Exchange] = (),
             steps: int = 1) -> Plan:
        """Returns the `Plan` of a graph of so many steps with these sites, and these other `Exchange`s.

        Raises:
            PoseidonError: If the given plan was made for another graph or job.
        """
        if self.given is None:
            plan = make_plan(sites, self.policy, self.cluster, self.pins, operations, exchanges, self.schemes, steps)
            return merging.merged(plan) if self.merge else plan
        given = self.given.fitted(sites)
        given.check(sites, self.cluster)
        groups = {exchange.site: exchange.group for exchange in given.exchanges}
        # Which steps overlap, what they wait for, what gradients are cast from and who needs them, this graph says.
        of_graph = {site.name: site for site in sites}
        given = given.of_sites(dataclasses.replace(
            site, needed=of_graph[site.name].needed, cast_from=of_graph[site.name].cast_from,
            is_divided=of_graph[site.name].is_divided) for site in given.sites)
        return dataclasses.replace(
            given, steps=steps,
            exchanges=tuple(dataclasses.replace(exchange, group=groups.get(exchange.site)) for exchange in exchanges))

    @property
    def divides_weights(self) -> bool:
        """Whether it may divide weights, see `DividedWeight`."""
        return bool(self.given and self.given.divided) or any(scheme == COLUMNS for _, scheme in self.pins)

    @property
    def may_divide(self) -> bool:
        """Whether plans are to say which other weights are divided: those by which a step is shorter."""
        return self.policy == "auto" and self.given is None

    def can_divide(self, shape: Sequence[int]) -> bool:
        """Whether weights of a shape, or what belongs to their columns, as biases do, may have to be divided."""
        if len(shape) not in (1, 2):
            return False
        return self.divides_weights or self.may_divide and is_worth_dividing(shape)

    def divided_among(self, paths: Collection[str]) -> Mapping[str, int | None]:
        """Returns those of some paths of weights that are to be divided: by the given plan, or by pins.

        Returns:
            {path: the dimension that the plan says; None by pins}.
        """
        if self.given is not None:
            return self.given.divided_among(paths)
        return {path: None for path in paths if pinned(path, self.pins) == COLUMNS}

    def by_policy(self) -> "Planner":
        """Returns a planner that follows no given plan, for graphs that the plan was not made for."""
        return dataclasses.replace(self, given=None)

    def refusal(self, reason: str) -> Plan:
        """Returns the plan of a graph that is not rewritten."""
        return Plan(self.given.policy if self.given else self.policy, self.cluster, refusal=reason)
