"""Compares the programs of tool_programs.py on several ranks with plain Keras.

    python -m evaluation.suites.tools --runs "1 sfb,2 auto,3 sfb" --markdown FILE

The report has the largest difference of each program, relative to the update or the result that has it. Needs
keras-tuner and keras-hub (`pip install keras-tuner`; `pip install --no-deps keras-hub` and what it then misses, which
leaves TensorFlow as it is). `--names` has patterns of programs. The exit status is 1 if a program differs, or fails.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import tempfile

from absl import app
from absl import flags

from evaluation.runner import arrays
from evaluation.runner import command
from evaluation.runner import jobs
from evaluation.runner.outcomes import Outcomes
from evaluation.suites import tool_programs

_RUNS = flags.DEFINE_list("runs", ["1 sfb", "2 sfb", "3 sfb"], "Ranks and policy of each run.")

# By precision: rounding of sums in another order, over some steps. Steps in bfloat16 have three digits, half has four.
# In Gemma, layers compute in single precision whatever the policy.
_BOUNDS = {"float64": 1e-9, "float32": 1e-5, "mixed_bfloat16": 3e-2, "mixed_float16": 4e-3}
_SINGLE = ("gemma_lora",)


def main(_: Sequence[str]) -> int:
    def run(suite: str, run: str, before: Mapping[str, Outcomes]) -> Outcomes:
        ranks, how = (1, "plain") if run == "plain" else (int(run.split()[0]), run.split()[1])
        found = jobs.run(jobs.Job("suites.tool_programs", ranks, how, {"arrays": f"{directory}/{run}"},
                                  **command.limits()), command.wanted(tool_programs.PROGRAMS))
        return found if run == "plain" else arrays.judged(
            before["plain"], found, (f"{directory}/plain", f"{directory}/{run}"),
            lambda name: _BOUNDS["float32" if name in _SINGLE else tool_programs.PRECISION[name]], smallest=1e-3)

    with tempfile.TemporaryDirectory() as directory:
        return command.Command(
            "Programs with tools around Keras", "evaluation.suites.tools",
            "Updates of plain SGD, results and logs on ranks, beside those of plain Keras.",
            {"plain": "", **dict.fromkeys(_RUNS.value, "plain")}).main(["tools"], run, with_files=["tools"])


if __name__ == "__main__":
    app.run(main)
