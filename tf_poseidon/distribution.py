"""`distribute`: makes a function that was written for one process a function of the whole job.

The function is traced for the global batch, with an unknown number of rows; the graph is partitioned by rows
(graph_passes/partition), and what comes out runs in the place of the function, if all ranks have made the same of
it. Else the function runs as it is, on the global batch on every rank: right, and as slow as one process.
"""

import functools
import hashlib
import inspect
import logging
import weakref

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.python.eager.polymorphic_function import concrete_function as concrete_function_lib
from tensorflow.python.framework import func_graph as func_graph_lib
from tensorflow.python.framework import importer
from tensorflow.python.ops import handle_data_util

from tf_poseidon import agreement
from tf_poseidon import data
from tf_poseidon import grappler
from tf_poseidon import ops
from tf_poseidon import step as step_lib
from tf_poseidon import strategy as strategy_lib
from tf_poseidon.errors import PoseidonError
from tf_poseidon.graph_passes import find_sites
from tf_poseidon.graph_passes import graph as graph_lib
from tf_poseidon.graph_passes.partition import inline
from tf_poseidon.graph_passes.partition import partition as partition_lib
from tf_poseidon.ops import library

_log = logging.getLogger("tf_poseidon")
_ROWS, _SAME = "rows", "same"


def distribute(function=None, *, inputs=None, strategy=None):
    """Makes a function of one process a function of the job.

    ```python
    @poseidon.distribute
    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        variables = model.trainable_variables
        for variable, gradient in zip(variables, tape.gradient(loss, variables)):
            variable.assign_sub(0.1 * gradient)
        return loss

    for x, y in batches:  # global batches, the same on all ranks
        loss = step(x, y)
    ```

    The function means what it says in one process: its inputs are global batches, its losses and norms are those
    of all rows, random numbers are drawn as in one process. Each rank computes its rows. Results are those of one
    process, with the same bits on all ranks. Variables get rank 0's values before the function first runs.

    Args:
        function: A `tf.function`, or a Python function, which becomes one. Of its arguments, arrays and tensors
            are inputs; others are constants of a trace. None returns a decorator.
        inputs: What has rows: {name of an argument: "rows", for tensors whose first dimension is that of the
            batch; a number, for another dimension; or "same", for tensors that belong to no row}. A structure
            of these fits arguments that are structures. Arguments without a name here have rows in each tensor
            that has a dimension. All inputs with rows have the same number of them.
        strategy: The `PoseidonStrategy` of the job; None for the one that this process has created last, or a first
            one with default options.

    Returns:
        A function like `function`. Its attribute `report` says what the last trace exchanges, and what it runs
        whole (`graph_passes.partition.report.Report`); None as long as it runs as it is.

    Raises:
        PoseidonError: When it is called: if `inputs` does not fit the arguments; or, under `strict`, if ranks do not
            have the same partitioned graph.
    """
    if function is None:
        return functools.partial(distribute, inputs=inputs, strategy=strategy)
    return _Distributed(function, inputs or {}, strategy)


class _Distributed:
    """A function of the job.

    Attributes:
        report: The `report.Report` of the last trace; None if it runs as it is.
    """

    # AutoGraph calls this as it is; it still converts the function.
    autograph_info__ = None

    def __init__(self, function, inputs, strategy):
        self._python = getattr(function, "python_function", function)
        self._function = function if hasattr(function, "get_concrete_function") else tf.function(function)
        self._inputs = inputs
        self._given = strategy
        self._traces = {}
        self._calls = 0
        self._bound = weakref.WeakKeyDictionary()
        self.report = None
        functools.update_wrapper(self, self._python)

    def __get__(self, instance, owner=None):
        """Binds a method to its object."""
        if instance is None:
            return self
        if instance not in self._bound:
            method = self._function.__get__(instance, owner)
            self._bound[instance] = _Distributed(method, self._inputs, self._given)
        return self._bound[instance]

    def __call__(self, *args, **kwargs):
        strategy = self._strategy()
        if strategy.num_replicas_in_sync == 1 or tf.config.functions_run_eagerly():
            return self._function(*args, **kwargs)
        call = _Call(self._python, self._inputs, args, kwargs)
        self._check_inputs(call, strategy)
        if call.key not in self._traces:
            name = f"{getattr(self._python, '__name__', 'function')}/{_number()}"
            self._traces[call.key] = _trace(self._function, call, strategy, name)
        trace = self._traces[call.key]
        self.report = trace.report
        return trace(call.tensors)

    def _check_inputs(self, call, strategy):
        """Compares the inputs of ranks, in the first call and then ever less often."""
        if not tf.executing_eagerly():
            return
        self._calls += 1
        if self._calls & (self._calls - 1):
            return
        mine = data.checksum(call.tensors).numpy()
        name = f"distribute/{call.name}/inputs"
        if mine != strategy.extended.communicator.broadcast(name, mine):
            raise PoseidonError(
                f"Rank {strategy.rank} calls '{call.name}' with other inputs than rank 0, in call {self._calls}. All "
                "ranks must give it the same global batches in the same order. Seed what shuffles or generates the "
                "data: keras.utils.set_random_seed(...) before the dataset is made, shuffle(seed=...), a seeded "
                "generator.")

    def _strategy(self):
        if self._given is None:
            self._given = strategy_lib.of_process()
        return self._given


