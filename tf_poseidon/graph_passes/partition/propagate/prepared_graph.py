"""A graph as propagation reads it: what it says whatever the states of its tensors are.

Tests: tests/graphs/test_partition.py, tests/graphs/test_partition_families.py.
"""

from collections.abc import Iterable
from collections.abc import Mapping

from tensorflow.core.framework import node_def_pb2

from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import tensors
from tf_poseidon.graph_passes.partition import frames as frames_lib
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.containers import resource_stores as stores_lib
from tf_poseidon.graph_passes.partition.containers import tensor_lists as lists_lib
from tf_poseidon.graph_passes.partition.sizes import poseidon_rows
from tf_poseidon.graph_passes.partition.sizes.graph_sizes import Sizes
from tf_poseidon.graph_passes.partition.states import WHOLE


class PreparedGraph:
    """A graph, and what propagation looks up in it in each pass.

    Attributes:
        sizes: Its `Sizes`.
        graph: The `indexed_graph.Graph`.
        ordered: Its nodes in topological order.
        frames: The `Frame` of each node, by name.
        home: The `Frame` of the inputs with rows.
        inputs: The tensors that each node reads, by name.
        whole: The `Outcome` of each node if it runs whole, as most nodes do, by name.
        lists: Its `Lists`.
        stores: Its `Stores`.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.graph = sizes.graph
        self.ordered = self.graph.ordered
        self.frames = frames_lib.find_frames(self.ordered)
        self.home = _home(poseidon_rows.find(self.graph.graph_def), self.frames)
        self.inputs = {node.name: tuple(map(tensors.canonical, self.graph.inputs(node))) for node in self.ordered}
        self.whole = {node.name: Outcome((WHOLE,) * len(self.inputs[node.name]),
                                         (WHOLE,) * tensors.num_outputs(self.graph, node)) for node in self.ordered}
        self.lists = lists_lib.Lists(self.graph)
        self.stores = stores_lib.Stores(self.graph)

    def op(self, tensor: str) -> str:
        """Returns the op that a tensor comes from."""
        return self.graph.node(tensor).op

    def num_outputs(self, name: str) -> int:
        """Returns the number of a node's outputs."""
        return len(self.whole[name].gives)

    def dtype_of(self, tensor: str) -> int:
        """Returns the `types_pb2.DataType` of a tensor."""
        return tensors.dtype_of(self.graph.node(tensor), graph_lib.output_of(tensor))

    def is_list(self, tensor: str) -> bool:
        """Whether a tensor is a list of tensors."""
        return lists_lib.is_list(self.dtype_of(tensor))

    def is_at_home(self, name: str) -> bool:
        """Whether a node is in the loop that has the rows, if one has, or inside it."""
        return self.frames[name].within(self.home)

    def outer_stores(self) -> set[str]:
        """Returns the names of the stacks and TensorArrays that are also used outside the loop that has the rows."""
        return {origin for origin, names in self.stores.nodes.items()
                if not all(self.is_at_home(name) for name in (origin, *names) if name in self.frames)}


def _home(rows_nodes: Iterable[node_def_pb2.NodeDef], frames: Mapping[str, frames_lib.Frame]) -> frames_lib.Frame:
    """Returns the frame of the inputs with rows."""
    loops = {frames[node.name]: node.name for node in rows_nodes}
    if len(loops) != 1:
        raise GraphError(
            f"The inputs with rows are in {len(loops)} loops{': ' if loops else ''}{', '.join(loops.values())}; "
            "expected all of them outside of loops, or in the same one.")
    return next(iter(loops))
