"""Finds the gradients of a training graph that does not say what they are.

Requires: a flat graph with `_output_shapes`, without communication. Ensures: once the gradients that are
returned are summed over ranks, every variable that was not refused is assigned what is equal on all
ranks, and nothing but the updates of variables reads the sums.

Where an optimizer is plain arithmetic, nothing names the gradient of a variable v. But the graph's
structure does: backpropagation ends in an op that adds up rows (a product of matrices, a gradient of
filters, a Sum), and what follows it, element by element, up to the assignment of v is the optimizer's. So
the search goes back from v's update, through slots that are updated in the same step, as long as ops work
element by element on tensors of v's size. Where it stops are the *origins*; the gradient is the first
tensor of v's shape through which everything from them passes, and from the origins to there the graph has
to be linear. All gradients are taken together: a norm of all of them is the same on all ranks once they
are summed, so clipping comes after them.
"""

import collections
import dataclasses

from tf_poseidon.errors import PoseidonError
from tf_poseidon.graph_passes import dependence as dependence_lib
from tf_poseidon.graph_passes import graph as graph_lib
from tf_poseidon.graph_passes import variables as variables_lib

# Ops that do the same to each element, in whichever order the elements are laid out.
_LAYOUT = {"Identity", "Snapshot", "StopGradient", "PreventGradient", "CheckNumerics", "Cast", "Reshape",
           "ExpandDims", "Squeeze", "Transpose", "EnsureShape", "IdentityN"}
_CONTROL = {"Switch", "Merge", "RefSwitch", "RefMerge", "Enter", "NextIteration", "LoopCond"}
_LINEAR = {"Neg", "AddN", "Add", "AddV2", "Sub"}
_SCALING = {"Mul", "RealDiv", "Div", "DivNoNan", "MulNoNan"}  # linear if the other operand is equal everywhere
_OTHERS = {"Square", "Sqrt", "Rsqrt", "Pow", "Maximum", "Minimum", "Sign", "Abs", "Select", "SelectV2", "Exp",
           "Log", "Log1p", "Expm1", "Tanh", "Sigmoid", "Reciprocal", "Inv", "ClipByValue", "Erf", "Round", "Floor",
           "SquaredDifference", "FloorDiv", "Softplus", "Relu", "Cos", "Sin", "Xlogy", "Where"}
_ELEMENTWISE = _LAYOUT | _CONTROL | _LINEAR | _SCALING | _OTHERS

RULES = ("mean", "sum")


@dataclasses.dataclass(frozen=True)
class Gradient:
    """Where the gradient of a variable is.

    Attributes:
        variable: Flat name of the variable.
        tensor: The gradient, a flat tensor; of slices, their values.
        rule: "mean" or "sum" over ranks.
        indices: Of slices, the tensor of their indices; None of a dense gradient.
        readers: (flat node, tensor) of what shall read the sum, None for all that reads `tensor`.
    """

    variable: str
    tensor: str
    rule: str
    indices: str | None = None
    readers: tuple[tuple[str, str], ...] | None = None


@dataclasses.dataclass(frozen=True)
class State:
    """A variable that is not trained, but changes with the data.

    Attributes:
        variable: Flat name of the variable.
        updates: Its `variables.Update`s; each is averaged. Empty if it stays what it is on each rank.
        reason: Why it stays so; empty if it is averaged.
    """

    variable: str
    updates: tuple = ()
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Found:
    """What a training step synchronises.

    Attributes:
        gradients: `Gradient`s, in the order of the graph.
        states: `State`s, in the order of the graph.
    """

    gradients: tuple[Gradient, ...]
    states: tuple[State, ...]


def find_gradients(graph, places, given=None, rule="mean"):
    """Returns what a training graph has to synchronise.

    Args:
        graph: The `Graph`.
        places: A function that says whether a flat tensor is one of the saved graph.
        given: (tensor, rule) by variable, of those that the user has decided.
        rule: The rule of all others.

    Raises:
        PoseidonError: If there is nothing to train, or the gradient of a variable cannot be told.
    """
    return _Search(graph, places, dict(given or {}), rule).found()


