"""The examples do what the README says."""

import pathlib
import re

import launch

DIGITS = pathlib.Path(__file__).parents[1] / "examples" / "digits.py"


def test_digits(tmp_path):
    saved = tmp_path / "two.npz"
    two = launch.run_ok([DIGITS, "--save", saved], ranks=2, timeout_s=120)
    one = launch.run_ok([DIGITS, "--compare", saved], ranks=0, timeout_s=120)
    for outcome, processes in ((two, 2), (one, 1)):
        accuracy = re.search(rf"with {processes} process\(es\): ([\d.]+)", outcome.output)[1]
        assert float(accuracy) >= 0.97
        assert outcome.output.count("Epoch 3/") == 1  # progress on rank 0 only
    # The plan, which depends on measured speeds.
    assert re.search(r"^sequential/conv2d/kernel +3x3x1x16 +ps ", two.output, re.MULTILINE)
    assert re.search(r"^sequential/dense/kernel +288x256 +(sfb|ps) ", two.output, re.MULTILINE)
    difference = re.search(r"Largest weight difference from \S+: ([\d.e-]+)", one.output)[1]
    # 12 epochs of 22 steps in single precision; a wrong scale for one step gives 1e-2.
    assert float(difference) < 1e-4
