"""Variables of optimizers of which each rank holds its shard: the elements that it updates, as a server does.

Where one rank alone can update a variable, that rank owns all elements, and the shards of others are empty.

In a function of one process such a variable is whole, as any other; the partitioner lets the update run on shards where
it can. Which it is, is decided by the first partitioned function that updates it; no rank has memory for the whole of
it before. Outside of steps, any rank can read it, which asks the others for their shards (`shard_service.py`).

If something needs all of it in each step, every rank holds the whole from then on: a function that cannot be
partitioned, or a graph of the program's own that uses it. One that reads it may be traced on some ranks only: it gets
the value of that time, and ranks hold the whole from their next function, epoch or call of `fit` on. Functions that
were partitioned before are then partitioned anew; what nobody traces anew fails, since the resources that it reads have
nothing.

Tests: tests/training/test_sharded_update.py, tests/training/test_saving.py.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import itertools
from typing import Any
from typing import Literal

import numpy as np
import tensorflow as tf

from tf_poseidon import ops
from tf_poseidon.compat import keras as keras_compat
from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.graph_passes.partition.states import Division
from tf_poseidon.job.communicator import Communicator
from tf_poseidon.job.job_variables.holdings import Extent
from tf_poseidon.job.job_variables.holdings import Holding
from tf_poseidon.job.job_variables.holdings import Initial
from tf_poseidon.job.joined_job import Job
from tf_poseidon.one_process import context


class ShardedVariable(tf_compat.uninitialized_variable()):  # type: ignore[misc]
    """A variable of which each rank holds its shard, or the whole, as the first function that updates it requires.

    Attributes:
        path: Its path.
        is_wanted: Whether a graph of this rank's program needs all of it, of which other ranks may not know.
        shard_handle: The resource of this rank's shard; `handle` is that of the whole.
    """

    def __init__(self, path: str, layout: str, shape: tf.TensorShape, dtype: tf.DType, initial: Initial, job: Job,
                 **of_tensorflow: Any) -> None:
        super().__init__(**{"trainable": False, "name": path.replace("/", "_")} | of_tensorflow, shape=shape,
                         dtype=dtype)
        self.path, self._job = path, job
        self.is_wanted = False
        self._is_updated = False  # by a partitioned function, as a shard
        self._is_pinned = False  # as the whole
        self._shard = tf_compat.uninitialized_variable()(
            trainable=False, name=f"{self.name.partition(':')[0]}_shard", shape=tf.TensorShape([None]), dtype=dtype)
        self.shard_handle = self._shard.handle
        self._holding = Holding(path, shape, dtype, initial, self.shard_handle, self.handle, layout)
        self._number = job.shards.add(self, self._holding)

    @property
    def division(self) -> Division:
        """How ranks divide it."""
        return self._holding.division

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds the whole."""
        return self._holding.extent is Extent.WHOLE

    @property
    def holds_shard(self) -> bool:
        """Whether functions must take its shard."""
        return self._is_updated

    @property
    def may_hold_shard(self) -> bool:
        """Whether a function may be the first that updates its shard."""
        return not self._is_pinned and not self._is_updated

    def parts(self, most_bytes: int) -> Iterator[np.ndarray] | None:
        """Returns an iterator of its rows, some at a time; None if this rank needs no other for its value.

        Args:
            most_bytes: How much is read at a time, at least one row.
        """
        return self._job.shards.parts(self._number, most_bytes) if self._holding.extent is Extent.SHARD else None

    def hold_shard(self, division: Division) -> None:
        """Makes this rank hold its shard, for functions that update it; all ranks call this together."""
        holding = self._holding
        if holding.extent is Extent.SHARD and division != self.division:
            self._gather()
        with holding.lock:
            holding.division = division
            if holding.extent is Extent.NOTHING:
                holding.set(self._initial_shard(), Extent.SHARD)
            elif holding.extent is Extent.WHOLE:
                holding.set(ops.shard(holding.read(), *division), Extent.SHARD)
        if not self._is_updated:
            self._job.shards.add_bytes(division.owner, holding.num_elements * self.dtype.size)
        self._is_updated = True

    def hold_whole(self) -> None:
        """Makes every rank hold the whole for good; all ranks call this together."""
        if self._holding.extent is Extent.NOTHING:
            self._holding.set(self._initial(), Extent.WHOLE)
        elif self._holding.extent is Extent.SHARD:
            self._gather()
        self._is_pinned, self.is_wanted = True, False

    def _gather(self) -> None:
        """Makes every rank hold the whole of what they hold shards of."""
        self._job.shards.check_assigned([self._number])
        whole = ops.gather_shards(self._holding.read(), f"{self.path}/shards", self.shape, *self.division)
        self._holding.set(whole, Extent.WHOLE)
        if self._is_updated:  # by functions that know it as a shard
            self._job.shards.note_change()
        self._is_updated = False

    # ---- what tf.Variable does ----

    def is_initialized(self, name: str | None = None) -> tf.Tensor:
        del name
        return tf.constant(True)

    @tf.autograph.experimental.do_not_convert
    def _read_variable_op(self, *args: Any, **kwargs: Any) -> tf.Tensor:
        if not self._prepare("reads") or self.is_whole:
            return super()._read_variable_op(*args, **kwargs)
        return self._initial() if self._holding.extent is Extent.NOTHING else tf.constant(
            self._job.shards.whole(self._number))

    @tf.autograph.experimental.do_not_convert
    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._prepare("assigns"):
            return super().assign(value, *args, **kwargs)
        value = tf.convert_to_tensor(value, self.dtype)
        self.shape.assert_is_compatible_with(value.shape)
        self._job.shards.assign(self._number, value, ops.shard(value, *self.division))
        return self

    @tf.autograph.experimental.do_not_convert
    def assign_add(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._prepare("assigns"):
            return super().assign_add(delta, *args, **kwargs)
        return self.assign(self.read_value() + delta)

    @tf.autograph.experimental.do_not_convert
    def assign_sub(self, delta: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._prepare("assigns"):
            return super().assign_sub(delta, *args, **kwargs)
        return self.assign(self.read_value() - delta)

    def _restore_from_tensors(self, restored_tensors: Mapping[str, tf.Tensor]) -> Any:
        value, = restored_tensors.values()
        return self.assign(value)

    def _prepare(self, does: Literal["reads", "assigns"]) -> bool:
        """Prepares for what the program's code does; returns whether it runs eagerly, and not in a graph.

        In graphs, the variable is whole, except that a function of one process may become one of shards.
        """
        if tf.executing_eagerly():
            return True
        if context.is_inside() or self._is_pinned or keras_compat.is_symbolic():
            return False
        is_in_step = is_in_run()
        with tf.init_scope():
            if is_in_step or does == "assigns":  # as all ranks do
                self.hold_whole()
            else:
                self.is_wanted = True
                if self._holding.extent is Extent.SHARD:
                    self._job.shards.lend(self._number, self._job.shards.whole(self._number))
                elif self._holding.extent is Extent.NOTHING:
                    self._job.shards.lend(self._number, self._initial())
        return False

    def _initial(self) -> tf.Tensor:
        initial = self._holding.initial
        return tf.cast(initial.whole(), self.dtype) if initial.of_size is not None else tf.constant(
            self._job.shards.initial(self._number))

    def _initial_shard(self) -> tf.Tensor:
        of_size, parts = self._holding.initial.of_size, self._holding.initial.parts
        if parts is not None and self.division.is_of_matrix:
            parts.source = self._job.communicator.broadcast(f"{self.path}/source", parts.source)
            shape, divided = tuple(self.shape), self.division.divided
            begin, count = (int(number) for number in ops.column_range(shape[divided]))
            return tf.cast(parts.columns(shape, divided, begin, count), self.dtype)
        if of_size is None:
            return ops.shard(self._initial(), *self.division)
        size = ops.shard_size(self._holding.num_elements, *self.division)
        return tf.cast(of_size(int(size)), self.dtype)


def is_in_run() -> bool:
    """Whether the program's code runs in `strategy.run`, outside of functions of one process."""
    return (tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
            and not context.is_inside())


def shard_handle(variable: tf.Variable) -> tf.Tensor:
    """Returns the resource of a variable's shard; of one that is only planned, as graphs would see it."""
    if isinstance(variable, ShardedVariable):
        return variable.shard_handle
    with tf.init_scope():
        return tf_compat.of_shape(variable.handle, tf.TensorShape([None]), variable.dtype)


def among(variables: Iterable[tf.Variable]) -> list[ShardedVariable]:
    """Returns those of some variables that are sharded."""
    return [variable for variable in variables if isinstance(variable, ShardedVariable)]


def check_assigned(variables: Sequence[ShardedVariable]) -> None:
    """Refuses variables whose shards would not belong together; all ranks call this with the same ones."""
    if variables:
        variables[0]._job.shards.check_assigned([variable._number for variable in variables])


def hold_wanted(variables: Sequence[ShardedVariable], communicator: Communicator) -> None:
    """Makes every rank hold the whole of variables that some rank needs; all ranks call this with the same ones."""
    if variables:
        wanted = communicator.sum("shards/wanted", np.array([one.is_wanted for one in variables], np.int64))
        for variable in itertools.compress(variables, wanted):
            variable.hold_whole()


def count_update(variables: Iterable[tf.Variable]) -> list[tf.Operation]:
    """Counts, in a graph that updates shards of some variables, that it has run; nothing where there are none."""
    return [variable._job.shards.count_update() for variable in among(variables)[:1]]
