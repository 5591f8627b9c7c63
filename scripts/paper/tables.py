"""Sets the paper's results (claims.py) beside ours: emulated where they are, simulated beyond.

    python scripts/paper/tables.py                          # all parts: some minutes
    python scripts/paper/tables.py --parts traffic,stalls   # these anew; the report has all
    python scripts/paper/tables.py --parts ''               # the report anew, from what is stored

Each part is kept as docs/results/paper/PART.json, with a plot; docs/results/paper.md is made of these alone.
Emulated points are those of docs/results/emulated.json (bench_emulated.py), by model, accelerator, system,
rate and nodes. Everything else is scripts/simulation/simulation.py at one setting, that of EFFICIENCY and LATENCY_US.
"""

import dataclasses
import functools
import json
import math
import pathlib
import sys

from absl import app
from absl import flags
import claims
from claims import CLAIMS
import rich.console
import rich.progress

from tf_poseidon.planning import cost

_SCRIPTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[1:1] = [str(_SCRIPTS / room) for room in ("simulation", "benchmarks")]  # see scripts/README.md
import simulation  # noqa: E402

_PARTS = flags.DEFINE_list("parts", None, "What to compute anew: all by default.")
_OUT = flags.DEFINE_string("out", "docs/results", "Directory of emulated.json and paper.md.")

EFFICIENCY = 0.94  # what TCP's payload is of Ethernet with frames of 1500 bytes
LATENCY_US = 50.0
_LITTLE = 0.15  # of the bytes: factors that save less are not worth their name
BUS_GBYTES_PER_S = 10.0  # PCI Express 3 with 16 lanes, as it is reached
# What bench_emulated.py calls the systems of simulation.SYSTEMS.
EMULATED_AS = {"poseidon": "poseidon", "poseidon-paper": "poseidon-paper", "wfbp": "poseidon-ps",
               "horovod": "horovod", "mwms": "mwms"}
ENGINES = {"titan_x": "Caffe", "titan_x_tf": "TensorFlow"}  # as which' rates a profile has
LABELS = {"poseidon": "ours", "poseidon-paper": "Poseidon", "wfbp": "WFBP", "ps": "PS, no overlap",
          "tensorflow": "stock TF", "adam": "Adam", "horovod": "Horovod", "mwms": "MWMS",
          "googlenet": "GoogLeNet", "vgg19": "VGG19",
          "vgg19_22k": "VGG19-22K", "inception_v3": "Inception-V3", "resnet152": "ResNet-152",
          "resnet50": "ResNet-50", "bert_base_head": "BERT-base head"}
LAYERS = {"VGG19 fc6": (25088, 4096), "VGG19 fc7": (4096, 4096), "VGG19 fc8": (4096, 1000),
          "VGG19-22K fc8": (4096, 21841), "GoogLeNet": (1024, 1000), "ResNet": (2048, 1000),
          "BERT-base head": (768, 30522)}


@dataclasses.dataclass(frozen=True)
class Point:
    """One step to be simulated; attributes as of `claims.Claim`, rates as told."""

    model: str
    profile: str
    system: str
    nodes: int
    gbps: float
    gpus: int = 1

    @property
    def key(self):
        return f"{self.model} {self.profile} {self.system} {self.nodes}x{self.gpus} {self.gbps:g}"


@functools.cache
def _profile(name):
    import profiles  # late, since they import Keras, which takes some seconds
    if name != "k80":
        return profiles.PROFILES[name]
    fast = profiles.PROFILES["titan_x"]
    return dataclasses.replace(fast, name="k80", gflops=fast.gflops / 2,
                               images_per_s={m: rate / 2 for m, rate in fast.images_per_s.items()})


@functools.cache
def _work(model, profile):
    import zoo
    profile, rows = _profile(profile), zoo.MODELS[model].batch_size
    return simulation.Work(zoo.sites(model, rows), rows * zoo.operations(model),
                           profile.step_seconds(model, rows), 1e-9 / profile.gflops)


def simulate(point, gbps=None, bus=BUS_GBYTES_PER_S, copy=math.inf, message_us=0.0):
    """Returns the `simulation.Result` of a point, at the rate `gbps` of payload if it is given."""
    machines = simulation.Machines(point.nodes, gbps or EFFICIENCY * point.gbps, LATENCY_US, message_us=message_us,
                                   gpus_per_node=point.gpus, local_gbytes_per_s=bus, copy_gbytes_per_s=copy)
    return simulation.simulate(_work(point.model, point.profile), machines, simulation.SYSTEMS[point.system])


