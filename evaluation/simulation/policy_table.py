"""Simulates the plans of policy `auto` beside those of all other policies and systems, and writes a table.

    python -m evaluation.simulation.policy_table --markdown docs/results/policies.md

A case is a model on a number of nodes with links of some rate and accelerators of some kind. `auto` should never be
slower than the best of the others; the table has the cases in which it is.
"""

from collections.abc import Sequence
import dataclasses
import itertools
import multiprocessing
import os
import pathlib
import typing

from absl import app
from absl import flags
import rich.console
import rich.progress

from evaluation.simulation import inputs
from evaluation.simulation import simulation

MODELS = ("mlp", "googlenet", "inception_v3", "vgg19", "vgg19_22k", "resnet50", "resnet152", "bert_base_head")
_NODES = (2, 4, 8, 16, 32, 128)
_RATES = (1, 4, 10, 40, 100)
_PROFILES = ("titan_x", "a100")
_STEPS = (1, 8)
_TCP = 0.94
OURS = "poseidon"
# Of our policies, all that are not `auto`; steps of other systems do not overlap. Those that place whole tensors are
# simulated node by node, which takes long on many.
_OTHERS = ("poseidon-ps", "poseidon-sfb", "poseidon-paper", "ring", "horovod", "mwms", "ps", "adam",
           "tensorflow-greedy")
_WHOLE, _MOST_OF_WHOLE = ("adam", "tensorflow-greedy"), 8
TOLERANCE = 0.005


class Case(typing.NamedTuple):
    """A model on a cluster; `steps` overlap."""

    model: str
    nodes: int
    gbps: float
    profile: str
    steps: int

    def __str__(self) -> str:
        of = f", {self.steps} steps" if self.steps > 1 else ""
        return f"{self.model} on {self.nodes} {self.profile}, {self.gbps:g} Gbit/s{of}"


class Outcome(typing.NamedTuple):
    """The seconds of a step of ours, and of the best of the others."""

    case: Case
    ours: float
    best: float
    best_system: str

    @property
    def ratio(self) -> float:
        return self.ours / self.best


def cases() -> list[Case]:
    """Returns all cases, those of one model after the other."""
    return [Case(model, nodes, gbps, profile, steps) for model, nodes, gbps, profile, steps in
            itertools.product(MODELS, _NODES, _RATES, _PROFILES, _STEPS)]


def compare(case: Case) -> Outcome:
    """Simulates a case with all systems."""
    from evaluation.simulation import models  # imported late: they import Keras, which takes some seconds
    from evaluation.workloads import profiles
    work = models.work_of(case.model, profiles.PROFILES[case.profile])
    machines = inputs.Machines(case.nodes, case.gbps, 50.0, efficiency=_TCP)
    seconds = {}
    for name in (OURS, *_OTHERS):
        system = inputs.SYSTEMS[name]
        if name in _WHOLE and case.nodes > _MOST_OF_WHOLE:
            continue
        if case.steps > 1:
            if system.exchange != "plan" or not system.overlap:
                continue
            system = dataclasses.replace(system, steps=case.steps, order="priority")
        seconds[name] = simulation.simulate(work, machines, system).step_seconds
    ours = seconds.pop(OURS)
    best = min(seconds, key=seconds.__getitem__)
    return Outcome(case, ours, seconds[best], best)


def table(outcomes: Sequence[Outcome]) -> str:
    """Returns the cases in which ours is slower than the best of the others, as text."""
    lines = ["| case | `auto`, ms | best of the others, ms | which | ratio |", "|---|---|---|---|---|"]
    slower = sorted((o for o in outcomes if o.ratio > 1 + TOLERANCE), key=lambda o: -o.ratio)
    lines += [f"| {o.case} | {1e3 * o.ours:,.1f} | {1e3 * o.best:,.1f} | {o.best_system} | {o.ratio:.4f} |"
              for o in slower]
    summary = []
    for steps in _STEPS:
        ratios = sorted(o.ratio for o in outcomes if o.case.steps == steps)
        if ratios:
            what = "single steps" if steps == 1 else f"{steps} steps that overlap"
            summary.append(f"* {what}: {len(ratios)} cases, {sum(r > 1 + TOLERANCE for r in ratios)} slower by more "
                           f"than {TOLERANCE:.1%}; the worst takes {ratios[-1]:.4f} of the best, the median "
                           f"{ratios[len(ratios) // 2]:.4f}")
    return "\n".join([*summary, "", *(lines if slower else ["None is slower."])])


def main(_: Sequence[str]) -> None:
    console = rich.console.Console(stderr=True)
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        found = pool.imap(compare, cases(), chunksize=4)
        outcomes = list(rich.progress.track(found, "simulating", total=len(cases()), console=console, transient=True))
    text = ("# Policy `auto` and the best of all others, simulated\n\nWritten by `evaluation.simulation.policy_table "
            f"--markdown`. {len(MODELS)} models, {_NODES[0]} to {_NODES[-1]} nodes,\n{_RATES[0]} to {_RATES[-1]} "
            f"Gbit/s, accelerators like a Titan X and an A100. The others are\n{', '.join(_OTHERS)}\n(`{_WHOLE[0]}` "
            f"and `{_WHOLE[1]}` on up to {_MOST_OF_WHOLE} nodes, and only our policies where steps overlap).\n\n"
            f"{table(outcomes)}\n")
    print(text)
    if _MARKDOWN.value:
        pathlib.Path(_MARKDOWN.value).write_text(text)


if __name__ == "__main__":
    _MARKDOWN = flags.DEFINE_string("markdown", None, "File for the table.")
    app.run(main)
