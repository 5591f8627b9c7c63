"""Writes the nodes of one site with our own ops, PoseidonSend and PoseidonRecv.

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

Send and Recv are on the host, whatever device the gradient is on; so TensorFlow copies what is sent down,
and what has come up: by "ps" the gradient and the sum, by "sfb" this rank's U and V, and those of all.
"""

from tensorflow.core.framework import types_pb2

from tf_poseidon.graph_passes.graph import graph as graph_lib
from tf_poseidon.graph_passes.write import site_writer
from tf_poseidon.graph_passes.match.factors import BETWEEN
from tf_poseidon.graph_passes.match.matches import Match


class SendReceive(site_writer.SiteWriter):
    """Writes the nodes of one site."""

    def __init__(self, graph, marker, strict, verifier, group):
        """Makes a writer.

        Args:
            graph: The `Graph`.
            marker: The site's `Marker`.
            strict: Whether the graph shall fail where ranks do not have the same factors.
            verifier: The site's PoseidonVerify node, None without.
            group: (name, size) of the group of messages that it travels with, ("", 1) without.
        """
        super().__init__(graph, marker, verifier)
        self._strict = strict
        self._group, self._group_size = group

    # ---- forms --------------------------------------------------------------------------------

    def dense(self):
        """gradient -> Send -> Recv, the last under the marker's name."""
        with self.writer.placed(self._gradient_device):
            self._exchange_dense("", self._marker.gradient, "")

    def slices(self):
        """Keeps the marker, and notes that it has been decided about."""
        self.writer.copy(self._node, **{graph_lib.PLANNED: True})

    def dense_slices(self):
        """slices -> dense -> Send -> Recv, and under the marker's name all indices and the sum."""
        self._as_slices(self._exchange_dense("", self._dense_of_slices(), "sum"))

    def factors(self, match, riders, digest):
        """Sends the factors of all products under each other, and the coefficients of all terms.

        Args:
            match: The `Match`.
            riders: What else is made of these factors, as text.
            digest: As for `site_writer.form_of`.
        """
        parts, types, columns = self._parts(match)
        recv = self._send_and_receive("", "send", "recv", parts, "sfb", types,
                                      [(None, c) for c in columns],
                                      site_writer.form_of(match, riders, digest))
        is_complete = f"{recv}:{len(parts)}"
        self._switch_on(is_complete)
        gathered = [self._if_complete(f"gathered{i}", f"{recv}:{i}", is_complete, t)
                    for i, t in enumerate(types)]
        with self.writer.placed(self._where_rebuilt(types[0])):
            masks = self._masks(match)
            total = self._after_controls(self._rebuild(match, masks, gathered, types[0]), match)
            self._merge_with_dense(total, is_complete)
        self._verify_by([f"{recv}:0", f"{recv}:1"], types[:2], masks)

    def bias(self, leader, bias, match):
        """Adds up the rows of a factor that another site has received."""
        index = 0 if bias.factor == "u" else 1
        dtype = self._on_wire(match.products[0].dtype)
        is_complete = f"{leader}/recv:{2 + len(match.terms)}"
        self._verify_by([f"{leader}/recv:{index}"], [dtype])
        gathered = self._if_complete("gathered", f"{leader}/recv:{index}", is_complete, dtype)
        self._merge_with_dense(self._after_controls(self._sum_of_rows(gathered, dtype), bias), is_complete)

    def waits(self, leader, match):
        """Returns what has to wait, and for which node: what computes this rank's own gradient."""
        return dict.fromkeys(self._only_for_dense(match), f"{leader}/is_dense")

    def _only_for_dense(self, match):
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
        shown = {graph_lib.MEANWHILE: self._marker.meanwhile} if self._marker.meanwhile else {}
        with self.writer.placed(self._host):
            ticket = self.writer.add(
                f"{prefix}{send}", "PoseidonSend", [*tensors, self._marker.contributes, *self._controls],
                T=types, site=self._marker.site, scheme=scheme, form=form,
                strict=self._strict, **group, **shown)
            return self.writer.add(recv, "PoseidonRecv", [ticket], T=types, shapes=shapes)

    def _exchange_dense(self, prefix, gradient, name):
        """Sums a gradient of the marker's shape over the parameter server, into `name`."""
        dtype, wire = self._marker.dtype, self._on_wire(self._marker.dtype)
        sent = self._cast(f"{prefix}send_wire", gradient, dtype, wire)
        recv = name if wire == dtype else f"{prefix}recv_wire"
        total = self._send_and_receive(prefix, "send", recv, [sent], "ps", [wire],
                                       [self._marker.shape], is_fallback=bool(prefix))
        return self._cast(name, total, wire, dtype)

    def _switch_on(self, is_complete):
        """Makes the node whose control edge lets something run in the dense branch only."""
        switch = self.writer.add("is_complete", "Switch", [is_complete, is_complete],
                                 T=types_pb2.DT_BOOL)
        self.writer.add("is_dense", "Identity", [switch], T=types_pb2.DT_BOOL)

    def _if_complete(self, name, tensor, is_complete, dtype):
        return self.writer.add(name, "Switch", [tensor, is_complete], T=dtype) + ":1"

    def _merge_with_dense(self, total, is_complete):
        dtype = self._marker.dtype
        with self.writer.placed(self._gradient_device):  # else it would be copied before
            gradient = self.writer.add("dense_gradient", "Switch", [self._marker.gradient, is_complete],
                                       T=dtype)
        dense = self._exchange_dense("dense_", gradient, "dense_recv")
        self.writer.add("", "Merge", [dense, total], T=dtype, N=2)
