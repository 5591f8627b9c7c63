"""Runs tables of small graphs, each about one op's rule, partitioned on many ranks: see partition_cases.

Many cases share one graph, since creating sessions dominates the time.
"""

import collections.abc
import dataclasses
from unittest import mock

import numpy as np
import partitioning
import tensorflow as tf

from tf_poseidon import grappler
from tf_poseidon.graph_passes.partition import partitioner as partition_lib
from tf_poseidon.graph_passes.partition.preparation import inline
from tf_poseidon.graph_passes.partition.propagate import dividing
from tf_poseidon.graph_passes.partition.row_loops import loop_outcomes
from tf_poseidon.graph_passes.partition.sizes import graph_sizes
from tf_poseidon.graph_passes.partition.states import Division
from tf_poseidon.graph_passes.partition.states import Shard
from tf_poseidon.job import communicator

# The size of a dimension of rows, and an unknown size.
K = "K"
T = "T"
# The size of a dimension of columns: on three ranks 16, 4 and none of them.
COLUMNS = 20
ROWS = (0, 1, 2, 7, 12)
# Up to here, sums of integers are exact in any order.
_EXACT = 2**40
_REDUCES = {"sum": tf.reduce_sum, "max": tf.reduce_max, "min": tf.reduce_min, "prod": tf.reduce_prod,
            "all": tf.reduce_all, "any": tf.reduce_any}


@dataclasses.dataclass(frozen=True)
class Input:
    """An input of a case.

    Attributes:
        shape: Its shape: with rows where a size is K, whole without one; T is an unknown size.
        dtype: Its type.
        low: The least value.
        high: One more than the greatest value; values are integers, in any type.
        reduce: How its rows are reduced before the case gets it, as a summand then; "" if they are not.
        make: A function from (random generator, shape) to values, instead of `low` and `high`.
        is_divided: Whether K is a number of columns, of which each rank holds its own: those of a variable.
    """

    shape: tuple
    dtype: str = "float64"
    low: int = -3
    high: int = 4
    reduce: str = ""
    make: collections.abc.Callable | None = None
    is_divided: bool = False

    @property
    def has_rows(self):
        return K in self.shape and not self.is_divided

    def values(self, rng, rows):
        """Returns values for a number of rows."""
        shape = [{K: COLUMNS if self.is_divided else rows, T: 5}.get(size, size) for size in self.shape]
        if self.make:
            return np.asarray(self.make(rng, shape)).astype(self.dtype)
        values = rng.integers(self.low, self.high, shape)
        if self.dtype == "object":
            return values.astype(str).astype(object)
        if self.dtype == "bool":
            return values >= (self.low + self.high) // 2
        return values.astype(self.dtype)


def of(*shape, **options):
    """Returns an `Input` of a shape, in which K is the number of rows."""
    return Input(shape, **options)


def summed(*shape, reduce="sum", **options):
    """Returns an `Input` that is summed over its rows, so the case gets a summand of that shape."""
    return Input((K, *shape), reduce=reduce, **options)


def columns(*shape, **options):
    """Returns an `Input` of a shape in which K is the number of columns."""
    return Input(shape, is_divided=True, **options)


@dataclasses.dataclass(frozen=True)
class Case:
    """A small graph that tests one rule or several.

    Attributes:
        ops: The ops that it is about, separated by spaces.
        build: A function from its inputs' tensors to its output, or outputs.
        inputs: The `Input`s.
        gives: The states, as text, that nodes of each of these ops give their first output; or a dict from op to it.
        fewest: The smallest number of rows that one process can take.
        tolerance: Of real numbers; by default 1e-12, where integers in one process must be equal.
        has_gradient: Whether to compare gradients too.
    """

    ops: str
    build: collections.abc.Callable
    inputs: tuple[Input, ...]
    gives: str | dict[str, str]
    fewest: int = 0
    tolerance: float | None = None
    has_gradient: bool = True

    def expected(self, op):
        """Returns the states that nodes of an op give their first output."""
        return set((self.gives if isinstance(self.gives, str) else self.gives[op]).split())


