"""Runs Horovod's own tests and examples for TensorFlow, plainly and after `poseidon.enable()`, and compares.

    scripts/install_horovod.sh
    pip install mock parameterized && pip install --no-deps "tf_keras==2.21.*"
    git clone --branch v0.28.1 https://github.com/horovod/horovod DIRECTORY
    python -m evaluation.suites.horovod_suites --horovod DIRECTORY --markdown docs/results/horovod_suites.md

Each suite is a job of two ranks (`horovod_rank.py`). `--names` has patterns of files and examples. The exit status is 1
if a test or an example fails after `enable()` but not plainly, without a reason in `DIFFERENCES`; if an example
computes something else; or if a reason is not needed.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import importlib.util
import os
import pathlib
import re
import tempfile

from absl import app
from absl import flags

from evaluation.runner import arrays
from evaluation.runner import command
from evaluation.runner import jobs
from evaluation.runner.outcomes import Difference
from evaluation.runner.outcomes import Outcome
from evaluation.runner.outcomes import Outcomes
from evaluation.suites import horovod_examples

_HOROVOD = flags.DEFINE_string("horovod", None, "Checkout of Horovod.", required=True)
_WITHOUT = flags.DEFINE_list("without", [], "Patterns of tests that are left out, where they would take too long.")
_POLICY = flags.DEFINE_string("policy", "sfb", "Policy of enable().")

VERSION = "0.28.1"
_RANKS = 2
_ROUNDING = 1e-5  # single precision, some steps

# The first that matches explains a failure that plain Horovod does not have.
DIFFERENCES = (
    Difference("tensorflow/*", "programs without eager execution are refused by name (docs/engines.md)"),
)
# What plain Horovod fails for, too.
_KERAS_3 = "written for Keras 2, run with Keras 3"
CAUSES = tuple(Difference("*", cause, error=error) for error, cause in (
    (r"missing 1 required positional argument: 'learning_rate'|has no attribute 'compute_gradients'", _KERAS_3),
    (r"not recognized: \{'lr'|keras.optimizers.legacy|_tf_keras.*has no attribute", _KERAS_3),
    (r"module 'keras.backend' has no attribute", _KERAS_3),
    (r"All local variables must be of tf.Variable type", _KERAS_3),
    (r"'list' object is not callable", "`optimizer.variables()` of Keras 2, now a property"),
    (r"float16\(0.0\) not less than 1e-08", "NumPy 2 rounds the bound 1e-8 to half precision, which is 0"),
))

_ABOUT = """\
Each file of tests, and each example, runs plainly and after `poseidon.enable(policy="sfb")`, which replaces every sum
that it can, on 2 ranks. `tf.keras` is Keras 2, which Horovod was written for, unless a row says otherwise. The last two
columns count the sums of all graphs that the passes rewrote, and those that became factors. Of examples, the largest
difference of printed losses and of trained weights on any rank, after the same steps, is at most 1e-05 in single
precision."""


@dataclasses.dataclass(frozen=True)
class Suite:
    """A file of tests.

    Attributes:
        path: Its path in `test/parallel` of the checkout.
        keras: The version of Keras that `tf.keras` is: 2, which Horovod was written for, or 3.
    """

    path: str
    keras: int = 2

    @property
    def name(self) -> str:
        """The file, and the version of Keras unless it is 2."""
        return self.path if self.keras == 2 else f"{self.path}, Keras {self.keras}"


SUITES = (
    Suite("test_tensorflow.py"), Suite("test_tensorflow_process_sets.py"), Suite("test_adasum_tensorflow.py"),
    Suite("test_tensorflow_keras.py"), Suite("test_tensorflow2_keras.py"), Suite("test_tensorflow2_keras.py", 3),
    Suite("test_tensorflow2_keras_process_sets.py"), Suite("test_tensorflow2_keras_process_sets.py", 3))


def check_checkout(directory: str) -> None:
    """Raises app.UsageError unless a directory is a checkout of Horovod's version, and all is installed."""
    file = pathlib.Path(directory) / "horovod" / "__init__.py"
    found = re.search(r"__version__ = '(.*)'", file.read_text()) if file.exists() else None
    if found is None or found[1] != VERSION:
        raise app.UsageError(f"--horovod={directory} is {f'Horovod {found[1]}' if found else 'no checkout of Horovod'},"
                             f" expected {VERSION}; check out its tag v{VERSION}.")
    missing = [name for name in ("horovod", "mock", "parameterized", "tf_keras")
               if importlib.util.find_spec(name) is None]
    if missing:
        raise app.UsageError(f"{', '.join(missing)} cannot be imported; install as the head of {__file__} says.")


def _plans(outcomes: Iterable[Outcome]) -> list[dict[str, int]]:
    """Returns how many sums travel by which scheme, of each graph that the passes rewrote on rank 0."""
    return [plan for outcome in outcomes for plans in outcome.values[:1] for plan in plans or ()
            if isinstance(plan, dict)]


_SUITES = {suite.name: suite for suite in SUITES}
_EXAMPLES = {example.name: example for example in horovod_examples.EXAMPLES}
COMMAND = command.Command(
    "Horovod's tests and examples", "evaluation.suites.horovod_suites", _ABOUT, {"plain": "plain", "enabled": "plain"},
    DIFFERENCES, CAUSES, row=lambda suite, item: "examples" if suite in _EXAMPLES else suite,
    columns={"sums": lambda found: sum(sum(plan.values()) for plan in _plans(found)),
             "as factors": lambda found: sum(plan.get("sfb", 0) for plan in _plans(found))},
    packages={"Horovod": "horovod", "tf_keras": "tf_keras"})


def run_suite(suite: Suite, checkout: str, how: str, without: Sequence[str] = (), **limits: float) -> Outcomes:
    """Runs the tests of a file, plainly or with a policy."""
    return jobs.run(jobs.Job("suites.horovod_rank", _RANKS, how, {
        "suite": suite.name, "path": os.path.join(checkout, "test", "parallel", suite.path), "without": without},
        {"TF_USE_LEGACY_KERAS": str(int(suite.keras == 2))}, **limits))


def main(_: Sequence[str]) -> int:
    check_checkout(_HOROVOD.value)
    checkout = os.path.abspath(_HOROVOD.value)

    def run(suite: str, run: str, before: Mapping[str, Outcomes]) -> Outcomes:
        how = "plain" if run == "plain" else _POLICY.value
        if suite in _SUITES:
            return run_suite(_SUITES[suite], checkout, how, _WITHOUT.value, **command.limits())
        found = jobs.run(jobs.Job("suites.horovod_rank", _RANKS, how, {
            "checkout": checkout, "arrays": f"{directory}/{run}"}, {"TF_USE_LEGACY_KERAS": "1"},
            **command.limits()), [suite])
        return found if run == "plain" else arrays.judged(
            before["plain"], found, (f"{directory}/plain", f"{directory}/{run}"), lambda name: _ROUNDING)

    with tempfile.TemporaryDirectory() as directory:
        return COMMAND.main(command.wanted([*_SUITES, *_EXAMPLES]), run, with_files=_EXAMPLES,
                            is_complete=not _WITHOUT.value)


if __name__ == "__main__":
    app.run(main)
