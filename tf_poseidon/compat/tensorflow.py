"""The private names of TensorFlow that we use, except protocol buffers, which TensorFlow's files define.

They are those of one series of TensorFlow, which is checked with the op library, or at the first use of a name.
Nothing here imports TensorFlow earlier.

Tests: tests/unit/test_compat.py.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import inspect
from typing import Any
from typing import TYPE_CHECKING
from typing import TypeVar
import weakref

from tf_poseidon import supported
from tf_poseidon.compat.table import Name
from tf_poseidon.compat.table import Table

if TYPE_CHECKING:
    import tensorflow as tf
    from tensorflow.core.framework import function_pb2
    from tensorflow.core.framework import graph_pb2
    from tensorflow.core.framework import kernel_def_pb2
    from tensorflow.core.framework import op_def_pb2
    from tensorflow.core.protobuf import config_pb2
    from tensorflow.core.protobuf import meta_graph_pb2

T = TypeVar("T")

_PYTHON = "tensorflow.python"
_DATA = f"{_PYTHON}.data.ops"
_EXPERIMENTAL = f"{_PYTHON}.data.experimental.ops"
_EAGER = f"{_PYTHON}.eager"
_FRAMEWORK = f"{_PYTHON}.framework"
_ONE_DEVICE = f"{_PYTHON}.distribute.one_device_strategy"
_DISTRIBUTE = f"{_PYTHON}.distribute.distribute_lib"

# The attribute in which an `OwnedIterator` holds what is freed with it.
ITERATOR_RESOURCE = "_iterator_resource"

_OVERRIDE = "act as a strategy of several processes"
_ROWS = "know the batch size that gradients are planned for"
_EPOCHS = "know which data a job that resumes must read past"
_SHARDS = "let each rank hold the part of a variable that it updates"
_OWN_ROWS = "let each rank make its own rows of a batch"
_TIMED = "measure how long steps wait for their batches"
_KERNELS = "know whether all ranks have the same kernels"
_TRACED = "take a traced function apart, and reassemble it"

# Datasets whose elements are batches; and datasets that keep the number of rows of their input's elements, as `map`
# is assumed to.
_BATCHES = ("batch_op._BatchDataset", "batch_op._ParallelBatchDataset", "padded_batch_op._PaddedBatchDataset")
_KEEP_ROWS = ("cache_op.CacheDataset", "dataset_ops._OptionsDataset", "filter_op._FilterDataset", "map_op._MapDataset",
              "map_op._ParallelMapDataset", "prefetch_op._PrefetchDataset", "repeat_op._RepeatDataset",
              "shuffle_op._ShuffleDataset", "skip_op._SkipDataset", "take_op._TakeDataset")
# What a dataset does with those that it reads, by its class; and the attributes that say how.
_TRANSFORMATIONS = {
    "cardinality._AssertCardinalityDataset": ("assert_cardinality", "_expected_cardinality"),
    "batch_op._BatchDataset": ("batch", "_batch_size", "_drop_remainder"),
    "batch_op._ParallelBatchDataset": ("batch", "_batch_size", "_drop_remainder", "_num_parallel_calls"),
    "padded_batch_op._PaddedBatchDataset": ("padded_batch", "_batch_size", "_drop_remainder", "_padded_shapes",
                                            "_padding_values"),
    "cache_op.CacheDataset": ("cache", "_filename"),
    "concatenate_op._ConcatenateDataset": ("concatenate",),
    "dataset_ops._OptionsDataset": ("options",),
    "map_op._MapDataset": ("map", "_map_func"),
    "map_op._ParallelMapDataset": ("map", "_map_func", "_num_parallel_calls"),
    "prefetch_op._PrefetchDataset": ("prefetch", "_buffer_size"),
    "prefetching_ops._CopyToDeviceDataset": ("copy_to_device",),
    "repeat_op._RepeatDataset": ("repeat", "_count"),
    "shard_op._ShardDataset": ("shard", "_num_shards", "_index"),
    "shuffle_op._ShuffleDataset": ("shuffle", "_buffer_size", "_seed", "_seed2", "_reshuffle_each_iteration"),
    "skip_op._SkipDataset": ("skip", "_count"),
    "take_op._TakeDataset": ("take", "_count"),
    "zip_op._ZipDataset": ("zip",),
}
_RESHUFFLES = "shuffle_op._ShuffleDataset._reshuffle_each_iteration"
# Datasets whose iterators begin those of their inputs when they are made, and read nothing else.
_BEGIN_AT_ONCE = (*_BATCHES, *(kind for kind in _KEEP_ROWS if kind != "repeat_op._RepeatDataset"),
                  "from_tensor_slices_op._TensorSliceDataset", "from_tensors_op._TensorDataset",
                  "range_op._RangeDataset", "zip_op._ZipDataset")
# `Dataset.apply` overwrites what these say of their inputs.
_CONCATENATED = ("_input_dataset", "_dataset_to_concatenate")
_HOLD_TENSORS = ("from_tensor_slices_op._TensorSliceDataset", "from_tensors_op._TensorDataset")
_SERVICE = "data_service_ops._DataServiceDatasetV2"
_OF_EXPERIMENTAL = ("cardinality", "data_service_ops", "prefetching_ops")
# What is used of the classes of datasets, and why.
_DATASETS = {
    **dict.fromkeys([*_TRANSFORMATIONS, *(f"{kind}.{attribute}" for kind, (_, *attributes) in _TRANSFORMATIONS.items()
                                          for attribute in attributes)], _OWN_ROWS),
    **dict.fromkeys((f"{kind}._tensors" for kind in _HOLD_TENSORS), _OWN_ROWS),
    **dict.fromkeys((f"concatenate_op._ConcatenateDataset.{name}" for name in _CONCATENATED), _OWN_ROWS),
    **dict.fromkeys((*_BEGIN_AT_ONCE, _RESHUFFLES), _EPOCHS),
    _SERVICE: "refuse batches that differ between ranks",
    **dict.fromkeys((*_KEEP_ROWS, *_BATCHES, *(f"{kind}._batch_size" for kind in _BATCHES)), _ROWS),
}

TABLE = Table("TensorFlow", supported.TENSORFLOW, (
    f"install 'tensorflow-cpu=={supported.TENSORFLOW_SERIES[-1]}.*', or "
    f"'tensorflow[and-cuda]=={supported.TENSORFLOW_SERIES[-1]}.*' for GPUs"), (
    # ---- strategies: what `extended.Extended` inherits, and what it overrides ----
    Name(_ONE_DEVICE, "OneDeviceExtended", "place variables and steps on the device of this process",
         ("container_strategy", "device")),
    Name(_DISTRIBUTE, "StrategyExtendedV2._container_strategy", "make the context of a step", ("self",)),
    Name(_ONE_DEVICE, "OneDeviceExtended._num_replicas_in_sync", _OVERRIDE),
    Name(_ONE_DEVICE, "OneDeviceExtended._in_multi_worker_mode", _OVERRIDE, ("self",)),
    Name(_ONE_DEVICE, "OneDeviceExtended._local_results", _OVERRIDE, ("self", "value")),
    Name(_DISTRIBUTE, "StrategyExtendedV1._use_merge_call", _OVERRIDE, ("self",)),
    Name(_DISTRIBUTE, "_DefaultDistributionExtended._retrace_functions_for_each_device", _OVERRIDE),
    Name(_ONE_DEVICE, "OneDeviceExtended._create_variable", _OVERRIDE, ("self", "next_creator", "kwargs")),
    Name(_ONE_DEVICE, "OneDeviceExtended._call_for_each_replica", _OVERRIDE, ("self", "fn", "args", "kwargs")),
    Name(_DISTRIBUTE, "StrategyExtendedV2._replica_ctx_all_reduce", _OVERRIDE,
         ("self", "reduce_op", "value", "options")),
    Name(_ONE_DEVICE, "OneDeviceExtended._reduce_to", _OVERRIDE,
         ("self", "reduce_op", "value", "destinations", "options")),
    Name(_ONE_DEVICE, "OneDeviceExtended._gather_to_implementation", _OVERRIDE,
         ("self", "value", "destinations", "axis", "options")),
    Name(_ONE_DEVICE, "OneDeviceExtended._experimental_distribute_dataset", _OVERRIDE, ("self", "dataset", "options")),
    Name(_ONE_DEVICE, "OneDeviceExtended._distribute_datasets_from_function", _OVERRIDE,
         ("self", "dataset_fn", "options")),
    Name(_ONE_DEVICE, "OneDeviceExtended._experimental_distribute_values_from_function", _OVERRIDE,
         ("self", "value_fn")),

    Name(f"{_PYTHON}.ops.resource_variable_ops", "BaseResourceVariable._read_variable_op",
         "aggregate a variable with synchronization=ON_READ", ("self",)),

    Name(f"{_PYTHON}.ops.resource_variable_ops", "UninitializedVariable", _SHARDS),
    Name(f"{_PYTHON}.ops.resource_variable_ops", "UninitializedVariable.__init__", _SHARDS,
         ("self", "trainable", "name", "shape", "dtype")),
    *(Name(f"{_PYTHON}.ops.resource_variable_ops", f"BaseResourceVariable.{name}", _SHARDS, ("self", *parameters))
      for name, parameters in {"_restore_from_tensors": ("restored_tensors",), "assign": ("value",), "assign_add": (
          "delta",), "assign_sub": ("delta",), "is_initialized": ("name",)}.items()),
    Name(f"{_PYTHON}.ops.handle_data_util", "create_handle_data", _SHARDS, ("shape", "dtype")),
    Name(f"{_PYTHON}.ops.handle_data_util", "set_handle_data", _SHARDS, ("target_t", "handle_data")),

    # ---- functions ----
    *(Name(f"{_FRAMEWORK}.func_graph", f"FuncGraph{name}", _TRACED) for name in (
        "", ".inputs", ".outputs", ".control_outputs", ".variables", ".captures", ".outer_graph")),
    Name(f"{_FRAMEWORK}.func_graph", "FuncGraph.capture", _TRACED, ("self", "tensor")),
    Name(f"{_FRAMEWORK}.func_graph", "dismantle_func_graph", "free the memory of traced graphs", ("func_graph",)),
    Name(f"{_EAGER}.polymorphic_function.concrete_function", "ConcreteFunction.from_func_graph", _TRACED,
         ("graph", "function_type", "attrs")),
    Name(f"{_EAGER}.polymorphic_function.concrete_function", "ConcreteFunction.function_type", _TRACED),
    Name("tensorflow.core.function.polymorphism.function_type", "FunctionType", _TRACED),
    Name("tensorflow.core.function.polymorphism.function_type", "Parameter", _TRACED),
    Name("tensorflow.core.function.polymorphism.function_type", "FunctionType.pack_output", _TRACED,
         ("self", "flat_values")),
    Name("tensorflow.core.function.trace_type.trace_type_builder", "from_value", _TRACED, ("value",)),
    Name(f"{_PYTHON}.ops.control_flow_v2_func_graphs", "CondBranchFuncGraph",
         "refuse exchanges that only some ranks would take part in"),
    Name(f"{_FRAMEWORK}.ops", "Graph.experimental_acd_manager", "let gradients travel out of program order"),
    Name(f"{_FRAMEWORK}.auto_control_deps", "AutomaticControlDependencies.run_independently",
         "let gradients travel out of program order", ("self", "op")),
    Name(f"{_PYTHON}.autograph.impl.api", "autograph_artifact", "keep AutoGraph from converting distributed functions",
         ("entity",)),

    # ---- graphs and ops ----
    Name(f"{_PYTHON}.grappler.tf_optimizer", "OptimizeGraph", "run TensorFlow's graph optimizer",
         ("config_proto", "metagraph")),
    Name(f"{_PYTHON}.ops.handle_data_util", "get_resource_handle_data", "know what captured variables hold",
         ("graph_op",)),
    Name(f"{_FRAMEWORK}.op_def_registry", "get", "know the inputs and outputs of ops", ("name",)),
    Name(f"{_FRAMEWORK}.kernels", "get_registered_kernels_for_op", "know which devices have a kernel", ("name",)),
    Name(f"{_EAGER}.execute", "quick_execute", "compute integers that depend on shapes",
         ("op_name", "num_outputs", "inputs", "attrs", "ctx")),

    # ---- the process ----
    Name(f"{_EAGER}.context", "context", "compute integers that depend on shapes"),
    *(Name(f"{_EAGER}.context", f"Context.{name}", "keep the functions that a partitioned graph calls",
           ("self", parameter)) for name, parameter in (("add_function_def", "fdef"), ("remove_function", "name"))),
    Name(f"{_FRAMEWORK}.config", "is_op_determinism_enabled", _KERNELS, ()),
    Name(f"{_PYTHON}.util._pywrap_util_port", "IsMklEnabled", _KERNELS),
    Name(f"{_EAGER}.context", "global_seed", "give all ranks the same random seed"),
    Name(f"{_EAGER}.context", "Context.set_config_key_value", "agree over tf.distribute's coordination service",
         ("self", "key", "value")),
    Name(f"{_EAGER}.context", "Context.get_config_key_value", "agree over tf.distribute's coordination service",
         ("self", "key", "timeout_in_ms")),

    # ---- data and files ----
    *(Name(f"{_EXPERIMENTAL if module in _OF_EXPERIMENTAL else _DATA}.{module}", name, why)
      for kind, why in _DATASETS.items() for module, _, name in [kind.partition(".")]),
    Name(f"{_DATA}.dataset_ops", "DatasetV2._inputs", _ROWS, ("self",)),
    Name(f"{_DATA}.dataset_ops", "DatasetV2._functions", _EPOCHS, ("self",)),
    Name(f"{_DATA}.dataset_ops", "DatasetV2._flat_shapes", _OWN_ROWS),
    Name(f"{_DATA}.dataset_ops", "DatasetV2._flat_types", _OWN_ROWS),
    Name(f"{_DATA}.structured_function", "StructuredFunctionWrapper.function", _EPOCHS),
    *(Name(f"{_DATA}.dataset_ops", f"DatasetV2.{name}", _TIMED) for name in ("_flat_structure", "_variant_tensor")),
    Name(f"{_DATA}.dataset_ops", "UnaryUnchangedStructureDataset", _TIMED, ("input_dataset", "variant_tensor")),
    Name(f"{_DATA}.iterator_ops", "OwnedIterator", _ROWS),
    Name(f"{_DATA}.iterator_ops", "OwnedIterator._dataset", _ROWS),
    Name(f"{_DATA}.iterator_ops", f"OwnedIterator.{ITERATOR_RESOURCE}", "free iterators without waiting for it"),
    Name(f"{_PYTHON}.saved_model.pywrap_saved_model.fingerprinting", "CreateFingerprintDef",
         "write the fingerprint of a SavedModel"),
    Name("tensorflow.tsl.profiler.protobuf.xplane_pb2", "XSpace", "write timelines for TensorBoard"),
))


def one_device_extended() -> type:
    """Returns the class that extends a strategy of one device."""
    return TABLE["one_device_strategy.OneDeviceExtended"]


def uninitialized_variable() -> type:
    """Returns the class of variables without a value."""
    return TABLE["resource_variable_ops.UninitializedVariable"]


def of_shape(handle: "tf.Tensor", shape: "tf.TensorShape", dtype: "tf.DType") -> "tf.Tensor":
    """Returns the resource of a variable, eager, as graphs see it that expect a value of another shape."""
    import tensorflow as tf  # see above: not earlier

    same = tf.identity(handle)
    TABLE["handle_data_util.set_handle_data"](same, TABLE["handle_data_util.create_handle_data"](shape, dtype))
    return same


def func_graph(name: str) -> "tf.Graph":
    """Returns a new function graph."""
    return TABLE["func_graph.FuncGraph"](name)


def outer_graph(graph: "tf.Graph") -> "tf.Graph | None":
    """Returns the graph in which a function's graph is under construction; None if `graph` is not a function's."""
    return graph.outer_graph if isinstance(graph, TABLE["func_graph.FuncGraph"]) else None


def is_branch(graph: "tf.Graph") -> bool:
    """Whether a graph belongs to a branch of a tf.cond."""
    return isinstance(graph, TABLE["control_flow_v2_func_graphs.CondBranchFuncGraph"])


def dismantle(graph: "tf.Graph") -> None:
    """Frees the contents of a function's graph, which cannot be used again."""
    TABLE["func_graph.dismantle_func_graph"](graph)


