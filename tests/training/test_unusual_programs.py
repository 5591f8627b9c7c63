"""Data, models and state of unusual kinds: one process under the strategy is plain Keras, several compute the same."""

import launch
import numpy as np
import pytest
import unusual_programs


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Returns (how many ranks, None without tf_poseidon) -> (name of a program -> what each rank has)."""
    done = {}

    def of(ranks):
        if ranks not in done:
            directory = tmp_path_factory.mktemp(str(ranks))
            how = "plain" if ranks is None else "job"
            outcome = launch.run_ok(["unusual_programs.py", how, directory], ranks or 0, timeout_s=300)
            assert outcome.output.count("is done") == max(ranks or 0, 1) * len(unusual_programs.PROGRAMS)
            done[ranks] = directory
        return lambda name: [dict(np.load(done[ranks] / f"{name}.{rank}.npz")) for rank in range(max(ranks or 0, 1))]

    return of


@pytest.mark.parametrize("name", unusual_programs.PROGRAMS)
def test_one_process_has_the_bits_of_plain_keras(results, name):
    plain, alone = results(None)(name)[0], results(0)(name)[0]
    assert list(plain) == list(alone)
    for key in plain:
        assert plain[key].tobytes() == alone[key].tobytes(), key


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", unusual_programs.PROGRAMS)
def test_several_ranks_compute_what_one_process_does(results, name, ranks):
    plain, parts = results(None)(name)[0], results(ranks)(name)
    for key, want in plain.items():
        assert all(part[key].tobytes() == parts[0][key].tobytes() for part in parts), key
        scale = max(np.abs(want[np.isfinite(want)]).max(initial=0), 1e-3)
        np.testing.assert_allclose(parts[0][key], want, rtol=0, atol=1e-9 * scale, err_msg=key)
    assert any(np.any(value) for key, value in plain.items() if key.startswith("weight"))


def test_keras_prints_on_rank_0_only():
    outcome = launch.run_ok(["small_programs.py", "print_what_keras_prints"], ranks=2, timeout_s=60)
    assert [outcome.output.count(text) for text in ('Model: "sequential"', "early stopping", "Epoch 1/")] == [1, 1, 1]
    assert all(f"rank {rank} has 1 summaries" in outcome.output for rank in range(2))  # whoever asks for one gets it
