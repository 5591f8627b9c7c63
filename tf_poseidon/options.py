"""The options of a job and of its training: frozen values that are checked once, and handed on whole.

Tests: tests/unit/test_options.py, tests/faults/test_failures.py.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools
import numbers
import re
from typing import Any

from tf_poseidon import planning
from tf_poseidon.errors import ConfigurationError
from tf_poseidon.errors import shown
from tf_poseidon.staleness import bounds
from tf_poseidon.staleness.version_log import VersionLog

WIRE_DTYPES = (None, "bfloat16")
INPUTS = ("exact", "independent")
BALANCED = "balanced"
AUTO = "auto"
_MOST_SHARE = 1000

# A dedicated server gives nothing before it has a KV pair of all workers, which come over one link.
_KV_PAIR_BYTES, _KV_PAIR_BYTES_IF_SERVED = 2 << 20, 512 << 10
_LONGEST_NAME = 64
_NAME = re.compile(rf"[\w.-]{{1,{_LONGEST_NAME}}}", re.ASCII)
_FOR_EVER_S = 1e9  # the clocks of C++ count nanoseconds with 64 bits
_LEAST_S = {"heartbeat_timeout_s": 1}  # a busy machine keeps a process waiting that long


@dataclasses.dataclass(frozen=True)
class JobOptions:
    """How ranks exchange. They are the same on all ranks, and in everything that joins the job in one process.

    Attributes:
        engine, servers, ranks_per_node, kv_pair_bytes, timeout_s, startup_timeout_s, heartbeat_timeout_s,
            staging_bytes, dedicated_servers: Same as in `PoseidonStrategy`. Infinite times, and others that no clock
            can count, become 30 years.

    Raises:
        ConfigurationError: If a value is out of range for any job.
    """

    engine: str | None = None
    servers: tuple[int, ...] = ()
    ranks_per_node: int | None = None
    kv_pair_bytes: int | None = None
    timeout_s: float = 600.0
    startup_timeout_s: float = 120.0
    heartbeat_timeout_s: float = 12.0
    staging_bytes: int | None = None
    dedicated_servers: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.servers, numbers.Number):
            raise ConfigurationError(f"servers={self.servers}, expected the ranks that are servers, such as "
                                     f"range({self.servers}).")
        object.__setattr__(self, "servers", tuple(self.servers or ()))
        if self.ranks_per_node is not None:
            planning.Cluster(1, ranks_per_node=self.ranks_per_node)  # checks it
        if self.kv_pair_bytes is None:
            object.__setattr__(self, "kv_pair_bytes", _KV_PAIR_BYTES_IF_SERVED if self.dedicated_servers
                               else _KV_PAIR_BYTES)
        elif not isinstance(self.kv_pair_bytes, numbers.Integral) or not 4096 <= self.kv_pair_bytes <= 2**30:
            raise ConfigurationError(f"kv_pair_bytes={self.kv_pair_bytes}, expected 4096 to 2**30; the default is "
                                     "2 MiB, or 512 KiB with dedicated servers.")
        if self.staging_bytes is not None and not (isinstance(self.staging_bytes, numbers.Integral)
                                                   and 0 < self.staging_bytes < 2**63):
            raise ConfigurationError(f"staging_bytes={self.staging_bytes}, expected a positive number of bytes, or "
                                     "None for 24 times kv_pair_bytes.")
        planning.Cluster(1, dedicated_servers=self.dedicated_servers)  # checks it
        for name in ("timeout_s", "startup_timeout_s", "heartbeat_timeout_s"):
            seconds, least = getattr(self, name), _LEAST_S.get(name, 0)
            if not seconds > least:
                expected = f"more than {least} s" if least else "a positive number of seconds"
                raise ConfigurationError(f"{name}={seconds}, expected {expected}.")
            object.__setattr__(self, name, min(seconds, _FOR_EVER_S))

    def check(self, size: int, has_own_ops: bool) -> None:
        """Refuses options that are not possible in a job.

        Args:
            size: Number of ranks.
            has_own_ops: Whether the engine, which `engine` names, sums gradients by its own ops.

        Raises:
            ConfigurationError: For the first such option.
        """
        for name, value in (("servers", self.servers), ("dedicated_servers", self.dedicated_servers)):
            if has_own_ops and value:
                raise _not_with_own_ops(name, value, self.engine)
        if self.dedicated_servers and self.dedicated_servers > size - 2:
            raise ConfigurationError(f"dedicated_servers={self.dedicated_servers} in a job of {size} ranks, expected "
                                     f"at most {max(0, size - 2)}: two or more have to train; start more ranks, or "
                                     "omit it.")
        if len(set(self.servers)) != len(self.servers) or not set(self.servers) <= set(range(size)):
            raise ConfigurationError(f"servers={list(self.servers)}, expected distinct ranks from 0 to {size - 1}; "
                                     "omit it to let every rank be a server.")
        idle = sorted({*range(size - self.dedicated_servers, size)} - {*self.servers}) if self.servers else []
        if idle:
            raise ConfigurationError(f"servers={list(self.servers)}, but rank {idle[0]} is one of the last "
                                     f"dedicated_servers={self.dedicated_servers} ranks, which only serve; name it, "
                                     "too, or omit servers.")
        if has_own_ops and (self.ranks_per_node or 1) > 1:
            raise _not_with_own_ops("ranks_per_node", self.ranks_per_node, self.engine)


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
    """How training functions are rewritten and checked.

    Attributes:
        policy, plan, pins, cluster, wire_dtype, merge, strict, global_batch_norm, verify, rows, input, shard_update,
            versions, crossover: Same as in `PoseidonStrategy`; pins are pairs.
        synchrony: By how much the weights that workers read may be stale; None if not at all.

    Raises:
        ConfigurationError: If a value is out of range, or two contradict each other, for any job.
    """

    policy: str = "auto"
    plan: planning.Plan | None = None
    pins: tuple[tuple[str, str], ...] = ()
    cluster: planning.Cluster | None = None
    wire_dtype: str | None = None
    merge: bool = False
    strict: bool = False
    global_batch_norm: bool = False
    verify: int | None = None
    rows: Sequence[int] | str | None = None
    input: str = "exact"
    shard_update: bool | str = False
    synchrony: bounds.Synchrony | None = None
    versions: VersionLog | None = None
    crossover: str | None = None

    def __post_init__(self) -> None:
        planning.make_plan((), self.policy, planning.Cluster(1), self.pins)  # checks policy and pins
        if self.plan is not None and (self.pins or self.policy != "auto"):
            raise ConfigurationError("A plan was given together with a policy or pins, but a plan already says how "
                                     "every gradient travels; omit these, or make another plan.")
        if self.wire_dtype not in WIRE_DTYPES:
            raise ConfigurationError(f"wire_dtype={self.wire_dtype!r}, expected 'bfloat16' or None.")
        if self.rows is not None and not (isinstance(self.rows, str) and self.rows == BALANCED):
            if isinstance(self.rows, str) or not isinstance(self.rows, Sequence) or not self.rows or any(
                    isinstance(share, bool) or share not in range(1, _MOST_SHARE + 1) for share in self.rows):
                raise ConfigurationError(f"rows={self.rows!r}, expected 'balanced', or for each rank a whole number "
                                         f"from 1 to {_MOST_SHARE}, such as (3, 1, 1).")
            object.__setattr__(self, "rows", tuple(self.rows))
        if self.rows is not None and self.plan is not None and self.plan.row_shares:
            raise ConfigurationError(f"rows={self.rows!r}, but the plan already says how ranks share rows, "
                                     f"{self.plan.row_shares}; omit rows, or give another plan.")
        if self.input not in INPUTS:
            raise ConfigurationError(f"input={self.input!r}, expected 'exact' or 'independent'.")
        if not isinstance(self.shard_update, bool) and self.shard_update != AUTO:
            raise ConfigurationError(f"shard_update={self.shard_update!r}, expected True, False or 'auto'.")
        if self.plan is not None and self.shard_update == AUTO:
            object.__setattr__(self, "shard_update", self.plan.has_shards)
        if self.plan is not None and self.shard_update != self.plan.has_shards:
            raise ConfigurationError(f"shard_update={self.shard_update}, but by the plan each rank updates "
                                     f"{'parts of' if self.plan.has_shards else 'whole'} variables, expected "
                                     f"{self.plan.has_shards}; give that, or another plan.")
        if self.verify is not None and not (isinstance(self.verify, int) and self.verify >= 1):
            raise ConfigurationError(f"verify={self.verify!r}, expected the number of steps from one check to the "
                                     "next, or None.")
        if self.wire_dtype is not None and self.verify is not None:
            raise ConfigurationError(
                f"verify={self.verify} compares gradients with their exact sums, but wire_dtype="
                f"{self.wire_dtype!r} rounds them; omit one of the two.")
        if self.crossover is not None and not (isinstance(self.crossover, str) and _NAME.fullmatch(self.crossover)):
            raise ConfigurationError(f"crossover={self.crossover!r}, expected a name of at most {_LONGEST_NAME} "
                                     "letters, digits, '-', '_' and '.', the same in all jobs that take turns.")
        self._check_synchrony()

    def _check_synchrony(self) -> None:
        """Refuses what cannot go together with stale weights; gradients then travel by the parameter server."""
        if self.synchrony is None:
            if self.versions is not None:
                raise ConfigurationError("versions= was given, but all ranks read the latest one with synchrony='bsp'; "
                                         "give the synchrony of the run that has written it, "
                                         f"{self.versions.synchrony}.")
            return
        others = {"policy": (self.policy, (AUTO, planning.PS)), "plan": (self.plan, (None,)),
                  "pins": (self.pins, ((),)), "wire_dtype": (self.wire_dtype, (None,)),
                  "merge": (self.merge, (False,)),
                  "global_batch_norm": (self.global_batch_norm, (False,)), "verify": (self.verify, (None,)),
                  "rows": (self.rows if self.rows == BALANCED else None, (None,)),
                  "shard_update": (self.shard_update, (False,)), "crossover": (self.crossover, (None,))}
        for name, (value, possible) in others.items():
            if value not in possible:
                raise ConfigurationError(
                    f"{name}={value!r} is not possible with synchrony={self.synchrony}, by which servers add up whole "
                    "gradients and ranks are at different clocks; omit one of the two.")
        object.__setattr__(self, "policy", planning.PS)

    @property
    def given_row_shares(self) -> tuple[int, ...] | None:
        """How ranks share rows from the beginning, None if that was not given."""
        if self.plan is not None and self.plan.row_shares:
            return self.plan.row_shares
        return None if self.rows is None or isinstance(self.rows, str) else tuple(map(int, self.rows))

    @property
    def ranks_per_node(self) -> int | None:
        """How many ranks of a node combine, according to plan or cluster; None if they leave that to the job."""
        return self.plan.cluster.ranks_per_node if self.plan else _ranks_per_node_of(self.cluster)

    def described(self, cluster: planning.Cluster) -> str:
        """Returns by what gradients are planned, in a few words; `cluster` is the one that they are planned for."""
        if self.plan is not None:
            return f"follows a plan by policy '{self.plan.policy}'"
        linked = f" ({cluster.gpu_link_gbps:g} between GPUs)" if cluster.gpu_link_gbps else ""
        speeds = (f" for {cluster.bandwidth_gbps:g} Gbit/s{linked}, {cluster.latency_us:g} µs and {cluster.gflops:g} "
                  "GFLOP/s" if self.policy == "auto" or self.cluster else "")
        stale = "" if self.synchrony is None else (
            f", with weights that may be stale, by {self.synchrony}: not what one process computes; logs are sums of "
            "what each rank has seen")
        shared = "" if self.crossover is None else f"; takes turns with other jobs, by the name '{self.crossover}'"
        return f"plans by policy '{self.policy}'{speeds}{stale}{shared}"

    def check(self, job: JobOptions, size: int, has_own_ops: bool) -> None:
        """Refuses options that are not possible in a job; arguments as in `JobOptions.check`, which comes before.

        Raises:
            ConfigurationError: For the first such option.
            PlanError: If the plan is for another job.
        """
        num_servers = len(job.servers) or size
        size -= job.dedicated_servers  # what follows is about workers
        self._check_ranks_per_node(job, size, has_own_ops)
        shares = self.given_row_shares
        if shares is not None and len(shares) != size:
            raise ConfigurationError(f"rows={shares} are for {len(shares)} ranks, but the job has {size}; give as many "
                                     "numbers.")
        if self.plan is not None and size > 1:
            self.plan.check(self.plan.sites, planning.Cluster(
                size, num_servers, ranks_per_node=self.plan.cluster.ranks_per_node,
                dedicated_servers=job.dedicated_servers))
        cluster = self.cluster
        if cluster is not None and size > 1 and (cluster.workers, cluster.servers) != (size, num_servers):
            raise ConfigurationError(
                f"The cluster has {cluster.workers} workers and {cluster.servers} servers, but this job "
                f"has {size} and {num_servers}; give it those.")
        if cluster is not None and size > 1 and cluster.dedicated_servers != job.dedicated_servers:
            raise ConfigurationError(f"The cluster has dedicated_servers={cluster.dedicated_servers}, but this job has "
                                     f"{job.dedicated_servers}; give it those.")
        if has_own_ops and cluster is not None and cluster.gpus_per_node > 1:
            raise _not_with_own_ops("gpus_per_node", cluster.gpus_per_node, job.engine, " of the cluster")
        if has_own_ops and self.wire_dtype is not None:
            raise _not_with_own_ops("wire_dtype", self.wire_dtype, job.engine)
        if has_own_ops and self.crossover is not None:
            raise _not_with_own_ops("crossover", self.crossover, job.engine)
        if has_own_ops and self.synchrony is not None:
            raise _not_with_own_ops("synchrony", str(self.synchrony), job.engine)
        if self.versions is not None and self.synchrony is not None:
            self.versions.check(size, self.synchrony.upper)

    def check_links(self, ranks: int) -> None:
        """Refuses a cluster that links other GPUs than those of ranks that combine.

        Args:
            ranks: How many ranks of a node combine in the job; all, if it has one node.

        Raises:
            ConfigurationError: If they are not as many.
        """
        if self.cluster is not None and self.cluster.gpus_per_node not in (1, ranks):
            raise ConfigurationError(f"The cluster has gpus_per_node={self.cluster.gpus_per_node}, but {ranks} ranks "
                                     f"of a node combine in this job; give it gpus_per_node={ranks}.")

    def _check_ranks_per_node(self, job: JobOptions, size: int, has_own_ops: bool) -> None:
        requested = {"ranks_per_node": job.ranks_per_node,
                     "the plan": self.plan.cluster.ranks_per_node if self.plan else None,
                     "the cluster": _ranks_per_node_of(self.cluster)}
        given = {name: value for name, value in requested.items() if value is not None}
        shapes = {name: planning.Cluster(size, ranks_per_node=value).shape for name, value in given.items()}
        for (giver, first), (other, second) in itertools.combinations(shapes.items(), 2):
            if first != second:
                raise ConfigurationError(f"{giver} says that {given[giver]} ranks of a node combine, and {other} that "
                                         f"{given[other]} do; omit one of the two, or change it.")
        given.pop("ranks_per_node", None)  # which `JobOptions.check` checks
        for name, value in given.items():
            if value > 1 and has_own_ops:
                raise _not_with_own_ops("ranks_per_node", value, job.engine, f" of {name}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What a training function is planned for that no job runs yet, and how.

    Attributes:
        workers, servers, bandwidth_gbps, latency_us, gflops, accelerators, ranks_per_node, gpus_per_node,
            gpu_link_gbps, dedicated_servers: Same as in `planning.Cluster`; speeds that are None become those of
            `network` and `accelerator`, or the defaults.
        policy, pins, merge, wire_dtype: Same as in `PoseidonStrategy`.
        network: A key of `planning.NETWORKS`, which stands for `bandwidth_gbps` and `latency_us`; None for none.
        accelerator: A key of `planning.ACCELERATORS`, which stands for `gflops` and `accelerators`; None for none.

    Raises:
        ConfigurationError: If a value is out of range.
    """

    workers: int | None = None
    servers: int = 0
    bandwidth_gbps: float | None = None
    latency_us: float | None = None
    gflops: float | None = None
    accelerators: bool | None = None
    ranks_per_node: int = 1
    gpus_per_node: int = 1
    gpu_link_gbps: float = 0.0
    dedicated_servers: int = 0
    policy: str = "auto"
    pins: Mapping[str, str] | None = None
    merge: bool = False
    wire_dtype: str | None = None
    network: str | None = None
    accelerator: str | None = None

    def __post_init__(self) -> None:
        if self.wire_dtype not in WIRE_DTYPES:
            raise ConfigurationError(f"wire_dtype={self.wire_dtype!r}, expected 'bfloat16' or None.")
        if not isinstance(self.pins or {}, Mapping):
            raise ConfigurationError(f"pins={self.pins!r}, expected a dictionary of patterns and schemes.")
        for option, speeds in (("network", planning.NETWORKS), ("accelerator", planning.ACCELERATORS)):
            self._take_speeds(option, speeds)

    def _take_speeds(self, option: str, speeds: Mapping[str, Mapping[str, float]]) -> None:
        """Gives the fields their values for which a name stands, or the defaults."""
        name = getattr(self, option)
        if name is not None and (not isinstance(name, str) or name not in speeds):
            raise ConfigurationError(f"{option}={shown(name)}, expected one of {', '.join(speeds)}, or None.")
        for field in next(iter(speeds.values())):
            given, value = getattr(self, field), getattr(planning.Cluster, field)
            if name is not None:
                value = speeds[name][field]
            if name is not None and given not in (None, value):
                raise ConfigurationError(f"{field}={shown(given)} with {option}='{name}', which stands for "
                                         f"{field}={value}; give one of the two.")
            if given is None:
                object.__setattr__(self, field, value)

    @property
    def cluster(self) -> planning.Cluster:
        """The cluster to plan for."""
        if self.workers is None:
            raise ConfigurationError("Neither a number of workers nor a plan is given; give one of the two.")
        names = [field.name for field in dataclasses.fields(planning.Cluster)]
        return planning.Cluster(**{name: getattr(self, name) for name in names if hasattr(self, name)})

    def planner(self) -> planning.Planner:
        """Returns what makes the plan; raises ConfigurationError if there is no such policy, or scheme."""
        planner = planning.Planner(self.cluster, self.policy, tuple((self.pins or {}).items()), self.merge)
        planner.plan(())  # before anything takes long
        return planner


def check_divides_nothing(pins: Iterable[tuple[str, str]], plan: planning.Plan | None = None) -> None:
    """Refuses pins and plans that divide weights, where variables are not those of a strategy.

    Raises:
        ConfigurationError: For the first pin, or weight of the plan.
    """
    names = [pattern for pattern, scheme in pins if scheme == planning.COLUMNS]
    names += [weight.path for weight in plan.divided] if plan is not None else []
    if names:
        raise ConfigurationError(f"'{names[0]}' is to be divided by 'columns', but only PoseidonStrategy makes "
                                 "variables that ranks can divide; give it another scheme, or train with that.")


def _ranks_per_node_of(cluster: planning.Cluster | None) -> int | None:
    return cluster.ranks_per_node if cluster is not None and cluster.ranks_per_node > 1 else None


def _not_with_own_ops(name: str, value: Any, engine: str | None, whose: str = "") -> ConfigurationError:
    return ConfigurationError(f"{name}={value!r}{whose} is not possible with engine='{engine}', whose own "
                              "ops sum the gradients; omit it, or use engine='mpi'.")
