"""What will be done: the scheme of every site, with the reason."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Decision:
    """How one site is synchronised.

    Attributes:
        site: Name of the site.
        scheme: "ps", the sharded parameter server; "sfb", sufficient factor broadcasting; or
            "sparse", all slices to all.
        num_bytes: Payload that a rank sends plus receives in a step with full batches, as a mean
            over the ranks; None if that is not known before the step. Of "sparse" an upper bound:
            slices with the same index are added up before they are sent.
        reason: Why, in a sentence.
        rides_on: With "sfb", the site whose factors this one is computed from; it sends nothing.
    """

    site: str
    scheme: str
    num_bytes: float | None
    reason: str
    rides_on: str | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """The decisions for all sites of a training graph.

    `print(plan)` shows it as a table.

    Attributes:
        policy: What has decided: "ps", "sfb" or "paper".
        workers: Number of ranks, P1 in the paper.
        servers: Number of ranks that are servers, P2.
        decisions: One for each site, in the order of the sites.
        refusal: Why the graph is not rewritten, or empty. Then all sites travel dense.
    """

    policy: str
    workers: int
    servers: int
    decisions: tuple[Decision, ...]
    refusal: str = ""

    @property
    def total_bytes(self):
        """Payload that a rank sends plus receives in a step, None if part of it is unknown."""
        parts = [decision.num_bytes for decision in self.decisions]
        return None if None in parts else sum(parts)

    def form(self):
        """Returns what ranks compare: a line for each site, in the order of their names."""
        lines = [f"'{d.site}' by {d.scheme}" + (f" with '{d.rides_on}'" if d.rides_on else "")
                 for d in sorted(self.decisions, key=lambda d: d.site)]
        return "\n".join([
            f"policy {self.policy}, {self.workers} workers, {self.servers} servers", *lines])

    def __str__(self):
        if self.refusal:
            return f"Not rewritten, all gradients travel dense: {self.refusal}"
        rows = [("site", "scheme", "bytes", "reason")]
        rows += [(d.site, d.scheme, _bytes(d.num_bytes), d.reason) for d in self.decisions]
        rows.append(("total", "", _bytes(self.total_bytes),
                     f"sent and received by each of {self.workers} ranks in a step"))
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d}" for a, b, c, d in rows]
        return "\n".join([f"plan by policy '{self.policy}' for {self.workers} workers, "
                          f"{self.servers} servers", *lines])


def _bytes(number):
    return "unknown" if number is None else f"{number:,.0f}"
