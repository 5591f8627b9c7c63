"""Rewrites the training graphs of a job: finds, plans, agrees with the other ranks, and writes.

This is the only place that runs the passes behind the partitioner: TensorFlow's graph optimizer, saved graphs and
`explain` all use it.

Tests: tests/graphs/test_passes.py, tests/engines/test_drop_in.py.
"""

import collections
from collections.abc import Iterable
import contextlib
import dataclasses
import hashlib
from typing import Protocol

from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2

from tf_poseidon import planning
from tf_poseidon.errors import GraphError
from tf_poseidon.errors import JobError
from tf_poseidon.graph_passes import describe
from tf_poseidon.graph_passes import passes
from tf_poseidon.graph_passes import plan_sites
from tf_poseidon.graph_passes import usual_batch
from tf_poseidon.graph_passes.find import all_markers
from tf_poseidon.graph_passes.find import exchanges
from tf_poseidon.graph_passes.find import foreign
from tf_poseidon.graph_passes.find import operations
from tf_poseidon.graph_passes.find import poseidon_markers
from tf_poseidon.graph_passes.find import priorities
from tf_poseidon.graph_passes.find import training_step
from tf_poseidon.graph_passes.graph import garbage
from tf_poseidon.graph_passes.graph.indexed_graph import AddShapes
from tf_poseidon.graph_passes.graph.indexed_graph import Graph
from tf_poseidon.graph_passes.graph.indexed_graph import node_of
from tf_poseidon.graph_passes.graph.indexed_graph import with_nodes
from tf_poseidon.graph_passes.match import biases
from tf_poseidon.graph_passes.match import casts
from tf_poseidon.graph_passes.match import factors
from tf_poseidon.graph_passes.match import slices
from tf_poseidon.graph_passes.partition.states import Division
from tf_poseidon.graph_passes.write import agreement_text
from tf_poseidon.graph_passes.write import rewrite as rewrite_lib
from tf_poseidon.graph_passes.write import turns
from tf_poseidon.graph_passes.write import writers
from tf_poseidon.graph_passes.write.send_receive import SendReceive
from tf_poseidon.graph_passes.write.site_writer import SiteWriter

# From markers to the ways in which each gradient could travel.
_MATCH = (factors.MatchFactors(), biases.MatchBiases(), slices.MatchSlices())


class TextComparison(Protocol):
    """Compares the agreement texts of all ranks."""

    def difference(self, key: str, text: str) -> str | None:
        """Returns None if all ranks have the same text under a key, else a sentence with the first difference."""


class CannotFollowError(JobError):
    """This rank cannot rewrite a graph as the others have, so it must not run it."""


@dataclasses.dataclass(frozen=True)
class RewriteOutcome:
    """The result of rewriting a graph.

    Attributes:
        graph_def: The rewritten GraphDef; None if the graph is unchanged.
        plan: The `Plan` that it follows; for an unchanged graph, the plan of its exchanges besides gradients. None if
            ranks exchange nothing.
        sites: The gradients that it synchronises.
        refusal: Why it was not rewritten although it synchronises something, a sentence; else "".
        cause: The exception that caused the refusal, if any.
    """

    graph_def: graph_pb2.GraphDef | None = None
    plan: planning.Plan | None = None
    sites: tuple[planning.Site, ...] = ()
    refusal: str = ""
    cause: Exception | None = None


