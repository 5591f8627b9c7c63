"""A Chrome trace as an XSpace for TensorBoard's profiler, which no longer reads Chrome traces.

Tests: tests/training/test_timeline.py.
"""

from collections.abc import Mapping
from typing import Any

from tf_poseidon.compat import tensorflow as tf_compat

SUFFIX = ".xplane.pb"

_PLANE = "/device:CUSTOM:"  # planes with other prefixes are taken for a host, or a device of XLA


def xspace(trace: Mapping[str, Any]) -> Any:
    """Returns the result of `trace.trace` as an `XSpace`: processes become planes, threads become lines."""
    space = tf_compat.xspace()
    planes: dict[int, Any] = {}
    lines: dict[tuple[int, int], Any] = {}
    numbers: dict[tuple[int, str], dict[str, int]] = {}

    def number_of(name: str, rank: int, table: str) -> int:
        """Returns the number of a name in "event_metadata" or "stat_metadata" of a plane."""
        numbers_of_names = numbers.setdefault((rank, table), {})
        if name not in numbers_of_names:
            numbers_of_names[name] = len(numbers_of_names) + 1
            entry = getattr(planes[rank], table)[numbers_of_names[name]]
            entry.id, entry.name = numbers_of_names[name], name
        return numbers_of_names[name]

    for event in trace["traceEvents"]:
        rank = event["pid"]
        if event["name"] == "process_name":
            planes[rank] = space.planes.add(id=rank, name=f"{_PLANE}{event['args']['name']}")
        elif event["name"] == "thread_name":
            lines[rank, event["tid"]] = planes[rank].lines.add(
                id=event["tid"], display_id=event["tid"], name=event["args"]["name"],
                display_name=event["args"]["name"])
        elif event["ph"] == "X":
            mark = lines[rank, event["tid"]].events.add(
                metadata_id=number_of(event["name"], rank, "event_metadata"),
                offset_ps=round(1e6 * event["ts"]), duration_ps=round(1e6 * event["dur"]))
            for key, value in event["args"].items():
                if value is not None:
                    stat = mark.stats.add(metadata_id=number_of(key, rank, "stat_metadata"))
                    if isinstance(value, str):
                        stat.str_value = value
                    else:
                        stat.int64_value = value
    return space

