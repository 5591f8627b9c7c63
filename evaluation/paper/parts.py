"""The sections of the report: the points of each, and the facts that its texts need."""

import dataclasses
import functools
import json

from evaluation.paper.claims import CLAIMS
from evaluation.paper.points import BUS_GBYTES_PER_S
from evaluation.paper.points import EFFICIENCY
from evaluation.paper.points import LATENCY_US
from evaluation.paper.points import measure
from evaluation.paper.points import Point
from evaluation.paper.points import rate_for
from evaluation.paper.points import simulate
from evaluation.paper.points import work_of
from tf_poseidon.planning import cost

LABELS = {"poseidon": "ours", "poseidon-paper": "Poseidon", "wfbp": "WFBP", "ps": "PS, no overlap",
          "tensorflow": "stock TF", "adam": "Adam", "horovod": "Horovod", "mwms": "MWMS",
          "googlenet": "GoogLeNet", "vgg19": "VGG19",
          "vgg19_22k": "VGG19-22K", "inception_v3": "Inception-V3", "resnet152": "ResNet-152",
          "resnet50": "ResNet-50", "bert_base_head": "BERT-base head"}
ENGINES = {"titan_x": "Caffe", "titan_x_tf": "TensorFlow"}  # as which' rates a profile has
LAYERS = {"VGG19 fc6": (25088, 4096), "VGG19 fc7": (4096, 4096), "VGG19 fc8": (4096, 1000),
          "VGG19-22K fc8": (4096, 21841), "GoogLeNet": (1024, 1000), "ResNet": (2048, 1000),
          "BERT-base head": (768, 30522)}


def point_of(claim):
    return Point(claim.model, claim.profile or PARTS[claim.part].profile, claim.system, claim.nodes,
                 claim.gbps, claim.gpus)


def _alone(point):
    """Returns how long one accelerator would take for all rows of a step."""
    return point.nodes * point.gpus * work_of(point.model, point.profile).seconds


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


# ---- facts for the reasons and texts -----------------------------------------------------------

def _facts_caffe():
    at = functools.partial(_claim, "scaling_caffe", "vgg19_22k", unit="s")
    work, one, ps = work_of("vgg19_22k", "titan_x"), _one_rate(), at("ps", 8)
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
    """Returns the bytes of all other tensors on the server of the largest matrix, with Adam's exchange."""
    sites = sorted(work_of(model, "titan_x_tf").sites, key=lambda site: site.num_bytes)[:-1]
    return sum(s.num_bytes + s.factors.num_bytes if s.factors else
               cost.parameter_server(s.num_bytes, nodes, nodes) for s in sites)


