"""Compares a rewritten graph on all ranks of the job with its original in one process.

The rewritten graph runs on all ranks. For each of its steps, rank 0 gives the original the same variables, and runs
it on the same global batch (`reference.py`). `rounding.py` bounds the difference of floats from those of one process;
`comparing.py` measures it, and compares the bits of all ranks.

Tests: tests/saved/test_verification.py, tests/saved/test_saved_commands.py.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import os

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from tf_poseidon.base import rounding
from tf_poseidon.base import tables
from tf_poseidon.errors import ConfigurationError
from tf_poseidon.graph_passes.partition.rules import sources
from tf_poseidon.graph_passes.saved import strip
from tf_poseidon.job import load_ops
from tf_poseidon.saved_graphs import comparing
from tf_poseidon.saved_graphs import formats
from tf_poseidon.saved_graphs import reference
from tf_poseidon.saved_graphs import running

# The seeds of random ops that have none.
_SEEDS = (87654321, 1)
# The job of a process that has no cluster, as devices name it.
_OWN_JOB = "localhost"


@dataclasses.dataclass
class Verification:
    """The result of a verification. `print(verification)` shows it.

    Attributes:
        size: Number of ranks.
        steps: Number of steps.
        errors: By ("variable" or "output", its name): (number of compared values, the largest error as a fraction of
            its bound). Floats are compared where those of one process are finite; for other types, any error is
            infinite.
        differing: Variables and outputs whose bits differ between ranks, sorted.
        elsewhere: Devices of other processes that nodes name, sorted; these nodes ran in each process all the same.
        failures: What is wrong, as sentences; empty if nothing is.
    """

    size: int
    steps: int
    errors: dict[tuple[str, str], tuple[int, float]] = dataclasses.field(default_factory=dict)
    differing: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    elsewhere: list[str] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)

    def conclusions(self) -> list[str]:
        """Returns what errors and differences say is wrong, as sentences."""
        return [
            *(f"{kind} '{name}' is off by {error:.3g} times the rounding bound" if np.isfinite(error) else
              f"{kind} '{name}' has values that are not those of one process"
              for (kind, name), (_, error) in self.errors.items() if not error <= 1),
            *(f"ranks have different bits of {kind} '{name}'" for kind, name in self.differing)]

    def __str__(self) -> str:
        rows = [("", "", "values", "largest error / bound"),
                *((kind, name, f"{number:,}", f"{error:.3g}") for (kind, name), (number, error) in self.errors.items())]
        ranks = f"{self.size} ranks" if self.size > 1 else "one rank"
        lines = []
        if self.errors:
            lines = [f"{self.steps} steps on {ranks}, against the original in one process:",
                     *tables.aligned(rows, left=(0, 1, 3), indent="  ")]
            if self.size > 1:
                lines.append("on all ranks: " + ("the same bits" if not self.differing else
                                                 "different bits of " + ", ".join(name for _, name in self.differing)))
            else:
                lines.append("nothing was exchanged: start it with mpiexec -n RANKS to verify that, too")
        if self.elsewhere:
            lines.append(f"nodes that name {', '.join(self.elsewhere)} have run in each process all the same; to "
                         "train, import the graph with clear_devices=True")
        return "\n".join([*lines, *(f"WRONG: {failure}" for failure in self.failures),
                          "wrong" if self.failures else "all right"])


def verify(source: str | os.PathLike[str], target: str | os.PathLike[str], signature: str | None = None,
           train_op: Sequence[str] = (), initializer: Sequence[str] = (), batch_size: int = 4, steps: int = 2,
           inputs: Mapping[str, npt.ArrayLike] | None = None, seed: int = 0, engine: str | None = None) -> Verification:
    """Runs a rewritten graph, and the original in one process, and compares them. All ranks must call it.

    Args:
        source: Path of the original graph.
        target: Path of the rewritten graph.
        signature, train_op: The step, as in `rewriting.rewrite`; a single signature.
        initializer: Names of ops that initialise variables, if there is no checkpoint.
        batch_size: Rows per rank, if the graph leaves their number open.
        steps: Number of steps.
        inputs: The arrays of the global batch of every step, by name; None for random numbers.
        seed: Seed of the random numbers.
        engine: Same as in `load_ops`.

    Returns:
        A `Verification`. Only rank 0, which computes the reference, has errors; all ranks have differences between
        ranks.

    Raises:
        PoseidonError: If the graphs cannot be compared.
    """
    rank, size = load_ops.load_ops(engine)
    if signature is not None and not isinstance(signature, str):
        raise ConfigurationError(f"signature={signature!r}, expected the name of one signature; verify them one by "
                                 "one.")
    for name, value in (("batch_size", batch_size), ("steps", steps)):
        if not isinstance(value, int) or value < 1:
            raise ConfigurationError(f"{name}={value!r}, expected at least 1.")
    original, rewritten = formats.read(source), formats.read(target)
    if not strip.is_rewritten(rewritten.graph_def):
        raise ConfigurationError(f"'{target}' was not rewritten, so there is nothing to verify; give the original "
                                 "first, and the rewritten graph second.")
    result = Verification(size, steps)
    if _bytes(strip.strip(rewritten.graph_def)) != _bytes(original.graph_def):
        result.failures.append(f"'{target}' was made from a different graph than '{source}'")
        return result
    epsilon = rounding.epsilon(running.nodes_of_step(rewritten, rewritten.targets(signature, train_op)))
    for graph in (original, rewritten):
        _set_seeds(graph.graph_def)
    result.elsewhere = sorted(_run_here(original.graph_def) | _run_here(rewritten.graph_def))
    what = dict(signature=signature, train_op=train_op, initializer=initializer)
    real = running.runner(rewritten, **what)
    one_process = reference.Reference(original, what, epsilon, seed) if rank == 0 else None
    arrays = None if inputs is None else _checked(inputs, real)
    if one_process:
        result.failures += one_process.differs_at_first(dict(zip(real.variables, real.state())))
    for step in range(steps):
        batch = arrays or running.random_inputs(real.inputs, batch_size * size, [seed, step])
        before = dict(zip(real.variables, real.state()))
        values = reference.run_step(real, batch)
        comparing.between_ranks(result, step, values)
        if one_process:
            comparing.with_one_process(result, values, *one_process.step(batch, before))
    result.failures += result.conclusions()
    return result


def _set_seeds(graph_def: graph_pb2.GraphDef) -> None:
    """Gives a seed to random ops that have none, so that every process draws the same numbers."""
    for nodes in (graph_def.node, *(function.node_def for function in graph_def.library.function)):
        for node in nodes:
            if node.op in sources.UNSEEDED and not node.attr["seed"].i and not node.attr["seed2"].i:
                node.attr["seed"].i, node.attr["seed2"].i = _SEEDS


def _run_here(graph_def: graph_pb2.GraphDef) -> set[str]:
    """Lets nodes that name devices of other processes run in this one; returns these devices.

    TensorFlow 1 does the same when it imports a MetaGraph with clear_devices=True.
    """
    found = set()
    for nodes in (graph_def.node, *(function.node_def for function in graph_def.library.function)):
        for node in nodes:
            try:
                device = tf.DeviceSpec.from_string(node.device)
            except ValueError:
                continue  # TensorFlow says what is wrong with it
            if device.job not in (None, _OWN_JOB) or device.task or device.replica:
                found.add(device.replace(device_type=None, device_index=None).to_string())
                node.device = device.replace(job=None, replica=None, task=None).to_string()
    return found


def _checked(inputs: Mapping[str, npt.ArrayLike], runner: running.Runner) -> dict[str, np.ndarray]:
    """Returns the arrays of a batch in the types that a step takes, without those that it does not need."""
    specs = {**runner.inputs, **runner.optional}
    if unknown := set(inputs) - set(specs) - runner.unused:
        raise ConfigurationError(f"The arrays are {', '.join(sorted(inputs))}, but the graph has no input "
                                 f"'{min(unknown)}', and the step takes {', '.join(sorted(specs)) or 'none'}; name "
                                 "them alike.")
    if missing := set(runner.inputs) - set(inputs):
        raise ConfigurationError(f"The arrays are {', '.join(sorted(inputs)) or 'none'}, but the step takes "
                                 f"{', '.join(sorted(runner.inputs))}; add {', '.join(sorted(missing))}.")
    given = {name: value for name, value in inputs.items() if name in specs}
    for name, value in given.items():
        if not specs[name][1].is_compatible_with(np.shape(value)):
            raise ConfigurationError(f"The array '{name}' has the shape {list(np.shape(value))}, but the step takes "
                                     f"{specs[name][1]}; give it a global batch of that shape.")
    return {name: np.asarray(value, specs[name][0].as_numpy_dtype) for name, value in given.items()}


def _bytes(graph_def: graph_pb2.GraphDef) -> bytes:
    return graph_def.SerializeToString(deterministic=True)
