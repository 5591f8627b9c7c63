"""Simulates training on many nodes, with our runtime and with others, and prints a table.

    python scripts/simulate.py --model vgg19 --nodes 1,2,4,8,16,32 --gbps 40 \
        --system poseidon,wfbp,horovod,tensorflow --profile titan_x
    python scripts/simulate.py --model vgg19 --nodes 4 --gbps 1 --steps_per_execution 8
    tf-poseidon explain model.keras --batch_size 32 --workers 8 --plan plan.json
    python scripts/simulate.py --plan plan.json --batch_size 32 --nodes 8,64,512 --gbps 10

The top of simulation.py says what is simulated, and what is left out. --trace writes the step with the most nodes
for chrome://tracing or ui.perfetto.dev: a process per system and node; of nodes that do the same, only the first.
"""

import dataclasses
import math

from absl import app
from absl import flags
import rich.console
import rich.progress

from evaluation import output
from evaluation.simulation import inputs
from evaluation.simulation import simulation
from tf_poseidon import planning
from tf_poseidon.errors import PoseidonError

_MODEL = flags.DEFINE_string("model", "vgg19", "One of zoo.MODELS.")
_PLAN = flags.DEFINE_string("plan", None, "File of a plan: its exchanges are simulated instead of a model's, "
                            "replanned for each number of nodes.")
_PROFILE = flags.DEFINE_string("profile", "titan_x", "The accelerator, one of profiles.PROFILES; not with "
                               "--plan.")
_COMPUTE = flags.DEFINE_float("compute_ms", None, "Time of a step of one accelerator alone; by default the "
                              "profile's, or that of the plan's cluster.", lower_bound=1e-6)
_BATCH = flags.DEFINE_integer("batch_size", None, "Rows of each accelerator; by default the paper's. With "
                              "--plan those of the plan: only images/s depend on it.", lower_bound=1)
_NODES = flags.DEFINE_list("nodes", ["1", "2", "4", "8", "16", "32"], "How many nodes.")
_SYSTEM = flags.DEFINE_list("system", ["poseidon", "wfbp", "horovod"],
                            f"What to simulate: {', '.join(inputs.SYSTEMS)}.")
_GBPS = flags.DEFINE_list("gbps", ["10"], "Rate of a node's link in each direction, 10^9 bits per second; "
                          "one for all nodes, or one per node.")
_LATE = flags.DEFINE_list("late_ms", [], "How much later each node starts computing; empty if none does.")
_EFFICIENCY = flags.DEFINE_float("efficiency", 1.0, "Share of these rates that payload gets.")
_LATENCY = flags.DEFINE_float("latency_us", 50.0, "Of a message.")
_MESSAGE = flags.DEFINE_float("message_us", 0.0, "How long a message occupies a link in addition to its bytes.")
_SERVERS = flags.DEFINE_integer("servers", 0, "Number of nodes that hold KV pairs, dedicated servers included; 0 for "
                                "all.", lower_bound=0)
_DEDICATED = flags.DEFINE_integer("dedicated_servers", 0, "Number of further nodes, which only serve.", lower_bound=0)
_GPUS = flags.DEFINE_integer("gpus_per_node", 1, "Accelerators of a node.")
_LOCAL = flags.DEFINE_float("local_gbytes_per_s", 10.0, "Rate of the link between these, in each direction.")
_COPY = flags.DEFINE_float("copy_gbytes_per_s", math.inf, "Rate of copies between accelerator and host.")
_SUM = flags.DEFINE_float("sum_gbytes_per_s", math.inf, "Rate at which a server sums.")
_STEPS = flags.DEFINE_integer("steps_per_execution", 1, "How many steps of ours overlap until all gradients must have "
                              "arrived; 0 for no such barrier.", lower_bound=0)
_ORDER = flags.DEFINE_enum("order", None, ["fifo", "priority"], "Which message leaves first: what is ready first, or "
                           "what is needed first; by default the latter between steps that overlap.")
