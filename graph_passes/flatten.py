"""Shows a saved graph, with functions and loops, as the flat graph that the passes read.

Requires: a GraphDef. Ensures: every call is replaced by the nodes of its function, conditions and loops
by Switch, Merge, Enter, NextIteration and Exit; each node knows where it comes from. The flat graph is
for reading: it is never run, and the saved graph keeps its functions (unflatten.py).
"""

import dataclasses

from tensorflow.core.framework import graph_pb2
from tensorflow.core.framework import node_def_pb2
from tensorflow.core.framework import types_pb2

from tf_poseidon.errors import PoseidonError
from tf_poseidon.graph_passes import functions as functions_lib
from tf_poseidon.graph_passes import graph as graph_lib

_MAX_NODES = 1_000_000  # functions that call functions twice grow fast
_MAX_DEPTH = 100

_CALLS = {"PartitionedCall": "f", "StatefulPartitionedCall": "f"}
_CONDITIONS = ("If", "StatelessIf")
_LOOPS = ("While", "StatelessWhile")


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """One use of a function: where its nodes are in the flat graph.

    Attributes:
        prefix: What their flat names begin with.
        function: Name of the function; "" of the main graph.
        caller: The body that uses it, None of the main graph.
        call: The node that does, by its name there.
        decides: The flat tensor that decides whether, or how often, it runs; None if it always does.
        is_compiled: Whether XLA compiles it.
    """

    prefix: str = ""
    function: str = ""
    caller: "Body | None" = None
    call: str = ""
    decides: str | None = None
    is_compiled: bool = False

    def callers(self):
        """Returns this body and all around it, the innermost first."""
        body, bodies = self, []
        while body is not None:
            bodies.append(body)
            body = body.caller
        return bodies


@dataclasses.dataclass(frozen=True)
class Flat:
    """A flat view of a saved graph.

    Attributes:
        graph_def: The flat graph.
        library: The `functions.Library` of the saved graph.
        places: By flat name of a node: its `Body`, its name there, and the output there that its own
            output 0 is; None of an argument.
    """

    graph_def: graph_pb2.GraphDef
    library: functions_lib.Library
    places: dict

    def is_saved(self, tensor):
        """Whether a flat tensor is one of the saved graph, and does not stand for the inner life of a call."""
        return self.places[graph_lib.node_of(tensor)][1] is not None

    def local(self, tensor):
        """Returns (body, tensor as that body names it) of a flat tensor."""
        body, name, offset = self.places[graph_lib.node_of(tensor)]
        output = None if offset is None else offset + graph_lib.output_of(tensor)
        return body, self.library.body(body.function).text(name, output)


def flatten(graph_def, targets, rows=None):
    """Returns the `Flat` view of the part of a graph that some targets need.

    Args:
        graph_def: The saved GraphDef.
        targets: Names of tensors or nodes of its main graph.
        rows: The first dimension to give placeholders in which it is unknown; None leaves it.

    Raises:
        PoseidonError: If the graph is not valid.
    """
    flattener = _Flattener(graph_def, rows)
    flattener.expand_main(targets)
    return Flat(flattener.finished(), flattener.library, flattener.places)


