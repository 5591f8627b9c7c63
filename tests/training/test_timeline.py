"""Timelines: of events written by hand, with exact numbers; and of training on three ranks."""

import collections
import dataclasses
import gzip
import json
import os
import re
import socket
import threading
import types

import launch
import numpy as np
from printed_durations import DURATION
from printed_durations import seconds_of
import pytest
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tf_poseidon import planning
from tf_poseidon.errors import PoseidonError
from tf_poseidon.graph_passes.graph import graph_steps
from tf_poseidon.job import engines
from tf_poseidon.job import runtime
from tf_poseidon.job.communicator import join_loopback
from tf_poseidon.planning.cost import Cost
from tf_poseidon.planning.decision import Decision
from tf_poseidon.planning.schemes import Rider
from tf_poseidon.strategy.poseidon_strategy import PoseidonStrategy
from tf_poseidon.timelines import clocks
from tf_poseidon.timelines import recorded_steps as steps_lib
from tf_poseidon.timelines import recording
from tf_poseidon.timelines import step_table as table_lib
from tf_poseidon.timelines import trace as trace_lib
from tf_poseidon.timelines.recorded_steps import Event
from tf_poseidon.timelines.recorded_steps import Rank

RANKS, STEPS = 3, 6
SLOW_S, LATE_S = 0.1, 0.3  # of record_timelines.py

# ---- events written by hand, with integer times ---------------------------------------------------


def two_layers(begin, late=0.0, scheme="sfb"):
    """Returns the events of a step: two gradients, one sent as factors; the first is hidden in part."""
    return (Event(scheme, "b", begin + 3, begin + 9, 8), Event("ps", "a", begin + 7 + late, begin + 11, 4),
            Event("rebuild", "b", begin + 9, begin + 10), Event("rebuild", "bias", begin + 10.5, begin + 12))


def segments(*events, begin=0.0):
    step, = Rank("host", begin, events).steps
    return [tuple(segment) for segment in step.segments]


def test_step_is_cut_into_segments():
    assert segments(*two_layers(0)) == [
        ("forward", "", 0, 3), ("backward", "a", 3, 7), ("wait", "b", 7, 9), ("rebuild", "b", 9, 10),
        ("wait", "a", 10, 10.5), ("rebuild", "bias", 10.5, 12)]


def test_copies_of_a_gpu_have_a_rate():
    """Of the middle steps of four."""
    copies = [Event(row, "a", begin + 7 + i, begin + 7.5 + i, int(1e9)) for begin in (0, 20, 40, 60)
              for i, row in enumerate(("down", "down", "across"))]
    events = sorted([*(event for begin in (0, 20, 40, 60) for event in two_layers(begin)), *copies],
                    key=lambda event: event.begin)
    found = table_lib.summary([Rank("host", 0.0, tuple(events))], 0)
    assert found.copies == {"down": (1.0, 2e9), "across": (0.5, 1e9)}
    lines = table_lib.table([Rank("host", 0.0, tuple(events))], 0).splitlines()
    assert [line for line in lines if line.startswith("copies")] == [
        "copies from its GPU: 1 s of a step, 2.0 GB/s", "copies and sums between GPUs: 500 ms of a step, 2.0 GB/s"]


def test_waiting_counts_for_what_comes_next():
    """Exchanges that wait together each count from the one before, so they add up."""
    assert segments(Event("ps", "b", 1, 8), Event("ps", "a", 2, 5)) == [
        ("forward", "", 0, 1), ("backward", "a", 1, 2), ("wait", "a", 2, 5), ("wait", "b", 5, 8)]


def test_gap_before_rebuilding_is_rebuilding():
    assert segments(Event("sfb", "a", 1, 3), Event("rebuild", "a", 4, 6)) == [
        ("forward", "", 0, 1), ("wait", "a", 1, 3), ("rebuild", "a", 3, 6)]


def test_eager_exchanges_hide_nothing():
    eager = [Event("ps", "a", 2, 5, 4, True), Event("ps", "b", 6, 7, 4, True)]
    assert segments(*eager) == [("forward", "", 0, 2), ("wait", "a", 2, 5), ("backward", "b", 5, 6),
                                ("wait", "b", 6, 7)]
    step, = Rank("host", 0, tuple(eager)).steps
    assert [end - begin for begin, end in map(step.hidden, step.exchanges)] == [0, 0]


