"""Jobs whose ranks make their own rows train what one process does, and decode each image once."""

import launch
import numpy as np
import pytest
import train_own_rows

from tf_poseidon.data import parts

JOBS = {"equal": 2, "4,1,2": 3}  # shares: number of ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Returns what the ranks of a job have, by shares; "alone" is one process."""
    found = {}
    folder = tmp_path_factory.mktemp("own_rows")

    def of(shares):
        if shares not in found:
            found[shares] = None
            found[shares] = run(shares)
        assert found[shares] is not None, "The job has failed before."
        return found[shares]

    def run(shares):
        ranks = JOBS.get(shares, 0)
        output = folder / shares.replace(",", "-")
        launch.run_ok(["train_own_rows.py", str(output), shares if ranks else "equal"], ranks, timeout_s=300)
        return [dict(np.load(f"{output}.{rank}.npz")) for rank in range(max(ranks, 1))]

    return of


@pytest.mark.parametrize("shares", JOBS)
@pytest.mark.parametrize("program", train_own_rows.PROGRAMS)
def test_what_ranks_train_is_what_one_process_trains(results, program, shares):
    alone, = results("alone")
    for key, expected in alone.items():
        if key.startswith(f"{program}/") and not key.endswith("decoded"):
            for rank, found in enumerate(results(shares)):
                np.testing.assert_array_equal(found[key], results(shares)[0][key], err_msg=f"{key}, rank {rank}")
            np.testing.assert_allclose(results(shares)[0][key], expected, rtol=2e-4, atol=2e-5, err_msg=key)


@pytest.mark.parametrize("shares", JOBS)
@pytest.mark.parametrize("program, epochs", [
    ("files", {train_own_rows.BATCH: 2, 4: 2 + 1}),  # training; validation, and predict
    ("loop_of_ones_own", {train_own_rows.BATCH: 1})])
def test_each_image_is_decoded_once(results, program, epochs, shares):
    alone, = results("alone")
    key, count = f"{program}/decoded", train_own_rows.COUNT
    assert alone[key].tolist() == [sum(epochs.values())] * count
    ranks = [1] * 2 if shares == "equal" else list(map(int, shares.split(",")))
    by_rank = np.zeros(len(ranks), int)
    for batch_size, number in epochs.items():
        for begin in range(0, count, batch_size):
            rows = parts.counts_of(min(batch_size, count - begin), ranks)
            by_rank += number * np.maximum(rows, 1)  # a rank without rows decodes the first one, as a padding row
    assert [found[key].sum() for found in results(shares)] == by_rank.tolist()
    assert (sum(found[key] for found in results(shares)) >= alone[key]).all()
