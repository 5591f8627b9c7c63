"""Tables as plain text, for everything that is printed. Imports nothing of this project, so any module may use it.

Tests: tests/unit/test_tables.py.
"""

from collections.abc import Collection
from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], left: Collection[int], indent: str = "") -> list[str]:
    """Returns the lines of a table, in which each column is as wide as its widest cell.

    Args:
        rows: The cells of each line, including the header; all rows have the same number of cells.
        left: The left-aligned columns, counted from 0. All others are right-aligned.
        indent: Prefix of each line.

    Returns:
        A line per row, with two spaces between cells and none at the end.

    Raises:
        ValueError: If rows have different numbers of cells.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [(indent + "  ".join(cell.ljust(width) if column in left else cell.rjust(width)
                                for column, (cell, width) in enumerate(zip(row, widths)))).rstrip() for row in rows]
