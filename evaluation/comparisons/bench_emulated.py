"""Measures tables of models, systems, rates and hosts on emulated clusters, with emulated accelerators.

    sudo env "PATH=$PATH" python -m evaluation.comparisons.bench_emulated --json docs/results/emulated.json

Part "table" compares with Horovod and MWMS on four hosts; part "points" has the runs that the simulation must agree
with, see tests/scripts/test_simulation.py. Five parts are for files of their own: "overlap" compares single steps with
eight that overlap; "bytes" factors without their zeros, half factors, and gradients and weights in 16 bits with what
they would be otherwise; "heads" layers that are divided by their outputs with all other schemes; "servers" jobs without
and with hosts that only serve, which take turns; "answers" cells of docs/answers.md. Every run is one of benchmark.py,
which verifies before it times. Runs that the file already has are not repeated, so that a part can be resumed.
"""

import dataclasses
import json
import pathlib
import statistics
import tempfile

from absl import app
from absl import flags
import rich.console
import rich.progress

from evaluation import modules
from evaluation import output
from tf_poseidon.emulation import emulated_cluster

_JSON = output.json_flag("docs/results/emulated.json", "File for the results; existing ones are kept.")
_PARTS = flags.DEFINE_list("parts", ["points", "table"], "What to measure.")
_AGAIN = flags.DEFINE_bool("again", False, "Begin with an empty file.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Measurements of each system.")


@dataclasses.dataclass(frozen=True)
class Run:
    """One job on an emulated cluster.

    Attributes:
        model, systems, profile, batch_size: Same as in benchmark.py; None as profile: it computes.
        hosts: How many train.
        ranks_per_host: How many accelerators each host has.
        gbps: Rate of their links in the target cluster.
        steps: Consecutive steps in a measurement.
        options: Other flags of evaluation/comparisons/benchmark.py.
        dilation, shrink: How the cluster is scaled down; the real rate of links is gbps / (dilation * shrink).
        dedicated_servers: How many more hosts only serve.
        turn: Which of several equal jobs, between which others run.
    """

    model: str
    hosts: int
    gbps: float
    systems: str
    profile: str | None = "titan_x"
    dilation: float = 1.0
    shrink: float = 1.0
    batch_size: int | None = None
    steps: int = 1
    ranks_per_host: int = 1
    options: tuple[str, ...] = ()
    dedicated_servers: int = 0
    turn: int = 0

    @property
    def link_gbps(self):
        return self.gbps / (self.dilation * self.shrink)

    def fields(self):
        """Returns it as it stands in the file."""
        fields = dataclasses.asdict(self) | {"options": list(self.options)}
        return {name: value for name, value in fields.items() if value or name not in _IF_GIVEN}


_IF_GIVEN = "options", "dedicated_servers", "turn"  # in the file
_TURNS = 3
_OVERLAP = "poseidon,poseidon+overlap"
_ALL = "poseidon,poseidon-ps,horovod,mwms"
_OURS = "poseidon,poseidon-paper,poseidon-ps"
_COLUMNS = "poseidon+columns"
_HEADS = "poseidon,poseidon+columns,poseidon-ps,poseidon-sfb,poseidon-hfb"

