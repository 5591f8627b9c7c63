"""What other policies and other circumstances would make of a plan: its sites are planned again, and nothing is traced.

So it takes no time to ask. What another trace would find out is derived from this one, as `changes` says.

Tests: tests/unit/test_advice.py.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import dataclasses
import functools
import math

from tf_poseidon import planning
from tf_poseidon.errors import ConfigurationError
from tf_poseidon.planning import cost as cost_lib
from tf_poseidon.planning.exchange import Exchange

# What others do, rings over dense gradients. No policy of ours.
ALL_REDUCE = "all-reduce"

_STEPS = 5  # that could overlap
_FASTER = 10  # links
_HALF = "bfloat16"
_SHOWN_ACCELERATORS = "v100", "a100"


@dataclasses.dataclass(frozen=True)
class Prospect:
    """What would come of a policy, or of a change.

    Attributes:
        name: Of the policy, or what is changed.
        step_seconds: Expected time of a step; None if the step's arithmetic is unknown.
        speed_up: How many times as fast as one process with the rows of all ranks; None if unknown.
        num_bytes: Payload that a node sends plus receives in a step; None if unknown.
        gain: How many times as many rows a second as the plan that there is; None if unknown.
    """

    name: str
    step_seconds: float | None
    speed_up: float | None
    num_bytes: float | None
    gain: float | None


def prospect(name: str, plan: planning.Plan, now: planning.Plan, rows: float = 1.0) -> Prospect:
    """Returns the `Prospect` of a plan.

    Args:
        name: Of the prospect.
        plan: The plan.
        now: The plan that there is.
        rows: How many times as many rows a step has, of all ranks.
    """
    step, alone = plan.step_seconds, plan.compute_seconds
    if step is None or alone is None or now.step_seconds is None:
        return Prospect(name, None, None, plan.total_bytes, None)
    return Prospect(name, step, plan.cluster.workers * alone / step, plan.total_bytes, rows * now.step_seconds / step)


def policies(now: planning.Plan, whole: planning.Plan, planner: planning.Planner) -> list[Prospect]:
    """Returns what each policy would make of a step, and rings.

    Args:
        now: The plan that there is.
        whole: The plan in which only those weights are divided that are pinned; only the policy "auto" divides others.
        planner: What has made the plan that there is.
    """
    plans = {policy: shortest((now, whole) if policy == planner.policy else (whole,),
                               dataclasses.replace(planner, policy=policy)) for policy in planning.POLICIES}
    of_policies = [prospect(policy, plan, now) for policy, plan in plans.items()]
    return [of_policies[0], prospect(ALL_REDUCE, all_reduced(whole), now), *of_policies[1:]]


def shortest(plans: Iterable[planning.Plan], planner: planning.Planner) -> planning.Plan:
    """Returns the shortest of what a planner makes of the graphs of some plans."""
    made = []
    for plan in plans:
        of_graph = planner.plan(plan.sites, plan.operations, plan.exchanges, plan.steps)
        made.append(dataclasses.replace(plan, policy=of_graph.policy, cluster=of_graph.cluster,
                                        decisions=of_graph.decisions, exchanges=of_graph.exchanges))
    return min(made, key=lambda plan: math.inf if plan.step_seconds is None else plan.step_seconds)


def all_reduced(plan: planning.Plan) -> planning.Plan:
    """Returns a plan in which a ring of the nodes adds up each dense gradient when it is ready, and gathers slices.

    At the full rate of the links, and without merging: so it is what others aim at, not what they reach.
    """
    decisions = []
    for site in plan.sites:
        scheme, cost = planning.PS, None
        if site.slices is not None and site.slices.k is not None:
            scheme = planning.SPARSE
            cost = cost_lib.Traffic(cost_lib.GATHER, site.slices.num_bytes, takes_links=True).cost(plan.cluster)
        elif site.num_bytes is not None:
            cost = cost_lib.ring(site.num_bytes, plan.cluster)
        decisions.append(planning.Decision(site.name, scheme, cost, "all ranks form a ring"))
    return dataclasses.replace(plan, policy=ALL_REDUCE, decisions=tuple(decisions))


def changes(now: planning.Plan, whole: planning.Plan, planner: planning.Planner, batch_size: int,
            may_overlap: bool = False) -> list[Prospect]:
    """Returns what changes of a job would gain.

    Of more rows, arithmetic, factors, slices and the rows that ops need whole grow in proportion. Of mixed precision,
    only bytes are counted. In steps that overlap, half as much of the forward pass comes before a layer as
    comes of backpropagation behind its gradient.

    Args:
        now, whole, planner: Same as in `policies`.
        batch_size: Rows on each worker.
        may_overlap: Whether steps would overlap in one execution.
    """
    if now.step_seconds is None:
        return []
    plans = (now, whole) if whole is not now else (now,)

    def changed(name: str, change: Callable[[planning.Plan], planning.Plan] = lambda plan: plan, rows: int = 1,
                cluster: planning.Cluster = planner.cluster, policy: str = planner.policy) -> Prospect:
        made = shortest(map(change, plans), dataclasses.replace(planner, cluster=cluster, policy=policy))
        return prospect(name, made, now, rows)

    found = [changed("policy 'auto'", policy="auto")] if planner.policy != "auto" else []
    for factor in (2, 4):
        found.append(changed(f"batches of {factor * batch_size} rows on each worker",
                             functools.partial(_with_rows, factor=factor), factor))
    if (fewer := _halved(planner.cluster)) is not None and not now.row_shares:
        found.append(changed(f"{fewer.workers} workers with {2 * batch_size} rows each",
                             functools.partial(_with_rows, factor=2), cluster=fewer))
    gbps = _FASTER * planner.cluster.bandwidth_gbps
    found.append(changed(f"links of {gbps:g} Gbit/s",
                         cluster=dataclasses.replace(planner.cluster, bandwidth_gbps=gbps)))
    if may_overlap and now.steps == 1:
        found.append(changed(f"compile(steps_per_execution={_STEPS})", _overlapping))
    for name, of_site in ((f"mixed_{_HALF} (bytes alone)", _mixed), (f'wire_dtype="{_HALF}"', _short)):
        if any(of_site(site) != site for site in now.sites):
            found.append(changed(name, functools.partial(_with_sites, of_site=of_site)))
    return found


def accelerated(now: planning.Plan, whole: planning.Plan, planner: planning.Planner) -> list[Prospect]:
    """Returns what a step would be on some accelerators; arguments as in `policies`."""
    plans = (now, whole) if whole is not now else (now,)
    found = []
    for name in _SHOWN_ACCELERATORS:
        cluster = dataclasses.replace(planner.cluster, gflops=planning.ACCELERATORS[name]["gflops"], accelerators=True)
        found.append(prospect(name, shortest(plans, dataclasses.replace(planner, cluster=cluster)), now))
    return found


def _with_rows(plan: planning.Plan, factor: int) -> planning.Plan:
    """Returns the plan of a graph with so many times as many rows; its decisions stay as they are."""
    def grown(site: planning.Site) -> planning.Site:
        factors, slices = site.factors, site.slices
        if factors is not None and factors.k is not None:
            factors = dataclasses.replace(factors, k=factor * factors.k)
        if slices is not None and slices.k is not None:
            slices = dataclasses.replace(slices, k=factor * slices.k)
        return dataclasses.replace(site, factors=factors, slices=slices, operations=factor * site.operations,
                                   needed=None if site.needed is None else factor * site.needed)

    def grown_exchange(exchange: Exchange) -> Exchange:
        shape = exchange.shape
        if shape and exchange.site.startswith("rows/"):
            shape = (factor * shape[0], *shape[1:])
        return dataclasses.replace(exchange, shape=shape, operations=factor * exchange.operations)

    return dataclasses.replace(
        plan, sites=tuple(map(grown, plan.sites)), exchanges=tuple(map(grown_exchange, plan.exchanges)),
        operations=None if plan.operations is None else factor * plan.operations)


def _halved(cluster: planning.Cluster) -> planning.Cluster | None:
    """Returns a cluster with half of the workers; None if there is none."""
    if cluster.workers % 2:
        return None
    workers = cluster.workers // 2
    gpus = workers if cluster.gpus_per_node == cluster.workers else cluster.gpus_per_node
    try:
        return dataclasses.replace(
            cluster, workers=workers, servers=min(cluster.servers, workers + cluster.dedicated_servers),
            gpus_per_node=gpus, gpu_link_gbps=cluster.gpu_link_gbps if gpus > 1 else 0.0)
    except ConfigurationError:  # the ranks of a node are more than there are left
        return None


def _overlapping(plan: planning.Plan) -> planning.Plan:
    """Returns the plan of a graph of several steps."""
    operations = plan.operations or 0.0
    last = max((site.operations for site in plan.sites), default=0.0)
    return dataclasses.replace(plan, steps=_STEPS, sites=tuple(dataclasses.replace(
        site, needed=0.0 if site.operations == last else (operations - site.operations) / 2) for site in plan.sites))


def _with_sites(plan: planning.Plan, of_site: Callable[[planning.Site], planning.Site]) -> planning.Plan:
    return dataclasses.replace(plan, sites=tuple(map(of_site, plan.sites)))


def _mixed(site: planning.Site) -> planning.Site:
    """Returns a site of a model in mixed precision, whose factors have half of the bytes, and gradients are cast."""
    if site.dtype != "float32" or site.itemsize < 4 or site.cast_from:
        return site
    return dataclasses.replace(site, factors=_shorter(site.factors), cast_from=None if site.slices else _HALF)


def _short(site: planning.Site) -> planning.Site:
    """Returns a site that is rounded for the wire; slices are not."""
    return dataclasses.replace(site, itemsize=min(site.itemsize, 2), factors=_shorter(site.factors), cast_from=None)


def _shorter(factors: planning.Factors | None) -> planning.Factors | None:
    return None if factors is None else dataclasses.replace(factors, itemsize=min(factors.itemsize, 2))


def worthwhile(found: Iterable[Prospect], least_gain: float) -> Iterator[Prospect]:
    """Returns those that gain more than a share, in their order."""
    return (each for each in found if each.gain is not None and each.gain > 1 + least_gain)
