"""What a pass is: a step from one description of a training graph to the next, with conditions that are checked.

A pass never changes what it is given: a `TrainingGraph` is frozen, and each pass returns one of which more is known.
"""

import abc
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses

from tensorflow.core.framework import graph_pb2

from tf_poseidon import planning
from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.find.markers import Marker
from tf_poseidon.graph_passes.find.step import StepFacts
from tf_poseidon.graph_passes.graph.graph import Graph
from tf_poseidon.graph_passes.match.matches import GradientMatch


@dataclasses.dataclass(frozen=True)
class TrainingGraph:
    """What the passes know of a training graph.

    Attributes:
        graph: The `Graph`, flat: calls are inlined, loops are made of Enter, Merge, Switch, NextIteration and Exit.
        facts: What it says about its step.
        markers: Where it synchronises gradients; in the order in which the program made them, as far as that is known.
        matches: What was found out about each gradient, by site.
        digest: A function that returns a text for tensors that are equal on all ranks.
        sites: What planning has to know of the gradients, in the order of the markers.
        exchanges: What else ranks exchange.
        operations: Additions and multiplications of the step; None if that is unknown.
        plan: How each gradient is to travel.
        rewritten: The GraphDef in which it does.
    """

    graph: Graph
    facts: StepFacts = StepFacts()
    markers: tuple[Marker, ...] = ()
    matches: Mapping[str, GradientMatch] = dataclasses.field(default_factory=dict)
    digest: Callable[[Iterable[str]], str] | None = None
    sites: tuple[planning.Site, ...] = ()
    exchanges: tuple[planning.Exchange, ...] = ()
    operations: float | None = None
    plan: planning.Plan | None = None
    rewritten: graph_pb2.GraphDef | None = None


class ConditionError(GraphError):
    """A pass was given, or has made, what it promises not to: a mistake of ours."""


class PreconditionError(ConditionError):
    """A pass was given a graph that it cannot work on."""


class PostconditionError(ConditionError):
    """A pass has not made what it promises."""


class Pass(abc.ABC):
    """A pass. Its conditions are part of running it."""

    def __call__(self, known: TrainingGraph) -> TrainingGraph:
        """Runs the pass between its conditions.

        Raises:
            ConditionError: If one of them does not hold.
            PoseidonError: If the graph is refused.
        """
        self._check(PreconditionError, self.requires(known))
        result = self.call(known)
        self._check(PostconditionError, self.ensures(known, result))
        return result

    @abc.abstractmethod
    def call(self, known: TrainingGraph) -> TrainingGraph:
        """Returns the training graph of which more is known."""

    def requires(self, known: TrainingGraph) -> str:
        """Returns what is missing for this pass, a sentence without its end; "" if nothing is."""
        del known
        return ""

    def ensures(self, known: TrainingGraph, result: TrainingGraph) -> str:
        """Returns what is wrong with a result, a sentence without its end; "" if nothing is."""
        del known, result
        return ""

    def _check(self, kind: type[ConditionError], problem: str) -> None:
        if problem:
            raise kind(f"{type(self).__name__}: {problem}.")


def run(passes: Iterable[Pass], known: TrainingGraph) -> TrainingGraph:
    """Runs passes one after the other."""
    for each in passes:
        known = each(known)
    return known