def measure(point, emulated=()):
    """Returns what is stored of a point; `emulated` is the content of emulated.json."""
    result, accelerators = simulate(point), point.nodes * point.gpus
    step, bits = result.step_seconds, [8e-9 * b for b in result.node_bytes]
    found = {"step_s": step, "speed_up": accelerators * result.compute_seconds / step,
             "compute_s": result.compute_seconds, "rebuild_s": result.rebuild_seconds,
             "waiting": max(0.0, 1 - (result.compute_seconds + result.rebuild_seconds) / step),
             "busy": 8e-9 * max(*result.sent, *result.received, 0) / (EFFICIENCY * point.gbps) / step,
             "gb_mean": sum(bits) / point.nodes, "gb_worst": max(bits)}
    if point.system == "adam":
        found["gb_of_nodes"] = bits
    found = json.loads(json.dumps(found), parse_float=lambda text: float(f"{float(text):.6g}"))
    return {**dataclasses.asdict(point), **found, "schemes": _schemes(point),
            "emulated": _emulated(point, emulated)}


def _schemes(point):
    """Returns how the gradients of dense layers travel, None where that is not planned."""
    if not point.system.startswith("poseidon") or point.nodes * point.gpus == 1:
        return None
    machines = simulation.Machines(point.nodes, EFFICIENCY * point.gbps, LATENCY_US, gpus_per_node=point.gpus)
    plan = simulation.make_plan(_work(point.model, point.profile), machines, simulation.SYSTEMS[point.system])
    return ", ".join(d.scheme.upper() for s, d in zip(plan.sites, plan.decisions) if s.factors)


def _emulated(point, runs):
    """Returns the emulated step of a point, of the run that shrinks tensors least; None without one."""
    name = EMULATED_AS.get(point.system)
    fitting = [run for run in runs if point.gpus == 1 and name in run["run"]["systems"].split(",")
               and (point.model, point.profile, point.nodes, 1, point.gbps, None) == tuple(
                   run["run"][k] for k in ("model", "profile", "hosts", "ranks_per_host", "gbps", "batch_size"))]
    if not fitting:
        return None
    rows = {row["system"]: row for row in min(fitting, key=lambda run: run["run"]["shrink"])["results"]}
    step, payload = rows[name]["step"]["median_ms"] / 1e3, rows[name]["payload_bytes"]
    return {"step_s": step, "speed_up": point.nodes * rows["single"]["step"]["median_ms"] / 1e3 / step,
            "gb_mean": payload and 8e-9 * payload}


def rate_for(point, seconds, share=0.01, **options):
    """Returns the rate of payload in Gbit/s at which a step takes so long, within a share of it."""
    low, high = 1.0, 100.0
    while high / low > 1 + share:
        middle = math.sqrt(low * high)
        is_slow = simulate(point, middle, **options).step_seconds > seconds
        low, high = (middle, high) if is_slow else (low, middle)
    return math.sqrt(low * high)


def point_of(claim):
    return Point(claim.model, claim.profile or PARTS[claim.part].profile, claim.system, claim.nodes,
                 claim.gbps, claim.gpus)


def _alone(point):
    """Returns how long all rows of a step would take one accelerator."""
    return point.nodes * point.gpus * _work(point.model, point.profile).seconds


def _speed_up(point, gbps=None):
    return _alone(point) / simulate(point, gbps).step_seconds


def _seconds(claim):
    """Returns how long the paper's step takes."""
    return claim.number if claim.unit == "s" else _alone(point_of(claim)) / claim.number


def _rate(claim, **options):
    """Returns the rate that explains a claim by itself."""
    return rate_for(point_of(claim), _seconds(claim), **options)


def _claim(part, model, system, nodes, unit="x", gpus=1):
    """Returns the first claim of these that has a number."""
    return next(c for c in CLAIMS if (c.part, c.model, c.system, c.nodes, c.unit, c.gpus) == (
        part, model, system, nodes, unit, gpus) and c.number is not None)


def _one_rate():
    """Returns the rate that explains the best known time of WFBP."""
    return _rate(_claim("scaling_caffe", "vgg19_22k", "wfbp", 8, "s"))


# ---- facts: what reasons and texts are made of -------------------------------------------------

def _facts_caffe():
    at = functools.partial(_claim, "scaling_caffe", "vgg19_22k", unit="s")
    work, one, ps = _work("vgg19_22k", "titan_x"), _one_rate(), at("ps", 8)
    ps_alone = at("ps", 1).number - work.seconds
    copy = 2e-9 * sum(s.num_bytes for s in work.sites) / ps_alone
    explained = []
    for claim in CLAIMS:
        if (claim.part in ("scaling_caffe", "scaling_tensorflow", "bandwidth") and claim.nodes > 1
                and claim.system in ("wfbp", "poseidon-paper") and claim.number is not None):
            point = point_of(claim)
            explained.append({
                "claim": CLAIMS.index(claim), "paper": _alone(point) / _seconds(claim),
                "gbps": _rate(claim) if claim.system == "wfbp" else None, "nominal": _speed_up(point),
                "one_rate": _speed_up(point, min(one, EFFICIENCY * claim.gbps))})
    return {"wfbp_gbps": one, "wfbp_share": one / 40, "wfbp_alone_s": at("wfbp", 1).number - work.seconds,
            "wfbp_busy": measure(point_of(at("wfbp", 8)))["busy"], "wfbp_2_gbps": _rate(at("wfbp", 2)),
            "wfbp_vgg19_gbps": _rate(_claim("scaling_caffe", "vgg19", "wfbp", 32)),
            "ps_alone_s": ps_alone, "ps_copy": copy, "ps_gbps": _rate(ps, copy=copy),
            "ps_with_copies_s": simulate(point_of(ps), copy=copy).step_seconds,
            "timed_8": 8 * work.seconds / at("wfbp", 8).number, "timed_ps_8": 8 * work.seconds / ps.number,
            "wfbp_10gbe": _speed_up(Point("vgg19_22k", "titan_x", "wfbp", 16, 10)), "explained": explained}


