"""Computes our results beside the paper's, and writes the tables of docs/results/paper.md.

    python -m evaluation.paper.tables             # simulates all rows again: some minutes
    python -m evaluation.paper.tables --parts ''  # only writes the tables of what is stored

docs/results/paper/claims.csv has what the paper says and our result, a row per number; points.csv has our results on
other numbers of nodes, with other rates and systems. Whoever wants to know more adds a row to either, without results.
"""

import json
import pathlib

from absl import app
from absl import flags
import rich.console
import rich.progress

from evaluation import modules
from evaluation.paper import plots
from evaluation.paper import points as points_lib
from evaluation.paper import report

_PARTS = flags.DEFINE_list("parts", None, "Parts to simulate again; all by default.")
_OUT = flags.DEFINE_string("out", str(modules.RESULTS), "Directory of emulated.json, paper.md and paper/.")


def main(arguments):
    if len(arguments) > 1:
        raise SystemExit(f"There is an argument '{arguments[1]}', expected flags only: see --help.")
    out = pathlib.Path(_OUT.value)
    claims, points = (report.load(out / "paper" / f"{name}.csv") for name in ("claims", "points"))
    known = sorted({row["part"] for row in (*claims, *points)})
    parts = known if _PARTS.value is None else _PARTS.value
    if unknown := sorted({*parts} - {*known}):
        raise SystemExit(f"--parts has '{unknown[0]}', expected some of {', '.join(known)}: choose from these.")
    runs = json.loads((out / "emulated.json").read_text()) if parts else []
    rows = [row for row in (*claims, *points) if row["part"] in parts]
    for row in rich.progress.track(rows, "simulating", console=rich.console.Console(stderr=True), transient=True):
        compute(row, runs)
    if found := report.problems(claims):
        raise SystemExit("\n".join(found))
    for name, table in (("claims", claims), ("points", points)):
        report.save(out / "paper" / f"{name}.csv", table)
    path = out / "paper.md"
    path.write_text(report.report(path.read_text(), claims, points))
    for part in plots.PARTS:
        if part in parts:
            plots.plot(part, claims, points, out / "paper" / f"{part}.png")


def compute(row, runs):
    """Sets our results in a row of either table; `runs` is the content of emulated.json."""
    point = points_lib.Point.of(row)
    simulated, emulated = points_lib.measure(point), points_lib.emulated(point, runs)
    if "quantity" not in row:
        row |= simulated | {f"emulated_{name}": emulated.get(name) for name in ("step_ms", "speed_up", "gb_mean")}
        return
    row |= {"simulated": simulated[row["quantity"]], "emulated": emulated.get(row["quantity"]), "needs_gbps": None}
    if row["paper"] and row["quantity"] in ("step_ms", "speed_up") and abs(report.ours(row) / row["paper"] - 1) > (
            report.TOLERANCE):
        step_ms = (row["paper"] if row["quantity"] == "step_ms" else
                   simulated["step_ms"] * simulated["speed_up"] / row["paper"])
        row["needs_gbps"] = points_lib.needed_gbps(point, step_ms)


if __name__ == "__main__":
    app.run(main)