class _Search:

    def __init__(self, graph, is_saved, given, rule):
        self._graph = graph
        self._is_saved = is_saved
        self._given = given
        self._rule = rule
        self._variables = variables_lib.Variables(graph)
        self._differs = dependence_lib.Dependence(graph, self._variables)
        self._upstream = None
        self._differing = {}
        self._position = {node.name: i for i, node in enumerate(graph_lib.in_order(graph.graph_def))}

    def found(self):
        if not self._variables.updates:
            raise PoseidonError("The graph updates no variable, so there is nothing to train; name what makes "
                                "a training step (a signature, or the names of its update ops).")
        candidates = [v for v in self._variables.updates if self._changes_with_data(v, self._differs)
                      and variables_lib.is_floating(self._variables.dtype(v))]
        spines = {v: _Spine(self, v) for v in candidates}
        trained = [v for v in candidates if v in self._given or self._is_trained(v, spines[v])]
        unknown = set(self._given) - set(trained)
        if unknown:
            raise PoseidonError(f"A gradient is given for '{min(unknown)}', but the training step has no such "
                                f"variable that changes with the data; it has {', '.join(trained) or 'none'}.")
        if not trained:
            raise PoseidonError("The graph trains no variable: none is assigned a value that depends on the "
                                "data and on itself; name what makes a training step.")
        origins = {v: spines[v].own_origins() for v in trained}
        upstream = self._before({graph_lib.node_of(t) for tensors in origins.values() for t in tensors})
        gradients = {}
        for v in trained:
            tensor, rule = self._given.get(v, (None, self._rule))
            if tensor is not None:
                self._check_given(v, tensor)
                gradients[v] = Gradient(v, tensor, rule)
            elif spines[v].sinks:
                gradients[v] = self._slices(v, spines[v], rule)
            else:
                spine = _Spine(self, v, upstream)
                gradients[v] = Gradient(v, self._cut(v, spine, origins), rule)
        gradients = {v: self._with_readers(gradient, gradients.values()) for v, gradient in gradients.items()}
        tensors = _summed(gradients.values())
        after = dependence_lib.Dependence(self._graph, self._variables, tensors)
        for v in trained:
            self._check_updates(v, after)
        states = [self._state(v, after) for v in self._variables.updates if v not in gradients]
        states = [state for state in states if state is not None]
        self._check_states(gradients.values(), states)
        for variable, reason in self._variables.refused.items():
            if not variables_lib.is_floating(self._variables.dtype(variable)):
                states.append(State(variable, reason="its values are not floating-point numbers"))
        unique = {}
        for gradient in gradients.values():  # one gradient may update several variables
            unique.setdefault(gradient.tensor, gradient)
        return Found(tuple(unique.values()), tuple(states))

    def differing_inputs(self, name):
        """Returns (tensor, its node's name) of the inputs of a node that differ between ranks."""
        if name not in self._differing:
            self._differing[name] = [(t, graph_lib.node_of(t)) for t in self._graph.inputs(self._graph.nodes[name])
                                     if self._differs(t)]
        return self._differing[name]

    # ---- which variables are trained -----------------------------------------------------------

    def _changes_with_data(self, variable, differs):
        return any(differs.differs(update.node) for update in self._variables.updates[variable])

    def _is_trained(self, variable, spine):
        """Whether something reads the variable together with data, other than its own update.

        A slot, or a moving average, is only read where its own gradient, or statistic, is there already.
        """
        reads = [name for name in self._variables.reads[variable]
                 if name not in self._variables.reads_after]
        if not spine.origins:
            return False
        meeting, queue, seen = [name for name in reads if self._differs.differs(name)], list(reads), set(reads)
        while queue:
            for consumer in self._graph.consumers(queue.pop()):
                if self._differs.differs(consumer.name):
                    meeting.append(consumer.name)
                elif consumer.name not in seen and consumer.op != "NoOp":
                    seen.add(consumer.name)
                    queue.append(consumer.name)
        origins = [graph_lib.node_of(tensor) for tensor in spine.origins]
        meeting = [name for name in meeting if name in self._position]
        positions = [self._position[name] for name in origins if name in self._position]
        if not positions or any(self._position[name] < min(positions) for name in meeting):
            return True
        # Its own gradient depends on it, or something that does not come after that.
        early = {name for name in meeting if self._position[name] < max(positions)}
        return bool(early & self._before(origins) if early else False) or (
            not set(meeting) <= self._reached(origins, set(meeting)))

    def _reached(self, names, wanted):
        """Returns which of the wanted nodes come after some nodes."""
        seen, queue, found = set(names), collections.deque(names), set(names) & wanted
        while queue and found != wanted:
            for consumer in self._graph.consumers(queue.popleft()):
                if consumer.name not in seen and self._differs.differs(consumer.name):
                    seen.add(consumer.name)
                    queue.append(consumer.name)
                    if consumer.name in wanted:
                        found.add(consumer.name)
        return found

    # ---- where their gradients are -------------------------------------------------------------

    def _cut(self, variable, spine, origins):
        """Returns the gradient of a variable."""
        own = spine.own_origins()
        for tensor in own:
            if not [t for t in self._graph.inputs(self._graph.node(tensor)) if self._differs(t)]:
                raise self._refusal(variable, "depends on the data element by element, without an op that "
                                    "adds up rows", tensor)
        tensor = spine.first_common(own)
        if tensor is None:
            raise self._refusal(variable, "has no single gradient: it is made of "
                                + " and ".join(f"'{t}'" for t in own), spine.end)
        nonlinear = spine.nonlinear_before(tensor)
        if nonlinear:
            raise self._refusal(variable, "is not a linear function of what adds up rows", nonlinear)
        others = {t for v, tensors in origins.items() if v != variable for t in tensors}
        earlier = self._earlier_candidate(variable, own, others)
        if earlier:
            raise self._refusal(variable, f"could be '{tensor}' or '{earlier}', through which all of it "
                                "passes", earlier)
        return tensor

    def _earlier_candidate(self, variable, origins, others):
        """Returns a tensor of the variable's shape that all of its gradient passes through earlier, or None."""
        shape = self._variables.shape(variable)
        common = None
        for pick in (0, -1):  # what is on every path from the data is on these two
            tensors, name = set(), graph_lib.node_of(origins[0])
            while name is not None:
                # Not round a loop: always to what comes earlier.
                inputs = [(t, source) for t, source in self.differing_inputs(name)
                          if self._position.get(source, -1) < self._position.get(name, -1)]
                tensor, name = inputs[pick] if inputs else (None, None)
                tensors.add(tensor)
            common = tensors if common is None else common & tensors
        for tensor in sorted(common - {None}):
            node = self._graph.node(tensor)
            if (tensor not in others and self._graph.shape(tensor) == shape
                    and node.op not in _ELEMENTWISE and self._graph.inputs(node)
                    and not self._data_reaches(origins[0], {tensor})):
                return tensor
        return None

    def _data_reaches(self, tensor, without):
        """Whether data gets into a tensor when some others are left out."""
        queue, seen = [tensor], set()
        while queue:
            tensor = queue.pop()
            name = graph_lib.node_of(tensor)
            if tensor in without or name in seen:
                continue
            seen.add(name)
            inputs = [t for t, _ in self.differing_inputs(name)]
            for update in self._variables.reads_after.get(name, ()):
                inputs.append(self._graph.inputs(self._graph.nodes[update.node])[update.index])
            if not inputs:
                return True
            queue += inputs
        return False

    def _check_given(self, variable, tensor):
        if graph_lib.node_of(tensor) not in self._graph.nodes or not self._is_saved(tensor):
            raise PoseidonError(f"The gradient of '{variable}' is given as '{tensor}', which the training step "
                                "does not have; name a tensor as a refusal or the report does.")
        shape = self._graph.shape(tensor)
        if shape is not None and shape != self._variables.shape(variable):
            raise PoseidonError(f"The gradient of '{variable}' is given as '{tensor}', of shape {shape}, but the "
                                f"variable has {self._variables.shape(variable)}.")

    # ---- whether that is all -------------------------------------------------------------------

    def _check_updates(self, variable, after):
        for update in self._variables.updates[variable]:
            node = self._graph.nodes[update.node]
            for tensor in self._graph.inputs(node):
                if after(tensor):
                    raise self._refusal(variable, "also depends on data in another way than by its gradient",
                                        self._root(tensor, after))

    def _root(self, tensor, differs):
        """Returns where data gets in: the last tensor before it that is not made element by element."""
        seen = set()
        while tensor not in seen:
            seen.add(tensor)
            node = self._graph.node(tensor)
            inputs = [t for t in self._graph.inputs(node) if differs(t)]
            if node.op not in _ELEMENTWISE or not inputs:
                break
            tensor = inputs[0]
        return tensor

    def _before(self, names):
        """Returns the nodes that some nodes are computed from, without these unless by each other."""
        seen, queue = set(), list(names)
        while queue:
            for _, name in self.differing_inputs(queue.pop()):
                if name not in seen:
                    seen.add(name)
                    queue.append(name)
        return seen

    def _with_readers(self, gradient, gradients):
        """Says who shall read the sum: not what another gradient is computed from, which needs this rank's."""
        if gradient.readers is not None:
            return gradient
        names = {graph_lib.node_of(g.tensor) for g in gradients}
        if self._upstream is None:
            self._upstream = self._before(names) | names
        consumers = [node.name for node in self._graph.consumers(graph_lib.node_of(gradient.tensor))
                     if gradient.tensor in self._graph.inputs(node)]
        readers = [name for name in consumers if name not in self._upstream]
        if len(readers) == len(consumers):
            return gradient
        return dataclasses.replace(gradient, readers=tuple((name, gradient.tensor) for name in readers))

    # ---- slices ----------------------------------------------------------------------------------

    def _slices(self, variable, spine, rule):
        """Returns the `Gradient` of a variable of which a step changes some rows: an embedding."""
        chains, all_indices, readers = [], set(), []
        for sink in spine.sinks:
            values, indices, reader = self._before_duplicates(sink)
            chains.append(self._chain(values))
            all_indices.add(self._before_identities(indices))
            readers.append((reader, indices))
        common = [t for t in chains[0] if all(t in chain for chain in chains)]
        if not common or len(all_indices) > 1:
            raise self._refusal(variable, "is made of different slices", spine.sinks[0].values)
        tensor = next((t for t in reversed(common) if self._is_saved(t)), None)
        if tensor is None or not self._is_saved(readers[0][1]):
            raise self._refusal(variable, "is made of slices that no tensor of the saved graph holds",
                                spine.sinks[0].values)
        values = [(node.name, tensor) for node in self._graph.consumers(graph_lib.node_of(tensor))
                  if tensor in self._graph.inputs(node)]
        return Gradient(variable, tensor, rule, readers[0][1],
                        tuple(dict.fromkeys([*values, *readers])))

    def _before_duplicates(self, sink):
        """Returns (values, indices, reader of the indices), before slices with the same index were added up."""
        indices, values = self._graph.node(sink.indices), self._graph.node(self._before_identities(sink.values))
        if indices.op in ("Unique", "UniqueV2") and values.op == "UnsortedSegmentSum":
            data, segments = self._graph.inputs(values)[:2]
            if graph_lib.node_of(self._before_identities(segments)) == indices.name:
                return data, self._graph.inputs(indices)[0], indices.name
        return sink.values, sink.indices, sink.reader

    def _chain(self, tensor):
        """Returns a tensor and those of its shape that it is made of element by element, one of each."""
        chain, shape = [tensor], self._graph.shape(tensor)
        while (node := self._graph.node(tensor)).op in _ELEMENTWISE:
            inputs = [t for t in _operands(self._graph, node, tensor) if self._differs(t) and self._graph.shape(t) == shape]
            if len(set(inputs)) != 1 or shape is None or len(shape) < 2:
                break
            tensor = inputs[0]
            chain.append(tensor)
        return chain

    def _before_identities(self, tensor):
        while (node := self._graph.node(tensor)).op == "Identity":
            tensor = self._graph.inputs(node)[0]
        return tensor

    # ---- state that is not trained -------------------------------------------------------------

    def _state(self, variable, after):
        """Returns what happens to a variable that is not trained, None if it is the same on all ranks."""
        updates = self._variables.updates[variable]
        differing = [update for update in updates if after.differs(update.node)]
        if not differing:
            is_slot = (self._changes_with_data(variable, self._differs)
                       and variables_lib.is_floating(self._variables.dtype(variable)))
            return None if is_slot else State(variable, reason="it is the same on all ranks")
        if not variables_lib.is_floating(self._variables.dtype(variable)):
            return State(variable, reason="its values are not floating-point numbers")
        for update in differing:
            node = self._graph.nodes[update.node]
            inputs = self._graph.inputs(node)
            if update.indices is not None or variables_lib.is_fused(node):
                return State(variable, reason=f"node '{node.name}', a {node.op}, changes parts of it")
            if after(inputs[0]):
                return State(variable, reason="whether it is updated depends on data of each rank")
        return State(variable, tuple(differing))

    def _check_states(self, gradients, states):
        """Refuses gradients that would differ, because a variable that stays local decides about them."""
        local = [state.variable for state in states if not state.updates
                 and self._changes_with_data(state.variable, self._differs)]
        if not local:
            return
        after = dependence_lib.Dependence(self._graph, self._variables, _summed(gradients), local)
        for gradient in gradients:
            self._check_updates(gradient.variable, after)

    def _refusal(self, variable, why, tensor):
        return PoseidonError(f"The gradient of variable '{variable}' {why} (node "
                             f"'{graph_lib.node_of(tensor)}'); say with --gradients which tensor it is.")


