"""What ranks exchange in a step beside gradients: rows that an op needs whole, largest values, random numbers."""

import dataclasses
import math

from tf_poseidon.planning.cluster import Cluster
from tf_poseidon.planning.cost import BROADCAST
from tf_poseidon.planning.cost import Cost
from tf_poseidon.planning.cost import GATHER
from tf_poseidon.planning.cost import Traffic

# What they are for, as `Exchange.scheme`.
PURPOSES = (GATHER, BROADCAST)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A tensor that ranks exchange.

    Attributes:
        site: Its name.
        scheme: "gather": all ranks get what each has; "broadcast": all get what rank 0 has.
        dtype: Name of its dtype.
        itemsize: Bytes of an element.
        shape: What one rank with a full batch has of it; None if that is unknown.
        operations, depth, is_waited_for: As of `Site`.
        group: As of `Decision`.
        pin: The scheme that a pin asks for, and that only a gradient can have.
    """

    site: str
    scheme: str
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
        """Bytes of what one rank has, None if that is unknown."""
        return None if self.shape is None else self.itemsize * math.prod(self.shape)

    @property
    def traffic(self) -> Traffic | None:
        """What ranks exchange, None if that is not known before the step."""
        return None if self.num_bytes is None else Traffic(self.scheme, self.num_bytes)

    @property
    def reason(self) -> str:
        """Why it is exchanged, in a sentence."""
        if self.scheme == GATHER:
            reason = "what comes next needs that of all ranks"
        else:
            reason = "each rank would have another value: all take that of rank 0"
        return reason + (f"; pinned to '{self.pin}', which it cannot: it is no gradient" if self.pin else "")

    def cost(self, cluster: Cluster) -> Cost | None:
        """Returns the `Cost` in a step; None if that is not known before the step."""
        traffic = self.traffic
        return None if traffic is None else traffic.cost(cluster)
