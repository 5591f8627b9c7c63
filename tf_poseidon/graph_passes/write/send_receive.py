"""Writes the nodes of one site with our own ops, PoseidonSend and PoseidonRecv.

Under "ps", a site becomes

    gradient -> Send -> Recv

and under "sfb"

    U, V -> Send -> Recv -> outer product -> Merge
                     | complete?               ^
    gradient -----> Switch -> Send -> Recv ----+

and under "hfb" the same, but the outer product gives a rank's columns alone, or if U is the wider factor, its rows;

    outer product -> JoinColumns -> Merge

gives all ranks all of them. Verify mode has all ranks get the wider factor whole, too. Where a PoseidonShard that takes
these columns or rows is all that reads the gradient, its node becomes the Merge:

    U, V -> Send -> Recv -> outer product -------> Merge
                     | complete?                     ^
    gradient -----> Switch -> Send -> Recv -> Shard -+

A gradient that the graph casts to float from half or bfloat16 is sent as it was before: a rank's part travels in
two bytes, and the sum, in float, in four. Ranks need not agree on this, since every part says its type.

Slices that stay slices keep their marker, which already is that exchange. Under "ps" they become

    slices -> dense -> Send -> Recv -> as slices, with all indices

The lower branch of "sfb" and "hfb" runs if some rank could not send factors; all ranks come to the same result. Until
then, this rank's own dense gradient is not computed, since only that branch needs it.

Send, Recv and the ops of slices are on the device of the gradient if they have kernels for it, which copy in pieces
while others travel. Else they are on the host, and TensorFlow copies what is sent to it, and what is received back:
under "ps" the gradient and the sum, under "sfb" this rank's U and V, and those of all ranks; slices likewise. Half
factors always are on the host, and a gradient that was joined is copied from it.

Tests: tests/graphs/test_passes.py, tests/training/test_rewritten.py.
"""

from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

from tensorflow.core.framework import types_pb2

from tf_poseidon import planning
from tf_poseidon.graph_passes.graph import devices
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import provenance
from tf_poseidon.graph_passes.match.factors import BETWEEN
from tf_poseidon.graph_passes.match.matches import BiasMatch
from tf_poseidon.graph_passes.match.matches import Match
from tf_poseidon.graph_passes.write import site_writer


