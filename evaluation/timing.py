"""Summaries of times, for all benchmarks."""

import statistics


def summarize(times):
    """Returns median and quartiles in milliseconds of times in seconds."""
    low, median, high = statistics.quantiles([1e3 * t for t in times], n=4)
    return {"median_ms": median, "quartiles_ms": [low, high], "samples": len(times)}


def cell(summary):
    """Returns a summary as text for a table."""
    return "{median_ms:.3f} ({quartiles_ms[0]:.3f}-{quartiles_ms[1]:.3f})".format(**summary)
