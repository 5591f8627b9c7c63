"""The passes in their order."""

import dataclasses
import math

import tensorflow as tf
from tensorflow.core.framework import types_pb2

from tf_poseidon import planning
from tf_poseidon.graph_passes import check
from tf_poseidon.graph_passes import count_operations
from tf_poseidon.graph_passes import find_collectives
from tf_poseidon.graph_passes import find_sites
from tf_poseidon.graph_passes import graph as graph_lib
from tf_poseidon.graph_passes import match_biases
from tf_poseidon.graph_passes import match_factors
from tf_poseidon.graph_passes import matches as matches_lib
from tf_poseidon.graph_passes import rank_independence
from tf_poseidon.graph_passes import rewrite as rewrite_lib
from tf_poseidon.graph_passes import site_writer


@dataclasses.dataclass(frozen=True)
class Found:
    """What a training graph synchronises.

    Attributes:
        graph: The `Graph`.
        markers: Where; in the order in which the program made them, as far as that is known.
        matches: What was found out about each gradient, by site.
        sites: The same for planning, `planning.Site`s.
        operations, exchanges: As of `planning.Plan`.
    """

    graph: graph_lib.Graph
    markers: tuple
    matches: dict
    sites: tuple
    operations: float | None
    exchanges: tuple
    _step: "_Step"
    _digest: object

    def rewrite(self, plan, collective_ops=None):
        """Returns the GraphDef in which each gradient travels as a plan says.

        Raises:
            check.InvalidGraph: If the result would not be valid.
        """
        result = rewrite_lib.rewrite(self.graph, self.markers, self.matches, plan, self._digest,
                                     self._step.strict, collective_ops)
        check.check_rewrite(self.graph.graph_def, result, self.markers)
        return result

    @property
    def _fixes_rows(self):
        """Whether factors have the same number of rows on all ranks: TensorFlow's collectives want it."""
        return any(self.graph.nodes[m.node].op in find_collectives.TENSORFLOW for m in self.markers)

    def fits(self, plan):
        """Whether a plan for other batches has room for the rows of these."""
        if not self._fixes_rows:
            return True
        rows = {site.name: site.factors.k for site in self.sites if site.factors}
        return all(rows.get(site.name) is None or rows[site.name] <= site.factors.k
                   for site, decision in zip(plan.sites, plan.decisions)
                   if decision.scheme == "sfb" and not decision.rides_on)

    def form(self, plan):
        """Returns what ranks have to have in common to follow a plan: a line for each site."""
        riders = {}
        for decision in plan.decisions:
            if decision.rides_on:
                riders.setdefault(decision.rides_on, []).append(decision.site)
        lines = [plan.form()]
        rows_of = {site.name: site.factors and site.factors.k for site in plan.sites}
        for decision in sorted(plan.decisions, key=lambda d: d.site):
            match = self.matches[decision.site]
            if decision.scheme == "sfb" and not decision.rides_on:
                form = site_writer.form_of(match, riders.get(decision.site, ()), self._digest)
                rows = rows_of[decision.site] if self._fixes_rows else "any"
                lines.append(f"'{decision.site}' {rows} rows, {form}")
        return "\n".join(lines)


