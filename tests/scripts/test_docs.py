"""The documentation: the site builds without a warning, its programs and commands do what it says, messages exist."""

import ast
import importlib.util
import os
import pathlib
import re
import shlex
import socket
import subprocess
import sys
import sysconfig

import documented
import launch
import pytest

import tf_poseidon as poseidon

ROOT = documented.ROOT
BINARIES = sysconfig.get_path("scripts")
_NUMBERS = re.compile(r"(?<![\w/])[±+]?\d[\d,]*(\.\d+)?(e[-+]\d+)?(?:\s+\d[\d,]*(\.\d+)?(e[-+]\d+)?)*")

PYTHON = [block for block in documented.all_blocks("python") if not block.title]
HOROVOD, = (block.place for block in PYTHON if "import horovod" in block.text)
MWMS, = (block.place for block in PYTHON if "MultiWorkerMirroredStrategy" in block.text)
SAVED, = (block.place for block in PYTHON if "tf.saved_model.load" in block.text)


def test_site(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path], cwd=ROOT, text=True,
        capture_output=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    # Nothing is loaded from elsewhere, and the help of commands is there.
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|link rel="stylesheet")[^>]*"(https?:[^"]*)"', page.read_text())
        assert not loaded, (page, loaded)
    assert "--bandwidth_gbps" in (tmp_path / "commands.html").read_text()


def test_every_public_name_is_in_the_reference():
    reference = re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    named = {name for path in reference for name in [path.rpartition(".")[2]]}
    errors = {name for name in poseidon.__all__ if name.endswith("Error")}
    assert set(poseidon.__all__) - errors <= named
    assert "tf_poseidon.errors" in reference


def test_programs_run_on_two_ranks(tmp_path):
    places = [block.place for block in PYTHON if block.place not in (HOROVOD, MWMS, SAVED)]
    output = run_blocks(tmp_path, places, ranks=2)
    for place in places:
        assert output.count(f"ran {place}\n") == 2, output


def test_programs_for_tf_distribute(tmp_path):
    config = '{"cluster": {"worker": ["127.0.0.1:%d"]}, "task": {"type": "worker", "index": 0}}' % free_port()
    assert f"ran {MWMS}\n" in run_blocks(tmp_path, [MWMS], ranks=0, environment={"TF_CONFIG": config})


@pytest.mark.skipif(importlib.util.find_spec("horovod") is None and "CI" not in os.environ,
                    reason="Horovod is not installed (scripts/install_horovod.sh)")
def test_programs_for_horovod(tmp_path):
    assert run_blocks(tmp_path, [HOROVOD], ranks=2, launcher="horovodrun").count(f"ran {HOROVOD}\n") == 2


def test_saved_graphs(tmp_path):
    """The first commands of docs/saved_graphs.md, in their order, and its program."""
    run_blocks(tmp_path, ["--save", "step"], ranks=0)
    commands = next(block for block in documented.blocks("docs/saved_graphs.md") if block.language == "sh")
    done = shell(commands.text, tmp_path)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "back" / "saved_model.pb").read_bytes() == (tmp_path / "step" / "saved_model.pb").read_bytes()
    assert run_blocks(tmp_path, [SAVED], ranks=4).count(f"ran {SAVED}\n") == 4


def test_tutorial(tmp_path, able):
    """All commands of the tutorial, in their order; they print what it shows, but for numbers.

    Two print the same losses: one process, and four.
    """
    printed, checked, losses = "", 0, []
    for block in documented.blocks("docs/tutorial.md"):
        if block.title:
            (tmp_path / block.title).write_text(block.text)
        elif block.language == "sh":
            done = shell(block.text, tmp_path)
            assert done.returncode == 0, f"{block.place}:\n{done.stdout}"
            printed = done.stdout
            losses.append(re.findall("accuracy: .* - loss: .*", printed))
        elif not block.language:
            shown = [line for line in block.text.splitlines() if line != "…"]
            lines = [without_numbers(line) for line in printed.splitlines()]
            for line in shown:
                assert without_numbers(line) in lines, f"{block.place}: {line}\nis not in\n{printed}"
                lines = lines[lines.index(without_numbers(line)) + 1:]
            checked += len(shown)
    assert checked > 20
    assert losses[0] == losses[1] and len(losses[0]) == 3


