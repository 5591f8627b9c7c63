"""Plants faults in the sources, one at a time, and says which tests find them.

    python -m evaluation.faults.find_planted --markdown planted_faults.md

A test that does not find a fault may be blind to what it is for, or another test may find it sooner. First each fault
is planted alone, and the tests of `make test` run that the changed module names. Those that none of these find are
planted together, and all tests of `make test` run: whatever fails then runs for each fault alone. The same follows with
the tests that only `make test-all` runs. Run it in a checkout of its own, in which `make setup` has run: it changes the
sources there, and builds what is compiled. It takes hours; `--json` keeps what was found, and the next run goes on from
there.
"""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import json
import pathlib
import re
import subprocess
import sys

from absl import app
from absl import flags

from evaluation import modules
from evaluation import output
from evaluation.faults import planted_table
from evaluation.faults.planted_table import Planted

_JSON = output.json_flag("build/planted.json", "File with what was found.")
_MARKDOWN = output.markdown_flag()
_NAMES = flags.DEFINE_string("names", "", "Only faults whose 'part: name' has this pattern.")
_WORKERS = flags.DEFINE_integer("workers", 2, "Processes that run tests.")
_LIMIT_S = flags.DEFINE_float("limit_s", 3600, "Seconds after which tests that find a fault by not ending have failed.")

# Tiers whose tests run, by the command that runs them; each command runs those before, too.
_COMMANDS = {"make test": "unit,test", "make test-all": "rest"}
_NOTHING = "nothing"


def main(argv: Sequence[str]) -> None:
    del argv
    if _git("status", "--porcelain", "--untracked-files=no"):
        sys.exit("The checkout has changes, which could be lost; commit them, or take another checkout.")
    found = _Found(modules.ROOT / _JSON.value)
    faults = [fault for part, faults in planted_table.PLANTED.items() for fault in faults
              if re.search(_NAMES.value, f"{part}: {fault.name}")]
    for command in _COMMANDS:
        for fault in faults:
            if not found.has(fault, f"{command}: named"):
                found.add(fault, f"{command}: named", _failures_alone(command, fault, _named_tests(fault)))
        _search_together(command, [fault for fault in faults if not found.has(fault, f"{command}: all")], found)
    if _MARKDOWN.value:
        pathlib.Path(_MARKDOWN.value).write_text(_page(found))


class _Found:
    """Which test finds which fault, and what has been tried; kept in a file."""

    def __init__(self, store: pathlib.Path):
        self._store = store
        self._tried: dict[str, dict[str, str]] = json.loads(store.read_text()) if store.exists() else {}

    def has(self, fault: Planted, search: str) -> bool:
        """Whether a fault has been found, or a search has been tried for it."""
        return any(self.finder(fault)) or search in self._tried.get(fault.name, {})

    def finder(self, fault: Planted) -> tuple[str, str]:
        """Returns the command and the test that find a fault, "" if none does."""
        tried = self._tried.get(fault.name, {})
        return next(((search.partition(":")[0], test) for search, test in tried.items() if test), ("", ""))

    def add(self, fault: Planted, search: str, tests: Sequence[str]) -> None:
        """Keeps that a search has been made for a fault, and the first of the tests that it has found it by."""
        self._tried.setdefault(fault.name, {})[search] = tests[0] if tests else ""
        print(f"{fault.name}: {search}: {tests[0] if tests else _NOTHING}", flush=True)
        self._store.parent.mkdir(parents=True, exist_ok=True)
        output.write_json(self._store, self._tried)


def _search_together(command: str, faults: Sequence[Planted], found: _Found) -> None:
    """Finds out which faults all tests of a command find. Each round finds one at least, or is the last one."""
    while faults:
        with _planted(faults):
            failures = _failures(command, [])
        left = []
        for fault in faults if failures else ():
            if failed := _failures_alone(command, fault, failures):
                found.add(fault, f"{command}: all", failed)
            else:
                left.append(fault)
        if not failures or len(left) == len(faults):
            for fault in faults:
                found.add(fault, f"{command}: all", [])
            return
        faults = left