def define_functions(library: "function_pb2.FunctionDefLibrary", graph: "tf.Graph") -> None:
    """Defines functions for as long as a function's graph lives, so that what is made of the graph can call them.

    TensorFlow itself only knows those that were traced, and forgets them with their traces.
    """
    context = TABLE["context.context"]()
    for function in library.function:
        context.add_function_def(function)
        weakref.finalize(graph, context.remove_function, function.signature.name).atexit = False


def concrete_function(graph: "tf.Graph", function_type: Any) -> "tf.types.experimental.ConcreteFunction":
    """Returns the ConcreteFunction of a function's graph, with another function's type."""
    return TABLE["concrete_function.ConcreteFunction.from_func_graph"](graph, function_type, {})


def repeated(function_type: Any, times: int) -> Any:
    """Returns the type of a function that takes the arguments of a function several times, and returns its results.

    Args:
        function_type: The function's type, with arguments that are given by position.
        times: How often.
    """
    parameters = [TABLE["function_type.Parameter"](f"{parameter.name}_{i}", parameter.kind, parameter.optional,
                                                   parameter.type_constraint)
                  for i in range(times) for parameter in function_type.parameters.values()]
    return TABLE["function_type.FunctionType"](parameters, function_type.captures,
                                               return_annotation=function_type.output)


