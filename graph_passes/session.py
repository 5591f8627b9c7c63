"""Rewrites the training graphs of a job: finds, plans, lets ranks agree, and writes.

This is the one place that runs the passes. TensorFlow's graph optimizer, saved graphs and `explain` all go through it.
"""

import collections
from collections.abc import Iterable
import dataclasses
import hashlib
from typing import Protocol

from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2

from tf_poseidon import planning
from tf_poseidon.errors import JobError
from tf_poseidon.graph_passes import describe
from tf_poseidon.graph_passes import passes
from tf_poseidon.graph_passes import plan as plan_lib
from tf_poseidon.graph_passes.find import exchanges
from tf_poseidon.graph_passes.find import find
from tf_poseidon.graph_passes.find import foreign
from tf_poseidon.graph_passes.find import operations
from tf_poseidon.graph_passes.find import own
from tf_poseidon.graph_passes.find import step
from tf_poseidon.graph_passes.graph.graph import Graph
from tf_poseidon.graph_passes.match import biases
from tf_poseidon.graph_passes.match import factors
from tf_poseidon.graph_passes.match import slices
from tf_poseidon.graph_passes.write import agreement_text
from tf_poseidon.graph_passes.write import rewrite as rewrite_lib
from tf_poseidon.graph_passes.write import writers
from tf_poseidon.graph_passes.write.send_receive import SendReceive
from tf_poseidon.graph_passes.write.site_writer import SiteWriter

# From markers to what planning has to know of them.
DESCRIBE = (factors.MatchFactors(), biases.MatchBiases(), slices.MatchSlices(), describe.DescribeSites(),
            operations.CountOperations())


class TextComparison(Protocol):
    """Compares the agreement texts of all ranks."""

    def difference(self, key: str, text: str) -> str | None:
        """Returns None if all ranks have the same text under a key, else a sentence about the first difference."""


class CannotFollowError(JobError):
    """This rank cannot rewrite a graph as the others have: it must not run it."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What has become of a graph.

    Attributes:
        graph_def: The rewritten GraphDef; None if the graph stays as it is.
        plan: The `Plan` that it follows; of a graph that stays as it is, that of what it exchanges beside gradients.
            None if ranks exchange nothing.
        sites: What it synchronises.
        refusal: Why it was not rewritten although it synchronises something, a sentence; else "".
        cause: The exception that made it be refused, if one did.
    """

    graph_def: graph_pb2.GraphDef | None = None
    plan: planning.Plan | None = None
    sites: tuple[planning.Site, ...] = ()
    refusal: str = ""
    cause: Exception | None = None