def flags_of(module):
    """Returns the flags that a module of the repository defines."""
    text = (ROOT / f"{module.replace('.', '/')}.py").read_text()
    names = re.findall(r'DEFINE_\w+\(\s*"(\w+)"', text) + re.findall(r"output\.(json|markdown)_flag\(", text)
    return "\n".join(f"--{name}" for name in names)


@pytest.mark.parametrize("block", documented.all_blocks("sh"), ids=lambda block: block.place)
def test_options_exist(block):
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        for i, word in enumerate(words):
            if word == "tf-poseidon" and words[i + 1] != "COMMAND" and not words[i + 1].startswith("-"):
                known = help_of(words[i + 1])
            elif word.startswith("scripts/") and word.endswith(".py"):
                module, = re.findall(r'run_module\("([\w.]+)"', (ROOT / word).read_text()) or [word[:-3]]
                known = flags_of(module)
            elif word.startswith("evaluation.") and words[i - 1] == "-m":
                known = flags_of(word)
            else:
                continue
            for option in own_options(words[i + 1:]):
                assert re.search(rf"{option}\b", known), f"{block.place}: {word} has no {option}"


MESSAGES = [(line.partition(" | ")[0].removeprefix("| "), line)
            for line in (ROOT / "docs/errors.md").read_text().partition("## Installing")[2].splitlines()
            if line.startswith("| ") and not line.startswith("| message")]


@pytest.mark.parametrize("message", [message for message, _ in MESSAGES], ids=lambda message: message[:40])
def test_messages_exist(message):
    """A message of docs/errors.md is in the code: its parts between names and values, in this order, in one text."""
    parts = [part.strip() for part in message.split("…") if part.strip()]
    pattern = re.compile(r"[^\n]{0,200}?".join(map(re.escape, parts)))
    assert any(map(pattern.search, texts_of_code())), message


def run_blocks(folder, arguments, ranks, environment=(), **options):
    """Returns what a job prints that runs blocks in a folder."""
    program = pathlib.Path(__file__).with_name("run_documented.py")
    return launch.run_ok(["-c", f"import os, runpy, sys; os.chdir({str(folder)!r}); sys.path.insert(0, "
                          f"{str(program.parent)!r}); runpy.run_path({str(program)!r}, run_name='__main__')",
                          *arguments], ranks, timeout_s=120, fresh=True, environment=environment, **options).output


def shell(text, folder):
    """Runs commands as a reader would, in a folder, with mpiexec and tf-poseidon in PATH."""
    return subprocess.run(
        ["bash", "-e", "-c", text], cwd=folder, text=True, timeout=300, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "PATH": f"{BINARIES}{os.pathsep}{os.environ['PATH']}", "TF_CPP_MIN_LOG_LEVEL": "3"})


def without_numbers(line):
    """Returns a line whose numbers, units of times, and spaces in a row, are each the same."""
    return re.sub(r"# (µs|ms|s|min)\b", "# s", " ".join(_NUMBERS.sub("#", line).split()))


def own_options(words):
    """Yields the options of a command, without those of a program that it starts."""
    for word in words:
        if word in ("--", "|", "&&"):
            return
        if word.startswith("--"):
            yield word.partition("=")[0]


def help_of(command):
    if command not in _help:
        _help[command] = subprocess.run([os.path.join(BINARIES, "tf-poseidon"), command, "--help"], check=True,
                                        capture_output=True, text=True).stdout
    return _help[command]


_help = {}


def texts_of_code():
    """Returns every text in the Python and C++ code, with … for what is put into it."""
    if not _texts:
        for path in ROOT.glob("tf_poseidon/**/*.py"):
            nodes = list(ast.walk(ast.parse(path.read_text())))
            docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
            _texts.extend(text for node in nodes if id(node) not in docstrings and (text := text_of(node)))
        for path in ROOT.glob("kernels/communicator/*.cc"):
            _texts.extend("…".join(re.findall(r'"((?:[^"\\]|\\.)*)"', statement))
                          for statement in path.read_text().split(";\n"))
    return _texts


_texts = []


def text_of(node):
    """Returns the text of an expression, or None if it is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (text_of(node.left) or "…") + (text_of(node.right) or "…")
    return None


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
