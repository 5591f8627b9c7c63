"""Measures jobs that train at the same time on the accelerators of one emulated cluster, without and with turns.

    sudo env "PATH=$PATH" python -m evaluation.comparisons.bench_crossover --json docs/results/crossover.json

Jobs of about equal times alone begin together; in the same processes each also trains alone, while the others idle, so
each round compares neighbours in time. Before anything is timed, and in each part of it, the sums that a job receives
have the bits that they had when it trained alone. Without turns the kernels of the jobs queue up on an accelerator as
they come.

The bound is what the busiest resource takes: jobs can be sum T / max(sum C, sum N) times as fast together as one after
the other, where a step of a job takes T alone, C on the accelerator and N on the links (payload: 0.94 of their rate).
All times are undilated. Measurements that the file already has are not repeated, unless --again.
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
from evaluation.clusters import emulated_cluster
from evaluation.comparisons.shared_jobs import Cell
from evaluation.comparisons.shared_jobs import SharedJob

_JSON = output.json_flag("docs/results/crossover.json", "File for the results; existing ones are kept.")
_MARKDOWN = output.markdown_flag()
_CELLS = flags.DEFINE_list("cells", None, "Names of what to measure; by default, all.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Measurements of each job alone, and of all together.", lower_bound=1)
_AGAIN = flags.DEFINE_bool("again", False, "Whether what the file has is measured again.")
_WAYS = flags.DEFINE_list("ways", ["without", "with"], "Whether jobs take turns: without, with.")

EFFICIENCY = 0.94  # of links, TCP's

_VGG19, _RESNET50 = SharedJob("vgg19", 16), SharedJob("resnet50", 12, "titan_x_tf")
_OVERLAP = {"overlaps": True}
CELLS = {cell.name: cell for cell in (
    Cell("two VGG19", (_VGG19,) * 2, 1, dilation=1, shrink=16),
    Cell("two ResNet-50", (_RESNET50,) * 2, 2.5, dilation=4, shrink=4),
    Cell("two overlapping VGG19", (dataclasses.replace(_VGG19, **_OVERLAP),) * 2, 1, dilation=1, shrink=16),
    Cell("two overlapping ResNet-50", (dataclasses.replace(_RESNET50, steps=16, **_OVERLAP),) * 2, 2.5,
         dilation=4, shrink=4),
    Cell("VGG19 and ResNet-50", (dataclasses.replace(_VGG19, steps=12, profile="titan_x_tf"),
                                 dataclasses.replace(_RESNET50, steps=12)), 1, dilation=2, shrink=8),
    Cell("three VGG19", (dataclasses.replace(_VGG19, steps=12),) * 3, 1, dilation=1.5, shrink=16),
)}


@dataclasses.dataclass(frozen=True)
class Gain:
    """What it brings to let some jobs train at the same time: seconds of whole measurements, undilated.

    Attributes:
        step_s, compute_s, wire_s: Of each job: T, C and N.
        sequential: By round: of all jobs, one after the other.
        together: By round: of all jobs, at the same time.
        bound: By how much they could be faster so.
    """

    step_s: list[float]
    compute_s: list[float]
    wire_s: list[float]
    sequential: list[float]
    together: list[float]
    bound: float

    @property
    def ratios(self):
        return [alone / together for alone, together in zip(self.sequential, self.together, strict=True)]


def gain(entry, way):
    """Returns the `Gain` of an entry of the file in a way, "without" or "with" turns."""
    cell, jobs = Cell.of(entry["cell"]), entry[way]
    steps = [job.steps for job in cell.jobs]
    alone = [[t / cell.dilation for t in job["alone"]] for job in jobs]
    compute = [job["compute_s"] / cell.dilation for job in jobs]
    wire = [8 * job["planned_bytes"] / 2 / (EFFICIENCY * cell.gbps * 1e9) for job in jobs]
    # Of all jobs the first begin and the last end.
    together = [(max(end for _, end in spans) - min(begin for begin, _ in spans)) / cell.dilation
                for spans in zip(*(job["together"] for job in jobs), strict=True)]
    busiest = max(sum(n * t for n, t in zip(steps, times)) for times in (compute, wire))
    step = [statistics.median(times) / n for times, n in zip(alone, steps)]
    sequential = [sum(times) for times in zip(*alone, strict=True)]
    return Gain(step, compute, wire, sequential, together, sum(n * t for n, t in zip(steps, step)) / busiest)


def table(results):
    """Returns a header, and a row for each entry and way."""
    header = ["jobs", "Gbit/s", "turns", "T, ms", "C, ms", "N, ms", "steps", "T to that without",
              "one after the other, s", "together, s", "as fast", "bound", "of it"]
    rows = []
    for entry in results:
        cell = Cell.of(entry["cell"])
        for way in ("without", "with"):
            if way in entry:
                found, without = gain(entry, way), gain(entry, "without") if "without" in entry else None
                ratio = statistics.median(found.ratios)
                rows.append([
                    cell.name, f"{cell.gbps:g}", way, *(" ".join(dict.fromkeys(f"{1e3 * t:,.0f}" for t in times))
                                                        for times in (found.step_s, found.compute_s, found.wire_s)),
                    " ".join(dict.fromkeys(str(job.steps) for job in cell.jobs)),
                    f"{sum(found.step_s) / sum(without.step_s):.3f}" if without else "",
                    f"{statistics.median(found.sequential):.2f}", _spread(found.together, ".2f"),
                    _spread(found.ratios, ".3f"), f"{found.bound:.2f}", f"{ratio / found.bound:.3f}"])
    return header, rows


def _spread(values, form):
    """Returns the median of values, and the least and the most, as text."""
    median, least, most = (format(value, form) for value in (statistics.median(values), min(values), max(values)))
    return f"{median} ({least} to {most})"


def measure(cell, way):
    """Returns what each job of a cell has measured."""
    with (tempfile.TemporaryDirectory() as folder,
          emulated_cluster.EmulatedCluster(cell.hosts, cell.link_gbps) as cluster):
        command = [*modules.command("comparisons.crossover_rank"), f"--cell={json.dumps(dataclasses.asdict(cell))}",
                   f"--folder={folder}", f"--rounds={_ROUNDS.value}"]
        if way == "with":
            command.append("--crossover=bench")
        statuses = cluster.run_together([[*command, f"--job={job}"] for job in range(len(cell.jobs))])
        if any(statuses):
            raise SystemExit(f"The jobs of '{cell.name}' {way} turns ended with statuses {statuses}, expected 0; see "
                             "their output above.")
        return [json.loads((pathlib.Path(folder) / f"{job}.json").read_text()) for job in range(len(cell.jobs))]


def main(_):
    names = _CELLS.value or list(CELLS)
    for flag, unknown, known in ((_CELLS, set(names) - set(CELLS), CELLS),
                                 (_WAYS, set(_WAYS.value) - {"without", "with"}, ("without", "with"))):
        if unknown:
            raise app.UsageError(f"--{flag.name} has '{min(unknown)}', expected some of {', '.join(known)}.")
    path = pathlib.Path(_JSON.value)
    results = json.loads(path.read_text()) if path.exists() else []
    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(console=console) as progress:
        for name, way in progress.track([(name, way) for name in names for way in _WAYS.value], description="cells"):
            fields = json.loads(json.dumps(dataclasses.asdict(CELLS[name])))
            entry = next((entry for entry in results if entry["cell"] == fields), None)
            if entry is None:
                results.append(entry := {"cell": fields})
            if _AGAIN.value or way not in entry:
                console.print(f"{name}, {way} turns")
                entry[way] = measure(CELLS[name], way)
                output.write_json(path, results)
    header, rows = table(results)
    output.show("jobs on the same accelerators", header, rows)
    if _MARKDOWN.value:
        pathlib.Path(_MARKDOWN.value).write_text("\n".join(output.markdown_table(header, rows)) + "\n")


if __name__ == "__main__":
    app.run(main)
