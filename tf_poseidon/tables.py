"""Tables as plain text, for whatever is printed: it imports nothing of this project, so that everything may use it."""

from collections.abc import Collection
from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], left: Collection[int], indent: str = "") -> list[str]:
    """Returns the lines of a table, in which each column is as wide as its widest cell.

    Args:
        rows: The cells of each line, of the header too; all have the same number.
        left: The columns, counted from 0, whose cells begin in line. Those of all others end in line.
        indent: What each line begins with.

    Returns:
        A line for each row, with two spaces between its cells and none at its end.

    Raises:
        ValueError: If rows differ in the number of their cells.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [(indent + "  ".join(cell.ljust(width) if column in left else cell.rjust(width)
                                for column, (cell, width) in enumerate(zip(row, widths)))).rstrip() for row in rows]
