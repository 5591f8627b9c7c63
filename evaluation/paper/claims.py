"""What the paper says about speed, as data: numbers, how sure each is, and why ours may differ.

H. Zhang et al., "Poseidon: An Efficient Communication Architecture for Distributed Deep Learning on GPU
Clusters", USENIX ATC 2017. Its text was not available when these were collected; grades say how each is known.
"""

import dataclasses

GRADES = {
    "A": "read in the named source", "D": "derived here from numbers of grade A, or by arithmetic",
    "R+": "recalled from the paper, and agrees with an A or a D", "R": "recalled, without anything to compare with",
    "R?": "recalled with doubt", "M": "missing: the paper has it, but it was neither found nor recalled"}
_NO_CHECK = ("R?", "M")
TOLERANCE = 0.05

ABSTRACT, SCRIPT, RELEASE = "abstract", "an author's plotting script", "documents of the binary release"
SUMMARY, RECALLED, TABLE_1 = "a summary by others", "recalled", "table 1 of the paper"


@dataclasses.dataclass(frozen=True)
class Claim:
    """One number of the paper.

    Attributes:
        part: The part of parts.PARTS with our number.
        model, system, nodes, gbps, gpus: Names in zoo.MODELS and inputs.SYSTEMS, the cluster, and `gpus` per
            node. With the unit "nodes", `model` is a layer, and `nodes` are its rows on each node.
        number: The paper's number; None if there is none, and `said` says why, or what there is instead.
        grade: One of GRADES.
        source: Where it comes from.
        unit: "x" (speed-up), "s" (of a step), "Gb" (sent plus received by a node, the mean), "Gb, worst" (by
            the node with most), "% waiting", "schemes" (of dense layers) or "nodes" (the largest number at
            which factors are fewer bytes).
        said: The text in place of the number; for a number, its qualification.
        is_at_most: Whether the number is an upper bound; then a smaller value is no difference.
        reason: Key of REASONS, where ours differs.
        profile: Name in profiles.PROFILES, if it is not that of the part.
    """

    part: str
    model: str
    system: str
    nodes: int
    gbps: float
    number: float | None
    grade: str
    source: str = RECALLED
    unit: str = "x"
    said: str = ""
    gpus: int = 1
    is_at_most: bool = False
    reason: str = ""
    profile: str = ""

    @property
    def is_checked(self):
        return self.number is not None and self.grade not in _NO_CHECK

    def difference(self, ours):
        """Returns the relative difference of ours from the paper's, None without a number."""
        if self.number is None:
            return None
        return 0.0 if self.is_at_most and ours <= self.number else ours / self.number - 1


def _timings():
    """Yields VGG19-22K with Caffe over 40 GbE: an author's figure has the seconds of 20 steps."""
    for system, reason, times in (("poseidon-paper", "", ((1, 0.935), (2, 0.945), (8, 0.970))),
                                  ("wfbp", "wfbp", ((1, 0.970), (2, 1.040), (8, 1.210))),
                                  ("ps", "copies", ((1, 1.725), (2, 1.840), (8, 3.425)))):
        for nodes, seconds in times:
            yield Claim("scaling_caffe", "vgg19_22k", system, nodes, 40, seconds, "A", SCRIPT, "s",
                        reason=reason)


def _predicted():
    """Yields the bytes for 32 rows on each node, where all nodes are servers."""
    for model, nodes, dense, hybrid, adam in (
            ("vgg19", 8, 16.1, 2.85, 23.2), ("vgg19", 16, 17.2, 3.71, 49.8), ("vgg19", 32, 17.8, 5.18, 102.9),
            ("vgg19_22k", 8, 25.7, 3.15, 23.2), ("vgg19_22k", 16, 27.5, 4.35, 49.8),
            ("vgg19_22k", 32, 28.4, 6.50, 102.9)):
        yield Claim("traffic", model, "wfbp", nodes, 40, dense, "D", TABLE_1, "Gb", profile="titan_x")
        yield Claim("traffic", model, "poseidon-paper", nodes, 40, hybrid, "D", TABLE_1, "Gb",
                    profile="titan_x")
        yield Claim("traffic", model, "adam", nodes, 40, adam, "D", TABLE_1, "Gb, worst", reason="adam_bytes",
                    said="of fc6 alone")