def find(graph_def, foreign_ranks=None):
    """Returns what a training graph synchronises, a `Found`; None if that is nothing.

    Args:
        graph_def: A flat GraphDef: calls are inlined, loops are made of Enter, Merge, Switch,
            NextIteration and Exit. Shapes are taken from `_output_shapes` where it has them.
        foreign_ranks: Number of ranks of a program of another library, whose all-reduces are the markers;
            None of one with ours.

    Raises:
        ValueError: If the graph synchronises two gradients under the same name.
        check.InvalidGraph: If the graph is not valid.
    """
    check.check_graph(graph_def)
    graph = graph_lib.Graph(graph_def)
    step = _step(graph_def)
    markers = (find_collectives.find_collectives(graph, foreign_ranks) if foreign_ranks else
               _in_order_of_trace(find_sites.find_sites(graph), step))
    if not markers:
        return None
    # Before matching: which tensors ranks have in common is a question to the whole graph.
    independent = rank_independence.RankIndependence(graph, is_foreign=foreign_ranks is not None)
    dense = [marker for marker in markers if marker.indices is None]
    matches = {m.site: matches_lib.Refusal(m.node, m.refusal) if m.refusal else
               match_factors.match_factors(graph, m, independent) for m in dense}
    matches |= {m.site: _that_can_be_gathered(graph, matches[m.site], m) for m in dense if m.is_foreign}
    # After it: biases follow the layers whose factors are known.
    matches |= match_biases.match_biases(graph, [m for m in dense if not m.refusal], matches)
    matches |= {m.site: _slices(graph, m) for m in markers if m.indices is not None}
    others = _others(graph)
    operations, before = count_operations.count_operations(
        graph, [marker.gradient for marker in markers] + [graph_lib.data_inputs(node)[0] for node in others])
    depths = _depths(graph, [marker.node for marker in markers] + [node.name for node in others])
    sites = tuple(dataclasses.replace(
        _site(marker, matches[marker.site], step), operations=count, depth=depths[marker.node],
        is_waited_for=marker.meanwhile == "waits") for marker, count in zip(markers, before))
    exchanges = tuple(dataclasses.replace(
        _exchange(graph, node), operations=count, depth=depths[node.name],
        is_waited_for=graph_lib.meanwhile(node) == "waits") for node, count in zip(others, before[len(markers):]))
    return Found(graph, tuple(markers), matches, sites, operations, exchanges, step, independent.digest)


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """A rewritten graph.

    Attributes:
        graph_def: The GraphDef; None if there was nothing to synchronise.
        sites: What the graph synchronises, `planning.Site`s.
        plan: How, a `planning.Plan`; None if ranks exchange nothing.
    """

    graph_def: object
    sites: tuple
    plan: planning.Plan | None


def rewrite(graph_def, planner, collective_ops=None):
    """Rewrites a training graph so that each gradient travels as the plan says.

    Args:
        graph_def: As of `find`.
        planner: The `planning.Planner`.
        collective_ops: As of `engines.Engine`.

    Returns:
        `Rewritten`. A graph that was rewritten before has nothing left to do.

    Raises:
        ValueError: If the graph synchronises two gradients under the same name.
        PoseidonError: If the planner refuses the graph.
        check.InvalidGraph: If the graph is not valid, or would not be afterwards.
    """
    found = find(graph_def)
    if found is None:
        graph = graph_lib.Graph(graph_def)
        exchanges = [_exchange(graph, node) for node in _others(graph)]
        alone = dataclasses.replace(planner, merge=False)  # the graph stays as it is
        return Rewritten(None, (), alone.plan((), exchanges=exchanges) if exchanges else None)
    plan = planner.plan(found.sites, found.operations, found.exchanges)
    return Rewritten(found.rewrite(plan, collective_ops), found.sites, plan)


# Ops of a partitioned graph that exchange something else than gradients.
_OTHERS = {"PoseidonAllGather": "gather", "PoseidonBroadcast": "broadcast"}


def _others(graph):
    """Returns the nodes by which the step of a partitioned graph exchanges something else than gradients."""
    return [node for node in graph.graph_def.node if node.op in _OTHERS and graph_lib.meanwhile(node)]


def _exchange(graph, node):
    """Returns the `planning.Exchange` that a node makes."""
    dtype, shape = tf.as_dtype(node.attr["T"].type), graph.shape(graph_lib.data_inputs(node)[0])
    return planning.Exchange(node.attr["site"].s.decode(), _OTHERS[node.op], dtype.name, dtype.size,
                             None if shape is None or None in shape else shape)


def _depths(graph, names):
    """Returns how many of some nodes come one after the other before each of them, None for those in loops."""
    names, before, found = set(names), {}, {}
    for node in graph_lib.in_order(graph.graph_def):
        # None yet of the back edge of a loop.
        depth = max((before.get(graph_lib.node_of(tensor), 0) for tensor in node.input), default=0)
        before[node.name] = depth + (node.name in names)
        if node.name in names:
            found[node.name] = None if graph_lib.meanwhile(node) == "repeats" else depth
    return found


