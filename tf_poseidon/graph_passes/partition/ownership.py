"""Which variables hold shards, and which ranks own whole ones, whose updates cannot be computed of shards.

Tests: tests/graphs/test_partition_shards.py.
"""

import collections
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Mapping

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import tensors
from tf_poseidon.graph_passes.partition import variables as variables_lib
from tf_poseidon.graph_passes.partition.propagate import held_summands
from tf_poseidon.graph_passes.partition.propagate import propagation as propagate_lib
from tf_poseidon.graph_passes.partition.propagate import shard_summands
from tf_poseidon.graph_passes.partition.sizes import graph_sizes
from tf_poseidon.graph_passes.partition.states import Division
from tf_poseidon.graph_passes.partition.states import Shard
from tf_poseidon.graph_passes.partition.states import State

_READ, _ASSIGN = "ReadVariableOp", "Assign"


class Ownership:
    """Which variables of a graph hold shards, and of which layouts one rank owns all elements.

    A layout's candidates are tried as shards; then as what one rank owns, if some need their values whole, or the
    gradient besides; then as shards again, unless some need their values whole. If there are some of other shapes,
    which cannot be shards, it is tried as what one rank owns at first. What is divided as a matrix has no owner.

    Attributes:
        needed_whole: Same as in `partitioner.PartitionedGraph`.
    """

    def __init__(self, sizes: graph_sizes.Sizes, paths: Mapping[str, str], shards: Mapping[str, str],
                 candidates: Mapping[str, str], divisions: Mapping[str, Division], loads: Mapping[int, int],
                 divided: Collection[str] = ()) -> None:
        """Makes all candidates shards; the arguments are those of `partitioner.KnownVariables`."""
        self._sizes, self._shards, self._divisions, self._loads = sizes, shards, divisions, loads
        self._divided = frozenset(divided)
        self.needed_whole: dict[str, str] = {}
        of_matrices = {layout for layout, division in divisions.items() if division.is_of_matrix}
        self._known_owned = {layout for layout, division in divisions.items() if division.owner >= 0}
        self._candidates = {name: candidates[name] for name in held_summands.candidates(sizes.graph, candidates)}
        self._layouts = _layouts_of(sizes.graph, paths, {**shards, **self._candidates})
        can_be_owned = set(self._layouts.values()) - set(shards.values()) - of_matrices if loads else set[str]()
        of_other_shapes = {layout for name, layout in self._layouts.items() if self._candidates.get(name) == ""}
        self._owned = self._known_owned | of_other_shapes & can_be_owned
        self._can_be_owned = can_be_owned - self._owned
        self._can_be_shards = set(self._layouts.values())

    @property
    def layouts(self) -> dict[str, str]:
        """The layouts of the variables that hold shards, by names of the nodes from which their resources come."""
        return {name: layout for name, layout in self._layouts.items()
                if name in self._shards or layout in self._owned
                or layout in self._can_be_shards and self._candidates[name]}

    def held(self) -> dict[str, State]:
        """Returns what these variables hold."""
        return {name: Shard(layout, layout in self._owned,
                            self._divisions[layout].divided if layout in self._divided else -1)
                for name, layout in self.layouts.items()}

    def changed(self, propagated: propagate_lib.Propagated, fetches: Iterable[str]) -> bool:
        """Notes what a graph needs whole; returns whether variables are to hold something else.

        Args:
            propagated: Its `Propagated` states.
            fetches: Names of the tensors that are whole.
        """
        former = self.held()
        whole = shard_summands.made_whole(self._sizes, propagated.states, propagated.outcomes, fetches,
                                          propagate_lib.UPDATES)
        besides = shard_summands.with_whole_summand(self._sizes, propagated.states, propagated.outcomes)
        self._owned -= {shard.layout for shard in whole if shard.owned} - self._known_owned
        self._can_be_shards -= {shard.layout for shard in whole if not shard.owned}
        self.needed_whole |= {shard.layout: name for shard, name in whole.items()}
        moved = {shard.layout for shard in whole.keys() | besides if not shard.owned} & self._can_be_owned
        self._owned |= moved
        self._can_be_owned -= moved
        return self.held() != former

    def divisions(self) -> dict[str, Division]:
        """Returns the `Division` of each layout; the owner of one, the largest first, is who owns the fewest bytes."""
        bytes_of = collections.Counter[str]()
        for name, tensor in _values(self._sizes.graph).items():
            layout = self._layouts.get(name)
            if layout in self._owned - self._known_owned:
                dtype = tensors.dtype_of(self._sizes.graph.node(tensor), graph_lib.output_of(tensor))
                bytes_of[layout] += self._sizes.bytes(tensors.canonical(tensor), dtype).fixed or 0
        loads, owners = dict(self._loads), dict[str, int]()
        for layout in sorted(bytes_of, key=lambda layout: (-bytes_of[layout], layout)):
            owners[layout] = min(loads, key=lambda rank: (loads[rank], rank))
            loads[owners[layout]] += bytes_of[layout]
        return {layout: Division(layout, owners[layout]) if layout in owners
                else self._divisions.get(layout, Division(layout)) for layout in self.layouts.values()}


