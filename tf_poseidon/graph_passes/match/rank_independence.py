"""Finds the tensors of a training graph that are the same on all ranks.

Requires: a flat graph, whose trained variables start equal on all ranks.

A variable is the same on all ranks if the graph assigns it, and never a value that depends on anything that differs:
data that were not summed over ranks, random numbers, or the result of an unknown op. Variables that the graph only
reads, such as an optimizer's learning rate, may differ between ranks, so they are not assumed to be equal.

Tests: tests/graphs/test_passes.py, tests/engines/test_horovod.py.
"""

from collections.abc import Iterable
from collections.abc import Mapping
import hashlib

from tensorflow.core.framework import node_def_pb2

from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.partition import variables

_EQUAL_EVERYWHERE = {"PoseidonSync", "PoseidonSyncSlices", "PoseidonAllReduce", "PoseidonAllGather",
                     "PoseidonBroadcast", "PoseidonGatherShards", "PoseidonRecv", "PoseidonSize", "HorovodAllreduce",
                     "HorovodGroupedAllreduce", "HorovodAllgather", "HorovodBroadcast", "HorovodSize",
                     "CollectiveReduceV2", "CollectiveReduceV3", "CollectiveGatherV2",
                     "CollectiveBcastRecvV2", "CollectiveBcastSendV2"}
_LOOPS = {"Enter", "RefEnter", "Switch", "Merge", "NextIteration", "Exit"}
_PASSES_RESOURCE_ON = {"Identity", *_LOOPS}
_READS = "ReadVariableOp"
_RESOURCE = 20  # types_pb2.DT_RESOURCE


