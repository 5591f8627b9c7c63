"""Plots of speed-ups: ours as curves, the paper's as x (or + if they are not checked), emulated ones as circles."""

import math

from evaluation import drawing
from evaluation.paper import report

_LINEAR = "linear"
_MARKERS = {"o": "emulated", "x": "the paper's", "+": "the paper's, not checked"}
PARTS = ("scaling_caffe", "scaling_tensorflow", "bandwidth", "beyond")


def plot(part, claims, points, path):
    """Writes the plot of a part: a panel for each model and rate."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    points = [point for point in points if point["part"] == part and not point["options"]]
    panels = list(dict.fromkeys((point["model"], point["gbps"]) for point in points))
    columns = 4 if len(panels) == 4 else 3
    figure, axes = pyplot.subplots(math.ceil(len(panels) / columns), columns, squeeze=False,
                                   figsize=(4 * columns, 3.4 * math.ceil(len(panels) / columns)))
    for ax, (model, gbps) in zip(axes.flat, panels):
        _draw(ax, [point for point in points if (point["model"], point["gbps"]) == (model, gbps)],
              [claim for claim in claims if (claim["part"], claim["model"], claim["gbps"]) == (part, model, gbps)])
        ax.set(title=f"{report.LABELS[model]}, {gbps:g} Gbit/s", xlabel="nodes", ylabel="speed-up")
        ax.legend(*drawing.in_order(ax, (*report.LABELS.values(), _LINEAR, *_MARKERS.values())), fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=90, metadata={"Software": None})  # omits the version of matplotlib
    pyplot.close(figure)


def _draw(ax, points, claims):
    nodes = sorted({point["nodes"] for point in points})
    if nodes[-1] > 32:
        ax.set(xscale="log", yscale="log")
    ax.plot(nodes, nodes, ":", color="grey", label=_LINEAR)
    used = set()
    for system, style in drawing.styles(dict.fromkeys(point["system"] for point in points)).items():
        curve = [point for point in points if point["system"] == system]
        ax.plot(*_columns(curve, "speed_up"), label=report.LABELS[system], **style)
        marks = [("o", point["nodes"], point["emulated_speed_up"]) for point in curve if point["emulated_speed_up"]]
        speed_ups = {(point["profile"], point["nodes"]): point["speed_up"] for point in curve}
        for claim in claims:
            alone = speed_ups.get((claim["profile"], claim["nodes"]))
            if claim["system"] == system and claim["paper"] and alone:
                told = (claim["paper"] if claim["quantity"] == "speed_up" else
                        alone * claim["simulated"] / claim["paper"])
                marks.append(("+" if report.verdict(claim) == "not checked" else "x", claim["nodes"], told))
        for mark, number, speed_up in marks:
            ax.plot(number, speed_up, mark, color=style["color"], markerfacecolor="white", zorder=4)
            used.add(mark)
    for mark in _MARKERS:
        if mark in used:
            ax.plot([], [], mark, color="black", markerfacecolor="white", label=_MARKERS[mark])


def _columns(points, name):
    return [point["nodes"] for point in points], [point[name] for point in points]
