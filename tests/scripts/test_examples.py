"""The examples do what the README says."""

import pathlib
import re

import launch

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
DIGITS, SAVED_GRAPH = EXAMPLES / "digits.py", EXAMPLES / "saved_graph.py"


def test_digits(tmp_path):
    saved = tmp_path / "two.npz"
    two = launch.run_ok([DIGITS, "--save", saved], ranks=2, timeout_s=120, fresh=True)
    one = launch.run_ok([DIGITS, "--compare", saved], ranks=0, timeout_s=120)
    for outcome, processes in ((two, 2), (one, 1)):
        accuracy = re.search(rf"with {processes} process\(es\): ([\d.]+)", outcome.output)[1]
        assert float(accuracy) >= 0.97
        assert outcome.output.count("Epoch 3/") == 1  # progress on rank 0 only
    # The plan, which depends on measured speeds.
    assert re.search(r"^sequential/conv2d/kernel +3x3x1x16 +ps ", two.output, re.MULTILINE)
    assert re.search(r"^sequential/dense/kernel +288x256 +(sfb|ps) ", two.output, re.MULTILINE)
    found = re.search(r"Largest difference from the weights in \S+: ([\d.e-]+), .*: equal up to rounding", one.output)
    # 12 epochs of 22 steps; a wrong scale for one step gives 1e-2.
    assert float(found[1]) < 1e-11
    other = launch.run([DIGITS, "--epochs=1", "--compare", saved], ranks=0, timeout_s=120)
    assert other.status == 1 and other.own_lines[-1].endswith(": DIFFERENT")


def test_saved_graph(tmp_path):
    launch.run_ok([SAVED_GRAPH, "--make", tmp_path], ranks=0, timeout_s=60, fresh=True)
    accuracies = {}
    for ranks, saved in ((0, "original"), (2, "rewritten")):
        outcome = launch.run_ok([SAVED_GRAPH, "--train", tmp_path / saved], ranks, timeout_s=60)
        found = re.search(rf"Test accuracy with {ranks or 1} process\(es\): ([\d.]+)", outcome.output)
        accuracies[saved] = float(found[1])
    assert accuracies["original"] >= 0.95
    # The same training but for rounding: 450 images, of which one or two may change sides.
    assert abs(accuracies["rewritten"] - accuracies["original"]) < 0.006
