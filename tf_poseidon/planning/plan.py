"""The plan: the scheme of every site, with the reason.

Tests: tests/unit/test_plan.py, tests/unit/test_planning.py.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from collections.abc import Set
import dataclasses
import hashlib
import os
import pathlib
from typing import Any

from tf_poseidon.base import files
from tf_poseidon.base import tables
from tf_poseidon.errors import PlanError
from tf_poseidon.errors import PoseidonError
from tf_poseidon.errors import shown
from tf_poseidon.planning import bound
from tf_poseidon.planning import plan_file
from tf_poseidon.planning import step_time
from tf_poseidon.planning.cluster import Cluster
from tf_poseidon.planning.cluster import describe
from tf_poseidon.planning.cost import Cost
from tf_poseidon.planning.cost import SCATTER
from tf_poseidon.planning.decision import Decision
from tf_poseidon.planning.exchange import Exchange
from tf_poseidon.planning.exchange import KINDS
from tf_poseidon.planning.memory import Memory
from tf_poseidon.planning.partition_facts import COLUMNS
from tf_poseidon.planning.partition_facts import DividedWeight
from tf_poseidon.planning.partition_facts import WholeOp
from tf_poseidon.planning.schemes import PS
from tf_poseidon.planning.schemes import SCHEMES
from tf_poseidon.planning.site import Site
from tf_poseidon.reports import page
from tf_poseidon.reports.texts import duration

_MOST_DIMENSIONS = 254  # as in TensorFlow
_MOST_STEPS = 1000  # far more than a graph has
_MOST_THREADS = 10_000  # far more than a host has processors


@dataclasses.dataclass(frozen=True)
class Plan:
    """The decisions for all sites of a training graph.

    `print(plan)` shows it as a table.

    Attributes:
        policy: The policy that has decided, a key of `policies.POLICIES`.
        cluster: The `Cluster` that it is made for.
        sites: The `Site`s that it is made for.
        decisions: One per site, in the order of the sites.
        operations: Additions and multiplications of one rank's step; None if unknown.
        refusal: Why the graph is not rewritten; all sites then travel dense. Empty if it is rewritten.
        exchanges: What ranks exchange besides gradients, `Exchange`s.
        whole: The `WholeOp`s of the step: the ops that every rank computes for the rows of all ranks.
        divided: The `DividedWeight`s, of which no rank has a gradient to synchronise.
        row_shares: By rank, how many rows of a global batch it has in proportion to others; () if all have as many.
        threads: How many threads computed an op on each rank of the job that it was made in; 0 if unknown.
        steps: How many steps of an execution overlap, by the graph that it was made for.
        overlap: Whether the steps of an execution overlap, and what holds them back, a sentence; "" if an execution has
            one step. Not part of a plan's file.
        memory: The `Memory` of a rank, None if unknown. Not part of a plan's file.
    """

    policy: str
    cluster: Cluster
    sites: tuple[Site, ...] = ()
    decisions: tuple[Decision, ...] = ()
    operations: float | None = None
    refusal: str = ""
    exchanges: tuple[Exchange, ...] = ()
    whole: tuple[WholeOp, ...] = ()
    divided: tuple[DividedWeight, ...] = ()
    row_shares: tuple[int, ...] = ()
    threads: int = dataclasses.field(default=0, compare=False)
    steps: int = dataclasses.field(default=1, compare=False)
    overlap: str = dataclasses.field(default="", compare=False)
    memory: Memory | None = dataclasses.field(default=None, compare=False)

    @property
    def has_shards(self) -> bool:
        """Whether each rank updates parts of variables, as with `shard_update`."""
        return any(exchange.kind == SCATTER for exchange in self.exchanges) or any(
            site.is_divided for site in self.sites)

    @property
    def total_bytes(self) -> float | None:
        """Payload that a node, worker and server, sends plus receives in a step; None if unknown."""
        others = [exchange.cost(self.cluster) for exchange in self.exchanges]
        parts = [*(decision.num_bytes for decision in self.decisions),
                 *(None if cost is None else cost.num_bytes for cost in others)]
        known_parts = [part for part in parts if part is not None]
        return sum(known_parts) if len(known_parts) == len(parts) else None

    @property
    def step_seconds(self) -> float | None:
        """Predicted time of a step, the mean of those that overlap; None if its arithmetic is unknown."""
        times = self._times()
        return None if times is None else times[0]

    @property
    def compute_seconds(self) -> float | None:
        """Predicted time of a step on a single rank, None if its arithmetic is unknown."""
        times = self._times()
        return None if times is None else times[1]

    @property
    def least_seconds(self) -> float | None:
        """Time that a step takes at least, by any plan for these speeds; None if its arithmetic is unknown."""
        if not self.operations:
            return None
        return bound.least_seconds(self.sites, self.exchanges, self.cluster, self.operations, self.steps)

    @property
    def is_slower_than_one_process(self) -> bool | None:
        """Whether one process would finish the rows of all ranks sooner; None if unknown."""
        times = self._times()
        if times is None:
            return None
        step, compute = times
        return step > self.cluster.workers * compute

    def _times(self) -> tuple[float, float] | None:
        if not self.operations:
            return None
        return step_time.step_seconds(self._messages(), self.cluster, self.operations, self.steps)

    def spans(self) -> list[step_time.BusySpan]:
        """Returns what a rank and its link are expected to do in a step, and when; of steps that overlap, in all.

        It is an empty list if the step's arithmetic is unknown.
        """
        if not self.operations:
            return []
        return step_time.spans(self._messages(), self.cluster, self.operations, self.steps)

    def _messages(self) -> list[step_time.Message]:
        return step_time.messages(self.decisions, self.sites, self.exchanges, self.cluster)

    def agreement_text(self) -> str:
        """Returns the text that ranks compare: a line per site, in the order of their names."""
        decisions = sorted(self.decisions, key=lambda d: d.site)
        return "\n".join([describe(self.cluster.shape), *map(str, decisions)])

    @property
    def digest(self) -> str:
        """A short text that is the same for two plans if they do the same to the same graph."""
        lines = sorted(f"'{name}' {text}" for name, text in [
            *self._fingerprints(self.sites).items(), *((weight.path, weight.fingerprint()) for weight in self.divided)])
        if self.row_shares:
            lines.append(f"rows {self.row_shares}")
        return hashlib.sha256("\n".join([self.agreement_text(), *lines]).encode()).hexdigest()[:16]

    def fitted(self, sites: Iterable[Site]) -> "Plan":
        """Returns this plan with the names that a graph has, where these have more or fewer leading parts.

        Keras names the variables of a Sequential 'sequential/dense/kernel', and 'dense/kernel' once it was loaded from
        a file. The plan is unchanged unless each other name has exactly one counterpart.
        """
        return self.renamed(_counterparts({site.name for site in self.sites}, {site.name for site in sites}))

    def divided_among(self, paths: Iterable[str]) -> dict[str, int]:
        """Returns {path: dimension} of a graph's variables that it divides; names may differ as in `fitted`."""
        planned, given_paths = {weight.path: weight.dimension for weight in self.divided}, frozenset(paths)
        names = {path: path for path in planned} | _counterparts(planned.keys(), given_paths)
        return {names[path]: dimension for path, dimension in planned.items() if names[path] in given_paths}

    def renamed(self, names: Mapping[str, str]) -> "Plan":
        """Returns this plan with new names of sites and groups in place of old ones."""
        return _renamed(self, names)

    def measured(self, stats: Mapping[str, Any]) -> "Plan":
        """Returns this plan with the bytes that factors had without their zeros, and the times that it expects of them.

        Args:
            stats: The result of `PoseidonStrategy.stats`.
        """
        shares = {name: counts["short_factor_bytes"] / counts["factor_bytes"]
                  for name, counts in stats["sites"].items() if counts["factor_bytes"]}
        return self.of_sites(
            dataclasses.replace(site, factors=dataclasses.replace(site.factors, sent_share=shares[site.name]))
            if site.factors is not None and site.name in shares else site for site in self.sites)

    def of_sites(self, sites: Iterable[Site]) -> "Plan":
        """Returns the same decisions for sites that differ in how many bytes travel, with their costs.

        Args:
            sites: `Site`s of the same names, in the same order.
        """
        decisions, sites = [], tuple(sites)
        for planned_site, site, decision in zip(self.sites, sites, self.decisions, strict=True):
            traffic, was = (None if decision.leader else decision.by.traffic(place) for place in (site, planned_site))
            if traffic != was:
                decision = dataclasses.replace(decision, cost=None if traffic is None else traffic.cost(self.cluster))
            decisions.append(decision)
        return dataclasses.replace(self, sites=sites, decisions=tuple(decisions))

    def check(self, sites: Iterable[Site], cluster: Cluster) -> None:
        """Refuses a graph or a job that the plan was not made for.

        Args:
            sites: The `Site`s of the graph.
            cluster: The `Cluster` of the job.

        Raises:
            PoseidonError: For the first difference.
        """
        planned_shape, job = self.cluster.shape, cluster.shape
        if planned_shape != job:
            raise PlanError(f"The plan is for {describe(planned_shape)}, but this job has {describe(job)}; make a "
                            "plan for these.")
        planned, given = self._fingerprints(self.sites), self._fingerprints(sites)
        for name in [*given, *planned]:
            if planned.get(name) != given.get(name):
                raise PlanError(
                    f"The plan was made for another training graph: the first difference is '{name}', "
                    f"which is {planned.get(name, 'missing')} in the plan and "
                    f"{given.get(name, 'missing')} in the graph; make a plan for this graph.")

    def _fingerprints(self, sites: Iterable[Site]) -> dict[str, str]:
        """Returns {name of a site: the properties that matter to this plan's decisions, as text}."""
        decisions = {d.site: (d.scheme, d.carried) for d in self.decisions}
        fingerprints = {}
        for site in sites:
            scheme, carried = decisions.get(site.name, (PS, None))
            fingerprints[site.name] = site.fingerprint() + SCHEMES[scheme].common(site, carried)
        return fingerprints

    def diff(self, other: "Plan") -> str:
        """Returns what another plan does differently: a line per variable, empty if nothing."""
        lines = []
        if (a := str(self.cluster)) != (b := str(other.cluster)):
            lines.append(f"cluster: {a} -> {b}")
        if self.row_shares != other.row_shares:
            lines.append(f"rows: {self.row_shares or 'equal'} -> {other.row_shares or 'equal'}")
        own, theirs = (plan._summaries() for plan in (self, other))
        for name in dict.fromkeys([*own, *theirs]):
            a, b = (summaries.get(name, "missing") for summaries in (own, theirs))
            if a != b:
                lines.append(f"'{name}': {a} -> {b}")
        return "\n".join(lines)

    def _summaries(self) -> dict[str, str]:
        """Returns {name of a site, or path of a weight that is divided: what is done with it}."""
        return ({d.site: f"{d.scheme}{d.carried or ''}, {_bytes(d.num_bytes)} bytes, {_duration(d.cost)}"
                 for d in self.decisions}
                | {weight.path: f"{COLUMNS}, {weight.fingerprint()}" for weight in self.divided})

    def predictions(self) -> dict[str, Any]:
        """Returns the contents of the table as values for JSON."""
        def cost(cost: Cost | None) -> dict[str, float] | None:
            return None if cost is None else {"bytes": cost.num_bytes, "seconds": cost.seconds}

        step, compute = self._times() or (None, None)
        return {
            "policy": self.policy, "cluster": self.cluster.fields(), "digest": self.digest,
            "total_bytes": self.total_bytes, "steps": self.steps, "step_seconds": step, "compute_seconds": compute,
            "least_seconds": self.least_seconds,
            "is_slower_than_one_process": self.is_slower_than_one_process,
            "variables": [
                {"name": site.name, "shape": site.shape, "dtype": site.dtype, "scheme": d.scheme,
                 "rides_on": d.leader, "cost": cost(d.cost), "runner_up": d.runner_up,
                 "runner_up_cost": cost(d.runner_up_cost), "reason": _reason(site, d)}
                for site, d in zip(self.sites, self.decisions, strict=True)] + [
                {"name": weight.path, "shape": weight.shape, "dtype": weight.dtype, "scheme": COLUMNS,
                 "rides_on": None, "cost": cost(Cost(0)), "runner_up": None, "runner_up_cost": None,
                 "reason": weight.reason(self.cluster)} for weight in self.divided],
            "exchanges": [
                {"name": exchange.site, "shape": exchange.shape, "dtype": exchange.dtype, "scheme": exchange.kind,
                 "cost": cost(exchange.cost(self.cluster))} for exchange in self.exchanges],
            "whole": [dataclasses.asdict(op) for op in self.whole]}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a file, for `Plan.load` and `PoseidonStrategy(plan=path)`.

        Args:
            path: The file to write; an existing file is replaced, or stays as it was.

        Raises:
            PoseidonError: If the plan belongs to a graph that was not rewritten, or the file cannot be written.
        """
        if self.refusal:
            raise PlanError(f"There is no plan to save, since the graph was not rewritten: "
                            f"{self.refusal}")
        _write("plan", path, self.to_text())

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes a page with figures of the plan, for a browser: what takes how long, and how the step goes.

        It needs plotly: pip install "tf_poseidon[report]".

        Args:
            path: The file to write; an existing file is replaced, or stays as it was.

        Raises:
            PoseidonError: If plotly is not installed, or the file cannot be written.
        """
        from tf_poseidon.explanations import plan_page  # which shows plans; planning does not know it
        page.check(path)
        _write("report", path, plan_page.html_report({"": self}))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Returns the plan in a file.

        Raises:
            PoseidonError: If the file is not a plan, has another version, or was changed.
        """
        try:
            text = pathlib.Path(path).read_text(encoding="utf-8-sig")  # some editors write a mark of UTF-8
        except (OSError, TypeError, ValueError) as error:
            raise PlanError(f"The plan {files.quoted(path)} cannot be read: {files.reason(error)}; give the file of a "
                            "plan that was saved.") from error
        try:
            return cls.from_text(text)
        except PoseidonError as error:
            raise PlanError(f"{files.quoted(path)}: {error}") from error

    def to_text(self) -> str:
        """Returns the plan as text."""
        head = {"digest": self.digest, "policy": self.policy, "cluster": self.cluster.fields(),
                "operations": self.operations, **({"steps": self.steps} if self.steps > 1 else {}),
                **({"threads": self.threads} if self.threads else {}),
                **({"row_shares": self.row_shares} if self.row_shares else {})}
        return plan_file.to_text(head, self.sites, self.decisions, {
            "divided": self.divided, "exchanges": self.exchanges, "whole": self.whole})

    @classmethod
    def from_text(cls, text: str) -> "Plan":
        """Returns the plan in a text of `to_text`.

        Raises:
            PoseidonError: If it is not a plan, has another version, or was changed.
        """
        try:
            fields = plan_file.from_text(text)
            digest = fields.pop("digest")
            plan = cls(**fields)
            is_unchanged = digest is None or digest == plan.digest
            if is_unchanged:
                plan._check_decisions()
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise PlanError(f"The plan is damaged ({shown(error)}); make a new one.") from error
        if not is_unchanged:
            raise PlanError(f"The plan was changed after it was saved: its digest says {shown(digest)}, but "
                            f"it is {plan.digest}; if that was on purpose, remove its line \"digest\".")
        return plan

    def _check_decisions(self) -> None:
        """Refuses hand-written plans that no job could follow.

        Raises:
            PoseidonError: For the first decision that is not possible.
            ValueError: If sites have the same name, a tensor is larger than any, an exchange is of no kind, a weight
                cannot be divided, or there are more steps than in any graph.
        """
        decisions, sites = {d.site: d for d in self.decisions}, {site.name: site for site in self.sites}
        if len(decisions) < len(self.sites):
            raise ValueError("its sites are not distinct")
        tensors: tuple[Site | Exchange, ...] = (*self.sites, *self.exchanges)
        for value in tensors:
            if len(value.shape or ()) > _MOST_DIMENSIONS or (value.num_bytes or 0) >= 2**63:
                raise ValueError(f"its 'shape' is {shown(value.shape)}")
        if not 1 <= self.steps <= _MOST_STEPS:
            raise ValueError(f"its 'steps' is {shown(self.steps)}")
        if self.threads > _MOST_THREADS:
            raise ValueError(f"its 'threads' is {shown(self.threads)}")
        if 0 in self.row_shares or len(self.row_shares) not in (0, self.cluster.workers):
            raise ValueError(f"its 'row_shares' is {shown(self.row_shares)}")
        for weight in self.divided:
            if not weight.dimension < len(weight.shape) <= 2:
                raise ValueError(f"its 'dimension' is {shown(weight.dimension)} of {shown(weight.shape)}")
        for exchange in self.exchanges:
            if exchange.kind not in KINDS:
                raise ValueError(f"its 'scheme' is {shown(exchange.kind)}")
        for site, decision in zip(self.sites, self.decisions, strict=True):
            scheme = SCHEMES.get(decision.scheme)
            leader = None if decision.leader is None else decisions.get(decision.leader)
            if scheme is None or decision.site != site.name:
                is_possible = False
            elif decision.carried is None:
                is_possible = not scheme.mismatch(site) and not scheme.refusal(site)
            else:
                if leader is not None and (leader.scheme != decision.scheme or leader.leader is not None):
                    leader = None
                is_possible = scheme.can_follow(site, decision.carried, None if leader is None else sites[leader.site])
            if not is_possible:
                raise PlanError(f"The plan lets {files.quoted(site.name)} travel by {files.quoted(decision.scheme)}"
                                f"{decision.carried or ''}, which is not possible; make it '{PS}'.")

    def __str__(self) -> str:
        if self.refusal:
            return f"Not rewritten, all gradients travel dense: {self.refusal}"
        rows = [("variable", "shape", "scheme", "bytes", "time", "runner-up", "reason")]
        for site, d in zip(self.sites, self.decisions, strict=True):
            runner_up = f"{d.runner_up} {_duration(d.runner_up_cost)}" if d.runner_up else ""
            rows.append((d.site, _shape(site.shape), d.scheme, _bytes(d.num_bytes), _duration(d.cost), runner_up,
                         _reason(site, d)))
        for weight in self.divided:
            rows.append((weight.path, _shape(weight.shape), COLUMNS, "0", "0", "", weight.reason(self.cluster)))
        for exchange in self.exchanges:
            exchange_cost = exchange.cost(self.cluster)
            rows.append((exchange.site, _shape(exchange.shape), exchange.kind,
                         _bytes(None if exchange_cost is None else exchange_cost.num_bytes),
                         _duration(exchange_cost), "", exchange.reason))
        others = [exchange.cost(self.cluster) for exchange in self.exchanges]
        total = [cost for cost in (*(d.cost for d in self.decisions), *others) if cost]
        rows.append(("total", "", "", _bytes(self.total_bytes),
                     duration(sum(cost.seconds for cost in total)), "",
                     f"sent plus received by each {'rank' if self.cluster.ranks_per_node == 1 else 'node'} "
                     "in a step, half of it in each direction"))
        shares = f", rows shared {' : '.join(map(str, self.row_shares))}" if self.row_shares else ""
        return "\n".join([f"plan by policy '{self.policy}' for {self.cluster}{shares}",
                          *tables.aligned(rows, left=(0, 1, 2, 5, 6)), *self._whole_ops(), *self._expectation(),
                          *map(str, filter(None, (self.cluster.routes, self.memory, self.overlap)))])

    def _whole_ops(self) -> list[str]:
        """Returns the ops that every rank computes for the rows of all ranks, as lines of text."""
        if not self.whole:
            return []
        return ["computed by every rank for the rows of all ranks, for lack of a partitioning rule:",
                *(f"  {op}" for op in self.whole)]

    def _expectation(self) -> list[str]:
        """Returns the expected time of the step, as lines of text."""
        times = self._times()
        if times is None:
            return []
        step, compute = times
        least = self.least_seconds
        assert least is not None  # its arithmetic is known
        workers = self.cluster.workers
        of = f" of {self.steps} that overlap" if self.steps > 1 else ""
        lines = [f"expected: {duration(step)} for a step{of}, {duration(compute)} without other ranks: "
                 f"{workers * compute / step:.3g} times as fast as one process",
                 f"at least: {duration(least)} by any choice of schemes, for bytes and arithmetic alone; this plan "
                 f"takes {step / least:.3g} times as long"]
        if self.is_slower_than_one_process:
            lines.append(f"This plan is expected to be SLOWER than one process, which would take "
                         f"{duration(workers * compute)} for the rows of all {workers} ranks; use "
                         "larger batches, fewer ranks, or a faster network.")
        return lines


def _write(what: str, path: str | os.PathLike[str], text: str) -> None:
    try:
        files.write(path, text.encode())
    except (OSError, TypeError, ValueError) as error:
        raise PlanError(f"The {what} {files.quoted(path)} cannot be written: {files.reason(error)}; name a file in "
                        "a directory that exists, with room for it.") from error


def _counterparts(planned: Set[str], names: Set[str]) -> dict[str, str]:
    """Returns the names that a graph has for those of a plan that it lacks; none unless each has one of its own."""
    found = {}
    for name in planned - names:
        counterparts = [other for other in names - planned
                        if other.endswith(f"/{name}") or name.endswith(f"/{other}")]
        if len(counterparts) != 1:
            return {}
        found[name] = counterparts[0]
    return found if len(set(found.values())) == len(found) else {}


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """Returns a value whose fields, and theirs, have new names in place of old ones."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, tuple):
        return tuple(_renamed(part, names) for part in value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    return dataclasses.replace(value, **{field.name: _renamed(getattr(value, field.name), names)
                                         for field in dataclasses.fields(value) if field.init})


def _reason(site: Site, decision: Decision) -> str:
    """Returns why a site travels by a scheme, and what is special about how it does."""
    note = "" if decision.leader else decision.by.note(site)
    return "; ".join(filter(None, (decision.reason, note)))


def _shape(shape: Sequence[int] | None) -> str:
    return "?" if shape is None else "x".join(map(str, shape))


def _bytes(number: float | None) -> str:
    return "unknown" if number is None else f"{number:,.0f}"


def _duration(cost: Cost | None) -> str:
    return "0" if cost is not None and not cost.seconds else duration(None if cost is None else cost.seconds)
