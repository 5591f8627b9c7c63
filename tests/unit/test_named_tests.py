"""Modules name the files that test them: Python in the last paragraph of their docstring, C++ in that of its comment.

Where people see a module's docstring, as in the reference, the names are in a comment that follows it.
"""

import ast
import itertools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MOST = 3  # files, the closest first
ONE = "tests/unit/test_named_tests.py"


def has_code(path):
    """Whether a module does more than to give others' names."""
    if path.name != "__init__.py":
        return True
    return any(not isinstance(node, (ast.Expr, ast.Import, ast.ImportFrom)) and not (
        isinstance(node, ast.Assign) and ast.unparse(node.targets) == "__all__")
               for node in ast.parse(path.read_text()).body)


MODULES = [path for path in sorted((ROOT / "tf_poseidon").rglob("*.py")) if has_code(path)] + sorted(
    (ROOT / "kernels").rglob("*.cc"))


def paragraphs(source, is_python):
    """Returns the paragraphs, each in one line, that may name tests."""
    sign, texts = "//", []
    if is_python:
        sign, tree = "#", ast.parse(source)
        if (docstring := ast.get_docstring(tree)) is None:
            return []
        texts.append(docstring)
        source = "".join(source.splitlines(keepends=True)[tree.body[0].end_lineno:])
    comment = itertools.takewhile(lambda line: line.startswith(sign), source.splitlines())
    texts.append("\n".join(line.removeprefix(sign) for line in comment))
    return [" ".join(re.split(r"\n\s*\n", text.strip())[-1].split()) for text in texts]


def problems(source, is_python):
    """Returns what is wrong with the names of tests in a module's text."""
    named = [text for text in paragraphs(source, is_python) if text.startswith("Tests: ")]
    if len(named) != 1 or not named[0].endswith("."):
        return ["no paragraph 'Tests: tests/….' at the end of the docstring or comment that opens it"]
    files = named[0].removeprefix("Tests: ").removesuffix(".").split(", ")
    found = [f"'{file}' is no test file" for file in files
             if not re.fullmatch(r"tests/\w+/(test_\w+\.py|\w+_test\.cc)", file) or not (ROOT / file).is_file()]
    found += [f"'{file}' is named twice" for file in sorted(set(files)) if files.count(file) > 1]
    return found + [f"{len(files)} files are named, expected {MOST} at most"] * (len(files) > MOST)


def test_every_module_names_its_tests():
    assert len(MODULES) > 200
    found = [f"{path.relative_to(ROOT)}: {problem}" for path in MODULES
             for problem in problems(path.read_text(), path.suffix == ".py")]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("source, problem", [
    (f'"""A.\n\nTests: {ONE}.\n"""\n\nimport ast\n', ""), (f'"""A."""\n# Tests: {ONE}.\n\n\ndef f():\n    pass\n', ""),
    (f'"""A.\n\nTests: {ONE},\ntests/native/routes_test.cc.\n"""\n', ""),
    (f"// A.\n//\n// Tests: {ONE}.\n\nint a;\n", ""), ('"""A."""\n', "no paragraph"),
    ("// A.\n\nint a;\n", "no paragraph"), ("import ast\n", "no paragraph"),
    (f'"""A.\n\nTests: {ONE}.\n\nB.\n"""\n', "no paragraph"), (f'"""A."""\n\n# Tests: {ONE}.\n', "no paragraph"),
    (f'"""A.\n\nTests: {ONE}\n"""\n', "no paragraph"), (f"// A.\n\n// Tests: {ONE}.\n", "no paragraph"),
    (f'"""A.\n\nTests: {ONE}.\n"""\n# Tests: {ONE}.\n', "no paragraph"),
    ('"""A.\n\nTests: tests/unit/test_none.py.\n"""\n', "'tests/unit/test_none.py' is no test file"),
    ("// A.\n//\n// Tests: tests/native/job.h.\n", "'tests/native/job.h' is no test file"),
    ('"""A.\n\nTests: tests/conftest.py.\n"""\n', "'tests/conftest.py' is no test file"),
    (f'"""A.\n\nTests: {ONE}, {ONE}.\n"""\n', f"'{ONE}' is named twice"),
    ('"""A.\n\nTests: ' + ", ".join(f"tests/unit/test_{name}.py" for name in ("data", "files", "forks", "gpus"))
     + '.\n"""\n', "4 files are named, expected 3 at most")])
def test_what_is_wrong_is_found(source, problem):
    found = problems(source, not source.startswith("//"))
    assert found[0].startswith(problem) if problem else not found
