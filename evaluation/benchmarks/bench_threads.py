"""Times steps of ranks that share a host's processors, against ranks that each have as many threads as these.

    python -m evaluation.benchmarks.bench_threads --json docs/results/threads.json

Each measurement is a job of its own (threads_rank.py), and those that are compared take turns. "before" is what
TensorFlow does: a thread for each processor, on each rank. All have to train to the loss of one process.
"""

import functools
import itertools
import json
import math
import os
import statistics
import subprocess
import sysconfig
from typing import Any

from absl import app
from absl import flags
import rich.progress

from evaluation import modules
from evaluation import output
from evaluation import timing

MODELS = "dense", "convolutions", "recurrent", "transformer"
_TOLERANCE = 1e-4  # of losses: sums in other orders
_TIMEOUT_S = 300

_JSON = output.json_flag()
_RANKS = flags.DEFINE_list("ranks", ["1", "2", "4"], "Numbers of ranks of this host.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Jobs of each kind.", lower_bound=2)
_STEPS = flags.DEFINE_integer("steps", 60, "Steps of a job that are timed.", lower_bound=10)
_MODELS = flags.DEFINE_multi_enum("model", MODELS, MODELS, "What is trained.")


def run(model: str, ranks: int, is_shared: bool) -> dict[str, Any]:
    """Returns what rank 0 of a job has measured."""
    launcher = [os.path.join(sysconfig.get_path("scripts"), "mpiexec"), "-n", str(ranks)] if ranks > 1 else []
    processors = len(os.sched_getaffinity(0))
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"} | (
        {} if is_shared else {"TF_NUM_INTRAOP_THREADS": str(processors)})
    done = subprocess.run([*launcher, *modules.command("benchmarks.threads_rank"), model, str(_STEPS.value)], text=True,
                          capture_output=True, timeout=_TIMEOUT_S, env=environment)
    if done.returncode:
        raise SystemExit(f"{model} on {ranks} ranks ended with status {done.returncode}, expected 0:\n"
                         f"{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(_):
    results, rows, expected = [], [], {}
    cases = list(itertools.product(_MODELS.value, map(int, _RANKS.value)))
    for model, ranks in rich.progress.track(cases, "Measuring"):
        if model not in expected:
            expected[model] = run(model, 1, True)["loss"]
        systems = {name: functools.partial(run, model, ranks, name == "shared") for name in ("before", "shared")}
        measured = timing.in_turns(systems, range(_ROUNDS.value), clock=lambda start: start())
        losses = [job["loss"] for jobs in measured.values() for job in jobs]
        if not all(math.isclose(loss, expected[model], rel_tol=_TOLERANCE) for loss in losses):
            raise SystemExit(f"{model} on {ranks} ranks has the losses {losses}, expected {expected[model]}.")
        times = {name: [statistics.median(job["seconds"]) for job in jobs] for name, jobs in measured.items()}
        found = {"model": model, "ranks": ranks, "threads": measured["shared"][0]["threads"],
                 **{name: timing.milliseconds(of_name) for name, of_name in times.items()},
                 "as_fast": timing.ratios(times["before"], times["shared"])}
        results.append(found)
        rows.append((model, str(ranks), *(timing.milliseconds_text(found[name]) for name in times),
                     timing.text(found["as_fast"])))
        output.write_json(_JSON.value, {"processors": len(os.sched_getaffinity(0)), "rows": results})
    output.show("milliseconds of a step: median (quartiles) of the jobs' medians",
                ("model", "ranks", "a thread for each processor", "shared", "times as fast"), rows)


if __name__ == "__main__":
    app.run(main)
