"""Partitions one graph as often as it takes to know which of its variables are divided, and how.

Whether a variable can hold a shard is found by partitioning the graph as if it did; whether it should, by the times of
plans for graphs in which it does and does not.

Tests: tests/graphs/test_partition_functions.py, tests/training/test_sharded_update.py.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import NamedTuple

from tensorflow.core.framework import graph_pb2

from tf_poseidon import grappler
from tf_poseidon import planning
from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.partition import partitioner
from tf_poseidon.graph_passes.partition.states import Division
from tf_poseidon.graph_passes.partition.updates import awaited_reads
from tf_poseidon.graph_passes.partition.updates import early_updates
from tf_poseidon.graph_passes.partition.updates import last_readers
from tf_poseidon.one_process.partition_options import PartitionOptions
from tf_poseidon.one_process.sharding.master_weights import Copies

_SHORTER = 1.005  # by how much, at least: plans are no more exact
_MOST_TRIED = 4  # weights: each takes as long as to partition the graph a few times


class Attempt(NamedTuple):
    """A partitioned graph.

    Attributes:
        known: What is known about its variables.
        graph: The `PartitionedGraph`.
    """

    known: partitioner.KnownVariables
    graph: partitioner.PartitionedGraph


class Attempts:
    """Partitions a flat GraphDef with the outputs of a function."""

    def __init__(self, graph_def: graph_pb2.GraphDef, outputs: Sequence[str], copies: Copies,
                 may_be_shards: Mapping[str, str], keeps_rows: bool, options: PartitionOptions) -> None:
        """Makes none yet.

        Args:
            graph_def: The GraphDef.
            outputs: The names of the outputs.
            copies: The working copies that it may use.
            may_be_shards: The layouts of variables that may hold shards, by name of their resource.
            keeps_rows: Whether the rows of outputs stay with their ranks.
            options: The `PartitionOptions`.
        """
        self._graph_def, self._outputs, self._copies = graph_def, outputs, copies
        self._may_be_shards, self._keeps_rows, self._options = may_be_shards, keeps_rows, options

    def settled(self, known: partitioner.KnownVariables) -> Attempt:
        """Returns an attempt in which all candidates hold shards that can, and should if their gradient is a sum."""
        while True:
            graph, early = self._partitioned(known)
            as_factors = self._shorter_as_factors(graph)
            of_matrices = {layout: division for layout, division in as_factors.items()
                           if division is not None and layout not in known.shards.values()}
            whole = as_factors.keys() - of_matrices.keys()
            if holding := sorted(early & known.shards.keys()):
                raise GraphError(f"It may update '{known.paths[holding[0]]}', of which each rank holds a shard, before "
                                 "other ranks have begun the step.")
            left = {name: layout for name, layout in known.shard_candidates.items()
                    if graph.shards.get(name, layout) not in whole and name not in early
                    and (name not in self._copies.candidates or name in graph.shards)}
            if len(left) == len(known.shard_candidates) and not of_matrices:
                return Attempt(known, graph)
            known = dataclasses.replace(known, shard_candidates=left, divisions={**known.divisions, **of_matrices})

    def divided(self, attempt: Attempt, weights: Mapping[str, Division],
                all_weights: Mapping[str, Division]) -> Attempt:
        """Returns an attempt in which more weights are divided that can be, and what belongs to their columns.

        Args:
            attempt: Another one.
            weights: The divisions of the weights, by name of their resource.
            all_weights: The same of all weights that may be divided.
        """
        if not weights:
            return attempt
        attempt = self.settled(self._with_divided(attempt.known, weights))
        following = {name: all_weights[name] for name in attempt.graph.followers & all_weights.keys()}
        return self.settled(self._with_divided(attempt.known, following)) if following else attempt

    def divided_if_shorter(self, attempt: Attempt, weights: Mapping[str, Division],
                           all_weights: Mapping[str, Division]) -> Attempt:
        """Returns an attempt in which weights are divided by which the step is planned to be shorter.

        One after the other, those first whose gradient takes longest; arguments as in `divided`.
        """
        plan = self._plan(attempt.graph) if weights else None
        if plan is None or plan.step_seconds is None:
            return attempt
        seconds, saved = plan.step_seconds, self._most_saved(plan)
        promising = sorted((-saved[division.layout], name) for name, division in weights.items()
                           if saved.get(division.layout, 0) > 0 and name not in attempt.graph.shards)
        for _, name in promising[:_MOST_TRIED]:
            for division in (weights[name], weights[name].along(1 - weights[name].divided)):
                other = self.divided(attempt, {name: division}, all_weights)
                other_plan = self._plan(other.graph) if name in other.graph.shards else None
                if other_plan is not None and other_plan.step_seconds is not None and (
                        _SHORTER * other_plan.step_seconds < seconds):
                    attempt, seconds = other, other_plan.step_seconds
                    break
        return attempt

    def whole_if_shorter(self, attempt: Attempt) -> Attempt:
        """Returns an attempt in which only what must be, and weights with their slots, is divided, if that is shorter.

        That is, if the step is planned to be.
        """
        candidates = attempt.known.shard_candidates
        in_columns = {name: layout for name, layout in candidates.items() if layout in attempt.known.divided}
        if not attempt.graph.shards.keys() - attempt.known.shards.keys() - in_columns.keys():
            return attempt
        known = dataclasses.replace(attempt.known, shard_candidates=in_columns)
        graph, early = self._partitioned(known)
        plans = [self._plan(each) for each in (graph, attempt.graph)]
        times = [None if plan is None else plan.step_seconds for plan in plans]
        is_shorter = times[0] is not None and times[1] is not None and _SHORTER * times[0] < times[1]
        return Attempt(known, graph) if is_shorter and not early else attempt

    def _partitioned(self, known: partitioner.KnownVariables) -> tuple[partitioner.PartitionedGraph, set[str]]:
        """Returns the graph, and which shards it may update before other ranks have begun the step."""
        layouts = {**known.shards, **known.shard_candidates}
        masters = [name for name in self._copies.of(layouts) if layouts[name] not in known.divided]
        graph = partitioner.partition(
            self._copies.used_in(masters), self._outputs, grappler.add_shapes, known, rows=self._options.rows,
            runs_whole=True, own=self._outputs if self._keeps_rows else ())
        divided = {name: layout for name, layout in graph.shards.items() if layout in known.divided}
        graph = dataclasses.replace(graph, graph_def=last_readers.waiting(awaited_reads.awaited(
            early_updates.delayed(graph.graph_def, graph.shards), divided), divided))
        return graph, early_updates.find(graph.graph_def, graph.shards)

    def _with_divided(self, known: partitioner.KnownVariables,
                      weights: Mapping[str, Division]) -> partitioner.KnownVariables:
        """Returns what is known if some weights are divided, and their slots with them."""
        divisions = {division.layout: division for division in weights.values()}
        return dataclasses.replace(
            known, divided={*known.divided, *divisions}, divisions={**known.divisions, **divisions},
            shard_candidates={**known.shard_candidates, **{name: division.layout for name, division in weights.items()},
                              **{name: layout for name, layout in self._may_be_shards.items() if layout in divisions}})

    def _shorter_as_factors(self, graph: partitioner.PartitionedGraph) -> dict[str, Division | None]:
        """Returns the layouts of shards whose gradient would not travel as a sum if it were whole, with `Division`s.

        Where servers rebuild columns or rows of it, each should update these. Where every rank rebuilds it, or one
        would have to own the variable, there is none: all ranks update all of it, which is to come from nowhere else.
        """
        if self._options.session is None or self._options.rows is None or not graph.shards:
            return {}
        found = self._options.session.layouts_of_factors(graph.graph_def, self._options.facts, grappler.add_shapes)
        return {layout: division if graph.divisions[layout].owner < 0 else None
                for layout, division in found.items()}

    def _plan(self, graph: partitioner.PartitionedGraph) -> planning.Plan | None:
        """Returns the plan that the policy would make, None without one."""
        if self._options.session is None or self._options.rows is None:
            return None
        return self._options.session.plan_of(graph.graph_def, self._options.facts, grappler.add_shapes)

    def _most_saved(self, plan: planning.Plan) -> dict[str, float]:
        """Returns how many seconds of exchanges a step may save at most, by path of a matrix that would be divided.

        In place of its gradient, rows of its smaller dimension travel: to all ranks, and back.
        """
        seconds = {decision.site: decision.cost.seconds for decision in plan.decisions if decision.cost is not None}
        shapes = {site.name: site.shape for site in plan.sites} | {each.site: each.shape for each in plan.exchanges}
        rows = {site.name: site.factors.k for site in plan.sites if site.factors is not None}
        seconds |= {each.site: cost.seconds for each in plan.exchanges
                    if each.kind == planning.SCATTER and (cost := each.cost(plan.cluster)) is not None}
        saved = {}
        for path, of_gradient in seconds.items():
            shape, own_rows = shapes[path], rows.get(path) or self._options.rows_of_rank
            if shape is not None and len(shape) == 2 and own_rows:
                moved = [planning.Exchange("", kind, "float32", 4, (number, min(shape))).cost(plan.cluster)
                         for kind, number in ((planning.GATHER, own_rows),
                                              (planning.RETURN, own_rows * self._options.size))]
                saved[path] = of_gradient - sum(cost.seconds for cost in moved if cost is not None)
        return saved
