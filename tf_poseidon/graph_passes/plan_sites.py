"""Decides how each gradient travels.

Requires: sites. Ensures: a plan with a decision for each site of a step, which the planner has made or was given.

Tests: tests/graphs/test_passes.py, tests/graphs/test_priorities.py, tests/engines/test_drop_in.py.
"""

import dataclasses

from tf_poseidon import planning
from tf_poseidon.graph_passes import passes


class MakePlan(passes.Pass):
    """Asks the planner."""

    def __init__(self, planner: planning.Planner) -> None:
        self._planner = planner

    def requires(self, training: passes.TrainingGraph) -> str:
        return "" if len(training.sites) == len(training.markers) else "not every marker has a site"

    def call(self, training: passes.TrainingGraph) -> passes.TrainingGraph:
        step = training.one_step()
        return dataclasses.replace(training, plan=self._planner.plan(
            step.sites, step.operations, step.exchanges, training.facts.steps.number))

    def ensures(self, training: passes.TrainingGraph, result: passes.TrainingGraph) -> str:
        assert result.plan is not None
        decided = {decision.site for decision in result.plan.decisions}
        missing = {site.name for site in training.one_step().sites} - decided
        return f"the plan decides nothing about '{min(missing)}'" if missing else ""


@dataclasses.dataclass(frozen=True)
class TakePlan(passes.Pass):
    """Reuses a plan on which ranks have agreed for a graph like this one.

    Attributes:
        plan: The plan.
        cluster: The `Cluster` of the job.
    """

    plan: planning.Plan
    cluster: planning.Cluster

    def call(self, training: passes.TrainingGraph) -> passes.TrainingGraph:
        self.plan.check(training.one_step().sites, self.cluster)
        return dataclasses.replace(training, plan=self.plan)


def of_all_steps(training: passes.TrainingGraph) -> planning.Plan:
    """Returns the plan of all steps of a planned graph; each follows the plan of one."""
    plan, steps = training.plan, training.facts.steps
    assert plan is not None
    if steps.number == 1:
        return plan
    names = {site.name for site in plan.sites} | {exchange.site for exchange in plan.exchanges}
    names |= {group for group in (*(decision.group for decision in plan.decisions),
                                  *(exchange.group for exchange in plan.exchanges)) if group}
    each_step = [plan.renamed({name: steps.site_in(step, name) for name in names}) for step in range(steps.number)]
    present = {marker.site for marker in training.markers} | {exchange.site for exchange in training.exchanges}
    return dataclasses.replace(
        plan, sites=tuple(site for step in each_step for site in step.sites if site.name in present),
        decisions=tuple(decision for step in each_step for decision in step.decisions if decision.site in present),
        exchanges=tuple(exchange for step in each_step for exchange in step.exchanges if exchange.site in present))
