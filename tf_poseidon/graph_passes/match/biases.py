"""Recognises the gradients of biases: sums of the rows of a factor that is sent anyway.

Requires: the matches of factors, in a flat graph with `_output_shapes`. Ensures: a `BiasMatch` for each gradient that
is the sum of the rows of all U, or of all V, of another gradient.

Tests: tests/graphs/test_passes.py, tests/graphs/test_partition_golden.py.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses

from tf_poseidon.graph_passes import passes
from tf_poseidon.graph_passes.find.markers import Marker
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.match.factors import PASS_ON
from tf_poseidon.graph_passes.match.factors import scalar_of
from tf_poseidon.graph_passes.match.matches import BiasMatch
from tf_poseidon.graph_passes.match.matches import Factor
from tf_poseidon.graph_passes.match.matches import GradientMatch
from tf_poseidon.graph_passes.match.matches import Match
from tf_poseidon.graph_passes.match.matches import Refused
from tf_poseidon.graph_passes.match.matches import Scale

_MAX_DEPTH = 12  # of sums and scales; sums of sums have up to 2 ** depth parts

# A tensor, and the scale of the sum of its rows; a sum of such parts in any order, with the count of each.
_Part = tuple[str | None, Scale]
_Unordered = frozenset[tuple[_Part, int]]


class MatchBiases(passes.Pass):
    """Finds the gradients of biases of dense layers."""

    def requires(self, training: passes.TrainingGraph) -> str:
        missing = [m.site for m in training.markers if m.indices is None and m.site not in training.matches]
        return f"'{missing[0]}' was not looked at for factors" if missing else ""

    def call(self, training: passes.TrainingGraph) -> passes.TrainingGraph:
        markers = [marker for marker in training.markers if marker.indices is None and not marker.refusal]
        matches = {**training.matches, **match(training.graph, markers, training.matches)}
        return dataclasses.replace(training, matches=matches)

    def ensures(self, training: passes.TrainingGraph, result: passes.TrainingGraph) -> str:
        return next((f"'{site}' is made of the factors of '{match.leader}', which has none"
                     for site, match in result.matches.items()
                     if isinstance(match, BiasMatch) and not isinstance(result.matches[match.leader], Match)), "")


def match(graph: graph_lib.Graph, markers: Iterable[Marker],
          matches: Mapping[str, GradientMatch]) -> dict[str, BiasMatch]:
    """Finds the gradients of biases of dense layers.

    Args:
        graph: The `Graph`.
        markers: All `Marker`s.
        matches: Result of `factors.match` for each site.

    Returns:
        `BiasMatch`es by site.
    """
    leaders: dict[_Unordered, BiasMatch] = {}
    for marker in markers:
        match = matches[marker.site]
        if not isinstance(match, Match):
            continue
        for which in ("v", "u"):
            parts = [(_root(graph, getattr(p, which)), p.scale) for p in match.products]
            # V is scaled before it is sent, U is not.
            if all(root and (which == "v" or not scale) for root, scale in parts):
                leaders.setdefault(_unordered(parts), BiasMatch(marker.site, which))
    bias_matches = {}
    for marker in markers:
        if marker.shape is None or len(marker.shape) != 1:
            continue
        try:
            sums = _row_sums(graph, marker.gradient, ())
        except Refused:
            continue
        leader = leaders.get(_unordered([(root, scale) for _, root, scale in sums]))
        if leader is None:
            continue
        match = matches[leader.leader]
        assert isinstance(match, Match)
        # Several dimensions of the tensor may form the columns of a factor.
        if marker.shape == (getattr(match.products[0], leader.factor).columns,):
            nodes = tuple(node for node, _, _ in sums)
            bias_matches[marker.site] = dataclasses.replace(leader, nodes=nodes)
    return bias_matches


def _unordered(parts: Sequence[_Part]) -> _Unordered:
    return frozenset((part, parts.count(part)) for part in parts)


def _root(graph: graph_lib.Graph, factor: Factor) -> str | None:
    """Returns the tensor that has the rows of a factor, before it was reshaped to a matrix."""
    return None if factor.transpose else _before_reshapes(graph, factor.tensor)


def _before_reshapes(graph: graph_lib.Graph, tensor: str) -> str:
    columns = graph.shape(tensor)
    while (node := graph.node(tensor)).op in (*PASS_ON, "Reshape"):
        shape = graph.shape(node.input[0])
        keeps_columns = shape and columns and shape[-1] == columns[-1] is not None
        if node.op == "Reshape" and not keeps_columns:
            break
        tensor = node.input[0]
    return tensor.removesuffix(":0")


def _row_sums(graph: graph_lib.Graph, tensor: str, scale: Scale, depth: int = 0) -> list[tuple[str, str, Scale]]:
    """Returns [(node, root, scale)] for a gradient that is a sum of the rows of tensors."""
    if depth > _MAX_DEPTH:
        raise Refused(tensor, f"its sums lie behind more than {_MAX_DEPTH} operations")
    node = graph.node(tensor)
    inputs = graph_lib.data_inputs(node)
    if node.op in (*PASS_ON, "Reshape"):
        return _row_sums(graph, inputs[0], scale, depth + 1)
    if node.op == "Cast" and not scale:
        return _row_sums(graph, inputs[0], scale, depth + 1)
    if node.op in ("AddN", "AddV2"):
        return [part for i in inputs for part in _row_sums(graph, i, scale, depth + 1)]
    if node.op == "Mul":
        for factor, other in (inputs, inputs[::-1]):
            if scalar := scalar_of(graph, factor):
                return _row_sums(graph, other, (*scale, scalar), depth + 1)
    if node.op == "RealDiv" and (scalar := scalar_of(graph, inputs[1])):
        divisor = dataclasses.replace(scalar, divides=True)
        return _row_sums(graph, inputs[0], (*scale, divisor), depth + 1)
    if node.op == "BiasAddGrad" and node.attr["data_format"].s in (b"", b"NHWC"):
        return [(node.name, _before_reshapes(graph, inputs[0]), scale)]
    if node.op == "Sum":
        axes, shape = graph.constant(inputs[1]), graph.shape(inputs[0])
        if axes is not None and shape and sorted(
                a % len(shape) for a in axes.flatten().tolist()) == list(range(len(shape) - 1)):
            return [(node.name, _before_reshapes(graph, inputs[0]), scale)]
    raise Refused(tensor, "it is not a sum of rows")
