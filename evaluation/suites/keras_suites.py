"""Runs Keras' own tests in the scope of a PoseidonStrategy, and writes which fail that pass plainly, and why.

    python -m evaluation.suites.keras_suites --keras DIRECTORY --markdown docs/results/keras_suites.md

DIRECTORY is a checkout of Keras, of the version that is installed. Its test files run against the installed package,
each test plainly, then on one rank and on two in the scope (`keras_rank.py`). Some files need packages that this
project does not: jax for `trainers`, torch, pandas and grain too for `trainers/data_adapters`. `--names` has patterns
of suites, as "trainers". The exit status is 1 if a test that passes plainly fails in the scope without a reason in
`DIFFERENCES`, or if all suites ran and a reason is not needed.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import importlib.metadata
import pathlib
import re

from absl import app
from absl import flags

from evaluation.runner import command
from evaluation.runner import jobs
from evaluation.runner.outcomes import Difference
from evaluation.runner.outcomes import Outcomes

_KERAS = flags.DEFINE_string("keras", None, "Checkout of Keras.", required=True)

SUITES = ("trainers", "trainers/data_adapters", "callbacks", "optimizers", "saving", "metrics", "losses")
# Their files are written by rank 0 and read by all ranks. In other suites, each rank writes and reads files of its own.
_SHARED = ("callbacks",)

_TWO = ("2 ranks",)
_OTHER = "the test enters the scope of a MirroredStrategy of its own, which TensorFlow refuses inside any other scope"
_HALF = ("outside of a step, Keras divides a loss by the number of replicas under every strategy, so these fail under "
         "MirroredStrategy with two replicas too")
_WRITERS = ("callbacks that write files run on rank 0 only, and the test uses them, or looks for what they have done, "
            "on all ranks")

# The first that matches a failure explains it.
DIFFERENCES = (
    Difference("*", "XLA cannot compile the exchange with other processes: jit_compile=True is refused by name", _TWO,
               "jit_compile=True, but XLA cannot compile the exchange"),
    Difference("*", _OTHER, error="Mixing different tf.distribute.Strategy objects"),
    Difference("*", "gradients that an optimizer applies outside of a step cannot be synchronised: refused by name",
               _TWO, "was asked to apply gradients outside strategy.run"),
    Difference("optimizers/*", "in any strategy's scope, Keras' LossScaleOptimizer refuses to apply gradients outside "
               "strategy.run", error=r"apply\(\) must be called in a replica context"),
    Difference("callbacks/backup_and_restore_test.py::*", _WRITERS, _TWO, "AssertionError: 0 != "),
    Difference("callbacks/model_checkpoint_test.py::*", _WRITERS, _TWO, "DID NOT WARN"),
    Difference("callbacks/orbax_checkpoint_test.py::*", _WRITERS, _TWO),
    Difference("callbacks/remote_monitor_test.py::*", _WRITERS, _TWO, "Called 0 times"),
    *(Difference(f"callbacks/{name}_test.py::*", "the test seeds its data by the operating system, so ranks have "
                 "different ones: refused by name", _TWO, "Rank 1 has different data than rank 0")
      for name in ("learning_rate_scheduler", "reduce_lr_on_plateau")),
    Difference("saving/saving_lib_test.py::*test_save_model_exception_raised*",
               "files are written completely or not at all, and the test wants to see an incomplete one",
               error="False is not true"),
    Difference("losses/*", _HALF, _TWO, "Mismatched elements"),
    Difference("trainers/compile_utils_test.py::TestCompileLoss::*", _HALF, _TWO, "Mismatched elements"),
    Difference("trainers/compile_utils_test.py::TestCompileLoss::test_struct_loss_valid_weights", _HALF, _TWO, "!= 4"),
)

_ABOUT = """\
The tests of these directories of `keras/src` run plainly; those that pass run in the scope of a PoseidonStrategy, on
one rank and on two. On two ranks, a test passes if it passes on both. "Skipped" are tests that Keras skips with
TensorFlow, on this machine. Random seeds are the same everywhere. Each rank has temporary directories of its own,
except in `callbacks`, whose files rank 0 alone writes."""

_RANKS = {"plain": 0, "1 rank": 1, "2 ranks": 2}  # 0 without a strategy
COMMAND = command.Command(
    "Keras' own tests", "evaluation.suites.keras_suites", _ABOUT,
    dict.fromkeys(_RANKS, "plain"), DIFFERENCES)


def check_version(root: pathlib.Path) -> None:
    """Refuses a directory that does not have the tests of the installed Keras.

    Raises:
        ValueError: If it is no checkout, or of another version.
    """
    installed, file = importlib.metadata.version("keras"), root / "keras" / "src" / "version.py"
    found = re.search(r'__version__ = "(.*)"', file.read_text()) if file.exists() else None
    if found is None or found[1] != installed:
        raise ValueError(
            f"--keras={root} has {f'Keras {found[1]}' if found else 'no keras/src/version.py'}, expected a checkout of "
            f"the installed version: git clone --depth 1 --branch v{installed} https://github.com/keras-team/keras.git")


def _run(suite: str, run: str, before: Mapping[str, Outcomes]) -> Outcomes:
    ranks = _RANKS[run]
    job = jobs.Job("suites.keras_rank", max(ranks, 1), "scope" if ranks else "plain",
                   {"checkout": str(pathlib.Path(_KERAS.value).resolve()), "suite": suite,
                    "is_shared": suite in _SHARED},
                   {"PYTHONHASHSEED": "0", "TF_NUM_INTRAOP_THREADS": "1"}, **command.limits())
    return jobs.run(job, [test for test, outcome in before["plain"].items() if outcome.outcome == "passed"]
                    if ranks else None)


def main(_: Sequence[str]) -> int:
    check_version(pathlib.Path(_KERAS.value).resolve())
    return COMMAND.main(command.wanted(SUITES), _run)


if __name__ == "__main__":
    app.run(main)
