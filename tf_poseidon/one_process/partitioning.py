"""Turns a traced function of one process into the function that each rank runs.

Requires: a ConcreteFunction whose inputs with rows go through PoseidonRows. Ensures: a ConcreteFunction with the same
inputs and outputs, and the exchanges that its `PartitionedFunction.report` lists. Nothing here communicates with other
ranks.

Tests: tests/graphs/test_partition_functions.py, tests/graphs/test_unroll.py, tests/training/test_distribution.py.
"""

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import itertools
import secrets
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import function_pb2
from tensorflow.core.framework import graph_pb2

from tf_poseidon import grappler
from tf_poseidon import ops
from tf_poseidon import planning
from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.find import poseidon_markers
from tf_poseidon.graph_passes.graph import functions as functions_lib
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import provenance
from tf_poseidon.graph_passes.partition import partitioner as partition_lib
from tf_poseidon.graph_passes.partition import results as results_lib
from tf_poseidon.graph_passes.partition import unroll as unroll_lib
from tf_poseidon.graph_passes.partition.propagate import row_inputs
from tf_poseidon.graph_passes.partition.sizes import poseidon_rows
from tf_poseidon.job.verify import Verifier
from tf_poseidon.one_process import flat_graphs
from tf_poseidon.one_process import graph_texts
from tf_poseidon.one_process import late_results
from tf_poseidon.one_process.flat_graphs import full_name
from tf_poseidon.ops import sites

# The node of a partitioned function that calls its nodes.
NODES = "nodes"

# Of the partitioned functions of this process; by another than those in graphs that other processes have saved.
_numbers = itertools.count()
_FIRST_NUMBER = secrets.randbits(48)
_call_numbers = itertools.count()  # of the functions that they call


@dataclasses.dataclass(frozen=True)
class PartitionOptions:
    """What a partitioned function must know about the job.

    Attributes:
        size: Number of ranks.
        wire_dtype, strict: Same as in `PoseidonStrategy`.
        verifier: The `verify.Verifier`, None without one.
        inlines: Whether the graph of a function has its nodes, for those who read it, and does not call them.
    """

    size: int
    wire_dtype: str | None = None
    strict: bool = False
    verifier: Verifier | None = None
    inlines: bool = False


@dataclasses.dataclass(frozen=True)
class _Interface:
    """What a partitioned function shares with the traced one, which need not be kept: graphs take memory.

    Attributes:
        name: The graph's name.
        arguments: (dtype, shape, name of the placeholder) of each input that is not a capture.
        captures: (captured tensor, name in the partitioned graph) of each capture.
        outputs: (dtype, shape) of each output.
        variables: The graph's variables.
        controls: Names of the operations that always run.
        function_type: Same as in a ConcreteFunction.
    """

    name: str
    arguments: tuple[tuple[tf.DType, tf.TensorShape, str], ...]
    captures: tuple[tuple[tf.Tensor, str], ...]
    outputs: tuple[tuple[tf.DType, tf.TensorShape], ...]
    variables: tuple[tf.Variable, ...]
    controls: tuple[str, ...]
    function_type: Any

    def of_steps(self, steps: int) -> "_Interface":
        """Returns the interface of several steps: their inputs one after the other, and the outputs of the last one."""
        return dataclasses.replace(
            self, function_type=tf_compat.repeated(self.function_type, steps),
            arguments=tuple((dtype, shape, unroll_lib.renamed(name, step))
                            for step in range(steps) for dtype, shape, name in self.arguments),
            controls=tuple(unroll_lib.renamed(name, step) for step in range(steps) for name in self.controls))

    def with_own_rows(self, own: Collection[int]) -> "_Interface":
        """Returns the interface of a function some of whose outputs, given by number, are this rank's rows."""
        return dataclasses.replace(self, outputs=tuple(
            (dtype, tf.TensorShape([None]).concatenate(shape[1:]) if i in own else shape)
            for i, (dtype, shape) in enumerate(self.outputs)))

    def of_step(self, traced: tf.types.experimental.ConcreteFunction, results: late_results.LateResults,
                graph_def: graph_pb2.GraphDef) -> "_Interface":
        """Returns the interface of a function without its results."""
        left = [tensor for i, tensor in enumerate(traced.graph.outputs) if i not in results.numbers]
        gone = results.reads - {node.name for node in graph_def.node}
        return dataclasses.replace(self, function_type=tf_compat.returning(self.function_type, left),
                                   outputs=tuple((tensor.dtype, tensor.shape) for tensor in left),
                                   controls=tuple(name for name in self.controls if name not in gone))

    @property
    def shared(self) -> set[str]:
        """The names of the captured inputs' placeholders."""
        return {graph_lib.node_of(name) for _, name in self.captures}

    @classmethod
    def of(cls, traced: tf.types.experimental.ConcreteFunction) -> "_Interface":
        """Returns the interface of a ConcreteFunction."""
        graph = traced.graph
        captured, names = {id(internal) for _, internal in graph.captures}, flat_graphs.names_of_captures(graph)
        return cls(graph.name,
                   tuple((t.dtype, t.shape, t.op.name) for t in graph.inputs if id(t) not in captured),
                   tuple((external, full_name(names[internal.op.name])) for external, internal in graph.captures),
                   tuple((tensor.dtype, tensor.shape) for tensor in graph.outputs), graph.variables,
                   tuple(operation.name for operation in graph.control_outputs), traced.function_type)


