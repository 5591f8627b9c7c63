"""The arguments of a call of a one-process function: which are tensors, and which of these have rows.

Tests: tests/training/test_distribution.py.
"""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import inspect
from typing import Any

import numpy as np
import tensorflow as tf

from tf_poseidon import ops
from tf_poseidon.data import datasets
from tf_poseidon.errors import GraphError
from tf_poseidon.ops import sites

_ROWS, _SAME = "rows", "same"
# What a caller declares about a tensor: _ROWS, _SAME, or the dimension of its rows.
Mark = str | int


class Call:
    """The arguments of one call: tensors, and constants.

    Attributes:
        name: The function's name.
        tensors: The tensors, flat. If ranks were given their rows alone, the last one says which, as `OwnRows.part`.
        has_own_rows: Whether ranks were given their rows alone.
        names: The tensors' names in messages.
        dimensions: The dimension of each tensor's rows, None for a tensor without rows.
        key: Everything that a trace depends on.
    """

    def __init__(self, function: Callable[..., Any], inputs: Mapping[str, Any], args: tuple[Any, ...],
                 kwargs: Mapping[str, Any], specs: Sequence[tf.TypeSpec] = ()) -> None:
        """Takes the arguments of a call.

        Args:
            function: The function.
            inputs: What the caller declares about arguments, by name.
            args, kwargs: The arguments.
            specs: What holds for its tensors in all calls of this kind, flat; by default, for a tensor its shape.
        """
        self.name = getattr(function, "__name__", "function")
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        unknown = set(inputs) - set(bound.arguments)
        if unknown:
            raise GraphError(f"inputs= names '{min(unknown)}', which is not an argument of '{self.name}'; its "
                             f"arguments are {', '.join(bound.arguments)}.")
        given = _own_rows((bound.args, bound.kwargs), inputs)
        self.has_own_rows = bool(given)
        self._usual_rows = given[0].usual_total if given else None
        self._structure = (datasets.values if given else joined)((bound.args, bound.kwargs))
        self._leaves = [_as_tensor(leaf) for leaf in tf.nest.flatten(self._structure, expand_composites=True)]
        args, kwargs = self._structure
        in_order = dict(zip(bound.arguments, args)) | dict(sorted(kwargs.items()))
        marks = _marks(inputs, in_order)
        self.tensors = [leaf for leaf in self._leaves if tf.is_tensor(leaf)]
        self._shapes = [spec.shape for spec in specs or self.tensors]
        self.names, self.dimensions = [], []
        for leaf, (name, mark) in zip(self._leaves, marks):
            if tf.is_tensor(leaf):
                self.names.append(name)
                self.dimensions.append(_dimension(leaf, name, mark))
        if given:
            self.tensors.append(given[0].part)
            self._shapes.append(given[0].part.shape)
            self.names.append("this rank's part")
            self.dimensions.append(None)
        self.key = tuple(
            (leaf.dtype, _without_rows(next(shapes), dimension := next(dimensions)), dimension)
            if tf.is_tensor(leaf) else ("constant", _hashable(leaf))
            for dimensions, shapes in [(iter(self.dimensions), iter(self._shapes))] for leaf in self._leaves) + (
                str(tf.nest.map_structure(lambda _: ".", self._structure)), self.has_own_rows)

    def specs(self) -> list[tf.TensorSpec]:
        """Returns the TensorSpecs of the tensors, with an unknown number of rows."""
        return [tf.TensorSpec(_without_rows(shape, dimension), tensor.dtype)
                for tensor, shape, dimension in zip(self.tensors, self._shapes, self.dimensions)]

    def common_tensors(self) -> list[tf.Tensor]:
        """Returns the tensors that all ranks have, which are all of them unless ranks were given their rows alone."""
        if not self.has_own_rows:
            return self.tensors
        *values, _ = self.tensors  # the part
        return [tensor for tensor, dimension in zip(values, self.dimensions) if dimension is None]

    def rows(self) -> int | None:
        """Returns the number of rows of a global batch, or of most of them; None if it is unknown."""
        if self._usual_rows is not None:
            return self._usual_rows if self._usual_rows > 0 else None
        return next((shape[dimension] for shape, dimension in zip(self._shapes, self.dimensions)
                     if dimension is not None and shape.rank is not None), None)

    def arguments(self, tensors: Iterable[tf.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns (args, kwargs) with other tensors in place of the call's."""
        rest = iter(tensors)
        leaves = [next(rest) if tf.is_tensor(leaf) else leaf for leaf in self._leaves]
        return tf.nest.pack_sequence_as(self._structure, leaves, expand_composites=True)


def _marks(inputs: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[tuple[str, Mark | None]]:
    """Returns (name, mark) per tensor or constant of the arguments; the mark is None if none was given."""
    marks: list[tuple[str, Mark | None]] = []
    for name, value in arguments.items():
        leaves, mark = tf.nest.flatten(value), inputs.get(name)
        if mark is None or isinstance(mark, (str, int)):
            named = [(name, mark)] * len(leaves)
        else:
            try:
                tf.nest.assert_same_structure(mark, value, check_types=False)
            except (TypeError, ValueError) as error:
                raise GraphError(f"inputs= has a different structure for '{name}' than the argument itself: "
                                 f"{str(error).splitlines()[0]}; give 'rows', 'same' or a structure like the "
                                 "argument's.") from error
            named = [(f"{name}[{i}]", leaf_mark) for i, leaf_mark in enumerate(tf.nest.flatten(mark))]
        for leaf, pair in zip(leaves, named):
            marks += [pair] if not isinstance(leaf, _COMPOSITES) else _marks_of_parts(leaf, *pair)
    return marks


_COMPOSITES = (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)


def _marks_of_parts(leaf: Any, name: str, mark: Mark | None) -> list[tuple[str, Mark]]:
    """Returns (name, mark) for the parts of a composite tensor: all whole, since they are cut differently."""
    if mark not in (None, _SAME):
        raise GraphError(f"inputs= says that '{name}', a {type(leaf).__name__}, has rows; only dense tensors are "
                         "partitioned: give 'same', so that every rank computes it whole, or make it dense.")
    return [(name, _SAME)] * len(tf.nest.flatten(leaf, expand_composites=True))


def _own_rows(structure: Any, inputs: Mapping[str, Any]) -> list[datasets.OwnRows]:
    """Returns the inputs of which a rank has its rows alone; none if others have rows, or callers mark inputs."""
    leaves = tf.nest.flatten(structure)
    own = [leaf for leaf in leaves if isinstance(leaf, datasets.OwnRows)]
    others = [tf.TensorShape(leaf.shape) for leaf in leaves if not isinstance(leaf, datasets.OwnRows)
              and hasattr(leaf, "shape")]
    are_alone = not inputs and all(shape.rank == 0 for shape in others)
    return own if are_alone and all(isinstance(leaf.value, tf.Tensor) for leaf in own) else []


def whole(tensors: Sequence[tf.Tensor], dimensions: Sequence[int | None]) -> list[tf.Tensor]:
    """Returns the tensors of a call that has own rows with the rows of all ranks, and the part of all of them.

    Args:
        tensors: The tensors of the `Call`.
        dimensions: Its `dimensions`.
    """
    *values, part = tensors
    rows = [value if dimension is None else ops.all_gather(value, sites.unique_site("distribute/inputs"), part[2] > 0)
            for value, dimension in zip(values, dimensions[:-1], strict=True)]
    return [*rows, tf.stack([part[0], tf.zeros_like(part[0]), part[0]])]


def joined(structure: Any) -> Any:
    """Returns a structure with the batches that the strategy has split joined to global ones again."""
    def join(leaf: Any) -> Any:
        if not isinstance(leaf, datasets.OwnRows):
            return leaf
        return ops.all_gather(leaf.value, sites.unique_site("distribute/inputs"), leaf.count > 0)

    leaves = []
    for leaf in tf.nest.flatten(structure):  # in order, since exchanges of eager code share one name
        leaves.append(join(leaf))
    return tf.nest.pack_sequence_as(structure, leaves)


def without_missing(batch: Any) -> Any:
    """Returns a batch of Keras, or what holds for all, in which parts that may be missing are None."""
    optional = tf.experimental.Optional, tf.OptionalSpec
    return tf.nest.map_structure(lambda part: None if isinstance(part, optional) else part, batch)


def _dimension(tensor: tf.Tensor, name: str, mark: Mark | None) -> int | None:
    """Returns the dimension of a tensor's rows, None if it has none."""
    rank = tensor.shape.rank
    if mark is None:
        return 0 if rank else None
    if mark == _SAME:
        return None
    dimension = 0 if mark == _ROWS else mark
    if not isinstance(dimension, int):
        raise GraphError(f"inputs= says {mark!r} for '{name}'; give 'rows', 'same', or the number of a dimension.")
    if rank is None or not 0 <= dimension < rank:
        raise GraphError(f"'{name}' has {rank} dimensions, and inputs= says that its rows are in dimension "
                         f"{dimension}; give 'same' for tensors without rows.")
    return dimension


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, (np.ndarray, np.generic)):
        return tf.convert_to_tensor(leaf)
    return leaf


def _without_rows(shape: tf.TensorShape, dimension: int | None) -> tf.TensorShape:
    """Returns a shape with an unknown number of rows."""
    if dimension is None or shape.rank is None:
        return shape
    return tf.TensorShape([None if d == dimension else size for d, size in enumerate(shape)])


def _hashable(leaf: Any) -> Hashable:
    try:
        hash(leaf)
        return leaf
    except TypeError:
        return id(leaf)
