"""What the partitioner says of a step for its plan, besides exchanges: ops that run whole, weights that are divided.

Tests: tests/training/test_explaining.py, tests/unit/test_plan.py.
"""

import dataclasses
import json
import math

from tf_poseidon.planning.cluster import Cluster

# The scheme of `DividedWeight`s in plans and pins.
COLUMNS = "columns"

_TOGETHER = 16  # as in kernels/communicator/columns.h


@dataclasses.dataclass(frozen=True)
class WholeOp:
    """An op whose inputs are gathered from all ranks, and that every rank runs for the rows of all ranks.

    Attributes:
        node: Name of its node.
        op: Name of the op.
        bytes_per_row: Bytes of its inputs per row of the batch; None if unknown.
    """

    node: str
    op: str
    bytes_per_row: int | None = None

    def __str__(self) -> str:
        size = "?" if self.bytes_per_row is None else f"{self.bytes_per_row:,}"
        return f"{self.op} '{self.node}', with {size} bytes a row"


@dataclasses.dataclass(frozen=True)
class DividedWeight:
    """A trained variable of which each rank has some columns, or rows, and computes with these alone.

    No rank has a gradient of it to synchronise; what ranks exchange instead are `Exchange`s.

    Attributes:
        path: Its path.
        dtype: Name of its dtype.
        shape: Its shape, of one or two sizes.
        dimension: The dimension of which each rank has a range.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    dimension: int

    def fingerprint(self) -> str:
        """Returns its type, its shape and its dimension as text."""
        return f"{self.dtype}{list(self.shape)}, divided along dimension {self.dimension}"

    def reason(self, cluster: Cluster) -> str:
        """Returns what each rank of a cluster has of it, in a sentence."""
        size, ranks = self.shape[self.dimension], cluster.of_workers.servers
        most = min(size, _TOGETHER * math.ceil(math.ceil(size / _TOGETHER) / ranks))
        what = "elements" if len(self.shape) == 1 else "columns" if self.dimension else "rows"
        return (f"each of {ranks} ranks computes with up to {most:,} of {size:,} {what}, and holds these alone, also "
                "of the optimizer's variables")


@dataclasses.dataclass(frozen=True)
class PartitionFacts:
    """What the plan of a partitioned step has of the partitioner.

    Attributes:
        whole: The ops that every rank computes for the rows of all ranks.
        divided: The weights that ranks divide.
    """

    whole: tuple[WholeOp, ...] = ()
    divided: tuple[DividedWeight, ...] = ()

    def to_text(self) -> str:
        """Returns them as text; "" for none."""
        return json.dumps(dataclasses.asdict(self)) if self.whole or self.divided else ""

    @classmethod
    def from_text(cls, text: str) -> "PartitionFacts":
        """Returns those in a text of `to_text`."""
        fields = json.loads(text) if text else {"whole": [], "divided": []}
        return cls(tuple(WholeOp(**op) for op in fields["whole"]),
                   tuple(DividedWeight(**{**weight, "shape": tuple(weight["shape"])}) for weight in fields["divided"]))