@dataclasses.dataclass(frozen=True)
class _Sink:
    """Where slices change rows: their values, their indices, and the node that reads the indices."""

    values: str
    indices: str
    reader: str


class _Spine:
    """What lies between the update of a variable and the ops that add up rows.

    Attributes:
        end: The update's value.
        origins: The tensors at which the search has stopped.
        sinks: The `_Sink`s of slices that it ends in, if it ends in nothing else.
    """

    def __init__(self, search, variable, upstream=frozenset()):
        """
        Args:
            search: The `_Search`.
            variable: The variable.
            upstream: Nodes that other gradients are computed from: they belong to backpropagation, and so
                does what mixes them with a gradient, even element by element.
        """
        self._search = search
        self._graph, self._variables, self._differs = search._graph, search._variables, search._differs
        self._variable = variable
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
        self.sinks = [_Sink(self._value(update), self._input(update, update.indices), update.node)
                      for update in slices if self._differs(self._value(update))]
        segments = [self._graph.node(tensor) for tensor in self.origins]
        if segments and all(node.op == "UnsortedSegmentSum" for node in segments):
            self.sinks = [_Sink(*self._graph.inputs(node)[:2], node.name) for node in segments]
        if slices:
            self.origins = [sink.values for sink in self.sinks]

    def _mixes(self, tensor):
        """Whether an op combines a gradient, element by element, with what backpropagation goes on from."""
        node = self._graph.node(tensor)
        if node.op not in _ELEMENTWISE or node.op in _CONTROL or node.name in self._upstream:
            return False
        operands = {t for t in _operands(self._graph, node, tensor) if self._is_of_size(t)}
        return len(operands) > 1 and any(graph_lib.node_of(t) in self._upstream for t in operands)

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
        if node.op in _ELEMENTWISE or node.op == "Const" or (
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
        if node.op in _ELEMENTWISE or (node.op == "Exit" and not self._accumulates(tensor)):
            return [t for t in _operands(self._graph, node, tensor) if self._is_of_size(t)]
        return []

    def own_origins(self):
        """Returns the origins, without those that are computed from the others alone: norms, say."""
        own = list(self.origins)
        for tensor in self.origins:
            others = set(own) - {tensor}
            if others and not self._search._data_reaches(tensor, others):
                own.remove(tensor)
        return own

    def first_common(self, origins):
        """Returns the first tensor of the variable's shape that all paths from the origins go through."""
        candidates = [t for t in self._before if self._graph.shape(t) == self._shape
                      and self._search._is_saved(t) and not self._reaches(self._ends, set(origins), t)]
        sizes = {t: len(self._behind(t)) for t in candidates}
        return min(candidates, key=lambda t: (sizes[t], t), default=None)

    def nonlinear_before(self, tensor):
        """Returns a tensor between the origins and this one that is no linear function of them, or None."""
        return next((t for t in self._behind(tensor) if self._before[t] and not self._is_linear(t)), None)

    def _is_linear(self, tensor):
        node = self._graph.node(tensor)
        inputs = self._graph.inputs(node)
        differing = [t for t in inputs if self._differs(t)]
        if node.op in _LAYOUT or node.op in _LINEAR:
            return all(self._is_of_size(t) for t in differing)
        if node.op in _SCALING:
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
            if node.op in _ELEMENTWISE and self._is_of_size(part):
                if not self._is_linear(part) and node.op not in ("NextIteration",):
                    return False
                queue += [t for t in self._graph.inputs(node) if self._is_of_size(t)]
            elif node.op == "Exit":
                continue
        return bool(rounds)


def _summed(gradients):
    """Returns the tensors that are the same on all ranks once gradients are summed."""
    return [t for gradient in gradients for t in (gradient.tensor, gradient.indices) if t]


def _operands(graph, node, tensor):
    """Returns the inputs whose elements an op takes, without those that only choose among them."""
    inputs = graph.inputs(node)
    if node.op in ("Switch", "RefSwitch"):
        return inputs[:1]
    if node.op in ("Select", "SelectV2"):
        return inputs[1:]
    if node.op == "IdentityN":
        return inputs[graph_lib.output_of(tensor):][:1]
    return inputs
