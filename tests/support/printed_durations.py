"""Durations as the package prints them, for tests that measure what it says."""

import re

# A group of a regular expression.
DURATION = r"([\d.,]+ (?:µs|ms|s|min))"

_UNITS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}


def seconds_of(text):
    """Returns the seconds of a text that matches `DURATION`."""
    number, unit = re.fullmatch(DURATION, text)[1].split()
    return float(number.replace(",", "")) * _UNITS[unit]
