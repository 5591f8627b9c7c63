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
import tempfile

from absl import app
from absl import flags
import rich.console
import rich.progress

from evaluation import modules
from evaluation import output
from evaluation.comparisons.shared_jobs import CELLS
from evaluation.comparisons.shared_jobs import table
from tf_poseidon.emulation import emulated_cluster

_JSON = output.json_flag("docs/results/crossover.json", "File for the results; existing ones are kept.")
_MARKDOWN = output.markdown_flag()
_CELLS = flags.DEFINE_list("cells", None, "Names of what to measure; by default, all.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Measurements of each job alone, and of all together.", lower_bound=1)
_AGAIN = flags.DEFINE_bool("again", False, "Whether what the file has is measured again.")
_WAYS = flags.DEFINE_list("ways", ["without", "with"], "Whether jobs take turns: without, with.")

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