class RewriteSession:
    """Rewrites training graphs, on all ranks alike.

    Our own Send and Recv find out in every step whether all ranks have factors, so ranks rewrite by themselves. With
    collectives, all ranks have to call the same ones: then each compares with the others what it would exchange, and
    takes the result only if all would do the same. A function may be traced again, perhaps by one rank alone, for
    batches of another size: then the plan of the first trace stands.

    Attributes:
        planner: The `planning.Planner`.
        marker_ops: The ops over which gradients are synchronised: ours, or those of another library.
        has_to_agree: Whether ranks compare graphs before these run.
    """

    def __init__(self, planner: planning.Planner, engine: type[SiteWriter] = SendReceive, is_foreign: bool = False,
                 comparison: TextComparison | None = None) -> None:
        """Makes a session.

        Args:
            planner: The planner.
            engine: What writes the ops of the engine that moves bytes.
            is_foreign: Whether programs synchronise by another library, and its all-reduces are the markers.
            comparison: Compares agreement texts between ranks; None where ranks need not agree.
        """
        self.planner = dataclasses.replace(planner, schemes=writers.schemes_of(engine))
        self.marker_ops = foreign.OPS if is_foreign else own.OPS
        self.has_to_agree = comparison is not None
        self._comparison = comparison
        self._find = (find.FindMarkers(planner.cluster.workers if is_foreign else None), exchanges.FindExchanges())
        self._write = rewrite_lib.Write(engine)
        self._plans: dict[str, list[planning.Plan]] = collections.defaultdict(list)  # that ranks have agreed on
        self._refused: dict[str, str] = {}  # why there is no plan, by what all ranks know of a function
        self._times: collections.Counter[str] = collections.Counter()

    def rewrite(self, graph_def: graph_pb2.GraphDef, by_policy: bool = False) -> Outcome:
        """Rewrites a graph so that each gradient travels as the plan says.

        Args:
            graph_def: A flat GraphDef. Shapes are taken from `_output_shapes` where it has them.
            by_policy: Whether to follow the policy even where a plan is given: that was made of other graphs.

        Returns:
            An `Outcome`. A graph that was rewritten before has nothing left to do.

        Raises:
            CannotFollowError: If other ranks run a rewritten graph, and this one cannot.
        """
        planner = self.planner.by_policy() if by_policy else self.planner
        known, cause = None, None
        try:
            known = self.find(graph_def)
            if not known.markers:
                return Outcome(plan=self._plan_of_exchanges(known, planner))
            known = passes.run(DESCRIBE, known)
        except Exception as error:  # whatever goes wrong, the graph as it is computes the same
            known, cause = None, error
        if self._comparison is not None:
            return self._rewrite_alike(graph_def, known, planner, cause, self._comparison)
        if known is not None:
            try:
                return _outcome(self._planned(known, plan_lib.MakePlan(planner)))
            except Exception as error:
                cause = error
        return Outcome(refusal=_text_of(cause), cause=cause)

    def find(self, graph_def: graph_pb2.GraphDef) -> passes.TrainingGraph:
        """Returns what a graph exchanges, without anything that is known of it.

        Raises:
            PoseidonError: If the graph is not valid, or synchronises two gradients under the same name.
        """
        return passes.run(self._find, passes.TrainingGraph(Graph(graph_def), step.facts_of(graph_def)))

    def _planned(self, known: passes.TrainingGraph, planning_pass: passes.Pass) -> passes.TrainingGraph:
        return passes.run((planning_pass, self._write), known)

    @staticmethod
    def _plan_of_exchanges(known: passes.TrainingGraph, planner: planning.Planner) -> planning.Plan | None:
        if not known.exchanges:
            return None
        # The graph stays as it is: nothing waits for anything.
        return dataclasses.replace(planner, merge=False).plan((), exchanges=known.exchanges)

    # ---- ranks that have to agree -----------------------------------------------------------------

    def _rewrite_alike(self, graph_def: graph_pb2.GraphDef, known: passes.TrainingGraph | None,
                       planner: planning.Planner, cause: Exception | None, comparison: TextComparison) -> Outcome:
        """Rewrites a graph as all ranks do; `known` is None where this one could not find out enough about it."""
        if known is not None and all(marker.refusal for marker in known.markers):
            return Outcome(refusal=known.markers[0].refusal or "")  # other ranks may not even run it
        try:
            return self._agreed(graph_def, known, planner, cause, comparison)
        except Exception as error:  # other ranks have done their part
            raise CannotFollowError("This rank could not rewrite a training graph as the others have: "
                                    f"{error}") from error

    def _agreed(self, graph_def: graph_pb2.GraphDef, known: passes.TrainingGraph | None, planner: planning.Planner,
                cause: Exception | None, comparison: TextComparison) -> Outcome:
        lines = [] if known is None else agreement_text.lines_of_gradients(known)
        key = _digest(lines)
        if known is not None:
            for plan in self._plans[key]:
                if agreement_text.has_room(known, plan):
                    return _outcome(self._planned(known, plan_lib.TakePlan(plan, planner.cluster)))
        # Whatever a rank has found out, it knows these.
        name = _digest(sorted(f"{node.op} {node.name}" for node in self.markers_of(graph_def)))
        if name in self._refused:
            return Outcome(refusal=self._refused[name])
        planned, text = None, ""
        if known is not None:
            try:
                planned = self._planned(known, plan_lib.MakePlan(planner))
                text = "\n".join([agreement_text.of_plan(planned), *lines])
            except Exception as error:  # the graph as it is computes the same
                planned, cause = None, error
        self._times[name] += 1
        problem = _text_of(cause)
        difference = comparison.difference(f"{name}/{self._times[name]}", text or f"not rewritten: {problem}")
        if planned is not None and planned.plan is not None and difference is None:
            self._plans[key].append(planned.plan)
            return _outcome(planned)
        self._refused[name] = difference or problem
        return Outcome(refusal=self._refused[name], cause=cause)

    def markers_of(self, graph_def: graph_pb2.GraphDef) -> list[node_def_pb2.NodeDef]:
        """Returns the nodes of a graph over which gradients are synchronised."""
        return [node for node in graph_def.node if node.op in self.marker_ops]


def _outcome(known: passes.TrainingGraph) -> Outcome:
    return Outcome(known.rewritten, known.plan, known.sites)


def _text_of(error: Exception | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
