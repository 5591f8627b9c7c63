"""Runs Horovod's own tests and examples for TensorFlow, plainly and after `poseidon.enable()`, and compares.

    scripts/install_horovod.sh
    pip install mock parameterized && pip install --no-deps "tf_keras==2.21.*"
    git clone --branch v0.28.1 https://github.com/horovod/horovod DIRECTORY
    python -m evaluation.suites.horovod_suites --horovod DIRECTORY --markdown docs/results/horovod_suites.md

Each suite is a job of two ranks, which is continued after a test that died or hung. The exit status is 1 if a test
fails after `enable()` but not plainly, without a reason in `horovod_differences.py`; if an example computes something
else; or if a reason is not needed.
"""

from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import fnmatch
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import sys
import time
from typing import Any

from absl import app
from absl import flags

from evaluation.suites import horovod_examples
from evaluation.suites import horovod_outcomes
from evaluation.suites import horovod_runs

_HOROVOD = flags.DEFINE_string("horovod", None, "Checkout of Horovod.", required=True)
_NAMES = flags.DEFINE_list("names", ["*"], "Patterns of the names of suites and examples.")
_WITHOUT = flags.DEFINE_list("without", [], "Patterns of tests that are left out, where they would take too long.")
_POLICY = flags.DEFINE_string("policy", "sfb", "Policy of enable().")
_JSON = flags.DEFINE_string("json", None, "File for all results; suites and examples that it has are not run again.")
_MARKDOWN = flags.DEFINE_string("markdown", None, "File for the report.")
_TIMEOUT = flags.DEFINE_integer("timeout_s", 240, "Longest time of a test.")
_GRACE = flags.DEFINE_integer("grace_s", 60, "How long other ranks may take after one has failed in a test.")

VERSION = "0.28.1"


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


def _wanted(names: Iterable[str]) -> list[str]:
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in _NAMES.value)]


def main(_: Sequence[str]) -> None:
    check_checkout(_HOROVOD.value)
    stored = pathlib.Path(_JSON.value) if _JSON.value else None
    data = json.loads(stored.read_text()) if stored and stored.exists() else {}
    checkout = os.path.abspath(_HOROVOD.value)
    suites = {suite.name: suite for suite in SUITES}
    examples = {example.name: example for example in horovod_examples.EXAMPLES}
    for name in _wanted([*suites, *examples]):
        results = data.setdefault(name, {"results": []})["results"]
        computed = []
        for how in ("plain", _POLICY.value)[len(results):]:
            begin = time.monotonic()
            if name in suites:
                path = os.path.join(checkout, "test", "parallel", suites[name].path)
                found = horovod_runs.run_suite(path, how, suites[name].keras, _TIMEOUT.value, _GRACE.value,
                                               _WITHOUT.value)
            else:
                result, arrays = horovod_runs.run_example(examples[name], how, checkout, _TIMEOUT.value)
                found = {name: result}
                computed.append(arrays)
            results.append(_plain(found))
            print(f"{name}, {how}: {time.monotonic() - begin:.0f} s", flush=True)
            if stored and (name in suites or len(results) == 2):  # both runs of an example are needed to compare it
                stored.write_text(json.dumps(data, indent=1) + "\n")
        if len(computed) == 2 and all(computed):
            data[name]["difference"] = horovod_outcomes.difference(*computed)
            if stored:
                stored.write_text(json.dumps(data, indent=1) + "\n")
    plain, enabled = ({} for _ in range(2))
    for name in _wanted([*suites, *examples]):
        for into, results in zip((plain, enabled), data[name]["results"]):
            into.setdefault(name if name in suites else "examples", {}).update(
                {test: horovod_outcomes.Result(**result) for test, result in results.items()})
    differences = {name: data[name]["difference"] for name in _wanted(examples) if "difference" in data[name]}
    lines = horovod_outcomes.problems(plain, enabled, is_complete=_NAMES.value == ["*"] and not _WITHOUT.value)
    lines += [f"examples::{name}: differs by {apart:g} after enable(), expected at most {horovod_outcomes.ROUNDING:g}"
              for name, apart in differences.items() if apart > horovod_outcomes.ROUNDING]
    if _MARKDOWN.value:
        versions = ", ".join(f"{title} {importlib.metadata.version(package)}" for title, package in (
            ("Horovod", "horovod"), ("TensorFlow", "tensorflow-cpu"), ("Keras", "tf_keras"), ("Keras", "keras")))
        page = horovod_outcomes.report(plain, enabled, differences, versions, _WITHOUT.value)
        pathlib.Path(_MARKDOWN.value).write_text(page)
    tests = [result for results in enabled.values() for result in results.values()]
    print("\n".join([f"{len(tests)} tests and examples: {sum(test.outcome == 'passed' for test in tests)} pass after "
                     "enable()", *lines]))
    sys.exit(1 if lines else 0)


def _plain(results: horovod_outcomes.Results) -> dict[str, Any]:
    return {name: dataclasses.asdict(result) for name, result in results.items()}


if __name__ == "__main__":
    app.run(main)
