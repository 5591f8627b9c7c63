"""The tiers of tests: which command runs a test.

`make test-unit` runs those of "unit", which start no jobs: a first answer. `make test` runs all.
"""

import fnmatch

TIERS = ("unit", "rest")

# The first pattern that a test's name has decides: room/file.py::function[cell].
_RULES: tuple[tuple[str, str], ...] = (
    # They start jobs, a browser, or train for long.
    ("unit/test_calibration.py::test_all_ranks_agree_on_what_was_measured", "rest"),
    ("unit/test_reports.py::*", "rest"),
    ("unit/test_resuming.py::*", "rest"),
    ("unit/test_schemes.py::test_it_trains_with_the_bits_of_the_parameter_server", "rest"),
    ("unit/test_selftest.py::test_every_scheme_has_the_bits_of_one_process*", "rest"),
    ("unit/test_selftest.py::test_faults_are_found*", "rest"),
    ("unit/test_selftest.py::test_ranks_of_its_own_or_of_mpiexec", "rest"),
    ("communicator/test_ops.py::test_values*", "rest"),
    ("communicator/test_ops.py::test_syncs_of_one_function_do_not_wait_for_each_other", "rest"),
    ("communicator/test_ops.py::test_a_group_that_stays_incomplete_leaves_without_the_others", "rest"),
    ("communicator/test_ops.py::test_many_pairs_over_tcp", "rest"),
    # They search, or try what is wrong with every rule.
    ("graphs/test_*_fuzz.py::*", "rest"),
    ("graphs/test_partition.py::test_wrong_rules_are_noticed*", "rest"),
    ("unit/*", "unit"),
    ("communicator/*", "unit"),
    ("graphs/*", "unit"),
    ("*", "rest"),
)


def tier_of(name: str) -> str:
    """Returns the tier of a test, which is named by its path from the root of the sources, as pytest does."""
    name = name.removeprefix("tests/")
    return next(tier for pattern, tier in _RULES if fnmatch.fnmatchcase(name, pattern))


def check_may_start_jobs(name: str) -> None:
    """Raises AssertionError if a test is of the tier that starts none; `name` may be "" outside of tests."""
    assert not name or tier_of(name) != "unit", (
        f"'{name}' starts a job, and is listed among the tests that start none; add it to tests/support/tiers.py.")
