"""Tables as plain text."""

import pytest

from tf_poseidon.base import tables

ROWS = [("site", "bytes", "reason"), ("kernel", "1,024", "fewer bytes"), ("b", "4", "")]


@pytest.mark.parametrize("left, indent, expected", [
    ((0, 2), "", ["site    bytes  reason", "kernel  1,024  fewer bytes", "b           4"]),
    (range(3), "  ", ["  site    bytes  reason", "  kernel  1,024  fewer bytes", "  b       4"]),
    ((), "", ["  site  bytes       reason", "kernel  1,024  fewer bytes", "     b      4"])])
def test_columns_are_as_wide_as_their_widest_cells(left, indent, expected):
    assert tables.aligned(ROWS, left, indent) == expected


def test_no_rows_are_no_lines():
    assert tables.aligned([], left=(0,)) == []


def test_rows_of_different_lengths_are_refused():
    with pytest.raises(ValueError):
        tables.aligned([("a", "b"), ("c",)], left=(0,))