class Batch:
    """One graph of many cases.

    Attributes:
        cases: The cases.
        flat: The graph in one process.
        divisions: The `Division`s of variables that are divided, by name.
        fetches: By case, the names of the compared tensors: outputs, and gradients for float inputs.
    """

    def __init__(self, cases):
        self.cases = list(cases)
        if not any(spec.has_rows for case in cases for spec in case.inputs):  # otherwise nothing is partitioned
            self.cases.append(Case("", tf.identity, [of(K)], ""))
        self.graph = tf.Graph()
        self.divisions = {}
        with self.graph.as_default():
            tf.compat.v1.set_random_seed(7)
            self.fetches = self._build()
        self._config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=4)
        self._config.graph_options.rewrite_options.disable_meta_optimizer = True
        self.flat = inline.inline(self.graph.as_graph_def(), sum(self.fetches, []))
        self.sizes = graph_sizes.Sizes(self.flat, grappler.add_shapes)

    def _build(self):
        placeholders = {}
        for i, case in enumerate(self.cases):
            for j, spec in enumerate(case.inputs):
                unknown = COLUMNS if spec.is_divided else None
                shape = [unknown if size in (K, T) else size for size in spec.shape]
                dtype = tf.string if spec.dtype == "object" else spec.dtype
                placeholders[i, j] = tf.compat.v1.placeholder(dtype, shape, name=_name(i, j))
        with_rows = [(i, j) for i, j in placeholders if self.cases[i].inputs[j].has_rows]
        placeholders.update(zip(with_rows, partitioning.rows(
            *(placeholders[key] for key in with_rows),
            dimensions=[self.cases[i].inputs[j].shape.index(K) for i, j in with_rows])))
        fetches = []
        for i, case in enumerate(self.cases):
            with tf.name_scope(f"summands{i}"):
                inputs = [self._input(spec, placeholders[i, j]) for j, spec in enumerate(case.inputs)]
            with tf.name_scope(f"case{i}"):
                outputs = tf.nest.flatten(case.build(*inputs))
            # Nonlinear ops need summands whole, in the case too.
            is_linear = any(spec.reduce for spec in case.inputs)
            gradients = _gradients(f"gradients{i}", outputs, inputs, is_linear) if case.has_gradient else []
            fetches.append([t.name for t in [*outputs, *gradients]])
        return fetches

    def _input(self, spec, placeholder):
        """Returns the tensor that a case gets, in the scope of what is before it."""
        if spec.reduce:
            return _REDUCES[spec.reduce](placeholder, 0)
        return self._divided(spec, placeholder) if spec.is_divided else placeholder

    def _divided(self, spec, whole):
        """Returns columns that are read from a variable, of which ranks hold columns or rows, and that a tensor has."""
        rank, place = len(spec.shape), spec.shape.index(K)
        divided = int(place == rank - 1)
        order = [*range(rank)] if divided else [place, *(d for d in range(rank) if d != place)]
        whole = tf.strings.to_number(whole, tf.float64) if spec.dtype == "object" else tf.cast(whole, tf.float64)
        ordered = tf.transpose(whole, order)
        matrix = tf.reshape(ordered, [-1, COLUMNS] if divided else [COLUMNS, -1])
        variable = tf.Variable(tf.zeros(matrix.shape, tf.float64), use_resource=True)
        self.divisions[variable.op.name] = Division(variable.op.name, divided=divided, columns=matrix.shape[1])
        with tf.control_dependencies([variable.assign(matrix)]):
            value = tf.reshape(variable.read_value(), ordered.shape)
        value = tf.transpose(value, np.argsort(order))
        return tf.as_string(tf.cast(value, tf.int32)) if spec.dtype == "object" else tf.cast(value, spec.dtype)

    def partition(self):
        """Returns (the `Propagated` states, the partitioned GraphDef, the fetches in it by case)."""
        layouts = {name: name for name in self.divisions}
        held = {name: Shard(name, divided=division.divided) for name, division in self.divisions.items()}
        with mock.patch.object(dividing, "_OPERATIONS_PER_BYTE", 0):  # graphs are small
            propagated = dividing.propagate(
                self.sizes, held, row_loops=loop_outcomes.find(self.sizes, sum(self.fetches, [])))
        with (mock.patch.object(graph_sizes, "Sizes", lambda *_: self.sizes),
              mock.patch.object(dividing, "propagate", lambda *_: propagated)):
            partitioned = partition_lib.partition(self.flat, sum(self.fetches, []), None, partition_lib.KnownVariables(
                layouts, shards=layouts, divisions=self.divisions, divided=layouts))
        fetches = iter(partitioned.fetches)
        return propagated, partitioned.graph_def, [[next(fetches) for _ in names] for names in self.fetches]

    def states(self, propagated, i, op):
        """Returns the states that nodes of an op give their first output in a case, as a set of texts."""
        for scope in (f"case{i}/", f"gradients{i}/"):
            found = {str((*propagated.outcomes[node.name].gives, "none")[0]) for node in propagated.ordered
                     if node.op == op and node.name.startswith(scope)}
            if found:
                return found
        return set()

    def ops(self, i):
        """Returns the ops of a case's graph."""
        scopes = f"summands{i}/", f"case{i}/", f"gradients{i}/"
        return {node.op for node in self.flat.node if node.name.startswith(scopes)}

    def feeds(self, rows):
        """Returns values for all inputs, by name."""
        return {_name(i, j): spec.values(np.random.default_rng(100 * rows + 10 * i + j), rows)
                for i, case in enumerate(self.cases) for j, spec in enumerate(case.inputs)}

    def alone(self, all_rows=ROWS):
        """Returns the results of one process: by number of rows, by number of a case, values."""
        with tf.compat.v1.Session(graph=self.graph, config=self._config) as session:
            return {rows: session.run(self._fetched(self.fetches, rows), {
                f"{name}:0": value for name, value in self.feeds(rows).items()}) for rows in all_rows}

    def on_ranks(self, graph_def, fetches, sizes, all_rows=ROWS):
        """Yields (size, results of the ranks) per number of ranks: by number of rows, by rank, by case, values."""
        with tf.Graph().as_default() as graph:
            for rank in range(max(sizes)):
                tf.import_graph_def(partitioning._of_rank(graph_def, rank), name=f"rank{rank}")
        for size in sizes:
            communicator.use_ranks_for_ops(partitioning.job(size))
            results = {}
            with tf.compat.v1.Session(graph=graph, config=self._config) as session:
                for rows in all_rows:
                    fetched = [{i: [_tensor(rank, name) for name in names]
                                for i, names in self._fetched(fetches, rows).items()} for rank in range(size)]
                    results[rows] = session.run(fetched, {
                        f"rank{rank}/{name}:0": value for name, value in self.feeds(rows).items()
                        for rank in range(size)})
            yield size, results

    def _fetched(self, fetches, rows):
        return {i: names for i, (case, names) in enumerate(zip(self.cases, fetches)) if rows >= case.fewest}

    def wrong_values(self, expected, results, size):
        """Returns a line for each case in which some rank differs from one process."""
        lines = []
        for rows, by_rank in results.items():
            for i, wants in expected[rows].items():
                try:
                    for rank in range(size):
                        for got, want, first, name in zip(
                                by_rank[rank][i], wants, by_rank[0][i], self.fetches[i], strict=True):
                            what = f"{name} on rank {rank} of {size}, {rows} rows"
                            compare(got, want, self.cases[i].tolerance, what)
                            assert np.asarray(got).tolist() == np.asarray(first).tolist() or np.asarray(
                                got).tobytes() == np.asarray(first).tobytes(), f"{what}: not the bits of rank 0"
                except AssertionError as error:
                    lines.append(f"{self.cases[i].ops}: {error}")
        return lines

    def wrong_states(self, propagated):
        """Returns a line for each op of a case with an unexpected state."""
        return [f"{op}: gives {found}, {case.expected(op)} expected in case {i} ({case.ops})"
                for i, case in enumerate(self.cases) for op in case.ops.split()
                if (found := self.states(propagated, i, op)) != case.expected(op)]


