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
        tensor: The flat tensor that was read in its place.
        readers: Flat names of the only nodes that read it now; None for all that read the tensor.
        rule: "mean" or "sum".
    """

    site: str
    node: str
    tensor: str
    readers: tuple[str, ...] | None
    rule: str


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
    wanted = [(g.variable, g.tensor, None, g.rule) for g in found.gradients]
    for state in found.states:
        for i, update in enumerate(state.updates):
            tensor = graph_lib.data_inputs(graph.nodes[update.node])[update.index]
            suffix = f"_{i}" if i else ""
            wanted.append((f"state/{state.variable}{suffix}", tensor, (update.node,), "mean"))
    wanted = _once(flat, wanted)
    lines = []
    for site, tensor, _, _ in wanted:
        shape = graph.shape(tensor)
        lines.append(f"'{site}' {dtypes.as_dtype(_dtype(graph, flat, tensor)).name}"
                     f"{list(shape) if shape is not None else ' of unknown shape'}")
    frames = _Frames(flat, graph)
    writers, insertions = {}, []
    for site, tensor, readers, rule in wanted:
        body, _ = flat.local(tensor)
        _check_body(body, site)
        frame = frames.of(tensor)
        if (body, frame) not in writers:
            # Inside of a loop of TensorFlow 1 a node belongs to the loop by its inputs.
            beside = graph_lib.data_inputs(graph.node(tensor))[0] if frame else None
            prefix = f"{body.prefix}{PREFIX}/" + (f"loop{len(writers)}/" if frame else "")
            writers[body, frame] = _BodyWriter(prefix, beside, "\n".join(lines), strict)
        dtype = _dtype(graph, flat, tensor)
        node = writers[body, frame].marker(site, tensor, graph.shape(tensor), dtype, rule, wire_dtype)
        insertions.append(Insertion(site, node, tensor, readers, rule))
    nodes = [node for writer in writers.values() for node in writer.nodes]
    taken = {node.name for node in graph.graph_def.node} & {node.name for node in nodes}
    if taken:
        raise PoseidonError(f"The graph has a node named '{min(taken)}' already, which is what rewritten graphs "
                            "have; rename it.")
    return graph_lib.with_nodes(graph.graph_def, _redirected(graph, insertions) + nodes), insertions


def _once(flat, wanted):
    """Returns each gradient of the saved graph once: a function that is called twice holds one marker."""
    by_place, by_site = {}, {}
    for site, tensor, readers, rule in wanted:
        body, local = flat.local(tensor)
        place = body.function, local, readers and flat.local(readers[0])[1]
        other = by_place.setdefault(place, (site, tensor, readers, rule))
        if other[0] != site:
            raise PoseidonError(f"The gradients of '{other[0]}' and '{site}' are the same tensor '{local}' of "
                                f"function '{body.function}', which is called for both; call it by two "
                                "functions.")
        by_site.setdefault(site, other)
    _check_uses(flat, wanted)
    return list(by_site.values())


def _check_uses(flat, wanted):
    """Refuses a function that is called elsewhere too, where what it computes is no gradient."""
    uses = collections.defaultdict(dict)
    for body, _, _ in flat.places.values():
        uses[body.function][body] = None
    tensors = {flat.local(tensor): site for site, tensor, _, _ in wanted}
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

    def marker(self, site, tensor, shape, dtype, rule, wire_dtype):
        """Adds the marker of a site, and returns its name."""
        writer = graph_lib.Writer(f"{self._prefix}{site}")
        if rule == "mean":
            tensor = writer.add("share", "RealDiv", [tensor, self._ranks_as(dtype)], T=dtype)
        wire = {"wire_dtype": wire_dtype} if wire_dtype else {}
        name = writer.add("", "PoseidonSync", [tensor, self._contributes, f"^{self._agree}"], T=dtype,
                          site=site, shape=shape, **wire)
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
    node = graph.node(tensor)
    op_def = flat.library.op_def(node)
    output, at = graph_lib.output_of(tensor), 0
    for argument in op_def.output_arg:
        types = [argument.type or (node.attr[argument.type_attr].type if argument.type_attr else 0)]
        if argument.type_list_attr:
            types = list(node.attr[argument.type_list_attr].list.type)
        elif argument.number_attr:
            types *= node.attr[argument.number_attr].i
        if output < at + len(types):
            return types[output - at]
        at += len(types)
    raise PoseidonError(f"Node '{node.name}' has no output {output}.")


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
    everywhere = {i.tensor: i.node for i in insertions if i.readers is None}
    somewhere = {(reader, i.tensor): i.node for i in insertions if i.readers for reader in i.readers}
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
