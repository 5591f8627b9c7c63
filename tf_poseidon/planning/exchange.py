"""What ranks exchange in a step besides gradients: rows that an op needs whole, largest values, random numbers, shards.

Tests: tests/unit/test_planning.py.
"""

import dataclasses
import math

from tf_poseidon.planning.cluster import Cluster
from tf_poseidon.planning.cost import BROADCAST
from tf_poseidon.planning.cost import Cost
from tf_poseidon.planning.cost import GATHER
from tf_poseidon.planning.cost import RETURN
from tf_poseidon.planning.cost import SCATTER
from tf_poseidon.planning.cost import SHARDS
from tf_poseidon.planning.cost import Traffic

# Their kinds.
KINDS = (GATHER, BROADCAST, SCATTER, SHARDS, RETURN)

# Why a tensor is exchanged, by kind.
_REASONS = {GATHER: "later ops need the values of all ranks",
            BROADCAST: "each rank would have a different value: all take rank 0's",
            SCATTER: "each rank needs the sum of what it owns alone",
            SHARDS: "all ranks need what each rank computes of what it owns",
            RETURN: "each rank needs the sum of its own rows alone"}


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A tensor that ranks exchange.

    Attributes:
        site: Its name.
        kind: "gather": all ranks get every rank's tensor; "broadcast": all ranks get rank 0's; "scatter": each rank
            gets its shard of a sum; "shards": all ranks get the tensor of which each rank has a shard; "return":
            each rank gets its own rows of a sum.
        dtype: Name of its dtype.
        itemsize: Bytes of an element.
        shape: The shape of its part on one rank with a full batch, of shards, and of a sum of which each rank gets
            its own rows, that of the whole tensor; None if unknown.
        operations, depth, is_waited_for: Same as in `Site`.
        group: Same as in `Decision`.
        pin: The scheme that a pin asks for, and that it cannot have, since it is no gradient, or a sum of shards.
        cast_from: Same as in `Site`, of what is scattered.
        busiest_share: Of what one rank owns: the share of all such bytes that the rank owns that owns most; None if
            servers own parts.
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
    cast_from: str | None = None
    busiest_share: float | None = None

    @property
    def num_bytes(self) -> int | None:
        """Bytes of one rank's part, or of the whole tensor; None if unknown."""
        return None if self.shape is None else self.itemsize * math.prod(self.shape)

    @property
    def traffic(self) -> Traffic | None:
        """What ranks exchange, None if unknown before the step."""
        if self.shape is None:
            return None
        elements = math.prod(self.shape)
        return Traffic(self.kind, self.itemsize * elements, sent_bytes=2 * elements if self.cast_from else None)

    @property
    def reason(self) -> str:
        """Why it is exchanged, in a sentence."""
        why = "" if self.kind == SCATTER else ": it is not a gradient"
        pinned = f"; pinned to '{self.pin}', which is not possible{why}" if self.pin else ""
        cast = f"; sent in {self.cast_from}, from which it is cast" if self.cast_from else ""
        return _REASONS[self.kind] + cast + pinned

    def cost(self, cluster: Cluster) -> Cost | None:
        """Returns the `Cost` in a step, its time that of the busiest link; None if unknown before the step."""
        if self.traffic is None:
            return None
        cost = self.traffic.cost(cluster)
        return dataclasses.replace(cost, transfer=cost.transfer * max(1.0, (self.busiest_share or 0) * cluster.workers))
