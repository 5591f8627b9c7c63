"""The examples do what the README says."""

import dataclasses
import json
import pathlib
import re

import launch
import pytest

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


@dataclasses.dataclass(frozen=True)
class Example:
    """What an example must show.

    Attributes:
        program: Its file, without ".py".
        arguments: What makes it quick.
        result: The begin of the line with its result, which ends in a number.
        bounds: Least and largest number.
        shown: Patterns of lines that two ranks print besides, such as those of their plan.
    """

    program: str
    arguments: tuple[str, ...]
    result: str
    bounds: tuple[float, float]
    shown: tuple[str, ...] = ()


TRAININGS = (
    # The moments of batch normalisation are sums over all rows.
    Example("image_classifier", ("--epochs=3",), "Test accuracy", (0.8, 1),
            (r"sequential\S*/batch_normalization\S*/moments/mean +1x1x1x16 +ps ",
             r"sequential/conv2d_2/kernel +3x3x32x64 +ps ")),
    # Less than the entropy of single characters, some 4.4 bits.
    Example("text_transformer", ("--steps=40", "--write=20"), "Bits per character", (2, 3.9),
            (r"dense/kernel +96x384 +ps ", r"characters/embeddings +128x96 +ps ")),
    # By bytes, since "auto" depends on speeds. Chance is 0.00005.
    Example("wide_classifier", ("--steps=100", "--policy=paper"), "Top-1 accuracy", (0.03, 0.14),
            (r"sequential/head/kernel +256x21841 +sfb ", r"The head sends 2\.83 MB .* has 44\.73 MB, 15\.8 times")),
    # The noise is 0.5, and always the mean has 1.22.
    Example("recommender", ("--epochs=3",), "RMSE", (0.5, 0.8),
            (r"rows/users/embeddings +256x8 +gather ", r"rows/items/embeddings +256x8 +gather ")),
    # Untrained, it is 11.
    Example("gan", ("--epochs=4",), "Frechet distance", (0.07, 5),
            (r"discriminator/dense_4/kernel +256x128 +(ps|sfb) ",)),
    # Both ranks print the same trial.
    Example("tuner", ("--trials=2", "--epochs=2"), "Test accuracy", (0.3, 1),
            (r"rank [01]: (trial \d with {'units': .*)$(?=[\s\S]*^rank [01]: \1$)",)),
)


def in_double_precision(folder):
    """Returns the environment of programs that compute in it: there, only a wrong result shows in printed digits."""
    (folder / "keras.json").write_text(json.dumps({"floatx": "float64"}))
    return {"KERAS_HOME": str(folder)}


def result_of(outcome, begin, ranks):
    """Returns the number in the line of the result, as it is printed."""
    found = re.findall(rf"^{begin} with {ranks or 1} process\(es\): (\d+\.\d{{4}})\b", outcome.output, re.MULTILINE)
    assert len(found) == 1, outcome.output  # rank 0 alone prints it
    return found[0]


@pytest.mark.parametrize("example", TRAININGS, ids=lambda example: example.program)
def test_alone_and_on_two_ranks(example, tmp_path):
    program, environment = EXAMPLES / f"{example.program}.py", in_double_precision(tmp_path)
    arguments = [*example.arguments, *([f"--parent={tmp_path}"] if example.program == "tuner" else [])]
    one, two = (launch.run_ok([program, *arguments], ranks, timeout_s=150, environment=environment, fresh=True)
                for ranks in (0, 2))
    number = result_of(one, example.result, 0)
    assert number == result_of(two, example.result, 2)
    assert example.bounds[0] <= float(number) <= example.bounds[1]
    for pattern in example.shown:
        assert re.search(f"^{pattern}", two.output, re.MULTILINE), two.output
    assert "computed by every rank" not in two.output  # nothing runs whole


def test_own_loop_resumes(tmp_path):
    """One process continues what two have begun, and ends where two end that nothing interrupts."""
    environment, resuming = in_double_precision(tmp_path), f"--checkpoints={tmp_path}"

    def train(ranks, *arguments):
        return launch.run_ok([EXAMPLES / "own_loop.py", *arguments], ranks, timeout_s=90, environment=environment,
                             fresh=True)

    train(2, "--epochs=2", resuming)
    ended, undisturbed = train(0, "--epochs=4", resuming), train(2, "--epochs=4")
    assert "Epoch 2/" not in ended.output and "Epoch 3/" in ended.output
    last = [re.findall("^Epoch 4/4: .*", outcome.output, re.MULTILINE) for outcome in (ended, undisturbed)]
    assert last[0] == last[1] and len(last[0]) == 1
    number = result_of(undisturbed, "Test accuracy", 2)
    assert number == result_of(ended, "Test accuracy", 0) and float(number) >= 0.94
    assert re.search(r"^  sum +64x256 +131,072 B +sequential/dense/kernel$", undisturbed.output, re.MULTILINE)


def test_notebook():
    """Its cells in one process that is no notebook; they print what it shows."""
    cells = [cell for cell in json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
             if cell["cell_type"] == "code"]
    outcome = launch.run_ok(["-c", "\n".join("".join(cell["source"]) for cell in cells)], ranks=0, timeout_s=120,
                            fresh=True)
    shown = "".join(line for output in cells[-1]["outputs"] for line in output["text"])
    assert shown.splitlines()[-1] in outcome.output.splitlines()  # the shapes; accuracies depend on the kernels
    assert outcome.output.count("Epoch 3/3") == 1