def _facts_tensorflow():
    at = functools.partial(_claim, "scaling_tensorflow", nodes=32)
    stock = _rate(at("inception_v3", "tensorflow"), share=0.05)
    return {"tf_gbps": _rate(at("vgg19", "wfbp")), "tf_22k_gbps": _rate(at("vgg19_22k", "wfbp")),
            "stock_gbps": stock, "stock_share": stock / 40,
            "stock_22k": _speed_up(point_of(at("vgg19_22k", "tensorflow")), stock)}


def _facts_bandwidth():
    return {"vgg19_gbps": _rate(_claim("bandwidth", "vgg19", "wfbp", 16)),
            "wfbp_22k": _speed_up(Point("vgg19_22k", "titan_x", "wfbp", 16, 10))}


def _facts_traffic():
    claim, one = _claim("traffic", "vgg19", "adam", 8), _one_rate()
    result = simulate(point_of(claim))
    worst = 8e-9 * max(*result.sent, *result.received)
    return {"adam_gb": worst, "adam_s": worst / (EFFICIENCY * 40), "one_rate": one, "adam_gbps": _rate(claim),
            "adam_slow": _speed_up(point_of(claim), one), **{
                f"rest_{model}": 8e-9 * _besides_largest(model, 8) for model in ("vgg19", "vgg19_22k")}}


def _besides_largest(model, nodes):
    """Returns the bytes that the server of the largest matrix has of all else, with Adam's exchange."""
    sites = sorted(_work(model, "titan_x_tf").sites, key=lambda site: site.num_bytes)[:-1]
    return sum(s.num_bytes + s.factors.num_bytes if s.factors else
               cost.parameter_server(s.num_bytes, nodes, nodes) for s in sites)


def _facts_gpus():
    facts = {"bus": BUS_GBYTES_PER_S}
    for model in ("googlenet", "vgg19"):
        claim, work = _claim("gpus", model, "ps", 1, gpus=4), _work(model, "titan_x")
        num_bytes = 2 * (claim.gpus - 1) * sum(s.num_bytes for s in work.sites)
        facts[f"bus_{model}"] = 1e-9 * num_bytes / (_seconds(claim) - work.seconds)
    claim = _claim("gpus", "vgg19", "poseidon-paper", 4, gpus=8)
    result = simulate(point_of(claim))
    return facts | {"k80_exposed_ms": 1e3 * result.exposed_seconds, "k80_step_ms": 1e3 * result.step_seconds,
                    "k80_rebuild_ms": 1e3 * result.rebuild_seconds,
                    "k80_more_ms": 1e3 * (_seconds(claim) - result.step_seconds)}


def _facts_beyond():
    slow = {system: 1e3 * simulate(Point("vgg19", "a100", system, 1024, 100), message_us=10).step_seconds
            for system in ("poseidon", "horovod", "mwms")}
    largest = {f"{layer} {k}": largest_nodes(*shape, k) for layer, shape in LAYERS.items() for k in (8, 32, 128)}
    return {"with_messages": slow, "largest": largest}


def largest_nodes(m, n, k):
    """Returns the most nodes at which factors of a layer are no more bytes than a parameter server's."""
    nodes = 2
    while cost.factor_broadcasting(4 * k * (m + n), nodes) <= cost.parameter_server(4 * m * n, nodes, nodes):
        nodes += 1
    return nodes - 1


# ---- parts -------------------------------------------------------------------------------------

def grid(models, profile, systems, nodes, rates=(40,), gpus=(1,)):
    return tuple(Point(m, profile, s, n, r, g) for m in models for r in rates for n in nodes for g in gpus
                 for s in systems)


@dataclasses.dataclass(frozen=True)
class Part:
    """A section of the report.

    Attributes:
        title, about: Its heading, and what stands below.
        profile: The accelerator, of profiles.PROFILES or "k80".
        points: What its table has.
        facts: Returns what texts need beyond.
        cell: Text of a row in the table; the default is the speed-up.
        legend: What the cells are.
    """

    title: str
    about: str
    profile: str
    points: tuple[Point, ...]
    facts: object = dict
    cell: object = lambda row: f"{row['speed_up']:.2f}" + (
        f" ({row['emulated']['speed_up']:.2f})" if row["emulated"] else "")
    legend: str = "Speed-up over one accelerator, simulated; in brackets emulated."


