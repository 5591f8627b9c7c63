"""Runs the training step of a saved graph, for verification: with given inputs, from a given state.

Tests: tests/saved/test_saved_commands.py, tests/saved/test_saved_graphs.py.
"""

import collections
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import tempfile
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

from tf_poseidon.errors import ConfigurationError
from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.graph import functions as functions_lib
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.saved_graphs import formats

v1 = tf.compat.v1


# What TensorFlow raises for files that are damaged or missing.
_OF_FILES = (tf.errors.DataLossError, tf.errors.NotFoundError, tf.errors.OutOfRangeError, IndexError, OSError)


def runner(graph: formats.Saved, signature: str | None = None, train_op: Sequence[str] = (),
           initializer: Sequence[str] | None = None, is_optimised: bool = True) -> "Runner":
    """Returns a runner of a graph of `formats.read`.

    Args:
        graph: The graph.
        signature, train_op: The step, as in `rewriting.rewrite`.
        initializer: Names of ops that initialise variables, if there is no checkpoint.
        is_optimised: Whether TensorFlow optimises the graph before it runs, as it does in training.

    Raises:
        PoseidonError: If TensorFlow cannot load it.
    """
    try:
        if graph.has_functions:
            return _FunctionRunner(graph, signature, is_optimised)
        return _SessionRunner(graph, graph.targets(signature, train_op), initializer, is_optimised)
    except (tf.errors.OpError, IndexError, OSError) as error:  # TensorFlow reads variables and assets
        if isinstance(error, _OF_FILES):
            raise GraphError(f"'{graph.path}' cannot be loaded: {_cause(error)}; one of its files is damaged or "
                             "missing, write it again.") from error
        raise GraphError(f"'{graph.path}' cannot be loaded: {_cause(error)}; correct what TensorFlow complains about, "
                         "in the graph or in its checkpoint.") from error


def _cause(error: Exception) -> str:
    """Returns the line of an error of TensorFlow that says what is wrong; lines before it say where."""
    lines = str(error).strip().split("\n")
    if lines[0].startswith("Graph execution error"):
        last = max((i for i, line in enumerate(lines) if line.startswith("Node: ")), default=0)
        lines = [line for line in lines[last + 1:] if line.strip()] or lines
    return lines[0].strip().rstrip(".")


class _FunctionRunner:
    """Runs a signature of a SavedModel of TensorFlow 2.

    Attributes:
        inputs: (dtype, shape) of the step's inputs, by name.
        optional: The same of inputs that have a default.
        unused: Names of inputs of the graph that the step does not need.
        variables: Distinct names of the variables that the step uses.
    """

    def __init__(self, graph: formats.Saved, signature: str | None, is_optimised: bool) -> None:
        self._is_optimised = is_optimised
        self._directory = tempfile.TemporaryDirectory()
        path = f"{self._directory.name}/model"
        graph.write(path)
        self._model = tf.saved_model.load(path)
        name = signature or "train"
        if name not in self._model.signatures:
            raise GraphError(f"'{graph.path}' has no signature '{name}'; name one with --signature.")
        self._step = self._model.signatures[name]
        specs = self._step.structured_input_signature[1]
        self.inputs = {key: (spec.dtype, spec.shape) for key, spec in specs.items()}
        self.optional: dict[str, tuple[tf.DType, tf.TensorShape]] = {}
        self.unused = {key for step in self._model.signatures.values()
                       for key in step.structured_input_signature[1]} - self.inputs.keys()
        # The same variable may be captured twice, and two variables may have the same name.
        self._variables = list({id(v): v for v in self._step.variables}.values())
        self.variables = _numbered(v.name.partition(":")[0] for v in self._variables)

    def state(self) -> list[np.ndarray]:
        """Returns the values of all variables, in the order of `variables`."""
        return [_array(v.numpy()) for v in self._variables]

    def set_state(self, state: Iterable[np.ndarray]) -> None:
        """Gives all variables their values, in the same order."""
        for variable, value in zip(self._variables, state):
            variable.assign(value)

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Runs a step, and returns what it returns: arrays by name."""
        with _optimiser(self._is_optimised):
            outputs = self._step(**{key: tf.constant(value) for key, value in inputs.items()})
        return {name: _array(tensor.numpy()) for name, tensor in outputs.items()}


class _SessionRunner:
    """Runs a graph of TensorFlow 1; attributes and methods as in `_FunctionRunner`.

    Its variables are all that have a value: a rewritten graph may need fewer than the original.
    """

    def __init__(self, graph: formats.Saved, targets: Iterable[str], initializer: Sequence[str] | None,
                 is_optimised: bool) -> None:
        config = v1.ConfigProto(intra_op_parallelism_threads=1, allow_soft_placement=True)  # as functions
        config.graph_options.rewrite_options.disable_meta_optimizer = not is_optimised
        self._graph = tf.Graph()
        self._session = v1.Session(graph=self._graph, config=config)
        with self._graph.as_default():
            is_restored = self._load(graph)
            self._targets = {target: self._graph.as_graph_element(target) for target in targets}
            self._make_accessors()
        restore = graph.checkpoint()
        if initializer:
            self._session.run([self._graph.get_operation_by_name(name) for name in initializer])
        elif restore:
            self._session.run(restore[0], {restore[1]: restore[2]})
        elif not is_restored:
            raise GraphError(f"'{graph.path}' has no checkpoint; name the op that initialises its variables "
                             "with --initializer.")
        ready = self._session.run(self._is_ready)
        self._used = [i for i, is_ready in enumerate(ready) if is_ready]
        self.variables = [self._names[i] for i in self._used]

    def _load(self, graph: formats.Saved) -> bool:
        """Loads a graph; returns whether its variables then have values."""
        if not isinstance(graph, formats.SavedModel):
            tf.import_graph_def(graph.graph_def, name="")
            return False
        with tempfile.TemporaryDirectory() as directory:
            path = f"{directory}/model"
            graph.write(path)
            v1.saved_model.load(self._session, graph.tags, path)
        return True

    def _make_accessors(self) -> None:
        """Adds ops that read and assign each variable, and finds the inputs."""
        self.inputs: dict[str, Any] = {}
        self._names, self._reads, self._assigns, self._feeds, self._is_ready = [], [], [], [], []
        self.optional: dict[str, Any] = {}
        self.unused: set[str] = set()
        needed = _needed(self._targets.values())
        for op in self._graph.get_operations():
            if op.type in ("Placeholder", "PlaceholderWithDefault"):
                tensor = op.outputs[0]
                if op not in needed:
                    self.unused.add(tensor.name)
                else:
                    inputs = self.inputs if op.type == "Placeholder" else self.optional
                    inputs[tensor.name] = tensor.dtype, tensor.shape
            elif op.type in ("VarHandleOp", "VariableV2", "Variable"):
                dtype = op.get_attr("dtype")
                feed = v1.placeholder(dtype)
                handle = op.outputs[0]
                if op.type == "VarHandleOp":
                    self._is_ready.append(tf.raw_ops.VarIsInitializedOp(resource=handle))
                    self._reads.append(tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype))
                    self._assigns.append(tf.raw_ops.AssignVariableOp(resource=handle, value=feed))
                else:
                    self._is_ready.append(v1.is_variable_initialized(handle))
                    self._reads.append(tf.identity(handle))
                    self._assigns.append(v1.assign(handle, feed, validate_shape=False).op)
                self._names.append(op.name)
                self._feeds.append(feed)

    def state(self) -> list[np.ndarray]:
        return self._session.run([self._reads[i] for i in self._used])

    def set_state(self, state: Iterable[np.ndarray]) -> None:
        self._session.run([self._assigns[i] for i in self._used],
                          {self._feeds[i]: value for i, value in zip(self._used, state)})

    def run(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        values = self._session.run(self._targets, inputs)  # None for an op
        return {name: _array(value) for name, value in values.items() if value is not None}


Runner = _FunctionRunner | _SessionRunner


@contextlib.contextmanager
def _optimiser(is_on: bool) -> Iterator[None]:
    """A context in which TensorFlow optimises functions, or does not; sessions have options of their own.

    It sets the option in both cases: for options that are written otherwise, even if they mean the same, TensorFlow
    makes the kernels of a function anew, and ours count their calls.
    """
    options = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not is_on})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options(
            {"disable_meta_optimizer": options.get("disable_meta_optimizer", False)})


def _numbered(names: Iterable[str]) -> list[str]:
    """Returns distinct names: the second "v" becomes "v (2)"."""
    counts: collections.Counter[str] = collections.Counter()
    numbered: list[str] = []
    for name in names:
        counts[name] += 1
        numbered.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return numbered


def _array(value: Any) -> np.ndarray:
    """Returns a value as an array; strings as objects, since NumPy's strings lose trailing zeros."""
    return np.asarray(value, object if isinstance(value, bytes) else None)