PARTS = {
    # At most 1 Gbit/s on real links, less where many small tensors are in flight, and a step of some tenths of
    # a second: what two cores can do, and TCP after a pause.
    "table": [
        Run("mlp", 4, 1, _ALL, profile=None, steps=3),
        Run("mlp", 4, 1, _ALL, dilation=4, steps=3), Run("mlp", 4, 10, _ALL, dilation=40),
        Run("vgg19", 4, 1, _ALL, dilation=0.5, shrink=16), Run("vgg19", 4, 10, _ALL, shrink=16),
        Run("vgg19_22k", 4, 1, _ALL, dilation=0.5, shrink=16), Run("vgg19_22k", 4, 10, _ALL, shrink=16),
        Run("resnet50", 4, 1, _ALL, profile="titan_x_tf", shrink=4),
        Run("resnet50", 4, 10, _ALL, profile="titan_x_tf", dilation=4, shrink=4),
    ],
    # Where links are the limit, and where they are not. ResNet-50 is dilated: with its 161 gradients, two cores would
    # delay the emulated accelerators otherwise.
    "overlap": [
        *(Run("vgg19", hosts, 1, _OVERLAP, dilation=0.5, shrink=16) for hosts in (4, 2)),
        Run("vgg19", 8, 1, _OVERLAP, shrink=16),
        Run("vgg19_22k", 4, 1, _OVERLAP, dilation=0.5, shrink=16),
        *(Run(model, 4, 2.5, _OVERLAP, shrink=16) for model in ("vgg19", "vgg19_22k")),
        *(Run("resnet50", hosts, gbps, _OVERLAP, profile="titan_x_tf", dilation=4, shrink=4)
          for hosts, gbps in ((4, 2.5), (4, 1), (4, 5), (2, 2.5), (4, 10))),
        Run("vgg19", 4, 10, _OVERLAP, shrink=16), Run("mlp", 4, 1, _OVERLAP, dilation=4, steps=3),
        Run("mlp", 4, 10, _OVERLAP, dilation=40, steps=3),
    ],
    # Zeros of factors, gradients that were cast, without and with weights that will be, and half factors.
    "bytes": [
        Run("mlp", 4, 1, "poseidon,poseidon+zeros", dilation=4, steps=3, options=("--zeros",)),
        *(Run("resnet50", 4, gbps, "poseidon,poseidon+wide,poseidon+shards", profile="titan_x_tf", dilation=4,
              shrink=4, options=("--mixed",)) for gbps in (1, 2.5)),
        Run("bert_base_head", 4, 1, "poseidon,poseidon+zeros", shrink=4),  # nothing is zero
        Run("bert_base_head", 8, 1, "poseidon,poseidon-hfb,poseidon-ps,poseidon-sfb", dilation=4, shrink=4),
    ],
    # Every way in which a head's gradient can travel, and not at all.
    "heads": [Run("bert_base_head", hosts, gbps, _HEADS, dilation=dilation, shrink=4)
              for hosts, gbps, dilation in ((4, 1, 8), (8, 1, 4), (4, 10, 80), (8, 10, 40))] + [
        Run("vgg19_22k", 4, gbps, _HEADS, shrink=16, dilation=dilation) for gbps, dilation in ((1, 0.5), (10, 4))],
    "servers": [Run("resnet50", 4, 1, "poseidon-ps", profile="titan_x_tf", dilation=4, shrink=4,
                    dedicated_servers=number, turn=turn) for turn in range(_TURNS) for number in (0, 1, 2, 4)],
    # Links of at most 0.6 Gbit/s, less where hosts are 8, and steps of half a second and more.
    "answers": [
        *(Run("vgg19", hosts, gbps, "poseidon", profile, dilation, 16) for hosts, gbps, profile, dilation in (
            (4, 1, "v100", 0.5), (4, 10, "v100", 1), (4, 25, "h100", 4), (8, 10, "v100", 2), (8, 25, "h100", 5))),
        *(Run("resnet50", hosts, gbps, "poseidon", profile, dilation, 4, batch_size=64)
          for hosts, gbps, profile, dilation in (
              (4, 1, "v100", 1), (4, 10, "v100", 5), (4, 10, "h100", 8), (8, 10, "v100", 8), (8, 25, "h100", 20))),
        *(Run("inception_v3", hosts, gbps, "poseidon", profile, dilation, 4, batch_size=64)
          for hosts, gbps, profile, dilation in ((4, 1, "v100", 1), (4, 10, "h100", 8), (8, 10, "v100", 8))),
        *(Run("mlp", hosts, gbps, "poseidon", profile, dilation, batch_size=256, steps=3)
          for hosts, gbps, profile, dilation in (
              (4, 1, "v100", 4), (4, 10, "h100", 40), (8, 10, "v100", 40), (8, 25, "h100", 100))),
        *(Run("faces_100k", hosts, gbps, _COLUMNS, profile, dilation, 4) for hosts, gbps, profile, dilation in (
            (4, 1, "v100", 2), (4, 10, "h100", 20), (8, 10, "v100", 20))),
    ],
    "points": [
        *(Run("mlp", 4, 1, _OURS, shrink=shrink, dilation=4, steps=3) for shrink in (1, 16)),  # is it right?
        *(Run(model, hosts, gbps, _OURS, shrink=16, dilation=dilation)
          for model in ("vgg19", "vgg19_22k")
          for gbps, dilation in ((2, 1), (10, 1), (40, 4))
          for hosts in (2, 4, 8)),
        *(Run("resnet50", hosts, gbps, _OURS, "titan_x_tf", shrink=4, dilation=dilation)
          for gbps, dilation, hosts in ((2, 1, 2), (2, 1, 4), (2, 4, 8), (10, 5, 2), (10, 5, 4), (10, 5, 8))),
        Run("vgg19", 4, 10, _OURS, dilation=4, shrink=4),  # as above, for a model that is too large for 1
        *(Run(model, 2, 2, _OURS, shrink=16, ranks_per_host=2) for model in ("vgg19", "vgg19_22k")),
    ],
}