_NODES = (1, 2, 4, 8, 16, 32)
PARTS = {
    "scaling_caffe": Part(
        "Scaling with Caffe, 40 GbE",
        "One Titan X on each node. The paper's points of VGG19-22K are timings of an author; those of the "
        "other models are missing.", "titan_x",
        grid(("googlenet", "vgg19", "vgg19_22k"), "titan_x",
             ("poseidon", "poseidon-paper", "wfbp", "ps"), _NODES), _facts_caffe),
    "scaling_tensorflow": Part(
        "Scaling with TensorFlow, 40 GbE",
        "As above, at the rates of one node with TensorFlow. Stock TensorFlow keeps each variable whole on "
        "one server.", "titan_x_tf",
        grid(("inception_v3", "vgg19", "vgg19_22k", "resnet152"), "titan_x_tf",
             ("poseidon", "poseidon-paper", "wfbp", "tensorflow"), _NODES), _facts_tensorflow),
    "bandwidth": Part(
        "Less bandwidth, Caffe", "The paper's curves are missing; what is left are these statements.",
        "titan_x",
        grid(("googlenet",), "titan_x", ("poseidon", "poseidon-paper", "wfbp"), _NODES[1:5], (2, 5, 10))
        + grid(("vgg19", "vgg19_22k"), "titan_x", ("poseidon", "poseidon-paper", "wfbp"), _NODES[1:5],
               (10, 20, 30)),
        _facts_bandwidth),
    "stalls": Part(
        "How long accelerators wait, 8 nodes with TensorFlow, 40 GbE",
        "All percentages of the paper are missing (M), so nothing is checked here. It says that with "
        "Poseidon accelerators are busy most of the time, and with stock TensorFlow wait most of it (R). "
        "With the latter ours wait less, as it scales further in a section above, for the same reason.",
        "titan_x_tf",
        grid(("inception_v3", "vgg19", "vgg19_22k"), "titan_x_tf",
             ("tensorflow", "wfbp", "poseidon-paper", "poseidon"), (8,)),
        cell=lambda row: f"{row['waiting']:.0%}, {row['rebuild_s'] / row['step_s']:.0%}",
        legend="Share of a step in which an accelerator waits, and in which it rebuilds gradients."),
    "traffic": Part(
        "Bytes on the network with TensorFlow, 40 GbE",
        "The heights of the paper's bars are missing (M). In their place stand those that its table 1 gives, "
        "for 32 rows on each node. Bytes do not depend on the accelerator; the first table's are of the "
        "Titan X with Caffe, of which there are emulated ones.", "titan_x_tf",
        grid(("vgg19", "vgg19_22k", "inception_v3"), "titan_x_tf",
             ("wfbp", "adam", "poseidon-paper", "poseidon"), (8, 16, 32)), _facts_traffic,
        lambda row: f"{row['gb_mean']:.2f} / {row['gb_worst']:.2f}",
        "Gb (10^9 bits) that a node sends plus receives in a step, mean / worst node: what is simulated is "
        "counted, not estimated."),
    "gpus": Part(
        "Several accelerators in a node",
        "Four Titan X in one node, and four nodes with 8 K80-class accelerators each. No profile is of a "
        "K80; the one named k80 is a Titan X at half of its rate, by what both can compute at most (a "
        "guess), and its nodes have 10 GbE, as such nodes of clouds had (a guess).", "titan_x",
        grid(("googlenet", "vgg19", "vgg19_22k"), "titan_x", ("poseidon", "poseidon-paper", "wfbp", "ps"), (1,),
             gpus=(1, 2, 4))
        + grid(("googlenet", "vgg19"), "k80", ("poseidon", "poseidon-paper", "wfbp", "ps"), (4,), (10,), (8,)),
        _facts_gpus),
    "beyond": Part(
        "Beyond the paper: A100, up to 1024 nodes",
        "Nothing here is measured. Horovod and MWMS are rings as the simulator knows them: fused buffers of "
        "128 MiB, and one buffer of all gradients after backpropagation; libraries of GPUs also have trees, "
        "which many nodes need. BERT-base's head is trained alone, so hardly anything is computed in a step, and "
        "the network is all. A message takes its bytes and the latency, and nothing else: with 10 us of a link "
        "for each, VGG19 over 100 Gbit/s takes {with_messages[poseidon]:.0f} ms with ours on 1024 nodes, "
        "{with_messages[horovod]:.0f} with Horovod and {with_messages[mwms]:.0f} with MWMS.", "a100",
        grid(("vgg19", "resnet50", "bert_base_head"), "a100",
             ("poseidon", "poseidon-paper", "wfbp", "horovod", "mwms"), (2, 8, 32, 128, 1024), (10, 25, 100)),
        _facts_beyond,
        lambda row: f"{1e3 * row['step_s']:,.0f}", "Milliseconds of a step, simulated."),
}


