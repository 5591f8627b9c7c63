"""Makes a step take turns with other jobs on its accelerator: from its first op to its last gradient's hand-over.

Requires: a rewritten graph. Ensures: before the first ops of each step PoseidonTurnBegin, and behind the last op that
hands over one of its gradients PoseidonTurnEnd. Nothing else changes but for control edges.

    batch, weights -> PoseidonTurnBegin => first layer -> ... -> Send, Send, Send => PoseidonTurnEnd => a Recv

The *round* of a node is the number of gradients' sums, one behind the other, on which it depends: in a graph of several
steps, the step, and in one whose parts have optimizers of their own, such as generator and discriminator, the part. A
round's turn begins when the first of its ops could run that compute on the batch and need a sum of the round before:
where rounds overlap, it begins as soon as one layer has its new weights. Updates, and what depends on weights alone,
wait for no turn: they take little time, and run when sums arrive. Where ranks exchange something within a round, as
batch normalisation does, the turn goes on.

A turn in a graph that this pass has not understood costs speed alone: whatever it waits for, turns have one order on
all hosts, in which the first one never waits for another (docs/synchrony.md).

Tests: tests/graphs/test_turns.py, tests/training/test_crossover.py.
"""

import collections
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses

from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.graph_passes import passes
from tf_poseidon.graph_passes.find import poseidon_markers
from tf_poseidon.graph_passes.graph import check
from tf_poseidon.graph_passes.graph import devices
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.partition import frames as frames_lib

BEGIN, END = "PoseidonTurnBegin", "PoseidonTurnEnd"
_SEND = "PoseidonSend"
# What sums gradients, or gives all ranks the rows of slices.
_SUMS = (*poseidon_markers.OPS, poseidon_markers.SCATTER, "PoseidonAllGather")
_MEANWHILE = ("computes", "")  # the second of `strategy.synchronize`
_INPUTS = ("Placeholder", "_Arg", "Arg")
_NO_TENSORS = (types_pb2.DT_RESOURCE, types_pb2.DT_VARIANT)


class AddTurns(passes.Pass):
    """Adds the ops of turns to a rewritten graph."""

    def call(self, training: passes.TrainingGraph) -> passes.TrainingGraph:
        assert training.rewritten is not None
        return dataclasses.replace(training, rewritten=_Turns(training.graph, training.rewritten).written())

    def requires(self, training: passes.TrainingGraph) -> str:
        return "" if training.rewritten is not None else "the graph is not rewritten"

    def ensures(self, training: passes.TrainingGraph, result: passes.TrainingGraph) -> str:
        return "" if result.rewritten is training.rewritten else check.problem_of(graph_lib.Graph(result.rewritten))


def takes_turns(graph_def: graph_pb2.GraphDef) -> bool:
    """Whether a graph takes turns; one that hands over its gradients in branches or loops alone takes none."""
    return any(node.op == END for node in graph_def.node)


@dataclasses.dataclass(frozen=True)
class _HandOver:
    """Where a gradient is handed over.

    Attributes:
        node: The node that begins its exchange.
        handed: Names of the nodes behind which it is handed over.
        awaiting: Names of the nodes that wait for the sum.
    """

    node: node_def_pb2.NodeDef
    handed: tuple[str, ...]
    awaiting: tuple[str, ...]


