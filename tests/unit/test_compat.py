"""Guards the tables of private names: they are correct and complete, and nothing else is used."""

import ast
import dataclasses
import importlib
import inspect
import pathlib
import re
import subprocess
import sys

import keras
from packaging import requirements
import pytest
import tensorflow as tf

from tf_poseidon import keras_hook
from tf_poseidon import supported
from tf_poseidon.compat import keras as keras_compat
from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.compat.table import Name
from tf_poseidon.errors import PoseidonError

try:
    import tomllib
except ModuleNotFoundError:  # before Python 3.11, for which pytest brings it
    import tomli as tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "tf_poseidon").rglob("*.py"))}
TABLES = (tf_compat.TABLE, keras_compat.TABLE)
NAMES = (*tf_compat.TABLE.names, *keras_compat.TABLE.names, *keras_hook.HOOKS)
# The files that may name private modules: the tables.
TABLE_FILES = {ROOT / "tf_poseidon" / "compat" / "tensorflow.py", ROOT / "tf_poseidon" / "compat" / "keras.py",
               ROOT / "tf_poseidon" / "keras_hook" / "hooks.py"}
# Public despite the underscore.
PUBLIC = {"os._exit", "segments[-1]._replace"}


def is_private(name):
    return name.startswith("_") and (not name.endswith("__") or name == "__internal__")


def is_of_private_module(text):
    """Whether a text names a private module of TensorFlow or Keras, or one of its members."""
    return re.match(r"(keras\.src|tensorflow\.(python|tsl|compiler|lite))\b", text) is not None


def defined(tree):
    """Returns the names that some code gives to classes, methods and attributes."""
    functions = {node.name for node in ast.walk(tree)
                 if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    stored = {getattr(node, "attr", None) or node.id for node in ast.walk(tree)
              if isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store)}
    return functions | stored


def classes(trees):
    """Returns {name of a class: (names of its bases, names that it defines)}; classes of the same name count as one."""
    found = {}
    for node in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        bases, names = found.setdefault(node.name, (set(), set()))
        bases |= {ast.unparse(base).rpartition(".")[2] for base in node.bases} - {node.name}
        names |= defined(node)
    return found


def inherited(name, known):
    """Returns the names that a class and its known bases define."""
    bases, own = known.get(name, ((), set()))
    return own.union(*(inherited(base, known) for base in bases))


def private_uses(tree, known):
    """Returns (line, text, name) of all private names that some code uses, and that neither it nor its classes define.

    Args:
        tree: The code.
        known: `classes` of it, and of what it imports.
    """
    own, uses = defined(tree), []

    def visit(node, of_class):
        if isinstance(node, ast.ClassDef):
            of_class = inherited(node.name, known)
        text = ast.unparse(node) if isinstance(node, (ast.Attribute, ast.Call)) else ""
        if isinstance(node, ast.Attribute) and is_private(node.attr) and text not in PUBLIC:
            is_self = ast.unparse(node.value) in ("self", "cls", "super()")
            if node.attr not in (of_class if is_self else own):
                uses.append((node.lineno, text, node.attr))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            if is_private(name) and name not in own:
                uses.append((node.lineno, text, name))
        modules = [text]
        if isinstance(node, ast.ImportFrom):
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            modules = [node.value]
        uses.extend((node.lineno, module, module) for module in modules if is_of_private_module(module))
        for child in ast.iter_child_nodes(node):
            visit(child, of_class)

    visit(tree, set())
    return uses