class RewriteSession:
    """Rewrites training graphs, on all ranks alike.

    Our own Send and Recv find out in every step whether all ranks have factors, so each rank rewrites independently.
    Collectives must be the same on all ranks: each rank compares its planned exchanges with the others, and rewrites
    only if all would do the same. A function may be traced again for batches of another size, perhaps on one rank
    alone; it then follows the plan of the first trace.

    Attributes:
        planner: The `planning.Planner`.
        marker_ops: The ops that synchronise gradients: ours, or those of another library.
        has_to_agree: Whether ranks compare graphs before these run.
        takes_turns: Whether steps take turns with other jobs on their accelerator.
    """

    def __init__(self, planner: planning.Planner, writer: type[SiteWriter] = SendReceive, is_foreign: bool = False,
                 comparison: TextComparison | None = None, takes_turns: bool = False) -> None:
        """Makes a session.

        Args:
            planner: The planner.
            writer: The class that writes the ops of the engine.
            is_foreign: Whether programs synchronise with another library, whose all-reduces are the markers.
            comparison: Compares agreement texts between ranks; None where ranks need not agree.
            takes_turns: Same as the attribute.
        """
        self.takes_turns = takes_turns
        self.planner = dataclasses.replace(planner, schemes=writers.schemes_of(writer))
        self.marker_ops = foreign.OPS if is_foreign else poseidon_markers.OPS
        self.has_to_agree = comparison is not None
        self._comparison = comparison
        self._find = all_markers.FindMarkers(planner.cluster.workers if is_foreign else None)
        self._match = (casts.FindCasts(), *_MATCH) if writer.sums_narrow else _MATCH
        self._write = rewrite_lib.Write(writer)
        self._plans: dict[str, list[planning.Plan]] = collections.defaultdict(list)  # on which ranks have agreed
        self._refused: dict[str, str] = {}  # why a function has no plan, by digest of its markers
        self._times: collections.Counter[str] = collections.Counter()

    @property
    def gathers(self) -> bool:
        """Whether ranks have agreed on a plan by which gradients do not all travel as sums."""
        return any(decision.scheme != "ps" for plans in self._plans.values() for plan in plans
                   for decision in plan.decisions)

    @garbage.unsearched()
    def rewrite(self, graph_def: graph_pb2.GraphDef, by_policy: bool = False,
                add_shapes: AddShapes | None = None) -> RewriteOutcome:
        """Rewrites a graph so that each gradient travels as the plan says.

        Args:
            graph_def: A flat GraphDef.
            by_policy: Whether to follow the policy even if a plan is given, since that was made for other graphs.
            add_shapes: A function that infers shapes, such as `grappler.add_shapes`; by default the shapes are those in
                `_output_shapes`, also for planning.

        Returns:
            A `RewriteOutcome`. A graph that was already rewritten is left unchanged.

        Raises:
            CannotFollowError: If other ranks run a rewritten graph and this rank cannot.
        """
        planner = self.planner.by_policy() if by_policy else self.planner
        training, cause = None, None
        try:
            training = self.find(graph_def, add_shapes)
            usual = training.graph  # for the passes that describe costs, and for no other
            if add_shapes is not None:
                usual = usual_batch.with_shapes(training.graph, add_shapes, training.facts)
            training = exchanges.FindExchanges(usual)(training)
            if not training.markers and _is_planned(graph_def):
                return RewriteOutcome()
            if not training.markers and not _has_shards_to_plan(graph_def):
                return RewriteOutcome(plan=self._plan_of_exchanges(training, planner))
            training = passes.run((*self._match, describe.DescribeSites(usual), operations.CountOperations(usual),
                                   priorities.FindPriorities()), training)
        except Exception as error:  # whatever goes wrong, the unmodified graph computes the same
            training, cause = None, error
        if self._comparison is not None:
            return self._rewrite_alike(graph_def, training, planner, cause, self._comparison)
        if training is not None:
            try:
                return _outcome(self._planned(training, plan_sites.MakePlan(planner)))
            except Exception as error:
                cause = error
        return RewriteOutcome(refusal=_text_of(cause), cause=cause)

    def find(self, graph_def: graph_pb2.GraphDef, add_shapes: AddShapes | None = None) -> passes.TrainingGraph:
        """Returns the gradients that a graph synchronises, without their matches, sites and plan.

        Raises:
            PoseidonError: If the graph is not valid, or synchronises two gradients under the same name.
        """
        shapes = None
        if add_shapes is not None:
            with contextlib.suppress(GraphError):  # without shapes the passes still run, and plan dense gradients
                shapes = add_shapes(graph_def, alone=True)
        return self._find(passes.TrainingGraph(Graph(graph_def, shapes), training_step.facts_of(graph_def)))

    def layouts_of_factors(self, graph_def: graph_pb2.GraphDef, facts: training_step.StepFacts,
                           add_shapes: AddShapes) -> dict[str, Division | None]:
        """Returns the layouts of shards whose gradient the planner would let travel as factors, if all needed it whole.

        With the `Division` of what servers rebuild of half factors; None where every rank rebuilds the gradient.

        Args:
            graph_def: A partitioned GraphDef.
            facts: What is known about its step.
            add_shapes: Same as in `rewrite`.
        """
        whole_graph, layouts = _with_whole_gradients(graph_def)
        given = self.planner.given
        if given is not None:  # it plans those of which no rank needs the usual shard
            return {layouts[site.name]: _division(layouts[site.name], site, site.is_divided)
                    for site in given.sites if site.name in layouts}
        plan = self.plan_of(whole_graph, facts, add_shapes)
        return {layouts[site.name]: _division(layouts[site.name], site, decision.scheme == planning.HFB)
                for site, decision in zip(plan.sites, plan.decisions, strict=True)
                if decision.scheme != planning.PS and site.name in layouts}

    def plan_of(self, graph_def: graph_pb2.GraphDef, facts: training_step.StepFacts,
                add_shapes: AddShapes) -> planning.Plan:
        """Returns the plan that the policy would make for a partitioned GraphDef; arguments as above."""
        training = self._find(passes.TrainingGraph(Graph(graph_def, add_shapes(graph_def, alone=True)), facts))
        usual = usual_batch.with_shapes(training.graph, add_shapes, facts)
        training = passes.run((exchanges.FindExchanges(usual), *self._match, describe.DescribeSites(usual),
                               operations.CountOperations(usual), plan_sites.MakePlan(self.planner)), training)
        assert training.plan is not None
        return training.plan

    def _planned(self, training: passes.TrainingGraph, planning_pass: passes.Pass) -> passes.TrainingGraph:
        planned = passes.run((planning_pass, self._write), training)
        trains = training_step.node_of(training.graph.graph_def) is not None  # else it adds up metrics, say
        return turns.AddTurns()(planned) if self.takes_turns and trains else planned

    @staticmethod
    def _plan_of_exchanges(training: passes.TrainingGraph, planner: planning.Planner) -> planning.Plan | None:
        if not training.exchanges:
            return None
        # The graph is left unchanged, so exchanges cannot wait to be merged.
        return dataclasses.replace(planner, merge=False).plan((), exchanges=training.exchanges)

    # ---- ranks that must agree --------------------------------------------------------------------

    def _rewrite_alike(self, graph_def: graph_pb2.GraphDef, training: passes.TrainingGraph | None,
                       planner: planning.Planner, cause: Exception | None,
                       comparison: TextComparison) -> RewriteOutcome:
        """Rewrites a graph as all ranks do; `training` is None if this rank could not analyse it."""
        is_refused = training is not None and training.markers and all(marker.refusal for marker in training.markers)
        refusal = training.markers[0].refusal if training is not None and is_refused else None
        if refusal and not any(foreign.is_of_all_ranks(node) for node in self.markers_of(graph_def)):
            return RewriteOutcome(refusal=refusal)  # other ranks may not even run it
        try:
            if refusal:
                return self._refused_alike(graph_def, refusal, comparison)
            return self._agreed(graph_def, training, planner, cause, comparison)
        except Exception as error:  # other ranks have done their part
            raise CannotFollowError("This rank could not rewrite a training graph as the others have: "
                                    f"{error}") from error

    def _refused_alike(self, graph_def: graph_pb2.GraphDef, refusal: str, comparison: TextComparison) -> RewriteOutcome:
        """Refuses a graph that other ranks may want to rewrite: there, the same sums may be of another type."""
        name = self._name_of(graph_def)
        if name not in self._refused:
            self._times[name] += 1
            comparison.difference(f"{name}/{self._times[name]}", f"not rewritten: {refusal}")
            self._refused[name] = refusal
        return RewriteOutcome(refusal=refusal)

    def _agreed(self, graph_def: graph_pb2.GraphDef, training: passes.TrainingGraph | None, planner: planning.Planner,
                cause: Exception | None, comparison: TextComparison) -> RewriteOutcome:
        lines = [] if training is None else agreement_text.lines_of_gradients(training)
        key = _digest(lines)
        if training is not None:
            for plan in self._plans[key]:
                if agreement_text.has_room(training, plan):
                    return _outcome(self._planned(training, plan_sites.TakePlan(plan, planner.cluster)))
        name = self._name_of(graph_def)
        if name in self._refused:
            return RewriteOutcome(refusal=self._refused[name])
        planned, text = None, ""
        if training is not None:
            try:
                planned = self._planned(training, plan_sites.MakePlan(planner))
                text = "\n".join([agreement_text.of_plan(planned), *lines])
            except Exception as error:  # the unmodified graph computes the same
                planned, cause = None, error
        self._times[name] += 1
        problem = _text_of(cause)
        difference = comparison.difference(f"{name}/{self._times[name]}", text or f"not rewritten: {problem}")
        if planned is not None and planned.plan is not None and difference is None:
            self._plans[key].append(planned.plan)
            return _outcome(planned)
        self._refused[name] = difference or problem
        return RewriteOutcome(refusal=self._refused[name], cause=cause)

    def _name_of(self, graph_def: graph_pb2.GraphDef) -> str:
        """Returns a name of a graph that every rank knows, even if it could not analyse the graph."""
        return _digest(sorted(f"{node.op} {node.name}" for node in self.markers_of(graph_def)))

    def markers_of(self, graph_def: graph_pb2.GraphDef) -> list[node_def_pb2.NodeDef]:
        """Returns the nodes of a graph that synchronise gradients."""
        return [node for node in graph_def.node if node.op in self.marker_ops]


