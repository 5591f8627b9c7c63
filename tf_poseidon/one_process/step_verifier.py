"""Verify mode: compares steps that ranks run together with the same steps in one process.

Rank 0 runs the function as it was traced, on the same global batch and from the same variables. It runs what training
runs, optimized by TensorFlow in the same way, so it also finds what optimizers make of a partitioned graph. `rounding`
measures by how much floats may differ.

Tests: tests/training/test_verify.py.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import logging
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from tf_poseidon.base import rounding
from tf_poseidon.compat import tensorflow as tf_compat
from tf_poseidon.errors import JobError
from tf_poseidon.graph_passes.partition.propagate import own_values
from tf_poseidon.graph_passes.partition.propagate import propagation
from tf_poseidon.job.communicator import Communicator
from tf_poseidon.ops import sites

_log = logging.getLogger("tf_poseidon")

# Stateful ops that can run again, from the same variables, with the same result.
_REPEATABLE = ("VarHandleOp", "ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape",
               "VarIsInitializedOp", "Assert", "NoOp")
# How often the step runs in one process with other last places, and how often before it is said to be wrong: what
# decides something, such as an argmax, may change in one of many runs.
_RERUNS, _MORE = 2, 8
_OPAQUE = (tf.resource, tf.variant, tf.string)


def obstacle(graph_def: graph_pb2.GraphDef, held: Sequence[tf.Variable], shards: Sequence[tf.Variable]) -> str:
    """Returns why a step cannot be compared with one process, a clause; "" if it can.

    Args:
        graph_def: The step of one process, a flat GraphDef.
        held: Its variables that hold summands.
        shards: Those of which each rank holds its shard.
    """
    if shards:
        return f"each rank holds a shard of '{shards[0].name.partition(':')[0]}'"
    if held:
        return f"'{held[0].name.partition(':')[0]}' holds this rank's summands"
    for node in graph_def.node:
        if node.op == own_values.BEGINS:
            return "in it, as in batch normalisation, ranks compute from their own rows alone"
        if node.op.startswith(propagation.UPDATES) and tf.string.as_datatype_enum in (
                node.attr["dtype"].type, node.attr["T"].type):
            return "it updates a variable of strings, which would not be restored"
        op = tf_compat.op_def(node.op)
        is_repeatable = op is not None and not op.is_stateful or node.op in _REPEATABLE or (
            node.op.startswith(propagation.UPDATES))
        if not is_repeatable or node.op.startswith("Horovod"):  # whose ops are not stateful
            return f"it has a {node.op}, which would not do the same again"
    return ""


class StepVerifier:
    """Compares a partitioned function with the function of one process, at intervals."""

    def __init__(self, function: tf.types.experimental.ConcreteFunction, name: str, variables: Iterable[tf.Variable],
                 graph_def: graph_pb2.GraphDef, every: int, communicator: Communicator) -> None:
        """Makes a verifier.

        Args:
            function: The function of one process.
            name: Its name in messages.
            variables: The variables that it uses.
            graph_def: Its flat GraphDef.
            every: Runs from one comparison to the next.
            communicator: This rank's communicator.
        """
        self._function = function
        self._name = name
        self._variables: dict[str, tf.Variable] = {}  # by path, to which others of the same path append a number
        for number, variable in enumerate(variables):
            path = sites.variable_path(variable)
            if variable.dtype not in _OPAQUE:
                self._variables[f"{path} ({number})" if path in self._variables else path] = variable
        self._epsilon = rounding.epsilon(graph_def.node)
        self._every = every
        self._communicator = communicator
        self._runs = 0
        self._has_failed = False  # to run as one process
        self._rng = np.random.default_rng(0)

    def run(self, partitioned: Callable[[Sequence[tf.Tensor]], Any], tensors: Sequence[tf.Tensor],
            whole: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]] | None = None) -> Any:
        """Runs the partitioned function, and compares the run if it is due.

        Args:
            partitioned: The function.
            tensors: Its inputs.
            whole: Gathers them from all ranks; None if every rank has them.

        Raises:
            JobError: On rank 0, if it has computed other values than one process; the other ranks' job ends, too.
        """
        self._runs += 1
        if self._runs % self._every:
            return partitioned(tensors)
        of_one_process = tensors if whole is None else whole(tensors)
        if self._has_failed or self._communicator.rank:
            return partitioned(tensors)
        state_before = self._state()
        results = partitioned(tensors)
        after = self._state()
        try:
            wrong = self._compare(_values(results, after), of_one_process, state_before)
        except tf.errors.OpError as error:  # of one process alone: out of memory, or an assertion about last places
            _log.warning("verify no longer compares '%s' with one process, where it fails with %s.", self._name,
                         type(error).__name__)
            self._has_failed = True
            wrong = ""
        finally:
            self._restore(after)
        if wrong:
            reason = (f"verify: '{self._name}' has computed other values than one process: {wrong}. Unless rounding "
                      "decides something there, such as an argmax, this is a mistake of tf_poseidon: please report it; "
                      "meanwhile, run the program with one process.")
            self._communicator.abort(reason)
            raise JobError(reason)
        return results

    def _compare(self, values: dict[rounding.Key, np.ndarray], tensors: Sequence[tf.Tensor],
                 state_before: dict[str, np.ndarray]) -> str:
        """Returns what differs most from one process, a clause; "" if rounding may explain all differences."""
        exact = self._of_one_process(tensors, state_before, is_exact=True)
        others: list[dict[rounding.Key, np.ndarray]] = []
        wrong = ""
        for more in (_RERUNS, _MORE):
            others += [self._of_one_process(tensors, state_before, is_exact=False) for _ in range(more)]
            decided = {key: value for key, value in exact.items() if rounding.is_float(value.dtype) or all(
                np.array_equal(value, other[key]) for other in others)}
            wrong = rounding.worst(values, decided, rounding.measured(exact, others, self._epsilon))
            if not wrong:
                break
        return wrong

    def _of_one_process(self, tensors: Sequence[tf.Tensor], state_before: dict[str, np.ndarray],
                        is_exact: bool) -> dict[rounding.Key, np.ndarray]:
        """Returns the values of one process, with all numbers in their last place changed unless `is_exact`."""
        def change(value: np.ndarray) -> np.ndarray:
            return value if is_exact else rounding.changed(value, self._epsilon, self._rng)

        self._restore({path: change(value) for path, value in state_before.items()})
        given = [tensor if tensor.dtype in _OPAQUE else tf.constant(change(tensor.numpy()), tensor.dtype)
                 for tensor in tensors]
        return _values(self._function(*given), self._state())

    def _state(self) -> dict[str, np.ndarray]:
        return {path: np.array(variable.numpy()) for path, variable in self._variables.items()}

    def _restore(self, values: dict[str, np.ndarray]) -> None:
        for path, value in values.items():
            self._variables[path].assign(value)


def _values(results: Any, state: dict[str, np.ndarray]) -> dict[rounding.Key, np.ndarray]:
    tensors = [leaf for leaf in tf.nest.flatten(results, expand_composites=True) if tf.is_tensor(leaf)]
    return {**{("output", str(i)): np.asarray(tensor.numpy()) for i, tensor in enumerate(tensors)
               if tensor.dtype not in _OPAQUE},
            **{("variable", path): value for path, value in state.items()}}