class _Turns:
    """Finds the rounds of a graph, and writes their turns into the rewritten one."""

    def __init__(self, graph: graph_lib.Graph, rewritten: graph_pb2.GraphDef) -> None:
        self._graph, self._rewritten = graph, graph_lib.Graph(rewritten)
        self._inside = frames_lib.inside(graph.graph_def)
        self._sums = {node.name for node in graph.ordered if node.op in _SUMS and node.name not in self._inside
                      and graph_lib.meanwhile(node) in _MEANWHILE}
        self._rounds: dict[str, int] = {}
        for node in graph.ordered:
            before = max((self._rounds.get(name, 0) for name in map(graph_lib.node_of, node.input)), default=0)
            self._rounds[node.name] = before + (node.name in self._sums)
        self._computed = self._of_batches()

    def written(self) -> graph_pb2.GraphDef:
        """Returns the rewritten GraphDef with turns."""
        by_round = collections.defaultdict[int, list[node_def_pb2.NodeDef]](list)
        for node in self._graph.ordered:
            if node.name in self._sums:
                by_round[self._rounds[node.name] - 1].append(node)
        nodes: list[node_def_pb2.NodeDef] = []
        waits = collections.defaultdict[str, list[str]](list)  # by node: the nodes for which it is to wait
        for number, sums in sorted(by_round.items()):
            ancestors = self._needed(sums)
            hand_overs = [hand_over for node in sums if (hand_over := self._hand_over(node)) is not None]
            # A node that waits for an end, or TensorFlow would leave that out.
            awaiting = next((name for each in reversed(hand_overs) for name in each.awaiting), None)
            if awaiting is not None and (first := self._first(ancestors & self._computed, number)):
                inputs = {name for name in ancestors - self._inside
                          if _is_input(self._graph.nodes[name]) and _begins(self._graph.nodes[name])}
                turn, end = self._turn(number, first, inputs, hand_overs, waits)
                nodes += turn
                waits[awaiting].append(end)
        graph_def = self._rewritten.graph_def
        if not nodes:
            return graph_def
        kept = [graph_lib.with_controls(node, waits.get(node.name, ())) for node in graph_def.node]
        return graph_lib.with_nodes(graph_def, kept + nodes)

    # ---- rounds -------------------------------------------------------------------------------

    def _hand_over(self, node: node_def_pb2.NodeDef) -> _HandOver | None:
        """Returns where a gradient is handed over; None if what is handed over for another one is enough."""
        after = self._rewritten.nodes.get(f"{node.name}/send", self._rewritten.nodes[node.name])
        if after.op not in (_SEND, *_SUMS):
            return None
        handed = [after.name] if after.op == _SEND else [
            name for name in map(graph_lib.node_of, self._graph.inputs(node)[:-1]) if name not in self._inside]
        awaiting = [reader.name for reader in self._rewritten.consumers(after.name) if reader.name not in self._inside]
        return _HandOver(after, tuple(handed), tuple(awaiting))

    def _of_batches(self) -> set[str]:
        """Returns the names of the nodes that compute on a batch or random numbers, without waiting for a sum."""
        found = set[str]()
        for node in self._graph.ordered:
            if node.name in self._sums:
                continue
            if _begins(node) or any(name in found for name in map(graph_lib.node_of, self._graph.inputs(node))):
                found.add(node.name)
        return found - {node.name for node in self._graph.ordered if _is_input(node)}

    def _needed(self, sums: Iterable[node_def_pb2.NodeDef]) -> set[str]:
        """Returns the names of the nodes that some summands are computed from, back to sums of others."""
        queue, needed = [tensor for node in sums for tensor in self._graph.inputs(node)], set[str]()
        while queue:
            name = graph_lib.node_of(queue.pop())
            if name in needed or name in self._sums:
                continue
            needed.add(name)
            queue += self._graph.inputs(self._graph.nodes[name])
        return needed

    def _first(self, needed: Collection[str], number: int) -> list[node_def_pb2.NodeDef]:
        """Returns the first nodes of a round, of those that it needs."""
        of_round = {name for name in needed if self._rounds.get(name) == number}
        return [self._graph.nodes[name] for name in sorted(of_round - self._inside) if not any(
            graph_lib.node_of(tensor) in of_round for tensor in self._graph.inputs(self._graph.nodes[name]))]

    # ---- writing ------------------------------------------------------------------------------

    def _turn(self, number: int, first: Iterable[node_def_pb2.NodeDef], inputs: Collection[str],
              hand_overs: Sequence[_HandOver],
              waits: dict[str, list[str]]) -> tuple[list[node_def_pb2.NodeDef], str]:
        """Returns (the nodes of the turn of a round, the one that ends it); notes in `waits` what waits for it.

        It begins when its batch is there, also before random numbers that need none.
        """
        # On a GPU, if any gradient is handed over there: it ends when that has come so far.
        places = [hand_over.node.device for hand_over in hand_overs]
        place = next((device for device in places if device != devices.host_of(device)), places[-1])
        writer = graph_lib.Writer(f"poseidon_turn_{number}", devices.host_of(place))
        begins: dict[tuple[str, ...], str] = {}  # by what they wait for
        for node in first:
            sources = tuple(sorted({*map(graph_lib.node_of, node.input), *inputs}))
            if sources not in begins:
                begins[sources] = writer.add(f"begin_{len(begins)}", BEGIN, [f"^{name}" for name in sources],
                                             turn=number)
            waits[node.name].append(begins[sources])
        with writer.placed(place if devices.has_kernel(END, place) else devices.host_of(place)):
            handed = sorted({name for hand_over in hand_overs for name in hand_over.handed})
            end = writer.add("end", END, [f"^{name}" for name in handed], turn=number)
        return writer.nodes, end


def _is_input(node: node_def_pb2.NodeDef) -> bool:
    """Whether a node passes on what a program gives."""
    return node.op in _INPUTS or node.op.startswith("Iterator")


def _begins(node: node_def_pb2.NodeDef) -> bool:
    """Whether a node is where a computation on a batch, or on random numbers, begins."""
    if node.op in _INPUTS:
        return (node.attr["dtype"].type or node.attr["T"].type) not in _NO_TENSORS
    if node.op.startswith(("Iterator", "PoseidonEmulated")) or "Random" in node.op:
        return True
    op_def = tf_compat.op_def(node.op)
    return op_def is not None and op_def.is_stateful and not node.op.startswith("Poseidon") and not any(
        argument.type == types_pb2.DT_RESOURCE for argument in (*op_def.input_arg, *op_def.output_arg))
