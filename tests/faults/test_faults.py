"""The table of faults: what a line of it shows, and what its file says."""

import pytest

from evaluation.faults import fault_table
from evaluation.faults import faults


@pytest.mark.parametrize("says, output, seen", [
    ("boom", "WARNING: boom\nfirst boom\nlast boom\n", "first boom"),
    ("stall", "[2026-01-01 10:00:00.5: W /tmp/a.B/c/stall.cc:107] missing\n", "stall.cc:107] missing"),
    ("weights", f"weights {'ab' * 32}\n", "weights ..."),
    ("", "anything", ""), ("boom", "other", ""), ("boom", "boom " * 100, ("boom " * 32).rstrip() + " ...")])
def test_what_a_user_sees(says, output, seen):
    assert faults.seen(says, output) == seen


def test_the_page_of_faults_has_a_row_for_each():
    rows = [faults.Row("a fault", "somehow", "mpiexec", "boom | bang", 1, 0.25, ""),
            faults.Row("another", "somehow", "horovodrun", "", 0, None, "the status is 0; it printed:\nmuch")]
    page = faults.report(rows)
    assert "| a fault | somehow | mpiexec | `boom \\| bang` | 1 | 0.2 |" in page
    assert "| another | somehow | horovodrun | the launcher's message | 0 |  |" in page
    assert "2 faults; 1 are wrong.\n* another (horovodrun): the status is 0; it printed:" in page


def test_a_program_without_its_fault_is_wrong():
    fault = fault_table.Fault("an option", "it is given", ("ask_for", "timeout_s=5"), "expected a positive", ranks=0)
    ended = faults.run_program(fault, "mpiexec")
    assert ended.status == 0
    assert fault_table.wrong(fault, ended).startswith("the status is 0, 'expected a positive' is not said")
