"""The way from the update of a variable back to the ops that end backpropagation.

Requires: a flat graph with `_output_shapes`. Ensures: what is between these ops and the update works on
tensors of the variable's size element by element.
"""

import dataclasses

from tf_poseidon.graph_passes import graph as graph_lib
from tf_poseidon.graph_passes import variables as variables_lib

# Ops that do the same to each element, in whichever order the elements are laid out.
LAYOUT = {"Identity", "Snapshot", "StopGradient", "PreventGradient", "CheckNumerics", "Cast", "Reshape",
           "ExpandDims", "Squeeze", "Transpose", "EnsureShape", "IdentityN"}
CONTROL = {"Switch", "Merge", "RefSwitch", "RefMerge", "Enter", "NextIteration", "LoopCond"}
LINEAR = {"Neg", "AddN", "Add", "AddV2", "Sub"}
SCALING = {"Mul", "RealDiv", "Div", "DivNoNan", "MulNoNan"}  # linear if the other operand is equal everywhere
OTHERS = {"Square", "Sqrt", "Rsqrt", "Pow", "Maximum", "Minimum", "Sign", "Abs", "Select", "SelectV2", "Exp",
           "Log", "Log1p", "Expm1", "Tanh", "Sigmoid", "Reciprocal", "Inv", "ClipByValue", "Erf", "Round", "Floor",
           "SquaredDifference", "FloorDiv", "Softplus", "Relu", "Cos", "Sin", "Xlogy", "Where"}
ELEMENTWISE = LAYOUT | CONTROL | LINEAR | SCALING | OTHERS
# Ops that backpropagation into a variable ends in: they add up rows.
ENDS = {"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "SparseTensorDenseMatMul",
         "Conv2DBackpropFilter", "Conv2DBackpropFilterV2", "Conv3DBackpropFilter", "Conv3DBackpropFilterV2",
         "DepthwiseConv2dNativeBackpropFilter", "Dilation2DBackpropFilter", "BiasAddGrad", "Sum", "Mean",
         "FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3", "UnsortedSegmentSum",
         "CudnnRNNBackprop", "CudnnRNNBackpropV2", "CudnnRNNBackpropV3", "Exit", "RefExit"}
# Ops that put parts of a gradient together, or take it apart, where the forward pass has done the opposite.
PARTS = {"Pack", "ConcatV2", "Concat", "StridedSliceGrad", "Pad", "PadV2", "Slice", "StridedSlice", "Split",
          "SplitV", "Unpack"}


@dataclasses.dataclass(frozen=True)
class Sink:
    """Where slices change rows: their values, their indices, and the node that reads the indices."""

    values: str
    indices: str
    reader: str