_count = 0


def _number():
    """Returns how many functions were traced before; all ranks trace the same ones in the same order."""
    global _count
    _count += 1
    return _count - 1


class _Call:
    """The arguments of one call: tensors, and constants.

    Attributes:
        name: That of the function.
        tensors: The tensors, flat.
        names: What they are called in messages.
        dimensions: Their dimension of rows, None of tensors that belong to no row.
        key: What a trace depends on.
    """

    def __init__(self, function, inputs, args, kwargs):
        self.name = function.__name__
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        unknown = set(inputs) - set(bound.arguments)
        if unknown:
            raise PoseidonError(f"inputs= names '{min(unknown)}', which is no argument of '{function.__name__}'; its "
                                f"arguments are {', '.join(bound.arguments)}.")
        self._structure = _joined((bound.args, bound.kwargs))
        self._leaves = [_as_tensor(leaf) for leaf in tf.nest.flatten(self._structure, expand_composites=True)]
        args, kwargs = self._structure
        in_order = dict(zip(bound.arguments, args)) | dict(sorted(kwargs.items()))
        marks = _marks(inputs, in_order)
        self.tensors = [leaf for leaf in self._leaves if tf.is_tensor(leaf)]
        self.names, self.dimensions = [], []
        for leaf, (name, mark) in zip(self._leaves, marks):
            if tf.is_tensor(leaf):
                self.names.append(name)
                self.dimensions.append(_dimension(leaf, name, mark))
        self.key = tuple(
            (leaf.dtype, _without_rows(leaf.shape, dimension := next(dimensions)), dimension)
            if tf.is_tensor(leaf) else ("constant", _hashable(leaf))
            for dimensions in [iter(self.dimensions)] for leaf in self._leaves) + (
                str(tf.nest.map_structure(lambda _: ".", self._structure)),)

    def specs(self):
        """Returns the TensorSpecs of the tensors, with an unknown number of rows."""
        return [tf.TensorSpec(_without_rows(tensor.shape, dimension), tensor.dtype)
                for tensor, dimension in zip(self.tensors, self.dimensions)]

    def rows(self):
        """Returns the number of rows of a global batch, None if it is unknown."""
        return next((tensor.shape[dimension] for tensor, dimension in zip(self.tensors, self.dimensions)
                     if dimension is not None and tensor.shape.rank is not None), None)

    def arguments(self, tensors):
        """Returns (args, kwargs) with other tensors in the place of the call's."""
        rest = iter(tensors)
        leaves = [next(rest) if tf.is_tensor(leaf) else leaf for leaf in self._leaves]
        return tf.nest.pack_sequence_as(self._structure, leaves, expand_composites=True)


