"""The policies: the rules that choose the scheme of each site.

A policy is a function of a site, of the cost of each scheme that could carry it, and of the cluster; it returns the
name of a scheme and why. To add one: a function, and a line in `POLICIES`.

Tests: tests/unit/test_planning.py.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import difflib
import fnmatch

from tf_poseidon.errors import ConfigurationError
from tf_poseidon.planning import cost as cost_lib
from tf_poseidon.planning import schemes as schemes_lib
from tf_poseidon.planning import step_time
from tf_poseidon.planning.choice import search
from tf_poseidon.planning.cluster import Cluster
from tf_poseidon.planning.cost import Cost
from tf_poseidon.planning.decision import Decision
from tf_poseidon.planning.exchange import Exchange
from tf_poseidon.planning.partition_facts import COLUMNS
from tf_poseidon.planning.plan import Plan
from tf_poseidon.planning.schemes import HFB
from tf_poseidon.planning.schemes import PS
from tf_poseidon.planning.schemes import SCHEMES
from tf_poseidon.planning.schemes import SFB
from tf_poseidon.planning.schemes import SPARSE
from tf_poseidon.planning.site import Site
from tf_poseidon.reports.texts import duration

Costs = Mapping[str, Cost]
Policy = Callable[[Site, Costs, Cluster], tuple[str, str]]
Pins = Sequence[tuple[str, str]]


def _ps(site: Site, costs: Costs, cluster: Cluster) -> tuple[str, str]:
    """Always the parameter server."""
    del site, costs, cluster
    return PS, "the policy is 'ps'"


def _sfb(site: Site, costs: Costs, cluster: Cluster) -> tuple[str, str]:
    """Factors wherever possible; slices where they have fewer bytes."""
    if SPARSE in costs:
        return _sparse(site, costs, cluster)
    if SFB in costs:
        return SFB, "the policy is 'sfb', and the gradient is a product of factors"
    return PS, _why_dense(site)


def _paper(site: Site, costs: Costs, cluster: Cluster) -> tuple[str, str]:
    """Algorithm 1 of H. Zhang et al., USENIX ATC 2017, section 3.2, to the letter.

    SFB if 2 K (P1 - 1)(M + N) <= 2 MN (P1 + P2 - 2) / P2, else PS. It counts numbers, and so assumes
    the same bytes per number for factors and gradient. K, P1 and P2 are those of nodes, see cost.py.
    """
    if SPARSE in costs:
        return _sparse(site, costs, cluster)
    if SFB not in costs:
        return PS, _why_dense(site)
    factors = site.factors
    assert factors is not None  # else factor broadcasting has no cost
    m, n = factors.m, factors.n
    sfb = cost_lib.gathered_bytes(factors.rows * (m + n), cluster)
    ps = cost_lib.dense_bytes(m * n, cluster)
    k = factors.rows * cluster.ranks_per_node
    relation = "at most" if sfb <= ps else "more than"
    return (SFB if sfb <= ps else PS,
            f"2K(P1-1)(M+N) = {sfb:,.0f} is {relation} 2MN(P1+P2-2)/P2 = {ps:,.0f} for K={k}, "
            f"M={m}, N={n}")


def _sparse(site: Site, costs: Costs, cluster: Cluster) -> tuple[str, str]:
    """Compares bytes, as Algorithm 1 does: all slices to all ranks, or the dense gradient."""
    assert site.slices is not None  # else slice broadcasting has no cost
    sparse, ps = costs[SPARSE].num_bytes, costs[PS].num_bytes
    relation = "at most" if sparse <= ps else "more than"
    return (SPARSE if sparse <= ps else PS,
            f"{site.slices.rows * cluster.ranks_per_node} slices to {cluster.nodes - 1} others are "
            f"{sparse:,.0f} bytes, {relation} the {ps:,.0f} of the dense gradient")


def _auto(site: Site, costs: Costs, cluster: Cluster) -> tuple[str, str]:
    """Compares seconds, including rebuilding; among equals, prefers the scheme with the least work for servers."""
    del site, cluster
    scheme = min(costs, key=lambda name: (costs[name].seconds, name in (PS, HFB), name == HFB))
    texts = []
    for name, cost in costs.items():
        rebuild = f", of which {duration(cost.rebuild)} to rebuild it" if cost.rebuild else ""
        texts.append(f"{duration(cost.seconds)} {SCHEMES[name].manner}{rebuild}")
    return scheme, ", ".join(texts)


# Tests hold for all of them: sites without factors or slices go over the parameter server, and no policy is faster than
# "auto" by auto's own estimate. Only "auto" plans with measured speeds.
POLICIES: dict[str, Policy] = {"auto": _auto, "ps": _ps, "sfb": _sfb, "paper": _paper}


def make_plan(sites: Iterable[Site], policy: str, cluster: Cluster, pins: Pins = (), operations: float | None = None,
              exchanges: Iterable[Exchange] = (), schemes: Iterable[str] | None = None, steps: int = 1) -> Plan:
    """Plans how the sites of one training graph are synchronised.

    Args:
        sites: The `Site`s.
        policy: "auto" (the fastest), "ps" (always the parameter server), "sfb" (factors wherever
            possible) or "paper" (Algorithm 1: whichever sends fewer numbers). "sfb" and "paper" send
            gradients that are slices as slices if these have fewer bytes.
        cluster: The `Cluster` to plan for.
        pins: (pattern, scheme) pairs; the first pattern that matches the path of a variable decides its
            scheme, if possible. Patterns are those of file names: "*", "?" and "[...]".
        operations: Additions and multiplications of the step, None if unknown.
        exchanges: The other `Exchange`s of the graph.
        schemes: Names of the schemes that the engine can carry out; None for all.
        steps: How many steps overlap; sites then say when the next step needs them.

    Returns:
        A `Plan`.

    Raises:
        PoseidonError: If there is no such policy or scheme.
    """
    if not isinstance(policy, str) or policy not in POLICIES:
        raise ConfigurationError(f"policy={policy!r}, expected one of {', '.join(POLICIES)}.")
    for pattern, scheme in pins:
        if scheme not in SCHEMES and scheme != COLUMNS:
            raise ConfigurationError(f"The pin of '{pattern}' is {scheme!r}, expected one of "
                                     f"{', '.join((*SCHEMES, COLUMNS))}.")
    sites, exchanges = tuple(sites), tuple(exchanges)
    chooser = _Chooser(policy, cluster, pins, tuple(SCHEMES if schemes is None else schemes))
    decisions: Sequence[Decision] = chooser.decisions(sites)
    # Of speeds that were measured on processors, it is not known whether these hide exchanges while they compute.
    if policy == "auto" and operations and (cluster.accelerators or not cluster.uncertainty):
        decisions = _of_whole_step(chooser, decisions, sites, operations, exchanges, steps)
    exchanges = tuple(dataclasses.replace(exchange, pin=_unmet_pin(exchange, pins)) for exchange in exchanges)
    return Plan(policy, cluster, sites, tuple(decisions), operations, exchanges=exchanges, steps=steps)


def _of_whole_step(chooser: "_Chooser", decisions: Sequence[Decision], sites: Sequence[Site], operations: float,
                   exchanges: Sequence[Exchange], steps: int) -> Sequence[Decision]:
    """Returns the decisions, changed where that shortens the step, however the uncertain parts of it turn out.

    Alone, a gradient may take less time as factors. But where links are fast, backpropagation hides its bytes,
    and never the arithmetic of rebuilding it; and on a link that is busy anyway, bytes cost more than they do
    alone. So what the other policies choose is tried too. On accelerators, where it is sure that exchanges are hidden,
    the search looks for better ones.
    """
    cluster = chooser.cluster
    free = {d.site: (site, chooser.costs(site)) for d, site in zip(decisions, sites, strict=True)
            if d.runner_up and not d.leader and pinned(site.name, chooser.pins) is None}
    chosen = {decision.site: decision.scheme for decision in decisions if decision.site in free}

    def sent(changed: search.Schemes) -> list[step_time.Message]:
        return step_time.messages(chooser.decisions(sites, changed), sites, exchanges, cluster)

    def seconds(changed: search.Schemes) -> float:
        return step_time.step_seconds(sent(changed), cluster, operations, steps)[0]

    def is_link_busier(changed: search.Schemes) -> bool:
        messages = sent(changed)
        return (sum(message.cost.transfer for message in messages)
                > cluster.compute_seconds(operations) + sum(message.cost.rebuild for message in messages))

    candidates = [search.shortest({name: costs for name, (_, costs) in free.items()}, chosen, seconds, is_link_busier,
                                  len(sites) * steps)] if cluster.accelerators else []
    for policy in (POLICIES[name] for name in POLICIES if name != chooser.policy):
        schemes = {name: policy(site, costs, cluster)[0] for name, (site, costs) in free.items()}
        candidates.append({name: scheme for name, scheme in schemes.items() if scheme != chosen[name]})
    as_chosen: list[float] = []
    for changed in sorted(filter(None, candidates), key=seconds):  # of equals the first
        as_chosen = as_chosen or step_time.uncertain_seconds(sent({}), cluster, operations, steps)
        times = step_time.uncertain_seconds(sent(changed), cluster, operations, steps)
        if all(new < old * _SHORTER for new, old in zip(times, as_chosen, strict=True)):
            return chooser.decisions(sites, changed)
    return decisions


_SHORTER = 1 - 1e-9  # than by rounding


@dataclasses.dataclass(frozen=True)
class _Chooser:
    """Chooses the scheme of each site; the fields are arguments of `make_plan`."""

    policy: str
    cluster: Cluster
    pins: Pins
    schemes: tuple[str, ...]
    _decided: dict[tuple[str, str | None], Decision] = dataclasses.field(default_factory=dict, init=False)

    def decisions(self, sites: Sequence[Site], changed: Mapping[str, str] | None = None) -> list[Decision]:
        """Returns the `Decision`s for sites; {site: scheme} in `changed` overrides the policy."""
        changed = changed or {}
        by_name = {site.name: site for site in sites}
        alone = {site.name: self._decide(site, changed.get(site.name)) for site in sites if site.bias_of is None}
        return [alone[site.name] if site.bias_of is None else
                self._follow(site, by_name[site.bias_of], alone[site.bias_of]) for site in sites]

    def costs(self, site: Site) -> dict[str, Cost]:
        """Returns {name of a scheme: `Cost`} of all schemes by which a site can travel."""
        return schemes_lib.costs_of(site, self.cluster, self.schemes)

    def _follow(self, site: Site, leader: Site, decision: Decision) -> Decision:
        """Returns the `Decision` for a bias: it uses the exchange of its layer if the layer's scheme allows it."""
        if pinned(site.name, self.pins) in (None, decision.scheme):
            followed = decision.by.follow(site, leader)
            if followed is not None:
                carried, reason = followed
                return Decision(site.name, decision.scheme, Cost(0), reason, carried)
        return self._decide(site)

    def _decide(self, site: Site, changed: str | None = None) -> Decision:
        key = site.name, changed
        if key not in self._decided:
            self._decided[key] = self._decision(site, changed)
        return self._decided[key]

    def _decision(self, site: Site, changed: str | None) -> Decision:
        costs, pin = self.costs(site), pinned(site.name, self.pins)
        is_not_divided = pin == COLUMNS  # the graph has a gradient of it, of which the partitioner says why
        if is_not_divided:
            pin = None
        if pin is not None and pin in (costs or (PS,)):
            scheme, reason = pin, f"pinned to '{pin}'"
        elif pin is not None:
            wanted = SCHEMES[pin]
            why_not = wanted.mismatch(site) or wanted.refusal(site) or "the engine cannot carry it out"
            scheme, reason = PS, f"pinned to '{pin}', which is not possible: {why_not}"
        elif len(costs) <= 1:
            scheme, reason = PS, _why_dense(site)
        else:
            scheme, reason = POLICIES[self.policy](site, costs, self.cluster)
            if changed is not None:
                scheme = changed
                reason += f"; by '{scheme}' the whole step is shorter"
        if is_not_divided:
            reason = "; ".join(filter(None, (reason, f"pinned to '{COLUMNS}', which is not possible in this step")))
        others = sorted(((cost, name) for name, cost in costs.items() if name != scheme),
                        key=lambda pair: pair[0].seconds)
        runner_up_cost, runner_up = others[0] if others else (None, None)
        return Decision(site.name, scheme, costs.get(scheme), reason, runner_up=runner_up,
                        runner_up_cost=runner_up_cost)


