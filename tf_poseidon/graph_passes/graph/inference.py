"""Infers the shapes of a graph for certain numbers of rows, each time only those that may depend on the number.

Requires: a flat graph with the shapes that hold for any number of rows. Ensures: the shapes are those that TensorFlow
infers for the whole graph.

A node whose inputs and outputs have known shapes has the same for each number of rows. If shapes that are unknown are
computed from it, only its own shape matters to them, unless it computes integers, which may become sizes. So a
placeholder stands for it, and nothing before it is inferred again. Graphs with loops are inferred as a whole.

Tests: tests/graphs/test_sizes.py.
"""

from collections.abc import Collection

from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib

# Types whose values may become sizes, and those whose shapes say too little for a placeholder.
_VALUES = (types_pb2.DT_INT32, types_pb2.DT_INT64, types_pb2.DT_BOOL)
_HANDLES = (types_pb2.DT_VARIANT, types_pb2.DT_RESOURCE)
# Ops of numbers that are no integers, whose values become sizes.
_MEASURED = ("Range", "LinSpace")
# Nodes that are cheaper to infer than to replace.
_GIVEN = ("Const", "Placeholder")
# The most elements of a tensor whose values may become sizes.
_FEW = 256


class Inference:
    """Infers the shapes of variants of a graph, which have more nodes, or other inputs with rows."""

    def __init__(self, graph: graph_lib.Graph, add_shapes: graph_lib.AddShapes, refined: Collection[str] = (),
                 changes_known: bool = False) -> None:
        """Makes an inference.

        Args:
            graph: The `indexed_graph.Graph`, with the shapes that hold for any number of rows.
            add_shapes: A function that infers shapes, such as `grappler.add_shapes`.
            refined: Ops of whose outputs a variant may know more.
            changes_known: Whether a variant has inputs of other sizes than those that are known.
        """
        self._add_shapes, self._refined = add_shapes, refined
        self._placeholders: dict[str, int] = {}  # by name of a node for which one stands: the type of its output
        # What TensorFlow infers in a loop depends on more than the shapes of what enters it.
        nodes = graph.graph_def.node
        is_whole = changes_known or any(node.op in ("NextIteration", "RefNextIteration") for node in nodes)
        self._inferred = {node.name for node in nodes if is_whole or node.op in refined or _has_unknown(graph, node)}
        # It ends, since each name enters the queue at most twice: for its shape, and for its values.
        queue, valued = [(graph.nodes[name], False) for name in self._inferred], set[str]()
        while queue and not is_whole:
            node, is_valued = queue.pop()
            is_valued |= node.op in _MEASURED or _gives_values(node)
            for tensor in graph.inputs(node):
                name = graph_lib.node_of(tensor)
                if is_valued and name not in valued and (graph_lib.num_elements(graph.shape(tensor)) or 0) <= _FEW:
                    valued.add(name)
                elif name in self._inferred:
                    continue
                dtype = None if name in valued else _type_for_placeholder(graph.nodes[name])
                if dtype is not None:
                    self._placeholders[name] = dtype
                else:
                    self._inferred.add(name)
                    queue.append((graph.nodes[name], name in valued))
        shapes = {node.name: graph.shapes(node.name) for node in nodes}
        self._known = {name: shapes[name] for name in shapes if name not in self._inferred}
        self._before = {name: shapes[name] for name in self._inferred if shapes[name]}

    def of(self, graph: graph_lib.Graph) -> "Inference":
        """Returns one for variants of a variant, with the same rows, in which less is unknown."""
        return Inference(graph, self._add_shapes, self._refined)

    def __call__(self, graph_def: graph_pb2.GraphDef) -> graph_lib.Shapes:
        """Returns the shapes of a variant.

        Raises:
            PoseidonError: If TensorFlow finds that they are incompatible.
        """
        inferred = graph_pb2.GraphDef(versions=graph_def.versions)
        if graph_def.HasField("library"):
            inferred.library.CopyFrom(graph_def.library)
        for node in graph_def.node:
            if node.name not in self._known:
                added = inferred.node.add()
                added.CopyFrom(node)
                waits = [tensor for tensor in node.input if graph_lib.is_control(tensor)]
                if not self._known.keys().isdisjoint(map(graph_lib.node_of, waits)):
                    added.input[:] = graph_lib.data_inputs(node)
        for name, dtype in self._placeholders.items():
            if name not in self._inferred:
                placeholder = inferred.node.add(name=name, op="Placeholder")
                placeholder.attr["dtype"].type = dtype
                graph_lib.set_attribute(placeholder.attr["shape"], "shape", self._known[name][0])
        shapes = self._add_shapes(inferred, alone=True)
        # TensorFlow may take an unknown number of rows for the size 1 of another input: what follows is wrong, too.
        if any(graph_lib.is_known(old) and old != new for name, shapes_before in self._before.items() if name in shapes
               for old, new in zip(shapes_before, shapes[name], strict=True)):
            return self._add_shapes(graph_def, alone=True)
        return {**self._known, **shapes}


def _has_unknown(graph: graph_lib.Graph, node: node_def_pb2.NodeDef) -> bool:
    """Whether a node has an input or an output of unknown shape."""
    op, shapes = tf_compat.op_def(node.op), graph.shapes(node.name)
    if not shapes and (op is None or op.output_arg):
        return True
    return not all(map(graph_lib.is_known, shapes)) or any(
        not graph_lib.is_known(graph.shape(tensor)) and not _is_resource(graph.node(tensor))
        for tensor in graph.inputs(node))


def _type_for_placeholder(node: node_def_pb2.NodeDef) -> int | None:
    """Returns the type of a node's output if a placeholder may stand for it; else None."""
    op = tf_compat.op_def(node.op)
    if node.op in _GIVEN or op is None or len(op.output_arg) != 1:
        return None
    output, = op.output_arg
    if output.number_attr or output.type_list_attr:
        return None
    dtype = output.type or node.attr[output.type_attr].type
    return None if dtype in (*_VALUES, *_HANDLES) else dtype


def _gives_values(node: node_def_pb2.NodeDef) -> bool:
    """Whether a node computes integers or truth values, or of types that are not known."""
    op = tf_compat.op_def(node.op)
    return op is None or any(output.type_list_attr or (output.type or node.attr[output.type_attr].type) in _VALUES
                             for output in op.output_arg)


def _is_resource(node: node_def_pb2.NodeDef) -> bool:
    """Whether a node gives a variable, whose own shape is that of a scalar."""
    return node.op == "VarHandleOp" or node.op == "Placeholder" and node.attr["dtype"].type == types_pb2.DT_RESOURCE