class PartitionedFunction:
    """A function that was partitioned.

    Attributes:
        number: Its number, which no other function has, nor one of another process.
        report: The `report.PartitionReport`.
        results: The `LateResults` of its last step; None if it returns all of them itself.
        agreement_text: The text that must be the same on all ranks before they run it.
        whole: The `planning.WholeOp`s.
        has_sites: Whether it synchronises anything.
        own: Numbers of the outputs that are this rank's rows; those of all ranks, in rank order, are the whole output.
    """

    def __init__(self, traced: tf.types.experimental.ConcreteFunction, options: PartitionOptions, rows: int | None,
                 held: Sequence[tf.Variable] = (), trains: bool = True,
                 candidates: Sequence[tf.Variable] | None = None, keeps_rows: bool = False) -> None:
        """Partitions a function.

        Args:
            traced: Its ConcreteFunction, in which each input with rows goes through a PoseidonRows.
            options: The options.
            rows: Usual number of rows of a global batch, None if unknown.
            held: Variables that hold summands.
            trains: Whether ranks compare what it exchanges, and verify it if the job has a verifier.
            candidates: Variables that hold summands if the function needs none of them whole, except for its results:
                what it returns from these variables alone is then computed by `results`. None if it returns all.
            keeps_rows: Whether the rows of its outputs stay with their ranks, where each output is a tensor.

        Raises:
            PoseidonError: If it cannot be partitioned.
        """
        in_process = next(_numbers)
        self.number = _FIRST_NUMBER + in_process
        self._interface = _Interface.of(traced)
        self._options = options
        self._rows = rows
        self._trains = trains
        keeps_rows = keeps_rows and all(isinstance(leaf, tf.Tensor)
                                        for leaf in tf.nest.flatten(traced.structured_outputs))
        partitioned, self.results = _partitioned(traced, rows, held, candidates, keeps_rows)
        self.own = partitioned.own
        self._interface = self._interface.with_own_rows(self.own)
        if self.results is not None:
            self._interface = self._interface.of_step(traced, self.results, partitioned.graph_def)
        self.report = partitioned.report
        self.whole = tuple(planning.WholeOp(op.node, op.op, op.bytes.per_row) for op in self.report.whole)
        self.has_sites = any(node.op in poseidon_markers.OPS for node in partitioned.graph_def.node)
        self.agreement_text = "\n".join([self.report.agreement_text(), *graph_texts.lines(partitioned.graph_def), *(
            [] if self.results is None else self.results.lines)])
        self._trained = {exchange.site for exchange in self.report.exchanges if exchange.variable}
        self._set_wire_dtype(partitioned.graph_def)
        self._variables = {sites.variable_path(variable): variable
                           for _, variable in flat_graphs.variables_of(traced.graph)}
        self._fetches = partitioned.fetches
        ends = dict.fromkeys([*self._interface.controls, *map(graph_lib.node_of, self._fetches)])
        self._ends = tuple(name for name in ends if name not in self._interface.shared)
        # TensorFlow forgets a function together with the graph that was traced with it, and names some after their
        # contents, so graphs that are traced later use the same names.
        graph_def = functions_lib.with_own_functions(partitioned.graph_def, f"_partitioned{in_process}")
        # As bytes, a graph takes a fraction of the memory.
        self._serialized = graph_def.SerializeToString()
        self._built = {"": self._build(graph_def, "")}
        self._unrolled: dict[int, tf.types.experimental.ConcreteFunction] = {}

    def __call__(self, tensors: Sequence[tf.Tensor]) -> Any:
        # Each exchange of one function needs its own name, also if the function calls several of ours.
        mark = sites.unique_site("distribute").removeprefix("distribute")
        with tf.init_scope():
            concrete = self.build(mark)
        result = concrete(*tensors)
        if self._trains and self._options.verifier:
            trained = dict.fromkeys(exchange.variable for exchange in self.report.exchanges)
            weights = {path: self._variables[path] for path in trained if path in self._variables}
            if weights:
                self._options.verifier.check_weights(weights, sites.unique_site)
        return result

    def build(self, mark: str) -> tf.types.experimental.ConcreteFunction:
        """Returns the ConcreteFunction with `mark` appended to the names of its exchanges."""
        if mark not in self._built:
            graph_def = graph_pb2.GraphDef.FromString(self._serialized)
            self._built[mark] = self._build(graph_def, mark)
        return self._built[mark]

    @functools.cached_property
    def order(self) -> unroll_lib.StepOrder:
        """What a step has to wait for in the one before, and why steps cannot be unrolled, if so."""
        if self._trains and self._options.verifier:
            return unroll_lib.StepOrder(obstacle="verify compares variables between steps")
        graph_def = graph_pb2.GraphDef.FromString(self._serialized)
        return unroll_lib.order_of(graph_def, self._interface.shared, self._ends, self._trained)

    def unrolled_steps(self, number: int) -> int:
        """Returns how many of a number of steps become one graph."""
        return 1 if self.order.obstacle else unroll_lib.length(number, self.report.nodes)

    def unrolled(self, steps: int) -> tf.types.experimental.ConcreteFunction:
        """Returns the ConcreteFunction of several steps, ordered by `order`.

        It takes the inputs of all steps, one after the other, and returns the results of the last one.
        """
        if steps not in self._unrolled:
            graph_def = graph_pb2.GraphDef.FromString(self._serialized)
            graph_def = unroll_lib.unroll(graph_def, self.order, self._interface.shared, self._ends,
                                          self._interface.controls, steps)
            self._unrolled[steps] = self._build(graph_def, "", steps)
        return self._unrolled[steps]

    def _set_wire_dtype(self, graph_def: graph_pb2.GraphDef) -> None:
        for node in graph_def.node:
            if node.op in poseidon_markers.OPS and node.attr["site"].s.decode() in self._trained:
                node.attr["wire_dtype"].s = (self._options.wire_dtype or "").encode()

    def _build(self, graph_def: graph_pb2.GraphDef, mark: str,
               steps: int = 1) -> tf.types.experimental.ConcreteFunction:
        """Returns the ConcreteFunction of a partitioned GraphDef of some steps."""
        interface = self._interface if steps == 1 else self._interface.of_steps(steps)
        graph = tf_compat.func_graph(interface.name)
        for node in graph_def.node:
            if mark and "site" in node.attr:
                provenance.rename_site(node, node.attr["site"].s.decode() + mark)
        fetches = [fetch if graph_lib.node_of(fetch) in interface.shared else unroll_lib.renamed(fetch, steps - 1)
                   for fetch in self._fetches]
        inlines_nodes = self._options.inlines or (self._trains and self._options.verifier is not None)
        with graph.as_default():
            graph.inputs = [tf.compat.v1.placeholder(*argument) for argument in interface.arguments]
            inputs = {full_name(name): tensor for (_, _, name), tensor in zip(interface.arguments, graph.inputs)}
            # Captured placeholders carry the dtypes and shapes of the variables, which the ops that read them need.
            inputs |= {name: graph.capture(external) for external, name in interface.captures}
            add = _import if inlines_nodes else functools.partial(_call, interface=interface)
            graph.outputs, controls = add(graph, graph_def, inputs, fetches, interface.controls)
            checks = self._checks(graph, mark, steps) if self._trains and self.has_sites else []
            graph.control_outputs = [*checks, *controls]
            graph.variables = interface.variables
        return tf_compat.concrete_function(graph, interface.function_type)

    def _checks(self, graph: tf.Graph, mark: str, steps: int) -> list[tf.Operation]:
        """Returns the operations by which ranks agree, and those of verify mode."""
        texts = [f"{exchange.agreement_text()}{mark}" for exchange in self.report.exchanges]
        rows = None if self._rows is None else -(-self._rows // self._options.size)
        ops.agree(texts, rows=rows, static_rows=None, strict=self._options.strict,
                  whole=planning.whole_op.dumps(self.whole), steps=steps, global_rows=self._rows, function=self.number)
        checks = graph.get_operations()[-1:]
        if self._options.verifier:
            markers = [operation for operation in graph.get_operations() if operation.type in poseidon_markers.OPS]
            checks += _verified([marker for marker in markers if marker.get_attr("site").decode().removesuffix(mark)
                                 in self._trained], self._options.verifier)
        return checks


def _import(graph: tf.Graph, graph_def: graph_pb2.GraphDef, inputs: Mapping[str, tf.Tensor], fetches: Sequence[str],
            controls: Iterable[str]) -> tuple[list[tf.Tensor], list[tf.Operation]]:
    """Creates the nodes of a GraphDef in the default graph; returns its fetches, and the operations that always run."""
    tf_compat.define_functions(graph_def.library, graph)
    imported = flat_graphs.without_placeholders(graph_def, inputs)
    read = {full_name(tensor) for node in imported.node for tensor in graph_lib.data_inputs(node)}
    tf.import_graph_def(imported, {name: tensor for name, tensor in inputs.items() if name in read}, name="")
    return [inputs[full_name(fetch)] if full_name(fetch) in inputs else graph.get_tensor_by_name(full_name(fetch))
            for fetch in fetches], list(map(graph.get_operation_by_name, controls))


def _call(graph: tf.Graph, graph_def: graph_pb2.GraphDef, inputs: Mapping[str, tf.Tensor], fetches: Sequence[str],
          controls: Iterable[str], interface: _Interface) -> tuple[list[tf.Tensor], list[tf.Operation]]:
    """Does what `_import` does by a call of the nodes as a function: objects of Python's for each of them take long."""
    function_def = function_pb2.FunctionDef()
    function_def.signature.name = f"{interface.name}_nodes{next(_call_numbers)}"
    for name, tensor in inputs.items():
        function_def.signature.input_arg.add(name=graph_lib.node_of(name), type=tensor.dtype.as_datatype_enum)
    returns = {f"output_{i}": fetch for i, fetch in enumerate(fetches)}
    for name, (dtype, _) in zip(returns, interface.outputs, strict=True):
        function_def.signature.output_arg.add(name=name, type=dtype.as_datatype_enum)
    calling = graph_lib.with_nodes(graph_def, ())
    calling.library.function.append(functions_lib.with_graph(function_def, graph_def, returns, controls))
    tf_compat.define_functions(calling.library, graph)
    node = calling.node.add(name=NODES, op="StatefulPartitionedCall", input=list(inputs))
    node.attr["f"].func.name = function_def.signature.name
    node.attr["Tin"].list.type.extend(tensor.dtype.as_datatype_enum for tensor in inputs.values())
    node.attr["Tout"].list.type.extend(dtype.as_datatype_enum for dtype, _ in interface.outputs)
    tf.import_graph_def(calling, inputs, name="")
    operation = graph.get_operation_by_name(node.name)
    for output, (_, shape) in zip(operation.outputs, interface.outputs, strict=True):
        output.set_shape(shape)
    return operation.outputs, [operation]


def _partitioned(traced: tf.types.experimental.ConcreteFunction, rows: int | None, held: Sequence[tf.Variable],
                 candidates: Sequence[tf.Variable] | None,
                 keeps_rows: bool) -> tuple[partition_lib.PartitionedGraph, late_results.LateResults | None]:
    """Returns the `PartitionedGraph` of a ConcreteFunction, and its `LateResults` if they are not part of it.

    Args:
        traced: The function.
        rows: Usual number of rows of a batch, None if unknown.
        held, candidates, keeps_rows: Same as in `PartitionedFunction`.
    """
    graph_def, outputs, variables = flat_graphs.flat(traced)
    cut = None
    if candidates is not None:
        names = flat_graphs.names_of_captures(traced.graph)
        ends = [*(operation.name for operation in traced.graph.control_outputs),
                *(names.get(tensor.op.name, tensor.op.name) for tensor in traced.graph.inputs)]
        graph_def, cut = results_lib.cut(graph_def, outputs, ends, _named(variables, candidates), set(names.values()))
        outputs = [output for i, output in enumerate(outputs) if i not in cut.fetches]
    graph_def = row_inputs.together(graph_def)
    if not any(node.op == poseidon_rows.ROWS for node in graph_def.node):
        raise GraphError("None of its inputs has rows that could be divided among ranks: they are ragged, sparse "
                         "or scalars.")
    paths = {name: sites.variable_path(variable) for name, variable in variables.items()}
    partitioned = partition_lib.partition(
        graph_def, outputs, grappler.add_shapes, paths, rows=rows, summands=_named(variables, held),
        candidates=_named(variables, candidates or ()), runs_whole=True, own=outputs if keeps_rows else ())
    if cut is None:
        return partitioned, None
    now = [variable for name, variable in variables.items() if name in partitioned.summands
           and not any(variable is held_variable for held_variable in held)]
    return partitioned, late_results.LateResults(traced, cut, now, variables)


def _named(variables: Mapping[str, tf.Variable], wanted: Iterable[tf.Variable]) -> list[str]:
    """Returns the names of the wanted variables' resources."""
    identities = {id(variable) for variable in wanted}
    return [name for name, variable in variables.items() if id(variable) in identities]


def _verified(markers: Iterable[tf.Operation], verifier: Verifier) -> list[tf.Operation]:
    """Compares the result of each PoseidonSync with the plain sum; returns the operations that do so."""
    graph, is_due = tf.compat.v1.get_default_graph(), None
    checks: list[tf.Operation] = []
    for marker in markers:
        site = marker.get_attr("site").decode()
        number = len(graph.get_operations())
        with tf.control_dependencies(checks[-1:]):  # each waits for other ranks, so all ranks begin with the same one
            is_due = verifier.is_due(site) if is_due is None else is_due
            gradient, contributes = marker.inputs
            verifier.check_gradient(gradient, marker.outputs[0], gradient.shape, site, contributes, is_due)
        checks += [operation for operation in graph.get_operations()[number:] if operation.op_def.is_stateful]
    return checks
