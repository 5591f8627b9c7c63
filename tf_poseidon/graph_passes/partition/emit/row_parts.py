"""Which rows are a rank's: PoseidonPart at each place, slices of these rows, and checks that inputs have as many.

Tests: tests/graphs/test_partition.py, tests/graphs/test_partition_golden.py.
"""

from collections.abc import Iterable
from collections.abc import Sequence

import numpy as np
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.errors import GraphError
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph.tensors import canonical
from tf_poseidon.graph_passes.partition import frames as frames_lib
from tf_poseidon.graph_passes.partition.case import Outcome
from tf_poseidon.graph_passes.partition.emit.written_graph import WrittenGraph
from tf_poseidon.graph_passes.partition.node_writer import HOST
from tf_poseidon.graph_passes.partition.node_writer import PREFIX
from tf_poseidon.graph_passes.partition.states import Rows
from tf_poseidon.graph_passes.partition.states import WHOLE

# The PoseidonPart of nodes that depend on no rows.
OF_NO_ROWS = f"{PREFIX}/ranks"
_INT64 = types_pb2.DT_INT64
# The outputs of PoseidonPart: (part, contributes, is first).
_Part = tuple[str, str, str]


class RowParts:
    """The nodes that say which rows a rank has."""

    def __init__(self, written: WrittenGraph) -> None:
        """Makes none yet; `written` is the graph in which they are written."""
        self._written = written
        self._sizes = written.sizes
        self._graph = written.original
        self._enters = {node.attr["frame_name"].s.decode(): node for node in written.propagated.ordered
                        if node.op in frames_lib.ENTERS}
        self._home = written.propagated.frames[next(iter(written.rows_nodes))]  # the loop that has the rows
        self._parts: dict[frames_lib.Place, _Part] = {}  # by place: the outputs of PoseidonPart there
        self._numbers: dict[tuple[str, int], list[str]] = {}  # of rows, by the part that has them and their type
        # By frame and two PoseidonRows: the check that they have as many rows.
        self._meetings: dict[tuple[frames_lib.Frame, str, str], str] = {}

    def write(self, rows_node: node_def_pb2.NodeDef, inputs: Sequence[str],
              given: str | None) -> tuple[frames_lib.Place, str]:
        """Writes the PoseidonPart of a PoseidonRows.

        Args:
            rows_node: The PoseidonRows.
            inputs: Its inputs: whole, or this rank's rows.
            given: Which rows these are, None if they are whole.

        Returns:
            (the place of its outputs, the name of the PoseidonPart).
        """
        place = frames_lib.Place(self._home, rows_node.name)
        writer = self._written.writer(f"{PREFIX}/{rows_node.name}", HOST)
        counts = []
        for i, (tensor, dimension, dtype) in enumerate(zip(
                inputs, rows_node.attr["dimensions"].list.i, rows_node.attr["T"].list.type)):
            shape = writer.add(f"shape{i}", "Shape", [tensor], T=dtype, out_type=_INT64)
            bounds = [writer.constant(f"{name}{i}", np.array([value]), tensor)
                      for name, value in (("begin", dimension), ("end", dimension + 1), ("stride", 1))]
            counts.append(writer.add(f"count{i}", "StridedSlice", [shape, *bounds], T=_INT64, Index=_INT64,
                                     begin_mask=0, end_mask=0, ellipsis_mask=0, new_axis_mask=0, shrink_axis_mask=1))
        controls = graph_lib.control_inputs(rows_node)
        parts = [] if given is None else [given]
        part = writer.add("part", "PoseidonPart", [*counts, *parts, *controls], N=len(counts), M=len(parts),
                          site=rows_node.name)
        writer.nodes[-1].attr["names"].CopyFrom(rows_node.attr["names"])
        self._parts[place] = part, f"{part}:1", f"{part}:2"
        return place, part

    def own_rows(self, tensor: str) -> str:
        """Returns the rows of a tensor that only this rank has: none, if it repeats a row of another."""
        name, dtype = canonical(tensor), self._written.dtype_of(tensor)
        place = self._written.places[graph_lib.node_of(tensor)]
        value, prefix = self._written.renamed.get(name, name), f"{PREFIX}/{name.replace(':', '_output')}/own"
        writer = self._written.writer(prefix, HOST)
        begin, all_rows, stride = (writer.constant(suffix, np.array([number], np.int64), value) for suffix, number in (
            ("begin", 0), ("all", np.iinfo(np.int64).max), ("stride", 1)))
        end = writer.add("end", "SelectV2", [self.part(place)[1], all_rows, begin], T=_INT64)
        with writer.placed(self._written.device_of(value)):
            return writer.add("", "StridedSlice", [value, begin, end, stride], T=dtype, Index=_INT64, begin_mask=0,
                              end_mask=0, ellipsis_mask=0, new_axis_mask=0, shrink_axis_mask=0)

    def rows_of(self, value: str, dimension: int, dtype: int, prefix: str, place: frames_lib.Place) -> str:
        """Slices this rank's rows."""
        writer = self._written.writer(prefix, HOST)
        shape = writer.add("shape", "Shape", [value], T=dtype, out_type=_INT64)
        bounds = writer.add("range", "PoseidonRowRange", [shape, self.part(place)[0]], Tshape=_INT64,
                            dimension=dimension)
        strides = writer.constant("strides", np.ones(dimension + 1, np.int64), shape)
        mask = (1 << dimension) - 1
        with writer.placed(self._written.device_of(value)):
            return writer.add("", "StridedSlice", [value, bounds, f"{bounds}:1", strides], T=dtype, Index=_INT64,
                              begin_mask=mask, end_mask=mask, ellipsis_mask=0, new_axis_mask=0,
                              shrink_axis_mask=0)

    def part(self, place: frames_lib.Place) -> _Part:
        """Returns the outputs of PoseidonPart at a place: (part, contributes, is first)."""
        if place not in self._parts:
            self._parts[place] = self._part_of_none() if place == frames_lib.Place(frames_lib.ROOT, None) else (
                self._entered_part(place))
        return self._parts[place]

    def numbers_of_rows(self, place: frames_lib.Place, dtype: int) -> list[str]:
        """Returns the number of rows in one process, and of this rank, as scalars of a type."""
        part = self.part(place)[0]
        if (part, dtype) not in self._numbers:
            writer = self._written.writer(f"{graph_lib.node_of(part)}/numbers{dtype}", HOST)
            numbers = writer.add("", "Unpack", [part], T=_INT64, num=3, axis=0)
            self._numbers[part, dtype] = [writer.add(name, "Cast", [number], SrcT=_INT64, DstT=dtype)
                                          for name, number in (("rows", numbers), ("own_rows", f"{numbers}:2"))]
        return self._numbers[part, dtype]

    def _part_of_none(self) -> _Part:
        """Writes a PoseidonPart that depends on no rows: tensors that are not cut only need to know the first rank."""
        writer = self._written.writer(OF_NO_ROWS, HOST)
        part = writer.add("", "PoseidonPart", [writer.constant("one", np.array(1, np.int64))], N=1, site=PREFIX)
        graph_lib.set_names(writer.nodes[-1].attr["names"], ["one"])
        return part, f"{part}:1", f"{part}:2"

    def _entered_part(self, place: frames_lib.Place) -> _Part:
        """Brings a PoseidonPart into a loop."""
        frame = place.frame
        if not frame.within(self._home) or frame.outer is None:
            raise GraphError(f"The inputs with rows ({', '.join(self._written.rows_nodes)}) are in a loop, and values "
                             "that are computed from them are needed outside of it.")
        outer = self.part(frames_lib.Place(frame.outer, place.rows_node))
        types = _INT64, types_pb2.DT_BOOL, types_pb2.DT_BOOL
        prefix = f"{PREFIX}/{frame.name}" + (f"/{place.rows_node}" if len(self._written.rows_nodes) > 1 else "")
        part, contributes, is_first = (
            self._entered(f"{prefix}/{name}", tensor, dtype, frame)
            for name, tensor, dtype in zip(("part", "contributes", "is_first"), outer, types))
        return part, contributes, is_first

    def _entered(self, name: str, tensor: str, dtype: int, frame: frames_lib.Frame) -> str:
        """Brings a tensor into a loop as an invariant."""
        iterations = self._enters[frame.name].attr["parallel_iterations"].i
        return self._written.writer(name, HOST).add("", "Enter", [tensor], T=dtype, frame_name=frame.name,
                                                    is_constant=True, parallel_iterations=iterations)

    def checks(self, inputs: Iterable[str], outcome: Outcome, place: frames_lib.Place) -> list[str]:
        """Writes checks that the inputs of different PoseidonRows that a node reads have the same number of rows.

        Returns:
            Control edges that wait for them.
        """
        rows_node = place.rows_node
        if len(self._written.rows_nodes) == 1 or rows_node is None or all(takes == WHOLE for takes in outcome.takes):
            return []
        others = {other for tensor in inputs if (other := self._written.places[graph_lib.node_of(tensor)].rows_node)
                  not in (None, rows_node) and self._has_rows(tensor)}
        return [f"^{self._same_rows(place.frame, rows_node, other)}" for other in sorted(others)]

    def _has_rows(self, tensor: str) -> bool:
        """Whether the size of a tensor depends on rows, or it is an integer that may be their number."""
        if isinstance(self._written.computed_state(tensor), Rows):
            return True
        return self._written.dtype_of(tensor) in (types_pb2.DT_INT32, _INT64) or any(
            size is not None and size.of_rows for size in self._sizes.shape(canonical(tensor)) or ())

    def _same_rows(self, frame: frames_lib.Frame, rows_node: str, other: str) -> str:
        """Returns the name of the check that the inputs of two PoseidonRows have the same number of rows."""
        first, second = sorted((rows_node, other))
        key = frame, first, second
        if key not in self._meetings:
            loop = f"/in/{frame.name}" if frame.name else ""
            writer = self._written.writer(f"{PREFIX}/rows_of/{rows_node}/and/{other}{loop}", HOST)
            parts = [self.part(frames_lib.Place(frame, rows_node_name))[0] for rows_node_name in (rows_node, other)]
            bounds = [writer.constant(name, np.array([bound], np.int32), parts[0])
                      for name, bound in (("begin", 0), ("end", 1))]
            strides = writer.constant("stride", np.ones(1, np.int32), parts[0])
            rows = [writer.add(f"rows{i}", "StridedSlice", [part, *bounds, strides], T=_INT64, Index=types_pb2.DT_INT32,
                               begin_mask=0, end_mask=0, ellipsis_mask=0, new_axis_mask=0, shrink_axis_mask=1)
                    for i, part in enumerate(parts)]
            equal = writer.add("equal", "Equal", rows, T=_INT64)
            text = writer.constant("text", (
                f"'{_input_of(rows_node)}' and '{_input_of(other)}' have different numbers of rows: give them the "
                "same, or name one of them as the same on all ranks with inputs=."), parts[0])
            writer.add("", "Assert", [equal, text, *rows], T=[types_pb2.DT_STRING, _INT64, _INT64], summarize=3)
            self._meetings[key] = writer.nodes[-1].name
        return self._meetings[key]


def _input_of(rows_node: str) -> str:
    """Returns the name of an input with rows in messages."""
    return rows_node.removeprefix(f"{PREFIX}/rows_of/")
