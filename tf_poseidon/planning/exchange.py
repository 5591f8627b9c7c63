"""What ranks exchange in a step besides gradients: rows that an op needs whole, largest values, random numbers.

Tests: tests/unit/test_planning.py.
"""

import dataclasses
import math

from tf_poseidon.planning.cluster import Cluster
from tf_poseidon.planning.cost import BROADCAST
from tf_poseidon.planning.cost import Cost
from tf_poseidon.planning.cost import GATHER
from tf_poseidon.planning.cost import Traffic

# Their kinds.
KINDS = (GATHER, BROADCAST)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A tensor that ranks exchange.

    Attributes:
        site: Its name.
        kind: "gather": all ranks get every rank's tensor; "broadcast": all ranks get rank 0's.
        dtype: Name of its dtype.
        itemsize: Bytes of an element.
        shape: The shape of its part on one rank with a full batch; None if unknown.
        operations, depth, is_waited_for: Same as in `Site`.
        group: Same as in `Decision`.
        pin: The scheme that a pin asks for, which only a gradient can have.
    """

    site: str
    kind: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...] | None
    operations: float = 0.0
    depth: int | None = 0
    is_waited_for: bool = False
    group: str | None = None
    pin: str | None = None

    @property
    def num_bytes(self) -> int | None:
        """Bytes of one rank's part, None if unknown."""
        return None if self.shape is None else self.itemsize * math.prod(self.shape)

    @property
    def traffic(self) -> Traffic | None:
        """What ranks exchange, None if unknown before the step."""
        return None if self.num_bytes is None else Traffic(self.kind, self.num_bytes)

    @property
    def reason(self) -> str:
        """Why it is exchanged, in a sentence."""
        if self.kind == GATHER:
            reason = "later ops need the values of all ranks"
        else:
            reason = "each rank would have a different value: all take rank 0's"
        return reason + (f"; pinned to '{self.pin}', which is not possible: it is not a gradient" if self.pin else "")

    def cost(self, cluster: Cluster) -> Cost | None:
        """Returns the `Cost` in a step; None if unknown before the step."""
        traffic = self.traffic
        return None if traffic is None else traffic.cost(cluster)
