"""Vectors that belong to columns, such as biases: where a layer is divided by its outputs, they are divided with it.

Tests: tests/graphs/test_partition_columns.py.
"""

from collections.abc import Collection

from tf_poseidon.graph_passes.graph import tensors
from tf_poseidon.graph_passes.partition import variables as variables_lib
from tf_poseidon.graph_passes.partition.propagate.propagation import Propagated
from tf_poseidon.graph_passes.partition.sizes.graph_sizes import Sizes
from tf_poseidon.graph_passes.partition.states import Columns
from tf_poseidon.graph_passes.partition.states import Rows

_READ, _ON = "ReadVariableOp", ("Identity", "Cast")


def find(sizes: Sizes, propagated: Propagated, names: Collection[str]) -> frozenset[str]:
    """Returns those of some variables of one dimension that meet columns, and no rows.

    Args:
        sizes: The `Sizes` of a graph.
        propagated: Its `Propagated` states, in which these variables are whole.
        names: Names of the nodes from which the resources of the variables come.
    """
    graph, meet_columns, meet_rows = sizes.graph, set[str](), set[str]()
    for node in propagated.ordered:
        source = variables_lib.source(graph, graph.inputs(node)[0]) if node.op == _READ else ""
        if source not in names or len(sizes.shape(node.name) or ()) != 1:
            continue
        queue = [node.name]
        while queue:  # ends, since only loops have cycles, which Merges close
            name = queue.pop()
            for reader in graph.consumers(name):
                outcome = propagated.outcomes[reader.name]
                takes = [takes for tensor, takes in zip(graph.inputs(reader), outcome.takes)
                         if tensors.canonical(tensor) == name]
                if Columns(0) in takes:
                    meet_columns.add(source)
                elif takes and any(isinstance(state, Rows) for state in outcome.gives):
                    meet_rows.add(source)
                elif takes and reader.op in _ON:
                    queue.append(reader.name)
    return frozenset(meet_columns - meet_rows)
