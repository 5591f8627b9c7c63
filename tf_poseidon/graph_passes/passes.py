"""Passes: steps from one description of a training graph to the next, with conditions that are checked.

A pass never changes its argument: a `TrainingGraph` is frozen, and each pass returns a new one that knows more.

Tests: tests/graphs/test_passes.py.
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
from tf_poseidon.graph_passes.find.training_step import StepFacts
from tf_poseidon.graph_passes.graph.indexed_graph import Graph
from tf_poseidon.graph_passes.match.matches import GradientMatch
from tf_poseidon.graph_passes.match.matches import NarrowGradient


@dataclasses.dataclass(frozen=True)
class TrainingGraph:
    """What the passes know of a training graph.

    Attributes:
        graph: The `Graph`, flat: calls are inlined, loops consist of Enter, Merge, Switch, NextIteration and Exit.
        facts: What the graph says about its step.
        markers: Where it synchronises gradients, in the order of the program as far as that is known.
        matches: The match of each gradient, by site.
        narrow: The `NarrowGradient`s of those that the engine can sum, by site.
        digest: A function that returns a digest of tensors that are equal on all ranks.
        sites: What the planner must know about the gradients, in the order of the markers.
        exchanges: What ranks exchange besides gradients.
        operations: Additions and multiplications of all steps; None if unknown.
        priorities: By site: gradients with smaller numbers overtake it on their way. Empty if all are alike.
        plan: How each gradient will travel; that of one step, which all steps follow.
        rewritten: The GraphDef that follows the plan.
    """

    graph: Graph
    facts: StepFacts = StepFacts()
    markers: tuple[Marker, ...] = ()
    matches: Mapping[str, GradientMatch] = dataclasses.field(default_factory=dict)
    narrow: Mapping[str, NarrowGradient] = dataclasses.field(default_factory=dict)
    digest: Callable[[Iterable[str]], str] | None = None
    sites: tuple[planning.Site, ...] = ()
    exchanges: tuple[planning.Exchange, ...] = ()
    operations: float | None = None
    priorities: Mapping[str, int] = dataclasses.field(default_factory=dict)
    plan: planning.Plan | None = None
    rewritten: graph_pb2.GraphDef | None = None

    def one_step(self) -> "TrainingGraph":
        """Returns what is known of one step alone, as far as planners use it.

        A site is that of the first step that has it: the last step alone has those that only its results need.
        """
        steps = self.facts.steps
        if steps.number == 1:
            return self
        total = (self.operations or 0) / steps.number

        def first(names: Iterable[str]) -> dict[str, int]:
            first_steps: dict[str, int] = {}
            for name in sorted(names, key=steps.step_of):
                first_steps.setdefault(steps.in_first(name), steps.step_of(name))
            return first_steps

        sites, exchanges = first(site.name for site in self.sites), first(exchange.site for exchange in self.exchanges)
        return dataclasses.replace(
            self, operations=None if self.operations is None else total,
            sites=tuple(dataclasses.replace(
                site, name=name, bias_of=site.bias_of and steps.in_first(site.bias_of),
                operations=max(0.0, site.operations - step * total))
                for site in self.sites for name, step in [(steps.in_first(site.name), steps.step_of(site.name))]
                if sites[name] == step),
            exchanges=tuple(dataclasses.replace(exchange, site=name,
                                                operations=max(0.0, exchange.operations - step * total))
                            for exchange in self.exchanges
                            for name, step in [(steps.in_first(exchange.site), steps.step_of(exchange.site))]
                            if exchanges[name] == step))


class ConditionError(GraphError):
    """A pass has violated its contract, on its input or its output: an internal error."""


class PreconditionError(ConditionError):
    """The input of a pass violates the contract."""


class PostconditionError(ConditionError):
    """The output of a pass violates the contract."""


class Pass(abc.ABC):
    """A pass, which checks its conditions whenever it runs."""

    def __call__(self, training: TrainingGraph) -> TrainingGraph:
        """Checks the precondition, runs the pass and checks the postcondition.

        Raises:
            ConditionError: If one of them does not hold.
            PoseidonError: If the graph is refused.
        """
        self._check(PreconditionError, self.requires(training))
        result = self.call(training)
        self._check(PostconditionError, self.ensures(training, result))
        return result

    @abc.abstractmethod
    def call(self, training: TrainingGraph) -> TrainingGraph:
        """Returns a training graph that knows more."""

    def requires(self, training: TrainingGraph) -> str:
        """Returns what this pass lacks, a sentence without its full stop; "" if nothing."""
        del training
        return ""

    def ensures(self, training: TrainingGraph, result: TrainingGraph) -> str:
        """Returns what is wrong with a result, a sentence without its full stop; "" if nothing."""
        del training, result
        return ""

    def _check(self, kind: type[ConditionError], problem: str) -> None:
        if problem:
            raise kind(f"{type(self).__name__}: {problem}.")


def run(passes: Iterable[Pass], training: TrainingGraph) -> TrainingGraph:
    """Runs passes one after the other."""
    for graph_pass in passes:
        training = graph_pass(training)
    return training
