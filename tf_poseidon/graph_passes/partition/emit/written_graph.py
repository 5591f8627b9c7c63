"""What is written of a partitioned graph, and the graph of which it is written.

Tests: tests/graphs/test_partition.py, tests/graphs/test_partition_golden.py.
"""

from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import provenance
from tf_poseidon.graph_passes.graph import tensors
from tf_poseidon.graph_passes.graph.tensors import canonical
from tf_poseidon.graph_passes.partition import frames as frames_lib
from tf_poseidon.graph_passes.partition.propagate import propagation as propagate_lib
from tf_poseidon.graph_passes.partition.sizes import graph_sizes
from tf_poseidon.graph_passes.partition.sizes import poseidon_rows
from tf_poseidon.graph_passes.partition.sizes.poseidon_rows import ROWS
from tf_poseidon.graph_passes.partition.states import Division
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import Shard
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import WHOLE

_INT64 = types_pb2.DT_INT64


class WrittenGraph:
    """The nodes of a partitioned graph so far.

    Attributes:
        nodes: The NodeDefs.
        sizes: The `Sizes` of the one-process graph.
        original: That graph.
        propagated: The `Propagated` states of its tensors.
        renamed: By tensor whose name has changed: its name in the partitioned graph.
        places: By node, its `Place`.
        rows_nodes: The PoseidonRows of the inputs with rows, by name.
    """

    def __init__(self, sizes: graph_sizes.Sizes, propagated: propagate_lib.Propagated,
                 divisions: Mapping[str, Division]) -> None:
        """Makes a graph without nodes; `divisions` are the `Division`s of its layouts."""
        self.nodes: list[node_def_pb2.NodeDef] = []
        self.sizes = sizes
        self.original = sizes.graph
        self.propagated = propagated
        self.renamed: dict[str, str] = {}
        self.places = {node.name: frames_lib.Place(propagated.frames[node.name], propagated.rows_nodes[node.name])
                       for node in propagated.ordered}
        self.rows_nodes = {node.name: node for node in poseidon_rows.find(self.original.graph_def)}
        self._divisions = divisions

    def elements_of_row(self, tensor: str, dimension: int) -> int | None:
        """Returns how many elements of a dimension belong to one row, None if unknown."""
        sizes = self.sizes.shape(tensor)
        size = sizes[dimension] if sizes and dimension < len(sizes) else None
        return None if size is None else size.per_row

    def declared(self, value: str, name: str, dimension: int, prefix: str, device: str) -> str:
        """Returns a tensor unchanged, from a PoseidonRows, to which `usual_batch.with_sizes` gives the usual rows.

        Args:
            value: The tensor, this rank's rows.
            name: The tensor of the one-process graph whose rows these are.
            dimension: The dimension of its rows.
            prefix: Name of the PoseidonRows.
            device: Its device.
        """
        elements = self.elements_of_row(name, dimension)
        assert elements is not None
        writer = self.writer(prefix, device)
        declared = writer.add("", ROWS, [value], T=[self.dtype_of(name)])
        writer.nodes[-1].attr["dimensions"].list.i.append(dimension)
        writer.nodes[-1].attr["elements"].list.i.append(elements)
        graph_lib.set_names(writer.nodes[-1].attr["names"], [name])
        return declared

    def division(self, shard: Shard) -> Division:
        """Returns how ranks divide a tensor."""
        return self._divisions[shard.layout]

    def computed_state(self, tensor: str) -> State:
        """Returns the state in which a tensor is computed."""
        return self.propagated.states.get(canonical(tensor), WHOLE)

    def constant_shape(self, tensor: str) -> graph_lib.Shape | None:
        """Returns the shape of a tensor, None for sizes that are unknown or depend on rows."""
        sizes = self.sizes.shape(tensor)
        return None if sizes is None else tuple(None if size is None else size.constant for size in sizes)

    def dtype_of(self, tensor: str) -> int:
        """Returns the `types_pb2.DataType` of a tensor of the one-process graph."""
        return tensors.dtype_of(self.original.node(tensor), graph_lib.output_of(tensor))

    def device_of(self, tensor: str) -> str:
        """Returns the device of the node of a tensor of either graph, "" if TensorFlow is to choose."""
        name = graph_lib.node_of(tensor)
        node = self.original.nodes.get(name) or next((node for node in reversed(self.nodes) if node.name == name), None)
        return node.device if node is not None else ""

    def writer(self, prefix: str, device: str, origin: provenance.Provenance | None = None) -> graph_lib.Writer:
        """Returns a writer; `origin` is the `Provenance` of nodes that serve an exchange."""
        writer = graph_lib.Writer(prefix, device, origin)
        writer.nodes = self.nodes
        return writer


def split(writer: graph_lib.Writer, value: str, state: Rows, dtype: int) -> list[str]:
    """Splits a tensor into its blocks."""
    axis = writer.constant("axis", np.array(state.dimension, np.int32), value)
    blocks = writer.add("blocks", "Split", [axis, value], T=dtype, num_split=state.blocks)
    return [tensors.tensor_of(blocks, i) for i in range(state.blocks)]


def joined(writer: graph_lib.Writer, suffix: str, parts: Sequence[str], dimension: int, dtype: int) -> str:
    """Concatenates tensors."""
    axis = writer.constant(f"{suffix}along", np.array(dimension, np.int32), parts[0])
    return writer.add(suffix, "ConcatV2", [*parts, axis], T=dtype, N=len(parts), Tidx=types_pb2.DT_INT32)


def transposed(writer: graph_lib.Writer, suffix: str, value: str, order: Sequence[int], dtype: int) -> str:
    """Transposes a tensor."""
    by = writer.constant(f"{suffix}order", np.array(order, np.int32), value)
    return writer.add(suffix, "Transpose", [value, by], T=dtype, Tperm=types_pb2.DT_INT32)