def compute(name, emulated, track=lambda points, description: points):
    """Returns the content of PART.json."""
    part = PARTS[name]
    told = (point_of(c) for c in CLAIMS if c.part == name and c.unit != "nodes")
    points = dict.fromkeys((*part.points, *told))
    rows = {p.key: measure(p, emulated) for p in track(list(points), description=name)}
    facts = json.loads(json.dumps(part.facts()), parse_float=lambda text: float(f"{float(text):.6g}"))
    return {"part": name, "efficiency": EFFICIENCY, "latency_us": LATENCY_US, "rows": rows, "facts": facts}


def load(path):
    """Returns the content of a JSON file.

    Raises:
        SystemExit: If it is none.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"The file '{path}' cannot be read ({error}), expected JSON: make it again.") from error


# ---- the report, of stored parts alone ---------------------------------------------------------

def stored(out):
    """Returns the contents of all parts in a directory, by name."""
    return {name: load(out / "paper" / f"{name}.json") for name in PARTS}


def ours(claim, data):
    """Returns (emulated, simulated) of a claim, None where there is no such number."""
    if claim.unit == "nodes":
        return None, data["facts"]["largest"][f"{claim.model} {claim.nodes}"]
    row = data["rows"][point_of(claim).key]
    if claim.unit == "schemes":
        return None, row["schemes"]
    field = {"x": "speed_up", "s": "step_s", "Gb": "gb_mean", "Gb, worst": "gb_worst",
             "% waiting": "waiting"}[claim.unit]
    times = 100 if claim.unit == "% waiting" else 1
    emulated = row["emulated"] and row["emulated"].get(field)
    return emulated and times * emulated, times * row[field]


def compare(claim, data):
    """Returns (emulated, simulated, difference of the first that is there, text of the reason).

    Raises:
        SystemExit: If a claim that is checked differs by more than TOLERANCE without a reason, or a number
            cannot be.
    """
    emulated, simulated = ours(claim, data)
    value = simulated if emulated is None else emulated
    accelerators = claim.nodes * claim.gpus
    name = f"{claim.part}: {_name(claim)}, {_where(claim)}"
    most = accelerators * (1 + claims.TOLERANCE) if claim.unit == "x" else math.inf
    if not isinstance(value, str) and not (math.isfinite(value) and 0 <= value <= most):
        raise SystemExit(f"{name} has {value} {claim.unit}, expected a finite number, not negative, and a "
                         f"speed-up of at most {accelerators}: compute the part again.")
    difference, reason = claim.difference(value), ""
    if difference is not None and abs(difference) > claims.TOLERANCE:
        if claim.reason:
            reason = claims.REASONS[claim.reason].format(**data["facts"], efficiency=data["efficiency"])
        if emulated and abs(emulated / simulated - 1) > claims.TOLERANCE:
            reason += claims.EMULATION.format(value=abs(emulated / simulated - 1))
        if claim.is_checked and not reason:
            raise SystemExit(f"{name} has {value:.4g} {claim.unit}, expected the paper's {claim.number:g} "
                             f"within {claims.TOLERANCE:.0%}: give the claim a reason, or mend the "
                             "number.")
    return emulated, simulated, difference, reason.strip()


def _lines(header, rows):
    """Returns the lines of a Markdown table."""
    return ["| " + " | ".join(header) + " |", "|" + "---|" * len(header),
            *("| " + " | ".join(row) + " |" for row in rows), ""]


def _show(value, unit):
    if value is None or isinstance(value, str):
        return value or ""
    text = {"s": f"{value:.3f} s", "x": f"{value:.2f}x", "% waiting": f"{value:.0f} %",
            "nodes": f"{value} nodes"}.get(unit)
    return text or f"{value:.2f} Gb"


def said(claim):
    """Returns the paper's number as the report prints it."""
    if claim.number is None:
        return claim.said
    text = "<= " * claim.is_at_most + _show(claim.number, claim.unit).replace(".00x", "x")
    return text + (f" ({claim.said})" if claim.said else "")


def _name(claim):
    return f"{LABELS.get(claim.model, claim.model)}, {LABELS[claim.system]}"


def _where(claim):
    if claim.unit == "nodes":
        return f"K = {claim.nodes}"
    return f"{claim.nodes}" + (f" x {claim.gpus}" if claim.gpus > 1 else "") + f" at {claim.gbps:g}"


def claims_table(name, data):
    """Returns the lines of the claims of a part, and the reasons below."""
    reasons, rows = [], []
    for claim in CLAIMS:
        if claim.part != name:
            continue
        emulated, simulated, difference, reason = compare(claim, data)
        if reason and reason not in reasons:
            reasons.append(reason)
        rows.append([_name(claim), _where(claim), said(claim),
                     f"{claim.grade}, {claim.source}" if claim.number is not None else claim.grade,
                     _show(emulated, claim.unit), _show(simulated, claim.unit),
                     "" if difference is None else f"{difference:+.1%}",
                     f"{reasons.index(reason) + 1}" if reason else ""])
    header = ["what", "nodes at Gbit/s", "paper", "grade", "emulated", "simulated", "differs", "why"]
    return [*_lines(header, rows), *(f"{i}. {reason}" for i, reason in enumerate(reasons, 1)),
            *([""] if reasons else [])]


