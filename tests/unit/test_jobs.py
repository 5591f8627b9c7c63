"""What it means that several ranks compute the same as one process: what is noticed."""

from jobs import assert_same_as_one_process
import numpy as np
import pytest

ONE = {"before/variable w": np.array([1.0, 2.0]), "step 0/variable w": np.array([0.5, 1.0]),
       "step 0/result 0": np.array([3.0, np.inf]), "count": np.array(4), "local/rank": np.array(0)}


def changed(name, value):
    return {**ONE, name: np.asarray(value)}


@pytest.mark.parametrize("ranks, problem", [
    ([ONE, changed("local/rank", 1)], None),
    ([changed("step 0/variable w", [0.5 + 1e-12, 1.0])] * 2, None),
    ([ONE, changed("step 0/variable w", [0.5 + 1e-12, 1.0])], "ranks 0 and 1"),
    ([changed("step 0/variable w", [0.75, 1.5])] * 2, "step 0/variable w is off by"),  # half of the update
    ([changed("step 0/result 0", [3.1, np.inf])] * 2, "step 0/result 0 is off by"),
    ([changed("step 0/result 0", [3.0, 9.0])] * 2, "step 0/result 0"),
    ([changed("step 0/result 0", [[3.0, np.inf]])] * 2, "step 0/result 0"),
    ([changed("count", 5)] * 2, "count"), ([changed("more", 1)] * 2, "other arrays")])
def test_what_differs_is_noticed(ranks, problem):
    if problem is None:
        assert_same_as_one_process(ONE, ranks)
    else:
        with pytest.raises(AssertionError, match=problem):
            assert_same_as_one_process(ONE, ranks)


def test_nothing_trained_is_noticed():
    still = changed("step 0/variable w", ONE["before/variable w"])
    with pytest.raises(AssertionError, match="nothing was trained"):
        assert_same_as_one_process(still, [still])
