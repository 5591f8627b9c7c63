"""Large values of which each rank holds a shard go into a file of weights some rows at a time, and are never whole.

Tests: tests/training/test_saving.py, tests/unit/test_shard_service.py.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tf_poseidon.compat import keras as keras_compat
from tf_poseidon.one_process.sharding.sharded_variables import ShardedVariable

_AT_A_TIME = 64 << 20  # bytes
_DTYPES = ("float16", "float32", "float64")  # which HDF5 has, too


def set_value(original: Callable[..., None], store: Any, key: str, value: Any) -> None:
    """Writes a value to a file of weights."""
    variable = _large(value)
    parts = None if variable is None else variable.parts(_AT_A_TIME)
    if variable is None or parts is None:
        original(store, key, value)
        return
    original(store, key, np.empty(0, np.float32))  # Keras makes the group
    del store[key]
    dataset = keras_compat.group(store).create_dataset(key, variable.shape, variable.dtype.as_numpy_dtype)
    row = 0
    for part in parts:
        dataset[row:row + len(part)] = part
        row += len(part)


def save_optimizer(original: Callable[..., None], optimizer: Any, store: Any) -> None:
    """Gives a file of weights an optimizer's variables; large ones themselves, not their values."""
    large = [_large(variable) is not None for variable in optimizer.variables]
    if not any(large) or type(store).__name__ != "H5IOStore":
        original(optimizer, store)
        return
    for i, variable in enumerate(optimizer.variables):
        store[str(i)] = variable if large[i] else variable.numpy()


def _large(value: Any) -> ShardedVariable | None:
    """Returns the variable of a value that is large, and held in shards; None if it is not."""
    variable = keras_compat.value(value) if isinstance(value, keras.Variable) else None
    if not isinstance(variable, ShardedVariable) or variable.dtype.name not in _DTYPES:
        return None
    is_large = variable.shape.num_elements() * variable.dtype.size > _AT_A_TIME
    return variable if is_large and variable.shape.rank else None
