"""Explains how a model's gradients would travel on any number of ranks, in one process without other ranks.

Tests: tests/training/test_explaining.py.
"""

import collections
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import numbers
import os
import sys
from typing import Any
import warnings

import keras
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.protobuf import config_pb2
from tensorflow.core.protobuf import meta_graph_pb2

from tf_poseidon import grappler
from tf_poseidon import options as options_lib
from tf_poseidon import planning
from tf_poseidon.compat import keras as keras_compat
from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.errors import ConfigurationError
from tf_poseidon.errors import GraphError
from tf_poseidon.errors import PoseidonError
from tf_poseidon.explanations import advice
from tf_poseidon.graph_passes import session
from tf_poseidon.job import worker_clocks
from tf_poseidon.keras_hook import hooks
from tf_poseidon.keras_hook.batch_loops import stale_steps
from tf_poseidon.keras_hook.coordination import coordinated_callbacks as callbacks_lib
from tf_poseidon.keras_hook.keras_objects import batch_normalization
from tf_poseidon.keras_hook.keras_objects import optimizers as optimizers_lib
from tf_poseidon.keras_hook.keras_objects import sharded_slots
from tf_poseidon.one_process import calls
from tf_poseidon.one_process import context
from tf_poseidon.one_process import partitioning
from tf_poseidon.one_process import rank_graphs
from tf_poseidon.one_process import tracing
from tf_poseidon.one_process.clocked import clocked_step
from tf_poseidon.one_process.partition_options import PartitionOptions
from tf_poseidon.staleness import bounds

# Prefix of the names of a step's nodes under `fit`: Keras' two functions call it, and it calls them.
_CALLS = 2 * "StatefulPartitionedCall/" + f"{rank_graphs.NODES}/"
_MEMORY_BYTES = sys.maxsize  # of a rank, which is unknown: enough for any model


def explain(model: keras.Model, batch_size: int, workers: int, bandwidth_gbps: float | None = None,
            policy: str = "auto",
            data: Any | None = None, servers: int = 0, latency_us: float | None = None,
            gflops: float | None = None, accelerators: bool | None = None, ranks_per_node: int = 1,
            pins: Mapping[str, str] | None = None, wire_dtype: str | None = None, merge: bool = False,
            global_batch_norm: bool = False, steps_per_execution: int = 1, gpus_per_node: int = 1,
            gpu_link_gbps: float = 0.0, dedicated_servers: int = 0, shard_update: bool | str = False,
            synchrony: str | bounds.Synchrony = bounds.BSP, network: str | None = None,
            accelerator: str | None = None) -> planning.Plan:
    """Returns the plan that training a model would follow, and why.

    Traces the training step of `model.fit`, and runs the passes on it that `fit` runs. Nothing is
    computed and nothing is sent, but a model that is not yet built is built.

    ```python
    print(poseidon.explain(model, batch_size=32, workers=8, bandwidth_gbps=10))
    ```

    Args:
        model: A Keras model. If it is not compiled, the mean square of its outputs is the loss.
        batch_size: Rows of a full batch on each worker, K in the paper: `fit` is given
            batch_size * workers.
        workers: Number of ranks, P1.
        bandwidth_gbps: Bandwidth at which a node sends, and receives at the same time, in 10^9 bits per
            second; None for 10, or that of `network`.
        policy: Same as in `PoseidonStrategy`.
        pins: Same as in `PoseidonStrategy`.
        wire_dtype: Same as in `PoseidonStrategy`.
        merge: Same as in `PoseidonStrategy`.
        global_batch_norm: Same as in `PoseidonStrategy`.
        data: A batch of any number of rows, as `fit` takes it: x, (x, y) or (x, y, sample_weight).
            None derives one from the inputs and outputs of the model, with whole numbers as targets of
            sparse losses; subclassed models have no such inputs before they are built.
        servers: Number of ranks that are servers, P2; 0 for all, dedicated servers included.
        latency_us: Latency of a message in microseconds; None for 50, or that of `network`.
        accelerators: Whether ranks compute on accelerators, same as in `Cluster`; None for what `accelerator` says.
        ranks_per_node: How many ranks share a node, same as in `Cluster`.
        gflops: How fast a rank computes, in 10^9 operations per second: about 1,000 on a server's
            processors, 10,000 and more on a GPU; None for 1,000, or that of `accelerator`. `poseidon.calibrate()`
            measures this machine.
        steps_per_execution: Same as in `compile`, whatever the model was compiled with: the steps of an execution
            overlap, and the plan says how far.
        gpus_per_node: How many ranks of a node have linked GPUs, same as in `Cluster`.
        gpu_link_gbps: The rate of these links in 10^9 bits per second, same as in `Cluster`.
        dedicated_servers: How many ranks only serve, in addition to the workers, same as in `Cluster`.
        shard_update: Same as in `PoseidonStrategy`, where "auto" goes by time alone.
        synchrony: Same as in `PoseidonStrategy`. What it does not go with is refused as there. The plan's times are
            those of steps for which ranks wait.
        network: "1GbE", "10GbE", "25GbE", "40GbE", "100GbE" or "200GbE", for `bandwidth_gbps` and `latency_us`.
        accelerator: "cpu", "titan-x", "v100", "a100" or "h100", for `gflops` and `accelerators`: rates that training in
            single precision reaches.

    Returns:
        A `Plan`. Its `total_bytes` are those that a node, worker and server, sends plus receives in a
        step.

    Raises:
        PoseidonError: If the model cannot be traced, or a value is out of range.
    """
    options = options_lib.PlanOptions(
        workers=workers, servers=servers, bandwidth_gbps=bandwidth_gbps, latency_us=latency_us, gflops=gflops,
        accelerators=accelerators, ranks_per_node=ranks_per_node, gpus_per_node=gpus_per_node,
        gpu_link_gbps=gpu_link_gbps, dedicated_servers=dedicated_servers, policy=policy, pins=pins,
        merge=merge, wire_dtype=wire_dtype, network=network, accelerator=accelerator)
    return _planned(model, batch_size, options, data, global_batch_norm, steps_per_execution, shard_update,
                    synchrony).plan