CLAIMS = (
    *_timings(),
    Claim("scaling_caffe", "vgg19_22k", "wfbp", 16, 40, 8, "A", SUMMARY, said="system not named",
          reason="unnamed"),
    Claim("scaling_caffe", "vgg19_22k", "ps", 32, 40, None, "M", said="missing"),
    Claim("scaling_caffe", "vgg19", "poseidon-paper", 32, 40, None, "R?", said="near-linear"),
    Claim("scaling_caffe", "vgg19", "wfbp", 32, 40, 22, "R?", reason="wfbp_vgg19"),
    Claim("scaling_caffe", "vgg19", "ps", 32, 40, None, "R?", said="below WFBP"),
    Claim("scaling_caffe", "googlenet", "poseidon-paper", 32, 40, None, "R", said="near-linear"),
    Claim("scaling_caffe", "googlenet", "wfbp", 32, 40, None, "R", said="near-linear"),
    Claim("scaling_caffe", "googlenet", "ps", 32, 40, None, "R", said="clearly lower"),

    Claim("scaling_tensorflow", "inception_v3", "poseidon-paper", 32, 40, 31.5, "A", ABSTRACT),
    Claim("scaling_tensorflow", "inception_v3", "wfbp", 32, 40, None, "M", said="missing"),
    Claim("scaling_tensorflow", "inception_v3", "tensorflow", 32, 40, 20, "A", ABSTRACT, reason="stock"),
    Claim("scaling_tensorflow", "inception_v3", "tensorflow", 32, 40, 10, "R?", reason="stock"),
    Claim("scaling_tensorflow", "vgg19", "poseidon-paper", 32, 40, 30, "R"),
    Claim("scaling_tensorflow", "vgg19", "wfbp", 32, 40, 22, "R", reason="wfbp_tf"),
    Claim("scaling_tensorflow", "vgg19", "tensorflow", 32, 40, None, "R", said="does not scale"),
    Claim("scaling_tensorflow", "vgg19_22k", "poseidon-paper", 32, 40, 30, "A", RELEASE),
    Claim("scaling_tensorflow", "vgg19_22k", "wfbp", 32, 40, 22, "R?", reason="wfbp_tf"),
    Claim("scaling_tensorflow", "vgg19_22k", "tensorflow", 32, 40, 1, "A", RELEASE, is_at_most=True,
          said="less than one node", reason="stock"),
    Claim("scaling_tensorflow", "resnet152", "poseidon-paper", 32, 40, 31, "R"),
    *(Claim("scaling_tensorflow", "resnet152", system, 32, 40, None, "M", said="missing")
      for system in ("wfbp", "tensorflow")),

    Claim("bandwidth", "vgg19_22k", "poseidon-paper", 16, 10, 15.5, "A", ABSTRACT, said="with Caffe"),
    Claim("bandwidth", "vgg19_22k", "poseidon-paper", 16, 10, 15.5, "A", ABSTRACT, said="with TensorFlow",
          profile="titan_x_tf"),
    Claim("bandwidth", "vgg19", "poseidon-paper", 16, 10, None, "R", said="near-linear"),
    Claim("bandwidth", "vgg19", "wfbp", 16, 10, 8, "R", reason="vgg19_10gbe"),
    Claim("bandwidth", "vgg19", "wfbp", 16, 30, None, "R", said="near-linear from 30 GbE"),
    Claim("bandwidth", "vgg19_22k", "wfbp", 16, 30, None, "R", said="near-linear from 30 GbE"),
    Claim("bandwidth", "googlenet", "poseidon-paper", 16, 2, None, "R+", unit="schemes", said="PS"),
    Claim("bandwidth", "googlenet", "wfbp", 16, 2, None, "M", said="missing"),

    *(Claim("stalls", model, system, 8, 40, None, "M", said="missing", unit="% waiting")
      for model in ("inception_v3", "vgg19", "vgg19_22k") for system in ("tensorflow", "wfbp", "poseidon-paper")),

    *_predicted(),
    Claim("traffic", "vgg19", "wfbp", 8, 40, None, "M", said="missing"),
    Claim("traffic", "vgg19", "adam", 8, 40, 5, "R", reason="adam"),
    Claim("traffic", "vgg19", "poseidon-paper", 8, 40, 8, "R", said="near"),

    *(Claim("gpus", model, "poseidon-paper", 1, 40, 4, "R", gpus=4, said="linear")
      for model in ("googlenet", "vgg19", "vgg19_22k")),
    Claim("gpus", "googlenet", "ps", 1, 40, 3, "R", gpus=4, said="stock Caffe", reason="bus"),
    Claim("gpus", "vgg19", "ps", 1, 40, 2, "R", gpus=4, said="stock Caffe", reason="bus"),
    Claim("gpus", "googlenet", "poseidon-paper", 4, 10, 32, "R", gpus=8, profile="k80"),
    Claim("gpus", "vgg19", "poseidon-paper", 4, 10, 28, "R", gpus=8, profile="k80", reason="k80"),

    *(Claim("beyond", layer, "poseidon-paper", rows, 0, nodes, "D", "derived", "nodes")
      for layer, of_32, of_128 in (
          ("VGG19 fc6", 220, 55), ("VGG19 fc7", 128, 32), ("VGG19 fc8", 50, 12), ("VGG19-22K fc8", 215, 53),
          ("GoogLeNet", 31, 7), ("ResNet", 41, 10)) for rows, nodes in ((32, of_32), (128, of_128))),
)