def returning(function_type: Any, tensors: "Sequence[tf.Tensor]") -> Any:
    """Returns the type of a function that takes another function's arguments, and returns a tuple of such tensors."""
    output = TABLE["trace_type_builder.from_value"](tuple(tensors))
    return TABLE["function_type.FunctionType"](list(function_type.parameters.values()), function_type.captures,
                                               return_annotation=output)


def flat_function(graph: "tf.Graph") -> "tf.types.experimental.ConcreteFunction":
    """Returns the ConcreteFunction of a function's graph: it takes its inputs one by one, and returns a tuple."""
    import tensorflow as tf
    captured = {id(internal) for _, internal in graph.captures}
    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in graph.inputs if id(tensor) not in captured]
    parameters = [TABLE["function_type.Parameter"](f"input_{i}", inspect.Parameter.POSITIONAL_ONLY, False, spec)
                  for i, spec in enumerate(specs)]
    output = TABLE["trace_type_builder.from_value"](tuple(graph.outputs))
    return concrete_function(graph, TABLE["function_type.FunctionType"](parameters, {}, return_annotation=output))


def run_independently(operation: "tf.Operation") -> None:
    """Takes an operation under construction out of the program order of its function."""
    manager = operation.graph.experimental_acd_manager
    if manager is not None:
        manager.run_independently(operation)


