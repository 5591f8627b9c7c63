"""Horovod's ops, which replace our markers and those of programs for Horovod.

Poseidon's markers become all-reduces. Slices that stay slices are gathered, and those with the same index are summed.

Other ranks identify an op of Horovod by the last component of its name, which is made from the name of the site.

Tests: tests/engines/test_horovod.py, tests/graphs/test_placement.py.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np
from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes.find import foreign
from tf_poseidon.graph_passes.graph import devices
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.write import collectives
from tf_poseidon.graph_passes.write import site_writer

_BFLOAT16, _FLOAT = types_pb2.DT_BFLOAT16, types_pb2.DT_FLOAT
_INT32, _UINT16 = types_pb2.DT_INT32, types_pb2.DT_UINT16


class HorovodOps(collectives.Collectives):
    """Writes Horovod's ops in place of our markers, and of those of programs for Horovod.

    Every replacement of one of our markers has an op of the same name: if ranks did different things after all, Horovod
    would end the job with an error instead of waiting forever.
    """

    def summed(self) -> None:
        """gradient -> all-reduce, whose result has the marker's name."""
        if self.marker.is_foreign:
            super().summed()
        elif self.marker.indices is not None:
            self._as_slices(self._all_reduced("sum", self._dense_of_slices()))
            self._verify_by_magnitudes()
        else:
            self._all_reduced("", self.marker.gradient)
            self._verify_by_magnitudes()

    def slices(self) -> None:
        """Gathers all slices and sums those with the same index, under the marker's name."""
        marker = self.marker
        indices, values = self._gathered([self._indices, marker.gradient],
                                         [self._index_type, marker.dtype], [None, None], ())
        unique = self.writer.add("unique", "Unique", [indices], T=self._index_type, out_idx=_INT32)
        number = self.writer.add("number", "Size", [unique], T=self._index_type, out_type=_INT32)
        total = self.writer.add("total", "UnsortedSegmentSum", [values, f"{unique}:1", number],
                                T=marker.dtype, Tindices=_INT32, Tnumsegments=_INT32)
        self.writer.add("", "IdentityN", [unique, total], T=[self._index_type, marker.dtype])
        self._verify_by_magnitudes()

    def _verify_by_magnitudes(self) -> None:
        """Gives verify mode a rounding bound for a sum whose order is the library's.

        The sum of the magnitudes on all ranks takes the place of a factor with a single row.
        """
        if self._verifier is None:
            return
        dtype = self.marker.dtype
        magnitude = self.writer.add("magnitude", "Abs", [graph_lib.data_inputs(self._verifier)[0]], T=dtype)
        magnitude = self._all_reduced("magnitudes", magnitude, what="magnitude")
        self._verify_by([self._reshaped("magnitudes_row", magnitude, [1, -1], dtype)], [dtype])

    def _all_reduced(self, suffix: str, tensor: str, what: str = "") -> str:
        """Returns the sum over all ranks of a tensor of the marker's type, at `suffix`.

        `what` distinguishes its nodes from those of the gradient's own sum.
        """
        with self.writer.placed(self._where_run("HorovodAllreduce")):
            dtype = self.marker.dtype
            if not self._contributes_always:
                zero = self.writer.constant(f"{what}zero", site_writer.array(0, dtype), tensor)
                tensor = self.writer.add(f"{what}contribution", "SelectV2",
                                         [self._contributes, tensor, zero], T=dtype)
            wire = _FLOAT if dtype == _BFLOAT16 else dtype  # Horovod cannot sum bfloat16
            tensor = self._cast(f"{what}wide", tensor, dtype, wire)
            if self._graph.node(self.marker.gradient).op == "Const":  # as for coefficients
                tensor = self._opaque(f"{what}opaque", tensor, wire)
            total = self._horovod(self._name(what and f".{what}"), "HorovodAllreduce", [tensor], T=wire,
                                  reduce_op=foreign.SUM, prescale_factor=1.0, postscale_factor=1.0)
            if wire == dtype:
                return self.writer.add(suffix, "Identity", [total], T=dtype)
            return self._cast(suffix, total, wire, dtype)

    def _gathered(self, tensors: Sequence[str], types: Sequence[int], columns: Sequence[int | None],
                  others: Sequence[str]) -> list[str]:
        with self.writer.placed(self._where_run("HorovodAllgather")):
            controls = collectives.after([*tensors, *others])
            gathered, limit = [], self._limit(tensors[0])
            for i, (tensor, dtype) in enumerate(zip(tensors, types)):
                if limit is not None:
                    tensor = self._rows_before(limit, f"part{i}", tensor, dtype)
                wire = _UINT16 if dtype == _BFLOAT16 else dtype  # Horovod has no bfloat16
                if wire != dtype:
                    tensor = self.writer.add(f"part{i}_bits", "Bitcast", [tensor], T=dtype, type=wire)
                if i > 1:  # coefficients: TensorFlow would evaluate a stateless op on constants
                    tensor = self._opaque(f"opaque{i}", tensor, wire)
                tensor = self._horovod(self._name(f".{i}" if i else ""), "HorovodAllgather", [tensor, *controls],
                                       T=wire)
                if wire != dtype:
                    tensor = self.writer.add(f"all{i}", "Bitcast", [tensor], T=wire, type=dtype)
                gathered.append(tensor)
            return gathered

    def _rescaled(self, total: str) -> str:
        if not self.marker.is_foreign:
            return total
        attr, dtype = self._node.attr, self.marker.dtype
        factor = attr["prescale_factor"].f * attr["postscale_factor"].f
        if factor != 1:
            by = self.writer.constant("factor", site_writer.array(factor, dtype), total)
            total = self.writer.add("rescaled", "Mul", [total, by], T=dtype)
        if attr["reduce_op"].i == foreign.AVERAGE:
            with self.writer.placed(self._host):
                size = self.writer.add("size", "HorovodSize", [f"^{graph_lib.node_of(total)}"], process_set_id=0)
            size = self._cast("number", size, _INT32, dtype)
            total = self.writer.add("average", "RealDiv", [total, size], T=dtype)
        return total

    def _horovod(self, name: str, op: str, inputs: Iterable[str], **attributes: graph_lib.Attribute) -> str:
        return self.writer.add(name, op, [*inputs, *self._controls], ignore_name_scope=True, process_set_id=0,
                               **attributes)

    def _where_run(self, op: str) -> str:
        """Returns the device of a Horovod op: that of the gradient if the op has a kernel for it, else the host."""
        return self._gradient_device if devices.has_kernel(op, self._gradient_device) else self._host

    def _opaque(self, name: str, tensor: str, dtype: int) -> str:
        with self.writer.placed(self._host):
            return self.writer.add(name, "PoseidonOpaque", [tensor], T=dtype)

    @property
    def _contributes_always(self) -> bool:
        if self.marker.is_foreign:
            return True
        constant = self._graph.constant(self._contributes)
        return constant is not None and bool(constant)

    def _name(self, suffix: str = "") -> str:
        """Returns the name by which other ranks identify an op."""
        return f"poseidon.{collectives.encoded(self.marker.site)}{suffix}"

    def _limit(self, beside: str) -> str | None:
        """Returns the end of the rows that this rank contributes, a vector; None if it always contributes all."""
        if self._contributes_always:
            return None
        every, none = (self.writer.constant(name, np.array([rows], np.int32), beside)
                       for name, rows in (("every", 2**31 - 1), ("none", 0)))
        return self.writer.add("limit", "SelectV2", [self._contributes, every, none], T=_INT32)

    def _rows_before(self, limit: str, name: str, tensor: str, dtype: int) -> str:
        begin, stride = (self.writer.constant(f"{name}_{what}", np.array([number], np.int32), tensor)
                         for what, number in (("begin", 0), ("stride", 1)))
        return self.writer.add(name, "StridedSlice", [tensor, begin, limit, stride], T=dtype, Index=_INT32,
                               begin_mask=0, end_mask=0, ellipsis_mask=0, new_axis_mask=0,
                               shrink_axis_mask=0)


