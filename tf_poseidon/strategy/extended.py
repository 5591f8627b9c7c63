"""What tf.distribute requires of a strategy: variables, steps, reductions and data of the job's ranks.

Tests: tests/training/test_training.py, tests/scripts/test_distribute_contract.py.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
from typing import Any
import weakref

import tensorflow as tf

from tf_poseidon import ops
from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.data import changing_shares
from tf_poseidon.data import datasets
from tf_poseidon.data import input_report
from tf_poseidon.data import row_selection
from tf_poseidon.errors import GraphError
from tf_poseidon.job.joined_job import Job
from tf_poseidon.loops import loop_variables as variables_lib
from tf_poseidon.loops import step as step_lib
from tf_poseidon.one_process import context
from tf_poseidon.ops import sites
from tf_poseidon.options import TrainingOptions
from tf_poseidon.strategy import row_maps

_OF_FIT = " of fit"


class _ReplicaContext(tf.distribute.ReplicaContext):
    """The context of one rank's step."""

    def __init__(self, strategy: tf.distribute.Strategy, rank: int) -> None:
        super().__init__(strategy, replica_id_in_sync_group=rank)

    @property
    def devices(self) -> Sequence[str]:
        return self.strategy.extended.worker_devices


class _OneReplicaContext(_ReplicaContext):
    """The context of a function of one process."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__(strategy, 0)

    def all_reduce(self, reduce_op: tf.distribute.ReduceOp, value: Any, options: Any | None = None) -> Any:
        """Returns `value`; TensorFlow's registry of gradients would keep everything that passes here, and its graph.

        Raises:
            ValueError: If `reduce_op` is neither SUM nor MEAN, as on several ranks.
        """
        if isinstance(reduce_op, str):
            tf.distribute.ReduceOp(reduce_op.upper())
        del options
        return tf.nest.map_structure(lambda x: x if isinstance(x, tf.IndexedSlices) else tf.convert_to_tensor(x), value)


class Extended(tf_compat.one_device_extended()):  # type: ignore[misc]
    """One device in this process, and a job of `size` processes around it.

    TensorFlow requires a strategy to override the methods below, private ones included: `compat.tensorflow` has them.
    """

    def __init__(self, container_strategy: tf.distribute.Strategy, job: Job | None, training: TrainingOptions) -> None:
        has_gpu = bool(tf.config.get_visible_devices("GPU"))
        super().__init__(container_strategy, "/gpu:0" if has_gpu else "/cpu:0")
        self.job = job  # None if this process runs alone
        self.rank, self.size = (job.rank, job.size) if job else (0, 1)
        # As MultiWorkerMirroredStrategy has it: KerasTuner names temporary directories of other ranks after it.
        self._task_id = self.rank
        # A tf.function of the program's own uses shards where a step calls it: elsewhere it has another graph.
        self._retrace_functions_for_each_device = job is not None and (job.shard_update or job.divides_weights)
        self.global_batch_norm = training.global_batch_norm
        self._is_independent = training.input == "independent"
        self._num_datasets, self._method = 0, ""
        # By split dataset: the dataset of global batches that it was made from, None if there is none.
        self._split_datasets: weakref.WeakKeyDictionary[tf.data.Dataset, Any] = weakref.WeakKeyDictionary()
        # By dataset of own rows: the dataset that it was made from, and the shares.
        self._shared: weakref.WeakKeyDictionary[tf.data.Dataset, tuple[tf.data.Dataset, tuple[int, ...]]] = (
            weakref.WeakKeyDictionary())

    @property
    def _ranks(self) -> Job:
        """The job of several processes."""
        assert self.job is not None
        return self.job

    @property
    def _num_replicas_in_sync(self) -> int:
        return 1 if context.is_inside() else self.size

    @contextlib.contextmanager
    def one_replica(self) -> Iterator[None]:
        """A context in which the only replica of a one-process function runs, or is traced."""
        with tf.device(self.worker_devices[0]), _OneReplicaContext(self._container_strategy()):
            yield

    def one_replica_in_scope(self) -> contextlib.AbstractContextManager[Any]:
        """Returns `one_replica`; outside the strategy's scope, where the context is the program's own, an empty one."""
        return self.one_replica() if tf.distribute.get_strategy().extended is self else contextlib.nullcontext()

    def _in_multi_worker_mode(self) -> bool:
        return self.size > 1

    def _use_merge_call(self) -> bool:
        return False  # one replica in this process: there is nothing to merge

    # ---- variables ----

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> tf.Variable:
        if self.size == 1:
            return super()._create_variable(next_creator, **kwargs)
        if tf.executing_eagerly():
            variable = variables_lib.distributed(super()._create_variable(next_creator, **kwargs), self._ranks)
            self._ranks.new_variables.add(variable)
            return variable
        if context.is_inside():  # `tracing.trace` shares the variables of its function
            return variables_lib.distributed(super()._create_variable(next_creator, **kwargs), self._ranks)
        # In a function under construction: the value is computed when the function first runs.
        initial_value, dtype = kwargs["initial_value"], kwargs.get("dtype")
        site = sites.unique_site(f"variables/{kwargs.get('name')}")
        kwargs["initial_value"] = lambda: ops.broadcast(
            tf.convert_to_tensor(initial_value() if callable(initial_value) else initial_value,
                                 dtype), site)
        return variables_lib.distributed(super()._create_variable(next_creator, **kwargs), self._ranks)

    # ---- running steps ----

    def _call_for_each_replica(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._num_replicas_in_sync == 1:
            with self.one_replica():
                return fn(*args, **kwargs)
        runner = context.current_runner()
        if runner is not None:
            return runner.run(fn, args, kwargs)
        if not tf.executing_eagerly():
            return self._run_replica(fn, args, kwargs)
        try:
            return self._run_replica(fn, args, kwargs)
        except Exception as error:
            self._ranks.errors.note(error, "strategy.run")
            raise

    def _run_replica(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Runs a function on this rank's rows."""
        strategy, job = self._container_strategy(), self._ranks
        job.new_variables.broadcast()
        share = step_lib.Share.of(datasets.all_rows((args, kwargs)), self.size)
        job.clocks.check_bsp("strategy.run")
        step = step_lib.Step(share, job.verifier, job.wire_dtype)
        args, kwargs = datasets.values((args, kwargs))
        with tf.device(self.worker_devices[0]), _ReplicaContext(strategy, self.rank), step.active():
            result = fn(*args, **kwargs)
            step.average_state()
            step.verify_weights()
            if step.agree(job.strict):
                job.graph_pass.expect()
            return self._without_padding_rows(step, result)

    def _without_padding_rows(self, step: step_lib.Step, result: Any) -> Any:
        """Returns the result of a step without the results of a padding row."""
        def without(x: Any) -> Any:
            if step.share.contributes is True or not tf.is_tensor(x):
                return x
            zeros = step.select(x, tf.zeros_like(x))
            # A tensor without rows, or one that was computed from a single row.
            if x.shape.rank == 0 or x.shape[0] not in (None, 1):
                return zeros
            rows = tf.shape(x)[0]
            return zeros[:tf.where(step.share.contributes | (rows != 1), rows, 0)]

        return tf.nest.map_structure(without, result)

    def _local_results(self, value: Any) -> tuple[Any, ...]:
        return (datasets.own_rows(value),)

    @property
    def should_checkpoint(self) -> bool:
        return self.rank == 0

    @property
    def should_save_summary(self) -> bool:
        return self.rank == 0

    # ---- reducing ----

    def _replica_ctx_all_reduce(self, reduce_op: tf.distribute.ReduceOp, value: Any, options: Any | None = None) -> Any:
        del options
        if self._num_replicas_in_sync == 1:
            return value
        step = step_lib.current()
        assert step is not None  # in a replica's context
        if step.is_applying:  # inside an optimizer, gradients are already synchronised
            return value
        reduce = {tf.distribute.ReduceOp.SUM: step.all_reduce,
                  tf.distribute.ReduceOp.MEAN: step.mean}[reduce_op]
        return tf.nest.map_structure(lambda x: reduce(tf.convert_to_tensor(x), "all_reduce"), value)

    def _reduce_to(self, reduce_op: tf.distribute.ReduceOp, value: Any, destinations: Any, options: Any) -> Any:
        del destinations, options
        if self._num_replicas_in_sync == 1:
            return value

        def reduce(part: Any) -> tf.Tensor:
            total = ops.all_reduce(tf.convert_to_tensor(part), sites.unique_site("reduce"))
            is_mean = reduce_op == tf.distribute.ReduceOp.MEAN
            return total / tf.cast(self.size, total.dtype) if is_mean else total

        return tf.nest.map_structure(reduce, value)

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> Any:
        del destinations, options
        return self.gather(value, axis)

    def gather(self, value: Any, axis: int = 0) -> Any:
        """Returns the tensors of all ranks, concatenated along an axis in rank order."""
        if self._num_replicas_in_sync == 1:
            return value
        step = step_lib.current()
        contributes = True if step is None else step.share.contributes

        def gather_one(part: Any) -> Any:
            if isinstance(part, tf.RaggedTensor) and axis == 0:
                return ops.all_gather(part, sites.unique_site("gather"), contributes)
            if isinstance(part, (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)):
                raise GraphError(f"A {type(part).__name__} cannot be gathered from all ranks along "
                                 f"axis {axis}; convert it to a dense tensor.")
            part = tf.convert_to_tensor(part)
            if part.shape.rank == 0:
                raise GraphError("A scalar cannot be gathered from all ranks; give it a dimension "
                                 "with tf.expand_dims, or use strategy.reduce.")
            if not -part.shape.rank <= axis < part.shape.rank:
                raise GraphError(f"A tensor with {part.shape.rank} dimensions cannot be gathered along axis {axis}, "
                                 f"expected {-part.shape.rank} to {part.shape.rank - 1}; give an axis that it has.")
            # The axis becomes the first dimension, and then returns to its place.
            front = list(range(part.shape.rank))
            front.insert(0, front.pop(axis))
            rows = tf.transpose(part, front) if axis else part
            rows = ops.all_gather(rows, sites.unique_site("gather"), contributes)
            return tf.transpose(rows, tf.math.invert_permutation(front)) if axis else rows

        return tf.nest.map_structure(gather_one, value)

    # ---- data ----

    def _experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any) -> tf.data.Dataset:
        if self.size == 1:
            return dataset
        if context.is_inside():
            dataset = self._split_datasets.get(dataset) or dataset
            if dataset in self._split_datasets:
                return dataset
            distributed = datasets.global_dataset(dataset, self._next_ranks(), self._ranks.communicator)
            if datasets.has_own_rows(distributed):
                self._shared[distributed] = dataset, self.row_shares
            return distributed
        if dataset in self._split_datasets:
            return dataset
        split = datasets.split_dataset(dataset, self._next_ranks(), self._ranks.communicator)
        self._split_datasets[split] = dataset
        return split

    def with_present_shares(self, distributed: tf.data.Dataset) -> tf.data.Dataset:
        """Returns a dataset whose rows ranks share as they do now, in place of one that was distributed before."""
        dataset, shares = self._shared.get(distributed, (None, ()))
        is_present = dataset is None or shares == self.row_shares or datasets.changing(distributed) is not None
        return distributed if is_present else (
            self._experimental_distribute_dataset(dataset, None))

    def _distribute_datasets_from_function(self, dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
                                           options: Any) -> tf.data.Dataset:
        own = dataset_fn(tf.distribute.InputContext(self.size, self.rank, self.size))
        if self.size == 1:
            return own
        joined = datasets.join_datasets(own, self._next_ranks())
        self._split_datasets[joined] = None
        return joined

    @contextlib.contextmanager
    def in_method(self, name: str) -> Iterator[None]:
        """A context in which datasets belong to a call of a model's method, and are numbered from 0 in each call.

        So a process that calls it for one model after the other exchanges under the same names.
        """
        outer, self._num_datasets, self._method = (self._num_datasets, self._method), 0, f" of {name}"
        try:
            yield
        finally:
            self._num_datasets, self._method = outer

    def _next_ranks(self) -> row_selection.Ranks:
        """Returns the ranks that divide the batches of the next dataset."""
        self._num_datasets += 1
        number, shares = self._num_datasets - 1, self.row_shares
        may_change = self._ranks.row_shares.is_balanced and (number, self._method) == (0, _OF_FIT)  # training data
        return row_selection.Ranks(
            self.rank, shares, f"dataset {number}{self._method}", self._is_independent, row_maps.by_rows,
            changing_shares.ChangingShares(shares) if may_change else None)

    def explain_input(self, dataset: tf.data.Dataset) -> input_report.InputReport:
        """Returns what of a dataset each rank runs for its own rows."""
        return datasets.select(dataset, row_selection.Ranks(
            self.rank, self.row_shares, "", self._is_independent, row_maps.by_rows))[1]

    @property
    def row_shares(self) -> tuple[int, ...]:
        """By rank, how many rows of a global batch it has in proportion to others."""
        return (1,) if self.job is None else self.job.row_shares.current

    def _experimental_distribute_values_from_function(self, value_fn: Callable[..., Any]) -> Any:
        return value_fn(tf.distribute.experimental.ValueContext(self.rank, self.size))
