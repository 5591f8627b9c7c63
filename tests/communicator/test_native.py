"""The communicator's tests in C++, in their plain build; `make test-native` also runs them under sanitizers."""

import pathlib
import subprocess
import sys

NATIVE = pathlib.Path(__file__).resolve().parents[1] / "native"


def test_plain_build():
    run = subprocess.run(["make", "--silent", "--jobs=2", f"PYTHON={sys.executable}", "plain"], cwd=NATIVE,
                         capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