def grouped(graph_def: graph_pb2.GraphDef, groups: Mapping[str, Iterable[str]]) -> graph_pb2.GraphDef:
    """Merges the all-reduces of each group into one op of Horovod, if no gradient depends on another's sum.

    Args:
        graph_def: The GraphDef.
        groups: Names of HorovodAllreduce nodes, by the name of the group.

    Returns:
        A GraphDef.
    """
    for group, names in groups.items():
        nodes = {node.name: node for node in graph_def.node}
        by_type: dict[int, list[node_def_pb2.NodeDef]] = {}
        for name in names:
            by_type.setdefault(nodes[name].attr["T"].type, []).append(nodes[name])
        for dtype, members in by_type.items():
            if len(members) < 2:
                continue
            first = members[0]
            name = f"{first.name.rpartition('/')[0]}/poseidon.group.{collectives.encoded(group)}.{dtype}"
            node = type(first)(name=name, op="HorovodGroupedAllreduce", device=first.device)
            node.input.extend(graph_lib.data_inputs(member)[0] for member in members)
            node.input.extend(dict.fromkeys(c for member in members
                                            for c in graph_lib.control_inputs(member)))
            graph_lib.copy_attributes(node, first, num_tensors=len(members))
            taken = [type(first)(name=member.name, op="Identity", input=[f"{name}:{i}"],
                                 device=member.device) for i, member in enumerate(members)]
            for member in taken:
                graph_lib.set_attribute(member.attr["T"], "T", dtype)
            replaced = {member.name for member in members}
            candidate = graph_lib.with_nodes(
                graph_def, [n for n in graph_def.node if n.name not in replaced] + [node, *taken])
            if len(graph_lib.in_order(candidate)) == len(candidate.node):
                graph_def = candidate
    return graph_def
