"""Unrolls a step: several steps in one graph, ordered by what they read, write and print, and by nothing else.

Requires: the flat graph of one step. Ensures: fetches and variables have the bits that they have after as many runs of
that graph. A variable that a step changes is accessed by the next one when all accesses of this one are over, so the
first layers of a step run while the gradients of others still travel. Besides, a step begins when the last but one is
over: where hardly anything waits for variables, as when a model is evaluated, the intermediate results of all steps
would be in memory at once.

In a branch that may not run, and in a loop, TensorFlow cannot say when a single access is over: the next step accesses
such a variable after the whole of this one.

Tests: tests/graphs/test_unroll.py, tests/training/test_overlapping.py.
"""

import collections
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import re

from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.graph import functions
from tf_poseidon.graph_passes.graph import graph_steps as steps_lib
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import provenance
from tf_poseidon.graph_passes.partition import frames as frames_lib
from tf_poseidon.graph_passes.partition import variables as variables_lib

# Stateful ops whose state is outside of the graph: they run in the order of the program.
ORDERED = frozenset(("Print", "PrintV2"))
_PYTHON = frozenset(("EagerPyFunc", "PyFunc"))
# Ops without a state: our own, since names of exchanges differ between steps, and one that only ends a run.
_OURS, _ASSERT = "Poseidon", "Assert"
# More steps hide little more; a step that begins a graph hides nothing, which is an eighth of them.
MOST_STEPS = 8
_MOST_NODES = 40_000
_STEPS_AT_A_TIME = 2
_FRAME, _CLASS, _BESIDE = "frame_name", "_class", "loc:@"
_OF_LATER_STEP = re.compile("step[0-9]+/")  # see `renamed`
_WHOLE_STEP = ""  # in `StepOrder.after`: the nodes at the end of the step


@dataclasses.dataclass(frozen=True)
class StepOrder:
    """What the accesses of a step have to wait for in the step before.

    Attributes:
        after: (name of the node from which a resource comes, nodes of the step before after which it is accessed).
        ordered: Nodes that run after all of these in the step before.
        obstacle: Why the step cannot be unrolled, a sentence without a full stop; "" if it can.
        trained: The number of updates of variables that wait for gradients.
        joint: How many of these wait for several, as with a global norm.
    """

    after: tuple[tuple[str, tuple[str, ...]], ...] = ()
    ordered: tuple[str, ...] = ()
    obstacle: str = ""
    trained: int = 0
    joint: int = 0

    @property
    def whole(self) -> int:
        """The number of variables that are accessed after the whole step before."""
        return sum(_WHOLE_STEP in nodes for _, nodes in self.after)

    def __str__(self) -> str:
        """Returns how far steps overlap, a sentence."""
        if self.obstacle:
            return f"Steps do not overlap, since {self.obstacle}."
        held = []
        if self.whole:
            held.append(f"{self.whole} of {len(self.after)} variables wait for the whole step before, since branches "
                        "or loops access them")
        if self.joint:
            held.append(f"{self.joint} of {self.trained} updates wait for several gradients, as with a global norm")
        return f"Steps overlap{': ' if held else ''}{'; '.join(held)}."