def _is_planned(graph_def: graph_pb2.GraphDef) -> bool:
    """Whether a graph follows a plan already: TensorFlow hands it over more than once."""
    agree = training_step.node_of(graph_def)
    return agree is not None and "plan" in agree.attr and bool(agree.attr["plan"].s)


def _has_shards_to_plan(graph_def: graph_pb2.GraphDef) -> bool:
    """Whether all gradients of a training step become shards."""
    return training_step.node_of(graph_def) is not None and any(
        node.op == poseidon_markers.SCATTER for node in graph_def.node)


def _with_whole_gradients(graph_def: graph_pb2.GraphDef) -> tuple[graph_pb2.GraphDef, dict[str, str]]:
    """Returns (what comes before the gradients that become shards, where they become whole; their layouts, by site)."""
    graph = Graph(graph_def)
    scattered = [node for node in graph_def.node if node.op == poseidon_markers.SCATTER]
    queue, names = [node.name for node in scattered], set[str]()
    while queue:
        name = queue.pop()
        if name not in names:
            names.add(name)
            queue += map(node_of, graph.nodes[name].input)
    result = with_nodes(graph_def, [node for node in graph_def.node if node.name in names])
    for node in result.node:
        if node.op == poseidon_markers.SCATTER:
            node.op = poseidon_markers.OPS[0]
            for attribute in ("layout", "owner", "Tout"):
                node.attr.pop(attribute, None)
    return result, {node.attr["site"].s.decode(): node.attr["layout"].s.decode() for node in scattered}


def _division(layout: str, site: planning.Site, is_divided: bool) -> Division | None:
    """Returns the `Division` by half factors of a gradient that has some, if it is divided as these."""
    factors = site.factors
    return None if factors is None or not is_divided else Division(
        layout, divided=factors.divided, columns=factors.n)


def _outcome(training: passes.TrainingGraph) -> RewriteOutcome:
    return RewriteOutcome(training.rewritten, training.plan, training.sites)


def _text_of(error: Exception | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