def advise(model: keras.Model, batch_size: int, workers: int, *, data: Any | None = None,
           global_batch_norm: bool = False, steps_per_execution: int = 1, shard_update: bool | str = False,
           synchrony: str | bounds.Synchrony = bounds.BSP, **options: Any) -> advice.Advice:
    """Returns what training a model would gain, and what would gain more, in about fifteen lines.

    ```python
    print(poseidon.advise(model, batch_size=32, workers=8, bandwidth_gbps=10))
    ```

    It plans as `explain` does, and then plans the same gradients again: by each policy, and for larger batches, fewer
    workers, faster links, steps that overlap, and numbers of fewer bits. Nothing is traced for that, unless "auto"
    divides weights, which other policies do not; larger batches and steps that overlap are estimates, and `explain`
    plans them exactly.

    Args:
        model: A Keras model, same as in `explain`.
        batch_size: Rows of a full batch on each worker.
        workers: Number of ranks.
        data: Same as in `explain`.
        global_batch_norm: Same as in `explain`.
        steps_per_execution: Same as in `explain`.
        shard_update: Same as in `explain`.
        synchrony: Same as in `explain`.
        **options: The other arguments of `explain`, by name.

    Returns:
        What to print, with the plan as `plan`.

    Raises:
        PoseidonError: If the model cannot be traced, or a value is out of range.
    """
    plan_options = options_lib.PlanOptions(workers=workers, **options)
    rest = (data, global_batch_norm, steps_per_execution, shard_update, synchrony)
    planned = _planned(model, batch_size, plan_options, *rest)
    plan = whole = planned.plan
    if plan.divided and not planned.planner.divides_weights:  # what other policies divide
        whole = _planned(model, batch_size, dataclasses.replace(plan_options, policy=planning.PS), *rest).plan
    is_assumed = options.get("gflops") is None and options.get("accelerator") is None
    return advice.of(plan, whole, planned.planner, batch_size, planned.may_overlap, bounds.of(synchrony) is None,
                     is_assumed)


@dataclasses.dataclass(frozen=True)
class _Planned:
    """What a model's step is planned as.

    Attributes:
        plan: The plan.
        planner: What has made it.
        may_overlap: Whether nothing holds back steps that overlap in one execution.
    """

    plan: planning.Plan
    planner: planning.Planner
    may_overlap: bool