def _marks(inputs, arguments):
    """Returns (name, mark) for each tensor or constant of the arguments; the mark None where none was given."""
    marks = []
    for name, value in arguments.items():
        leaves, mark = tf.nest.flatten(value), inputs.get(name)
        if mark is None or isinstance(mark, (str, int)):
            named = [(name, mark)] * len(leaves)
        else:
            try:
                tf.nest.assert_same_structure(mark, value, check_types=False)
            except (TypeError, ValueError) as error:
                raise PoseidonError(f"inputs= has another structure for '{name}' than the argument itself: "
                                    f"{str(error).splitlines()[0]}; give 'rows', 'same' or a structure like the "
                                    "argument's.") from error
            named = [(f"{name}[{i}]", each) for i, each in enumerate(tf.nest.flatten(mark))]
        for leaf, pair in zip(leaves, named):
            marks += [pair] if not isinstance(leaf, _COMPOSITES) else _marks_of_parts(leaf, *pair)
    return marks


_COMPOSITES = (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)


def _marks_of_parts(leaf, name, mark):
    """Returns (name, mark) for the tensors that make up a composite one: whole, since they are cut otherwise."""
    if mark not in (None, _SAME):
        raise PoseidonError(f"inputs= says that '{name}', a {type(leaf).__name__}, has rows; only dense tensors are "
                            "partitioned: give 'same', and every rank computes it whole, or make it dense.")
    return [(name, _SAME)] * len(tf.nest.flatten(leaf, expand_composites=True))


def _joined(structure):
    """Returns a structure in which batches that the strategy has split are global ones again."""
    def join(leaf):
        if not isinstance(leaf, data.Rows):
            return leaf
        return ops.all_gather(leaf.value, step_lib.unique_site("distribute/inputs"), leaf.count > 0)

    leaves = []
    for leaf in tf.nest.flatten(structure):  # in their order, since the names of exchanges are the same in eager code
        leaves.append(join(leaf))
    return tf.nest.pack_sequence_as(structure, leaves)


def _dimension(tensor, name, mark):
    """Returns the dimension of a tensor's rows, None if it has none."""
    rank = tensor.shape.rank
    if mark is None:
        return 0 if rank else None
    if mark == _SAME:
        return None
    if mark != _ROWS and not isinstance(mark, int):
        raise PoseidonError(f"inputs= says {mark!r} of '{name}'; give 'rows', 'same', or the number of a dimension.")
    dimension = 0 if mark == _ROWS else mark
    if rank is None or not 0 <= dimension < rank:
        raise PoseidonError(f"'{name}' has {rank} dimensions, and inputs= says that its rows are in dimension "
                            f"{dimension}; say 'same' of tensors without rows.")
    return dimension


def _as_tensor(leaf):
    if isinstance(leaf, (np.ndarray, np.generic)):
        return tf.convert_to_tensor(leaf)
    return leaf


def _without_rows(shape, dimension):
    """Returns a shape with an unknown number of rows."""
    if dimension is None or shape.rank is None:
        return shape
    return tf.TensorShape([None if d == dimension else size for d, size in enumerate(shape)])


def _hashable(leaf):
    try:
        hash(leaf)
        return leaf
    except TypeError:
        return id(leaf)


class _Trace:
    """One trace of a function.

    Attributes:
        report: The `report.Report`, None if it runs as it was traced.
    """

    def __init__(self, traced, build=None, report=None):
        """Makes a trace.

        Args:
            traced: The ConcreteFunction as it was traced.
            build: A function that makes the partitioned one, given what comes behind the names of its exchanges;
                None if it runs as it was traced.
            report: As above.
        """
        self._traced = traced
        self._build = build
        self.report = report

    def __call__(self, tensors):
        if self._build is None:
            return self._traced(*tensors)
        # Exchanges of one function need names of their own, also where it calls several of ours.
        mark = step_lib.unique_site("distribute").removeprefix("distribute")
        with tf.init_scope():
            concrete = self._build(mark)
        return concrete(*tensors)