def _layouts_of(graph: graph_lib.Graph, paths: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """Returns the layouts of variables that the updates of one trained variable alone read and write.

    Args:
        graph: The `indexed_graph.Graph`.
        paths: The paths of all variables, by names of the nodes from which their resources come.
        names: The layouts of some variables, by the same names; "" where it is to be found. Such a variable belongs to
            one layout if what is read from it leads to the variable of this path and to those of this layout alone.

    Returns:
        Those of all variables for which one is given or found.
    """
    reads = collections.defaultdict[str, list[str]](list)
    for node in graph.graph_def.node if "" in names.values() else ():
        if node.op == _READ:
            reads[variables_lib.source(graph, graph.inputs(node)[0])].append(node.name)
    found, layouts = {}, {**paths, **names}
    for name, layout in names.items():
        reached = {layout} if layout else _reached(graph, name, layouts, reads)
        if len(reached) == 1:
            found[name] = reached.pop()
    return found


def _reached(graph: graph_lib.Graph, name: str, layouts: Mapping[str, str], reads: Mapping[str, list[str]]) -> set[str]:
    """Returns the layouts of the variables to which what is read from a variable leads, also by others without one.

    Args:
        graph: The `indexed_graph.Graph`.
        name: The name of the node from which the variable's resource comes.
        layouts: The layouts of variables, "" where it is to be found.
        reads: The names of the nodes that read each variable.
    """
    queue = [*reads.get(name, ())]
    seen, reached = set(queue), set[str]()
    while queue:
        read = queue.pop()
        for reader in graph.consumers(read):
            if read not in map(graph_lib.node_of, graph.inputs(reader)):
                continue  # it only waits
            op, new = tf_compat.op_def(reader.op), list[str]()
            if reader.op.startswith(_ASSIGN):
                assigned = variables_lib.source(graph, graph.inputs(reader)[0])
                reached |= {layouts.get(assigned, "")} - {""}
                new = reads.get(assigned, []) if layouts.get(assigned) == "" else []
            elif op is not None and not op.is_stateful:
                new = [reader.name]
            queue += [node for node in new if node not in seen]
            seen.update(new)
    return reached


def _values(graph: graph_lib.Graph) -> dict[str, str]:
    """Returns a tensor of the shape of each variable that is read or assigned, by name of its resource's node."""
    values = {}
    for node in graph.graph_def.node:
        inputs = graph.inputs(node)
        if inputs and (node.op == _READ or node.op.startswith(_ASSIGN)):
            values[variables_lib.source(graph, inputs[0])] = node.name if node.op == _READ else inputs[1]
    return values
