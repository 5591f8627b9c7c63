"""Puts a marker over every gradient of a training graph that had no communication.

Requires: a flat graph, and what `find_gradients` found in it. Ensures: a `PoseidonSync` for each
gradient, and for each update of a state that is averaged; what read the gradient reads its sum or mean.

    gradient ─► divided by the number of ranks ─► PoseidonSync ─► what read the gradient

A mean is divided before it is summed: of a product of factors that costs a division of the thinner one.
"""

import collections
import dataclasses

from tensorflow.python.framework import dtypes

from tf_poseidon.errors import PoseidonError
from tf_poseidon.graph_passes import graph as graph_lib

PREFIX = "poseidon"


@dataclasses.dataclass(frozen=True)
class Insertion:
    """A marker, and what it stands for.

    Attributes:
        site: Name of the site.
        node: Flat name of the marker.
        tensors: The flat tensors that were read in the place of its outputs: the gradient; of slices their
            indices and their values.
        readers: (flat node, tensor) of what reads an output instead now; None for all that reads the tensors.
        rule: "mean" or "sum".
        shape: The shape of the variable, of slices; else of the tensor.
        is_gathered: Of slices, whether rows of all ranks are kept apart: they are exchanged here and now, and
            no marker is left that a plan could decide about.
        also: Other variables that are updated by it.
    """

    site: str
    node: str
    tensors: tuple[str, ...]
    readers: tuple[tuple[str, str], ...] | None
    rule: str
    shape: tuple | None
    is_gathered: bool = False
    also: tuple[str, ...] = ()

    @property
    def is_slices(self):
        """Whether it is a marker of slices."""
        return len(self.tensors) == 2


def insert_markers(flat, graph, found, wire_dtype=None, strict=False):
    """Returns (GraphDef, insertions): the flat graph with markers.

    Args:
        flat: The `flatten.Flat`.
        graph: The `Graph` of it, with shapes.
        found: The `find_gradients.Found`.
        wire_dtype, strict: As of `PoseidonStrategy`.

    Raises:
        PoseidonError: If a marker cannot be where a gradient is.
    """
    wanted = _once(flat, [*_of_gradients(graph, found), *_of_states(graph, found)])
    lines = []
    for insertion in wanted:
        dtype = dtypes.as_dtype(_dtype(graph, flat, insertion.tensors[-1])).name
        shape = "of unknown shape" if insertion.shape is None else list(insertion.shape)
        lines.append(f"'{insertion.site}' {dtype}{shape}" + (" slices" if insertion.is_slices else "")
                     + (", gathered" if insertion.is_gathered else ""))
    frames = _Frames(flat, graph)
    writers, insertions = {}, []
    for insertion in wanted:
        tensor = insertion.tensors[-1]
        body, _ = flat.local(tensor)
        _check_body(body, insertion.site)
        frame = frames.of(tensor)
        if (body, frame) not in writers:
            # Inside of a loop of TensorFlow 1 a node belongs to the loop by its inputs.
            beside = graph_lib.data_inputs(graph.node(tensor))[0] if frame else None
            prefix = f"{body.prefix}{PREFIX}/" + (f"loop{len(writers)}/" if frame else "")
            writers[body, frame] = _BodyWriter(prefix, beside, "\n".join(lines), strict)
        types = [_dtype(graph, flat, t) for t in insertion.tensors]
        node = writers[body, frame].marker(insertion, types, wire_dtype, graph.node(tensor).device)
        insertions.append(dataclasses.replace(insertion, node=node))
    nodes = [node for writer in writers.values() for node in writer.nodes]
    taken = {node.name for node in graph.graph_def.node} & {node.name for node in nodes}
    if taken:
        raise PoseidonError(f"The graph has a node named '{min(taken)}' already, which is what rewritten graphs "
                            "have; rename it.")
    return graph_lib.with_nodes(graph.graph_def, _redirected(graph, insertions) + nodes), insertions


def _of_gradients(graph, found):
    for gradient in found.gradients:
        if gradient.indices:
            shape = tuple(dim.size for dim in graph.nodes[gradient.variable].attr["shape"].shape.dim)
            tensors = gradient.indices, gradient.tensor
        else:
            shape, tensors = graph.shape(gradient.tensor), (gradient.tensor,)
        yield Insertion(gradient.variable, "", tensors, gradient.readers, gradient.rule, shape,
                        gradient.is_gathered, gradient.also)


def _of_states(graph, found):
    for state in found.states:
        for i, update in enumerate(state.updates):
            tensor = graph_lib.data_inputs(graph.nodes[update.node])[update.index]
            site = f"state/{state.variable}" + (f"_{i}" if i else "")
            yield Insertion(site, "", (tensor,), ((update.node, tensor),), "mean", graph.shape(tensor))


def _once(flat, wanted):
    """Returns each gradient of the saved graph once: a function that is called twice holds one marker."""
    by_place, by_site = {}, {}
    for insertion in wanted:
        body, local = flat.local(insertion.tensors[-1])
        # Several updates of states may take the same tensor.
        reader = insertion.readers and flat.places[insertion.readers[0][0]][1]
        other = by_place.setdefault((body.function, local, reader), insertion)
        if other.site != insertion.site:
            raise PoseidonError(f"The gradients of '{other.site}' and '{insertion.site}' are the same tensor "
                                f"'{local}' of function '{body.function}', which is called for both; call it by "
                                "two functions.")
        by_site.setdefault(insertion.site, other)
    _check_uses(flat, wanted)
    return list(by_site.values())


