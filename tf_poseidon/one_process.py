"""Functions that mean what they say in one process, and run on the ranks of a job.

A function is traced for global batches, with an unknown number of rows. Its graph is partitioned by rows
(graph_passes/partition), and what comes out runs in its place, if all ranks have made the same of it. Else it runs as
it is, on the global batch on every rank: right, and as slow as one process. Inside of it there is one replica.
"""

import contextlib
import dataclasses
import hashlib
import logging
import threading

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.python.eager.polymorphic_function import concrete_function as concrete_function_lib
from tensorflow.python.framework import func_graph as func_graph_lib
from tensorflow.python.framework import importer
from tensorflow.python.ops import handle_data_util

from tf_poseidon import agreement
from tf_poseidon import grappler
from tf_poseidon import ops
from tf_poseidon import step as step_lib
from tf_poseidon.errors import PoseidonError
from tf_poseidon.graph_passes import find_sites
from tf_poseidon.graph_passes import graph as graph_lib
from tf_poseidon.graph_passes.partition import inline
from tf_poseidon.graph_passes.partition import partition as partition_lib
from tf_poseidon.ops import library

_log = logging.getLogger("tf_poseidon")
_thread = threading.local()


def is_inside():
    """Whether this thread traces a function of one process: then there is one replica."""
    return getattr(_thread, "is_inside", False)


@contextlib.contextmanager
def inside():
    """While this thread is in a function of one process."""
    before, _thread.is_inside = is_inside(), True
    try:
        yield
    finally:
        _thread.is_inside = before


_WHOLE = "Every rank computes the whole batch: right, but no faster than one process."
_count = 0


def _number():
    """Returns how many functions were traced before; all ranks trace the same ones in the same order."""
    global _count
    _count += 1
    return _count - 1


class Trace:
    """One trace of a function.

    Attributes:
        report: The `report.Report`, None if it runs as it was traced.
    """

    def __init__(self, traced, partitioned=None):
        """Makes a trace.

        Args:
            traced: The ConcreteFunction as it was traced.
            partitioned: The `Partitioned` function; None if it runs as it was traced.
        """
        self.report = partitioned and partitioned.report
        self._traced = traced
        self._partitioned = partitioned

    def __call__(self, tensors):
        return self._traced(*tensors) if self._partitioned is None else self._partitioned(tensors)


@dataclasses.dataclass(frozen=True)
class Job:
    """What a partitioned function has to know of the job.

    Attributes:
        size: Number of ranks.
        wire_dtype, strict: As of `PoseidonStrategy`.
        verifier: The `verify.Verifier`, None without one.
    """

    size: int
    wire_dtype: str | None = None
    strict: bool = False
    verifier: object = None


