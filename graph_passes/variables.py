"""The variables of a flat graph: what assigns them, and what reads them before and after that.

Requires: a flat graph with `_output_shapes`. Handles both kinds of variables: resources
(VarHandleOp), and references (VariableV2) as TensorFlow 1 has them.
"""

import collections
import dataclasses

from tensorflow.core.framework import types_pb2
from tensorflow.python.framework import op_def_registry

from tf_poseidon.errors import PoseidonError
from tf_poseidon.graph_passes import graph as graph_lib

_HANDLES = ("VarHandleOp",)
_REFERENCES = ("VariableV2", "Variable")
# Ops that hand a handle on. They read the value of a reference, which ops named Ref... hand on.
_HAND_ON = ("Identity", "Enter", "Switch", "Merge", "NextIteration", "Exit")
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp",
          "IsVariableInitialized")
# Which input of an op is assigned.
_ASSIGNMENTS = {"AssignVariableOp": 1, "AssignAddVariableOp": 1, "AssignSubVariableOp": 1,
                "Assign": 1, "AssignAdd": 1, "AssignSub": 1}
# (indices, updates) of ops that change rows of a variable.
_SCATTERS = {f"{kind}Scatter{change}": (1, 2) for kind in ("", "Resource")
             for change in ("Add", "Sub", "Update", "Mul", "Div", "Min", "Max", "NdAdd", "NdSub", "NdUpdate")}


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """An op that changes a variable.

    Attributes:
        variable: Flat name of the variable's node.
        node: The op's node.
        index: Which input of the node is the value, or gradient, that it is changed by.
        indices: Which input says the rows that change; None if all do.
    """

    variable: str
    node: str
    index: int
    indices: int | None = None