def test_rows_wait_for_what_they_are_computed_from():
    """Rows are gathered in the forward pass, and nothing is computed meanwhile; a value of rank 0 is not waited for."""
    events = [Event("gather", "rows", 1, 3, 4, True), Event("broadcast", "value", 4, 6, 4), Event("ps", "a", 7, 8, 4)]
    assert segments(*events) == [("forward", "", 0, 1), ("wait", "rows", 1, 3), ("backward", "value", 3, 4),
                                 ("backward", "a", 4, 7), ("wait", "a", 7, 8)]
    step, = Rank("host", 0, tuple(events)).steps
    assert [end - begin for begin, end in map(step.hidden, step.exchanges)] == [0, 2, 0]


def test_waits_for_data_are_not_computing():
    """Those before the first exchange; nothing waits for a batch that a graph of several steps reads ahead."""
    events = [Event("data", "", 1, 3), Event("data", "", 3.5, 4), Event("ps", "a", 6, 8), Event("data", "", 6.5, 7),
              Event("ps", "b", 7, 9)]
    assert segments(*events) == [
        ("forward", "", 0, 1), ("wait for data", "", 1, 3), ("forward", "", 3, 3.5), ("wait for data", "", 3.5, 4),
        ("forward", "", 4, 6), ("backward", "b", 6, 7), ("wait", "a", 7, 8), ("wait", "b", 8, 9)]
    # The step before has not ended, and an exchange does not need the batch.
    begun = Rank("host", 0.0, (Event("ps", "a", 1, 5), Event("data", "", 4, 9), Event("ps", "a", 7, 10))).steps[1]
    assert [tuple(segment) for segment in begun.segments] == [("wait for data", "", 5, 7), ("wait", "a", 7, 10)]


@pytest.mark.parametrize("waits, says", [
    ((None, None, None), []), ((2, 2, 2), []), ((2, 2.04, 2), []),
    ((2, 3, 2), ["rank 1 waits longest for data, 1 s of a step longer than the median rank"])])
def test_the_table_says_how_long_steps_wait_for_data(waits, says):
    ranks = [Rank("host", 0.0, tuple(event for begin in (0, 10) for event in (
        *([Event("data", "", begin + 1, begin + 1 + wait)] if wait else []), Event("ps", "a", begin + 5, begin + 10))))
             for wait in waits]
    lines = table_lib.table(ranks, 0).splitlines()
    waiting, computing = ("2 s waiting for data; ", "3 s") if waits[0] else ("", "5 s")
    begin, = (i for i, line in enumerate(lines) if line.startswith("a step"))
    assert lines[begin:] == [f"a step of 10 s: {waiting}{computing} compute; then 5 s waiting for "
                             "exchanges, and 0 s rebuilding gradients", *says]


def test_site_that_comes_again_begins_a_step():
    rank = Rank("host", -1.0, (*two_layers(0), Event("calls", "x", 13, 14), *two_layers(20)))
    assert [(step.begin, step.end) for step in rank.steps] == [(-1, 12), (12, 32)]
    assert [event.site for event in rank.steps[1].rebuilds] == ["b", "bias"]
    full = Rank("host", -1.0, rank.events, dropped=3)
    assert full.steps == rank.steps[:1]


def overlapping_steps():
    """A run of two steps. Each computes for 1 s forward and 2 s backward; the sums of its two layers take 2 s each."""
    events = (Event("ps", "upper", 2, 6), Event("ps", "lower", 3, 5),
              Event("ps", "upper", 7.5, 11.5, step=1), Event("ps", "lower", 8.5, 10.5, step=1))
    places = {"lower": steps_lib.SitePlace(3, 0), "upper": steps_lib.SitePlace(2, 0.5)}
    return Rank("host", 0.0, events, places=places)


