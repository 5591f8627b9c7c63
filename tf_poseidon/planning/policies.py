"""The policies: what chooses a scheme for each site."""

import dataclasses
import fnmatch

from tf_poseidon.errors import PoseidonError
from tf_poseidon.planning import cost as cost_lib
from tf_poseidon.planning import merging
from tf_poseidon.planning import timeline
from tf_poseidon.planning.plan import Decision
from tf_poseidon.planning.plan import Plan

SCHEMES = ("ps", "sfb", "sparse")


def _ps(site, costs, cluster):
    del site, costs, cluster
    return "ps", "the policy is 'ps'"


def _sfb(site, costs, cluster):
    if "sparse" in costs:
        return _sparse(site, costs, cluster)
    return "sfb", "the policy is 'sfb', and the gradient is a product of factors"


def _paper(site, costs, cluster):
    """Algorithm 1 of H. Zhang et al., USENIX ATC 2017, section 3.2, to the letter.

    SFB if 2 K (P1 - 1)(M + N) <= 2 MN (P1 + P2 - 2) / P2, else PS. It counts numbers, and so takes
    those of factors and gradient to be equally long. K, P1 and P2 are those of nodes, see cost.py.
    """
    if "sparse" in costs:
        return _sparse(site, costs, cluster)
    m, n = site.factors.m, site.factors.n
    sfb = cost_lib.broadcast_bytes(site.factors.k * (m + n), cluster)
    ps = cost_lib.dense_bytes(m * n, cluster)
    k = site.factors.k * cluster.ranks_per_node
    relation = "at most" if sfb <= ps else "more than"
    return ("sfb" if sfb <= ps else "ps",
            f"2K(P1-1)(M+N) = {sfb:,.0f} is {relation} 2MN(P1+P2-2)/P2 = {ps:,.0f} for K={k}, "
            f"M={m}, N={n}")


def _sparse(site, costs, cluster):
    """Compares bytes, as Algorithm 1 does: all slices to all, or the dense gradient."""
    sparse = costs["sparse"].num_bytes
    ps = cost_lib.dense_bytes(site.num_bytes, cluster)
    relation = "at most" if sparse <= ps else "more than"
    return ("sparse" if sparse <= ps else "ps",
            f"{site.slices.k * cluster.ranks_per_node} slices to {cluster.nodes - 1} others are "
            f"{sparse:,.0f} bytes, {relation} the {ps:,.0f} of the dense gradient")


def _auto(site, costs, cluster):
    """Compares seconds, rebuilding included."""
    del site, cluster
    ps = costs["ps"]
    scheme, cost = next((s, c) for s, c in costs.items() if s != "ps")
    what = {"sfb": "as factors", "sparse": "as slices"}[scheme]
    rebuild = f", of which {_ms(cost.rebuild)} ms to rebuild it" if cost.rebuild else ""
    return ("ps" if ps.seconds < cost.seconds else scheme,
            f"{_ms(ps.seconds)} ms dense, {_ms(cost.seconds)} ms {what}{rebuild}")


def _ms(seconds):
    return f"{seconds * 1e3:.3g}"


POLICIES = {"auto": _auto, "ps": _ps, "sfb": _sfb, "paper": _paper}


def make_plan(sites, policy, cluster, pins=(), operations=None, merge=False, exchanges=()):
    """Plans how the sites of one training graph are synchronised.

    Args:
        sites: The `Site`s.
        policy: "auto" (whatever takes least time), "ps" (always the parameter server), "sfb" (factors
            wherever it is possible) or "paper" (Algorithm 1: whatever sends fewer numbers). "sfb" and
            "paper" let gradients that are slices travel as those where that is fewer bytes.
        cluster: The `Cluster` to plan for.
        pins: (pattern, scheme) pairs; the first pattern that fits the path of a variable decides it,
            as far as that is possible. Patterns are those of file names: "*", "?" and "[...]".
        operations: Additions and multiplications of the step, None if that is unknown.
        merge: Whether small messages wait for each other, see merging.py.
        exchanges: The other `Exchange`s of the graph.

    Returns:
        A `Plan`.

    Raises:
        PoseidonError: If there is no such policy or scheme.
    """
    if not isinstance(policy, str) or policy not in POLICIES:
        raise PoseidonError(f"policy={policy!r}, expected one of {', '.join(POLICIES)}.")
    for pattern, scheme in pins:
        if scheme not in SCHEMES:
            raise PoseidonError(f"The pin of '{pattern}' is {scheme!r}, expected one of "
                                f"{', '.join(SCHEMES)}.")
    decisions = _decisions(sites, policy, cluster, pins)
    if policy == "auto" and cluster.accelerators and operations:
        decisions = _with_overlap(decisions, sites, cluster, pins, operations, exchanges)
    exchanges = [dataclasses.replace(exchange, pin=_pin(exchange.site, pins)) for exchange in exchanges]
    if merge:
        decisions, exchanges = merging.with_groups(decisions, sites, exchanges, cluster)
    return Plan(policy, cluster, tuple(sites), tuple(decisions), operations, exchanges=tuple(exchanges))


