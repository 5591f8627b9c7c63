"""Partitions a traced function of one process: what each rank computes of it, as one graph.

Requires: a ConcreteFunction whose inputs with rows go through PoseidonRows. Ensures: a graph with the same inputs and
outputs, and the exchanges that `Partition.report` lists. Nothing here communicates with other ranks.

Tests: tests/graphs/test_partition_functions.py, tests/graphs/test_unroll.py, tests/training/test_distribution.py.
"""

from collections.abc import Container
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools
import secrets
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from tf_poseidon import planning
from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.find import poseidon_markers
from tf_poseidon.graph_passes.graph import functions
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.partition import partitioner
from tf_poseidon.graph_passes.partition import report as report_lib
from tf_poseidon.graph_passes.partition import unroll
from tf_poseidon.graph_passes.partition.preparation import results as results_lib
from tf_poseidon.graph_passes.partition.preparation import working_copies
from tf_poseidon.graph_passes.partition.propagate import row_inputs
from tf_poseidon.graph_passes.partition.sizes import poseidon_rows
from tf_poseidon.graph_passes.partition.states import Division
from tf_poseidon.one_process import late_results
from tf_poseidon.one_process.attempts import Attempts
from tf_poseidon.one_process.graphs import flat_graphs
from tf_poseidon.one_process.graphs import graph_texts
from tf_poseidon.one_process.graphs.flat_graphs import full_name
from tf_poseidon.one_process.partition_options import PartitionOptions
from tf_poseidon.one_process.sharding import divided_weights
from tf_poseidon.one_process.sharding import master_weights
from tf_poseidon.one_process.sharding import sharded_variables
from tf_poseidon.ops import sites

# Of the partitioned functions of this process; by another than those in graphs that other processes have saved.
_numbers = itertools.count()
_FIRST_NUMBER = secrets.randbits(48)


@dataclasses.dataclass(frozen=True)
class Interface:
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

    @classmethod
    def of(cls, traced: tf.types.experimental.ConcreteFunction, partitioned: partitioner.PartitionedGraph,
           results: late_results.LateResults | None,
           shards: Iterable[tf.Variable], copies: Iterable[tuple[tf.Tensor, str]]) -> "Interface":
        """Returns the interface of a ConcreteFunction that was partitioned.

        Args:
            traced: The function.
            partitioned: Its graph.
            results: Its results that are not part of the graph.
            shards: The variables that hold shards in it.
            copies: (resource, name of its placeholder) of each working copy in it.
        """
        graph, function_type = traced.graph, traced.function_type
        captured, names = {id(internal) for _, internal in graph.captures}, flat_graphs.names_of_captures(graph)
        outputs, controls = graph.outputs, [operation.name for operation in graph.control_outputs]
        if results is not None:
            outputs = [tensor for i, tensor in enumerate(outputs) if i not in results.numbers]
            function_type = tf_compat.returning(function_type, outputs)
            gone = results.reads - {node.name for node in partitioned.graph_def.node}
            controls = [name for name in controls if name not in gone]
        shapes = [tf.TensorShape([None]).concatenate(tensor.shape[1:]) if i in partitioned.own else tensor.shape
                  for i, tensor in enumerate(outputs)]
        handles = {id(variable.handle): sharded_variables.shard_handle(variable) for variable in shards}
        return cls(graph.name,
                   tuple((t.dtype, t.shape, t.op.name) for t in graph.inputs if id(t) not in captured),
                   (*((handles.get(id(external), external), full_name(names[internal.op.name]))
                      for external, internal in graph.captures),
                    *((resource, full_name(name)) for resource, name in copies)),
                   tuple((tensor.dtype, shape) for tensor, shape in zip(outputs, shapes)), graph.variables,
                   tuple(controls), function_type)

    def of_steps(self, steps: int) -> "Interface":
        """Returns the interface of several steps: their inputs one after the other, and the outputs of the last one."""
        return dataclasses.replace(
            self, function_type=tf_compat.repeated(self.function_type, steps),
            arguments=tuple((dtype, shape, unroll.renamed(name, step))
                            for step in range(steps) for dtype, shape, name in self.arguments),
            controls=tuple(unroll.renamed(name, step) for step in range(steps) for name in self.controls))

    @property
    def shared(self) -> set[str]:
        """The names of the captured inputs' placeholders."""
        return {graph_lib.node_of(name) for _, name in self.captures}


