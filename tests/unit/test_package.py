"""The package as a whole: effects of importing it, and the TensorFlow that it is built for."""

import ast
import collections
import os
import pathlib
import re
import subprocess
import sys

import pytest

import tf_poseidon
from tf_poseidon import supported
from tf_poseidon.errors import PoseidonError
from tf_poseidon.job import engines
from tf_poseidon.job.engines import mpi
from tf_poseidon.ops import library

PACKAGE = pathlib.Path(tf_poseidon.__file__).parent


def test_importing_starts_nothing():
    program = ("import sys, threading; before = set(sys.modules); import tf_poseidon; "
               "assert not {'tensorflow', 'keras', 'ctypes', 'plotly'} & (set(sys.modules) - before); "
               "assert threading.active_count() == 1")
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_unknown_attribute():
    with pytest.raises(AttributeError, match="no attribute 'Strategy'"):
        tf_poseidon.Strategy  # noqa: B018


def test_folders_have_few_files():
    numbers = collections.Counter(path.parent for path in PACKAGE.rglob("*.py"))
    most = {PACKAGE / "graph_passes/partition/rules": 16}  # one per family of ops
    assert not {folder: number for folder, number in numbers.items() if number > most.get(folder, 12)}


def test_only_the_hook_touches_keras():
    for path in PACKAGE.rglob("*.py"):
        if not {"keras_hook", "explanations"} & set(path.relative_to(PACKAGE).parts):
            assert not re.search(r"^\s*(import|from) keras", path.read_text(), re.MULTILINE), path


def test_names_of_classes_and_modules_are_unique():
    places = collections.defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        places[path.parent.name if path.name == "__init__.py" else path.stem].add(path)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(path)
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}


# Public functions, whose many options are keywords.
OF_KEYWORDS = {
    "explanations/explaining.py advise",
    "explanations/explaining.py explain",
    "job/function_jobs/function_job.py run",
    "saved_graphs/load_ops.py load_ops",
    "saved_graphs/verifying.py verify",
    "strategy/poseidon_strategy.py __init__",
}


def test_functions_have_few_parameters():
    many = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                names = {arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)} - {"self", "cls"}
                if len(names) > 8:
                    many.add(f"{path.relative_to(PACKAGE)} {node.name}")
    assert many == OF_KEYWORDS


def test_the_communicator_includes_no_tensorflow_header():
    sources = pathlib.Path(__file__).parents[2] / "kernels" / "communicator"
    for path in sources.glob("*"):
        assert '#include "tensorflow' not in path.read_text(), path


@pytest.mark.parametrize("built, running, expected", [
    (["2.21"], "2.21.0", "libposeidon_ops_2_21.so"), (["2.20", "2.21"], "2.20.1", "libposeidon_ops_2_20.so"),
    (["2.21"], "2.21.0-rc1", "libposeidon_ops_2_21.so"),
    (["2.20"], "2.21.0", r"built for TensorFlow 2\.20, but TensorFlow 2\.21\.0 is running\. Build it"),
    (["2.19", "2.2"], "2.2.1", r"built for TensorFlow 2\.19, but TensorFlow 2\.2\.1 is running\."),
    ([], "2.21.0", "has none. Run `make setup`")])
def test_each_tensorflow_has_its_library(built, running, expected, tmp_path):
    for series in built:
        (tmp_path / f"{supported.library(series)}.so").touch()
    if expected.endswith(".so"):
        assert library.path_for(running, tmp_path).name == expected
    else:
        with pytest.raises(PoseidonError, match=expected):
            library.path_for(running, tmp_path)


@pytest.mark.parametrize("wish, problem", [
    ("1", "but there is no nvcc in /nowhere/bin; set CUDA_HOME"), ("yes", "expected 0, 1, or nothing")])
def test_gpu_kernels_that_cannot_be_built(wish, problem, tmp_path):
    build = subprocess.run([sys.executable, "setup.py", "build", "--build-base", tmp_path], text=True,
                           capture_output=True, cwd=PACKAGE.parent,
                           env={**os.environ, "TF_POSEIDON_CUDA": wish, "CUDA_HOME": "/nowhere"})
    assert build.returncode != 0
    assert f"tf_poseidon: TF_POSEIDON_CUDA={wish}" in build.stderr and problem in build.stderr


@pytest.mark.parametrize("environment, expected", [
    ({}, (1, None)),
    ({"PMI_SIZE": "4"}, (4, "PMI_SIZE")),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, (2, "OMPI_COMM_WORLD_SIZE")),
    ({"SLURM_STEP_NUM_TASKS": "8"}, (8, "SLURM_STEP_NUM_TASKS")),
    ({"SLURM_NTASKS": "8"}, (1, None)),  # an allocation's shell, not a task of srun
])
def test_launched_size(environment, expected):
    assert mpi.launched_size(environment) == expected


@pytest.mark.parametrize("engine, environment, expected", [
    (None, {}, ("mpi", 1)),
    (None, {"PMI_SIZE": "4"}, ("mpi", 4)),
    (None, {"HOROVOD_SIZE": "4"}, ("horovod", 4)),
    (None, {"SLURM_STEP_NUM_TASKS": "1", "HOROVOD_SIZE": "4"}, ("horovod", 4)),  # horovodrun in one task
    (None, {"PMI_SIZE": "4", "HOROVOD_SIZE": "4"}, ("horovod", 4)),
    ("horovod", {"PMI_SIZE": "4"}, ("horovod", 4)),
    ("horovod", {}, ("horovod", 1)),
    ("mpi", {"HOROVOD_SIZE": "1"}, ("mpi", 1)),
    ("mpi", {"HOROVOD_SIZE": "2"}, r"\(HOROVOD_SIZE=2\): launch with mpiexec, or omit engine"),
    (None, {"PMI_SIZE": "2", "HOROVOD_SIZE": "4"}, r"disagree, HOROVOD_SIZE=4 but PMI_SIZE=2: use one"),
    ("tcp", {}, r"engine='tcp', expected one of horovod, mpi"),
])
def test_the_engine_follows_from_the_launcher(engine, environment, expected):
    if isinstance(expected, tuple):
        assert engines.launch(engine, environment) == expected
    else:
        with pytest.raises(PoseidonError, match=expected):
            engines.launch(engine, environment)


def test_a_rank_disconnects_from_its_launcher(monkeypatch):
    receives, sends = os.pipe()
    monkeypatch.setenv("PMI_FD", str(sends))
    mpi.disconnect()
    assert os.read(receives, 1) == b""  # as the launcher sees it
    os.close(receives)
    mpi.disconnect()  # it is closed already
    monkeypatch.delenv("PMI_FD")
    mpi.disconnect()  # another launcher