def compare(got, want, tolerance, what):
    """Compares values, with the tolerance of a `Case`."""
    if tolerance is None:
        want = np.asarray(want)
        finite = want[np.isfinite(want)] if want.dtype.kind == "f" else want
        is_exact = want.dtype.kind == "f" and not (finite % 1).any() and float(np.abs(finite).max(initial=0)) < _EXACT
        tolerance = 0 if is_exact else 1e-12
    partitioning.compare(got, want, tolerance, what)


def _name(i, j):
    return f"input{i}_{j}"


def _tensor(rank, name):
    return f"rank{rank}/{name}" if ":" in name else f"rank{rank}/{name}:0"


def _gradients(scope, outputs, inputs, is_linear):
    """Returns the gradients of a weighted sum of the outputs, or of their squares, for all inputs that have one."""
    floats = [t for t in inputs if t.dtype.is_floating or t.dtype.is_complex]
    with tf.name_scope(scope):
        weighted = []
        for output in outputs:
            if output.dtype.is_floating:
                weights = tf.reshape(tf.cast(tf.range(tf.size(output)) % 5 - 2, output.dtype), tf.shape(output))
                weighted.append(tf.reduce_sum(weights * (output if is_linear else output * output)))
        if not weighted or not floats:
            return []
        try:
            found = tf.gradients(weighted, floats, name="for")
        except LookupError:  # no gradient is defined
            return []
        return [tf.convert_to_tensor(gradient) for gradient in found if gradient is not None]


def check(cases, sizes=partitioning.RANKS, all_rows=ROWS):
    """Returns a line for each error in the cases."""
    batch = Batch(cases)
    propagated, graph_def, fetches = batch.partition()
    lines = batch.wrong_states(propagated)
    try:
        expected = batch.alone(all_rows)
        for size, results in batch.on_ranks(graph_def, fetches, sizes, all_rows):
            lines += batch.wrong_values(expected, results, size)
    except (tf.errors.OpError, ValueError) as error:
        partitioning.forget_jobs()
        if len(cases) == 1:
            return [*lines, f"{cases[0].ops}: {type(error).__name__} {str(error)[:600]}"]
        for case in cases:  # which of them it is
            lines += check([case], sizes, all_rows)
    return lines
