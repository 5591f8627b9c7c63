"""Compares a rewritten graph, on as many ranks as there are, with the one that it was made of in one process.

The rewritten graph runs on all ranks. Before each of its steps rank 0 gives the original the same variables, and runs
it on the same global batch. Nothing is known about the step, so how much rounding may show in a value is measured: the
original runs again, twice, with its numbers changed in the last place.
"""

import contextlib
import dataclasses
import hashlib

import ml_dtypes
import numpy as np
import tensorflow as tf

from tf_poseidon import job
from tf_poseidon import runtime
from tf_poseidon import tables
from tf_poseidon.errors import PoseidonError
from tf_poseidon.graph_passes.graph import functions as functions_lib
from tf_poseidon.graph_passes.graph import graph as graph_lib
from tf_poseidon.graph_passes.saved import strip
from tf_poseidon.graph_passes.partition.rules import sources
from tf_poseidon.saved_graphs import formats
from tf_poseidon.saved_graphs import running

# From the narrowest: bfloat16 has fewer bits than half.
_FLOATS = (tf.bfloat16, tf.half, tf.float32, tf.float64)
_COMPLEX = {tf.complex64: tf.float32, tf.complex128: tf.float64}
# How often the original runs with other last places, and how much more than it shows then may come of rounding.
_RERUNS, _FACTOR = 2, 32
# What random ops without a seed get.
_SEEDS = (87654321, 1)


@dataclasses.dataclass
class Verification:
    """What a verification has found. `print(verification)` shows it.

    Attributes:
        size: Number of ranks.
        steps: Number of steps.
        errors: By ("variable" or "output", its name): (number of values compared, the largest error in parts of its
            bound). Floats are compared where one process has finite ones; of what is no float, an error is infinite.
        differing: Variables and outputs that ranks have with different bits, sorted.
        failures: What is wrong, sentences; empty if nothing is.
    """

    size: int
    steps: int
    errors: dict[tuple[str, str], tuple[int, float]] = dataclasses.field(default_factory=dict)
    differing: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)

    def __str__(self):
        rows = [("", "", "values", "largest error / bound"),
                *((kind, name, f"{number:,}", f"{error:.3g}") for (kind, name), (number, error) in self.errors.items())]
        lines = [f"{self.steps} steps on {self.size} ranks, against the original in one process:",
                 *tables.aligned(rows, left=(0, 1, 3), indent="  ")]
        lines.append("on all ranks: " + ("the same bits" if not self.differing else
                                         "other bits of " + ", ".join(name for _, name in self.differing)))
        return "\n".join([*lines, *(f"WRONG: {failure}" for failure in self.failures),
                          "wrong" if self.failures else "all right"])