def unconverted(function: T) -> T:
    """Marks a callable so that AutoGraph calls it unconverted; returns it."""
    return TABLE["api.autograph_artifact"](function)


def optimize(config: "config_pb2.ConfigProto", meta_graph: "meta_graph_pb2.MetaGraphDef") -> "graph_pb2.GraphDef":
    """Runs TensorFlow's graph optimizer.

    Args:
        config: A `ConfigProto`, which selects the optimizers.
        meta_graph: A `MetaGraphDef`, whose collection "train_op" names the nodes to keep.

    Returns:
        A GraphDef.
    """
    return TABLE["tf_optimizer.OptimizeGraph"](config, meta_graph)


def handle_data(tensor: "tf.Tensor") -> Any:
    """Returns the contents of the resource in a graph's tensor: a `CppShapeInferenceResult.HandleData`."""
    return TABLE["handle_data_util.get_resource_handle_data"](tensor)


def op_def(op: str) -> "op_def_pb2.OpDef | None":
    """Returns the OpDef of an op, by its name; None if this process does not know it."""
    return TABLE["op_def_registry.get"](op)


def kernels(op: str) -> "Sequence[kernel_def_pb2.KernelDef]":
    """Returns the `KernelDef`s of an op."""
    return TABLE["kernels.get_registered_kernels_for_op"](op).kernel