def curves_table(name, data):
    """Returns the lines of the table of a part's points: a row for each cluster, a column for each system."""
    part, groups = PARTS[name], {}
    for point in part.points:
        groups.setdefault((point.gbps, point.model, point.nodes, point.gpus), {})[point.system] = (
            data["rows"][point.key])
    systems, tables, saved = list(dict.fromkeys(p.system for p in part.points)), {}, {}
    for (gbps, model, nodes, gpus), found in groups.items():
        dense, hybrid = (found[s]["gb_mean"] for s in ("wfbp", "poseidon-paper"))
        share = 1 - hybrid / dense if nodes > 1 else 0.0  # within a node there is no network
        if nodes > 1:
            saved[model] = max(share, saved.get(model, 0.0))
        others = _best_other(found)
        tables.setdefault(gbps, []).append([
            LABELS[model], f"{nodes}" + (f" x {gpus}" if gpus > 1 else ""),
            *(part.cell(found[s]) for s in systems), f"{share:.0%}",
            f"{others / found['poseidon']['step_s']:.2f}"
        ])
    none = [f"{LABELS[model]} ({share:.0%})" for model, share in saved.items() if share < _LITTLE]
    lines = [
        f"{part.legend} *Saved*: bytes that factors save against WFBP. *Gain*: the shortest step of all systems "
        "but this project's, divided by ours." + (f" No gain is expected of {', '.join(none)}: so little of the "
                                                  "bytes do factors save at most." if none else ""), ""
    ]
    for gbps, rows in sorted(tables.items()):
        lines += [f"Links of {gbps:g} Gbit/s:", ""] if len(tables) > 1 else []
        lines += _lines(["model", "nodes", *(LABELS[s] for s in systems), "saved", "gain"], rows)
    return lines


def _best_other(found):
    """Returns the shortest step of the rows, by system, that are not of this project."""
    return min(row["step_s"] for system, row in found.items() if not system.startswith("poseidon"))


def _worst_gain(parts):
    """Returns (step divided by that of the best other system, row) where ours gains least."""
    groups = {}
    for part in parts.values():
        for row in part["rows"].values():
            where = tuple(row[key] for key in ("model", "profile", "nodes", "gbps", "gpus"))
            groups.setdefault(where, {})[row["system"]] = row
    compared = [(found["poseidon"]["step_s"] / _best_other(found), found["poseidon"])
                for found in groups.values() if "poseidon" in found]
    return max(compared, key=lambda pair: pair[0])


def rates_table(facts):
    """Returns the lines of what one rate of all links would explain."""
    rows = []
    for row in facts["explained"]:
        claim = CLAIMS[row["claim"]]
        rows.append([f"{_name(claim)}, {ENGINES[point_of(claim).profile]}", _where(claim),
                     f"{row['paper']:.2f}", claim.grade, f"{row['nominal']:.2f}",
                     f"{row['gbps']:.1f}" if row["gbps"] else "", f"{row['one_rate']:.2f}"])
    header = ["what", "nodes at Gbit/s", "paper", "grade", "ours", "rate it needs", "ours at one rate"]
    text = claims.RATES.format(**facts)
    return ["### What single rate explains WFBP", "", text, "", *_lines(header, rows)]


def summary(parts):
    """Returns the lines at the top: what agrees, what does not, and why."""
    compared = [(c, *compare(c, parts[c.part])) for c in CLAIMS if c.is_checked]
    off = [row for row in compared if abs(row[3]) > claims.TOLERANCE]
    counts = {}
    for is_derived, suffix in ((False, ""), (True, "_d")):
        of = [row for row in compared if (row[0].grade == "D") == is_derived]
        counts |= {f"checked{suffix}": len(of), f"agree{suffix}": sum(row not in off for row in of)}
    rows = [row for part in parts.values() for row in part["rows"].values()]
    ratios = sorted(r["emulated"]["step_s"] / r["step_s"] for r in rows if r["emulated"])
    emulation = "All are simulated: docs/results/emulated.json has none of these points yet."
    if ratios:
        emulation = (f"{len(ratios)} points are emulated too; their steps take {ratios[0]:.2f} to "
                     f"{ratios[-1]:.2f} times the simulated ones, {ratios[len(ratios) // 2]:.2f} in the "
                     "middle.")
    caffe, tensorflow = parts["scaling_caffe"], parts["scaling_tensorflow"]
    at = {f"{system}_{nodes}": part["rows"][Point("vgg19_22k", profile, system, nodes, 40).key]["speed_up"]
          for part, profile, nodes in ((caffe, "titan_x", 8), (tensorflow, "titan_x_tf", 32))
          for system in ("poseidon", "poseidon-paper", "wfbp")}
    exceptions = [f"{_name(row[0])}, {_where(row[0])} Gbit/s" for row in off if row[0].system == "poseidon-paper"]
    slower, row = _worst_gain(parts)
    text = claims.SUMMARY.format(
        **caffe | at | counts | caffe["facts"] | tensorflow["facts"], emulation=emulation, slower=slower - 1,
        where=f"{LABELS[row['model']]} on {row['nodes']} {_profile_label(row)} over {row['gbps']:g} Gbit/s",
        exceptions="; ".join(exceptions) or "nowhere",
        differ=_num_different_plans(rows))
    kinds = {}
    for row in compared:
        kind = LABELS[row[0].system] + {"Gb": ", bytes", "Gb, worst": ", bytes",
                                        "nodes": ", break-even"}.get(row[0].unit, "")
        kinds.setdefault(kind, []).append(row in off)
    return [text, "", *_lines(["what", "can be checked", "within 5 %"], [
        [kind, str(len(are_off)), str(are_off.count(False))] for kind, are_off in kinds.items()]),
        "Those that differ by more; the sections say why:", "",
        *_lines(["what", "nodes at Gbit/s", "paper", "grade", "ours", "differs", "section"], [
            [_name(c), _where(c), said(c), c.grade,
             _show(simulated if emulated is None else emulated, c.unit), f"{difference:+.0%}",
             PARTS[c.part].title.partition(",")[0]]
            for c, emulated, simulated, difference, _ in off])]


