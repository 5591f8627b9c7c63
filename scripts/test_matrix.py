"""Tests each supported TensorFlow with each supported Keras, by the wheel that people install.

    scripts/build_wheel.sh && python scripts/test_matrix.py --wheel dist/tf_poseidon-*.whl

Each TensorFlow has an environment of its own in build/matrix for each Python (--python, by default this one), without
this source tree; the releases of Keras take turns in it. Of each pair, the newest patch releases are tested: the
self-test, the private names and hooks, the graph passes, the cover of the training table on two ranks, programs of one
process, and saved graphs. Takes about three minutes for a pair on 2 cores. Results of pairs that are not tested again
are kept.
"""

import itertools
import json
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import time

from absl import app
from absl import flags
import rich.console

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_SUPPORTED = runpy.run_path(str(_ROOT / "tf_poseidon" / "supported.py"))

# In addition to what the wheel needs. TensorFlow 2.20 itself cannot write graphs as text by protobuf 7.
_TOOLS = ("pytest", "pytest-xdist", "hypothesis", "scikit-learn", "setuptools>=77")
_WITH = {"2.20": ("protobuf<7",)}
_CORE = (
    "unit/test_compat.py", "unit/test_keras_hook.py", "unit/test_package.py", "graphs/test_passes.py",
    "graphs/test_placement.py", "training/test_training.py::test_table", "training/test_distribution.py",
    "training/test_rewritten.py", "saved/test_saved_graphs.py",
)
# Two ranks; and not the longest, nor those that look for what only a source tree has.
_SELECTED = " and ".join(f"not {name}" for name in (
    "3-ps", "3-sfb", "3-auto", "3-paper", "4-auto", "requirements_are", "gpu_kernels_that_cannot", "linear_time",
    "keras_applications", "deterministic", "goes_on_where", "replayed", "scope_are"))
# What pip says where an index has a project, but no release for this Python; without any release, it was not reached.
_NO_WHEEL, _NO_INDEX = "No matching distribution found for {}", "from versions: none"
_VERSIONS = ("import importlib.metadata as m, json, platform; print(json.dumps({'python': platform.python_version(), "
             "**{name: m.version(name) for name in ('tensorflow-cpu', 'keras', 'numpy', 'mpich')}}))")


def keras_series():
    """Returns the supported release series of Keras."""
    major, first = _SUPPORTED["KERAS_FROM"].split(".")
    return [f"{major}.{minor}" for minor in range(int(first), int(_SUPPORTED["KERAS_BELOW"].split(".")[1]))]


def main(_):
    wheel, path = pathlib.Path(_WHEEL.value).resolve(), pathlib.Path(_JSON.value)
    results = {_key(row): row for row in (json.loads(path.read_text()) if path.exists() else [])}
    console, failed = rich.console.Console(stderr=True), False
    for interpreter, series in itertools.product(_PYTHON.value, _TENSORFLOW.value):
        python, python_series = environment(interpreter, series, wheel)
        for keras in _KERAS.value:
            row = {"series": series, "keras_series": keras, "python_series": python_series, "passed": 0, "problem": ""}
            row |= test(python, series, keras)
            failed |= row["problem"] != ""
            console.print(f"Python {python_series}, TensorFlow {series}, Keras {keras}:", row["problem"] or row.get(
                "unavailable") or f"{row['passed']} tests passed in {row['seconds']:.0f} s")
            results[_key(row)] = row
            path.write_text(json.dumps([results[key] for key in sorted(results)], indent=1) + "\n")
            pathlib.Path(_MARKDOWN.value).write_text(markdown([results[key] for key in sorted(results)]))
    return 1 if failed else 0