# The parts compute the facts in braces.
REASONS = {
    "wfbp":
        "At {efficiency} of 40 GbE the exchange of VGG19-22K keeps a link of 8 nodes busy for "
        "{wfbp_busy:.0%} of the step, and backpropagation hides all of it. The paper's time needs links of "
        "{wfbp_gbps:.1f} Gbit/s on 8 nodes, {wfbp_2_gbps:.1f} on 2; {wfbp_alone_s:.3f} s of the difference "
        "also occur on one node alone. See the rates below. It is a guess that hosts, not links, are the "
        "limit.",
    "wfbp_vgg19":
        "As with VGG19-22K; 22x needs links of {wfbp_vgg19_gbps:.1f} Gbit/s.",
    "wfbp_tf":
        "As with Caffe, the exchange hides at the nominal rate. On 32 nodes, 22x needs links of "
        "{tf_gbps:.1f} Gbit/s with VGG19, and {tf_22k_gbps:.1f} with VGG19-22K. The author's timings with "
        "Caffe need as much as the latter, so 22x may belong to VGG19-22K (a guess).",
    "copies":
        "One node alone is {ps_alone_s:.2f} s slower than Caffe, though no byte leaves it: the time goes into "
        "copies to the host and the server's work, which the simulator leaves out. With copies at "
        "{ps_copy:.2f} GB/s each way, which take as long, ours takes {ps_with_copies_s:.2f} s on 8 nodes; "
        "the rest needs links of {ps_gbps:.1f} Gbit/s. So the baseline is weak, rather than the network slow.",
    "unnamed":
        "The source does not name the system. The author's timings on 8 nodes, {timed_8:.2f}x with "
        "WFBP and {timed_ps_8:.2f}x with PS, do not fit; ours with WFBP over 10 GbE is {wfbp_10gbe:.2f}x, so "
        "10 GbE may be meant (a guess).",
    "stock":
        "In ours, the worst server sends at {efficiency} of 40 GbE. At {stock_gbps:.1f} Gbit/s, "
        "{stock_share:.0%} of the link, Inception-V3 has the 20x of the abstract, and VGG19-22K "
        "{stock_22k:.2f}x, less than one node as the paper says: one rate explains both. It is a guess that "
        "copies in the gRPC of 2016 are its cause.",
    "vgg19_10gbe":
        "8x needs links of {vgg19_gbps:.1f} Gbit/s. With VGG19-22K ours is {wfbp_22k:.2f}x at {efficiency} "
        "of 10 GbE, so the recalled number may belong to that model (a guess).",
    "adam":
        "The worst node sends {adam_gb:.1f} Gb, {adam_s:.2f} s at {efficiency} of 40 GbE, most of it "
        "behind backpropagation. 5x needs links of {adam_gbps:.1f} Gbit/s; at the {one_rate:.1f} Gbit/s "
        "that explain WFBP it is {adam_slow:.1f}x. Any cause of this gap in the paper's machines would be a "
        "guess.",
    "adam_bytes":
        "The prediction is for fc6 alone. Its server is also a worker for the other matrices, and has its share "
        "of all KV pairs: on 8 nodes {rest_vgg19:.2f} Gb with VGG19, {rest_vgg19_22k:.2f} Gb with VGG19-22K.",
    "bus":
        "Stock Caffe is simulated as gathering on one accelerator after backpropagation, at {bus:g} GB/s "
        "each way. The paper's speed-ups need {bus_googlenet:.1f} GB/s with GoogLeNet and {bus_vgg19:.1f} "
        "GB/s with VGG19: no single rate explains both. GoogLeNet reads seven times as many images per second, "
        "so reading them may cost it time (a guess).",
    "k80":
        "Ours loses {k80_exposed_ms:.0f} ms in a step of {k80_step_ms:.0f} ms, of which "
        "{k80_rebuild_ms:.0f} ms rebuild the gradients from 32 accelerators' rows. At 28x it would lose "
        "{k80_more_ms:.0f} ms more. Neither the accelerators' rate nor the network's is known, so any "
        "cause is a guess.",
}

