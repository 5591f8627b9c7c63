"""Functions of TensorFlow are made anew when graphs in them are out of date."""

import types

import pytest

from tf_poseidon.one_process import job_functions


@pytest.mark.parametrize("changes_of_calls, made", [
    ([0, 0, 0], 1),
    ([2, 0, 0], 1),  # the first trace has its own changes
    ([0, 1, 0], 2),  # that of the second call has them, that of the first has not
    ([0, 1, 1, 0], 2)])
def test_changes_that_a_trace_makes_are_those_of_its_own_graph(changes_of_calls, made):
    shards, functions = types.SimpleNamespace(changes=5, take_back=lambda: None), []

    def function(changes):
        shards.changes += changes

    renewed = job_functions.Renewed(lambda: functions.append(function) or function, types.SimpleNamespace(
        shards=shards))
    for changes in changes_of_calls:
        renewed(changes)
    assert len(functions) == made