def environment(interpreter, series, wheel):
    """Returns (the Python of an environment with a TensorFlow and the wheel, its series).

    There is no such environment, and no Python, if there are no wheels of this TensorFlow for it.
    """
    python_series = _run([interpreter, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
                         check=True).stdout.strip()
    folder = _ROOT / "build" / "matrix" / f"{series}-{python_series}"
    python = folder / "bin" / "python"
    if not python.exists():
        _run([interpreter, "-m", "venv", folder], check=True)
    tensorflow = f"tensorflow-cpu=={series}.*"
    installed = _run([python, "-m", "pip", "install", "--quiet", tensorflow, wheel, *_TOOLS, *_WITH.get(series, ())])
    if _has_no_wheel(installed, tensorflow):
        shutil.rmtree(folder)
        return python, python_series
    installed.check_returncode()
    _run([python, "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", wheel], check=True)
    return python, python_series


def test(python, series, keras):
    """Returns what a row of the file says about the result of one pair."""
    if not python.exists():
        return {"unavailable": "no TensorFlow"}
    row, begin = {}, time.monotonic()
    installed = _run([python, "-m", "pip", "install", "--quiet", f"keras=={keras}.*"])
    if _has_no_wheel(installed, f"keras=={keras}.*"):
        return {"unavailable": "no Keras"}
    if installed.returncode:
        return {"problem": installed.stderr.strip().splitlines()[-1]}
    row |= json.loads(_run([python, "-c", _VERSIONS], check=True).stdout)
    tests = _ROOT / "tests"  # whose conftest.py puts the source tree behind the installed wheel
    steps = {"selftest": [python.with_name("tf-poseidon"), "selftest"],
             "tests": [python, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", "-c", _ROOT / "pyproject.toml",
                       "--rootdir", _ROOT, "--numprocesses=2", "--dist=loadfile", "-k", _SELECTED, *_CORE]}
    for name, command in steps.items():
        done = _run(command, cwd=tests)
        log = python.parents[1] / f"{name}-{keras}.log"
        log.write_text(done.stdout + done.stderr)
        if done.returncode:
            last = [line for line in done.stdout.splitlines() if re.match(r"FAILED|ERROR|WRONG|\d+ failed", line)]
            return row | {"problem": f"{name}: {'; '.join(last[:3]) or f'status {done.returncode}'}; see {log.name}"}
    row["passed"] = int(re.search(r"(\d+) passed", done.stdout)[1])
    return row | {"seconds": round(time.monotonic() - begin)}


def markdown(rows):
    """Returns the table of results: a line per Python and TensorFlow, a column per Keras."""
    columns, found = keras_series(), {_key(row): row for row in rows}

    def cell(row):
        if row is None:
            return ""
        return f"**fails**: {row['problem']}" if row["problem"] else row.get("unavailable", f"{row['passed']} tests")

    lines = [["Python", "TensorFlow", *(f"Keras {column}" for column in columns)], ["---"] * (len(columns) + 2)]
    lines += [[f"3.{python[1]}", f"2.{series[1]}", *(cell(found.get((python, series, _numbers(column))))
                                                     for column in columns)]
              for python, series in sorted({key[:2] for key in found})]
    tested = {row["tensorflow-cpu"] for row in rows if "tensorflow-cpu" in row}, {
        row["keras"] for row in rows if "keras" in row}, {row["python"] for row in rows if "python" in row}
    return "\n".join([
        "# Versions that were tested together", "",
        "Made by `scripts/test_matrix.py`, which says what is tested, by the wheel for all of them. The newest pair is",
        "also the one with which all tests run. The table says where there is no TensorFlow or Keras for a Python;",
        "empty fields were not tested.", "",
        *(f"| {' | '.join(line)} |" for line in lines), "",
        "TensorFlow {}; Keras {}; Python {}.".format(*(", ".join(sorted(each)) for each in tested)), ""])


def _has_no_wheel(installed, wanted):
    return _NO_WHEEL.format(wanted) in installed.stderr and _NO_INDEX not in installed.stderr


def _key(row):
    return tuple(_numbers(row[name]) for name in ("python_series", "series", "keras_series"))


def _numbers(series):
    return tuple(map(int, series.split(".")))


def _run(command, **options):
    # Of Python's path nothing that would hide the wheel.
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([str(part) for part in command], text=True, stdin=subprocess.DEVNULL, capture_output=True,
                          env=outside | {"TF_CPP_MIN_LOG_LEVEL": "3"}, **options)


if __name__ == "__main__":
    _WHEEL = flags.DEFINE_string("wheel", None, "The wheel to test, of scripts/build_wheel.sh.", required=True)
    _PYTHON = flags.DEFINE_list("python", [sys.executable], "Interpreters to test with.")
    _TENSORFLOW = flags.DEFINE_list("tensorflow", list(_SUPPORTED["TENSORFLOW_SERIES"]), "Series to test.")
    _KERAS = flags.DEFINE_list("keras", keras_series(), "Series to test.")
    _JSON = flags.DEFINE_string("json", str(_ROOT / "docs/results/versions.json"), "File of the results.")
    _MARKDOWN = flags.DEFINE_string("markdown", str(_ROOT / "docs/results/versions.md"), "File of the table.")
    app.run(main)
