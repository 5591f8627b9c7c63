"""Hosts that vanish, and links that are down for a while; scripts/faults/hosts.py breaks more."""

import pathlib
import subprocess
import sys

import hosts
import pytest


def test_job_ends_or_goes_on_as_it_must(able):
    done = subprocess.run([sys.executable, pathlib.Path(hosts.__file__), "--faults=vanishes", "--faults=flaps"],
                          text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(" after ")[0] for line in done.stdout.splitlines()] == [
        "vanishes: as it must, with status 255", "flaps: as it must, with status 0"]


BITS = ["weights " + digit * 64 for digit in "aab"]
SILENT = "Rank 0 has heard nothing of rank 1 for 12 s: the host is down"


@pytest.mark.parametrize("fault, status, seconds, output, is_wrong", [
    ("vanishes", 255, 11, SILENT, False), ("vanishes", 0, 11, SILENT, True), ("vanishes", 255, 61, SILENT, True),
    ("vanishes", 255, float("nan"), SILENT, True), ("vanishes", 255, 11, "other", True),
    ("flaps", 0, 20, "".join(BITS[:1] * 3), False), ("flaps", 1, 20, "".join(BITS[:1] * 3), True),
    ("flaps", 0, 20, "".join(BITS[:1] * 2), True), ("flaps", 0, 20, "".join(BITS), True),
    ("flaps", 0, 20, "".join(BITS[2:] * 3), True)])
def test_ends_that_are_wrong(fault, status, seconds, output, is_wrong):
    assert bool(hosts.wrong(fault, status, seconds, output, ["a" * 64] * 3)) == is_wrong
