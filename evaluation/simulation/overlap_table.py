"""Simulates what overlapping steps gain on 4 to 256 nodes, and writes a table.

    python -m evaluation.simulation.overlap_table --markdown docs/results/overlap_simulated.md

Each cell has the milliseconds of single steps and of eight that overlap, and the ratio, at the share of links' rates
that TCP leaves for payload.
"""

from collections.abc import Sequence
import dataclasses
import pathlib

from absl import app
from absl import flags
import rich.console
import rich.progress

from evaluation.simulation import inputs
from evaluation.simulation import models
from evaluation.simulation import simulation
from evaluation.workloads import profiles

_STEPS = 8
_NODES = (4, 16, 64, 256)
_RATES = (1, 2.5, 10, 25, 100)
_MODELS = {"vgg19": "titan_x", "vgg19_22k": "titan_x", "resnet50": "titan_x_tf"}
_TCP = 0.94
SYSTEMS = {1: inputs.SYSTEMS["poseidon"],
           _STEPS: dataclasses.replace(inputs.SYSTEMS["poseidon"], steps=_STEPS, order="priority")}


def cell(work: inputs.Work, nodes: int, gbps: float) -> str:
    """Returns the text of a cell."""
    machines = inputs.Machines(nodes, gbps, 50.0, efficiency=_TCP)
    single, overlapping = (1e3 * simulation.simulate(work, machines, system).step_seconds
                           for system in SYSTEMS.values())
    return f"{single:,.0f} → {overlapping:,.0f} ({single / overlapping:.2f})"


def main(_: Sequence[str]) -> None:
    rows = []
    cases = [(model, gbps) for model in _MODELS for gbps in _RATES]
    console = rich.console.Console(stderr=True)
    for model, gbps in rich.progress.track(cases, "simulating", console=console, transient=True):
        work = models.work_of(model, profiles.PROFILES[_MODELS[model]])
        rows.append([model, f"{gbps:g}", *(cell(work, nodes, gbps) for nodes in _NODES)])
    head = ["model", "Gbit/s", *(f"{nodes} nodes" for nodes in _NODES)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))
    text = ("# Steps that overlap, simulated\n\nWritten by `evaluation.simulation.overlap_table --markdown`: a step in "
            f"milliseconds, alone → as one of {_STEPS} that\noverlap (ratio), with accelerators like a Titan X, policy "
            f"`auto`, and {_TCP:g} of the rate for payload.\n\n{table}\n")
    print(text)
    if _MARKDOWN.value:
        pathlib.Path(_MARKDOWN.value).write_text(text)


if __name__ == "__main__":
    _MARKDOWN = flags.DEFINE_string("markdown", None, "File for the table.")
    app.run(main)