def _check_uses(flat, wanted):
    """Refuses a function that is called elsewhere too, where what it computes is no gradient."""
    uses = collections.defaultdict(dict)
    for body, _, _ in flat.places.values():
        uses[body.function][body] = None
    tensors = {flat.local(insertion.tensors[-1]): insertion.site for insertion in wanted}
    for (body, local), site in tensors.items():
        for other in uses[body.function]:
            if (other, local) not in tensors:
                raise PoseidonError(f"The gradient of '{site}' is tensor '{local}' of function '{body.function}', "
                                    f"which is also called by '{other.call}' for something else; save a "
                                    "function for each.")


def _check_body(body, site):
    for around in body.callers():
        if around.is_compiled:
            raise PoseidonError(f"The gradient of '{site}' is computed in function '{around.function}', which XLA "
                                "compiles; save it with jit_compile=False.")


class _BodyWriter:
    """Writes the markers of one function, or of one loop of TensorFlow 1.

    Attributes:
        nodes: What was written.
    """

    def __init__(self, prefix, beside, sites, strict):
        self._prefix = prefix
        writer = graph_lib.Writer(f"{prefix}all")
        beside_it = [f"^{graph_lib.node_of(beside)}"] if beside else []
        self._agree = writer.add("agree", "PoseidonAgree", beside_it, sites=sites, rows=-1, strict=strict)
        self._contributes = writer.constant("contributes", True, beside)
        self._size = writer.add("size", "PoseidonSize", beside_it)
        self._ranks = {}
        self.nodes = writer.nodes
        self._shared = writer

    def marker(self, insertion, types, wire_dtype, device):
        """Adds the marker of a site, and returns its name.

        Args:
            insertion: The `Insertion`.
            types: DataTypes of its tensors.
            wire_dtype: As of `PoseidonStrategy`.
            device: The gradient's.
        """
        writer = graph_lib.Writer(f"{self._prefix}{insertion.site}")
        *indices, tensor = insertion.tensors
        dtype = types[-1]
        if insertion.rule == "mean":
            with writer.placed(device):
                tensor = writer.add("share", "RealDiv", [tensor, self._ranks_as(dtype)], T=dtype)
        if insertion.is_gathered:
            parts = [writer.add(name, "PoseidonAllGather", [part, self._contributes, f"^{self._agree}"], T=part_type,
                                site=f"{insertion.site}/{name}")
                     for name, part, part_type in zip(("indices", "values"), (*indices, tensor), types)]
            name = writer.add("", "IdentityN", parts, T=types)
            self.nodes += writer.nodes
            return name
        wire = {"wire_dtype": wire_dtype} if wire_dtype and not indices else {}
        types = {"T": dtype, "Tidx": types[0]} if indices else {"T": dtype}
        name = writer.add("", "PoseidonSyncSlices" if indices else "PoseidonSync",
                          [*indices, tensor, self._contributes, f"^{self._agree}"], site=insertion.site,
                          shape=insertion.shape, **types, **wire)
        self.nodes += writer.nodes
        return name

    def _ranks_as(self, dtype):
        if dtype not in self._ranks:
            self._ranks[dtype] = self._shared.add(
                f"ranks_{dtypes.as_dtype(dtype).name}", "Cast", [self._size],
                SrcT=dtypes.int32.as_datatype_enum, DstT=dtype)
        return self._ranks[dtype]


def _dtype(graph, flat, tensor):
    """Returns the DataType of a flat tensor."""
    return flat.library.types(graph.node(tensor))[graph_lib.output_of(tensor)]


class _Frames:
    """In which loops of TensorFlow 1, which are made of Enter and Exit, a node of the saved graph is."""

    def __init__(self, flat, graph):
        self._frames = collections.defaultdict(tuple)
        self._flat = flat
        if not any(node.op in ("Enter", "RefEnter") and flat.places[node.name][1] is not None
                   for node in graph.graph_def.node):
            return
        for node in graph_lib.in_order(graph.graph_def):
            frame = max((self._frames[graph_lib.node_of(t)] for t in node.input), key=len, default=())
            is_saved = flat.places[node.name][1] is not None
            if is_saved and node.op in ("Enter", "RefEnter"):
                frame = (*frame, node.attr["frame_name"].s)
            elif is_saved and node.op in ("Exit", "RefExit"):
                frame = frame[:-1]
            self._frames[node.name] = frame

    def of(self, tensor):
        return self._frames[graph_lib.node_of(tensor)]


def _redirected(graph, insertions):
    """Returns the nodes of the graph, where what read a gradient reads its marker."""
    everywhere, somewhere = {}, {}
    for insertion in insertions:
        for output, tensor in enumerate(insertion.tensors):
            sum_of_it = f"{insertion.node}:{output}" if output else insertion.node
            if insertion.readers is None:
                everywhere[tensor] = sum_of_it
            for reader, read in insertion.readers or ():
                if read == tensor:
                    somewhere[reader, tensor] = sum_of_it
    nodes = []
    for node in graph.graph_def.node:
        changed = [somewhere.get((node.name, tensor), everywhere.get(tensor, tensor)) for tensor in node.input]
        if changed != list(node.input):
            copy = type(node)()
            copy.CopyFrom(node)
            copy.input[:] = changed
            node = copy
        nodes.append(node)
    return nodes