class SendReceive(site_writer.SiteWriter):
    """Writes the nodes of one site."""

    sums_narrow = True

    # ---- schemes ------------------------------------------------------------------------------

    def summed(self) -> None:
        """Sums the gradient over the parameter server."""
        if self.marker.indices is not None:
            with self.writer.placed(self._where_summed()):
                self._as_slices(self._exchange_dense("", self._dense_of_slices(), "sum"))
            return
        with self.writer.placed(self._gradient_device):
            self._exchange_dense("", self.marker.gradient, "")

    def slices(self) -> None:
        """Keeps the marker, beside the values if it can be, and marks it as decided."""
        self.writer.copy(self._node, device=self._where_exchanged("PoseidonSyncSlices", self._gradient_device),
                         **graph_lib.DECIDED, **self._prioritised)

    def factors(self) -> None:
        """Sends the concatenated factors of all products, and all coefficients; or uses a leader's factors."""
        leader, match = self.leader
        if self.decision.leader:
            self._bias(leader, match)
        else:
            self._products(match)
        # The nodes that compute this rank's own gradient run only if the dense branch needs it.
        own = self._bias_match if self.decision.leader else match
        self.waits = dict.fromkeys(self._only_for_dense(own), f"{leader}/is_dense")

    def _products(self, match: Match) -> None:
        parts, types, columns = self._parts(match)
        digest = self.planned.training.digest
        assert digest is not None
        form = site_writer.form_of(match, self.planned.riders.get(self.marker.site, ()), digest)
        shapes: list[graph_lib.Shape | None] = [(None, c) for c in columns]
        options, factors = self._grouped, [0, 1]
        least_saving = planning.least_saving(self.planned.plan.cluster)
        if self._is_half:
            wide = 0 if columns[0] >= columns[1] else 1
            form, shapes[wide] = f"{'keeps' if self._kept else 'divides'} {wide}; {form}", (None, None)
            options |= {"divided": wide} | ({"joins": False} if self._kept else {})
            if self._verifier is not None:
                factors[wide] = len(parts)
                parts, types, shapes = [*parts, parts[wide]], [*types, types[wide]], [*shapes, (None, columns[wide])]
        elif least_saving < 1:
            options |= {"least_saving": least_saving}
        with self.writer.placed(self._where_gathered(types[0])):
            ticket = self._send("send", parts, types, self.decision.scheme, form, **options)
            recv = self._receive("recv", ticket, types, shapes)
        is_complete = f"{recv}:{len(parts)}"
        self._switch_on(is_complete)
        gathered = [self._if_complete(f"gathered{i}", f"{recv}:{i}", is_complete, t)
                    for i, t in enumerate(types)]
        with self.writer.placed(self._where_rebuilt(types[0])):
            masks = self._masks(match)
            total = self._rebuild(match, masks, gathered, types[0], ticket if self._is_half else "")
            self._merge_with_dense(self._after_controls(total, match), is_complete)
        self._verify_by([f"{recv}:{i}" for i in factors], types[:2], masks)

    def _bias(self, leader: str, match: Match) -> None:
        """Sums the rows of a factor that another site has received."""
        bias = self._bias_match
        index = 0 if bias.factor == "u" else 1
        dtype = self._on_wire(match.products[0].dtype)
        has_whole = self._is_half and self.decision.leader in self.planned.verifiers
        is_complete = f"{leader}/recv:{2 + len(match.terms) + has_whole}"
        self._verify_by([f"{leader}/recv:{index}"], [dtype])
        gathered = self._if_complete("gathered", f"{leader}/recv:{index}", is_complete, dtype)
        with self.writer.placed(self._where_rows_are_summed(dtype)):
            total = self._after_controls(self._sum_of_rows(gathered, dtype), bias)
        with self.writer.placed(self._where_summed()):
            self._merge_with_dense(total, is_complete)

    def _only_for_dense(self, match: Match | BiasMatch) -> list[str]:
        """Returns the nodes that compute this rank's own gradient for nothing but the dense branch."""
        ends = {p.node for p in match.products} if isinstance(match, Match) else set(match.nodes)
        names, queue, readers = [], [self.marker.gradient], {self.marker.node}
        while queue:
            node = self._graph.node(queue.pop())
            if any(consumer.name not in readers for consumer in self._graph.consumers(node.name)):
                continue  # another node reads it
            if node.name in ends:
                names.append(node.name)
            elif node.op in BETWEEN:
                readers.add(node.name)
                queue += graph_lib.data_inputs(node)
        return names

    @property
    def _is_half(self) -> bool:
        """Whether the factors are half factors."""
        return self.decision.scheme == planning.HFB

    @property
    def _prioritised(self) -> dict[str, Any]:
        """The attribute with the priority of the exchange, if it has one."""
        priority = self.planned.training.priorities.get(self.marker.site)
        return {} if priority is None else {"priority": priority}

    @property
    def _grouped(self) -> dict[str, Any]:
        """The attributes with the group of the exchange, if it has one."""
        group = self.decision.group
        return {"group": group, "group_size": self.planned.group_sizes[group]} if group else {}

    # ---- parts --------------------------------------------------------------------------------

    def _where_exchanged(self, op: str, device: str) -> str:
        """Returns where an op can exchange tensors that are on a device: there, or on the host."""
        return device if devices.has_kernel(op, device) else self._host

    def _where_gathered(self, dtype: int) -> str:
        """Returns the device where factors of `dtype` are exchanged."""
        if self._is_half:
            return self._host
        return self._where_exchanged("PoseidonSend", self._where_rebuilt(dtype))

    def _where_rows_are_summed(self, dtype: int) -> str:
        """Returns the device where a factor that another site has received is added up: there, or on the host."""
        device = self._where_gathered(dtype)
        types = {"T": dtype, "Tout": self._made_of(dtype)}
        return device if devices.has_kernel("SufficientFactorBias", device, **types) else self._host

    def _where_summed(self) -> str:
        """Returns the device where the dense gradient is exchanged, and made of slices if it is that."""
        op = "PoseidonSend" if self.marker.indices is None else "PoseidonDenseSlices"
        return self._where_exchanged(op, self._gradient_device)

    def _send(self, name: str, tensors: Iterable[str], types: Sequence[int], scheme: str, form: str = "",
              **attributes: Any) -> str:
        """Starts an exchange; returns its ticket."""
        shown = {graph_lib.MEANWHILE: self.marker.meanwhile} if self.marker.meanwhile else {}
        return self.writer.add(
            name, "PoseidonSend", [*tensors, self._contributes, *self._controls], T=types, site=self.marker.site,
            scheme=scheme, form=form, strict=self.planned.training.facts.strict, **self._prioritised, **shown,
            **attributes)

    def _receive(self, name: str, ticket: str, types: Sequence[int], shapes: Sequence[graph_lib.Shape | None]) -> str:
        """Ends the exchange of a ticket."""
        return self.writer.add(name, "PoseidonRecv", [ticket], T=types, shapes=shapes)

    def _exchange_dense(self, prefix: str, gradient: str, name: str) -> str:
        """Sums a gradient of the marker's shape over the parameter server, into `name`.

        Args:
            prefix: That of the nodes of a fallback to dense gradients, which waits for no group of messages; else "".
            gradient: The gradient.
            name: Name of the node with the sum.
        """
        dtype, wire = self.marker.dtype, self._on_wire(self.marker.dtype)
        narrow = self.planned.training.narrow.get(self.marker.site)
        if narrow is not None and gradient == self.marker.gradient:
            with self.writer.placed(self._where_summed()):
                ticket = self._send("send", [narrow.tensor], [narrow.dtype], planning.PS, float_sum=True,
                                    **self._grouped)
                return self._receive(name, ticket, [types_pb2.DT_FLOAT], [self.marker.shape])
        sent = self._cast(f"{prefix}send_wire", gradient, dtype, wire)
        with self.writer.placed(self._where_summed()):
            ticket = self._send(f"{prefix}send", [sent], [wire], planning.PS, **({} if prefix else self._grouped))
            total = self._receive(name if wire == dtype else f"{prefix}recv_wire", ticket, [wire],
                                  [self.marker.shape])
        return self._cast(name, total, wire, dtype)

    def _switch_on(self, is_complete: str) -> None:
        """Writes the node whose control edge restricts other nodes to the dense branch."""
        switch = self.writer.add("is_complete", "Switch", [is_complete, is_complete],
                                 T=types_pb2.DT_BOOL)
        self.writer.add("is_dense", "Identity", [switch], T=types_pb2.DT_BOOL)

    def _if_complete(self, name: str, tensor: str, is_complete: str, dtype: int) -> str:
        with self.writer.placed(self._where_gathered(dtype)):
            return self.writer.add(name, "Switch", [tensor, is_complete], T=dtype) + ":1"

    def _merge_with_dense(self, total: str, is_complete: str) -> None:
        dtype = self.marker.dtype
        with self.writer.placed(self._gradient_device):  # otherwise it would be copied to the host first
            gradient = self.writer.add("dense_gradient", "Switch", [self.marker.gradient, is_complete],
                                       T=dtype)
        if self._kept is None:
            dense = self._exchange_dense("dense_", gradient, "dense_recv")
            self.writer.add("", "Merge", [dense, total], T=dtype, N=2)
            return
        shard = self._graph.nodes[self._kept.node]
        total_of_all = self._exchange_dense("dense_", gradient, "")
        with self.writer.placed(shard.device):
            dense = self._kept_of("dense_kept", total_of_all)
        writer = graph_lib.Writer(shard.name, shard.device, provenance.Provenance(
            "sum", self.marker.site, self.decision.scheme))
        writer.add("", "Merge", [dense, total], T=dtype, N=2)
        self.writer.nodes += writer.nodes