_MERGE = flags.DEFINE_bool("merge", False, "Whether small messages wait for each other; see --message_us.")
_KV_PAIR = flags.DEFINE_integer("kv_pair_bytes", None, "Size of KV pairs; by default that of PoseidonStrategy.")
_JSON = output.json_flag()
_TRACE = flags.DEFINE_string("trace", None, "File for the events of the step with the most nodes.")


def numbers(flag, kind):
    """Returns the numbers in the list of a flag.

    Raises:
        SystemExit: If it has something else.
    """
    try:
        return tuple(kind(text) for text in flag.value)
    except ValueError as error:
        raise SystemExit(f"--{flag.name}={','.join(flag.value)}, expected numbers separated by commas "
                         f"({error}): such as --{flag.name} 1,2,4.") from error


def one_of(flag, value, known):
    """Returns the entry that a flag names."""
    if value not in known:
        raise SystemExit(f"--{flag.name}={value}, expected one of {', '.join(known)}: choose one of these.")
    return known[value]


def refuse_others(plan):
    """Raises SystemExit if systems are compared that do not divide the weights that a plan divides."""
    others = [name for name in _SYSTEM.value if name != "poseidon"]
    if plan.divided and others:
        raise SystemExit(
            f"The plan '{_PLAN.value}' divides '{plan.divided[0].path}' among ranks, and has no gradient of it, which "
            f"{', '.join(others)} would exchange, expected --system poseidon; for the others, make a plan that "
            "divides none: tf-poseidon explain --policy ps --plan FILE.")


def make_work():
    """Returns (a title; the `Work` to simulate; rows of each accelerator, None if unknown)."""
    if _PLAN.value:
        plan = planning.Plan.load(_PLAN.value)
        if not plan.operations:
            raise SystemExit(f"The plan '{_PLAN.value}' does not say how much arithmetic a step has, expected a "
                             "number of operations: make a new plan from a training graph.")
        refuse_others(plan)
        seconds = plan.cluster.compute_seconds(plan.operations)
        return _PLAN.value, inputs.Work(
            plan.sites, plan.operations, _COMPUTE.value / 1e3 if _COMPUTE.value else seconds,
            plan.cluster.compute_seconds(1), plan.cluster.accelerators, plan.exchanges), _BATCH.value
    from evaluation.simulation import models  # imported late: they import Keras, which takes some seconds
    from evaluation.workloads import profiles
    from evaluation.workloads import zoo
    model = one_of(_MODEL, _MODEL.value, zoo.MODELS)
    profile = one_of(_PROFILE, _PROFILE.value, profiles.PROFILES)
    batch_size = _BATCH.value or model.batch_size
    work = models.work_of(_MODEL.value, profile, batch_size, _COMPUTE.value / 1e3 if _COMPUTE.value else None)
    return f"{_MODEL.value}, {batch_size} rows on each {profile.name}", work, batch_size


def make_system(name):
    """Returns a `System` with the changes of the flags."""
    system = one_of(_SYSTEM, name, inputs.SYSTEMS)
    steps = _STEPS.value if system.exchange == "plan" and system.overlap else system.steps
    order = _ORDER.value or (system.order if steps == system.steps else "priority")
    return dataclasses.replace(system, order=order, merge=_MERGE.value, kv_pair_bytes=_KV_PAIR.value, steps=steps)


def make_machines(nodes):
    gbps = numbers(_GBPS, float)
    return inputs.Machines(
        nodes, gbps[0] if len(gbps) == 1 else gbps, _LATENCY.value, min(_SERVERS.value, nodes + _DEDICATED.value),
        _EFFICIENCY.value, _MESSAGE.value, _GPUS.value, _LOCAL.value, _COPY.value, _SUM.value,
        tuple(ms / 1e3 for ms in numbers(_LATE, float)), _DEDICATED.value)