def verify(source, target, signature=None, train_op=(), initializer=(), batch_size=4, steps=2, inputs=None,
           seed=0, engine=None):
    """Runs a rewritten graph, and the original in one process, and compares them. All ranks have to call it.

    Args:
        source: Path of the original graph.
        target: Path of the rewritten one.
        signature, train_op: What makes a step, as for `rewriting.rewrite`; of several signatures, one.
        initializer: Names of ops that give variables their first values, where there is no checkpoint.
        batch_size: Rows for each rank, where the graph leaves their number open.
        steps: Number of steps.
        inputs: By name, the arrays of the global batch, which every step gets; random numbers if they are missing.
        seed: What decides the random numbers.
        engine: As of `job.load_ops`.

    Returns:
        A `Verification`. Errors are there on rank 0, which computes the reference; what ranks have differently on all.

    Raises:
        PoseidonError: If the graphs cannot be compared.
    """
    rank, size = job.load_ops(engine)
    if signature is not None and not isinstance(signature, str):
        raise PoseidonError(f"signature={signature!r}, expected the name of one signature; verify them one by one.")
    for name, value in (("batch_size", batch_size), ("steps", steps)):
        if not isinstance(value, int) or value < 1:
            raise PoseidonError(f"{name}={value!r}, expected 1 at least.")
    original, rewritten = formats.read(source), formats.read(target)
    if not strip.is_rewritten(rewritten.graph_def):
        raise PoseidonError(f"'{target}' was not rewritten, so there is nothing to verify; give the original first, "
                            "and what was made of it second.")
    result = Verification(size, steps)
    if _bytes(strip.strip(rewritten.graph_def)) != _bytes(original.graph_def):
        result.failures.append(f"'{target}' was made of another graph than '{source}'")
        return result
    epsilon = _epsilon(rewritten, rewritten.targets(signature, train_op))
    for graph in (original, rewritten):
        _set_seeds(graph.graph_def)
    what = dict(signature=signature, train_op=train_op, initializer=initializer)
    with _unoptimised():
        real = running.runner(rewritten, **what)
        reference = _Reference(original, what, epsilon, seed) if rank == 0 else None
        arrays = None if inputs is None else _checked(inputs, real.inputs)
        for step in range(steps):
            batch = arrays or running.random_inputs(real.inputs, batch_size * size, [seed, step])
            before = dict(zip(real.variables, real.state()))
            values = _run(real, batch)
            _compare_ranks(result, step, values)
            if reference:
                _compare(result, values, *reference.step(batch, before))
    result.failures += [
        f"{kind} '{name}' is off by {error:.3g} times what rounding explains" if np.isfinite(error) else
        f"{kind} '{name}' has values that are not those of one process"
        for (kind, name), (_, error) in result.errors.items() if not error <= 1]
    result.failures += [f"ranks have different bits of {kind} '{name}'" for kind, name in result.differing]
    return result


class _Reference:
    """The original graph in this process."""

    def __init__(self, original, what, epsilon, seed):
        # Each in a runner of its own, so that seeded random ops are where they are in the rewritten graph.
        self._runners = [running.runner(original, **what) for _ in range(1 + _RERUNS)]
        self._epsilon = epsilon
        self._rng = np.random.default_rng([seed, 1])

    def step(self, batch, state):
        """Runs a step.

        Args:
            batch: The inputs, arrays by name.
            state: The variables before the step, arrays by name.

        Returns:
            (values, bounds), both by (kind, name): the one-process value of each variable and output after the step,
            and how far floats may be from that.
        """
        exact, *others = [self._run(runner, batch, state, is_exact=not i) for i, runner in enumerate(self._runners)]
        bounds = {}
        for key, value in exact.items():
            if _is_float(value.dtype):
                spread = max(_largest(_wide(other[key]) - _wide(value)) if other[key].shape == value.shape else 0
                             for other in others)
                bounds[key] = _FACTOR * (spread + self._epsilon * _largest(_wide(value)))
        return exact, bounds

    def _run(self, runner, batch, state, is_exact):
        change = (lambda value: value) if is_exact else self._changed
        runner.set_state([change(state[name]) for name in runner.variables])
        return _run(runner, {name: change(value) for name, value in batch.items()})

    def _changed(self, value):
        """Returns an array of which each element is a last place larger or smaller; only of floats."""
        if not _is_float(value.dtype):
            return value
        signs = self._rng.choice([-1, 1], value.shape)
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(_wide(value) * (1 + self._epsilon * signs), value.dtype)


def _run(runner, batch):
    """Runs a step; returns what there is afterwards, by (kind, name)."""
    outputs = runner.run(batch)
    return {**{("variable", name): value for name, value in zip(runner.variables, runner.state())},
            **{("output", name): value for name, value in outputs.items()}}


def _compare(result, values, expected, bounds):
    """Notes how far values are from those of one process."""
    for key, wanted in expected.items():
        value = values.get(key)
        if value is None or value.shape != wanted.shape or value.dtype != wanted.dtype:
            error = np.inf
        elif key in bounds:
            error = _error(value, wanted, bounds[key])
        else:
            error = 0.0 if np.array_equal(value, wanted) else np.inf
        number, largest = result.errors.get(key, (0, 0.0))
        compared = int(np.isfinite(_wide(wanted)).sum()) if key in bounds else wanted.size
        result.errors[key] = number + compared, max(largest, error)


