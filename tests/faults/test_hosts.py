"""Hosts that vanish, and links that are down for a while; evaluation/faults/faults.py breaks more."""

import subprocess

import numpy as np
import pytest

from evaluation import modules
from evaluation.faults import hosts


def test_job_ends_or_goes_on_as_it_must(able):
    done = subprocess.run(
        [*modules.command("faults.faults"), "--kinds=hosts", "--only=a host vanishes$|flaps"], text=True,
        capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split(" after ")[0] for line in done.stdout.splitlines()] == [
        "hosts, a host vanishes: as it must, with status 255", "hosts, a link flaps: as it must, with status 0"]


BITS = ["weights " + digit * 64 + "\n" for digit in "aab"]
SILENT = "Rank 0 has heard nothing of rank 1 for 12 s: the host is down"
AGAIN = "a job starts again without a host"
RESTARTED = f"host1 cannot be reached; it starts again on 2 ranks\n{BITS[0]}{BITS[0]}"
WAITED = BITS[0] * 3 + "rank 0 has waited most for rank 1\n"
WEIGHTS, OTHERS = (np.ones(3), np.ones(2)), (np.ones(3), 1.01 * np.ones(2))


@pytest.mark.parametrize("fault, status, seconds, output, weights, is_wrong", [
    ("a host vanishes", 255, 11, SILENT, (), False), ("a host vanishes", 0, 11, SILENT, (), True),
    ("a host vanishes", 255, 61, SILENT, (), True), ("a host vanishes", 255, float("nan"), SILENT, (), True),
    ("a host vanishes", 255, 11, "other", (), True),
    ("a link flaps", 0, 20, BITS[0] * 3, WEIGHTS, False), ("a link flaps", 1, 20, BITS[0] * 3, WEIGHTS, True),
    ("a link flaps", 0, 20, BITS[0] * 2, WEIGHTS, True), ("a link flaps", 0, 20, "".join(BITS), WEIGHTS, True),
    ("a link flaps", 0, 20, BITS[2] * 3, WEIGHTS, True), ("a link flaps", 0, 130, BITS[0] * 3, WEIGHTS, True),
    ("a link is slow", 0, 20, WAITED, WEIGHTS, False), ("a link is slow", 0, 20, BITS[0] * 3, WEIGHTS, True),
    (AGAIN, 0, 40, RESTARTED, WEIGHTS, False), (AGAIN, 0, 40, RESTARTED, OTHERS, True),
    (AGAIN, 0, 40, RESTARTED, (), True), (AGAIN, 0, 40, BITS[0] * 3, WEIGHTS, True),
    (AGAIN, 255, 40, RESTARTED, WEIGHTS, True)])
def test_ends_that_are_wrong(fault, status, seconds, output, weights, is_wrong):
    undisturbed = hosts.Ended(0, float("nan"), BITS[0] * 3, WEIGHTS)
    assert bool(hosts.wrong(fault, hosts.Ended(status, seconds, output, weights), undisturbed)) == is_wrong
