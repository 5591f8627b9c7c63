"""Bounds on the difference of floats from those of one process: the effect of rounding.

Nothing is known about a step, so the effect is measured: in one process it runs twice more, with its numbers changed in
the last place. The bound of a value is a factor times the sum of its largest change and a last place of its largest
number.

Tests: tests/unit/test_rounding.py, tests/saved/test_saved_commands.py, tests/training/test_verify.py.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2

# ("variable" or "output", its name).
Key = tuple[str, str]

# The factor between the observed change and the bound.
_FACTOR = 32
# From the narrowest: bfloat16 has fewer bits than half.
_FLOATS = (tf.bfloat16, tf.half, tf.float32, tf.float64)
_COMPLEX = {tf.complex64: tf.float32, tf.complex128: tf.float64}


def changed(value: np.ndarray, epsilon: float, rng: np.random.Generator) -> np.ndarray:
    """Returns an array with each element a last place larger or smaller, if they are floats."""
    if not is_float(value.dtype):
        return value
    signs = rng.choice([-1, 1], value.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(_wide(value) * (1 + epsilon * signs), value.dtype)


def measured(exact: Mapping[Key, np.ndarray], others: Sequence[Mapping[Key, np.ndarray]],
             epsilon: float) -> dict[Key, float]:
    """Returns the bounds on the difference of floats from those of one process, by key; other types have none.

    Args:
        exact: The values of one process, arrays by key.
        others: The same values from runs with other last places.
        epsilon: The last place of 1.
    """
    bounds = {}
    for key, value in exact.items():
        if is_float(value.dtype):
            spread = max(_largest(_wide(other[key]) - _wide(value)) if other[key].shape == value.shape else 0
                         for other in others)
            bounds[key] = _FACTOR * (spread + epsilon * _largest(_wide(value)))
    return bounds


def error(value: np.ndarray, wanted: np.ndarray, bound: float) -> float:
    """Returns the largest error as a fraction of its bound; infinite if only one of both values is finite."""
    value, wanted = _wide(value), _wide(wanted)
    if not np.array_equal(np.isfinite(value), np.isfinite(wanted)):
        return np.inf
    difference = _largest(value - wanted)
    return difference / bound if bound else (np.inf if difference else 0.0)


def num_finite(value: np.ndarray) -> int:
    """Returns the number of finite elements, whose errors count."""
    return int(np.isfinite(_wide(value)).sum())


def worst(values: Mapping[Key, np.ndarray], exact: Mapping[Key, np.ndarray], allowed: Mapping[Key, float]) -> str:
    """Returns which value differs most from that of one process, a clause; "" if none differs by more than its bound.

    Args:
        values: The values, arrays by key.
        exact: Those of one process.
        allowed: The bounds on the difference of floats, from `measured`; other types must be equal.
    """
    errors = {key: _error(values[key], wanted, allowed.get(key)) for key, wanted in exact.items()}
    key = max(errors, key=lambda key: errors[key], default=None)
    if key is None or errors[key] <= 1:
        return ""
    kind, name = key
    how = f"is off by {errors[key]:.3g} times the rounding bound" if np.isfinite(errors[key]) else "is another"
    return f"{kind} '{name}' {how}"


def _error(value: np.ndarray, wanted: np.ndarray, bound: float | None) -> float:
    """Returns the largest error as a fraction of its bound; without a bound, infinite for another value."""
    if value.shape != wanted.shape or value.dtype != wanted.dtype:
        return np.inf
    if bound is None:
        return 0.0 if np.array_equal(value, wanted) else np.inf
    return error(value, wanted, bound)


def epsilon(nodes: Iterable[node_def_pb2.NodeDef]) -> float:
    """Returns the last place of 1 in the narrowest floating-point type of the nodes of a step.

    Give it a rewritten step, which may round the tensors that ranks exchange.
    """
    types: set[str] = set()
    for node in nodes:
        for value in node.attr.values():
            types.update((value.type, *value.list.type))
    types.update(real.as_datatype_enum for dtype, real in _COMPLEX.items() if dtype.as_datatype_enum in types)
    narrowest = next((dtype for dtype in _FLOATS if dtype.as_datatype_enum in types), _FLOATS[-1])
    return float(ml_dtypes.finfo(narrowest.as_numpy_dtype).eps)


def is_float(dtype: np.dtype) -> bool:
    """Whether values of a type have rounding errors."""
    return dtype.kind != "O" and (tf.as_dtype(dtype) in _FLOATS or tf.as_dtype(dtype) in _COMPLEX)


def _wide(value: np.ndarray) -> np.ndarray:
    return np.asarray(value, np.complex128 if np.iscomplexobj(value) else np.float64)


def _largest(difference: np.ndarray) -> float:
    """Returns the largest magnitude of the finite elements."""
    return float(np.max(np.abs(difference), where=np.isfinite(difference), initial=0))
