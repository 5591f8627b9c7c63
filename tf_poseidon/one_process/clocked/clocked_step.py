"""A partitioned step in which workers may read stale weights: its two parts as functions, and how ranks run them.

Tests: tests/training/test_clocks.py.
"""

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any
from typing import overload

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from tf_poseidon import grappler
from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.graph_passes import session as session_lib
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.partition import worker_and_server
from tf_poseidon.job.communicator import Communicator
from tf_poseidon.job.job_variables import sharing
from tf_poseidon.job.worker_clocks import Clocks
from tf_poseidon.one_process import rank_graphs
from tf_poseidon.one_process.graphs.flat_graphs import full_name
from tf_poseidon.one_process.partitioning import Partition

_Argument = tuple[str, tf.DType, tf.TensorShape]  # of a function: its placeholder


class ClockedStep:
    """A step that a rank's worker and its server share, as `worker_and_server` divides it.

    Attributes:
        plan: Its `Plan`: all gradients travel dense.
        overlap: How far workers run ahead, a sentence.
    """

    def __init__(self, partition: Partition, clocks: Clocks, session: session_lib.RewriteSession) -> None:
        """Makes the functions of both.

        Args:
            partition: The step.
            clocks: This rank's clocks.
            session: What plans the step.

        Raises:
            GraphError: If it cannot be divided, on all ranks.
        """
        self._clocks = clocks
        interface, graph_def = partition.interface, partition.graph_def()
        captures = {graph_lib.node_of(name): external for external, name in interface.captures}
        by_handle = {id(variable.handle): variable for variable in interface.variables}
        variables = {name: by_handle[id(external)] for name, external in captures.items() if id(external) in by_handle}
        held = () if partition.results is None else partition.results.held
        divided = worker_and_server.divide(
            graph_def, partition.fetches, interface.controls, captures,
            {name: variable.dtype.as_datatype_enum for name, variable in variables.items()},
            [name for name, variable in variables.items() if any(variable is other for other in held)],
            grappler.add_shapes(graph_def, alone=True))
        plan = session.plan_of(graph_def, partition.options.facts, grappler.add_shapes)
        self.plan = dataclasses.replace(plan, whole=partition.facts.whole)
        self.overlap = (f"Workers may run ahead of the weights that they read, by {clocks.synchrony}; the results are "
                        "not those of one process.")
        self._versioned = [variables[name] for name in divided.versioned]
        self._copies = [(variables[name], _copy_of(variables[name])) for name in divided.copied]
        self._name = interface.name
        self._shared = [variables[name] for name in sorted(variables)  # in the same order on all ranks
                        if not any(variables[name] is other for other in held)]
        self._is_workers = divided.outputs
        self._given = len(divided.tickets) + len(divided.carried)
        arguments = [(graph_lib.node_of(name), dtype, shape) for dtype, shape, name in interface.arguments]
        arguments += [(name, variable.dtype, variable.shape) for name, variable in zip(divided.versioned,
                                                                                       self._versioned)]
        fetches = {of_worker: [fetch for fetch, is_workers in zip(partition.fetches, divided.outputs)
                               if is_workers == of_worker] for of_worker in (True, False)}
        copies = {name: copy.handle for name, (_, copy) in zip(divided.copied, self._copies)}
        self._worker = _function(f"{interface.name}_worker", divided.worker, arguments, captures | copies,
                                 [*divided.tickets, *divided.carried, *fetches[True]], divided.worker_ends,
                                 interface.variables)
        names = [*(f"{worker_and_server.TICKET}{name}" for name in divided.tickets), *divided.carried.values()]
        given = [(name, tensor.dtype, tensor.shape) for name, tensor in zip(names, self._worker.outputs)]
        self._server = _function(f"{interface.name}_server", divided.server, given, captures,
                                 [*divided.values, *fetches[False]], divided.server_ends, interface.variables)

    def run(self, tensors: Sequence[tf.Tensor]) -> "StepOutputs":
        """Makes a step of the worker, which the server applies later; returns its outputs."""
        outputs = StepOutputs(self._clocks, self._is_workers)

        def compute(values: Sequence[tf.Tensor]) -> Any:
            results = self._worker(*tensors, *values)
            given, outputs.of_worker = results[:self._given], results[self._given:]

            def update() -> Sequence[tf.Tensor]:
                results = self._server(*given)
                outputs.of_server = results[len(values):]
                return results[:len(values)]

            return update

        self._clocks.step(self, compute)
        return outputs

    def present(self) -> list[tf.Tensor]:
        """Returns the values of the weights, and gives the worker's copies those of their variables."""
        for variable, copy in self._copies:
            tf.raw_ops.AssignVariableOp(resource=copy.handle, value=_value(variable))
        return [_value(variable) for variable in self._versioned]

    def restore(self, values: Sequence[tf.Tensor], communicator: Communicator) -> None:
        """Gives the weights values, and all ranks rank 0's values of the step's other variables.

        An update that fails may have changed some of its variables, on some ranks.
        """
        for variable, value in zip(self._versioned, values, strict=True):
            tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)
        sharing.share(self._shared, communicator, self._name)


class StepOutputs(Sequence[tf.Tensor]):
    """The outputs of a step; those of the server are there when it has applied the step, for which reading waits.

    Attributes:
        of_worker: Those that the worker has computed.
        of_server: Those that the server has.
    """

    def __init__(self, clocks: Clocks, is_workers: Sequence[bool]) -> None:
        self.of_worker: Sequence[tf.Tensor] = ()
        self.of_server: Sequence[tf.Tensor] = ()
        self._clocks = clocks
        self._is_workers = is_workers

    def __len__(self) -> int:
        return len(self._is_workers)

    @overload
    def __getitem__(self, index: int) -> tf.Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[tf.Tensor]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if not all(self._is_workers):
            self._clocks.finish()
        of = {True: iter(self.of_worker), False: iter(self.of_server)}
        return [next(of[is_workers]) for is_workers in self._is_workers][index]


def _function(name: str, graph_def: graph_pb2.GraphDef, arguments: Iterable[_Argument],
              captures: Mapping[str, tf.Tensor], fetches: Sequence[str], ends: Collection[str],
              variables: Sequence[tf.Variable]) -> tf.types.experimental.ConcreteFunction:
    """Returns the ConcreteFunction of a GraphDef.

    Args:
        name: Its name.
        graph_def: The GraphDef.
        arguments: Its arguments, in their order.
        captures: What it may capture, by the name of its placeholder.
        fetches: The tensors that it returns.
        ends: The nodes that always run.
        variables: The variables that it may use.
    """
    graph = tf_compat.func_graph(name)
    names = {node.name for node in graph_def.node}
    with graph.as_default():
        graph.inputs = []
        inputs = {}
        for argument, dtype, shape in arguments:
            graph.inputs.append(tf.compat.v1.placeholder(dtype, shape, argument))
            inputs[full_name(argument)] = graph.inputs[-1]
        inputs |= {full_name(captured): graph.capture(external) for captured, external in captures.items()
                   if captured in names and full_name(captured) not in inputs}
        graph.outputs, graph.control_outputs = rank_graphs.import_nodes(
            graph, graph_def, inputs, list(map(full_name, fetches)), ends)
        graph.variables = variables
    return tf_compat.flat_function(graph)


def _copy_of(variable: tf.Variable) -> tf.Variable:
    """Returns a variable of this rank's own, without a value."""
    return tf_compat.uninitialized_variable()(
        trainable=False, name=f"{variable.name.partition(':')[0]}_worker", shape=variable.shape, dtype=variable.dtype)


def _value(variable: tf.Variable) -> tf.Tensor:
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
