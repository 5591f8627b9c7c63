"""Weights in float of which each rank holds its shard, beside a whole copy in the 16 bits that layers compute in.

A step of one process reads and assigns the weight as any other. Where the partitioner finds that nothing but its update
needs it in float, all ranks hold the working copy (`working_copies.py`), and of the weight, the *master*, the elements
that they update. Outside of steps, any rank can read it (`shard_service.py`).

Until a step divides it, every rank holds the whole.

Tests: tests/unit/test_shard_service.py, tests/training/test_sharded_update.py.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import itertools
from typing import Any
from typing import Literal

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.partition.preparation import working_copies
from tf_poseidon.graph_passes.partition.states import Division
from tf_poseidon.job.job_variables import holdings
from tf_poseidon.job.job_variables.holdings import Extent
from tf_poseidon.job.job_variables.holdings import Initial
from tf_poseidon.job.joined_job import Job
from tf_poseidon.one_process.sharding import sharded_variables
from tf_poseidon.one_process.sharding.sharded_variables import ShardedVariable


class MasterWeight(ShardedVariable):
    """A trained variable that every rank holds whole, or divides into shards.

    Attributes:
        copy: Its working copy, a `tf.Variable`; None if no function has ever used one.
    """

    def __init__(self, path: str, name: str, shape: tf.TensorShape, dtype: tf.DType, initial: Initial, job: Job,
                 is_held: bool = True) -> None:
        """Makes a variable; unless `is_held`, no rank has memory for it before it is decided how much each holds."""
        # Its initial value, if it has that, may refer to what refers to it.
        super().__init__(path, path, shape, dtype, Initial(_never, None) if is_held else initial, job, name=name,
                         trainable=True, distribute_strategy=tf.distribute.get_strategy())
        if is_held:
            self._holding.set(tf.cast(initial.whole(), dtype), Extent.WHOLE)

    def begin_whole(self) -> None:
        """Makes every rank hold the whole, but not for good, unless functions know its shards; all ranks call this."""
        if self._holding.extent is Extent.NOTHING:
            self._holding.set(self._initial(), Extent.WHOLE)
        elif self._holding.extent is Extent.SHARD and not self.holds_shard:  # assigned before a function has used it
            self._gather()

    @property
    def copy(self) -> tf.Variable | None:
        return self._holding.copy

    def copy_in(self, dtype: tf.DType) -> tf.Variable:
        """Returns its working copy, which has no value before ranks hold shards."""
        if self.copy is None or self.copy.dtype != dtype:
            self._holding.copy = copy_of(self, dtype)
        return self.copy

    def hold_shard(self, division: Division) -> None:
        if not self.holds_shard:
            if self.copy is not None:
                self.begin_whole()
                self._holding.set_copy(self._holding.read())
            self._job.shards.note_change()  # functions may know it as whole
        super().hold_shard(division)

    def hold_whole(self) -> None:
        super().hold_whole()
        if self.copy is not None:
            tf.raw_ops.AssignVariableOp(resource=self.copy.handle, value=holdings.nothing(self.copy.dtype))
            self._holding.copy = None

    @tf.autograph.experimental.do_not_convert
    def _read_variable_op(self, *args: Any, **kwargs: Any) -> tf.Tensor:
        value = super()._read_variable_op(*args, **kwargs)
        if not tf.executing_eagerly() or self.is_whole:
            return value
        super(ShardedVariable, self)._read_variable_op(*args, **kwargs)  # so that tapes watch it
        return tf.custom_gradient(lambda handle: (tf.identity(value), lambda gradient: gradient))(self.handle)

    # ---- what tf.Variable does by its resource ----

    @tf.autograph.experimental.do_not_convert
    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        return tf.gather(self.read_value(), indices, name=name) if self.is_apart("reads") else super().sparse_read(
            indices, name)

    @tf.autograph.experimental.do_not_convert
    def gather_nd(self, indices: Any, name: str | None = None) -> tf.Tensor:
        return tf.gather_nd(self.read_value(), indices, name=name) if self.is_apart("reads") else super().gather_nd(
            indices, name)

    def _prepare(self, does: Literal["reads", "assigns"]) -> bool:
        is_fetched = tf.executing_eagerly() and self.holds_shard
        if (not self._is_pinned and not is_fetched and sharded_variables.is_in_run()
                and self._job.is_to_divide(self.path)):
            raise GraphError(
                f"'{self.path}' is to be divided by 'columns', but strategy.run {does} all of it on every rank; "
                "decorate the step with @poseidon.distribute instead, or give it another scheme.")
        return super()._prepare(does)

    def is_apart(self, does: Literal["reads", "assigns"]) -> bool:
        """Prepares for what the program's code does; returns whether that cannot use its resource."""
        return self._prepare(does) and not self.is_whole