def _planned(model: keras.Model, batch_size: int, plan_options: options_lib.PlanOptions, data: Any | None,
             global_batch_norm: bool, steps_per_execution: int, shard_update: bool | str,
             synchrony: str | bounds.Synchrony) -> _Planned:
    """Traces and plans a model's step; arguments as in `explain`."""
    if not isinstance(model, keras.Model):
        raise ConfigurationError(f"explain was given a {type(model).__name__}, expected a Keras model; load "
                                 "one from a file with keras.models.load_model.")
    for name, value, least in (("batch_size", batch_size, "one row per worker"),
                               ("steps_per_execution", steps_per_execution, "one step")):
        if not isinstance(value, numbers.Integral) or value < 1:
            raise ConfigurationError(f"{name}={value!r}, expected a whole number, at least {least}.")
    pins, merge, wire_dtype = dict(plan_options.pins or {}), plan_options.merge, plan_options.wire_dtype
    clocks = worker_clocks.Clocks(bounds.of(synchrony))
    if clocks.synchrony is not None:
        plan_options = dataclasses.replace(plan_options, policy=options_lib.TrainingOptions(
            plan_options.policy, pins=tuple(pins.items()), wire_dtype=wire_dtype, merge=merge,
            global_batch_norm=global_batch_norm, shard_update=shard_update, synchrony=clocks.synchrony).policy)
        stale_steps.check(model, clocks.synchrony)
    planner, workers = plan_options.planner(), plan_options.cluster.workers
    options_lib.TrainingOptions(shard_update=shard_update)  # checks it
    _check_can_be_planned(model)
    # A single worker would synchronise nothing, so its step is partitioned for two.
    ranks = max(workers, 2)
    rows = batch_size * ranks
    with hooks.installed():
        try:
            element = keras.tree.lists_to_tuples(_element(model, data))
            with batch_normalization.of_all_rows() if global_batch_norm else contextlib.nullcontext():
                step = _trace(model, element, rows)
        except PoseidonError:
            raise
        except Exception as error:  # whatever Keras or the model itself says
            hint = ("if that is about inputs or targets, give explain a batch as fit takes it: "
                    "data=(x, y)" if data is None else "data must be arrays as fit takes them: x, "
                    "(x, y) or (x, y, sample_weight)")
            text = str(error).strip().split("\n")[-1].strip().rstrip(".")
            raise GraphError(f"The training step of '{model.name}' cannot be traced: "
                             f"{type(error).__name__}: {text}; {hint}.") from error
        if not model.trainable_variables:
            raise GraphError(f"The model '{model.name}' has no trainable variables, so there is nothing "
                             "to synchronise.")
        # As in `fit` without callbacks that read logs of batches.
        metrics = [variable.value for variable in model.metrics_variables if variable.aggregation == "sum"]
        rewriting = session.RewriteSession(planner)
        optimizers = callbacks_lib.optimizers_of(model)
        layouts = dict(collections.ChainMap(*(
            sharded_slots.layouts(optimizer, planner) for optimizer in _with_inner(optimizers))))
        accumulators = [each for each in callbacks_lib.accumulators(model) if id(each) not in layouts]
        masters = sharded_slots.masters(optimizers)
        options = PartitionOptions(ranks, rows, trains=True, wire_dtype=wire_dtype, inlines=True,
                                   session=rewriting, layouts=layouts, masters=masters,
                                   loads=dict.fromkeys(range(min(plan_options.servers or ranks, ranks)), 0),
                                   shard_update=bool(shard_update),
                                   only_if_shorter=shard_update == options_lib.AUTO,
                                   memory_bytes=_MEMORY_BYTES)
        partition = partitioning.partition(step, options, accumulators,
                                           candidates=metrics if model.compiled else None)
        graphs = rank_graphs.RankGraphs(partition)
        graph_pass = grappler.GraphPass(rewriting)
        of_step = graph_pass.expect(partition.number, partition.facts, partition.has_sites)
        if clocks.synchrony is not None:  # single steps, in two parts
            clocked = clocked_step.ClockedStep(partition, clocks, rewriting)
            of_step.note(clocked.plan)
            of_step.overlap = clocked.overlap
        else:
            steps = graphs.unrolled_steps(steps_per_execution) if steps_per_execution > 1 else 1
            with graph_pass.registered():
                _optimize(graphs.marked("") if steps == 1 else graphs.unrolled(steps))
            if steps_per_execution > 1:
                of_step.overlap = str(graphs.order)
        if not partition.has_sites:  # all weights are divided: TensorFlow hands the graph to no pass
            of_step.note(_plan_of_exchanges(partition, rewriting))
    plan = of_step.plan
    if plan.refusal:
        raise GraphError(f"The training step of '{model.name}' cannot be planned: {plan.refusal}")
    weights = [variable.value for variable in model.variables]
    slots = [variable.value for optimizer in optimizers for variable in optimizer.variables]
    divided = {weight.path for weight in partition.divided}
    paths = [(variable, masters[id(variable)]) for variable in partition.shards if id(variable) in masters]
    copies = sum(2 * variable.shape.num_elements() for variable, path in paths if path not in divided)
    others = _bytes([variable for variable, path in paths if path in divided]) * (workers - 1) // workers
    plan = dataclasses.replace(plan, memory=planning.Memory(
        _most(weights, partition, workers) + copies, _bytes(weights),
        _bytes([variable.value for variable in model.trainable_variables]) - others,
        _most(slots, partition, workers), _bytes(slots), round((plan.total_bytes or 0) / 2)))
    order = graphs.order
    return _Planned(plan, planner, not (order.obstacle or order.joint or order.whole))


