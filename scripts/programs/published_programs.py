"""Trains published Keras programs plainly and on several ranks, and writes how far the results are apart.

    python scripts/programs/published_programs.py --keras_io DIRECTORY --markdown docs/results/published_programs.md

DIRECTORY is a checkout of Keras with `examples/keras_io` and `guides`. The exit status is 1 if a program differs, or
fails, without an explanation in its recipe.
"""

from collections.abc import Sequence
import dataclasses
import json
import pathlib
import subprocess
import sys
import sysconfig
import tempfile

from absl import app
from absl import flags
import numpy as np
import program_recipes
from rich import progress
import updates

_CHECKOUT = flags.DEFINE_string("keras_io", None, "Checkout with the programs.", required=True)
_NAMES = flags.DEFINE_list("names", [], "Programs to run; all by default.")
_RANKS = flags.DEFINE_list("ranks", ["1", "2", "3"], "Numbers of ranks.")
_POLICIES = flags.DEFINE_list("policies", ["auto", "sfb"], "Policies.")
_JSON = flags.DEFINE_string("json", None, "File for the results; programs that it has are not run again.")
_MARKDOWN = flags.DEFINE_string("markdown", None, "File for the table.")
_TIMEOUT = flags.DEFINE_integer("timeout_s", 300, "Longest time of a run.")

_RUN = pathlib.Path(__file__).with_name("run_program.py")
# One process is plain Keras, bit for bit; several add in another order, in double precision. Adam and others amplify
# rounding where gradients are nearly zero.
_BOUND = 1e-5


def _run(recipe: program_recipes.Recipe, how: str, ranks: int, out: pathlib.Path) -> list[dict[str, np.ndarray]] | str:
    """Returns the arrays of each rank, or why the run failed."""
    launcher = [str(pathlib.Path(sysconfig.get_path("scripts")) / "mpiexec"), "-n", str(ranks)] if ranks > 1 else []
    try:
        ended = subprocess.run([*launcher, sys.executable, str(_RUN), how, _CHECKOUT.value, recipe.name, str(out)],
                               capture_output=True, text=True, timeout=_TIMEOUT.value, cwd=out.parent)
    except subprocess.TimeoutExpired:
        return f"took more than {_TIMEOUT.value} s"
    if ended.returncode:
        lines = [line for line in ended.stderr.splitlines() if line.strip() and not line.startswith(("=", "YOUR "))]
        return lines[-1][:300] if lines else f"status {ended.returncode}"
    return [dict(np.load(f"{out}.{rank}.npz")) for rank in range(ranks)]


def compared(recipe: program_recipes.Recipe) -> dict[str, object]:
    """Returns the results of a program: of plain Keras, and per number of ranks and policy."""
    with tempfile.TemporaryDirectory() as directory:
        plain = _run(recipe, "plain", 1, pathlib.Path(directory) / "plain")
        if isinstance(plain, str):
            return {"plain": plain}
        runs = {}
        for ranks in map(int, _RANKS.value):
            for policy in _POLICIES.value if ranks > 1 else _POLICIES.value[:1]:
                name = f"{ranks} {policy}" if ranks > 1 else "1"
                arrays = _run(recipe, policy, ranks, pathlib.Path(directory) / name.replace(" ", "-"))
                runs[name] = arrays if isinstance(arrays, str) else _compare(plain[0], arrays)
        return {"plain": "", "runs": runs}


def _compare(plain: updates.Arrays, ranks: Sequence[updates.Arrays]) -> dict[str, object] | str:
    for rank, arrays in enumerate(ranks):
        if any(value.tobytes() != ranks[0][key].tobytes() for key, value in arrays.items()):
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
    return comparison.updates > 0 and comparison.is_equal if name == "1" else comparison.within(_BOUND)


_PAGE = """# Published programs

Programs of keras-io and of Keras' guides, trained plainly and in the scope of a strategy, on the same few rows, in
double precision, with dropout and augmentation as they are, and `global_batch_norm=True`. One process must have the
bits of plain Keras ("equal"). Of several ranks, the table has the largest difference of anything noted: the ratio of an
update of plain SGD to that of plain Keras, minus 1; weights after up to three steps of SGD and of the program's own
optimizer; logs. `scripts/programs/published_programs.py` makes it; `program_recipes.py` says what is made smaller.

"""


def table(results: dict[str, dict[str, object]]) -> str:
    """Returns the page about all results."""
    recipes = {recipe.name: recipe for recipe in program_recipes.RECIPES}
    names = list(dict.fromkeys(name for result in results.values() for name in result.get("runs", ())))
    lines = [f"| program | subject | updates | {' | '.join(names)} | |", "|" + "---|" * (len(names) + 4)]
    for program, result in results.items():
        recipe, runs = recipes[program], result.get("runs", {})
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
    return not result["plain"] and all(is_right(*run) for run in result["runs"].items())


def main(_: Sequence[str]) -> int:
    stored = pathlib.Path(_JSON.value) if _JSON.value else None
    results = json.loads(stored.read_text()) if stored and stored.exists() else {}
    wanted = [recipe for recipe in program_recipes.RECIPES if recipe.name in (_NAMES.value or [recipe.name])]
    for recipe in progress.track([recipe for recipe in wanted if recipe.name not in results], "programs"):
        results[recipe.name] = compared(recipe)
        print(recipe.name, json.dumps(results[recipe.name]), flush=True)
        if stored:
            stored.write_text(json.dumps(results, indent=1) + "\n")
    if _MARKDOWN.value:
        pathlib.Path(_MARKDOWN.value).write_text(table(results))
    unexplained = [recipe.name for recipe in wanted if not recipe.explained and not _is_right(results[recipe.name])]
    print(f"{len(wanted) - len(unexplained)} programs are right or explained; not: {', '.join(unexplained) or 'none'}")
    return bool(unexplained)


if __name__ == "__main__":
    app.run(main)
