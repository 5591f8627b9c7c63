"""Finds the gradients of a training graph that does not say what they are.

Requires: a flat graph with `_output_shapes`, without communication. Ensures: once the gradients that are
returned are summed over ranks, every variable that is trained, and every slot, is assigned what is equal on all
ranks, and no gradient is computed from the sum of another one.

Where an optimizer is plain arithmetic, nothing names the gradient of a variable v. But the graph's
structure does: backpropagation ends in an op that adds up rows (a product of matrices, a gradient of
filters, a Sum), and what follows it, element by element, up to the assignment of v is the optimizer's. So
the search goes back from v's update, through slots that are updated in the same step, as long as ops work
element by element on tensors of v's size (spine.py). Where it stops are the *origins*; the gradient is the
first tensor of v's shape through which everything from them passes. What would make that a guess is refused:
an origin that is no such op, an origin that all data reaches through an earlier tensor of v's shape, a way
from the origins to the gradient that is not linear. All gradients are taken together: a norm of all of them
is the same on all ranks once they are summed, so clipping comes after them.
"""

import collections
import dataclasses

from tf_poseidon.errors import PoseidonError
from tf_poseidon.graph_passes import dependence as dependence_lib
from tf_poseidon.graph_passes import graph as graph_lib
from tf_poseidon.graph_passes import spine as spine_lib
from tf_poseidon.graph_passes import variables as variables_lib

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
        is_gathered: Of slices, whether rows of all ranks are kept apart, since they are not just added up.
        also: Other variables that are updated by it.
    """

    variable: str
    tensor: str
    rule: str
    indices: str | None = None
    readers: tuple[tuple[str, str], ...] | None = None
    is_gathered: bool = False
    also: tuple[str, ...] = ()


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


def find_gradients(graph, is_saved, given=None, rule="mean"):
    """Returns what a training graph has to synchronise.

    Args:
        graph: The `Graph`.
        is_saved: A function that says whether a flat tensor is one of the saved graph.
        given: (tensor, rule) by variable, of those that the user has decided.
        rule: The rule of all others.

    Raises:
        PoseidonError: If there is nothing to train, or the gradient of a variable cannot be told.
    """
    return _Search(graph, is_saved, dict(given or {}), rule).found()


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
        for variable, reason in self._variables.refused.items():
            if variables_lib.is_floating(self._variables.dtype(variable)):
                raise PoseidonError(f"What happens to variable '{variable}' cannot be told: {reason}; leave that node "
                                    "out of the training step.")
        candidates = [v for v in self._variables.updates if self._changes_with_data(v, self._differs)
                      and variables_lib.is_floating(self._variables.dtype(v))]
        spines = {v: self._spine(v) for v in candidates}
        own = self._own_origins(spines)
        trained = [v for v in candidates if v in self._given or self._is_trained(v, own[v])]
        unknown = set(self._given) - set(trained)
        if unknown:
            raise PoseidonError(f"A gradient is given for '{min(unknown)}', but the training step has no such "
                                f"variable that changes with the data; it has {', '.join(trained) or 'none'}.")
        if not trained:
            raise PoseidonError("The graph trains no variable: none is assigned a value that depends on the "
                                "data and on itself; name what makes a training step.")
        upstream = self._before({graph_lib.node_of(t) for v in trained for t in own[v]})
        gradients = {}
        for v in trained:
            tensor, rule = self._given.get(v, (None, self._rule))
            if tensor is not None:
                self._check_given(v, tensor)
                gradients[v] = Gradient(v, tensor, rule)
            elif spines[v].sinks:
                gradients[v] = self._slices(v, spines[v], rule)
            else:
                of_others = set(spines[v].origins) - set(own[v])
                gradients[v] = Gradient(v, self._cut(v, self._spine(v, upstream), of_others), rule)
        cuts = {graph_lib.node_of(gradient.tensor) for gradient in gradients.values()}
        self._upstream = self._before(cuts) | cuts
        gradients = {v: self._with_readers(gradient) for v, gradient in gradients.items()}
        after = dependence_lib.Dependence(self._graph, self._variables, _summed(gradients.values()))
        for v in trained:
            self._check_updates(v, after)
        states = [self._state(v, after) for v in self._variables.updates if v not in gradients]
        states = [state for state in states if state is not None]
        self._check_states(gradients.values(), states)
        states += [State(variable, reason="its values are not floating-point numbers")
                   for variable in self._variables.refused if variable not in self._variables.updates]
        return Found(tuple(_once(gradients.values())), tuple(states))

    def _spine(self, variable, upstream=frozenset()):
        return spine_lib.Spine(self._graph, self._variables, self._differs, variable, upstream)

    def _own_origins(self, spines):
        """Returns the origins of each spine, without those that are made of others alone: norms, say."""
        everything = {tensor for spine in spines.values() for tensor in spine.origins}
        without = dependence_lib.Dependence(self._graph, self._variables, everything)
        return {v: [t for t in spine.origins if any(without.read_by(graph_lib.node_of(t), i) for i in
                                                   self._graph.inputs(self._graph.node(t)))]
                for v, spine in spines.items()}

    def _differing_inputs(self, name):
        """Returns (tensor, its node's name) of the inputs of a node that differ between ranks."""
        if name not in self._differing:
            self._differing[name] = [(t, graph_lib.node_of(t)) for t in self._graph.inputs(self._graph.nodes[name])
                                     if self._differs(t)]
        return self._differing[name]

    # ---- which variables are trained -----------------------------------------------------------

    def _changes_with_data(self, variable, differs):
        return any(differs.differs(update.node) for update in self._variables.updates[variable])

    def _is_trained(self, variable, own):
        """Whether something reads the variable together with data, other than its own update.

        A slot, or a moving average, is only read where its own gradient, or statistic, is there already.
        """
        if not own:
            return False
        meeting = self._meeting(variable)
        origins = [graph_lib.node_of(tensor) for tensor in own]
        positions = [self._position[name] for name in origins if name in self._position]
        if not positions or any(self._position[name] < min(positions) for name in meeting):
            return True
        # Its own gradient depends on it, or something that does not come after that.
        early = {name for name in meeting if self._position[name] < max(positions)}
        return bool(early & self._before(origins) if early else False) or (
            not set(meeting) <= self._reached(origins, set(meeting)))

    def _meeting(self, variable):
        """Returns the nodes in which data meets what is read of a variable before it is updated."""
        reads = [name for name in self._variables.reads[variable] if name not in self._variables.reads_after]
        meeting, queue, seen = [name for name in reads if self._differs.differs(name)], list(reads), set(reads)
        while queue:
            for consumer in self._graph.consumers(queue.pop()):
                if self._differs.differs(consumer.name):
                    meeting.append(consumer.name)
                elif consumer.name not in seen and consumer.op != "NoOp":
                    seen.add(consumer.name)
                    queue.append(consumer.name)
        return [name for name in meeting if name in self._position]

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

    def _cut(self, variable, spine, of_others):
        """Returns the gradient of a variable.

        Args:
            variable: The variable.
            spine: Its `Spine`, which knows what other gradients are computed from.
            of_others: Origins that are made of those of others alone.
        """
        own = [t for t in spine.origins if t not in of_others]
        for tensor in own:
            end = spine.unknown_end(tensor)
            if end is not None:
                raise self._refusal(variable, f"comes from a {end.op}, of which it is not known that backpropagation "
                                    "ends in it", end.name)
        tensor = spine.first_common(own, self._is_saved) if own else None
        if tensor is None:
            made_of = " and ".join(f"'{t}'" for t in own) or "nothing that adds up rows"
            raise self._refusal(variable, f"is no single tensor: it is made of {made_of}", spine.end)
        nonlinear = spine.nonlinear_before(tensor)
        if nonlinear:
            raise self._refusal(variable, "is not a linear function of what adds up rows", nonlinear)
        earlier = self._earlier_candidate(variable, own[0])
        if earlier:
            raise self._refusal(variable, f"could be '{tensor}' or '{earlier}', through which all of it "
                                "passes", earlier)
        return tensor

    def _earlier_candidate(self, variable, origin):
        """Returns a tensor of the variable's shape that all of an origin passes through earlier, or None."""
        shape = self._variables.shape(variable)
        accumulated = self._accumulated(origin)
        common = None
        for pick in (0, -1):  # what is on every path from the data is on these two
            tensors, name = set(), graph_lib.node_of(origin)
            while name is not None:
                # Not round a loop: always to what comes earlier.
                inputs = [(t, source) for t, source in self._sources(name)
                          if self._position.get(source, -1) < self._position.get(name, -1)]
                tensor, name = inputs[pick] if inputs else (None, None)
                tensors.add(tensor)
            common = tensors if common is None else common & tensors
        for tensor in sorted(common - {None}):
            name = graph_lib.node_of(tensor)
            if (self._graph.shape(tensor) == shape and self._sources(name) and name not in accumulated
                    and not self._data_reaches(origin, {tensor})):
                return tensor
        return None

    def _accumulated(self, tensor):
        """Returns what a loop adds up: its sum, on the way, and the parts of each round."""
        if self._graph.node(tensor).op not in ("Exit", "RefExit"):
            return set()
        queue, seen = [graph_lib.node_of(tensor)], set()
        while queue:
            name = queue.pop()
            if name not in seen:
                seen.add(name)
                if self._graph.nodes[name].op in (*spine_lib.ELEMENTWISE, "Exit", "RefExit"):
                    queue += [source for _, source in self._differing_inputs(name)]
        return seen

    def _sources(self, name):
        """Returns (tensor, its node's name) of what a node is made of, also through a variable."""
        found = list(self._differing_inputs(name))
        for update in self._variables.reads_after.get(name, ()):
            tensor = self._graph.inputs(self._graph.nodes[update.node])[update.index]
            found.append((tensor, graph_lib.node_of(tensor)))
        return found

    def _data_reaches(self, tensor, without):
        """Whether data gets into a tensor when some others are left out."""
        queue, seen = [tensor], set()
        while queue:
            tensor = queue.pop()
            name = graph_lib.node_of(tensor)
            if tensor in without or name in seen:
                continue
            seen.add(name)
            sources = self._sources(name)
            if not sources:
                return True
            queue += [t for t, _ in sources]
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
                if after.read_by(node.name, tensor):
                    raise self._refusal(variable, "also depends on data in another way than by its gradient",
                                        self._root(tensor, after))

    def _root(self, tensor, differs):
        """Returns where data gets in: the last tensor before it that is not made element by element."""
        seen = set()
        while tensor not in seen:
            seen.add(tensor)
            node = self._graph.node(tensor)
            inputs = [t for t in self._graph.inputs(node) if differs(t)]
            if node.op not in spine_lib.ELEMENTWISE or not inputs:
                break
            tensor = inputs[0]
        return tensor

    def _before(self, names):
        """Returns the nodes that some nodes are computed from, without these unless by each other."""
        seen, queue = set(), list(names)
        while queue:
            for _, name in self._differing_inputs(queue.pop()):
                if name not in seen:
                    seen.add(name)
                    queue.append(name)
        return seen

    def _with_readers(self, gradient):
        """Says who shall read the sum: not what another gradient is computed from, which needs this rank's."""
        if gradient.readers is not None:
            return gradient
        consumers = [node.name for node in self._graph.consumers(graph_lib.node_of(gradient.tensor))
                     if gradient.tensor in self._graph.inputs(node)]
        readers = [name for name in consumers if name not in self._upstream]
        if len(readers) == len(consumers):
            return gradient
        if not readers:
            raise self._refusal(gradient.variable, "is read by nothing but what other gradients are computed from",
                                gradient.tensor)
        return dataclasses.replace(gradient, readers=tuple((name, gradient.tensor) for name in readers))

    # ---- slices ----------------------------------------------------------------------------------

    def _slices(self, variable, spine, rule):
        """Returns the `Gradient` of a variable of which a step changes some rows: an embedding.

        What backpropagation hands over is a Reshape to rows. Where these are only scaled and added up by
        their indices, rows of several ranks may be added up too. Else they have to stay what they are.
        """
        roots, all_indices, readers, on_the_way, adds_up = set(), set(), [], set(), True
        for sink in spine.sinks:
            values, indices, reader, adds = self._before_duplicates(sink)
            root, passed, is_linear = self._root_of_rows(values)
            roots.add(root)
            all_indices.add(self._before_identities(indices))
            readers.append((reader, indices))
            on_the_way |= {*passed, graph_lib.node_of(sink.values), sink.reader, reader}
            adds_up = adds_up and adds and is_linear
        root = min(roots)
        if len(roots) > 1 or len(all_indices) > 1:
            raise self._refusal(variable, "is made of different slices", root)
        node = self._graph.node(root)
        behind = self._graph.node(self._graph.inputs(node)[0]) if self._graph.inputs(node) else node
        if node.op in spine_lib.ELEMENTWISE - {"Reshape"} or (
                self._graph.shape(behind.name) == self._graph.shape(root)
                and behind.op in spine_lib.ELEMENTWISE - spine_lib.LAYOUT):
            raise self._refusal(variable, f"are slices that a {node.op} makes element by element, which may be the "
                                "optimizer's or backpropagation's", root)
        if not (self._is_saved(root) and self._is_saved(readers[0][1])):
            raise self._refusal(variable, "is made of slices that no tensor of the saved graph holds", root)
        values = [(n.name, root) for n in self._graph.consumers(node.name) if root in self._graph.inputs(n)]
        # A norm of the rows, say, would be another one of their sums.
        adds_up = adds_up and {name for name, _ in values} <= on_the_way
        return Gradient(variable, root, rule, readers[0][1], tuple(dict.fromkeys([*values, *readers])), not adds_up)

    def _root_of_rows(self, tensor):
        """Returns (first tensor, nodes on the way, whether that is linear) of rows made element by element."""
        passed, is_linear = set(), True
        while (node := self._graph.node(tensor)).op in spine_lib.ELEMENTWISE - {"Reshape"}:
            shape = self._graph.shape(tensor)
            inputs = {t for t in spine_lib.operands(self._graph, node, tensor)
                      if self._differs(t) and self._graph.shape(t) == shape}
            if len(inputs) != 1 or shape is None or len(shape) < 2:
                break
            others = [t for t in self._graph.inputs(node) if self._differs(t) and t not in inputs]
            is_linear = is_linear and not others and node.op in (
                spine_lib.LAYOUT | spine_lib.LINEAR | spine_lib.SCALING) and (
                node.op in ("Mul", "MulNoNan") or node.op not in spine_lib.SCALING
                or self._graph.inputs(node)[0] in inputs)
            passed.add(node.name)
            tensor = inputs.pop()
        return tensor, passed, is_linear

    def _before_duplicates(self, sink):
        """Returns (values, indices, reader of the indices, whether rows are only added up) of a sink.

        What adds up slices with the same index first may do anything to the sums.
        """
        indices, values = self._graph.node(sink.indices), self._graph.node(self._before_identities(sink.values))
        if indices.op in ("Unique", "UniqueV2") and values.op == "UnsortedSegmentSum":
            data, segments = self._graph.inputs(values)[:2]
            if graph_lib.node_of(self._before_identities(segments)) == indices.name:
                return data, self._graph.inputs(indices)[0], indices.name, True
        reader = self._graph.nodes[sink.reader]
        adds = reader.op == "UnsortedSegmentSum" or reader.op.endswith(("ScatterAdd", "ScatterSub"))
        return sink.values, sink.indices, sink.reader, adds

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
        if set(self._meeting(variable)) & self._upstream:
            raise PoseidonError(f"Variable '{variable}' is read by the forward pass, but what it is assigned by node "
                                f"'{differing[0].node}' depends on the rows of each rank, and is no gradient that "
                                "can be told; say with --gradients which tensor is, or leave it out of the step.")
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


def _summed(gradients):
    """Returns which tensors are read summed, and by which nodes, None for all."""
    summed = {}
    for gradient in gradients:
        if gradient.readers is None:
            summed[gradient.tensor] = None
        for reader, tensor in gradient.readers or ():
            summed.setdefault(tensor, set()).add(reader)
    return summed


def _once(gradients):
    """Returns each tensor's gradient once: one may update several variables."""
    unique = {}
    for gradient in gradients:
        other = unique.get(gradient.tensor)
        if other is None:
            unique[gradient.tensor] = gradient
            continue
        if other.rule != gradient.rule:
            raise PoseidonError(f"The gradient of '{other.variable}' and '{gradient.variable}' is one tensor, "
                                f"'{gradient.tensor}', but is given two rules; give it one.")
        readers = None if None in (other.readers, gradient.readers) else tuple(
            dict.fromkeys([*other.readers, *gradient.readers]))
        unique[gradient.tensor] = dataclasses.replace(other, readers=readers,
                                                      also=(*other.also, gradient.variable))
    return unique.values()
