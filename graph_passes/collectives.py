"""Writes the nodes of one site with the collectives of another library: Horovod, or TensorFlow itself.

By "ps", a site becomes an all-reduce, and by "sfb"

    U, V -> all-gather -> outer product

Slices that stay such are gathered too, and those of the same index added up. Such collectives want that
all ranks call the same ones, so ranks agree on the rewritten graph before they run it (agreement.py): no
branch is left for a rank that could not give factors.

Two kinds of markers are written about. Our own become collectives altogether. In a program that was
written for another library its all-reduce is the marker, and stays where it was if the plan says "ps".
"""

import re

import numpy as np
from tensorflow.core.framework import types_pb2
from tensorflow.python.framework import kernels

from tf_poseidon.graph_passes import graph as graph_lib
from tf_poseidon.graph_passes import site_writer

_BFLOAT16, _FLOAT = types_pb2.DT_BFLOAT16, types_pb2.DT_FLOAT
_INT32, _UINT16 = types_pb2.DT_INT32, types_pb2.DT_UINT16

# Attributes of the nodes that have the sums.
SITE, SCHEME = "_poseidon_site", "_poseidon_scheme"
# How many gradients that are laid end to end can be told apart: keys of tf.distribute are counted up from 0,
# those of parts of its bundles down, each with so many numbers.
MOST_PARTS = 1024
# Horovod's numbers of the reductions that we know what to do with.
HOROVOD_AVERAGE, HOROVOD_SUM = 0, 1


class Collectives(site_writer.SiteWriter):
    """Writes the nodes of one site; what the ops of a library are, its subclasses know."""

    def __init__(self, graph, marker, plan):
        """Makes a writer.

        Args:
            graph: The `Graph`.
            marker: The site's `Marker`.
            plan: The `Plan`.
        """
        super().__init__(graph, marker)
        self._scheme = next(d.scheme for d in plan.decisions if d.site == marker.site)
        self._planned = next(site for site in plan.sites if site.name == marker.site)

    # ---- forms ----------------------------------------------------------------------------------

    def dense(self):
        """gradient -> all-reduce, the last under the marker's name."""
        if not self._marker.is_foreign:
            self._all_reduced("", self._marker.gradient)
        elif self._marker.bundle is None:  # those of a bundle are for `open_bundle`
            self.writer.copy(self._node, **{graph_lib.PLANNED: True})

    def slices(self):
        """Gathers all slices, and under the marker's name those with the same index added up."""
        marker = self._marker
        indices, values = self._gathered([marker.indices, marker.gradient],
                                         [self._index_type, marker.dtype], [None, None])
        unique = self.writer.add("unique", "Unique", [indices], T=self._index_type, out_idx=_INT32)
        number = self.writer.add("number", "Size", [unique], T=self._index_type, out_type=_INT32)
        total = self.writer.add("total", "UnsortedSegmentSum", [values, f"{unique}:1", number],
                                T=marker.dtype, Tindices=_INT32, Tnumsegments=_INT32)
        self.writer.add("", "IdentityN", [unique, total], T=[self._index_type, marker.dtype])

    def dense_slices(self):
        """slices -> dense -> all-reduce, and under the marker's name all indices and the sum."""
        self._as_slices(self._all_reduced("sum", self._dense_of_slices()))

    def factors(self, match, riders, digest):
        """Gathers the factors of all ranks; see `SendReceive.factors`."""
        del riders, digest  # ranks have agreed on them
        parts, types, columns = self._parts(match)
        gathered = self._gathered(parts, types, columns)
        for i, tensor in enumerate(gathered):  # where riders find them
            self.writer.add(f"recv{i}", "Identity", [tensor], T=types[i])
        self._finish(self._rebuild(match, self._masks(match), gathered, types[0]))

    def bias(self, leader, bias, match):
        """Adds up the rows of a factor that another site has gathered."""
        dtype = self._on_wire(match.products[0].dtype)
        self._finish(self._sum_of_rows(f"{leader}/recv{0 if bias.factor == 'u' else 1}", dtype))

    def waits(self, leader, match):
        """Returns nothing: this rank's own gradient is not needed, and so not computed."""
        del leader, match
        return {}

    def _finish(self, total):
        """Puts a rebuilt gradient in the marker's place; of a bundle, where `open_bundle` takes it from."""
        dtype = self._marker.dtype
        total = self._rescaled(total)
        if self._marker.is_flat:
            total = self._reshaped("flat", total, [-1], dtype)
        self.writer.add("sum" if self._marker.bundle else "", "Identity", [total], T=dtype)

    def note(self):
        """Notes at the node with the sum which site it is of, and how that travels."""
        for node in self.writer.nodes:
            if node.name == self._marker.node:
                node.attr[SITE].s, node.attr[SCHEME].s = self._marker.site.encode(), self._scheme.encode()

    # ---- what libraries differ in ----------------------------------------------------------------

    def _all_reduced(self, suffix, tensor):
        """Returns the sum of a tensor of the marker's type over all ranks, at `suffix`."""
        raise NotImplementedError

    def _gathered(self, tensors, types, columns):
        """Returns tensors with the rows of all ranks; `columns` are None of slices."""
        raise NotImplementedError

    def _rescaled(self, total):
        """Returns a sum as the all-reduce of the program would have returned it."""
        raise NotImplementedError


