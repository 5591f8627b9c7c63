"""Compares the paper's results (claims.py) with ours: emulated where available, simulated beyond.

    python -m evaluation.paper.tables                          # all parts: some minutes
    python -m evaluation.paper.tables --parts traffic,stalls   # recomputes these; the report has all
    python -m evaluation.paper.tables --parts ''               # only the report, from the stored parts

Each part (parts.py) is stored as docs/results/paper/PART.json, with a plot (plots.py); docs/results/paper.md is made
only from these (report.py). points.py says what is emulated, and what is simulated.
"""

import json
import pathlib

from absl import app
from absl import flags
import rich.console
import rich.progress

from evaluation.paper import parts
from evaluation.paper import plots
from evaluation.paper import report

_PARTS = flags.DEFINE_list("parts", None, "Parts to recompute; all by default.")
_OUT = flags.DEFINE_string("out", "docs/results", "Directory of emulated.json and paper.md.")


def main(arguments):
    if len(arguments) > 1:
        raise SystemExit(f"There is an argument '{arguments[1]}', expected flags only: see --help.")
    names = list(parts.PARTS) if _PARTS.value is None else _PARTS.value
    unknown = [name for name in names if name not in parts.PARTS]
    if unknown:
        raise SystemExit(f"--parts has '{unknown[0]}', expected some of {', '.join(parts.PARTS)}: choose from these.")
    out = pathlib.Path(_OUT.value)
    (out / "paper").mkdir(parents=True, exist_ok=True)
    emulated = report.load(out / "emulated.json") if (out / "emulated.json").exists() else []
    with rich.progress.Progress(console=rich.console.Console(stderr=True)) as progress:
        for name in names:
            data = parts.compute(name, emulated, progress.track)
            (out / "paper" / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
            plots.plot(data, out / "paper")
    (out / "paper.md").write_text(report.report(report.stored(out)))


if __name__ == "__main__":
    app.run(main)
