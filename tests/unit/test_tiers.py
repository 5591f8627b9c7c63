"""How long the tests of each tier take, and which programs run on how many ranks: what is recorded and documented."""

import collections
import importlib
import pathlib
import re

import durations
import pytest
import tiers

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = ROOT / "tests" / "README.md"
# Tables of programs that several ranks and one process must compute the same of; engines/test_horovod.py has another.
TABLES = ("test_training", "test_keras_programs", "test_distribution", "test_unusual_programs", "test_overlapping",
          "test_saving")
JOBS = [(ranks, policy) for ranks in (2, 3, 4) for policy in ("ps", "sfb", "auto")]


@pytest.mark.parametrize("tier", tiers.BUDGETS_S)
def test_tests_of_a_tier_take_no_longer_than_they_may(tier):
    files = durations.load()[tier]
    longest = ", ".join(f"{file} ({seconds:.0f} s)" for file, seconds in list(files.items())[:5])
    assert sum(files.values()) <= tiers.BUDGETS_S[tier], (
        f"the tests of '{tier}' take {sum(files.values()):.0f} s, expected at most {tiers.BUDGETS_S[tier]:.0f}; most "
        f"take {longest}; make some shorter, or move them to another tier in tests/support/tiers.py, and record again "
        "with pytest --record-durations")


def test_durations_of_all_files_are_recorded():
    recorded = {file for files in durations.load().values() for file in files}
    found = {str(path.relative_to(ROOT / "tests")) for path in (ROOT / "tests").glob("*/test_*.py")}
    assert not found - recorded, "record them with pytest --record-durations tests/FILE"
    assert not recorded - found, f"delete them from {durations.FILE}"


def test_every_rule_has_a_file():
    for pattern, tier in tiers._RULES[:-1]:
        file = pattern.partition("::")[0]
        assert tier in tiers.TIERS and any((ROOT / "tests").glob(file)), pattern


def test_documents_say_the_same_times():
    """The comment that opens the Makefile, CONTRIBUTING and the README."""
    makefile = dict(re.findall(r"^# make (\S+) .*\((\d+) minutes", (ROOT / "Makefile").read_text(), re.MULTILINE))
    contributing = dict(re.findall(r"^\| `make (\S+)` .*\| (\d+) minutes", (ROOT / "CONTRIBUTING.md").read_text(),
                                   re.MULTILINE))
    readme = dict(re.findall(r"^make (\S+) +# .*\((\d+) minutes", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {"test-unit", "test", "test-all"} <= contributing.keys() and {"demo", "test"} <= readme.keys()
    for documented in (contributing, readme):
        assert documented.items() <= makefile.items()


def matrix():
    """Returns the lines of the table of programs by number of ranks and policy: those of CI, and all."""
    counts = collections.defaultdict(lambda: ([0] * len(JOBS), [0] * len(JOBS)))
    for name in TABLES:
        module = importlib.import_module(name)
        for function in vars(module).values():
            for mark in getattr(function, "pytestmark", ()):
                if mark.name == "table":
                    for is_full in (False, True):
                        for case in mark.kwargs["cases"](is_full):
                            counts[name, function.__name__][is_full][JOBS.index((case.ranks, case.policy))] += 1
    yield "| test | " + " | ".join(f"{ranks}, {policy}" for ranks, policy in JOBS) + " |"
    yield "|---" * (len(JOBS) + 1) + "|"
    for (module, function), (some, every) in counts.items():
        cells = [f"{few or '–'} ({many})" if many else "" for few, many in zip(some, every)]
        yield f"| `{module}.{function.removeprefix('test_')}` | {' | '.join(cells)} |"


def test_readme_has_the_table_of_programs(request):
    begin, end = "<!-- programs -->\n", "<!-- end of programs -->\n"
    text = README.read_text()
    before, rest = text.split(begin)
    wanted = before + begin + "".join(f"{line}\n" for line in matrix()) + end + rest.split(end)[1]
    if request.config.getoption("--update-golden"):
        README.write_text(wanted)
        text = wanted
    assert text == wanted, "run pytest tests/unit/test_tiers.py --update-golden"
