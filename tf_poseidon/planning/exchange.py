"""What ranks exchange in a step beside gradients: rows that an op needs whole, largest values, random numbers."""

import dataclasses
import math

from tf_poseidon.planning import cost as cost_lib


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A tensor that ranks exchange.

    Attributes:
        site: Its name.
        scheme: "gather": all ranks get what each has; "broadcast": all get what rank 0 has.
        dtype: Name of its dtype.
        itemsize: Bytes of an element.
        shape: What one rank with a full batch has of it; None if that is unknown.
    """

    site: str
    scheme: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...] | None

    @property
    def reason(self):
        """Why it is exchanged, in a sentence."""
        if self.scheme == "gather":
            return "what comes next needs that of all ranks"
        return "each rank would have another value: all take that of rank 0"

    def cost(self, cluster):
        """Returns the `Cost` in a step; None if that is not known before the step."""
        if self.shape is None:
            return None
        num_bytes = self.itemsize * math.prod(self.shape)
        if self.scheme == "gather":
            return cost_lib.gathered(num_bytes, cluster)
        return cost_lib.broadcast(num_bytes, cluster)