def _plan_of_exchanges(partition: partitioning.Partition, rewriting: session.RewriteSession) -> planning.Plan:
    """Returns the plan of a step that synchronises no gradient."""
    plan = rewriting.plan_of(partition.graph_def(), partition.options.facts, grappler.add_shapes)
    return dataclasses.replace(plan, whole=partition.facts.whole, divided=partition.facts.divided)


def _most(variables: Sequence[tf.Variable], partition: partitioning.Partition, workers: int) -> int:
    """Returns the bytes of variables that the rank holds that holds most."""
    identities = {id(variable) for variable in variables}
    of_owner = collections.Counter[int]()
    for variable, division in zip(partition.shards, partition.divisions, strict=True):
        if id(variable) in identities:
            of_owner[division.owner] += _bytes([variable])
    whole = _bytes(variables) - of_owner.total()
    return whole + of_owner.pop(-1, 0) // workers + max(of_owner.values(), default=0)


def _with_inner(optimizers: Iterable[keras.optimizers.Optimizer]) -> list[keras.optimizers.Optimizer]:
    """Returns optimizers and those that they wrap, as far as they are built."""
    return [inner for optimizer in optimizers for inner in optimizers_lib.with_inner(optimizer) if inner.built]


def _bytes(variables: Iterable[tf.Variable]) -> int:
    return sum(variable.shape.num_elements() * variable.dtype.size for variable in variables)


def load(path: str | os.PathLike[str]) -> keras.Model:
    """Returns the model in a file that `model.save` has written.

    Raises:
        PoseidonError: If it is not such a file, or the model has classes that Keras does not know.
    """
    try:
        with warnings.catch_warnings():  # plans do not depend on an optimizer's values
            warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
            return keras.models.load_model(path)
    except Exception as error:  # Keras raises many kinds
        text = str(error).strip().split("\n")[0].rstrip(".")
        raise GraphError(f"Keras cannot load '{path}': {text}; give a model saved with "
                         "model.save('model.keras'), or explain a model with classes of your own "
                         "by poseidon.explain(model, ...) in your program.") from error


def _check_can_be_planned(model: keras.Model) -> None:
    """Refuses models that fit would refuse, or run without a plan."""
    if tf.distribute.has_strategy():
        raise GraphError("explain was called inside a strategy's scope, where it would trace the step for "
                         "that strategy's job: call it outside `with strategy.scope():`.")
    # With accelerators, Keras resolves "auto" to True, but inside a strategy's scope to False.
    if model.compiled and model.jit_compile and not tf.config.list_physical_devices("GPU"):
        raise GraphError(f"The model '{model.name}' is compiled with jit_compile=True, which fit "
                         "under PoseidonStrategy refuses; use compile(jit_compile=False).")
    if model.compiled and model.run_eagerly:
        raise GraphError(f"The model '{model.name}' runs eagerly, where there is no graph to plan and "
                         "every rank computes the whole batch; use compile(run_eagerly=False).")


def _element(model: keras.Model, data: Any) -> tuple[Any, ...]:
    """Returns the specs of one row of a batch, nested like the batches that `fit` hands to a step."""
    if data is not None:
        rows = tf.data.Dataset.from_tensor_slices(keras.tree.lists_to_tuples(data)).element_spec
        return rows if isinstance(rows, tuple) else (rows,)
    functional = keras_compat.functional(model) if isinstance(model, keras.Sequential) else model
    if not isinstance(functional, keras.Function):
        raise GraphError(
            f"The inputs of the model '{model.name}' are unknown, since it was subclassed or is not built; "
            "give explain a batch: data=(x, y).")
    x = keras.tree.map_structure(_row, functional.input)
    if not model.compiled:
        return (x,)
    outputs, loss = functional.output, model.loss
    if isinstance(outputs, dict):
        return x, {name: _target(output, loss.get(name) if isinstance(loss, dict) else loss)
                   for name, output in outputs.items()}
    flat = keras.tree.flatten(outputs)
    if isinstance(loss, dict):  # by the names of the outputs
        losses = [loss.get(name) for name in model.output_names]
    else:
        losses = list(loss) if isinstance(loss, (list, tuple)) else [loss] * len(flat)
    return x, keras.tree.pack_sequence_as(outputs, list(map(_target, flat, losses)))


