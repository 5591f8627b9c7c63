"""Compares ways to train a model on several machines: this project by policy, Horovod, MWMS, one process.

    mpiexec -n 4 -hosts a,b,c,d python scripts/benchmark.py --model vgg19 --system poseidon,horovod
    horovodrun --gloo -np 4 -H a:1,b:1,c:1,d:1 python scripts/benchmark.py --system poseidon,horovod
    tf-poseidon emulate --hosts 4 --gbps 1 -- \
        python scripts/benchmark.py --model mlp --system poseidon,poseidon-ps,horovod,mwms

Every system (systems.py) trains its own model with random data, and the systems take turns, each round in another
order. Before anything is timed, all run the same steps from the same weights and are compared: bit by bit
between ranks, and between systems by how far each variable has moved, within 1 %. Exposed is how much longer a
step takes than that of one rank alone, which exchanges nothing: waiting, and rebuilding gradients from all ranks'
rows. "At least" is the expected time of a step that hides as much communication as possible: the larger of that
rank's step plus rebuilding, and bytes over the bandwidth of the links.

Under horovodrun, our gradients travel by Horovod's own ops, which do not count bytes; and mwms is not available.

Systems slow each other down: Horovod's threads wake up every millisecond, and TensorFlow's server adds some tenths
of a millisecond to each call of a function. Where steps take only milliseconds, compare runs of one system each.

Where machines are too few or too slow, --compute=emulated:PROFILE replaces computing by waiting for an accelerator
(profiles.py), --dilation=D makes everything take D times as long, and --shrink=S divides all tensors' bytes by S
(emulation.py); links then need 1/(D S) of the rate. Times, bytes and rates are reported as those of the emulated
cluster.
"""

import dataclasses
import importlib
import os
import pathlib
import statistics
import time

from absl import app
from absl import flags
from absl import logging
from mpi4py import MPI  # starts MPI with MPI_THREAD_MULTIPLE; the strategy then shares it
import numpy as np
import rich.console
import rich.progress
import rich.table
import tensorflow as tf

from evaluation import output
from evaluation import peers
from evaluation import timing
from evaluation.comparisons import systems as systems_lib
from evaluation.workloads import emulation
from evaluation.workloads import profiles
from evaluation.workloads import zoo
import tf_poseidon as poseidon
from tf_poseidon import ops
from tf_poseidon.job import engines
from tf_poseidon.job import runtime

_MODEL = flags.DEFINE_enum("model", "mlp", list(zoo.MODELS), "What to train.")
_SYSTEMS = flags.DEFINE_list("system", ["poseidon", "poseidon-ps"], "What to compare, separated by "
                             f"commas: {', '.join(systems_lib.NAMES)}.")
