"""Writes the nodes of one site: what all engines have in common.

Factors become matrices with the rows of a rank, and a gradient is rebuilt from the rows of all ranks. Subclasses
exchange the rows.

Collectives run on the host; PoseidonSend on the device of the gradient, where it has a kernel. If a gradient is
computed on another device than the host, its factors are computed there too, and it is rebuilt there from the factors
of all ranks: no gradient that travels as factors is copied.

Tests: tests/graphs/test_passes.py, tests/graphs/test_placement.py.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses

import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon import planning
from tf_poseidon.graph_passes import passes
from tf_poseidon.graph_passes.find.markers import KeptPart
from tf_poseidon.graph_passes.find.markers import Marker
from tf_poseidon.graph_passes.graph import devices
from tf_poseidon.graph_passes.graph import indexed_graph as graph_lib
from tf_poseidon.graph_passes.graph import provenance
from tf_poseidon.graph_passes.match.factors import BETWEEN
from tf_poseidon.graph_passes.match.matches import BiasMatch
from tf_poseidon.graph_passes.match.matches import Factor
from tf_poseidon.graph_passes.match.matches import GradientMatch
from tf_poseidon.graph_passes.match.matches import Match
from tf_poseidon.graph_passes.match.matches import Scalar
from tf_poseidon.graph_passes.match.matches import Scale

_FLOAT = types_pb2.DT_FLOAT


@dataclasses.dataclass(frozen=True)
class PlannedGraph:
    """A planned graph, with indexes for writing the nodes of its sites.

    Attributes:
        training: The `TrainingGraph`, planned.
        plan: Its plan.
        decisions: The `Decision`s of its plan, by site.
        markers: Its `Marker`s, by site.
        riders: What else is made from the factors of a site, as texts, by site.
        verifiers: The PoseidonVerify nodes, by site.
        group_sizes: The number of exchanges in each group of messages.
    """

    training: passes.TrainingGraph
    plan: planning.Plan
    decisions: Mapping[str, planning.Decision]
    markers: Mapping[str, Marker]
    riders: Mapping[str, list[str]]
    verifiers: Mapping[str, node_def_pb2.NodeDef]
    group_sizes: Mapping[str | None, int]

    @classmethod
    def of(cls, training: passes.TrainingGraph) -> "PlannedGraph":
        """Returns the `PlannedGraph` of a training graph."""
        plan, riders = training.plan, collections.defaultdict(list)
        assert plan is not None
        for decision in plan.decisions:
            if decision.leader:
                match = training.matches[decision.site]
                assert isinstance(match, BiasMatch)
                riders[decision.leader].append(f"{decision.site} from {match.factor}")
        return cls(training, plan, {decision.site: decision for decision in plan.decisions},
                   {marker.site: marker for marker in training.markers}, riders,
                   {node.attr["site"].s.decode(): node for node in training.graph.graph_def.node
                    if node.op == "PoseidonVerify"},
                   collections.Counter([*(decision.group for decision in plan.decisions),
                                        *(exchange.group for exchange in plan.exchanges)]))


class SiteWriter:
    """Writes the nodes of one site. Each engine has a subclass, and `writers.WRITERS` has its method for each scheme.

    Attributes:
        has_to_agree: Whether all ranks must call the same ops, and so agree on a graph before it runs.
        sums_narrow: Whether ranks' parts of a sum in float may be half or bfloat16.
        writer: The `indexed_graph.Writer` of its nodes, below the name of the marker and on the host.
        marker: The `Marker`.
        decision: Its `Decision`.
        waits: The node for which each node that computes this rank's own gradient must wait, by name of the latter.
    """

    has_to_agree = False
    sums_narrow = False

    def __init__(self, planned: PlannedGraph, marker: Marker) -> None:
        self.planned = planned
        self.marker = marker
        self.decision = planned.decisions[marker.site]
        self.waits: dict[str, str] = {}
        self._graph = planned.training.graph
        self._verifier = planned.verifiers.get(marker.site)
        self._node = self._graph.nodes[marker.node]
        self._controls = graph_lib.control_inputs(self._node)
        self._gradient_device = self._graph.node(marker.gradient).device
        self._host = devices.host_of(self._node.device)
        self.writer = graph_lib.Writer(marker.prefix, self._host, provenance.Provenance(
            "sum", marker.site, self.decision.scheme, self.decision.leader or ""))

    @property
    def match(self) -> GradientMatch:
        """The match of the gradient."""
        return self.planned.training.matches[self.marker.site]

    @property
    def leader(self) -> tuple[str, Match]:
        """The site whose factors this one uses: (the prefix of its nodes' names, its `Match`)."""
        site = self.decision.leader or self.marker.site
        match = self.planned.training.matches[site]
        assert isinstance(match, Match)
        return self.planned.markers[site].prefix, match

    @property
    def _shape(self) -> tuple[int, ...]:
        """The gradient's shape, which must be known."""
        assert graph_lib.is_known(self.marker.shape)
        return self.marker.shape

    @property
    def _contributes(self) -> str:
        """Whether this rank has rows of its own, a tensor; only Poseidon's markers have it."""
        assert self.marker.contributes is not None
        return self.marker.contributes

    @property
    def _bias_match(self) -> BiasMatch:
        """The match of a gradient that is made from another site's factors."""
        assert isinstance(self.match, BiasMatch)
        return self.match

    @property
    def _kept(self) -> KeptPart | None:
        """What this rank makes of half factors if that is all that is read of the sum; else None."""
        kept = self.marker.kept
        if self.decision.scheme != planning.HFB or self.decision.leader or kept is None or kept.is_verified:
            return None
        first = self.leader[1].products[0]
        return kept if kept.is_of(first.u.columns, first.v.columns) else None

    # ---- factors --------------------------------------------------------------------------------

    def _parts(self, match: Match) -> tuple[list[str], list[int], list[int]]:
        """Returns (tensors, types, columns), on the gradient's device: what this rank sends to rebuild it.

        These are U and V, with the concatenated rows of all products, and the coefficient of each term, a matrix with
        one element.
        """
        first = match.products[0]
        dtype = self._on_wire(first.dtype)
        with self.writer.placed(self._gradient_device):
            u = self._matrices("u", [p.u for p in match.products], first.dtype)
            v = self._matrices("v", [p.v for p in match.products], first.dtype,
                               [p.scale for p in match.products])
            tensors = [self._cast("wire_u", u, first.dtype, dtype),
                       self._cast("wire_v", v, first.dtype, dtype)]
            types, columns = [dtype] * 2, [first.u.columns, first.v.columns]
            for i, term in enumerate(match.terms):
                unit = self.writer.constant(f"one{i}", array([[1]], self.marker.dtype), tensors[0])
                tensors.append(self._scaled(f"coefficient{i}", unit, term.coefficient, self.marker.dtype))
                types.append(self.marker.dtype)
                columns.append(1)
        return tensors, types, columns

    def _where_rebuilt(self, dtype: int) -> str:
        """Returns the gradient's device if it can multiply factors of `dtype`, else the host."""
        can_multiply = devices.can_multiply(self._gradient_device, T=dtype, Tout=self._made_of(dtype))
        return self._gradient_device if can_multiply else self._host

    def _masks(self, match: Match) -> list[str]:
        return [self._same_shape(f"mask{i}", mask) for i, mask in enumerate(match.masks)]

    def _rebuild(self, match: Match, masks: Sequence[str], gathered: Sequence[str], dtype: int,
                 ticket: str = "") -> str:
        """Returns the gradient, rebuilt from what all ranks have sent.

        Args:
            match: The `Match`.
            masks: Its masks, from `_masks`.
            gathered: The tensors of `_parts`, with the rows of all ranks.
            dtype: The type of the first two.
            ticket: Of half factors: what was sent; then this rank makes its columns of the product, and joins all, or
                keeps them, flat.
        """
        first = match.products[0]
        out_type = self._made_of(dtype)
        total = self.writer.add("product", "SufficientFactorOuterProduct", gathered[:2], T=dtype,
                                Tout=out_type)
        if ticket:
            total, out_type = self._cast("wire_part", total, out_type, wire := self._on_wire(out_type)), wire
            if self._kept is None:
                with self.writer.placed(self._host):
                    total = self.writer.add("joined", "PoseidonJoinColumns", [ticket, total], T=out_type,
                                            shape=(first.u.columns, first.v.columns), site=self.marker.site)
        total = self._as_gradient(total, out_type, (first.u.columns, first.v.columns))
        for i, mask in enumerate(masks):
            total = self.writer.add(f"masked{i}", "Mul", [total, mask], T=self.marker.dtype)
        for i, (term, coefficients) in enumerate(zip(match.terms, gathered[2:])):
            with self.writer.placed(self._host):  # a number, summed on the host, where it arrives
                factor = self.writer.add(f"total_coefficient{i}", "SufficientFactorBias", [coefficients],
                                         T=self.marker.dtype, Tout=self.marker.dtype)
            for j, tensor in enumerate(term.tensors):
                factor = self.writer.add(f"term{i}_{j}", "Mul",
                                         [self._same_shape(f"term{i}_{j}_in", tensor), factor],
                                         T=self.marker.dtype)
            total = self.writer.add(f"sum{i}", "AddV2", [total, factor], T=self.marker.dtype)
        return total

    def _after_controls(self, total: str, match: Match | BiasMatch) -> str:
        """Returns a rebuilt gradient that waits for the control inputs between this rank's own products and its marker.

        In programs of TensorFlow 1, an update waits in this way until all readers, which hold references, have read the
        variable.
        """
        ends = {p.node for p in match.products} if isinstance(match, Match) else set(match.nodes)
        queue, passed, controls = [self.marker.gradient], set(), []
        while queue:
            node = self._graph.node(queue.pop())
            if node.name in passed:
                continue
            passed.add(node.name)
            controls += graph_lib.control_inputs(node)
            if node.name not in ends and node.op in BETWEEN:
                queue += graph_lib.data_inputs(node)
        controls = [control for control in dict.fromkeys(controls) if graph_lib.node_of(control) not in passed]
        if not controls:
            return total
        return self.writer.add("after", "Identity", [total, *controls], T=self.marker.dtype)

    def _sum_of_rows(self, gathered: str, dtype: int) -> str:
        """Returns a bias' gradient: the sum of the rows of all ranks."""
        out_type = self._made_of(dtype)
        total = self.writer.add("rows", "SufficientFactorBias", [gathered], T=dtype, Tout=out_type,)
        return self._as_gradient(total, out_type, self.marker.shape)

    def _matrices(self, name: str, factors: Sequence[Factor], dtype: int, scales: Sequence[Scale] | None = None) -> str:
        """Returns one matrix with the scaled rows of all factors."""
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
        return self._concatenated(name, matrices, 0, dtype)

    def _verify_by(self, factors: Sequence[str], types: Sequence[int], masks: Sequence[str] = ()) -> None:
        """Gives verify mode the tensors from which the gradient is rebuilt, for its rounding bound."""
        if self._verifier is None:
            return
        data, controls = map(list, (graph_lib.data_inputs(self._verifier),
                                    graph_lib.control_inputs(self._verifier)))
        is_on_host = self._gradient_device == devices.host_of(self._gradient_device)
        self.writer.copy(self._verifier, inputs=[*data, *masks, *factors, *controls], num_masks=len(masks),
                         F=types, may_use_tf32=not is_on_host)

    # ---- slices ---------------------------------------------------------------------------------

    def _dense_of_slices(self) -> str:
        """Returns this rank's slices as a dense gradient."""
        marker = self.marker
        return self.writer.add("dense", "PoseidonDenseSlices", [self._indices, marker.gradient],
                               T=marker.dtype, Tidx=self._index_type, shape=marker.shape)

    def _as_slices(self, total: str) -> None:
        """Puts a dense sum in the marker's place, as slices with all indices."""
        limits = [self.writer.constant(name, array(value, self._index_type), total)
                  for name, value in (("start", 0), ("limit", self._shape[0]), ("delta", 1))]
        indices = self.writer.add("indices", "Range", limits, Tidx=self._index_type)
        self.writer.add("", "IdentityN", [indices, total], T=[self._index_type, self.marker.dtype])

    @property
    def _indices(self) -> str:
        """The indices of slices."""
        assert self.marker.indices is not None
        return self.marker.indices

    @property
    def _index_type(self) -> int:
        return self._node.attr["Tidx"].type

    # ---- parts ----------------------------------------------------------------------------------

    def _on_wire(self, dtype: int) -> int:
        """Returns the type in which values of `dtype` travel."""
        wire = self.marker.wire_dtype
        return wire if wire is not None and dtype not in graph_lib.HALVES else dtype

    def _made_of(self, dtype: int) -> int:
        """Returns the type of products of factors of `dtype`, without rounding to half in between."""
        return _FLOAT if dtype in graph_lib.HALVES and self.marker.dtype not in graph_lib.HALVES else dtype

    def _cast(self, name: str, tensor: str, source: int, target: int) -> str:
        if source == target:
            return tensor
        return self.writer.add(name, "Cast", [tensor], SrcT=source, DstT=target)

    def _concatenated(self, name: str, tensors: Sequence[str], axis: int, dtype: int) -> str:
        if len(tensors) == 1:
            return tensors[0]
        along = self.writer.constant(f"{name}_axis", np.int32(axis), tensors[0])
        return self.writer.add(name, "ConcatV2", [*tensors, along], T=dtype, N=len(tensors),
                               Tidx=types_pb2.DT_INT32)

    def _scaled(self, name: str, tensor: str, scalars: Iterable[Scalar], dtype: int) -> str:
        for i, scalar in enumerate(scalars):
            if scalar.tensor is None:
                assert scalar.value is not None
                operand = self.writer.constant(f"{name}_by{i}", array(scalar.value, dtype), tensor)
            elif self._graph.shape(scalar.tensor) == ():
                operand = scalar.tensor
            else:
                operand = self._reshaped(f"{name}_by{i}", scalar.tensor, [], dtype)
            tensor = self.writer.add(f"{name}_scaled{i}", "RealDiv" if scalar.divides else "Mul",
                                     [tensor, operand], T=dtype)
        return tensor

    def _reshaped(self, name: str, tensor: str, shape: Sequence[int], dtype: int) -> str:
        to = self.writer.constant(f"{name}_shape", np.array(shape, np.int32), tensor)
        return self.writer.add(f"{name}_reshaped", "Reshape", [tensor, to], T=dtype,
                               Tshape=types_pb2.DT_INT32)

    def _kept_of(self, name: str, tensor: str) -> str:
        """Returns what this rank keeps of a tensor that all ranks have."""
        assert self._kept is not None
        return self.writer.add(name, "PoseidonShard", [tensor], T=self.marker.dtype, **self._kept.division.attributes)

    def _same_shape(self, name: str, tensor: str) -> str:
        if self._kept is not None:
            return self._kept_of(f"{name}_kept", tensor)
        if self._graph.shape(tensor) == self.marker.shape:
            return tensor
        return self._reshaped(name, tensor, self._shape, self.marker.dtype)

    def _as_gradient(self, tensor: str, dtype: int, shape: graph_lib.Shape | None) -> str:
        tensor = self._cast("cast", tensor, dtype, self.marker.dtype)
        if self._kept is not None:
            return self._reshaped("kept", tensor, [-1], self.marker.dtype)
        if shape != self.marker.shape:
            tensor = self._reshaped("gradient", tensor, self._shape, self.marker.dtype)
        return tensor


def form_of(match: Match, riders: Iterable[str], digest: Callable[[Iterable[str]], str]) -> str:
    """Returns the form of factors: how this rank will use them, as text. Ranks that exchange factors need equal forms.

    Args:
        match: The `Match`.
        riders: What else is made from them, as texts.
        digest: A function that returns a digest of tensors that are equal on all ranks.
    """
    return "; ".join([f"masks {digest(match.masks)}",
                      *(f"term {digest(term.tensors)}" for term in match.terms), *sorted(riders)])


def array(value: npt.ArrayLike, dtype: int) -> np.ndarray:
    """Returns an array of a `types_pb2.DataType`."""
    return np.asarray(value, tf.as_dtype(dtype).as_numpy_dtype)