class HorovodOps(Collectives):
    """Horovod's ops, in place of our markers and of those of programs that are written for Horovod.

    The other ranks know an op of Horovod by the last part of its name. All that may stand for a marker of
    ours has an op of the same name: where ranks did different things after all, Horovod would end the job
    with an error, instead of waiting for ever.
    """

    def _all_reduced(self, suffix, tensor):
        dtype = self._marker.dtype
        if not self._contributes_always:
            zero = self.writer.constant("zero", site_writer.array(0, dtype), tensor)
            tensor = self.writer.add("contribution", "SelectV2",
                                     [self._marker.contributes, tensor, zero], T=dtype)
        wire = _FLOAT if dtype == _BFLOAT16 else dtype  # which Horovod cannot sum
        tensor = self._cast("wide", tensor, dtype, wire)
        if self._graph.node(self._marker.gradient).op == "Const":  # as for coefficients
            tensor = self.writer.add("opaque", "PoseidonOpaque", [tensor], T=wire)
        total = self._horovod(self._name(), "HorovodAllreduce", [tensor], T=wire,
                              reduce_op=HOROVOD_SUM, prescale_factor=1.0, postscale_factor=1.0)
        if wire == dtype:
            return self.writer.add(suffix, "Identity", [total], T=dtype)
        return self._cast(suffix, total, wire, dtype)

    def _gathered(self, tensors, types, columns):
        gathered, limit = [], self._limit(tensors[0])
        for i, (tensor, dtype) in enumerate(zip(tensors, types)):
            if limit is not None:
                tensor = self._rows_before(limit, f"part{i}", tensor, dtype)
            wire = _UINT16 if dtype == _BFLOAT16 else dtype  # Horovod has no bfloat16
            if wire != dtype:
                tensor = self.writer.add(f"part{i}_bits", "Bitcast", [tensor], T=dtype, type=wire)
            if i > 1:  # coefficients; of constants, TensorFlow would compute ops that are not stateful
                tensor = self.writer.add(f"opaque{i}", "PoseidonOpaque", [tensor], T=wire)
            tensor = self._horovod(self._name(f".{i}" if i else ""), "HorovodAllgather", [tensor], T=wire)
            if wire != dtype:
                tensor = self.writer.add(f"all{i}", "Bitcast", [tensor], T=wire, type=dtype)
            gathered.append(tensor)
        return gathered

    def _rescaled(self, total):
        if not self._marker.is_foreign:
            return total
        attr, dtype = self._node.attr, self._marker.dtype
        factor = attr["prescale_factor"].f * attr["postscale_factor"].f
        if factor != 1:
            by = self.writer.constant("factor", site_writer.array(factor, dtype), total)
            total = self.writer.add("rescaled", "Mul", [total, by], T=dtype)
        if attr["reduce_op"].i == HOROVOD_AVERAGE:
            size = self.writer.add("size", "HorovodSize", [f"^{graph_lib.node_of(total)}"],
                                   process_set_id=self._process_set)
            size = self._cast("number", size, _INT32, dtype)
            total = self.writer.add("average", "RealDiv", [total, size], T=dtype)
        return total

    def _horovod(self, name, op, inputs, **attributes):
        """Adds an op of Horovod: beside the gradient, if it has a kernel for that device."""
        device = self._graph.node(self._marker.gradient).device
        kinds = {kernel.device_type for kernel in kernels.get_registered_kernels_for_op(op).kernel}
        return self.writer.add(name, op, [*inputs, *self._controls], ignore_name_scope=True,
                               process_set_id=self._process_set,
                               on=device if "GPU" in device and "GPU" in kinds else None, **attributes)

    @property
    def _process_set(self):
        return self._node.attr["process_set_id"].i if self._marker.is_foreign else 0

    @property
    def _contributes_always(self):
        if self._marker.is_foreign:
            return True
        constant = self._graph.constant(self._marker.contributes)
        return constant is not None and bool(constant)

    def _name(self, suffix=""):
        """Returns the name by which other ranks know an op."""
        return f"poseidon.{encoded(self._marker.site)}{suffix}"

    def _limit(self, beside):
        """Returns where the rows that a rank gives end, a vector; None if it always gives all."""
        if self._contributes_always:
            return None
        every, none = (self.writer.constant(name, np.array([rows], np.int32), beside)
                       for name, rows in (("every", 2**31 - 1), ("none", 0)))
        return self.writer.add("limit", "SelectV2", [self._marker.contributes, every, none], T=_INT32)

    def _rows_before(self, limit, name, tensor, dtype):
        begin, stride = (self.writer.constant(f"{name}_{what}", np.array([number], np.int32), tensor)
                         for what, number in (("begin", 0), ("stride", 1)))
        return self.writer.add(name, "StridedSlice", [tensor, begin, limit, stride], T=dtype, Index=_INT32,
                               begin_mask=0, end_mask=0, ellipsis_mask=0, new_axis_mask=0,
                               shrink_axis_mask=0)


