"""What is the gradient, and what must not be guessed."""

import pickle

import launch
import numpy as np
import pytest
import training_steps

import tf_poseidon as poseidon


@pytest.mark.parametrize("name", training_steps.REFUSED)
def test_guesses_are_refused(name, tmp_path):
    make, message = training_steps.REFUSED[name]
    training_steps.save(make, tmp_path / "step")
    with pytest.raises(poseidon.PoseidonError, match=message):
        poseidon.rewrite_saved_model(tmp_path / "step", tmp_path / "out", workers=2, batch_size=4)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What two ranks, and one process, make of each step that is found: {name: (states, state)}."""
    folder = tmp_path_factory.mktemp("found")
    for i, make in enumerate(training_steps.FOUND.values()):
        training_steps.save(make, folder / f"step{i}")
        poseidon.rewrite_saved_model(folder / f"step{i}", folder / f"out{i}", workers=2, batch_size=4)
    launch.run_ok(["train_found.py", folder], ranks=2, timeout_s=120)
    return pickle.loads((folder / "result").read_bytes())


@pytest.mark.parametrize("name", training_steps.FOUND)
def test_trains_as_one_process(trained, name):
    """All variables, also those in which optimizers keep something, are those of one process."""
    for mine, expected in zip(*trained[name], strict=True):
        scale = np.max(np.abs(expected))
        np.testing.assert_allclose(mine, expected, rtol=0, atol=2e-5 * scale)
