"""Schemes are self-contained: a new one is planned, compared, saved and carried out."""

import dataclasses

import launch
import numpy as np
import own_scheme
import pytest
from small_plans import dense_site

from tf_poseidon import planning
from tf_poseidon.graph_passes.write import writers
from tf_poseidon.graph_passes.write.horovod_ops import HorovodOps
from tf_poseidon.graph_passes.write.send_receive import SendReceive

SMALL = dataclasses.replace(dense_site(4, 4, 100), factors=None, refusal="a convolution")


@pytest.fixture
def registered():
    before, writers_before = dict(planning.SCHEMES), dict(writers.WRITERS)
    own_scheme.register()
    yield
    for table, entries in ((planning.SCHEMES, before), (writers.WRITERS, writers_before)):
        table.clear()
        table.update(entries)


def plan(site, policy, pins=(), schemes=None, workers=2, **cluster):
    return planning.make_plan([site], policy, planning.Cluster(workers, **cluster), pins, schemes=schemes)


def test_auto_chooses_among_any_number(registered):
    """One latency instead of two, but more bytes: with many ranks, more than any other scheme."""
    decision, = plan(SMALL, "auto").decisions
    assert (decision.scheme, decision.runner_up) == ("gathered", "ps")
    assert decision.reason == "100 µs dense, 50.1 µs gathered"
    for workers, runner_up in ((2, "gathered"), (4, "ps")):
        decision, = plan(dense_site(400, 400, 1), "auto", schemes=("ps", "sfb", "gathered"), workers=workers).decisions
        assert (decision.scheme, decision.runner_up) == ("sfb", runner_up)
        assert all(manner in decision.reason for manner in ("dense", "as factors", "gathered"))


def test_policies_that_do_not_know_it_leave_it_alone(registered):
    for policy in ("ps", "sfb", "paper"):
        assert plan(SMALL, policy).decisions[0].scheme == "ps"


def test_an_engine_without_a_writer_is_not_planned_for(registered):
    assert own_scheme.Gathering.name in writers.schemes_of(SendReceive)
    schemes = writers.schemes_of(HorovodOps)
    assert schemes == ("ps", "sfb", "sparse")
    assert plan(SMALL, "auto", schemes=schemes).decisions[0].scheme == "ps"
    decision, = plan(SMALL, "ps", (("*", "gathered"),), schemes).decisions
    assert decision.reason == "pinned to 'gathered', which is not possible: the engine cannot carry it out"


def test_it_trains_with_the_bits_of_the_parameter_server(tmp_path):
    """Both sum in rank order."""
    for scheme in ("ps", "gathered"):
        launch.run_ok(["own_scheme.py", scheme, tmp_path / "weights"], 2, timeout_s=120)
    results = [dict(np.load(tmp_path / f"weights.{scheme}.{rank}.npz")) for scheme in ("ps", "gathered")
               for rank in range(2)]
    for other in results[1:]:
        for name, value in results[0].items():
            np.testing.assert_array_equal(other[name], value)
