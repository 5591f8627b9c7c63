"""Replaces each marker by the ops that its decision asks for.

Requires: markers and matches of this graph, and a plan with a decision for each of them. Ensures:
no marker is left; every other node keeps its name, and what read a marker reads its sum.

By "ps", a site becomes

    gradient -> Send -> Recv

and by "sfb"

    U, V -> Send -> Recv -> outer product -> Merge
                     | complete?               ^
    gradient -----> Switch -> Send -> Recv ----+

Slices that stay such keep their marker, which is that exchange already. By "ps" they become

    slices -> dense -> Send -> Recv -> as slices, with all indices

The lower branch of "sfb" runs if some rank could not give factors, which all ranks find alike. Until then the
dense product of this rank alone, which only that branch needs, is not computed.
"""

import collections

import numpy as np
from tensorflow.core.framework import types_pb2
from tensorflow.python.framework import dtypes

from tf_poseidon.graph_passes import graph as graph_lib
from tf_poseidon.graph_passes.match_factors import BETWEEN
from tf_poseidon.graph_passes.matches import Match

_FLOAT = types_pb2.DT_FLOAT
_HALVES = (types_pb2.DT_HALF, types_pb2.DT_BFLOAT16)


def rewrite(graph, markers, matches, plan, digest, strict=False):
    """Returns the rewritten GraphDef.

    Args:
        graph: The `Graph`.
        markers: Its `Marker`s.
        matches: What was found out about each gradient, by site.
        plan: The `Plan`.
        digest: A function that returns a text for tensors that are equal on all ranks.
        strict: Whether the graph shall fail where ranks do not have the same factors.
    """
    decisions = {decision.site: decision for decision in plan.decisions}
    by_site = {marker.site: marker for marker in markers}
    riders = {}
    for decision in plan.decisions:
        if decision.rides_on:
            rider = f"{decision.site} from {matches[decision.site].factor}"
            riders.setdefault(decision.rides_on, []).append(rider)
    verifiers = {node.attr["site"].s.decode(): node for node in graph.graph_def.node
                 if node.op == "PoseidonVerify"}
    group_sizes = collections.Counter(decision.group for decision in plan.decisions)
    nodes = []
    waits = {}  # by node that computes a gradient: what it has to wait for
    for marker in markers:
        decision = decisions[marker.site]
        group = (decision.group, group_sizes[decision.group]) if decision.group else ("", 1)
        site = _SiteRewriter(graph, marker, strict, verifiers.get(marker.site), group)
        if decision.scheme == "sparse":
            site.slices()
        elif marker.indices is not None:
            site.dense_slices()
        elif decision.scheme == "ps":
            site.dense()
        else:
            leader = by_site[decision.rides_on or marker.site].node
            if decision.rides_on:
                site.bias(leader, matches[marker.site], matches[decision.rides_on])
            else:
                site.factors(matches[marker.site], riders.get(marker.site, ()), digest)
            for name in site.only_for_dense(matches[marker.site]):
                waits[name] = f"{leader}/is_dense"
        nodes += site.writer.nodes
    replaced = {marker.node for marker in markers} | {node.name for node in nodes}
    kept = [_waiting(node, waits.get(node.name)) for node in graph.graph_def.node
            if node.name not in replaced]
    return graph_lib.with_nodes(graph.graph_def, kept + nodes)


def _waiting(node, control):
    if control is None:
        return node
    changed = type(node)()
    changed.CopyFrom(node)
    changed.input.append(f"^{control}")
    return changed


