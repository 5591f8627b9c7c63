"""The recording of all ranks as a Chrome trace.

Tests: tests/training/test_timeline.py.
"""

import bisect
from collections.abc import Sequence
from typing import Any

from tf_poseidon.timelines import recorded_steps as steps_lib


def trace(ranks: Sequence[steps_lib.Rank]) -> dict[str, Any]:
    """Returns the recording of all ranks as the object of a Chrome trace.

    A rank is a process of the trace, with one thread for computing and one per kind of exchange, or several
    if several exchanges of a kind are in flight at the same time.
    """
    origin = min(rank.begin for rank in ranks)
    events = []

    def note(rank: int, phase: str, name: str, **more: Any) -> None:
        events.append({"ph": phase, "pid": rank, "name": name, **more})

    def name_thread(rank: int, tid: int, name: str) -> None:
        note(rank, "M", "thread_name", tid=tid, args={"name": name})
        note(rank, "M", "thread_sort_index", tid=tid, args={"sort_index": tid})

    def note_span(rank: int, tid: int, name: str, category: str, span: steps_lib.Event | steps_lib.Segment,
                  **arguments: Any) -> None:
        note(rank, "X", name, tid=tid, cat=category, ts=1e6 * (span.begin - origin),
             dur=1e6 * (span.end - span.begin), args=arguments)

    for number, rank in enumerate(ranks):
        note(number, "M", "process_name", args={"name": f"rank {number} on {rank.host}"})
        note(number, "M", "process_sort_index", args={"sort_index": number})
        name_thread(number, 0, "compute")
        steps = rank.steps
        for i, step in enumerate(steps):
            for segment in step.segments:
                note_span(number, 0, f"{segment.kind} {segment.site}".strip(), segment.kind, segment,
                          site=segment.site, step=i)
        numbers = {id(event): i for i, step in enumerate(steps) for event in (*step.exchanges, *step.rebuilds)}
        ends, tid = [step.end for step in steps], 1
        for row in steps_lib.ROWS:
            lanes: list[float] = []  # when each is free
            for event in (e for e in rank.events if e.row == row):
                lane = next((i for i, free in enumerate(lanes) if free <= event.begin), len(lanes))
                if lane == len(lanes):
                    lanes.append(0.0)
                    name_thread(number, tid + lane, row if lane == 0 else f"{row} {lane + 1}")
                lanes[lane] = event.end
                index = numbers.get(id(event), bisect.bisect_left(ends, event.end))
                note_span(number, tid + lane, event.site or steps_lib.WAIT_FOR_DATA, row, event, site=event.site,
                          step=index if index < len(steps) else None, bytes=event.num_bytes)
            tid += len(lanes)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "clocks": "all times are on rank 0's clock; those of another rank may be off by its error",
            **{f"clock error of rank {i}, us": 1e6 * rank.clock_error for i, rank in enumerate(ranks)}}}
