"""Simulates policy `auto` on many clusters, beside all other systems or with steps that overlap, and writes a table.

    python -m evaluation.simulation.simulated_tables --table policies --markdown docs/results/policies.md
    python -m evaluation.simulation.simulated_tables --table overlap --markdown docs/results/overlap_simulated.md
    python -m evaluation.simulation.simulated_tables --table heads --markdown docs/results/heads.md

`auto` should never be slower than the best of the others; "policies" has the cases in which it is. "heads" draws its
table, too, beside the Markdown file.
"""

from collections.abc import Callable
from collections.abc import Mapping
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

from evaluation import drawing
from evaluation import output
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
_OTHERS = ("poseidon-ps", "poseidon-sfb", "poseidon-hfb", "poseidon-paper", "ring", "horovod", "mwms", "ps", "adam",
           "tensorflow-greedy")
_WHOLE, _MOST_OF_WHOLE = ("adam", "tensorflow-greedy"), 8
TOLERANCE = 0.005
_OVERLAPPING = {"vgg19": "titan_x", "vgg19_22k": "titan_x", "resnet50": "titan_x_tf"}
_OVERLAPPING_NODES = (4, 16, 64, 256)
_OVERLAPPING_RATES = (1, 2.5, 10, 25, 100)
_COLUMNS = "poseidon+columns"
_HEADS, _HEAD_NODES, _HEAD_RATES = ("vgg19_22k", "bert_base_head"), (8, 16, 32, 64, 128, 256), (1, 10, 40)
_HEAD_SYSTEMS = (_COLUMNS, OURS, "poseidon-hfb", "poseidon-sfb", "poseidon-ps")


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

    def seconds(self, systems: Sequence[str]) -> dict[str, float]:
        """Returns the seconds of a step with each of these systems that the case is for."""
        from evaluation.simulation import models  # imported late: they import Keras, which takes some seconds
        from evaluation.workloads import profiles
        work = models.work_of(self.model, profiles.PROFILES[self.profile])
        machines = inputs.Machines(self.nodes, self.gbps, 50.0, efficiency=_TCP)
        found = {}
        for name in systems:
            system = inputs.SYSTEMS[name]
            if name in _WHOLE and self.nodes > _MOST_OF_WHOLE:
                continue
            if self.steps > 1:
                if system.exchange != "plan" or not system.overlap:
                    continue
                system = dataclasses.replace(system, steps=self.steps, order="priority")
            found[name] = simulation.simulate(work, machines, system).step_seconds
        return found


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
    return list(itertools.starmap(Case, itertools.product(MODELS, _NODES, _RATES, _PROFILES, _STEPS)))


def compare(case: Case) -> Outcome:
    """Simulates a case with all systems."""
    seconds = case.seconds((OURS, *_OTHERS))
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


def _policies(markdown: pathlib.Path | None) -> str:
    del markdown
    return ("# Policy `auto` and the best of all others, simulated\n\nWritten by "
            f"`evaluation.simulation.simulated_tables --table policies`. {len(MODELS)} models, {_NODES[0]} to "
            f"{_NODES[-1]} nodes,\n{_RATES[0]} to {_RATES[-1]} Gbit/s, accelerators like a Titan X and an A100. The "
            f"others are\n{', '.join(_OTHERS)}\n(`{_WHOLE[0]}` and `{_WHOLE[1]}` on up to {_MOST_OF_WHOLE} nodes, and "
            f"only our policies where steps overlap).\n\n{table(_simulate(compare, cases()))}\n")


def _overlap(markdown: pathlib.Path | None) -> str:
    del markdown
    rows = [["model", "Gbit/s", *(f"{nodes} nodes" for nodes in _OVERLAPPING_NODES)]]
    places = list(itertools.product(_OVERLAPPING, _OVERLAPPING_RATES, _OVERLAPPING_NODES))
    cells = iter(_simulate(_cell, places))
    rows += [[model, f"{gbps:g}", *itertools.islice(cells, len(_OVERLAPPING_NODES))]
             for model, gbps in itertools.product(_OVERLAPPING, _OVERLAPPING_RATES)]
    text = "\n".join(output.markdown_table(rows[0], rows[1:]))
    return ("# Steps that overlap, simulated\n\nWritten by `evaluation.simulation.simulated_tables --table overlap`: a "
            f"step in milliseconds, alone → as one of {_STEPS[-1]} that\noverlap (ratio), with accelerators like a "
            f"Titan X, policy `auto`, and {_TCP:g} of the rate for payload.\n\n{text}\n")