class Partitioned:
    """A function that was partitioned.

    Attributes:
        report: The `report.Report`.
        form: What ranks have to have in common to run it, as text.
    """

    def __init__(self, traced, job, rows):
        """Partitions a function.

        Args:
            traced: Its ConcreteFunction, as of `traced`.
            job: The `Job`.
            rows: How many rows a global batch usually has, None if that is unknown.

        Raises:
            PoseidonError: If it cannot be partitioned.
        """
        self._traced = traced
        self._job = job
        self._rows = None if rows is None else -(-rows // job.size)
        self._graph = _partitioned(traced, rows)
        self.report = self._graph.report
        self.form = "\n".join([self.report.form(), *_lines(self._graph.graph_def)])
        self._variables = {step_lib.variable_path(variable): variable for _, variable in _variables(traced.graph)}
        self._built = {}
        self.build("")

    def __call__(self, tensors):
        # Exchanges of one function need names of their own, also where it calls several of ours.
        mark = step_lib.unique_site("distribute").removeprefix("distribute")
        with tf.init_scope():
            concrete = self.build(mark)
        result = concrete(*tensors)
        if self._job.verifier:
            trained = dict.fromkeys(exchange.variable for exchange in self.report.exchanges)
            weights = {path: self._variables[path] for path in trained if path in self._variables}
            if weights:
                self._job.verifier.check_weights(weights, step_lib.unique_site)
        return result

    def build(self, mark):
        """Returns the ConcreteFunction with `mark` behind the names of its exchanges."""
        if mark not in self._built:
            self._built[mark] = _built(self._traced, self._graph, self._rows, self._job, mark)
        return self._built[mark]


def trace(function, call, extended):
    """Traces a function for a call, and partitions it if all ranks can do so alike.

    Args:
        function: A Python function, or `tf.function`.
        call: The `calls.Call`.
        extended: That of the job's strategy.

    Returns:
        A `Trace`.

    Raises:
        PoseidonError: Under `strict`, if the function was not partitioned.
    """
    name = f"{call.name}/{_number()}"
    extended.broadcast_new_variables()
    # Outside of the strategy's scope, what the function finds there is no business of ours.
    in_scope = tf.distribute.get_strategy().extended is extended
    # Not in an init_scope: tapes inside would record nothing.
    function = traced(function, call, extended.one_replica if in_scope else contextlib.nullcontext)
    with tf.init_scope():
        _share([variable for _, variable in _variables(function.graph)], extended.communicator, name)
        job = Job(extended.size, extended.wire_dtype, extended.graph_pass.strict, extended.verifier)
        problem, partitioned = "", None
        try:
            partitioned = Partitioned(function, job, call.rows())
        except Exception as error:  # whatever goes wrong, the function as it is computes the same
            problem = f"{type(error).__name__}: {error}"
        form = f"not partitioned: {problem}" if problem else f"partitioned\n{partitioned.form}"
        difference = agreement.OverCommunicator(extended.communicator).difference(f"distribute/{name}", form)
        if problem or difference:
            _refuse(call.name, problem or difference, extended)
            return Trace(function)
    extended.graph_pass.expect()
    return Trace(function, partitioned)


def _refuse(name, reason, extended):
    sentence = f"The function '{name}' was not partitioned. {reason}"
    if extended.graph_pass.strict:
        raise PoseidonError(f"strict=True, but: {sentence}")
    if extended.rank == 0:
        _log.warning("%s %s", sentence, _WHOLE)


def traced(function, call, replica=contextlib.nullcontext):
    """Returns the ConcreteFunction of a call, whose inputs with rows go through PoseidonRows.

    Args:
        function: A Python function, or `tf.function`.
        call: The `calls.Call`.
        replica: A context in which the function is traced.
    """
    marks = [(dimension, name) for dimension, name in zip(call.dimensions, call.names) if dimension is not None]

    def body(*tensors):
        if marks:
            dimensions, names = zip(*marks)
            marked = iter(library.load()[0].poseidon_rows(
                values=[t for t, d in zip(tensors, call.dimensions) if d is not None], dimensions=dimensions,
                names=names))
            tensors = [t if d is None else next(marked) for t, d in zip(tensors, call.dimensions)]
        args, kwargs = call.arguments(tensors)
        with inside(), replica():
            return function(*args, **kwargs)

    body.__name__ = call.name
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


def _built(traced, partitioned, rows, job, mark):
    """Returns the ConcreteFunction of a partitioned graph, with `mark` behind the names of its exchanges."""
    trained = {exchange.site for exchange in partitioned.report.exchanges if exchange.variable}
    graph = func_graph_lib.FuncGraph(traced.graph.name)
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
            if node.op in find_sites.MARKERS and node.attr["site"].s.decode() in trained:
                node.attr["wire_dtype"].s = (job.wire_dtype or "").encode()
            if "site" in node.attr:
                node.attr["site"].s += mark.encode()
        importer.import_graph_def(graph_def, inputs, name="")
        graph.outputs = [inputs.get(_full(fetch)) if _full(fetch) in inputs else graph.get_tensor_by_name(_full(fetch))
                         for fetch in partitioned.fetches]
        checks = []
        markers = [operation for operation in graph.get_operations() if operation.type in find_sites.MARKERS]
        if markers:
            ops.agree([f"{exchange.form()}{mark}" for exchange in partitioned.report.exchanges], rows, None, job.strict)
            checks = graph.get_operations()[-1:]
        if markers and job.verifier:
            checks += _verified([marker for marker in markers if marker.get_attr("site").decode().removesuffix(mark)
                                 in trained], job.verifier)
        graph.control_outputs = [*checks, *(graph.get_operation_by_name(operation.name)
                                           for operation in traced.graph.control_outputs)]
        graph.variables = traced.graph.variables
    return concrete_function_lib.ConcreteFunction.from_func_graph(graph, traced.function_type, {})


def _verified(markers, verifier):
    """Compares what each PoseidonSync gives with the plain sum; returns the operations that do so."""
    graph, is_due, checks = tf.compat.v1.get_default_graph(), None, []
    for marker in markers:
        site = marker.get_attr("site").decode()
        before = len(graph.get_operations())
        with tf.control_dependencies(checks[-1:]):  # each waits for other ranks, and all begin with the same one
            is_due = verifier.is_due(site) if is_due is None else is_due
            gradient, contributes = marker.inputs
            verifier.check_gradient(gradient, marker.outputs[0], gradient.shape, site, contributes, is_due)
        checks += [operation for operation in graph.get_operations()[before:] if operation.op_def.is_stateful]
    return checks


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