def _facts_gpus():
    facts = {"bus": BUS_GBYTES_PER_S}
    for model in ("googlenet", "vgg19"):
        claim, work = _claim("gpus", model, "ps", 1, gpus=4), work_of(model, "titan_x")
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
    """Returns the largest number of nodes at which a layer's factors are no more bytes than its gradient's."""
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
        title, about: Its heading, and the text below.
        profile: The accelerator: a name in profiles.PROFILES, or "k80".
        points: The points of its table.
        facts: Returns the further facts of its texts.
        cell: Returns the text of a point in the table; by default, the speed-up.
        legend: The meaning of the cells.
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
        "One Titan X on each node. The paper's points for VGG19-22K are timings by an author; those of the "
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
        "Less bandwidth, Caffe", "The paper's curves are missing; only these statements remain.",
        "titan_x",
        grid(("googlenet",), "titan_x", ("poseidon", "poseidon-paper", "wfbp"), _NODES[1:5], (2, 5, 10))
        + grid(("vgg19", "vgg19_22k"), "titan_x", ("poseidon", "poseidon-paper", "wfbp"), _NODES[1:5],
               (10, 20, 30)),
        _facts_bandwidth),
    "stalls": Part(
        "How long accelerators wait, 8 nodes with TensorFlow, 40 GbE",
        "All percentages of the paper are missing (M), so nothing is checked here. The paper says that "
        "accelerators are busy most of the time with Poseidon, and wait most of it with stock TensorFlow "
        "(R). With the latter, ours wait less, for the same reason for which it scales further in a section "
        "above.",
        "titan_x_tf",
        grid(("inception_v3", "vgg19", "vgg19_22k"), "titan_x_tf",
             ("tensorflow", "wfbp", "poseidon-paper", "poseidon"), (8,)),
        cell=lambda row: f"{row['waiting']:.0%}, {row['rebuild_s'] / row['step_s']:.0%}",
        legend="Share of a step in which an accelerator waits, and in which it rebuilds gradients."),
    "traffic": Part(
        "Bytes on the network with TensorFlow, 40 GbE",
        "The heights of the paper's bars are missing (M). They are replaced by those that its table 1 gives, for "
        "32 rows on each node. Bytes do not depend on the accelerator; those of the first table are for the "
        "Titan X with Caffe, which was also emulated.", "titan_x_tf",
        grid(("vgg19", "vgg19_22k", "inception_v3"), "titan_x_tf",
             ("wfbp", "adam", "poseidon-paper", "poseidon"), (8, 16, 32)), _facts_traffic,
        lambda row: f"{row['gb_mean']:.2f} / {row['gb_worst']:.2f}",
        "Gb (10^9 bits) that a node sends plus receives in a step, mean / worst node: the simulation "
        "counts them, and does not estimate."),
    "gpus": Part(
        "Several accelerators in a node",
        "Four Titan X in one node, and four nodes with 8 K80-class accelerators each. There is no "
        "profile of a K80; k80 is a Titan X at half of its rate, by the peak rates of both (a guess), and its "
        "nodes have 10 GbE, as such nodes of clouds had (a guess).", "titan_x",
        grid(("googlenet", "vgg19", "vgg19_22k"), "titan_x", ("poseidon", "poseidon-paper", "wfbp", "ps"), (1,),
             gpus=(1, 2, 4))
        + grid(("googlenet", "vgg19"), "k80", ("poseidon", "poseidon-paper", "wfbp", "ps"), (4,), (10,), (8,)),
        _facts_gpus),
    "beyond": Part(
        "Beyond the paper: A100, up to 1024 nodes",
        "Nothing here is measured. Horovod and MWMS are rings as modelled by the simulator: fused buffers of "
        "128 MiB, and one buffer of all gradients after backpropagation; GPU libraries also have trees, "
        "which many nodes need. BERT-base's head is trained alone, so a step has hardly any arithmetic, and "
        "the network dominates. A message costs its bytes and the latency, and nothing else: with 10 us of a "
        "link for each, VGG19 over 100 Gbit/s takes {with_messages[poseidon]:.0f} ms with ours on 1024 nodes, "
        "{with_messages[horovod]:.0f} with Horovod and {with_messages[mwms]:.0f} with MWMS.", "a100",
        grid(("vgg19", "resnet50", "bert_base_head"), "a100",
             ("poseidon", "poseidon-paper", "wfbp", "horovod", "mwms"), (2, 8, 32, 128, 1024), (10, 25, 100)),
        _facts_beyond,
        lambda row: f"{1e3 * row['step_s']:,.0f}", "Milliseconds per step, simulated."),
}


def compute(name, emulated, track=lambda points, description: points):
    """Returns the content of PART.json."""
    part = PARTS[name]
    told = (point_of(c) for c in CLAIMS if c.part == name and c.unit != "nodes")
    points = dict.fromkeys((*part.points, *told))
    rows = {p.key: measure(p, emulated) for p in track(list(points), description=name)}
    facts = json.loads(json.dumps(part.facts()), parse_float=lambda text: float(f"{float(text):.6g}"))
    return {"part": name, "efficiency": EFFICIENCY, "latency_us": LATENCY_US, "rows": rows, "facts": facts}
