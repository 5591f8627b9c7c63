"""Compares a rewritten graph on all ranks of the job with its original in one process.

The rewritten graph runs on all ranks. For each of its steps, rank 0 gives the original the same variables, and runs
it on the same global batch (`reference.py`). `rounding.py` bounds the difference of floats from those of one process;
`verification.py` measures it, and compares the bits of all ranks.

Tests: tests/saved/test_verification.py, tests/saved/test_saved_commands.py.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import os
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from tf_poseidon.base import rounding
from tf_poseidon.errors import ConfigurationError
from tf_poseidon.graph_passes.partition.rules import sources
from tf_poseidon.graph_passes.saved import strip
from tf_poseidon.saved_graphs import formats
from tf_poseidon.saved_graphs import load_ops
from tf_poseidon.saved_graphs import reference
from tf_poseidon.saved_graphs import running
from tf_poseidon.saved_graphs import verification
from tf_poseidon.saved_graphs.verification import Verification

# The seeds of random ops that have none.
_SEEDS = (87654321, 1)
# The job of a process that has no cluster, as devices name it.
_OWN_JOB = "localhost"


def verify(source: str | os.PathLike[str], target: str | os.PathLike[str], *, signature: str | None = None,
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
    what: dict[str, Any] = dict(signature=signature, train_op=train_op, initializer=initializer)
    real = running.runner(rewritten, **what)
    one_process = reference.Reference(original, what, epsilon, seed) if rank == 0 else None
    arrays = None if inputs is None else _checked(inputs, real)
    if one_process:
        result.failures += one_process.differs_at_first(dict(zip(real.variables, real.state())))
    for step in range(steps):
        batch = arrays or running.random_inputs(real.inputs, batch_size * size, [seed, step])
        state_before = dict(zip(real.variables, real.state()))
        values = reference.run_step(real, batch)
        verification.between_ranks(result, step, values)
        if one_process:
            verification.with_one_process(result, values, *one_process.step(batch, state_before))
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
    devices = set()
    for nodes in (graph_def.node, *(function.node_def for function in graph_def.library.function)):
        for node in nodes:
            try:
                device = tf.DeviceSpec.from_string(node.device)
            except ValueError:
                continue  # TensorFlow says what is wrong with it
            if device.job not in (None, _OWN_JOB) or device.task or device.replica:
                devices.add(device.replace(device_type=None, device_index=None).to_string())
                node.device = device.replace(job=None, replica=None, task=None).to_string()
    return devices


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
