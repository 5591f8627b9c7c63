"""Whether the functions of datasets make of an element what they make of it alone, whatever was read before.

Tests: tests/unit/test_row_selection.py, tests/unit/test_resuming.py.
"""

from collections.abc import Iterator

import tensorflow as tf

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.graph_passes.partition import variables as variables_lib

# Stateful ops that calls of a function may have in any order, and for any elements. What is read of variables and
# tables is that of the moment: a variable that is assigned while a dataset is read is seen by elements that TensorFlow
# makes later, and how far it has read ahead depends on the time, in one process too. It is the same for an epoch if it
# is assigned in front of it.
_HARMLESS = variables_lib.READS | frozenset((
    "Assert", "CheckNumerics", "CheckNumericsV2", "Print", "PrintV2", "VarHandleOp", "LookupTableFindV2",
    "LookupTableSizeV2", "StatefulPartitionedCall", "If", "While", "Case"))


def stateful_ops(graph: tf.Graph) -> Iterator[str]:
    """Yields the ops of a function, and of those that it calls, by which its results may depend on other calls."""
    graph_def = graph.as_graph_def()
    called = {function.signature.name for function in graph_def.library.function}
    for node in (*graph_def.node, *(node for function in graph_def.library.function for node in function.node_def)):
        op_def = tf_compat.op_def(node.op)
        if node.op not in _HARMLESS and node.op not in called and (op_def is None or op_def.is_stateful):
            yield node.op
