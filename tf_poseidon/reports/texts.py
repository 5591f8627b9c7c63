"""Numbers as text, for all that is printed and for reports.

Tests: tests/unit/test_reports.py.
"""


# The least number of seconds for which a unit is used, those of the unit, and its name.
_UNITS = ((100.0, 60.0, "min"), (1.0, 1.0, "s"), (1e-3, 1e-3, "ms"), (0.0, 1e-6, "µs"))


def duration(seconds: float | None) -> str:
    """Returns seconds as text with three digits, in µs, ms, s or min; "unknown" for None."""
    if not seconds:
        return "unknown" if seconds is None else "0 s"
    _, unit, name = next(unit for unit in _UNITS if abs(seconds) >= 0.9995 * unit[0])
    number = seconds / unit
    return f"{number:.3g} {name}" if abs(number) < 999.5 else f"{number:,.0f} {name}"


def size(num_bytes: float | None) -> str:
    """Returns a number of bytes as text, with three digits; "unknown" for None."""
    if num_bytes is None:
        return "unknown"
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= 0.9995 * unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes:.0f} bytes"


def times(ratio: float) -> str:
    """Returns a ratio as text."""
    return f"{ratio:.3g}" if ratio < 1000 else f"{ratio:,.0f}"