@contextlib.contextmanager
def _planted(faults: Sequence[Planted]) -> Iterator[None]:
    """A context in which the sources have faults, and what is compiled has them."""
    texts = {fault.file: (modules.ROOT / fault.file).read_text() for fault in faults}
    try:
        for fault in faults:
            text = (modules.ROOT / fault.file).read_text()
            if text.count(fault.right) != 1:
                sys.exit(f"'{fault.file}' has {text.count(fault.right)} times what {fault.name!r} replaces, expected "
                         "once; mend planted_table.py.")
            (modules.ROOT / fault.file).write_text(text.replace(fault.right, fault.wrong))
        _build(texts)
        yield
    finally:
        for file, text in texts.items():
            (modules.ROOT / file).write_text(text)
        _build(texts)


def _build(files: Iterable[str]) -> None:
    if any(file.endswith((".cc", ".h")) for file in files):
        subprocess.run(["make", "--silent", "setup"], cwd=modules.ROOT, check=True, stdout=subprocess.DEVNULL)


def _named_tests(fault: Planted) -> list[str]:
    """Returns the test files that the module with a fault names: tests/unit/test_named_tests.py."""
    named = re.search(r"Tests: ((?:[^.]|\.(?:py|cc)\b)*)\.", (modules.ROOT / fault.file).read_text())
    files = re.findall(r"tests/\w+/test_\w+\.py", named[1]) if named else []
    if named and "tests/native/" in named[1]:
        files.append("tests/communicator/test_native.py")
    return files


def _failures_alone(command: str, fault: Planted, tests: Sequence[str]) -> list[str]:
    """Returns the first of some tests that fails with one fault, or nothing."""
    if not tests:
        return []
    try:
        with _planted([fault]):
            return _failures(command, tests, most=1)
    except subprocess.TimeoutExpired:
        return [f"no end within {_LIMIT_S.value:g} s"]


def _failures(command: str, tests: Sequence[str], most: int = 0) -> list[str]:
    """Returns the tests of a command that fail: of some files or tests, or of all; `most` of them, 0 for all."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--quiet", f"--maxfail={most}", f"--numprocesses={_WORKERS.value}",
         "--dist=loadfile", "-p", "no:cacheprovider", f"--tier={_COMMANDS[command]}",
         "--deselect=tests/scripts/test_planted_table.py",  # which any fault fails
         *tests], cwd=modules.ROOT, capture_output=True, text=True, timeout=_LIMIT_S.value)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", run.stdout, re.MULTILINE)
    if not failed and run.returncode not in (0, 5):  # 5: there are no such tests
        sys.exit(f"pytest ended with status {run.returncode}, and no test has failed:\n{run.stdout[-2000:]}")
    return failed


def _page(found: _Found) -> str:
    rows = [(part, fault.name, fault.was, *found.finder(fault))
            for part, faults in planted_table.PLANTED.items() for fault in faults]
    by_command = ", ".join(f"{sum(row[3] == command for row in rows)} by `{command}`" for command in _COMMANDS)
    missed = sum(not row[3] for row in rows)
    table = "\n".join(f"| {part} | {name} | {was} | " + (f"`{command}` | `{test}` |" if command else f"{_NOTHING} | |")
                      for part, name, was, command, test in rows)
    return ("# Which tests find planted faults\n\n"
            f"`evaluation/faults/find_planted.py` plants each of {len(rows)} faults in the sources, "
            f"{sum(bool(row[2]) for row in rows)} of which were there once, and runs tests until one fails. Found are "
            f"{by_command}; {missed} by none.\n\n"
            "| part | fault | mended in | found by | first test that fails |\n|---|---|---|---|---|\n" + table + "\n")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=modules.ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    app.run(main)
