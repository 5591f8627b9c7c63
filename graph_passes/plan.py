"""Decides how each gradient travels.

Requires: sites. Ensures: a plan with a decision for each site, which the planner has made or was given.
"""

import dataclasses

from tf_poseidon import planning
from tf_poseidon.graph_passes import passes


class MakePlan(passes.Pass):
    """Asks the planner."""

    def __init__(self, planner: planning.Planner) -> None:
        self._planner = planner

    def requires(self, known: passes.TrainingGraph) -> str:
        return "" if len(known.sites) == len(known.markers) else "not every marker has a site"

    def call(self, known: passes.TrainingGraph) -> passes.TrainingGraph:
        return dataclasses.replace(known, plan=self._planner.plan(known.sites, known.operations, known.exchanges))

    def ensures(self, known: passes.TrainingGraph, result: passes.TrainingGraph) -> str:
        assert result.plan is not None
        missing = {site.name for site in known.sites} - {decision.site for decision in result.plan.decisions}
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

    def call(self, known: passes.TrainingGraph) -> passes.TrainingGraph:
        self.plan.check(known.sites, self.cluster)
        return dataclasses.replace(known, plan=self.plan)
