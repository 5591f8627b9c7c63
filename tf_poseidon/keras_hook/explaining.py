"""Says how a model's gradients would travel, on any number of ranks: in one process, without any of them."""

import contextlib
import functools
import numbers
import types

import keras
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.protobuf import config_pb2
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow.core.protobuf import rewriter_config_pb2
from tensorflow.python.grappler import tf_optimizer
from tensorflow.python.ops import handle_data_util

from tf_poseidon import grappler
from tf_poseidon import options as options_lib
from tf_poseidon import planning
from tf_poseidon import step as step_lib
from tf_poseidon import strategy as strategy_lib
from tf_poseidon.errors import PoseidonError
from tf_poseidon.keras_hook import common
from tf_poseidon.keras_hook import hooks
from tf_poseidon.keras_hook import optimizers
from tf_poseidon.keras_hook import trainer


def explain(model, batch_size, workers, bandwidth_gbps=10.0, policy="auto", data=None, servers=0,
            latency_us=50.0, gflops=1000.0, accelerators=False, ranks_per_node=1, pins=None,
            wire_dtype=None, merge=False):
    """Returns the plan that training a model would follow, and why.

    Traces the training step of `model.fit`, and runs the passes on it that `fit` runs; nothing is
    computed and nothing is sent, but a model that is not built yet is built.

    ```python
    print(poseidon.explain(model, batch_size=32, workers=8, bandwidth_gbps=10))
    ```

    Args:
        model: A Keras model. One that is not compiled is explained with the mean square of its outputs
            as the loss.
        batch_size: Rows of a full batch on each worker, K in the paper: `fit` is given
            batch_size * workers.
        workers: Number of ranks, P1.
        bandwidth_gbps: What a node sends, and receives at the same time, in 10^9 bits per second.
        policy, pins, wire_dtype, merge: As of `PoseidonStrategy`.
        data: A batch of any number of rows, as `fit` takes it: x, (x, y) or (x, y, sample_weight).
            None makes one by the inputs and outputs of the model, with whole numbers as targets of
            sparse losses; subclassed models have no such inputs before they are built.
        servers: Number of ranks that are servers, P2; 0 for all.
        latency_us: Latency of a message in microseconds.
        accelerators: Whether ranks compute on accelerators, as of `Cluster`.
        ranks_per_node: How many ranks share a node, as of `Cluster`.
        gflops: How fast a rank computes, in 10^9 operations per second: some 1,000 on a server's
            processors, 10,000 and more on a GPU. `poseidon.calibrate()` measures this machine.

    Returns:
        A `Plan`. Its `total_bytes` are what a node that is worker and server sends plus receives in a
        step.

    Raises:
        PoseidonError: If the model cannot be traced, or a value is out of range.
    """
    if not isinstance(model, keras.Model):
        raise PoseidonError(f"explain was given a {type(model).__name__}, expected a Keras model; load "
                            "one from a file with keras.models.load_model.")
    if not isinstance(batch_size, numbers.Integral) or batch_size < 1:
        raise PoseidonError(f"batch_size={batch_size!r}, expected at least one row for each worker, a "
                            "whole number.")
    if wire_dtype not in options_lib.WIRE_DTYPES:
        raise PoseidonError(f"wire_dtype={wire_dtype!r}, expected 'bfloat16' or None.")
    _check_can_be_planned(model)
    cluster = planning.Cluster(workers, servers, bandwidth_gbps, latency_us, gflops, accelerators,
                               ranks_per_node)
    planner = planning.Planner(cluster, policy, tuple(dict(pins or {}).items()), merge)
    planner.plan(())  # checks policy and pins before anything takes long
    # One worker alone would synchronise nothing: its step is traced as that of one of two.
    ranks = max(workers, 2)
    strategy = _Planned(ranks, wire_dtype)
    with hooks.installed():
        try:
            element = keras.tree.lists_to_tuples(_element(model, data))
            function = _trace(model, element, batch_size * ranks, strategy)
        except PoseidonError:
            raise
        except Exception as error:  # whatever Keras or the model itself says
            hint = ("if that is about inputs or targets, give explain a batch as fit takes it: "
                    "data=(x, y)" if data is None else "data has to be arrays as fit takes them: x, "
                    "(x, y) or (x, y, sample_weight)")
            text = str(error).strip().split("\n")[-1].strip().rstrip(".")
            raise PoseidonError(f"The training step of '{model.name}' cannot be traced: "
                                f"{type(error).__name__}: {text}; {hint}.") from error
        graph_pass = grappler.GraphPass(planner)
        with graph_pass.registered():
            _optimize(function)
    if graph_pass.plan is None:
        raise PoseidonError(f"The model '{model.name}' has no trainable variables, so there is nothing "
                            "to synchronise.")
    if graph_pass.plan.refusal:
        raise PoseidonError(f"The training step of '{model.name}' cannot be planned: "
                            f"{graph_pass.plan.refusal}")
    return graph_pass.plan