def _target(output: keras.KerasTensor, loss: Any) -> tf.TensorSpec:
    """Returns the spec of one row of the targets of an output."""
    row = _row(output)
    name = getattr(loss, "name", None) or getattr(loss, "__name__", None) or str(loss)
    is_sparse = "sparse" in name or isinstance(loss, keras.losses.SparseCategoricalCrossentropy)
    return tf.TensorSpec(row.shape[:-1], tf.int32) if is_sparse else row


def _row(tensor: keras.KerasTensor) -> tf.TensorSpec:
    """Returns the spec of one row of a KerasTensor."""
    if None in tensor.shape[1:]:
        raise GraphError(f"The shape of '{tensor.name}' is {tensor.shape}, but the cost of a step "
                         "depends on all sizes; give explain a batch: data=(x, y).")
    return tf.TensorSpec(tensor.shape[1:], tensor.dtype)


def _trace(model: keras.Model, element: Any, total: int) -> tf.types.experimental.ConcreteFunction:
    """Returns the training step of a model, as one process runs it on batches of `total` rows: a ConcreteFunction."""
    strategy = model.distribute_strategy
    with tf.Graph().as_default():  # where tensors take no memory
        batch = tf.nest.map_structure(
            lambda spec: tf.compat.v1.placeholder(spec.dtype, [total, *spec.shape]), element)
    step = model.train_step if model.compiled else lambda batch: _plain_step(model, batch)
    call = calls.Call(step, {}, (batch,), {})
    step = context.as_step(step)
    if not hasattr(strategy.extended, "one_replica"):  # plain Keras
        return tracing.traced(step, call)
    with strategy.scope():
        return tracing.traced(step, call, strategy.extended.one_replica)


def _plain_step(model: keras.Model, batch: tuple[Any, ...]) -> None:
    """Runs a training step of a model that is not compiled."""
    with tf.GradientTape() as tape:
        outputs = keras.tree.flatten(model(batch[0], training=True))
        loss = tf.add_n([tf.reduce_mean(tf.square(tf.cast(y, tf.float32))) for y in outputs])
    variables = [variable.value for variable in model.trainable_variables]
    for variable, gradient in zip(variables, tape.gradient(loss, variables)):
        if isinstance(gradient, tf.IndexedSlices):
            variable.scatter_sub(gradient)
        elif gradient is not None:
            variable.assign_sub(gradient)


def _optimize(step: tf.types.experimental.ConcreteFunction) -> None:
    """Runs TensorFlow's graph optimizer, and with it our passes, on a partitioned step."""
    graph_def = step.graph.as_graph_def(add_shapes=True)
    nodes = {node.name: node for node in graph_def.node}
    for index, argument in enumerate(step.inputs):
        if argument.dtype == tf.resource:
            _make_argument(nodes[argument.op.name], index, argument)
    for node in graph_def.node:
        node.name = _CALLS + node.name
        for i, tensor in enumerate(node.input):
            node.input[i] = f"^{_CALLS}{tensor[1:]}" if tensor.startswith("^") else _CALLS + tensor
        places = node.attr["_class"].list.s if "_class" in node.attr else []
        places[:] = [place.replace(b"loc:@", b"loc:@" + _CALLS.encode()) for place in places]
    meta_graph = meta_graph_pb2.MetaGraphDef(graph_def=graph_def)
    meta_graph.collection_def["train_op"].node_list.value.extend(
        [_CALLS + tensor.name for tensor in step.outputs]
        + [_CALLS + operation.name for operation in step.graph.control_outputs])
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.min_graph_nodes = -1  # small graphs too
    tf_compat.optimize(config, meta_graph)


def _make_argument(node: node_def_pb2.NodeDef, index: int, tensor: tf.Tensor) -> None:
    """Turns a variable's placeholder into an argument, as in a function that runs, with its handle's shape and type."""
    node.op = "_Arg"
    node.attr.clear()
    node.attr["T"].type = tensor.dtype.as_datatype_enum
    node.attr["index"].i = index
    for part in tf_compat.handle_data(tensor).shape_and_type:
        node.attr["_handle_dtypes"].list.type.append(part.dtype)
        node.attr["_handle_shapes"].list.shape.append(part.shape)
