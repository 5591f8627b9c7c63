"""Plants faults in the sources, one at a time, and says which tests find them.

    python scripts/faults/find_planted.py --markdown planted_faults.md

A test that does not find a fault may be blind to what it is for, or another test may find it sooner. For each fault,
tests run until one fails: those of `make test` that the changed module names, then all of these, then what else
`make test-all` runs, in the same order. Run it in a checkout of its own, in which `make setup` has run: it changes the
sources there, and builds what is compiled. It takes hours; `--json` keeps what was found, and the next run goes on from
there.
"""

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
import planted_table
from planted_table import Planted

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_JSON = flags.DEFINE_string("json", "build/planted.json", "File with what was found.")
_MARKDOWN = flags.DEFINE_string("markdown", None, "Page to write.")
_TIERS = flags.DEFINE_list("tiers", ["unit", "test", "rest"], "Tiers whose tests may find a fault, in this order.")
_NAMES = flags.DEFINE_string("names", "", "Only faults whose 'part: name' has this pattern.")
_WORKERS = flags.DEFINE_integer("workers", 2, "Processes that run tests.")
_LIMIT_S = flags.DEFINE_float("limit_s", 3600, "Seconds after which a tier that does not end counts as failed.")

_NOTHING = "nothing"


def main(argv: Sequence[str]) -> None:
    del argv
    if _git("status", "--porcelain", "--untracked-files=no"):
        sys.exit("The checkout has changes, which could be lost; commit them, or take another checkout.")
    store = _ROOT / _JSON.value
    found = json.loads(store.read_text()) if store.exists() else {}
    faults = [(part, fault) for part, faults in planted_table.PLANTED.items() for fault in faults]
    for number, (part, fault) in enumerate(faults, 1):
        if fault.name in found or not re.search(_NAMES.value, f"{part}: {fault.name}"):
            continue
        with _planted(fault):
            found[fault.name] = _finder(fault)
        print(f"{number}/{len(faults)} {part}: {fault.name}: {found[fault.name]}", flush=True)
        store.parent.mkdir(parents=True, exist_ok=True)
        store.write_text(json.dumps(found, indent=1))
    if _MARKDOWN.value:
        pathlib.Path(_MARKDOWN.value).write_text(_page(found))


@contextlib.contextmanager
def _planted(fault: Planted) -> Iterator[None]:
    """A context in which the sources have a fault, and what is compiled has it."""
    path = _ROOT / fault.file
    text = path.read_text()
    if text.count(fault.right) != 1:
        sys.exit(f"'{fault.file}' has {text.count(fault.right)} times what {fault.name!r} replaces, expected once; "
                 "mend planted_table.py.")
    try:
        path.write_text(text.replace(fault.right, fault.wrong))
        _build(fault)
        yield
    finally:
        path.write_text(text)
        _build(fault)


def _build(fault: Planted) -> None:
    if fault.file.endswith((".cc", ".h")):
        subprocess.run(["make", "--silent", "setup"], cwd=_ROOT, check=True, stdout=subprocess.DEVNULL)


def _finder(fault: Planted) -> str:
    """Returns the tier and the name of the first test that fails, or "nothing"."""
    # The test files that the module names: tests/unit/test_named_tests.py.
    named = re.search(r"Tests: ((?:[^.]|\.(?:py|cc)\b)*)\.", (_ROOT / fault.file).read_text())
    files = re.findall(r"tests/\w+/test_\w+\.py", named[1]) if named else []
    if named and "tests/native/" in named[1]:
        files.append("tests/communicator/test_native.py")
    *quick, last = _TIERS.value
    for tiers in (quick, [last]):
        for chosen in (files, []) if files else ([],):
            for tier in tiers:
                if found := _first_failure(tier, chosen):
                    return found
    return _NOTHING


def _first_failure(tier: str, files: Sequence[str]) -> str:
    """Returns the tier and the name of the first of its tests that fails, in these files or in all, or ""."""
    try:
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "--quiet", "--exitfirst", f"--numprocesses={_WORKERS.value}",
             "--dist=loadfile", "-p", "no:cacheprovider", f"--tier={tier}",
             "--deselect=tests/scripts/test_planted_table.py",  # which any fault fails
             *files], cwd=_ROOT, capture_output=True, text=True, timeout=_LIMIT_S.value)
    except subprocess.TimeoutExpired:
        return f"{tier}: no end within {_LIMIT_S.value:g} s"
    if failed := re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S.*?)(?: - .*)?$", run.stdout, re.MULTILINE):
        return f"{tier}: {failed[1]}"
    if run.returncode not in (0, 5):  # 5: there are no such tests
        sys.exit(f"pytest ended with status {run.returncode}, and no test has failed:\n{run.stdout[-2000:]}")
    return ""


def _page(found: dict[str, str]) -> str:
    rows = [(part, fault.name, fault.was or "", found[fault.name])
            for part, faults in planted_table.PLANTED.items() for fault in faults if fault.name in found]
    by_tier = {tier: sum(finder.startswith(f"{tier}:") for *_, finder in rows) for tier in _TIERS.value}
    counts = ", ".join(f"{number} by the tests of `{tier}`" for tier, number in by_tier.items())
    missed = sum(finder == _NOTHING for *_, finder in rows)
    table = "\n".join(f"| {part} | {name} | {was} | {finder} |" for part, name, was, finder in rows)
    return ("# Which tests find planted faults\n\n"
            f"`scripts/faults/find_planted.py` plants each of {len(rows)} faults in the sources, one at a time, "
            f"{sum(bool(was) for _, _, was, _ in rows)} of which were there once, and runs the tests until one fails. "
            f"Found were {counts}; {missed} by none.\n\n"
            "| part | fault | mended in | first test that fails |\n|---|---|---|---|\n" + table + "\n")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=_ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    app.run(main)
