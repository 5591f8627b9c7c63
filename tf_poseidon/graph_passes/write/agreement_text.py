"""The agreement text of a planned graph: ranks follow a plan only if this text is the same on all of them.

Tests: tests/engines/test_drop_in.py, tests/engines/test_horovod.py.
"""

import collections

from tf_poseidon import planning
from tf_poseidon.graph_passes import passes
from tf_poseidon.graph_passes.find import foreign
from tf_poseidon.graph_passes.match.matches import Match
from tf_poseidon.graph_passes.write import site_writer


def of_plan(training: passes.TrainingGraph) -> str:
    """Returns the text that must be the same on all ranks to follow the plan of a graph: a line per site."""
    plan, riders = training.plan, collections.defaultdict(list)
    assert plan is not None
    for decision in plan.decisions:
        if decision.leader:
            riders[decision.leader].append(decision.site)
    lines = [plan.agreement_text()]
    rows_of = {site.name: site.factors and site.factors.k for site in plan.sites}
    for decision in sorted(plan.decisions, key=lambda d: d.site):
        if decision.scheme == planning.SFB and not decision.leader:
            match = training.matches[decision.site]
            assert isinstance(match, Match) and training.digest is not None
            form = site_writer.form_of(match, riders[decision.site], training.digest)
            rows = rows_of[decision.site] if _fixes_rows(training) else "any"
            lines.append(f"'{decision.site}' {rows} rows, {form}")
    return "\n".join(lines)


def has_room(training: passes.TrainingGraph, plan: planning.Plan) -> bool:
    """Whether a plan that was made for other batches has room for the rows of a graph."""
    if not _fixes_rows(training):
        return True
    rows = {site.name: site.factors.k for site in training.sites if site.factors}
    for site, decision in zip(plan.sites, plan.decisions):
        if decision.scheme == planning.SFB and not decision.leader:
            assert site.factors is not None
            k = rows.get(site.name)
            if k is not None and k > site.factors.rows:
                return False
    return True


def lines_of_gradients(training: passes.TrainingGraph) -> list[str]:
    """Returns a line per gradient of a graph, in alphabetical order; it does not depend on the batch size."""
    lines = []
    for site, marker in zip(training.sites, training.markers, strict=True):
        node = training.graph.nodes[marker.node]
        attributes = [f"{key}={node.attr[key].SerializeToString().hex()}" for key in sorted(node.attr)
                      if not key.startswith("_")]
        # What the site could be under any scheme.
        kinds = site.fingerprint(), [scheme.common(site, None) for scheme in planning.SCHEMES.values()], site.bias_of
        lines.append(f"'{site.name}' {node.op} {' '.join(attributes)} {kinds}")
    return sorted(lines)


def _fixes_rows(training: passes.TrainingGraph) -> bool:
    """Whether factors must have the same number of rows on all ranks, as TensorFlow's collectives require."""
    return any(training.graph.nodes[marker.node].op in foreign.TENSORFLOW for marker in training.markers)
