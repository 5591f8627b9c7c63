"""The graphs of a partitioned function, as ConcreteFunctions that a rank runs.

They have the nodes of a `partitioning.Partition`, and those by which ranks agree on them. Nothing here communicates
with other ranks.

Tests: tests/graphs/test_partition_functions.py, tests/graphs/test_unroll.py, tests/training/test_verify.py.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import itertools

import tensorflow as tf
from tensorflow.core.framework import function_pb2
from tensorflow.core.framework import graph_pb2

from tf_poseidon import ops
from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.graph_passes.find import poseidon_markers
from tf_poseidon.graph_passes.graph import functions
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import provenance
from tf_poseidon.graph_passes.partition import unroll
from tf_poseidon.job.verify import Verifier
from tf_poseidon.one_process.graphs import flat_graphs
from tf_poseidon.one_process.graphs.flat_graphs import full_name
from tf_poseidon.one_process.partitioning import Interface
from tf_poseidon.one_process.partitioning import Partition
from tf_poseidon.one_process.sharding import sharded_variables

# The node of a partitioned function that calls its nodes.
NODES = "nodes"

_call_numbers = itertools.count()  # of the functions that have the nodes


class RankGraphs:
    """The ConcreteFunctions of a partition: one for each mark of its exchanges, and some of several steps.

    Attributes:
        partition: The `Partition`.
    """

    def __init__(self, partition: Partition) -> None:
        """Makes the first graph: the one without a mark."""
        self.partition = partition
        self._shared = partition.interface.shared
        ends = dict.fromkeys([*partition.interface.controls, *map(graph_lib.node_of, partition.fetches)])
        self._ends = tuple(name for name in ends if name not in self._shared)
        self._marked = {"": self._build(partition.graph_def(), "")}
        self._unrolled: dict[int, tf.types.experimental.ConcreteFunction] = {}

    def marked(self, mark: str) -> tf.types.experimental.ConcreteFunction:
        """Returns the ConcreteFunction with `mark` appended to the names of its exchanges."""
        if mark not in self._marked:
            self._marked[mark] = self._build(self.partition.graph_def(), mark)
        return self._marked[mark]

    @functools.cached_property
    def order(self) -> unroll.StepOrder:
        """What a step has to wait for in the one before, and why steps cannot be unrolled, if so."""
        partition = self.partition
        if partition.options.verifier:
            return unroll.StepOrder(obstacle="verify compares variables between steps")
        return unroll.order_of(partition.graph_def(), self._shared, self._ends, partition.report.gradient_sites)

    def unrolled_steps(self, number: int) -> int:
        """Returns how many of a number of steps become one graph."""
        return 1 if self.order.obstacle else unroll.length(number, self.partition.report.nodes)

    def unrolled(self, steps: int) -> tf.types.experimental.ConcreteFunction:
        """Returns the ConcreteFunction of several steps, ordered by `order`.

        It takes the inputs of all steps, one after the other, and returns the results of the last one.
        """
        if steps not in self._unrolled:
            graph_def = unroll.unroll(self.partition.graph_def(), self.order, self._shared, self._ends,
                                      self.partition.interface.controls, steps)
            self._unrolled[steps] = self._build(graph_def, "", steps)
        return self._unrolled[steps]

    def _build(self, graph_def: graph_pb2.GraphDef, mark: str,
               steps: int = 1) -> tf.types.experimental.ConcreteFunction:
        """Returns the ConcreteFunction of a partitioned GraphDef of some steps."""
        partition, options = self.partition, self.partition.options
        interface = partition.interface if steps == 1 else partition.interface.of_steps(steps)
        graph = tf_compat.func_graph(interface.name)
        for node in graph_def.node:
            if mark and "site" in node.attr:
                provenance.rename_site(node, node.attr["site"].s.decode() + mark)
        fetches = [fetch if graph_lib.node_of(fetch) in self._shared else unroll.renamed(fetch, steps - 1)
                   for fetch in partition.fetches]
        with graph.as_default():
            graph.inputs = [tf.compat.v1.placeholder(*argument) for argument in interface.arguments]
            inputs = {full_name(name): tensor for (_, _, name), tensor in zip(interface.arguments, graph.inputs)}
            # Captured placeholders carry the dtypes and shapes of the variables, which the ops that read them need.
            inputs |= {name: graph.capture(external) for external, name in interface.captures}
            add = import_nodes if options.inlines or options.verifier is not None else functools.partial(
                _call, interface=interface)
            graph.outputs, controls = add(graph, graph_def, inputs, fetches, interface.controls)
            with tf.control_dependencies(controls):
                controls += sharded_variables.count_update(partition.shards)
            checks = self._checks(graph, mark, steps) if options.trains and partition.has_sites else []
            graph.control_outputs = [*checks, *controls]
            graph.variables = interface.variables
        return tf_compat.concrete_function(graph, interface.function_type)

    def _checks(self, graph: tf.Graph, mark: str, steps: int) -> list[tf.Operation]:
        """Returns the operations by which ranks agree, and those of verify mode."""
        partition, options = self.partition, self.partition.options
        report = partition.report
        texts = [f"{exchange.agreement_text()}{mark}" for exchange in report.exchanges]
        ops.agree(texts, rows=options.rows_of_rank, static_rows=None, strict=options.strict,
                  partition=partition.facts.to_text(), steps=steps, global_rows=options.rows,
                  function=partition.number)
        checks = graph.get_operations()[-1:]
        if options.verifier:
            gradient_sites = {site + mark for site in report.gradient_sites}
            checks += _verified([operation for operation in graph.get_operations()
                                 if operation.type in (*poseidon_markers.OPS, poseidon_markers.SCATTER)
                                 and operation.get_attr("site").decode() in gradient_sites], options.verifier)
        return checks


def import_nodes(graph: tf.Graph, graph_def: graph_pb2.GraphDef, inputs: Mapping[str, tf.Tensor],
                 fetches: Sequence[str], controls: Iterable[str]) -> tuple[list[tf.Tensor], list[tf.Operation]]:
    """Creates the nodes of a GraphDef in the default graph; returns its fetches, and the operations that always run."""
    tf_compat.define_functions(graph_def.library, graph)
    imported = flat_graphs.without_placeholders(graph_def, inputs)
    read = {full_name(tensor) for node in imported.node for tensor in graph_lib.data_inputs(node)}
    tf.import_graph_def(imported, {name: tensor for name, tensor in inputs.items() if name in read}, name="")
    return [inputs[full_name(fetch)] if full_name(fetch) in inputs else graph.get_tensor_by_name(full_name(fetch))
            for fetch in fetches], list(map(graph.get_operation_by_name, controls))


def _call(graph: tf.Graph, graph_def: graph_pb2.GraphDef, inputs: Mapping[str, tf.Tensor], fetches: Sequence[str],
          controls: Iterable[str], interface: Interface) -> tuple[list[tf.Tensor], list[tf.Operation]]:
    """Does what `import_nodes` does by a call of the nodes as a function: objects of Python for each take long."""
    function_def = function_pb2.FunctionDef()
    function_def.signature.name = f"{interface.name}_nodes{next(_call_numbers)}"
    for name, tensor in inputs.items():
        function_def.signature.input_arg.add(name=graph_lib.node_of(name), type=tensor.dtype.as_datatype_enum)
    returns = {f"output_{i}": fetch for i, fetch in enumerate(fetches)}
    for name, (dtype, _) in zip(returns, interface.outputs, strict=True):
        function_def.signature.output_arg.add(name=name, type=dtype.as_datatype_enum)
    calling = graph_lib.with_nodes(graph_def, ())
    calling.library.function.append(functions.with_graph(function_def, graph_def, returns, controls))
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


def _verified(markers: Iterable[tf.Operation], verifier: Verifier) -> list[tf.Operation]:
    """Compares the result of each marker with the plain sum, shards once they are gathered.

    Returns:
        The operations that do so.
    """
    graph, is_due = tf.compat.v1.get_default_graph(), None
    checks: list[tf.Operation] = []
    for marker in markers:
        site = marker.get_attr("site").decode()
        number = len(graph.get_operations())
        with tf.control_dependencies(checks[-1:]):  # each waits for other ranks, so all ranks begin with the same one
            is_due = verifier.is_due(site) if is_due is None else is_due
            gradient, contributes = marker.inputs
            synchronised = marker.outputs[0]
            if marker.type == poseidon_markers.SCATTER:
                synchronised = tf.cond(is_due, functools.partial(_of_shards, marker),
                                       functools.partial(tf.identity, gradient))
            verifier.check_gradient(gradient, synchronised, gradient.shape, site, contributes, is_due)
        checks += [operation for operation in graph.get_operations()[number:] if operation.op_def.is_stateful]
    return checks


def _of_shards(scatter: tf.Operation) -> tf.Tensor:
    """Returns the sum of which a PoseidonReduceScatter gives each rank its shard."""
    return ops.gather_shards(scatter.outputs[0], f"verify/shards/{scatter.get_attr('site').decode()}",
                             tf.TensorShape(scatter.get_attr("shape")), scatter.get_attr("layout").decode(),
                             scatter.get_attr("owner"))