@dataclasses.dataclass(frozen=True)
class Partition:
    """A function that was partitioned, as one graph.

    Attributes:
        number: Its number, which no other function has, nor one of another process.
        options: The `PartitionOptions`.
        interface: Its `Interface`.
        serialized: Its GraphDef: as bytes, a graph takes a fraction of the memory.
        fetches: The names of its outputs in it.
        row_outputs: Numbers of the outputs that are this rank's rows; those of all ranks, in rank order, are the whole
            output.
        results: The `LateResults` of its last step; None if it returns all of them itself.
        report: The `report.PartitionReport`.
        agreement_text: The text that must be the same on all ranks before they run it.
        shards: The variables of which each rank holds its shard.
        divisions: The `states.Division` of each of these.
        held_whole: The variables that may hold shards, of which each rank must hold the whole.
        has_sites: Whether it synchronises anything.
        weights: The variables whose gradients it sums, by path; of masters that hold shards, their copies.
        divided: The `planning.DividedWeight`s.
        refusals: Sentences about weights that were to be divided, and cannot be.
    """

    number: int
    options: PartitionOptions
    interface: Interface
    serialized: bytes
    fetches: tuple[str, ...]
    row_outputs: frozenset[int]
    results: late_results.LateResults | None
    report: report_lib.PartitionReport
    agreement_text: str
    shards: tuple[tf.Variable, ...]
    divisions: tuple[Division, ...]
    held_whole: tuple[tf.Variable, ...]
    has_sites: bool
    weights: Mapping[str, tf.Variable]
    divided: tuple[planning.DividedWeight, ...] = ()
    refusals: tuple[str, ...] = ()

    @property
    def facts(self) -> planning.PartitionFacts:
        """What its plan says of it."""
        return planning.PartitionFacts(tuple(
            planning.WholeOp(op.node, op.op, op.bytes.per_row) for op in self.report.whole), self.divided)

    def graph_def(self) -> graph_pb2.GraphDef:
        """Returns its GraphDef."""
        return graph_pb2.GraphDef.FromString(self.serialized)


def partition(traced: tf.types.experimental.ConcreteFunction, options: PartitionOptions,
              held: Sequence[tf.Variable] = (), candidates: Sequence[tf.Variable] | None = None,
              keeps_rows: bool = False) -> Partition:
    """Partitions a function.

    Args:
        traced: Its ConcreteFunction, in which each input with rows goes through a PoseidonRows.
        options: The options.
        held: Variables that hold summands.
        candidates: Variables that hold summands if the function needs none of them whole, except for its results:
            what it returns from these variables alone is then computed by `results`. None if it returns all.
        keeps_rows: Whether the rows of its outputs stay with their ranks, where each output is a tensor.

    Raises:
        PoseidonError: If it cannot be partitioned.
    """
    in_process = next(_numbers)
    keeps_rows = keeps_rows and all(isinstance(leaf, tf.Tensor)
                                    for leaf in tf.nest.flatten(traced.structured_outputs))
    parts = _partitioned(traced, options, held, candidates, keeps_rows)
    partitioned, results, shards = parts.graph, parts.results, tuple(variable for variable, _ in parts.divisions)
    graph_def, report = partitioned.graph_def, partitioned.report
    agreement_text = "\n".join([report.agreement_text(), *graph_texts.lines(graph_def), *(
        [] if results is None else results.lines)])
    markers = [node for node in graph_def.node if node.op in (*poseidon_markers.OPS, poseidon_markers.SCATTER)]
    gradient_sites = report.gradient_sites
    for marker in markers:
        if marker.attr["site"].s.decode() in gradient_sites:
            marker.attr["wire_dtype"].s = (options.wire_dtype or "").encode()
    variables = {sites.variable_path(variable): variable for _, variable in flat_graphs.variables_of(traced.graph)}
    variables |= {master.path: master.copy for master in master_weights.among(shards) if master.copy is not None}
    paths = dict.fromkeys(exchange.variable for exchange in report.exchanges)
    # TensorFlow forgets a function together with the graph that was traced with it, and names some after their
    # contents, so graphs that are traced later use the same names.
    graph_def = functions.with_own_functions(graph_def, f"_partitioned{in_process}")
    return Partition(
        _FIRST_NUMBER + in_process, options, Interface.of(traced, partitioned, results, shards, parts.copies),
        graph_def.SerializeToString(), partitioned.fetches, row_outputs=partitioned.own, results=results, report=report,
        agreement_text=agreement_text, shards=shards, divisions=tuple(division for _, division in parts.divisions),
        held_whole=parts.held_whole, has_sites=bool(markers),
        weights={path: variables[path] for path in paths if path in variables},
        divided=parts.divided, refusals=parts.refusals)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """What a ConcreteFunction becomes.

    Attributes:
        graph: Its `PartitionedGraph`.
        results: Its `LateResults`; None if they are part of the graph.
        divisions: (variable, its `Division`) of each that holds shards.
        copies: (resource, name of its placeholder) of each working copy that the graph uses.
        held_whole, divided, refusals: Same as in `Partition`.
    """

    graph: partitioner.PartitionedGraph
    results: late_results.LateResults | None
    divisions: Sequence[tuple[tf.Variable, Division]]
    copies: Sequence[tuple[tf.Tensor, str]]
    held_whole: tuple[tf.Variable, ...]
    divided: tuple[planning.DividedWeight, ...]
    refusals: tuple[str, ...]