def test_the_next_step_of_a_run_waits_for_what_it_needs():
    """That is how long it waits if it computes as fast as the time after the last wait allows."""
    first, second = overlapping_steps().steps
    assert [tuple(segment) for segment in first.segments] == [("forward", "", 0, 2), ("backward", "lower", 2, 3)]
    assert [tuple(segment) for segment in second.segments] == [
        ("wait", "lower", 3, 5), ("forward", "", 5, 5.5), ("wait", "upper", 5.5, 6), ("forward", "", 6, 7.5),
        ("backward", "lower", 7.5, 8.5), ("wait", "lower", 8.5, 10.5), ("wait", "upper", 10.5, 11.5)]
    assert [first.hidden_next(event) for event in first.exchanges] == [[(5, 5.5)], []]
    assert first.follower is second and second.follower is None


@pytest.mark.parametrize("places, waits", [
    ({}, []), ({"lower": steps_lib.SitePlace(3, 0)}, []),
    # Nothing waits for a gradient without a place, and none that is not needed.
    ({"lower": steps_lib.SitePlace(3), "upper": steps_lib.SitePlace(2, 0.5)}, [("wait", "upper", 3.5, 6)])])
def test_waits_are_not_guessed(places, waits):
    second = dataclasses.replace(overlapping_steps(), places=places).steps[1]
    assert [tuple(segment) for segment in second.segments if segment.kind == "wait" and segment.end < 8] == waits


def test_a_run_without_its_last_events_does_not_count():
    rank = overlapping_steps()
    later = tuple(event._replace(begin=event.begin + 20, end=event.end + 20) for event in rank.events[:3])
    assert len(dataclasses.replace(rank, events=rank.events + later).steps) == 4
    assert len(dataclasses.replace(rank, events=rank.events + later, dropped=1).steps) == 2


def test_sites_of_one_step_alone_belong_to_it():
    """The last step alone has what only results need."""
    assert graph_steps.in_any(["a", "a@1", "a@2", "loss@2", "b@3", "c@d"]) == {
        "a": ("a", 0), "a@1": ("a", 1), "a@2": ("a", 2), "loss@2": ("loss", 2), "b@3": ("b@3", 0), "c@d": ("c@d", 0)}


def test_rebuilding_for_the_next_step_is_not_waiting():
    events = (Event("sfb", "a", 1, 3), Event("rebuild", "a", 4, 6), Event("sfb", "a", 8, 9, step=1))
    second = Rank("host", 0.0, events, places={"a": steps_lib.SitePlace(2, 0)}).steps[1]
    assert [tuple(segment) for segment in second.segments] == [
        ("wait", "a", 1, 4), ("rebuild", "a", 4, 6), ("forward", "", 6, 8), ("wait", "a", 8, 9)]


def test_table_of_steps_that_overlap():
    lines = [line.split() for line in table_lib.table([overlapping_steps()], 0).splitlines()]
    assert lines[1][:8] == ["variable", "scheme", "compute", "hidden", "hidden", "next", "exposed", "rebuild"]
    assert lines[2:] == [
        ["forward", "2,000"],
        # compute, hidden, hidden next, exposed, measured
        ["upper", "ps", "0", "1,000", "250", "750", "4,000"], ["lower", "ps", "1,000", "0", "0", "2,000", "2,000"],
        ["total", "3,000", "1,000", "250", "2,750", "0", "5,750"],
        "a step of 5.75 s: 3 s compute; then 2.75 s waiting for exchanges, and 0 s rebuilding "
        "gradients".split()]


def test_clock_offset_is_that_of_the_shortest_round_trip():
    """This rank's clock is 100 ahead; the second try takes 3 + 2, the others longer."""
    of_rank_0 = [(0, 50), (60, 63), (70, 90)]
    own = [(130, 180), (161, 163), (175, 190)]
    time, offset, error = clocks.clock_offset(own, of_rank_0)
    assert (time, offset, error) == (162, (98 + 103) / 2, 2.5)


