"""Trains published Keras programs plainly and on several ranks, and writes how far the results are apart.

    python -m evaluation.programs.published_programs --keras_io DIRECTORY --markdown docs/results/published_programs.md

DIRECTORY is a checkout of Keras with `examples/keras_io` and `guides`. Some programs need pandas, keras-hub or
tensorflow-text. The exit status is 1 if a program differs, or fails, without an explanation in its recipe.
"""

from collections.abc import Sequence
import dataclasses
import json
import pathlib
import tempfile

from absl import app
from absl import flags
from rich import progress

from evaluation.programs import program_recipes
from evaluation.programs import updates
from evaluation.runner import arrays
from evaluation.runner import command
from evaluation.runner import jobs
from evaluation.runner import outcomes

_CHECKOUT = flags.DEFINE_string("keras_io", None, "Checkout with the programs.", required=True)
_RUNS = flags.DEFINE_list("runs", ["1 auto", "2 auto", "2 sfb", "3 auto", "3 sfb"], "Ranks and policy of each run.")
_TOGETHER = flags.DEFINE_integer("together", 5, "Number of programs that share a job.")

# One process is plain Keras, bit for bit; several add in another order, in double precision. Adam and others amplify
# rounding where gradients are nearly zero.
_BOUND = 1e-5


def _run(names: Sequence[str], how: str, ranks: int) -> dict[str, list[updates.Arrays] | str]:
    """Returns the arrays of each rank, or why the run failed, of each program.

    Programs share a job, since imports take longer than most of them.
    """
    with tempfile.TemporaryDirectory() as directory:
        found = jobs.run(jobs.Job("programs.run_program", ranks, how, {
            "checkout": str(pathlib.Path(_CHECKOUT.value).resolve()), "arrays": directory},
            **command.limits()), names)
        return {name: arrays.load(directory, name) if found[name].outcome == "passed"
                else outcomes.short(found[name].error) for name in names}


def compared(names: Sequence[str], results: dict[str, dict[str, object]]) -> None:
    """Adds the results of programs that are missing: of plain Keras, and of each run, which is then stored."""
    plain = _run(names, "plain", 1)
    for name, outcome in plain.items():
        results.setdefault(name, {"plain": "", "runs": {}})["plain"] = outcome if isinstance(outcome, str) else ""
    for run in _RUNS.value:
        ranks, policy = run.split()
        missing = [name for name in names if not results[name]["plain"] and run not in results[name]["runs"]]
        for name, outcome in _run(missing, policy, int(ranks)).items():
            results[name]["runs"][run] = outcome if isinstance(outcome, str) else _compare(plain[name][0], outcome)
        command.write(results)


def _compare(plain: updates.Arrays, ranks: Sequence[updates.Arrays]) -> dict[str, object] | str:
    for rank, found in enumerate(ranks):
        if any(value.tobytes() != ranks[0][key].tobytes() for key, value in found.items()):
            return f"rank {rank} has other bits than rank 0"
    try:
        return dataclasses.asdict(updates.compare(plain, ranks[0]))
    except ValueError as error:
        return str(error)


def is_right(name: str, result: dict[str, object] | str) -> bool:
    """Whether a run computed what plain Keras did: one process the same bits, several within the bound."""
    if isinstance(result, str):
        return False
    comparison = updates.Comparison(**result)
    return (comparison.updates > 0 and comparison.is_equal if name.startswith("1 ") else
            comparison.within(_BOUND))


_PAGE = """# Published programs

Programs of keras-io and of Keras' guides, and models of keras-hub, trained plainly and in the scope of a strategy, on
the same few rows, in double precision, with dropout and augmentation as they are, and `global_batch_norm=True`. A
column is a number of ranks and a policy. One process must have the bits of plain Keras ("equal"). Of several ranks, the
table has the largest difference of anything noted: the ratio of an update of plain SGD to that of plain Keras, minus 1;
weights after up to three steps of SGD and of the program's own optimizer; logs. More than 1e-5 counts as wrong. The
first thirteen programs that were ever run keep the results that they had with their own batches and depths.

The programs are files of [keras-team/keras](https://github.com/keras-team/keras) at commit
2588a15440a10de8d0cc10b50c21ede333a2bd01 (8 January 2024), the last that has `examples/keras_io`. The group "keras-hub"
has models of keras-hub 0.32.0 with random weights, as large as those of its own tests.
`evaluation/programs/published_programs.py` makes the table. `program_recipes.py` says what is made smaller in each
program, `run_program.py` what is in all: data are small and made up, weights are not downloaded, a batch has 10 rows, a
`fit` up to three steps, stacks of transformer blocks are two deep, and maps of `tf.data` are not parallel, since random
augmentation would then differ between two runs of plain Keras. Programs with loops of their own get
`@poseidon.distribute` on their steps. Of reinforcement learning, the checkout has `actor_critic_cartpole` alone, which
is refused by name: it applies gradients outside of a step, after an episode whose states came one by one.

"""


def table(results: dict[str, dict[str, object]]) -> str:
    """Returns the page about all results."""
    recipes = {recipe.name: recipe for recipe in program_recipes.RECIPES}
    names = sorted({name for result in results.values() for name in result["runs"]})
    lines = [f"| program | subject | updates | {' | '.join(names)} | |", "|" + "---|" * (len(names) + 4)]
    for program, recipe in sorted(recipes.items(), key=lambda item: item[1].group):
        if program not in results:
            continue
        result, runs = results[program], results[program]["runs"]
        cells = []
        for name in names:
            run = runs.get(name)
            cells.append("" if run is None else run if isinstance(run, str) else "equal" if run["is_equal"] else
                         f"{max(abs(run['ratio'] - 1), run['weights'], run['logs']):.0e}")
        count = max((run["updates"] for run in runs.values() if isinstance(run, dict)), default=0)
        note = f"plain Keras fails: {result['plain']}" if result["plain"] else recipe.explained
        lines.append(f"| {program} | {recipe.group} | {count} | {' | '.join(cells)} | {note} |")
    right = sum(_is_right(result) for result in results.values())
    return _PAGE + "\n".join(lines) + f"\n\n{right} of {len(results)} programs are right in all of these runs.\n"


def _is_right(result: dict[str, object]) -> bool:
    return bool(not result["plain"] and result["runs"]) and all(is_right(*run) for run in result["runs"].items())


def main(_: Sequence[str]) -> int:
    results = command.stored()
    names = command.wanted(recipe.name for recipe in program_recipes.RECIPES)
    missing = [name for name in names if not set(_RUNS.value) <= set(results.get(name, {"runs": {}})["runs"])]
    for start in progress.track(range(0, len(missing), _TOGETHER.value), "programs"):
        together = missing[start:start + _TOGETHER.value]
        compared(together, results)
        for name in together:
            print(name, json.dumps(results[name]), flush=True)
    command.write(page=table(results))
    explained = {recipe.name for recipe in program_recipes.RECIPES if recipe.explained}
    absent = {"plain": "", "runs": {}}
    wrong = [name for name in names if name not in explained and not _is_right(results.get(name, absent))]
    print(f"{len(names) - len(wrong)} programs are right or explained; not: {', '.join(wrong) or 'none'}")
    return bool(wrong)


if __name__ == "__main__":
    app.run(main)
