"""Reads from a rewritten graph what was inserted into it, and puts other nodes in its place."""

import dataclasses

from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2

from tf_poseidon.graph_passes import collectives
from tf_poseidon.graph_passes import functions as functions_lib
from tf_poseidon.graph_passes import graph as graph_lib
from tf_poseidon.graph_passes import strip as strip_lib
from tf_poseidon.graph_passes import unflatten


@dataclasses.dataclass(frozen=True)
class InsertedSite:
    """A site of a rewritten graph.

    Attributes:
        name: Name of the site.
        function: The function that holds it; "" of the main graph.
        node: The node, there, that has the sums.
        before: The tensors, there, that were read in the place of the sums.
        sums: The sums: tensors, there.
        types: Their DataTypes.
        rule: "mean" or "sum".
        scheme: "ps", "sfb" or "sparse"; "gather" where the rows of all ranks are kept apart.
        rides_on: The site whose factors it is made of, if it has none of its own.
        factors: With "sfb", the factors U and V as they are sent, or the one whose rows are added up: tensors
            of the same function.
        wire: Whether it is rounded on its way.
        nodes: All nodes that were inserted for it.
    """

    name: str
    function: str
    node: str
    before: tuple[str, ...]
    sums: tuple[str, ...]
    types: tuple[int, ...]
    rule: str
    scheme: str
    rides_on: str | None
    factors: tuple[str, ...]
    wire: bool
    nodes: tuple


def sites(graph_def):
    """Returns the `InsertedSite`s of a rewritten GraphDef, in the order in which they are there."""
    library = functions_lib.Library(graph_def)
    bodies = [("", graph_def.node), *((f.signature.name, f.node_def) for f in graph_def.library.function)]
    return [site for function, nodes in bodies for site in _sites(library, function, nodes)]


def _sites(library, function, nodes):
    inserted = [node for node in nodes if unflatten.INSERTED in node.attr]
    ends = [node for node in inserted if unflatten.REPLACES in node.attr]
    by_end = {node.name: [node] for node in ends}
    for node in inserted:  # each belongs to the site with the longest name that its own begins with
        name = node.name
        while name and (name not in by_end or name == node.name):
            name = name.rpartition("/")[0]
        if name and node.name not in by_end:
            by_end[name].append(node)
    named = {end.name: _name(end, by_end[end.name]) for end in ends}
    for end in ends:
        own = {node.name.removeprefix(end.name): node for node in by_end[end.name]}
        pairs = [text.decode().split(" ") for text in end.attr[unflatten.REPLACES].list.s]
        rides_on, factors, scheme = None, (), "ps"
        if collectives.SCHEME in end.attr:
            scheme = end.attr[collectives.SCHEME].s.decode()
            if scheme == "sfb":
                # Of a bias: the leader, and which of its factors.
                leader, _, which = own["/rows"].input[0].partition("/recv") if "/rows" in own else (end.name,) * 3
                bits = {n.name: n.input[0] for n in by_end[leader] if n.op == "Bitcast"}
                gathers = [n.input[0] for n in by_end[leader] if n.op == "HorovodAllgather"]
                factors = tuple(bits.get(graph_lib.node_of(tensor), tensor) for tensor in gathers[:2])
                if leader != end.name:
                    rides_on, factors = named[leader], (factors[int(which.partition(":")[0])],)
        elif end.op == "PoseidonSyncSlices":
            scheme = "sparse"
        elif "/indices" in own and own["/indices"].op == "PoseidonAllGather":
            scheme = "gather"
        elif "/gathered" in own:  # rows of a factor that another site has received
            leader, _, output = own["/gathered"].input[0].partition("/recv")
            sender = next(node for node in inserted if node.name == f"{leader}/send")
            rides_on, scheme = named[leader], "sfb"
            factors = (sender.input[int(output.rpartition(":")[2] or 0)],)
        elif own["/send"].attr["scheme"].s == b"sfb":
            scheme, factors = "sfb", tuple(own["/send"].input[:2])
        outputs = library.types(end)
        yield InsertedSite(
            named[end.name], function, end.name, tuple(before for _, before in pairs),
            tuple(after for after, _ in pairs), tuple(outputs[:len(pairs)]),
            "mean" if "/share" in own else "sum", scheme, rides_on, factors,
            any("wire" in name for name in own), tuple(by_end[end.name]))


def _name(end, nodes):
    """Returns the name of the site whose sums a node has, and some nodes make."""
    if collectives.SITE in end.attr:
        return end.attr[collectives.SITE].s.decode()
    node = next(node for node in nodes if "site" in node.attr)
    site = node.attr["site"].s.decode()
    return site.rpartition("/")[0] if node.op == "PoseidonAllGather" else site


def with_calls(graph_def, call):
    """Returns the graph as it was before, but for a Python function at each site.

    Args:
        graph_def: A rewritten GraphDef.
        call: A function that returns, for an `InsertedSite`, the token of a Python function; that
            takes this rank's tensors and returns the sums.
    """
    return _with_functions(graph_def, call, is_stripped=True)


def with_listeners(graph_def, call):
    """Returns a rewritten graph in which a Python function sees the sums, and the factors, of each site.

    Args:
        graph_def: A rewritten GraphDef.
        call: A function that returns, for an `InsertedSite`, the token of a Python function; that takes the
            sums and the factors, and returns the sums.
    """
    return _with_functions(graph_def, call, is_stripped=False)


def _with_functions(graph_def, call, is_stripped):
    result = graph_pb2.GraphDef()
    result.CopyFrom(graph_def)
    bodies = {"": (result.node, {}), **{f.signature.name: (f.node_def, f.ret) for f in result.library.function}}
    library = functions_lib.Library(graph_def)
    added = {}
    for site in sites(graph_def):
        nodes, returns = bodies[site.function]
        name = site.node + ("/python" if is_stripped else "/heard")
        read = site.before if is_stripped else (*site.sums, *site.factors)
        body = library.body(site.function)
        node = node_def_pb2.NodeDef(name=name, op="PyFunc", input=read)
        node.attr["token"].s = call(site).encode()
        node.attr["Tin"].list.type.extend(_type(library, body, tensor) for tensor in read)
        node.attr["Tout"].list.type.extend(site.types)
        new = [f"{name}:output:{i}" if site.function else (f"{name}:{i}" if i else name)
               for i in range(len(site.sums))]
        if is_stripped:
            end = next(n for n in nodes if n.name == site.node)
            end.attr[unflatten.REPLACES].list.s[:] = [
                f"{after} {tensor}".encode() for after, tensor in zip(site.sums, new)]
        else:
            replaced = dict(zip(site.sums, new))
            for reader in nodes:
                if unflatten.INSERTED not in reader.attr:
                    reader.input[:] = [replaced.get(tensor, tensor) for tensor in reader.input]
            for key, tensor in list(returns.items()):
                returns[key] = replaced.get(tensor, tensor)
        added.setdefault(site.function, []).append(node)
    if is_stripped:
        result = strip_lib.strip(result)
        bodies = {"": (result.node, {}), **{f.signature.name: (f.node_def, f.ret) for f in result.library.function}}
    for function, nodes in added.items():
        bodies[function][0].extend(nodes)
    return result


def _type(library, body, tensor):
    name, output = body.parse(tensor)
    if output is None:
        return dict(body.arguments)[name]
    return library.types(body.nodes[name])[output]