class Variables:
    """The variables of a graph.

    Attributes:
        updates: `Update`s by variable, in the order of the graph.
        reads: Nodes that read a variable, by variable.
        read_nodes: All nodes that read a variable.
        reads_after: By node that reads a variable: the `Update`s of it that come before.
        refused: Why a variable cannot be understood, by variable.
    """

    def __init__(self, graph):
        self._graph = graph
        self._sources = {}
        self.updates = collections.defaultdict(list)
        self.reads = collections.defaultdict(list)
        self.refused = {}
        for node in graph.graph_def.node:
            self._look_at(node)
        self.read_nodes = {name for names in self.reads.values() for name in names}
        self.reads_after = self._after_updates()

    def source(self, tensor):
        """Returns the variable whose handle or reference a tensor is, or None."""
        name, seen = graph_lib.node_of(tensor), []
        while name not in self._sources:
            node = self._graph.nodes[name]
            inputs = self._graph.inputs(node)
            if node.op in (*_HANDLES, *_REFERENCES):
                self._sources[name] = name
            elif not inputs or not self._hands_on(node) or graph_lib.node_of(inputs[0]) in seen:
                self._sources[name] = None
            else:
                seen.append(name)
                name = graph_lib.node_of(inputs[0])
        found = self._sources[name]
        for name in reversed(seen):
            if found is not None and self.is_reference(found) and self._graph.nodes[name].op in _HAND_ON:
                found = None
            self._sources[name] = found
        return found

    @staticmethod
    def _hands_on(node):
        return (node.op in _HAND_ON or node.op.startswith("Ref") or node.op in _ASSIGNMENTS
                or node.op in _SCATTERS or is_fused(node))

    def is_reference(self, variable):
        """Whether a variable is of TensorFlow 1's kind."""
        return self._graph.nodes[variable].op in _REFERENCES

    def dtype(self, variable):
        """Returns the `types_pb2.DataType` of a variable."""
        return self._graph.nodes[variable].attr["dtype"].type

    def shape(self, variable):
        """Returns the shape of a variable, None if it is unknown."""
        shape = self._graph.nodes[variable].attr["shape"].shape
        if shape.unknown_rank or any(dim.size < 0 for dim in shape.dim):
            return None
        return tuple(dim.size for dim in shape.dim)

    def _look_at(self, node):
        inputs = self._graph.inputs(node)
        if node.op in (*_HANDLES, *_REFERENCES) or not inputs:
            return
        if node.op in _ASSIGNMENTS or node.op in _SCATTERS or is_fused(node):
            variable = self.source(inputs[0])
            if variable is not None:
                self._add_update(variable, node)
                for tensor in inputs[1:]:  # slots, and beta powers of TensorFlow 1
                    slot = self.source(tensor)
                    if slot is not None and slot != variable:
                        self._read_or_slot(slot, node, tensor)
            return
        for tensor in inputs:
            variable = self.source(tensor)
            if variable is None:
                continue
            is_read = (not node.op.startswith("Ref") if self.is_reference(variable) else node.op in _READS)
            if is_read:
                self.reads[variable].append(node.name)
            elif not self._hands_on(node):
                self.refused.setdefault(variable, f"it is handed to node '{node.name}', a {node.op}, of which "
                                        "it is not known what that does with it")

    def _add_update(self, variable, node):
        if node.op in _ASSIGNMENTS:
            update = Update(variable, node.name, _ASSIGNMENTS[node.op])
        elif node.op in _SCATTERS:
            indices, values = _SCATTERS[node.op]
            update = Update(variable, node.name, values, indices)
        else:
            update = fused_update(variable, node)
        self.updates[variable].append(update)

    def _read_or_slot(self, slot, node, tensor):
        """A fused op changes its slots by the same gradient, but only reads its other variables."""
        if is_fused(node) and (self._graph.nodes[slot].op in _HANDLES or _is_reference_input(
                node, self._graph.inputs(node).index(tensor))):
            self.updates[slot].append(dataclasses.replace(fused_update(slot, node), variable=slot))
        else:
            self.reads[slot].append(node.name)

    def _after_updates(self):
        """Returns which updates come before each read, by data or control edges."""
        bits, masks, found = {}, {}, {}
        readers = {name: variable for variable, names in self.reads.items() for name in names
                   if variable in self.updates}
        by_variable = collections.defaultdict(int)
        everything = []
        for variable, updates in self.updates.items():
            for update in updates:
                bits[update.node] = bits.get(update.node, 0) | 1 << len(everything)
                by_variable[variable] |= 1 << len(everything)
                everything.append(update)
        for node in graph_lib.in_order(self._graph.graph_def):
            mask = 0
            for tensor in node.input:
                mask |= masks.get(graph_lib.node_of(tensor), 0)
            if node.name in readers and mask & by_variable[readers[node.name]]:
                before = mask & by_variable[readers[node.name]]
                found[node.name] = [everything[i] for i in range(before.bit_length()) if before >> i & 1]
            masks[node.name] = mask | bits.get(node.name, 0)
        return found


def is_fused(node):
    """Whether a node is an optimizer's update of a variable in one op."""
    op = node.op.removeprefix("Resource").removeprefix("Sparse")
    return op.startswith("Apply") and len(op) > len("Apply")


def fused_update(variable, node):
    """Returns the `Update` of a fused op: its inputs named "grad" or "delta", and "indices"."""
    op_def = op_def_registry.get(node.op)
    names = [argument.name for argument in op_def.input_arg] if op_def else []
    index = next((names.index(name) for name in ("grad", "delta") if name in names), None)
    if index is None:
        raise PoseidonError(f"Node '{node.name}' is a {node.op}, which has no input for the gradient of "
                            f"'{variable}'; say what it is with --gradients.")
    return Update(variable, node.name, index, names.index("indices") if "indices" in names else None)


def _is_reference_input(node, index):
    op_def = op_def_registry.get(node.op)
    return op_def is not None and op_def.input_arg[index].is_ref


def is_floating(dtype):
    """Whether a `types_pb2.DataType` is one whose values can be averaged."""
    return dtype in (types_pb2.DT_HALF, types_pb2.DT_BFLOAT16, types_pb2.DT_FLOAT, types_pb2.DT_DOUBLE)
