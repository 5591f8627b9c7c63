"""Gives all ranks rank 0's values of variables that exist already, where they differ.

Tests: tests/faults/test_failures.py, tests/training/test_clocks.py.
"""

from collections.abc import Iterable

import numpy as np
import tensorflow as tf

from tf_poseidon import ops
from tf_poseidon.job.communicator import Communicator


def share(variables: Iterable[tf.Variable], communicator: Communicator, name: str) -> None:
    """Gives all ranks rank 0's values of the variables that a function uses, where they differ.

    Args:
        variables: The variables; values that are no numbers stay.
        communicator: This rank's communicator.
        name: The function's name, the same on all ranks.
    """
    variables = [variable for variable in variables if variable.dtype not in (tf.resource, tf.variant, tf.string)]
    digests, site = ops.digests(variables).numpy(), f"distribute/{name}"
    differs = digests != communicator.broadcast(f"{site}/digests", digests)
    differs = communicator.sum(f"{site}/differs", differs.astype(np.int64))
    waits = [(variable, communicator.submit(f"{site}/variables/{i}", np.asarray(variable.numpy()), root=0))
             for i, variable in enumerate(variables) if differs[i]]
    for variable, wait in waits:
        value = wait()
        if communicator.rank != 0:
            variable.assign(value)