class RankIndependence:
    """Answers whether tensors of one graph are the same on all ranks."""

    def __init__(self, graph: graph_lib.Graph, is_foreign: bool = False) -> None:
        """Looks at a graph.

        Args:
            graph: The `Graph`.
            is_foreign: Whether another library synchronises the program, so that we did not give its variables the
                same initial values. Then a variable is the same on all ranks only if each of its new values
                depends on something that all ranks have summed or gathered, as in training.
        """
        self._graph = graph
        self._resources: dict[str, str] = {}
        readers: dict[str, list[str]] = {}
        assigned, differing = set(), []
        for node in graph.graph_def.node:
            if _is_assignment(node):
                assigned.add(self._resource(node.input[0]))
            elif node.op == _READS:
                readers.setdefault(self._resource(node.input[0]), []).append(node.name)
            elif _is_source(node):
                differing.append(node.name)
        same_resources = assigned - self._handed_to_others()
        if is_foreign:
            same_resources -= self._without_ranks(readers)
        only_read = [name for resource, names in readers.items() if resource not in same_resources
                     for name in names]
        self._differing = self._spread(differing, readers) | self._spread(only_read, {})

    def _without_ranks(self, readers: Mapping[str, list[str]]) -> set[str]:
        """Returns the resources that are assigned values that do not depend on other ranks."""
        queue = [node.name for node in self._graph.graph_def.node
                 if node.op in _EQUAL_EVERYWHERE and not node.op.endswith("Size")]
        reached = set(queue)
        while queue:
            node = self._graph.nodes[queue.pop()]
            dependents = [consumer.name for consumer in self._graph.consumers(node.name)
                          if any(graph_lib.node_of(tensor) == node.name for tensor in self._graph.inputs(consumer))]
            if _is_assignment(node):
                dependents += readers.get(self._resource(node.input[0]), ())
            queue += [name for name in dependents if name not in reached]
            reached.update(dependents)
        return {self._resource(node.input[0]) for node in self._graph.graph_def.node
                if _is_assignment(node) and node.name not in reached}

    def __call__(self, tensor: str) -> bool:
        return graph_lib.node_of(tensor) not in self._differing

    def digest(self, tensors: Iterable[str]) -> str:
        """Returns a digest that is the same for the same expressions of constants and variables.

        A constant can hold a value that only one rank knows, so ranks compare what they assume to be equal.
        """
        digests: dict[str, str] = {}

        def of(name: str) -> str:
            # Depth-first without recursion: expressions can be deep.
            stack = [name]
            while stack:
                node = self._graph.nodes[stack[-1]]
                inputs = self._graph.inputs(node)
                is_leaf = node.op == _READS or node.op in _LOOPS
                missing = [i for i in map(graph_lib.node_of, inputs) if i not in digests]
                if missing and not is_leaf:
                    stack += missing
                    continue
                stack.pop()
                source = self._resource(inputs[0]) if node.op == _READS else node.name
                digests[node.name] = _hash(
                    node.op, source if is_leaf else "",
                    *(digests.get(graph_lib.node_of(i), "") + str(graph_lib.output_of(i))
                      for i in inputs),
                    *(node.attr[key].SerializeToString(deterministic=True)
                      for key in sorted(node.attr) if not key.startswith("_")))
            return digests[name]

        return _hash(*(of(graph_lib.node_of(tensor)) for tensor in tensors))

    def _spread(self, names: Iterable[str], readers: Mapping[str, list[str]]) -> set[str]:
        """Returns the nodes that depend on any of these, also through variables that have `readers`."""
        reached, queue = set(names), list(names)

        def reach(name: str) -> None:
            if name not in reached:
                reached.add(name)
                queue.append(name)

        while queue:
            name = queue.pop()
            node = self._graph.nodes[name]
            if _is_assignment(node):
                for reader in readers.get(self._resource(node.input[0]), ()):
                    reach(reader)
            for consumer in self._graph.consumers(name):
                # The branch of a condition that runs can decide between two constants.
                inputs = (consumer.input if consumer.op == "Const"
                          else self._graph.inputs(consumer))
                depends = any(graph_lib.node_of(tensor) == name for tensor in inputs)
                if depends and consumer.op not in _EQUAL_EVERYWHERE:
                    reach(consumer.name)
        return reached

    def _handed_to_others(self) -> set[str]:
        """Returns the resources that ops with unknown effects take."""
        resources = set()
        for node in self._graph.graph_def.node:
            if node.op in variables.READS or node.op in _PASSES_RESOURCE_ON or _is_assignment(node):
                continue
            for tensor in self._graph.inputs(node):
                source = self._resource(tensor)
                if _is_resource(self._graph.nodes[source]):
                    resources.add(source)
        return resources

    def _resource(self, tensor: str) -> str:
        """Returns the node from which a resource comes, before it enters loops."""
        seen = []
        name = graph_lib.node_of(tensor)
        while name not in self._resources:
            seen.append(name)
            node = self._graph.nodes[name]
            inputs = self._graph.inputs(node)
            if node.op not in _PASSES_RESOURCE_ON or not inputs:
                self._resources[name] = name
                break
            name = graph_lib.node_of(inputs[0])
            if name in seen:
                self._resources[name] = name
        source = self._resources[name]
        for name in seen:
            self._resources[name] = source
        return source


def _hash(*parts: str | bytes) -> str:
    data = [part if isinstance(part, bytes) else part.encode() for part in parts]
    lengths = ",".join(str(len(part)) for part in data).encode()
    return hashlib.sha256(b"\0".join([lengths, *data])).hexdigest()[:16]


def _is_assignment(node: node_def_pb2.NodeDef) -> bool:
    return node.op.startswith(("Assign", "ResourceApply", "ResourceScatter"))


def _is_resource(node: node_def_pb2.NodeDef) -> bool:
    key = {"_Arg": "T", "Placeholder": "dtype"}.get(node.op)
    return node.op == "VarHandleOp" or (key is not None and node.attr[key].type == _RESOURCE)


def _is_source(node: node_def_pb2.NodeDef) -> bool:
    """Whether a node's outputs differ between ranks, whatever its inputs."""
    if node.op in _EQUAL_EVERYWHERE or _is_resource(node):
        return False
    if node.op in ("_Arg", "Placeholder"):
        return True
    if "Random" in node.op:  # stateless ones too: each rank has a seed of its own
        return True
    op_def = tf_compat.op_def(node.op)
    return op_def is None or op_def.is_stateful