EMULATION = (
    " Emulated steps differ from simulated ones by {value:.0%} here: the latter leave out packets, and the "
    "processor time of the network.")

SUMMARY = """\
Made by `make paper` (evaluation/paper/tables.py) from docs/results/paper/*.json and evaluation/paper/claims.py.
Links have their nominal rate, {efficiency} of it for payload, and {latency_us:g} us latency: no rate is
fitted to a row. {emulation}

The paper's text was not available, so each of its numbers has a grade. **Of {checked} numbers that can be
checked, {agree} agree within 5 %**; so do {agree_d} of {checked_d} that follow from its formulas (grade D).

* **Poseidon agrees:** its headlines are 30x on 32 nodes, and 15.5x on 16 nodes over 10 GbE. It differs by
  more than 5 % here: {exceptions}.
* **The paper's baselines are faster here,** over 40 GbE. WFBP's exchange hides behind backpropagation
  at the nominal rate, {wfbp_8:.2f}x on 8 nodes with VGG19-22K; the author's timing needs links of
  {wfbp_gbps:.1f} Gbit/s ({wfbp_share:.2f} of 40), which would not slow down Poseidon, with its few bytes.
  Caffe+PS is already slow on one node, and both claims on stock TensorFlow fit links of {stock_gbps:.1f}
  Gbit/s.
* **Over well-used links of 40 Gbit/s, Algorithm 1 gains nothing** with these models on this accelerator: with
  VGG19-22K on 32 nodes Poseidon is {poseidon-paper_32:.2f}x against WFBP's {wfbp_32:.2f}x, since it spends
  accelerator time on rebuilding gradients whose bytes would be hidden. Our policy `auto` takes that into account,
  and has {poseidon_32:.2f}x. Factors gain where links are slower or accelerators faster: over 10 GbE, and in the
  last section.
* **Where ours is slower:** by at most {slower:.1%} against the best of all other systems, {where}.
  `auto` starts from the fastest scheme of each gradient by itself, and changes it where that shortens the step.

"Poseidon" is Algorithm 1 of the paper; "ours" is the policy `auto` for a cluster with accelerators
(`Cluster(accelerators=True)`). It makes another plan at {differ}
of the points below."""

RATES = """\
The last column but one has the rate that each time of WFBP needs by itself. The one rate is that of the most
reliable of them, VGG19-22K on 8 nodes: {wfbp_gbps:.1f} Gbit/s, {wfbp_share:.2f} of 40 GbE, or the link's nominal
rate where that is less. If the recalled 22x belongs to VGG19-22K, the same rate explains 32 nodes. It does not
explain 2 nodes ({wfbp_2_gbps:.1f} Gbit/s), nor 22x and 8x with VGG19. Poseidon's numbers do not change at this
rate. Over 10 GbE, VGG19-22K with WFBP is {wfbp_10gbe:.2f}x on 16 nodes at the nominal rate; if the 8x without a
named system means that, whatever limits 40 GbE does not limit 10 GbE."""
