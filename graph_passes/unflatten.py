"""Brings what was changed in a flat graph back into the saved graph, with its functions and loops.

Requires: a flat view of the saved graph, and the same view after the passes. Ensures: the saved graph, with
the same functions and signatures, in which each function holds what was inserted into its nodes. Every
change leaves a note, an attribute whose name begins with `_poseidon`, so that `strip.py` can undo it.
"""

import collections

from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2

from tf_poseidon.errors import PoseidonError
from tf_poseidon.graph_passes import graph as graph_lib
from tf_poseidon.graph_passes import insert_markers

INSERTED = "_poseidon_inserted"  # on a node: it was not there
REPLACES = "_poseidon_replaces"  # on such a node: its tensors, each with the one that was read before
WAS = "_poseidon_was"  # on a node: its op before, which said that it has no state
WAS_STATELESS = "_poseidon_was_stateless"  # on the first node of a function: the same of the function
NOTES = INSERTED, REPLACES, WAS, WAS_STATELESS

# What calls a function without state has to become once the function exchanges something.
_STATEFUL = {"PartitionedCall": "StatefulPartitionedCall", "StatelessIf": "If", "StatelessWhile": "While"}


def unflatten(graph_def, flat, after, insertions):
    """Returns the saved GraphDef with what the passes have inserted.

    Args:
        graph_def: The saved GraphDef.
        flat: Its `flatten.Flat` view.
        after: The flat GraphDef after the passes.
        insertions: The `insert_markers.Insertion`s.
    """
    edits = _Edits(flat, after)
    for insertion in insertions:
        edits.replace(insertion)
    result = graph_pb2.GraphDef()
    result.CopyFrom(graph_def)
    edits.apply("", result.node, {})
    for function in result.library.function:
        name = function.signature.name
        edits.apply(name, function.node_def, function.ret)
        if name in edits.functions and not function.signature.is_stateful:
            function.signature.is_stateful = True
            # On a node, since functions are not loaded with attributes that TensorFlow does not know.
            function.node_def[0].attr[WAS_STATELESS].b = True
    return result


class _Edits:
    """The changes of each function.

    Attributes:
        functions: Names of those that exchange something now, themselves or what they call.
    """

    def __init__(self, flat, after):
        self._flat = flat
        self._nodes = {node.name: node for node in after.node}
        bodies = {body.prefix: body for body, _, _ in flat.places.values()}
        # The longest first: the prefix of a function begins with that of its caller.
        self._bodies = [bodies[prefix] for prefix in sorted(bodies, key=len, reverse=True)]
        self._body_of = {node.name: self._find_body(node.name) for node in after.node
                         if node.name not in flat.places}
        self._added = collections.defaultdict(list)
        self._controls = collections.defaultdict(lambda: collections.defaultdict(list))
        self._replaced = collections.defaultdict(lambda: collections.defaultdict(list))
        self._stateful = collections.defaultdict(set)
        for node in after.node:
            if node.name in self._body_of:
                self._add(node)
            else:
                self._note_new_controls(node)
        edited = {body.function for body in self._body_of.values()}
        for body in self._bodies:
            if body.function in edited:
                for inner in body.callers()[:-1]:
                    self._stateful[inner.caller.function].add(inner.call)
        self.functions = set(self._stateful) | edited

    def replace(self, insertion):
        """Lets what read a gradient read its marker."""
        body, _ = self._flat.local(insertion.tensors[0])
        node = next(node for node in self._added[body.function]
                    if node.name == insertion.node[len(body.prefix):])
        for output, tensor in enumerate(insertion.tensors):
            _, before = self._flat.local(tensor)
            after = self._text(f"{insertion.node}:{output}" if output else insertion.node, body)
            readers = None if insertion.readers is None else {
                self._reader(reader, body) for reader, read in insertion.readers if read == tensor}
            node.attr[REPLACES].list.s.append(f"{after} {before}".encode())
            self._replaced[body.function][before].append((after, readers))

    def _reader(self, name, body):
        """Returns which node of a body reads what a node of the flat graph does; None for what it returns."""
        place, local, _ = self._flat.places[name]
        if place is body:
            # What stands for a part of a call is named after it.
            return local or name[len(body.prefix):].rpartition("/-")[0]
        return next((inner.call for inner in place.callers() if inner.caller is body), None)

    def apply(self, function, nodes, returns):
        """Makes the changes of a function, or of the main graph.

        Args:
            function: Its name.
            nodes: Its nodes.
            returns: What it returns, tensors by name.
        """
        for node in nodes:
            if node.name in self._stateful[function] and node.op in _STATEFUL:
                node.attr[WAS].s = node.op.encode()
                node.op = _STATEFUL[node.op]
            for i, tensor in enumerate(node.input):
                node.input[i] = self._read(function, node.name, tensor)
            node.input.extend(self._controls[function][node.name])
        for name, tensor in list(returns.items()):
            returns[name] = self._read(function, None, tensor)
        # Also a node that the step does not need, and that the flat graph does not have.
        taken = {node.name for node in nodes} & {node.name for node in self._added[function]}
        if taken:
            where = f"Function '{function}'" if function else "The graph"
            raise PoseidonError(f"{where} has a node named "
                                f"'{min(taken)}' already, which is what rewritten graphs have; rename it.")
        nodes.extend(self._added[function])

    def _read(self, function, reader, tensor):
        # In a graph, "name" and "name:0" are the same tensor.
        suffix = ":0" if not function and tensor.endswith(":0") else ""
        for after, readers in self._replaced[function].get(tensor.removesuffix(suffix), ()):
            if readers is None or reader in readers:
                return after + suffix
        return tensor

    def _add(self, node):
        body = self._body_of[node.name]
        local = node_def_pb2.NodeDef()
        local.CopyFrom(node)
        local.name = node.name[len(body.prefix):]
        del local.input[:]
        for tensor in node.input:
            text = self._text(tensor, body)
            if text is not None:
                local.input.append(text)
        local.attr.pop("_output_shapes", None)
        local.attr[INSERTED].b = True
        self._added[body.function].append(local)

    def _note_new_controls(self, node):
        """Notes what a node of the saved graph waits for now."""
        for tensor in graph_lib.control_inputs(node):
            if graph_lib.node_of(tensor) in self._body_of:
                body, name, _ = self._flat.places[node.name]
                self._controls[body.function][name].append(self._text(tensor, body))

    def _text(self, tensor, body):
        """Returns how a body names a flat tensor; None of a control edge that it does not need."""
        name, output = graph_lib.node_of(tensor), graph_lib.output_of(tensor)
        if name in self._body_of:
            local = name[len(body.prefix):]
            if self._body_of[name] is not body:
                raise PoseidonError(f"'{name}' would be read by another function, '{body.function}'.")
            if graph_lib.is_control(tensor):
                return f"^{local}"
            if not body.function:
                return f"{local}:{output}" if output else local
            return f"{local}:{self._flat.library.outputs(self._nodes[name])[output]}"
        place, local, offset = self._flat.places[name]
        if place is not body or local is None:
            raise PoseidonError(f"'{name}' would be read by another function, '{body.function}'.")
        if graph_lib.is_control(tensor):
            return f"^{local}" if offset is not None else None
        return self._flat.local(tensor)[1]

    def _find_body(self, name):
        return next(body for body in self._bodies
                    if name.startswith(f"{body.prefix}{insert_markers.PREFIX}/"))