_BATCH = flags.DEFINE_integer("batch_size", None, "Rows of each worker; by default the paper's.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 15, "Measurements of each system.", lower_bound=2)
_STEPS = flags.DEFINE_integer("steps", 2, "Steps in one measurement.", lower_bound=1)
_WARM_UP = flags.DEFINE_integer("warm_up", 1, "Steps before each measurement: TCP, for one, begins slowly after "
                                "a pause.", lower_bound=0)
_COMPUTE = flags.DEFINE_string("compute", "real", "real, or emulated:PROFILE with one of "
                               f"{', '.join(profiles.PROFILES)}.")
_DILATION = flags.DEFINE_float("dilation", 1, "How many times slower everything is emulated; below 1 faster.",
                               lower_bound=0.01)
_SHRINK = flags.DEFINE_float("shrink", 1, "How many times smaller all tensors are emulated.", lower_bound=1)
_ZEROS = flags.DEFINE_bool("zeros", False, "Whether emulated factors have as many zeros as in training, of the models "
                           "for which zoo.py says it.")
_MIXED = flags.DEFINE_bool("mixed", False, "Whether emulated gradients that are no products are casts from bfloat16, "
                           "as in mixed precision.")
_BANDWIDTH = flags.DEFINE_float("bandwidth_gbps", None, "Real rate of a node's link, in each direction; that of "
                                "tf_poseidon/emulation/emulated_cluster.py, or the measured one, by default.")
_KV_PAIR_BYTES = flags.DEFINE_integer("kv_pair_bytes", None, "Same as in PoseidonStrategy, before shrinking.")
_RANKS_PER_NODE = flags.DEFINE_integer("ranks_per_node", None, "As of PoseidonStrategy.", lower_bound=1)
_DEDICATED = flags.DEFINE_integer("dedicated_servers", 0, "As of PoseidonStrategy.", lower_bound=0)
_TIMELINE = flags.DEFINE_string("timeline", None, "File for a Chrome trace of some steps of the first of our "
                                "systems; a table says where they went.")
_JSON = output.json_flag()


@dataclasses.dataclass
class Measured:
    """The measurements of one system: seconds of its steps, and bytes of a rank per step."""

    seconds: list = dataclasses.field(default_factory=list)
    payload: list = dataclasses.field(default_factory=list)
    on_links: list = dataclasses.field(default_factory=list)


def check_flags(names):
    """Refuses flags that cannot be measured."""
    for name in names:
        if name not in systems_lib.NAMES:
            raise app.UsageError(f"--system has '{name}', expected some of {', '.join(systems_lib.NAMES)}.")
    kind, _, profile = _COMPUTE.value.partition(":")
    if kind not in ("real", "emulated") or (kind == "emulated") != (profile in profiles.PROFILES):
        raise app.UsageError(f"--compute={_COMPUTE.value}, expected real or emulated:PROFILE with one of "
                             f"{', '.join(profiles.PROFILES)}.")
    if kind == "real" and (_DILATION.value, _SHRINK.value, _ZEROS.value, _MIXED.value) != (1, 1, False, False):
        raise app.UsageError("--dilation, --shrink, --zeros and --mixed change an emulation, but --compute=real; use "
                             "--compute=emulated:PROFILE.")
    emulated_only = [name for name in names if name.endswith(("+shards", "+columns"))]
    if kind == "real" and emulated_only:
        raise app.UsageError(f"--system has '{emulated_only[0]}', which can be emulated only, but --compute=real; use "
                             "--compute=emulated:PROFILE.")
    others = [name for name in names if name.partition("+")[0] in systems_lib.PEERS]
    if _DEDICATED.value and others:
        raise app.UsageError(f"--dedicated_servers={_DEDICATED.value}, but --system has '{others[0]}', which trains on "
                             "all ranks; compare them in jobs of their own.")
    missing = [name for name in names if name.startswith("horovod") and "horovod" not in peers.names()]
    if missing:
        raise app.UsageError(f"--system has '{missing[0]}', but Horovod is not installed; run "
                             "scripts/install_horovod.sh.")
    for what, is_given in (("--system has mwms", any(name.startswith("mwms") for name in names)),
                           (f"--timeline={_TIMELINE.value}", _TIMELINE.value)):
        if is_given and not _is_mpi():
            raise app.UsageError(f"{what}, but Horovod's launcher has started this; launch with mpiexec.")
    if _TIMELINE.value and not any(map(_is_ours, names)):
        raise app.UsageError(f"--timeline={_TIMELINE.value} records steps of this project, but --system has none "
                             "of its policies; add poseidon.")
    # Files are rank 0's. Horovod's processes are no job of MPI.
    is_first = MPI.COMM_WORLD.rank == 0 and os.environ.get("HOROVOD_RANK", "0") == "0"
    refusal = MPI.COMM_WORLD.bcast(_unwritable() if is_first else "")
    if refusal:
        raise app.UsageError(refusal)


def _unwritable():
    """Returns why a file of the flags cannot be written: before everything is measured, not after."""
    for flag in (_JSON, _TIMELINE):
        try:
            if flag.value:
                open(flag.value, "ab").close()
        except OSError as error:
            return (f"--{flag.name}={flag.value} cannot be written ({error.strerror}), expected a file in a "
                    "directory that exists; choose another.")
    return ""


def _is_mpi():
    """Returns whether MPI started this job, not Horovod's launcher."""
    return engines.launch().engine == engines.DEFAULT


def _is_ours(name):
    return name.partition("+")[0] in systems_lib.POLICIES


def _counts(name):
    """Returns whether our runtime carries, and so counts, the bytes of a system."""
    return _is_ours(name) and not runtime.engine().writer.has_to_agree


def main(_):
    logging.set_verbosity(logging.WARNING)  # TensorFlow's strategies log a lot
    names = [systems_lib.SINGLE, *(n for n in dict.fromkeys(_SYSTEMS.value) if n != systems_lib.SINGLE)]
    check_flags(names)
    # More than cores: an op that waits for an accelerator occupies a thread.
    tf.config.threading.set_inter_op_parallelism_threads(max(8, os.cpu_count()))
    # In this order: TensorFlow's server must be started before anything else uses TensorFlow.
    start = {"mwms": peers.start_tensorflow, "horovod": peers.start_horovod}
    libraries = {peer: start[peer](MPI.COMM_WORLD) for peer in start
                 if _is_mpi() and any(name.partition("+")[0] == peer for name in names)}
    kv_pair_bytes = emulation.kv_pair_bytes(_SHRINK.value, _KV_PAIR_BYTES.value, _DEDICATED.value)
    strategy = poseidon.PoseidonStrategy("ps", timeout_s=600, kv_pair_bytes=kv_pair_bytes,
                                         ranks_per_node=_RANKS_PER_NODE.value,
                                         dedicated_servers=_DEDICATED.value)
    communicator = runtime.communicator()
    if communicator is None:
        raise SystemExit("This is a single process, expected several that exchange gradients; start it with "
                         "mpiexec -n 2 or more.")
    if not _is_mpi():
        libraries["horovod"] = importlib.import_module("horovod.tensorflow")  # which the strategy has started
    cluster = _cluster()
    rows = _BATCH.value or zoo.MODELS[_MODEL.value].batch_size
    make_replica, emulated = _replicas(rows, strategy)
    if emulated:
        cluster = dataclasses.replace(cluster, gflops=emulated.operations_per_second / 1e9, accelerators=True)
    systems = systems_lib.make(names, make_replica, cluster, strategy, libraries)
    verify(systems, communicator)
    measured = measure(systems, communicator)
    for system in systems.values():  # bounds count the bytes that travel
        system.plan = system.plan and system.plan.measured(strategy.stats())
    products = {name: tuple(factors_of(system.plan)) for name, system in systems.items() if system.plan}
    seconds = {p: extra_rebuild(p, cluster, emulated, communicator) for p in dict.fromkeys(products.values())}
    rebuild = {name: seconds[p] for name, p in products.items()}
    if strategy.rank == 0:
        report(systems, measured, rebuild, cluster, rows)
    recorded = record_timeline(systems, strategy) if _TIMELINE.value else ""
    if strategy.rank == 0:
        print(recorded)


def _cluster():
    """Returns the `planning.Cluster` of this job."""
    cluster = poseidon.calibrate()
    gbps = _BANDWIDTH.value or float(os.environ.get("TF_POSEIDON_EMULATED_GBPS", 0))
    return dataclasses.replace(cluster, bandwidth_gbps=gbps) if gbps else cluster


def _replicas(rows, strategy):
    """Returns a function that makes a replica of the model, and the emulated model or None."""
    ranks = strategy.num_replicas_in_sync
    _, _, profile = _COMPUTE.value.partition(":")
    if not profile:
        initial = []
        return lambda system: systems_lib.RealReplica(system, _MODEL.value, rows, strategy.rank, ranks,
                                                      initial), None
    model = emulation.EmulatedModel(_MODEL.value, rows, profiles.PROFILES[profile], _DILATION.value,
                                    _SHRINK.value, _ZEROS.value, _MIXED.value)
    return lambda system: systems_lib.EmulatedReplica(system, model, ranks), model


def verify(systems, communicator):
    """Runs one more step of all systems and compares them; they have run one already."""
    trained = [system for system in systems.values() if system.name != systems_lib.SINGLE]
    for system in trained:
        system.replica.check(system.step(), system.plan, communicator, trained[0].replica)


def measure(systems, communicator):
    """Returns the `Measured` of each system, by name; they take turns, each round in another order."""
    measured, names = {name: Measured() for name in systems}, list(systems)
    for turn in _told(range(_ROUNDS.value), communicator.rank == 0):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            system = systems[name]
            for _ in range(_WARM_UP.value):
                system.step()
            payload, on_links, steps = _payload_bytes(communicator), _bytes_on_links(), _STEPS.value * system.steps
            seconds = _seconds(communicator, system.step)
            measured[name].seconds.append(seconds / steps)
            measured[name].payload.append((_payload_bytes(communicator) - payload) / steps)
            measured[name].on_links.append((_bytes_on_links() - on_links) / steps)
    return measured


def _told(rounds, tells):
    """Yields the rounds; shows progress as a bar or, where mpiexec passes output on, in lines."""
    console = rich.console.Console(stderr=True, quiet=not tells)
    if console.is_terminal:
        yield from rich.progress.track(rounds, "rounds", console=console, transient=True)
        return
    begin = time.monotonic()
    for turn in rounds:
        yield turn
        left = (time.monotonic() - begin) / (turn + 1) * (len(rounds) - turn - 1)
        console.print(f"round {turn + 1} of {len(rounds)}, {left:.0f} s left")


def _seconds(communicator, step):
    """Returns how long all ranks take for the steps of a measurement."""
    _wait_for_all(communicator)
    begin = time.perf_counter()
    for _ in range(_STEPS.value):
        step()
    _wait_for_all(communicator)
    return time.perf_counter() - begin


def _wait_for_all(communicator):
    """Waits until this rank's GPUs are idle, and all ranks have come here."""
    _wait_for_gpus()
    communicator.sum("barrier", np.zeros(1, np.float32))


def _wait_for_gpus():
    # Not tf.test.experimental.sync_devices, which beside mwms tries to reach those of other hosts, too.
    for i in range(len(tf.config.list_physical_devices("GPU"))):
        with tf.device(f"GPU:{i}"):
            tf.raw_ops.SyncDevice()


def _payload_bytes(communicator):
    """Returns the payload bytes that this rank has sent and received through our runtime."""
    return sum(counts["sent_bytes"] + counts["received_bytes"]
               for site, counts in communicator.statistics()["sites"].items() if site != "barrier")


def _bytes_on_links():
    """Returns the bytes that have passed this host's network interfaces, except its loopback."""
    lines = pathlib.Path("/proc/net/dev").read_text().splitlines()[2:]
    fields = [line.replace(":", " ").split() for line in lines]
    return sum(int(f[1]) + int(f[9]) for f in fields if f[0] != "lo")


def record_timeline(systems, strategy):
    """Records steps of the first of our systems; returns the table of where their time went."""
    ours = next(system for system in systems.values() if _is_ours(system.name))
    with strategy.timeline(_TIMELINE.value) as recording:
        for _ in range(_STEPS.value * 5):
            ours.step()
    return f"{ours.name}, as it is (not undilated):\n{recording.table(plan=ours.plan)}"


def factors_of(plan):
    """Returns the `planning.Factors` that the plan sends."""
    return [site.factors for site, d in zip(plan.sites, plan.decisions)
            if d.scheme == "sfb" and not d.leader]


def extra_rebuild(factors, cluster, emulated, communicator):
    """Returns how many seconds longer the products of all ranks' rows take than those of this rank's."""
    if emulated or not factors:
        return sum(2 * f.k * f.m * f.n * (cluster.workers - 1) for f in factors) / (cluster.gflops * 1e9)

    def products(ranks, multiply):
        pairs = [(tf.ones((f.k * ranks, f.m)), tf.ones((f.k * ranks, f.n))) for f in factors]
        return tf.function(lambda: [tf.reduce_max(multiply(u, v)[:1]) for u, v in pairs])

    everyone = products(cluster.workers, ops.outer_product)
    own = products(1, lambda u, v: tf.matmul(u, v, transpose_a=True))
    times = []
    for _ in range(_ROUNDS.value):  # on all ranks at the same time, as in a step
        _wait_for_all(communicator)
        begin = time.perf_counter()
        everyone()
        _wait_for_gpus()
        middle = time.perf_counter()
        own()
        _wait_for_gpus()
        times.append((middle - begin) - (time.perf_counter() - middle))
    return max(0.0, statistics.median(times[1:]))


def report(systems, measured, rebuild, cluster, rows):
    """Prints the results as a table and writes them as JSON."""
    dilation, shrink = _DILATION.value, _SHRINK.value
    gbps = cluster.bandwidth_gbps * dilation * shrink
    single = measured[systems_lib.SINGLE].seconds
    compute = statistics.median(single) / dilation
    title = (f"{_MODEL.value}, {rows} rows on each of {cluster.workers} ranks, {gbps:.3g} Gbit/s, compute "
             f"{_COMPUTE.value}")
    if (dilation, shrink) != (1, 1):
        title += f"; dilation {dilation:g}, shrink {shrink:g}"
    first = next((name for name in systems if name != systems_lib.SINGLE), systems_lib.SINGLE)
    header = ("system", "rows/s", "step, ms (quartiles)", "exposed, ms", "MB of a rank", "MB on its link",
              "at least, ms", "step to that", f"step to {first}", "schemes")
    results, lines = [], []
    for name, system in systems.items():
        times, of_first = measured[name].seconds, measured[first].seconds
        summary = timing.milliseconds([t / dilation for t in times])
        row = {"system": name, "step": summary, "rows_per_s": 1e3 * cluster.workers * rows / summary["median_ms"],
               "exposed_ms": 1e3 * statistics.median(a - b for a, b in zip(times, single)) / dilation,
               "payload_bytes": shrink * statistics.median(measured[name].payload) if _counts(name) else None,
               "bytes_on_link": shrink * statistics.median(measured[name].on_links),
               "to_first": statistics.median(a / b for a, b in zip(times, of_first))}
        if name == systems_lib.SINGLE:
            row["rows_per_s"] /= cluster.workers
        if system.plan:
            extra = rebuild[name] / dilation
            wire = shrink * system.plan.total_bytes / 2 * 8 / (gbps * 1e9)
            schemes = [d.scheme for d in system.plan.decisions if not d.leader]
            bound = max(compute + extra, wire)
            row |= {"planned_bytes": shrink * system.plan.total_bytes, "extra_rebuild_ms": 1e3 * extra,
                    "bound_ms": 1e3 * bound, "to_bound": summary["median_ms"] / (1e3 * bound),
                    "schemes": {scheme: schemes.count(scheme) for scheme in sorted(set(schemes))}}
        results.append(row)
        lines.append((name, f"{row['rows_per_s']:,.1f}", timing.milliseconds_text(summary), f"{row['exposed_ms']:.1f}",
                      f"{row['payload_bytes'] / 1e6:.1f}" if _counts(name) else "",
                      f"{row['bytes_on_link'] / 1e6:.1f}",
                      *([f"{row['bound_ms']:.1f}", f"{row['to_bound']:.2f}"] if system.plan else [""] * 2),
                      f"{row['to_first']:.2f}",
                      ", ".join(f"{n} {s}" for s, n in row.get("schemes", {}).items())))
    output.show(title, header, lines)
    output.write_json(_JSON.value, {
        "model": _MODEL.value, "batch_size": rows, "compute": _COMPUTE.value, "dilation": dilation, "shrink": shrink,
        "bandwidth_gbps": gbps, "cluster": dataclasses.asdict(cluster),
        "calibrated": dataclasses.asdict(poseidon.calibrate()), "results": results, "made_by": output.made_by()})


if __name__ == "__main__":
    app.run(main)