def summarize(nodes, name, result, batch_size):
    """Returns a result as values for the table and for JSON."""
    accelerators = nodes * _GPUS.value
    each = result.node_bytes
    return {"nodes": nodes, "system": name, "step_ms": 1e3 * result.step_seconds,
            "images_per_s": batch_size and accelerators * batch_size / result.step_seconds,
            "speed_up": accelerators * result.compute_seconds / result.step_seconds,
            "compute_ms": 1e3 * result.compute_seconds, "exposed_ms": 1e3 * result.exposed_seconds,
            "rebuild_ms": 1e3 * result.rebuild_seconds, "mean_node_bytes": sum(each) / len(each),
            "worst_node_bytes": max(each)}


def trace(results):
    """Returns the events of results, (title, `Result`) pairs, in the format of chrome://tracing.

    Overlapping events of a row get separate lines.
    """
    events, processes, rows = [], {}, {}
    for title, result in results:
        free = {}  # (node, row) -> when each of its lines becomes free
        for event in result.events:
            lines = free.setdefault((event.node, event.row), [])
            line = next((i for i, end in enumerate(lines) if end <= event.begin), len(lines))
            lines[line:line + 1] = [event.end]
            process = processes.setdefault(f"{title}, node {event.node}", len(processes) + 1)
            row = rows.setdefault((process, event.row, line), len(rows) + 1)
            events.append({"name": event.site, "cat": event.row, "ph": "X", "pid": process, "tid": row,
                           "ts": 1e6 * event.begin, "dur": 1e6 * (event.end - event.begin)})
    names = [{"name": "process_name", "ph": "M", "pid": number, "args": {"name": name}}
             for name, number in processes.items()]
    names += [{"name": "thread_name", "ph": "M", "pid": process, "tid": number, "args": {"name": name}}
              for (process, name, _), number in rows.items()]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def print_table(title, rows):
    cells = [(str(row["nodes"]), row["system"], f"{row['step_ms']:.1f}",
              f"{row['images_per_s']:.1f}" if row["images_per_s"] else "", f"{row['speed_up']:.2f}",
              f"{row['exposed_ms']:.1f}", f"{row['rebuild_ms']:.1f}", f"{row['mean_node_bytes'] / 1e9:.3f}",
              f"{row['worst_node_bytes'] / 1e9:.3f}") for row in rows]
    output.show(title, ("nodes", "system", "step, ms", "images/s", "speed-up", "exposed, ms", "rebuild, ms",
                        "GB per node", "worst node"), cells, left=2)


def main(arguments):
    if len(arguments) > 1:
        raise SystemExit(f"There is an argument '{arguments[1]}', expected flags only: see --help.")
    try:
        machines = [make_machines(nodes) for nodes in numbers(_NODES, int)]
        cases = [(m, name, make_system(name)) for m in machines for name in _SYSTEM.value]
        title, work, batch_size = make_work()
        console = rich.console.Console(stderr=True)
        rows, traced = [], []
        for m, name, system in rich.progress.track(cases, "simulating", console=console, transient=True):
            result = simulation.simulate(work, m, system)
            rows.append(summarize(m.nodes, name, result, batch_size))
            if m.nodes == max(m.nodes for m in machines):
                traced.append((name, result))
    except PoseidonError as error:
        raise SystemExit(str(error)) from error
    rates = ", ".join(_GBPS.value)
    share = f" of which {_EFFICIENCY.value:g} for payload," if _EFFICIENCY.value != 1 else ""
    print_table(f"{title}; {rates} Gbit/s,{share} {_LATENCY.value:g} µs; speed-up over one accelerator,\n"
                "bytes sent plus received in a step", rows)
    for path, value in ((_JSON.value, {"title": title, "results": rows, "flags": given_flags(),
                                     "made_by": output.made_by()}),
                        (_TRACE.value, trace(traced))):
        try:
            output.write_json(path, value)
        except OSError as error:
            raise SystemExit(f"The file '{path}' cannot be written ({error.strerror}), expected one in a directory "
                             "that exists: choose another.") from error


def given_flags():
    """Returns the values of this file's flags by name; JSON has no infinity."""
    return {flag.name: flag.value for flag in flags.FLAGS.get_key_flags_for_module("__main__")
            if flag.value not in (None, math.inf)}


if __name__ == "__main__":
    app.run(main)
