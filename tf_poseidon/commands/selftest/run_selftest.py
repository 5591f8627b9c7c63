"""Runs a self-test on the ranks of this job.

Tests: tests/unit/test_selftest.py.
"""

import time

from tf_poseidon.commands.selftest import links
from tf_poseidon.commands.selftest import scheme_checks
from tf_poseidon.commands.selftest import selftest_report
from tf_poseidon.job import runtime
from tf_poseidon.options import JobOptions
from tf_poseidon.strategy import poseidon_strategy as strategy_lib


def run(engine: str | None = None) -> selftest_report.SelftestReport:
    """Returns the `SelftestReport` of this job; all ranks must call it.

    Args:
        engine: Same as in `PoseidonStrategy`.

    Raises:
        PoseidonError: If the job cannot be joined.
    """
    begin = time.monotonic()
    runtime.start(JobOptions(engine=engine), announces=False)  # the report does
    # A policy that compares no times: nothing has to be measured first.
    strategy = strategy_lib.PoseidonStrategy("ps", engine=engine, pins=scheme_checks.PINS)
    results = scheme_checks.check(strategy)
    communicator = runtime.communicator()
    measured_links = [] if communicator is None else links.measure(communicator)
    return selftest_report.SelftestReport(runtime.described(), results, measured_links, time.monotonic() - begin)
