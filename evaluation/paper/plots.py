"""The plots of a part."""

import dataclasses

from evaluation.paper.claims import CLAIMS
from evaluation.paper.parts import LABELS
from evaluation.paper.parts import LAYERS
from evaluation.paper.parts import PARTS
from evaluation.paper.parts import point_of
from evaluation.paper.points import Point


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
        # Omits the version of matplotlib.
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
    """Draws speed-ups over nodes; the paper's as x, or + if they are not checked, emulated ones as circles."""
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
    """Draws bars: shares of a step, bytes per node, or speed-ups."""
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
    """Returns the offset of the i-th of some bars from their centre."""
    return 0.84 / len(bars) * (i - (len(bars) - 1) / 2)


def _break_even(ax):
    """Draws the rows of all nodes together, and the limit up to which a layer's factors are fewer bytes."""
    nodes = [2 ** i for i in range(1, 11)]
    for k, dashes in ((8, ":"), (32, "-"), (128, "--")):
        ax.plot(nodes, [k * p for p in nodes], dashes, color="black", label=f"K = {k} rows on each")
    for i, (layer, (m, n)) in enumerate(LAYERS.items()):
        ax.axhline(2 * m * n / (m + n), color=f"C{i}", linewidth=1, label=layer)
    ax.set(xscale="log", yscale="log", xlabel="nodes P", ylabel="rows K P; factors below 2MN/(M+N)")
    ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
