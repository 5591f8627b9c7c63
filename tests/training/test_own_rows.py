"""Jobs whose ranks make their own rows train what one process does, and decode each image once."""

import launch
import numpy as np
import pytest
import train_own_rows

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
@pytest.mark.parametrize("program, decodings", [
    # Of each image: in epochs of training; in validation after each, and in predict.
    ("files", 2 + 2 + 1), ("loop_of_ones_own", 1)])
def test_each_image_is_decoded_once(results, program, decodings, shares):
    alone, = results("alone")
    key = f"{program}/decoded"
    assert alone[key].tolist() == [decodings] * train_own_rows.COUNT
    total = sum(found[key] for found in results(shares))
    # A rank without rows in the last batch decodes the first row of it, as a padding row.
    padding = total - decodings
    assert (padding >= 0).all() and padding.sum() <= 4 * len(results(shares)) and (padding > 0).sum() <= 4
    parts = np.array([int(np.median(found[key])) for found in results(shares)])
    assert all(found[key].sum() < alone[key].sum() for found in results(shares)), parts