class _Flattener:

    def __init__(self, graph_def, rows):
        self.library = functions_lib.Library(graph_def)
        self.places = {}
        self._nodes = {}
        self._replaced = {}  # outputs and control edges of calls, by flat name
        self._rows = rows
        self._graph_def = graph_def

    def finished(self):
        """Returns the flat graph, where what read a call reads what replaces it."""
        for node in self._nodes.values():
            for i, tensor in enumerate(node.input):
                if tensor in self._replaced:
                    node.input[i] = self._replaced[tensor]
        flat = graph_pb2.GraphDef(node=self._nodes.values(), versions=self._graph_def.versions)
        flat.library.CopyFrom(self._graph_def.library)
        return flat

    def expand_main(self, targets):
        """Adds what the targets need of the main graph."""
        main = self.library.body("")
        self._expand(Body(), [main.parse(target)[0] for target in targets], [], None)

    def _expand(self, body, roots, arguments, entry):
        """Adds the nodes of a body.

        Args:
            body: The `Body`.
            roots: Names of the nodes that have to be there, with all that they need.
            arguments: Flat tensors, one for each argument.
            entry: A flat node after which the body's nodes run; None if there is none.
        """
        if len(body.callers()) > _MAX_DEPTH:
            raise PoseidonError(f"Function '{body.function}' is called through more than {_MAX_DEPTH} "
                                "others; recursion is not supported.")
        local = self.library.body(body.function)
        if len(arguments) != len(local.arguments):
            raise PoseidonError(f"Function '{body.function}' takes {len(local.arguments)} arguments, but "
                                f"is called by '{body.call}' with {len(arguments)}.")
        for (name, dtype), tensor in zip(local.arguments, arguments):
            inputs = [tensor, f"^{entry}"] if entry else [tensor]
            flat = self._add(body.prefix + name, "Identity", inputs, body, T=dtype)
            self.places[flat] = body, name, None
        for name in _needed(local, roots):
            self._expand_node(body, local, local.nodes[name], entry)

    def _expand_node(self, body, local, node, entry):
        inputs = [self._flat(body, local, tensor) for tensor in node.input]
        data = [tensor for tensor in inputs if not graph_lib.is_control(tensor)]
        controls = [tensor for tensor in inputs if graph_lib.is_control(tensor)]
        if not inputs and entry:
            controls = [f"^{entry}"]
        op_def = self.library.op_def(node)
        name = body.prefix + node.name
        if node.op in _CALLS or node.op in self.library.functions:
            function = (functions_lib.attribute(node, op_def, "f").func.name if node.op in _CALLS
                        else node.op)
            self._call(body, node, name, function, data, controls)
        elif node.op in _CONDITIONS:
            self._condition(body, node, name, op_def, data, controls)
        elif node.op in _LOOPS:
            self._loop(body, node, name, op_def, data, controls)
        else:
            copy = node_def_pb2.NodeDef()
            copy.CopyFrom(node)
            copy.name = name
            copy.input[:] = data + controls
            copy.attr.pop("_output_shapes", None)
            for attr in op_def.attr:  # files leave defaults out, passes want them
                if attr.name not in copy.attr and attr.HasField("default_value"):
                    copy.attr[attr.name].CopyFrom(attr.default_value)
            if node.op == "Placeholder" and self._rows:
                dims = copy.attr["shape"].shape.dim
                if dims and dims[0].size == -1:
                    dims[0].size = self._rows
            self._keep(copy, body, node.name)

    def _call(self, body, node, name, function, data, controls):
        is_compiled = body.is_compiled or any(
            "_XlaMustCompile" in attr and attr["_XlaMustCompile"].b
            for attr in (node.attr, self.library.functions[function].attr)
            ) if function in self.library.functions else False
        inner = Body(f"{name}/", function, body, node.name, is_compiled=is_compiled)
        entry = self._add(f"{name}/-entry", "NoOp", controls, body) if controls else None
        returned, controls = self._body(inner, data, entry)
        self._replace(body, node.name, name, returned, self._types(function), controls)

    def _condition(self, body, node, name, op_def, data, controls):
        """Branches read what goes in through Switch, and what comes out goes through Merge."""
        read = functions_lib.attribute(node, op_def, "Tin").list.type
        if len(data) != 1 + len(read):
            raise PoseidonError(f"Node '{name}', a {node.op}, reads {len(data)} tensors, expected "
                                f"{1 + len(read)}.")
        predicate, *arguments = data
        if functions_lib.attribute(node, op_def, "Tcond").type != types_pb2.DT_BOOL:
            predicate = self._add(f"{name}/-predicate", "Cast", [predicate, *controls], body,
                                  SrcT=node.attr["Tcond"].type, DstT=types_pb2.DT_BOOL)
        switches = [self._add(f"{name}/-switch{i}", "Switch", [tensor, predicate], body, T=dtype)
                    for i, (tensor, dtype) in enumerate(zip(arguments, read))]
        pivot = self._add(f"{name}/-pivot", "Switch", [predicate, predicate, *controls], body,
                          T=types_pb2.DT_BOOL)
        returned, done = [], []
        for index, branch in enumerate(("else", "then")):
            function = functions_lib.attribute(node, op_def, f"{branch}_branch").func.name
            inner = Body(f"{name}/-{branch}/", function, body, node.name, predicate, body.is_compiled)
            entry = self._add(f"{name}/-{branch}/-entry", "Identity", [f"{pivot}:{index}"], body,
                              T=types_pb2.DT_BOOL)
            tensors, controls = self._body(inner, [f"{s}:{index}" for s in switches], entry)
            returned.append(tensors)
            done += controls
        merged, types = [], self._types(function)
        if len(returned[0]) != len(returned[1]):
            raise PoseidonError(f"The branches of node '{name}' return different numbers of tensors.")
        for i, (pair, dtype) in enumerate(zip(zip(*returned), types)):
            merged.append(self._add(f"{name}/-merge{i}", "Merge", pair, body, T=dtype, N=2))
        self._replace(body, node.name, name, merged, types, done)

    def _loop(self, body, node, name, op_def, data, controls):
        """Variables of a loop go round through Merge, Switch and NextIteration."""
        types = functions_lib.attribute(node, op_def, "T").list.type
        if len(types) != len(data):
            raise PoseidonError(f"Node '{name}' has {len(data)} inputs, but types of {len(types)}.")
        entered = [self._add(f"{name}/-enter{i}", "Enter", [tensor, *controls], body, T=dtype,
                             frame_name=name, is_constant=False, parallel_iterations=10)
                   for i, (tensor, dtype) in enumerate(zip(data, types))]
        merged = [self._add(f"{name}/-merge{i}", "Merge", [tensor, f"{name}/-next{i}"], body, T=dtype,
                            N=2) for i, (tensor, dtype) in enumerate(zip(entered, types))]
        if not merged:
            raise PoseidonError(f"Node '{name}' is a loop without variables.")
        entry = self._add(f"{name}/-condition/-entry", "NoOp", [f"^{merged[0]}"], body)
        decides = f"{name}/-decides"
        inner = Body(f"{name}/-condition/",
                     functions_lib.attribute(node, op_def, "cond").func.name, body, node.name, decides,
                     body.is_compiled)
        answer, _ = self._body(inner, merged, entry)
        if len(answer) != 1:
            raise PoseidonError(f"The condition of node '{name}' returns {len(answer)} tensors.")
        self._add(decides, "LoopCond", answer, body)
        switches = [self._add(f"{name}/-switch{i}", "Switch", [tensor, decides], body, T=dtype)
                    for i, (tensor, dtype) in enumerate(zip(merged, types))]
        entry = self._add(f"{name}/-body/-entry", "Identity", [f"{switches[0]}:1"], body, T=types[0])
        inner = Body(f"{name}/-body/", functions_lib.attribute(node, op_def, "body").func.name, body,
                     node.name, decides, body.is_compiled)
        returned, done = self._body(inner, [f"{switch}:1" for switch in switches], entry)
        if len(returned) != len(types):
            raise PoseidonError(f"The body of node '{name}' returns {len(returned)} tensors, but takes "
                                f"{len(types)}.")
        for i, (tensor, dtype) in enumerate(zip(returned, types)):
            self._add(f"{name}/-next{i}", "NextIteration", [tensor], body, T=dtype)
        exits = [self._add(f"{name}/-exit{i}", "Exit", [switch], body, T=dtype)
                 for i, (switch, dtype) in enumerate(zip(switches, types))]
        self._replace(body, node.name, name, exits, types, done)

    def _body(self, inner, arguments, entry):
        """Adds a function's nodes, and returns the flat tensors that it returns and its control edges."""
        if not inner.function:  # which would be the main graph
            raise PoseidonError(f"Node '{inner.prefix[:-1]}' calls a function without a name.")
        local = self.library.body(inner.function)
        roots = [local.parse(tensor)[0] for _, tensor, _ in local.returns] + local.control_returns
        self._expand(inner, roots, arguments, entry)
        return ([self._flat(inner, local, tensor) for _, tensor, _ in local.returns],
                [f"^{inner.prefix}{name}" for name in local.control_returns])

    def _types(self, function):
        return [dtype for _, _, dtype in self.library.body(function).returns]

    def _replace(self, body, local_name, name, tensors, types, controls):
        """Lets a call's readers read these tensors, each by a node that stands for the output."""
        for i, (tensor, dtype) in enumerate(zip(tensors, types)):
            stand_in = self._add(f"{name}/-out{i}", "Identity", [tensor], body, T=dtype)
            self.places[stand_in] = body, local_name, i
            self._replaced[f"{name}:{i}" if i else name] = stand_in
        done = self._add(f"{name}/-done", "NoOp",
                         [*(f"^{name}/-out{i}" for i in range(len(tensors))), *controls], body)
        self._replaced[f"^{name}"] = f"^{done}"

    def _flat(self, body, local, tensor):
        """Returns the flat name of what a node of a body reads."""
        name, output = local.parse(tensor)
        if graph_lib.is_control(tensor):
            return f"^{body.prefix}{name}"
        return f"{body.prefix}{name}:{output}" if output else body.prefix + name

    def _add(self, name, op, inputs, body, **attributes):
        node = node_def_pb2.NodeDef(name=name, op=op, input=inputs)
        for key, value in attributes.items():
            graph_lib.set_attribute(node.attr[key], key, value)
        self._keep(node, body, None)
        return name

    def _keep(self, node, body, local_name):
        if node.name in self._nodes:
            raise PoseidonError(f"Two nodes would be named '{node.name}' once functions are called.")
        if len(self._nodes) >= _MAX_NODES:
            raise PoseidonError(f"The graph has more than {_MAX_NODES:,} nodes once functions are called.")
        self._nodes[node.name] = node
        self.places[node.name] = body, local_name, 0


def _needed(local, roots):
    """Returns the names of the nodes that some nodes need, in the order of the body."""
    seen, queue = set(), [root for root in roots if root in local.nodes]
    while queue:
        name = queue.pop()
        if name not in seen:
            seen.add(name)
            queue += [source for source, _ in map(local.parse, local.nodes[name].input)
                      if source in local.nodes]
    return [name for name in local.nodes if name in seen]