def _trace(function, call, strategy, name):
    """Traces a function for a call, and partitions it if all ranks can do so alike."""
    extended = strategy.extended
    extended.broadcast_new_variables()
    traced = _traced(function, call)  # not in an init_scope: tapes inside would record nothing
    with tf.init_scope():
        _share([variable for _, variable in _variables(traced.graph)], extended.communicator, name)
        rows = call.rows()
        rows = None if rows is None else -(-rows // strategy.num_replicas_in_sync)
        problem = ""
        try:
            partitioned = _partitioned(traced, call.rows())
            build = functools.cache(functools.partial(_built, traced, partitioned, name, rows,
                                                      extended.graph_pass.strict))
            build("")
            trace = _Trace(traced, build, partitioned.report)
        except Exception as error:  # whatever goes wrong, the function as it is computes the same
            trace, problem = _Trace(traced), f"{type(error).__name__}: {error}"
        form = f"not partitioned: {problem}" if problem else "\n".join(
            ["partitioned", partitioned.report.form(), *_lines(partitioned.graph_def)])
        difference = agreement.OverCommunicator(extended.communicator).difference(f"distribute/{name}", form)
        if problem or difference:
            _refuse(name, problem or difference, extended)
            return _Trace(traced)
    extended.graph_pass.expect()
    return trace


def _refuse(name, reason, extended):
    sentence = f"The function '{name.partition('/')[0]}' was not partitioned. {reason}"
    if extended.graph_pass.strict:
        raise PoseidonError(f"strict=True, but: {sentence}")
    if extended.rank == 0:
        _log.warning("%s Every rank computes the whole batch: right, but no faster than one process.", sentence)


def _traced(function, call):
    """Returns the ConcreteFunction of a call, whose inputs with rows go through PoseidonRows."""
    dimensions = [d for d in call.dimensions if d is not None]
    if not dimensions:
        raise PoseidonError(f"No input of '{function.__name__}' has rows; give it a batch, or name its inputs by "
                            "inputs=.")
    names = [name for name, d in zip(call.names, call.dimensions) if d is not None]

    def body(*tensors):
        marked = iter(library.load()[0].poseidon_rows(
            values=[t for t, d in zip(tensors, call.dimensions) if d is not None], dimensions=dimensions, names=names))
        args, kwargs = call.arguments([t if d is None else next(marked) for t, d in zip(tensors, call.dimensions)])
        return function(*args, **kwargs)

    return tf.function(body, autograph=False).get_concrete_function(*call.specs())


def _partitioned(traced, rows):
    """Returns the `partition.Partitioned` graph of a ConcreteFunction, for batches that usually have so many rows."""
    graph = traced.graph
    names = _names(graph)
    graph_def = _renamed(graph.as_graph_def(), names)
    _describe_variables(graph_def, graph.captures, names)
    outputs = [_full(names.get(tensor.op.name, tensor.name)) for tensor in graph.outputs]
    controls = [operation.name for operation in graph.control_outputs]
    inputs = [names.get(tensor.op.name, tensor.op.name) for tensor in graph.inputs]
    flat = inline.inline(graph_def, [*outputs, *controls, *inputs])
    paths = {names[name]: step_lib.variable_path(variable) for name, variable in _variables(graph)}
    return partition_lib.partition(flat, outputs, grappler.add_shapes, paths, rows=rows)


def _names(graph):
    """Returns names for captured inputs that are the same on all ranks: TensorFlow numbers them by all it has made."""
    return {internal.op.name: f"capture{i}" for i, (_, internal) in enumerate(graph.captures)}


def _renamed(graph_def, names):
    """Returns a GraphDef whose placeholders have other names."""
    for node in graph_def.node:
        node.name = names.get(node.name, node.name)
        for i, tensor in enumerate(node.input):
            name = graph_lib.node_of(tensor)
            if name in names:
                node.input[i] = f"^{names[name]}" if graph_lib.is_control(tensor) else names[name]
        if "_class" in node.attr:
            del node.attr["_class"]
    return graph_def


def _variables(graph):
    """Returns (name of its placeholder, variable) of captured variables, in the order in which they were captured."""
    by_handle = {id(variable.handle): variable for variable in graph.variables}
    return [(internal.op.name, by_handle[id(external)]) for external, internal in graph.captures
            if id(external) in by_handle]


def _describe_variables(graph_def, captures, names):
    """Notes what captured variables hold, which a GraphDef does not say."""
    nodes = {node.name: node for node in graph_def.node}
    for _, internal in captures:
        held = internal.dtype == tf.resource and handle_data_util.get_resource_handle_data(internal)
        if held and held.is_set:
            attributes = nodes[names[internal.op.name]].attr
            attributes["_handle_dtypes"].list.type.extend(each.dtype for each in held.shape_and_type)
            attributes["_handle_shapes"].list.shape.extend(each.shape for each in held.shape_and_type)


def _built(traced, partitioned, name, rows, strict, mark):
    """Returns the ConcreteFunction of a partitioned graph, with `mark` behind the names of its exchanges."""
    graph = func_graph_lib.FuncGraph(name.partition("/")[0])
    captured = {id(internal) for _, internal in traced.graph.captures}
    with graph.as_default():
        arguments = [tensor for tensor in traced.graph.inputs if id(tensor) not in captured]
        graph.inputs = [tf.compat.v1.placeholder(tensor.dtype, tensor.shape, tensor.op.name) for tensor in arguments]
        # Captured, they know what the variables hold, and so do the ops that read them.
        inputs = dict(zip((tensor.name for tensor in arguments), graph.inputs))
        names = _names(traced.graph)
        inputs |= {_full(names[internal.op.name]): graph.capture(external)
                   for external, internal in traced.graph.captures}
        graph_def = _without(partitioned.graph_def, inputs)
        for node in graph_def.node:
            if "site" in node.attr:
                node.attr["site"].s += mark.encode()
        importer.import_graph_def(graph_def, inputs, name="")
        graph.outputs = [inputs.get(_full(fetch)) if _full(fetch) in inputs else graph.get_tensor_by_name(_full(fetch))
                         for fetch in partitioned.fetches]
        agree = []
        if any(node.op in find_sites.MARKERS for node in graph_def.node):
            ops.agree([f"{exchange.form()}{mark}" for exchange in partitioned.report.exchanges], rows, None, strict)
            agree = graph.get_operations()[-1:]
        graph.control_outputs = [*agree, *(graph.get_operation_by_name(operation.name)
                                          for operation in traced.graph.control_outputs)]
        graph.variables = traced.graph.variables
    return concrete_function_lib.ConcreteFunction.from_func_graph(graph, traced.function_type, {})


def _without(graph_def, inputs):
    """Returns a GraphDef without the placeholders that have been made already, and without what names them."""
    names = {name.partition(":")[0] for name in inputs}
    result = graph_lib.with_nodes(graph_def, [node for node in graph_def.node if node.name not in names])
    for node in result.node:
        if any(tensor[1:] in names for tensor in node.input if graph_lib.is_control(tensor)):
            node.input[:] = [tensor for tensor in node.input
                             if not (graph_lib.is_control(tensor) and tensor[1:] in names)]
        if "_class" in node.attr and any(text.decode().removeprefix("loc:@") in names
                                         for text in node.attr["_class"].list.s):
            del node.attr["_class"]
    return result


def _full(tensor):
    """Returns the name of a tensor with its output's number."""
    return tensor if ":" in tensor else f"{tensor}:0"


def _share(variables, communicator, name):
    """Gives all ranks rank 0's values of the variables that a function uses, where they differ."""
    variables = [variable for variable in variables if variable.dtype not in (tf.resource, tf.variant, tf.string)]
    values = [np.asarray(variable.numpy()) for variable in variables]
    mine = np.array([int.from_bytes(hashlib.sha256(value.tobytes()).digest()[:7], "big") for value in values], np.int64)
    site = f"distribute/{name}"
    differs = communicator.sum(f"{site}/differs", (mine != communicator.broadcast(f"{site}/checksums", mine)).astype(
        np.int64))
    waits = [(variable, communicator.submit(f"{site}/variables/{i}", value, root=0))
             for i, (variable, value) in enumerate(zip(variables, values)) if differs[i]]
    for variable, wait in waits:
        value = wait()
        if communicator.rank != 0:
            variable.assign(value)


def _lines(graph_def):
    """Returns a line for each node of a graph, with its attributes as a digest."""
    lines = []
    for node in graph_def.node:
        plain = graph_pb2.GraphDef().node.add()
        plain.CopyFrom(node)
        plain.ClearField("experimental_debug_info")
        for attribute in plain.attr.values():
            if attribute.HasField("func"):
                attribute.func.name = attribute.func.name.rstrip("0123456789")  # numbered by all that was made
        for key in [key for key in plain.attr if key.startswith("_")]:
            del plain.attr[key]
        digest = hashlib.sha256(plain.SerializeToString(deterministic=True)).hexdigest()[:12]
        lines.append(f"the node '{node.name}' is a {node.op} ({digest})")
    return sorted(lines)
