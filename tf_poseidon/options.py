"""The options of PoseidonStrategy: whether they make sense, and whether all ranks have the same."""

import importlib.metadata
import itertools
import json
import random

import tensorflow as tf

from tf_poseidon import engines
from tf_poseidon import ops
from tf_poseidon import planning
from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.errors import PoseidonError

WIRE_DTYPES = (None, "bfloat16")


def check(engine, policy, plan, pins, cluster, wire_dtype, servers, ranks_per_node, verify, kv_pair_bytes,
          timeout_s, startup_timeout_s):
    """Raises PoseidonError with the first option that is out of range, see `PoseidonStrategy`."""
    engine, size = engines.launch(engine)
    num_servers = len(servers) or size
    planning.make_plan((), policy, planning.Cluster(size), pins)  # checks policy and pins
    if plan is not None and (pins or policy != "auto"):
        raise PoseidonError("A plan was given together with a policy or pins, but it says already how "
                            "every gradient travels; leave these away, or make another plan.")
    check_ranks_per_node(ranks_per_node, size, plan, cluster, engine)
    if plan is not None and size > 1:
        plan.check(plan.sites, planning.Cluster(size, num_servers,
                                                ranks_per_node=plan.cluster.ranks_per_node))
    if cluster is not None and size > 1 and (cluster.workers, cluster.servers) != (size, num_servers):
        raise PoseidonError(
            f"The cluster has {cluster.workers} workers and {cluster.servers} servers, but this job "
            f"has {size} and {num_servers}; give it those.")
    if wire_dtype not in WIRE_DTYPES:
        raise PoseidonError(f"wire_dtype={wire_dtype!r}, expected 'bfloat16' or None.")
    if wire_dtype is not None and verify is not None:
        raise PoseidonError(
            f"verify={verify} compares gradients with their exact sums, but wire_dtype="
            f"{wire_dtype!r} rounds them; leave one of the two away.")
    if engines.load(engine).writer.has_to_agree:
        for name, value in (("wire_dtype", wire_dtype), ("servers", servers or None)):
            if value is not None:
                raise PoseidonError(f"{name}={value!r} is not possible with engine='{engine}', whose own "
                                    "ops sum the gradients; leave it away, or use engine='mpi'.")
    if len(set(servers)) != len(servers) or not set(servers) <= set(range(size)):
        raise PoseidonError(f"servers={list(servers)}, expected distinct ranks from 0 to {size - 1}; "
                            "leave it away to let every rank be a server.")
    if verify is not None and not (isinstance(verify, int) and verify >= 1):
        raise PoseidonError(f"verify={verify!r}, expected the number of steps from one check to the "
                            "next, or None.")
    if not 4096 <= kv_pair_bytes <= 2**30:
        raise PoseidonError(f"kv_pair_bytes={kv_pair_bytes}, expected 4096 to 2**30; the default is "
                            "2 MiB.")
    for name, value in (("timeout_s", timeout_s), ("startup_timeout_s", startup_timeout_s)):
        if not value > 0:
            raise PoseidonError(f"{name}={value}, expected a positive number of seconds.")


def check_ranks_per_node(ranks_per_node, size, plan, cluster, engine):
    """Raises PoseidonError if options say different things of how many ranks combine, or what is not possible."""
    told = {"ranks_per_node": ranks_per_node, "the plan": plan and plan.cluster.ranks_per_node,
            "the cluster": told_by(cluster)}
    told = {name: value for name, value in told.items() if value is not None}
    shapes = {name: planning.Cluster(size, ranks_per_node=value).shape for name, value in told.items()}
    for (one, first), (other, second) in itertools.combinations(shapes.items(), 2):
        if first != second:
            raise PoseidonError(f"{one} says that {told[one]} ranks of a node combine, and {other} that "
                                f"{told[other]} do; leave one of the two away, or change it.")
    for name, value in told.items():
        if value > 1 and engines.load(engine).writer.has_to_agree:
            whose = "" if name == "ranks_per_node" else f" of {name}"
            raise PoseidonError(f"ranks_per_node={value}{whose} is not possible with engine='{engine}', whose own "
                                "ops sum the gradients; leave it away, or use engine='mpi'.")


def told_by(cluster):
    """Returns how many ranks of a node combine in a cluster, None if it leaves that to the job."""
    return cluster.ranks_per_node if cluster is not None and cluster.ranks_per_node > 1 else None


def agree(communicator, **options):
    """Ends the job unless all ranks have the same options and packages.

    Raises:
        PoseidonError: If this rank differs from rank 0.
    """
    mine = {
        **{name: str(value) for name, value in options.items()},
        **{name: importlib.metadata.version(name) for name in ("tf_poseidon", "keras", "numpy")},
        "tensorflow": tf.__version__,
        "products and sums of factors": ops.rounding(),
    }
    of_rank_0 = json.loads(communicator.broadcast_text("options", json.dumps(mine)))
    for name, value in mine.items():
        if of_rank_0.get(name) != value:
            raise PoseidonError(
                f"Ranks differ in {name}: {value} on rank {communicator.rank}, and "
                f"{of_rank_0.get(name)} on rank 0. Start the same program, in the same environment, "
                "on all ranks.")


def agree_on_seed(communicator):
    """Gives all ranks rank 0's random seed, or a common one when it has none.

    Without a seed, `Dataset.shuffle` and `fit(shuffle=True)` draw other orders in every process.
    """
    mine = tf_compat.global_seed()
    proposal = random.SystemRandom().randrange(2**31) if mine is None else mine
    agreed = int(communicator.broadcast("seed", tf.constant(proposal, tf.int64).numpy()))
    if agreed != mine:
        tf.random.set_seed(agreed)
