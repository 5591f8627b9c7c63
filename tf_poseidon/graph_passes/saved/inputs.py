"""The inputs of a saved step: which ones have rows, and the PoseidonRows through which they pass.

The result is correct whichever inputs are taken to have rows: that only decides what is computed by rows.

Tests: tests/saved/test_saved_inputs.py, tests/saved/test_saved_damage.py, tests/saved/test_saved_graphs.py.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses

from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import tensor_shape_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import tensors
from tf_poseidon.graph_passes.partition import states
from tf_poseidon.graph_passes.partition.rules import sources

ROWS, SAME = "rows", "same"
_PLACEHOLDERS = ("Placeholder", "PlaceholderWithDefault", "PlaceholderV2")
# The first version of GraphDefs in which a placeholder's shape may be that of a scalar.
_HAS_SCALARS = 24
# Names of the PoseidonRows of one input, in the main graph, and of that of all inputs, in a function.
_ROWS = "poseidon/rows_of/"
_ROWS_OF_ALL = "poseidon/rows"

# How a caller declares an input: ROWS, SAME, or the dimension of its rows.
Mark = str | int


@dataclasses.dataclass(frozen=True)
class Input:
    """An input of a step, which is fed, or read from an iterator or queue.

    Attributes:
        name: Its name for users.
        tensor: Its tensor in the graph.
        dtype: Its `types_pb2.DataType`.
        shape: Its shape, None for unknown sizes; None if its rank is unknown.
        dimension: The dimension of its rows; None if it has none.
        is_fed_alone: Whether a caller may feed it without the others.
        is_read: Whether it is read from an iterator or queue; all ranks then have what rank 0 reads.
    """

    name: str
    tensor: str
    dtype: int
    shape: tuple[int | None, ...] | None
    dimension: int | None = None
    is_fed_alone: bool = False
    is_read: bool = False

    def text(self) -> str:
        """Returns a description of its rows."""
        if self.dimension is None:
            return "the same for all rows"
        return "rows" if not self.dimension else f"rows in dimension {self.dimension}"


def of_placeholder(node: node_def_pb2.NodeDef, name: str, is_fed_alone: bool = False) -> Input:
    """Returns the `Input` of a placeholder that users know as `name`."""
    return Input(name, node.name, node.attr["dtype"].type, _shape(node.attr["shape"].shape)
                 if "shape" in node.attr else None, is_fed_alone=is_fed_alone)


def of_main(graph_def: graph_pb2.GraphDef) -> list[Input]:
    """Returns the `Input`s of a main graph: placeholders, and the outputs of iterators and queues."""
    inputs = []
    for node in graph_def.node:
        if node.op in _PLACEHOLDERS and node.attr["dtype"].type not in (types_pb2.DT_RESOURCE, types_pb2.DT_VARIANT):
            inputs.append(of_placeholder(node, node.name, is_fed_alone=True))
        elif node.op in sources.READERS:
            shapes = node.attr["output_shapes"].list.shape
            for i, dtype in enumerate(tensors.types_of_outputs(node)):
                if dtype not in states.GATHERED:
                    raise GraphError(
                        f"Node '{node.name}', a {node.op}, returns {types_pb2.DataType.Name(dtype)[3:].lower()}s, "
                        "which rank 0 cannot send to the other ranks; let it return numbers, or feed the step.")
                name = tensors.tensor_of(node.name, i)
                inputs.append(Input(name, name, dtype, _shape(shapes[i]) if i < len(shapes) else None,
                                    is_fed_alone=True, is_read=True))
    return inputs


def say_shapes(graph_def: graph_pb2.GraphDef) -> None:
    """Sets the shapes of placeholders in graphs from before TensorFlow 1.3, where no dimensions meant unknown ones."""
    if graph_def.versions.producer >= _HAS_SCALARS:
        return
    for node in graph_def.node:
        if node.op == "Placeholder" and "shape" in node.attr and not node.attr["shape"].shape.dim:
            node.attr["shape"].shape.unknown_rank = True
            inferred = node.attr["_output_shapes"].list.shape if "_output_shapes" in node.attr else ()
            if inferred and inferred[0].dim:
                node.attr["shape"].shape.CopyFrom(inferred[0])


def decide(inputs: Sequence[Input], given: Mapping[str, Mark]) -> list[Input]:
    """Returns the inputs with their dimensions of rows.

    Inputs have rows if their first dimension is unknown. If there are none, all inputs with a dimension have rows,
    provided that their first dimensions are equal.

    Args:
        inputs: `Input`s.
        given: "rows", "same", or a dimension, by name; other names may be those of other steps.

    Raises:
        PoseidonError: If `given` does not fit the inputs, or nothing has rows.
    """
    input_of_alias = {alias: entry for entry in inputs for alias in _aliases(entry.name)}
    marks = {input_of_alias[name].name: mark for name, mark in given.items() if name in input_of_alias}
    decided = [dataclasses.replace(entry, dimension=_dimension(entry, marks.get(entry.name))) for entry in inputs]
    if not any(entry.dimension is not None for entry in decided):
        sizes = {entry.shape[0] for entry in inputs if entry.shape and entry.name not in marks}
        if len(sizes) == 1 and sizes != {1}:
            decided = [dataclasses.replace(entry, dimension=0) if entry.shape and entry.name not in marks else entry
                       for entry in decided]
    if not any(entry.dimension is not None for entry in decided):
        shown = ", ".join(f"{entry.name} {list(entry.shape) if entry.shape is not None else 'of any shape'}"
                          for entry in inputs)
        raise GraphError(f"No input of the step is known to have rows (it has {shown or 'no inputs'}); say which "
                         "have, as in --inputs x=rows,y=rows.")
    return decided


def check_names(inputs: Iterable[Input], given: Iterable[str]) -> None:
    """Refuses names that no input has.

    Args:
        inputs: The `Input`s of all steps.
        given: Same as in `decide`.
    """
    aliases = {alias for entry in inputs for alias in _aliases(entry.name)}
    for name in given:
        if name not in aliases:
            names = dict.fromkeys(entry.name for entry in inputs)
            raise GraphError(f"inputs= names '{name}', but the steps have the inputs "
                             f"{', '.join(names) or 'none'}.")


def _aliases(name: str) -> tuple[str, str, str]:
    return (name, name.removesuffix(":0"), name if ":" in name else f"{name}:0")


def _dimension(entry: Input, mark: Mark | None) -> int | None:
    rank = None if entry.shape is None else len(entry.shape)
    if mark is None:
        return 0 if entry.shape and entry.shape[0] is None else None
    if mark == SAME:
        return None
    if mark != ROWS and (not isinstance(mark, int) or isinstance(mark, bool)):
        raise GraphError(f"Input '{entry.name}' is declared as {mark!r}, expected 'rows', 'same', or the number of "
                         "a dimension.")
    dimension = mark if isinstance(mark, int) else 0
    if dimension < 0 or rank is not None and dimension >= rank:
        raise GraphError(f"Input '{entry.name}' has {rank} dimensions, but is declared to have rows in dimension "
                         f"{dimension}; declare inputs without rows as 'same'.")
    return dimension


def with_rows_node(graph_def: graph_pb2.GraphDef, inputs: Sequence[Input]) -> graph_pb2.GraphDef:
    """Returns a GraphDef in which all inputs with rows pass through one PoseidonRows: they are fed together."""
    return _with_rows_nodes(graph_def, {_ROWS_OF_ALL: [entry for entry in inputs if entry.dimension is not None]})


def with_rows_nodes(graph_def: graph_pb2.GraphDef, inputs: Sequence[Input]) -> graph_pb2.GraphDef:
    """Returns a GraphDef in which each input with rows passes through its own PoseidonRows."""
    return _with_rows_nodes(graph_def, {f"{_ROWS}{entry.name.removesuffix(':0').replace(':', '_output')}": [entry]
                                        for entry in inputs if entry.dimension is not None})


def _with_rows_nodes(graph_def: graph_pb2.GraphDef, rows_nodes: Mapping[str, Sequence[Input]]) -> graph_pb2.GraphDef:
    result = graph_pb2.GraphDef()
    result.CopyFrom(graph_def)
    nodes = {node.name: node for node in result.node}
    marked, added = {}, []
    for rows_node, inputs in rows_nodes.items():
        writer = graph_lib.Writer(rows_node)
        writer.add("", "PoseidonRows", [entry.tensor for entry in inputs], T=[entry.dtype for entry in inputs])
        attributes = writer.nodes[-1].attr
        attributes["dimensions"].list.i.extend(entry.dimension for entry in inputs)
        graph_lib.set_names(attributes["names"], [entry.name for entry in inputs])
        added += writer.nodes
        for i, entry in enumerate(inputs):
            marked[entry.tensor] = tensors.tensor_of(rows_node, i)
            marked[_aliases(entry.tensor)[2]] = tensors.tensor_of(rows_node, i)
            node = nodes[graph_lib.node_of(entry.tensor)]
            if node.op in _PLACEHOLDERS and entry.shape is not None:  # of any number of rows
                node.attr["shape"].shape.dim[entry.dimension].size = -1
    for node in result.node:
        node.input[:] = [marked.get(tensor, tensor) for tensor in node.input]
    result.node.extend(added)
    return result


def _shape(proto: tensor_shape_pb2.TensorShapeProto) -> graph_lib.Shape | None:
    return None if proto.unknown_rank else tuple(dim.size if dim.size >= 0 else None for dim in proto.dim)
