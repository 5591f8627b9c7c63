"""How benchmarks time what they compare: in turns, by medians and quartiles, and by ratios of neighbours in time."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import statistics
import time
from typing import Any


def seconds(function: Callable[[], Any]) -> float:
    """Returns how long a call takes."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def in_turns(systems: Mapping[str, Callable[[], Any]], rounds: Iterable[Any], barrier: Callable[[], Any] | None = None,
             clock: Callable[[Callable[[], Any]], Any] = seconds) -> dict[str, list[Any]]:
    """Measures systems that take turns, each round in another order, so that none always follows the same one.

    Args:
        systems: Functions of no arguments, by name.
        rounds: As many rounds as it has elements, such as `rich.progress.track(range(10))`.
        barrier: Called before each turn: ranks begin together.
        clock: Returns what is measured of a call: by default, its seconds.

    Returns:
        By name, what was measured in each round.
    """
    measured: dict[str, list[Any]] = {name: [] for name in systems}
    names = list(systems)
    for turn, _ in enumerate(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if barrier:
                barrier()
            measured[name].append(clock(systems[name]))
    return measured


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Returns median and quartiles."""
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": median, "quartiles": [low, high]}


def ratios(times: Sequence[float], baseline: Sequence[float]) -> dict[str, Any]:
    """Returns the `summary` of the ratios of neighbours in time: the machine's speed drifts."""
    return summary([a / b for a, b in zip(times, baseline, strict=True)])


def text(found: Mapping[str, Any], digits: int = 2) -> str:
    """Returns a `summary` for a table."""
    low, high = found["quartiles"]
    return f"{found['median']:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def milliseconds(times: Sequence[float]) -> dict[str, Any]:
    """Returns median and quartiles in milliseconds of times in seconds."""
    found = summary([1e3 * t for t in times])
    return {"median_ms": found["median"], "quartiles_ms": found["quartiles"], "samples": len(times)}


def milliseconds_text(found: Mapping[str, Any]) -> str:
    """Returns `milliseconds` for a table."""
    return text({"median": found["median_ms"], "quartiles": found["quartiles_ms"]}, 3)