def load(path):
    """Returns the model in a file that `model.save` has written.

    Raises:
        PoseidonError: If it is no such file, or the model has classes that Keras does not know.
    """
    try:
        return keras.models.load_model(path)
    except Exception as error:  # Keras raises many kinds
        text = str(error).strip().split("\n")[0].rstrip(".")
        raise PoseidonError(f"Keras cannot load '{path}': {text}; it has to be a model of "
                            "model.save('model.keras'), and one with classes of your own is explained "
                            "by poseidon.explain(model, ...) in your program.") from error


def _check_can_be_planned(model):
    """Refuses what fit would refuse, or run without a plan."""
    if tf.distribute.has_strategy():
        raise PoseidonError("explain was called inside of a strategy's scope, but makes one of its own: "
                            "call it outside of `with strategy.scope():`.")
    config = getattr(getattr(model, "_compile_config", None), "config", {})
    if config.get("jit_compile") is True:
        raise PoseidonError(f"The model '{model.name}' is compiled with jit_compile=True, which fit "
                            "under PoseidonStrategy refuses; use compile(jit_compile=False).")
    if model.compiled and model.run_eagerly:
        raise PoseidonError(f"The model '{model.name}' runs eagerly, where there is no graph to plan and "
                            "all gradients travel dense; use compile(run_eagerly=False).")


class _Planned(tf.distribute.Strategy):
    """Rank 0 of a job that there is only in thought: its steps can be traced, but not run."""

    def __init__(self, workers, wire_dtype):
        extended = _PlannedExtended(self, workers)
        extended.wire_dtype = wire_dtype
        super().__init__(extended)


class _PlannedExtended(strategy_lib.Extended):

    def __init__(self, strategy, workers):
        super().__init__(strategy, communicator=None)
        self.size = workers
        self.communicator = object()  # what tells the hooks to act
        self.graph_pass = types.SimpleNamespace(strict=False, expect=lambda: None)

    def broadcast_new_variables(self):
        """There is nobody to have them."""

    def _create_variable(self, next_creator, **kwargs):
        return next_creator(**kwargs)

    def _validate_colocate_with_variable(self, colocate_with_variable):
        """The model's variables are of another strategy, or none."""


def _element(model, data):
    """Returns the specs of one row of a batch: nested like what `fit` hands to a step."""
    if data is not None:
        rows = tf.data.Dataset.from_tensor_slices(keras.tree.lists_to_tuples(data)).element_spec
        return rows if isinstance(rows, tuple) else (rows,)
    functional = getattr(model, "_functional", None) or model  # of a Sequential
    if getattr(functional, "_inputs_struct", None) is None:
        raise PoseidonError(
            f"The model '{model.name}' does not say what its inputs are, since it was subclassed or is "
            "not built; give explain a batch: data=(x, y).")
    x = keras.tree.map_structure(_row, functional._inputs_struct)
    if not model.compiled:
        return (x,)
    outputs, loss = functional._outputs_struct, model._compile_loss._user_loss
    if isinstance(outputs, dict):
        return x, {name: _target(output, loss.get(name) if isinstance(loss, dict) else loss)
                   for name, output in outputs.items()}
    flat = keras.tree.flatten(outputs)
    if isinstance(loss, dict):  # by the names of the outputs
        losses = [loss.get(name) for name in model.output_names]
    else:
        losses = loss if isinstance(loss, (list, tuple)) else [loss] * len(flat)
    return x, keras.tree.pack_sequence_as(outputs, list(map(_target, flat, losses)))


def _target(output, loss):
    """Returns the spec of one row of the targets of an output."""
    row = _row(output)
    name = getattr(loss, "name", None) or getattr(loss, "__name__", None) or str(loss)
    is_sparse = "sparse" in name or isinstance(loss, keras.losses.SparseCategoricalCrossentropy)
    return tf.TensorSpec(row.shape[:-1], tf.int32) if is_sparse else row


def _row(tensor):
    """Returns the spec of one row of a KerasTensor."""
    if None in tensor.shape[1:]:
        raise PoseidonError(f"The shape of '{tensor.name}' is {tensor.shape}, but what a step costs "
                            "depends on all sizes; give explain a batch: data=(x, y).")
    return tf.TensorSpec(tensor.shape[1:], tensor.dtype)


