"""Errors of floats as fractions of their bounds."""

import numpy as np
import pytest

from tf_poseidon.base import rounding


@pytest.mark.parametrize("value, wanted, error", [
    ([1.0, 2.0], [1.0, 2.5], 0.5), ([np.inf, 1.0], [2.0, 1.0], np.inf), ([1.0, 1.0], [np.nan, 1.0], np.inf),
    ([np.nan, 1.0], [np.inf, 2.0], 1.0), ([np.nan], [np.nan], 0.0)])
def test_only_what_is_finite_in_both_is_compared(value, wanted, error):
    assert rounding.error(np.array(value), np.array(wanted), bound=1.0) == error


def test_nothing_may_differ_where_the_bound_is_zero():
    assert rounding.error(np.ones(2), np.ones(2), bound=0.0) == 0
    assert rounding.error(np.ones(2), np.array([1, 1.5]), bound=0.0) == np.inf