def _profile_label(row):
    return {"titan_x": "Titan X", "titan_x_tf": "Titan X", "a100": "A100"}.get(row["profile"], row["profile"])


def _num_different_plans(rows):
    """Returns at how many points our policy and the paper's Algorithm 1 make different plans."""
    plans = {}
    for row in rows:
        if row["schemes"]:
            where = tuple(row[key] for key in ("model", "profile", "nodes", "gbps", "gpus"))
            plans.setdefault(where, set()).add(row["schemes"])
    return sum(len(schemes) > 1 for schemes in plans.values())


def report(parts):
    """Returns the text of paper.md, of the stored parts alone."""
    lines = ["# The paper's results beside ours", "", *summary(parts),
             "## How sure the paper's numbers are", "",
             *_lines(["grade", "meaning"], [list(item) for item in claims.GRADES.items()])]
    for name, part in PARTS.items():
        data = parts[name]
        lines += [f"## {part.title}", "", part.about.format(**data["facts"]), ""]
        lines += claims_table(name, data) + curves_table(name, data)
        if name == "scaling_caffe":
            lines += rates_table(data["facts"])
        lines += [f"![{part.title}](paper/{name}.png)", ""]
        if name in ("scaling_caffe", "scaling_tensorflow", "bandwidth"):
            lines += ["x is a number of the paper, + one that is no check, a circle an emulated one.", ""]
        if name == "beyond":
            lines += ["![Where factors are fewer bytes](paper/break_even.png)", ""]
    return "\n".join(lines)


# ---- plots -------------------------------------------------------------------------------------

def plot(data, directory):
    """Writes the plots of a part."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    name = data["part"]

    def figure(columns, file, draw, rows=1, width=4):
        made, axes = pyplot.subplots(rows, columns, figsize=(width * columns, 3.4 * rows), squeeze=False)
        draw(axes)
        made.tight_layout()
        # Without the version of matplotlib.
        made.savefig(directory / f"{file}.png", dpi=90, metadata={"Software": None})
        pyplot.close(made)

    rows = [data["rows"][point.key] for point in PARTS[name].points]
    models = list(dict.fromkeys(row["model"] for row in rows))
    if name in ("stalls", "traffic", "gpus"):
        figure(len(models), name,
               lambda axes: [_bars(ax, name, model, rows) for ax, model in zip(axes[0], models)])
    elif name == "beyond":
        rates = sorted({row["gbps"] for row in rows})
        figure(len(models), name, lambda axes: [
            _curves(axes[i][j], [r for r in rows if (r["model"], r["gbps"]) == (model, gbps)], True)
            for i, gbps in enumerate(rates) for j, model in enumerate(models)], len(rates))
        figure(1, "break_even", lambda axes: _break_even(axes[0][0]), width=7)
    else:
        figure(len(models), name, lambda axes: [
            _curves(ax, [r for r in rows if r["model"] == m], False) for ax, m in zip(axes[0], models)])


def _curves(ax, rows, is_log):
    """Draws speed-ups over nodes; the paper's as x, or + if they are no check, emulated ones as circles."""
    rates = list(dict.fromkeys(r["gbps"] for r in rows))
    nodes = sorted({r["nodes"] for r in rows})
    ax.plot(nodes, nodes, ":", color="grey", label="linear")
    for i, system in enumerate(dict.fromkeys(r["system"] for r in rows)):
        for gbps, dashes in zip(rates, ("-", "--", "-.")):
            of = [r for r in rows if (r["system"], r["gbps"]) == (system, gbps)]
            label = LABELS[system] + (f", {gbps:g} Gbit/s" if len(rates) > 1 else "")
            ax.plot([r["nodes"] for r in of], [r["speed_up"] for r in of], dashes, color=f"C{i}", label=label)
            measured = [(r["nodes"], r["emulated"]["speed_up"]) for r in of if r["emulated"]]
            ax.plot(*zip(*measured) if measured else ((), ()), "o", color=f"C{i}", mfc="none")
            keys = {r["nodes"]: Point(**{f.name: r[f.name] for f in dataclasses.fields(Point)}) for r in of}
            alone = of[0]["compute_s"]
            for claim in CLAIMS:
                if claim.unit in ("x", "s") and claim.number and point_of(claim) == keys.get(claim.nodes):
                    told = claim.number if claim.unit == "x" else claim.nodes * alone / claim.number
                    ax.plot([claim.nodes], [told], "x" if claim.is_checked else "+", color=f"C{i}")
    ax.set(title=LABELS[rows[0]["model"]] + (f", {rates[0]:g} Gbit/s" if is_log else ""), xlabel="nodes",
           ylabel="speed-up", xscale="log" if is_log else "linear", yscale="log" if is_log else "linear")
    ax.legend(fontsize=6)