def length(number: int, nodes: int) -> int:
    """Returns how many of a number of steps become one graph: so that there are as few graphs as possible.

    Between graphs, and between single steps, nothing overlaps. But a step in a graph takes time to trace, and memory.

    Args:
        number: The number of steps that run one after the other.
        nodes: The number of nodes of one step.
    """
    most = max(1, min(number, MOST_STEPS, _MOST_NODES // max(nodes, 1)))
    return min(range(1, most + 1), key=lambda steps: (number // steps + number % steps, -steps))


def order_of(graph_def: graph_pb2.GraphDef, shared: Collection[str], ends: Iterable[str],
             gradients: Collection[str]) -> StepOrder:
    """Returns the `StepOrder` of the steps of a graph.

    Args:
        graph_def: The flat GraphDef of a step.
        shared: Names of the placeholders that all steps share: resources, and other captured values.
        ends: Names of the nodes that are over when the step is.
        gradients: Names of the sites of gradients.
    """
    graph = graph_lib.Graph(graph_def)
    inside = frames_lib.inside(graph_def)
    accesses: dict[str, list[node_def_pb2.NodeDef]] = {}
    ordered = []
    for node in graph_def.node:
        if _OF_LATER_STEP.match(node.name):
            return StepOrder(obstacle=f"'{node.name}' is named like a node of a later step")
        if functions.called(node):
            return StepOrder(obstacle=f"the {node.op} '{node.name}' calls a function that is not inlined")
        if node.op in variables_lib.PASSED_ON or not _is_stateful(node):
            continue
        sources = [source for tensor in graph.inputs(node)
                   if _is_resource(graph, source := variables_lib.source(graph, tensor))]
        if foreign := set(sources) - set(shared):
            return StepOrder(obstacle=f"the {node.op} '{node.name}' uses a resource that the step makes itself, "
                             f"'{min(foreign)}'")
        for source in dict.fromkeys(sources):
            accesses.setdefault(source, []).append(node)
        if sources or node.op.startswith(_OURS) or node.op == _ASSERT:
            continue
        if node.op not in ORDERED:
            what = ("may use variables in Python, where the graph does not show it" if node.op in _PYTHON else
                    "keeps its state in the op itself")
            return StepOrder(obstacle=f"the {node.op} '{node.name}' {what}")
        if node.name in inside:
            return StepOrder(obstacle=f"the {node.op} '{node.name}' must run in order, but is in a branch or loop")
        ordered.append(node.name)
    if conditional := [end for end in ends if end in inside]:
        return StepOrder(obstacle=f"'{conditional[0]}', at the end of the step, is in a branch or loop")
    after = []
    for source, nodes in accesses.items():
        if all(node.op in variables_lib.READS for node in nodes):
            continue  # nothing changes it
        is_inside = any(node.name in inside for node in nodes)
        after.append((source, (_WHOLE_STEP,) if is_inside else tuple(node.name for node in nodes)))
    return StepOrder(tuple(after), tuple(ordered), "", *_updates(graph, accesses.values(), gradients))


def _updates(graph: graph_lib.Graph, accesses: Iterable[Sequence[node_def_pb2.NodeDef]],
             gradients: Collection[str]) -> tuple[int, int]:
    """Returns how many updates of variables wait for gradients, and how many of them for several."""
    markers = [node.name for node in graph.graph_def.node
               if node.op.startswith(_OURS) and "site" in node.attr and node.attr["site"].s.decode() in gradients]
    numbers = {name: 1 << i for i, name in enumerate(markers)}
    markers_before: dict[str, int] = {}  # by node: the markers before it, as a bit set
    for node in graph.ordered:
        bits = numbers.get(node.name, 0)
        for tensor in graph.inputs(node):
            bits |= markers_before.get(graph_lib.node_of(tensor), 0)
        markers_before[node.name] = bits
    updates = [node.name for nodes in accesses for node in nodes if node.op not in variables_lib.READS]
    counts = [markers_before[name].bit_count() for name in updates]
    return sum(count > 0 for count in counts), sum(count > 1 for count in counts)


def unroll(graph_def: graph_pb2.GraphDef, order: StepOrder, shared: Collection[str], ends: Sequence[str],
           controls: Collection[str], steps: int) -> graph_pb2.GraphDef:
    """Returns a GraphDef of several steps; the names of the first one do not change, for others see `renamed`.

    Args:
        graph_def, shared, ends: Same as in `order_of`, whose result is `order`.
        order: The `StepOrder`.
        controls: Those of `ends` that run in every step, whatever is fetched.
        steps: The number of steps.
    """
    if order.obstacle:
        raise GraphError(f"A step cannot be unrolled, since {order.obstacle}.")
    nodes = list(graph_def.node)
    first = [node for node in nodes if node.name not in shared]
    arguments = {node.name for node in first if node.op == "Placeholder"}
    uses_arguments = {node.name for node in first if not arguments.isdisjoint(map(graph_lib.node_of, node.input))}
    for step in range(1, steps):
        handles = {source: f"{renamed('after', step)}/{source}" for source, _ in order.after}
        for source, names in order.after:
            awaited = ends if names == (_WHOLE_STEP,) else names
            handle = node_def_pb2.NodeDef(name=handles[source], op="Identity", input=[
                source, *(f"^{renamed(name, step - 1)}" for name in dict.fromkeys(awaited))])
            graph_lib.set_attribute(handle.attr["T"], "T", types_pb2.DT_RESOURCE)
            provenance.Provenance(provenance.STEP).note(handle)
            nodes.append(handle)
        waits = collections.defaultdict(list, {
            name: [f"^{renamed(awaited, step - 1)}" for awaited in order.ordered] for name in order.ordered})
        if (over := step - _STEPS_AT_A_TIME) >= 0:
            # Results that nobody fetches are not computed for this.
            end = node_def_pb2.NodeDef(name=f"{renamed('after', step)}/step{over}", op="NoOp", input=[
                f"^{renamed(name, over)}" for name in controls])
            provenance.Provenance(provenance.STEP).note(end)
            nodes.append(end)
            for name in uses_arguments:
                waits[name].append(f"^{end.name}")
        nodes += [_copied(node, step, shared, handles, waits[node.name]) for node in first]
    return graph_lib.with_nodes(graph_def, nodes)


def renamed(name: str, step: int) -> str:
    """Returns the name of a node or tensor of the first step in another one."""
    return f"step{step}/{name}" if step else name


def _copied(node: node_def_pb2.NodeDef, step: int, shared: Collection[str], handles: dict[str, str],
            waits: Iterable[str]) -> node_def_pb2.NodeDef:
    """Returns the copy of a node in a later step."""
    def tensor(text: str) -> str:
        name = graph_lib.node_of(text)
        if graph_lib.is_control(text):
            return f"^{name if name in shared else renamed(name, step)}"
        return handles.get(name, text) if name in shared else renamed(text, step)

    copy = node_def_pb2.NodeDef()
    copy.CopyFrom(node)
    copy.name = renamed(node.name, step)
    copy.input[:] = [*map(tensor, node.input), *waits]
    if _FRAME in copy.attr:
        copy.attr[_FRAME].s = renamed(copy.attr[_FRAME].s.decode(), step).encode()
    if _CLASS in copy.attr:
        beside = [text.decode().removeprefix(_BESIDE) for text in copy.attr[_CLASS].list.s]
        graph_lib.set_names(copy.attr[_CLASS], [
            _BESIDE + (name if name in shared else renamed(name, step)) for name in beside])
    if "site" in copy.attr:
        provenance.rename_site(copy, steps_lib.GraphSteps().site_in(step, copy.attr["site"].s.decode()))
    return copy


def _is_stateful(node: node_def_pb2.NodeDef) -> bool:
    op_def = tf_compat.op_def(node.op)
    return op_def is None or op_def.is_stateful


def _is_resource(graph: graph_lib.Graph, name: str) -> bool:
    """Whether a node gives a resource or a reference."""
    node = graph.nodes[name]
    if node.op == "Placeholder":
        return node.attr["dtype"].type == types_pb2.DT_RESOURCE
    op_def = tf_compat.op_def(node.op)
    return op_def is not None and any(output.type == types_pb2.DT_RESOURCE or output.is_ref
                                      for output in op_def.output_arg)