def _never() -> tf.Tensor:
    raise AssertionError("a weight that has a value needs none to begin with")


def _scattering(name: str) -> Callable[..., Any]:
    """Returns a method that changes some rows."""
    @tf.autograph.experimental.do_not_convert
    def scatter(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_apart("assigns"):
            return getattr(super(MasterWeight, self), name)(*args, **kwargs)
        whole = copy_of(self, self.dtype)
        tf.raw_ops.AssignVariableOp(resource=whole.handle, value=self.read_value())
        getattr(whole, name)(*args, **kwargs)
        return self.assign(whole.read_value())

    return scatter


for _name in ("scatter_add", "scatter_sub", "scatter_update", "scatter_min", "scatter_max", "scatter_mul",
              "scatter_div", "scatter_nd_add", "scatter_nd_sub", "scatter_nd_update"):
    setattr(MasterWeight, _name, _scattering(_name))


def among(variables: Iterable[tf.Variable]) -> list[MasterWeight]:
    """Returns those of some variables that are masters."""
    return [variable for variable in variables if isinstance(variable, MasterWeight)]


def copy_of(variable: tf.Variable, dtype: tf.DType) -> tf.Variable:
    """Returns a new variable in another type, without a value."""
    return tf_compat.uninitialized_variable()(
        trainable=False, name=f"{variable.name.partition(':')[0]}_copy", shape=variable.shape, dtype=dtype)


class Copies:
    """The working copies that a function may use.

    Attributes:
        candidates: Names of the nodes from which the resources of masters come that may hold shards if the function
            needs none of these whole.
        updated: The same of all masters that might hold shards and that the function updates.
    """

    def __init__(self, graph_def: graph_pb2.GraphDef, variables: Mapping[str, tf.Variable],
                 planned: Iterable[str]) -> None:
        """Finds the copies.

        Args:
            graph_def: The flat GraphDef of the function.
            variables: Its variables, by name of their resource.
            planned: The names of other variables that a function updates which never runs.
        """
        self._graph_def = graph_def
        masters = {name: variable for name, variable in variables.items() if isinstance(variable, MasterWeight)}
        possible = [*planned, *(name for name, master in masters.items() if master.may_hold_shard)]
        self.updated = working_copies.updated(graph_def, possible)
        types = working_copies.types(graph_def, self.updated)
        self.candidates = types.keys()
        self._copies = {name: masters[name].copy_in(tf.as_dtype(dtype)) if name in masters
                        else copy_of(variables[name], tf.as_dtype(dtype)) for name, dtype in types.items()}
        self._copies |= {name: master.copy for name, master in masters.items()
                         if master.holds_shard and master.copy is not None}

    def named(self, paths: Mapping[str, str]) -> dict[str, str]:
        """Returns the paths of the masters of copies, by name of the copy's placeholder."""
        return {_name_of_copy(name): paths[name] for name in self._copies}

    def of(self, *names: Iterable[str]) -> list[str]:
        """Returns those of some names that belong to masters with a copy."""
        return [name for name in itertools.chain(*names) if name in self._copies]

    def used_in(self, masters: Iterable[str]) -> graph_pb2.GraphDef:
        """Returns the GraphDef in which some masters have copies, those of `captures` with the same argument."""
        copies = {name: self._copies[name] for name in masters}
        if not copies:
            return self._graph_def
        result = working_copies.with_copies(self._graph_def, {
            name: working_copies.Copy(_name_of_copy(name), copy.dtype.as_datatype_enum)
            for name, copy in copies.items()})
        for name, copy in copies.items():
            node = result.node.add(name=_name_of_copy(name), op="Placeholder")
            node.attr["dtype"].type = tf.resource.as_datatype_enum
            node.attr["_handle_dtypes"].list.type.append(copy.dtype.as_datatype_enum)
            node.attr["_handle_shapes"].list.shape.append(copy.shape.as_proto())
        return result

    def captures(self, masters: Iterable[str]) -> Sequence[tuple[tf.Tensor, str]]:
        """Returns (resource, name of its placeholder) of the copies of some masters."""
        return [(self._copies[name].handle, _name_of_copy(name)) for name in masters]


def _name_of_copy(master: str) -> str:
    return f"{master}_copy"