def _bars(ax, name, model, rows):
    """Draws bars: of shares of a step, of the bytes of each node, or of speed-ups."""
    rows = [r for r in rows if r["model"] == model and (name != "traffic" or r["nodes"] == 8)]
    systems = list(dict.fromkeys(r["system"] for r in rows))
    ax.set_title(LABELS[model] + (", 8 nodes" if name != "gpus" else ""))
    if name == "stalls":
        rebuild = [r["rebuild_s"] / r["step_s"] for r in rows]
        waiting, bottom = [r["waiting"] for r in rows], [0.0] * len(rows)
        for label, heights in (("computing", [1 - a - b for a, b in zip(rebuild, waiting)]),
                               ("rebuilding", rebuild), ("waiting", waiting)):
            ax.bar([LABELS[s] for s in systems], heights, bottom=bottom, label=label)
            bottom = [a + b for a, b in zip(bottom, heights)]
        ax.set_ylabel("share of a step")
    elif name == "traffic":
        for i, row in enumerate(rows):
            heights = row.get("gb_of_nodes") or [row["gb_mean"]] * 8
            ax.bar([node + _offset(i, rows) for node in range(8)], heights, 0.84 / len(rows),
                   label=LABELS[row["system"]])
        ax.set(xlabel="node", ylabel="Gb sent + received in a step")
    else:
        places = list(dict.fromkeys(f"{r['nodes']} x {r['gpus']}" for r in rows))
        for i, system in enumerate(systems):
            of = [r for r in rows if r["system"] == system]
            ax.bar([places.index(f"{r['nodes']} x {r['gpus']}") + _offset(i, systems) for r in of],
                   [r["speed_up"] / (r["nodes"] * r["gpus"]) for r in of], 0.84 / len(systems),
                   label=LABELS[system])
        ax.set_xticks(range(len(places)), places)
        ax.set(xlabel="nodes x accelerators", ylabel="speed-up / accelerators")
    ax.legend(fontsize=6, loc="lower center", bbox_to_anchor=(0.5, 1.1), ncols=3)


def _offset(i, bars):
    """Returns where the i-th of some bars is beside the middle of all."""
    return 0.84 / len(bars) * (i - (len(bars) - 1) / 2)


def _break_even(ax):
    """Draws rows of all nodes together against the most for which a layer's factors are fewer bytes."""
    nodes = [2 ** i for i in range(1, 11)]
    for k, dashes in ((8, ":"), (32, "-"), (128, "--")):
        ax.plot(nodes, [k * p for p in nodes], dashes, color="black", label=f"K = {k} rows on each")
    for i, (layer, (m, n)) in enumerate(LAYERS.items()):
        ax.axhline(2 * m * n / (m + n), color=f"C{i}", linewidth=1, label=layer)
    ax.set(xscale="log", yscale="log", xlabel="nodes P", ylabel="rows K P; factors below 2MN/(M+N)")
    ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))


def main(arguments):
    if len(arguments) > 1:
        raise SystemExit(f"There is an argument '{arguments[1]}', expected flags only: see --help.")
    names = list(PARTS) if _PARTS.value is None else _PARTS.value
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise SystemExit(f"--parts has '{unknown[0]}', expected some of {', '.join(PARTS)}: choose of these.")
    out = pathlib.Path(_OUT.value)
    (out / "paper").mkdir(parents=True, exist_ok=True)
    emulated = load(out / "emulated.json") if (out / "emulated.json").exists() else []
    with rich.progress.Progress(console=rich.console.Console(stderr=True)) as progress:
        for name in names:
            data = compute(name, emulated, progress.track)
            (out / "paper" / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
            plot(data, out / "paper")
    (out / "paper.md").write_text(report(stored(out)))


if __name__ == "__main__":
    app.run(main)
