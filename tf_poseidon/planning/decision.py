"""The decision about one site: its scheme, with the reason.

Tests: tests/unit/test_planning.py, tests/unit/test_plan.py.
"""

import dataclasses

from tf_poseidon.planning.cost import Cost
from tf_poseidon.planning.schemes import Carried
from tf_poseidon.planning.schemes import Scheme
from tf_poseidon.planning.schemes import SCHEMES


@dataclasses.dataclass(frozen=True)
class Decision:
    """How one site is synchronised.

    Attributes:
        site: Name of the site.
        scheme: Name of the scheme, a key of `schemes.SCHEMES`.
        cost: The predicted `Cost` of a step with full batches; None if unknown before the step. For
            "sparse" an upper bound: slices with the same index are summed before they are sent.
        reason: Why, in a sentence.
        carried: What it holds only for its scheme, or None.
        runner_up: Name of the second-best scheme, None if there was no other.
        runner_up_cost: The runner-up's `Cost`.
        group: Name of the group of messages that it travels with; None if it leaves at once.
    """

    site: str
    scheme: str
    cost: Cost | None
    reason: str
    carried: Carried | None = None
    runner_up: str | None = None
    runner_up_cost: Cost | None = None
    group: str | None = None

    @property
    def by(self) -> Scheme:
        """The scheme itself."""
        return SCHEMES[self.scheme]

    @property
    def leader(self) -> str | None:
        """The site whose exchange this one uses, so that it sends nothing; None if it exchanges something itself."""
        return self.carried.leader if self.carried else None

    @property
    def num_bytes(self) -> float | None:
        """Payload that a node, worker and server, sends plus receives; None if unknown."""
        return None if self.cost is None else self.cost.num_bytes

    @property
    def seconds(self) -> float | None:
        """Predicted time of this exchange alone, including rebuilding; None if unknown."""
        return None if self.cost is None else self.cost.seconds

    def __str__(self) -> str:
        """Returns what ranks compare."""
        return f"'{self.site}' by {self.scheme}{self.carried or ''}"
