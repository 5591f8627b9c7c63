"""Variables of optimizers of which each rank holds its shard: the elements that it updates, as a server does.

Where one rank alone can update a variable, that rank owns all elements, and the shards of others are empty.

In a function of one process such a variable is whole, as any other; the partitioner lets the update run on shards where
it can. Which it is, is decided by the first partitioned function that updates it; no rank has memory for the whole of
it before. Outside of steps, reading it gathers the shards, which all ranks do together (`shard_service.py`).

Tests: tests/training/test_sharded_update.py, tests/training/test_saving.py.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
import typing
from typing import Any

import tensorflow as tf

from tf_poseidon import ops
from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.errors import GraphError
from tf_poseidon.job.job_variables import shard_service
from tf_poseidon.job.joined_job import Job
from tf_poseidon.one_process import context

_NOTHING, _SHARD, _WHOLE = "nothing", "a shard", "the whole"


class Initial:
    """The value that a variable begins with.

    Attributes:
        whole: Returns it.
        of_size: Returns so many of its elements, a vector, where all are the same; None if they differ.
    """

    def __init__(self, whole: Callable[[], Any], of_size: Callable[[int], Any] | None) -> None:
        self.whole = whole
        self.of_size = of_size


class Division(typing.NamedTuple):
    """How ranks divide a variable.

    Attributes:
        layout: The path of the variable after which it is cut into shards; "" if a function is to decide it.
        owner: The rank that owns all of it; -1 spreads it over the servers.
    """

    layout: str
    owner: int = -1


class ShardedVariable(tf_compat.uninitialized_variable()):  # type: ignore[misc]
    """A variable of which each rank holds its shard, or the whole, as the first function that updates it requires.

    Attributes:
        path: Its path.
        division: How ranks divide it.
        assignments: How often the program has assigned it outside of steps.
        shard_handle: Its resource, whose value has an unknown shape: TensorFlow infers shapes of what a resource says.
    """

    def __init__(self, path: str, layout: str, shape: tf.TensorShape, dtype: tf.DType, initial: Initial,
                 job: Job) -> None:
        self._whole_shape = shape
        super().__init__(trainable=False, name=path.replace("/", "_"), shape=tf.TensorShape(None), dtype=dtype)
        self.path, self.division, self.assignments = path, Division(layout), 0
        self._initial, self._job = initial, job
        self._number = job.shards.add(self)
        self._holds = _NOTHING
        self._is_updated = False  # by a partitioned function, as a shard
        self.shard_handle = super().handle
        with tf.init_scope():
            self._whole_handle = tf_compat.of_shape(self.shard_handle, shape, dtype)

    @property
    def holds_shard(self) -> bool:
        """Whether functions must take its shard."""
        return self._is_updated

    @property
    def may_hold_shard(self) -> bool:
        """Whether a function may be the first that updates its shard."""
        return self._holds != _WHOLE and not self._is_updated

    def hold_shard(self, division: Division) -> None:
        """Makes this rank hold its shard, for functions that update it; all ranks call this together."""
        if self._holds == _SHARD and division != self.division:
            self.hold_whole("it is divided anew")
        self.division = division
        if self._holds == _NOTHING:
            self._set(self._initial_shard())
        elif self._holds == _WHOLE:
            self._set(ops.shard(self._held_value(), *division))
        if not self._is_updated:
            self._job.shards.add_bytes(division.owner, self.shape.num_elements() * self.dtype.size)
        self._holds, self._is_updated = _SHARD, True

    def hold_whole(self, why: str) -> None:
        """Makes every rank hold the whole; all ranks call this together.

        Args:
            why: A clause that says why this is necessary.

        Raises:
            GraphError: If a partitioned function updates shards of it.
        """
        if self._is_updated:
            raise GraphError(f"Each rank updates a shard of '{self.path}', but {why}, which needs all of it; use one "
                             "or the other, or PoseidonStrategy(shard_update=False).")
        if self._holds != _WHOLE:
            self._set(self._whole())
            self._holds = _WHOLE

    def take_part(self, request: str) -> None:
        """Does what rank 0 does for a `shard_service.READ` or `ASSIGN`."""
        if request == shard_service.READ:
            self._whole()
        else:
            self._assign_of_rank_0(tf.zeros(self.shape, self.dtype))

    # ---- what tf.Variable does ----

    @property
    def shape(self) -> tf.TensorShape:
        return self._whole_shape

    @property
    def handle(self) -> tf.Tensor:
        return self._whole_handle

    def is_initialized(self, name: str | None = None) -> tf.Tensor:
        del name
        return tf.constant(True)

    @tf.autograph.experimental.do_not_convert
    def _read_variable_op(self, *args: Any, **kwargs: Any) -> tf.Tensor:
        if not self._prepare("a graph that is not partitioned reads it"):
            return super()._read_variable_op(*args, **kwargs)
        self._job.shards.request(shard_service.READ, self._number)
        return self._whole()

    @tf.autograph.experimental.do_not_convert
    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._prepare("a graph that is not partitioned assigns it"):
            return super().assign(value, *args, **kwargs)
        value = tf.convert_to_tensor(value, self.dtype)
        self.shape.assert_is_compatible_with(value.shape)
        if self._job.shards.is_alone:
            self._job.shards.request(shard_service.ASSIGN, self._number)
            self._assign_of_rank_0(value)
        else:
            self.assignments += 1
            self._assign_whole(value)
        return self

    @tf.autograph.experimental.do_not_convert
    def assign_add(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._prepare("a graph that is not partitioned assigns it"):
            return super().assign_add(delta, *args, **kwargs)
        return self.assign(self.read_value() + delta)

    @tf.autograph.experimental.do_not_convert
    def assign_sub(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._prepare("a graph that is not partitioned assigns it"):
            return super().assign_sub(delta, *args, **kwargs)
        return self.assign(self.read_value() - delta)

    def _restore_from_tensors(self, restored_tensors: Mapping[str, tf.Tensor]) -> Any:
        value, = restored_tensors.values()
        return self.assign(value)

    def _prepare(self, why: str) -> bool:
        """Prepares for the program's code; returns whether it runs eagerly, and not in a graph.

        In graphs, the variable is whole, except that a function of one process may become one of shards.
        """
        if tf.executing_eagerly():
            return True
        if not context.is_inside():
            with tf.init_scope():
                self.hold_whole(why)
        return False

    # ---- what it holds ----

    def _whole(self) -> tf.Tensor:
        """Returns the whole value; all ranks call this together."""
        if self._holds == _NOTHING:
            return self._initial_whole()
        value = self._held_value()
        return value if self._holds == _WHOLE else ops.gather_shards(
            value, f"{self.path}/shards", self.shape, *self.division)

    def _initial_whole(self) -> tf.Tensor:
        value = tf.cast(self._initial.whole(), self.dtype)
        return value if self._initial.of_size is not None else ops.broadcast(value, f"{self.path}/initial")

    def _initial_shard(self) -> tf.Tensor:
        if self._initial.of_size is None:
            return ops.shard(self._initial_whole(), *self.division)
        size = ops.shard_size(self.division.layout, self.shape.num_elements(), self.division.owner)
        return tf.cast(self._initial.of_size(int(size)), self.dtype)

    def _assign_of_rank_0(self, value: tf.Tensor) -> None:
        """Assigns rank 0's value, which all ranks take together."""
        self._assign_whole(ops.broadcast(value, f"{self.path}/assigned"))

    def _assign_whole(self, value: tf.Tensor) -> None:
        if self._holds == _WHOLE:
            self._set(value)
        else:
            self._set(ops.shard(value, *self.division))
            self._holds = _SHARD

    def _held_value(self) -> tf.Tensor:
        return tf.raw_ops.ReadVariableOp(resource=self.shard_handle, dtype=self.dtype)

    def _set(self, value: tf.Tensor) -> None:
        tf.raw_ops.AssignVariableOp(resource=self.shard_handle, value=value)


def shard_handle(variable: tf.Variable) -> tf.Tensor:
    """Returns the resource of a variable as that of one whose value has an unknown shape, as a shard has."""
    if isinstance(variable, ShardedVariable):
        return variable.shard_handle
    with tf.init_scope():
        return tf_compat.of_shape(variable.handle, tf.TensorShape(None), variable.dtype)


def among(variables: Iterable[tf.Variable]) -> list[ShardedVariable]:
    """Returns those of some variables that are sharded."""
    return [variable for variable in variables if isinstance(variable, ShardedVariable)]