def _decisions(sites, policy, cluster, pins, changed=frozenset()):
    """Returns the `Decision`s for some sites; those in `changed` travel otherwise than the policy says."""
    by_name = {site.name: _decide(site, policy, cluster, pins, site.name in changed) for site in sites
               if site.bias_of is None}
    decisions = []
    for site in sites:
        decision = by_name.get(site.name)
        pin = _pin(site.name, pins)
        if decision is None and by_name[site.bias_of].scheme == "sfb" and pin in (None, "sfb"):
            decision = Decision(site.name, "sfb", cost_lib.Cost(0),
                                f"the sum of the rows of a factor of '{site.bias_of}'",
                                rides_on=site.bias_of)
        decisions.append(decision or _decide(site, policy, cluster, pins))
    return decisions


def _with_overlap(decisions, sites, cluster, pins, operations, exchanges):
    """Returns the decisions, changed one by one while that makes the step shorter; as they are if not by 5 %.

    By itself a gradient may take less time as factors. But its bytes are hidden by backpropagation where
    links are fast, and the arithmetic of rebuilding it never is; or a link that is busy anyway makes bytes
    dearer than they are alone. What is expected is not sure to 5 %, and factors leave more of the links to
    others.
    """
    def seconds(decisions):
        sent = timeline.messages(decisions, sites, exchanges, cluster)
        return timeline.step_seconds(sent, cluster, operations)[0]

    by_themselves, changed = decisions, set()
    best = at_first = seconds(decisions)
    dearest_first = sorted((d for d, site in zip(decisions, sites, strict=True)
                            if d.runner_up and not d.rides_on and _pin(site.name, pins) is None),
                           key=lambda d: -max(d.cost.rebuild, d.runner_up_cost.rebuild))
    for decision in dearest_first:
        tried = _decisions(sites, "auto", cluster, pins, {*changed, decision.site})
        if (shorter := seconds(tried)) < best:
            best, decisions = shorter, tried
            changed.add(decision.site)
    return decisions if best < 0.95 * at_first else by_themselves


def _pin(name, pins):
    """Returns the scheme that a site, or an exchange, is pinned to, or None."""
    names = {name, name.partition("#")[0], name.removeprefix("rows/")}  # its own, and those of its variable
    return next((scheme for pattern, scheme in pins
                 if pattern in names or any(fnmatch.fnmatchcase(n, pattern) for n in names)), None)


def _decide(site, policy, cluster, pins, is_changed=False):
    costs = {"ps": cost_lib.dense(site, cluster)}
    parts, why_dense = site.factors or site.slices, site.refusal
    if parts is not None and parts.k is None:
        why_dense = "the number of rows is not known before the step; end the dataset with .batch(n)"
    elif site.factors is not None:
        costs["sfb"] = cost_lib.factors(site, cluster)
    elif site.slices is not None:
        costs["sparse"] = cost_lib.slices(site, cluster)
    pin = _pin(site.name, pins)
    if pin is not None:
        is_possible = pin in costs
        scheme = pin if is_possible else "ps"
        why_not = why_dense or ("its gradient is slices" if site.slices else "it is not slices")
        reason = f"pinned to '{pin}'" + ("" if is_possible else f", which it cannot: {why_not}")
    elif len(costs) == 1:
        scheme, reason = "ps", why_dense
    else:
        scheme, reason = POLICIES[policy](site, costs, cluster)
        if is_changed:
            scheme, = set(costs) - {scheme}
            reason += f"; by '{scheme}' the whole step is shorter"
    others = [(name, cost) for name, cost in costs.items() if name != scheme]
    runner_up, runner_up_cost = others[0] if others else (None, None)
    return Decision(site.name, scheme, costs[scheme], reason, runner_up=runner_up,
                    runner_up_cost=runner_up_cost)
