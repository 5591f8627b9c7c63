"""What a rank holds of a variable that ranks divide: nothing yet, its shard, or the whole.

It outlives the variable, which other ranks may read when this one's program has dropped it.

Tests: tests/unit/test_shard_service.py, tests/training/test_sharded_update.py, tests/training/test_saving.py.
"""

from collections.abc import Callable
import enum
import threading
from typing import Any

import numpy as np
import tensorflow as tf

from tf_poseidon.graph_passes.partition.states import Division

# In the resource of what is not held: a graph that still reads it fails, or computes what is not a number.
_NOTHING = [np.nan, np.nan]


class Extent(enum.Enum):
    """How much of a variable a rank holds."""

    NOTHING = "nothing"
    SHARD = "a shard"
    WHOLE = "the whole"


class Initial:
    """The value that a variable begins with.

    Attributes:
        whole: Returns it.
        of_size: Returns so many of its elements, a vector, where all are the same; None if they differ.
        parts: What draws parts of it (`initial_values.InitialValue`); None if nothing does.
    """

    def __init__(self, whole: Callable[[], Any], of_size: Callable[[int], Any] | None, parts: Any = None) -> None:
        self.whole = whole
        self.of_size = of_size
        self.parts = parts


class Holding:
    """What this rank holds of a variable.

    Attributes:
        path: The variable's path.
        shape: The shape of the whole.
        dtype: Its dtype.
        initial: Its `Initial`.
        resource: The resource of this rank's shard.
        whole_resource: The resource of the whole.
        copy: A variable of another type that has the whole, cast, while this rank holds its shard; None without one.
        division: How ranks divide it, its `states.Division`.
        extent: How much of it is held.
        assignments: How often the program has assigned the variable outside of steps while it was not whole.
        digest: Of the whole that it has assigned last; 0 if rank 0 has assigned it for all ranks.
        former: The shard before the last assignment, for ranks that have not come as far; None where there are none.
        lock: To be held where several of these change together, and to read them meanwhile.
    """

    def __init__(self, path: str, shape: tf.TensorShape, dtype: tf.DType, initial: Initial, resource: tf.Tensor,
                 whole_resource: tf.Tensor, layout: str) -> None:
        self.path, self.shape, self.dtype, self.initial = path, shape, dtype, initial
        self.resource, self.whole_resource = resource, whole_resource
        self.copy: tf.Variable | None = None
        self.division = Division(layout)
        self.extent = Extent.NOTHING
        self.assignments = self.digest = 0
        self.former: np.ndarray | None = None
        self.lock = threading.RLock()

    @property
    def num_elements(self) -> int:
        """The number of elements of the whole."""
        return int(self.shape.num_elements())

    def read(self) -> tf.Tensor:
        """Returns what is held."""
        return tf.raw_ops.ReadVariableOp(resource=self._resource(self.extent), dtype=self.dtype)

    def set(self, value: tf.Tensor, extent: Extent) -> None:
        """Holds a value from now on."""
        with self.lock:
            former, self.extent = self.extent, extent
            tf.raw_ops.AssignVariableOp(resource=self._resource(extent), value=value)
            if former not in (extent, Extent.NOTHING):
                tf.raw_ops.AssignVariableOp(resource=self._resource(former), value=nothing(self.dtype))

    def _resource(self, extent: Extent) -> tf.Tensor:
        return self.whole_resource if extent is Extent.WHOLE else self.resource

    def lend(self, whole: tf.Tensor) -> None:
        """Lets graphs read the whole, though this rank does not hold it."""
        tf.raw_ops.AssignVariableOp(resource=self.whole_resource, value=whole)

    def take_back(self) -> None:
        """Ends that, if the whole is not held meanwhile."""
        if self.extent is not Extent.WHOLE:
            tf.raw_ops.AssignVariableOp(resource=self.whole_resource, value=nothing(self.dtype))

    def set_copy(self, whole: tf.Tensor) -> None:
        """Gives the copy the value of the whole."""
        assert self.copy is not None, "a variable without a copy needs none"
        tf.raw_ops.AssignVariableOp(resource=self.copy.handle, value=tf.cast(whole, self.copy.dtype))

    def assign(self, value: tf.Tensor, whole: tf.Tensor | None = None, digest: int = 0) -> None:
        """Holds a value that the program has assigned.

        Args:
            value: The whole where the whole is held, else this rank's shard.
            whole: The whole where there is a copy.
            digest: Of the whole; 0 if rank 0 assigns it for all ranks.
        """
        with self.lock:
            self.former = self.read().numpy() if self.extent is Extent.SHARD else None
            if self.extent is Extent.WHOLE:  # ranks give each other rank 0's
                self.set(value, Extent.WHOLE)
            else:
                self.set(value, Extent.SHARD)
                self.assignments, self.digest = self.assignments + 1, digest
                if self.copy is not None and whole is not None:
                    self.set_copy(whole)


def nothing(dtype: tf.DType) -> tf.Tensor:
    """Returns what the resource of a variable has that is not held."""
    return tf.cast(_NOTHING, dtype)