def _partitioned(traced: tf.types.experimental.ConcreteFunction, options: PartitionOptions, held: Sequence[tf.Variable],
                 candidates: Sequence[tf.Variable] | None, keeps_rows: bool) -> _Parts:
    """Partitions the graph of a ConcreteFunction.

    Args:
        traced: The function.
        options, held, candidates, keeps_rows: Same as in `partition`.
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
    sharded = {name: variable for name, variable in variables.items()
               if isinstance(variable, sharded_variables.ShardedVariable)}
    planned, planned_masters = ({name: layouts[id(variable)] for name, variable in variables.items()
                                 if id(variable) in layouts} for layouts in (options.layouts, options.masters))
    to_divide = options.session.planner.divided_among(list(paths.values())) if options.session is not None else ()
    graph_def = divided_weights.prepared(graph_def, {
        name: variables[name] for name, path in paths.items() if path in to_divide})
    copies = master_weights.Copies(graph_def, variables, planned_masters)
    may_be_shards = planned | {name: layout for name, layout in planned_masters.items() if name in copies.candidates}
    may_be_shards |= {
        name: variable.division.layout for name, variable in sharded.items()
        if variable.may_hold_shard and (name in copies.candidates or not _is_master(variable))}
    # Unless updates are divided, slots of weights that may be are shards only with these.
    of_weights = {*planned_masters.values(), *(
        paths[name] for name, variable in sharded.items() if _is_master(variable))}
    held_divisions = sorted(variable.division for variable in sharded.values() if variable.holds_shard)
    whole_weights = partitioner.KnownVariables(
        paths | copies.named(paths), summands=_named(variables, held), candidates=_named(variables, candidates or ()),
        shards={name: variable.division.layout for name, variable in sharded.items() if variable.holds_shard},
        shard_candidates={name: layout for name, layout in may_be_shards.items()
                          if options.shard_update or layout not in of_weights},
        divisions={division.layout: division for division in held_divisions},  # of several of a layout, an owner's
        divided=divided_weights.layouts(sharded.values()), loads=options.loads)

    attempts = Attempts(graph_def, outputs, copies, may_be_shards, keeps_rows, options)
    weights = divided_weights.candidates(graph_def, variables, planned_masters)
    wanted = _wanted(graph_def, weights, options)
    attempt = attempts.divided(attempts.settled(whole_weights), wanted, weights)
    refusals = [_refusal(division.layout, _why_whole(division.layout, attempt.graph))
                for name, division in wanted.items() if name not in attempt.graph.shards]
    never = [name for name, path in paths.items()
             if path in to_divide and name not in wanted and name not in attempt.graph.shards]
    refusals += [_refusal(paths[name], why) for name in sorted(working_copies.updated(graph_def, never))
                 if (why := _why_never_divided(variables[name]))]
    if options.session is not None and options.session.planner.may_divide:
        others = {name: division for name, division in weights.items()
                  if division.columns > 1 and planning.is_worth_dividing(variables[name].shape)
                  and planning.pinned(paths[name], options.session.planner.pins) is None}
        if options.is_memory_short(_held_bytes(variables, attempt.graph.shards, options.size)):
            attempt = attempts.divided(attempt, divided_weights.in_pairs(graph_def, others), weights)
        else:
            attempt = attempts.divided_if_shorter(attempt, others, weights)
    if options.only_if_shorter and not options.is_memory_short(_bytes(variables.values())):
        attempt = attempts.whole_if_shorter(attempt)
    known, partitioned = attempt.known, attempt.graph
    masters = [name for name in copies.of(known.shards, known.shard_candidates)
               if {**known.shards, **known.shard_candidates}[name] not in known.divided]
    divisions = [(variable, partitioned.divisions[layout])
                 for name, variable in variables.items() if (layout := partitioned.shards.get(name)) is not None]
    divided = tuple(
        planning.DividedWeight(path, variable.dtype.name, tuple(variable.shape), partitioned.divisions[path].divided)
        for name, variable in variables.items()
        if (path := partitioned.shards.get(name)) in known.divided and path == paths[name])
    held_whole = tuple(variable for name, variable in sharded.items() if name not in partitioned.shards
                       and (name in copies.updated or not _is_master(variable)))
    results = None if cut is None else late_results.LateResults(traced, cut, [
        variable for name, variable in variables.items() if name in partitioned.summands
        and not any(variable is held_variable for held_variable in held)], variables)
    return _Parts(partitioned, results, divisions, copies.captures(masters), held_whole, divided,
                  tuple(refusals))


def _wanted(graph_def: graph_pb2.GraphDef, weights: Mapping[str, Division],
            options: PartitionOptions) -> dict[str, Division]:
    """Returns those of some weights that the planner wants to be divided, as it says; vectors follow them."""
    if options.session is None:
        return {}
    dimensions = options.session.planner.divided_among([division.layout for division in weights.values()])
    wanted = divided_weights.in_pairs(graph_def, {
        name: division for name, division in weights.items() if division.columns > 1 and division.layout in dimensions})
    return {name: division if (dimension := dimensions[division.layout]) is None else division.along(dimension)
            for name, division in wanted.items()}


def _why_whole(path: str, partitioned: partitioner.PartitionedGraph) -> str:
    """Returns why a graph does not divide a weight that could be divided."""
    reader = partitioned.needed_whole.get(path)
    return "the step returns all of it" if reader == "" else f"'{reader}' needs all of it in each step" if reader else (
        "it may be updated before all ranks have begun the step")


def _why_never_divided(variable: tf.Variable) -> str:
    """Returns why no graph divides a variable; "" if it is not trained, is a vector, which follows columns, or may be.

    Of a matrix with one column, a vector, all columns would be one rank's.
    """
    if not variable.trainable or len(variable.shape) < 2:
        return ""
    if len(variable.shape) > 2 or variable.shape[1] == 1:
        return f"it has the shape {variable.shape.as_list()}, expected a matrix with several columns"
    return "" if _is_master(variable) else f"it is of {variable.dtype.name}, expected float32 or float64"


def _refusal(path: str, why: str) -> str:
    """Returns the sentence about a weight that is not divided."""
    return f"'{path}' is to be divided by 'columns', but {why}: every rank holds the whole."


def _is_master(variable: tf.Variable) -> bool:
    return isinstance(variable, master_weights.MasterWeight)


def _bytes(variables: Iterable[tf.Variable]) -> int:
    return sum(variable.shape.num_elements() * variable.dtype.size for variable in variables
               if variable.shape.is_fully_defined())


def _held_bytes(variables: Mapping[str, tf.Variable], shards: Container[str], ranks: int) -> int:
    """Returns about how many bytes of some variables each rank holds: of those in `shards` its part."""
    return sum(_bytes([variable]) // (ranks if name in shards else 1) for name, variable in variables.items())


def _named(variables: Mapping[str, tf.Variable], wanted: Iterable[tf.Variable]) -> list[str]:
    """Returns the names of the wanted variables' resources."""
    identities = {id(variable) for variable in wanted}
    return [name for name, variable in variables.items() if id(variable) in identities]
