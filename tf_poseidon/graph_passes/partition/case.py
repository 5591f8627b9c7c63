"""The argument of a rule, `Case`, and its result, `Outcome`.

Tests: tests/graphs/test_partition.py, tests/graphs/test_partition_families.py.
"""

import collections.abc
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import numpy as np
from tensorflow.core.framework import attr_value_pb2
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes.partition.node_writer import NodeWriter
from tf_poseidon.graph_passes.partition.sizes import row_size
from tf_poseidon.graph_passes.partition.sizes.graph_sizes import Sizes
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import State
from tf_poseidon.graph_passes.partition.states import SUM
from tf_poseidon.graph_passes.partition.states import WHOLE

_INEXACT = (types_pb2.DT_HALF, types_pb2.DT_BFLOAT16, types_pb2.DT_FLOAT, types_pb2.DT_DOUBLE,
            types_pb2.DT_COMPLEX64, types_pb2.DT_COMPLEX128)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an op runs on each rank.

    Attributes:
        takes: The state in which it takes each input; None takes it in whichever state it has.
        gives: The state of each output.
        local: By number of an input that is a shape: the dimension whose size becomes that of this rank's rows.
        write: A function that writes the op's nodes (`NodeWriter`) if it does not stay the same op.
        checks: By number of an integer input: (index, value). The op fails when it runs if the input has another value
            at that index of its first dimension.
        wishes: By number of an input that is a list: the state in which it should hold its elements.
    """

    takes: tuple[State | None, ...]
    gives: tuple[State, ...]
    local: dict[int, int] = dataclasses.field(default_factory=dict)
    write: "collections.abc.Callable[[NodeWriter], list[str]] | None" = None
    checks: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    wishes: dict[int, State] = dataclasses.field(default_factory=dict)


class Case:
    """One op, and the states of its inputs.

    Attributes:
        node: The NodeDef.
        inputs: Its inputs, names of tensors.
        states: Their states.
        num_outputs: How many outputs it has.
        wish: For an op that makes a list: the state in which others need it; None if no op does.
        stored: For an op on a stack or TensorArray: the state of its elements; None if only whole values are put into
            it, as far as is known.
    """

    def __init__(self, node: node_def_pb2.NodeDef, inputs: Sequence[str], states: tuple[State, ...], num_outputs: int,
                 sizes: Sizes, wish: State | None = None, stored: State | None = None) -> None:
        self.node = node
        self.inputs = inputs
        self.states = states
        self.num_outputs = num_outputs
        self.wish = wish
        self.stored = stored
        self._sizes = sizes

    def attr(self, name: str) -> attr_value_pb2.AttrValue:
        """Returns an attribute as a protocol buffer, empty if the node has none of that name."""
        return self.node.attr[name] if name in self.node.attr else attr_value_pb2.AttrValue()

    def shape(self, i: int) -> row_size.Shape | None:
        """Returns what is known about an input's one-process shape, see `Sizes.shape`."""
        return self._sizes.shape(self.inputs[i])

    def sizes(self, i: int) -> row_size.Shape:
        """Returns the shape of an input whose rank is known."""
        shape = self.shape(i)
        assert shape is not None
        return shape

    def dimension(self, i: int) -> int:
        """Returns the dimension of an input's rows, which it must have."""
        state = self.states[i]
        assert isinstance(state, Rows)
        return state.dimension

    @property
    def is_waited_for(self) -> bool:
        """Whether the op is a control input of another."""
        return any(f"^{self.node.name}" in reader.input for reader in self._sizes.graph.consumers(self.node.name))

    @property
    def outputs(self) -> list[str]:
        """The names of the outputs."""
        return [f"{self.node.name}:{i}" if i else self.node.name for i in range(self.num_outputs)]

    def shape_of(self, tensor: str) -> row_size.Shape | None:
        """Returns what is known about the one-process shape of an input or output, given its name."""
        return self._sizes.shape(tensor)

    def out_shape(self, i: int = 0) -> row_size.Shape | None:
        """Returns what is known about an output's one-process shape."""
        return self._sizes.shape(f"{self.node.name}:{i}" if i else self.node.name)

    def rank(self, i: int) -> int | None:
        """Returns the number of dimensions of an input, None if it is unknown."""
        shape = self.shape(i)
        return None if shape is None else len(shape)

    def constant(self, i: int) -> np.ndarray | None:
        """Returns the value of an integer input if it does not depend on rows, as an array; else None."""
        return self._sizes.constant(self.inputs[i])

    def element(self, i: int, index: int) -> np.ndarray | None:
        """Returns an integer input at an index of its first dimension, see `Sizes.element`."""
        return self._sizes.element(self.inputs[i], index)

    def likely_element(self, i: int, index: int) -> np.ndarray | None:
        """Returns the same for the tried numbers of rows alone, see `Sizes.likely_element`."""
        return self._sizes.likely_element(self.inputs[i], index)

    def size_at(self, i: int, *index: int) -> row_size.Size | None:
        """Returns an integer in an input, see `Sizes.size_at`."""
        return self._sizes.size_at(self.inputs[i], *index)

    def with_states(self, states: Sequence[State], wish: State | None, stored: State | None) -> "Case":
        """Returns the same case with other states."""
        return Case(self.node, self.inputs, tuple(states), self.num_outputs, self._sizes, wish, stored)

    def is_packed(self, i: int) -> bool:
        """Whether an input was packed from single values: by a program rather than by backpropagation."""
        return self._sizes.graph.node(self.inputs[i]).op in ("Pack", "ConcatV2", "Const")

    def is_one(self, i: int, dimension: int) -> bool:
        """Whether a dimension of an input has one element, for any number of rows."""
        return self._sizes.is_one(self.inputs[i], dimension)

    def accumulates(self, i: int) -> bool:
        """Whether an input comes from the previous round of a loop."""
        graph, node = self._sizes.graph, self._sizes.graph.node(self.inputs[i])
        while node.op in ("Switch", "Identity"):
            node = graph.node(node.input[0])
        return node.op == "Merge" and any(graph.node(tensor).op == "NextIteration" for tensor in graph.inputs(node))

    def is_zero(self, i: int) -> bool:
        """Whether an input is a constant of zeros, with which Python's `sum` begins."""
        value = self._sizes.graph.constant(self.inputs[i])
        return value is not None and not value.any()

    def all(self, takes: Mapping[int, State], gives: State, **options: Any) -> Outcome:
        """Returns an Outcome in which all outputs have one state, and inputs that `takes` does not name are whole.

        Args:
            takes: The states of some inputs, by number.
            gives: The state of all outputs.
            **options: Same as in `Outcome`.
        """
        return Outcome(tuple(takes.get(i, WHOLE) for i in range(len(self.inputs))),
                       (gives,) * self.num_outputs, **options)

    def linear_in(self, *numbers: int) -> Outcome | None:
        """Returns a summand if one input is a summand, in which the op is linear, and all others are whole; else None.

        Args:
            *numbers: The inputs in which the op is linear, each if the others are constant.
        """
        partials = [i for i, state in enumerate(self.states) if state != WHOLE]
        if len(partials) != 1 or partials[0] not in numbers or self.states[partials[0]] != SUM:
            return None
        return self.all({partials[0]: SUM}, SUM)

    def rows_inputs(self) -> list[int]:
        """Returns the numbers of the inputs that have rows."""
        return [i for i, state in enumerate(self.states) if isinstance(state, Rows)]

    def elements(self, shape: row_size.Shape | None) -> float:
        """Returns the number of elements of a shape with a large number of rows; infinity if unknown."""
        if not row_size.is_known(shape):
            return math.inf
        return math.prod(size.values[0] for size in shape)


# The values of the tables; a rule returns None if the op needs whole inputs.
Rule = collections.abc.Callable[[Case], Outcome | None]


def is_inexact(dtype: int) -> bool:
    """Whether a `types_pb2.DataType` has real or complex numbers, whose quotients are not rounded to integers."""
    return dtype in _INEXACT


def same_size(a: row_size.Size | None, b: row_size.Size | None) -> bool:
    """Whether two sizes are known and equal."""
    return a is not None and a == b


def of_rows(size: row_size.Size | None) -> bool:
    """Whether a size is known to be a multiple of the number of rows."""
    return size is not None and size.of_rows