def test_drift_of_clocks_is_taken_out():
    """Rank 1's clock is 10 s ahead, and 20 s ahead 110 s of it later."""
    def recorded(ahead):
        tries = {key: [(t + a - 1, t + a + 1)] for key, t, a in (("before", 0, ahead),
                                                                ("after", 100, 2 * ahead))}
        middle = 1e9 * (50 + 1.5 * ahead)
        return dict(tries, host="h", begin=middle, dropped=0,
                    events=[["ps", "a", middle, middle + 11e8, 4, False]])
    first, second = clocks.aligned([recorded(0), recorded(10)])
    assert first.events == (Event("ps", "a", 50, 51.1, 4, False),)
    assert second.begin == pytest.approx(50)
    assert second.events[0].end == pytest.approx(51)  # 1.1 s of a clock that is fast by a tenth
    assert (first.clock_error, second.clock_error) == (0, 2)


def two_ranks(scheme="sfb"):
    on_time, late = ((*two_layers(0, late, scheme), *two_layers(12, late, scheme)) for late in (0, 2))
    return [Rank("near", 0.0, (*on_time, Event("calls", "x", 13, 14))), Rank("far", 0.0, late, clock_error=0.25)]


def plan(scheme="sfb"):
    decisions = (Decision("a", "ps", Cost(8, transfer=1.0), "why"),
                 Decision("b", scheme, Cost(8, rebuild=2.0), "why"),
                 Decision("bias", scheme, Cost(0), "why", carried=Rider("b")))
    return planning.Plan("sfb", planning.Cluster(2), decisions=decisions)


@pytest.mark.parametrize("scheme", ["sfb", "hfb"])
def test_the_table_has_the_times_of_each_site(scheme):
    """On both ranks: 'a' is ready at 7 on rank 0 and at 9 on rank 1, and arrives at 11."""
    lines = [line.split() for line in table_lib.table(two_ranks(scheme), 0, plan(scheme)).splitlines()]
    assert " ".join(lines[0]) == ("rank 0 on near, 2 steps, times in ms; clocks of ranks agree within 500 ms; "
                                  "predicted for 10 Gbit/s and 50 µs")
    assert lines[2:] == [
        ["forward", "3,000"],
        # compute, hidden, exposed, rebuild, predicted, measured: 6 until it was there, 1 to rebuild it
        ["b", scheme, "0", "4,000", "2,000", "1,000", "2,000", "7,000"],
        ["bias", scheme, "1,500", "0", "1,500"],
        # with the slowest rank, and how much later it is
        ["a", "ps", "4,000", "0", "500", "1", "2,000", "1,000", "2,000"],
        ["other", "exchanges", "calls", "500"],
        ["total", "7,000", "4,000", "2,500", "2,500", "12,000"],
        "a step of 12 s: 7 s compute; then 2.5 s waiting for exchanges, and 2.5 s "
        "rebuilding gradients".split()]
    assert ["a", "ps", "6,000", "0", "500", "1", "2,000", "1,000", "2,000"] in [
        line.split() for line in table_lib.table(two_ranks(scheme), 1, plan(scheme)).splitlines()]


def test_steps_that_last_longest_and_shortest_do_not_count():
    """The middle half, of at least four steps; means, so that intermittent times are not lost."""
    events = [Event("ps", "a", begin, end) for begin, end in ((4, 5), (6, 7), (10, 12), (112, 113))]
    lines = table_lib.table([Rank("host", 0.0, tuple(events))], 0).splitlines()
    assert lines[0].startswith("rank 0 on host, 4 steps")
    # Those of 5 and 5 s, of which 4 and 3 come before the gradient.
    assert lines[-1] == ("a step of 5 s: 3.5 s compute; then 1.5 s waiting for exchanges, and "
                         "0 s rebuilding gradients")


def test_prediction_for_another_scheme_is_left_away():
    ranks = [Rank("host", 0.0, (Event("ps", "b", 1, 4),))]
    line = table_lib.table(ranks, 0, plan()).splitlines()[3]
    assert line.split() == ["b", "ps", "0", "0", "3,000", "3,000"]


def test_table_without_steps_or_with_too_many():
    assert table_lib.table([Rank("host", 0.0, ())], 0) == (
        "No step was recorded: train inside strategy.timeline.")
    full = Rank("host", 0.0, (*two_layers(0), *two_layers(12)), dropped=1234)
    assert "full, and 1,234 later events are missing" in table_lib.table([full], 0)