class TensorFlowOps(Collectives):
    """TensorFlow's own collectives, in the place of those of tf.distribute.

    They want tensors of one shape on all ranks: factors are filled up with rows of zeros, which add
    nothing, to the rows that the plan was made for. U, V and coefficients travel as one matrix.
    """

    def _gathered(self, tensors, types, columns):
        rows, dtype = self._planned.factors.k, types[0]
        matrix = self._concatenated("parts", [self._filled_up(f"part{i}", tensor, rows, dtype)
                                              for i, tensor in enumerate(tensors)], 1, dtype)
        _, size, group, instance, *token = graph_lib.data_inputs(self._node)
        attr = self._node.attr
        gathered = self.writer.add(
            "gather", "CollectiveGatherV2", [matrix, size, group, self._instance_key(instance), *token],
            T=dtype, communication_hint=attr["communication_hint"].s.decode(),
            timeout_seconds=attr["timeout_seconds"].f, is_stateless=attr["is_stateless"].b,
            Nordering_token=len(token))
        sizes = self.writer.constant("columns", np.array(columns, np.int32), gathered)
        axis = self.writer.constant("columns_axis", np.int32(1), gathered)
        pieces = self.writer.add("pieces", "SplitV", [gathered, sizes, axis], T=dtype, Tlen=_INT32,
                                 num_split=len(columns))
        return [f"{pieces}:{i}" for i in range(len(columns))]

    def _filled_up(self, name, tensor, rows, dtype):
        """Returns a matrix with as many rows as on all ranks."""
        if (self._graph.shape(tensor) if tensor in self._graph.nodes else (None,))[0] == rows:
            return tensor
        wanted = self.writer.constant(f"{name}_wanted", np.array([rows, 0], np.int32), tensor)
        shape = self.writer.add(f"{name}_shape", "Shape", [tensor], T=dtype, out_type=_INT32)
        # [rows, 0] - shape * [1, 0]: only rows are added, and a rank that has too many fails.
        first = self.writer.constant(f"{name}_first", np.array([1, 0], np.int32), tensor)
        shape = self.writer.add(f"{name}_rows", "Mul", [shape, first], T=_INT32)
        missing = self.writer.add(f"{name}_missing", "Sub", [wanted, shape], T=_INT32)
        before = self.writer.add(f"{name}_before", "ZerosLike", [missing], T=_INT32)
        paddings = self.writer.add(f"{name}_paddings", "Pack", [before, missing], T=_INT32, N=2, axis=1)
        return self.writer.add(f"{name}_filled_up_to_{rows}_rows", "Pad", [tensor, paddings], T=dtype,
                               Tpaddings=_INT32)

    def _instance_key(self, key):
        """Returns a key that no other collective in flight has: of parts of a bundle a new one."""
        if self._marker.bundle is None:
            return key
        part = self._marker.part
        factor = self.writer.constant("keys", np.int32(-MOST_PARTS), key)
        number = self.writer.constant("key_of_part", np.int32(-part), key)
        key = self.writer.add("key_of_bundle", "Mul", [key, factor], T=_INT32)
        return self.writer.add("key", "Add", [key, number], T=_INT32)

    def _rescaled(self, total):
        return total