class Spine:
    """What lies between the update of a variable and the ops that add up rows.

    Attributes:
        end: The update's value.
        origins: The tensors at which the search has stopped.
        sinks: The `Sink`s of slices that it ends in, if it ends in nothing else.
    """

    def __init__(self, graph, variables, differs, variable, upstream=frozenset()):
        """
        Args:
            graph: The `Graph`.
            variables: Its `Variables`.
            differs: Its `Dependence`.
            variable: The variable.
            upstream: Nodes that other gradients are computed from: they belong to backpropagation, and so
                does what mixes them with a gradient, even element by element.
        """
        self._graph, self._variables, self._differs = graph, variables, differs
        self._upstream = upstream
        shape = self._variables.shape(variable)
        self._shape, self._size = shape, graph_lib.num_elements(shape)
        self._before = {}  # by tensor: the tensors that the search has gone on to
        updates = self._variables.updates[variable]
        self._ends = [self._value(update) for update in updates]
        self.end = self._ends[0]
        slices = [update for update in updates if update.indices is not None]
        queue = [] if slices else list(self._ends)
        while queue:
            tensor = queue.pop()
            if tensor in self._before or not self._is_of_size(tensor):
                continue
            self._before[tensor] = [] if self._mixes(tensor) else self._previous(tensor)
            queue += self._before[tensor]
        self.origins = [tensor for tensor in self._before if self._mixes(tensor) or self._is_origin(tensor)]
        self.sinks = [Sink(self._value(update), self._input(update, update.indices), update.node)
                      for update in slices if self._differs(self._value(update))]
        segments = [self._graph.node(tensor) for tensor in self.origins]
        if segments and all(node.op == "UnsortedSegmentSum" for node in segments):
            self.sinks = [Sink(*self._graph.inputs(node)[:2], node.name) for node in segments]
        if slices:
            self.origins = [sink.values for sink in self.sinks]

    def _mixes(self, tensor):
        """Whether an op combines a gradient, element by element, with what backpropagation goes on from."""
        node = self._graph.node(tensor)
        if node.op not in ELEMENTWISE or node.op in CONTROL or node.name in self._upstream:
            return False
        mixed = {t for t in operands(self._graph, node, tensor) if self._is_of_size(t)}
        return len(mixed) > 1 and any(graph_lib.node_of(t) in self._upstream for t in mixed)

    def _input(self, update, index):
        return self._graph.inputs(self._graph.nodes[update.node])[index]

    def _value(self, update):
        return self._input(update, update.index)

    def _is_of_size(self, tensor):
        if not self._differs(tensor):
            return False
        size = graph_lib.num_elements(self._graph.shape(tensor))
        return size is None or self._size is None or size == self._size

    def _is_origin(self, tensor):
        node = self._graph.node(tensor)
        if node.name in self._variables.read_nodes:
            return False
        if node.op in ELEMENTWISE or node.op == "Const" or (
                node.op == "Exit" and not self._accumulates(tensor)):
            return False
        return not self._variables.source(tensor)

    def _previous(self, tensor):
        """Returns the tensors that one is made of element by element, none where that ends."""
        node = self._graph.node(tensor)
        found = [self._value(update) for update in self._variables.reads_after.get(node.name, ())]
        if found:
            return found
        if node.op == "Cast" and not variables_lib.is_floating(node.attr["SrcT"].type):
            return []
        if self._variables.source(tensor):  # the output of an assignment, in TensorFlow 1
            return [self._value(update) for updates in self._variables.updates.values() for update in updates
                    if update.node == node.name]
        if node.op in ELEMENTWISE or (node.op == "Exit" and not self._accumulates(tensor)):
            return [t for t in operands(self._graph, node, tensor) if self._is_of_size(t)]
        return []

    def unknown_end(self, tensor):
        """Returns a node behind an origin of which it is not known that backpropagation ends in it, or None."""
        queue, seen = [tensor], set()
        while queue:
            tensor = queue.pop()
            node = self._graph.node(tensor)
            if node.name in seen or node.op in ENDS:
                continue
            seen.add(node.name)
            inputs = [t for t in operands(self._graph, node, tensor) if self._differs(t)]
            mixes = node.op in ELEMENTWISE and self._mixes(tensor)
            if not inputs or not (mixes or node.op in PARTS or self._is_linear(tensor, of_size=False)):
                return node
            if not mixes:
                queue += inputs
        return None

    def first_common(self, origins, is_saved):
        """Returns the first tensor of the variable's shape that all paths from the origins go through.

        Args:
            origins: Some of the origins.
            is_saved: A function that says whether a tensor is one of the saved graph.
        """
        candidates = [t for t in self._before if self._graph.shape(t) == self._shape
                      and is_saved(t) and not self._reaches(self._ends, set(origins), t)]
        sizes = {t: len(self._behind(t)) for t in candidates}
        return min(candidates, key=lambda t: (sizes[t], t), default=None)

    def nonlinear_before(self, tensor):
        """Returns a tensor between the origins and this one that is no linear function of them, or None."""
        return next((t for t in self._behind(tensor) if self._before[t] and not self._is_linear(t)), None)

    def _is_linear(self, tensor, of_size=True):
        node = self._graph.node(tensor)
        inputs = self._graph.inputs(node)
        differing = [t for t in inputs if self._differs(t)]
        if node.op in LAYOUT or node.op in LINEAR:
            return not of_size or all(self._is_of_size(t) for t in differing)
        if node.op in SCALING:
            return len(differing) == 1 and (node.op in ("Mul", "MulNoNan") or differing[0] == inputs[0])
        if node.op in ("Switch", "RefSwitch"):
            return not self._differs(inputs[1])
        return node.op in ("Merge", "Enter", "NextIteration", "Exit")

    def _reaches(self, tensors, wanted, without):
        """Whether the search gets from some tensors to a wanted one when one is left out."""
        queue, seen = list(tensors), {without}
        while queue:
            tensor = queue.pop()
            if tensor in seen:
                continue
            seen.add(tensor)
            if tensor in wanted:
                return True
            queue += self._before.get(tensor, ())
        return False

    def _behind(self, tensor):
        """Returns what the search finds from a tensor on, itself included."""
        queue, seen = [tensor], {}
        while queue:
            tensor = queue.pop()
            if tensor not in seen and tensor in self._before:
                seen[tensor] = None
                queue += self._before[tensor]
        return seen

    def _accumulates(self, tensor):
        """Whether a loop hands out a sum: each round adds to it what is linear in the round's own part."""
        switch = self._graph.node(self._graph.inputs(self._graph.node(tensor))[0])
        merge = self._graph.node(self._graph.inputs(switch)[0])
        if switch.op != "Switch" or merge.op != "Merge":
            return False
        rounds = [t for t in self._graph.inputs(merge) if self._graph.node(t).op == "NextIteration"]
        queue, seen = list(rounds), set()
        while queue:
            part = queue.pop()
            node = self._graph.node(part)
            if part in seen or node.name == switch.name or not self._differs(part):
                continue
            seen.add(part)
            if node.op in ELEMENTWISE and self._is_of_size(part):
                if not self._is_linear(part):
                    return False
                queue += [t for t in self._graph.inputs(node) if self._is_of_size(t)]
            elif self.unknown_end(part) is not None:
                return False
        return bool(rounds)


def operands(graph, node, tensor):
    """Returns the inputs whose elements an op takes, without those that only choose among them."""
    inputs = graph.inputs(node)
    if node.op in ("Switch", "RefSwitch"):
        return inputs[:1]
    if node.op in ("Select", "SelectV2"):
        return inputs[1:]
    if node.op == "IdentityN":
        return inputs[graph_lib.output_of(tensor):][:1]
    return inputs