def test_trace():
    trace = trace_lib.trace(two_ranks())
    named = {(e["pid"], e.get("tid")): e["args"]["name"] for e in trace["traceEvents"]
             if e["name"].endswith("_name")}
    assert [named[0, tid] for tid in (None, 0, 1, 2, 3, 4)] == [
        "rank 0 on near", "compute", "ps", "sfb", "calls", "rebuild"]
    assert named[1, 3] == "rebuild"
    assert {"ph": "X", "pid": 1, "tid": 1, "name": "a", "cat": "ps", "ts": 21e6, "dur": 2e6,
            "args": {"site": "a", "step": 1, "bytes": 4}} in trace["traceEvents"]
    # What ends a step belongs to it.
    assert [e["args"]["step"] for e in trace["traceEvents"] if e["name"] == "bias"] == [0, 1, 0, 1]
    waits = trace_lib.trace([Rank("host", 0.0, (Event("data", "", 1, 3), Event("ps", "a", 4, 5)))])["traceEvents"]
    assert [(e["tid"], e["ts"], e["dur"]) for e in waits if e["name"] == "wait for data"] == [(0, 1e6, 2e6),
                                                                                             (1, 1e6, 2e6)]
    assert trace["otherData"]["clock error of rank 1, us"] == 0.25e6


def test_exchanges_at_the_same_time_have_rows_of_their_own():
    trace = trace_lib.trace([Rank("host", 0.0, (Event("ps", "a", 1, 4), Event("ps", "b", 2, 3),
                                                Event("ps", "c", 3, 5)))])
    lanes = {e["name"]: e["tid"] for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] == "ps"}
    assert lanes == {"a": 1, "b": 2, "c": 2}


# ---- recording -----------------------------------------------------------------------------------


@pytest.fixture
def alone():
    """A communicator of a job of one rank."""
    communicator, = join_loopback(1)
    yield communicator
    communicator.leave()


def test_events_are_kept_while_recording_as_long_as_there_is_room(alone):
    def exchange():
        alone.submit("gradient", np.ones(3, np.float32), is_gradient=True)()
        alone.submit("call", np.ones(3), root=0)()
        alone.submit_factors("factors", [np.ones((2, 3))])()
        return alone.events()

    assert exchange()["events"] == []
    alone.record_events(4)
    recorded = exchange()
    assert [(row, site, size, eager) for row, site, _, _, size, eager, _ in recorded["events"]] == [
        ("ps", "gradient", 12, False), ("calls", "call", 24, False), ("calls", "factors", 48, False)]
    times = [time for event in recorded["events"] for time in event[2:4]]
    assert [recorded["begin"], *times] == sorted([recorded["begin"], *times])
    assert [exchange()["dropped"], exchange()["dropped"]] == [2, 5]
    alone.record_events(0)
    assert exchange()["dropped"] == 5
    alone.record_events(1)
    assert alone.events()["events"] == [] and alone.events()["dropped"] == 0


def test_events_of_a_site_leave_a_recording_as_it_is(alone):
    def exchange(site="x"):
        alone.sum(site, np.ones(3))

    for is_recording in (False, True):
        if is_recording:
            alone.record_events(4)
            exchange("before")
        (row, site, *_), = alone.events_of("x", lambda: [exchange("y"), exchange()], 2)
        assert (row, site) == ("calls", "x")
        exchange("after")
        assert [event[1] for event in alone.events()["events"]] == (
            ["before", "y", "x", "after"] if is_recording else ["y", "x"])


