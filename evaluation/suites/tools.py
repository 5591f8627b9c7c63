"""Compares the programs of tool_programs.py on several ranks with plain Keras.

    python -m evaluation.suites.tools --ranks 1,2,3 --policies auto,sfb

Prints the largest difference of each program, relative to the update or the result that has it. Needs keras-tuner and
keras-hub (`pip install keras-tuner`; `pip install --no-deps keras-hub` and what it then misses, which leaves TensorFlow
as it is). The exit status is 1 if a program differs, or fails.
"""

from collections.abc import Sequence
import pathlib
import subprocess
import sys
import sysconfig
import tempfile

from absl import app
from absl import flags
import numpy as np

from evaluation import modules
from evaluation.suites import tool_programs

_NAMES = flags.DEFINE_list("names", [], "Programs to run; all by default.")
_RANKS = flags.DEFINE_list("ranks", ["1", "2", "3"], "Numbers of ranks.")
_POLICIES = flags.DEFINE_list("policies", ["sfb"], "Policies.")
_TIMEOUT = flags.DEFINE_integer("timeout_s", 600, "Longest time of a program.")

# By precision: rounding of sums in another order, over some steps. Steps in bfloat16 have three digits, half has four.
# In Gemma, layers compute in single precision whatever the policy.
_BOUNDS = {"float64": 1e-9, "float32": 1e-5, "mixed_bfloat16": 3e-2, "mixed_float16": 4e-3}
_SINGLE = ("gemma_lora",)


def _run(name: str, how: str, ranks: int, directory: pathlib.Path) -> list[dict[str, np.ndarray]] | str:
    """Returns the arrays of each rank, or why the run failed."""
    directory.mkdir()
    launcher = [str(pathlib.Path(sysconfig.get_path("scripts")) / "mpiexec"), "-n", str(ranks)] if ranks > 1 else []
    try:
        ended = subprocess.run([*launcher, *modules.command("suites.tool_programs"), how, str(directory), name],
                               capture_output=True, text=True, timeout=_TIMEOUT.value)
    except subprocess.TimeoutExpired:
        return f"took more than {_TIMEOUT.value} s"
    if ended.returncode:
        lines = [line for line in ended.stderr.splitlines() if line.strip()]
        return lines[-1][:300] if lines else f"status {ended.returncode}"
    return [dict(np.load(directory / f"{name}.{rank}.npz")) for rank in range(ranks)]


def difference(plain: dict[str, np.ndarray], parts: Sequence[dict[str, np.ndarray]]) -> float:
    """Returns the largest difference of ranks from plain Keras, relative to the largest element.

    It is infinite if the ranks differ, or if something is missing, has another shape, or is infinite elsewhere.
    """
    largest = 0.0
    for key, want in plain.items():
        have = parts[0].get(key)
        if have is None or have.shape != want.shape or any(part[key].tobytes() != have.tobytes() for part in parts):
            return np.inf
        finite = np.isfinite(want)
        if not np.array_equal(finite, np.isfinite(have)):
            return np.inf
        scale = max(np.abs(want[finite]).max(initial=0), 1e-3)
        largest = max(largest, np.abs(have - want)[finite].max(initial=0) / scale)
    return float(largest)


def main(_: Sequence[str]) -> None:
    """Runs the programs, and prints a line for each."""
    columns = [(int(ranks), policy) for ranks in _RANKS.value for policy in _POLICIES.value]
    is_right = True
    for name in _NAMES.value or tool_programs.PROGRAMS:
        with tempfile.TemporaryDirectory() as directory:
            plain = _run(name, "plain", 1, pathlib.Path(directory) / "plain")
            found = []
            for ranks, policy in columns:
                parts = _run(name, policy, ranks, pathlib.Path(directory) / f"{ranks}-{policy}")
                found.append(next((text for text in (plain, parts) if isinstance(text, str)), None)
                             or difference(plain[0], parts))
        bound = _BOUNDS["float32" if name in _SINGLE else tool_programs.PRECISION[name]]
        is_right &= all(not isinstance(value, str) and value <= bound for value in found)
        cells = (value if isinstance(value, str) else f"{value:.0e}" if value else "equal" for value in found)
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    sys.exit(not is_right)


if __name__ == "__main__":
    app.run(main)