def execute(op: str, num_outputs: int, inputs: "Sequence[tf.Tensor]", attributes: Iterable[Any]) -> "list[tf.Tensor]":
    """Runs an op eagerly.

    Args:
        op: Its name.
        num_outputs: Number of its outputs.
        inputs: Eager tensors, not nested in lists.
        attributes: Names and values of its attributes, alternating.

    Returns:
        A list of eager tensors.
    """
    context = TABLE["context.context"]()
    return TABLE["execute.quick_execute"](op.encode(), num_outputs, inputs, tuple(attributes), context)


def global_seed() -> int | None:
    """Returns the seed of `tf.random.set_seed`; None if there is none."""
    return TABLE["context.global_seed"]()


def is_deterministic() -> bool:
    """Whether this process is asked for deterministic ops, by its environment or its program."""
    return bool(TABLE["config.is_op_determinism_enabled"]())


def uses_onednn() -> bool:
    """Whether this process uses the kernels of oneDNN, which depends on its environment and its processor."""
    return bool(TABLE["_pywrap_util_port.IsMklEnabled"]())


def publish_text(key: str, text: str) -> None:
    """Publishes a text to all processes under a key, through tf.distribute's coordination service."""
    TABLE["context.context"]().set_config_key_value(key, text)


def published_text(key: str, timeout_ms: int) -> str:
    """Returns the text that a process publishes under a key; waits for it."""
    return TABLE["context.context"]().get_config_key_value(key, timeout_ms)


