"""Numbers as text for reports.

Tests: tests/unit/test_reports.py.
"""


def ms(seconds: float | None) -> str:
    """Returns seconds as text in milliseconds; "unknown" for None."""
    if seconds is None:
        return "unknown"
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{1e3 * seconds:,.0f} ms"


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