def test_no_private_name_is_used_outside_of_the_tables():
    known, inherits = classes(PACKAGE.values()), {name.name.rpartition(".")[2] for name in tf_compat.TABLE.names}
    found = [f"{path.relative_to(ROOT)}:{line}: {text}" for path, tree in PACKAGE.items() if path not in TABLE_FILES
             for line, text, name in private_uses(tree, known)
             # A subclass can access an inherited member only by its name.
             if not (text.startswith(("self.", "super().")) and name in inherits)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("code, count", [
    ("from tensorflow.python.eager import context", 1), ("import keras.src.trainers", 1),
    ("import importlib; importlib.import_module('keras.src.trainers')", 1),
    ("optimizer._trainable_variables", 1), ("getattr(model, '_functional', None)", 1), ("tf.__internal__.FuncGraph", 1),
    ("from keras import src; import keras; keras.src.trainers", 3),
    ("class A(Base):\n  def f(self):\n    return self._device", 1), ("model._initial_epoch = None", 0),
    ("class A(Base):\n  def f(self):\n    super()._create_variable()", 1),
    ("class A:\n  def __init__(self, a):\n    self._b = a._b", 0),
    ("from tensorflow.core.framework import graph_pb2", 0),
    ("class B(A):\n  def f(self):\n    return self._g()\nclass A:\n  def _g(self): pass", 0)])
def test_private_names_are_found(code, count):
    tree = ast.parse(code)
    assert len(private_uses(tree, classes([tree]))) == count


def test_tables_hold_what_they_guard():
    """Private attributes in the functions of the tables' modules are all in the tables."""
    listed = {part for name in NAMES for part in name.name.split(".")}
    for path in TABLE_FILES:
        uses = {name for _, _, name in private_uses(PACKAGE[path], {}) if not is_of_private_module(name)}
        assert uses <= listed, path


def test_tables_hold_nothing_that_is_not_used():
    used = set()
    for tree in PACKAGE.values():
        entries = {id(part) for node in ast.walk(tree) if isinstance(node, ast.Call)
                   and ast.unparse(node.func) in ("Name", "Hook") for part in ast.walk(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.FunctionDef):
                used.add(node.name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in entries:
                used.add(node.value.rpartition(".")[2])
    tables = [name for table in TABLES for name in table.names]
    assert not [str(name) for name in tables if name.name.rpartition(".")[2] not in used]


def test_what_our_classes_override_is_in_the_table():
    overridden = set()
    for path in PACKAGE:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        module = module if module.startswith("tf_poseidon") else f"tf_poseidon.{module}"
        for _, kind in inspect.getmembers(importlib.import_module(module), inspect.isclass):
            foreign = [base for base in kind.__mro__ if base.__module__.split(".")[0] in ("tensorflow", "keras")]
            if kind.__module__.startswith("tf_poseidon"):
                overridden |= {name for name in vars(kind) if is_private(name)
                               and not name.startswith(("_abc_", "_tf_"))  # which metaclasses give
                               and any(name in vars(base) for base in foreign)}
    assert "_reduce_to" in overridden
    assert overridden <= {name.name.rpartition(".")[2] for name in NAMES}


def test_names_are_listed_once():
    for table in TABLES:
        assert len({(name.module, name.name) for name in table.names}) == len(table.names)
        assert len(table.check()) == sum(map(table.has, table.names))


@pytest.mark.parametrize("name", [name for table in TABLES for name in table.names if table.has(name)], ids=str)
def test_library_has_name(name):
    (tf_compat if name in tf_compat.TABLE.names else keras_compat).TABLE.resolve(name)


@pytest.mark.parametrize("table, name, message", [
    (tf_compat.TABLE, Name("tensorflow.python.eager.kontext", "context", "ask"),
     r"TensorFlow 2\.\d+\.\d+ has no tensorflow\.python\.eager\.kontext\.context, which tf_poseidon needs to ask; "
     r"install 'tensorflow-cpu==2\.21\.\*'"),
    (tf_compat.TABLE, Name("tensorflow.python.grappler.tf_optimizer", "OptimizeGraph", "optimize", ("graph",)),
     r"has no tensorflow\.python\.grappler\.tf_optimizer\.OptimizeGraph\(graph\), which tf_poseidon needs to optimize"),
    (tf_compat.TABLE, Name("tensorflow.python.framework.func_graph", "FuncGraph.captured", "capture"), "has no"),
    (keras_compat.TABLE, Name("keras.src.backend.tensorflow.core", "Variable._values", "assign"),
     r"Keras 3\.\d+\.\d+ has no keras\.src\.backend\.tensorflow\.core\.Variable\._values, which .*; "
     r"install 'keras>=3\.12,<3\.16'"),
    # Defined by its base.
    (keras_compat.TABLE, Name("keras.src.optimizers.adam", "Adam._trainable_variables", "train"), "has no"),
])
def test_other_names_are_refused(table, name, message):
    with pytest.raises(PoseidonError, match=message):
        table.resolve(name)
    with pytest.raises(PoseidonError, match=message):
        dataclasses.replace(table, names=(*table.names, name)).check()


@pytest.mark.parametrize("library, version, table", [
    (keras, "3.16.0", keras_compat.TABLE), (keras, "3.16.0.dev2026", keras_compat.TABLE),
    (keras, "3.11.3", keras_compat.TABLE), (tf, "2.22.0", tf_compat.TABLE), (tf, "2.17.1", tf_compat.TABLE)])
def test_other_versions_are_refused(library, version, table, monkeypatch):
    monkeypatch.setattr(library, "__version__", version)
    with pytest.raises(PoseidonError, match=f"{table.library} {version} is installed, but tf_poseidon works with "
                                            f"'.*' only; install '"):
        table.check()


@pytest.mark.parametrize("version", ["3.12.0", "3.14.2", "3.15.0", "3.15.9", "3.15.2.dev2026"])
def test_other_patches_are_taken(version, monkeypatch):
    names = tuple(name for name in keras_compat.TABLE.names if not name.since)  # the installed one may lack these
    monkeypatch.setattr(keras, "__version__", version)
    dataclasses.replace(keras_compat.TABLE, names=names).check()


@pytest.mark.parametrize("version, has", [("3.13.2", False), ("3.14.0", True), ("3.15.0", True),
                                          ("3.14.0.dev2026", True)])
def test_names_of_later_versions(version, has, monkeypatch):
    later = Name("keras.src.none", "Nothing.here", "test", since="3.14")
    monkeypatch.setattr(keras, "__version__", version)
    assert keras_compat.TABLE.has(later) == has
    table = dataclasses.replace(keras_compat.TABLE, names=(later,))
    if has:
        with pytest.raises(PoseidonError, match=r"has no keras\.src\.none\.Nothing\.here"):
            table.check()
    else:
        assert table.check() == {}


@pytest.mark.parametrize("library, call", [
    ("keras", "PoseidonStrategy()"), ("keras", "distribute(lambda x: x)(tf.ones([2]))"),
    ("keras", "explain(keras.Sequential(), 1, 2)"), ("tf", "PoseidonStrategy()")])
def test_other_versions_are_refused_where_they_would_be_used(library, call):
    version, table = {"keras": ("3.16.0", keras_compat.TABLE), "tf": ("2.22.0", tf_compat.TABLE)}[library]
    program = ("import keras, tensorflow as tf, tf_poseidon\n"
               f"{library}.__version__ = '{version}'\n"
               f"tf_poseidon.{call}")
    run = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, timeout=120)
    assert run.returncode == 1
    assert run.stderr.strip().endswith(
        f"ConfigurationError: {table.library} {version} is installed, but tf_poseidon works with '{table.requirement}' "
        f"only; {table.remedy}.")


@pytest.mark.parametrize("module, name", [
    ("keras.src.backend.tensorflow.trainer", "TensorFlowTrainer._make_function"),
    (keras_hook.HOOKS[-1].module, keras_hook.HOOKS[-1].name)])
def test_nothing_is_wrapped_where_something_is_missing(module, name, monkeypatch):
    functions = [keras_hook.resolve(hook)[2] for hook in keras_hook.HOOKS]
    with monkeypatch.context() as patch:
        owner, _, method = name.partition(".")
        patch.delattr(getattr(importlib.import_module(module), owner), method)
        with pytest.raises(PoseidonError, match=f"has no {module}.{name}"):
            keras_hook.install()
    assert [keras_hook.resolve(hook)[2] for hook in keras_hook.HOOKS] == functions


def test_requirements_are_those_that_are_supported(tmp_path):
    subprocess.run([sys.executable, "setup.py", "-q", "egg_info", "--egg-base", tmp_path], cwd=ROOT, check=True,
                   timeout=120, capture_output=True)
    lines = (tmp_path / "tf_poseidon.egg-info" / "requires.txt").read_text().split("[")[0].split()
    requires = {each.name: each for each in map(requirements.Requirement, lines)}
    assert requires["keras"] == requirements.Requirement(supported.KERAS)
    series = ".".join(tf.__version__.split(".")[:2])
    assert f"=={series}.*" in [str(each.specifier) for each in requires.values()]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert f"tensorflow-cpu=={supported.TENSORFLOW_SERIES[-1]}.*" in project["build-system"]["requires"]
    for extra in ("cpu", "cuda"):
        requirement, = map(requirements.Requirement, project["project"]["optional-dependencies"][extra])
        assert requirement.specifier == requirements.Requirement(supported.TENSORFLOW).specifier
