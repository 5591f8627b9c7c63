"""Data, models and state of unusual kinds: one process under the strategy is plain Keras, several compute the same."""

from jobs import assert_same_as_one_process
from jobs import Case
import launch
import numpy as np
import pytest
import unusual_programs


def case(name, ranks=1, options=()):
    return Case("unusual_programs.py", name, ranks, "ps", options)


def plain(name):
    """Returns the case of a program without tf_poseidon."""
    return case(name, options=("--plain",))


def of_several_ranks(is_full):
    return [case(name, ranks) for ranks in ((2, 3) if is_full else (2,)) for name in unusual_programs.PROGRAMS]


@pytest.mark.needs(*map(plain, unusual_programs.PROGRAMS))
@pytest.mark.parametrize("case", [*map(case, unusual_programs.PROGRAMS)], ids=str)
def test_one_process_has_the_bits_of_plain_keras(jobs, case):
    one, = jobs.arrays(plain(case.name))
    alone, = jobs.arrays(case)
    assert list(one) == list(alone)
    for key in one:
        assert one[key].tobytes() == alone[key].tobytes(), key


@pytest.mark.needs(*map(plain, unusual_programs.PROGRAMS))
@pytest.mark.table(cases=of_several_ranks)
def test_several_ranks_compute_what_one_process_does(jobs, case):
    one, = jobs.arrays(plain(case.name))
    assert_same_as_one_process(one, jobs.arrays(case), {"float64": 1e-9, "float32": 1e-9})
    assert any(np.any(value) for key, value in one.items() if key.startswith("weight"))


def test_keras_prints_on_rank_0_only():
    outcome = launch.run_ok(["small_programs.py", "print_what_keras_prints"], ranks=2, timeout_s=60)
    assert [outcome.output.count(text) for text in ('Model: "sequential"', "early stopping", "Epoch 1/")] == [1, 1, 1]
    assert all(f"rank {rank} has 1 summaries" in outcome.output for rank in range(2))  # whoever asks for one gets it