def _that_can_be_gathered(graph, match, marker):
    """Returns a match as it is, or a Refusal if other libraries' collectives cannot gather its types."""
    if not isinstance(match, matches_lib.Match):
        return match
    dtype = match.products[0].dtype
    if match.terms and dtype != marker.dtype:
        return matches_lib.Refusal(marker.node, "what is added to its factors has another type than these")
    if dtype == types_pb2.DT_BFLOAT16 and graph.nodes[marker.node].op in find_collectives.TENSORFLOW:
        return matches_lib.Refusal(marker.node, "TensorFlow's collectives do not gather bfloat16")
    return match


@dataclasses.dataclass(frozen=True)
class _Step:
    """What the graph says about its step, in PoseidonAgree.

    Attributes:
        sites: Names of the sites in the order of the trace, as lines of text.
        rows: Rows of a full batch that one rank computes, None if unknown.
        static_rows: Rows that this rank's shapes are made for, None if that changes.
        strict: Whether to fail where ranks have other graphs.
    """

    sites: tuple[str, ...] = ()
    rows: int | None = None
    static_rows: int | None = None
    strict: bool = False


def _step(graph_def):
    for node in graph_def.node:
        if node.op == "PoseidonAgree":
            rows, static_rows = (node.attr[key].i if node.attr[key].i > 0 else None
                                 for key in ("rows", "static_rows"))
            return _Step(tuple(node.attr["sites"].s.decode().split("\n")), rows, static_rows,
                         node.attr["strict"].b)
    return _Step()


def _in_order_of_trace(markers, step):
    """Returns the markers as the user's program made them; TensorFlow orders graphs anew."""
    order = {line.rpartition("' ")[0].removeprefix("'"): i for i, line in enumerate(step.sites)}
    return sorted(markers, key=lambda marker: (order.get(marker.site, len(order)), marker.node))


def _slices(graph, marker):
    """Returns how many slices a gradient has: as many as its indices, if their number is known."""
    tensor = marker.indices
    while graph.shape(tensor) in (None, (None,)) and graph.node(tensor).op in ("Cast", "Reshape"):
        tensor = graph_lib.data_inputs(graph.node(tensor))[0]  # neither changes the number
    return matches_lib.SlicesMatch(graph_lib.num_elements(graph.shape(tensor)),
                                   graph.nodes[marker.node].attr["Tidx"].type)


def _itemsize(marker, dtype):
    """Returns the bytes of an element of `dtype` on its way."""
    size = tf.as_dtype(dtype).size
    return size if marker.wire_dtype is None else min(size, tf.as_dtype(marker.wire_dtype).size)


def _planned(k, rows, static_rows):
    """Returns K in a full batch of the rank with most rows, when this rank's shapes are fixed.

    A batch that does not divide gives ranks different shapes, and all must plan alike.
    """
    if None in (k, rows, static_rows) or k % static_rows:
        return k
    return k // static_rows * rows


def _site(marker, match, step):
    """Returns what planning needs to know of a gradient."""
    dtype = tf.as_dtype(marker.dtype)
    shape = marker.shape
    site = planning.Site(marker.site, dtype.name, _itemsize(marker, marker.dtype),
                         None if shape is None or None in shape else shape)
    if isinstance(match, matches_lib.Refusal):
        return dataclasses.replace(site, refusal=str(match))
    if isinstance(match, matches_lib.BiasMatch):
        return dataclasses.replace(
            site, bias_of=match.leader,
            refusal=f"it is computed from the factors of '{match.leader}', which are not sent")
    if isinstance(match, matches_lib.SlicesMatch):
        row_bytes = math.prod(shape[1:]) * dtype.size + tf.as_dtype(match.index_dtype).size
        k = _planned(match.k, step.rows, step.static_rows)
        return dataclasses.replace(site, slices=planning.Slices(k, row_bytes))
    first = match.products[0]
    k = [_planned(product.k, step.rows, step.static_rows) for product in match.products]
    factors = planning.Factors(
        m=first.u.columns, n=first.v.columns, k=None if None in k else sum(k),
        itemsize=_itemsize(marker, first.dtype), extra_bytes=len(match.terms) * dtype.size)
    return dataclasses.replace(site, factors=factors)