def _trace(model, element, total, strategy):
    """Returns the training step of a model as a concrete function, for batches of `total` rows."""
    dataset = tf.data.Dataset.range(total).map(lambda _: tf.nest.map_structure(
        lambda spec: tf.zeros(spec.shape, spec.dtype), element)).batch(total)
    has_call = type(model).call is not keras.Model.call  # as that of a GAN has not
    if model.compiled and has_call:
        with model.distribute_strategy.scope():
            model._symbolic_build(data_batch=dataset.element_spec)

    steps = [functools.partial(_plain_step, model)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(common.replaced(model, "_distribute_strategy", strategy))
        for optimizer in _optimizers(model):
            stack.enter_context(common.replaced(optimizer, "_distribution_strategy", strategy))
        if model.compiled:  # the step that the hook makes of the model's
            trainer.make_function(lambda _, step: steps.append(step), model, model.train_step)
        iterator = iter(strategy.experimental_distribute_dataset(dataset))

        # Two functions, as in Keras: so the nodes have the names that they have in `fit`.
        @tf.function
        @tf.autograph.experimental.do_not_convert
        def one_step(batch):
            return strategy.run(steps[-1], args=(batch,))

        @tf.function
        @tf.autograph.experimental.do_not_convert
        def function(iterator):
            return one_step(iterator.get_next())

        return function.get_concrete_function(iterator)


def _optimizers(model):
    """Returns the optimizers of a model: that of compile, and those of its own, as a GAN has them."""
    values = []
    for value in vars(model).values():
        values += (value.values() if isinstance(value, dict) else
                   value if isinstance(value, (list, tuple)) else [value])
    found = [value for value in values if isinstance(value, keras.optimizers.Optimizer)]
    found = [inner for optimizer in found for inner in optimizers.with_inner(optimizer)]
    return {id(optimizer): optimizer for optimizer in found}.values()


def _plain_step(model, batch):
    """A training step of a model that is not compiled."""
    with tf.GradientTape() as tape:
        outputs = keras.tree.flatten(model(batch[0], training=True))
        loss = tf.add_n([tf.reduce_mean(tf.square(tf.cast(y, tf.float32))) for y in outputs])
    variables = [v.value for v in model.trainable_variables]
    gradients = tape.gradient(loss, variables)
    return step_lib.current().synchronize(gradients, model.trainable_variables)


def _optimize(function):
    """Runs TensorFlow's graph optimizer, and with it our passes, on a concrete function."""
    graph_def = function.graph.as_graph_def(add_shapes=True)
    for library_function in graph_def.library.function:
        # Alternatives for other devices would keep calls from being inlined.
        library_function.attr.pop("api_implements", None)
    nodes = {node.name: node for node in graph_def.node}
    for index, argument in enumerate(function.inputs):
        _make_argument(nodes[argument.op.name], index, argument)
    meta_graph = meta_graph_pb2.MetaGraphDef(graph_def=graph_def)
    meta_graph.collection_def["train_op"].node_list.value.extend(
        [tensor.name for tensor in function.outputs]
        + [operation.name for operation in function.graph.control_outputs])
    config = config_pb2.ConfigProto()
    options = config.graph_options.rewrite_options
    options.min_graph_nodes = -1  # small graphs too
    options.function_optimization = rewriter_config_pb2.RewriterConfig.AGGRESSIVE
    options.optimizers.append("function")  # inlines all calls, which a runtime does beforehand
    flat = tf_optimizer.OptimizeGraph(config, meta_graph)
    del options.optimizers[:]
    meta_graph.graph_def.CopyFrom(flat)
    tf_optimizer.OptimizeGraph(config, meta_graph)


def _make_argument(node, index, tensor):
    """Makes of a placeholder what it is when a function runs: an argument, which knows variables."""
    placeholder = node_def_pb2.NodeDef()
    placeholder.CopyFrom(node)
    node.op = "_Arg"
    node.attr.clear()
    node.attr["_output_shapes"].CopyFrom(placeholder.attr["_output_shapes"])
    node.attr["T"].type = tensor.dtype.as_datatype_enum
    node.attr["index"].i = index
    if tensor.dtype == tf.resource:
        for part in handle_data_util.get_resource_handle_data(tensor).shape_and_type:
            node.attr["_handle_dtypes"].list.type.append(part.dtype)
            node.attr["_handle_shapes"].list.shape.append(part.shape)
