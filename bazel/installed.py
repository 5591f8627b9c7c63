"""Prints for installed.bzl, as JSON: where a wheel has its headers and its library, and what setup.py says of flags.

    python bazel/installed.py tensorflow|mpi
"""

import json
import os
import pathlib
import runpy
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
NEWEST = runpy.run_path(str(ROOT / "tf_poseidon" / "supported.py"))["TENSORFLOW_SERIES"][-1]


def refuse(problem: str) -> None:
    """Ends with one sentence."""
    sys.exit(f"tf_poseidon: {problem}; set PYTHON to the path of a Python that builds tf_poseidon, or run "
             f"{sys.executable} -m pip install 'tensorflow-cpu=={NEWEST}.*' 'mpich>=5' 'setuptools>=77' first.")


def main() -> None:
    """Looks for the wheel as setup.py does."""
    try:
        setup = runpy.run_path(str(ROOT / "setup.py"))
    except ImportError as error:
        refuse(f"setup.py does not run: {error}")
    if sys.argv[1] == "tensorflow":
        found = setup["tensorflow_in"](sys.path)
        if found is None:
            refuse("no TensorFlow to build against")
        include, library = f"{found.package}/include", f"{found.package}/libtensorflow_framework.so.2"
        constants = {"OP_LIBRARY": setup["SUPPORTED"]["library"](found.series) + ".so"} | {
            name: setup[name] for name in ("COMPILE_FLAGS", "COMMUNICATOR_FLAGS", "OP_FLAGS", "LINK_FLAGS")}
    else:
        if "MPICXX" in os.environ:
            sys.exit("tf_poseidon: Bazel builds with the mpich wheel; unset MPICXX, or build with setup.py.")
        header, library = setup["mpich_wheel"]("mpi.h"), setup["mpich_wheel"]("libmpi.so.12")
        if header is None or library is None:
            refuse("no MPI to build against")
        include, constants = os.path.dirname(header), {}
    print(json.dumps({"include": include, "library": library, "constants": constants}))


if __name__ == "__main__":
    main()