def _why_dense(site: Site) -> str:
    """Returns why only the parameter server can carry a gradient: the first refusal of a scheme for its kind."""
    return next((reason for scheme in SCHEMES.values()
                 if not scheme.mismatch(site) and (reason := scheme.refusal(site))), "")


def unmatched_pins(pins: Pins, plan: Plan) -> str:
    """Returns a sentence about a pin that matches no variable of a plan, empty if there is none."""
    variables = [*(site.name for site in plan.sites), *(weight.path for weight in plan.divided)]
    names = [*variables, *(exchange.site for exchange in plan.exchanges)]
    for pin in pins:
        if all(pinned(name, (pin,)) is None for name in names):
            nearest = difflib.get_close_matches(pin[0], variables, 1, cutoff=0)
            return (f"The pin of '{pin[0]}' matches no variable of this step"
                    + (f"; the nearest is '{nearest[0]}'" if nearest else "")
                    + ". Patterns are those of file names, for whole paths: '*/kernel'.")
    return ""


def pinned(name: str, pins: Pins) -> str | None:
    """Returns the scheme to which a site or an exchange is pinned, or None."""
    names = {name, name.partition("#")[0], name.removeprefix("rows/")}  # its own, and those of its variable
    return next((scheme for pattern, scheme in pins
                 if pattern in names or any(fnmatch.fnmatchcase(n, pattern) for n in names)), None)


def _unmet_pin(exchange: Exchange, pins: Pins) -> str | None:
    """Returns the scheme to which an exchange is pinned that is no gradient, or cannot have it; else None."""
    pin = pinned(exchange.site, pins)
    is_of_shards = exchange.kind == cost_lib.SHARDS or (exchange.kind == cost_lib.SCATTER and pin == PS)
    is_of_columns = pin == COLUMNS and exchange.kind != cost_lib.SCATTER
    return None if is_of_shards or is_of_columns else pin