class _SiteRewriter:
    """Writes the nodes of one site."""

    def __init__(self, graph, marker, strict, verifier, group):
        self._verifier = verifier
        self._group, self._group_size = group
        self._graph = graph
        self._marker = marker
        self._strict = strict
        self._node = graph.nodes[marker.node]
        self._controls = graph_lib.control_inputs(self._node)
        self.writer = graph_lib.Writer(self._node.name, self._node.device)

    # ---- forms --------------------------------------------------------------------------------

    def dense(self):
        """gradient -> Send -> Recv, the last under the marker's name."""
        self._exchange_dense("", self._marker.gradient, "")

    def slices(self):
        """Keeps the marker, and notes that it has been decided about."""
        self.writer.copy(self._node, planned=True)

    def dense_slices(self):
        """slices -> dense -> Send -> Recv, and under the marker's name all indices and the sum."""
        marker, index_type = self._marker, self._node.attr["Tidx"].type
        dense = self.writer.add("dense", "PoseidonDenseSlices", [marker.indices, marker.gradient],
                                T=marker.dtype, Tidx=index_type, shape=marker.shape)
        total = self._exchange_dense("", dense, "sum")
        limits = [self.writer.constant(name, _array(value, index_type), dense)
                  for name, value in (("start", 0), ("limit", marker.shape[0]), ("delta", 1))]
        indices = self.writer.add("indices", "Range", limits, Tidx=index_type)
        self.writer.add("", "IdentityN", [indices, total], T=[index_type, marker.dtype])

    def factors(self, match, riders, digest):
        """Sends the factors of all products under each other, and the coefficients of all terms.

        Args:
            match: The `Match`.
            riders: What else is made of these factors, as text.
            digest: As for `rewrite`.
        """
        first = match.products[0]
        columns = [first.u.columns, first.v.columns]
        u = self._matrices("u", [p.u for p in match.products], first.dtype)
        v = self._matrices("v", [p.v for p in match.products], first.dtype,
                           [p.scale for p in match.products])
        dtype = self._on_wire(first.dtype)
        parts = [self._cast("wire_u", u, first.dtype, dtype),
                 self._cast("wire_v", v, first.dtype, dtype)]
        types, shapes = [dtype] * 2, [(None, c) for c in columns]
        for i, term in enumerate(match.terms):
            one = self.writer.constant(f"one{i}", _array([[1]], self._marker.dtype),
                                       self._marker.contributes)
            parts.append(self._scaled(f"coefficient{i}", one, term.coefficient,
                                      self._marker.dtype))
            types.append(self._marker.dtype)
            shapes.append((None, 1))
        # What all ranks must make of the factors, or they are not exchanged.
        form = "; ".join([f"masks {digest(match.masks)}",
                          *(f"term {digest(term.tensors)}" for term in match.terms),
                          *sorted(riders)])
        recv = self._send_and_receive("", "send", "recv", parts, "sfb", types, shapes, form)
        masks = [self._same_shape(f"mask{i}", mask) for i, mask in enumerate(match.masks)]
        self._verify_by([f"{recv}:0", f"{recv}:1"], [dtype] * 2, masks)
        is_complete = f"{recv}:{len(parts)}"
        self._switch_on(is_complete)
        gathered = [self._if_complete(f"gathered{i}", f"{recv}:{i}", is_complete, t)
                    for i, t in enumerate(types)]
        out_type = self._made_of(dtype)
        total = self.writer.add("product", "SufficientFactorOuterProduct", gathered[:2], T=dtype,
                                Tout=out_type)
        total = self._as_gradient(total, out_type, tuple(columns))
        for i, mask in enumerate(masks):
            total = self.writer.add(f"masked{i}", "Mul", [total, mask], T=self._marker.dtype)
        for i, (term, coefficients) in enumerate(zip(match.terms, gathered[2:])):
            factor = self.writer.add(f"total_coefficient{i}", "SufficientFactorBias", [coefficients],
                                     T=self._marker.dtype, Tout=self._marker.dtype)
            for j, tensor in enumerate(term.tensors):
                factor = self.writer.add(f"term{i}_{j}", "Mul",
                                         [self._same_shape(f"term{i}_{j}_in", tensor), factor],
                                         T=self._marker.dtype)
            total = self.writer.add(f"sum{i}", "AddV2", [total, factor], T=self._marker.dtype)
        self._merge_with_dense(total, is_complete)

    def bias(self, leader, bias, match):
        """Adds up the rows of a factor that another site has received."""
        index = 0 if bias.factor == "u" else 1
        dtype = self._on_wire(match.products[0].dtype)
        is_complete = f"{leader}/recv:{2 + len(match.terms)}"
        self._verify_by([f"{leader}/recv:{index}"], [dtype])
        gathered = self._if_complete("gathered", f"{leader}/recv:{index}", is_complete, dtype)
        out_type = self._made_of(dtype)
        total = self.writer.add("rows", "SufficientFactorBias", [gathered], T=dtype, Tout=out_type)
        self._merge_with_dense(self._as_gradient(total, out_type, self._marker.shape), is_complete)

    def only_for_dense(self, match):
        """Returns the nodes that compute this rank's own gradient, for the dense branch alone."""
        ends = {p.node for p in match.products} if isinstance(match, Match) else set(match.nodes)
        found, queue, readers = [], [self._marker.gradient], {self._marker.node}
        while queue:
            node = self._graph.node(queue.pop())
            if any(consumer.name not in readers for consumer in self._graph.consumers(node.name)):
                continue  # something else needs it now
            if node.name in ends:
                found.append(node.name)
            elif node.op in BETWEEN:
                readers.add(node.name)
                queue += graph_lib.data_inputs(node)
        return found

    # ---- parts --------------------------------------------------------------------------------

    def _send_and_receive(self, prefix, send, recv, tensors, scheme, types, shapes,
                          form="", is_fallback=False):
        # What some ranks have to send after all does not wait for others.
        group = {} if is_fallback or not self._group else dict(group=self._group,
                                                               group_size=self._group_size)
        ticket = self.writer.add(
            f"{prefix}{send}", "PoseidonSend", [*tensors, self._marker.contributes, *self._controls],
            T=types, site=self._marker.site, scheme=scheme, form=form,
            strict=self._strict, **group)
        return self.writer.add(recv, "PoseidonRecv", [ticket], T=types, shapes=shapes)

    def _exchange_dense(self, prefix, gradient, name):
        """Sums a gradient of the marker's shape over the parameter server, into `name`."""
        dtype, wire = self._marker.dtype, self._on_wire(self._marker.dtype)
        sent = self._cast(f"{prefix}send_wire", gradient, dtype, wire)
        recv = name if wire == dtype else f"{prefix}recv_wire"
        total = self._send_and_receive(prefix, "send", recv, [sent], "ps", [wire],
                                       [self._marker.shape], is_fallback=bool(prefix))
        return self._cast(name, total, wire, dtype)

    def _on_wire(self, dtype):
        """Returns the type that values of `dtype` travel in."""
        wire = self._marker.wire_dtype
        return wire if wire is not None and dtype not in _HALVES else dtype

    def _cast(self, name, tensor, source, target):
        if source == target:
            return tensor
        return self.writer.add(name, "Cast", [tensor], SrcT=source, DstT=target)

    def _verify_by(self, factors, types, masks=()):
        """Tells verify mode what the gradient is rebuilt of, so that it knows how rounding shows."""
        if self._verifier is None:
            return
        data, controls = map(list, (graph_lib.data_inputs(self._verifier),
                                    graph_lib.control_inputs(self._verifier)))
        self.writer.copy(self._verifier, inputs=[*data, *masks, *factors, *controls],
                         num_masks=len(masks), F=types)

    def _switch_on(self, is_complete):
        """Makes the node whose control edge lets something run in the dense branch only."""
        switch = self.writer.add("is_complete", "Switch", [is_complete, is_complete],
                                 T=types_pb2.DT_BOOL)
        self.writer.add("is_dense", "Identity", [switch], T=types_pb2.DT_BOOL)

    def _made_of(self, dtype):
        """Returns the type that is made of factors of `dtype`: no rounding to half in between."""
        return _FLOAT if dtype in _HALVES and self._marker.dtype not in _HALVES else dtype

    def _if_complete(self, name, tensor, is_complete, dtype):
        return self.writer.add(name, "Switch", [tensor, is_complete], T=dtype) + ":1"

    def _merge_with_dense(self, total, is_complete):
        dtype = self._marker.dtype
        gradient = self.writer.add("dense_gradient", "Switch", [self._marker.gradient, is_complete],
                                   T=dtype)
        dense = self._exchange_dense("dense_", gradient, "dense_recv")
        self.writer.add("", "Merge", [dense, total], T=dtype, N=2)

    def _matrices(self, name, factors, dtype, scales=None):
        """Returns one matrix with the rows of all factors, scaled."""
        matrices = []
        for i, factor in enumerate(factors):
            tensor = factor.tensor
            if factor.transpose:
                order = self.writer.constant(f"{name}{i}_order", np.array(factor.transpose, np.int32),
                                             tensor)
                tensor = self.writer.add(f"{name}{i}_transposed", "Transpose", [tensor, order],
                                         T=dtype, Tperm=types_pb2.DT_INT32)
            if not factor.is_matrix:
                tensor = self._reshaped(f"{name}{i}", tensor, [-1, factor.columns], dtype)
            if scales:
                tensor = self._scaled(f"{name}{i}", tensor, scales[i], dtype)
            matrices.append(tensor)
        if len(matrices) == 1:
            return matrices[0]
        axis = self.writer.constant(f"{name}_axis", np.int32(0), matrices[0])
        return self.writer.add(name, "ConcatV2", [*matrices, axis], T=dtype, N=len(matrices),
                               Tidx=types_pb2.DT_INT32)

    def _scaled(self, name, tensor, scalars, dtype):
        for i, scalar in enumerate(scalars):
            if scalar.tensor is None:
                operand = self.writer.constant(f"{name}_by{i}", _array(scalar.value, dtype), tensor)
            elif self._graph.shape(scalar.tensor) == ():
                operand = scalar.tensor
            else:
                operand = self._reshaped(f"{name}_by{i}", scalar.tensor, [], dtype)
            tensor = self.writer.add(f"{name}_scaled{i}", "RealDiv" if scalar.divides else "Mul",
                                     [tensor, operand], T=dtype)
        return tensor

    def _reshaped(self, name, tensor, shape, dtype):
        to = self.writer.constant(f"{name}_shape", np.array(shape, np.int32), tensor)
        return self.writer.add(f"{name}_reshaped", "Reshape", [tensor, to], T=dtype,
                               Tshape=types_pb2.DT_INT32)

    def _same_shape(self, name, tensor):
        if self._graph.shape(tensor) == self._marker.shape:
            return tensor
        return self._reshaped(name, tensor, self._marker.shape, self._marker.dtype)

    def _as_gradient(self, tensor, dtype, shape):
        tensor = self._cast("cast", tensor, dtype, self._marker.dtype)
        if shape != self._marker.shape:
            tensor = self._reshaped("gradient", tensor, self._marker.shape, self._marker.dtype)
        return tensor


def _array(value, dtype):
    return np.asarray(value, dtypes.as_dtype(dtype).as_numpy_dtype)