def _needed(targets: Iterable[tf.Tensor | tf.Operation]) -> set[tf.Operation]:
    """Returns the operations that given tensors or operations need."""
    queue, seen = [getattr(target, "op", target) for target in targets], set()
    while queue:
        op = queue.pop()
        if op not in seen:
            seen.add(op)
            queue += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return seen


def nodes_of_step(graph: formats.Saved, targets: Iterable[str]) -> list[node_def_pb2.NodeDef]:
    """Returns the nodes that given tensors need, and those of the functions that these nodes call."""
    main = {node.name: node for node in graph.graph_def.node}
    functions = {function.signature.name: function.node_def for function in graph.graph_def.library.function}
    queue, nodes_by_name = [graph_lib.node_of(target) for target in targets], {}
    for name in queue:
        if name not in main:
            raise ConfigurationError(f"'{graph.path}' has no node '{name}'; name one of its nodes with --train_op.")
    while queue:
        name = queue.pop()
        if name in main and name not in nodes_by_name:
            nodes_by_name[name] = main[name]
            queue += map(graph_lib.node_of, main[name].input)
    nodes = list(nodes_by_name.values())
    for node in nodes:  # which grows
        for name in functions_lib.called(node):
            nodes += functions.pop(name, ())
    return nodes


def random_inputs(inputs: Mapping[str, tuple[tf.DType, tf.TensorShape]], rows: int, seed: Any) -> dict[str, np.ndarray]:
    """Returns random arrays for the inputs of a step: normal floats; zeros and ones for integers and bools.

    Args:
        inputs: (dtype, shape) by name.
        rows: The first dimension, if it is unknown.
        seed: Seed of the random numbers.
    """
    rng, arrays = np.random.default_rng(seed), {}
    for name, (dtype, shape) in sorted(inputs.items()):
        if shape.rank is None or None in shape.as_list()[1:]:
            raise GraphError(f"The shape of input '{name}' is {shape}, so it cannot be generated; give a file of "
                             "arrays with --arrays.")
        sizes = [rows if size is None else size for size in shape.as_list()]
        if dtype.is_floating:
            arrays[name] = rng.normal(size=sizes).astype(dtype.as_numpy_dtype)
        elif dtype.is_integer or dtype.is_bool:
            arrays[name] = rng.integers(0, 2, sizes).astype(dtype.as_numpy_dtype)
        else:
            raise GraphError(f"Input '{name}' has dtype {dtype.name}, so it cannot be generated; give a file of "
                             "arrays with --arrays.")
    return arrays