def batch_size(dataset: "tf.data.Dataset") -> int:
    """Returns the batch size of a dataset that ends in `batch`, -1 if it is unknown."""
    keep_rows = {TABLE[kind] for kind in _KEEP_ROWS}
    while type(dataset) in keep_rows:
        dataset, = dataset._inputs()
    is_batch = type(dataset) in {TABLE[kind] for kind in _BATCHES}
    return int(dataset._batch_size) if is_batch else -1


def inputs_of(dataset: "tf.data.Dataset") -> "list[tf.data.Dataset]":
    """Returns the datasets whose elements a dataset reads."""
    if type(dataset) is TABLE["concatenate_op._ConcatenateDataset"]:
        return [getattr(dataset, name) for name in _CONCATENATED]
    return list(dataset._inputs())


def transformation(dataset: "tf.data.Dataset") -> tuple[str, dict[str, Any]]:
    """Returns (what a dataset does with those that it reads, how: by the names of the arguments that say so).

    What it does is the name of a method of `tf.data.Dataset` or function of `tf.data.experimental`, "" if it is none of
    `_TRANSFORMATIONS`.
    """
    for kind, (method, *attributes) in _TRANSFORMATIONS.items():
        if type(dataset) is TABLE[kind]:
            return method, {attribute.removeprefix("_"): _as_python(getattr(dataset, attribute))
                            for attribute in attributes}
    return "", {}


def _as_python(value: Any) -> Any:
    """Returns a number or text for a scalar tensor; anything else as it is."""
    if not hasattr(value, "numpy") or value.shape.rank:
        return value
    scalar = value.numpy()
    return scalar if isinstance(scalar, bytes) else scalar.item()


def tensors_of(dataset: "tf.data.Dataset") -> "list[tf.Tensor]":
    """Returns the tensors that a dataset holds itself: its elements, or what its functions have captured."""
    if any(type(dataset) is TABLE[kind] for kind in _HOLD_TENSORS):
        return list(dataset._tensors)
    return [tensor for function in dataset._functions() for tensor in function.function.captured_inputs]


def flat_specs(dataset: "tf.data.Dataset") -> "list[tuple[tf.TensorShape, tf.DType]]":
    """Returns the shape and type of each tensor of which a dataset's elements consist."""
    return list(zip(dataset._flat_shapes, dataset._flat_types, strict=True))


def reads_service(dataset: "tf.data.Dataset") -> bool:
    """Whether a dataset, or one that its functions make, takes its elements from the workers of tf.data.service."""
    graphs = [function.function.graph for function in dataset._functions()
              if hasattr(function.function, "graph")]  # those of TensorFlow 1 have none
    return type(dataset) is TABLE[_SERVICE] or any(
        operation.type.startswith("DataServiceDataset") for graph in graphs for operation in graph.get_operations())


def begins_with_its_iterator(dataset: "tf.data.Dataset") -> bool:
    """Whether an iterator of a dataset begins those of its inputs when it is made, and reads nothing else."""
    return type(dataset) in {TABLE[kind] for kind in _BEGIN_AT_ONCE}


def reshuffles(dataset: "tf.data.Dataset") -> bool:
    """Whether a dataset shuffles its input, in another way for every iterator."""
    return isinstance(dataset, TABLE["shuffle_op._ShuffleDataset"]) and bool(dataset._reshuffle_each_iteration)


def graphs_of(dataset: "tf.data.Dataset") -> "list[tf.Graph]":
    """Returns the graphs of the functions by which a dataset makes its elements; those of tf.compat.v1 have none."""
    return [function.function.graph for function in dataset._functions() if hasattr(function.function, "graph")]


def same_elements(dataset: "tf.data.Dataset", op: Callable[..., Any]) -> "tf.data.Dataset":
    """Returns what an op makes of a dataset: another one, of the same elements."""
    return TABLE["dataset_ops.UnaryUnchangedStructureDataset"](
        dataset, op(dataset._variant_tensor, **dataset._flat_structure))


def dataset_of(iterator: Any) -> "tf.data.Dataset | None":
    """Returns the dataset that an iterator reads; None if that is unknown, or the iterator is not TensorFlow's."""
    return getattr(iterator, "_dataset", None) if isinstance(iterator, TABLE["iterator_ops.OwnedIterator"]) else None


def fingerprint(directory: str) -> bytes:
    """Returns the fingerprint of a SavedModel, serialized."""
    return TABLE["fingerprinting.CreateFingerprintDef"](directory)


def xspace() -> Any:
    """Returns an empty `XSpace`, the format of TensorBoard's profiler."""
    return TABLE["xplane_pb2.XSpace"]()
