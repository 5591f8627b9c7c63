"""Functions of batches, as a rank runs them for its own rows of each batch.

A dataset's map may take batches. If the partitioner finds that each row of what its function returns depends on the
same row of what it takes, a rank can run it for its own rows alone.

Tests: tests/unit/test_row_selection.py, tests/training/test_own_rows.py.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
import weakref

import tensorflow as tf

from tf_poseidon import grappler
from tf_poseidon.errors import shortened
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.partition import report as report_lib
from tf_poseidon.graph_passes.partition import rules
from tf_poseidon.graph_passes.partition.propagate import row_inputs
from tf_poseidon.graph_passes.partition.sizes import graph_sizes
from tf_poseidon.graph_passes.partition.sizes import poseidon_rows
from tf_poseidon.graph_passes.partition.states import GATHERED
from tf_poseidon.one_process import partitioning
from tf_poseidon.one_process.graphs import flat_graphs
from tf_poseidon.one_process.partition_options import PartitionOptions
from tf_poseidon.one_process.rank_graphs import RankGraphs
from tf_poseidon.ops import library

# Takes a rank's part and rows of each input, returns its rows of each output.
RowFunction = Callable[..., Sequence[tf.Tensor]]

_found: weakref.WeakKeyDictionary[Any, dict[int, RowFunction | str]] = weakref.WeakKeyDictionary()


def by_rows(function: tf.types.experimental.ConcreteFunction, size: int) -> RowFunction | str:
    """Returns the function of a rank's rows; or why a rank needs all rows of a batch for its own, and what to do.

    Args:
        function: Takes tensors of a batch, and returns some.
        size: Number of ranks.
    """
    of_sizes = _found.setdefault(function, {})
    if size not in of_sizes:
        of_sizes[size] = _divided(function, size)
    return of_sizes[size]


def _divided(function: tf.types.experimental.ConcreteFunction, size: int) -> RowFunction | str:
    inputs = function.inputs[:len(function.inputs) - len(function.captured_inputs)]
    if any(tensor.shape.rank is None for tensor in inputs):
        return "its function takes tensors of unknown rank; give them a shape (tf.ensure_shape) in front of batch"
    if any(not tensor.shape.rank or tensor.shape[0] is not None for tensor in inputs):
        return "its function was made for batches of one size; leave drop_remainder out, or map it in front of batch"

    other = next((tensor.dtype for tensor in function.outputs if tensor.dtype.as_datatype_enum not in GATHERED), None)
    if other is not None:
        return f"its function returns a {other.name}; turn it into numbers, or map it in front of batch"

    def of_rows(*tensors: tf.Tensor) -> tuple[tf.Tensor, ...]:
        *rows, part = tensors
        marked = [library.load()[0].poseidon_rows(values=[tensor], part=[part], dimensions=[0], names=[f"input {i}"])[0]
                  for i, tensor in enumerate(rows)]
        return tuple(function(*marked))

    specs = [*(tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in inputs), tf.TensorSpec([3], tf.int64)]
    try:
        traced = tf.function(of_rows, autograph=False).get_concrete_function(*specs)
        partition = partitioning.partition(traced, PartitionOptions(size), keeps_rows=True)
        keeps_rows = _keeps_rows(traced)
    except Exception as error:  # whatever the partitioner does not know, whole batches are right
        return f"its function could not be divided ({shortened(str(error))}); map it in front of batch"
    if partition.report.exchanges or partition.row_outputs != frozenset(range(len(partition.fetches))):
        named = next((op.op for op in partition.report.whole), "") or _needing_all(traced, partition.report)
        return (f"its function has {f'a {named}' if named else 'an op'} that may need all rows of a batch; map it in "
                "front of batch")
    if not keeps_rows:
        return "its batches may have other numbers of rows than those that it takes; map it in front of batch"
    concrete = RankGraphs(partition).marked("")

    def own_rows(part: tf.Tensor, *tensors: tf.Tensor) -> Sequence[tf.Tensor]:
        # A rank without rows has the first one of the batch for padding, and keeps it.
        return tf.nest.flatten(concrete(*tensors, tf.concat([part[:2], tf.maximum(part[2:], 1)], 0)))

    return own_rows


def _needing_all(traced: tf.types.experimental.ConcreteFunction, report: report_lib.PartitionReport) -> str:
    """Returns the first op whose rows are exchanged, or that has no rule, where no op is whole; "" if there is none.

    Strings are not gathered, so where an op without a rule takes them, no op has rows.
    """
    graph_def, *_ = flat_graphs.flat(traced)
    exchanged = {exchange.tensor for exchange in report.exchanges}
    of_rows = set()
    for node in graph_lib.in_order(graph_def):
        if node.name in exchanged:
            return node.op
        if node.op == poseidon_rows.ROWS or any(graph_lib.node_of(tensor) in of_rows
                                                for tensor in graph_lib.data_inputs(node)):
            if node.op not in rules.RULES:
                return node.op
            of_rows.add(node.name)
    return ""


def _keeps_rows(traced: tf.types.experimental.ConcreteFunction) -> bool:
    """Whether each output has as many rows as the inputs."""
    graph_def, outputs, _ = flat_graphs.flat(traced)
    sizes = graph_sizes.Sizes(row_inputs.together(graph_def), grappler.add_shapes, None)
    shapes = [sizes.shape(output) for output in outputs]
    return all(shape and shape[0] is not None and shape[0].per_row == 1 for shape in shapes)
