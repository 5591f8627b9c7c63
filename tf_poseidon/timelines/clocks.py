"""Converts the recordings of all ranks to rank 0's clock.

Tests: tests/training/test_timeline.py.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tf_poseidon.timelines.recorded_steps import Event
from tf_poseidon.timelines.recorded_steps import Rank
from tf_poseidon.timelines.recorded_steps import SitePlace


def clock_offset(own: Sequence[tuple[float, float]],
                 of_rank_0: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Returns (time, offset, error): by how much this rank's clock was ahead of rank 0's, and when.

    In an all-to-all exchange, no rank finishes before all have begun. So the offset is at least this rank's
    beginning minus rank 0's end, and at most this rank's end minus rank 0's beginning. Of several tries, the
    one with the shortest round trip counts (F. Cristian, "Probabilistic clock synchronization", 1989).

    Args:
        own: (begin, end) of several exchanges, in seconds of this rank's clock.
        of_rank_0: The same exchanges on rank 0, in seconds of its clock.
    """
    bounds = [(begin - end_0, end - begin_0, (begin + end) / 2)
              for (begin, end), (begin_0, end_0) in zip(own, of_rank_0, strict=True)]
    low, high, time = min(bounds, key=lambda bound: bound[1] - bound[0])
    return time, (low + high) / 2, (high - low) / 2


def aligned(recorded: Sequence[Mapping[str, Any]], places: Mapping[str, SitePlace] | None = None) -> list[Rank]:
    """Returns the `Rank`s with all times on rank 0's clock.

    Args:
        recorded: The recording of each rank, see `recording.record`.
        places: Same as in `Rank`.
    """
    ranks = []
    for rank, recording in enumerate(recorded):
        (first, offset, error), (last, last_offset, last_error) = (
            clock_offset(recording[key], recorded[0][key]) if rank else (0.0, 0.0, 0.0)
            for key in ("before", "after"))
        drift = (last_offset - offset) / (last - first) if rank else 0.0

        def to_rank_0(time: float, offset: float = offset, drift: float = drift, first: float = first) -> float:
            return time - offset - drift * (time - first)

        events = [Event(row, site, to_rank_0(1e-9 * begin), to_rank_0(1e-9 * end), *rest)
                  for row, site, begin, end, *rest in recording["events"]]
        events.sort(key=lambda e: e.begin)
        ranks.append(Rank(recording["host"], to_rank_0(1e-9 * recording["begin"]), tuple(events),
                          max(error, last_error), recording["dropped"], places or {}))
    return ranks