def _error(value, wanted, bound):
    """Returns the largest error in parts of its bound; infinite where only one of both is finite."""
    value, wanted = _wide(value), _wide(wanted)
    if not np.array_equal(np.isfinite(value), np.isfinite(wanted)):
        return np.inf
    difference = _largest(value - wanted)
    return difference / bound if bound else (np.inf if difference else 0.0)


def _compare_ranks(result, step, values):
    """Notes what ranks do not have with the same bits."""
    communicator, keys = runtime.communicator(), sorted(values)
    if communicator is None or not keys:
        return
    digests = np.frombuffer(b"".join(_digest(values[key]) for key in keys), np.uint8).reshape(1, len(keys), -1)
    rows, = communicator.submit_factors(f"verify/{step}", [digests.reshape(1, -1)])()
    rows = rows.reshape(-1, *digests.shape[1:])
    differing = {key for i, key in enumerate(keys) if np.any(rows[:, i] != rows[0, i])}
    result.differing = sorted({*result.differing, *differing})


def _digest(value):
    data = repr(value.tolist()).encode() if value.dtype == object else np.ascontiguousarray(value).tobytes()
    return hashlib.sha256(f"{value.dtype} {value.shape} ".encode() + data).digest()


def _is_float(dtype):
    return dtype != object and (tf.as_dtype(dtype) in _FLOATS or tf.as_dtype(dtype) in _COMPLEX)


def _wide(value):
    return np.asarray(value, np.complex128 if np.iscomplexobj(value) else np.float64)


def _largest(difference):
    """Returns the largest magnitude among what is finite."""
    return float(np.max(np.abs(difference), where=np.isfinite(difference), initial=0))


def _epsilon(graph, targets):
    """Returns the last place of 1 in the narrowest type of floats that a step computes with.

    That of the rewritten graph: it may round what ranks exchange.
    """
    found = set()
    for node in _nodes_of_step(graph, targets):
        for value in node.attr.values():
            found.update((value.type, *value.list.type))
    found.update(real.as_datatype_enum for dtype, real in _COMPLEX.items() if dtype.as_datatype_enum in found)
    narrowest = next((dtype for dtype in _FLOATS if dtype.as_datatype_enum in found), _FLOATS[-1])
    return float(ml_dtypes.finfo(narrowest.as_numpy_dtype).eps)


def _nodes_of_step(graph, targets):
    """Returns the nodes that some tensors need, and those of the functions that these call."""
    main = {node.name: node for node in graph.graph_def.node}
    functions = {function.signature.name: function.node_def for function in graph.graph_def.library.function}
    queue, found = [graph_lib.node_of(target) for target in targets], {}
    for name in queue:
        if name not in main:
            raise PoseidonError(f"'{graph.path}' has no node '{name}'; name one of its nodes with --train_op.")
    while queue:
        name = queue.pop()
        if name in main and name not in found:
            found[name] = main[name]
            queue += map(graph_lib.node_of, main[name].input)
    nodes = list(found.values())
    for node in nodes:  # which grows
        for name in functions_lib.called(node):
            nodes += functions.pop(name, ())
    return nodes


def _set_seeds(graph_def):
    """Gives random ops a seed that have none, so that every process draws the same numbers."""
    for nodes in (graph_def.node, *(function.node_def for function in graph_def.library.function)):
        for node in nodes:
            if node.op in sources.UNSEEDED and not node.attr["seed"].i and not node.attr["seed2"].i:
                node.attr["seed"].i, node.attr["seed2"].i = _SEEDS


def _checked(inputs, specs):
    """Returns the arrays of a batch in the types that a step takes."""
    if set(inputs) != set(specs):
        raise PoseidonError(f"The arrays are {', '.join(sorted(inputs)) or 'none'}, but the step takes "
                            f"{', '.join(sorted(specs)) or 'none'}; name them alike.")
    return {name: np.asarray(value, specs[name][0].as_numpy_dtype) for name, value in inputs.items()}


@contextlib.contextmanager
def _unoptimised():
    """While TensorFlow runs graphs as they are: otherwise both would be rounded in other places."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options(
            {"disable_meta_optimizer": before.get("disable_meta_optimizer", False)})


def _bytes(graph_def):
    return graph_def.SerializeToString(deterministic=True)
