"""The policies: functions that choose a scheme for one site."""

from tf_poseidon.planning import cost
from tf_poseidon.planning.plan import Decision
from tf_poseidon.planning.plan import Plan


def _ps(site, p1, p2):
    del site, p1, p2
    return "ps", "the policy is 'ps'"


def _sfb(site, p1, p2):
    del p1, p2
    return "sfb", "the policy is 'sfb', and the gradient is a product of factors"


def _paper(site, p1, p2):
    """Algorithm 1 of H. Zhang et al., USENIX ATC 2017, to the letter.

    SFB if 2 K (P1 - 1)(M + N) <= 2 MN (P1 + P2 - 2) / P2, else PS. It counts numbers, and so takes
    those of factors and gradient to be equally long.
    """
    k, m, n = site.factors.k, site.factors.m, site.factors.n
    sfb = cost.factor_broadcasting(k * (m + n), p1)
    ps = cost.parameter_server(m * n, p1, p2)
    relation = "at most" if sfb <= ps else "more than"
    return ("sfb" if sfb <= ps else "ps",
            f"2K(P1-1)(M+N) = {sfb:,.0f} is {relation} 2MN(P1+P2-2)/P2 = {ps:,.0f} for K={k}, "
            f"M={m}, N={n}")


def _sparse(site, p1, p2):
    """Compares bytes, as Algorithm 1 does: all slices to all, or the dense gradient."""
    sparse = cost.factor_broadcasting(site.slices.num_bytes, p1)
    ps = cost.parameter_server(site.num_bytes, p1, p2)
    relation = "at most" if sparse <= ps else "more than"
    return ("sparse" if sparse <= ps else "ps",
            f"{site.slices.k} slices to {p1 - 1} others are {sparse:,.0f} bytes, {relation} the "
            f"{ps:,.0f} of the dense gradient")


POLICIES = {"ps": _ps, "sfb": _sfb, "paper": _paper}


def make_plan(sites, policy, workers, servers):
    """Plans how the sites of one training graph are synchronised.

    Args:
        sites: The `Site`s.
        policy: "ps", "sfb" (wherever it is possible) or "paper". But for "ps", gradients that are
            slices travel as those where that is fewer bytes.
        workers: Number of ranks.
        servers: Number of ranks that are servers.

    Returns:
        A `Plan`.
    """
    leaders = {site.name: _decide(site, policy, workers, servers) for site in sites
               if site.bias_of is None}
    decisions = []
    for site in sites:
        decision = leaders.get(site.name)
        if decision is None and leaders[site.bias_of].scheme == "sfb":
            decision = Decision(site.name, "sfb", 0,
                                f"the sum of the rows of a factor of '{site.bias_of}'", site.bias_of)
        decisions.append(decision or _decide(site, policy, workers, servers))
    return Plan(policy, workers, servers, tuple(decisions))


def _decide(site, policy, p1, p2):
    parts = site.factors or site.slices
    if parts is None:
        scheme, reason = "ps", site.refusal
    elif policy != "ps" and parts.k is None:
        scheme, reason = "ps", ("the number of rows is not known before the step; end the dataset "
                                "with .batch(n)")
    elif policy != "ps" and site.slices is not None:
        scheme, reason = _sparse(site, p1, p2)
    else:
        scheme, reason = POLICIES[policy](site, p1, p2)
    if scheme != "ps":
        return Decision(site.name, scheme, cost.factor_broadcasting(parts.num_bytes, p1), reason)
    dense = site.num_bytes
    return Decision(site.name, scheme,
                    None if dense is None else cost.mean_parameter_server(dense, p1), reason)
