"""The self-test: who measures with whom, what its report says, and that it finds what is wrong."""

import itertools
import pathlib
import re

import launch
import pytest

import tf_poseidon
from tf_poseidon.commands.selftest import links
from tf_poseidon.commands.selftest import scheme_checks
from tf_poseidon.commands.selftest import selftest_report
from tf_poseidon.commands.selftest.links import Link

COMMAND = pathlib.Path(tf_poseidon.__file__).with_name("__main__.py")


@pytest.mark.parametrize("ranks", [[0], [0, 1], [0, 4, 8], [3, 1, 2, 0], list(range(0, 22, 2)), list(range(64))])
def test_each_pair_is_in_one_round(ranks):
    rounds = list(links.rounds(ranks))
    pairs = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert sorted(map(sorted, pairs)) == sorted(map(sorted, itertools.combinations(ranks, 2)))
    for pairs in rounds:
        busy = [rank for pair in pairs for rank in pair]
        assert len(set(busy)) == len(busy)
    assert len(rounds) <= max(len(ranks), 1)  # as few as a tournament has


def of(names, gbps=None, local=False):
    """Returns links of 10 Gbit/s between hosts, or others where `gbps` says so."""
    return [Link(a, b, 20.0, (gbps or {}).get((a, b), 40.0 if a == b else 10.0)) for a in names for b in names
            if a != b or local]


FINE = (scheme_checks.Result(scheme_checks.LOOP, "a dense layer", "ps", ""),)


@pytest.mark.parametrize("found, says, says_not", [
    ([], "all right, in 1 s", "Gbit/s"),
    (of("ab", local=True), "the slowest link is from a to b, 10 Gbit/s", "all wait for the slowest"),
    (of("a", local=True), "the slowest link is within a, 40 Gbit/s", "from"),
    (of("abcd", {("c", "b"): 0.9}), r"from c to b, 0.9 Gbit/s: others have 10, and all wait for the slowest", "WRONG"),
    # All slow: then none is slower than others. Of two, one differs from the other.
    (of("abc", {(a, b): 0.1 + (b == "a") for a in "abc" for b in "abc"}), "from a to b, 0.1 Gbit/s", "others have"),
    (of("ab", {("a", "b"): 0.1}), "from a to b, 0.1 Gbit/s", "others have"),
    (of("abcdefghijklmnop", {("c", "b"): 0.9}), "the 10 slowest links between 16 hosts", "WRONG"),
])
def test_verdict_names_the_slowest_link(found, says, says_not):
    text = str(selftest_report.SelftestReport("job", FINE, found, 1.0))
    assert says in text and says_not not in text.splitlines()[-1]
    assert "all right, in 1 s" in text


def test_table_of_links_is_from_rows_to_columns():
    lines = str(selftest_report.SelftestReport("job", FINE, of("ab", {("a", "b"): 3.0}), 1.0)).splitlines()
    header = next(i for i, line in enumerate(lines) if line.split() == ["a", "b"])
    assert lines[header + 1].split() == ["a", "20", "/", "3"] and lines[header + 2].split() == ["b", "20", "/", "10"]


def test_what_an_engine_cannot_do_is_not_wrong():
    result = scheme_checks.Result(scheme_checks.LOOP, "a dense layer", "hfb", "", is_supported=False)
    report = selftest_report.SelftestReport("job", (*FINE, result), [], 1.0)
    assert re.search(r"^loop .* hfb +not supported by this engine$\n^all right", str(report), re.M)
    assert not report.problems


def test_what_is_wrong_is_in_the_report():
    result = scheme_checks.Result(scheme_checks.LOOP, "an embedding", "sparse", "it is off")
    wrong = selftest_report.SelftestReport("job", (*FINE, result), [], 1.0)
    assert wrong.problems == ["loop over strategy.run, an embedding: it is off"]
    assert re.search(r"^WRONG: loop over strategy.run, an embedding: it is off$\n^wrong, in 1 s", str(wrong), re.M)


@pytest.mark.parametrize("arguments, ranks, lines", [
    ([], 0, 11), (["-n", "1"], 0, 11), (["-n", "3"], 0, 11), ([], 2, 11)])
def test_every_scheme_has_the_bits_of_one_process(arguments, ranks, lines):
    """Alone, it starts its ranks itself."""
    done = launch.run_ok([COMMAND, "selftest", *arguments], ranks, timeout_s=120)
    expected = {(): 2, ("-n", "1"): 1, ("-n", "3"): 3}[tuple(arguments)]
    assert done.output.count("the same bits") == lines and "WRONG" not in done.output
    assert (f"{expected} ranks on one host over MPICH" if expected > 1 else "one process, TensorFlow") in done.output
    found = set(re.findall(r"^(?:partitioned|loop).*  (\w+) +the same bits$", done.output, re.MULTILINE))
    assert found == ({"ps", "sfb", "hfb", "gather", "sparse", "scatter"} if expected > 1 else {"none"})
    assert bool(re.search(r"the slowest link is within \S+, [\d.]+ Gbit/s", done.output)) == (expected > 1)


@pytest.mark.parametrize("fault, says", [
    ("scale", r"loop over strategy.run, a dense layer: \d+ of the 7680 numbers of 'loop/dense/0\S*' are not those of "
              r"one process, the first is -?[\d.]+ instead of -?[\d.]+"),
    ("lost", r"partitioned by rows, a dense layer, by its factors: .* are not those of one process"),
    ("unplanned", r"loop over strategy.run, a dense layer, by its factors: it has travelled by ps: "),
    ("whole", r"partitioned by rows, a dense layer, updated in shards: ranks have not updated shards of '\S+'"),
])
def test_faults_are_found(fault, says):
    done = launch.run(["selftest_with_fault.py", fault], 2, timeout_s=120)
    assert done.status == 1
    assert re.search(f"^WRONG: {says}", done.output, re.MULTILINE), done.output
    assert re.search("^wrong, in ", done.output, re.MULTILINE)


def test_ranks_of_its_own_or_of_mpiexec():
    done = launch.run([COMMAND, "selftest", "-n", "4"], 2, timeout_s=60)
    assert done.status == 2 and "-n and --hosts are for a selftest that starts its ranks itself" in done.output
