"""What a verification concludes from errors and differences."""

import numpy as np
import pytest

from tf_poseidon.saved_graphs.verifying import Verification


@pytest.mark.parametrize("error, differing, failures", [
    (0.0, False, []), (1.0, False, []), (1.5, False, ["variable 'w' is off by 1.5 times the rounding bound"]),
    (np.inf, False, ["variable 'w' has values that are not those of one process"]),
    (np.nan, False, ["variable 'w' has values that are not those of one process"]),
    (0.5, True, ["ranks have different bits of variable 'w'"])])
def test_a_verification_fails_by_its_bounds_and_by_ranks_that_differ(error, differing, failures):
    result = Verification(2, 1, {("variable", "w"): (6, error)}, [("variable", "w")] if differing else [])
    result.failures += result.conclusions()
    assert result.failures == failures
    assert str(result).endswith("\n" + "wrong" if failures else "\nall right")