def _cell(place: tuple[str, float, int]) -> str:
    model, gbps, nodes = place
    single, overlapping = (1e3 * Case(model, nodes, gbps, _OVERLAPPING[model], steps).seconds([OURS])[OURS]
                           for steps in _STEPS)
    return f"{single:,.0f} → {overlapping:,.0f} ({single / overlapping:.2f})"


def _heads(markdown: pathlib.Path | None) -> str:
    header = ["model", "Gbit/s", "system", *(f"{nodes} nodes" for nodes in _HEAD_NODES)]
    places = list(itertools.product(_HEADS, _HEAD_RATES, _HEAD_SYSTEMS, _HEAD_NODES))
    cells = iter(_simulate(_speed_up, places))
    curves = {key: list(itertools.islice(cells, len(_HEAD_NODES)))
              for key in itertools.product(_HEADS, _HEAD_RATES, _HEAD_SYSTEMS)}
    text = "\n".join(output.markdown_table(header, [
        [model, f"{gbps:g}", system, *(f"{speed_up:.1f}" for speed_up in curve)]
        for (model, gbps, system), curve in curves.items()]))
    picture = ""
    if markdown is not None:
        _draw_heads(curves, markdown.with_suffix(".png"))
        picture = f"![Speed-ups by nodes]({markdown.with_suffix('.png').name})\n\n"
    return ("# Layers that are divided by their outputs, simulated\n\nWritten by "
            "`evaluation.simulation.simulated_tables --table heads`: how many times as fast as one node, with "
            f"accelerators\nlike a Titan X, and {_TCP:g} of the rate for payload. `{_COLUMNS}` divides the last layer, "
            f"and is `auto` for all others.\n\n{picture}{text}\n")


def _draw_heads(curves: Mapping[tuple[str, float, str], Sequence[float]], path: pathlib.Path) -> None:
    """Draws speed-ups by (model, Gbit/s, system): a row of panels for each model."""
    import matplotlib  # imported late, like models: other tables need neither
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(len(_HEADS), len(_HEAD_RATES), squeeze=False, figsize=(12, 3.4 * len(_HEADS)))
    for ax, (model, gbps) in zip(axes.flat, itertools.product(_HEADS, _HEAD_RATES), strict=True):
        ax.plot(_HEAD_NODES, _HEAD_NODES, ":", color="grey", label="linear")
        for system, style in drawing.styles(_HEAD_SYSTEMS).items():
            ax.plot(_HEAD_NODES, curves[model, gbps, system], label=system, **style)
        ax.set(xscale="log", yscale="log", title=f"{model}, {gbps:g} Gbit/s", xlabel="nodes", ylabel="speed-up")
        ax.set_xticks(_HEAD_NODES, map(str, _HEAD_NODES), minor=False)
        ax.minorticks_off()
    legend = drawing.in_order(axes[0][-1], ("linear", *_HEAD_SYSTEMS))
    axes[0][-1].legend(*legend, fontsize=7, loc="lower right")  # where curves leave room
    figure.tight_layout()
    figure.savefig(path, dpi=90, metadata={"Software": None})  # omits the version of matplotlib
    pyplot.close(figure)


def _speed_up(place: tuple[str, float, str, int]) -> float:
    from evaluation.simulation import models
    from evaluation.workloads import profiles
    from evaluation.workloads import zoo
    model, gbps, name, nodes = place
    work = models.work_of(model, profiles.PROFILES["titan_x"])
    alone = work.seconds
    if name == _COLUMNS:
        work = models.of_columns(work, model, zoo.MODELS[model].batch_size, nodes)
    machines = inputs.Machines(nodes, gbps, 50.0, efficiency=_TCP)
    seconds = simulation.simulate(work, machines, inputs.SYSTEMS[OURS if name == _COLUMNS else name]).step_seconds
    return nodes * alone / seconds


def _simulate(function: Callable[[typing.Any], typing.Any], arguments: Sequence[typing.Any]) -> list[typing.Any]:
    """Returns the results of a function, computed by several processes."""
    console = rich.console.Console(stderr=True)
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        found = pool.imap(function, arguments, chunksize=4)
        return list(rich.progress.track(found, "simulating", total=len(arguments), console=console, transient=True))


_TABLES = {"policies": _policies, "overlap": _overlap, "heads": _heads}


def main(_: Sequence[str]) -> None:
    path = pathlib.Path(_MARKDOWN.value) if _MARKDOWN.value else None
    text = _TABLES[_TABLE.value](path)
    print(text)
    if path is not None:
        path.write_text(text)


if __name__ == "__main__":
    _TABLE = flags.DEFINE_enum("table", "policies", list(_TABLES), "Which table.")
    _MARKDOWN = output.markdown_flag()
    app.run(main)
