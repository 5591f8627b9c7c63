"""`fit` of published models computes the same on several ranks as in one process, without hints.

Steps are plain SGD: a gradient of a wrong length is an update of a wrong length.
"""

import json

from jobs import assert_same_as_one_process
from jobs import Case
import keras_programs
import pytest

# By the type of a program: updates may differ by rounding, logs are numbers of Python.
BOUNDS = {"float64": {"float64": 1e-8}, "float32": {"float32": 1e-3, "float64": 1e-3}}


def cases(is_full):
    jobs = [(ranks, policy) for ranks in (2, 3) for policy in ("ps", "sfb", "auto")]
    return [Case("run_keras_programs.py", name, *job) for job in (jobs if is_full else [(2, "sfb")])
            for name in keras_programs.PROGRAMS]


@pytest.mark.table(cases=cases)
def test_fit_computes_what_one_process_does(jobs, case):
    bounds = BOUNDS["float32" if case.name in keras_programs.SINGLE else "float64"]
    one = jobs.one_process(case)
    assert_same_as_one_process(one, jobs.arrays(case), bounds)


@pytest.mark.table(cases=cases)
def test_only_what_has_no_rule_runs_whole(jobs, case):
    whole = json.loads((jobs.folder(case) / "whole.0.json").read_text())
    assert whole[case.name] == keras_programs.WHOLE.get(case.name, [])