def test_all_ranks_get_the_recordings_of_all(tmp_path):
    ranks, timelines = join_loopback(3), {}

    def train(rank):
        with recording.record(rank, tmp_path / "new" / "trace.json.gz", lambda: None) as mine:
            assert str(mine) == "The timeline is not complete yet: leave strategy.timeline first."
            for site in "aba":
                rank.submit(site, np.ones(3, np.float32), is_gradient=True)()
        timelines[rank.rank] = mine

    threads = [threading.Thread(target=train, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for rank in ranks:
        rank.leave()
    assert sorted(timelines) == [0, 1, 2]
    for number, mine in timelines.items():
        assert mine.ranks == timelines[0].ranks
        assert [[e.site for e in step.exchanges] for step in mine.ranks[number].steps] == [["a", "b"], ["a"]]
        assert str(mine) == timelines[0].table(number) != timelines[0].table((number + 1) % 3)
    with gzip.open(tmp_path / "new" / "trace.json.gz") as file:
        assert json.load(file) == trace_lib.trace(timelines[0].ranks)


def test_tensorboard_gets_the_same_rows_and_spans(tmp_path, alone):
    with recording.record(alone, tmp_path / "job.xplane.pb", lambda: None) as mine:
        for site in ("a", "b"):
            alone.submit(site, np.ones(3, np.float32), is_gradient=True)()
    space = xplane_pb2.XSpace.FromString((tmp_path / "job.xplane.pb").read_bytes())
    plane, = space.planes  # XProf shows planes of devices that it does not know if they are called so
    assert plane.name == f"/device:CUSTOM:rank 0 on {socket.gethostname()}"
    found = [(line.name, plane.event_metadata[event.metadata_id].name, event.offset_ps, event.duration_ps,
              {plane.stat_metadata[stat.metadata_id].name: getattr(stat, stat.WhichOneof("value"))
               for stat in event.stats}) for line in plane.lines for event in line.events]
    events = trace_lib.trace(mine.ranks)["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["cat"] for event in spans} >= {"ps"}
    assert sorted(found, key=str) == sorted(
        ((rows[e["tid"]], e["name"], round(1e6 * e["ts"]), round(1e6 * e["dur"]),
          {key: value for key, value in e["args"].items() if value is not None}) for e in spans), key=str)


@pytest.mark.parametrize("name, reason", [
    ("file/trace.json", r"'.*trace.json' \(File exists\)"), ("trace\0.json", r"'.*trace\\x00.json' \(.*null byte\)"),
    ("", "Is a directory"), ("x" * 300, "File name too long"), ("/proc/trace", "trace")])
def test_file_that_cannot_be_written_is_refused_at_once(name, reason, alone, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(PoseidonError, match=f"cannot write the trace .*{reason}.*; give it the path of a file"):
        with recording.record(alone, tmp_path / name, lambda: None):
            raise AssertionError("recorded")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz", "trace.xplane.pb", "trace.html"])
def test_disk_is_full_when_the_trace_is_written(name, alone, tmp_path):
    (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(PoseidonError, match=r"cannot write the trace .* \(No space left on device\); give it"):
        with recording.record(alone, tmp_path / name, lambda: None):
            alone.sum("x", np.zeros(3, np.float32))
    with recording.record(alone, tmp_path / f"another.{name}", lambda: None):
        alone.sum("x", np.zeros(3, np.float32))


@pytest.mark.parametrize("communicator, message", [
    (None, "this process runs alone; launch several with mpiexec, or use tf.profiler"),
    ("some", "cannot see gradients that travel by Horovod's ops; use mpiexec and engine='mpi', or Horovod's"),
])
def test_where_there_is_nothing_to_see_it_is_refused(communicator, message, monkeypatch):
    monkeypatch.setattr(runtime, "engine", lambda: engines.load("horovod"))
    job = communicator and types.SimpleNamespace(communicator=communicator)
    strategy = types.SimpleNamespace(extended=types.SimpleNamespace(job=job))
    with pytest.raises(PoseidonError, match=message):
        PoseidonStrategy.timeline(strategy, "trace.json")


def test_recording_ends_with_an_exception(alone, tmp_path):
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            with recording.record(alone, tmp_path / "trace.json", lambda: None):
                1 / 0  # noqa: B018
    alone.sum("x", np.ones(2))
    assert alone.events()["events"] == []


# ---- training on three ranks ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """(reports of all ranks, {mode: trace})."""
    folder = tmp_path_factory.mktemp("timelines")
    launch.run_ok(["record_timelines.py", folder], RANKS, timeout_s=120)
    reports = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return reports, {path.stem: json.loads(path.read_text()) for path in (folder / "traces").glob("*.json")}


MODES = ("rewritten", "as_it_is", "eager")
VARIABLES = ("first/kernel", "first/bias", "norm/gamma", "norm/beta", "table/embeddings", "last/kernel", "last/bias")


def rows_of(trace):
    """Returns {(rank, row): its events, as in the file}; parallel rows of one kind count as one."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"]
             if e["name"] == "thread_name"}
    rows = collections.defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            rows[event["pid"], names[event["pid"], event["tid"]].split()[0]].append(event)
    return rows


def end_of(event):
    return event["ts"] + event["dur"]


def cells(table, site):
    """Returns {column: text} of a site in a table: numbers end where their column's name does."""
    lines = table.splitlines()
    line = next(line for line in lines if line.startswith(site + " "))
    columns = [(match.group(), match.end()) for match in re.finditer(r"\S+( \S+)*", lines[1])][1:]
    return {name: line[begin:end].strip() for (_, begin), (name, end) in zip(columns, columns[1:])}


def test_trace_has_a_row_for_each_kind_on_each_rank(recorded):
    _, traces = recorded
    rows = dict(rewritten={"ps", "sfb", "gather", "rebuild"}, as_it_is={"ps", "gather"},
                eager={"ps", "sparse", "rebuild"}, partitioned={"ps", "sfb", "gather", "broadcast", "rebuild"})
    for mode, trace in traces.items():
        processes = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
        assert [re.sub(" on .+", "", name) for name in processes] == ["rank 0", "rank 1", "rank 2"]
        for rank in range(RANKS):
            assert {row for r, row in rows_of(trace) if r == rank} == (
                rows[mode] | {"compute", "calls"} | ({"data"} if mode in MODES else set()))


def test_each_site_occurs_in_each_step(recorded):
    reports, traces = recorded
    plan = reports[0]["plan"]
    assert set(plan.values()) == {"ps", "sfb", "gather"}
    for mode in MODES:
        for rank in range(RANKS):
            sites = collections.Counter()
            for (r, row), events in rows_of(traces[mode]).items():
                if r == rank and row not in ("compute", "data", "calls"):
                    # A gradient and what it is rebuilt of are one.
                    sites.update({(e["args"]["site"], e["args"]["step"]) for e in events
                                  if row != "rebuild" or mode != "eager" and e["args"]["site"].endswith("bias")})
            expected = VARIABLES if mode == "eager" else plan
            assert sites == {(site, step): 1 for site in expected for step in range(STEPS)}, mode


@pytest.mark.parametrize("mode", MODES)
def test_events_of_a_row_follow_each_other(mode, recorded):
    lanes = collections.defaultdict(list)
    for event in recorded[1][mode]["traceEvents"]:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append(event)
    for events in lanes.values():
        for before, after in zip(events, events[1:]):
            assert end_of(before) <= after["ts"] + 0.01  # us, which floats round
    for rank in range(RANKS):
        compute = rows_of(recorded[1][mode])[rank, "compute"]
        assert all(abs(end_of(before) - after["ts"]) < 0.01 for before, after in zip(compute, compute[1:]))


@pytest.mark.parametrize("mode", MODES)
def test_compute_waiting_and_rebuilding_are_the_step(mode, recorded):
    """They add up to the time that the program has measured itself between calls of its callback."""
    for rank, report in enumerate(recorded[0]):
        ends = report[mode]["ends"]
        assert len(ends) == (STEPS // 2 if mode == "rewritten" else STEPS)
        compute = rows_of(recorded[1][mode])[rank, "compute"]
        seconds = sum(1e-6 * e["dur"] for e in compute if e["args"]["step"] >= STEPS // len(ends))
        # A callback comes after the optimizer, which is part of the next step.
        assert abs(ends[-1] - ends[0] - seconds) < 0.25 * seconds
        assert report[mode]["mine"] == report[mode]["tables"][rank]
        total, *parts = (seconds_of(found) for found in re.findall(
            DURATION, report[mode]["mine"].splitlines()[-1]))
        assert sum(parts) == pytest.approx(total, rel=0.015)  # three digits of each


@pytest.mark.parametrize("mode", ["rewritten", "as_it_is"])
def test_slow_layer_and_late_rank_are_seen(mode, recorded):
    for rank in range(RANKS):
        table = recorded[0][0][mode]["tables"][rank]
        slow_s = SLOW_S + (LATE_S if rank == 1 else 0)
        first = [cells(table, name) for name in ("norm/gamma", "norm/beta", "first/kernel")]
        assert sum(float(c["compute"]) for c in first) >= 900 * slow_s
        assert float(cells(table, "last/kernel")["compute"]) < 500 * SLOW_S
        late = [float(c["later by"]) for c in first]
        assert {c["slowest rank"] for c in first} == {"1"} and min(late) > 800 * LATE_S
        assert float(cells(table, "last/kernel")["later by"] or 0) < 500 * LATE_S
        exposed = sum(float(cells(table, site)["exposed"] or 0) for site in recorded[0][0]["plan"])
        assert exposed < 500 * LATE_S if rank == 1 else exposed > 700 * LATE_S


def test_eager_steps_wait_for_each_exchange(recorded):
    for rank in (0, 2):
        table = recorded[0][0]["eager"]["tables"][rank]
        gradients = [cells(table, site) for site in VARIABLES]
        assert {c["hidden"] for c in gradients} == {"0"}
        assert sum(float(c["exposed"]) for c in gradients) > 700 * LATE_S


def test_bytes_are_those_of_a_rank(recorded):
    """Four rows: factors of 8 and 16 columns; a dense gradient; a gradient for each of eight indices of a row."""
    sizes = {}
    for row, site in (("sfb", "first/kernel"), ("ps", "norm/gamma"), ("gather", "rows/table/embeddings")):
        sizes[site] = {e["args"]["bytes"] for e in rows_of(recorded[1]["rewritten"])[0, row]
                       if e["args"]["site"] == site}
    assert sizes == {"first/kernel": {4 * 4 * (8 + 16)}, "norm/gamma": {4 * 16},
                     "rows/table/embeddings": {4 * 8 * 2 * 4}}


@pytest.mark.parametrize("mode", MODES)
def test_no_exchange_ends_before_another_rank_has_begun_it(mode, recorded):
    trace = recorded[1][mode]
    errors = [trace["otherData"][f"clock error of rank {rank}, us"] for rank in range(RANKS)]
    assert errors[0] == 0 and max(errors) < 20_000
    exchanges = collections.defaultdict(lambda: [[] for _ in range(RANKS)])
    for (rank, row), events in rows_of(trace).items():
        if row in ("ps", "sfb", "sparse", "gather"):  # of a broadcast, the root may be done before the others begin
            for event in sorted(events, key=lambda e: e["ts"]):
                exchanges[event["args"]["site"]][rank].append(event)
    assert len(exchanges) >= 5
    for of_ranks in exchanges.values():
        assert len(of_ranks[0]) == len(of_ranks[1]) == len(of_ranks[2])
        for events in zip(*of_ranks):
            for i, event in enumerate(events):
                for j, other in enumerate(events):
                    assert end_of(event) >= other["ts"] - errors[i] - errors[j] - 0.01


def test_timeline_inside_of_another_is_refused(recorded):
    assert re.search(r"strategy.timeline\('.*inner.json'\) was entered inside another one; leave that one",
                     recorded[0][0]["nested"])


def test_steps_that_were_partitioned(recorded):
    """Each exchange appears by its name, once per step; nothing hides exchanges that rows wait for."""
    reports, traces = recorded
    report = reports[0]["partitioned"]
    waited_for = {site for site, is_waited_for in report["exchanges"].items() if is_waited_for}
    assert {"mean", "variance", "value/noise", "max/StopGradient"} <= waited_for
    assert {"weights", "loss", "rows/kinds"} <= set(report["exchanges"]) - waited_for
    sites = collections.Counter(
        e["args"]["site"] for (rank, row), events in rows_of(traces["partitioned"]).items() for e in events
        if rank == 0 and row not in ("compute", "calls", "rebuild"))
    assert sites == dict.fromkeys(report["exchanges"], STEPS)
    for site, is_waited_for in report["exchanges"].items():
        row = cells(report["table"], site)
        assert row["predicted"] and row["measured"], site
        assert not is_waited_for or row["hidden"] == "0", site
    assert cells(report["table"], "total")["predicted"]