def main(_):
    unknown = set(_PARTS.value) - set(PARTS)
    if unknown:
        raise app.UsageError(f"--parts has '{min(unknown)}', expected some of {', '.join(PARTS)}.")
    path = pathlib.Path(_JSON.value)
    results = json.loads(path.read_text()) if path.exists() and not _AGAIN.value else []
    done = [entry["run"] for entry in results]
    runs = [run for part in _PARTS.value for run in PARTS[part] if run.fields() not in done]
    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(console=console) as progress:
        for run in progress.track(runs, description="runs"):
            console.print(run)
            results.append({"run": run.fields(), **measure(run)})
            output.write_json(path, results)
    print(table_of_servers(results) if "servers" in _PARTS.value else table(results))


def table(results):
    """Returns a table in Markdown: a line per run, a column per system."""
    systems = list(dict.fromkeys(row["system"] for entry in results for row in entry["results"]))
    header, lines = ["model", "hosts", "ranks on each", "Gbit/s", "D", "S", *systems, "poseidon to its bound"], []
    for entry in results:
        run, rows = entry["run"], {row["system"]: row for row in entry["results"]}
        model = run["model"] + ("" if run["profile"] else ", computed")
        first = rows.get("poseidon") or rows[run["systems"]]
        ours = first["step"]["median_ms"]
        cells = []
        for system in systems:
            milliseconds = rows[system]["step"]["median_ms"] if system in rows else None
            cells.append("" if milliseconds is None else f"{milliseconds:,.0f}" if system in ("single", "poseidon")
                         else f"{milliseconds:,.0f} ({milliseconds / ours:.2f})")
        lines.append([model, *(f"{run[key]:g}" for key in ("hosts", "ranks_per_host", "gbps", "dilation", "shrink")),
                      *cells, f"{first['to_bound']:.2f}"])
    return "\n".join(output.markdown_table(header, lines))


def table_of_servers(results):
    """Returns a table in Markdown: a line per number of hosts that only serve; medians of all turns, and extremes."""
    turns = {}  # by that number
    for entry in results:
        row = next(row for row in entry["results"] if row["system"] == "poseidon-ps")
        turns.setdefault(entry["run"].get("dedicated_servers", 0), []).append(row)
    lines = []
    for number, rows in turns.items():
        ratios = [without["step"]["median_ms"] / row["step"]["median_ms"] for without, row in zip(turns[0], rows)]
        by_bytes = turns[0][0]["planned_bytes"] / rows[0]["planned_bytes"]
        lines.append([f"{number}", *(f"{rows[0][key] / 1e6:.1f}" for key in ("planned_bytes", "payload_bytes")),
                      _spread([row["step"]["median_ms"] for row in rows], ",.0f"), _spread(ratios, ".3f"),
                      f"{by_bytes:.3f}"])
    return "\n".join(output.markdown_table(
        ["hosts that only serve", "MB of a rank, planned", "counted", "ms", "as fast as without", "by bytes"], lines))


def _spread(values, form):
    """Returns the median of values, and the least and the most, as text."""
    median, least, most = (format(value, form) for value in (statistics.median(values), min(values), max(values)))
    return f"{median} ({least} to {most})"


def measure(run):
    """Returns the results that evaluation/comparisons/benchmark.py writes for a run."""
    with tempfile.TemporaryDirectory() as directory:
        out = pathlib.Path(directory) / "results.json"
        command = [*modules.command("comparisons.benchmark"), f"--model={run.model}", f"--system={run.systems}",
                   f"--rounds={_ROUNDS.value}", f"--steps={run.steps}", f"--json={out}",
                   f"--bandwidth_gbps={run.link_gbps}"]
        if run.profile:
            command += [f"--compute=emulated:{run.profile}", f"--dilation={run.dilation}",
                        f"--shrink={run.shrink}"]
        if run.dedicated_servers:
            command.append(f"--dedicated_servers={run.dedicated_servers}")
        command += run.options
        if run.batch_size:
            command.append(f"--batch_size={run.batch_size}")
        with emulated_cluster.EmulatedCluster(run.hosts + run.dedicated_servers, run.link_gbps) as cluster:
            status = cluster.run(list(map(str, command)), run.ranks_per_host)
        if status:
            raise SystemExit(f"{run} ended with status {status}, expected 0; see its output above.")
        measured = json.loads(out.read_text())
    del measured["made_by"]["command"]  # the run says the same, without the name of a temporary file
    return measured


if __name__ == "__main__":
    app.run(main)