def encoded(site):
    """Returns a site's name with characters that names of nodes may have, different for each."""
    return re.sub(r"[^A-Za-z0-9_]", lambda c: "." if c[0] == "/" else f"-{ord(c[0]):x}-", site)


def open_bundle(graph, markers, decisions):
    """Returns the nodes that stand for a bundle of which some parts travel as factors.

    Args:
        graph: The `Graph`.
        markers: Its `Marker`s, all of one bundle.
        decisions: The plan's `Decision`s by site.
    """
    bundle, node = markers[0].bundle, graph.nodes[markers[0].node]
    writer = graph_lib.Writer(node.name, node.device)
    left = [marker for marker in markers if decisions[marker.site].scheme == "ps"]
    if len(left) == len(markers):
        writer.copy(node, **{graph_lib.PLANNED: True})
        return writer.nodes
    dtype, sums = markers[0].dtype, {marker.part: f"{marker.prefix}/sum" for marker in markers}
    tensors = [bundle.gradients[marker.part] for marker in left]
    others = list(node.input)[len(bundle.gradients) if bundle.output == node.name else 1:]
    if bundle.output == node.name:
        if left:
            rest = writer.add(f"poseidon.{encoded(node.name)}", node.op, [*tensors, *others])
            _take_attributes(writer.nodes[-1], node, num_tensors=len(left), ignore_name_scope=True)
            sums |= {marker.part: f"{rest}:{i}" for i, marker in enumerate(left)}
    elif left:
        if len(left) > 1:
            axis = writer.constant("rest_axis", np.int32(0), tensors[0])
            tensors = [writer.add("rest", "ConcatV2", [*tensors, axis], T=dtype, N=len(tensors),
                                  Tidx=_INT32)]
        writer.copy(node, inputs=[*tensors, *others], **{graph_lib.PLANNED: True})
        lengths = [graph_lib.num_elements(graph.shape(bundle.gradients[m.part])) for m in left]
        sizes = writer.constant("rest_sizes", np.array(lengths, np.int32), node.name)
        axis = writer.constant("rest_sizes_axis", np.int32(0), node.name)
        pieces = writer.add("rest_pieces", "SplitV", [node.name, sizes, axis], T=dtype, Tlen=_INT32,
                            num_split=len(left))
        sums |= {marker.part: f"{pieces}:{i}" for i, marker in enumerate(left)}
    else:  # others may wait for it
        writer.add("", "NoOp", [tensor for tensor in others if graph_lib.is_control(tensor)])
    writer.nodes.append(type(node)(
        name=bundle.output, op="IdentityN", device=node.device,
        input=[sums[part] for part in range(len(markers))]))
    graph_lib.set_attribute(writer.nodes[-1].attr["T"], "T", [dtype] * len(markers))
    return writer.nodes


def grouped(graph_def, groups):
    """Lets Horovod sum the gradients of a group by one op, where none of them depends on another's sum.

    Args:
        graph_def: The GraphDef.
        groups: Names of nodes that are HorovodAllreduces, lists of them by the name of the group.

    Returns:
        A GraphDef.
    """
    for group, names in groups.items():
        nodes = {node.name: node for node in graph_def.node}
        by_type = {}
        for name in names:
            by_type.setdefault(nodes[name].attr["T"].type, []).append(nodes[name])
        for dtype, members in by_type.items():
            if len(members) < 2:
                continue
            first = members[0]
            name = f"{first.name.rpartition('/')[0]}/poseidon.group.{encoded(group)}.{dtype}"
            node = type(first)(name=name, op="HorovodGroupedAllreduce", device=first.device)
            node.input.extend(graph_lib.data_inputs(member)[0] for member in members)
            node.input.extend(dict.fromkeys(c for member in members
                                            for c in graph_lib.control_inputs(member)))
            _take_attributes(node, first, num_tensors=len(members))
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


def _take_attributes(node, other, **attributes):
    """Gives a node the attributes of another one, but for some."""
    for key, value in other.attr.items():
        node.attr[key].CopyFrom(value)
    for key, value in (*attributes.items(), (graph_lib.PLANNED, True)):
        graph_lib.set_attribute(node.attr[key], key, value)
